"""Processes that save into the same folder touch neither each other's unfinished files nor those of other programs."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import forks
import pytest

from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import atomic

HOLD = """
import sys, time
from pathlib import Path
from typing import Any
from halfstep.integrations.checkpoint import atomic
with atomic.unfinished_save(Path(sys.argv[1])) as path:
    (path / "model.safetensors").write_text("part")
    print(path, flush=True)
    time.sleep(600)
"""
SAVE = """
import sys, torch
from halfstep.integrations import checkpoint
for step in range(int(sys.argv[2]), 1000, 2):
    checkpoint.save(sys.argv[1], step, {"step": step, "x": torch.full((100_000,), float(step))}, keep=5)
    print(step, flush=True)
"""


def test_files_being_written_stay_until_their_process_is_dead(tmp_path: Path) -> None:
    other = forks.Program(["-c", HOLD, tmp_path])
    unfinished = other.stdout.readline().strip()
    checkpoint.save(tmp_path, 1, {"x": 1})
    assert os.listdir(unfinished) == ["model.safetensors"]
    other.send_signal(signal.SIGKILL)
    other.wait()
    checkpoint.save(tmp_path, 2, {"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_two_processes_save_into_one_folder_at_the_same_time(tmp_path: Path) -> None:
    both = [forks.Program(["-c", SAVE, tmp_path, first]) for first in (0, 1)]
    end = time.monotonic() + 100
    while time.monotonic() < end and max((step for step, _ in checkpoint.checkpoints(tmp_path)), default=0) < 30:
        assert all(one.poll() is None for one in both), [one.stdout.read() for one in both]
        time.sleep(0.05)
    for one in both:
        one.send_signal(signal.SIGKILL)
        one.wait()
    for step, path in checkpoint.checkpoints(tmp_path):
        assert checkpoint.load(path)["step"] == step
    checkpoint.save(tmp_path, 10_000, {}, keep=1)
    assert os.listdir(tmp_path) == ["step-00010000"]


def test_two_simultaneous_saves_of_the_same_step_both_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attacks.model_of()
    replace = os.replace
    inside = []

    def renamed(old: Path, new: Path) -> None:
        if Path(new).name == "step-00000007" and not inside:
            inside.append(True)
            checkpoint.save(tmp_path, 7, {"by": "other"}, model=model)
        replace(old, new)

    monkeypatch.setattr(os, "replace", renamed)
    path = checkpoint.save(tmp_path, 7, {"by": "first"}, model=model)
    assert checkpoint.load(path, model=model) == {"by": "first"}
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_without_locks_nothing_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".halfstep-0123456789abcdef"
    left.mkdir()
    (left / "model.safetensors").write_text("part")

    def without(file: Any, flags: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(atomic.fcntl, "flock", without)
    checkpoint.save(tmp_path, 1, {"x": 1})
    assert left.exists()
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, {"x": 1})
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
