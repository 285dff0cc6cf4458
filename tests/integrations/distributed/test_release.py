"""Steps inside the backward on two ranks: the bits of a step after it, and few gradients at any time."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
import release_ranks
import torch

from halfstep.numerics.planning import plan, unit


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


def test_ddp_is_refused_before_anything_changes(ranks: list[dict[str, Any]]) -> None:
    advice = (
        "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: use fully_shard "
        "with a mesh of shape (ranks, 1), which replicates without keeping them"
    )
    for rank in ranks:
        assert rank["refused"] == [
            f"Expected model not to be wrapped, but module '' is a {advice}",
            f"Expected the model not to be wrapped by {advice}",
        ]
