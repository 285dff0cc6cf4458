"""How tensors lie on ranks: `Sharding` for one of them, `Topology` for all parameters of an optimizer.

Both are derived from the meshes and placements of DTensors (FSDP2, HSDP, tensor parallelism and combinations) and from
the flat parameters of FSDP1. In a topology, plain tensors are copies on every rank that holds any other part of the
same optimizer, such as the norms next to tensor-parallel layers. If the same parameter is on two separate meshes (a
layer norm sharded over data-parallel ranks only, next to layers that are also tensor-parallel), one of them is treated
as a copy of the other. Nothing here imports torch.distributed.tensor before a DTensor exists.

**One reduction.** Each rank adds the squares of those of its tensors that no lower rank holds a copy of. The sum over
all ranks then counts everything once, and is the same number on every rank without a division. A flag of 0 or 1 is
added with it. If one process group contains all ranks concerned (one of the mesh, or the default group), this is one
`all_reduce` of 16 bytes; otherwise there is one per mesh dimension. Flags are combined by sums, because gloo's maximum
may lose a NaN, whereas a sum of zeros and ones is always exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from halfstep.numerics.owners import Ranges, cut
from halfstep.numerics.scaling.wrappers import wrapped_by, zero_group_of


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    return hasattr(type(tensor), "_local_tensor")


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has flattened the tensor. Its shards do not record their positions."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def shard_of(tensor: Any) -> Any:
    """The local tensor of a DTensor, even if a collective may still be filling it; anything else itself."""
    # An access to `_local_tensor` of a gradient counts as one that may change it (early_checks.py).
    unread = hasattr(type(tensor), "unread_shard")
    return tensor.unread_shard if unread else getattr(tensor, "_local_tensor", tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor; a plain tensor itself."""
    shard = shard_of(tensor)
    # A collective may still be filling the shard.
    return shard.wait() if hasattr(shard, "wait") else shard


class Ranks(NamedTuple):
    """The ranks with a shard or a copy of a tensor, including this one."""

    members: frozenset[int]
    lines: tuple[frozenset[int], ...]  # the members on this rank's line in each dimension of the mesh
    groups: tuple[Any, ...]  # of the lines
    is_first: bool = True  # whether no lower rank holds a copy of this rank's shard

    @classmethod
    def of_group(cls, group: Any) -> Ranks | None:
        """Those of a process group, of which each rank has tensors of its own; None for a group of one."""
        if group is None or group.size() == 1:
            return None
        members = _members(group)
        return cls(members, (members,), (group,))


