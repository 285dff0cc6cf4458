"""Pictures of where tensors fall in a format: exponents under the format's range, and a bar per tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halfstep.cli.figures import figure, tidy
from halfstep.cli.results import shortened

if TYPE_CHECKING:
    from halfstep.numerics.formats.table import Format
    from halfstep.numerics.statistics.advice import ScaleAdvice
    from halfstep.numerics.statistics.counts import Row, Statistics

# Distinguishable without red-green vision: what is lost is warm, what is kept is blue.
KIND_COLOURS = {
    "zero": "#b8bcc4",
    "flushed": "#d55e00",
    "subnormal": "#e8a33d",
    "normal": "#0072b2",
    "overflow": "#7b2d8b",
    "not finite": "#222222",
}
# For words on the pale colour of their zone.
INK = {**KIND_COLOURS, "subnormal": "#9a6200", "flushed": "#a84800"}
OUTER = 0.18  # of the rest of the axis: the width of the zones beyond a format's range, at least
BARS = 16
MEANINGS = {
    "zero": "zero before",
    "flushed": "flushed to zero",
    "subnormal": "subnormal",
    "normal": "normal",
    "overflow": "overflow",
    "not finite": "Inf or NaN before",
}


def _at(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f" at scale $2^{{{exponent - 1}}}$" if fraction == 0.5 else f" at scale {scale:g}"


def _kind(form: Format, exponent: int) -> str:
    """What most numbers with this exponent become."""
    if exponent < form.emin - form.mantissa - 1:
        return "flushed"
    if exponent < form.emin:
        return "subnormal"
    return "normal" if exponent <= form.emax else "overflow"


def draw_exponents(axes: Any, found: dict[int, int], total: int, form: Format, scale: float, what: str) -> None:
    """The share of elements of each exponent, as they were before scaling, coloured by what becomes of them.

    Args:
        axes: matplotlib's.
        found: how many numbers have each exponent, scale included: `Row.exponents`.
        total: how many elements there are.
        form, scale: what they are held in, multiplied by what.
        what: the elements' name, for the axis, such as ``"gradients"``.
    """
    shift = math.log2(scale)
    total = total or 1
    limits = {
        "flushed": (-math.inf, form.emin - form.mantissa - 1 - shift),
        "subnormal": (form.emin - form.mantissa - 1 - shift, form.emin - shift),
        "normal": (form.emin - shift, form.emax + 1 - shift),
        "overflow": (form.emax + 1 - shift, math.inf),
    }
    low = min([*found, form.emin - form.mantissa - 3]) - shift - 1
    high = max([*found, form.emax + 2]) - shift + 2
    # A format as wide as fp32 says nothing beyond the numbers that are there.
    if form.emax > 60:
        low, high = (min(found) - shift - 4, max(found) - shift + 5) if found else (-20 - shift, 5 - shift)
    else:  # the zones beyond both ends are wide enough for their names
        first, last = limits["flushed"][1], limits["overflow"][0]
        high = max(high, last + OUTER * (last - low))
        low = min(low, first - OUTER * (high - first))
    for kind, (start, end) in limits.items():
        start, end = max(start, low), min(end, high)
        if start < end:
            axes.axvspan(start, end, color=KIND_COLOURS[kind], alpha=0.10, linewidth=0)
    for kind in limits:
        bars = {exponent: number for exponent, number in found.items() if _kind(form, exponent) == kind}
        axes.bar(
            [exponent - shift for exponent in bars],
            [100 * number / total for number in bars.values()],
            width=0.86,
            align="edge",
            color=KIND_COLOURS[kind],
        )
    top = 100 * max(found.values(), default=0) / total or 1.0
    axes.set_xlim(low, high)
    axes.set_ylim(0, top * 1.26)
    for kind, (start, end) in limits.items():
        start, end = max(start, low), min(end, high)
        name = {"flushed": "flushed\nto zero"}.get(kind, kind)
        if end - start > 0.0155 * max(map(len, name.split("\n"))) * (high - low):
            axes.text(
                (start + end) / 2, top * 1.24, name, ha="center", va="top", fontsize=10, color=INK[kind],
                fontweight="bold", clip_on=True,
            )  # fmt: skip
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{value:.0f}}}$"))
    factor = _at(scale) if shift else ""
    axes.set(
        xlabel=f"magnitude of the {what}" + (", unscaled" if shift else ""),
        ylabel="% of all",
        title=f"Exponents of the {what} under the range of {form.name}{factor}",
    )
    tidy(axes, "y")


def draw_bars(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Draw a bar per tensor, divided by what its elements become, with the first row on top."""
    left = [0.0] * len(rows)
    places = list(range(len(rows)))[::-1]
    for kind, colour in KIND_COLOURS.items():
        if kind == "not finite":
            shares = [100 * (row.share("infinite") + row.share("nan")) for row in rows]
        else:
            shares = [100 * row.share(kind) for row in rows]
        if any(shares):
            axes.barh(places, shares, left=left, color=colour, height=0.78, label=MEANINGS[kind])
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_yticks(places, [shortened(row.name, 34) for row in rows], fontsize=8, parse_math=False)
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    axes.set(title=title, xlabel="% of elements")
    tidy(axes, "x")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14 - 0.6 / max(4, len(rows))))


