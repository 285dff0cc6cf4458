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

import ast
import math
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

from halfstep.numerics.formats.table import Format, formats

ENCODE_ROUNDINGS = ("nearest", "nearest_away", "toward_zero", "up", "down", "odd", "stochastic")
OVERFLOWS = ("inf", "saturate", "nan")
NANS = ("canonical", "payload", "zero", "raise")
LARGEST_OFFSET = 2**60 - 1  # as in kernels/cast.py
LARGEST_TEXT = 4000  # characters
LARGEST_POWER = 65536  # of two; about 19,700 of ten
_LARGEST_SUM = 1000  # characters besides literals, which Python's parser and the recursion here can take
_QUIET = 1 << 51  # of a float64 NaN

# A float for an infinity, a NaN (with sign and payload) or -0.0, which no Fraction represents.
Number = Fraction | float

# ------------------------------------------------------------------------------------------------------------- rounding


def encode_exact(
    value: Any, format: Any, rounding: str = "nearest", *, overflow: str = "inf", nan: str = "canonical",
    subnormals: bool = True, seed: int | None = None, offset: int = 0,
) -> int:  # fmt: skip
    """The code of one number, computed in rational arithmetic. The arguments are those of `codec.encode`.

    Examples:
        >>> from halfstep.numerics.formats.exact import encode_exact
        >>> hex(encode_exact("1/3", "fp16"))
        '0x3555'
    """
    form, number = formats.element(format), exact(value)
    check_options(form, rounding, overflow, nan, subnormals, seed, offset)
    word = random_word(offset, seed) if rounding == "stochastic" else 0
    return code_of(number, form, rounding, overflow, nan, subnormals, word)


def code_of(
    number: Number, form: Format, rounding: str = "nearest", overflow: str = "inf", nan: str = "canonical",
    subnormals: bool = True, word: int = 0,
) -> int:  # fmt: skip
    """`encode_exact` of a number that `exact` returned, with options that were checked and the random word."""
    if number != number:
        return nan_code(struct.unpack("<Q", struct.pack("<d", number))[0], form, nan)
    negative = number < 0 or (isinstance(number, float) and number == 0)  # which is -0.0
    if number in (math.inf, -math.inf) or (form.kind == "scale" and number < 0):
        return beyond_code(negative, form, overflow)
    code = unlimited_code(abs(Fraction(number)), negative, form, rounding, word)
    if code > largest_magnitude(negative, form):
        return beyond_code(negative, form, "saturate" if stops_at_the_end(rounding, negative, form) else overflow)
    if not subnormals and form.has_subnormals and code < 1 << form.mantissa:
        code = 0
    return signed_code(code, negative, form)


def unlimited_code(magnitude: Fraction, negative: bool, form: Format, rounding: str = "nearest", word: int = 0) -> int:
    """The code of a rounded magnitude as if the exponent had no upper limit; `negative` is the sign of the number."""
    exponent = unit_exponent(magnitude, form)
    code, part = divmod(magnitude / Fraction(2) ** exponent, 1)
    code += bool(part) and moves_away(code, part, rounding, negative, word, form)
    if form.kind == "scale":
        return max(code + exponent - form.emin - 1, 0) if magnitude >= form.min_normal else 0
    return code if form.kind == "integer" else code + ((exponent - (form.emin - form.mantissa)) << form.mantissa)


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


def moves_away(below: Any, part: Any, rounding: str, negative: Any, word: Any, form: Format) -> Any:
    """Whether rounding chooses k + 1 = `below` + 1 for a number `part` units above `below`, where that is not 0.

    Of one number, with a Fraction `part`, or of arrays of numbers, with `part` in float64, which holds it exactly.
    """
    if rounding in ("nearest", "nearest_away"):
        return (2 * part > 1) | ((2 * part == 1) & (rounding == "nearest_away" or below % 2 == 1))
    if rounding == "odd":
        return below % 2 == 0
    if rounding != "stochastic":
        return rounding != "toward_zero" and negative == (rounding == "down")
    moves, bits = part * 2**32 >= 2.0**32 - word, 23 - form.mantissa
    if form.emin <= -126 or not form.has_subnormals or form.mantissa > 10:
        return moves
    steps, least_normal = part * 2**bits, 1 << form.mantissa
    nearest = round(steps) if isinstance(steps, Fraction) else steps.round()
    coarse = (word >> (32 - bits)) + nearest >= 2**bits
    return ((below < least_normal) & coarse) | ((below >= least_normal) & moves)


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


