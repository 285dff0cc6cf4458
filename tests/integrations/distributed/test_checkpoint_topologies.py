"""A checkpoint saved in any topology continues in any other with the same bits."""

from __future__ import annotations

import socket
from pathlib import Path

import checkpoint_ranks
import pytest
import torch
import torch.multiprocessing


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, list[str]]]]:
    folder = Path(tmp_path_factory.mktemp("ranks"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(checkpoint_ranks.run, (port, str(folder)), nprocs=checkpoint_ranks.WORLD)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(checkpoint_ranks.WORLD)]


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
