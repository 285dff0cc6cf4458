"""Runs of examples/train_gpt.py, in this process or in several, and differences between two runs."""

import io
import json
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import states
import torch.distributed as dist
import train_gpt

from halfstep.integrations import checkpoint

GROUPS: list[Any] = []  # process groups are not freed, which can block


def options(**settings: Any) -> Any:
    """The options of a run of a nano model, with `settings` in place of the defaults."""
    parsed = train_gpt.parse(["--size", "nano", "--batch", "4"])
    vars(parsed).update(settings)
    return parsed


def train(*words: object) -> int:
    """Run train_gpt.py with these arguments in this process. Returns the exit status."""
    try:
        return train_gpt.main([str(word) for word in words])
    except SystemExit as ended:
        return int(ended.code or 0)


def newest(out: Path, name: str) -> tuple[int, dict[str, Any]]:
    """The step and the content of the last checkpoint of a run."""
    step, path = checkpoint.checkpoints(out / "checkpoints" / name)[-1]
    return step, checkpoint.load(path)


def report(out: Path) -> dict[str, Any]:
    """The first run of the report."""
    run: dict[str, Any] = json.loads((out / "report.json").read_text())["runs"][0]
    return run


def differences(expected: Any, found: Any) -> list[str]:
    """The places where two states differ in any bit, except the times of steps."""
    return states.differences(expected, found, without=("step_ms", "optimizer_ms"))


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Make runs short: few rows for validation."""
    patch.setattr(train_gpt, "VALIDATION_ROWS", 16)


def train_together(ranks: int, runs: Sequence[Sequence[object]]) -> list[str]:
    """Run train_gpt.py, made small, with each of `runs`, in the same processes. Returns each rank's output."""
    with rank_processes.ports(len(runs)) as ports:
        orders = [(port, list(map(str, words))) for port, words in zip(ports, runs, strict=True)]
        return rank_processes.run(_train, ranks, orders, join=False)


def _train(rank: int, orders: list[tuple[int, list[str]]]) -> str:
    make_small(pytest.MonkeyPatch())
    printed = io.StringIO()
    for port, words in orders:
        os.environ["MASTER_PORT"] = str(port)
        with redirect_stdout(printed), redirect_stderr(printed):
            status = train(*words)
        if status:
            raise RuntimeError(f"train_gpt.py {' '.join(words)} returned {status}: {printed.getvalue()[-3000:]}")
        GROUPS.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    return printed.getvalue()
