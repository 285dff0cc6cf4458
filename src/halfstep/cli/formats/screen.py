"""What only the screen shows: colours of bits and outcomes, and the line between two neighbours of a format."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rich.text import Text

from halfstep.cli.formats.text import outcome
from halfstep.cli.formats.values import Encoded, Stored
from halfstep.cli.terminal import joined, styled, text

_STYLES = {
    "exact": "good", "exact subnormal": "good", "subnormal": "note", "saturated": "note",
    "underflow": "bad", "overflow": "bad", "no NaN": "bad", "no sign": "bad",
}  # fmt: skip


def bits(stored: Stored) -> Text:
    """The bits of the fields, coloured and separated by spaces."""
    return joined(*(styled(digits, name) for name, digits in stored.fields), by=" ")


def coloured_outcome(encoded: Encoded) -> Text:
    """`outcome` in its colour."""
    return styled(outcome(encoded), _STYLES.get(outcome(encoded), ""))


def _row(width: int, labels: Sequence[tuple[int, Text]]) -> Text:
    """Labels centred on columns, moved inward from the ends; one that would touch the label before it is left out."""
    line = Text("  ")
    for column, label in labels:
        start = 2 + min(max(column - label.cell_len // 2, 0), width - label.cell_len)
        if start >= line.cell_len + 2 or line.cell_len == 2:
            line.pad_right(start - line.cell_len)
            line.append_text(label)
    return line


def column_of(position: Fraction, width: int) -> int:
    """The column of a position between 0 and 1. Only 0, 1/2 and 1 are in the first, middle and last column."""
    last, middle, half = width - 1, (width - 1) // 2, Fraction(1, 2)
    if position <= 0 or position >= 1:
        return 0 if position <= 0 else last
    if position == half:
        return middle
    column = round(position * last)
    return min(max(column, 1), middle - 1) if position < half else min(max(column, middle + 1), last - 1)


def number_line(
    width: int, ends: Sequence[tuple[str, str]], middle: str, number: str, position: Fraction, stored: int | None
) -> list[Text]:
    """The line between two neighbours of a format, with a number on it.

    Args:
        width: columns of the screen.
        ends: value and code of the lower neighbour, then of the upper one.
        middle: value halfway.
        number: the number, as it was written.
        position: where it is, from 0 at the lower neighbour to 1 at the upper one.
        stored: the end it is rounded to, 0 or 1; None for neither.
    """
    width = min(width, 80) - 4
    width -= 1 - width % 2  # an odd number of columns has a middle one
    half, last, column = width // 2, width - 1, column_of(position, width)
    low, high = (text(value, "good" if stored == end else "") for end, (value, _) in enumerate(ends))
    first, second = (text(code, "faint") for _, code in ends)
    marks = [styled("●", "good") if stored == end else Text(glyph) for end, glyph in enumerate("├┤")]
    return [
        _row(width, [(0, low), (last, high)]),
        _row(width, [(0, first), (half, text(f"halfway {middle}", "faint")), (last, second)]),
        joined("  ", marks[0], "─" * (half - 1) + "┼" + "─" * (last - half - 1), marks[1]),
        joined("  " + " " * column, styled("▲", "strong")),
        _row(width, [(column, text(number, "strong"))]),
    ]
