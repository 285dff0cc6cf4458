"""Start here: steps of SGD in every implementation, against torch.optim and the rule."""

import math
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from implementations import ALL, using

import halfstep

SIZES = ((), (1,), (17,), (3, 70), (0,), (5, 31, 3), (40, 128), (2, 1040))
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    "momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
LAYOUTS = [
    {"master_weights": master, "state_dtype": state, "rounding": rounding}
    for master, state, rounding in product(
        ("split", "split24", "full", None), (torch.float32, torch.bfloat16, "8bit"), ("nearest", "stochastic")
    )
]


def tensors(dtype: torch.dtype, device: torch.device, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in SIZES]


def stepped(cls: Any, dtype: torch.dtype, device: torch.device, options: dict[str, Any]) -> Any:
    """The optimizer and its parameters after three steps, with a NaN in the gradients of the last one."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors(dtype, device, 0)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        optimizer = cls(parameters, **options)
    for seed in (1, 2, 3):
        for parameter, grad in zip(parameters, tensors(dtype, device, seed), strict=True):
            parameter.grad = grad
        if seed == 3:
            parameters[3].grad[1, 5] = math.nan  # type: ignore[index]
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", ALL)
def test_steps_are_those_of_torch(implementation: str, name: str) -> None:
    with using(implementation, "sgd") as device:
        _, results = stepped(halfstep.SGD, torch.float32, device, ARGUMENTS[name])
        _, theirs = stepped(torch.optim.SGD, torch.float32, device, ARGUMENTS[name])
        for index, (result, expected) in enumerate(zip(results, theirs, strict=True)):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert result.isnan().sum() == (index == 3)  # the NaN stays where it was


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
@pytest.mark.parametrize("implementation", ["native", "triton"])
def test_layouts_have_the_bits_of_the_reference(implementation: str, name: str) -> None:
    """All layouts in C++, by turns with each form of the momentum; the digests of every layout are in tests/golden."""
    for layout in LAYOUTS[name == "nesterov" :: 2 if implementation == "native" else 16]:
        runs = []
        for chosen in ("reference", implementation):
            with using(chosen, "sgd") as device:
                optimizer, parameters = stepped(halfstep.SGD, torch.bfloat16, device, ARGUMENTS[name] | layout)
            runs.append([(p.detach().cpu(), optimizer.state[p]) for p in parameters])
        for (expected, expected_state), (result, state) in zip(*runs, strict=True):
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7)), layout
            for key, value in expected_state.items():
                assert torch.equal(state[key].cpu().nan_to_num(7), value.cpu().nan_to_num(7)), (layout, key)
