"""One decision and one norm for all ranks, whatever shards the parameters: four processes, every topology of torch.

The processes are started once, train and break everything (tests/support/topology_ranks.py), and leave their answers.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import rank_processes
import topology_ranks
from topologies import SAMPLE, TOPOLOGIES, WORLD

Ranks = list[dict[str, Any]]
SINGLE = ("DDP", "ZeRO-1")  # every rank has every gradient: nothing to agree on
every_topology = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in SAMPLE)) for name in TOPOLOGIES]
)


@functools.cache
def run(sample: bool) -> Ranks:
    return rank_processes.run(topology_ranks.run, WORLD, sample)


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return run(True)


@every_topology
def test_a_fault_on_any_rank_is_skipped_by_all_and_leaves_every_bit(name: str) -> None:
    """Inf, -Inf and NaN on each of four ranks, before and after the reduction; see topology_walk.Walk.step."""
    for rank in run(name in SAMPLE):
        found = rank["walks"][name]
        assert found["complaints"] == []
        # Of the ranks that hold nothing, none can be broken after the reduction.
        assert found["faults"] == 4 or ("nothing" in name and 2 <= found["faults"] < 4)
        assert found["clean"][0] == found["clean"][1] >= 3
        assert found["as if never broken"], "the steps between faults differ from those of a run without faults"


@every_topology
def test_norm_and_clipped_step_are_those_of_one_process(name: str) -> None:
    ranks = run(name in SAMPLE)
    for rank in ranks:
        found = rank["norms"][name]
        assert found["expected"] > 10 * topology_ranks.MAX_NORM
        for way in topology_ranks.ways_of(name):
            # fp32 gradients, summed over ranks in another order. A copy counted twice would change the norm by 1%.
            assert found[way]["norm"] == pytest.approx(found["expected"], rel=2**-20), way
            assert found[way]["norm"] == ranks[0]["norms"][name][way]["norm"], "ranks have different bits"
            assert found[way]["off"] < 2**-22, way  # weights of about 1, moved by up to 1e-2


@pytest.mark.parametrize("whose", ["fused", "not fused"])
@pytest.mark.parametrize("case", topology_ranks.CASES)
def test_torchs_optimizers_skip_on_all_ranks_what_one_found(ranks: Ranks, case: str, whose: str) -> None:
    """And step where plain tensors stand beside DTensors, which torch's scaler refuses."""
    overflows = case != "DTensors beside plain tensors"
    for rank in ranks:
        expected = {"taken": [not overflows, True], "scale": 4.0 if overflows else 8.0}
        assert rank["skipped"][case, whose] == expected


# --------------------------------------------------------------------------------------------------------- corner cases


def special(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    return [rank["special"][name] for rank in ranks]


def test_optimizers_on_different_meshes_have_one_scale(ranks: Ranks) -> None:
    found = special(ranks, "two_optimizers_on_different_meshes")
    assert [one["scale"] for one in found] == [4.0] * WORLD
    assert [one["taken"][0] for one in found] == [[True, True]] * 2 + [[False, True]] * 2
    assert [one["taken"][1] for one in found] == [[True, True]] * WORLD


def test_a_pipeline_stage_without_gradients_takes_part(ranks: Ranks) -> None:
    for one in special(ranks, "stage_without_gradients"):
        assert one == {"skipped": [False, True], "scale": 4.0, "finite": False}


def test_ranks_without_gradients_do_not_keep_others_waiting_at_lr_zero(ranks: Ranks) -> None:
    found = special(ranks, "at_rest_without_gradients")
    assert {one["holds"] for one in found} == {True, False}
    # The first step, with gradients of 0, is not counted; the others are.
    assert all(one["steps"] == ([2] if one["holds"] else []) for one in found)


def test_partial_sums_are_formed_by_the_optimizer_too(ranks: Ranks) -> None:
    assert all(one["off"] < 2**-22 for one in special(ranks, "sequence_parallel_without_a_scaler"))


def test_what_is_known_of_an_optimizer_ends_with_it_and_with_its_parameters(ranks: Ranks) -> None:
    for one in special(ranks, "an_optimizer_that_outlives_another"):
        assert one == {"kept": 1, "skipped": True}


def test_flat_parameters_whose_ranks_are_unknown_are_refused_with_the_remedy(ranks: Ranks) -> None:
    for one in special(ranks, "flat_parameters_of_nobody"):
        assert "parameter 0 of the optimizer was flattened by FullyShardedDataParallel" in one["error"]
        assert "pass GradScaler(process_group=...)" in one["error"]
        assert one["skipped"], "the remedy works"


def test_tensor_parallelism_inside_flat_parameters_is_refused(ranks: Ranks) -> None:
    for one in special(ranks, "tensor_parallel_inside_flat_parameters"):
        assert "was flattened by FullyShardedDataParallel together with tensor parallelism" in one["error"]
        assert "use torch.distributed.fsdp.fully_shard" in one["error"]


@every_topology
def test_a_step_costs_one_reduction_of_two_numbers_and_no_memory(name: str) -> None:
    for rank in run(name in SAMPLE):
        found = rank["reductions"][name]
        assert found["reduced"] == ([] if name in SINGLE else [2])
        allowed = {"aten.copy_.default", "aten.add_.Tensor", "aten.zero_.default", "aten.gt.Scalar_out"}
        allowed.add("c10d.allreduce_.default")
        if "sequence" in name:  # the partial sums are formed in new tensors
            allowed |= {operation for operation in found["operations"] if operation.startswith("_c10d_functional.")}
        assert set(found["operations"]) <= allowed
