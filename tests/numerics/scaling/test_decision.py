"""Decisions passed to an optimizer apply to exactly one step."""

import pytest
import torch

import halfstep
from halfstep.kernels.unscale import Factor
from halfstep.numerics.scaling.decision import Decision

SCALE = torch.tensor(8.0)


def started(values: list[float]) -> tuple[torch.nn.Parameter, halfstep.AdamW]:
    parameter = torch.nn.Parameter(torch.ones(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter, halfstep.AdamW([parameter], lr=0.1, eps=1e-3)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("values", [[8.0, -24.0], [8.0, float("inf")]])
def test_a_decision_has_the_effect_of_the_scaler_that_would_make_it(
    values: list[float], max_norm: float | None
) -> None:
    (expected, optimizer), scaler = started(values), halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    if max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    parameter, optimizer = started(values)
    verdict = optimizer.checker.verdict(Factor(SCALE, inverted=True))
    assert verdict is not None
    optimizer.apply(Decision(verdict, SCALE, max_norm))
    assert torch.equal(parameter, expected) and optimizer.last_verdict is verdict
    assert torch.equal(parameter, torch.ones(2)) == (values[1] == float("inf"))


def test_a_decision_applies_to_one_step() -> None:
    parameter, optimizer = started([3.0, 4.0])
    verdict = optimizer.checker.verdict()
    assert verdict is not None
    verdict.found_inf.fill_(1.0)
    optimizer.decide(Decision(verdict, None, None))
    for skips in (True, False):
        before = parameter.detach().clone()
        optimizer.step()
        assert torch.equal(parameter, before) == skips
    optimizer.decide(Decision(verdict, None, None, skips=False))
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2 and optimizer.last_verdict is verdict


def test_clipping_without_a_scaler_is_that_of_torch_in_the_next_step_only() -> None:
    (parameter, optimizer), (expected, reference) = started([3.0, 4.0]), started([3.0, 4.0])
    assert optimizer.clip_grad_norm_(1.0).item() == 5.0 and parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 4.0]
    torch.nn.utils.clip_grad_norm_([expected], 1.0)
    for _ in range(2):
        optimizer.step()
        reference.step()
        torch.testing.assert_close(parameter, expected)
        expected.grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip_grad_norm_(float("inf")).item() == 5.0
    with pytest.raises(ValueError, match="Expected max_norm to be a finite number above 0, but got 0"):
        optimizer.clip_grad_norm_(0)
