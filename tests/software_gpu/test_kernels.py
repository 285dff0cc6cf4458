"""The kernels as Triton compiles them, against the reference: bit for bit, softmax within its bound.

What tests/kernels and tests/integrations ask of the interpreted kernels they ask of the compiled ones too, when pytest
runs them with ``--software-gpu``. Here stands what only this machine can show, or what the interpreter is too slow for.
"""

from typing import Any

import pytest
import torch
from devices import normal
from kernel_cases import BF16, CASES, FP32, difference
from software_gpu.gpu import SoftwareGPU

import halfstep


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


SETTINGS = [
    {"inexact": 1, "reversed": True},
    {"inexact": -1},
    pytest.param({"inexact": 2}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_approximations_or_order(
    machine: SoftwareGPU, name: str, settings: dict[str, Any]
) -> None:
    """Approximations at either end of their error and between; blocks and warps last to first."""
    assert_right(machine, name, **settings)


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
