"""Rounding of one number at a time, in exact rational arithmetic. Needs neither numpy nor torch.

This is the specification of the codec. The magnitude of a number is k + d units, where k is an integer, 0 <= d < 1, and
a unit is the distance between the format's numbers there, at least that of its subnormals. Rounding chooses k or k + 1:

    nearest        the nearer one; in a tie, the even one (IEEE 754-2019, 4.3.1)
    nearest_away   the nearer one; in a tie k + 1, the one away from zero
    toward_zero    k
    up, down       k + 1 if d > 0 and the number is positive (up) or negative (down)
    odd            the odd one of k and k + 1 if d > 0 (Boldo and Melquiond, 2008). Rounding the result to a format with
                   at least two bits fewer gives the same as rounding once
    stochastic     k + 1 with probability d, rounded to a multiple of 2^-16

**Overflow.** A number is rounded as if the exponent of the format had no upper limit. It overflows if the result is
beyond the largest number. Toward zero and to odd no finite number overflows; "up" overflows for positive numbers only,
and "down" for negative ones. Overflowed numbers and infinities become: with "inf", infinity, or NaN in a format without
infinity, or the largest number in a format without both; with "saturate", the largest number; with "nan", NaN.

**One significant bit** (E8M0). k is 1 and therefore odd, so ties go up, as IEEE 754 specifies and as torch and
ml_dtypes do; "odd" is the same as toward zero. E8M0 has neither zero nor sign: all numbers from 0 to 2^-127 become
2^-127 in every mode, and negative numbers overflow (to NaN, or to 2^-127 if saturated). Rounding a scale by
"toward_zero" or "down" is the floor of OCP's specification; "up" is the ceiling that NVIDIA recommends.

**Stochastic rounding** uses 16 random bits r, from Philox of the seed and the index of the element, as in
`halfstep.cast`. With the word 2^16 r + 2^15, it chooses k + 1 if word + 2^32 d >= 2^32. For subnormals of formats with
a narrower exponent than fp32 and m <= 10 mantissa bits, d is first rounded to a multiple of 2^-(23 - m), to nearest
even, and only the upper 23 - m bits of the word are used, as in fp32 arithmetic.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.parse import Number, parse_number
from halfstep.numerics.formats.table import Format, formats

ENCODE_ROUNDINGS = ("nearest", "nearest_away", "toward_zero", "up", "down", "odd", "stochastic")
OVERFLOWS = ("inf", "saturate", "nan")
NANS = ("canonical", "payload", "zero", "raise")
LARGEST_OFFSET = 2**60 - 1  # as in kernels/cast.py

_QUIET = 1 << 51  # of a float64 NaN


# ---------------------------------------------------------------------------------------------------------- what comes


def exact(value: Any) -> Number:
    """The exact value of a number, or of a text (`parse_number`).

    Args:
        value: int, float, str, Fraction, Decimal, or a numpy or ml_dtypes scalar.

    Returns:
        A Fraction, or a float for an infinity, a NaN (with its sign and payload) or -0.0.

    Raises:
        TypeError: `value` has another type, such as a complex number.
        ValueError: `value` is a text that is not a number, or a magnitude outside 2^±65536.

    Examples:
        >>> from halfstep.numerics.formats.exact import exact
        >>> exact("1/3"), exact(0.1)
        (Fraction(1, 3), Fraction(3602879701896397, 36028797018963968))
    """
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, float):
        return _from_float(float(value))
    if isinstance(value, Integral):
        return Fraction(int(value))
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if isinstance(value, Decimal):
        if value.is_nan():
            return math.copysign(math.nan, -1.0 if value.is_signed() else 1.0)
        return parse_number(str(value))
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("f", "V", "i", "u", "b") and hasattr(value, "__float__"):
        near = float(value)
        if kind != "f" or near != near or near == 0 or value in (math.inf, -math.inf):
            return _from_float(near)  # float64 represents all numbers of ml_dtypes
        return Fraction(*value.as_integer_ratio())  # but not those of numpy's long double
    raise TypeError(
        "Expected a real number (int, float, Fraction, Decimal or numpy's) or a string such as '0.1', '0x1p-3' or "
        f"'1/3', but got {value!r}, a {type(value).__name__}"
    )


def _from_float(value: float) -> Number:
    special = value == 0 or value - value != 0
    return value if special and not (value == 0 and math.copysign(1.0, value) > 0) else Fraction(value)


def _pattern(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def check_options(
    format: Format, rounding: str, overflow: str, nan: str, subnormals: bool, seed: int | None, offset: int
) -> None:
    """Validate the options of an encoding.

    Raises:
        TypeError, ValueError: an option is unknown, out of range, or impossible for the format.
    """
    words = (("rounding", rounding, ENCODE_ROUNDINGS), ("overflow", overflow, OVERFLOWS), ("nan", nan, NANS))
    for name, value, allowed in words:
        if value not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {value!r}")
    if overflow == "nan" and not format.has_nan:
        raise ValueError(
            f"Expected overflow to be 'inf' or 'saturate' for {format.name}, which has no NaN, but got 'nan'"
        )
    if not isinstance(subnormals, bool):
        raise TypeError(f"Expected subnormals to be True (kept) or False (flushed to zero), but got {subnormals!r}")
    for name, number, largest in (("seed", seed, 2**63 - 1), ("offset", offset, LARGEST_OFFSET)):
        if number is None and name == "seed":
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"Expected {name} to be an integer from 0 to {largest}, but got {number!r}, a {type(number).__name__}"
            )
        if not 0 <= number <= largest:
            raise ValueError(f"Expected {name} to be from 0 to {largest}, but got {number}")
    if seed is not None and rounding != "stochastic":
        raise ValueError(
            f"Expected seed to be None with rounding={rounding!r}, which uses no random numbers, but got {seed}: leave "
            "it out, or pass rounding='stochastic'"
        )


def no_nan_here(format: Format, nan: str) -> ValueError:
    """The error for a NaN that must not be encoded, or cannot be."""
    if nan == "raise":
        return ValueError(
            "Expected values without NaN with nan='raise', but got one: pass nan='canonical', 'payload' or 'zero'"
        )
    return ValueError(
        f"Expected values without NaN for {format.name}, which has none, but got one: pass nan='zero', or replace it "
        "before"
    )


# -------------------------------------------------------------------------------------------------------------- coding


def encode_exact(
    value: Any,
    format: Any,
    rounding: str = "nearest",
    *,
    overflow: str = "inf",
    nan: str = "canonical",
    subnormals: bool = True,
    seed: int | None = None,
    offset: int = 0,
) -> int:
    """The code of one number, computed in rational arithmetic. The arguments are those of `codec.encode`.

    Examples:
        >>> from halfstep.numerics.formats.exact import encode_exact
        >>> hex(encode_exact("1/3", "fp16"))
        '0x3555'
    """
    form, number = formats[format], exact(value)
    check_options(form, rounding, overflow, nan, subnormals, seed, offset)
    if number != number:
        return nan_code(_pattern(float(number)), form, nan)
    negative = _pattern(number) >> 63 == 1 if isinstance(number, float) else number < 0
    if number in (math.inf, -math.inf) or (form.kind == "scale" and number < 0):
        return beyond_code(negative, form, overflow)
    word = 0
    if rounding == "stochastic":
        word = philox_words.word(offset, random.getrandbits(63) if seed is None else seed)
    magnitude = abs(Fraction(number))
    unit = Fraction(_unit(magnitude, form))
    below = magnitude // unit
    code = below + _away(below, magnitude / unit - below, rounding, negative, word, form)
    if form.kind == "scale":
        code = max(code + power_of_two(unit) - form.emin - 1, 0) if below else 0
    elif form.kind != "integer":  # as if the exponent had no upper limit
        code += (power_of_two(unit) - (form.emin - form.mantissa)) << form.mantissa
    if code > largest_magnitude(negative, form):
        return beyond_code(negative, form, "saturate" if stops_at_the_end(rounding, negative, form) else overflow)
    if not subnormals and form.has_subnormals and code < 1 << form.mantissa:
        code = 0
    return signed_code(code, negative, form)


def power_of_two(x: Fraction) -> int:
    """The e with 2^e <= |x| < 2^(e+1); `x` is not 0."""
    numerator, denominator = abs(x.numerator), x.denominator
    guess = numerator.bit_length() - denominator.bit_length()
    return guess if numerator << max(-guess, 0) >= denominator << max(guess, 0) else guess - 1


def _unit(magnitude: Fraction, format: Format) -> Fraction:
    """The distance between the numbers around a magnitude, as if the exponent had no upper limit."""
    if format.kind == "integer":
        return Fraction(1)
    exponent = max(power_of_two(magnitude), format.emin) if magnitude else format.emin
    return Fraction(2) ** (exponent - format.mantissa)


def _away(below: int, rest: Fraction, rounding: str, negative: bool, word: int, format: Format) -> bool:
    """Whether rounding chooses k + 1."""
    if rounding == "nearest":
        return 2 * rest > 1 or (2 * rest == 1 and below % 2 == 1)
    if rounding == "nearest_away":
        return 2 * rest >= 1
    if rounding == "odd":
        return rest > 0 and below % 2 == 0
    if rounding == "stochastic":
        steps = subnormal_steps(format)
        if steps is not None and below < 1 << format.mantissa:
            return (word >> (32 - steps)) + round(rest * 2**steps) >= 2**steps
        return word + rest * 2**32 >= 2**32
    return rest > 0 and rounding == ("down" if negative else "up")


def subnormal_steps(format: Format) -> int | None:
    """The number of bits of the dropped fraction that stochastic rounding of subnormal numbers uses; None for all."""
    coarse = format.emin > -126 and format.has_subnormals and format.mantissa <= 10
    return 23 - format.mantissa if coarse else None


def stops_at_the_end(rounding: str, negative: bool, format: Format) -> bool:
    """Whether finite numbers beyond the last one become that, whatever `overflow` says."""
    inward = rounding in ("toward_zero", "odd") or rounding == ("up" if negative else "down")
    return inward and not (negative and format.kind == "scale")


def largest_magnitude(negative: bool, format: Format) -> int:
    """The code of the largest magnitude with this sign. In int8 it is 128 for negative numbers, 127 for others."""
    return format.largest_code + (format.kind == "integer" and negative)


def signed_code(magnitude: int, negative: bool, format: Format) -> int:
    """The code of a magnitude with a sign. Zero has no sign in formats without a negative zero."""
    if not negative or (magnitude == 0 and not format.has_negative_zero):
        return magnitude
    if format.kind == "integer":
        return format.codes - magnitude
    return magnitude | format.sign_bit


def beyond_code(negative: bool, format: Format, overflow: str) -> int:
    """The code of overflowed numbers and infinities, and of negative numbers in a format without sign."""
    if overflow == "saturate" or (overflow == "inf" and not format.has_infinity and not format.has_nan):
        if format.kind == "scale" and negative:
            return 0
        return signed_code(largest_magnitude(negative, format), negative, format)
    if overflow == "inf" and format.infinity_code is not None:
        return signed_code(format.infinity_code, negative, format)
    if format.nan_code is None:  # refused by `check_options`
        raise ValueError(f"{format.name} has no NaN")
    return format.nan_code


def nan_code(pattern: Any, format: Format, nan: str) -> Any:
    """The code of a NaN, given by its float64 bit pattern, or the codes of an array of uint64 patterns.

    Raises:
        ValueError: the format has no NaN, or `nan` is ``"raise"``.
    """
    if nan == "zero":
        return 0
    if nan == "raise" or format.nan_code is None:
        raise no_nan_here(format, nan)
    if nan == "canonical" or format.kind not in ("ieee", "fn"):
        return format.nan_code
    payload = (pattern & ((1 << 52) - 1)) >> (52 - format.mantissa) if format.kind == "ieee" else 0
    return format.nan_code | payload | (pattern >> 63) * format.sign_bit


def decode_exact(code: int, format: Any) -> Number:
    """The exact value of a code: a Fraction, or a float for an infinity, a NaN or -0.0.

    A NaN is quiet and has the sign and, in its upper bits, the payload of the code.

    Raises:
        ValueError: `code` is not a code of the format.

    Examples:
        >>> from halfstep.numerics.formats.exact import decode_exact
        >>> decode_exact(0x3555, "fp16")
        Fraction(1365, 4096)
    """
    form = formats[format]
    if not 0 <= code < form.codes:
        raise ValueError(f"Expected a code of {form.name} to be from 0 to {form.codes - 1:#x}, but got {code:#x}")
    if form.kind == "integer":
        return Fraction(code - form.codes if code & form.sign_bit else code)
    negative, magnitude = bool(code & form.sign_bit), code & ~form.sign_bit
    field, units = divmod(magnitude, 1 << form.mantissa)
    if form.kind == "fnuz" and code == form.sign_bit:
        return math.nan
    if magnitude > form.largest_code:
        if magnitude == form.infinity_code:
            return -math.inf if negative else math.inf
        payload = units << (52 - form.mantissa) if form.kind == "ieee" else 0
        pattern = negative << 63 | 0x7FF << 52 | _QUIET | payload
        return float(struct.unpack("<d", pattern.to_bytes(8, "little"))[0])
    if form.kind == "scale":
        return Fraction(2) ** (field + form.emin)
    value = (units + (bool(field) << form.mantissa)) * Fraction(2) ** (max(field - 1, 0) + form.emin - form.mantissa)
    return (-value if value else -0.0) if negative else value


# ---------------------------------------------------------------------------------------------------- what lies around


def ulp_exact(value: Any, format: Any) -> Number:
    """The distance between the format's numbers around `value`, as if the exponent had no upper limit (`Format.ulp`).

    It is NaN for NaN and infinity for infinities.
    """
    form, number = formats[format], exact(value)
    if isinstance(number, float) and number != 0:
        return abs(number)
    return _unit(abs(Fraction(number)), form)


def next_up_exact(value: Any, format: Any) -> Number:
    """The least number of the format greater than `value`, which may be any number: nextUp of IEEE 754.

    After the negative number closest to zero comes -0.0, if the format has it. After the largest number comes infinity,
    or NaN in a format without infinity, or the largest number again in a format without both. The result for NaN is
    NaN.
    """
    return _next(exact(value), formats[format], up=True)


def next_down_exact(value: Any, format: Any) -> Number:
    """The greatest number of the format less than `value`: nextDown of IEEE 754. See `next_up_exact`."""
    return _next(exact(value), formats[format], up=False)


def _next(number: Number, format: Format, *, up: bool) -> Number:
    """The next number by its position in the order of the format's numbers: 0 is zero (in E8M0 the least number)."""
    if number != number:
        return number
    code = encode_exact(number, format, "down" if up else "up", overflow="saturate")
    near = decode_exact(code, format)
    if near > number if up else near < number:
        return near  # the number is beyond the lowest or the largest one
    order = code
    if code & format.sign_bit:
        order = code - format.codes if format.kind == "integer" else format.sign_bit - code
    order += 1 if up else -1
    lowest = 0 if format.kind == "scale" else -largest_magnitude(True, format)
    if not lowest <= order <= format.largest_code:
        return decode_exact(beyond_code(order < lowest, format, "inf"), format)
    minus = order < 0 or (order == 0 and up and format.kind != "scale")
    return decode_exact(signed_code(abs(order), minus, format), format)


