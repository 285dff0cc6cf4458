"""The number of values that two formats share, counted per binade, since fp64 has 2^64 values.

Between 2^e and 2^(e+1) the values of a format are the multiples of one step, and so are the shared values of two: those
of the larger step.
"""

from __future__ import annotations

from fractions import Fraction

from halfstep.numerics.formats.table import Format


def lowest_exponent(format: Format) -> int:
    """The exponent e of the smallest positive value, 2^e."""
    return format.emin - format.mantissa if format.has_subnormals else format.emin


def step_exponent(format: Format, exponent: int) -> int:
    """The s for which the values in [2^exponent, 2^(exponent + 1)) are the multiples of 2^s."""
    return 0 if format.kind == "integer" else max(exponent, format.emin) - format.mantissa


def binade_values(format: Format, exponent: int) -> int:
    """Number of values in [2^exponent, 2^(exponent + 1))."""
    return _shared_in(exponent, (format,), Fraction(format.max))


def _shared_in(exponent: int, formats: tuple[Format, ...], top: Fraction) -> int:
    """Number of values in [2^exponent, 2^(exponent + 1)), up to `top`, that all formats have."""
    if any(exponent < lowest_exponent(format) for format in formats):
        return 0
    step = max(step_exponent(format, exponent) for format in formats)
    whole = 1 << (exponent - step)
    if top >= Fraction(2) ** (exponent + 1):
        return whole
    return max(0, min(whole, int(top / Fraction(2) ** step) - whole + 1))


def shared_values(one: Format, other: Format) -> int:
    """Number of values that both formats have. Infinities count, NaNs do not, and both zeros count as one."""
    exponents = range(max(lowest_exponent(one), lowest_exponent(other)), min(one.emax, other.emax) + 2)
    tops = [Fraction(min(one.max, other.max))]
    if one.signed and other.signed:
        tops.append(Fraction(min(-one.lowest, -other.lowest)))
    finite = sum(_shared_in(exponent, (one, other), top) for top in tops for exponent in exponents)
    return finite + (one.has_zero and other.has_zero) + 2 * (one.has_infinity and other.has_infinity)
