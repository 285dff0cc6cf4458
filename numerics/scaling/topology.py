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

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from halfstep.numerics.scaling.sharding import Ranks, Sharding, flat_ranks, grid, is_flat, is_sharded
from halfstep.numerics.scaling.wrappers import zero_group_of

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
    """How an optimizer's parameters are distributed over ranks.

    Attributes:
        parameters: all parameters of the optimizer, in its order.
        world: the default group.
        number_of: for each parameter the number of its sharding, 0 for plain tensors; or None if all are plain.
        members, groups, counted: those of `Agreement`.
        settled: whether gradients need no `settle_gradients`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], process_group: Any = None, world: Any = None) -> None:
        self.parameters, self.world = list(parameters), world
        self.settled = not any(map(is_sharded, self.parameters))
        numbers: dict[Ranks | None, int] = {None: 0}
        number_of = [numbers.setdefault(ranks, len(numbers)) for ranks in self._ranks(process_group is not None)]
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
