"""Advice on the loss scale: the interval, the limits and the losses against trying every power of two."""

import json
import math
from typing import Any

import falling
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep
from halfstep.numerics.formats.table import formats
from halfstep.numerics.statistics.advice import EXPONENTS, advise_scale
from halfstep.numerics.statistics.counts import statistics

INF = math.inf


def spread(low: int, high: int, numel: int, seed: int) -> torch.Tensor:
    """Numbers whose exponents are even between two."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(numel, generator=generator) * (high - low) + low
    return torch.exp2(exponents) * torch.randn(numel, generator=generator).sign()


@settings(max_examples=12, deadline=None)
@given(
    st.integers(-100, 10), st.integers(0, 60), st.sampled_from(["fp16", "bf16", "e5m2", "e4m3fn"]), st.integers(0, 99)
)
def test_losses_at_every_scale_match_the_oracle(low: int, width: int, name: str, seed: int) -> None:
    gradients = {
        "a": spread(low, low + width, 200, seed),
        "b": spread(low - 3, low + 9, 50, seed + 1),
        "c": torch.zeros(3),
    }
    share, headroom = 0.01, 2
    advice = advise_scale(gradients, name, share=share, headroom=headroom)
    fits, allowed = [], []
    for place, exponent in enumerate(advice.exponents):
        fallen = [falling.fall(one.numpy(), 2.0**exponent, formats[name]) for one in gradients.values()]
        assert advice.curves.flushed[:, place].tolist() == [one.flushed for one in fallen]
        assert advice.curves.subnormal[:, place].tolist() == [one.subnormal for one in fallen]
        assert advice.curves.overflow[:, place].tolist() == [one.overflow for one in fallen]
        fits.append(not any(one.overflow for one in fallen))
        allowed.append(fallen[0].flushed <= share * 200 and fallen[1].flushed <= share * 50)
    assert advice.high == 2.0 ** max(e for e, fit in zip(advice.exponents, fits, strict=True) if fit)
    assert advice.low == 2.0 ** min(e for e, fine in zip(advice.exponents, allowed, strict=True) if fine)
    place = advice.exponents.index(int(math.log2(advice.scale)))
    assert fits[place]
    if advice.interval:
        assert advice.low <= advice.scale <= max(advice.high / 2**headroom, advice.low)
    least = min(sum(advice.curves.flushed[:, : place + 1].sum(0)), *advice.curves.flushed.sum(0)[: place + 1].tolist())
    assert advice.curves.flushed[:, place].sum() == least, "no smaller scale flushes less"
    assert advice.lost == advice.curves.flushed[:, place].sum() / 250
    total = advice.statistics.total
    assert (total.flushed, total.subnormal) == (
        advice.curves.flushed[:, place].sum(),
        advice.curves.subnormal[:, place].sum(),
    )


def test_the_interval_its_limits_and_the_middle() -> None:
    gradients = {"small": torch.tensor([2.0**-40] * 99 + [2.0**-44]), "large": torch.tensor([2.0**-10, -1.5 * 2.0**-5])}
    advice = advise_scale(gradients, share=0.0)
    assert advice.interval == (2.0**20, 2.0**20)  # 2^-44 * 2^19 = 2^-25 is flushed; 1.5 * 2^-5 * 2^21 = 1.5 * 2^16
    assert (advice.below.name, advice.below.scale, advice.below.share) == ("small", 2.0**19, 0.01)
    assert (advice.above.name, advice.above.scale, advice.above.share) == ("large", 2.0**21, 0.5)
    assert advice.scale == 2.0**20, "no headroom is left, and nothing is lost"
    assert advice.verdict == "scaled"
    advice = advise_scale(gradients, share=0.01)
    assert advice.interval == (2.0**16, 2.0**20)
    assert advice.scale == 2.0**17
    assert advice.lost == 1 / 102
    # Nothing is even subnormal from 2^-9 to 2^15, of which two bits are kept; 1 is among these.
    advice = advise_scale({"a": torch.tensor([2.0**-5, 1.0])})
    assert (advice.low, advice.high, advice.scale) == (2.0**-19, 2.0**15, 1.0)
    # From 2^1 to 2^25.
    assert advise_scale({"a": torch.tensor([2.0**-15, 2.0**-10])}).scale == 2.0**12
    assert advise_scale({"a": torch.tensor([2.0**-15, 2.0**-10])}, headroom=0).scale == 2.0**13
    assert advise_scale({"a": torch.tensor([2.0**-5, 1.0])}, headroom=40).scale == 2.0**-19, (
        "not at the cost of the share"
    )


def test_verdicts_for_narrow_and_wide_ranges() -> None:
    cases = {
        "unscaled": [1.0, 2.0**-20],
        "scaled": [2.0**-30, 2.0**-10],
        "bf16": [1.0, 2.0**-50],
        "neither": [1.0, 2.0**-140],
    }
    for verdict, numbers in cases.items():
        assert advise_scale([torch.tensor(numbers)], share=0.0).verdict == verdict
    assert advise_scale([torch.tensor([2.0**127, 2.0**-10])]).verdict == "neither", "the topmost binade"
    assert advise_scale([torch.tensor([2.0**126, 2.0**-10])], share=0.0).verdict == "bf16"
    assert advise_scale([torch.tensor([2.0**100, 2.0**-10])], "bf16").verdict == "unscaled"
    assert advise_scale([torch.tensor([2.0**14])]).verdict == "scaled", "it fits, without the headroom"
    assert advise_scale([torch.tensor([2.0**14])], headroom=1).verdict == "unscaled"


def test_values_lost_before_counting_are_noted() -> None:
    assert advise_scale([torch.tensor([1.0, INF, math.nan, 2.0**-20])]).notes == (
        "1 elements are infinite and 1 NaN already; they are left out",
    )
    (zeros,) = advise_scale([torch.tensor([1.0, 0.0], dtype=torch.float16)]).notes
    assert "50.0 % of the elements of float16 tensors are 0" in zeros
    assert advise_scale([torch.tensor([1.0, 0.0])]).notes == ()


def test_gradients_of_every_source_say_the_same() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
    model(torch.randn(5, 20)).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    plain = advise_scale(model).as_dict()
    assert advise_scale(gradients).as_dict() == plain
    assert advise_scale(statistics(model, of="gradients")).as_dict() == plain
    assert advise_scale(statistics(gradients, "fp16", 2.0**9)).as_dict() == plain, "the scale is known"
    assert advise_scale(statistics([g * 512 for g in gradients.values()]), scaled_by=512.0).scale == plain["scale"]
    scaled = {name: gradient * 1024 for name, gradient in gradients.items()}
    assert advise_scale(scaled, scaled_by=torch.tensor(1024.0)).as_dict() == plain
    assert json.loads(json.dumps(plain, allow_nan=False))["format"] == "fp16"


def test_scales_considered_are_those_the_scaler_allows() -> None:
    scaler = halfstep.GradScaler("cpu", init_scale=2.0 ** int(EXPONENTS[-1]))
    assert scaler.get_scale() == 2.0**126
    halfstep.GradScaler("cpu", init_scale=2.0 ** int(EXPONENTS[0]))
    tiny = advise_scale([torch.tensor([2.0**-149])])
    assert (tiny.high, tiny.above) == (2.0**126, None)


A_SHARE = r"Expected share to be a number from 0 to below 1, but got "
A_HEADROOM = r"Expected headroom to be an integer of at least 0, but got "
NOTHING = r"gradients hold no finite number but 0.*after backward\(\)"
ONE = [torch.ones(1)]


def test_errors_name_the_argument() -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (ONE, {"share": True}, ValueError, A_SHARE),
        (ONE, {"headroom": 1.5}, ValueError, A_HEADROOM),
        *((nothing, {}, ValueError, NOTHING) for nothing in ([], [torch.zeros(3)], torch.nn.Linear(1, 1))),
        (ONE, {"scaled_by": 0.0}, ValueError, r"Expected scaled_by to be a number from 2\^-126 to 2\^126, or a tensor"),
        (statistics(ONE, "bf16"), {}, ValueError, "Expected statistics for fp16, but got statistics for bf16: count"),
        (statistics(ONE, "fp16", 3.0), {}, ValueError, "at a power of two as scale, but got scale 3.0"),
    ]
    for gradients, arguments, error, message in cases:
        with pytest.raises(error, match=message):
            advise_scale(gradients, **arguments)
