"""One decision and one norm for all ranks, whatever shards the parameters: four processes, every topology of torch.

The processes are started once, train and break everything (tests/support/topology_ranks.py), and leave their answers.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import rank_processes
import soak
import topology_ranks
from topologies import TOPOLOGIES, WORLD

Ranks = list[dict[str, Any]]
SINGLE = ("DDP", "ZeRO-1")  # every rank has every gradient: nothing to agree on


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return rank_processes.run(topology_ranks.run, WORLD)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_fault_on_any_rank_is_skipped_by_all_and_leaves_every_bit(ranks: Ranks, name: str) -> None:
    """Inf, -Inf and NaN on each of four ranks, before and after the reduction; see topology_walk.Walk.step."""
    for rank in ranks:
        found = rank["walks"][name]
        assert found["complaints"] == []
        # Of the ranks that hold nothing, none can be broken after the reduction.
        assert found["faults"] == 4 or ("nothing" in name and 2 <= found["faults"] < 4)
        assert found["clean"][0] == found["clean"][1] >= 3
        assert found["as if never broken"], "the steps between faults differ from those of a run without faults"


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in TOPOLOGIES for way in topology_ranks.ways_of(name)])
def test_norm_and_clipped_step_are_those_of_one_process(ranks: Ranks, name: str, way: str) -> None:
    for rank in ranks:
        found = rank["norms"][name]
        # fp32 gradients, summed over ranks in another order. A copy counted twice would change the norm by 1% at least.
        assert found[way]["norm"] == pytest.approx(found["expected"], rel=2**-20)
        assert found[way]["norm"] == ranks[0]["norms"][name][way]["norm"], "ranks have different bits"
        assert found["expected"] > 10 * topology_ranks.MAX_NORM
        assert found[way]["off"] < 2**-22  # weights of about 1, moved by up to 1e-2


# ----------------------------------------------------------------------------------------- faults of torch's scalers


def taken(ranks: Ranks, key: Any, whose: str = "ours") -> list[Any]:
    return [rank[whose][key]["taken"] for rank in ranks]


def must_fail(fails: bool, what: str) -> None:
    """torch's bug, after ours has been tested: required in the version it was found in."""
    installed = importlib.metadata.version("torch")
    if not fails and not installed.startswith("2.13"):
        pytest.skip(f"torch {installed} no longer has this bug ({what}): correct docs/distributed.md")
    assert fails, f"torch {installed} was found to have this bug and does not show it: {what}"


OPTIMIZERS = ("halfstep", "torch fused", "torch")


@pytest.mark.parametrize("whose", OPTIMIZERS)
@pytest.mark.parametrize("case", ["TP and FSDP2, norm first", "pipeline"])
def test_all_ranks_skip_what_one_found(ranks: Ranks, case: str, whose: str) -> None:
    assert taken(ranks, (case, whose)) == [[False, True]] * WORLD
    assert [rank["ours"][case, whose]["scale"] for rank in ranks] == [4.0] * WORLD


@pytest.mark.parametrize("whose", OPTIMIZERS)
def test_finite_gradients_are_stepped(ranks: Ranks, whose: str) -> None:
    case = "DTensors beside plain tensors"
    assert [rank["ours"][case, whose]["error"] for rank in ranks] == [""] * WORLD
    assert taken(ranks, (case, whose)) == [[True, True]] * WORLD


def test_torchs_ranks_diverge_where_the_first_parameter_lies_on_one_dimension(ranks: Ranks) -> None:
    steps = [own[0] for own in taken(ranks, "TP and FSDP2, norm first", "torch")]
    must_fail(steps == [True, False, True, False], "GradScaler reduces over the first gradient's mesh only")


def test_torchs_raises_for_plain_tensors_beside_dtensors(ranks: Ranks) -> None:
    errors = [rank["torch"]["DTensors beside plain tensors"]["error"] for rank in ranks]
    must_fail(all("mixed torch.Tensor and DTensor" in error for error in errors), "GradScaler refuses mixed gradients")


def test_torchs_pipeline_stages_diverge(ranks: Ranks) -> None:
    steps = [own[0] for own in taken(ranks, "pipeline", "torch")]
    must_fail(steps == [True, True, False, False], "GradScaler does not ask other pipeline stages")


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


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_step_costs_one_reduction_of_two_numbers_and_no_memory(ranks: Ranks, name: str) -> None:
    for one in special(ranks, "reductions_of_a_step"):
        found = one[name]
        assert found["reduced"] == ([] if name in SINGLE else [2])
        allowed = {"aten.copy_.default", "aten.add_.Tensor", "aten.zero_.default", "aten.gt.Scalar_out"}
        allowed.add("c10d.allreduce_.default")
        if "sequence" in name:  # the partial sums are formed in new tensors
            allowed |= {one for one in found["operations"] if one.startswith("_c10d_functional.")}
        assert set(found["operations"]) <= allowed


# --------------------------------------------------------------------------------------------------------- the campaign


def test_random_faults_and_no_disagreement(ranks: Ranks) -> None:
    rows = soak.merged([rank["campaign"] for rank in ranks])
    assert sum(row["faults"] for row in rows.values()) == topology_ranks.RANDOM
    assert [complaint for row in rows.values() for complaint in row["complaints"]] == []
