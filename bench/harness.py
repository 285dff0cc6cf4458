"""The harness of `halfstep bench run`: cases, providers, and a check before each measurement.

A `Case` is one job at one size: its inputs, the bytes that any implementation must move, its float64 reference, and the
providers that can do it. `measure` runs it::

    results = measure(case, torch.device("cpu"), seconds=1.0)       # one `Result` per provider, in the case's order

**Checks.** A provider's values are first compared with float64. If their error exceeds the bound of the case, or the
provider raises an exception, the result says so and has no time.

**Rounds.** All providers that passed are timed in interleaved rounds (`timing`). A ratio is the median of the ratios in
each round.

**Copy.** A plain copy that moves as many bytes as the case (half read, half written) is timed in every round. The time
of the copy over the time of a provider is `copy_fraction`; 1 means as fast as a copy. The bytes are the least that the
job needs, the same for every provider. An implementation that moves more bytes has a lower `copy_fraction`.

On a GPU `graph_us` is the time to replay a CUDA graph of the call, without the time of the host.

**JSON.** `run_report` writes ``{"halfstep", "torch", "triton", "python", "device", "threads", "date", "quick",
"left_out", "copy_gb_per_s", "results": [Result as a dictionary, ...]}``; an infinite error is ``Infinity``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.bench.timing import Clock, clock_for, copy_call, paired, percentile, rounds

OK, WRONG, FAILED, UNAVAILABLE = "ok", "wrong", "failed", "unavailable"


class Unavailable(Exception):
    """A provider cannot do a case on this machine. The message says why, for example "needs a GPU"."""


@dataclass
class Prepared:
    """A provider, ready to run.

    Attributes:
        call: the timed call. It does not wait for the GPU, and may be repeated any number of times.
        values: does the whole job once, before any timing, and returns the values for `Case.error`.
    """

    call: Callable[[], Any]
    values: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One job at one size.

    Attributes:
        group: ``"softmax"``, ``"cast"``, ``"unscale"``, ``"adam"`` or ``"step"``.
        operation: the operation, for example ``"softmax forward"``.
        dtype: the dtypes, for example ``"bf16"`` or ``"fp32 to bf16"``.
        size: the dimensions, for example ``{"columns": 256, "elements": 2**22}``.
        axis: the key of `size` on the horizontal axis of pictures.
        bytes_moved: the least number of bytes per call: every input is read once and every output written once.
        bound: the largest error that passes the check.
        error_unit: the unit of `bound` and of errors.
        prepare: creates the inputs on a device. All providers share them and must not change them.
        providers: functions by name, each of which makes a `Prepared` from the inputs, or raises `Unavailable`.
        error: returns the error of the values of a job against float64, given the inputs. NaN never passes.
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
    providers: Mapping[str, Callable[[Any], Prepared]]
    error: Callable[[Any, Any], float]

    @property
    def name(self) -> str:
        """For example ``"softmax forward, bf16, 256 columns"``."""
        return f"{self.operation}, {self.dtype}, {self.size[self.axis]:,} {self.axis}"


@dataclass
class Result:
    """The measurements of one provider in one case. Times are microseconds per call; None means not measured.

    Attributes:
        status: ``"ok"``, ``"wrong"`` (error above the bound), ``"failed"`` (raised an exception) or ``"unavailable"``.
        reason: why there are no times; empty if there are.
        error: the error against float64, in `error_unit`; the check passes up to `bound`.
        p20_us, p50_us, p80_us: percentiles over all samples.
        gb_per_s: `bytes_moved` in 10^9 bytes over the median time.
        copy_fraction: time of a copy of as many bytes over the time of the provider, median of the rounds.
        speedup: time of the fastest other provider over the time of this one, median of the rounds; above 1 means
            faster than all others. Layouts of halfstep are not compared with each other.
        rounds: number of samples.
        launches: kernels and copies per call, on a GPU.
        host_us: time until the call returns, without waiting for the GPU; None on a CPU.
        graph_us: median time to replay a CUDA graph of the call; None if the call cannot be captured.
        extra_bytes: peak of the memory that a call allocates, including its results.
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


# ---------------------------------------------------------------------------------------------------------- measuring


def first_line(error: BaseException) -> str:
    """The type and the first line of the message of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class Checked:
    """A provider after its check; `job` is None unless it passed."""

    result: Result
    job: Prepared | None = None


def check(case: Case, inputs: Any, provider: str) -> Checked:
    """Do the job once with a provider and compare its values with float64.

    Returns:
        The result without times, and the job if it passed.
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
    except Exception as error:  # reported as the result of this provider; the others are still measured
        result.status, result.reason = FAILED, first_line(error)
        return Checked(result)
    if not result.error <= case.bound:  # so that NaN fails
        result.status = WRONG
        result.reason = f"error {result.error:.3g} {case.error_unit}, at most {case.bound:.3g} is allowed"
        return Checked(result)
    return Checked(result, job)


def ours(provider: str) -> bool:
    """Whether a provider is halfstep, with any layout."""
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
        case: the case.
        device: the device to measure on.
        seconds: approximate time of all rounds. There are always at least seven rounds.
        clock: a clock of the device, which may be reused for several cases.
        details: whether to measure launches, host time, memory and graph replay too.
        progress: called with a short description of each phase.

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
        calls = [*(job.call for _, job in passed), copy_call(case.bytes_moved, device)]
        *samples, copy = rounds(clock, calls, seconds)
        for index, ((result, job), own) in enumerate(zip(passed, samples, strict=True)):
            result.p20_us, result.p50_us, result.p80_us = (1e6 * percentile(own, share) for share in (0.2, 0.5, 0.8))
            result.gb_per_s = case.bytes_moved / 1e3 / result.p50_us
            result.copy_fraction = paired(copy, own)
            others = [
                one
                for position, ((other, _), one) in enumerate(zip(passed, samples, strict=True))
                if position != index and not (ours(other.provider) and ours(result.provider))
            ]
            result.speedup = min((paired(other, own) for other in others), default=None)
            result.rounds = len(own)
            if details:
                for name, value in clock.details(job.call).items():
                    setattr(result, name, value)
    return [one.result for one in found]
