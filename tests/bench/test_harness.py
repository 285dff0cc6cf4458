"""The harness: no figure without a green check, interleaved rounds, and what is computed from the samples."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_model import Model

from halfstep.bench import harness
from halfstep.bench.harness import FAILED, OK, UNAVAILABLE, WRONG, Case, CpuClock, Job, Unavailable, measure

CPU = torch.device("cpu")


def case_of(providers: dict[str, Callable[[Any], Job]], error: Callable[[Any, Any], float], moved: int = 1000) -> Case:
    return Case("group", "doubling", "fp32", {"elements": 4}, "elements", moved, 0.5, "in all", _ones, providers, error)


def _ones(device: torch.device) -> torch.Tensor:
    return torch.ones(4, device=device)


def _distance(inputs: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - 2 * inputs).abs().max())


def doubler(factor: float, called: list[str] | None = None, name: str = "") -> Callable[[Any], Job]:
    def make(inputs: torch.Tensor) -> Job:
        def call() -> torch.Tensor:
            if called is not None:
                called.append(name)
            return inputs * factor

        return Job(call, call)

    return make


class FixedClock(CpuClock):
    """Every call takes what it is told to; the copy, which is not listed, takes one second."""

    def __init__(self, seconds: dict[Any, Sequence[float]]) -> None:
        super().__init__(CPU)
        self.taken = {call: list(values) for call, values in seconds.items()}
        self.orders: list[list[Any]] = []

    def seconds(self, call: Callable[[], Any]) -> float:
        return 1.0

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        self.orders.append([call for call, _ in calls])
        return [self.taken[call].pop(0) if call in self.taken else 1.0 for call, _ in calls]


def test_only_what_passes_its_check_gets_figures() -> None:
    def raising(inputs: torch.Tensor) -> Job:
        raise RuntimeError("no such kernel\nsecond line")

    def absent(inputs: torch.Tensor) -> Job:
        raise Unavailable("needs a GPU")

    providers = {"right": doubler(2), "wrong": doubler(3), "nan": doubler(math.nan), "raises": raising, "away": absent}
    right, wrong, nan, raises, away = measure(case_of(providers, _distance), CPU, seconds=0.01)
    assert (right.status, right.reason, right.error) == (OK, "", 0.0)
    assert right.p50_us is not None and right.p50_us > 0
    assert (wrong.status, wrong.error) == (WRONG, 1.0)
    assert wrong.reason == "error 1 in all, allowed is 0.5"
    assert nan.status == WRONG
    assert (raises.status, raises.reason) == (FAILED, "RuntimeError: no such kernel")
    assert (away.status, away.reason) == (UNAVAILABLE, "needs a GPU")
    for result in (wrong, nan, raises, away):
        figures = (result.p20_us, result.p50_us, result.p80_us, result.gb_per_s, result.copy_fraction, result.speedup)
        assert figures == (None,) * 6
        assert result.extra_bytes is None and result.rounds == 0


def test_what_failed_its_check_is_never_called_again() -> None:
    called: list[str] = []
    measure(case_of({"right": doubler(2), "wrong": doubler(3, called, "wrong")}, _distance), CPU, seconds=0.01)
    assert called == ["wrong"]


def test_rounds_interleave_and_begin_with_another_each_time() -> None:
    calls = [lambda: None, lambda: 1]

    def copy() -> None:
        return None

    clock = FixedClock({})
    samples = harness.sample(clock, calls, copy, seconds=24.0)
    a, b, c = [*calls, copy]
    assert clock.orders[:4] == [[a, b, c], [b, c, a], [c, a, b], [a, b, c]]
    assert len(clock.orders) == 8 == len(samples.copy)  # three calls of a second fill 24 seconds eight times


def test_samples_stay_with_their_provider_although_the_order_turns() -> None:
    calls = [lambda: None, lambda: 1]
    samples = harness.sample(FixedClock({calls[0]: [2.0] * 9, calls[1]: [3.0] * 9}), calls, lambda: 2, seconds=0.0)
    assert samples.providers == [[2.0] * 7, [3.0] * 7] and samples.copy == [1.0] * 7


def test_figures_from_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times 1 to 7 s against a rival's, which is twice as slow in four rounds of seven and faster in three."""
    jobs = {name: Job(lambda name=name: name, lambda: torch.full((4,), 2.0)) for name in ("a", "b", "c")}  # type: ignore[misc]
    clock = FixedClock(
        {
            jobs["a"].call: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            jobs["b"].call: [2.0, 4.0, 6.0, 8.0, 1.0, 1.0, 1.0],
            jobs["c"].call: [99.0] * 7,
        }
    )
    copied = case_of({name: lambda inputs, job=job: job for name, job in jobs.items()}, _distance)  # type: ignore[misc]
    a, b, _ = measure(copied, CPU, seconds=0.0, clock=clock, details=False)
    assert (a.p20_us, a.p50_us, a.p80_us) == pytest.approx((2.2e6, 4e6, 5.8e6))
    assert a.gb_per_s == pytest.approx(1000 / 4e9)
    assert a.copy_fraction == pytest.approx(1 / 4)
    assert a.speedup == 2.0, "the median of the ratios, not the ratio of the medians"
    assert b.speedup == 0.5
    assert a.rounds == 7


