"""The ranks that hold shards or copies of an optimizer's parameters, and the groups over which they must agree.

The topology is derived from the meshes and placements of DTensors (FSDP2, HSDP, tensor parallelism and combinations)
and from the flat parameters of FSDP1. Plain tensors are treated as copies on every rank that holds any other part of
the same optimizer, such as the norms next to tensor-parallel layers. If the same parameter is on two separate meshes (a
layer norm sharded over data-parallel ranks only, next to layers that are also tensor-parallel), one of them is treated
as a copy of the other.

**One reduction.** Each rank adds the squares of those of its tensors that no lower rank holds a copy of. The sum over
all ranks then counts everything once, and is the same number on every rank without a division. A flag of 0 or 1 is
added with it. If one process group contains all ranks concerned (one of the mesh, or the default group), this is one
`all_reduce` of 16 bytes; otherwise there is one per mesh dimension. Flags are combined by sums, because gloo's maximum
may lose a NaN, whereas a sum of zeros and ones is always exact.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import is_
from typing import Any, NamedTuple

import torch

REMEDY = "pass GradScaler(process_group=...) a group of all ranks that hold a part of the model"


class Placement(NamedTuple):
    """How one tensor is distributed: over all `ranks` that hold a shard or a copy of it, including this one.

    `lines` are the ranks on this rank's line in each dimension of the mesh, `groups` their process groups. `first` says
    whether no lower rank holds a copy of this rank's shard.
    """

    ranks: frozenset[int]
    lines: tuple[frozenset[int], ...]
    groups: tuple[Any, ...]
    first: bool


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor. Does not import torch.distributed."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor; a plain tensor itself."""
    shard: Any = getattr(tensor, "_local_tensor", tensor)
    # A collective may still be filling the shard.
    return shard.wait() if hasattr(shard, "wait") else shard


def cuts(tensor: Any) -> dict[int, int]:
    """Into how many parts a DTensor is cut in each dimension; empty for a plain tensor, or one that is on each rank."""
    ways: dict[int, int] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True) if is_sharded(tensor) else ():
        if size > 1 and (dim := getattr(placement, "dim", None)) is not None:
            ways[dim] = ways.get(dim, 1) * size
    return ways