class Sharding:
    """How a tensor lies on ranks."""

    __slots__ = ("_spec", "_strides", "is_flat", "local", "mesh", "placements", "shape")

    def __init__(self, tensor: Any) -> None:
        self.shape, self._strides = tensor.shape, tensor.stride()  # of the whole; FSDP1 shows a flat shard only
        self.local, self.is_flat = local(tensor), is_flat(tensor)
        self._spec = getattr(tensor, "_spec", None) if is_sharded(tensor) else None
        self.mesh = None if self._spec is None else self._spec.mesh  # of a DTensor, as are the placements
        self.placements: tuple[Any, ...] = () if self._spec is None else tuple(self._spec.placements)

    def __str__(self) -> str:
        return f"placements {self.placements} on a mesh of shape {() if self.mesh is None else tuple(self.mesh.shape)}"

    @property
    def ways(self) -> dict[int, int]:
        """Into how many parts each dimension is cut; empty for a plain tensor, or one that is whole on each rank."""
        counts: dict[int, int] = {}
        for placement, size in zip(self.placements, () if self.mesh is None else self.mesh.shape, strict=True):
            if size > 1 and (dim := getattr(placement, "dim", None)) is not None:
                counts[dim] = counts.get(dim, 1) * size
        return counts

    def elements(self, where: str) -> tuple[int, int, int]:
        """Which elements of the whole this part has: the first one, how many follow one another, and the distance from
        the first of such a run to that of the next one. Raises a ValueError, which calls the tensor `where`, if they do
        not lie at equal distances."""
        whole, part = tuple(self.shape), tuple(self.local.shape)
        if self.mesh is None:
            return 0, max(math.prod(whole), 1), max(math.prod(whole), 1)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        # If two mesh dimensions shard one dimension in an interleaved order, the parts are ranges only if their sizes
        # are equal.
        interleaved = {getattr(p, "dim", None) for p in self.placements if type(p).__name__ == "_StridedShard"}
        uneven = any(dim in interleaved and whole[dim] % count for dim, count in self.ways.items())
        if tuple(shape) == part and 0 in part:
            return 0, 1, 1
        rows = next((dim for dim, size in enumerate(whole) if size != 1), 0)
        inner = [dim for dim, size in enumerate(whole) if dim != rows and part[dim] != size]
        if tuple(shape) != part or uneven or len(inner) > 1 or any(p.is_partial() for p in self.placements):
            raise ValueError(
                f"Expected {where} to be sharded by a range of rows, of one other dimension, or of both with "
                f"rounding='stochastic', but got {self}: shard evenly, or use rounding='nearest'"
            )
        start = sum(first * math.prod(whole[dim + 1 :]) for dim, first in enumerate(offset))
        if not inner:
            return start, math.prod(part), math.prod(part)
        return start, math.prod(part[inner[0] :]), math.prod(whole[inner[0] :])

    def keeps_blocks(self, span: int, evenly: bool = False) -> bool:
        """Whether each block of `span` elements of a row of a matrix is on one rank. All ranks decide alike.

        With `evenly`, columns must be cut into equal parts too: torch then cuts a tensor with a number per block alike.
        """
        cuts = self.ways
        if self.is_flat or max(cuts, default=0) == 0:
            return not self.is_flat
        if max(cuts) > 1 or (evenly and self.shape[1] % cuts[1]):
            return False
        columns = -(-self.shape[1] // cuts[1])  # of all ranks but the last
        return columns * math.prod(self.shape[2:]) % span == 0

    def cut(self) -> tuple[Any, int, Ranges] | None:
        """How one dimension is cut along one dimension of the mesh: the group of ranks, the dimension, and where the
        part of each of them begins and ends. None if this rank has the whole. Raises a ValueError if FSDP1 has
        flattened the tensor, or two dimensions of the mesh cut it."""
        cuts = [
            number
            for number, placement in enumerate(self.placements)
            if not placement.is_replicate() and self.mesh.size(number) > 1  # type: ignore[union-attr]
        ]
        if self.is_flat or len(cuts) > 1 or any(not self.placements[number].is_shard() for number in cuts):
            raise ValueError(
                "Expected a parameter whose rows or columns one dimension of the mesh shards, but got "
                f"{'one that FullyShardedDataParallel has flattened' if self.is_flat else self}: shard it by "
                "fully_shard, or by tensor parallelism, but not by both"
            )
        if self.mesh is None or not cuts:
            return None
        dim = self.placements[cuts[0]].dim
        return self.mesh.get_group(cuts[0]), dim, cut(self.shape[dim], self.mesh.size(cuts[0]))

    def like(
        self, part: torch.Tensor, shape: torch.Size | None = None, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A tensor that lies on the ranks as this one, with another part of this rank; the part if there is no mesh.

        The whole has the shape and the strides of this tensor, or another `shape`, in row-major order by default. The
        part may be on another device than the mesh.
        """
        if self._spec is None:
            return part
        from torch.distributed.tensor import DTensor

        if shape is None:
            shape, strides = self.shape, self._strides
        strides = strides or torch.empty(shape, dtype=part.dtype, device="meta").stride()
        # `DTensor.from_local` would move the part to the device of the mesh, and keep a view of it.
        meta = self._spec.tensor_meta._replace(shape=torch.Size(shape), stride=tuple(strides), dtype=part.dtype)
        return DTensor(part, replace(self._spec, tensor_meta=meta), requires_grad=False)

    def distributed(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor that every rank has whole, cut as this one. Nothing is sent."""
        if self.mesh is None:
            return whole
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)

    def ranks(self) -> Ranks | None:
        """The ranks that hold the other parts of a DTensor; None if it is on one rank only, or not on this one."""
        mesh = self.mesh
        coordinate = None if mesh is None else mesh.get_coordinate()
        if mesh is None or coordinate is None or mesh.size() == 1:
            return None
        groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim) if mesh.size(dimension) > 1)
        copies = [at for at, placement in zip(coordinate, self.placements, strict=True) if placement.is_replicate()]
        members = frozenset(mesh.mesh.flatten().tolist())
        return Ranks(members, tuple(map(_members, groups)), groups, not any(copies))


def settled(parameter: Any, grad: Any) -> Any:
    """A gradient with the placements of its parameter.

    Sequence parallelism leaves gradients of replicated parameters as partial sums (``Partial``). Neither their norm nor
    their overflow can be derived from the summand of one rank.
    """
    if is_sharded(grad) and is_sharded(parameter) and grad.placements != parameter.placements:
        return grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad


