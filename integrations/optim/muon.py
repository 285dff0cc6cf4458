"""Muon, a drop-in for torch's that also steps parameters that are not matrices, by AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from halfstep.integrations.optim.adam import AdamW
from halfstep.integrations.optim.classes import Grads, LayoutOptimizer, Rule
from halfstep.integrations.optim.options import Group, check_number, check_options
from halfstep.integrations.optim.sgd import translated
from halfstep.integrations.optim.step_plan import LaunchGroup
from halfstep.kernels import muon
from halfstep.kernels.multi_tensor import TensorTable, checked_addresses
from halfstep.kernels.muon import rule
from halfstep.kernels.streams import current_stream, on_device
from halfstep.numerics.owners import FOR_ADAMW, MOST, Ownership, Round, cuts_matrices, is_matrix, padded
from halfstep.numerics.scaling.decision import parameters_of
from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local

_FOR_ADAMW = torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.Conv1d, torch.nn.ConvTranspose1d


class Exchange(Ownership):
    """Sharded matrices, and their owners, which orthogonalize them.

    Each rank sends its parts to the owners and receives the results. N ranks together send 4 (N - 1) / N bytes per
    element, in two collectives per round, which run while the owners orthogonalize the matrices of other rounds.
    """

    def __init__(self, targets: list[torch.Tensor]) -> None:
        cuts = [cut for cut in (Sharding(target).cut() for target in targets) if cut is not None]
        self.group = cuts[0][0]
        super().__init__([target.shape for target in targets], [cut[1:] for cut in cuts], self.group.rank())

    def run(self, parts: torch.Tensor, received: torch.Tensor, products: rule.Products) -> None:
        """Replace this rank's parts, in `order`, by those of the orthogonalized matrices."""
        parts_of = parts.split([sum(each.sent) for each in self.rounds])
        received_of = received.split([sum(each.received) for each in self.rounds])
        buffers = list(zip(self.rounds, parts_of, received_of, strict=True))
        # `wait` blocks the host on a CPU only. All ranks begin collectives in the same order.
        arriving, returning = [self._begin(*buffers[0], back=False)], []
        for number, (each, sent, matrices) in enumerate(buffers):
            if number + 1 < len(buffers):
                arriving.append(self._begin(*buffers[number + 1], back=False))
            arriving[number].wait()
            self._orthogonalize(each, matrices, products)
            returning.append(self._begin(each, sent, matrices, back=True))
        for work in returning:
            work.wait()

    def _begin(self, each: Round, parts: torch.Tensor, received: torch.Tensor, back: bool) -> dist.Work:
        tensors = parts.view(torch.uint8), received.view(torch.uint8)  # some backends lack bf16
        counts = [2 * size for size in each.sent], [2 * size for size in each.received]
        (source, into), (sizes, into_sizes) = (tensors, counts) if not back else (tensors[::-1], counts[::-1])
        return dist.all_to_all_single(into, source, into_sizes, sizes, group=self.group, async_op=True)

    def _orthogonalize(self, each: Round, received: torch.Tensor, products: rule.Products) -> None:
        starts = list(accumulate(each.received[:-1], initial=0))
        for index in each.owned:
            shape, (dim, ranges) = self.shapes[index], self.cuts[index]
            whole = received.new_empty(shape)
            of_ranks = []
            for rank, (begin, end) in enumerate(ranges):
                piece = whole.narrow(dim, begin, end - begin)
                of_ranks.append((received[starts[rank] : starts[rank] + piece.numel()].view(piece.shape), piece))
                starts[rank] += self.elements(index, rank)
            for part, piece in of_ranks:
                piece.copy_(part)
            muon.orthogonalize([whole.view(rule.matrices(shape, products.blocks))], products)
            for part, piece in of_ranks:
                part.copy_(piece)


