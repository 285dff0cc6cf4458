"""Planned bytes and messages of each of torch's strategies equal those of two and of four real processes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import planned_bytes
import planned_strategies
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.numerics.planning import plan, unit


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return planned_bytes.measured()


def test_uneven_shards_are_really_among_them(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 holds fewer states than rank 0 and as many weights: the padding."""
    first, second = (rank["strategies"]["fsdp, torch"]["held"] for rank in ranks[:2])
    assert second["exp_avg"] < first["exp_avg"] and second["weights"] == first["weights"]
    first, second = (rank["strategies"]["zero1-torch, torch"]["held"] for rank in ranks[:2])
    assert first["exp_avg"] != second["exp_avg"]


@pytest.mark.parametrize("name", planned_strategies.OPTIONS)
def test_every_strategy_holds_and_sends_what_is_planned(ranks: list[dict[str, Any]], name: str) -> None:
    """All collectives of a step, by operation; flag and norm, 16 bytes where ranks differ, are the scaler's."""
    found = [rank["strategies"][name] for rank in ranks if name in rank["strategies"]]
    assert len(found) == planned_strategies.made_for(name, 0).settings["gpus"]
    for rank, one in enumerate(found):
        made = planned_strategies.made_for(name, rank)
        assert one["held"] == planned_strategies.planned_memory(made)
        sent, scaler = planned_strategies.split(one["sent"])
        assert sent == planned_strategies.planned_messages(made)
        # Under DDP and ZeRO-1 every rank has the whole reduced gradient; among four 16 bytes take 2 · 3/4 · 16.
        whole = made.settings["strategy"] in ("ddp", "zero1-torch")
        reductions = 0 if whole else 1 if made.layout.ours else 2  # torch's: to unscale, to clip
        assert scaler == reductions * {2: 16, 4: 24}[len(found)]


@pytest.mark.parametrize("view", [False, True])
def test_ddps_buckets_are_a_second_gradient_or_none(ranks: list[dict[str, Any]], view: bool) -> None:
    made = plan(model=planned_strategies.MODEL, gpus=2, bucket_view=view)
    buckets = sum(part.bytes for part in made.parts if part.name == "buckets")
    for rank in ranks[: planned_bytes.WORLD]:
        found = rank["ddp view" if view else "ddp"]
        assert found["gradients and buckets"] == found["gradients"] + buckets
        (message,) = made.communication
        assert message.bytes == 2 * Fraction(1, 2) * found["reduced"]


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_rows_are_cut_as_torch_chunk_cuts_them(shapes: list[list[int]], ranks: int) -> None:
    pieces = [unit("all", shapes)]
    held = [
        plan(units=pieces, gpus=ranks, strategy="fsdp", precision="fp32", rank=rank).part("exp_avg").bytes // 4
        for rank in range(ranks)
    ]
    expected = [0] * ranks
    for shape in shapes:
        for rank, chunk in enumerate(torch.empty(shape, device="meta").chunk(ranks)):
            expected[rank] += chunk.numel()
    assert held == expected
    for strategy in ("zero1", "zero1-torch", "zero2", "zero3", "fsdp1"):
        states = [
            plan(units=pieces, gpus=ranks, strategy=strategy, precision="fp32", rank=rank).part("exp_avg").bytes // 4
            for rank in range(ranks)
        ]
        whole = sum(held)
        assert sum(states) == whole if strategy == "zero1-torch" else sum(states) >= whole
