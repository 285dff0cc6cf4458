"""Exact numbers as text: decimal, hexadecimal float, fraction, and the shortest decimal that names a stored number.

All of it is integer arithmetic on `Fraction`; nothing passes through a float.
"""

from __future__ import annotations

from fractions import Fraction

from halfstep.numerics.formats.exact import decode_exact, encode_exact
from halfstep.numerics.formats.table import Format

_LONGEST = 1100  # digits; the exact decimal of fp64's least number has 751, and more than that nobody reads
_LEAST_POSITIONAL, _MOST_POSITIONAL = -4, 16  # decimal exponents written without an e


def _placed(negative: bool, digits: str, exponent: int, most: int = _MOST_POSITIONAL) -> str:
    """The number d.ddd * 10^exponent of these digits; without an e if the exponent is no larger than `most`."""
    digits = digits.rstrip("0") or "0"
    if not _LEAST_POSITIONAL <= exponent <= most:
        text = digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{exponent}"
    elif exponent < 0:
        text = "0." + "0" * (-exponent - 1) + digits
    else:
        whole = digits[: exponent + 1].ljust(exponent + 1, "0")
        text = whole + ("." + digits[exponent + 1 :] if len(digits) > exponent + 1 else "")
    return ("-" if negative else "") + text


def power_of_two(x: Fraction) -> int:
    """The e with 2^e <= |x| < 2^(e+1); `x` is not 0."""
    numerator, denominator = abs(x.numerator), x.denominator
    guess = numerator.bit_length() - denominator.bit_length()
    return guess if numerator << max(-guess, 0) >= denominator << max(guess, 0) else guess - 1


def _power_of_ten(x: Fraction) -> int:
    """The e with 10^e <= |x| < 10^(e+1); `x` is not 0."""
    guess = power_of_two(x) * 30103 // 100000
    while abs(x) >= Fraction(10) ** (guess + 1):
        guess += 1
    while abs(x) < Fraction(10) ** guess:
        guess -= 1
    return guess


def decimal(x: Fraction) -> str | None:
    """All decimal digits of `x`; None if there are infinitely many, as for 1/3, or too many to read."""
    if max(x.numerator.bit_length(), x.denominator.bit_length()) > 4 * _LONGEST:
        return None
    twos = (x.denominator & -x.denominator).bit_length() - 1
    rest, fives = x.denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or places > _LONGEST:
        return None
    digits = str(abs(x.numerator) * 10**places // x.denominator)
    return _placed(x < 0, digits, len(digits) - 1 - places)


def rounded(x: Fraction, digits: int) -> str:
    """`x` rounded to a number of significant decimal digits, to nearest, ties to even."""
    if x == 0:
        return "0"
    exponent = _power_of_ten(x)
    scaled = round(abs(x) * Fraction(10) ** (digits - 1 - exponent))
    text = str(scaled)
    exponent += len(text) - digits
    return _placed(x < 0, text, exponent, min(digits - 1, _MOST_POSITIONAL))  # no zeros that are no digits of it


def hex_float(x: Fraction) -> str | None:
    """`x` as a hexadecimal float of C and Python, ``0x1.4p+1``; None if it is not a binary fraction."""
    if x == 0:
        return "0x0p+0"
    if x.denominator & (x.denominator - 1):
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
        raise ValueError(
            f"expected the code of a finite number other than -0, but got {code:#x}, which is {value} in {format.name}"
        )
    if value == 0:
        return "0"
    exponent = _power_of_ten(value)
    for digits in range(1, 800):
        unit = Fraction(10) ** (exponent - digits + 1)
        below = value // unit
        near = [text for text in (below, below + 1) if text and encode_exact(text * unit, format) == code]
        if near:
            best = min(near, key=lambda count: abs(count * unit - value))
            text = str(abs(best))
            return _placed(value < 0, text, exponent + len(text) - digits)
    raise AssertionError("a decimal of 800 digits tells any two numbers apart")
