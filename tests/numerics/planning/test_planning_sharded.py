"""Planned bytes and messages of each of torch's strategies equal those of two and of four real processes."""

from collections import Counter
from fractions import Fraction
from typing import Any

import planned_bytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planned_bytes import BATCH, CODED, SHAPE

from halfstep.numerics.planning import plan, unit

_FP32 = {"precision": "fp32"}
# The arguments of `plan` beside the model; on two GPUs unless they say otherwise.
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, fp32": {"strategy": "ddp", **_FP32},
    "zero1-torch": {"strategy": "zero1-torch"},
    "zero1-torch, 8bit": {"strategy": "zero1-torch", "moments": "8bit", "model": CODED},
    "zero1-torch, torch": {"strategy": "zero1-torch", "optimizer": "torch-fused", **_FP32},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, fp16": {"strategy": "fsdp", "precision": "fp16"},
    "fsdp, 8bit": {"strategy": "fsdp", "moments": "8bit", "model": CODED},
    "fsdp, torch": {"strategy": "fsdp", "optimizer": "torch-fused", **_FP32},
    "fsdp, fp32 gathered as bf16": {"strategy": "fsdp", "precision": "amp-bf16"},
    "fsdp1": {"strategy": "fsdp1"},
    "hsdp": {"strategy": "hsdp", "gpus": 4, "shard": 2},
    "fsdp, muon": {"strategy": "fsdp", "optimizer": "halfstep-muon"},
    "fsdp, muon, 8bit": {"strategy": "fsdp", "optimizer": "halfstep-muon", "moments": "8bit", "model": CODED},
    "hsdp, muon": {"strategy": "hsdp", "gpus": 4, "shard": 2, "optimizer": "halfstep-muon"},
    "fsdp, muon on 4": {"strategy": "fsdp", "gpus": 4, "optimizer": "halfstep-muon"},
    "zero1-torch on 4": {"strategy": "zero1-torch", "gpus": 4},
    "fsdp on 4": {"strategy": "fsdp", "gpus": 4},
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return planned_bytes.measured()


def test_uneven_shards_are_really_among_them(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 holds fewer states than rank 0 and as many weights: the padding."""
    first, second = (rank["strategies"]["fsdp, torch"]["held"] for rank in ranks[:2])
    assert second["exp_avg"] < first["exp_avg"] and second["weights"] == first["weights"]
    first, second = (rank["strategies"]["zero1-torch, torch"]["held"] for rank in ranks[:2])
    assert first["exp_avg"] != second["exp_avg"]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_strategy_holds_and_sends_what_is_planned(ranks: list[dict[str, Any]], name: str) -> None:
    """All collectives of a step, by operation; flag and norm, 16 bytes where ranks differ, are the scaler's."""
    found = [rank["strategies"][name] for rank in ranks if name in rank["strategies"]]
    options = {"gpus": 2, "model": SHAPE, **OPTIONS[name]}
    assert len(found) == options["gpus"]
    ways = options.get("shard", options["gpus"]) if options["strategy"] != "ddp" else 1
    for rank, one in enumerate(found):
        made = plan(batch=BATCH, rank=rank % ways, **options)
        # Another test counts DDP's buckets.
        planned = {part.name: part.bytes for part in made.parts if part.phase == "always" and part.name != "buckets"}
        assert one["held"] == planned
        sent = dict(one["sent"])
        scaler = sent.pop("scaler", 0)
        messages: Counter[str] = Counter()
        for each in made.communication:
            messages[each.name] += each.bytes
        assert sent == messages
        # Under DDP and ZeRO-1 every rank has the whole reduced gradient; among four 16 bytes take 2 · 3/4 · 16.
        whole = made.settings["strategy"] in ("ddp", "zero1-torch")
        reductions = 0 if whole else 1 if made.layout.ours else 2  # torch's: to unscale, to clip
        assert scaler == reductions * {2: 16, 4: 24}[len(found)]


@pytest.mark.parametrize("view", [False, True])
def test_ddps_buckets_are_a_second_gradient_or_none(ranks: list[dict[str, Any]], view: bool) -> None:
    made = plan(model=SHAPE, gpus=2, bucket_view=view)
    buckets = sum(part.bytes for part in made.parts if part.name == "buckets")
    for rank in ranks[: planned_bytes.WORLD]:
        found = rank["ddp view" if view else "ddp"]
        assert found["gradients and buckets"] == found["gradients"] + buckets
        (message,) = made.communication
        assert message.bytes == 2 * Fraction(1, 2) * found["reduced"]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 9))
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
