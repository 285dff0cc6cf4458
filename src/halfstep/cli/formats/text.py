"""Texts that several commands and the pages show: notations, errors and outcomes."""

from __future__ import annotations

from fractions import Fraction

from halfstep.cli.formats import number_text
from halfstep.cli.formats.arguments import Given
from halfstep.cli.formats.values import Encoded, number_dict, special_text


def notations(given: Given) -> str:
    """The number in every notation that adds information."""
    if isinstance(given.number, float):
        exact = [special_text(given.number)]
    else:
        exact = [words for words in number_dict(given.number).values() if words and len(words) <= 40]
        exact = exact or [f"≈{number_text.rounded(given.number, 17)}"]
    return " = ".join(dict.fromkeys((given.text, *exact)))


def distance(ulps: Fraction) -> str:
    """A number of ulps with four digits, or with as many as distinguish it from one half."""
    if ulps == 0:
        return "0"
    texts = (number_text.rounded(ulps, digits) for digits in range(4, 24))
    return next((one for one in texts if one.lstrip("-") != "0.5" or abs(ulps) == Fraction(1, 2)), "≈0.5")


def ulps(encoded: Encoded) -> str:
    """The error, with its sign."""
    return "" if encoded.ulps is None else ("+" if encoded.ulps > 0 else "") + distance(encoded.ulps)


def outcome(encoded: Encoded) -> str:
    """The outcome, and whether the result is subnormal."""
    subnormal = encoded.stored is not None and encoded.stored.sort == "subnormal"
    if subnormal and encoded.outcome in ("exact", "rounded"):
        return "exact subnormal" if encoded.outcome == "exact" else "subnormal"
    if encoded.outcome == "overflow" and not encoded.format.signed and encoded.number < 0:
        return "no sign"
    return "no NaN" if encoded.outcome == "none" else encoded.outcome
