"""The harness of `halfstep bench run`: cases, providers, and a check before each measurement.

A `Case` is one job at one size: its inputs, the bytes that any implementation must move, its float64 reference, and the
providers that can do it. `measure` runs it. Measure your own kernels in the same way::

    def prepare(device):
        return torch.randn(2**24, dtype=torch.float32, device=device)

    case = Case(
        group="mine", operation="square", dtype="fp32", size={"elements": 2**24}, axis="elements",
        bytes_moved=8 * 2**24, bound=0.5, error_unit="in eps", prepare=prepare,
        providers={"mine": lambda x: Prepared(lambda: my_square(x)), "torch": lambda x: Prepared(lambda: x * x)},
        error=lambda x, y: float(((y.double() - x.double() ** 2) / x.double() ** 2).abs().max()) * 2**23,
    )
    results = measure(case, torch.device("cuda"))      # one `Result` per provider, in the case's order

``halfstep bench run --module my_cases`` measures and prints the cases that ``my_cases.cases(sizes)`` returns.

A provider that raises an exception, or whose error against float64 exceeds the bound, is not timed. The others are
timed in interleaved rounds (`timing`), together with a copy that moves as many bytes. Ratios are medians over the
rounds. Bytes are the minimum for the layout of the provider's state: moving more lowers its `copy_fraction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from halfstep.bench.timing import Call, Clock, clock_for, copy_calls, paired, rounds

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OK, WRONG, FAILED, UNAVAILABLE = "ok", "wrong", "failed", "unavailable"


class Unavailable(Exception):
    """A provider cannot run a case on this machine. The message says why, for example "needs a GPU"."""


@dataclass
class Prepared:
    """A provider, ready to run."""

    call: Call  # the timed call; it does not wait for the GPU, and can be repeated any number of times
    # Does the job once, before any timing, and returns the values for `Case.error`. Default: `call`.
    values: Call | None = None


@dataclass(frozen=True)
class Case:
    """One job at one size."""

    group: str  # of `cases.GROUPS`, or a name of your own
    operation: str  # for example "softmax forward"
    dtype: str  # for example "bf16" or "fp32 to bf16"
    size: Mapping[str, int]  # the dimensions, for example {"columns": 256, "elements": 2**22}
    axis: str  # the key of `size` by which cases of an operation differ
    bytes_moved: int  # the minimum per call: every input is read once and every output written once
    bound: float  # the maximum error that passes the check
    error_unit: str  # the unit of `bound` and of errors
    prepare: Callable[[torch.device], Any]  # creates inputs on a device, which providers share and must not modify
    providers: Mapping[str, Callable[[Any], Prepared]]  # from the inputs, return a `Prepared` or raise `Unavailable`
    error: Callable[[Any, Any], float]  # from inputs and values, the error against float64; NaN never passes
    layout_bytes: Mapping[str, int] = field(default_factory=dict)  # `bytes_moved` of providers with other layouts
    memory: bool = False  # whether to count `extra_bytes` on a CPU too, which takes seconds for a list of tensors

    @property
    def name(self) -> str:
        """For example ``"softmax forward, bf16, 256 columns"``."""
        return f"{self.operation}, {self.dtype}, {self.size[self.axis]:,} {self.axis}"


@dataclass
class Result:
    """The measurements of one provider in one case. Times are in microseconds per call; None means not measured."""

    group: str
    operation: str
    dtype: str
    size: dict[str, int]
    axis: str
    provider: str
    bytes_moved: int
    bound: float
    error_unit: str
    status: str = OK  # or "wrong" (error above the bound), "failed" (raised an exception), "unavailable"
    reason: str = ""  # why there are no times
    error: float | None = None  # against float64, in `error_unit`; the check passes up to `bound`
    p20_us: float | None = None  # percentiles over all samples
    p50_us: float | None = None
    p80_us: float | None = None
    gb_per_s: float | None = None  # `bytes_moved` in 10^9 bytes over the median time
    copy_fraction: float | None = None  # time of a copy of as many bytes over the provider's, median of the rounds
    # Time of the fastest other provider over the time of this one, median of the rounds; above 1 means faster than all
    # others. halfstep's layouts are not compared with each other.
    speedup: float | None = None
    rounds: int = 0  # number of samples
    launches: int | None = None  # kernels and copies per call, on a GPU
    host_us: float | None = None  # time until the call returns, without waiting for the GPU
    graph_us: float | None = None  # median time to replay a CUDA graph of the call; None if it cannot be captured
    extra_bytes: int | None = None  # peak memory that a call allocates through torch, including its results


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    """Standard normal fp32 values from a fixed seed. Up to 2^20 values are the same on every device."""
    source = torch.device("cpu") if math.prod(shape) <= 2**20 else device
    generator = torch.Generator(source).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=source).to(device)


def in_eps(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest error, relative to a magnitude or the smallest normal number of `dtype`, in units of its eps."""
    limits = torch.finfo(dtype)
    error = (got.detach().double() - want).abs_().div_(magnitude.clamp(min=limits.smallest_normal))
    return float(error.max()) / limits.eps


