"""The documentation: links and names resolve, tables equal their sources, and code runs."""

import ast
import importlib.util
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generated
import layout_table
import pytest
import torch
import torch.distributed as dist
from lookup_run import lines, said
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.numerics import planning

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_navigation_has_every_page() -> None:
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r": ([\w/]+\.md)$", CONFIG, flags=re.MULTILINE)) == sorted(pages)


def test_the_api_has_every_public_name() -> None:
    names = re.findall(r"^::: .*\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(halfstep.__all__) - set(names) == {"__version__"}


def test_links_out_of_the_folder_lead_to_the_repository() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="trainers/others.md"))
    config = SimpleNamespace(repo_url="https://example.org/us")
    text = "[a](../../tests/x.py) [b](../optimizer.md#state) [c](../../README.md) [d](https://a.org/b) [e](#here)"
    found = module("hooks").on_page_markdown(text, page, config, None)
    assert found == (
        "[a](https://example.org/us/blob/main/tests/x.py) [b](../optimizer.md#state) [c](../index.md) "
        "[d](https://a.org/b) [e](#here)"
    )


# ------------------------------------------------------------------------------------------------- links and names

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "RELEASING", "GOVERNANCE", "CODE_OF_CONDUCT")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]+))?\)")
FILE = re.compile(
    r"(?<![\w/.<{-])(?:bench|docs|examples|integrations|kernels|numerics|src|tests)/[\w/]*\w\.(?:cpp|json|md|py)\b"
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            assert not anchor or anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_every_page_is_linked() -> None:
    texts = [(page.parent, page.read_text(encoding="utf-8")) for page in PAGES]
    linked = {(folder / target).resolve() for folder, text in texts for target, _ in LINK.findall(text)}
    assert {page for page in PAGES if "docs" in page.parts} <= linked


@every_page
def test_make_targets_files_and_tests_that_are_named_exist(page: Path) -> None:
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    assert [name for name in FILE.findall(text) if not (ROOT / name).exists()] == []
    for name in set(re.findall(r"`([\w]+\.py)\b", text)) - {"train.py", "my_cases.py"}:  # the user's own
        assert [*(ROOT / "tests").rglob(name), *(ROOT / "examples").rglob(name)], name
    for name in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


def test_names_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])halfstep\.(\w[\w.]*\w)", readme))
    for name in named - set(halfstep.__all__):
        pkgutil.resolve_name(f"halfstep.{name}")
    assert {"AdamW", "GradScaler", "softmax", "cast", "backend"} <= named


def test_the_two_line_change_trains() -> None:
    (change,) = blocks(ROOT / "README.md", "diff")
    ours = [line[1:] for line in change.splitlines() if line.startswith("+")]
    assert len(ours) == len([line for line in change.splitlines() if line.startswith("-")]) == 2
    model = torch.nn.Linear(3, 1).half()
    names: dict[str, Any] = {"halfstep": halfstep, "model": model}
    exec("\n".join(ours).replace('"cuda"', '"cpu"'), names)
    before = model.weight.detach().clone()
    # In fp32, as losses should be; at a scale of 65536 a gradient of 1 would overflow fp16.
    names["scaler"].scale((model.weight.float() * 0.5).sum()).backward()
    names["scaler"].step(names["optimizer"])
    names["scaler"].update()
    assert not torch.equal(before, model.weight)


def test_the_script_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = blocks(ROOT / "README.md", "python")
    torch.manual_seed(0)
    exec(script.replace("range(300)", "range(60)"), {})
    assert float(capsys.readouterr().out.removeprefix("loss ")) < 0.01


# ------------------------------------------------------------------------------------------------ errors and tables


