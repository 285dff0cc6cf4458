"""The switch between implementations: names, blocks, the environment variable, and what runs where."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

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
    yield


def compiled(monkeypatch: pytest.MonkeyPatch, *, triton: bool = True, interpreted: bool = False) -> None:
    """Pretend to be a process with or without Triton and its interpreter."""
    monkeypatch.setattr(module, "triton", object() if triton else None)
    monkeypatch.setattr(module, "INTERPRET", interpreted)
    monkeypatch.setattr(module, "TAKES_CPU_TENSORS", interpreted)


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    code = "import halfstep; from halfstep.kernels.backend import chosen; print(chosen())"
    kept = {key: value for key, value in os.environ.items() if key != "HALFSTEP_BACKEND"}
    return forks.run(["-c", code], {**kept, **environment}, cwd="/")


def test_it_switches_for_good_or_for_a_block() -> None:
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
def test_the_environment_variable_sets_the_start(name: str) -> None:
    assert run(HALFSTEP_BACKEND=name).stdout.strip() == name


def test_without_the_variable_it_is_auto_and_a_bad_one_is_named() -> None:
    assert run().stdout.strip() == "auto"
    done = run(HALFSTEP_BACKEND="fast")
    assert done.returncode == 1
    assert (
        "ValueError: Expected environment variable HALFSTEP_BACKEND to be 'auto', 'reference' or 'triton', but got "
        "'fast'" in done.stderr
    )


@pytest.mark.parametrize("device", [CPU, GPU])
def test_reference_is_the_reference_everywhere(device: torch.device) -> None:
    with halfstep.backend("reference"):
        assert module.resolve(device, "unscale") == "reference"


def test_auto_takes_triton_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(monkeypatch)
    assert module.resolve(GPU, "unscale") == "triton"
    compiled(monkeypatch, triton=False)
    assert module.resolve(GPU, "unscale") == "reference"
    compiled(monkeypatch, interpreted=True)  # interpreted kernels cannot reach GPU memory at any speed worth having
    assert module.resolve(GPU, "unscale") == "reference"


def test_auto_takes_native_on_cpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for interpreted in (False, True):
        compiled(monkeypatch, interpreted=interpreted)
        monkeypatch.setattr(native, "library", lambda family: object())
        assert module.resolve(CPU, "unscale") == "native"
        monkeypatch.setattr(native, "library", lambda family: None)
        assert module.resolve(CPU, "unscale") == "reference"
    assert module.resolve(torch.device("meta"), "unscale") == "reference"


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with halfstep.backend("triton"):
        compiled(monkeypatch, interpreted=True)
        assert module.resolve(CPU, "unscale") == "triton"
        compiled(monkeypatch)
        assert module.resolve(GPU, "unscale") == "triton"
        with pytest.raises(RuntimeError) as raised:
            module.resolve(CPU, "unscale")
        assert str(raised.value) == (
            "Expected GPU tensors for backend 'triton', but got tensors on 'cpu': use backend('auto'), or "
            "set TRITON_INTERPRET=1 before halfstep is imported to run the kernels on CPU tensors"
        )
        with pytest.raises(RuntimeError, match="but got tensors on 'meta'"):
            module.resolve(torch.device("meta"), "unscale")


def test_compiled_kernels_take_cpu_tensors_where_a_stand_in_for_the_driver_runs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled(monkeypatch)
    monkeypatch.setattr(module, "TAKES_CPU_TENSORS", True)
    assert module.resolve(GPU, "unscale") == "triton"  # compiled still: a GPU runs them as ever
    assert not module.interpreting()
    with halfstep.backend("triton"):
        assert module.resolve(CPU, "unscale") == "triton"
        with pytest.raises(RuntimeError, match="but got tensors on 'meta'"):
            module.resolve(torch.device("meta"), "unscale")


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(monkeypatch, triton=False)
    with halfstep.backend("triton"), pytest.raises(RuntimeError) as raised:
        module.resolve(CPU, "unscale")
    assert str(raised.value) == (
        "Expected triton to be installed for backend 'triton', but it is not: install it or use backend('auto')"
    )


@pytest.mark.parametrize(("lanes", "most"), [(32, 32), (64, 16)])
def test_a_program_has_1024_threads_at_most(monkeypatch: pytest.MonkeyPatch, lanes: int, most: int) -> None:
    asked = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(warp_size=lanes)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    module._lanes.cache_clear()
    try:
        assert [module.most_warps(GPU), module.most_warps(GPU)] == [most, most]
        assert asked == [GPU]
        if module.TAKES_CPU_TENSORS:
            assert module.most_warps(CPU) == 32
    finally:
        module._lanes.cache_clear()


def test_jit_leaves_functions_alone_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton", None)

    def kernel() -> None:
        """Never called."""

    assert module.jit(kernel) is kernel


def test_a_function_runs_through_the_chosen_implementation() -> None:
    """The same bits from all three; under the interpreter the kernel really runs."""
    values = torch.tensor([3.0, float("nan"), 4.0])
    found = {}
    for name in module.NAMES:
        if name == "triton" and not module.TAKES_CPU_TENSORS:
            continue
        with halfstep.backend(name):
            found[name] = [part.tolist() for part in halfstep.foreach_check([values])][0::2]
    assert set(map(str, found.values())) == {str([1.0, [2]])}
