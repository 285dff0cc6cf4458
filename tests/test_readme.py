"""What README.md and the other pages say can be typed, followed and run."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "RELEASING")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_name_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)", page.read_text(encoding="utf-8"))
    }
    assert {page for page in PAGES if "docs" in page.parts} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_two_line_change_trains() -> None:
    (change,) = blocks(ROOT / "README.md", "diff")
    ours = [line[1:] for line in change.splitlines() if line.startswith("+")]
    assert len(ours) == len([line for line in change.splitlines() if line.startswith("-")]) == 2
    model = torch.nn.Linear(3, 1).half()
    names: dict[str, Any] = {"halfstep": halfstep, "model": model}
    exec("\n".join(ours).replace('"cuda"', '"cpu"'), names)
    before = model.weight.detach().clone()
    # In fp32, as losses should be; at a scale of 65536 a gradient of 1 would overflow fp16.
    loss = (model.weight.float() * 0.5).sum()
    names["scaler"].scale(loss).backward()
    names["scaler"].step(names["optimizer"])
    names["scaler"].update()
    assert not torch.equal(before, model.weight)


def test_the_script_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    torch.manual_seed(0)
    exec(script.replace("range(300)", "range(60)"), {})
    assert float(capsys.readouterr().out.removeprefix("loss ")) < 0.01


def test_names_in_the_table_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])halfstep\.(\w[\w.]*\w)", readme))
    for name in named - set(halfstep.__all__):
        pkgutil.resolve_name(f"halfstep.{name}")
    assert {"AdamW", "GradScaler", "softmax", "cast", "backend"} <= named


FILE = re.compile(
    r"(?<![\w/.<{-])(?:bench|docs|examples|integrations|kernels|numerics|src|tests)/[\w/]*\w\.(?:cpp|json|md|py)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in FILE.findall(text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w]+\.py)\b", text):  # by name alone: examples, tests, and what they share
        if name in ("train.py", "my_cases.py"):  # the user's own
            continue
        assert [*(ROOT / "tests").rglob(name), *(ROOT / "examples").rglob(name)], name


def test_tests_that_are_named_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in sources, f"{page.name}: {name}"


def test_files_that_code_names_exist() -> None:
    sources = [
        path
        for folder in ("bench", "integrations", "kernels", "numerics", "src")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert sources
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in FILE.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert missing == set()
