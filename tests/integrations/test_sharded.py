"""AdamW and GradScaler on FSDP2's DTensors, in two real processes."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes
import sharded_training
import torch
import torch.multiprocessing

import halfstep


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_processes.run(sharded_training.run, 2)


def test_an_overflow_in_one_ranks_shard_is_skipped_by_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["overflow"] == {"scales": [8.0, 4.0, 4.0], "changed": [True, False, True]}


def test_the_norm_is_that_of_the_whole_gradient_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    model = sharded_training.model_of(torch.float32)
    sharded_training.backward(model, halfstep.GradScaler("cpu", enabled=False), 0, torch.float32)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for rank in ranks:
        # Summation order of the gradients' mean over two ranks, and of the squares.
        assert rank["norm"] == pytest.approx(expected, rel=2**-20)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(ranks: list[dict[str, Any]]) -> None:
    before, after = ranks[0]["resumed"]["uninterrupted"], ranks[0]["resumed"]["resumed"]
    assert set(before) == set(after) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name in before:
        assert set(before[name]) == {"step", "exp_avg", "exp_avg_sq", "master"}
        for key, value in before[name].items():
            assert value.dtype == torch.float32
            assert torch.equal(value, after[name][key]), (name, key)


def test_stochastic_rounding_has_the_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    whole = sharded_training.stochastic_steps(shard=False)
    for rank in ranks:
        assert rank["stochastic"].keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(rank["stochastic"][name].view(torch.int16), value.view(torch.int16)), name
