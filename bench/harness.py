"""What every benchmark here is made of: cases, providers, a check before each figure, and rounds that interleave.

A `Case` is one job at one size: its inputs, the bytes that any implementation must move, the float64 truth, and who can
do it. `measure` runs it::

    results = measure(case, torch.device("cpu"), seconds=1.0)       # one `Result` per provider, in the case's order

**No figure without a green check.** A provider first computes what is compared with float64. If that errs by more than
the case's bound, or raises, its result says so and holds no time.

**Rounds.** All providers that passed are timed in turn, A B C A B C ..., beginning with another one each round, so that
a machine that slows down slows all. Ratios are taken round by round and their median is given.

**The copy.** A plain copy that moves as many bytes as the case (half read, half written) takes part in every round. Its
time over a provider's is `copy_fraction`: 1 means as fast as the machine copies. Bytes are those of the case, the least
the job needs, and the same for every provider; what an implementation moves beyond them shows as a lower figure.

On a CPU a sample is the mean of as many calls as fill a millisecond, caches as the calls before left them. On a GPU it
is one call between two events, after a write to a buffer larger than the L2 cache ("cold"), queued behind it so that
the host is ahead; `graph_us` is the same for the replay of a CUDA graph of the call, that is without the host.

**JSON.** `report` writes ``{"halfstep", "torch", "triton", "python", "device", "threads", "date", "quick", "left_out",
"copy_gb_per_s", "results": [Result as a dictionary, ...]}``; an infinite error is ``Infinity``.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OK, WRONG, FAILED, UNAVAILABLE = "ok", "wrong", "failed", "unavailable"
SAMPLE_SECONDS = 1e-3  # of one sample on a CPU, so that the clock's own cost does not count
LEAST_ROUNDS, MOST_ROUNDS = 7, 50
# The profiler's library else writes several lines to standard error each time. Read when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Unavailable(Exception):
    """A provider cannot do a case here; the message says why, for example "needs a GPU"."""


@dataclass
class Job:
    """A provider, ready to run.

    Attributes:
        call: what is timed. It waits for nothing on a GPU, and may be repeated any number of times.
        values: does the job from its beginning, once, before any timing, and returns what `Case.error` compares.
    """

    call: Callable[[], Any]
    values: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One job at one size.

    Attributes:
        group: ``"softmax"``, ``"cast"``, ``"unscale"``, ``"adam"`` or ``"step"``.
        operation: what is done, for example ``"softmax forward"``.
        dtype: of what, for example ``"bf16"`` or ``"fp32 to bf16"``.
        size: numbers that say how large, for example ``{"columns": 256, "elements": 2**22}``.
        axis: the key of `size` by which cases of one operation and dtype form a line.
        bytes_moved: per call, at least: every input read once and every output written once.
        bound: the greatest error that passes the check.
        error_unit: what errors are measured in.
        prepare: makes the inputs on a device. All providers share them and must leave them as they are.
        providers: by name; each makes a `Job` from the inputs, or raises `Unavailable`.
        error: of a job's values against float64, given the inputs; NaN never passes.
    """

    group: str
    operation: str
    dtype: str
    size: Mapping[str, int]
    axis: str
    bytes_moved: int
    bound: float
    error_unit: str
    prepare: Callable[[torch.device], Any]
    providers: Mapping[str, Callable[[Any], Job]]
    error: Callable[[Any, Any], float]

    @property
    def name(self) -> str:
        """For example ``"softmax forward, bf16, 256 columns"``."""
        return f"{self.operation}, {self.dtype}, {self.size[self.axis]:,} {self.axis}"


@dataclass
class Result:
    """What was found for one provider in one case. Times are microseconds per call; None where not measured.

    Attributes:
        status: ``"ok"``, ``"wrong"`` (beyond the bound), ``"failed"`` (raised) or ``"unavailable"``.
        reason: why there is no figure; empty if there is one.
        error: against float64, in `error_unit`; the check passes up to `bound`.
        p20_us, p50_us, p80_us: percentiles over all samples.
        gb_per_s: `bytes_moved` in 10^9 bytes over the median time.
        copy_fraction: time of a copy of as many bytes over the provider's, median of the rounds.
        speedup: time of the best other provider over this one's, median of the rounds; above 1 means faster than all.
            Two layouts of halfstep are not each other's rivals.
        rounds: how many samples were taken.
        launches: kernels and copies per call, on a GPU.
        host_us: until the call returns, on a GPU without waiting for it; on a CPU that is the time itself.
        graph_us: median of a CUDA graph's replay; None if the call cannot be captured.
        extra_bytes: the most memory allocated during a call beyond what was there before, results included.
    """

    group: str
    operation: str
    dtype: str
    size: dict[str, int]
    axis: str
    provider: str
    bytes_moved: int
    bound: float
    error_unit: str
    status: str = OK
    reason: str = ""
    error: float | None = None
    p20_us: float | None = None
    p50_us: float | None = None
    p80_us: float | None = None
    gb_per_s: float | None = None
    copy_fraction: float | None = None
    speedup: float | None = None
    rounds: int = 0
    launches: int | None = None
    host_us: float | None = None
    graph_us: float | None = None
    extra_bytes: int | None = None