def philox(group: Any, seed: int) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-7 of the key `seed` and the counter `group`: step 0, stream 0 of `kernels.philox`, without torch.

    The words have the 16 bits of elements ``8 * group`` to ``8 * group + 7``, two in each, the first in the lower half.
    The same code works on Python integers and on numpy arrays of uint64, which hold the products of 32-bit numbers.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = group & mask, group >> 32 & mask, group & 0, group & 0
    k0, k1 = seed & mask, seed >> 32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def random_word(index: int, seed: int | None) -> int:
    """The random word of one element: its 16 random bits, a one and 15 zeros. Without a seed, one is drawn."""
    words = philox(index // 8, random.getrandbits(63) if seed is None else seed)
    both = int(words[index % 8 // 2])
    return (both >> 16 if index % 2 else both & 0xFFFF) << 16 | 0x8000


def nan_code(pattern: Any, form: Format, nan: str) -> Any:
    """The code of a NaN, given by its float64 bit pattern, or the codes of an array of uint64 patterns."""
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
    """Raise TypeError or ValueError unless the options are known, in range, and possible for the format."""
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
            raise TypeError(f"Expected {name} to be an integer from 0 to {largest}, but got {number!r}")
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
    form = format if isinstance(format, Format) else formats.element(format)
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


def next_exact(value: Any, format: Any, *, up: bool) -> Number:
    """The least number of a format above `value` or, without `up`, the greatest below: IEEE 754's nextUp and nextDown.

    Up from the negative number closest to zero lies -0.0, if the format has it. Beyond the last number lies infinity,
    or NaN in a format without infinity, or the last number again in a format without both. NaN gives NaN.
    """
    number, form = exact(value), formats.element(format)
    if number != number:
        return number
    code = code_of(number, form, "down" if up else "up", "saturate")
    near = decode_exact(code, form)
    if near > number if up else near < number:
        return near  # the number is beyond the lowest or the largest one
    order = code  # the position among the format's numbers: 0 is zero, in E8M0 the least number
    if code & form.sign_bit:
        order = code - form.codes if form.kind == "integer" else form.sign_bit - code
    order += 1 if up else -1
    lowest = 0 if form.kind == "scale" else -largest_magnitude(True, form)
    if not lowest <= order <= form.largest_code:
        return decode_exact(beyond_code(order < lowest, form, "inf"), form)
    minus = order < 0 or (order == 0 and up and form.kind != "scale")
    return decode_exact(signed_code(abs(order), minus, form), form)


def ulp_exact(value: Any, format: Any) -> Number:
    """The distance between the format's numbers around `value` (`Format.ulp`): NaN for NaN, infinity for infinities."""
    number = exact(value)
    if isinstance(number, float) and number != 0:
        return abs(number)
    return Fraction(2) ** unit_exponent(Fraction(number), formats.element(format))


@dataclass(frozen=True)
class Neighbours:
    """The numbers of a format around a number, as returned by `neighbours`."""

    value: Number
    exact: bool  # whether `value` is a number of the format. `below` and `above` are then `value` itself
    # The numbers of the format on both sides of `value`. Beyond the largest number this is infinity, or NaN in a format
    # without infinity, or None in a format without both.
    below: Number | None
    above: Number | None
    # The middle between `below` and `above`, the threshold of rounding to nearest. Beyond the largest number it is the
    # middle between that and the next number if there were one. None if `exact`, or if no number is on the other side.
    midpoint: Fraction | None
    nearest: Number  # that ``"nearest"`` chooses, with ties to even
    code_below: int | None
    code_above: int | None
    code_nearest: int
    ulp: Number  # the distance between the format's numbers around `value`
    previous: Number  # strictly below `value`: `next_down`
    next: Number  # strictly above `value`: `next_up`

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
        >>> from halfstep.numerics.formats.exact import neighbours
        >>> around = neighbours("1/3", "fp16")
        >>> float(around.below), float(around.above)
        (0.333251953125, 0.33349609375)
    """
    form, number = formats.element(format), exact(value)
    if isinstance(number, float) and number != 0:
        raise ValueError(f"Expected value to be a finite number, which has neighbours, but got {value!r}")
    code = code_of(number, form)
    nearest, step = decode_exact(code, form), Fraction(2) ** unit_exponent(Fraction(number), form)
    previous, following = (next_exact(number, form, up=up) for up in (False, True))
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


_LITERAL = (
    r"0x(?:[0-9a-f]+(?:\.[0-9a-f]*)?|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?"
    r"|(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|infinity|inf|nan"
)
_WRITTEN_OTHERWISE = str.maketrans({"\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{INFINITY}": "inf"})


def parse_number(text: str) -> Number:
    """The exact value of a text as people write it: "0.1" is one tenth, not the float64 number next to it.

    Decimals, hexadecimal floats, ``inf``, ``nan``, and of finite numbers sums, products, quotients and integer powers
    (``^`` or ``**``) with parentheses. The precedence is Python's.

    Returns:
        A Fraction, or a float for an infinity, NaN or -0.0.

    Raises:
        ValueError: the text is not a number, or its magnitude or that of an intermediate result is outside 2^±65536,
            which is far beyond the range of every format. The message says what is wrong.

    Examples:
        >>> from halfstep.numerics.formats.exact import parse_number
        >>> parse_number("2^-24"), parse_number("0x1.8p-3"), parse_number("-(1 + 2^-11)")
        (Fraction(1, 16777216), Fraction(3, 16), Fraction(-2049, 2048))
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"Expected a number of at most {LARGEST_TEXT} characters, but got {len(text)}")
    plain = " ".join(text.translate(_WRITTEN_OTHERWISE).lower().split())
    literals = re.findall(_LITERAL, plain)
    terms = re.sub(_LITERAL, " L ", plain)  # Python's parser sees the name L for each literal
    try:
        if len(terms) > _LARGEST_SUM or not re.fullmatch(r"[-+*/^() L]+", terms):
            raise SyntaxError
        tree = ast.parse(terms.strip().replace("^", "**"), mode="eval").body
        return _value(tree, iter(literals))
    except (SyntaxError, RecursionError, MemoryError):
        raise _refused(text) from None
    except ZeroDivisionError:
        raise _refused(text, ": it divides by zero; an infinity is written inf") from None
    except (ValueError, OverflowError) as error:
        raise _refused(text, f": {error}") from None


def _refused(text: str, why: str = "") -> ValueError:
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    return ValueError(
        f"{shown} is not a number{why}. Write decimals (1e-400), hexadecimal floats (0x1.8p-3), inf, nan, fractions "
        f"(1/3), powers (2^-24), and sums and products of these, from 2^-{LARGEST_POWER} to 2^{LARGEST_POWER}"
    )


def _value(node: ast.AST, literals: Iterator[str]) -> Number:
    """The value of a part of a syntax tree, whose names stand for `literals` in their order."""
    match node:
        case ast.Name("L"):
            return _literal(next(literals))
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _value(operand, literals)
            if isinstance(sign, ast.UAdd):
                return value
            return -value if value else -0.0 if isinstance(value, Fraction) else Fraction(0)
        case ast.BinOp(first, operator, second):
            left, right = _value(first, literals), _value(second, literals)
            if any(isinstance(side, float) and side != 0 for side in (left, right)):
                raise ValueError("infinities and NaN stand alone")
            return _combined(left, operator, right)
    raise SyntaxError


def _combined(left: Number, operator: ast.operator, right: Number) -> Number:
    a, b = Fraction(left), Fraction(right)
    match operator:
        case ast.Add():
            return _limited(a + b)
        case ast.Sub():
            return _limited(a - b)
        case ast.Mult() | ast.Div():
            zero = -0.0 if _negative(left) != _negative(right) else Fraction(0)
            return _limited(a * b if isinstance(operator, ast.Mult) else a / b) or zero
        case ast.Pow() if b.denominator != 1:
            raise ValueError("an exponent is not an integer")
        case ast.Pow() if abs(a) == 1:
            return a if b % 2 else Fraction(1)
        case ast.Pow():
            # |a|^n has at least n bits before or after the binary point, so this limits the work as well.
            if a and abs(b) * max(a.numerator.bit_length() - 1, a.denominator.bit_length() - 1) > 2 * LARGEST_POWER:
                raise ValueError("it or an intermediate result is too large or too small")
            return _limited(a ** int(b))
    raise SyntaxError


def _literal(token: str) -> Number:
    if token[0] in "in":
        return math.nan if token == "nan" else math.inf
    base, mark, root, per_digit = (16, "p", 2, 4) if token.startswith("0x") else (10, "e", 10, 1)
    digits, _, power = token.removeprefix("0x").replace("_", "").partition(mark)
    integer, _, fraction = digits.partition(".")
    significand, exponent = int(integer + fraction, base), Decimal(power or 0)
    if not significand:
        return Fraction(0)
    if abs(exponent) > LARGEST_POWER:  # before a power of so many digits is computed
        raise ValueError("it is too large or too small")
    return _limited(Fraction(significand) * Fraction(root) ** (int(exponent) - per_digit * len(fraction)))


def _limited(value: Fraction) -> Fraction:
    numerator, denominator = abs(value.numerator).bit_length(), value.denominator.bit_length()
    if (value and abs(numerator - denominator) > LARGEST_POWER) or max(numerator, denominator) > 2 * LARGEST_POWER:
        raise ValueError("it or an intermediate result is too large or too small")
    return value


def _negative(value: Number) -> bool:
    return value < 0 or (isinstance(value, float) and math.copysign(1.0, value) < 0)
