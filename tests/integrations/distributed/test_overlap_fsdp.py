"""The check in the backward under FSDP2, in two processes: the same bits, and no pass over gradients at `step`."""

from __future__ import annotations

from typing import Any

import overlap_shards
import pytest
import rank_processes
from keeping import skip_where_gradients_cannot_be_kept
from overlap_ranks import assert_same_training
from overlap_shards import SETTINGS

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    skip_where_gradients_cannot_be_kept()
    return rank_processes.run(overlap_shards.run, overlap_shards.WORLD)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_has_the_bits_of_the_check_at_step(ranks: Found, name: str) -> None:
    for rank in ranks:
        without, with_it = rank[name][False], rank[name][True]
        assert_same_training(without, with_it)
        assert any(without["skipped"])
        assert not all(without["skipped"]) or name == "one shard made NaN"


@pytest.mark.parametrize("name", SETTINGS)
def test_no_pass_is_left_after_the_backward(ranks: Found, name: str) -> None:
    """Where one is expected, gradients were changed, or are not reduced by FSDP2 on this device."""
    setting = SETTINGS[name]
    expected, optimizers = setting.get("expected", 0), setting.get("optimizers", 1)
    for number, rank in enumerate(ranks):
        # A plain tensor beside the shards is a kind of its own.
        assert set(rank[name][False]["passes"]) == {optimizers + (name == "a parameter ignored")}
        if name == "one shard made NaN" and number == 1:
            expected = 0  # its own shards are as they were
        assert set(rank[name][True]["passes"]) == {expected}


def test_errors_name_the_remedy(ranks: Found) -> None:
    errors = ranks[0]["errors"]
    assert errors["not sharded"].startswith(
        "ValueError: model has no module sharded by FSDP2; allowed are models after"
    )
    assert "halfstep.integrations.ddp.overlap_overflow_check" in errors["not sharded"]
    assert errors["twice"].startswith("RuntimeError: scaler was told of this model, or of a part of it, by overlap_")
    assert errors["FSDP1"].startswith("ValueError: model is sharded by FullyShardedDataParallel (FSDP1)")
    assert "allowed is torch.distributed.fsdp.fully_shard; without this call FSDP1's gradients" in errors["FSDP1"]
    assert errors["their scaler"].startswith("TypeError: scaler is a torch.amp.grad_scaler.GradScaler; allowed is half")


def test_a_model_that_is_gone_takes_its_check_with_it(ranks: Found) -> None:
    for rank in ranks:
        assert rank["memory"] == {"with the model": True, "without it": False}