def sharded_like(
    parameter: Any, shard: torch.Tensor, shape: torch.Size | None = None, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A DTensor with the mesh and the placements of a parameter, and a shard of this rank.

    The whole has the shape and the strides of the parameter, or another `shape`, in row-major order by default.
    """
    from torch.distributed.tensor import DTensor

    if shape is None:
        shape, stride = parameter.shape, parameter.stride()
    stride = stride or torch.empty(shape, dtype=shard.dtype, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    whole = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
    whole._local_tensor = shard  # instead of a view
    return whole


def settle_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Redistribute DTensor gradients to the placements of their parameters.

    Sequence parallelism leaves gradients of replicated parameters as partial sums (``Partial``). Neither their norm nor
    their overflow can be derived from the summand of one rank.
    """
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and is_sharded(grad) and is_sharded(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            if grad.placements != placements:  # type: ignore[attr-defined]
                parameter.grad = grad.redistribute(mesh, placements)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- what one holds


def _members(group: Any) -> frozenset[int]:
    import torch.distributed as dist

    return frozenset(dist.get_process_group_ranks(group))


def _grid(rank: int, sets: Sequence[frozenset[int]]) -> frozenset[int] | None:
    """The ranks of the grid that several sets of ranks span, each along one dimension; None if they span none.

    In a grid, the sets along one dimension are shifted copies of each other, so this rank knows those of other ranks.
    """
    offsets = [sorted(member - min(ranks) for member in ranks) for ranks in sets]
    base = rank - sum(rank - min(ranks) for ranks in sets)
    reached = frozenset(base + sum(steps) for steps in product(*offsets))
    return reached if base >= 0 and len(reached) == math.prod(map(len, sets)) else None


def _of_mesh(tensor: Any) -> Placement | None:
    """The placement of a DTensor; None if it is on one rank only, or not on this one."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() == 1:
        return None
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim) if mesh.size(dimension) > 1)
    copies = [at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()]
    return Placement(frozenset(mesh.mesh.flatten().tolist()), tuple(map(_members, groups)), groups, not any(copies))


def _of_flat(state: Any, handle: Any) -> Placement | None:
    """The placement of the parameters that an FSDP1 module has flattened."""
    import torch.distributed as dist

    dimensions = [(handle.process_group, handle.uses_sharded_strategy)]
    if "HYBRID" in handle._sharding_strategy.name:
        dimensions.append((state._inter_node_pg, False))
    dimensions = [(group, cut) for group, cut in dimensions if group.size() > 1]
    if not dimensions:
        return None
    lines = tuple(_members(group) for group, _ in dimensions)
    ranks = _grid(dist.get_rank(), lines)
    if ranks is None:
        raise RuntimeError(
            f"Expected FSDP to shard and copy over the dimensions of one mesh, but got ranks {sorted(lines[0])} and "
            f"{sorted(lines[1])}: pass device_mesh= to FullyShardedDataParallel instead of two process groups"
        )
    first = all(cut or group.rank() == 0 for group, cut in dimensions)
    return Placement(ranks, lines, tuple(group for group, _ in dimensions), first)


def instances(module: str, name: str) -> list[Any]:
    """All existing objects of a class, if its module was imported. It takes a while: all objects are examined."""
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    objects = gc.get_objects()
    # There are far fewer types than objects. By their ids, since a type need not be hashable.
    kinds = {id(kind) for kind in {id(kind): kind for kind in map(type, objects)}.values() if issubclass(kind, cls)}
    return [one for one in objects if id(type(one)) in kinds] if kinds else []


def _flat_parts() -> dict[int, tuple[Placement | None, bool]]:
    """For each parameter of FSDP1, by its id, the placement and whether it is sharded.

    Parameters have no reference to their module, so all modules are examined.
    """
    found: dict[int, tuple[Placement | None, bool]] = {}
    for state in instances("torch.distributed.fsdp._common_utils", "_FSDPState"):
        handle = getattr(state, "_handle", None)
        if handle is None or getattr(state, "_fsdp_extension", None) is not None:
            continue  # with an extension, the flat parameter contains DTensors with placements of their own
        flat = handle.flat_param
        placed = _of_flat(state, handle), handle.uses_sharded_strategy and handle.process_group.size() > 1
        found.update((id(one), placed) for one in (flat, *(flat._params or ()), *(flat._shared_params or ())))
    return found


def zero_group_of(optimizer: torch.optim.Optimizer) -> Any:
    """The group over which a `ZeroRedundancyOptimizer` distributes its state, if `optimizer` is its local part."""
    for outer in instances("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
        if getattr(outer, "optim", None) is optimizer:
            return outer.process_group
    return None


# ------------------------------------------------------------------------------------------------------ what all share


def _steps(line: frozenset[int]) -> tuple[int, ...]:
    """A key that is equal for shifted copies of a set of ranks, so that all ranks sort the sets in the same order."""
    return tuple(member - min(line) for member in sorted(line))


class World(NamedTuple):
    """This rank, the number of ranks, and the group of all ranks."""

    rank: int
    size: int
    group: Any


def _joined(parts: Sequence[Placement], world: World) -> tuple[frozenset[int], tuple[Any, ...]]:
    """All ranks concerned, and the groups over which to reduce one after the other."""
    if not parts:
        return frozenset(), ()
    every = frozenset().union(*(part.ranks for part in parts))
    widest = [part for part in parts if part.ranks == every]
    if widest:
        ranks, groups = every, min((part.groups for part in widest), key=len)
    else:
        known = {line: group for part in parts for line, group in zip(part.lines, part.groups, strict=True)}
        lines = sorted((line for line in known if not any(line < other for other in known)), key=_steps)
        reached = _grid(world.rank, lines)
        if reached is None or not every <= reached or max(reached) >= world.size:
            raise RuntimeError(
                f"the optimizer's parameters are on the ranks {', '.join(str(sorted(line)) for line in lines)}, which "
                f"are not dimensions of one mesh, so no sum over them counts each once; {REMEDY}"
            )
        ranks, groups = reached, tuple(known[line] for line in lines)
    return ranks, (world.group,) if len(groups) > 1 and len(ranks) == world.size else groups


class Agreement(NamedTuple):
    """How to sum over all `ranks` that take part, by reducing over `groups`, such that each tensor counts once.

    `counted` says whether this rank adds its squares, for plain tensors first and then for each part.
    """

    ranks: frozenset[int]
    groups: tuple[Any, ...]
    counted: list[bool]


def agreement(parts: Sequence[Placement], further: Placement | None, world: World) -> Agreement:
    """How the ranks that hold any of the different placements of an optimizer's tensors sum over each tensor once.

    `further` is a group that the user passed, on whose ranks plain tensors differ.

    Raises:
        RuntimeError: the sets of ranks overlap without being dimensions of one grid.
    """
    ranks, groups = _joined([*parts, *(() if further is None else (further,))], world)
    if not groups:
        return Agreement(ranks, groups, [True])
    try:
        model = _joined(parts, world)[0]
    except RuntimeError:
        if further is None or not further.ranks >= frozenset().union(*(part.ranks for part in parts)):
            raise
        model = further.ranks
    if not model:
        return Agreement(ranks, groups, [True])
    # Separate meshes hold copies, of which those on the mesh with the lowest rank count. So do plain tensors.
    lowest = min(model)
    plain = lowest == world.rank if further is None else lowest in further.ranks
    return Agreement(ranks, groups, [plain, *(part.first and lowest in part.ranks for part in parts)])


class Topology:
    """How an optimizer's parameters are distributed over ranks.

    Attributes:
        parameters: all parameters of the optimizer, in its order.
        world: the default group.
        kind_of: for each parameter the number of its placement, 0 for plain tensors; or None if all are plain.
        counted: for each placement, whether this rank adds its squares to the sum over all ranks.
        ranks, groups: all ranks concerned, and the groups to reduce over, one after the other.
        settled: whether gradients need no `settle_gradients`.
        cut_by_fsdp1: whether FSDP1 shards any of the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], process_group: Any = None, world: Any = None) -> None:
        self.parameters, self.world = list(parameters), world
        self.settled = not any(map(is_sharded, self.parameters))
        self.cut_by_fsdp1 = False
        number_of: dict[Placement | None, int] = {None: 0}
        numbers = [number_of.setdefault(part, len(number_of)) for part in self._placements(process_group is not None)]
        self.kind_of = numbers if len(number_of) > 1 else None
        parts = [part for part in number_of if part is not None]
        further = None
        if process_group is not None and process_group.size() > 1:
            ranks = _members(process_group)
            further = Placement(ranks, (ranks,), (process_group,), True)
        agreed = Agreement(frozenset(), (), [True])
        if parts or further is not None:
            import torch.distributed as dist

            agreed = agreement(parts, further, World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD))
        self.ranks, self.groups, self.counted = agreed

    def _placements(self, has_group: bool) -> Iterator[Placement | None]:
        """The placement of each parameter. With a group that the user passed, unknown ones are plain."""
        flats: dict[int, tuple[Placement | None, bool]] | None = None
        # Reading the ranks of a mesh takes longer than a step of its parameter.
        of_meshes: dict[tuple[int, Any], Placement | None] = {}
        for index, parameter in enumerate(self.parameters):
            part = None
            if is_sharded(parameter):
                key = id(parameter.device_mesh), parameter.placements  # type: ignore[attr-defined]
                if key not in of_meshes:
                    of_meshes[key] = _of_mesh(parameter)
                part = of_meshes[key]
            elif getattr(parameter, "_fsdp_flattened", False):
                flats = _flat_parts() if flats is None else flats
                if id(parameter) not in flats and not has_group:
                    raise RuntimeError(
                        f"parameter {index} of the optimizer was flattened by FullyShardedDataParallel together with "
                        "tensor parallelism, or its module cannot be found (after gc.freeze(), say), so which ranks "
                        f"hold its other parts is not known; use torch.distributed.fsdp.fully_shard, or {REMEDY}"
                    )
                part, cut = flats.get(id(parameter), (None, False))
                self.cut_by_fsdp1 |= cut
            yield part

    def device_for(self, home: torch.device) -> torch.device:
        """The device on which every group can reduce numbers: `home` if possible."""
        for group in self.groups:
            able = [device.type for device in group._device_types]
            if home.type not in able:
                other = "cuda" if "cuda" in able else able[0]
                return torch.device(other, torch.cuda.current_device()) if other == "cuda" else torch.device(other)
        return home

    def sum_over_ranks(self, numbers: torch.Tensor) -> None:
        """Replace numbers in place by their sums over all ranks."""
        import torch.distributed as dist

        for group in self.groups:
            dist.all_reduce(numbers, group=group)


NOWHERE = Topology(())


def default_group() -> Any:
    """The default process group, or None. Does not import torch.distributed."""
    dist = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None


def checked_group(group: Any) -> Any:
    """The process group that a user passed, that of a 1-D mesh, or None."""
    group = group.get_group() if hasattr(group, "get_group") else group
    if group is not None and not hasattr(group, "size"):  # as torch returns on ranks outside a new group
        raise ValueError(f"Expected process_group to be None or a group that contains this rank, but got {group!r}")
    return group


def topology_of(
    parameters: list[torch.Tensor], last: Topology, process_group: Any = None, owner: Any = None
) -> Topology:
    """The topology of all parameters of an optimizer: the `last` one, or `NOWHERE`, if it still is.

    Plain tensors differ on the ranks of `process_group`. The `owner` may be the local part of a
    `ZeroRedundancyOptimizer`. Raises a RuntimeError if the topology cannot be derived.
    """
    world = default_group()
    if world is None:
        return NOWHERE
    same = last.world is world and len(parameters) == len(last.parameters)
    if same and all(map(is_, parameters, last.parameters)):
        return last
    return Topology(parameters, process_group if owner is None else zero_group_of(owner), world)
