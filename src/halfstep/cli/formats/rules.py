"""The rule that decides the rounding of a number, and the results of stochastic and of double rounding."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from halfstep.cli.formats.values import Encoded, Stored, encoded, finite, overflows
from halfstep.numerics.formats.exact import Neighbours, decode_exact, encode_exact, ulp_exact
from halfstep.numerics.formats.parse import Number
from halfstep.numerics.formats.table import Format, formats

_WIDER = ("fp64", "fp32")  # what numbers are held in before they are cast


class DoubleRounding(NamedTuple):
    """The result of rounding to another format first."""

    via: tuple[Format, ...]
    found: Encoded


def rule(found: Encoded, around: Neighbours | None) -> str:
    """The rule that decides rounding to nearest.

    ``"exact"``: the number is one of the format. ``"nearer"``: the nearer neighbour is taken. ``"tie"``: of two equally
    near, the one whose last bit is 0. ``"tie_up"``: of these, the larger magnitude, since with one significant bit none
    is even. ``"overflow"``: it rounds to a number beyond the largest. ``"special"``: an infinity or NaN is not rounded.
    ``"sign"``: the format has no negative numbers. ``"least"``: the format has no zero, and everything below its least
    number becomes that.
    """
    number, format = found.number, found.format
    if around is None:
        return "special"
    if around.exact:
        return "exact"
    if format.kind == "scale" and number <= 0:
        return "sign" if number < 0 else "least"
    if overflows(number, format):
        return "overflow"
    if format.kind == "scale" and number < Fraction(format.min_normal):
        return "least"
    if around.midpoint is not None and number == around.midpoint:
        return "tie_up" if format.mantissa == 0 and abs(Fraction(number)) >= format.min_normal else "tie"
    return "nearer"


def double_roundings(number: Number, format: Format) -> list[DoubleRounding]:
    """The wider formats through which double rounding gives another result than rounding once."""
    if not finite(number):
        return []
    direct, made = decode_exact(encode_exact(number, format), format), []
    via: tuple[Format, ...] = ()
    for name in _WIDER:
        if formats[name].bits <= format.bits:
            break
        via = (*via, formats[name])
        number = decode_exact(encode_exact(number, name), name)
        there = encoded(number, format)
        if there.stored is not None and not _same(there.stored.value, direct):
            made.append(DoubleRounding(via, there))
    return made


def _same(one: Number, other: Number) -> bool:
    return one == other or (one != one and other != other)


def chances(number: Number, format: Format, overflow: str) -> list[tuple[Fraction, Encoded]]:
    """The possible results of stochastic rounding and their probabilities: toward zero first, then away from it.

    The noise has 32 bits (31 among the subnormals of formats with fewer exponents than fp32), so that a probability is
    a multiple of 2^-32 (2^-31), rounded down for the one away from zero.
    """
    if not finite(number) or number == 0 or (format.kind == "scale" and number < Fraction(format.min_normal)):
        return [(Fraction(1), encoded(number, format, overflow=overflow))]
    exact, step = Fraction(number), Fraction(ulp_exact(number, format))
    away = step if exact > 0 else -step
    units = abs(exact) // step
    coarse = format.has_subnormals and format.emin > -126 and abs(exact) < Fraction(format.min_normal)
    steps = 2**31 if coarse else 2**32
    share = Fraction((abs(exact) / step - units) * steps // 1, steps)
    ends = [encoded(away * count if count else away * 0.0, format, overflow=overflow) for count in (units, units + 1)]
    if ends[0].stored == ends[1].stored:
        return [(Fraction(1), ends[0])]
    return [(chance, end) for chance, end in zip((1 - share, share), ends, strict=True) if chance]


def ends_around(found: Encoded, around: Neighbours) -> tuple[Fraction, Fraction]:
    """The values on both sides, as if the exponent had no upper limit."""
    step, exact = Fraction(around.ulp), Fraction(found.number)
    if found.format.kind == "scale" and exact < Fraction(found.format.min_normal):
        return Fraction(0), Fraction(found.format.min_normal)
    low = exact // step * step
    return low, low + step


def nearest(found: Encoded) -> Stored:
    """The value that rounding to nearest stores."""
    return Stored(encode_exact(found.number, found.format), found.format)
