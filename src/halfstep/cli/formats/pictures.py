"""Pictures of formats: dynamic range, and all codes of a small format. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from halfstep.cli.figures import figure, save, tidy
from halfstep.cli.formats.compare import fields, lowest_exponent
from halfstep.cli.formats.values import Stored, code_text, rounded, short
from halfstep.numerics.formats.table import Format

_LOWEST, _HIGHEST = -178, 152  # powers of two drawn; fp64 goes on beyond both
_FAMILIES = {64: "#6b7280", 32: "#374151", 19: "#0f766e", 16: "#1d4ed8", 8: "#c2410c", 6: "#7c3aed", 4: "#be185d"}
_CLASSES = {"normal": "#b8d5fd", "subnormal": "#fde68a", "zero": "#e5e7eb", "infinity": "#fca5a5", "nan": "#d8b4fe"}
_INK = "#111827"


def draw_range(axes: Any, formats: Sequence[Format]) -> None:
    """A bar from the smallest to the largest number of each format, on powers of two and ten; pale for subnormals."""
    low, high = min(map(lowest_exponent, formats)), max(format.emax + 1 for format in formats)
    room = max(4, (high - low) // 5)  # for the labels
    lowest, highest = max(_LOWEST, low - room), min(_HIGHEST, high + room)
    axes.set_xlim(lowest, highest)
    step, apart = (20, 10) if highest - lowest > 120 else (8, 3) if highest - lowest > 40 else (4, 1)
    ticks = range(math.ceil(lowest / step) * step, highest + 1, step)
    axes.set_xticks(list(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
    above = axes.secondary_xaxis("top", functions=(lambda x: x * math.log10(2), lambda x: x / math.log10(2)))
    decimals = range(math.ceil(lowest * math.log10(2) / apart) * apart, int(highest * math.log10(2)) + 1, apart)
    above.set_xticks(list(decimals), [f"$10^{{{tick}}}$" for tick in decimals])
    tidy(axes, "x", ("top", "right", "left"))
    axes.set_yticks(range(len(formats)), [f"{format.name}   {fields(format)}" for format in formats], fontsize=10)
    axes.set_ylim(len(formats) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Range: smallest to largest positive number; pale: subnormal", loc="left", fontsize=12, pad=26)
    for row, format in enumerate(formats):
        start, normal, end = lowest_exponent(format), format.emin, math.log2(format.max)
        left, middle, right = max(start, lowest), max(normal, lowest), min(end, highest)
        bar = {"height": 0.62, "color": _FAMILIES[min(_FAMILIES, key=lambda bits: abs(bits - format.bits))]}
        axes.barh(row, right - middle, left=middle, **bar)
        if left < middle:
            axes.barh(row, middle - left, left=left, alpha=0.35, linewidth=0, **bar)
        smallest, largest = short(format.min_subnormal), short(format.max)
        lower = (start - 1, smallest, "right") if start >= lowest else (lowest + 1, f"← {smallest}", "left")
        upper = (end + 1, largest, "left") if end <= highest else (highest - 1, f"{largest} →", "right")
        for (x, label, side), inside in ((lower, start < lowest), (upper, end > highest)):
            axes.text(x, row, label, ha=side, va="center", fontsize=9, color="white" if inside else _INK)


def draw_codes(axes: Any, format: Format) -> None:
    columns = min(16, format.codes)
    rows = format.codes // columns
    for code in range(format.codes):
        stored = Stored(code, format)
        row, column = divmod(code, columns)
        axes.fill_between([column, column + 1], row, row + 1, color=_CLASSES[stored.category], linewidth=0)
        text = stored.text(8)
        text = rounded(Fraction(stored.value), 3) if text.startswith("≈") else text
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([column + 0.5 for column in range(columns)], [f"…{column:x}" for column in range(columns)])
    names = [code_text(row * columns, format)[:-1] + "…" for row in range(rows)]
    axes.set_yticks([row + 0.5 for row in range(rows)], names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.vlines(range(1, columns), 0, rows, color="white", linewidth=1)
    axes.hlines(range(1, rows), 0, columns, color="white", linewidth=1)
    axes.spines[:].set_visible(False)
    categories = dict.fromkeys(Stored(code, format).category for code in range(format.codes))
    shown = [category for category in _CLASSES if category in categories]
    handles = [axes.fill_between([], [], [], color=_CLASSES[category], label=category) for category in shown]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=5, frameon=False, fontsize=10)
    axes.set_title(f"All {format.codes} codes of {format.name} ({format.title})", loc="left", fontsize=12, pad=26)


def draw(panels: Sequence[str], formats: Sequence[Format], small: Format, out: Path) -> None:
    """Draw the panels ``"range"``, of `formats`, and ``"codes"``, of the `small` one, 1200 pixels wide, to a file."""
    codes_height = 1.6 + 0.36 * max(1, small.codes // 16)
    heights = [codes_height if panel == "codes" else 1.3 + 0.32 * len(formats) for panel in panels]
    picture = figure(12, sum(heights))
    rows = picture.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for panel, axes in zip(panels, rows, strict=True):
        if panel == "codes":
            draw_codes(axes, small)
        else:
            draw_range(axes, formats)
    save(picture, out, dpi=100)
