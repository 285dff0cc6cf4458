"""Forked ranks are as spawned ones: with this process's environment, in a group, and their errors are told."""

from __future__ import annotations

import os

import pytest
import rank_processes
import rank_samples
from torch.multiprocessing import ProcessRaisedException


def test_ranks_are_a_group_of_processes_with_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = {os.getpid()}
    for value in ("first", "second"):
        monkeypatch.setenv("HALFSTEP_SAMPLE", value)
        for rank, found in enumerate(rank_processes.run(rank_samples.seen, 2, "HALFSTEP_SAMPLE")):
            assert found["HALFSTEP_SAMPLE"] == found["imported"] == value
            assert (found["RANK"], found["WORLD_SIZE"], found["sum"].item()) == (str(rank), "2", 1.0)
            processes.add(found["process"])
    assert len(processes) == 5 and "RANK" not in os.environ


def test_fresh_ranks_have_the_same_and_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("HALFSTEP_SAMPLE", "fresh")
    one, other = rank_processes.run(rank_samples.seen, 2, "HALFSTEP_SAMPLE", fresh=True)
    assert one["HALFSTEP_SAMPLE"] == other["imported"] == "fresh" and one["sum"].item() == 1.0
    assert one["order"] != other["order"]


def test_without_a_group_nobody_waits() -> None:
    assert [found["sum"].item() for found in rank_processes.run(rank_samples.seen, 2, "x", join=False)] == [0.0, 1.0]


def test_the_traceback_of_a_rank_that_fails_is_told_and_the_others_end() -> None:
    with pytest.raises(ProcessRaisedException, match=r"Process 1 terminated(?s:.)*in failing(?s:.)*rank 1 is broken"):
        rank_processes.run(rank_samples.failing, 2, 1)
