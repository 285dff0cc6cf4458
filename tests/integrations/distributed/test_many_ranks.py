"""1,024 ranks, simulated: memory as planned, empty shards, and one decision wherever the fault is.

torch's fake process group sends nothing. Each rank makes its state and its two numbers as on a cluster. Support code
adds the numbers of all ranks, as the one reduction would, and gives each rank the sum.
"""

from __future__ import annotations

import math
from typing import Any

import many_ranks
import pytest
import rank_processes
from many_ranks import LAYOUTS, SCALE, SHAPE, WORLD

from halfstep.numerics.planning import Transformer, plan

FAULTS = (math.inf, math.nan)
TRAINED = [0, 700, 751, WORLD - 1]
# With FSDP, rank 751 is the last with rows of the embedding; with FSDP and tensor parallelism, ranks 744 to 751 are.
SPREAD = sorted({0, 1, 7, 8, 127, 128, 700, 744, 751, 752, 1016, WORLD - 1} | set(range(0, WORLD, 37)))
DECIDING = sorted({0, 1, 8, 128, 751, 752, WORLD - 1} | set(SPREAD[::8]))
ALL = list(range(WORLD))
QUICK = "fsdp and tp"  # the others in `make exhaustive`


@pytest.fixture(scope="module")
def found() -> Any:
    return rank_processes.alone(many_ranks.run, {QUICK: TRAINED}, {QUICK: [SPREAD, DECIDING]}, FAULTS)


def test_where_shards_are_empty() -> None:
    """272 of the 1,024 ranks with FSDP, with and without tensor parallelism, and none with shards on eight ranks."""
    empty = {layout: many_ranks.owned(layout)[1].eq(0) for layout in LAYOUTS}
    counts = {layout: int(which.sum()) for layout, which in empty.items()}
    assert counts == {"fsdp": 272, "hsdp": 0, "fsdp and tp": 272, "hsdp and tp": 0}
    assert len(SPREAD) >= 36 and empty[QUICK][SPREAD].sum() >= 8


def check_training(layout: str, ranks: list[dict[str, Any]]) -> None:
    ways, t = LAYOUTS[layout]["shard"], LAYOUTS[layout].get("tensor", 1)
    hybrid = "replicate" in LAYOUTS[layout]
    elements = many_ranks.owned(layout)[1]
    for rank, one in zip(TRAINED, ranks, strict=True):
        made = plan(
            model=Transformer(**SHAPE),
            gpus=WORLD,
            strategy="hsdp" if hybrid else "fsdp",
            shard=ways if hybrid else None,
            tensor_parallel=t,
            rank=rank // t % ways,
        )
        planned = {part.name: part.bytes for part in made.parts if part.phase == "always" and part.bytes}
        assert one["bytes"] == planned, rank
        assert sum(one["shards"]) == elements[rank]
        assert one["others"] == []  # the shards of the other tests are placed like these
        assert set(one["steps"]) == {1}
        for size, state in zip(one["shards"], one["states"], strict=True):
            assert state == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), size)
    assert 0 in ranks[-1]["shards"]
    assert any(ranks[-1]["shards"]) == hybrid


def check_decisions(layout: str, ranks: list[int], deciding: list[int], made: dict[str, Any]) -> None:
    squares, elements = many_ranks.owned(layout)
    # fp32 sums of squares, in chunks, of bf16 numbers, whose squares are exact.
    assert made["added"][:, 0, 0].eq(0).all()
    assert made["added"][:, 0, 1].tolist() == pytest.approx(squares[ranks].tolist(), rel=2**-20, abs=0)
    clean, *faulty = made["given"][made["sums"]].tolist()
    assert clean == [0, pytest.approx(many_ranks.norm_of_whole() ** 2, rel=2**-20)]
    # A rank that holds nothing has no fault. One that holds only copies adds its flag, and no squares.
    has = [elements[rank].item() > 0 for rank in ranks for _ in FAULTS]
    assert [flag for flag, _ in faulty] == has
    assert all(numbers == clean for numbers, any_there in zip(faulty, has, strict=True) if not any_there)

    for rank, steps in zip(deciding, made["steps"], strict=True):
        for (flag, total), one in zip(made["given"].tolist(), steps, strict=True):
            assert one == {
                "scale": SCALE / 2 if flag else SCALE,
                "steps": [0 if flag else 1],
                "changed": not flag and elements[rank].item() > 0,
                "norm": pytest.approx(math.sqrt(total), rel=2**-23, nan_ok=True),
                "calls": 1,
            }, rank


def test_ranks_hold_what_is_planned_and_empty_shards_step(found: Any) -> None:
    """Bytes of weights, gradients, moments and remainders after a step of training: first, mid and last ranks."""
    check_training(QUICK, found["trained"][QUICK])


def test_a_fault_on_any_of_some_ranks_is_one_decision(found: Any) -> None:
    check_decisions(QUICK, SPREAD, DECIDING, found["decided"][QUICK])


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_a_fault_on_any_rank(layout: str) -> None:
    made = rank_processes.alone(many_ranks.run, {layout: TRAINED}, {layout: [ALL, ALL]}, FAULTS)
    check_training(layout, made["trained"][layout])
    check_decisions(layout, ALL, ALL, made["decided"][layout])
