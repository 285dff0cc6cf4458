"""Which ranks hold parts and which hold copies of an optimizer's parameters, and over which groups they must agree.

What is looked at is what torch knows: the meshes and placements of DTensors (FSDP2, HSDP, tensor parallel, and both),
and the flat parameters of FSDP1. Plain tensors are taken for copies on every rank that holds anything else of the same
optimizer, as the norms beside tensor-parallel layers are; of two sets of ranks that hold the same parameter on meshes
of their own (a layer norm sharded over data-parallel ranks only, beside layers that are also tensor-parallel), one is
taken for a copy of the other.

**One reduction.** Each rank adds up the squares of those of its tensors whose copies on other ranks come after it, and
0 for the others; then a sum over all ranks counts everything once, and is the same number on every rank without a
division. Beside it goes a flag of 0 or 1. Where one process group joins all ranks concerned (one of the mesh's own, or
the default group) that is one `all_reduce` of 16 bytes; else it is one per mesh dimension. Flags are added, and not
compared: gloo's maximum loses NaN, and a sum of zeros and ones cannot be mistaken.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from operator import is_
from typing import Any, NamedTuple

import torch

REMEDY = "pass GradScaler(process_group=...) a group of all ranks that hold a part of the model"


class Placement(NamedTuple):
    """Where one tensor lies.

    Attributes:
        ranks: all that hold a part or a copy of it, this one included.
        lines: for each dimension of the mesh the ranks on this one's line.
        groups: the process groups of these lines.
        first: whether no rank before this one, of `ranks`, holds a copy of this one's part.
    """

    ranks: frozenset[int]
    lines: tuple[frozenset[int], ...]
    groups: tuple[Any, ...]
    first: bool


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor, without importing torch.distributed to find out."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: all of a plain tensor."""
    shard: Any = getattr(tensor, "_local_tensor", tensor)
    # A collective may still be filling the shard.
    return shard.wait() if hasattr(shard, "wait") else shard


def settle_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give DTensor gradients the placements of their parameters.

    Sequence parallelism leaves gradients of replicated parameters as sums yet to be formed (``Partial``), of which each
    rank holds a summand: neither their norm nor their overflow can be told from it.
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
    """The ranks reached from this one by a step in each of several sets of ranks, if they are a grid.

    In a grid, sets along one dimension are shifted copies of each other: so the ranks of others' sets are known too.
    """
    offsets = [sorted(member - min(ranks) for member in ranks) for ranks in sets]
    base = rank - sum(rank - min(ranks) for ranks in sets)
    reached = frozenset(base + sum(steps) for steps in product(*offsets))
    return reached if base >= 0 and len(reached) == math.prod(map(len, sets)) else None


def _of_mesh(tensor: Any) -> Placement | None:
    """Where a DTensor lies; None if on one rank only, or not on this one."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() == 1:
        return None
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim) if mesh.size(dimension) > 1)
    copies = [at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()]
    return Placement(frozenset(mesh.mesh.flatten().tolist()), tuple(map(_members, groups)), groups, not any(copies))


def _of_flat(state: Any, handle: Any) -> Placement | None:
    """Where the parameters lie that an FSDP1 module has flattened."""
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


def _instances(module: str, name: str) -> list[Any]:
    """All living objects of a class, if its module was imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return [] if cls is None else [one for one in gc.get_objects() if issubclass(type(one), cls)]


def _flat_parts() -> dict[int, tuple[Placement | None, bool]]:
    """By the parameter's id: where FSDP1 has put it, and whether it has cut it.

    Parameters do not know their module, so all modules are asked.
    """
    found: dict[int, tuple[Placement | None, bool]] = {}
    for state in _instances("torch.distributed.fsdp._common_utils", "_FSDPState"):
        handle = getattr(state, "_handle", None)
        if handle is None or getattr(state, "_fsdp_extension", None) is not None:
            continue  # with an extension, DTensors lie inside the flat parameter, each in a way of its own
        flat = handle.flat_param
        placed = _of_flat(state, handle), handle.uses_sharded_strategy and handle.process_group.size() > 1
        found.update((id(one), placed) for one in (flat, *(flat._params or ()), *(flat._shared_params or ())))
    return found


