"""Times of calls: interleaved rounds, their percentiles, and the machine's copy to compare with.

Every benchmark times with `rounds`. All calls are timed once per round, so that a machine that slows down slows all;
ratios are taken round by round (`paired`). The order is drawn anew for each round: a call finds the caches as the one
before it left them and pays for the lines that are still to be written back, so no call may always follow the same one.
Python's garbage collector waits.

On a CPU a sample is the mean of as many calls as fill a millisecond, caches as the calls before left them. On a GPU it
is one call between two events, after a write to a buffer larger than the L2 cache ("cold"), queued behind it so that
the host is ahead.
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

SAMPLE_SECONDS = 1e-3  # of one sample on a CPU, so that the clock's own cost does not count
LEAST_ROUNDS, MOST_ROUNDS = 7, 50
# The profiler's library else writes several lines to standard error each time. Read when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class CpuClock:
    """Times calls on the CPU.

    Args:
        now: the clock, in seconds: wall time, or the processor time of this process or thread.
        sample: seconds that one sample fills with calls; 0 for one call.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, sample: float = SAMPLE_SECONDS) -> None:
        self.device = torch.device("cpu")
        self._now, self._sample = now, sample

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, roughly, to plan by."""
        start = self._now()
        call()
        return self._now() - start

    def calls_per_sample(self, seconds: float) -> int:
        return max(1, math.ceil(self._sample / max(seconds, 1e-7)))

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        """One sample of each, in seconds per call."""
        taken = []
        for call, repeat in calls:
            start = self._now()
            for _ in range(repeat):
                call()
            taken.append((self._now() - start) / repeat)
        return taken

    def extra_bytes(self, call: Callable[[], Any]) -> int | None:
        """Peak of what torch's allocator handed out during a call, followed event by event."""
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
        """What needs measurements of its own, by the names of `harness.Result`."""
        return {"extra_bytes": self.extra_bytes(call)}


FLUSH_BYTES = 1 << 28  # written between calls, or four times the L2 cache if that is more
# The longest that a GPU is kept busy while the host queues a call: about 0.1 s. A call that takes longer waits itself.
MOST_CYCLES = 1 << 28


class GpuClock:
    """Times calls on a GPU with events, its L2 cache emptied before each.

    Between the events is the GPU's work alone, not the host's: the GPU is kept busy (``torch.cuda._sleep``) until the
    call is queued, longer and longer until that is so. Only of a call that waits for the GPU itself the host is part.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._cycles: weakref.WeakKeyDictionary[Callable[[], Any], int] = weakref.WeakKeyDictionary()
        self._flush = torch.empty(max(4 * cache, FLUSH_BYTES), dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, roughly, to plan by."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def calls_per_sample(self, seconds: float) -> int:
        return 1

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        """One cold sample of each, in seconds; waits once, at the end."""
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
                cycles *= 4  # the GPU was there before the host was done, and may have waited for it
            self._cycles[call] = cycles
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def host_us(self, call: Callable[[], Any], repeat: int = 5) -> float:
        """Median microseconds until a call returns, the queue empty before each."""
        taken = []
        for _ in range(repeat):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        torch.cuda.synchronize(self.device)
        return 1e6 * statistics.median(taken)

    def launches(self, call: Callable[[], Any]) -> int | None:
        """Kernels, copies and fills that one call puts on the GPU; None where the profiler sees none of them."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            call()
            torch.cuda.synchronize(self.device)
        recorded = profile.profiler.kineto_results.events()
        return sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in recorded) or None

    def extra_bytes(self, call: Callable[[], Any]) -> int:
        """Peak of allocated memory during a call."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        del result
        return torch.cuda.max_memory_allocated(self.device) - before

    def waits(self, call: Callable[[], Any]) -> bool:
        """Whether a call has the host wait for the GPU."""
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
        """Median cold microseconds of the replay of a CUDA graph of the call; None if it cannot be captured.

        What waits is not tried: a capture that fails may leave the process in capture mode.
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
            except RuntimeError:  # capturing forbids what the call does
                return None
            finally:
                torch.cuda.synchronize(self.device)
        replay = graph.replay  # one object, by which `round` knows it
        taken = [self.round([(replay, 1)])[0] for _ in range(repeat)]
        del kept
        return 1e6 * statistics.median(taken)

    def details(self, call: Callable[[], Any]) -> dict[str, Any]:
        """What needs measurements of its own, by the names of `harness.Result`."""
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
        clock: of the device they run on.
        calls: any number.
        seconds: for all of it, about.
        least, most: rounds, whatever the time; equal ones say how many.
        prepare: called before each round, untimed.

    Returns:
        Seconds per call: a list for each of `calls`, all equally long.
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
    """By linear interpolation between the two nearest samples."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def paired(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def copy_call(bytes_moved: int, device: torch.device) -> Callable[[], Any]:
    """A copy that reads half of `bytes_moved` and writes the other half."""
    source = torch.zeros(max(1, bytes_moved // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_gb_per_s(clock: Clock, bytes_moved: int, rounds: int = 10) -> float:
    """The machine's copy bandwidth: 10^9 bytes read plus written per second, median."""
    call = copy_call(bytes_moved, clock.device)
    clock.seconds(call)
    return bytes_moved / 1e9 / statistics.median(clock.round([(call, 1)])[0] for _ in range(rounds))