def settle_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Redistribute DTensor gradients to the placements of their parameters."""
    for parameter in parameters:
        grad = settled(parameter, parameter.grad)
        if grad is not parameter.grad:
            parameter.grad = grad


def _members(group: Any) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))


def grid(rank: int, lines: Sequence[frozenset[int]]) -> frozenset[int] | None:
    """The ranks of the grid that several sets of ranks span, each along one dimension; None if they span none.

    In a grid, the sets along one dimension are shifted copies of each other, so this rank knows those of other ranks.
    """
    offsets = [sorted(member - min(line) for member in line) for line in lines]
    origin = rank - sum(rank - min(line) for line in lines)
    reached = frozenset(origin + sum(steps) for steps in product(*offsets))
    return reached if origin >= 0 and len(reached) == math.prod(map(len, lines)) else None


def flat_ranks() -> dict[int, Ranks | None]:
    """The ranks of each parameter that a living module of FSDP1 has flattened, by the parameter's id."""
    ranks: dict[int, Ranks | None] = {}
    for module in wrapped_by("FullyShardedDataParallel"):
        handle = getattr(module, "_handle", None)
        if handle is None or getattr(module, "_fsdp_extension", None) is not None:
            continue  # with an extension, the flat parameter contains DTensors with placements of their own
        flat = handle.flat_param
        spread = _of_handle(module, handle)
        ranks.update((id(view), spread) for view in (flat, *(flat._params or ()), *(flat._shared_params or ())))
    return ranks


def _of_handle(module: Any, handle: Any) -> Ranks | None:
    dimensions = [(handle.process_group, handle.uses_sharded_strategy)]
    if "HYBRID" in handle._sharding_strategy.name:
        dimensions.append((module._inter_node_pg, False))
    dimensions = [(group, cut) for group, cut in dimensions if group.size() > 1]
    if not dimensions:
        return None
    groups = tuple(group for group, _ in dimensions)
    lines = tuple(map(_members, groups))
    members = grid(dist.get_rank(), lines)
    if members is None:
        raise RuntimeError(
            f"Expected FSDP to shard and copy over the dimensions of one mesh, but got ranks {sorted(lines[0])} and "
            f"{sorted(lines[1])}: pass device_mesh= to FullyShardedDataParallel instead of two process groups"
        )
    is_first = all(cut or group.rank() == 0 for group, cut in dimensions)
    return Ranks(members, lines, groups, is_first)


def checked_group(group: Any) -> Any:
    """The process group that a user passed, that of a 1-D mesh, or None."""
    group = group.get_group() if hasattr(group, "get_group") else group
    if group is not None and not hasattr(group, "size"):  # as torch returns on ranks outside a new group
        raise ValueError(f"Expected process_group to be None or a group that contains this rank, but got {group!r}")
    return group


# ---------------------------------------------------------------------------------------------------------- topologies

REMEDY = "pass GradScaler(process_group=...) a group of all ranks that hold a part of the model"


def _steps(line: frozenset[int]) -> tuple[int, ...]:
    """A key that is equal for shifted copies of a set of ranks, so that all ranks sort the sets in the same order."""
    return tuple(member - min(line) for member in sorted(line))


class World(NamedTuple):
    """This rank, the number of ranks, and the group of all ranks."""

    rank: int
    size: int
    group: Any


def _joined(spread: Sequence[Ranks], world: World) -> tuple[frozenset[int], tuple[Any, ...]]:
    """All ranks concerned, and the groups over which to reduce one after the other."""
    if not spread:
        return frozenset(), ()
    union = frozenset().union(*(ranks.members for ranks in spread))
    widest = [ranks for ranks in spread if ranks.members == union]
    if widest:
        members, groups = union, min((ranks.groups for ranks in widest), key=len)
    else:
        group_of = {line: group for ranks in spread for line, group in zip(ranks.lines, ranks.groups, strict=True)}
        lines = sorted((line for line in group_of if not any(line < longer for longer in group_of)), key=_steps)
        reached = grid(world.rank, lines)
        if reached is None or not union <= reached or max(reached) >= world.size:
            raise RuntimeError(
                f"the optimizer's parameters are on the ranks {', '.join(str(sorted(line)) for line in lines)}, which "
                f"are not dimensions of one mesh, so no sum over them counts each once; {REMEDY}"
            )
        members, groups = reached, tuple(group_of[line] for line in lines)
    return members, (world.group,) if len(groups) > 1 and len(members) == world.size else groups


class Agreement(NamedTuple):
    """How to sum over all ranks that take part, the `members`, by reducing over `groups`: each tensor counts once."""

    members: frozenset[int] = frozenset()
    groups: tuple[Any, ...] = ()
    counted: Sequence[bool] = (True,)  # whether this rank adds its squares: of plain tensors, then of each sharding


