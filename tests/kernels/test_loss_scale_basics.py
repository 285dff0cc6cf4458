"""Start here: the loss scale against torch's GradScaler. test_loss_scale.py has the rules of Megatron-LM."""

import pytest
import torch
from devices import WHERE, kernels_on

from halfstep.kernels.loss_scale import DECIDED, LAST_SKIPPED, SKIPPED, Rules, State, update

# 0: a step without overflow, 1: one with; NaN is not 0.
FLAGS = (0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, float("nan"), 0.0)


def state(scale: float, hysteresis: int, device: torch.device) -> State:
    return State(
        torch.tensor(scale, device=device),
        torch.zeros((), dtype=torch.int32, device=device),
        torch.tensor(hysteresis, dtype=torch.int32, device=device),
        torch.zeros((), device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_it_follows_torchs_operator(where: str) -> None:
    with kernels_on(where) as device:
        ours, rules = state(1024.0, 1, device), Rules(1.1, 0.9, 2, 1, False, 2.0**-126, 2.0**126)
        scale, tracker = torch.tensor(1024.0), torch.zeros((), dtype=torch.int32)
        for flag in FLAGS:
            update(ours, torch.tensor(flag, device=device), rules)
            torch._amp_update_scale_(scale, tracker, torch.tensor(float(flag != 0)), 1.1, 0.9, 2)
            assert (ours.scale.item(), ours.clean_steps.item()) == (scale.item(), tracker.item())
            assert ours.skipped.item() == float(flag != 0)
        assert ours.counts[DECIDED].item() == len(FLAGS)
        assert ours.counts[SKIPPED].item() == 4 and ours.counts[LAST_SKIPPED].item() == 10


@pytest.mark.parametrize(("refill_on_clean", "expected"), [(False, 512.0), (True, 1024.0)])
@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_hysteresis_tolerates_overflows(where: str, refill_on_clean: bool, expected: float) -> None:
    """Two overflows with a clean step between them lower the scale, unless that step refills the hysteresis."""
    with kernels_on(where) as device:
        ours, rules = state(1024.0, 2, device), Rules(2.0, 0.5, 2000, 2, refill_on_clean, 1.0, 2048.0)
        for flag in (1.0, 0.0, 1.0):
            update(ours, torch.tensor(flag, device=device), rules)
        assert ours.scale.item() == expected


@pytest.mark.parametrize("where", [*WHERE, "cpu"])
def test_the_scale_stays_within_its_bounds(where: str) -> None:
    with kernels_on(where) as device:
        for flag, bound in ((1.0, 1.0), (0.0, 2048.0)):
            ours = state(1024.0, 1, device)
            for _ in range(20):
                update(ours, torch.tensor(flag, device=device), Rules(2.0, 0.5, 1, 1, False, 1.0, 2048.0))
            assert ours.scale.item() == bound
