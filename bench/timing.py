"""Time calls in interleaved rounds, together with a plain copy for comparison.

Each round of `rounds` times all calls once, in random order, so that a machine that slows down slows all of them, and
no call always finds the caches as the same predecessor left them. Ratios are computed per round (`paired`). Python's
garbage collector is disabled meanwhile. On a CPU, a sample is the mean of as many calls as take a millisecond, with
warm caches. On a GPU, it is one call between two events, after writing to a buffer larger than the L2 cache ("cold").
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]

LEAST_ROUNDS, MOST_ROUNDS = 7, 50
# Keeps the profiler from writing several lines to stderr per use. Its library reads this when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class CpuClock:
    """Times calls on the CPU with `read`, a function that returns wall or processor time in seconds.

    A sample repeats a call for `sample` seconds, so that the cost of reading the clock is negligible; 0 means one call.
    """

    device = torch.device("cpu")

    def __init__(self, read: Callable[[], float] = time.perf_counter, sample: float = 1e-3) -> None:
        self._now, self.sample = read, sample

    def seconds(self, call: Call) -> float:
        """The time of one call, for an estimate."""
        return self.round([(call, 1)])[0]

    def round(self, calls: Sequence[tuple[Call, int]]) -> list[float]:
        """One sample of each call, in seconds per call. The number with each call says how often to repeat it."""
        samples = []
        for call, repeat in calls:
            start = self._now()
            for _ in range(repeat):
                call()
            samples.append((self._now() - start) / repeat)
        return samples

    def details(self, call: Call) -> dict[str, Any]:
        """Further measurements, as attributes of `harness.Result`."""
        return {}

    def extra_bytes(self, call: Call) -> int:
        """The peak memory that a call allocates, from the allocations and releases that the profiler records."""
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            result = call()
            del result
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


FLUSH_BYTES = 1 << 28  # written before each call, or four times the L2 cache if that is more
# The maximum delay of the GPU while the host queues a call: about 0.1 s. A call that takes longer to queue is assumed
# to wait for the GPU.
MOST_CYCLES = 1 << 28


class GpuClock:
    """Times calls on a GPU with events and a cold L2 cache, excluding host time: the GPU sleeps until the call is
    queued, unless the call itself waits for the GPU.
    """

    sample = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._cycles: weakref.WeakKeyDictionary[Call, int] = weakref.WeakKeyDictionary()
        self._flush = torch.empty(max(4 * cache, FLUSH_BYTES), dtype=torch.int8, device=device)

    def seconds(self, call: Call) -> float:
        """The time of one call, for an estimate."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def round(self, calls: Sequence[tuple[Call, int]]) -> list[float]:
        """One cold sample of each call, in seconds. Waits for the GPU once, at the end."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
        for (call, _), (begin, end) in zip(calls, events, strict=True):
            cycles = self._cycles.get(call, 1 << 17)
            while True:
                if cycles <= MOST_CYCLES:
                    torch.cuda._sleep(cycles)
                self._flush.zero_()
                begin.record()
                call()
                end.record()
                if cycles > MOST_CYCLES or not begin.query():
                    break
                cycles *= 4  # the GPU reached the call before the host had queued all of it, and may have idled
            self._cycles[call] = cycles
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def details(self, call: Call) -> dict[str, Any]:
        """Further measurements, by the names of the attributes of `harness.Result`."""
        measured = (self.launches, self.host_us, self.extra_bytes, self.graph_us)
        return {measure.__name__: measure(call) for measure in measured}

    def launches(self, call: Call) -> int | None:
        """The number of kernels, copies and fills launched by one call; None if the profiler records none."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call()
            torch.cuda.synchronize(self.device)
        events = profile.profiler.kineto_results.events()
        return sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events) or None

    def host_us(self, call: Call, repeat: int = 5) -> float:
        """The median time until a call returns, in microseconds, with an empty queue before each call."""
        samples = []
        for _ in range(repeat):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return 1e6 * float(np.median(samples))

    def extra_bytes(self, call: Call) -> int:
        """The peak memory that a call allocates."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        del result
        return torch.cuda.max_memory_allocated(self.device) - before

    def graph_us(self, call: Call, repeat: int = 11) -> float | None:
        """The median time to replay a CUDA graph of the call, cold, in microseconds; None if it cannot be captured."""
        torch.cuda.synchronize(self.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:  # it waits; a failed capture may leave the process in capture mode
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(self.device)
        side, graph, result = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph(), None
        side.wait_stream(torch.cuda.current_stream(self.device))
        # Not `torch.cuda.graph`, which leaves its stream current if ending the capture fails.
        with torch.cuda.stream(side):
            call()
            torch.cuda.synchronize(self.device)
            try:
                graph.capture_begin()
                try:
                    result = call()
                finally:
                    graph.capture_end()
            except RuntimeError:  # the call does something that a capture forbids
                return None
            finally:
                torch.cuda.synchronize(self.device)
        replay = graph.replay  # a single object, since `round` remembers the delay of each call by identity
        samples = [self.round([(replay, 1)])[0] for _ in range(repeat)]
        del result
        return 1e6 * float(np.median(samples))


Clock = CpuClock | GpuClock


def clock_for(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else CpuClock()


def rounds(clock: Clock, calls: Sequence[Call], seconds: float = 0.0) -> list[list[float]]:
    """Time `calls` in `LEAST_ROUNDS` to `MOST_ROUNDS` interleaved rounds, which take about `seconds` in total.

    Returns:
        For each call, a list of its times in all rounds, in seconds.
    """
    planned, cost = [], 0.0
    for call in calls:
        clock.seconds(call)
        expected = min(clock.seconds(call) for _ in range(3))
        repeat = max(1, math.ceil(clock.sample / max(expected, 1e-7)))
        planned.append((call, repeat))
        cost += expected * repeat
    samples: list[list[float]] = [[] for _ in planned]
    shuffled = random.Random(0)
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(max(LEAST_ROUNDS, min(MOST_ROUNDS, int(seconds / max(1e-9, cost))))):
            order = shuffled.sample(range(len(planned)), len(planned))
            for index, sample in zip(order, clock.round([planned[index] for index in order]), strict=True):
                samples[index].append(sample)
    finally:
        if enabled:
            gc.enable()
    return samples


def paired(over: Sequence[float], under: Sequence[float]) -> float:
    """The median over the rounds of the ratio."""
    return float(np.median(np.divide(over, under)))


def copy_calls(sizes: Sequence[int], device: torch.device) -> list[Call]:
    """For each of `sizes`, a copy that reads half of the bytes and writes the other half. All copies share memory."""
    source = torch.zeros(max(1, max(sizes) // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    halves = [max(1, size // 2) for size in sizes]
    return [lambda to=target[:half], of=source[:half]: to.copy_(of) for half in halves]  # type: ignore[misc]


def copy_gb_per_s(clock: Clock, bytes_moved: int) -> float:
    """The median copy bandwidth of the machine, bytes read plus bytes written, in 10^9 bytes per second."""
    (samples,) = rounds(clock, copy_calls([bytes_moved], clock.device))
    return bytes_moved / 1e9 / float(np.median(samples))
