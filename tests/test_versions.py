"""The versions that the project names are those that `make versions` tests, and that docs/versions.md speaks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import versions

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
ROWS = {row.name: row for row in versions.ROWS}


def test_the_floor_is_what_pyproject_allows() -> None:
    floor = ROWS["floor"]
    assert f'requires-python = ">={floor.python}"' in PYPROJECT
    for package in ("torch", "triton", "numpy"):
        least = re.search(rf'"{package}>=([\d.]+)', PYPROJECT)
        assert least is not None
        assert getattr(floor, package).lstrip("=").startswith(least[1]), package


def test_the_pin_is_what_the_constraints_hold_and_every_named_python_has_a_row() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pins = [row for row in versions.ROWS if row.name.startswith("pin")]
    for row in pins:
        assert f"torch=={row.torch}\ntriton=={row.triton}\n" in constraints
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT))
    assert {row.python for row in pins} == named


def test_the_page_names_every_version_that_has_a_row() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    for row in versions.ROWS:
        assert re.search(rf"\| {row.python}[^|]* \| {row.torch} [^|]*\| {row.triton} ", page), row


@pytest.mark.parametrize(
    ("log", "status", "words"),
    [
        ("....\n4 passed in 1.23s\n", 0, "4 passed"),
        ("..F.\n== 1 failed, 3 passed, 2 skipped in 61.00s (0:01:01) ==\n", 1, "1 failed, 3 passed, 2 skipped"),
        ("a test says: 3 passed in a row\n1 passed, 1 error in 0.1s\n", 1, "1 passed, 1 error"),
        ("Fatal\nSegmentation fault\n", -11, "pytest ended with status -11: Segmentation fault"),
        ("", 4, "pytest ended with status 4: no output"),
    ],
)
def test_the_result_is_pytests_closing_line(log: str, status: int, words: str) -> None:
    assert versions.result(log, status) == words


def test_a_row_without_its_python_is_named_and_does_not_fail(tmp_path: Path) -> None:
    row = versions.Row("none", "3.0", "2.11.0", "3.6.0")
    assert versions.run(row, tmp_path, []) == ("not run: python3.0 is not on the path", 0)
