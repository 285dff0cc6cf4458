"""``halfstep bench gpu``: check and measure halfstep on this machine's GPU.

Checks run in a worker process, which appends each outcome to ``checks.jsonl``; if a check exceeds a minute or crashes
the worker, another worker continues after it. In order: versions and copy bandwidth; every job of ``halfstep bench
run`` compared with the reference bit for bit, and compilation of kernels, several at a time; times of optimizer steps;
the tests marked gpu of a checkout; the other times, largest tensors first and ``torch.compile`` last. ``results.json``,
in the format of ``halfstep bench run``, is built from ``checks.jsonl``.

The command ends after ``--minutes``; the next call continues. Outcomes of other code or versions do not count. It
needs torch, Triton and numpy, but no installation: ``PYTHONPATH=src python3 -m halfstep bench gpu``. Exit status: 0 if
nothing failed, 1 if something did, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from halfstep.bench import gpu_checks, run_report
from halfstep.bench.gpu_checks import DONE, FAILED, PASSED, STOPPED, TOO_LONG
from halfstep.bench.harness import Result
from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, above_zero, make_folder
from halfstep.cli.terminal import show

SIDE_BY_SIDE = max(1, min(4, (os.cpu_count() or 1) // 4))  # concurrent checks; each computes its reference on the CPU
PROCESS = [sys.executable, "-m", "halfstep.bench.gpu_checks"]


def _parser() -> Parser:
    parser = Parser("bench gpu", "Check and measure halfstep on this machine's GPU.", json=False)
    parser.add_argument(
        "--out", type=a_path, metavar="DIR", help="folder for the results (default: bench/results/ and the GPU's name)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--minutes", type=above_zero, default=9.0, metavar="M", help="stop after M minutes; the next call continues"
    )
    return parser


def _run_checks(names: list[str], shares: int, file: Path, quick: bool, end: float) -> None:
    """Run checks one after the other in a worker with its share of the processors. If one ends the worker, start
    another for the rest."""
    environment = {**os.environ, "OMP_NUM_THREADS": str((os.cpu_count() or 1) // shares)} if shares > 1 else None
    while names and (left := end - time.monotonic()) > 0:
        offset = file.stat().st_size if file.exists() else 0
        try:
            done = subprocess.run([*PROCESS, str(file), str(int(quick)), *names], env=environment, timeout=left)
        except subprocess.TimeoutExpired:
            return
        records = gpu_checks.records(file, offset)
        names = [name for name in names if name not in records]
        if names:
            name, *names = names
            why = "it took too long" if done.returncode == TOO_LONG else f"its process ended with {done.returncode}"
            gpu_checks.append(file, {"check": name, "status": STOPPED, "error": why})
            print(f"{name}: {STOPPED}, {why}", flush=True)


def _run(options: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * options.minutes
    if not torch.cuda.is_available():
        raise UsageError(
            "no GPU: torch.cuda.is_available() is False. Use halfstep bench run to measure on the CPU, or "
            "halfstep bench audit to audit the compiled kernels"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    about = run_report.environment(device)
    slug = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    out = options.out or Path("bench", "results", slug)
    make_folder(out)
    file = out / "checks.jsonl"
    checks = gpu_checks.checks(out, options.quick)
    before = {name: record["status"] for name, record in gpu_checks.records(file).items()}
    left = [name for name in checks if before.get(name) not in DONE]
    print(f"{about['device']}: {len(checks) - len(left)} of {len(checks)} checks and times are in {file}", flush=True)
    for stage, of_stage in groupby(left, lambda name: checks[name].stage):
        # Checks that were stopped, or crashed the worker, in an earlier call come last.
        names = sorted(of_stage, key=lambda name: before.get(name) == STOPPED)
        batches, shares = ([[name] for name in names], SIDE_BY_SIDE) if stage == "bits" else ([names], 1)
        with ThreadPoolExecutor(shares) as pool:
            apply = pool.map if shares > 1 else map  # a single batch runs in this thread, so that Ctrl-C ends it
            run = partial(_run_checks, shares=shares, file=file, quick=options.quick, end=end)
            list(apply(run, batches))
    records = gpu_checks.records(file)
    rest = sum(name not in records or records[name]["status"] not in DONE for name in checks)
    machine = records.get("machine", {}).get("detail") or {"copy_gb_per_s": 0.0}
    about |= {**machine, "quick": options.quick, "left_out": rest}
    results = [Result(**row) for record in records.values() for row in (record.get("detail") or {}).get("results", ())]
    if results:
        run_report.write_json(out / "results.json", about, results)
        show(*run_report.tables(about, results))
    for name, record in records.items():
        if record["status"] != PASSED:
            print(f"{name}: {record['status']}: {record['error'].strip().splitlines()[-1]}")
    if rest:
        print(f"{rest} of {len(checks)} checks and times are left: the same command continues")
    return 1 if any(record["status"] in (FAILED, STOPPED) for record in records.values()) else 0


def main(argv: Sequence[str]) -> int:
    return command_line.run(_parser(), argv, _run)