def _exchanging(parameter: torch.Tensor, group: Group) -> Any:
    """The ranks over which the matrices of a parameter are sharded; None if each matrix is entirely on one rank."""
    cut = Sharding(parameter).cut()
    if cut is None:
        return None
    ranks, dim, ranges = cut
    return ranks if cuts_matrices(parameter.shape, dim, ranges, group["blocks"]) else None


class Exchanged:
    """The parameters whose matrices ranks exchange, so that each of these needs a gradient where any has one.

    Attributes:
        parameters, blocks: all parameters of the optimizer and the blocks of its groups, by which it is still valid.
        indices: the parameters exchanged, by a process group for tensors on the host.
    """

    def __init__(self, optimizer: LayoutOptimizer, parameters: list[torch.Tensor]) -> None:
        self.parameters, self.blocks = parameters, _blocks(optimizer)
        of_ranks: dict[Any, list[int]] = {}
        groups = [group for group in optimizer.param_groups for _ in group["params"]]
        for index, (parameter, group) in enumerate(zip(parameters, groups, strict=True)):
            ranks = None
            if is_sharded(parameter):
                with suppress(ValueError):  # the step raises it if there is a gradient
                    ranks = optimizer._rule_of(group).exchanging(parameter, group)
            if ranks is not None:
                of_ranks.setdefault(ranks, []).append(index)
        self.indices = {_host_group(ranks): indices for ranks, indices in of_ranks.items()}

    def complete(self, grads: Grads) -> None:
        """Set gradients to zeros that are None here but not on another rank. The host waits for the other hosts."""
        for group, indices in self.indices.items():
            present = torch.tensor([grads[index] is not None for index in indices], dtype=torch.uint8, device="cpu")
            dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
            for index, anywhere in zip(indices, present.tolist(), strict=True):
                if anywhere and grads[index] is None:
                    grads[index] = torch.zeros_like(self.parameters[index].detach())


def _blocks(optimizer: LayoutOptimizer) -> list[int]:
    return [group["blocks"] for group in optimizer.param_groups]


def _host_group(ranks: Any) -> Any:
    """A process group of the same ranks that reduces tensors on the host, without waiting for a GPU."""
    if "cpu:" in dist.get_backend_config(ranks):
        return ranks
    return dist.new_group(dist.get_process_group_ranks(ranks), backend="gloo", use_local_synchronization=True)


def _complete(optimizer: LayoutOptimizer, parameters: list[torch.Tensor], grads: Grads) -> None:
    """Set gradients to zeros that only other ranks have, of parameters whose matrices they exchange with this one."""
    last: Exchanged | None = optimizer._plans.exchanged
    same = last is not None and len(last.parameters) == len(parameters) and last.blocks == _blocks(optimizer)
    if last is None or not same or not all(map(is_, last.parameters, parameters)):
        last = optimizer._plans.exchanged = Exchanged(optimizer, parameters)
    last.complete(grads)


