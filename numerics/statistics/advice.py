"""Recommend a loss scale for gradients, and name the parameters that limit it.

The counts of one pass (counts.py) determine the losses at every power of two S. For gradients x:

    flushed(S)      the number of elements of a tensor that x * S rounds to zero; decreases with S
    overflow(S)     the number of elements that overflow; increases with S. None is allowed, since one skips the step
    high            the largest S at which no element overflows
    low             the smallest S at which no tensor loses more than the accepted share of its elements to zero

The recommended scale is at most high / 2^headroom, so that gradients can grow by this factor. Among these scales, it is
one that flushes the fewest elements, and then leaves the fewest subnormal. Among equally good scales, it is 1 or
otherwise the middle one, so that gradients can shrink, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfstep.kernels.cells import CELLS, CLASSES, LOWEST, ROWS, ZERO
from halfstep.numerics.formats.table import Format, formats
from halfstep.numerics.messages import percent, shown
from halfstep.numerics.statistics.counts import Statistics, checked_scale, statistics
from halfstep.numerics.statistics.named_tensors import named_tensors

EXPONENTS = np.arange(-126, 127)  # log2 of the scales that are compared: those that GradScaler allows
_ONE = 126  # the index of the scale 1
_AS_DICT = ("format", "scale", "low", "high", "below", "above", "share", "headroom", "lost", "verdict", "notes")


class Limit(NamedTuple):
    """The parameter that limits the interval of scales on one side."""

    name: str
    scale: float  # the first scale outside of the interval, a factor of two beyond its end
    share: float  # of the parameter's finite nonzero elements that is lost at this scale


class Curves(NamedTuple):
    """The losses at every scale 2^EXPONENTS, as int64 (tensors, scales)."""

    flushed: np.ndarray  # elements that are flushed to zero
    subnormal: np.ndarray  # elements that become subnormal
    overflow: np.ndarray  # elements that overflow
    numbers: np.ndarray  # int64 (tensors,): finite nonzero elements


@dataclass(frozen=True)
class ScaleAdvice:
    """A recommended loss scale and its reasons, as returned by `advise_scale`."""

    format: Format  # of the gradients
    scale: float  # the recommended loss scale, a power of two
    low: float  # the smallest scale at which no tensor loses more than `share` of its elements
    high: float  # the largest scale at which nothing overflows. If it is below `low`, no scale is good enough
    below: Limit | None  # the parameter that limits the scale from below; None if none does
    above: Limit | None  # the parameter that limits the scale from above; None if none does
    share: float  # as passed to `advise_scale`
    headroom: int
    lost: float  # the share of all finite nonzero elements that are flushed at `scale`
    # "unscaled" (the format suffices without loss scaling), "scaled" (with loss scaling), "bf16" (the format's range is
    # too small, but that of bf16 suffices) or "neither"
    verdict: str
    statistics: Statistics = field(repr=False)  # of the gradients at `scale`
    notes: tuple[str, ...]  # about the gradients
    curves: Curves = field(repr=False)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval ``(low, high)`` of good scales; None if there is none."""
        return (self.low, self.high) if self.low <= self.high else None

    @property
    def exponents(self) -> list[int]:
        """log2 of the scales of `curves`."""
        return EXPONENTS.tolist()

    def as_dict(self) -> dict[str, Any]:
        """The recommendation as a dict that can be written as JSON."""
        limits = {"below": self.below and self.below._asdict(), "above": self.above and self.above._asdict()}
        plain = {name: getattr(self, name) for name in _AS_DICT}
        return plain | {"format": self.format.name, **limits, "notes": list(self.notes)}

    def __str__(self) -> str:
        return shown("advice_text", self)

    def picture(self, path: str | Path) -> None:
        """Draw exponents under the format's range at the scale, what each scale loses, and bars per parameter."""
        shown("picture", self.statistics, self, path)


def _curves(counted: Statistics, format: Format) -> Curves:
    """The losses at all scales from the counts at one, which must be a power of two."""
    cells = counted.counts[:, :CELLS].reshape(len(counted), ROWS, CLASSES)[:, :ZERO]
    below = np.concatenate([np.zeros((len(counted), 1), np.int64), cells.sum(2).cumsum(1)], axis=1)  # below each row
    numbers = below[:, -1]
    shift = EXPONENTS - round(math.log2(counted.scale))

    # The rows of three thresholds at each scale. Elements in the first and last row have left fp32's range and stay.
    thresholds = (format.emin - format.mantissa - 1, format.emin, format.emax)
    tie, normal, top = ((exponent - shift - LOWEST).clip(0, ZERO - 1) for exponent in thresholds)
    inside_tie, inside_top = ((row > 0) & (row < ZERO - 1) for row in (tie, top))
    flushed = below[:, tie.clip(1)] + np.where(inside_tie, cells[:, tie, 0], 0)
    overflow = numbers[:, None] - below[:, (top + 1).clip(1, ZERO - 1)] + np.where(inside_top, cells[:, top, 2], 0)
    return Curves(flushed, below[:, normal.clip(1)] - flushed, overflow, numbers)


def _counted(gradients: Any, format: Format, scaled_by: float | torch.Tensor) -> Statistics:
    """The statistics of the gradients without their scale."""
    factor = checked_scale("scaled_by", float(scaled_by))
    if isinstance(gradients, Statistics):
        if gradients.format != format:
            raise ValueError(
                f"Expected statistics for {format.name}, but got statistics for {gradients.format.name}: count for "
                "that format, or pass the gradients themselves"
            )
        scale = gradients.scale * factor
        if math.frexp(scale)[0] != 0.5:
            raise ValueError(
                f"Expected statistics at a power of two as scale, but got scale {scale}: with other scales, values are "
                "rounded before they are counted"
            )
        return gradients.relabelled(scale)
    of = "gradients" if isinstance(gradients, torch.nn.Module) else "parameters"
    return statistics(named_tensors(gradients, "gradients", of), format, 1 / factor, errors=False).relabelled(1.0)


