"""Exact numbers: read as people write them, and rounded to a format one at a time. Needs neither numpy nor torch.

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
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.table import Format, formats

ENCODE_ROUNDINGS = ("nearest", "nearest_away", "toward_zero", "up", "down", "odd", "stochastic")
OVERFLOWS = ("inf", "saturate", "nan")
NANS = ("canonical", "payload", "zero", "raise")
LARGEST_OFFSET = 2**60 - 1  # as in kernels/cast.py
LARGEST_TEXT = 4000  # characters
LARGEST_POWER = 65536  # of two; about 19,700 of ten

_QUIET = 1 << 51  # of a float64 NaN


class Irrational(Fraction):
    """The first 50 digits of a number whose digits never end, such as pi: enough to round it to every format."""


Number = (
    Fraction | float
)  # a float for an infinity, a NaN (with sign and payload) or -0.0, which no Fraction represents


# ------------------------------------------------------------------------------------------------------------- rounding


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
    word = 0
    if rounding == "stochastic":
        word = philox_words.word(offset, random.getrandbits(63) if seed is None else seed)
    return code_of(number, form, rounding, overflow, nan, subnormals, word)


def code_of(
    number: Number,
    form: Format,
    rounding: str = "nearest",
    overflow: str = "inf",
    nan: str = "canonical",
    subnormals: bool = True,
    word: int = 0,
) -> int:
    """`encode_exact` of a number that `exact` returned, with options that were checked and the random word."""
    if number != number:
        return nan_code(_pattern(float(number)), form, nan)
    negative = number < 0 or (isinstance(number, float) and number == 0)  # which is -0.0
    if number in (math.inf, -math.inf) or (form.kind == "scale" and number < 0):
        return beyond_code(negative, form, overflow)
    magnitude = abs(Fraction(number))
    exponent = unit_exponent(magnitude, form)
    below, rest = divmod(magnitude / Fraction(2) ** exponent, 1)
    if rest and _moves_away(below, rest, rounding, negative, word, form):
        below += 1
    code = below
    if form.kind == "scale":
        code = max(code + exponent - form.emin - 1, 0) if magnitude >= form.min_normal else 0
    elif form.kind != "integer":  # as if the exponent had no upper limit
        code += (exponent - (form.emin - form.mantissa)) << form.mantissa
    if code > form.largest_code + (form.kind == "integer" and negative):
        return beyond_code(negative, form, "saturate" if stops_at_the_end(rounding, negative, form) else overflow)
    if not subnormals and form.has_subnormals and code < 1 << form.mantissa:
        code = 0
    return signed_code(code, negative, form)


def power_of_two(x: Fraction) -> int:
    """The e with 2^e <= |x| < 2^(e+1); `x` is not 0."""
    numerator, denominator = abs(x.numerator), x.denominator
    guess = numerator.bit_length() - denominator.bit_length()
    return guess if numerator << max(-guess, 0) >= denominator << max(guess, 0) else guess - 1


def unit_exponent(number: Fraction, form: Format) -> int:
    """The e for which the numbers around a number are 2^e apart, as if the exponent had no upper limit."""
    if form.kind == "integer":
        return 0
    return (max(power_of_two(number), form.emin) if number else form.emin) - form.mantissa


def _moves_away(below: int, rest: Fraction, rounding: str, negative: bool, word: int, form: Format) -> bool:
    """Whether rounding chooses k + 1 = `below` + 1 for a number `rest` units above `below`, which is not 0."""
    if rounding == "nearest":
        return 2 * rest > 1 or (2 * rest == 1 and below % 2 == 1)
    if rounding == "nearest_away":
        return 2 * rest >= 1
    if rounding == "odd":
        return below % 2 == 0
    if rounding == "stochastic":
        steps = subnormal_steps(form)
        if steps is not None and below < 1 << form.mantissa:
            return (word >> (32 - steps)) + round(rest * 2**steps) >= 2**steps
        return word + rest * 2**32 >= 2**32
    return rounding == ("down" if negative else "up")


def subnormal_steps(form: Format) -> int | None:
    """The number of bits of the dropped fraction that stochastic rounding of subnormal numbers uses; None for all."""
    coarse = form.emin > -126 and form.has_subnormals and form.mantissa <= 10
    return 23 - form.mantissa if coarse else None


def stops_at_the_end(rounding: str, negative: bool, form: Format) -> bool:
    """Whether finite numbers beyond the last one become that, whatever `overflow` says."""
    inward = rounding in ("toward_zero", "odd") or rounding == ("up" if negative else "down")
    return inward and not (negative and form.kind == "scale")


def largest_magnitude(negative: bool, form: Format) -> int:
    """The code of the largest magnitude with this sign. In int8 it is 128 for negative numbers, 127 for others."""
    return form.largest_code + (form.kind == "integer" and negative)


def signed_code(magnitude: int, negative: bool, form: Format) -> int:
    """The code of a magnitude with a sign. Zero has no sign in formats without a negative zero."""
    if not negative or (magnitude == 0 and not form.has_negative_zero):
        return magnitude
    return form.codes - magnitude if form.kind == "integer" else magnitude | form.sign_bit


def beyond_code(negative: bool, form: Format, overflow: str) -> int:
    """The code of overflowed numbers and infinities, and of negative numbers in a format without sign."""
    if overflow == "saturate" or (overflow == "inf" and not form.has_infinity and not form.has_nan):
        if form.kind == "scale" and negative:
            return 0
        return signed_code(largest_magnitude(negative, form), negative, form)
    if overflow == "inf" and form.infinity_code is not None:
        return signed_code(form.infinity_code, negative, form)
    if form.nan_code is None:  # refused by `check_options`
        raise ValueError(f"{form.name} has no NaN")
    return form.nan_code


def nan_code(pattern: Any, form: Format, nan: str) -> Any:
    """The code of a NaN, given by its float64 bit pattern, or the codes of an array of uint64 patterns.

    Raises:
        ValueError: the format has no NaN, or `nan` is ``"raise"``.
    """
    if nan == "zero":
        return 0
    if nan == "raise":
        raise ValueError(
            "Expected values without NaN with nan='raise', but got one: pass nan='canonical', 'payload' or 'zero'"
        )
    if form.nan_code is None:
        raise ValueError(
            f"Expected values without NaN for {form.name}, which has none, but got one: pass nan='zero', or replace it "
            "before"
        )
    if nan == "canonical" or form.kind not in ("ieee", "fn"):
        return form.nan_code
    payload = (pattern & ((1 << 52) - 1)) >> (52 - form.mantissa) if form.kind == "ieee" else 0
    return form.nan_code | payload | (pattern >> 63) * form.sign_bit


def check_options(
    form: Format, rounding: str, overflow: str, nan: str, subnormals: bool, seed: int | None, offset: int
) -> None:
    """Validate the options of an encoding.

    Raises:
        TypeError, ValueError: an option is unknown, out of range, or impossible for the format.
    """
    words = (("rounding", rounding, ENCODE_ROUNDINGS), ("overflow", overflow, OVERFLOWS), ("nan", nan, NANS))
    for name, value, allowed in words:
        if value not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {value!r}")
    if overflow == "nan" and not form.has_nan:
        raise ValueError(
            f"Expected overflow to be 'inf' or 'saturate' for {form.name}, which has no NaN, but got 'nan'"
        )
    if not isinstance(subnormals, bool):
        raise TypeError(f"Expected subnormals to be True (kept) or False (flushed to zero), but got {subnormals!r}")
    for name, number, largest in (("seed", 0 if seed is None else seed, 2**63 - 1), ("offset", offset, LARGEST_OFFSET)):
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
    form = format if isinstance(format, Format) else formats[format]
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


# ----------------------------------------------------------------------------------------------------------- neighbours


def ulp_exact(value: Any, format: Any) -> Number:
    """The distance between the format's numbers around `value`, as if the exponent had no upper limit (`Format.ulp`).

    It is NaN for NaN and infinity for infinities.
    """
    number = exact(value)
    if isinstance(number, float) and number != 0:
        return abs(number)
    return Fraction(2) ** unit_exponent(Fraction(number), formats[format])


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


def _next(number: Number, form: Format, *, up: bool) -> Number:
    """The next number by its position in the order of the format's numbers: 0 is zero (in E8M0 the least number)."""
    if number != number:
        return number
    code = code_of(number, form, "down" if up else "up", "saturate")
    near = decode_exact(code, form)
    if near > number if up else near < number:
        return near  # the number is beyond the lowest or the largest one
    order = code
    if code & form.sign_bit:
        order = code - form.codes if form.kind == "integer" else form.sign_bit - code
    order += 1 if up else -1
    lowest = 0 if form.kind == "scale" else -largest_magnitude(True, form)
    if not lowest <= order <= form.largest_code:
        return decode_exact(beyond_code(order < lowest, form, "inf"), form)
    minus = order < 0 or (order == 0 and up and form.kind != "scale")
    return decode_exact(signed_code(abs(order), minus, form), form)


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
    code = code_of(number, form)
    nearest, step = decode_exact(code, form), Fraction(2) ** unit_exponent(Fraction(number), form)
    previous, following = _next(number, form, up=False), _next(number, form, up=True)
    if nearest == number:
        return Neighbours(number, True, number, number, None, nearest, code, code, code, step, previous, following)
    open_ended = form.has_infinity or form.has_nan
    below = previous if open_ended or number > form.lowest else None
    above = following if open_ended or number < form.max else None
    midpoint = None
    if form.lowest < number < form.max:
        midpoint = (Fraction(previous) + Fraction(following)) / 2
    elif number > form.max:
        midpoint = Fraction(form.max) + Fraction(form.ulp(form.max)) / 2
    elif form.signed:
        midpoint = Fraction(form.lowest) - Fraction(form.ulp(form.lowest)) / 2
    first, second = (None if side is None else code_of(side, form) for side in (below, above))
    return Neighbours(number, False, below, above, midpoint, nearest, first, second, code, step, previous, following)


