"""The table in docs/trainers.md names tests that exist, in the ways of training that they run in. Needs no trainer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")


def cells(page: str) -> list[tuple[str, str, list[str]]]:
    """(file, test, ways of training) of each cell of the table that is not a dash."""
    table = page.split("\n| what | test |")[1].split("\n\n")[0]
    lines = [[one.strip() for one in line.strip("|").split("|")] for line in f"| what | test |{table}".splitlines()]
    head, _, *rows = lines
    files = [re.search(r"\(\.\./(tests/[\w/]+\.py)\)", title) for title in head]
    found = []
    for row in rows:
        for file, cell in zip(files[2:], row[2:], strict=True):
            if cell != "—":
                assert file is not None
                found.append((file[1], row[1].strip("`"), cell.split(", ")))
    return found


def wrong(cell: tuple[str, str, list[str]]) -> str | None:
    """What is wrong with a cell: the test does not exist, or its file has other ways of training."""
    file, test, ways = cell
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    if test not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        return f"{file} has no {test}"
    known: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "STRATEGIES":
            known = set(ast.literal_eval(node.value))
    missing = set(ways) - {one.replace("one process", "1") for one in known}
    return f"{file} does not run in {', '.join(sorted(missing))}" if missing else None


def test_every_cell_is_a_test() -> None:
    found = cells(PAGE)
    assert len(found) >= 10
    assert [text for text in map(wrong, found) if text] == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("`test_it_trains`", "`test_it_flies`", "test_accelerate.py has no test_it_flies"),
        ("| 1, DDP, FSDP2 |", "| 1, DDP, FSDP3 |", "test_accelerate.py does not run in FSDP3"),
    ],
)
def test_the_check_can_fail(old: str, new: str, complaint: str) -> None:
    found = [text for text in map(wrong, cells(PAGE.replace(old, new))) if text]
    assert found and complaint in found[0]


def test_tests_that_the_page_names_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in sources, name
