"""The harness: no figure without a passed check, and the figures computed from samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixed_clock import FixedClock

from halfstep.bench.harness import FAILED, OK, UNAVAILABLE, WRONG, Case, Prepared, Unavailable, measure

CPU = torch.device("cpu")


def case_of(
    providers: dict[str, Callable[[Any], Prepared]], error: Callable[[Any, Any], float], moved: int = 1000
) -> Case:
    return Case("group", "doubling", "fp32", {"elements": 4}, "elements", moved, 0.5, "in all", _ones, providers, error)


def _ones(device: torch.device) -> torch.Tensor:
    return torch.ones(4, device=device)


def _distance(inputs: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - 2 * inputs).abs().max())


def doubler(factor: float, called: list[str] | None = None, name: str = "") -> Callable[[Any], Prepared]:
    def make(inputs: torch.Tensor) -> Prepared:
        def call() -> torch.Tensor:
            if called is not None:
                called.append(name)
            return inputs * factor

        return Prepared(call, call)

    return make


def test_only_providers_that_pass_their_check_get_figures() -> None:
    def raising(inputs: torch.Tensor) -> Prepared:
        raise RuntimeError("no such kernel\nsecond line")

    def absent(inputs: torch.Tensor) -> Prepared:
        raise Unavailable("needs a GPU")

    called: list[str] = []
    providers = {
        "right": doubler(2),
        "wrong": doubler(3, called, "wrong"),
        "nan": doubler(math.nan),
        "raises": raising,
        "away": absent,
    }
    right, wrong, nan, raises, away = measure(case_of(providers, _distance), CPU, seconds=0.01)
    assert (right.status, right.reason, right.error) == (OK, "", 0.0)
    assert right.p50_us is not None and right.p50_us > 0
    assert right.speedup is None and right.copy_fraction is not None, "no other provider passed"
    assert (wrong.status, wrong.error) == (WRONG, 1.0) and called == ["wrong"], "checked, and never called again"
    assert wrong.reason == "error 1 in all, at most 0.5 is allowed"
    assert nan.status == WRONG
    assert (raises.status, raises.reason) == (FAILED, "RuntimeError: no such kernel")
    assert (away.status, away.reason) == (UNAVAILABLE, "needs a GPU")
    for result in (wrong, nan, raises, away):
        figures = (result.p20_us, result.p50_us, result.p80_us, result.gb_per_s, result.copy_fraction, result.speedup)
        assert figures == (None,) * 6
        assert result.extra_bytes is None and result.rounds == 0


def test_figures_from_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times 1 to 7 s against a rival's, which is twice as slow in four rounds of seven and faster in three."""
    times = {
        "halfstep": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "b": [2.0, 4.0, 6.0, 8.0, 1.0, 1.0, 1.0],
        "c": [99.0] * 7,
        "halfstep full master": [0.5] * 7,  # another layout of ours is no rival
    }
    jobs = {name: Prepared(lambda name=name: name, lambda: torch.full((4,), 2.0)) for name in times}  # type: ignore[misc]
    clock = FixedClock({jobs[name].call: samples for name, samples in times.items()})
    copied = case_of({name: lambda inputs, job=job: job for name, job in jobs.items()}, _distance)  # type: ignore[misc]
    a, b, _, full = measure(copied, CPU, seconds=0.0, clock=clock)
    assert (a.p20_us, a.p50_us, a.p80_us) == pytest.approx((2.2e6, 4e6, 5.8e6))
    assert a.gb_per_s == pytest.approx(1000 / 4e9)
    assert a.copy_fraction == pytest.approx(1 / 4)
    assert a.speedup == 2.0, "the median of the ratios, not the ratio of the medians"
    assert b.speedup == 0.25 and full.speedup == 4.0
    assert a.rounds == 7


def test_a_provider_with_another_layout_is_measured_by_its_own_bytes() -> None:
    """Its GB/s, and the copy that it is compared with."""
    moved: list[int] = []

    class Clock(FixedClock):
        def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
            copies = [call() for call, _ in calls]
            moved[:] = sorted(2 * copy.nbytes for copy in copies if copy is not None)
            return [1.0 if copy is None else copy.nbytes / 100 for copy in copies]

    job = Prepared(lambda: None, lambda: torch.full((4,), 2.0))
    case = replace(
        case_of({"halfstep": lambda inputs: job, "b": lambda inputs: job}, _distance), layout_bytes={"b": 600}
    )
    ours, theirs = measure(case, CPU, seconds=0.0, clock=Clock({}))
    assert moved == [600, 1000]
    assert (ours.bytes_moved, ours.gb_per_s, ours.copy_fraction) == (1000, pytest.approx(1e-6), 5.0)
    assert (theirs.bytes_moved, theirs.gb_per_s, theirs.copy_fraction) == (600, pytest.approx(6e-7), 3.0)
