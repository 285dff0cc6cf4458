"""How each strategy divides weights, gradients and states among GPUs, and the bytes that a GPU sends in a step.

The shards of FSDP and ZeroRedundancyOptimizer have exactly the sizes of torch 2.13. FSDP2 splits the first dimension of
each parameter and pads the weights and gradients of short shards, but not the states
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _fsdp_collectives.py). FSDP1 pads the flat parameter of each unit
(fsdp/_flat_param.py). ZeroRedundancyOptimizer assigns whole parameters, the largest first, each to the rank with the
fewest elements so far (distributed/optim). ``zero1`` to ``zero3`` follow the paper (Rajbhandari et al., ZeRO: memory
optimizations toward training trillion parameter models, 2020, §5) and DeepSpeed: one flat buffer, or each parameter in
stage 3, is divided into equal parts, rounded up. The bytes sent are those of ring algorithms, which are optimal.

Needs no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from halfstep.numerics.messages import divides
from halfstep.numerics.planning.layouts import Layout
from halfstep.numerics.planning.models import Transformer, Unit, parameters_of, tensors_of

# Elements of the smallest parameter whose moments integrations/optim keeps in 8 bits.
LEAST_CODED = 4096

# How strategies divide that leave rows whole, or do not divide.
WHOLE_ROWS = ("nothing", "parameters", "rows")

# Local tensors: the number of elements of a tensor, and the number of such tensors.
Locals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Strategy:
    """How data parallelism divides its memory.

    Args:
        name: its name on the command line.
        weights, gradients, states: whether they are divided.
        by: what is divided: ``"nothing"``, ``"flat"`` (one flat buffer), ``"parameters"`` (each rank gets whole
            parameters), ``"rows"`` (of each parameter), ``"units"`` (one flat parameter per unit) or ``"elements"``
            (each parameter, flattened).
        buckets: whether DDP's buckets are allocated in addition to the gradients.
        gathers: whether weights are gathered unit by unit for forward and backward.
        offloads: what ``offload`` moves to the host: ``""``, ``"states"`` or ``"all"``.
        text: a description in one line.
    """

    name: str
    weights: bool = False
    gradients: bool = False
    states: bool = False
    by: str = "nothing"
    buckets: bool = False
    gathers: bool = False
    offloads: str = ""
    text: str = ""


def _everything(name: str, by: str, text: str) -> Strategy:
    return Strategy(name, True, True, True, by, gathers=True, offloads="all", text=text)


MIRRORED = ("single", "ddp")  # the strategies whose offloaded weights also stay on the GPU
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", offloads="states", text="one GPU"),
        Strategy("ddp", buckets=True, offloads="states", text="DistributedDataParallel: nothing divided"),
        Strategy("zero1", states=True, by="flat", offloads="states", text="ZeRO-1: states divided"),
        Strategy(
            "zero1-torch", states=True, by="parameters", buckets=True, text="ZeroRedundancyOptimizer: whole parameters"
        ),
        Strategy("zero2", gradients=True, states=True, by="flat", offloads="states", text="ZeRO-2: gradients too"),
        _everything("zero3", "elements", "ZeRO-3: everything, each parameter flat"),
        _everything("fsdp", "rows", "FSDP2: everything, by rows of each parameter"),
        _everything("fsdp1", "units", "FSDP1: everything, one flat tensor per unit"),
        _everything("hsdp", "rows", "FSDP2 inside groups, replicas across them"),
    )
}


@dataclass(frozen=True)
class Shards:
    """The local tensors of one rank.

    Attributes:
        weights, gradients, states: their sizes.
        rows: for each of `states`, the elements in a row of the parameter: an index of dimension 0. It is 0 for vectors
            and for parameters of less than `LEAST_CODED` elements. Empty if shards are not whole rows.
    """

    weights: Locals
    gradients: Locals
    states: Locals
    rows: tuple[int, ...] = ()

    @property
    def states_with_rows(self) -> Iterator[tuple[int, int, int]]:
        """Elements, number and row of each of `states`; without rows, 0."""
        rows = self.rows or (0,) * len(self.states)
        return ((size, count, row) for (size, count), row in zip(self.states, rows, strict=True))


def _row(shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:]) if len(shape) > 1 and math.prod(shape) >= LEAST_CODED else 0


def _rows(shape: tuple[int, ...], ways: int, rank: int | None) -> int:
    """Elements of a rank's chunk of the first dimension; of the largest, padded chunk if `rank` is None."""
    first = shape[0] if shape else 1
    chunk = -(-first // ways)
    return math.prod(shape[1:]) * (chunk if rank is None else max(0, min(chunk, first - rank * chunk)))


def assigned(sizes: Sequence[int], ways: int) -> list[list[int]]:
    """The indices of the parameters, given by their sizes, that ZeroRedundancyOptimizer assigns to each rank."""
    loads = [(0, rank) for rank in range(ways)]
    given: list[list[int]] = [[] for _ in range(ways)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = heapq.heappop(loads)
        given[rank].append(index)
        heapq.heappush(loads, (load + sizes[index], rank))
    return given


def shard(units: Sequence[Unit], strategy: Strategy, ways: int, rank: int | None = None, shaped: bool = True) -> Shards:
    """The local tensors of one rank of a model that is divided among `ways` GPUs.

    Args:
        units: the model.
        strategy: how it is divided.
        ways: number of GPUs.
        rank: the rank; None for the one that holds most.
        shaped: whether `units` have the shapes of the parameters, and not only their number. Without shapes, whole
            parameters cannot be assigned, and every rank is assumed to hold an equal part.
    """
    whole = tuple((tensor.elements, count) for tensor, count in tensors_of(units))
    # Without shapes, the parameters count as one long row.
    rows = tuple(_row(tensor.shape) if shaped else tensor.elements for tensor, _ in tensors_of(units))
    if ways == 1 or strategy.by == "nothing":
        return Shards(whole, whole, whole, rows)
    if strategy.by == "flat" or (strategy.by == "parameters" and not shaped):
        part = ((-(-parameters_of(units) // ways), 1),)
        return Shards(whole, part if strategy.gradients else whole, part, () if shaped else (part[0][0],))
    if strategy.by == "parameters":
        every = [(size, row) for (size, count), row in zip(whole, rows, strict=True) for _ in range(count)]
        given = assigned([size for size, _ in every], ways)
        loads = [sum(every[index][0] for index in indices) for indices in given]
        mine = given[loads.index(max(loads)) if rank is None else rank]
        return Shards(whole, whole, tuple((every[i][0], 1) for i in mine), tuple(every[i][1] for i in mine))
    if strategy.by == "units":
        flat = tuple((-(-one.elements // ways), one.count) for one in units)
        return Shards(flat, flat, flat)
    if strategy.by == "elements":
        parts = tuple((-(-size // ways), count) for size, count in whole)
        return Shards(parts, parts, parts)
    shapes = [(tensor.shape, count) for tensor, count in tensors_of(units)]
    largest, held = (tuple((_rows(shape, ways, which), count) for shape, count in shapes) for which in (None, rank))
    return Shards(largest, largest, held, rows if shaped else tuple(size for size, _ in held))


def keeps_rows(strategy: Strategy) -> bool:
    """Whether states are divided by whole rows of parameters, or not at all."""
    return strategy.by in WHOLE_ROWS


def elements(held: Iterable[tuple[int, int]]) -> int:
    """The number of elements of all local tensors."""
    return sum(size * count for size, count in held)


def padded(units: Sequence[Unit], strategy: Strategy, ways: int, shaped: bool = True) -> int:
    """The number of elements of gathered weights and unreduced gradients: all parameters, and the padding of shards."""
    if strategy.by == "parameters":
        return parameters_of(units)
    mine = shard(units, strategy, ways, shaped=shaped)
    return ways * elements(mine.states if strategy.by == "flat" else mine.gradients)


def groups(strategy: Strategy, ranks: int, shard_size: int | None) -> tuple[int, int]:
    """The number of GPUs among which the model is divided, and the number of replicas of the model.

    Raises:
        ValueError: `shard_size` is given for a strategy without groups, is missing for ``hsdp``, or does not divide
            `ranks`.
    """
    if strategy.name != "hsdp":
        if shard_size is not None:
            raise ValueError(
                f"shard is {shard_size}, but strategy {strategy.name!r} has no groups; leave it out, or choose 'hsdp'"
            )
        return (ranks, 1) if strategy.states else (1, ranks)
    if shard_size is None:
        raise ValueError("strategy is 'hsdp', but shard is not given; give the GPUs of one group, as --shard 8")
    divides("shard", shard_size, "the number of data-parallel GPUs", ranks, "every group needs as many GPUs")
    return shard_size, ranks // shard_size


# --------------------------------------------------------------------------------------------------- communication


@dataclass(frozen=True)
class Collective:
    """One kind of message in a step.

    Args:
        name: the operation.
        what: the data that is sent.
        bytes: bytes that one GPU sends in a step.
        per_parameter: these bytes per parameter of the model; None if they do not depend on parameters.
        ranks: number of ranks that take part.
        times: number of messages in a step.
        note: a remark on unexpected behavior.
    """

    name: str
    what: str
    bytes: int
    per_parameter: Fraction | None
    ranks: int
    times: int
    note: str = ""


def ring(ranks: int) -> Fraction:
    """The share of a buffer that each rank sends to all-gather or reduce-scatter it: (N − 1)/N. An all-reduce is both.

    No algorithm sends less: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations
    (2009).
    """
    return Fraction(ranks - 1, ranks)


def communication(
    strategy: Strategy,
    ranks: int,
    ways: int,
    *,
    parameters: int,
    gradient_width: Fraction,
    weight_width: Fraction,
    accumulate: int = 1,
    kept: int = 0,
    gathered: int | None = None,
) -> tuple[Collective, ...]:
    """The messages that one GPU sends in a step for data parallelism.

    DDP all-reduces gradients: 2·(N − 1)/N × their bytes. ZeRO-1 and 2 reduce-scatter gradients and gather weights,
    which is as much if both have the same width. ZeRO-3 and FSDP gather weights twice, 1.5 times as much (Rajbhandari
    et al., §7).

    Args:
        strategy: the strategy.
        ranks: number of data-parallel GPUs.
        ways: number of GPUs among which the model is divided; see `groups`.
        parameters: parameters of the model, or of its part on one tensor-parallel GPU, including the padding of shards.
        gradient_width: bytes per gradient in a message, after compression by a hook.
        weight_width: bytes per weight in a message.
        accumulate: micro-batches in a step. DDP, ZeRO-1 and ZeroRedundancyOptimizer send gradients once per step
            (``no_sync``); strategies that divide gradients send them once per micro-batch.
        kept: parameters gathered once per micro-batch instead of twice: the root unit of FSDP1 and FSDP2.
        gathered: parameters whose weights are sent, if some are frozen. Default: `parameters`.
    """
    if ranks == 1:
        return ()
    times, once = accumulate if strategy.gradients else 1, ring(ways)
    weights = parameters if gathered is None else gathered

    def sent(name: str, what: str, share: Fraction, to: int = ways, count: int = times, note: str = "") -> Collective:
        width, number = (gradient_width, parameters) if "gradients" in what else (weight_width, weights)
        each = share * width * count
        return Collective(name, what, math.ceil(each * number), each, to, count, note)

    summed = sent("all-reduce", "gradients", 2 * ring(ranks), ranks, 1)
    if strategy.by == "nothing":
        return (summed,)
    if strategy.by == "parameters":
        return summed, sent("broadcast", "weights", once, ranks, 1, "from each weight's owner")
    scattered = sent("reduce-scatter", "gradients", once)
    if not strategy.gathers:
        return scattered, sent("all-gather", "weights", once, ways, 1)
    again, note = once * Fraction(weights - kept, weights), "the root unit stays gathered" if kept else ""
    forward, backward = (
        sent("all-gather", "weights, forward", once),
        sent("all-gather", "weights, backward", again, note=note),
    )
    divided = (forward, backward, scattered) if ways > 1 else ()
    replicas = ranks // ways
    if replicas == 1:
        return divided
    return (*divided, sent("all-reduce", "shards of gradients", 2 * ring(replicas) / ways, replicas))


def over_the_bus(row: Layout, how: Strategy, mine: Shards, accumulate: int) -> tuple[Collective, ...]:
    """The copies between a GPU and its host if states, or everything, are offloaded."""
    # One GPU copies the gradients of each backward to the host, which adds them.
    gradients, down = (mine.gradients, accumulate) if how.gradients or how.name == "single" else (mine.states, 1)
    weights, up = (mine.states, 1) if how.offloads == "states" else (mine.weights, 2 * accumulate)
    sizes = elements(gradients) * row.gradients.width * down, elements(weights) * row.weights.width * up
    copies = (
        Collective("copy to the host", "gradients", sizes[0], None, 1, down),
        Collective("copy from the host", "weights", sizes[1], None, 1, up),
    )
    if how.name not in MIRRORED:
        return copies
    # `halfstep.integrations.offload` steps from the weights on the device, which others may have written.
    return copies[0], replace(copies[1], name="copy to the host"), copies[1]


def between_layers(
    row: Layout, model: Transformer, batch: int, seq: int, t: int, accumulate: int
) -> tuple[Collective, ...]:
    """The messages of tensor parallelism (Shoeybi et al., 2019, §3).

    Each block all-reduces s·b·h activations twice in the forward and twice in the backward. With sequence parallelism,
    a reduce-scatter and an all-gather with the same number of bytes replace each all-reduce. Embedding and head are
    sharded by the vocabulary and need one more each: of the embeddings in the forward and of the gradient of the head's
    input in the backward. The loss reduces three fp32 numbers per token: the maximum of the logits, the sum of their
    exponentials, and the logit of the target.
    """
    tokens = batch * seq
    activation = tokens * model.hidden * row.compute.width
    listed = (
        ("activations", activation, 4 * model.layers * accumulate),
        ("activations at embedding and head", activation, 2 * accumulate),
        ("loss", 4 * tokens, 3 * accumulate),
    )
    return tuple(
        Collective("all-reduce", what, -(-(2 * (t - 1) * size * times) // t), None, t, times)
        for what, size, times in listed
    )
