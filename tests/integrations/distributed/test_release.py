"""Steps inside the backward, and on the host, on two ranks: the bits of a step after it, and few gradients."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
import release_ranks
import torch

from halfstep.numerics.planning import plan, unit

pytestmark = pytest.mark.sample(3)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return rank_processes.run(release_ranks.run, release_ranks.WORLD)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys() and one
    return all(value.dtype == other[name].dtype and value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", [*release_ranks.MODELS, "accumulated"])
def test_the_bits_are_those_of_steps_after_the_backward(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        expected, *found = rank[name].values()
        assert found and all(_same(one["state"], expected["state"]) for one in found)
        assert _same(expected["state"], ranks[0][name][None]["state"])


@pytest.mark.parametrize("name", ["clipped FSDP2", "clipped tensor parallelism", "scaled"])
def test_exact_clipping_and_scaling_have_the_bits_of_steps_after_the_backward(
    ranks: list[dict[str, Any]], name: str
) -> None:
    """The last rank alone overflows in the second step, which all ranks skip."""
    for rank in ranks:
        expected = rank[name][None]
        assert expected["skipped"] == (1 if name == "scaled" else None)
        assert (expected["norms"][1] == "tensor(nan)") == (name == "scaled") and len(set(expected["norms"])) == 3
        assert len(rank[name]) > 1
        for how, found in rank[name].items():
            assert _same(found["state"], expected["state"]) and found["norms"] == expected["norms"], how
            assert found["skipped"] == expected["skipped"]
        assert _same(expected["state"], ranks[0][name][None]["state"])


def test_previous_norms_are_those_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["previous"] for rank in ranks)
    exact = ranks[0]["clipped FSDP2"][None]
    assert first["norms"] == second["norms"] and _same(first["state"], second["state"])
    assert first["norms"][0] == exact["norms"][0] and not _same(first["state"], exact["state"])


def test_a_check_refuses_gradients_that_were_not_reduced(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["accumulated before a check"] == (
            "Expected no gradient before check(), which frees the gradients, but got some of an earlier backward: call "
            "zero_grad(), or to accumulate, remove() and step after the backward"
        )


@pytest.mark.parametrize("name", release_ranks.MODELS)
def test_the_gradients_of_one_bucket_exist_and_those_that_share_its_memory(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        after = rank[name][None]
        for size in (1, 150):
            inside = rank[name][size]
            assert len(inside["buckets"]) > 3 and sum(inside["buckets"]) <= after["peak"]
            assert inside["peak"] <= size + 2 * inside["largest"] <= after["peak"] / 2
            if name == "FSDP2":
                blocks = [unit("block", [p.shape for p in block.parameters()]) for block in release_ranks.model_of()]
                planned = plan(units=blocks, gpus=2, strategy="fsdp", step_in_backward=size)
                assert planned.part("gradients").bytes == size + 2 * inside["largest"]


@pytest.mark.parametrize("name", release_ranks.REPLICAS)
def test_replicas_have_the_bits_of_ddp(ranks: list[dict[str, Any]], name: str) -> None:
    """Each rank skips one layer in its own steps, so that in one step nobody uses it."""
    for rank in ranks:
        expected, *found = rank[name].values()
        assert expected["peak"] == sum(found[0]["buckets"])
        for inside in found:
            assert _same(inside["state"], expected["state"]) and inside["logged"] == expected["logged"]
            assert inside["left"] == 0
        # In a bucket that is reduced, gradients begin at multiples of 16 bytes, and a mark of 2 bytes follows for each.
        for inside, members, number in zip(found, (17, 1), (4, 32), strict=False):
            assert len(inside["buckets"]) == number
            most = 2 * (max(inside["buckets"]) + (14 + 2) * members)
            assert inside["peak"] <= most or name == "replicas, accumulated"
        if name == "replicas":
            shapes = [p.shape for p in release_ranks.model_of().parameters()]
            for inside, size in zip(found, (400, 1), strict=True):
                planned = plan(units=[unit("all", shapes)], gpus=2, step_in_backward=size).part("gradients").bytes
                assert inside["peak"] <= planned - 16 * (32 - 32 // len(inside["buckets"]))
            assert found[1]["peak"] < expected["peak"] / 6
        assert _same(expected["state"], ranks[0][name][None]["state"])


def test_what_replicas_refuse(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["refused replicas"] == [
            "Expected the same parameters and buffers on all ranks of process_group, but rank 1 has "
            "('0.0.weight', (7, 6), 'torch.bfloat16', False) where rank 0 has ('0.0.weight', (7, 6), 'torch.bfloat16', "
            "True): make the same model on all ranks",
            "Expected parameter 0 of the optimizer to be a replica with process_group=, but it is sharded: FSDP2 and "
            "HSDP average their gradients themselves, so leave process_group out",
            "Expected no gradient at the step with process_group=, but got some that no backward has averaged over its "
            "ranks: call zero_grad(); run the last backward outside of accumulate(); call step_in_backward again after "
            "requires_grad_()",
        ]
    outside = "Expected process_group to be None or a group that contains this rank, but got "
    assert ranks[0]["outside"] == "" and ranks[1]["outside"].startswith(outside)


def test_an_offloaded_optimizer_under_ddp(ranks: list[dict[str, Any]]) -> None:
    """Its gradients are copied at the step, when they are reduced."""
    for rank in ranks:
        assert _same(rank["offloaded"]["host"], rank["offloaded"]["device"])
        assert rank["offloaded"]["refused"] == [
            "Expected the model not to be wrapped by DistributedDataParallel, whose gradients are reduced after they "
            "are complete: use in_backward=None, which copies them in step()",
            "Expected a parameter that is not sharded, but got one of shape (7, 6) under FSDP: use fully_shard(..., "
            "offload_policy=CPUOffloadPolicy()) with halfstep.AdamW, which steps on the host too",
        ]


def test_ddp_is_refused_before_anything_changes(ranks: list[dict[str, Any]]) -> None:
    advice = (
        "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: pass the model in "
        "it and process_group=, which averages each bucket before its step"
    )
    for rank in ranks:
        assert rank["refused"] == [
            f"Expected model not to be wrapped, but module '' is a {advice}",
            f"Expected the model not to be wrapped by {advice}",
        ]
