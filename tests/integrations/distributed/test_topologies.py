"""One decision and one norm for all ranks, whatever shards the parameters: four processes, every topology of torch.

The processes are started once, train and break everything (tests/support/topology_ranks.py), and leave their answers.
"""

from __future__ import annotations

import functools

import pytest
import rank_processes
import topology_ranks
from topologies import WORLD


@functools.cache
def ranks(others: bool) -> list[dict[str, dict[str, str]]]:
    return rank_processes.run(topology_ranks.run, WORLD, others)


@pytest.mark.parametrize(
    "case",
    [*topology_ranks.CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in topology_ranks.EVERY_CASE)],
)
def test_on_four_ranks(case: str) -> None:
    for rank in ranks(case in topology_ranks.EVERY_CASE):
        assert rank["topology_ranks"][case] == ""
