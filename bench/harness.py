"""What the benchmarks of `halfstep bench run` are made of: cases, providers, and a check before each figure.

A `Case` is one job at one size: its inputs, the bytes that any implementation must move, the float64 truth, and who can
do it. `measure` runs it::

    results = measure(case, torch.device("cpu"), seconds=1.0)       # one `Result` per provider, in the case's order

**No figure without a green check.** A provider first computes what is compared with float64. If that errs by more than
the case's bound, or raises, its result says so and holds no time.

**Rounds.** All providers that passed are timed in turn (`timing`). Ratios are taken round by round and their median is
given.

**The copy.** A plain copy that moves as many bytes as the case (half read, half written) takes part in every round. Its
time over a provider's is `copy_fraction`: 1 means as fast as the machine copies. Bytes are those of the case, the least
the job needs, and the same for every provider; what an implementation moves beyond them shows as a lower figure.

On a GPU `graph_us` is the time of the replay of a CUDA graph of the call, that is without the host.

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
    """A provider cannot do a case here; the message says why, for example "needs a GPU"."""


@dataclass
class Prepared:
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
        providers: by name; each makes a `Prepared` from the inputs, or raises `Unavailable`.
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
    providers: Mapping[str, Callable[[Any], Prepared]]
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


# ---------------------------------------------------------------------------------------------------------- measuring


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass
class Checked:
    """A provider after its check; `job` is None unless it passed."""

    result: Result
    job: Prepared | None = None


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
