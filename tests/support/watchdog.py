"""A pytest plugin for a first run on unknown hardware: no test can hang the run or break later tests.

``pytest -p watchdog``, which ``run_gpu_tests.py`` starts, writes one line of JSON when a test starts and when it ends.
If a test exceeds its time, the plugin prints tracebacks and ends the process. It also ends the process after a failure
that broke the GPU's context. With the same record, the next process skips the tests that have already run, so that
repeated runs complete all tests.

Settings, as environment variables: ``HALFSTEP_WATCHDOG_RECORD`` (file to append to), ``_LIMIT`` (seconds per test),
``_SHARE`` (``"1/4"``: the second of four processes, each of which takes every fourth test).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PREFIX = "HALFSTEP_WATCHDOG_"
CONTEXT_LOST = 70  # exit status

_started = 0.0
_failed = False


def _record() -> Path:
    return Path(os.environ[PREFIX + "RECORD"])


def _write(**entry: Any) -> None:
    with open(_record(), "a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def entries(record: Path) -> list[dict[str, Any]]:
    """The entries of a record so far; a line that is cut off is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_with_parent() -> None:
    """On Linux, end this process when the one that started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def pytest_configure() -> None:
    end_with_parent()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share of this process, without tests that have already run."""
    share, of = map(int, os.environ.get(PREFIX + "SHARE", "0/1").split("/"))
    had = {entry["test"] for entry in entries(_record()) if entry["event"] == "start"}
    for record in _record().parent.glob("tests-*.jsonl"):  # also of calls before this one
        had |= {entry["test"] for entry in entries(record) if entry["event"] == "end"}
    kept = [item for index, item in enumerate(items) if index % of == share and item.nodeid not in had]
    kept_ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept_ids])
    items[:] = kept
    _write(event="collected", tests=len(kept))


def pytest_runtest_logstart(nodeid: str) -> None:
    global _started, _failed
    _started, _failed = time.monotonic(), False
    _write(event="start", test=nodeid)
    # A thread of the interpreter's own, which also fires while the main thread waits inside the driver.
    tracebacks = open(_record().with_suffix(".traceback"), "a")  # must outlive this function
    faulthandler.dump_traceback_later(float(os.environ.get(PREFIX + "LIMIT", "60")), exit=True, file=tracebacks)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _failed
    if report.when == "call" or not report.passed:
        _failed |= report.failed
        _write(
            event="end",
            test=report.nodeid,
            outcome=report.outcome,
            seconds=round(time.monotonic() - _started, 3),
            message=report.longreprtext[-6000:] if report.failed else "",
        )


def pytest_runtest_logfinish(nodeid: str) -> None:
    faulthandler.cancel_dump_traceback_later()
    if not _failed:
        return
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, dtype=torch.float32, device="cuda").item()
    except Exception as error:  # every later test of this process would fail with the same words
        _write(event="lost", test=nodeid, message=str(error)[:500])
        os._exit(CONTEXT_LOST)