# ------------------------------------------------------------------------------------------------------------- clocks


class CpuClock:
    """Times calls on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, roughly, to plan by."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def calls_per_sample(self, seconds: float) -> int:
        return max(1, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7)))

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        """One sample of each, in seconds per call."""
        taken = []
        for call, repeat in calls:
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            taken.append((time.perf_counter() - start) / repeat)
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
        """The fields of `Result` that need measurements of their own."""
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
        """The fields of `Result` that need measurements of their own."""
        return {
            "launches": self.launches(call),
            "host_us": self.host_us(call),
            "extra_bytes": self.extra_bytes(call),
            "graph_us": self.graph_us(call),
        }


Clock = CpuClock | GpuClock


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GpuClock(device) if device.type == "cuda" else CpuClock(device)


# ---------------------------------------------------------------------------------------------------------- measuring


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


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class Checked:
    """A provider after its check; `job` is None unless it passed."""

    result: Result
    job: Job | None = None


def check(case: Case, inputs: Any, provider: str) -> Checked:
    """Let a provider do the job once and compare with float64.

    Returns:
        Its result so far, and the job if it may be timed.
    """
    result = Result(
        group=case.group,
        operation=case.operation,
        dtype=case.dtype,
        size=dict(case.size),
        axis=case.axis,
        provider=provider,
        bytes_moved=case.bytes_moved,
        bound=case.bound,
        error_unit=case.error_unit,
    )
    try:
        job = case.providers[provider](inputs)
        result.error = case.error(inputs, job.values())
    except Unavailable as why:
        result.status, result.reason = UNAVAILABLE, str(why)
        return Checked(result)
    except Exception as error:  # whatever a provider raises is the finding, and the others still count
        result.status, result.reason = FAILED, first_line(error)
        return Checked(result)
    if not result.error <= case.bound:  # so that NaN fails
        result.status = WRONG
        result.reason = f"error {result.error:.3g} {case.error_unit}, allowed is {case.bound:.3g}"
        return Checked(result)
    return Checked(result, job)


@dataclass
class Samples:
    """Seconds per call: one list per provider, and the copy's, all equally long."""

    providers: list[list[float]] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)


def sample(clock: Clock, calls: Sequence[Callable[[], Any]], copy: Callable[[], Any], seconds: float) -> Samples:
    """Time `calls` and the copy in interleaved rounds, for about `seconds`."""
    everything = [*calls, copy]
    for call in everything:
        clock.seconds(call)
    planned = []
    for call in everything:
        expected = min(clock.seconds(call) for _ in range(3))
        repeat = clock.calls_per_sample(expected)
        planned.append((call, repeat, expected * repeat))
    fits = seconds / max(1e-9, sum(cost for _, _, cost in planned))
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(fits)))
    taken: list[list[float]] = [[] for _ in planned]
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            order = [(number + index) % len(planned) for index in range(len(planned))]
            for index, value in zip(order, clock.round([planned[index][:2] for index in order]), strict=True):
                taken[index].append(value)
    finally:
        if enabled:
            gc.enable()
    return Samples(taken[:-1], taken[-1])


def _percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest samples."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _paired(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def ours(provider: str) -> bool:
    """Whether a provider is halfstep, in whatever layout."""
    return provider.split()[0] == "halfstep"


def measure(
    case: Case,
    device: torch.device,
    *,
    seconds: float = 1.0,
    clock: Clock | None = None,
    details: bool = True,
    progress: Callable[[str], None] = lambda doing: None,
) -> list[Result]:
    """Check every provider of a case, then time those that passed.

    Args:
        case: what to measure.
        device: where.
        seconds: of timing, about; at least seven rounds are taken, however long they last.
        clock: of that device; pass one on to use it for many cases.
        details: also measure launches, host time, memory and graph replay.
        progress: is told what is being done, in a few words.

    Returns:
        One result per provider, in the case's order.
    """
    clock = clock or clock_for(device)
    inputs = case.prepare(device)
    found = []
    for provider in case.providers:
        progress(f"{case.name}: checking {provider}")
        found.append(check(case, inputs, provider))
    passed = [(one.result, one.job) for one in found if one.job is not None]
    if passed:
        progress(f"{case.name}: timing")
        samples = sample(clock, [job.call for _, job in passed], copy_call(case.bytes_moved, device), seconds)
        for index, ((result, job), own) in enumerate(zip(passed, samples.providers, strict=True)):
            result.p20_us, result.p50_us, result.p80_us = (1e6 * _percentile(own, share) for share in (0.2, 0.5, 0.8))
            result.gb_per_s = case.bytes_moved / 1e3 / result.p50_us
            result.copy_fraction = _paired(samples.copy, own)
            others = [
                one
                for position, ((other, _), one) in enumerate(zip(passed, samples.providers, strict=True))
                if position != index and not (ours(other.provider) and ours(result.provider))
            ]
            result.speedup = min((_paired(other, own) for other in others), default=None)
            result.rounds = len(own)
            if details:
                for name, value in clock.details(job.call).items():
                    setattr(result, name, value)
    return [one.result for one in found]
