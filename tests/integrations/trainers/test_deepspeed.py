"""DeepSpeed with `halfstep.AdamW`, as docs/trainers/others.md says: two ranks with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
from trainer_tools import STEPS, imported, skip_without

pytestmark = skip_without("deepspeed")
deepspeed_ranks = imported("deepspeed_ranks")

RUNS = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "with copies")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank, by run."""
    results: list[dict[str, Any]] = rank_processes.run(
        deepspeed_ranks.run, 2, str(tmp_path_factory.mktemp("deepspeed"))
    )
    return results


@pytest.mark.parametrize("run", RUNS)
def test_it_trains_and_resumes(found: list[dict[str, Any]], run: str) -> None:
    for rank in found:
        before, after = rank[run]["fit"]
        assert after < 0.7 * before and len(rank[run]["losses"]) == STEPS
        assert rank[run]["optimizer"] and rank[run]["resumed"]


def test_two_entries_of_the_configuration_make_masters_split(found: list[dict[str, Any]]) -> None:
    """Otherwise the optimizer gets copies in fp32, which have no masters."""
    for rank in found:
        assert [rank[f"ZeRO-{stage}"]["masters"] for stage in (1, 2, 3)] == [["torch.int16"]] * 3
        assert rank["ZeRO-1"]["weights"] == ["torch.bfloat16"] and rank["with copies"]["weights"] == ["torch.float32"]
        assert rank["with copies"]["masters"] == []
        assert rank["ZeRO-1"]["elements"] == rank["with copies"]["elements"] == (8 * 16 + 16 + 16 * 4 + 4) // 2
