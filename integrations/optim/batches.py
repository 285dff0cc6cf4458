"""Batches for one launch of the Adam kernel: parameters of one device and layout, their state and their table."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from halfstep.integrations.optim.state import Agreed, as_written, state_keys, version_of
from halfstep.kernels import adam
from halfstep.kernels.block_codes import SPAN
from halfstep.kernels.multi_tensor import TensorTable, checked_addresses, is_flat
from halfstep.kernels.streams import upload
from halfstep.numerics.scaling.topology import cuts, is_sharded, local

_address = torch.Tensor.data_ptr


def all_contiguous(tensors: list[torch.Tensor]) -> bool:
    try:
        return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))
    except RuntimeError:  # raised by some sparse layouts
        return False


def dense(values: torch.Tensor, layout: adam.Layout) -> torch.Tensor:
    """A parameter's local values in an order that kernels can process, or a copy in that order.

    A copy is needed for tensors with gaps, for lazy negations, whose memory holds the negated numbers, and, where
    random bits or blocks depend on the order, for any but the row-major one.
    """
    keep = is_flat(values) and (values.is_contiguous() or not (layout.stochastic or layout.coded))
    return values if keep else values.resolve_neg().contiguous()


def in_same_order(values: torch.Tensor, order: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return values.stride() == order.stride() or (values.is_contiguous() and order.is_contiguous())


def place_of(parameter: torch.Tensor, where: str) -> tuple[int, int, int]:
    """The position of a local part in the whole parameter: `BASE`, `INNER` and `INNER_WHOLE` of the kernels' table."""
    if not is_sharded(parameter):
        return 0, max(parameter.numel(), 1), max(parameter.numel(), 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole, part = tuple(parameter.shape), tuple(local(parameter).shape)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    # If two mesh dimensions shard one dimension in an interleaved order, the parts are ranges only if their sizes are
    # equal.
    interleaved = {getattr(p, "dim", None) for p in placements if type(p).__name__ == "_StridedShard"}
    uneven = any(dim in interleaved and whole[dim] % ways for dim, ways in cuts(parameter).items())
    if tuple(shape) == part and 0 in part:
        return 0, 1, 1
    first = next((dim for dim, size in enumerate(whole) if size != 1), 0)  # the dimension of the rows
    inner = [dim for dim, size in enumerate(whole) if dim != first and part[dim] != size]
    if tuple(shape) != part or uneven or len(inner) > 1 or any(p.is_partial() for p in placements):
        raise ValueError(
            f"Expected {where} to be sharded by a range of rows, of one other dimension, or of both with "
            f"rounding='stochastic', but got placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}: "
            "shard evenly, or use rounding='nearest'"
        )
    base = sum(start * math.prod(whole[dim + 1 :]) for dim, start in enumerate(offset))
    if not inner:
        return base, math.prod(part), math.prod(part)
    return base, math.prod(part[inner[0] :]), math.prod(whole[inner[0] :])


def check_blocks(parameter: torch.Tensor, where: str) -> None:
    """Raise if a shard of a parameter, which messages call `where`, would cut blocks of 8-bit codes."""
    remedy = (
        "use fully_shard, which shards by rows, or state_dtype=torch.bfloat16 or torch.float32 in a parameter group of "
        "its own"
    )
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError(
            f"Expected state_dtype to be torch.float32 or torch.bfloat16 for {where}, which FullyShardedDataParallel "
            f"has flattened, but got '8bit', whose blocks lie within the rows of a matrix: {remedy}"
        )
    ways = cuts(parameter)
    if max(ways, default=0) == 0:
        return
    # All shards but the last have this size, so that all ranks decide alike.
    if max(ways) > 1 or -(-parameter.shape[1] // ways[1]) * math.prod(parameter.shape[2:]) % SPAN:
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        raise ValueError(
            f"Expected {where} to be sharded by rows, or in dimension 1 at multiples of {SPAN} elements of a row, with "
            f"state_dtype='8bit', but got shape {tuple(parameter.shape)} and placements {tuple(placements)} on a mesh "
            f"of shape {tuple(mesh.shape)}: {remedy}"
        )


class LaunchGroup:
    """The parameters of one launch, their state, and the table of their addresses. Full masters must round to them.

    `rows` are the parameters' groups and `names` more rows of the table, by their number in the kernel.
    """

    def __init__(
        self,
        layout: adam.Layout,
        parameters: list[torch.Tensor],
        states: list[dict[str, Any]],
        rows: list[int],
        names: dict[int, list[int]],
    ) -> None:
        self.parameters, self.states, self.keys = parameters, states, state_keys(layout)
        self.sharded = any(map(is_sharded, parameters))
        self.held = [local(parameter.detach()) for parameter in parameters]
        self.device = self.held[0].device
        lists: list[list[torch.Tensor]] = [[] for _ in range(adam.CODED_OPERANDS)]
        for operand in self.keys:
            lists[operand] = self._state(operand)
        hyper = torch.empty(len(rows), adam.HYPER_COLUMNS, dtype=torch.float32, device=self.device)
        row_of = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)
        self.batch = adam.Batch(layout, None, lists, row_of, hyper)
        self.versions = self._versions()
        self._point(names)

    def _point(self, names: dict[int, list[int]]) -> None:
        """Take the addresses of parameters and state."""
        layout, lists = self.batch.layout, self.batch.lists
        self.dense = lists[adam.PARAM] = [dense(one, layout) for one in self.held]
        self.copied = [(one, copy) for one, copy in zip(self.held, self.dense, strict=True) if one is not copy]
        self.addresses = list(map(_address, self.held))
        self.contiguous = all(map(torch.Tensor.is_contiguous, self.dense))
        # All rows except that of the gradients, which are known when the table is built.
        self._contents: list[list[int] | None] = [names.get(row) for row in range(layout.operands)]
        for operand in (adam.PARAM, *self.keys):
            self._contents[operand] = checked_addresses(lists[operand])

    def _versions(self) -> list[int]:
        return list(map(version_of if self.sharded else attrgetter("_version"), self.parameters))

    def agreed(self) -> dict[int, Agreed]:
        """By the parameter's id, the version and address that its full master was last compared with."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return {}
        dtype = self.batch.layout.param
        entries = [Agreed(*known, dtype) for known in zip(self.versions, self.addresses, strict=True)]
        return dict(zip(map(id, self.parameters), entries, strict=True))

    def _state(self, operand: int) -> list[torch.Tensor]:
        tensors = list(map(itemgetter(self.keys[operand]), self.states))
        return list(map(local, tensors)) if self.sharded else tensors

    def still_describes(self) -> bool:
        """Whether the addresses of parameters and state are those in the table."""
        held = list(map(local, self.parameters)) if self.sharded else self.parameters
        if list(map(_address, held)) != self.addresses:
            return False
        for operand in self.keys:
            now = self._state(operand)
            # Plain tensors must be the same objects. `local` makes new objects of shards, so only addresses are
            # compared.
            if not self.sharded and not all(map(is_, now, self.batch.lists[operand])):
                return False
            if list(map(_address, now)) != self._contents[operand]:
                return False
        return True

    def take_outside_writes(self) -> None:
        """Update the full masters of parameters that other code wrote. Split masters need no update."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return
        now = self._versions()
        for value, master, before, after in zip(
            self.held, self.batch.lists[adam.EXTRA], self.versions, now, strict=True
        ):
            if before != after:
                master.copy_(as_written(value, master))
        self.versions = now

    def _in_order(
        self, gradients: list[torch.Tensor], contiguous: bool
    ) -> tuple[list[torch.Tensor], list[partial[Any]]]:
        """The gradients in the memory order of the parameters, and the calls that copy those that autograd left in
        another order. They may still be arriving."""
        if self.contiguous and contiguous:
            return gradients, []
        ordered, copies = [], []
        for grad, dense in zip(gradients, self.dense, strict=True):
            if grad.is_neg() or not in_same_order(grad, dense):
                copy = torch.empty_strided(grad.shape, dense.stride(), dtype=grad.dtype, device=grad.device)
                copies.append(partial(copy.copy_, grad))
                grad = copy
            ordered.append(grad)
        return ordered, copies

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        """Do everything in a step that can fail or take long. Returns the calls that update parameters and state.

        The calls hold addresses, not tensors. `contiguous` says whether all gradients are contiguous; `control` is on
        this device.
        """
        if self.sharded:
            grads = list(map(local, grads))
            contiguous = all_contiguous(grads)
        gradients, copies = self._in_order(grads, contiguous)
        self.take_outside_writes()
        self.batch.lists[adam.GRAD] = gradients
        if self.batch.table is None:
            contents = list(self._contents)
            contents[adam.GRAD] = checked_addresses(gradients)
            sizes = self.batch.layout.sizes([one.shape for one in self.held])
            self.batch.table = TensorTable(sizes, len(contents), self.batch.layout.chunk, self.device, contents)
        else:
            self.batch.table.point(adam.GRAD, gradients)
        back = [partial(parameter.copy_, copy) for parameter, copy in self.copied]
        there = [partial(copy.copy_, parameter) for parameter, copy in self.copied]
        return [*copies, *there, adam.launch(self.batch, groups, control), *back]

    def finish(self) -> None:
        """Release the gradients and record the update. Must run after the calls that `prepare` returned."""
        self.batch.lists[adam.GRAD] = []  # zero_grad must be able to free them
        # The kernels write to addresses, which autograd does not notice.
        torch.autograd.graph.increment_version(self.parameters)
        if self.batch.layout.master == adam.FULL_MASTER:
            self.versions = self._versions()


class OperationsGroup(LaunchGroup):
    """Parameters that kernels cannot read (wrapper subclasses, fake and meta tensors). The reference updates them."""

    def _point(self, names: dict[int, list[int]]) -> None:
        self.known = list(map(local, self.parameters))
        self.addresses = [0] * len(self.parameters)
        self.batch.hyper.zero_()

    def still_describes(self) -> bool:
        return all(map(is_, map(local, self.parameters), self.known)) and all(
            all(map(is_, self._state(operand), self.batch.lists[operand])) for operand in self.keys
        )

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        # `parameter.data` may have been replaced.
        self.held = self.batch.lists[adam.PARAM] = [local(parameter.detach()) for parameter in self.parameters]
        self.take_outside_writes()
        self.batch.lists[adam.GRAD] = list(map(local, grads))
        return [adam.launch(self.batch, groups, control)]
