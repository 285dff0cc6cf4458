"""Run the tests marked ``gpu`` and the golden digests so that none can hang the others.

    python tests/support/run_gpu_tests.py --out DIR

For a first run on unknown hardware. Workers of pytest-xdist share the tests. Where a test takes more than a minute or
breaks the GPU's context, its worker ends and a new one goes on with the other tests. DIR receives ``tests.txt`` and
``tests.json``; another call with the same DIR continues with the tests that have not run.
Exit status: 0 if every test passed or was skipped.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
RECORD = "HALFSTEP_GPU_RECORD"  # the file to which pytest's main process appends a line of JSON per test


def entries(record: Path) -> list[dict[str, Any]]:
    """The lines of a record; one that is cut off is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def append(**entry: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[RECORD], "a") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_configure() -> None:
    if sys.platform == "linux":  # end with the process that started this one, however it ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    record = Path(os.environ[RECORD])
    had = {
        entry.get("test") for path in record.parent.glob("tests-*.jsonl") if path != record for entry in entries(path)
    }
    items[:] = [item for item in items if item.nodeid not in had]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    append(collected=len(ids))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        # xdist reports a test whose worker ended with a phase of its own.
        outcome = report.outcome if report.when in ("setup", "call", "teardown") else "unfinished"
        message = report.longreprtext[-6000:] if report.failed else ""
        append(test=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), message=message)


def run_tests(seconds: float, folder: Path, tests: Path, processes: int, *options: str) -> dict[str, Any]:
    """Run the tests marked ``gpu`` or ``golden`` below `tests` for at most `seconds`.

    Returns:
        ``counts`` by outcome, ``collected`` and ``not_run`` as numbers, ``tests`` (outcome and seconds of each), and
        ``failed``, a list of test, outcome, seconds and message.
    """
    before = sorted(folder.glob("tests-*.jsonl"))
    record = folder / f"tests-{len(before):04}.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "run_gpu_tests", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [
        "-q",
        "-m",
        "gpu or (golden and not exhaustive)",
        f"--numprocesses={processes}",
        "--timeout=60",
        "--timeout-method=thread",
    ]
    command += ["--tb=short", *options]
    paths = [str(TESTS.parent / "src"), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, RECORD: str(record), "PYTHONPATH": os.pathsep.join(paths)}
    golden = tests.glob("test_golden.py") if torch.cuda.is_available() else ()
    files = map(str, [*sorted(tests.rglob("test_gpu.py")), *golden])
    process = subprocess.Popen([*command, *files], env=environment, cwd=tests.parent)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    outcomes: dict[str, dict[str, Any]] = {}
    for entry in (entry for path in (*before, record) for entry in entries(path) if "test" in entry):
        known = outcomes.get(entry["test"], {})
        if known.get("outcome") != "failed":  # what comes after a failure must not hide it
            outcomes[entry["test"]] = entry
    here = {entry["test"] for entry in entries(record) if "test" in entry}
    not_run = max((entry["collected"] for entry in entries(record) if "collected" in entry), default=0) - len(here)
    failed = [entry for entry in outcomes.values() if entry["outcome"] in ("failed", "unfinished")]
    if not outcomes or not_run:
        message = f"{not_run} tests were not run: out of time"
        if not outcomes:
            message = f"no test was run: pytest ended with {process.returncode}; are pytest-xdist and -timeout here?"
        failed.append({"test": "", "outcome": "not run" if outcomes else "failed", "seconds": 0.0, "message": message})
    return {
        "counts": Counter(entry["outcome"] for entry in outcomes.values()),
        "collected": len(outcomes) + not_run,
        "not_run": not_run,
        "failed": failed,
        "tests": {test: [entry["outcome"], entry["seconds"]] for test, entry in outcomes.items()},
    }


def text_of(detail: dict[str, Any]) -> str:
    """The outcome of every test, failures with their messages first."""
    lines = [", ".join(f"{count} {outcome}" for outcome, count in sorted(detail["counts"].items()))]
    for failure in detail["failed"]:
        lines += ["", f"{failure['outcome'].upper()} {failure['test']}".rstrip(), failure["message"]]
    lines += ["", *(f"{outcome:10} {seconds:8.2f} s  {test}" for test, (outcome, seconds) in detail["tests"].items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for tests.txt and tests.json")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="for all tests (default: 60)")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)), metavar="N")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = run_tests(60 * options.minutes, options.out, TESTS, options.processes)
    (options.out / "tests.txt").write_text(text_of(found))
    (options.out / "tests.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text_of(found).partition("\n")[0])
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
