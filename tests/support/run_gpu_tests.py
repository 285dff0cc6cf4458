"""Run the tests marked ``gpu`` so that none can hang the others: ``python tests/support/run_gpu_tests.py --out DIR``.

For a first run on unknown hardware. Several processes share the tests. If a test hangs or breaks the GPU's context, its
process is ended and a new one continues with the other tests (``watchdog.py``). DIR receives a record of each test when
it ends, ``tests.txt`` and ``tests.json``; another call with the same DIR continues with the tests that have not ended.
Exit status: 0 if every test passed or was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import watchdog

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 60  # for one test, compiling included


def run_tests(seconds: float, folder: Path, tests: Path, processes: int, marker: str = "gpu") -> dict[str, Any]:
    """Run the tests marked `marker` in files ``test_gpu.py`` for at most `seconds`, even if some hang or break the GPU.

    Args:
        seconds: time limit for all tests.
        folder: folder for the records.
        tests: folder of the tests.
        processes: number of concurrent processes, which share the tests.
        marker: argument of pytest's ``-m``.

    Returns:
        ``counts`` by outcome, and ``failed``, a list of (test, outcome, message).
    """
    files = sorted(map(str, tests.rglob("test_gpu.py")))
    end = time.monotonic() + seconds
    command = [sys.executable, "-m", "pytest", "-p", "watchdog", "-p", "no:cacheprovider", "-q"]
    command += ["-m", marker, "--tb=short", *files]
    before = sorted(folder.glob("tests-*.jsonl"))
    over = {entry["test"] for record in before for entry in watchdog.entries(record) if entry["event"] == "end"}
    records = [folder / f"tests-{len(before) + share:04}.jsonl" for share in range(processes)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    turns: dict[int, int] = {}
    ended: list[int] = []

    def start(share: int) -> None:
        settings = {"RECORD": str(records[share]), "LIMIT": str(TEST_SECONDS), "SHARE": f"{share}/{processes}"}
        variables = {**variables_here(), **{watchdog.PREFIX + name: value for name, value in settings.items()}}
        turns[share] = len(watchdog.entries(records[share]))
        running[share] = subprocess.Popen(command, env=variables, cwd=tests.parent)

    for share in range(processes):
        start(share)
    while running:
        time.sleep(0.2)
        for share, process in list(running.items()):
            status = process.poll()
            if status is None and time.monotonic() > end:
                process.kill()
                process.wait()
                ended.append(share)
                del running[share]
            elif status is not None:
                del running[share]
                begun = [
                    entry for entry in watchdog.entries(records[share])[turns[share] :] if entry["event"] == "start"
                ]
                # Ended in the middle of a test: the others get their turn in a fresh process.
                if status not in (0, 1, 2, 3, 4, 5) or (status == 1 and _unfinished(records[share])):
                    if begun and time.monotonic() < end:
                        start(share)
    return _outcomes(before, records, ended, len(over))


def _unfinished(record: Path) -> set[str]:
    entries = watchdog.entries(record)
    over = {entry["test"] for entry in entries if entry["event"] == "end"}
    return {entry["test"] for entry in entries if entry["event"] == "start"} - over


def _outcomes(before: Sequence[Path], records: Sequence[Path], ended: Sequence[int], over: int) -> dict[str, Any]:
    """Counts and failures from the records of all processes; `before` are those of earlier calls, with `over` tests."""
    outcome: dict[str, dict[str, Any]] = {}
    collected = over
    for share, record in enumerate([*before, *records], -len(before)):
        entries = watchdog.entries(record)
        if share >= 0:
            collected += next((entry["tests"] for entry in entries if entry["event"] == "collected"), 0)
        for entry in entries:
            if entry["event"] == "start":
                reason = "the time for all tests was over" if share in ended else "it hung or ended the process"
                outcome[entry["test"]] = {"outcome": "unfinished", "seconds": 0.0, "message": reason}
            elif entry["event"] == "end":
                known = outcome.get(entry["test"], {})
                if known.get("outcome") != "failed":  # a failing teardown must not hide behind a passing call
                    outcome[entry["test"]] = {key: entry[key] for key in ("outcome", "seconds", "message")}
            elif entry["event"] == "lost":
                outcome[entry["test"]]["message"] += f"\nThe GPU's context was lost: {entry['message']}"
    counts: dict[str, int] = {}
    for entry in outcome.values():
        counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
    failed = [
        {"test": test, **entry} for test, entry in outcome.items() if entry["outcome"] in ("failed", "unfinished")
    ]
    not_run = collected - len(outcome)
    result: dict[str, Any] = {"counts": counts, "collected": collected, "not_run": not_run, "failed": failed}
    result["tests"] = {test: [entry["outcome"], entry["seconds"]] for test, entry in outcome.items()}
    if collected == 0:
        result["failed"] = [{"test": "", "outcome": "failed", "message": "no test was collected"}]
    elif not_run:
        message = f"{not_run} tests were not run: out of time, or their process could not go on"
        result["failed"].append({"test": "", "outcome": "not run", "message": message})
    return result


def variables_here() -> dict[str, str]:
    """The environment of the processes, with the import paths of this process."""
    path = [str(ROOT / "src"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def text_of(detail: dict[str, Any]) -> str:
    """The outcome of every test, failures with their messages first."""
    lines = [", ".join(f"{count} {outcome}" for outcome, count in sorted(detail["counts"].items()))]
    for failure in detail["failed"]:
        lines += ["", f"{failure['outcome'].upper()} {failure['test']}".rstrip(), failure["message"]]
    lines += ["", *(f"{outcome:10} {seconds:8.2f} s  {test}" for test, (outcome, seconds) in detail["tests"].items())]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tests.txt and tests.json")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="for all tests (default: 60)")
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 2)), metavar="N")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    found = run_tests(60 * options.minutes, options.out, ROOT / "tests", options.processes)
    (options.out / "tests.txt").write_text(text_of(found))
    (options.out / "tests.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text_of(found).partition("\n")[0])
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    watchdog.end_with_parent()
    raise SystemExit(main())
