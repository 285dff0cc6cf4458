"""A checkpoint saved in any topology continues in any other with the same bits."""

from __future__ import annotations

import checkpoint_ranks
import pytest
import rank_processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[str]]]]:
    return rank_processes.run(checkpoint_ranks.run, checkpoint_ranks.WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", checkpoint_ranks.LAYOUTS)
def test_masters_moments_weights_and_options_have_the_same_bits(
    ranks: list[dict[str, dict[str, list[str]]]], layout: str
) -> None:
    for rank, found in enumerate(ranks):
        pairs = {
            f"{way}: {source} -> {name}"
            for way in checkpoint_ranks.ways_of(layout)
            for name, count in checkpoint_ranks.TOPOLOGIES.items()
            for source in checkpoint_ranks.sources(layout, name)
            if rank < count
        }
        assert found[layout].keys() == pairs
        assert {pair: wrong for pair, wrong in found[layout].items() if wrong} == {}, f"rank {rank}"
