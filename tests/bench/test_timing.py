"""The timing of every benchmark: interleaved rounds, clocks, memory, and graphs on a model of a GPU."""

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


def test_samples_stay_with_their_call_although_the_order_changes() -> None:
    calls = [lambda: None, lambda: 1, lambda: 2]
    clock = FixedClock({calls[0]: [2.0] * 9, calls[1]: [3.0] * 9})
    assert timing.rounds(clock, calls) == [[2.0] * 7, [3.0] * 7, [1.0] * 7]


def test_the_number_of_rounds_follows_the_time_within_limits() -> None:
    for seconds, count in ((0.0, 7), (20.0, 20), (1e6, 50)):
        assert [len(samples) for samples in timing.rounds(FixedClock({}), [lambda: None], seconds)] == [count]


def test_a_sample_is_the_mean_of_as_many_calls_as_take_a_millisecond() -> None:
    now, called = [0.0], [0]

    def call() -> None:
        now[0] += 2**-13
        called[0] += 1

    (samples,) = timing.rounds(CpuClock(lambda: now[0]), [call])
    assert samples == [2**-13] * 7
    assert called[0] == 4 + 7 * 9, "a warm-up and three estimates, then nine calls for each of seven samples"


def test_garbage_collection_is_off_while_calls_are_timed() -> None:
    enabled: list[bool] = []
    assert gc.isenabled()
    timing.rounds(CpuClock(sample=0), [lambda: enabled.append(gc.isenabled())])
    assert enabled[-2:] == [False, False] and gc.isenabled()


def test_peak_memory_of_a_call_on_a_cpu() -> None:
    """The largest sum of what is there at one time, results included."""
    x = torch.zeros(1000, dtype=torch.float32)
    for call, tensors in (
        (lambda: x.add_(1), 0),
        (lambda: x + x, 1),
        (lambda: (x + x) * (x + x), 3),
        (lambda: [(x + x).sum(), (x * x).sum()], 1),
    ):
        assert 0 <= CpuClock().extra_bytes(call) - 4000 * tensors < 100


def test_the_copy_moves_the_bytes_it_is_given() -> None:
    copies = timing.copy_calls([1000, 40, 3000], CPU)
    assert [copy().nbytes for copy in copies] == [500, 20, 1500]
    assert [[part.nbytes for part in copy.__defaults__] for copy in copies] == [[500] * 2, [20] * 2, [1500] * 2]  # type: ignore[attr-defined]
    assert timing.copy_gb_per_s(FixedClock({}), 3 * 10**7) == 0.03, "the copy takes a second"


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


def test_calls_that_wait_are_not_captured(gpu_clock: Any) -> None:
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
