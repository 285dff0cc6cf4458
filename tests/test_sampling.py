"""Samples of many cases: every value of every parameter, one in so many of the rest, and the others exhaustive."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import sampling

CASES = [{"first": a, "second": b} for a, b in product(range(5), range(8))]
NAMES = [f"{case['first']}-{case['second']}" for case in CASES]
PROJECT = """
import pytest

pytestmark = pytest.mark.sample(4)

@pytest.mark.parametrize("number", range(40))
def test_many(number): pass

@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_few(number): pass

def test_one(): pass
"""


def test_a_sample_has_every_value_of_several_parameters() -> None:
    found = [case for case, is_chosen in zip(CASES, sampling.chosen(NAMES, CASES, 10**9), strict=True) if is_chosen]
    assert {case["first"] for case in found} == set(range(5)) and {case["second"] for case in found} == set(range(8))
    assert len(found) == 5 + 8 - 1


def test_a_sample_of_one_parameter_has_about_one_in_so_many() -> None:
    values = [{"number": number} for number in range(1000)]
    found = sampling.chosen([str(number) for number in range(1000)], values, 4)
    assert found[0] and 200 < sum(found) < 300
    assert found == sampling.chosen([str(number) for number in range(1000)], values, 4)
    assert all(sampling.chosen(NAMES, CASES, 1))


def test_the_sample_and_the_exhaustive_tests_are_all_tests(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(PROJECT)
    support = Path(sampling.__file__).parent
    sets = []
    for marks in ("not exhaustive", "exhaustive", ""):
        command = [sys.executable, "-m", "pytest", "-p", "sampling", "-q", "--collect-only", "-m", marks, "test_it.py"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(support)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        sets.append({line for line in done.stdout.splitlines() if "::" in line})
    sample, others, everything = sets
    assert sample | others == everything and not sample & others and len(everything) == 43
    assert {"test_it.py::test_one", "test_it.py::test_few[0]", "test_it.py::test_many[0]"} <= sample
    assert "test_it.py::test_few[1]" in others and 5 <= len(sample) <= 20
