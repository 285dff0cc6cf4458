"""Pictures of formats: dynamic range, density of values, and all codes of a small format. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from halfstep.cli.figures import figure, save, tidy
from halfstep.cli.formats import number_text
from halfstep.cli.formats.properties import fields, short
from halfstep.cli.formats.shared_values import binade_values, lowest_exponent
from halfstep.cli.formats.values import Stored, code_text, special_text
from halfstep.numerics.formats.table import Format

PICTURES = ("range", "density", "codes")
_LOWEST, _HIGHEST = -178, 152  # powers of two drawn; fp64 goes on beyond both
_FAMILIES = {64: "#6b7280", 32: "#374151", 19: "#0f766e", 16: "#1d4ed8", 8: "#c2410c", 6: "#7c3aed", 4: "#be185d"}
_CLASSES = {"normal": "#b8d5fd", "subnormal": "#fde68a", "zero": "#e5e7eb", "infinity": "#fca5a5", "nan": "#d8b4fe"}
_INK = "#111827"


def _colour(format: Format) -> str:
    """The colour of a format, which depends on its size."""
    return _FAMILIES[min(_FAMILIES, key=lambda bits: abs(bits - format.bits))]


def _axes_of_powers(axes: Any, lowest: int, highest: int) -> None:
    """Label the axis with powers of two below and powers of ten above."""
    axes.set_xlim(lowest, highest)
    step = 20 if highest - lowest > 120 else 8 if highest - lowest > 40 else 4
    ticks = range(math.ceil(lowest / step) * step, highest + 1, step)
    axes.set_xticks(list(ticks), [f"$2^{{{tick}}}$" for tick in ticks])
    above = axes.secondary_xaxis("top", functions=(lambda x: x * math.log10(2), lambda x: x / math.log10(2)))
    apart = 10 if highest - lowest > 120 else 3 if highest - lowest > 40 else 1
    first = math.ceil(lowest * math.log10(2) / apart) * apart
    decimals = range(first, int(highest * math.log10(2)) + 1, apart)
    above.set_xticks(list(decimals), [f"$10^{{{tick}}}$" for tick in decimals])
    tidy(axes, "x", ("top", "right", "left"))


def _span(formats: Sequence[Format]) -> tuple[int, int]:
    """The range of powers of two to draw: what the formats need and room for labels, or what fits."""
    low, high = min(map(lowest_exponent, formats)), max(format.emax + 1 for format in formats)
    room = max(4, (high - low) // 5)
    return max(_LOWEST, low - room), min(_HIGHEST, high + room)


def draw_range(axes: Any, formats: Sequence[Format]) -> None:
    """Draw a bar from the smallest to the largest number of each format, lighter for subnormal numbers."""
    lowest, highest = _span(formats)
    _axes_of_powers(axes, lowest, highest)
    for row, format in enumerate(formats):
        start, normal, end = lowest_exponent(format), format.emin, math.log2(format.max)
        colour = _colour(format)
        left, right = max(start, lowest), min(end, highest)
        axes.barh(row, right - max(normal, lowest), left=max(normal, lowest), height=0.62, color=colour)
        if start < normal and normal > lowest:
            axes.barh(row, normal - left, left=left, height=0.62, color=colour, alpha=0.35, linewidth=0)
        inside = {"color": "white", "fontsize": 9, "va": "center"}
        if start < lowest:
            axes.text(lowest + 1, row, f"← {short(format.min_subnormal)}", ha="left", **inside)
        else:
            axes.text(start - 1, row, short(format.min_subnormal), ha="right", va="center", fontsize=9, color=_INK)
        if end > highest:
            axes.text(highest - 1, row, f"{short(format.max)} →", ha="right", **inside)
        else:
            axes.text(end + 1, row, short(format.max), ha="left", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(formats)), [f"{format.name}   {fields(format)}" for format in formats], fontsize=10)
    axes.set_ylim(len(formats) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Range: smallest to largest positive number; light: subnormal", loc="left", fontsize=12, pad=26)


def _centre(formats: Sequence[Format]) -> tuple[int, int]:
    """The range of powers of two of the narrow formats. Bars of wider formats cross it."""
    narrow = [format for format in formats if format.emax - lowest_exponent(format) < 60]
    if not narrow:
        return max(_LOWEST, min(map(lowest_exponent, formats))), min(_HIGHEST, max(one.emax + 1 for one in formats))
    return min(map(lowest_exponent, narrow)) - 4, max(format.emax + 1 for format in narrow) + 4


def draw_density(axes: Any, formats: Sequence[Format]) -> None:
    """Draw a cell for each binade, with log2 of the number of values in it."""
    from matplotlib.colors import Normalize

    lowest, highest = _centre(formats)
    _axes_of_powers(axes, lowest, highest)
    most = min(24, max(format.precision for format in formats))
    wide = highest - lowest > 80  # too many cells for text in them
    for row, format in enumerate(formats):
        first, last = max(lowest, lowest_exponent(format)), min(highest, format.emax + 1)
        bits = [math.log2(binade_values(format, exponent)) for exponent in range(first, last)]
        edges, heights = list(range(first, last + 1)), [row - 0.31, row + 0.31]
        axes.pcolormesh(edges, heights, [bits], cmap="YlGnBu", norm=Normalize(-2, 1.2 * most))
        for exponent, count in zip(range(first, last), () if wide else bits, strict=not wide):
            text = f"{count:.0f}" if count.is_integer() else f"{count:.1f}"
            ink = "white" if count > 0.6 * most else _INK
            axes.text(exponent + 0.5, row, text, ha="center", va="center", fontsize=7.5, color=ink, clip_on=True)
        if wide and bits:
            axes.text((first + last) / 2, row, f"{max(bits):.0f}", ha="center", va="center", fontsize=9, color="white")
    axes.set_yticks(range(len(formats)), [f"{format.name}   {fields(format)}" for format in formats], fontsize=10)
    axes.set_ylim(len(formats) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        "Density: numbers between one power of two and the next, as log2: 10 stands for 1024",
        loc="left",
        fontsize=12,
        pad=26,
    )


def _shade(stored: Stored) -> Any:
    """The colour of a code's class. Larger normal numbers are darker."""
    from matplotlib.colors import to_rgb

    if stored.sort != "normal":
        return _CLASSES[stored.sort]
    format, exponent = stored.format, number_text.power_of_two(Fraction(stored.value))
    share = (exponent - format.emin) / max(1, format.emax - format.emin)
    pale, full = to_rgb("#e3eefe"), to_rgb("#8ebdfb")
    return tuple(one + share * (other - one) for one, other in zip(pale, full, strict=True))


