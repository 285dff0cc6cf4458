"""A checkpoint of the state as it is held loads into every layout and topology like a canonical one."""

from __future__ import annotations

import checkpoint_ranks
import held_ranks
import pytest
import rank_processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[held_ranks.Pair, list[str]]]:
    return rank_processes.run(held_ranks.run, checkpoint_ranks.WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("pair", held_ranks.pairs(), ids=" -> ".join)
def test_every_layout_loads_into_every_other_with_the_bits_of_the_canonical_state(
    ranks: list[dict[held_ranks.Pair, list[str]]], pair: held_ranks.Pair
) -> None:
    count = checkpoint_ranks.TOPOLOGIES[pair[3]]
    assert [rank[pair] for rank in ranks if pair in rank] == [[]] * count