class MatrixGroup(LaunchGroup):
    """Matrices stepped by two launches. In between, they are in bf16 scratch memory and orthogonalized one by one.

    If the launches are on the host and the parameters on a device, the matrices are orthogonalized in a copy there.
    """

    _batches: tuple[muon.Batch, muon.Batch] | None = None

    def _launches(self, grads: list[torch.Tensor], groups: torch.Tensor, control: muon.Control) -> list[partial[Any]]:
        if self._batches is None:
            self._batches = self._with_tables(grads)
        else:
            self._batches[0].table.point(muon.GRAD, grads)  # type: ignore[union-attr]
        momentum, weight = self._batches
        momentum.lists[muon.GRAD] = grads
        return [
            muon.MOMENTUM.launch(momentum, groups, control),
            *self._products,
            muon.WEIGHT.launch(weight, groups, control),
        ]

    def _with_tables(self, grads: list[torch.Tensor]) -> tuple[muon.Batch, muon.Batch]:
        """The batches of both launches. What the first writes as parameters, the second reads as gradients."""
        scratch, lists = self._scratch(), self.batch.lists
        to_scratch = checked_addresses(scratch)
        batches = []
        for layout, operands in (
            (self.batch.layout.momentum, {muon.GRAD: grads, muon.PARAM: scratch, muon.EXTRA: []}),
            (self.batch.layout.weight, {muon.GRAD: scratch, muon.M: []}),
        ):
            of_layout = [operands.get(operand, tensors) for operand, tensors in enumerate(lists)]
            contents = [None if operands.get(row) == [] else self._contents[row] for row in range(layout.operands)]
            for operand, tensors in operands.items():
                if tensors:
                    contents[operand] = to_scratch if tensors is scratch else checked_addresses(tensors)
            sizes = layout.sizes([weight.shape for weight in self.weights])
            table = TensorTable(sizes, layout.operands, layout.chunk, self.device, contents)
            batches.append(replace(self.batch, layout=layout, table=table, lists=of_layout))
        return batches[0], batches[1]

    def _scratch(self) -> list[torch.Tensor]:
        """bf16 scratch memory shaped like the weights. Also sets `_products`, which orthogonalize its matrices."""
        products, shapes = self.batch.layout.products, [target.shape for target in self.targets]
        exchange, device = None if self.ranks is None else Exchange(self.targets), local(self.parameters[0]).device
        order = range(len(shapes)) if exchange is None else exchange.order
        sizes = [padded(self.weights[index].numel()) for index in order]
        starts = dict(zip(order, accumulate(sizes, initial=0), strict=False))

        def views(memory: torch.Tensor) -> list[torch.Tensor]:
            numbered = enumerate(self.weights)
            return [memory[starts[index] :][: weight.numel()].view(weight.shape) for index, weight in numbered]

        memory = self._memory("parts", sum(sizes), device)
        if exchange is None:
            sides = (rule.matrices(shape, products.blocks)[1:] for shape in shapes)
            pairs = zip(views(memory), sides, strict=True)
            matrices = [view.view(-1, *side) if view.numel() else view for view, side in pairs]
            orthogonalize = partial(muon.orthogonalize, matrices, products)
        else:
            received = self._memory("received", exchange.received, device)
            orthogonalize = partial(exchange.run, memory, received, products)
        if device == self.device:
            self._products: Sequence[partial[Any]] = [orthogonalize]
            return views(memory)
        # The launch before the next products writes the other one of two while these are copied back.
        host = self._memory(f"pinned, {next(self.plans.turns) % 2}", sum(sizes), self.device, pinned=True)
        self._products = on_device(orthogonalize, host, memory)
        return views(host)

    def _memory(self, use: str, elements: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
        """bf16 scratch memory that all launches of an optimizer on the same stream share."""
        stream = current_stream(device)
        key = device, stream, use
        memory = self.plans.scratch.get(key)
        if memory is None or memory.numel() < elements:
            memory = torch.empty(elements, dtype=torch.bfloat16, device=device, pin_memory=pinned)
            if stream is not None:  # while capturing, the memory belongs to the graph
                self.plans.scratch[key] = memory
        return memory[:elements]

    def finish(self) -> None:
        super().finish()
        assert self._batches is not None
        self._batches[0].lists[muon.GRAD] = []


def _coefficients(group: Group) -> tuple[rule.Triple, ...]:
    coefficients = group["ns_coefficients"]
    triples = coefficients if isinstance(coefficients[0], Sequence) else [coefficients]
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def _check(group: Group) -> None:
    check_number(group["momentum"], "Invalid momentum value", "a number from 0 to below 1", lambda x: 0 <= x < 1)
    check_number(group["eps"], "Invalid epsilon value", "a finite number above 0", lambda x: x > 0)
    for name, least in (("ns_steps", 0), ("blocks", 1)):
        if type(group[name]) is not int or group[name] < least:
            raise ValueError(f"Expected {name} to be an integer of at least {least}, but got {group[name]!r}")
    if group["adjust_lr_fn"] not in (*rule.ADJUSTMENTS, None):
        raise ValueError(
            f"Expected adjust_lr_fn to be one of {', '.join(map(repr, rule.ADJUSTMENTS))} or None, but got "
            f"{group['adjust_lr_fn']!r}"
        )
    try:
        _coefficients(group)
    except (TypeError, ValueError, LookupError):
        raise ValueError(
            "Expected ns_coefficients to be three numbers, or a list with three for each step, but got "
            f"{group['ns_coefficients']!r}"
        ) from None
    check_options(group)


def _variant(group: Group) -> dict[str, Any]:
    products = rule.Products(_coefficients(group), group["ns_steps"], group["eps"], group["blocks"])
    return {"nesterov": bool(group["nesterov"]), "products": products}


def _numbers(group: Group, shape: torch.Size | None) -> dict[str, Any]:
    assert shape is not None
    _, rows, columns = rule.matrices(shape, group["blocks"])
    return {**group, "ratio": rule.ratio(group["adjust_lr_fn"] or "original", rows, columns)}


_ADAMW: Rule = AdamW._rule._replace(
    variant=lambda group: {"amsgrad": False, "l2": False},
    numbers=lambda group, shape: AdamW._rule.numbers({**group, "decoupled_weight_decay": True}, shape),
    check=lambda group: AdamW._rule.check({**group, "amsgrad": False}),
)


class Muon(LayoutOptimizer, torch.optim.Muon):
    """Muon (Jordan et al., 2024) with exact fp32 master weights, a drop-in for `torch.optim.Muon`.

    Each update is a matrix whose singular values are near 1, computed from the momentum by a Newton-Schulz iteration in
    bf16. Groups with ``algorithm="adamw"`` are stepped as by `halfstep.AdamW`; `muon_groups` splits a model into both.

    Bytes per bf16 parameter with its gradient: 7.03 with ``state_dtype="8bit"``, 8 with bf16, 10 with fp32 momentum;
    one less with ``master_weights="split24"``. Scratch memory takes 2 bytes per element of the matrices orthogonalized
    together, up to 2^25 elements or the largest matrix, and up to 8 (10 under FSDP2) for copies of the largest matrix.

    Args:
        params: matrices. Three dimensions are a batch of matrices; with more, the first dimension is that of the rows.
            One mesh dimension may shard rows or columns of DTensors (FSDP2, HSDP, tensor parallelism): ranks then send
            parts of matrices to their owners and receive the results. Where only some of them have a gradient, it is 0
            on the others.
        lr: learning rate, which `adjust_lr_fn` adjusts to the shape of a matrix.
        weight_decay: decoupled decay: the weight shrinks by ``lr * weight_decay`` of itself per step.
        momentum: decay of the momentum buffer, from 0 to below 1.
        nesterov: step along the average of gradient and buffer.
        ns_coefficients: three coefficients of the iteration, or a list of three per step (Polar Express).
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: number of steps of the iteration.
        adjust_lr_fn: ``"original"``: ``lr * sqrt(max(1, rows / columns))``; ``"match_rms_adamw"``:
            ``lr * 0.2 * sqrt(max(rows, columns))``, which lets AdamW and Muon share one learning rate (Liu et al.,
            2025). None: the latter if there are AdamW groups, otherwise the former, which is torch's.
        algorithm: ``"muon"``, or ``"adamw"`` for embeddings, heads, norms and biases; set it per group.
        betas: those of AdamW. The default `eps` of AdamW groups is 1e-8.
        blocks: number of matrices with equally many rows that each parameter consists of: fused projections, or heads.
        state_dtype: dtype of the momentum; ``"8bit"`` uses linear codes, rounded stochastically. The other arguments
            and the errors are those of `halfstep.AdamW`.

    Raises:
        ValueError: an option is out of range, or a parameter for Muon has fewer than two dimensions.

    The bits of a step do not depend on the number of threads, nor on the layout of other parameters, but those of the
    matrix products differ between types of devices.

    Examples:
        >>> weight = torch.nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
        >>> optimizer = halfstep.Muon([weight], lr=0.02)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> optimizer.masters()[weight].dtype
        torch.float32
    """

    _rule = Rule(
        muon,
        ("momentum_buffer",),
        _check,
        _variant,
        _numbers,
        translated,
        fixed_options=("algorithm", "blocks"),
        by_shape=True,
        linear=True,
        launch_group=MatrixGroup,
        most=MOST,
        exchanging=_exchanging,
        complete=_complete,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] | Sequence[Sequence[float]] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        betas: tuple[float, float] = (0.9, 0.999),
        blocks: int = 1,
        maximize: bool = False,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        LayoutOptimizer.__init__(self, {**locals(), "foreach": None, "fused": None, "differentiable": False})

    def _rule_of(self, group: Group) -> Rule:
        if group["algorithm"] not in ("muon", "adamw"):
            raise ValueError(f"Expected algorithm to be 'muon' or 'adamw', but got {group['algorithm']!r}")
        return _ADAMW if group["algorithm"] == "adamw" else self._rule

    def step_parts_by(self, handle: Any) -> None:
        if handle is not None and any(map(is_sharded, parameters_of(self))):
            raise ValueError(
                "Expected unsharded parameters for steps in the backward, since ranks must exchange parts of Muon's "
                "matrices in the same order, but got DTensors: call optimizer.step() after the backward"
            )
        super().step_parts_by(handle)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        is_adamw = {**self.defaults, **param_group}["algorithm"] == "adamw" if isinstance(param_group, dict) else False
        if is_adamw:
            param_group = {"eps": 1e-8, **param_group}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, parameter in enumerate(() if is_adamw else group["params"]):
            if is_lazy(parameter):
                continue
            try:
                rule.matrices(parameter.shape, group["blocks"])
            except ValueError as error:
                self.param_groups.pop()
                raise ValueError(
                    f"{error} for parameter {index} of group {len(self.param_groups)}: put vectors into a group with "
                    "algorithm='adamw', as halfstep.muon_groups does"
                ) from None
        if any(group["algorithm"] == "adamw" for group in self.param_groups):
            for group in self.param_groups:
                group["adjust_lr_fn"] = group["adjust_lr_fn"] or "match_rms_adamw"


def muon_groups(model: torch.nn.Module, *, adamw: Sequence[str] = FOR_ADAMW, **options: Any) -> list[dict[str, Any]]:
    """Split the parameters of a model into two groups: matrices for Muon; vectors, embeddings, the head and 1-D
    convolutions, whose three dimensions are not a batch of matrices, for AdamW.

    Args:
        model: the model. A weight tied to an embedding counts as an embedding.
        adamw: parameters with one of these words in their name, delimited by dots or underscores, are for AdamW. So are
            always the weights of `torch.nn.Embedding`, and that of the last `torch.nn.Linear` if it has as many outputs
            as the largest embedding has rows (a head of any name, such as ``output``).
        options: options of the AdamW group, such as ``lr``, ``betas`` and ``weight_decay``.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
        >>> optimizer = halfstep.Muon(halfstep.muon_groups(model, weight_decay=0.0), lr=1e-3)
        >>> [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adamw', 2)]
    """
    for_adamw = {id(module.weight) for module in model.modules() if isinstance(module, _FOR_ADAMW)}
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    last = next((module for module in reversed([*model.modules()]) if isinstance(module, torch.nn.Linear)), None)
    if last is not None and last.out_features == max(vocabularies, default=0):
        for_adamw.add(id(last.weight))
    matrices: list[tuple[str, torch.Tensor]] = []
    others: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        for_muon = id(parameter) not in for_adamw and is_matrix(name, parameter.shape, adamw)
        (matrices if for_muon else others).append((name, parameter))
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw", **options}]
    return [group for group in groups if group["params"]]
