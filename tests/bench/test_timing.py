"""The timing of every benchmark: interleaved rounds, clocks, memory, and graphs on a model of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixed_clock import FixedClock
from stream_model import Model

from halfstep.bench import timing
from halfstep.bench.timing import CpuClock

CPU = torch.device("cpu")


def test_rounds_interleave_and_no_call_always_follows_the_same() -> None:
    a, b, c = calls = [lambda: None, lambda: 1, lambda: 2]
    clock = FixedClock({})
    samples = timing.rounds(clock, calls, seconds=24.0)
    assert all(sorted(order, key=id) == sorted((a, b, c), key=id) for order in clock.orders)
    followed = {pair for order in clock.orders for pair in pairwise(order)}
    assert followed == set(permutations((a, b, c), 2))
    assert len(clock.orders) == 8 == len(samples[2])  # three calls of a second fill 24 seconds eight times


def test_samples_stay_with_their_call_although_the_order_turns() -> None:
    calls = [lambda: None, lambda: 1, lambda: 2]
    clock = FixedClock({calls[0]: [2.0] * 9, calls[1]: [3.0] * 9})
    assert timing.rounds(clock, calls) == [[2.0] * 7, [3.0] * 7, [1.0] * 7]


def test_as_many_rounds_as_asked_for() -> None:
    assert [len(taken) for taken in timing.rounds(FixedClock({}), [lambda: None], least=3, most=3)] == [3]
    assert [len(taken) for taken in timing.rounds(FixedClock({}), [lambda: None], seconds=60.0, most=9)] == [9]


def test_what_is_prepared_is_not_timed() -> None:
    now = [0.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    clock = CpuClock(lambda: now[0], 0)
    (taken,) = timing.rounds(clock, [lambda: advance(1.0)], least=3, most=3, prepare=lambda: advance(100.0))
    assert taken == [1.0] * 3


def test_the_collector_waits_while_calls_are_timed() -> None:
    enabled: list[bool] = []
    assert gc.isenabled()
    timing.rounds(CpuClock(sample=0), [lambda: enabled.append(gc.isenabled())], least=2, most=2)
    assert enabled[-2:] == [False, False] and gc.isenabled()


def test_percentiles_lie_between_samples() -> None:
    assert [timing.percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]


def test_extra_memory_is_the_peak_of_what_was_allocated() -> None:
    x = torch.ones(1 << 16)
    clock = CpuClock()
    size = x.numel() * x.itemsize
    slack = 64  # numbers that torch wraps into tensors
    assert size <= clock.extra_bytes(lambda: x * x) <= size + slack  # type: ignore[operator]
    # Two intermediate results are alive when the third is made, and the first is gone by then.
    assert 2 * size <= clock.extra_bytes(lambda: ((x * x) * x) * x) <= 2 * size + slack  # type: ignore[operator]
    assert clock.extra_bytes(lambda: x.mul_(x)) <= slack  # type: ignore[operator]


def test_the_copy_moves_the_bytes_it_is_given() -> None:
    copied = timing.copy_call(1000, CPU)()
    assert copied.nbytes == 500
    assert timing.copy_gb_per_s(CpuClock(), 2**20, rounds=3) > 0


# ------------------------------------------------------------------------------------- on a model of a GPU that is late


@pytest.fixture
def gpu_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], tuple[timing.GpuClock, list[int]]]:
    """A clock on a model, and the cycles for which it has kept the GPU busy."""

    def made(model: Model) -> tuple[timing.GpuClock, list[int]]:
        busy: list[int] = []
        monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
        monkeypatch.setattr(torch.cuda, "_sleep", busy.append)
        return timing.GpuClock(model.device), busy

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
