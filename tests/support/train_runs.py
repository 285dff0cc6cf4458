"""Runs of ``halfstep train`` in several processes, one after the other, and the bits that two runs differ in.

As a script, one rank of them: reads from standard input a JSON list of [port, words], and trains each.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from halfstep.integrations import checkpoint

TIMES = ("step_ms", "optimizer_ms")
VALIDATION_ROWS = 16  # after every one of twelve steps


def newest(out: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Step and content of a run's last checkpoint."""
    step, path = checkpoint.checkpoints(out / "checkpoints" / name)[-1]
    return step, checkpoint.load(path)


def report(out: Path) -> dict[str, Any]:
    """The first run of the report."""
    run: dict[str, Any] = json.loads((out / "report.json").read_text())["runs"][0]
    return run


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Places where two states differ in any bit, but for the times of the steps."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{where}: {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [d for key in a if key not in TIMES for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for index in range(len(a)) for d in differences(a[index], b[index], f"{where}/{index}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return [] if same and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b))) else [where]
    return [] if a == b and type(a) is type(b) else [f"{where}: {a!r} and {b!r}"]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]


def train_together(ranks: int, runs: Sequence[Sequence[object]]) -> str:
    """Train each of `runs`, words of ``halfstep train``, in the same `ranks` processes. Returns what rank 0 printed.

    Raises:
        RuntimeError: one failed; with what was printed.
    """
    ports = _free_ports(len(runs))
    orders = json.dumps([[port, list(map(str, words))] for port, words in zip(ports, runs, strict=True)])
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {**os.environ, **{name: str(number) for name, number in place.items()}}
        environment |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        )
    printed = []
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(orders)
            process.stdin.close()
            process.stdin = None
        printed = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(text[-3000:] for text in printed))
    return printed[0]


def _main() -> int:
    from halfstep.__main__ import main
    from halfstep.bench.train import loop
    from halfstep.bench.train import report as reports

    torch.set_num_threads(1)
    loop.VALIDATION_ROWS = VALIDATION_ROWS
    reports.picture = lambda content: None  # pictures take longer than these runs
    for port, words in json.load(sys.stdin):
        os.environ["MASTER_PORT"] = str(port)
        if main(["train", *words]):
            print("failed:", *words, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
