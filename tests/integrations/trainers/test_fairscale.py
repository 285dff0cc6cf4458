"""fairscale's OSS with `halfstep.AdamW`, as docs/trainers/others.md says: two ranks with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
from trainer_tools import BROKEN, SCALE, STEPS, imported, same_bits, skip_without

pytestmark = skip_without("fairscale")
fairscale_ranks = imported("fairscale_ranks")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of each rank, by run."""
    results: list[dict[str, Any]] = rank_processes.run(
        fairscale_ranks.run, 2, str(tmp_path_factory.mktemp("fairscale"))
    )
    return results


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_it_trains_and_resumes(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        before, after = rank[kind]["fit"]
        assert after < 0.7 * before and rank[kind]["optimizer"] and rank[kind]["resumed"]
        assert same_bits(rank[kind]["weights"], found[0][kind]["weights"])
    assert sum(rank[kind]["parameters"] for rank in found) == 4


def test_masters_are_split(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["bf16"]["masters"] == ["torch.int16"]


def test_both_ranks_skip_an_overflow(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["fp16"]["held"] == [step == BROKEN for step in range(STEPS)]
        assert rank["fp16"]["scale"] == SCALE / 2


def test_its_fsdp_refuses_weights_in_bf16(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["FSDP"] == "Expecting FP16 param type in FP32 & MP modes."
