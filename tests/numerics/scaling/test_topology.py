"""Sums over ranks on meshes of many shapes, carried out by hand for every rank; with processes: topology_ranks.py."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.numerics.scaling.decision import Checker
from halfstep.numerics.scaling.scaler import GradScaler
from halfstep.numerics.scaling.sharding import Agreement, Ranks, World, agreement

EVERYONE = "all ranks"


class Lies(NamedTuple):
    """A tensor on some dimensions of a mesh, sharded over some of them; on the others there are copies."""

    dims: tuple[int, ...]
    cut: tuple[int, ...]


def coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def members(shape: tuple[int, ...], at: tuple[int, ...], dims: tuple[int, ...]) -> frozenset[int]:
    """The ranks that differ from the one at a coordinate in some dimensions only."""
    every = coordinates(shape)
    return frozenset(
        rank
        for rank, other in enumerate(every)
        if all(a == b for dim, (a, b) in enumerate(zip(at, other, strict=True)) if dim not in dims)
    )


def part_of(shape: tuple[int, ...], at: tuple[int, ...], lies: Lies) -> Ranks | None:
    wide = [dim for dim in lies.dims if shape[dim] > 1]
    if not wide:
        return None
    groups = tuple(members(shape, at, (dim,)) for dim in wide)
    first = not any(at[dim] for dim in lies.dims if dim not in lies.cut)
    return Ranks(members(shape, at, lies.dims), groups, groups, first)


def summed(
    shape: tuple[int, ...], agreements: list[Agreement], contributions: list[dict[object, int]]
) -> list[dict[object, int]]:
    """What each rank has in the end, if every rank reduces over its groups one after the other."""
    values = contributions
    rounds = {len(one.groups) for one in agreements}
    assert len(rounds) == 1, "some ranks would wait for others for ever"
    for turn in range(rounds.pop()):
        groups = [one.groups[turn] for one in agreements]
        sets = [frozenset(range(len(values))) if group == EVERYONE else group for group in groups]
        for rank, ranks in enumerate(sets):
            assert all(sets[other] == ranks for other in ranks), (rank, "is alone in its reduction")
        values = [
            {
                key: sum(values[other].get(key, 0) for other in sorted(ranks))
                for key in set().union(*(values[o] for o in ranks))
            }
            for ranks in sets
        ]
    return values


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Lies], bool]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    dims = range(len(shape))
    lying = []
    for _ in range(draw(st.integers(1, 4))):
        on = tuple(sorted(draw(st.sets(st.sampled_from(list(dims)), min_size=1))))
        lying.append(Lies(on, tuple(sorted(draw(st.sets(st.sampled_from(on)))))))
    return shape, lying, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_each_part_is_counted_once_and_every_rank_has_the_same_sum(
    case: tuple[tuple[int, ...], list[Lies], bool],
) -> None:
    """Dimensions on which nothing lies are other models: pipeline stages, or copies that train by themselves."""
    shape, lying, plain = case
    every = coordinates(shape)
    used = {dim for lies in lying for dim in lies.dims if shape[dim] > 1}
    agreements, contributions = [], []
    for rank, at in enumerate(every):
        placed = [(lies, part_of(shape, at, lies)) for lies in lying]
        kinds: dict[Ranks | None, int] = {None: 0}
        for _, part in placed:
            kinds.setdefault(part, len(kinds))
        parts = [part for part in kinds if part is not None]
        agreed = agreement(parts, None, World(rank, len(every), EVERYONE))
        agreements.append(agreed)
        mine: dict[object, int] = {}
        for number, (lies, part) in enumerate(placed):
            name = (number, *(at[dim] for dim in lies.cut), *(at[dim] for dim in range(len(shape)) if dim not in used))
            mine[name] = int(agreed.counted[kinds[part]])
        if plain:
            mine["plain", tuple(at[dim] for dim in range(len(shape)) if dim not in used)] = int(agreed.counted[0])
        contributions.append(mine)
    for rank, at in enumerate(every):
        assert agreements[rank].members == (members(shape, at, tuple(used)) if used else frozenset())
    for rank, total in enumerate(summed(shape, agreements, contributions)):
        assert set(total.values()) == {1}, (rank, total)
        assert len(total) == sum(math.prod(shape[dim] for dim in lies.cut) for lies in lying) + plain


def every_agreement(shape: tuple[int, ...], lying: list[Lies], further: tuple[int, ...]) -> Iterator[Agreement]:
    for rank, at in enumerate(coordinates(shape)):
        parts = [part for part in (part_of(shape, at, lies) for lies in lying) if part is not None]
        ranks = members(shape, at, further)
        yield agreement(parts, Ranks(ranks, (ranks,), (ranks,), True), World(rank, math.prod(shape), EVERYONE))


def test_one_group_that_joins_all_ranks_is_all_that_is_reduced_over() -> None:
    shape = (2, 2, 2)
    both = Lies((1, 2), (1, 2))
    for rank, at in enumerate(coordinates(shape)):
        part = part_of(shape, at, both)
        assert part is not None
        world = World(rank, 8, EVERYONE)
        assert len(agreement([part], None, world).groups) == 2
        flat = part._replace(lines=(part.members,), groups=(part.members,))
        assert agreement([part, flat], None, world).groups == agreement([flat, part], None, world).groups
        assert agreement([flat, part], None, world).groups == (part.members,)
    assert {one.groups for one in every_agreement(shape, [both], (0,))} == {(EVERYONE,)}
    assert {one.groups for one in every_agreement(shape, [both], (0, 1, 2))} == {(frozenset(range(8)),)}


@pytest.mark.parametrize("further", [(0,), (0, 1)])
def test_plain_tensors_differ_over_the_further_group_and_are_copies_elsewhere(further: tuple[int, ...]) -> None:
    """Stages (0) of shards (1), with plain tensors; or a group of all, where they differ on each rank."""
    agreed = list(every_agreement((2, 2), [Lies((1,), (1,))], further))
    assert [one.counted[0] for one in agreed] == ([True, False, True, False] if further == (0,) else [True] * 4)
    assert [one.counted[1] for one in agreed] == [True] * 4


def test_a_further_group_inside_the_mesh_is_not_reduced_over_again() -> None:
    """Experts as plain tensors on pairs of ranks, beside layers sharded over all four; copies on the other pair."""
    agreed = list(every_agreement((2, 2), [Lies((0, 1), (0, 1))], (1,)))
    assert {one.groups for one in agreed} == {(EVERYONE,)}
    assert [one.counted[0] for one in agreed] == [True, True, False, False]


def test_sets_of_ranks_that_are_no_mesh_are_refused_with_the_remedy() -> None:
    odd = [Ranks(frozenset(ranks), (frozenset(ranks),), (frozenset(ranks),), True) for ranks in ((0, 1, 2), (0, 1, 4))]
    world = World(0, 8, EVERYONE)
    with pytest.raises(RuntimeError, match=r"are on the ranks \[0, 1, 2\], \[0, 1, 4\], which are not dimensions"):
        agreement(odd, None, world)
    with pytest.raises(RuntimeError, match=r"pass GradScaler\(process_group=\.\.\.\) a group of all ranks"):
        agreement(odd, None, world)
    remedy = Ranks(frozenset(range(6)), (frozenset(range(6)),), ("remedy",), True)
    assert agreement(odd, remedy, world).groups == ("remedy",)
    too_far = [Ranks(frozenset(ranks), (frozenset(ranks),), (frozenset(ranks),), True) for ranks in ((0, 3), (0, 1))]
    with pytest.raises(RuntimeError, match="not dimensions of one mesh"):
        agreement(too_far, None, World(0, 4, EVERYONE))


def test_a_group_that_this_rank_is_not_in_is_refused() -> None:
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="Expected process_group to be None or a group that contains this rank, but"):
        GradScaler("cpu", process_group=outside)


def test_without_process_groups_nothing_is_reduced() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    checker = Checker(optimizer)
    assert checker.verdict() is None
    assert checker.topology.groups == () and checker.topology.number_of is None
    parameter.grad = torch.full((3,), 2.0)
    verdict = checker.verdict()
    assert verdict is not None
    assert (verdict.found_inf.item(), verdict.sum_of_squares.item()) == (0.0, 12.0)
