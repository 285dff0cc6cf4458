"""A checkpoint saved in any topology and layout continues in any other with the same bits."""

from pathlib import Path
from typing import Any

import checkpoint_ranks
import pytest
import rank_processes
from checkpoint_ranks import LAYOUTS, PAIRS, PAIRS_OF_SAMPLE, SAMPLE, TOPOLOGIES, WORLD, Pair


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return rank_processes.run(checkpoint_ranks.run, WORLD, folder, list(SAMPLE), PAIRS_OF_SAMPLE, False)


def assert_same_bits(found: list[dict[str, list[str]]], layout: str, every: bool) -> None:
    for rank, differences in enumerate(found):
        expected = {
            f"{way}: {source} -> {name}"
            for way in checkpoint_ranks.ways_of(layout, every)
            for name, count in TOPOLOGIES.items()
            for source in checkpoint_ranks.sources(name, every)
            if rank < count
        }
        assert differences.keys() == expected
        assert {pair: wrong for pair, wrong in differences.items() if wrong} == {}, f"rank {rank}"


def assert_same_as_canonical(found: list[dict[Pair, list[str]]], pair: Pair) -> None:
    assert [rank[pair] for rank in found if pair in rank] == [[]] * TOPOLOGIES[pair[3]]


@pytest.mark.parametrize("layout", SAMPLE)
def test_masters_moments_weights_and_options_have_the_same_bits(ranks: list[dict[str, Any]], layout: str) -> None:
    assert_same_bits([rank["topologies"][layout] for rank in ranks], layout, every=False)


@pytest.mark.parametrize("pair", PAIRS_OF_SAMPLE, ids=" -> ".join)
def test_layouts_load_into_others_with_the_bits_of_the_canonical_state(ranks: list[dict[str, Any]], pair: Pair) -> None:
    assert_same_as_canonical([rank["layouts"] for rank in ranks], pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_of_topologies_has_the_same_bits(tmp_path: Path, layout: str) -> None:
    found = rank_processes.run(checkpoint_ranks.run, WORLD, tmp_path, [layout], [], True)
    assert_same_bits([rank["topologies"][layout] for rank in found], layout, every=True)


@pytest.mark.exhaustive
def test_every_layout_loads_into_every_other_with_the_bits_of_the_canonical_state(tmp_path: Path) -> None:
    found = rank_processes.run(checkpoint_ranks.run, WORLD, tmp_path, [], PAIRS, True)
    for pair in PAIRS:
        assert_same_as_canonical([rank["layouts"] for rank in found], pair)
