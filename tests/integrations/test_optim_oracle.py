"""Adam and AdamW against float64: random configurations, a thousand steps; and the memory they need."""

import itertools
import math
from typing import Any

import layouts
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import BF16, FP16, FP32, bits
from tolerances import ADAM_ERROR_AGAINST_TORCH, ADAM_RUN_UNITS, STOCHASTIC_SIGMAS

import halfstep

pytestmark = pytest.mark.sample(3)

KEPT = {"fp32": (FP32, "auto"), "split": (BF16, "split"), "full bf16": (BF16, "full"), "full fp16": (FP16, "full")}
STEPS = 8


class Float64:
    """The textbook's Adam in float64, on one tensor, with the sizes that the bound of its fp32 twin is made of."""

    def __init__(self, weight: np.ndarray, options: dict[str, Any]) -> None:
        self.w, self.m, self.v = weight.copy(), np.zeros_like(weight), np.zeros_like(weight)
        self.top, self.size_of_m, self.bound, self.t = self.v.copy(), self.m.copy(), np.zeros_like(weight), 0
        self.options = options

    def step(self, grad: np.ndarray) -> None:
        o = self.options
        beta1, beta2 = o["betas"]
        self.t += 1
        g = -grad if o["maximize"] else grad
        if not o["decoupled"]:
            g = g + o["weight_decay"] * self.w
        size_of_g = np.abs(grad) + (0 if o["decoupled"] else o["weight_decay"] * np.abs(self.w))
        self.m = beta1 * self.m + (1 - beta1) * g
        self.size_of_m = beta1 * self.size_of_m + (1 - beta1) * size_of_g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        self.top = np.maximum(self.top, self.v) if o["amsgrad"] else self.v
        if o["decoupled"]:
            self.w = self.w - o["lr"] * o["weight_decay"] * self.w
        root = np.sqrt(self.top / (1 - beta2**self.t)) + o["eps"]
        update = o["lr"] / (1 - beta1**self.t)
        self.w = self.w - update * self.m / root
        # A few roundings of the update, and one of the weight. m may be small by cancellation, so its error goes with
        # the size of what it was made of.
        self.bound = self.bound + 2.0**-24 * (update * self.size_of_m / root * ADAM_RUN_UNITS + np.abs(self.w))


configurations = st.fixed_dictionaries(
    {
        "lr": st.floats(-5, -1).map(lambda x: 10**x),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)),
        "eps": st.floats(-10, -4).map(lambda x: 10**x),
        "weight_decay": st.one_of(st.just(0.0), st.floats(1e-4, 0.3)),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
        "decoupled": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
        "size": st.sampled_from([0, 1, 2, 3, 7, 16, 33]),
        "scale": st.sampled_from([1e-4, 1e-2, 1.0, 1e2]),
    }
)


def optimizer_of(parameters: list[Any], options: dict[str, Any], **more: Any) -> Any:
    known = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
    return halfstep.Adam(parameters, **known, decoupled_weight_decay=options["decoupled"], **more)


def masters_of(optimizer: Any, parameters: list[Any]) -> list[torch.Tensor]:
    state = optimizer.canonical_state_dict()["state"]
    return [state[index].get("master", p.detach()) for index, p in enumerate(parameters)]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(options=configurations)
