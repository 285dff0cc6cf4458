"""The house rules that no linter knows: imports point one way, links are relative, nothing names one machine."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("kernels", "numerics", "integrations", "cli", "bench")  # each may import itself and what stands before it
FOLDERS = {layer: ROOT / ("src/halfstep/cli" if layer == "cli" else layer) for layer in LAYERS}
LINKED = tuple(layer for layer in LAYERS if layer != "cli")
PRESENTATION = {"matplotlib"}  # for the command line and the reports of benchmarks
TEST_TOOLS = {"pytest", "hypothesis", "unittest"}
KERNELS_MAY_IMPORT = {"torch", "numpy", "triton", "halfstep"} | set(sys.stdlib_module_names)

SOURCES = [(layer, path) for layer in LAYERS for path in sorted(FOLDERS[layer].rglob("*.py"))]


def imported_modules(tree: ast.Module, package: str) -> set[str]:
    """Dotted names of all modules that `tree`, of a module in `package`, imports anywhere, relative ones resolved.

    ``from halfstep import x`` gives ``halfstep.x``, or the home of `x` if it is a public name.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "halfstep":
                found |= {halfstep._HOME.get(alias.name, f"halfstep.{alias.name}") for alias in node.names}
            else:
                found.add(module)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def violations(source: str, layer: str, package: str | None = None) -> list[str]:
    """What a module of `layer` imports and must not."""
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    wrong = []
    for module in sorted(imported_modules(ast.parse(source), package or f"halfstep.{layer}")):
        parts = module.split(".")
        if parts[0] in LAYERS:
            wrong.append(f"{module}: write halfstep.{module}")
        elif parts == ["halfstep"] and layer not in ("cli", "bench"):
            wrong.append("halfstep: the front door reaches every layer; import the module itself")
        elif parts[0] == "halfstep" and set(parts[1:2]) & set(LAYERS) - set(allowed):
            wrong.append(f"{module}: {layer} may import {', '.join(allowed)}")
        elif layer not in ("cli", "bench") and parts[0] in PRESENTATION:
            wrong.append(f"{module}: {layer} computes results, cli shows them")
        elif parts[0] in TEST_TOOLS:
            wrong.append(f"{module}: test tools stand in tests/")
        elif layer == "kernels" and parts[0] not in KERNELS_MAY_IMPORT:
            wrong.append(f"{module}: kernels import torch, numpy and triton only")
    return wrong


@pytest.mark.parametrize(("layer", "path"), SOURCES, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_imports_point_one_way(layer: str, path: Path) -> None:
    folder = path.relative_to(FOLDERS[layer]).parent
    assert violations(path.read_text(), layer, ".".join(("halfstep", layer, *folder.parts))) == []


@pytest.mark.parametrize(
    ("layer", "source", "complaint"),
    [
        (
            "kernels",
            "import halfstep.numerics.scaling.scaler",
            "halfstep.numerics.scaling.scaler: kernels may import kernels",
        ),
        ("kernels", "from halfstep import GradScaler", "halfstep.numerics.scaling.scaler: kernels may import kernels"),
        ("kernels", "from halfstep import bench", "halfstep.bench: kernels may import kernels"),
        ("kernels", "from ..numerics import scaler", "halfstep.numerics: kernels may import kernels"),
        ("kernels", "def f():\n    from halfstep.bench.audit import main", "halfstep.bench.audit: kernels may"),
        ("kernels", "import yaml", "yaml: kernels import torch, numpy and triton only"),
        ("numerics", "from matplotlib.figure import Figure", "matplotlib.figure: numerics computes results, cli shows"),
        ("bench", "def f():\n    import pytest", "pytest: test tools stand in tests/"),
        (
            "integrations",
            "def f():\n    import matplotlib",
            "matplotlib: integrations computes results, cli shows them",
        ),
        (
            "numerics",
            "import importlib\nimportlib.import_module('halfstep.integrations.optim')",
            "halfstep.integrations",
        ),
        ("integrations", "import halfstep", "halfstep: the front door"),
        ("integrations", "from kernels.adam import x", "kernels.adam: write halfstep.kernels.adam"),
        ("integrations", "import halfstep.bench", "integrations may import kernels, numerics, integrations"),
        ("integrations", "import halfstep.cli.terminal", "integrations may import kernels, numerics, integrations"),
        ("cli", "import halfstep.bench.audit", "cli may import kernels, numerics, integrations, cli"),
    ],
)
def test_the_import_check_can_fail(layer: str, source: str, complaint: str) -> None:
    (found,) = [text for text in violations(source, layer) if not text.startswith("importlib")]
    assert complaint in found


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("kernels", "import torch, math\nfrom halfstep.kernels import native\nfrom . import backend"),
        ("numerics", "from halfstep.kernels.unscale import foreach_check\nimport numpy"),
        ("bench", "import halfstep\nfrom halfstep.integrations.optim import AdamW\nfrom halfstep import AdamW"),
    ],
)
def test_the_import_check_allows_what_it_should(layer: str, source: str) -> None:
    assert violations(source, layer) == []


