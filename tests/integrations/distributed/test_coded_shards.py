"""Moments in 8 bits under FSDP2: the bits of one process, and checkpoints of ours and of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coded_ranks
import pytest
import rank_processes
import torch

import halfstep
from halfstep.integrations import checkpoint

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Found:
    return rank_processes.run(coded_ranks.run, coded_ranks.WORLD, folder)


def one_process() -> tuple[torch.nn.Module, halfstep.AdamW]:
    model = coded_ranks.model_of()
    return model, halfstep.AdamW(model.parameters(), **coded_ranks.OPTIONS)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_every_rank_has_the_bits_of_one_process(ranks: Found) -> None:
    model, optimizer = one_process()
    coded_ranks.steps(model, optimizer, range(coded_ranks.BEFORE))
    state = optimizer.state[next(model.parameters())]
    assert state["exp_avg"].dtype == torch.uint8 and state["exp_avg_scale"].shape == (33, 10)
    for found in ranks:
        assert found["shapes"] == {key: tuple(value.shape) for key, value in state.items()}
        assert same(found["before"], coded_ranks.held(model, optimizer))
    coded_ranks.steps(model, optimizer, range(coded_ranks.BEFORE, coded_ranks.BEFORE + coded_ranks.AFTER))
    for found in ranks:
        assert same(found["after"], coded_ranks.held(model, optimizer))


@pytest.mark.parametrize("way", ["ours", "torch"])
def test_checkpoints_continue_with_the_same_bits(ranks: Found, way: str) -> None:
    for found in ranks:
        assert same(found["loaded"], found["before"])
        assert same(found[way], found["after"])


def test_a_checkpoint_of_two_ranks_continues_in_one_process(ranks: Found, folder: Path) -> None:
    model, optimizer = one_process()
    path = checkpoint.newest(folder / "ours")
    assert path is not None
    checkpoint.load(path, model=model, optimizer=optimizer)
    assert same(coded_ranks.held(model, optimizer), ranks[0]["before"])
    coded_ranks.steps(model, optimizer, range(coded_ranks.BEFORE, coded_ranks.BEFORE + coded_ranks.AFTER))
    assert same(coded_ranks.held(model, optimizer), ranks[0]["after"])


def test_flat_parameters_are_refused(ranks: Found) -> None:
    for found in ranks:
        assert "which FullyShardedDataParallel has flattened, but got '8bit'" in found["refused"]
