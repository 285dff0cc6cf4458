"""The line between two neighbours of a format, with a number on it, in text."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from halfstep.cli.terminal import Terminal, visible


def _row(width: int, labels: Sequence[tuple[int, str]]) -> str:
    """Labels centred on columns, moved inward from the ends; one that would touch the label before it is left out."""
    line = ""
    for column, text in labels:
        start = min(max(column - visible(text) // 2, 0), width - visible(text))
        if start >= visible(line) + 2 or not line:
            line += " " * (start - visible(line)) + text
    return line


def column_of(position: Fraction, width: int) -> int:
    """The column of a position between 0 and 1. Only 0, 1/2 and 1 are in the first, middle and last column."""
    last, middle = width - 1, (width - 1) // 2
    if position <= 0 or position >= 1:
        return 0 if position <= 0 else last
    if position == Fraction(1, 2):
        return middle
    column = round(position * last)
    return min(max(column, 1), middle - 1) if position < Fraction(1, 2) else min(max(column, middle + 1), last - 1)


def draw(
    terminal: Terminal,
    ends: tuple[tuple[str, str], tuple[str, str]],
    middle: str,
    number: str,
    position: Fraction,
    chosen: int | None,
) -> list[str]:
    """The lines of the picture.

    Args:
        terminal: what it is drawn on.
        ends: value and code of the lower neighbour, then of the upper one.
        middle: value halfway.
        number: the number, as it was written.
        position: where it is, from 0 at the lower neighbour to 1 at the upper one.
        chosen: the end it is rounded to, 0 or 1; None for neither.
    """
    width = min(terminal.width, 80) - 4
    width -= 1 - width % 2  # an odd number of columns has a middle one
    half, last = width // 2, width - 1
    marks = [terminal.paint("●", "good") if chosen == end else glyph for end, glyph in enumerate("├┤")]
    values = [terminal.paint(value, "good") if chosen == end else value for end, (value, _) in enumerate(ends)]
    codes = [terminal.paint(code, "faint") for _, code in ends]
    column = column_of(position, width)
    beneath = [(column, terminal.paint(number, "strong"))]
    return [
        "  " + line
        for line in (
            _row(width, [(0, values[0]), (last, values[1])]),
            _row(width, [(0, codes[0]), (half, terminal.paint(f"halfway {middle}", "faint")), (last, codes[1])]),
            marks[0] + "─" * (half - 1) + "┼" + "─" * (last - half - 1) + marks[1],
            " " * column + terminal.paint("▲", "strong"),
            _row(width, beneath),
        )
    ]
