"""What the scaler and the optimizers ask of gradients: are all finite, and what is their norm, whatever shards them.

The kernels see local tensors on one device. Here gradients are grouped by device and by the mesh that shards them,
checked with one pass each, and the answers combined: flags by maximum over every mesh that shards anything, sums of
squares by addition over the mesh dimensions that shard and not over those that replicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES
from halfstep.kernels.unscale import CHECK_OF_NOTHING, Check, foreach_check, foreach_unscale_and_check_


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
    flags = torch.stack([tensor.isfinite().all().logical_not().int() for tensor in unscaled])
    squares = torch.stack([tensor.abs().double().square().sum() for tensor in unscaled]).sum()
    return Check(flags.any().float(), squares, flags)


def _reduce(tensor: torch.Tensor, mesh: Any, dimensions: Iterable[int], maximum: bool) -> None:
    import torch.distributed as dist

    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for dimension in dimensions:
        dist.all_reduce(tensor, operation, group=mesh.get_group(dimension))


def _by_kind(grads: list[torch.Tensor]) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    """The local values of gradients by (device, mesh, placements, whether the kernels know the dtype)."""
    # The common case, told in four passes at the speed of C: with thousands of tensors a loop costs more than the step.
    if set(map(type, grads)) == {torch.Tensor} and set(map(attrgetter("layout"), grads)) == {torch.strided}:
        devices = set(map(attrgetter("device"), grads))
        if len(devices) == 1 and DTYPE_CODES.keys() >= set(map(attrgetter("dtype"), grads)):
            return {(devices.pop(), None, (), True): grads}
    kinds: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for grad in grads:
        values = _values(grad)
        spec = (grad.device_mesh, tuple(grad.placements)) if is_sharded(grad) else (None, ())  # type: ignore[attr-defined]
        kinds.setdefault((values.device, *spec, values.dtype in DTYPE_CODES), []).append(values)
    return kinds


def check_gradients(
    grads: Iterable[torch.Tensor],
    inv_scale: torch.Tensor | None,
    *,
    write: bool = False,
    process_group: Any = None,
) -> GradientCheck | None:
    """Check gradients times `inv_scale`, wherever they are, and unscale them in place if asked to.

    Args:
        grads: fp32, fp16 or bf16; dense, DTensor or coalesced sparse; on any devices.
        inv_scale: 0-dim fp32, or None for 1.
        write: also multiply them in place.
        process_group: a further group over which to combine the flag, for sharding that torch does not know of.

    Returns:
        The combined answer on the first gradient's device, or None if there are no gradients and no `process_group`.
    """
    kinds = _by_kind(list(grads))
    if not kinds and process_group is None:
        return None
    found: list[torch.Tensor] = []
    squares: list[torch.Tensor] = []
    for (device, mesh, placements, ours), tensors in kinds.items():
        factor = None if inv_scale is None else inv_scale.to(device, non_blocking=True)
        if not ours:
            check = _check_in_torch(tensors, factor, write)
        elif write:
            check = foreach_unscale_and_check_(tensors, factor)
        else:
            check = foreach_check(tensors, inv_scale=factor)
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
