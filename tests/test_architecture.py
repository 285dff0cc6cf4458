"""Rules that no linter checks: import order of the layers, allocations, and where public names are defined."""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("kernels", "numerics", "integrations", "cli", "bench")  # each may import itself and what stands before it
FOLDERS = {layer: ROOT / ("src/halfstep/cli" if layer == "cli" else layer) for layer in LAYERS}
SOURCES = {
    str(path.relative_to(ROOT)): (layer, path.read_text())
    for layer in LAYERS
    for path in FOLDERS[layer].rglob("*.py")
    if path.name != "test_benchmarks.py"  # for ``pytest bench``
}
PRESENTATION = {"matplotlib", "rich"}  # for the command line and the reports of benchmarks
TEST_TOOLS = {"pytest", "hypothesis", "unittest"}
KERNELS_MAY_IMPORT = {*("torch", "numpy", "triton", "filelock", "platformdirs", "halfstep"), *sys.stdlib_module_names}

# Where copies may be asynchronous: `to_device` and its like, and offloading, which waits for an event after each copy.
COPY_WITHOUT_WAITING = {"kernels/streams.py", "integrations/offload.py"}
KNOWS_RANKS = {"numerics/scaling/sharding.py"}  # below integrations
ALLOCATES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}
# These know no device, or not even a dtype, or change both for everybody.
FORBIDDEN = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"} | {
    *("set_default_dtype", "set_default_device", "set_default_tensor_type")
}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_modules(source: str, package: str) -> set[str]:
    """Dotted names of all modules that `source`, of a module in `package`, imports anywhere, relative ones resolved.

    ``from halfstep import x`` gives ``halfstep.x``, or the home of `x` if it is a public name.
    """
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = {halfstep._HOME.get(alias.name, f"halfstep.{alias.name}") for alias in node.names}
            found |= names if module == "halfstep" else {module}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def wrong_imports(source: str, layer: str, package: str) -> list[str]:
    """What a module of `layer` imports and must not."""
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    shows = layer in ("cli", "bench")
    wrong = []
    for module in sorted(imported_modules(source, package)):
        first, *rest = module.split(".")
        if (
            first in LAYERS  # a bare `kernels` would be somebody else's
            or (module == "halfstep" and not shows)  # the front door reaches every layer
            or (first == "halfstep" and set(rest[:1]) & above)
            or (first in PRESENTATION and not shows)
            or first in TEST_TOOLS
            or (layer == "kernels" and first not in KERNELS_MAY_IMPORT)
        ):
            wrong.append(module)
    return wrong


def careless_allocations(source: str) -> list[int]:
    """Lines that allocate without a dtype and a device. Scripts set torch's defaults (``torch.device("meta")``)."""
    lines = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
            name, arguments = ast.unparse(node.func).removeprefix("torch."), {one.arg for one in node.keywords}
            if name in FORBIDDEN or (name in ALLOCATES and not {"dtype", "device"} <= arguments):
                lines.append(node.lineno)
    return lines


def copies_without_waiting(source: str) -> list[int]:
    """Lines with a copy that may be asynchronous, towards the CPU too: ``non_blocking``, by name or by position."""
    lines = []
    for node in nodes(source):
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


def addresses(source: str) -> list[int]:
    """Lines that take addresses: `multi_tensor.address` and tables refuse those of tensors that have no memory."""
    return [node.lineno for node in nodes(source) if getattr(node, "attr", "") == "data_ptr"]


@functools.cache
def private_names(source: str) -> tuple[set[str], set[str]]:
    """Private attributes that a module defines, as a method or by setting them on `self`, and those that it reads."""
    defined: set[str] = set()
    read: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                targets = getattr(one, "targets", [getattr(one, "target", None)])
                defined |= {getattr(one, "name", ""), *(name.id for name in targets if isinstance(name, ast.Name))}
        elif isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            read |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return (*({name for name in names if name.startswith("_") and name[1:2] != "_"} for names in (defined, read)),)


def test_imports_point_one_way() -> None:
    for name, (layer, source) in SOURCES.items():
        folder = (ROOT / name).relative_to(FOLDERS[layer]).parent
        assert wrong_imports(source, layer, ".".join(("halfstep", layer, *folder.parts))) == [], name


@pytest.mark.parametrize(
    ("check", "allowed", "wrong"),
    [
        (
            careless_allocations,
            {name for name, (layer, _) in SOURCES.items() if layer in ("cli", "bench")},
            "torch.zeros(3, device=d); torch.tensor(1.0); torch.Tensor([1.0]); torch.set_default_dtype(d)",
        ),
        (
            copies_without_waiting,
            COPY_WITHOUT_WAITING,
            "x.to(d, non_blocking=True); x.to(d, torch.float32, True); x.cuda(None, True); f(**{'non_blocking': True})",
        ),
        (
            addresses,
            {name for name in SOURCES if Path(name).parent.name != "kernels" or name == "kernels/multi_tensor.py"},
            "f(x.data_ptr()); list(map(torch.Tensor.data_ptr, xs))",
        ),
    ],
    ids=["allocations", "copies", "addresses"],
)
def test_sources_follow_the_rules_for_memory(check: Callable[[str], list[int]], allowed: set[str], wrong: str) -> None:
    found = {name: lines for name, (_, source) in SOURCES.items() if (lines := check(source)) and name not in allowed}
    assert found == {}
    for line in wrong.split("; "):
        assert check(line), line
    assert not check("x = torch.zeros(3, dtype=a, device=b).to(c, non_blocking=False); torch.empty_like(x).copy_(x)")


def test_only_sharding_and_topology_know_of_ranks() -> None:
    lower = {name: source for name, (layer, source) in SOURCES.items() if layer in ("kernels", "numerics")}
    imports = {name: imported_modules(source, "") for name, source in lower.items()}
    knows = {name for name, modules in imports.items() if any(one.startswith("torch.distributed") for one in modules)}
    assert knows == KNOWS_RANKS


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_no_layer_reads_private_attributes_of_one_above(layer: str) -> None:
    level = LAYERS.index(layer)
    lower = [source for one, source in SOURCES.values() if LAYERS.index(one) <= level]
    upper = [source for one, source in SOURCES.values() if LAYERS.index(one) > level]
    defined, read = (set().union(*parts) for parts in zip(*map(private_names, lower), strict=True))
    above = set().union(*(private_names(source)[0] for source in upper))
    assert not (read - defined) & above


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "cli"])
def test_the_folders_are_linked_and_not_packages_of_their_own(layer: str) -> None:
    """An ``__init__.py`` here would make ``import kernels`` find this folder before Hugging Face's package."""
    assert not (ROOT / layer / "__init__.py").exists()
    link = ROOT / "src" / "halfstep" / layer
    assert os.readlink(link) == os.path.join("..", "..", layer)


def test_every_public_name_has_its_home() -> None:
    """Also the names under TYPE_CHECKING, which are written out by hand."""
    assert set(halfstep._HOME) | {"__version__"} == set(halfstep.__all__)
    for name, home in halfstep._HOME.items():
        assert getattr(halfstep, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'AdamX'; public names are SGD, Adam, AdamW"):
        _ = halfstep.AdamX
    tree = ast.parse((ROOT / "src" / "halfstep" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname or alias.name: node.module for node in imports for alias in node.names} == halfstep._HOME


def test_no_tracked_file_names_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    personal = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    assert personal.search("see " + "/".join(("", "work", "x")))
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            assert not personal.search(path.read_bytes().decode("utf-8", errors="ignore")), name
