"""What the scaler and the optimizers ask of gradients: are all finite, and what is their norm, whatever shards them.

The kernels see local tensors on one device. Here gradients are grouped by device and by the mesh that shards them,
checked with one pass each, and the answers combined: flags by maximum over every mesh that shards anything, sums of
squares by addition over the mesh dimensions that shard and not over those that replicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES
from halfstep.kernels.unscale import (
    CHECK_OF_NOTHING,
    HAS_INF,
    HAS_NAN,
    Check,
    Tally,
    foreach_check,
    foreach_unscale_and_check_,
    note,
)


class GradientCheck(NamedTuple):
    """Over all gradients of an optimizer, on all devices and ranks.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any is non-finite, else 0.0.
        sum_of_squares: 0-dim fp64; of what was checked.
    """

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, without importing torch.distributed to find out."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: all of a plain tensor."""
    shard: Any = getattr(tensor, "_local_tensor", tensor)
    # A collective may still be filling the shard.
    return shard.wait() if hasattr(shard, "wait") else shard


def _values(grad: torch.Tensor) -> torch.Tensor:
    """The stored values of a gradient; duplicates of a sparse one must have been summed before."""
    return grad._values() if grad.is_sparse else local(grad)


def _check_in_torch(tensors: list[torch.Tensor], inv_scale: torch.Tensor | None, write: bool) -> Check:
    """The same for dtypes that the kernels do not know (fp64), which optimizers of others may hold."""
    unscaled = tensors if inv_scale is None else [tensor * inv_scale for tensor in tensors]
    if write:
        for tensor, value in zip(tensors, unscaled, strict=True):
            tensor.copy_(value)
    flags = torch.stack(
        [HAS_INF * tensor.isinf().any().int() + HAS_NAN * tensor.isnan().any().int() for tensor in unscaled]
    )
    squares = torch.stack([tensor.abs().double().square().sum() for tensor in unscaled]).sum()
    return Check(flags.any().float(), squares, flags)


def _reduce(tensor: torch.Tensor, mesh: Any, dimensions: Iterable[int], maximum: bool) -> None:
    import torch.distributed as dist

    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for dimension in dimensions:
        dist.all_reduce(tensor, operation, group=mesh.get_group(dimension))


Kind = tuple[Any, ...]


def _by_kind(grads: list[torch.Tensor], places: Sequence[int]) -> dict[Kind, tuple[list[torch.Tensor], Sequence[int]]]:
    """Gradients by (device, mesh, placements, whether the kernels know the dtype): their local values and places."""
    # The common case, told in four passes at the speed of C: with thousands of tensors a loop costs more than the step.
    if set(map(type, grads)) == {torch.Tensor} and set(map(attrgetter("layout"), grads)) == {torch.strided}:
        devices = set(map(attrgetter("device"), grads))
        if len(devices) == 1 and DTYPE_CODES.keys() >= set(map(attrgetter("dtype"), grads)):
            return {(devices.pop(), None, (), True): (grads, places)}
    kinds: dict[Kind, tuple[list[torch.Tensor], list[int]]] = {}
    for grad, place in zip(grads, places, strict=True):
        values = _values(grad)
        spec = (grad.device_mesh, tuple(grad.placements)) if is_sharded(grad) else (None, ())  # type: ignore[attr-defined]
        of_kind, where = kinds.setdefault((values.device, *spec, values.dtype in DTYPE_CODES), ([], []))
        of_kind.append(values)
        where.append(place)
    return {kind: found for kind, found in kinds.items()}


class CheckMemory:
    """What the checks of one optimizer's gradients leave for the next: where answers go, and which gradients were bad.

    Attributes:
        counts: by device, `Tally.counts` with a row per parameter of the optimizer, in its order.
    """

    def __init__(self) -> None:
        self.counts: dict[torch.device, torch.Tensor] = {}
        self._answers: dict[Kind, Check] = {}

    def answer(self, kind: Kind, slots: int, device: torch.device) -> Check:
        """Where to write, the same each time for the same kind of gradients."""
        known = self._answers.get(kind)
        if known is None or known.flags.numel() != slots:
            known = self._answers[kind] = Check(
                torch.empty((), dtype=torch.float32, device=device),
                torch.empty((), dtype=torch.float64, device=device),
                torch.empty(slots, dtype=torch.int32, device=device),
            )
        return known

    def tally(self, slots: int, device: torch.device, step: torch.Tensor) -> Tally:
        """Where to note bad gradients; `step` counts the steps before this one."""
        counts = self.counts.get(device)
        if counts is None or counts.shape[0] < slots:
            grown = torch.zeros(slots, 4, dtype=torch.int32, device=device)
            if counts is not None:
                grown[: counts.shape[0]] = counts
            counts = self.counts[device] = grown
        return Tally(counts[:slots], step.to(device, non_blocking=True))