def zero_group_of(optimizer: torch.optim.Optimizer) -> Any:
    """The ranks over which a `ZeroRedundancyOptimizer` spreads its parameters, if `optimizer` is its local part."""
    for outer in _instances("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
        if getattr(outer, "optim", None) is optimizer:
            return outer.process_group
    return None


# ------------------------------------------------------------------------------------------------------ what all share


def _steps(line: frozenset[int]) -> tuple[int, ...]:
    """The same for sets of ranks that are shifted copies of each other, so that all ranks put them in one order."""
    return tuple(member - min(line) for member in sorted(line))


class World(NamedTuple):
    """This rank, how many there are, and the group of all."""

    rank: int
    size: int
    group: Any


def _joined(parts: Sequence[Placement], world: World) -> tuple[frozenset[int], tuple[Any, ...]]:
    """All ranks concerned, and the groups over which to reduce, one after the other.

    Raises:
        RuntimeError: the sets of ranks overlap in a way that does not tell which ranks the others reach.
    """
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
    """How to sum over all ranks, each tensor once.

    Attributes:
        ranks: all that take part; none if there is nothing to agree on.
        groups: to reduce over, one after the other.
        counted: for each kind of tensor whether this rank adds its squares; plain ones first, then one per part.
    """

    ranks: frozenset[int]
    groups: tuple[Any, ...]
    counted: list[bool]


def agreement(parts: Sequence[Placement], further: Placement | None, world: World) -> Agreement:
    """How the ranks that hold any of some parts come to one answer.

    Args:
        parts: where the tensors of an optimizer lie, each kind once.
        further: a group whose ranks hold other tensors although nothing shows it: there plain ones differ.
        world: as this rank sees it.

    Raises:
        RuntimeError: the sets of ranks overlap in a way that does not tell which ranks the others reach.
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
    # Meshes beside each other hold copies: those on the one with the lowest rank count. Plain tensors likewise.
    lowest = min(model)
    plain = lowest == world.rank if further is None else lowest in further.ranks
    return Agreement(ranks, groups, [plain, *(part.first and lowest in part.ranks for part in parts)])


class Topology:
    """Over which ranks an optimizer's parameters are spread.

    Attributes:
        parameters: all of the optimizer's, in its order.
        kinds: the different places where parameters lie; the first is that of plain tensors.
        kind_of: for each parameter its place in `kinds`, or None if all are plain.
        counted: for each kind whether this rank adds its squares to the sum over all ranks.
        groups: to reduce over, one after the other; none if there is nothing to agree on.
        settled: whether gradients need no `settle_gradients`.
        cut_by_fsdp1: whether FSDP1 has spread any of them over several ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], process_group: Any = None) -> None:
        self.parameters = list(parameters)
        self.process_group = process_group
        self.kinds: list[Placement | None] = [None]
        self.kind_of: list[int] | None = None
        self.settled = not any(map(is_sharded, self.parameters))
        self.cut_by_fsdp1 = False
        self._find()
        parts = [part for part in self.kinds if part is not None]
        further = None
        if process_group is not None and process_group.size() > 1:
            ranks = _members(process_group)
            further = Placement(ranks, (ranks,), (process_group,), True)
        agreed = Agreement(frozenset(), (), [True])
        if parts or further is not None:
            import torch.distributed as dist

            world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
            agreed = agreement(parts, further, world)
        self.ranks, self.groups, self.counted = agreed

    def _find(self) -> None:
        flats: dict[int, tuple[Placement | None, bool]] | None = None
        known: dict[Placement | None, int] = {None: 0}
        kind_of = []
        for index, parameter in enumerate(self.parameters):
            part = None
            if is_sharded(parameter):
                part = _of_mesh(parameter)
            elif getattr(parameter, "_fsdp_flattened", False):
                flats = _flat_parts() if flats is None else flats
                if id(parameter) not in flats and self.process_group is None:
                    raise RuntimeError(
                        f"parameter {index} of the optimizer was flattened by FullyShardedDataParallel together with "
                        "tensor parallelism, or its module cannot be found (after gc.freeze(), say), so which ranks "
                        f"hold its other parts is not known; use torch.distributed.fsdp.fully_shard, or {REMEDY}"
                    )
                part, cut = flats.get(id(parameter), (None, False))
                self.cut_by_fsdp1 |= cut
            kind_of.append(known.setdefault(part, len(known)))
        self.kinds = list(known)
        if len(known) > 1:
            self.kind_of = kind_of

    def device_for(self, home: torch.device) -> torch.device:
        """Where numbers must lie to be reduced: where they are, if every group can."""
        for group in self.groups:
            able = [device.type for device in group._device_types]
            if home.type not in able:
                other = "cuda" if "cuda" in able else able[0]
                return torch.device(other, torch.cuda.current_device()) if other == "cuda" else torch.device(other)
        return home

    def sum_over_ranks(self, numbers: torch.Tensor) -> None:
        """Replace numbers by their sums over all ranks, in place."""
        import torch.distributed as dist

        for group in self.groups:
            dist.all_reduce(numbers, group=group)


NOWHERE = Topology(())


def _distributed() -> Any:
    """The default process group, or None."""
    dist = sys.modules.get("torch.distributed")
    return dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None


class TopologyMemory:
    """The topology of one optimizer, found out once and again when it has other parameters."""

    def __init__(self) -> None:
        self._known: Topology | None = None
        self._world: Any = None

    def of(self, parameters: list[torch.Tensor], process_group: Any = None, owner: Any = None) -> Topology:
        """Over which ranks `parameters` are spread.

        Args:
            parameters: all of an optimizer's.
            process_group: a further group, whose ranks hold other plain tensors.
            owner: their optimizer, if it may be the local part of a `ZeroRedundancyOptimizer`.

        Raises:
            RuntimeError: it cannot be found out.
        """
        world = _distributed()
        if world is None:
            return NOWHERE
        known = self._known
        if (
            known is None
            or self._world is not world
            or len(parameters) != len(known.parameters)
            or not all(map(is_, parameters, known.parameters))
        ):
            group = process_group if owner is None else zero_group_of(owner)
            known = self._known = Topology(parameters, group)
            self._world = world
        return known