# ------------------------------------------------------------------------------------------------------ exact numbers


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
    dtype_kind = getattr(getattr(value, "dtype", None), "kind", None)
    if dtype_kind in ("f", "V", "i", "u", "b") and hasattr(value, "__float__"):
        near = float(value)
        if dtype_kind != "f" or near != near or near == 0 or value in (math.inf, -math.inf):
            return _from_float(near)  # float64 represents all numbers of ml_dtypes
        return Fraction(*value.as_integer_ratio())  # but not those of numpy's long double
    raise TypeError(
        "Expected a real number (int, float, Fraction, Decimal or numpy's) or a string such as '0.1', '0x1p-3' or "
        f"'1/3', but got {value!r}, a {type(value).__name__}"
    )


def _from_float(value: float) -> Number:
    if value == 0:
        return value if math.copysign(1.0, value) < 0 else Fraction(0)
    return Fraction(value) if math.isfinite(value) else value


def _pattern(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


_TOKEN = re.compile(
    r"""
      (?P<hexadecimal> 0x (?: [0-9a-f]+ (?:\.[0-9a-f]*)? | \.[0-9a-f]+ ) (?: p [+-]?[0-9]+ )? )
    | (?P<decimal> (?: [0-9]+ (?:_[0-9]+)* (?:\.[0-9]*)? | \.[0-9]+ ) (?: e [+-]?[0-9]+ )? )
    | (?P<special> infinity | inf | nan )
    | (?P<irrational> (?: pi | e | sqrt ) \b )
    | (?P<operator> \*\* | [-+*/^()] )
    """,
    re.VERBOSE,
)
_WRITTEN_OTHERWISE = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{INFINITY}": "inf", "π": "pi", "√": "sqrt "}
)
_CONSTANTS = {
    "pi": Fraction("3.1415926535897932384626433832795028841971693993751"),
    "e": Fraction("2.7182818284590452353602874713526624977572470936999"),
}


