"""Cases that two real ranks run: shards, steps in the backward, communication hooks, and torch's cases.

The modules in tests/support are run one after the other in two processes, and each of their functions is a case here.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import rank_processes

MODULES = ["shard_ranks", "release_ranks", "ddp_hook_ranks"]
try:
    import state_dict_ranks
except ImportError:  # another torch
    pass
else:
    MODULES.append("state_dict_ranks")


@functools.cache
def ranks() -> list[dict[str, dict[str, str]]]:
    return rank_processes.run(rank_processes.run_cases, 2, MODULES)


@pytest.mark.parametrize(
    ("module", "case"),
    [(module, case) for module in MODULES for case in importlib.import_module(module).CASES],
)
def test_on_two_ranks(module: str, case: str) -> None:
    for rank in ranks():
        assert rank[module][case] == ""


@pytest.mark.exhaustive
@pytest.mark.skipif("state_dict_ranks" not in MODULES, reason="another torch")
def test_every_case_of_torch_on_two_ranks() -> None:
    for rank in rank_processes.run(rank_processes.run_cases, 2, ["state_dict_ranks"], True):
        assert {case: text for case, text in rank["state_dict_ranks"].items() if text} == {}


@pytest.mark.skipif("state_dict_ranks" not in MODULES, reason="another torch")
@pytest.mark.parametrize("layout", ["fp32", "split"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_cases_of_torch_without_a_group(name: str, layout: str) -> None:
    classes: dict[str, Any] = {cls.__name__: cls for cls in state_dict_ranks.CLASSES}
    state_dict_ranks.without_a_group(classes[name], layout)
