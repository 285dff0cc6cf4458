"""The budget of durations, on a small project: what is recorded, what fails, and what ``--quick`` chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import durations
import pytest

SUPPORT = Path(durations.__file__).parent
BURN = """
import multiprocessing, subprocess, sys, time

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

"""
HERE = "burn(0.5)"
CHILD = "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.5: pass'], check=True)"
FORKED = (
    "one = multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(0,)); one.start(); one.join()\n"
    "    one = multiprocessing.get_context('forkserver').Process(target=exec, args=("
    "'import time\\nend = time.process_time() + 0.5\\nwhile time.process_time() < end: pass', {})); "
    "one.start(); one.join(); time.sleep(0.1)"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two files of tests, of which one takes half a second, and a budget with a slack of a tenth."""
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text("import durations\ndurations.SLACK = 0.1\npytest_plugins = ['durations']\n")
    (tests / "test_fast.py").write_text("def test_fast():\n    pass\n")
    (tests / "test_slow.py").write_text(f"{BURN}\ndef test_slow():\n    {HERE}\n")
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if "-n" in options:
        options = ("-p", "xdist", *options)
    code = "import pytest; raise SystemExit(pytest.console_main())"
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment)


def write(project: Path, **seconds: float) -> None:
    """Budgets, of a machine so slow that this one is not slower."""
    files = {f"tests/test_{name}.py": [value, 1] for name, value in seconds.items()}
    (project / "tests" / "durations.json").write_text(json.dumps({"loop": 1000.0, "files": files}))


def test_workers_begin_with_what_takes_longest(project: Path) -> None:
    write(project, fast=1.0, slow=2.0)
    done = run(project, "-vv", "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("test_slow.py") < done.stdout.index("test_fast.py")


def read(project: Path) -> dict[str, Any]:
    return json.loads((project / "tests" / "durations.json").read_text())


@pytest.mark.parametrize(
    ("work", "workers"), [(HERE, ()), (CHILD, ("-n", "2")), (FORKED, ("-n", "1"))], ids=["here", "child", "forked"]
)
def test_a_file_that_outgrows_its_budget_fails_the_run(project: Path, work: str, workers: tuple[str, ...]) -> None:
    if work == FORKED and sys.platform != "linux":
        pytest.skip("what a server has forked is counted on Linux only")
    (project / "tests" / "test_slow.py").write_text(f"{BURN}\ndef test_slow():\n    {work}\n")
    write(project, fast=0.0, slow=0.0)
    done = run(project, "--check-durations", *workers)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert line.startswith("ERROR tests/test_slow.py took 0.")
    assert "pytest --record-durations tests/test_slow.py" in line


@pytest.mark.parametrize(
    "options",
    [(), ("--check-durations", "tests/test_slow.py"), ("--check-durations", "-k", "slow")],
    ids=["without the option", "one file", "by name"],
)
def test_only_a_whole_run_is_held_to_the_budget(project: Path, options: tuple[str, ...]) -> None:
    write(project, fast=0.0, slow=0.0)
    done = run(project, *options)
    assert done.returncode == 0, done.stdout


def test_a_file_without_an_entry_may_take_any_time(project: Path) -> None:
    assert run(project, "--check-durations").returncode == 0
    write(project, fast=0.0)
    assert run(project, "--check-durations").returncode == 0


def test_every_test_file_has_an_entry() -> None:
    root = Path(__file__).resolve().parents[1]
    files = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    recorded = set(json.loads((root / "tests" / "durations.json").read_text())["files"])
    missing = sorted(files - recorded)
    assert not missing, f"record them: pytest --record-durations {' '.join(missing)}"
    assert recorded <= files, "entries of files that do not exist"


def test_what_is_recorded_is_what_is_held(project: Path) -> None:
    assert run(project, "--record-durations", "-n", "2").returncode == 0
    first = read(project)
    assert first["files"]["tests/test_slow.py"][0] >= 0.5 > first["files"]["tests/test_fast.py"][0]
    assert [tests for _, tests in first["files"].values()] == [1, 1]
    assert 0.001 < first["loop"] < 10
    assert run(project, "--check-durations").returncode == 0

    (project / "tests" / "test_slow.py").unlink()
    assert run(project, "--record-durations", "tests/test_fast.py").returncode == 0
    assert read(project).keys() == first.keys() and set(read(project)["files"]) == set(first["files"])
    assert run(project, "--record-durations").returncode == 0
    assert set(read(project)["files"]) == {"tests/test_fast.py"}  # a whole run forgets files that are gone


def test_a_part_of_a_file_is_not_recorded(project: Path) -> None:
    done = run(project, "--record-durations", "-k", "slow")
    assert done.returncode == 4
    assert "--record-durations records whole files; leave out -k slow" in done.stderr


def test_a_slower_machine_is_allowed_more_and_a_faster_one_no_less() -> None:
    meter = durations.Meter()
    meter.add({"seconds": {"a": 145.0}, "tests": {"a": 3}, "loops": [0.01, 0.02, 9.0]})
    assert durations.outgrown({"loop": 0.01, "files": {"a": [10.0, 3]}}, meter) == []  # 2 x (2 x 10 + 60)
    (line,) = durations.outgrown({"loop": 0.02, "files": {"a": [10.0, 3]}}, meter)
    assert line.startswith("a took 145.0 s of processor time; allowed are 80.0 s, (2 x 10.0 s recorded + 60 s) x 1.00")
    (line,) = durations.outgrown({"loop": 0.04, "files": {"a": [10.0, 3]}}, meter)
    assert "allowed are 80.0 s" in line


def test_one_file_is_recorded_at_the_speed_of_the_others() -> None:
    meter = durations.Meter()
    meter.add({"seconds": {"a": 8.0}, "tests": {"a": 3}, "loops": [0.02]})
    before = {"loop": 0.01, "files": {"a": [1.0, 1], "b": [2.0, 1]}}
    assert durations.record(before, meter, whole=False) == {"loop": 0.01, "files": {"a": [4.0, 3], "b": [2.0, 1]}}
    assert durations.record(before, meter, whole=True) == {"loop": 0.02, "files": {"a": [8.0, 3]}}


def test_quick_takes_the_files_with_most_tests_per_second() -> None:
    files = {"many": [20.0, 400], "few": [20.0, 4], "small": [1.0, 1], "large": [500.0, 2000]}
    assert durations.quick(files, 45.0) == {"many", "few", "small"}
    assert durations.quick(files, 25.0) == {"many", "small"}
    assert durations.quick(files, 0.5) == set()


def test_quick_runs_no_other_file_and_does_not_import_it(project: Path) -> None:
    write(project, fast=0.1, slow=5.0)
    (project / "tests" / "test_slow.py").write_text("raise AssertionError('imported')\n")
    done = run(project, "--quick", "1", "-n", "1")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_quick_without_a_record_says_how_to_make_one(project: Path) -> None:
    done = run(project, "--quick", "1")
    assert done.returncode == 4
    assert "has no file so fast; run `make durations`" in done.stderr