def check(case: Case, inputs: Any, provider: str) -> tuple[Result, Prepared | None]:
    """Run a provider once and compare its values with float64.

    Returns the result without times, and the prepared provider if it passed.
    """
    moved = case.layout_bytes.get(provider, case.bytes_moved)
    size = dict(case.size)
    result = Result(
        case.group, case.operation, case.dtype, size, case.axis, provider, moved, case.bound, case.error_unit
    )
    try:
        job = case.providers[provider](inputs)
        result.error = case.error(inputs, (job.values or job.call)())
    except Unavailable as why:
        result.status, result.reason = UNAVAILABLE, str(why)
    except Exception as error:  # reported in this provider's result; the others are still measured
        lines = str(error).strip().splitlines()
        result.status, result.reason = FAILED, ": ".join([type(error).__name__, *lines[:1]])
    else:
        if result.error <= case.bound:  # false for NaN
            return result, job
        result.status = WRONG
        result.reason = f"error {result.error:.3g} {case.error_unit}, at most {case.bound:.3g} is allowed"
    return result, None


def ours(provider: str) -> bool:
    """Whether a provider is halfstep, in any layout."""
    return provider.split()[0] == "halfstep"


def measure(
    case: Case,
    device: torch.device,
    *,
    seconds: float = 1.0,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Check every provider of a case, then time those that passed. Returns one result per provider, in order.

    Args:
        seconds: approximate total time of the rounds, of which there are at least seven.
        clock: a clock for the device, which can be reused for several cases.
        progress: called with a short description of each phase.
    """
    clock = clock or clock_for(device)
    inputs = case.prepare(device)
    results, passed = [], []
    for provider in case.providers:
        progress(f"{case.name}: checking {provider}")
        result, job = check(case, inputs, provider)
        results.append(result)
        if job is not None:
            passed.append((result, job.call))
    if not passed:
        return results
    progress(f"{case.name}: timing")
    sizes = list({result.bytes_moved: None for result, _ in passed})
    samples = rounds(clock, [*(call for _, call in passed), *copy_calls(sizes, device)], seconds)
    copies = dict(zip(sizes, samples[len(passed) :], strict=True))
    for (result, call), times in zip(passed, samples, strict=False):
        result.p20_us, result.p50_us, result.p80_us = (1e6 * np.percentile(times, (20, 50, 80))).tolist()
        result.gb_per_s = result.bytes_moved / 1e3 / result.p50_us
        result.copy_fraction = paired(copies[result.bytes_moved], times)
        rivals = [
            paired(rival_times, times)
            for (rival, _), rival_times in zip(passed, samples, strict=False)
            if rival is not result and not (ours(rival.provider) and ours(result.provider))
        ]
        result.speedup = min(rivals, default=None)
        result.rounds = len(times)
        for name, value in clock.details(call).items():
            setattr(result, name, value)
        if case.memory and result.extra_bytes is None:
            result.extra_bytes = clock.extra_bytes(call)
    return results
