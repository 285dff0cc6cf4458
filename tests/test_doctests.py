"""The examples in docstrings run, and every public function and class has one."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.integrations import checkpoint, ddp, fsdp, release, vocabulary, zero
from halfstep.numerics import planning
from halfstep.numerics.formats import codec, exact

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"kernels": "kernels", "numerics": "numerics", "integrations": "integrations", "src/halfstep/cli": "cli"}
# Documented beside the names of the package; constants, and classes that only functions return, need no example.
PUBLIC = {
    **{f"halfstep.{name}": getattr(halfstep, name) for name in halfstep.__all__ if name != "__version__"},
    **{
        f"{module.__name__}.{name}": getattr(module, name)
        for module, names in {
            codec: ("neighbours", "next_down", "next_up", "ulp"),
            exact: ("decode_exact", "encode_exact", "exact", "parse_number"),
            planning: ("Transformer", "card", "layout", "plan", "unit", "usable"),
            ddp: ("mean_in_bf16_hook", "mean_in_fp16_hook"),
            fsdp: ("keep_reduced_gradients", "send_gradients_in_16_bits"),
            release: ("step_in_backward",),
            vocabulary: ("log_probabilities",),
            zero: ("load_state_dict", "state_dict"),
            checkpoint: ("checkpoints", "load", "load_model", "load_optimizer", "newest", "save", "with_masters"),
        }.items()
        for name in names
    },
}


def modules_with_examples() -> list[str]:
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join(("halfstep", package, *(part for part in parts if part != "__init__"))))
    return found


def examples(docstring: str, name: str = "example") -> doctest.DocTest:
    """The examples of a docstring, which may use `torch` and `halfstep`."""
    names = {"torch": torch, "halfstep": halfstep}
    return doctest.DocTestParser().get_doctest(inspect.cleandoc(docstring), names, name, None, 0)


def docstrings(module: str) -> dict[str, str]:
    """By name, the docstrings of a module and of what it defines that hold examples."""
    loaded = importlib.import_module(module)
    found: dict[str, Any] = {module: loaded}
    for name, member in vars(loaded).items():
        if not callable(member) or getattr(inspect.unwrap(member), "__module__", None) != module:
            continue
        found[f"{module}.{name}"] = member
        if inspect.isclass(member):
            members = {
                key: value for key, value in vars(member).items() if callable(value) or isinstance(value, property)
            }
            found.update((f"{module}.{name}.{key}", value) for key, value in members.items())
    return {name: text for name, it in found.items() if ">>> " in (text := getattr(it, "__doc__", None) or "")}


def complaints(test: doctest.DocTest) -> str:
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test, out=told.append)
    return "".join(told)


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = docstrings(module)
    assert found
    for name, text in found.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        torch.manual_seed(0)
        assert complaints(examples(text, name)) == ""


def test_every_example_of_the_files_is_run() -> None:
    for module in modules_with_examples():
        source = Path(inspect.getfile(importlib.import_module(module))).read_text(encoding="utf-8")
        written = source.count(">>> ")
        assert sum(text.count(">>> ") for text in docstrings(module).values()) >= written, module


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    value = PUBLIC[name]
    text = value.__doc__ if inspect.isclass(value) or callable(value) else type(value).__doc__
    assert text is not None and "Examples:\n" in text and examples(text).examples
