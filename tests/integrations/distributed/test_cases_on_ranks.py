"""Cases run on real ranks: topologies, shards, steps in the backward and on the host, hooks, pairings, torch's cases.

The tables of the modules in tests/support are run one after the other in two or four processes, and each of their
functions is a case here. What a case asserts follows its last message, so that no other rank is left waiting.
"""

import functools
import importlib
from typing import Any

import pytest
import rank_processes

TWO = [
    "shard_ranks",
    "early_check_ranks",
    "release_ranks",
    "ddp_hook_ranks",
    "pairing_ranks",
    "offload_ranks",
    "rule_ranks",
    "vocabulary_ranks",
]
FOUR = ["early_check_ranks", "sharded_noise", "offload_ranks", "rule_ranks", "topology_ranks", "vocabulary_ranks"]
try:
    import state_dict_ranks
except ImportError:  # another torch
    pass
else:
    TWO.append("state_dict_ranks")


@functools.cache
def ranks(count: int, table: str) -> list[dict[str, dict[str, str]]]:
    return rank_processes.run(rank_processes.run_cases, count, TWO if count == 2 else FOUR, table)


def cases_of(modules: list[str], table: str) -> list[tuple[str, str]]:
    return [(module, case) for module in modules for case in getattr(importlib.import_module(module), table, {})]


@pytest.mark.parametrize(("module", "case"), cases_of(TWO, "CASES"))
def test_on_two_ranks(module: str, case: str) -> None:
    for rank in ranks(2, "CASES"):
        assert rank[module][case] == ""


@pytest.mark.parametrize(("module", "case"), cases_of(FOUR, "ON_FOUR_RANKS"))
def test_on_four_ranks(module: str, case: str) -> None:
    for rank in ranks(4, "ON_FOUR_RANKS"):
        assert rank[module][case] == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("module", "case"), cases_of(FOUR, "EVERY_CASE_ON_FOUR_RANKS"))
def test_every_case_on_four_ranks(module: str, case: str) -> None:
    for rank in ranks(4, "EVERY_CASE_ON_FOUR_RANKS"):
        assert rank[module][case] == ""


@pytest.mark.exhaustive
@pytest.mark.skipif("state_dict_ranks" not in TWO, reason="another torch")
def test_every_case_of_torch_on_two_ranks() -> None:
    for rank in rank_processes.run(rank_processes.run_cases, 2, ["state_dict_ranks"], "EVERY_CASE"):
        assert {case: text for case, text in rank["state_dict_ranks"].items() if text} == {}


@pytest.mark.skipif("state_dict_ranks" not in TWO, reason="another torch")
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_cases_of_torch_without_a_group(name: str, layout: str) -> None:
    classes: dict[str, Any] = {cls.__name__: cls for cls in state_dict_ranks.CLASSES}
    state_dict_ranks.without_a_group(classes[name], layout)
