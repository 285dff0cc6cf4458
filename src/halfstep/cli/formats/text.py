"""Texts that several commands show: bits, errors, outcomes, and implementations with other results."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from halfstep.cli.formats import implementations, number_text
from halfstep.cli.formats.arguments import Given
from halfstep.cli.formats.values import Encoded, Stored, number_dict, special_text
from halfstep.cli.terminal import Terminal, table

_STYLES = {
    "exact": "good", "rounded": "", "underflow": "bad", "overflow": "bad", "saturated": "note", "none": "bad",
}  # fmt: skip


def bits(stored: Stored, screen: Terminal) -> str:
    """The bits of the fields, coloured and separated by spaces."""
    return " ".join(screen.paint(text, name) for name, text in stored.fields)


def number_lines(given: Given, screen: Terminal) -> list[str]:
    """The number in every notation that adds information."""
    if isinstance(given.number, float):
        named = [special_text(given.number)]
    else:
        notations = number_dict(given.number).values()
        named = [text for text in notations if text and len(text) <= 40] or [
            f"≈{number_text.rounded(given.number, 17)}"
        ]
    parts = dict.fromkeys((given.text, *named))
    return screen.wrap(screen.paint(" = ".join(parts), "strong"), "  ")


def distance(ulps: Fraction) -> str:
    """A number of ulps with four digits, or with as many as distinguish it from one half."""
    if ulps == 0:
        return "0"
    texts = (number_text.rounded(ulps, digits) for digits in range(4, 24))
    return next((text for text in texts if text.lstrip("-") != "0.5" or abs(ulps) == Fraction(1, 2)), "≈0.5")


def ulps(found: Encoded) -> str:
    """The error, with its sign."""
    return "" if found.ulps is None else ("+" if found.ulps > 0 else "") + distance(found.ulps)


def outcome(found: Encoded, screen: Terminal) -> str:
    """The outcome, coloured, and whether the result is subnormal."""
    subnormal = found.stored is not None and found.stored.sort == "subnormal"
    text, style = found.outcome, _STYLES[found.outcome]
    if subnormal and text in ("exact", "rounded"):
        text, style = ("exact subnormal", "good") if text == "exact" else ("subnormal", "note")
    elif text == "none":
        text = "no NaN"
    elif text == "overflow" and not found.format.signed and found.number < 0:
        text = "no sign"
    return screen.paint(text, style) if style else text


def implementation_lines(given: Given, found: Sequence[Encoded], screen: Terminal) -> list[str]:
    """The implementations that store another value."""
    rows = []
    for one in found:
        for number, conversion in enumerate(implementations.conversions(given.number, one.format)):
            rows.append((one.format.name if number == 0 else "", conversion.text, conversion.who))
    if not rows:
        return []
    return [screen.paint("elsewhere, from the nearest float64", "faint"), *table(("", "", ""), rows, [False] * 3)[1:]]