def test_explained_errors_exist() -> None:
    sources = [path for folder in ("kernels", "numerics", "integrations") for path in (ROOT / folder).rglob("*.py")]
    trees = (ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for path in sources)
    texts = [
        node.value for tree in trees for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    rows = re.findall(r"^\| (`.+?`) \|", (DOCS / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert rows
    for message in re.findall(r"`([^`]+)`", " ".join(rows)):
        for part in filter(None, message.removeprefix("Attempting to unscale FP16 gradients.").split("…")):
            assert any(part in text for text in texts), message


def test_the_largest_models_are_those_of_the_planner() -> None:
    block = generated.read(layout_table.BLOCK, layout_table.PAGE)
    assert block == layout_table.table(), "run tests/support/layout_table.py"


def test_bytes_of_the_layouts() -> None:
    """The columns of bytes in docs/layouts.md are those of the planner, to the digits shown."""
    text = layout_table.PAGE.read_text(encoding="utf-8")
    table = text.partition("| your case | options of")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for options, (optimizer, precision) in list(layout_table.ROWS.items())[2:]:
        (row,) = [row for row in rows if row[1] == options]
        made = planning.plan(10**9, optimizer=optimizer, precision=precision)
        held, moved = made.totals.peak / 1e9, made.step_traffic / 1e9
        assert row[2:5] == [f"{round(number, 2):g}" for number in (held, held - 2, moved)], options


# ----------------------------------------------------------------------------------------------------------- commands


def commands(language: str, pattern: str) -> list[tuple[str, str]]:
    """The commands of a pattern in the blocks of a language on all pages, and what follows each."""
    texts = [block for page in sorted(DOCS.glob("*.md")) for block in blocks(page, language)]
    parts = [re.split(pattern, text, flags=re.MULTILINE)[1:] for text in texts]
    return [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]


SHOWN = commands("console", r"^\$ halfstep ((?:format|encode|decode|why|compare|plan) (?:.*\\\n)*.*)\n")
TYPED = commands("sh", r"^halfstep (plan (?:.*\\\n)*.*)$")


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_commands_print_the_output_shown(command: str, output: str) -> None:
    status, out, errors = said(*shlex.split(command.replace("\\\n", " ")), COLUMNS="80")
    printed = "\n".join(map(str.rstrip, (out + errors).splitlines()))
    assert status == (2 if errors else 0)
    assert printed.startswith(output.strip().removesuffix("..."))
    assert output.strip().endswith("...") or printed == output.strip()


@pytest.mark.parametrize("command", [command for command, _ in TYPED if "--page" not in command])
def test_plans_can_be_typed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lines(*shlex.split(command.replace("\\\n", " "), comments=True))


# ------------------------------------------------------------------------------------------------------ Python blocks


def python_blocks(page: Path) -> Iterator[str]:
    """Each block, after the imports of those before it."""
    imports = ""
    for block in blocks(page, "python"):
        yield imports + block
        imports += "".join(re.findall(r"^from .*\n", block, flags=re.MULTILINE))


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(python_blocks(page), 1)
]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names that the pages take for granted: a model, its batches, an optimizer, a scaler, a schedule."""
    monkeypatch.chdir(tmp_path)
    from halfstep.integrations import checkpoint

    torch.manual_seed(0)
    half = "checkpoint" not in block and "GradScaler" not in block
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).to(torch.bfloat16 if half else None)
    model.add_module("head", torch.nn.Linear(2, 2, dtype=model[0].weight.dtype))
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-3)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    batches = [torch.ones(4, 8, dtype=model[0].weight.dtype) for _ in range(2)]

    def train_step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    train_step(batches[0])
    names: dict[str, Any] = {
        **{"halfstep": halfstep, "torch": torch, "checkpoint": checkpoint, "fully_shard": fully_shard},
        **{"MixedPrecisionPolicy": MixedPrecisionPolicy, "DistributedDataParallel": DistributedDataParallel},
        **{"model": model, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler, "batches": batches},
        **{"some_batches": batches, "inputs": batches[0], "train_step": train_step},
        **{"step": 1, "tokens": 7, "decay": 0.9},
    }
    if "scaler.scale(loss)" in block:  # the pages begin a loop there
        block = block.replace("...\n", "loss = model(batches[0]).sum()\n", 1)
    if "# after sharding" in block or "clipping=" in block or "Offloaded" in block:
        optimizer.zero_grad()
    exec(compile(block.replace('"cuda"', '"cpu"'), "block", "exec"), names)
