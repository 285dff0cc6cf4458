"""The loss scale: every implementation against Python versions of the rules of torch, DeepSpeed and Megatron-LM."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, using

from halfstep.kernels.loss_scale import Rules, State, update

LEAST, MOST = 2.0**-126, 2.0**126


def fresh(scale: float, tolerance: int, device: torch.device) -> State:
    return State(
        torch.tensor([scale], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((1,), tolerance, dtype=torch.int32, device=device),
        torch.zeros((), device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )


def megatron(flags: list[float], scale: float, rules: Rules) -> Iterator[float]:
    """DynamicGradScaler of Megatron-LM: its budget comes back when the scale grows."""
    clean, budget = 0, rules.hysteresis
    for flag in flags:
        if flag:
            clean, budget = 0, budget - 1
            if budget <= 0:
                scale = max(scale * rules.backoff_factor, rules.least)
        else:
            clean += 1
            if clean == rules.growth_interval:
                clean, budget, scale = 0, rules.hysteresis, min(scale * rules.growth_factor, rules.most)
        yield scale


def deepspeed(flags: list[float], scale: float, rules: Rules) -> Iterator[float]:
    """DynamicLossScaler of DeepSpeed, which counts iterations instead of clean steps."""
    budget, last_overflow = rules.hysteresis, -1
    for iteration, flag in enumerate(flags):
        if flag:
            if budget == 1:
                scale = max(scale * rules.backoff_factor, rules.least)
            else:
                budget -= 1
            last_overflow = iteration
        else:
            if rules.refill_on_clean:
                budget = rules.hysteresis
            if (iteration - last_overflow) % rules.growth_interval == 0:
                budget, scale = rules.hysteresis, min(scale * rules.growth_factor, rules.most)
        yield scale


def torchs(flags: list[float], scale: float, rules: Rules) -> Iterator[float]:
    """torch's own operator."""
    value, tracker = torch.tensor([scale]), torch.zeros(1, dtype=torch.int32)
    for flag in flags:
        torch._amp_update_scale_(
            value, tracker, torch.tensor([flag]), rules.growth_factor, rules.backoff_factor, rules.growth_interval
        )
        yield value.item()


flags_of = st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0]), min_size=1, max_size=60)
rules_of = st.builds(
    Rules,
    growth_factor=st.sampled_from([2.0, 1.5, 4.0]),
    backoff_factor=st.sampled_from([0.5, 0.75, 0.25]),
    growth_interval=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    refill_on_clean=st.booleans(),
    least=st.sampled_from([LEAST, 1.0, 512.0]),
    most=st.sampled_from([MOST, 2.0**16, 2.0**24]),
)


def walk(flags: list[float], scale: float, rules: Rules, device: torch.device) -> list[float]:
    state = fresh(scale, rules.hysteresis, device)
    scales = []
    for number, flag in enumerate(flags, start=1):
        update(state, torch.tensor([flag], device=device), rules)
        scales.append(state.scale.item())
        assert state.skipped.item() == float(flag != 0)
        so_far = flags[:number]
        last = max((step for step, one in enumerate(so_far, start=1) if one), default=0)
        assert state.counts.tolist() == [number, sum(one != 0 for one in so_far), last]
    return scales


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=30, deadline=None)
@given(flags=flags_of, rules=rules_of)
def test_the_rules_of_deepspeed_and_megatron(name: str, flags: list[float], rules: Rules) -> None:
    with using(name, "loss_scale") as device:
        scales = walk(flags, 4096.0, rules, device)
    # Their loops compute in float64; the products differ from fp32's by a rounding each at most.
    assert scales == pytest.approx(list(deepspeed(flags, 4096.0, rules)), rel=60 * 2.0**-24)
    if not rules.refill_on_clean:
        assert scales == pytest.approx(list(megatron(flags, 4096.0, rules)), rel=60 * 2.0**-24)


@pytest.mark.parametrize(("growth", "backoff"), [(1.1, 0.9), (3.0, 1 / 3)])
@pytest.mark.parametrize("name", ALL)
def test_factors_that_fp32_cannot_represent_have_torchs_bits(name: str, growth: float, backoff: float) -> None:
    """Multiplied as fp32 by factors of fp32, every other step of 1.1 is off by an ulp."""
    generator = torch.Generator().manual_seed(0)
    count = 100 if name == "triton" else 1000  # under the interpreter a launch takes milliseconds
    flags = (torch.rand(count, generator=generator) < 0.5).float().tolist()
    rules = Rules(growth, backoff, 1, 1, False, LEAST, MOST)
    with using(name, "loss_scale") as device:
        state = fresh(65536.0, 1, device)
        scales = []
        for flag in flags:
            update(state, torch.tensor([flag], device=device), rules)
            scales.append(state.scale.item())
    assert scales == list(torchs(flags, 65536.0, rules))


@pytest.mark.parametrize("name", ALL)
def test_factors_far_from_one_lead_to_the_bounds(name: str) -> None:
    with using(name, "loss_scale") as device:
        assert walk([1.0], 8.0, Rules(2.0, 5e-324, 1, 1, False, LEAST, MOST), device) == [LEAST]
        assert walk([0.0], 8.0, Rules(1e308, 0.5, 1, 1, False, LEAST, MOST), device) == [MOST]


@pytest.mark.parametrize("flag", [float("nan"), float("inf"), 2.0, -1.0, 1e-40])
@pytest.mark.parametrize("name", ALL)
def test_any_flag_but_zero_is_an_overflow(name: str, flag: float) -> None:
    with using(name, "loss_scale") as device:
        state = fresh(8.0, 1, device)
        before = state.scale._version
        update(state, torch.tensor(flag, device=device), Rules(2.0, 0.5, 2000, 1, False, LEAST, MOST))
        assert (state.scale.item(), state.skipped.item()) == (4.0, 1.0)
        assert state.scale._version > before, "autograd would not notice"