@dataclass(frozen=True)
class Neighbours:
    """The numbers of a format around a number.

    Attributes:
        value: the number.
        exact: whether `value` is a number of the format. `below` and `above` are then `value` itself.
        below, above: the numbers of the format on both sides of `value`. Beyond the largest number this is infinity, or
            NaN in a format without infinity, or None in a format without both.
        midpoint: the middle between `below` and `above`, the threshold of rounding to nearest. Beyond the largest
            number it is the middle between that and the next number if there were one. None if `exact`, or if there is
            no number on the other side.
        nearest: the number that ``"nearest"`` chooses, with ties to even.
        code_below, code_above, code_nearest: the codes of these numbers.
        ulp: the distance between the format's numbers around `value`.
        previous, next: the numbers strictly below and above `value`: `next_down_exact` and `next_up_exact`.
    """

    value: Number
    exact: bool
    below: Number | None
    above: Number | None
    midpoint: Fraction | None
    nearest: Number
    code_below: int | None
    code_above: int | None
    code_nearest: int
    ulp: Number
    previous: Number
    next: Number

    @property
    def error(self) -> Fraction | None:
        """`nearest` minus `value`; None if `nearest` is not finite."""
        if isinstance(self.nearest, float) and self.nearest != 0:
            return None
        return Fraction(self.nearest) - Fraction(self.value)


