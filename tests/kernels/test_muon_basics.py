"""Start here: steps of Muon in every implementation, against torch.optim and the rule."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from implementations import ALL, using

import halfstep

SHAPES = ((3, 5), (33, 64), (100, 70), (64, 64))  # of the last two, codes are in short and in whole blocks
ARGUMENTS: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.95, "weight_decay": 0.1},
    "plain": {"momentum": 0.95, "nesterov": False, "ns_steps": 3},
    "recent": {"momentum": 0.25, "adjust_lr_fn": "match_rms_adamw"},  # the other form of the average
}
MASTERS, STATES = (None, "full", "split", "split24"), (torch.float32, torch.bfloat16, "8bit")


def stepped(cls: Any, dtype: torch.dtype, device: torch.device, steps: int, **options: Any) -> Any:
    """The optimizer and its parameters after some steps, with a NaN in the first parameter's last gradient."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in SHAPES]

    parameters = [torch.nn.Parameter(tensor) for tensor in numbers()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group 0 rounds moments of 8 bits to nearest")
        optimizer = cls(parameters, lr=0.02, **options)
    for step in range(steps):
        for parameter, grad in zip(parameters, numbers(), strict=True):
            parameter.grad = grad
        if step == steps - 1:
            parameters[0].grad[1, 2] = math.nan  # type: ignore[index]
        optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", ALL)
def test_steps_are_those_of_torch(implementation: str, name: str, steps: int) -> None:
    """Up to rounding to bf16 inside of the products, which differs because torch rounds the norm too."""
    with using(implementation, "muon") as device:
        optimizer, results = stepped(halfstep.Muon, torch.float32, device, steps, **ARGUMENTS[name])
        reference, theirs = stepped(torch.optim.Muon, torch.float32, device, steps, **ARGUMENTS[name])
    for index, (result, expected) in enumerate(zip(results, theirs, strict=True)):
        buffer, torchs = (of.state[p]["momentum_buffer"] for of, p in ((optimizer, result), (reference, expected)))
        torch.testing.assert_close(buffer, torchs, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert buffer.isnan().sum() == (index == 0)  # the NaN stays where it was, but a matrix has one norm
        assert result.isnan().all() and expected.isnan().all() if index == 0 else result.isfinite().all()
        size = 0.02 * (0.2 * 10 if name == "recent" else 1.2)  # of an update: its singular values are near 1
        assert index == 0 or (result - expected).norm() <= 0.03 * size * (steps * min(result.shape)) ** 0.5


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize(
    "implementation",
    ["native", pytest.param("triton", marks=pytest.mark.exhaustive)],  # golden digests hold a part of them
)
def test_every_layout_has_the_bits_of_the_reference(implementation: str, master: str | None) -> None:
    options = [
        {"state_dtype": state, "rounding": rounding, "nesterov": nesterov, "momentum": 0.9 if nesterov else 0.25}
        for state, rounding, nesterov in product(STATES, ("nearest", "stochastic"), (True, False))
    ]
    few = slice(MASTERS.index(master), None, 7) if implementation == "triton" else slice(None)
    for layout in options[few]:
        runs = []
        for chosen in ("reference", implementation):
            with using(chosen, "muon") as device:
                steps = 2 if implementation == "triton" else 3
                both = stepped(
                    halfstep.Muon, torch.bfloat16, device, steps, master_weights=master, ns_steps=1, **layout
                )
            runs.append([(p.detach().cpu(), both[0].state[p]) for p in both[1]])
        for (expected, expected_state), (result, state) in zip(*runs, strict=True):
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7)), layout
            for key, value in expected_state.items():
                assert torch.equal(state[key].cpu().nan_to_num(7), value.cpu().nan_to_num(7)), (layout, key)