def agreement(spread: Sequence[Ranks], further: Ranks | None, world: World) -> Agreement:
    """How the ranks that hold any of an optimizer's tensors, in different shardings, sum over each tensor once.

    `further` is a group that the user passed, on whose ranks plain tensors differ. Raises a RuntimeError if the sets of
    ranks overlap without being dimensions of one grid.
    """
    members, groups = _joined([*spread, further] if further else spread, world)
    if not groups:
        return Agreement(members, groups)
    try:
        model = _joined(spread, world)[0]
    except RuntimeError:
        if further is None or not further.members >= frozenset().union(*(ranks.members for ranks in spread)):
            raise
        model = further.members
    if not model:
        return Agreement(members, groups)
    # Separate meshes hold copies, of which those on the mesh with the lowest rank count. So do plain tensors.
    lowest = min(model)
    plain = lowest == world.rank if further is None else lowest in further.members
    return Agreement(members, groups, [plain, *(ranks.is_first and lowest in ranks.members for ranks in spread)])


class Topology:
    """How an optimizer's parameters, in its order, are distributed over the ranks of the default group, `world`."""

    def __init__(self, parameters: Sequence[torch.Tensor], process_group: Any = None, world: Any = None) -> None:
        self.parameters, self.world = list(parameters), world
        self.settled = not any(map(is_sharded, self.parameters))  # whether gradients need no `settle_gradients`
        numbers: dict[Ranks | None, int] = {None: 0}
        number_of = [numbers.setdefault(ranks, len(numbers)) for ranks in self._ranks(process_group is not None)]
        # For each parameter the number of its sharding, 0 for plain tensors; None if all are plain.
        self.number_of = number_of if len(numbers) > 1 else None
        spread = [ranks for ranks in numbers if ranks is not None]
        further, agreed = Ranks.of_group(process_group), Agreement()
        if spread or further is not None:
            agreed = agreement(spread, further, World(world.rank(), world.size(), world))
        self.members, self.groups, self.counted = agreed

    def _ranks(self, has_group: bool) -> Iterator[Ranks | None]:
        """The ranks of each parameter. With a group that the user passed, unknown ones are plain."""
        flats: dict[int, Ranks | None] | None = None
        # Reading the ranks of a mesh takes longer than a step of its parameter.
        of_meshes: dict[tuple[int, Any], Ranks | None] = {}
        for index, parameter in enumerate(self.parameters):
            if is_sharded(parameter):
                key = id(parameter.device_mesh), parameter.placements  # type: ignore[attr-defined]
                if key not in of_meshes:
                    of_meshes[key] = Sharding(parameter).ranks()
                yield of_meshes[key]
                continue
            if not is_flat(parameter):
                yield None
                continue
            flats = flat_ranks() if flats is None else flats
            if id(parameter) not in flats and not has_group:
                raise RuntimeError(
                    f"parameter {index} of the optimizer was flattened by FullyShardedDataParallel together with "
                    "tensor parallelism, or its module is not known (of a copied model, say), so which ranks hold its "
                    f"other parts is not known; use torch.distributed.fsdp.fully_shard, or {REMEDY}"
                )
            yield flats.get(id(parameter))

    def device_for(self, home: torch.device) -> torch.device:
        """The device on which every group can reduce numbers: `home` if possible."""
        for group in self.groups:
            able = [device.type for device in group._device_types]
            if home.type not in able:
                return torch.device("cuda", torch.cuda.current_device()) if "cuda" in able else torch.device(able[0])
        return home

    def sum_over_ranks(self, numbers: torch.Tensor) -> None:
        """Replace numbers in place by their sums over all ranks."""
        for group in self.groups:
            dist.all_reduce(numbers, group=group)


NOWHERE = Topology(())


in_process_group: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool


def default_group() -> Any:
    return dist.group.WORLD if in_process_group() else None


def topology_of(
    parameters: list[torch.Tensor], last: Topology, process_group: Any = None, owner: Any = None
) -> Topology:
    """The topology of all parameters of an optimizer: the `last` one, or `NOWHERE`, if it still is.

    Plain tensors differ on the ranks of `process_group`, and on those of a `ZeroRedundancyOptimizer` whose local part
    the `owner` is. Raises a RuntimeError if the topology cannot be derived.
    """
    world = default_group()
    if world is None:
        return NOWHERE
    unchanged = last.world is world and len(parameters) == len(last.parameters)
    if unchanged and all(map(is_, parameters, last.parameters)):
        return last
    return Topology(parameters, process_group or (None if owner is None else zero_group_of(owner)), world)