def neighbours(value: Any, format: Any) -> Neighbours:
    """The numbers of a format around a number.

    Args:
        value: a finite number, of a type that `exact` accepts.
        format: a key of `formats`.

    Raises:
        ValueError: `value` is NaN or an infinity.

    Examples:
        >>> from halfstep.numerics.formats.codec import neighbours
        >>> around = neighbours("1/3", "fp16")
        >>> float(around.below), float(around.above)
        (0.333251953125, 0.33349609375)
    """
    form, number = formats[format], exact(value)
    if isinstance(number, float) and number != 0:
        raise ValueError(f"Expected value to be a finite number, which has neighbours, but got {value!r}")
    code = encode_exact(number, form)
    nearest, step = decode_exact(code, form), Fraction(ulp_exact(number, form))
    previous, following = next_down_exact(number, form), next_up_exact(number, form)
    if nearest == number:
        return Neighbours(number, True, number, number, None, nearest, code, code, code, step, previous, following)
    below: Number | None = previous if number > form.lowest else None
    above: Number | None = following if number < form.max else None
    if form.has_infinity or form.has_nan:
        below, above = previous, following
    midpoint = None
    if form.lowest < number < form.max:
        midpoint = (Fraction(previous) + Fraction(following)) / 2
    elif number > form.max:
        midpoint = Fraction(form.max) + Fraction(form.ulp(form.max)) / 2
    elif form.signed:
        midpoint = Fraction(form.lowest) - Fraction(form.ulp(form.lowest)) / 2
    first, second = (None if side is None else encode_exact(side, form) for side in (below, above))
    return Neighbours(number, False, below, above, midpoint, nearest, first, second, code, step, previous, following)
