"""Time calls in interleaved rounds, and a plain copy for comparison.

Every benchmark times with `rounds`. Each round times all calls once, so that a machine that slows down slows all of
them, and ratios are computed per round (`paired`). The order is random in each round: a call starts with the caches
that the previous call left, and pays for dirty lines that are still to be written back, so no call may always follow
the same one. Python's garbage collector is off meanwhile.

On a CPU a sample is the mean of as many calls as take a millisecond, with warm caches. On a GPU it is one call between
two events, after a write to a buffer larger than the L2 cache ("cold"). The write is queued first, so that the host has
queued the call before the GPU reaches it.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

SAMPLE_SECONDS = 1e-3  # length of a sample on a CPU, so that the cost of reading the clock is negligible
LEAST_ROUNDS, MOST_ROUNDS = 7, 50
# Otherwise the profiler writes several lines to standard error each time. Its library reads this when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class CpuClock:
    """Times calls on the CPU.

    Args:
        now: returns the time in seconds: wall time, or the processor time of this process or thread.
        sample: length of a sample in seconds; 0 for one call.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, sample: float = SAMPLE_SECONDS) -> None:
        self.device = torch.device("cpu")
        self._now, self._sample = now, sample

    def seconds(self, call: Callable[[], Any]) -> float:
        """The time of one call, for an estimate."""
        start = self._now()
        call()
        return self._now() - start

    def calls_per_sample(self, seconds: float) -> int:
        return max(1, math.ceil(self._sample / max(seconds, 1e-7)))

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        """One sample of each call, in seconds per call."""
        taken = []
        for call, repeat in calls:
            start = self._now()
            for _ in range(repeat):
                call()
            taken.append((self._now() - start) / repeat)
        return taken

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """The peak of the memory that torch's allocator provides during a call, from the events of the profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            result = call()
        del result
        recorded = profile.profiler.kineto_results.events()
        now = peak = 0
        memory = sorted((event.start_ns(), event.nbytes()) for event in recorded if event.name() == "[memory]")
        for _, change in memory:
            now += change
            peak = max(peak, now)
        return peak

    def details(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Further measurements, by the names of the attributes of `harness.Result`."""
        return {"extra_bytes": self.extra_bytes(call)}


FLUSH_BYTES = 1 << 28  # written before each call, or four times the L2 cache if that is more
# The longest delay of the GPU while the host queues a call: about 0.1 s. A call that takes longer to queue is assumed
# to wait for the GPU.
MOST_CYCLES = 1 << 28


class GpuClock:
    """Times calls on a GPU with events, with a cold L2 cache.

    The time between the events does not include the host: the GPU sleeps (``torch.cuda._sleep``) until the call is
    queued. The sleep is made longer until that is the case. The exception are calls that wait for the GPU themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._cycles: weakref.WeakKeyDictionary[Callable[[], Any], int] = weakref.WeakKeyDictionary()
        self._flush = torch.empty(max(4 * cache, FLUSH_BYTES), dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The time of one call, for an estimate."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def calls_per_sample(self, seconds: float) -> int:
        return 1

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
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
                cycles *= 4  # the GPU reached the call before the host had queued it, and may have waited
            self._cycles[call] = cycles
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def host_us(self, call: Callable[[], Any], repeat: int = 5) -> float:
        """The median time until a call returns, in microseconds, with an empty queue before each call."""
        taken = []
        for _ in range(repeat):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return 1e6 * statistics.median(taken)

    def launches(self, call: Callable[[], Any]) -> int | None:
        """The number of kernels, copies and fills that one call launches; None if the profiler records none."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            call()
            torch.cuda.synchronize(self.device)
        recorded = profile.profiler.kineto_results.events()
        return sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in recorded) or None

    def extra_bytes(self, call: Callable[[], Any]) -> int:
        """The peak of the memory that a call allocates."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        del result
        return torch.cuda.max_memory_allocated(self.device) - before

    def waits(self, call: Callable[[], Any]) -> bool:
        """Whether a call makes the host wait for the GPU."""
        torch.cuda.synchronize(self.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize(self.device)
        return False

    def graph_us(self, call: Callable[[], Any], repeat: int = 11) -> float | None:
        """The median time to replay a CUDA graph of the call, cold, in microseconds; None if it cannot be captured.

        A call that waits is not captured, since a failed capture may leave the process in capture mode.
        """
        if self.waits(call):
            return None
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        kept = None
        # `torch.cuda.graph` leaves its stream current if the capture cannot be ended.
        with torch.cuda.stream(side):
            call()
            torch.cuda.synchronize(self.device)
            try:
                graph.capture_begin()
                try:
                    kept = call()
                finally:
                    graph.capture_end()
            except RuntimeError:  # the call does something that a capture forbids
                return None
            finally:
                torch.cuda.synchronize(self.device)
        replay = graph.replay  # one object, since `round` keeps the delay of each call by its identity
        taken = [self.round([(replay, 1)])[0] for _ in range(repeat)]
        del kept
        return 1e6 * statistics.median(taken)

    def details(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Further measurements, by the names of the attributes of `harness.Result`."""
        return {
            "launches": self.launches(call),
            "host_us": self.host_us(call),
            "extra_bytes": self.extra_bytes(call),
            "graph_us": self.graph_us(call),
        }


Clock = CpuClock | GpuClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GpuClock(device) if device.type == "cuda" else CpuClock()


# -------------------------------------------------------------------------------------------------------------- rounds


def rounds(
    clock: Clock,
    calls: Sequence[Callable[[], Any]],
    seconds: float = 0.0,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
    prepare: Callable[[], Any] = lambda: None,
) -> list[list[float]]:
    """Time `calls` in interleaved rounds.

    Args:
        clock: the clock of their device.
        calls: the calls.
        seconds: approximate time of all rounds together.
        least, most: the least and the largest number of rounds.
        prepare: called before each round; not timed.

    Returns:
        A list for each call, with its time in each round, in seconds.
    """
    planned = []
    for call in calls:
        prepare()
        clock.seconds(call)
        expected = min(clock.seconds(call) for _ in range(3 if least < most else 1))
        repeat = clock.calls_per_sample(expected)
        planned.append((call, repeat, expected * repeat))
    fits = seconds / max(1e-9, sum(cost for _, _, cost in planned))
    count = max(least, min(most, int(fits)))
    taken: list[list[float]] = [[] for _ in planned]
    shuffled = random.Random(0)
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            order = shuffled.sample(range(len(planned)), len(planned))
            prepare()
            for index, value in zip(order, clock.round([planned[index][:2] for index in order]), strict=True):
                taken[index].append(value)
    finally:
        if enabled:
            gc.enable()
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    """A percentile, by linear interpolation between the two nearest samples."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def paired(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios in each round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def copy_call(bytes_moved: int, device: torch.device) -> Callable[[], Any]:
    """A copy that reads half of `bytes_moved` and writes the other half."""
    source = torch.zeros(max(1, bytes_moved // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_gb_per_s(clock: Clock, bytes_moved: int, rounds: int = 10) -> float:
    """The median copy bandwidth of the machine: bytes read plus bytes written, in 10^9 per second."""
    call = copy_call(bytes_moved, clock.device)
    clock.seconds(call)
    return bytes_moved / 1e9 / statistics.median(clock.round([(call, 1)])[0] for _ in range(rounds))
