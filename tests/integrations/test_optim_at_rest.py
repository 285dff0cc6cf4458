"""Steps that must change nothing, or nothing but the moments: lr = 0, gradients of 0, and both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import BF16, FP16, FP32
from states import held, same

import halfstep

LAYOUTS = {
    "fp32": (FP32, {}),
    "split": (BF16, {"master_weights": "split"}),
    "split, bf16 state": (BF16, {"master_weights": "split", "state_dtype": BF16}),
    "split24": (BF16, {"master_weights": "split24", "state_dtype": BF16, "rounding": "stochastic"}),
    "split, 8-bit state": (BF16, {"state_dtype": "8bit", "rounding": "stochastic"}),
    "full": (FP16, {"master_weights": "full"}),
    "none": (BF16, {"master_weights": None, "rounding": "stochastic", "state_dtype": BF16}),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_no_weight_and_no_master_moves_at_an_lr_of_zero(name: str, decoupled: bool) -> None:
    dtype, options = LAYOUTS[name]
    parameters = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in (100, 1, 0, (40, 110))]
    optimizer = halfstep.Adam(parameters, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=decoupled, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.0
            before = held(optimizer, parameters, ["master"])
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    assert same(held(optimizer, parameters, ["master"]), before)
    # As in torch, the moments go on, and the step is counted.
    assert all(float(state["step"]) == 6 for state in optimizer.state.values())


@pytest.mark.parametrize("gradient", [1.0, 2.0**-149, -(2.0**-149), 1e-30, float("nan")])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_first_step_of_warm_up_with_gradients_is_torchs(gradient: float, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    states = []
    for cls in (halfstep.AdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(2))]
        optimizer = cls(parameters, lr=0.0)
        parameters[0].grad, parameters[1].grad = torch.zeros(5), torch.zeros(2)
        parameters[0].grad[3] = gradient
        with halfstep.backend(backend):
            optimizer.step()
        states.append([optimizer.state[p] for p in parameters])
    for ours, theirs in zip(*states, strict=True):
        assert float(ours["step"]) == float(theirs["step"]) == 1
        # At -2^-149 (1 - beta1) of it rounds to 0, whose sign may differ.
        assert torch.equal(ours["exp_avg"].isnan(), theirs["exp_avg"].isnan())
        assert torch.equal(ours["exp_avg"].nan_to_num(), theirs["exp_avg"].nan_to_num())


def test_an_overflow_found_by_a_scaler_still_skips_that_first_step() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = halfstep.AdamW([p], lr=0.0)
    p.grad = torch.ones(3)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(1)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 0


def test_later_steps_with_gradients_of_zero_are_steps() -> None:
    for lr, steps in ((0.0, 2), (0.1, 3)):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = halfstep.AdamW([p], lr=lr)
        for _ in range(3):
            p.grad = torch.zeros(3)
            optimizer.step()
        assert float(optimizer.state[p]["step"]) == steps