def test_layouts_of_halfstep_are_no_rivals() -> None:
    jobs = {
        name: Job(lambda name=name: name, lambda: torch.full((4,), 2.0))  # type: ignore[misc]
        for name in ("halfstep", "halfstep full master", "torch fused")
    }
    clock = FixedClock({job.call: [second] * 7 for job, second in zip(jobs.values(), (4.0, 1.0, 8.0), strict=True)})
    case = case_of({name: lambda inputs, job=job: job for name, job in jobs.items()}, _distance)  # type: ignore[misc]
    split, full, fused = measure(case, CPU, seconds=0.0, clock=clock, details=False)
    assert (split.speedup, full.speedup, fused.speedup) == (2.0, 8.0, 0.125)


def test_one_provider_alone_has_no_ratio() -> None:
    (alone,) = measure(case_of({"halfstep": doubler(2)}, _distance), CPU, seconds=0.01)
    assert alone.speedup is None and alone.copy_fraction is not None


def test_the_collector_runs_again_after_timing() -> None:
    assert gc.isenabled()
    measure(case_of({"halfstep": doubler(2)}, _distance), CPU, seconds=0.01)
    assert gc.isenabled()


def test_extra_memory_is_the_peak_of_what_was_allocated() -> None:
    x = torch.ones(1 << 16)
    clock = CpuClock(CPU)
    size = x.numel() * x.itemsize
    slack = 64  # numbers that torch wraps into tensors
    assert size <= clock.extra_bytes(lambda: x * x) <= size + slack  # type: ignore[operator]
    # Two intermediate results are alive when the third is made, and the first is gone by then.
    assert 2 * size <= clock.extra_bytes(lambda: ((x * x) * x) * x) <= 2 * size + slack  # type: ignore[operator]
    assert clock.extra_bytes(lambda: x.mul_(x)) <= slack  # type: ignore[operator]


def test_the_copy_moves_the_bytes_it_is_given() -> None:
    copied = harness.copy_call(1000, CPU)()
    assert copied.nbytes == 500
    assert harness.copy_gb_per_s(CpuClock(CPU), 2**20, rounds=3) > 0


# ------------------------------------------------------------------------------------- on a model of a GPU that is late


@pytest.fixture
def gpu_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], tuple[harness.GpuClock, list[int]]]:
    """A clock on a model, and the cycles for which it has kept the GPU busy."""

    def made(model: Model) -> tuple[harness.GpuClock, list[int]]:
        busy: list[int] = []
        monkeypatch.setattr(harness, "FLUSH_BYTES", 4096)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
        monkeypatch.setattr(torch.cuda, "_sleep", busy.append)
        return harness.GpuClock(model.device), busy

    return made


def test_a_gpu_is_kept_busy_until_the_host_has_queued_a_call(gpu_clock: Any) -> None:
    with Model("late") as model:
        clock, busy = gpu_clock(model)
        x = torch.zeros(8, device=model.device)
        call = partial(x.add_, 1)
        assert clock.round([(call, 1), (call, 1)]) == [1e-3, 1e-3]
        assert busy == [1 << 17, 1 << 17] and x.tolist() == [2.0] * 8
    with Model("at once") as model:  # a host that is always behind
        clock, busy = gpu_clock(model)
        x = torch.zeros(8, device=model.device)
        call = partial(x.add_, 1)
        clock.round([(call, 1)])
        assert busy == [1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27]
        clock.round([(call, 1)])
        assert len(busy) == 6, "it is known by now that it cannot be helped"


def test_what_waits_is_not_captured(gpu_clock: Any) -> None:
    """As torch's foreach AMP step, which asks whether to skip: its failure would leave the process in capture mode."""
    begun: list[object] = []
    with Model("late") as model:
        clock, _ = gpu_clock(model)
        parameter = torch.nn.Parameter(torch.ones(8, device=model.device))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(torch.zeros((), device=model.device))
        begin = torch.cuda.CUDAGraph.capture_begin
        torch.cuda.CUDAGraph.capture_begin = lambda graph, **options: (begun.append(graph), begin(graph))  # type: ignore[method-assign,assignment,func-returns-value]

        def step() -> None:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

        assert clock.graph_us(step) is None
        assert begun == [] and not torch.cuda.is_current_stream_capturing() and not model.refusing
        assert clock.graph_us(lambda: parameter.grad.add(1)) == 1000.0  # type: ignore[union-attr]
        assert len(begun) == 1


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu_clock: Any) -> None:
    with Model("late") as model:
        clock, _ = gpu_clock(model)
        event = torch.cuda.Event()
        before = torch.cuda.current_stream()
        assert clock.graph_us(event.query) is None  # no wait, and yet refused
        assert torch.cuda.current_stream() is before and not torch.cuda.is_current_stream_capturing()
        assert clock.round([(partial(torch.zeros, 8, device=model.device), 1)]) == [1e-3]
