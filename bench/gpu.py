"""``halfstep bench gpu``: check and measure halfstep on this machine's GPU. Every minute of it is of use.

Each check runs in a process of its own, which is ended if it takes more than a minute, and appends its outcome to
``checks.jsonl`` in the folder of results, on the disk. In order: versions, driver and copy bandwidth; what our PTX
assumes of the GPU's arithmetic, the bits of every layout of the optimizer and of the other kernels, and AMP steps,
eager, captured and on two streams, none of which may wait for the GPU, several of these at a time where there are
processors for it; the times of optimizer steps; the tests marked gpu of a checkout; and the other times, those of the
largest tensors first and what ``torch.compile`` has to compile last.

The command ends after ``--minutes``, and the next call continues where it ended, or was killed: outcomes of other code
or versions do not count. Two calls of nine minutes are enough. It needs torch, Triton and numpy, and runs in a checkout
that is not installed: ``PYTHONPATH=src python3 -m halfstep bench gpu``.

The other files are made from ``checks.jsonl``: ``results.json`` and ``table.md`` as of ``halfstep bench run``, and, if
matplotlib is installed, its pictures. Exit status: 0 if nothing has failed; 1 if something did; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import torch

from halfstep.bench import gpu_checks, run_report
from halfstep.bench.gpu_checks import DONE, FAILED, PASSED, STOPPED, TEST_MINUTES, TESTS
from halfstep.bench.harness import Result
from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, make_folder
from halfstep.cli.numbers import above_zero
from halfstep.cli.terminal import show

LIMIT = 60.0  # seconds of a check, compiling included
SIDE_BY_SIDE = max(1, min(4, (os.cpu_count() or 1) // 4))  # checks at a time; each computes its reference on the CPU
HEADLINE = 8  # times that come before the tests
LIMITS = {TESTS: 60 * TEST_MINUTES + 30}
PROCESS = [sys.executable, "-m", "halfstep.bench.gpu_checks"]


def _parser() -> Parser:
    parser = Parser("bench gpu", "Check and measure halfstep on this machine's GPU.")
    parser.add_argument(
        "--out", type=a_path, metavar="DIR", help="folder for the results (default: bench/results/ and the GPU's name)"
    )
    parser.add_argument("--quick", action="store_true", help="measure fewer and smaller cases")
    parser.add_argument(
        "--minutes", type=above_zero, default=9.0, metavar="M", help="end after so long; the next call continues"
    )
    return parser


def _environment() -> dict[str, str]:
    """That of the processes, which import the halfstep of this one, wherever they run."""
    paths = [str(Path(gpu_checks.__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run_side_by_side(names: Sequence[str], file: Path, quick: bool, end: float) -> None:
    """Run checks in a process each, several at a time, which share the processors."""
    threads = {"OMP_NUM_THREADS": str((os.cpu_count() or 1) // SIDE_BY_SIDE)} if SIDE_BY_SIDE > 1 else {}
    interrupted = Event()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = [pool.submit(_run_checks, [name], file, quick, end, threads, interrupted) for name in names]
        try:
            for one in running:
                one.result()
        except BaseException:
            interrupted.set()
            raise


def _run_checks(
    names: Sequence[str],
    file: Path,
    quick: bool,
    end: float,
    variables: Mapping[str, str] | None = None,
    interrupted: Event | None = None,
) -> None:
    """Run checks in one process, and in another one what is left after a check that took too long or ended it."""
    pending, interrupted = list(names), interrupted or Event()
    while pending and time.monotonic() < end and not interrupted.is_set():
        offset = file.stat().st_size if file.exists() else 0
        command = [*PROCESS, str(file), str(int(quick)), *pending]
        process = subprocess.Popen(command, env={**_environment(), **(variables or {})}, start_new_session=True)
        left, since, why = pending, time.monotonic(), ""
        try:
            while not why:
                ended, now = process.poll() is not None, time.monotonic()
                before, left = left, [name for name in pending if name not in gpu_checks.records(file, offset)]
                if ended:
                    why = f"its process ended with status {process.returncode}"
                elif now > end or interrupted.is_set():
                    return
                elif len(left) < len(before):
                    since = now
                elif now > since + (LIMITS.get(left[0], LIMIT) if left else LIMIT):
                    why = f"it took more than {now - since:.0f} s"
                time.sleep(0.05)
        finally:  # also what the process has started
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if left:
            gpu_checks.append(file, {"check": left[0], "status": STOPPED, "error": why})
            print(f"{left[0]}: {STOPPED}, {why}", flush=True)
        pending = left[1:]


def _report(out: Path, about: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
    """Write and show the times, and say what failed."""
    results = [Result(**one) for record in records.values() for one in (record.get("detail") or {}).get("results", ())]
    if results:
        run_report.write(out, about, results)
        show(*run_report.tables(about, results))
    for name, record in records.items():
        if record["status"] != PASSED:
            print(f"{name}: {record['status']}: {record['error'].strip().splitlines()[-1]}")


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
    checks, every = gpu_checks.checks(out), [*gpu_checks.checks(out), *gpu_checks.timings(options.quick)]
    before = {name: record["status"] for name, record in gpu_checks.records(file).items()}
    # What a process had to be stopped in, or what ended it, comes last.
    left = sorted(
        (name for name in every if before.get(name) not in DONE), key=lambda name: before.get(name) == STOPPED
    )
    print(f"{about['device']}: {len(every) - len(left)} of {len(every)} checks and times are in {file}", flush=True)
    alone = [name for name in left if name == "machine"]
    together = [name for name in left if name in checks and name not in ("machine", TESTS)]
    times = [name for name in left if name not in checks]
    _run_checks(alone, file, options.quick, end)
    _run_side_by_side(together, file, options.quick, end)
    for names in (times[:HEADLINE], [name for name in left if name == TESTS], times[HEADLINE:]):
        _run_checks(names, file, options.quick, end)
    records = gpu_checks.records(file)
    rest = sum(name not in records or records[name]["status"] not in DONE for name in every)
    machine = records.get("machine", {}).get("detail") or {"copy_gb_per_s": 0.0}
    _report(out, {**about, **machine, "quick": options.quick, "left_out": rest}, records)
    if rest:
        print(f"{rest} of {len(every)} checks and times are left: the same command continues")
    return 1 if any(record["status"] in (FAILED, STOPPED) for record in records.values()) else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench gpu`` with the arguments `argv`. Returns the exit status."""
    return command_line.run(_parser(), argv, _run)