CLOCKS = {f"{name}{unit}" for name in ("perf_counter", "process_time", "thread_time") for unit in ("", "_ns")}


def clocks_read(source: str) -> set[str]:
    """The clocks for short times that a module calls or imports by name; handing one to `timing` does not count."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            names.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names & CLOCKS


def test_benchmarks_share_one_timing_loop() -> None:
    reading = [path.name for layer, path in SOURCES if layer == "bench" and clocks_read(path.read_text())]
    assert reading == ["timing.py"]


@pytest.mark.parametrize(
    "source", ["time.perf_counter()", "from time import thread_time_ns as now", "process_time_ns()"]
)
def test_the_check_for_timing_loops_can_fail(source: str) -> None:
    assert clocks_read(source)


# Modules of `bench/cases` and `bench/audit/families` are named after the kernels that they measure.
SHARED_MODULES = {"__init__", "command", "adam", "cast", "unscale", "loss_scale", "softmax", "statistics"}
# `Layout` is a public name of the planner, and the variant of an Adam kernel. `Trainer` is that of `halfstep train`,
# and takes the place of transformers' class of that name.
SHARED_CLASSES = {"Layout", "Trainer"}


def shared(named: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that several places have, of (name, place)."""
    places: dict[str, list[str]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def classes(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]


def test_a_module_has_its_name_alone() -> None:
    found = shared([(path.stem, str(path.relative_to(ROOT))) for _, path in SOURCES])
    assert set(found) == SHARED_MODULES, found


def test_a_class_has_its_name_alone() -> None:
    found = shared([(name, str(path.relative_to(ROOT))) for _, path in SOURCES for name in classes(path.read_text())])
    assert set(found) == SHARED_CLASSES, found


def test_the_checks_for_shared_names_can_fail() -> None:
    assert shared([("Row", "a.py"), ("Case", "a.py"), ("Row", "b.py")]) == {"Row": ["a.py", "b.py"]}
    assert classes("class Row:\n    class Inner: ...\ndef f(): ...\nclass Case(Row): ...") == ["Row", "Case"]


LONGEST = 900  # lines of a module
# A family of kernels is one file, as CONTRIBUTING.md says. Adam has two kernels, and casts have one for lists.
LONGER = {"kernels/adam.py", "kernels/cast.py"}


def longer(lengths: dict[str, int]) -> set[str]:
    return {name for name, lines in lengths.items() if lines > LONGEST}


def test_no_module_is_long() -> None:
    assert longer({str(path.relative_to(ROOT)): path.read_text().count("\n") for _, path in SOURCES}) == LONGER


def test_the_check_for_long_modules_can_fail() -> None:
    assert longer({"a.py": LONGEST + 1, "b.py": LONGEST}) == {"a.py"}


# Where copies may be asynchronous: `to_device` and its like, and offloading, which waits for an event after each copy.
COPY_WITHOUT_WAITING = {"kernels/streams.py", "integrations/offload.py"}


def copies_without_waiting(source: str) -> list[int]:
    """Lines with a copy that may be asynchronous, towards the CPU too: ``non_blocking``, by name or by position."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "non_blocking":
            asked = not (isinstance(node.value, ast.Constant) and node.value.value is False)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            booleans = [one for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, bool)]
            asked = node.func.attr in ("copy_", "cuda") or (node.func.attr == "to" and bool(booleans))
        else:
            asked = isinstance(node, ast.Constant) and node.value == "non_blocking"
        if asked:
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def test_what_is_copied_to_the_cpu_has_arrived() -> None:
    found = {str(path.relative_to(ROOT)): copies_without_waiting(path.read_text()) for _, path in SOURCES}
    asynchronous = {name: lines for name, lines in found.items() if lines and name not in COPY_WITHOUT_WAITING}
    assert asynchronous == {}, "use to_device or all_to_device of kernels/streams.py"
    assert found["kernels/streams.py"]


@pytest.mark.parametrize(
    "source",
    [
        "x.to(device, non_blocking=True)",
        "x.to(device, torch.float32, True)",
        "x.to(device, non_blocking=device.type == 'cuda')",
        "x.copy_(y, True)",
        "torch.Tensor.copy_(x, y)",
        "x.cuda(None, True)",
        "partial(x.copy_, non_blocking=True)",
        "x.to(**{'non_blocking': True})",
    ],
)
def test_the_check_for_asynchronous_copies_can_fail(source: str) -> None:
    assert copies_without_waiting(f"import torch\n\n{source}") == [3]
    assert not copies_without_waiting("x.to(y, non_blocking=False).to(device, torch.float32)\nx.copy_(y).cuda(0)")


# What may know how torch spreads a model over ranks, in the layers below integrations.
KNOWS_RANKS = {"numerics/scaling/topology.py"}


def test_only_the_topology_knows_of_ranks() -> None:
    found = {
        str(path.relative_to(ROOT))
        for layer, path in SOURCES
        if layer in ("kernels", "numerics")
        and any(module.startswith("torch.distributed") for module in imported_modules(ast.parse(path.read_text()), ""))
    }
    assert found == KNOWS_RANKS


def private_names(source: str) -> tuple[set[str], set[str]]:
    """Private attributes that a module defines, as a method or by setting them on `self`, and those that it reads."""
    defined: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                defined |= {getattr(one, "name", "")} | {
                    target.id
                    for target in getattr(one, "targets", [getattr(one, "target", None)])
                    if isinstance(target, ast.Name)
                }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
        elif isinstance(node, ast.Attribute):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            read |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return (*({name for name in names if name.startswith("_") and name[1:2] != "_"} for names in (defined, read)),)


def known_upward(lower: list[str], upper: list[str]) -> set[str]:
    """Private attributes of the upper modules that the lower ones read, in sources."""
    defined, read = (set().union(*parts) for parts in zip(*map(private_names, lower), strict=True))
    above = set().union(*(private_names(source)[0] for source in upper))
    return (read - defined) & above


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_no_layer_reads_private_attributes_of_one_above(layer: str) -> None:
    place = LAYERS.index(layer)
    lower = [path.read_text() for of, path in SOURCES if LAYERS.index(of) <= place]
    upper = [path.read_text() for of, path in SOURCES if LAYERS.index(of) > place]
    assert known_upward(lower, upper) == set()


def test_the_check_for_private_attributes_can_fail() -> None:
    above = "class A:\n    _kept = 1\n    def __init__(self): self._set = 2\n    def _made(self): ..."
    for source in ("x._kept", "getattr(x, '_set')", "hasattr(x, '_made')"):
        assert known_upward([source], [above]), source
    assert not known_upward(["class B:\n    def _made(self): self._set = self._made()"], [above])


@pytest.mark.parametrize("layer", LINKED)
def test_the_folders_are_linked_and_not_packages_of_their_own(layer: str) -> None:
    """An ``__init__.py`` here would make ``import kernels`` find this folder before Hugging Face's package."""
    assert not (ROOT / layer / "__init__.py").exists()
    link = ROOT / "src" / "halfstep" / layer
    assert os.readlink(link) == os.path.join("..", "..", layer)
    assert link.resolve() == ROOT / layer


def test_every_public_name_has_its_home() -> None:
    assert set(halfstep._HOME) | {"__version__"} == set(halfstep.__all__)
    for name, home in halfstep._HOME.items():
        assert getattr(halfstep, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'AdamX'; public names are Adam, AdamW"):
        _ = halfstep.AdamX


def test_type_checkers_see_the_public_names_where_they_live() -> None:
    """The names under TYPE_CHECKING are written out by hand; they must say the same as the table that is used."""
    tree = ast.parse((ROOT / "src" / "halfstep" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == halfstep._HOME


def test_no_tracked_file_names_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    personal = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    assert personal.search("see " + "/".join(("", "work", "x")))
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            text = path.read_bytes().decode("utf-8", errors="ignore")
            found += [f"{name}: {match.group(0)}" for match in personal.finditer(text)]
    assert found == []