def advise_scale(
    gradients: Any, format: Any = "fp16", *, share: float = 1e-3, headroom: int = 2,
    scaled_by: float | torch.Tensor = 1.0,
) -> ScaleAdvice:  # fmt: skip
    """Recommend a loss scale, and report whether a format's range and precision suffice. Waits for the device.

    Args:
        gradients: a module (its ``.grad`` are used), gradients in any form that `halfstep.statistics` accepts, its
            result at any power of two, or ``AmpMonitor.statistics()``.
        format: the format of the gradients.
        share: the largest share of values of a gradient that may be flushed to zero.
        headroom: bits by which gradients may grow before they overflow.
        scaled_by: the scale that the gradients are already multiplied by, such as ``scaler.get_scale()``.

    Returns:
        `ScaleAdvice`; print it.

    Raises:
        ValueError: an argument is out of range, or no gradient has a finite nonzero value.
        TypeError: an element is not a tensor that can be counted.

    Examples:
        >>> gradients = {"w": torch.tensor([1e-8, 1e-4, 0.5])}
        >>> advice = halfstep.advise_scale(gradients)
        >>> advice.low, advice.scale, advice.high
        (4.0, 8192.0, 65536.0)
        >>> advice.verdict
        'scaled'
    """
    chosen = formats.element(format)
    if isinstance(share, bool) or not 0 <= share < 1:
        raise ValueError(f"Expected share to be a number from 0 to below 1, but got {share!r}")
    if isinstance(headroom, bool) or not isinstance(headroom, int) or headroom < 0:
        raise ValueError(f"Expected headroom to be an integer of at least 0, but got {headroom!r}")
    counted = _counted(gradients, chosen, scaled_by)
    curves = _curves(counted, chosen)
    if not curves.numbers.sum():
        raise ValueError(
            "gradients hold no finite number but 0, so no scale is better than another; call advise_scale after "
            "backward() and before zero_grad()"
        )
    allowed = curves.flushed <= share * curves.numbers[:, None]
    fits = curves.overflow.sum(0) == 0
    last, first = int(np.flatnonzero(fits)[-1]), int(np.flatnonzero(allowed.all(0))[0])
    best = _best(curves, last, first, headroom)
    scale, low, high = (2.0 ** int(EXPONENTS[index]) for index in (best, first, last))
    verdict = "neither"
    if first <= last:
        verdict = "unscaled" if first <= _ONE <= last - headroom else "scaled"
    elif chosen.name != "bf16" and _fits_bf16(counted, share):
        verdict = "bf16"
    below = _limit(counted.names, curves.flushed, curves.numbers, first - 1)
    above = _limit(counted.names, curves.overflow, curves.numbers, last + 1)
    lost = int(curves.flushed[:, best].sum()) / int(curves.numbers.sum())
    kept, notes = counted.at(scale), _notes(counted)
    return ScaleAdvice(chosen, scale, low, high, below, above, share, headroom, lost, verdict, kept, notes, curves)


def _best(curves: Curves, last: int, first: int, headroom: int) -> int:
    """The index of the recommended scale in `EXPONENTS`, as the module's docstring defines it."""
    limit = max(0, last - headroom)
    if limit < first <= last:
        return first  # losing no more than the accepted share matters more than the whole headroom
    flushed, subnormal = (counts.sum(0)[: limit + 1] for counts in (curves.flushed, curves.subnormal))
    good = np.flatnonzero((flushed == flushed[-1]) & (subnormal + flushed == subnormal[-1] + flushed[-1]))
    return _ONE if _ONE in good else int(good[0] + good[-1]) // 2


def _limit(names: Sequence[str], lost: np.ndarray, numbers: np.ndarray, index: int) -> Limit | None:
    """The tensor that loses the largest share of its elements at the scale with this index."""
    if not 0 <= index < EXPONENTS.size:
        return None
    shares = lost[:, index] / numbers.clip(1)
    worst = int(shares.argmax())
    return Limit(names[worst], 2.0 ** int(EXPONENTS[index]), float(shares[worst]))


def _fits_bf16(counted: Statistics, share: float) -> bool:
    """Whether bf16 holds the unscaled gradients.

    It overflows inside its topmost binade, all of which counts as too large: these classes may be of another format.
    """
    form = formats["bf16"]
    curves = _curves(counted, form)
    cells = counted.at(1.0).counts[:, :CELLS].reshape(len(counted), ROWS, CLASSES)
    too_large = int(cells[:, form.emax - LOWEST : ZERO].sum())
    return too_large == 0 and bool((curves.flushed[:, _ONE] <= share * curves.numbers).all())


def _notes(counted: Statistics) -> tuple[str, ...]:
    total, notes = counted.total, []
    if total.infinite or total.nan:
        notes.append(f"{total.infinite:,} elements are infinite and {total.nan:,} NaN already; they are left out")
    narrow = [row for row in counted if row.dtype.startswith(("float16", "float8"))]
    zeros = sum(row.zero for row in narrow) / max(1, sum(row.elements for row in narrow))
    if zeros:
        notes.append(
            f"{percent(zeros)} % of the elements of {narrow[0].dtype} tensors are 0; what was flushed before cannot be "
            "told from these"
        )
    return tuple(notes)
