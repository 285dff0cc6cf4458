"""A pytest plugin: record the processor time of each test file, check it against a budget, and choose quick tests.

    pytest -m "not exhaustive" -n 2 --record-durations     # `make durations` writes tests/durations.json
    pytest -m "not exhaustive" -n 2 --check-durations      # `make test` fails if a file exceeds its recorded time

Processor time is measured instead of elapsed time, because others may use the machine too. It includes the processes
that the tests start: children, and those that the server of forks.py forks (on Linux). A fixed loop is timed between
tests, and the budget is scaled by its time, so that a slower or busier machine is allowed more.
"""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# A file may take FACTOR * recorded + SLACK seconds. On a fresh machine one of them also compiles the C++: some 40 s.
FACTOR, SLACK = 2.0, 60.0
OPTIONS = ("--record-durations", "--check-durations")


def loop() -> float:
    """The processor time of a fixed loop of about ten milliseconds, in seconds."""
    start, total = time.thread_time(), 0
    for number in range(200_000):
        total += number * number % 7
    return time.thread_time() - start


def spent() -> float:
    """The processor time of this process, its ended children and the server of forks, in seconds."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    try:
        ticks = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:  # no server, or not Linux
        return seconds
    return seconds + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Meter:
    """The measurements of a run: seconds and number of tests by file, and times of the loop."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.loops: list[float] = []

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the measurements of another process."""
        self.seconds.update(data["seconds"])
        self.tests.update(data["tests"])
        self.loops += data["loops"]

    def data(self) -> dict[str, Any]:
        return {"seconds": dict(self.seconds), "tests": dict(self.tests), "loops": self.loops}


def outgrown(recorded: Mapping[str, Any], meter: Meter) -> list[str]:
    """A line for each file that exceeded its budget. A file without an entry has no budget."""
    if not meter.loops or not recorded["files"]:
        return []
    slower = max(1.0, statistics.median(meter.loops) / recorded["loop"])
    lines = []
    for file, seconds in sorted(meter.seconds.items()):
        if file in recorded["files"]:
            budget = recorded["files"][file][0]
            allowed = (FACTOR * budget + SLACK) * slower
            if seconds > allowed:
                lines.append(
                    f"{file} took {seconds:.1f} s of processor time; allowed are {allowed:.1f} s, "
                    f"({FACTOR:g} x {budget:.1f} s recorded + {SLACK:g} s) x {slower:.2f} for this machine: make it "
                    f"faster, or record it anew: pytest --record-durations {file}"
                )
    return lines


def record(recorded: Mapping[str, Any], meter: Meter, whole: bool) -> dict[str, Any]:
    """The durations to store after a run: those of a complete run, otherwise the stored ones with the new ones."""
    if not meter.loops:
        return dict(recorded)
    now = statistics.median(meter.loops)
    keep = {} if whole or not recorded["files"] else recorded["files"]
    speed = recorded["loop"] / now if keep else 1.0
    files = {file: [round(seconds * speed, 1), meter.tests[file]] for file, seconds in meter.seconds.items()}
    return {"loop": recorded["loop"] if keep else round(now, 5), "files": dict(sorted({**keep, **files}.items()))}


def quick(files: Mapping[str, Any], limit: float) -> set[str]:
    """The files to run in `limit` seconds: those with the most tests per second first; n tests count as sqrt(n)."""
    chosen, total = set(), 0.0
    for file in sorted(files, key=lambda file: files[file][0] / max(files[file][1], 1) ** 0.5):
        if total + files[file][0] <= limit:
            chosen.add(file)
            total += files[file][0]
    return chosen


def is_whole(config: pytest.Config) -> bool:
    """Whether the run selects tests only by markers."""
    option = config.option
    chosen = [getattr(option, name, None) for name in ("keyword", "deselect", "ignore", "ignore_glob", "lf", "quick")]
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not any(chosen)


# ------------------------------------------------------------------------------------------------------------- pytest

METER = Meter()


def stored(config: pytest.Config) -> Path:
    return config.rootpath / "tests" / "durations.json"


def entries(config: pytest.Config) -> dict[str, Any]:
    path = stored(config)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"loop": 0.0, "files": {}}


def is_metering(config: pytest.Config) -> bool:
    return any(config.getoption(option) for option in OPTIONS)


def pytest_addoption(parser: pytest.Parser) -> None:
    path = "tests/durations.json"
    parser.addoption(OPTIONS[0], action="store_true", help=f"write each file's processor time to {path}")
    parser.addoption(OPTIONS[1], action="store_true", help=f"fail a whole run where a file has outgrown {path}")
    parser.addoption(
        "--quick", type=float, metavar="SECONDS", help=f"only files that took this processor time together, by {path}"
    )


def pytest_configure(config: pytest.Config) -> None:
    limit = config.getoption("--quick")
    if limit is not None:
        config.stash[CHOSEN] = quick(entries(config)["files"], limit)
        if not config.stash[CHOSEN]:
            raise pytest.UsageError(f"--quick {limit:g}: {stored(config)} has no file so fast; run `make durations`")
    if config.getoption(OPTIONS[0]) and config.option.keyword:
        raise pytest.UsageError(f"{OPTIONS[0]} records whole files; leave out -k {config.option.keyword}")


CHOSEN = pytest.StashKey[set[str]]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files that are not chosen."""
    chosen = config.stash.get(CHOSEN, None)
    if chosen is None or collection_path.suffix != ".py":
        return None
    return True if collection_path.relative_to(config.rootpath).as_posix() not in chosen else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, start files without an entry first, then the longest: a long last file would run alone.

    Workers get complete files, since fixtures are expensive, in this order with ``--no-loadscope-reorder``.
    """
    if hasattr(config, "workerinput"):
        files = entries(config)["files"]
        seconds = {file: entry[0] for file, entry in files.items()}
        items.sort(key=lambda item: -seconds.get(item.path.relative_to(config.rootpath).as_posix(), float("inf")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not is_metering(item.config):
        return (yield)
    file = item.path.relative_to(item.config.rootpath).as_posix()
    if file not in METER.seconds:
        METER.loops.append(loop())
    before = spent()
    try:
        return (yield)
    finally:
        METER.seconds[file] += max(0.0, spent() - before)
        METER.tests[file] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the measurements of a worker of xdist."""
    data = getattr(node, "workeroutput", {}).get("durations")
    if data:
        METER.add(data)


FOUND = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not is_metering(config):
        return
    if hasattr(config, "workeroutput"):
        config.workeroutput["durations"] = METER.data()
    elif session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        if config.getoption(OPTIONS[1]) and is_whole(config):
            config.stash[FOUND] = outgrown(entries(config), METER)
            if config.stash[FOUND]:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if config.getoption(OPTIONS[0]):
            text = json.dumps(record(entries(config), METER, is_whole(config)), indent=1)
            stored(config).write_text(one_line_each(text) + "\n", encoding="utf-8")


def one_line_each(text: str) -> str:
    """JSON with one entry per line."""
    return text.replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(FOUND, []):
        terminalreporter.write_line(f"ERROR {line}", red=True)
