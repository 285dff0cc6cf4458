"""Exact numbers as text: decimal, hexadecimal float, fraction, and the shortest decimal that names a stored number.

Quotients are those of Python's decimal arithmetic, which rounds once; nothing passes through a float.
"""

from __future__ import annotations

import decimal as arithmetic
from decimal import Decimal
from fractions import Fraction

from halfstep.numerics.formats.exact import Irrational, Number, decode_exact, encode_exact, power_of_two
from halfstep.numerics.formats.table import Format

_LONGEST = 1100  # digits; the exact decimal of fp64's least number has 751, and more than that nobody reads
_LEAST_POSITIONAL, _MOST_POSITIONAL = -4, 16  # decimal exponents written without an e
_EXACT = arithmetic.Context(prec=3 * _LONGEST, traps=[arithmetic.Inexact])


def _quotient(x: Fraction, context: arithmetic.Context) -> Decimal:
    return context.divide(Decimal(x.numerator), Decimal(x.denominator))


def _placed(x: Decimal, most: int = _MOST_POSITIONAL) -> str:
    """The digits of `x`; without an e if its exponent is no larger than `most`."""
    sign, exponent = "-" * x.as_tuple().sign, x.adjusted()
    digits = "".join(map(str, x.as_tuple().digits)).rstrip("0") or "0"
    if not _LEAST_POSITIONAL <= exponent <= most:
        return sign + digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{exponent}"
    if exponent < 0:
        return sign + "0." + "0" * (-exponent - 1) + digits
    whole = digits[: exponent + 1].ljust(exponent + 1, "0")
    return sign + whole + ("." + digits[exponent + 1 :] if len(digits) > exponent + 1 else "")


def decimal(x: Fraction) -> str | None:
    """All decimal digits of `x`; None if there are infinitely many, as for 1/3, or too many to read."""
    if isinstance(x, Irrational) or max(x.numerator.bit_length(), x.denominator.bit_length()) > 4 * _LONGEST:
        return None
    try:
        exact = _quotient(x, _EXACT)
    except arithmetic.Inexact:
        return None
    return _placed(exact) if -int(exact.as_tuple().exponent) <= _LONGEST else None


def rounded(x: Fraction, digits: int) -> str:
    """`x` rounded to a number of significant decimal digits, to nearest, ties to even."""
    near = _quotient(x, arithmetic.Context(prec=digits, rounding=arithmetic.ROUND_HALF_EVEN))
    return _placed(near, min(digits - 1, _MOST_POSITIONAL)) if x else "0"  # no zeros that are no digits of it


def special(number: float) -> str:
    """An infinity, NaN or -0.0."""
    return "nan" if number != number else "-0" if number == 0 else "inf" if number > 0 else "-inf"


def fitting(number: Number, width: int, digits: int) -> str:
    """All digits in at most `width` columns; otherwise ≈ and a number of significant digits."""
    if isinstance(number, float):
        return special(number)
    whole = decimal(number)
    return whole if whole is not None and len(whole) <= width else f"≈{rounded(number, digits)}"


def among(number: Number, format: Format) -> str:
    """A number with all its digits, or with enough of them to distinguish it from its neighbours in a format."""
    return fitting(number, 24, format.max_digits10 + 2)


def short(value: float | Fraction) -> str:
    """A number with a few digits, or with all of them if they fit nine columns."""
    return fitting(Fraction(value), 9 + (value < 0), 4).removeprefix("≈")


def whole(number: Number) -> str:
    """A number with all its digits, unless they never end."""
    return fitting(number, 10 * _LONGEST, 17)


def power(number: float | Fraction) -> str:
    """A number as a power of two and in decimal."""
    text = fitting(Fraction(number), 24, 4)
    return f"2^{power_of_two(Fraction(number))} " + (f"≈ {text[1:]}" if text.startswith("≈") else f"= {text}")


def hex_float(x: Fraction) -> str | None:
    """`x` as a hexadecimal float of C and Python, ``0x1.4p+1``; None if it is not a binary fraction."""
    if x == 0:
        return "0x0p+0"
    if isinstance(x, Irrational) or x.denominator & (x.denominator - 1):
        return None
    exponent = power_of_two(x)
    mantissa = abs(x) / Fraction(2) ** exponent - 1
    digits = -(-(mantissa.denominator.bit_length() - 1) // 4)
    text = f".{int(mantissa * 16**digits):0{digits}x}" if digits else ""
    return f"{'-' if x < 0 else ''}0x1{text}p{exponent:+d}"


def shortest(code: int, format: Format) -> str:
    """The shortest decimal that rounds to this code, to nearest; of several as short, the nearest to its value.

    65504 of fp16 is "65500": nothing else in fp16 is nearer to that.
    """
    value = decode_exact(code, format)
    if isinstance(value, float):
        return special(value)
    if value == 0:
        return "0"
    for digits in range(1, 800):
        contexts = (arithmetic.Context(prec=digits, rounding=mode) for mode in ("ROUND_FLOOR", "ROUND_CEILING"))
        sides = (_quotient(value, context) for context in contexts)
        near = [side for side in sides if encode_exact(Fraction(side), format) == code]
        if near:
            return _placed(min(near, key=lambda side: abs(Fraction(side) - value)))
    raise AssertionError("a decimal of 800 digits tells any two numbers apart")


def number_dict(number: Number) -> dict[str, str | None]:
    """A number in the form of all JSON of the lookup. Infinities and NaN have only a decimal."""
    if isinstance(number, float):
        zero = number == 0
        return {"decimal": special(number), "hex": "-0x0p+0" if zero else None, "fraction": "0" if zero else None}
    legible = type(number) is Fraction and number.denominator.bit_length() < 8000 > number.numerator.bit_length()
    return {"decimal": decimal(number), "hex": hex_float(number), "fraction": str(number) if legible else None}
