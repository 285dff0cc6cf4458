"""The kernels as Triton compiles them, against the reference: bit for bit, softmax within its bound.

What tests/kernels and tests/integrations ask of the interpreted kernels they ask of the compiled ones too, when pytest
runs them with ``--software-gpu``. Here stands what only this machine can show, or what the interpreter is too slow for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import assert_same_bits, normal, patterns, placed
from kernel_cases import BF16, CASES, E4M3, E5M2, FP16, FP32, difference
from software_gpu.gpu import SoftwareGPU

import halfstep

MODES: dict[str, dict[str, Any]] = {
    "nearest": {},
    "saturating": {"saturate": True},
    "toward zero": {"rounding": "toward_zero"},
    "stochastic": {"rounding": "stochastic", "seed": 11},
}


def assert_right(machine: SoftwareGPU, name: str, **settings: Any) -> None:
    """A case gives what the reference gives, by launches of compiled kernels."""
    case = CASES[name]
    with halfstep.backend("reference"):
        expected = case.run(3)
    before = sum(machine.launched.values())
    with machine.set(**settings), halfstep.backend("triton"):
        mine = case.run(3)
    assert sum(machine.launched.values()) > before
    assert difference(case, mine, expected) == ""


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_has_the_bits_of_the_reference(machine: SoftwareGPU, name: str) -> None:
    assert_right(machine, name)


@pytest.mark.parametrize("settings", [{"inexact": 1}, {"inexact": -1}, {"inexact": 2}, {"reversed": True}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_depend_on_no_approximation_and_no_order(
    machine: SoftwareGPU, name: str, settings: dict[str, Any]
) -> None:
    """Approximations at either end of their error and between; blocks and warps last to first."""
    assert_right(machine, name, **settings)


def every(source: torch.dtype) -> torch.Tensor:
    """All codes of a format of 16 or 8 bits; a million patterns of fp32, ties and subnormals among them."""
    if source != FP32:
        integers = torch.arange(2 ** (8 * source.itemsize), dtype=torch.int32)
        return integers.to(torch.uint8 if source.itemsize == 1 else torch.int16).view(source)
    codes = patterns(2**20, FP32, 5).view(torch.int32)
    codes[::5] &= -(2**13)  # ties of fp16, and for half of them of what lies between two codes of bf16
    codes[1::5] &= -(2**16) | 2**15
    codes[2::5] &= 0x80FFFFFF - 2**32  # subnormals and the smallest normal numbers
    return codes.view(FP32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", [FP32, FP16, BF16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [FP32, FP16, BF16, E4M3, E5M2], ids=str)
def test_every_code_through_every_cast(
    machine: SoftwareGPU, source: torch.dtype, target: torch.dtype, mode: str
) -> None:
    values = every(source)
    with halfstep.backend("reference"):
        expected = halfstep.cast(values, target, **MODES[mode])
    with halfstep.backend("triton"):
        assert_same_bits(halfstep.cast(values, target, **MODES[mode]), expected)
        (listed,) = halfstep.foreach_cast([placed(values, values.device, 1)], target, **MODES[mode])
    assert_same_bits(listed, expected, "in a list, misaligned")


SIZES = (1, 15, 16, 17, 513, 4099, 70_001, *range(100, 400))
LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "fp32 amsgrad": (FP32, {"amsgrad": True}),
    "fp32 bf16 moments": (FP32, {"state_dtype": BF16}),
    "bf16 split": (BF16, {}),
    "bf16 split maximize": (BF16, {"maximize": True, "amsgrad": True}),
    "bf16 split bf16 moments stochastic": (BF16, {"state_dtype": BF16, "rounding": "stochastic", "seed": 3}),
    "bf16 full": (BF16, {"master_weights": "full"}),
    "bf16 none": (BF16, {"master_weights": None}),
    "bf16 none stochastic": (BF16, {"master_weights": None, "rounding": "stochastic", "seed": 9}),
    "fp16 full": (FP16, {}),
    "fp16 none": (FP16, {"master_weights": None}),
}


def trained(backend: str, kind: str, dtype: torch.dtype, options: dict[str, Any], clip: bool) -> list[torch.Tensor]:
    """Steps over many sizes, misaligned and strided gradients, one of them skipped: what is left."""
    with halfstep.backend(backend):
        parameters = [
            torch.nn.Parameter(placed(normal(size, dtype, size), torch.device("cpu"), at % 3))
            for at, size in enumerate(SIZES)
        ]
        optimizer = getattr(halfstep, kind)(
            parameters, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0 if clip else None, **options
        )
        scaler = halfstep.GradScaler("cpu", init_scale=256.0)
        scaler.scale(torch.zeros((), dtype=FP32, device="cpu"))
        for step in range(3):
            for at, parameter in enumerate(parameters):
                grad = normal(2 * parameter.numel(), dtype, 10 * step + at)
                parameter.grad = grad[::2] if at % 4 == 1 else placed(grad[::2].clone(), grad.device, step % 2)
            if step == 1:
                parameters[7].grad[3] = torch.nan  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        left = [value for entry in optimizer.canonical_state_dict()["state"].values() for value in entry.values()]
        return [parameter.detach() for parameter in parameters] + [torch.as_tensor(value) for value in left]


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_amp_steps_over_many_sizes(machine: SoftwareGPU, layout: str, kind: str, clip: bool) -> None:
    dtype, options = LAYOUTS[layout]
    expected = trained("reference", kind, dtype, options, clip)
    mine = trained("triton", kind, dtype, options, clip)
    for index, (a, b) in enumerate(zip(mine, expected, strict=True)):
        assert_same_bits(a, b, f"result {index}")


def test_gradients_are_only_read(machine: SoftwareGPU) -> None:
    """The check, the clipping and the step write to no gradient."""
    parameters = [torch.nn.Parameter(normal(size, BF16, size)) for size in (1, 17, 5000)]
    for parameter in parameters:
        parameter.grad = normal(parameter.numel(), BF16, 1)
    optimizer = halfstep.AdamW(parameters, max_grad_norm=1.0)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros((), dtype=FP32, device="cpu"))
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with machine.read_only(*grads), halfstep.backend("triton"):
        scaler.step(optimizer)
        scaler.update()
    with machine.read_only(*grads), halfstep.backend("triton"), pytest.raises(RuntimeError, match="only to be read"):
        halfstep.foreach_unscale_(grads, 0.5)
