"""The switch between implementations: names, blocks, the environment variable, and which one runs where."""

import os
import re
import subprocess
from collections.abc import Iterator

import forks
import pytest
import torch

import halfstep
from halfstep.kernels import backend as module
from halfstep.kernels import native

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def start_from_auto(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_chosen", "auto")
    module.resolve.cache_clear()
    yield
    module.resolve.cache_clear()


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "import halfstep; from halfstep.kernels.backend import chosen; print(chosen())"
    kept = {key: value for key, value in os.environ.items() if key != "HALFSTEP_BACKEND"}
    return forks.run(["-c", code], {**kept, **environment}, cwd="/")


def test_the_backend_switches_permanently_or_for_a_block() -> None:
    assert module.chosen() == "auto"
    halfstep.backend("reference")
    assert module.chosen() == "reference"
    with halfstep.backend("triton"):
        assert module.chosen() == "triton"
        with halfstep.backend("auto"):
            assert module.chosen() == "auto"
        assert module.chosen() == "triton"
    assert module.chosen() == "reference"


def test_a_block_switches_back_after_an_error() -> None:
    with pytest.raises(KeyError), halfstep.backend("reference"):
        raise KeyError
    assert module.chosen() == "auto"


@pytest.mark.parametrize("name", ["Triton", "", None, "cuda", 1])
def test_an_unknown_name_is_refused_and_changes_nothing(name: object) -> None:
    with halfstep.backend("reference"):
        with pytest.raises(ValueError) as raised:
            halfstep.backend(name)  # type: ignore[arg-type]
        assert str(raised.value) == f"Expected backend to be 'auto', 'reference' or 'triton', but got {name!r}"
        assert module.chosen() == "reference"


@pytest.mark.parametrize("name", module.NAMES)
def test_the_environment_variable_sets_the_initial_backend(name: str) -> None:
    assert run(HALFSTEP_BACKEND=name).stdout.strip() == name


def test_without_the_variable_it_is_auto_and_a_bad_one_is_named() -> None:
    assert run().stdout.strip() == "auto"
    done = run(HALFSTEP_BACKEND="fast")
    assert done.returncode == 1
    assert (
        "ValueError: Expected environment variable HALFSTEP_BACKEND to be 'auto', 'reference' or 'triton', but got "
        "'fast'" in done.stderr
    )


REFUSED = "Expected GPU tensors for backend 'triton', but got tensors on '{}': use backend('auto'), or set "
META = torch.device("meta")


@pytest.mark.parametrize(
    ("chosen", "process", "device", "expected"),
    [
        ("reference", {}, CPU, "reference"),
        ("reference", {}, GPU, "reference"),
        ("auto", {}, GPU, "triton"),
        ("auto", {"triton": False}, GPU, "reference"),
        ("auto", {"interpreted": True}, GPU, "reference"),  # interpreted kernels cannot reach a GPU's memory
        ("auto", {}, CPU, "native"),
        ("auto", {"interpreted": True}, CPU, "native"),
        ("auto", {"cpp": False}, CPU, "reference"),
        ("auto", {}, META, "reference"),
        ("triton", {}, GPU, "triton"),
        ("triton", {"interpreted": True}, CPU, "triton"),
        ("triton", {}, CPU, REFUSED.format("cpu")),
        ("triton", {}, META, REFUSED.format("meta")),
        # Where a stand-in for the driver runs compiled kernels on CPU tensors.
        ("triton", {"takes_cpu_tensors": True}, CPU, "triton"),
        ("triton", {"takes_cpu_tensors": True}, META, REFUSED.format("meta")),
        ("triton", {"triton": False}, CPU, "Expected triton to be installed for backend 'triton', but it is not: "),
    ],
)
def test_implementation_by_backend_device_and_installation(
    chosen: str, process: dict[str, bool], device: torch.device, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted = process.get("interpreted", False)
    monkeypatch.setattr(module, "triton", object() if process.get("triton", True) else None)
    monkeypatch.setattr(module, "INTERPRET", interpreted)
    monkeypatch.setattr(module, "TAKES_CPU_TENSORS", process.get("takes_cpu_tensors", interpreted))
    monkeypatch.setattr(native, "library", lambda family: object() if process.get("cpp", True) else None)
    with halfstep.backend(chosen):
        if expected in ("reference", "native", "triton"):
            assert module.resolve(device, "unscale") == expected
        else:
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                module.resolve(device, "unscale")
