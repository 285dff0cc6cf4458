"""Pictures of where tensors fall in a format: exponents under the format's range, and a bar per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from halfstep.cli.figures import figure, tidy
from halfstep.cli.results import shortened

if TYPE_CHECKING:
    from halfstep.numerics.formats.table import Format
    from halfstep.numerics.statistics.advice import ScaleAdvice
    from halfstep.numerics.statistics.counts import Row, Statistics

# What becomes of an element, its colour and its meaning. Lost is warm and kept is blue, for eyes without red and green.
KINDS = {
    "zero": ("#b8bcc4", "zero before"),
    "flushed": ("#d55e00", "flushed to zero"),
    "subnormal": ("#e8a33d", "subnormal"),
    "normal": ("#0072b2", "normal"),
    "overflow": ("#7b2d8b", "overflow"),
    "not finite": ("#222222", "Inf or NaN before"),
}
OUTER = 0.18  # of the rest of the axis: the width of the zones beyond a format's range, at least
BARS = 16


def _at(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f" at scale $2^{{{exponent - 1}}}$" if fraction == 0.5 else f" at scale {scale:g}"


def _powers(axes: Any, ticks: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{value:.0f}}}$"))


def zones(exponents: dict[int, int], form: Format, scale: float) -> tuple[dict[str, tuple[float, float]], float, float]:
    """The exponents before scaling between which each class lies, and the ends of an axis to draw `exponents` on."""
    shift = math.log2(scale)
    first, subnormal, last = (form.emin - form.mantissa - 1 - shift, form.emin - shift, form.emax + 1 - shift)
    ends = pairwise((-math.inf, first, subnormal, last, math.inf))
    limits = dict(zip(("flushed", "subnormal", "normal", "overflow"), ends, strict=True))
    # A format as wide as fp32 says nothing beyond the numbers that are there.
    if form.emax > 60:
        drawn = (min(exponents) - 4, max(exponents) + 5) if exponents else (-20, 5)
        return limits, drawn[0] - shift, drawn[1] - shift
    # The zones beyond both ends are wide enough for their names.
    low = min([*exponents, form.emin - form.mantissa - 3]) - shift - 1
    high = max(max([*exponents, form.emax + 2]) - shift + 2, last + OUTER * (last - low))
    return limits, min(low, first - OUTER * (high - first)), high


def draw_exponents(axes: Any, exponents: dict[int, int], total: int, form: Format, scale: float, noun: str) -> None:
    """The share of elements (`noun`) of each exponent, which includes the scale, coloured by what becomes of them."""
    shift, total = math.log2(scale), total or 1
    limits, low, high = zones(exponents, form, scale)
    for name, (start, end) in limits.items():
        colour = KINDS[name][0]
        bars = {exponent - shift: number for exponent, number in exponents.items() if start <= exponent - shift < end}
        axes.bar([*bars], [100 * n / total for n in bars.values()], width=0.86, align="edge", color=colour)
        if max(start, low) < min(end, high):
            axes.axvspan(max(start, low), min(end, high), color=colour, alpha=0.10, linewidth=0)
            axes.bar(0, 0, color=colour, label=KINDS[name][1])
    axes.set_xlim(low, high)
    axes.legend(frameon=False, fontsize=9)
    _powers(axes, 9)
    axes.set(
        xlabel=f"magnitude of the {noun}" + (", unscaled" if shift else ""),
        ylabel="% of all",
        title=f"Exponents of the {noun} under the range of {form.name}{_at(scale) if shift else ''}",
    )
    tidy(axes, "y")


def draw_bars(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Draw a bar per tensor, divided by what its elements become, with the first row on top."""
    left, heights = [0.0] * len(rows), list(range(len(rows)))[::-1]
    for outcome, (colour, meaning) in KINDS.items():
        names = ("infinite", "nan") if outcome == "not finite" else (outcome,)
        shares = [100 * sum(row.share(name) for name in names) for row in rows]
        if any(shares):
            axes.barh(heights, shares, left=left, color=colour, height=0.78, label=meaning)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_yticks(heights, [shortened(row.name, 34) for row in rows], fontsize=8, parse_math=False)
    axes.set(title=title, xlabel="% of elements", xlim=(0, 100), ylim=(-0.6, max(len(rows), 1) - 0.4))
    tidy(axes, "x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14 - 0.6 / max(4, len(rows))))


def draw_scales(axes: Any, advice: ScaleAdvice) -> None:
    """Draw the largest share of any tensor that each scale would flush or overflow, and shade the interval."""
    exponents, curves = advice.exponents, advice.curves
    numbers = curves.numbers.clip(1)
    low, high, best = (math.log2(scale) for scale in (advice.low, advice.high, advice.scale))
    if low <= high:
        axes.axvspan(low, high, color=KINDS["normal"][0], alpha=0.12, linewidth=0, label="no more than accepted")
    floor = 1e-3
    for outcome, counts in (("flushed", curves.flushed), ("overflow", curves.overflow)):
        shares = 100 * (counts / numbers[:, None]).max(0)
        colour, meaning = KINDS[outcome]
        visible = [share if share > 0 else math.nan for share in shares]
        axes.plot(exponents, visible, color=colour, marker="o", markersize=3, label=f"{meaning}, worst tensor")
        floor = min([floor, *(share / 2 for share in shares if share > 0)])
    axes.axvline(best, color="black", linewidth=1.4, label=f"scale $2^{{{best:.0f}}}$")
    if advice.share:
        accepted = 100 * advice.share
        axes.axhline(accepted, color="#555555", linewidth=1.0, linestyle=":", label=f"accepted, {accepted:g} %")
    axes.set_yscale("log")
    axes.set_ylim(max(floor, 1e-7), 300)
    axes.set_xlim(max(min(low, best) - 12, exponents[0]), min(max(high, best, min(low, best + 40)) + 8, exponents[-1]))
    _powers(axes, 12)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="What each scale would lose of a gradient", xlabel="loss scale", ylabel="% of its numbers")
    axes.legend(frameon=False, fontsize=9, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.24))
    tidy(axes, "y")


def figure_of(statistics: Statistics, advice: ScaleAdvice | None = None) -> Any:
    """The figure of `Statistics.picture`, or with `advice` on its statistics, of `ScaleAdvice.picture`."""
    worst, total, form = statistics.worst(BARS), statistics.total, statistics.format
    bars = 0.24 * max(4, len(worst))
    heights = [3.4, 1.4 + bars] if advice is None else [3.2, 2.6, 1.4 + bars]
    drawing = figure(11, (4.6 if advice is None else 7.6) + bars)
    upper, *middle, lower = drawing.subplots(len(heights), 1, height_ratios=heights)
    noun = "elements" if advice is None else "gradients"
    draw_exponents(upper, total.exponents, total.elements, form, statistics.scale, noun)
    title = f"What {form.name} makes of each tensor"
    if advice is not None:
        draw_scales(middle[0], advice)
        title = f"What {form.name} makes of each gradient{_at(statistics.scale)}"
    if len(worst) < len(statistics):
        title += f", the {len(worst)} worst of {len(statistics)}"
    draw_bars(lower, worst, title)
    return drawing