def test_random_configurations_against_float64(options: dict[str, Any]) -> None:
    """Masters of every kind hold the same bits, and lie as near float64 as the roundings of their steps allow."""
    rng = np.random.default_rng(options["seed"])
    # Numbers with 8 significant bits, which every format here holds.
    numbers = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(BF16)  # noqa: E731
    start = numbers(options["size"])
    grads = (numbers(STEPS, options["size"]).float() * options["scale"]).to(BF16).to(FP16).to(BF16)
    exact = Float64(start.double().numpy(), options)
    for grad in grads:
        exact.step(grad.double().numpy())
    found = {}
    for name, (dtype, master) in KEPT.items():
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = optimizer_of([p], options, master_weights=master)
        for grad in grads:
            p.grad = grad.to(dtype)
            optimizer.step()
        found[name] = masters_of(optimizer, [p])[0]
    error = np.abs(found["fp32"].double().numpy() - exact.w)
    assert (error <= exact.bound).all(), (error / exact.bound).max()
    for name in found:
        assert (bits(found[name]) == bits(found["fp32"])).all(), name


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_thousand_steps_leave_every_master_with_the_bits_of_fp32_and_err_no_more_than_torchs(name: str) -> None:
    cls, torchs = getattr(halfstep, name), getattr(torch.optim, name)
    runs: dict[str, Any] = {
        "torch": (FP32, torchs, {}),
        "float64": (torch.float64, torchs, {}),
        **{kept: (dtype, cls, {"master_weights": master}) for kept, (dtype, master) in KEPT.items()},
    }
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(4_000, generator=generator).to(BF16)
    optimizers = {}
    for run, (dtype, make, options) in runs.items():
        optimizers[run] = make([torch.nn.Parameter(start.to(dtype, copy=True))], lr=1e-3, weight_decay=0.1, **options)
    for _ in range(1000):
        grad = torch.randn(4_000, generator=generator).to(BF16)
        for optimizer in optimizers.values():
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = grad.to(p.dtype)
            optimizer.step()
    masters = {run: masters_of(optimizers[run], optimizers[run].param_groups[0]["params"])[0] for run in KEPT}
    assert all((bits(master) == bits(masters["fp32"])).all() for master in masters.values())
    theirs = {run: optimizers[run].param_groups[0]["params"][0].detach() for run in ("torch", "float64")}
    errors = [(end.double() - theirs["float64"]).norm().item() for end in (masters["split"], theirs["torch"])]
    assert errors[0] / errors[1] <= ADAM_ERROR_AGAINST_TORCH[name]


def test_stochastic_rounding_is_unbiased_over_many_seeds() -> None:
    """After ten steps the mean weight over seeds is the fp32 weight, where nearest rounding has not moved at all."""
    size, seeds, steps, lr = 256, 300, 10, 3e-4

    def end(dtype: torch.dtype, **options: Any) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        optimizer = halfstep.AdamW([p], lr=lr, weight_decay=0.0, **options)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach().double()

    exact = end(FP32)
    assert (end(BF16, master_weights=None) == 1).all()
    ends = torch.stack([end(BF16, master_weights=None, rounding="stochastic", seed=seed) for seed in range(seeds)])
    # Below 1 bf16 numbers are 2^-8 apart: a rounding has a standard deviation of half of that at most, and each step
    # rounds once. The same for every element, and for their mean.
    deviation = 2.0**-8 / 2 * math.sqrt(steps / seeds)
    # With gradients of 1 the update does not depend on the weight, so it is that of the fp32 run.
    assert (ends.mean(0) - exact).abs().max() < STOCHASTIC_SIGMAS * deviation
    assert (ends.mean() - exact.mean()).abs() < STOCHASTIC_SIGMAS * deviation / math.sqrt(size)
    assert (exact - 1).abs().min() > 10 * deviation / math.sqrt(size), "the test would not notice a weight that stays"


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_step_needs_less_than_a_hundredth_of_the_state_on_top(name: str) -> None:
    """The profiler sees every allocation of the third step; their peak counts, and what is left afterwards."""
    dtype, options = layouts.LAYOUTS[name]
    parameters = [torch.nn.Parameter(torch.randn(1 << 9, 1 << 9).to(dtype)) for _ in range(4)]
    optimizer = halfstep.AdamW(parameters, max_grad_norm=1.0, **options)
    for p in parameters:
        p.grad = torch.randn_like(p)
    for _ in range(2):
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
        witness = torch.empty(4, dtype=torch.float32)  # that allocations are seen: the step may make none
    now = peak = seen = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            seen += 1
            now += event.nbytes()
            peak = max(peak, now)
    assert seen > 0 and witness.nbytes == 16, "the profiler saw no allocation at all"
    state = bytes_of(itertools.chain.from_iterable(state.values() for state in optimizer.state.values()))
    assert peak < state / 100, f"{peak} bytes on top of {state}"
    assert now < state / 1000
