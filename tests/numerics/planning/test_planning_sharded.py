"""Planned bytes and messages of every strategy that torch has against real processes, two and four, to the byte."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import planned_bytes
import planned_strategies
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.numerics.planning import Plan, Unit, plan, unit


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return planned_bytes.measured()


def units_of(model: planned_bytes.Model) -> list[Unit]:
    """A unit for each block, and the head as the root."""
    blocks = [unit(f"block{i}", [p.shape for p in block.parameters()]) for i, block in enumerate(model.blocks)]
    return [*blocks, unit("head", [p.shape for p in model.head.parameters()], root=True)]


def planned(made: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in made.parts if part.phase == "always" and part.name != "buckets"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("fsdp split", {"strategy": "fsdp"}),
        ("fsdp full", {"strategy": "fsdp", "precision": "fp16"}),
        ("fsdp 8bit", {"strategy": "fsdp", "moments": "8bit"}),
        ("fsdp torch", {"strategy": "fsdp", "precision": "fp32", "optimizer": "torch-fused"}),
        ("fsdp1", {"strategy": "fsdp1", "precision": "fp32", "optimizer": "torch-fused"}),
        ("zero1 split", {"strategy": "zero1-torch"}),
        ("zero1 8bit", {"strategy": "zero1-torch", "moments": "8bit"}),
        ("zero1 torch", {"strategy": "zero1-torch", "precision": "fp32", "optimizer": "torch-fused"}),
        ("ddp", {"strategy": "ddp", "rank": None}),
    ],
)
def test_each_rank_holds_what_is_planned(
    ranks: list[dict[str, Any]], rank: int, case: str, options: dict[str, Any]
) -> None:
    model = planned_bytes.Model(planned_bytes.CODED_BLOCKS if "8bit" in case else planned_bytes.BLOCKS)
    found = dict(ranks[rank][case])
    for name in ("gradients and buckets", "reduced"):
        found.pop(name, None)
    assert found == planned(plan(units=units_of(model), gpus=2, **{"rank": rank, **options}))


def test_uneven_shards_were_really_among_them(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 holds fewer states than rank 0 and as many weights: the padding."""
    for case in ("fsdp split", "fsdp torch"):
        first, second = ranks[0][case], ranks[1][case]
        assert second["exp_avg"] < first["exp_avg"] and second["weights"] == first["weights"]
    assert ranks[0]["zero1 torch"]["exp_avg"] != ranks[1]["zero1 torch"]["exp_avg"]


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
        everywhere = {2: 16, 4: 24}[len(found)]
        assert scaler == (0 if made.strategy.name in ("ddp", "zero1-torch") else everywhere)


def test_a_message_counts_as_rings_send_it() -> None:
    sent = [
        ("all-reduce", "bfloat16", 8, 16, 4),
        ("broadcast", "bfloat16", 2, 4, 4),
        ("all-gather", "float32", 2, 8, 2),
    ]
    norm = ("all-reduce", "float64", 2, 16, 2)
    assert planned_strategies.split([*sent, norm]) == ({"all-reduce": 24, "broadcast": 3, "all-gather": 4}, 16)


@pytest.mark.parametrize("view", [False, True])
def test_ddps_buckets_are_a_second_gradient_or_none(ranks: list[dict[str, Any]], view: bool) -> None:
    made = plan(units=units_of(planned_bytes.Model()), gpus=2, bucket_view=view)
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