def of_statistics(found: Statistics) -> Any:
    """The figure of `Statistics.picture`."""
    worst = found.worst(BARS)
    made = figure(11, 4.6 + 0.24 * max(4, len(worst)))
    upper, lower = made.subplots(2, 1, height_ratios=[3.4, 1.4 + 0.24 * max(4, len(worst))])
    total = found.total
    draw_exponents(upper, total.exponents, total.elements, found.format, found.scale, "elements")
    more = "" if len(worst) == len(found) else f", the {len(worst)} worst of {len(found)}"
    draw_bars(lower, worst, f"What {found.format.name} makes of each tensor{more}")
    return made


def draw_scales(axes: Any, advice: ScaleAdvice) -> None:
    """Draw the largest share of any tensor that each scale would flush or overflow, and shade the interval."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    exponents, curves = advice.exponents, advice.curves
    numbers = curves.numbers.clip(1)
    low, high, best = (math.log2(scale) for scale in (advice.low, advice.high, advice.scale))
    flushed = 100 * (curves.flushed / numbers[:, None]).max(0)
    overflow = 100 * (curves.overflow / numbers[:, None]).max(0)
    if low <= high:
        axes.axvspan(low, high, color=KIND_COLOURS["normal"], alpha=0.12, linewidth=0, label="no more than accepted")
    floor = 1e-3
    for kind, shares in (("flushed", flushed), ("overflow", overflow)):
        shown = [share if share > 0 else math.nan for share in shares]
        axes.plot(
            exponents,
            shown,
            color=KIND_COLOURS[kind],
            marker="o",
            markersize=3,
            label=f"{MEANINGS[kind]}, worst tensor",
        )
        floor = min([floor, *(share / 2 for share in shares if share > 0)])
    axes.axvline(best, color="black", linewidth=1.4, label=f"scale $2^{{{best:.0f}}}$")
    if advice.share:
        axes.axhline(
            100 * advice.share,
            color="#555555",
            linewidth=1.0,
            linestyle=":",
            label=f"accepted, {100 * advice.share:g} %",
        )
    axes.set_yscale("log")
    axes.set_ylim(max(floor, 1e-7), 300)
    axes.set_xlim(max(min(low, best) - 12, exponents[0]), min(max(high, best, min(low, best + 40)) + 8, exponents[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"$2^{{{value:.0f}}}$"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(title="What each scale would lose of a gradient", xlabel="loss scale", ylabel="% of its numbers")
    axes.legend(frameon=False, fontsize=9, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.24))
    tidy(axes, "y")


def of_advice(advice: ScaleAdvice) -> Any:
    """The figure of `ScaleAdvice.picture`."""
    found = advice.statistics
    worst = found.worst(BARS)
    made = figure(11, 7.6 + 0.24 * max(4, len(worst)))
    upper, middle, lower = made.subplots(3, 1, height_ratios=[3.2, 2.6, 1.4 + 0.24 * max(4, len(worst))])
    total = found.total
    draw_exponents(upper, total.exponents, total.elements, found.format, found.scale, "gradients")
    draw_scales(middle, advice)
    more = "" if len(worst) == len(found) else f", the {len(worst)} worst of {len(found)}"
    draw_bars(lower, worst, f"What {found.format.name} makes of each gradient{_at(found.scale)}{more}")
    return made