def parse_number(text: str) -> Number:
    """The exact value of a text as people write it: "0.1" is one tenth, not the float64 number next to it.

        sum      = product {("+" | "-") product}
        product  = signed {("*" | "/") signed}
        signed   = ("+" | "-") signed | power
        power    = atom [("^" | "**") signed]
        atom     = decimal | hexadecimal float | "inf" | "nan" | "pi" | "e" | "sqrt" atom | "(" sum ")"

    pi, e and roots that are not rational have 50 digits here. That decides every rounding of at most 53 bits, and what
    is computed from them is rational where it agrees with a short fraction to 43 digits, such as sqrt(2)^2.

    Returns:
        A Fraction, `Irrational` if it has only its first digits, or a float for an infinity, NaN or -0.0.

    Raises:
        ValueError: the text is not a number, or its magnitude or that of an intermediate result is outside 2^±65536,
            which is far beyond the range of every format. The message says what is wrong.

    Examples:
        >>> from halfstep.numerics.formats.codec import parse_number
        >>> parse_number("2^-24"), parse_number("0x1.8p-3"), parse_number("-(1 + 2^-11)")
        (Fraction(1, 16777216), Fraction(3, 16), Fraction(-2049, 2048))
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"Expected a number of at most {LARGEST_TEXT} characters, but got {len(text)}")
    return _Parser(text).result()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        plain = text.translate(_WRITTEN_OTHERWISE).lower()
        at = 0
        while at < len(plain):
            if plain[at].isspace():
                at += 1
                continue
            token = _TOKEN.match(plain, at)
            if not token:
                word = plain[at:].split()[0]
                raise self._error("" if word == plain.strip() else f"{word!r} is not understood")
            self._tokens.append((str(token.lastgroup), token.group()))
            at = token.end()
        self._at = 0
        self._depth = 0
        self._irrational = False

    def result(self) -> Number:
        value = self._chain("+-")
        if self._at < len(self._tokens):
            raise self._error(f"{self._tokens[self._at][1]!r} is not expected there")
        if not self._irrational or not isinstance(value, Fraction) or not value:
            return value
        unit = Fraction(2) ** (value.numerator.bit_length() - value.denominator.bit_length())
        near = (value / unit).limit_denominator(2**56) * unit
        return near if abs(value - near) * 2**145 < abs(value) else Irrational(value)

    def _shown(self) -> str:
        return repr(self._text if len(self._text) <= 60 else self._text[:57] + "...")

    def _error(self, why: str) -> ValueError:
        return ValueError(
            f"{self._shown()} is not a number{': ' if why else ''}{why}. Write decimals (1e-400), hexadecimal floats "
            "(0x1.8p-3), inf, nan, fractions (1/3), powers (2^-24), pi, e, sqrt(2), and sums and products of these"
        )

    def _take(self, *operators: str) -> str | None:
        """The next token, if it is one of `operators`."""
        if self._at < len(self._tokens) and self._tokens[self._at][1] in operators:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _chain(self, operators: str) -> Number:
        """A sum (of products) or a product (of signed numbers)."""
        operand = self._signed if operators == "*/" else lambda: self._chain("*/")
        value = operand()
        while sign := self._take(*operators):
            value = self._applied(sign, value, operand())
        return value

    def _applied(self, sign: str, first: Number, second: Number) -> Number:
        left, right = self._finite(first, sign), self._finite(second, sign)
        if sign in "+-":
            if left == right == 0 and _negative(first) and _negative(second) == (sign == "+"):
                return first  # -0 + -0 and -0 - 0 are -0; all other sums of zeros are 0
            value = left + right if sign == "+" else left - right
            if self._irrational and 0 < abs(value) * 2**60 < abs(left):
                raise self._error("the first 18 digits cancel out, and of pi, e and roots only 50 are there")
            return self._limited(value)
        if sign == "/" and right == 0:
            raise self._error("it divides by zero; an infinity is written inf")
        if left == 0 or right == 0:
            return -0.0 if _negative(first) != _negative(second) else Fraction(0)
        return self._limited(left * right if sign == "*" else left / right)

    def _signed(self) -> Number:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        if not negative:
            return value
        return -value if value or isinstance(value, float) else -0.0

    def _power(self) -> Number:
        base = self._atom()
        sign = self._take("^", "**")
        if not sign:
            return base
        exponent = self._finite(self._deeper(self._signed), sign)
        root = self._finite(base, sign)
        if exponent.denominator != 1:
            raise self._error("an exponent is not an integer")
        if root == 0 and exponent < 0:
            raise self._error("it divides by zero; an infinity is written inf")
        if root in (0, 1, -1):
            return root if exponent % 2 or root == 1 else Fraction(int(exponent == 0 or root != 0))
        # |root|^n has at least n bits before or after the binary point, so this limits the work as well.
        if abs(exponent) * max(root.numerator.bit_length() - 1, root.denominator.bit_length() - 1) > 2 * LARGEST_POWER:
            raise self._too_far()
        return self._limited(root ** int(exponent))

    def _atom(self) -> Number:
        if self._take("("):
            value = self._deeper(lambda: self._chain("+-"))
            if not self._take(")"):
                raise self._error("a parenthesis is not closed")
            return value
        if self._at == len(self._tokens):
            raise self._error("it ends too early" if self._tokens else "it is empty")
        group, token = self._tokens[self._at]
        if group == "operator":
            raise self._error(f"{token!r} is not expected there")
        self._at += 1
        if group == "irrational":
            self._irrational = True
            return self._root() if token == "sqrt" else _CONSTANTS[token]
        if group == "special":
            return math.nan if token == "nan" else math.inf
        if group == "hexadecimal":
            return self._literal(token[2:], "p", 16, 2, 4, LARGEST_POWER)
        return self._literal(token.replace("_", ""), "e", 10, 10, 1, 19_000)

    def _root(self) -> Number:
        """The square root of the atom that follows."""
        value = self._deeper(self._atom)
        square = self._finite(value, "sqrt")
        if square < 0:
            raise self._error("a square root of a negative number is not real")
        top, under = math.isqrt(square.numerator), math.isqrt(square.denominator)
        if (top * top, under * under) == (square.numerator, square.denominator):
            return Fraction(top, under) if square else value
        product = square.numerator * square.denominator  # the root is that of this, divided by the denominator
        shift = max(0, 166 - product.bit_length() // 2)
        return self._limited(Fraction(math.isqrt(product << 2 * shift), square.denominator << shift))

    def _deeper(self, rule: Callable[[], Number]) -> Number:
        self._depth += 1
        if self._depth > 50:
            raise self._error("it is nested more than 50 deep")
        value = rule()
        self._depth -= 1
        return value

    def _literal(self, token: str, mark: str, base: int, root: int, per_digit: int, largest: int) -> Fraction:
        """Digits of a base, times a power of `root` behind a mark; a digit after the point is worth `per_digit`."""
        digits, _, power = token.partition(mark)
        integer, _, fraction = digits.partition(".")
        significand = int(integer + fraction, base)
        if not significand:
            return Fraction(0)
        if power and (len(power.lstrip("+-").lstrip("0")) > 9 or abs(int(power)) > largest):
            raise self._too_far()
        return self._limited(Fraction(significand) * Fraction(root) ** (int(power or 0) - per_digit * len(fraction)))

    def _finite(self, value: Number, operator: str) -> Fraction:
        if isinstance(value, float) and value != 0:
            raise self._error(f"{operator!r} is not defined here for infinities and NaN, which stand alone")
        return Fraction(value)

    def _limited(self, value: Fraction) -> Fraction:
        numerator, denominator = abs(value.numerator).bit_length(), value.denominator.bit_length()
        far = value != 0 and abs(numerator - denominator) > LARGEST_POWER
        if far or max(numerator, denominator) > 2 * LARGEST_POWER:
            raise self._too_far()
        return value

    def _too_far(self) -> ValueError:
        return ValueError(
            f"Expected magnitudes from 2^-{LARGEST_POWER} to 2^{LARGEST_POWER}, also of intermediate results, but got "
            f"{self._shown()}: for infinity write inf, for zero 0"
        )


def _negative(value: Number) -> bool:
    return value < 0 or (isinstance(value, float) and math.copysign(1.0, value) < 0)