def _cell(stored: Stored) -> str:
    """The value with as many digits as fit a cell."""
    if isinstance(stored.value, float):
        return special_text(stored.value)
    text = short(stored.value)
    return text if len(text) <= 8 else number_text.rounded(stored.value, 3)


def draw_codes(axes: Any, format: Format) -> None:
    """Draw every code with its value, coloured by class."""
    columns = min(16, format.codes)
    rows = format.codes // columns
    for code in range(format.codes):
        stored = Stored(code, format)
        row, column = divmod(code, columns)
        text = _cell(stored)
        axes.fill_between([column, column + 1], row, row + 1, color=_shade(stored), linewidth=0)
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([column + 0.5 for column in range(columns)], [f"…{column:x}" for column in range(columns)])
    digits = len(code_text(0, format)) - 3
    axes.set_yticks(
        [row + 0.5 for row in range(rows)], [f"0x{row:0{digits}x}…" if digits else "0x…" for row in range(rows)]
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for column in range(1, columns):
        axes.axvline(column, color="white", linewidth=1)
    for row in range(1, rows):
        axes.axhline(row, color="white", linewidth=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    sorts = dict.fromkeys(Stored(code, format).sort for code in range(format.codes))
    handles = [axes.fill_between([], [], [], color=_CLASSES[sort], label=sort) for sort in _CLASSES if sort in sorts]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=5, frameon=False, fontsize=10)
    axes.set_title(f"All {format.codes} codes of {format.name} ({format.title})", loc="left", fontsize=12, pad=26)


def draw(kinds: Sequence[str], formats: Sequence[Format], small: Format, out: Path) -> None:
    """Draw panels beneath one another, 1200 pixels wide, and write them.

    Args:
        kinds: names from `PICTURES`, from top to bottom.
        formats: the formats whose range and density are drawn.
        small: the format whose codes are drawn; at most 8 bits.
        out: the file. Its suffix decides the format of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    heights = {
        "range": 1.3 + 0.32 * len(formats),
        "density": 1.3 + 0.32 * len(formats),
        "codes": 1.6 + 0.36 * max(1, small.codes // 16),
    }
    panels: dict[str, Callable[[Any], None]] = {
        "range": lambda axes: draw_range(axes, formats),
        "density": lambda axes: draw_density(axes, formats),
        "codes": lambda axes: draw_codes(axes, small),
    }
    chosen = [heights[kind] for kind in kinds]
    made = figure(12, sum(chosen))
    every = made.subplots(len(kinds), squeeze=False, height_ratios=chosen)[:, 0]
    for kind, axes in zip(kinds, every, strict=True):
        panels[kind](axes)
    save(made, out, dpi=100)
