"""A checkpoint saved in any topology continues in any other with the same bits."""

from __future__ import annotations

from pathlib import Path

import checkpoint_ranks
import pytest
import rank_processes

Found = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return _found(tmp_path_factory.mktemp("ranks"), list(checkpoint_ranks.LAYOUTS), every=False)


def _found(folder: Path, layouts: list[str], every: bool) -> list[Found]:
    return rank_processes.run(checkpoint_ranks.run, checkpoint_ranks.WORLD, folder, layouts, every)


@pytest.mark.parametrize("layout", checkpoint_ranks.LAYOUTS)
def test_masters_moments_weights_and_options_have_the_same_bits(ranks: list[Found], layout: str) -> None:
    _all_have_the_same_bits(ranks, layout, every=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", checkpoint_ranks.WHOLE_CROSS)
def test_every_pair_of_topologies_has_the_same_bits(tmp_path: Path, layout: str) -> None:
    """By torch's save and load as well as by ours."""
    _all_have_the_same_bits(_found(tmp_path, [layout], every=True), layout, every=True)


def _all_have_the_same_bits(ranks: list[Found], layout: str, every: bool) -> None:
    for rank, found in enumerate(ranks):
        pairs = {
            f"{way}: {source} -> {name}"
            for way in checkpoint_ranks.ways_of(layout, every)
            for name, count in checkpoint_ranks.TOPOLOGIES.items()
            for source in checkpoint_ranks.sources(layout, name, way, every)
            if rank < count
        }
        assert found[layout].keys() == pairs
        assert {pair: wrong for pair, wrong in found[layout].items() if wrong} == {}, f"rank {rank}"