def check_gradients(
    grads: Iterable[torch.Tensor],
    inv_scale: torch.Tensor | None,
    *,
    scale: torch.Tensor | None = None,
    write: bool = False,
    process_group: Any = None,
    memory: CheckMemory | None = None,
    places: Sequence[int] | None = None,
    slots: int = 0,
    step: torch.Tensor | None = None,
) -> GradientCheck | None:
    """Check gradients times `inv_scale`, wherever they are, and unscale them in place if asked to.

    Args:
        grads: fp32, fp16 or bf16; dense, DTensor or coalesced sparse; on any devices.
        inv_scale: 0-dim fp32, or None for 1.
        scale: 0-dim fp32, its reciprocal, instead of it.
        write: also multiply them in place.
        process_group: a further group over which to combine the flag, for sharding that torch does not know of.
        memory: of earlier checks of the same optimizer: nothing is then allocated for the answer, which the next check
            overwrites, and bad gradients are noted in it.
        places, slots, step: with `memory`: which of the optimizer's `slots` parameters each gradient belongs to (None:
            all, in order), and the number of steps before this one, int64.

    Returns:
        The combined answer on the first gradient's device, or None if there are no gradients and no `process_group`.
    """
    listed = list(grads)
    kinds = _by_kind(listed, range(len(listed)) if places is None else places)
    if not kinds and process_group is None:
        return None
    found: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for kind, (tensors, where) in kinds.items():
        _, mesh, placements, _ = kind
        check = _check_kind(kind, tensors, where, inv_scale, scale, write, memory, slots, step)
        total = check.sum_of_squares
        if mesh is not None:
            shards = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
            _reduce(total, mesh, shards, maximum=False)
        found.append(check.found_inf)
        squares.append(total)
    if not kinds:
        import torch.distributed as dist

        backend_device = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
        found, squares = [CHECK_OF_NOTHING.found_inf.to(backend_device)], [CHECK_OF_NOTHING.sum_of_squares]
    home = found[0].device
    flag = torch.stack([one.to(home, non_blocking=True) for one in found]).amax() if len(found) > 1 else found[0]
    total = sum((one.to(home, non_blocking=True) for one in squares[1:]), start=squares[0])
    meshes = {id(mesh): mesh for _, mesh, _, _ in kinds if mesh is not None}
    for mesh in meshes.values():
        _reduce(flag, mesh, range(mesh.ndim), maximum=True)
    if process_group is not None:
        import torch.distributed as dist

        dist.all_reduce(flag, dist.ReduceOp.MAX, group=process_group)
    return GradientCheck(flag, total)


def _check_kind(
    kind: Kind,
    tensors: list[torch.Tensor],
    where: Sequence[int],
    inv_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    write: bool,
    memory: CheckMemory | None,
    slots: int,
    step: torch.Tensor | None,
) -> Check:
    """One pass over gradients of one kind."""
    device, _, _, ours = kind
    factor = scale if inv_scale is None else inv_scale
    factor = None if factor is None else factor.to(device, non_blocking=True)
    tally = None if memory is None or step is None else memory.tally(slots, device, step)
    if ours and not write:
        times, over = (None, factor) if inv_scale is None else (factor, None)
        if memory is None:
            return foreach_check(tensors, inv_scale=times, scale=over)
        out, rows = memory.answer(kind, slots, device), None if len(where) == slots else where
        return foreach_check(tensors, inv_scale=times, scale=over, out=out, tally=tally, places=rows)
    if factor is not None and inv_scale is None:
        factor = factor.double().reciprocal().float()
    check = foreach_unscale_and_check_(tensors, factor) if ours else _check_in_torch(tensors, factor, write)
    if tally is not None:
        flags = torch.zeros(slots, dtype=torch.int32, device=device)
        flags[list(where)] = check.flags
        note(flags, tally)
    return check
