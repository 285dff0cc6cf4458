"""A number in a format: code, value, error, outcome, what other implementations store, and why, in exact texts."""

from __future__ import annotations

import decimal as arithmetic
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from halfstep.numerics.formats.exact import (
    Irrational,
    Number,
    code_of,
    decode_exact,
    next_down_exact,
    next_up_exact,
    power_of_two,
    unit_exponent,
)
from halfstep.numerics.formats.table import AMBIGUOUS, Format, formats

# ------------------------------------------------------------------------------------------------------ numbers as text

_LONGEST = 1100  # digits; the exact decimal of fp64's least number has 751, and more than that nobody reads
_LEAST_POSITIONAL, _MOST_POSITIONAL = -4, 16  # decimal exponents written without an e
_EXACT = arithmetic.Context(prec=3 * _LONGEST, traps=[arithmetic.Inexact])


def finite(number: Number) -> bool:
    """Whether the number is neither an infinity nor a NaN. -0.0 is finite."""
    return isinstance(number, Fraction) or number == 0


def _quotient(x: Fraction, context: arithmetic.Context) -> Decimal:
    """`x` as Python's decimal arithmetic divides: rounded once, and through no float."""
    return context.divide(Decimal(x.numerator), Decimal(x.denominator))


def _placed(x: Decimal, limit: int = _MOST_POSITIONAL) -> str:
    """The digits of `x`; without an e if its exponent is no larger than `limit`."""
    sign, exponent = "-" * x.as_tuple().sign, x.adjusted()
    digits = "".join(map(str, x.as_tuple().digits)).rstrip("0") or "0"
    if not _LEAST_POSITIONAL <= exponent <= limit:
        return sign + digits[0] + ("." + digits[1:] if len(digits) > 1 else "") + f"e{exponent}"
    if exponent < 0:
        return sign + "0." + "0" * (-exponent - 1) + digits
    integer = digits[: exponent + 1].ljust(exponent + 1, "0")
    return sign + integer + ("." + digits[exponent + 1 :] if len(digits) > exponent + 1 else "")


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
    every_digit = decimal(number)
    return every_digit if every_digit is not None and len(every_digit) <= width else f"≈{rounded(number, digits)}"


def among(number: Number, format: Format) -> str:
    """A number with all its digits, or with enough of them to distinguish it from its neighbours in a format."""
    return fitting(number, 24, format.max_digits10 + 2)


def short(value: float | Fraction) -> str:
    """A number with a few digits, or with all of them if they fit nine columns."""
    return fitting(Fraction(value), 9 + (value < 0), 4).removeprefix("≈")


def all_digits(number: Number) -> str:
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


def number_dict(number: Number) -> dict[str, str | None]:
    """A number in the form of all JSON of the lookup. Infinities and NaN have only a decimal."""
    if isinstance(number, float):
        zero = number == 0
        return {"decimal": special(number), "hex": "-0x0p+0" if zero else None, "fraction": "0" if zero else None}
    legible = type(number) is Fraction and number.denominator.bit_length() < 8000 > number.numerator.bit_length()
    return {"decimal": decimal(number), "hex": hex_float(number), "fraction": str(number) if legible else None}


def code_text(code: int, format: Format) -> str:
    """A code in hexadecimal, with leading zeros."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


# ------------------------------------------------------------------------------------------------------ stored numbers


@dataclass(frozen=True)
class Stored:
    """A code of a format."""

    code: int
    format: Format

    @cached_property
    def value(self) -> Number:
        """The exact value: a Fraction, or a float for an infinity, NaN or -0.0."""
        return decode_exact(self.code, self.format)

    @cached_property
    def hex(self) -> str:
        """The code in hexadecimal, with leading zeros."""
        return code_text(self.code, self.format)

    @cached_property
    def fields(self) -> dict[str, str]:
        """The bits of the fields by their names, from the most significant one."""
        form, bits = self.format, f"{self.code:0{self.format.bits}b}"
        first, second = int(form.signed), int(form.signed) + form.exponent
        fields = {"sign": bits[:first], "exponent": bits[first:second], "mantissa": bits[second:]}
        return {name: digits for name, digits in fields.items() if digits}

    @property
    def bits(self) -> str:
        """The bits of the fields, separated by spaces."""
        return " ".join(self.fields.values())

    @cached_property
    def category(self) -> str:
        """``zero``, ``subnormal``, ``normal``, ``infinity`` or ``nan``."""
        if isinstance(self.value, float) and self.value != 0:
            return "nan" if self.value != self.value else "infinity"
        if self.value == 0:
            return "zero"
        return "subnormal" if abs(Fraction(self.value)) < self.format.min_normal else "normal"

    @cached_property
    def shortest(self) -> str:
        """The shortest decimal that rounds to the value, the nearest of several; or the name of a special value.

        65504 of fp16 is "65500": nothing else in fp16 is nearer to that.
        """
        value = self.value
        if isinstance(value, float) or value == 0:
            return special(value) if isinstance(value, float) else "0"
        for digits in range(1, 800):
            contexts = (arithmetic.Context(prec=digits, rounding=mode) for mode in ("ROUND_FLOOR", "ROUND_CEILING"))
            sides = (_quotient(value, context) for context in contexts)
            near = [side for side in sides if code_of(Fraction(side), self.format) == self.code]
            if near:
                return _placed(min(near, key=lambda side: abs(Fraction(side) - value)))
        raise AssertionError("a decimal of 800 digits tells any two numbers apart")

    def text(self, width: int) -> str:
        """The value in at most `width` columns: all its digits, or ≈ and the shortest decimal."""
        text = fitting(self.value, width, 1)
        return f"≈{self.shortest}" if text.startswith("≈") else text

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format.name,
            "code": self.hex,
            "bits": {"sign": "", "exponent": "", "mantissa": "", **self.fields},
            "class": self.category,
            "value": {**number_dict(self.value), "shortest": self.shortest},
        }


@dataclass(frozen=True)
class Encoded:
    """The result of rounding a number to a format.

    `stored` is None if the format has no code for the result.
    """

    number: Number
    format: Format
    stored: Stored | None

    @cached_property
    def error(self) -> Fraction | None:
        """The stored value minus the given one; None unless both are finite."""
        if self.stored is None or not finite(self.number) or not finite(self.stored.value):
            return None
        error = Fraction(self.stored.value) - Fraction(self.number)
        return Irrational(error) if isinstance(self.number, Irrational) else error

    @cached_property
    def ulps(self) -> Fraction | None:
        """The error in ulps of the given number, as if the exponent had no upper limit."""
        return None if self.error is None else self.error / (self.ends[1] - self.ends[0])

    @cached_property
    def ulps_text(self) -> str:
        """The error in ulps, with its sign; empty if there is none."""
        return "" if self.ulps is None else ("+" if self.ulps > 0 else "") + distance(self.ulps)

    @property
    def relative(self) -> Fraction | None:
        return self.error / Fraction(self.number) if self.error is not None and self.number != 0 else None

    @cached_property
    def outcome(self) -> str:
        """What became of the number.

        ``"exact"``: stored without error. ``"rounded"``: a neighbour is stored. ``"underflow"``: became zero, and was
        not. ``"overflow"``: became infinity, or NaN in a format without. ``"saturated"``: beyond the largest number,
        which is stored. ``"none"``: a NaN in a format without.
        """
        if self.stored is None:
            return "none"
        if self.number != self.number or self.error == 0:
            return "exact"
        if self.stored.category in ("nan", "infinity"):
            return "exact" if self.stored.value == self.number else "overflow"
        if overflows(self.number, self.format):
            return "saturated"
        return "underflow" if self.stored.category == "zero" else "rounded"

    @property
    def outcome_text(self) -> str:
        """The outcome, and whether the result is subnormal."""
        outcome = self.outcome
        if self.stored is not None and self.stored.category == "subnormal" and outcome in ("exact", "rounded"):
            return "exact subnormal" if outcome == "exact" else "subnormal"
        if outcome == "overflow" and not self.format.signed and self.number < 0:
            return "no sign"
        return "no NaN" if outcome == "none" else outcome

    @cached_property
    def ends(self) -> tuple[Fraction, Fraction]:
        """The values on both sides of a finite number, one ulp apart, as if the exponent had no upper limit."""
        exact = Fraction(self.number)
        step = Fraction(2) ** unit_exponent(exact, self.format)
        low = exact // step * step
        return low, low + step

    @cached_property
    def rule(self) -> str:
        """The rule that decides rounding to nearest.

        ``"exact"``: the number is one of the format. ``"nearer"``: the nearer neighbour is taken. ``"tie"``: of two
        equally near, the one whose last bit is 0. ``"tie_up"``: of these, the larger magnitude, since with one
        significant bit none is even. ``"overflow"``: it rounds to a number beyond the largest. ``"special"``: an
        infinity or NaN is not rounded. ``"sign"``: the format has no negative numbers. ``"least"``: the format has no
        zero, and everything below its least number becomes that.
        """
        number, format = self.number, self.format
        if not finite(number):
            return "special"
        if format.kind == "scale" and number < format.min_normal:
            return "sign" if number < 0 else "least"
        if self.ends[0] == number and format.lowest <= number <= format.max:
            return "exact"
        if overflows(number, format):
            return "overflow"
        if 2 * Fraction(number) == sum(self.ends):
            return "tie_up" if format.mantissa == 0 and abs(Fraction(number)) >= format.min_normal else "tie"
        return "nearer"

    def as_dict(self) -> dict[str, Any]:
        error = None
        if self.error is not None and self.ulps is not None:
            relative = None if self.relative is None else rounded(self.relative, 6)
            error = {**number_dict(self.error), "ulps": rounded(self.ulps, 6), "relative": relative}
        empty = {"format": self.format.name, **dict.fromkeys(("code", "bits", "class", "value"))}
        return {**(self.stored.as_dict() if self.stored else empty), "outcome": self.outcome, "error": error}


def distance(ulps: Fraction) -> str:
    """A number of ulps with four digits, or with as many as distinguish it from one half."""
    for digits in range(4, 24):
        text = rounded(ulps, digits)
        if text.lstrip("-") != "0.5" or abs(ulps) == Fraction(1, 2):
            return text
    return "≈0.5"


def overflow_threshold(format: Format, negative: bool = False) -> Fraction:
    """The exact value of `Format.overflow`, the threshold of overflow for rounding to nearest."""
    largest = Fraction(-format.lowest if negative and format.kind == "integer" else format.max)
    return largest + Fraction(2) ** unit_exponent(largest, format) / 2


def overflows(number: Number, format: Format) -> bool:
    """Whether rounding to nearest overflows."""
    if not finite(number):
        return number == number
    negative, magnitude = number < 0, abs(Fraction(number))
    if magnitude <= format.max or (format.kind == "scale" and negative):
        return format.kind == "scale" and negative
    threshold = overflow_threshold(format, negative)
    if magnitude != threshold:
        return magnitude > threshold
    # A tie goes to the even one of the largest number and what would come next; up where there is one significant bit.
    return format.mantissa == 0 or bool((format.largest_code + (format.kind == "integer" and negative)) & 1)


def encoded(number: Number, format: Format, rounding: str = "nearest", overflow: str = "inf", word: int = 0) -> Encoded:
    """`number` rounded to a format; see `halfstep.numerics.formats.exact` for the modes and the random word."""
    if number != number and not format.has_nan:
        return Encoded(number, format, None)
    refuses = overflow == "nan" and not format.has_nan
    code = code_of(number, format, rounding, "inf" if refuses else overflow, word=word)
    result = Encoded(number, format, Stored(code, format))
    return Encoded(number, format, None) if refuses and result.outcome == "saturated" else result


class DoubleRounding(NamedTuple):
    """The result of rounding to other formats first."""

    via: tuple[Format, ...]
    result: Encoded


def double_roundings(number: Number, format: Format) -> list[DoubleRounding]:
    """The wider formats, in which numbers are held before a cast, that change the result of rounding to nearest."""
    if not finite(number):
        return []
    direct, changed = str(decode_exact(code_of(number, format), format)), []
    via: tuple[Format, ...] = ()
    for wide in (formats["fp64"], formats["fp32"]):
        if wide.bits <= format.bits:
            break
        via, number = (*via, wide), decode_exact(code_of(number, wide), wide)
        result = encoded(number, format)
        if result.stored is not None and str(result.stored.value) != direct:
            changed.append(DoubleRounding(via, result))
    return changed


def chances(number: Number, format: Format, overflow: str) -> list[tuple[Fraction, Encoded]]:
    """The possible results of stochastic rounding and their probabilities: toward zero first, then away from it.

    The noise has 32 bits (31 among the subnormals of formats with fewer exponents than fp32), so that a probability is
    a multiple of 2^-32 (2^-31), rounded down for the one away from zero.
    """
    if not finite(number) or number == 0 or (format.kind == "scale" and number < format.min_normal):
        return [(Fraction(1), encoded(number, format, overflow=overflow))]
    exact, step = abs(Fraction(number)), Fraction(2) ** unit_exponent(Fraction(number), format)
    units = exact // step
    coarse = format.has_subnormals and format.emin > -126 and exact < format.min_normal
    steps = 2**31 if coarse else 2**32
    share = Fraction((exact / step - units) * steps // 1, steps)
    sides: list[Number] = [units * step, (units + 1) * step]
    if number < 0:
        sides = [-side if side else -0.0 for side in sides]
    ends = [encoded(side, format, overflow=overflow) for side in sides]
    if ends[0].stored == ends[1].stored:
        return [(Fraction(1), ends[0])]
    return [(chance, end) for chance, end in zip((1 - share, share), ends, strict=True) if chance]


class Line(NamedTuple):
    """Where a number lies between two numbers of the format, or beyond the largest one."""

    ends: list[tuple[str, str]]  # the values and the codes
    middle: str  # the value halfway
    position: Fraction  # 0 at the lower end, 1 at the upper one
    stored: int | None  # the index of the end that is stored; None for neither


def line_between(result: Encoded) -> Line | None:
    """The `Line` of a number; None where nothing is rounded or both ends overflow."""
    format = result.format
    if result.rule in ("special", "exact", "sign"):
        return None
    low, high = result.ends
    if overflows(low if result.number > 0 else high, format):
        return None
    exact, ends = Fraction(result.number), []
    for value in (low, high):
        code = f"not in {format.name}"
        if not overflows(value, format) and (value or format.has_zero):
            code = code_text(code_of(value if value or exact > 0 else -0.0, format), format)
        ends.append((among(value, format), code))
    value_stored = None if result.stored is None else result.stored.value
    stored = int(value_stored == high) if value_stored in (low, high) else None
    return Line(ends, among((low + high) / 2, format), (exact - low) / (high - low), stored)


# ------------------------------------------------------------------------------------- what other implementations store


class Implementation(NamedTuple):
    """How an implementation casts. All begin with a Python float, thus with the float64 nearest to the number.

    Attributes:
        name: what it is called here.
        formats: names of the formats it has.
        via: formats the number is rounded to on the way.
        saturates: names of the formats in which overflow and infinities become the largest number.
        scale: what E8M0 makes of numbers it has none for: ``"magnitude"`` drops the sign and takes 0 for the least,
            ``"nan"`` makes both NaN.
    """

    name: str
    formats: tuple[str, ...]
    via: tuple[str, ...] = ("fp64",)
    saturates: tuple[str, ...] = ()
    scale: str = "magnitude"

    def cast(self, number: Number, format: Format) -> Number | None:
        """The value that the implementation stores; None if that is undefined."""
        for name in self.via:
            wide = formats[name]
            if wide.bits <= format.bits and name != "fp64":
                break  # from float64 to float64 nothing is rounded
            number = decode_exact(code_of(number, wide), wide)
        if format.kind == "integer":  # C's conversion: toward zero, and undefined outside the range
            integer = Fraction(math.trunc(number)) if finite(number) else None
            return integer if integer is not None and format.lowest <= integer <= format.max else None
        if number != number:
            return -0.0 if not format.has_nan else math.nan
        if format.kind == "scale":
            if number <= 0 and self.scale == "nan":
                return math.nan
            number = -number if number < 0 else number
            if format.min_normal < number < 2 * format.min_normal:
                return Fraction(2 * format.min_normal)  # fp32's subnormals go up whatever is beyond their first bit
        code = code_of(number, format, overflow="saturate" if format.name in self.saturates else "inf")
        return decode_exact(code, format)


# The rules of torch, ml_dtypes and numpy are tested against what is installed; OCP's are those of the OFP8
# specification 1.0, 2023, table of conversions.
_FP8 = AMBIGUOUS["fp8"]
_TORCH = ("fp64", "fp32", "fp16", "bf16", *_FP8, "e8m0fnu", "int8")
_ML_DTYPES = ("bf16", *_FP8, "e8m0fnu", "e2m3fn", "e3m2fn", "e2m1fn")
IMPLEMENTATIONS = (
    Implementation("torch 2.12 and later", _TORCH, ("fp64", "fp32"), saturates=("e4m3fn",)),
    Implementation("torch before 2.12", _TORCH, ("fp64", "fp32")),
    Implementation("numpy", ("fp64", "fp32", "fp16", "int8")),
    Implementation("ml_dtypes", _ML_DTYPES, ("fp64", "fp32"), scale="nan"),
    Implementation("OCP saturating", ("e4m3fn", "e5m2"), saturates=("e4m3fn", "e5m2")),
    Implementation("OCP non-saturating", ("e4m3fn", "e5m2")),
)


class Conversion(NamedTuple):
    """A value, None if it is undefined, and the implementations that store it."""

    value: Number | None
    names: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {"value": None if self.value is None else number_dict(self.value), "who": self.names}

    @property
    def who(self) -> str:
        """The names of the implementations, shortened."""
        names = [name for name in self.names if not name.startswith("torch")]
        return ", ".join(["torch", *names] if len(self.names) - len(names) == 2 else self.names)

    @property
    def text(self) -> str:
        return "undefined" if self.value is None else fitting(self.value, 20, 9)


def conversions(number: Number, format: Format) -> list[Conversion]:
    """The values and who stores them, in the order of the table; empty if all store the nearest number."""
    stored: dict[str, Conversion] = {}  # by text, in which NaN equals NaN
    for implementation in IMPLEMENTATIONS:
        if format.name in implementation.formats:
            value = implementation.cast(number, format)
            stored.setdefault(str(value), Conversion(value, [])).names.append(implementation.name)
    nearest = None if number != number and not format.has_nan else decode_exact(code_of(number, format), format)
    if all(key == str(nearest) or conversion.value == nearest for key, conversion in stored.items()):
        return []
    return list(stored.values())


# ----------------------------------------------------------------------------------------------------------------- why

_DIRECTIONS = {"toward_zero": "toward zero", "odd": "to odd", "up": "up", "down": "down"}
_TAKEN = {"toward_zero": "the one nearer to zero", "up": "the upper one", "down": "the lower one"}


def reasons(result: Encoded, rounding: str = "nearest") -> list[str]:
    """The explanation of a number rounded in any mode but ``"stochastic"``, as a list of one or two sentences each.

    Args:
        result: the number rounded in this mode, subnormal results kept.
        rounding: the mode.
    """
    format, number, rule = result.format, result.number, result.rule
    if rule == "special":
        return ["An infinity is not rounded." if number == number else "NaN is not rounded.", _instead(result)]
    if rule == "exact":
        below, above = (among(near(number, format), format) for near in (next_down_exact, next_up_exact))
        nothing = f"It is a number of {format.name}: nothing is rounded."
        return [nothing, f"The next ones are {below} below and {above} above."]
    if rule == "sign":
        stands = "nothing" if result.stored is None else among(result.stored.value, format)
        return [f"{format.name} has no sign, and {stands} stands for negative numbers."]
    if rule == "least":
        return [f"{format.name} has no zero: everything below its least number, 2^{format.emin}, becomes that."]

    negative, to_nearest = number < 0, rounding in ("nearest", "nearest_away")
    if rule == "overflow" and to_nearest:
        return _nearest_beyond(result)
    inner, outer = sorted(map(abs, result.ends))
    last = abs(format.lowest if negative else format.max)
    stored = result.stored or Stored(code_of(number, format), format)
    value = among(stored.value, format)
    why = _obstacle(result) if rule != "overflow" else []
    if to_nearest:
        if rule == "nearer" or rounding == "nearest":
            return [*why, _step(result), *_nearest(result, rule, stored)]
        if outer <= last:
            return [*why, _step(result), _halfway(result), f"Ties go away from zero: {value}."]
        where = f"The number is exactly halfway to the number after the last one, {among(number, format)}."
        return [*why, _step(result), where, "Ties go away from zero, so it overflows.", _instead(result)]
    inward = rounding in ("toward_zero", "odd", "up" if negative else "down")
    if inner > last or (outer > last and not inward):
        name, end = ("lowest", format.lowest) if negative else ("largest", format.max)
        where = f"The {name} number of {format.name} is {among(Fraction(end), format)}, and the number lies beyond it."
        if not inward:
            return [*why, where, f"Rounding {rounding} leads away from zero, so it overflows.", _instead(result)]
        kept = f"{value} is stored, {stored.hex}"
        return [*why, where, f"Rounding {_DIRECTIONS[rounding]} does not overflow here: {kept}."]
    if rounding != "odd":
        decision = f"Rounding {_DIRECTIONS[rounding]} takes {_TAKEN[rounding]}: {value}."
    elif format.mantissa == 0 and abs(Fraction(number)) >= format.min_normal:
        decision = f"With one significant bit, rounding to odd is rounding toward zero: {value}."
    else:
        decision = f"Rounding to odd takes the one whose last bit is 1, {stored.bits}: {value}."
    return [*why, _step(result), _where(result), decision]


def double_rounding_words(twice: DoubleRounding, result: Encoded) -> str:
    """What comes of rounding to wider formats first."""
    if twice.result.stored is None:
        return ""
    format, wide = result.format, " and ".join(format.name for format in twice.via)
    direct = decode_exact(code_of(result.number, format), format)
    becomes = f"and that becomes {among(twice.result.stored.value, format)} instead of {among(direct, format)}."
    return f"Rounded twice: first to {wide}, the number is {all_digits(twice.result.number)}, {becomes}"


def _obstacle(result: Encoded) -> list[str]:
    """Why a finite number between two numbers of the format is none itself; empty where its size is the reason."""
    format, number = result.format, Fraction(result.number)
    denominator, numerator = number.denominator, abs(number.numerator)
    if format.kind == "scale" or (format.kind == "integer" and denominator == 1):
        return []
    if format.kind == "integer":
        return [f"The number is not an integer, and {format.name} has integers only."]
    if isinstance(result.number, Irrational):
        return ["The digits of the number never end: no format has it exactly."]
    if denominator & (denominator - 1):
        shown = str(number) if max(denominator, numerator).bit_length() < 80 else ""
        terms = f"The number is {shown} in lowest terms, and {denominator} is not a power of two"
        if not 0 < len(shown) <= 24:
            terms = "In lowest terms its denominator is not a power of two"
        return [f"{terms}: no binary format has it exactly."]
    significant = (numerator // (numerator & -numerator)).bit_length()
    if significant <= format.precision:
        return []
    return [f"The number has {significant} significant bits, and {format.name} has {format.precision}."]


def _step(result: Encoded) -> str:
    """The distance between the numbers."""
    format, step = result.format, result.ends[1] - result.ends[0]
    if format.kind == "integer":
        return f"The numbers of {format.name} are 1 apart: 1 ulp."
    if format.kind == "scale":
        return f"The numbers of {format.name} are powers of two."
    low = power_of_two(Fraction(result.number))
    if low >= format.emin:
        return f"From 2^{low} to 2^{low + 1} the numbers of {format.name} are {power(step)} apart: 1 ulp."
    words = f"Below 2^{format.emin} the numbers of {format.name} are subnormal, all {power(step)} apart: 1 ulp."
    left = low - (format.emin - format.mantissa) + 1
    if left < 1:
        return words + " This one is smaller than the least of them."
    return words + f" Of the {format.precision} bits of precision {left} {'is' if left == 1 else 'are'} left."


def _where(result: Encoded) -> str:
    """The distances to both neighbours."""
    (low, high), number = result.ends, Fraction(result.number)
    below, above = distance((number - low) / (high - low)), distance((high - number) / (high - low))
    first, second = among(low, result.format), among(high, result.format)
    return f"The number is {below} ulp above {first} and {above} ulp below {second}."


def _halfway(result: Encoded) -> str:
    low, high = result.ends
    return f"The number is exactly halfway between {among(low, result.format)} and {among(high, result.format)}."


def _nearest(result: Encoded, rule: str, nearest: Stored) -> list[str]:
    """The decision of rounding to nearest, and its reason."""
    format = result.format
    if rule == "nearer":
        words = [_where(result), f"The nearer one is taken: {among(nearest.value, format)}."]
    elif rule == "tie":
        sides = (Stored(code_of(result.number, format, mode), format) for mode in ("down", "up"))
        odd = [f", {side.bits} ends in 1" for side in sides if side.code != nearest.code]
        words = [_halfway(result), f"Ties go to even: {nearest.bits} ends in 0 and is taken{''.join(odd)}."]
    else:
        reason = "with one significant bit none of them is even (IEEE 754-2019, 4.3.1)"
        words = [_halfway(result), f"Ties go away from zero: {reason}."]
    if result.outcome == "underflow":
        half = power(Fraction(format.min_subnormal) / 2)
        words.append(f"Whatever is no larger than {half}, half the least number, becomes zero.")
    return words


def _nearest_beyond(result: Encoded) -> list[str]:
    """The reason why rounding to nearest overflows."""
    format, negative = result.format, result.number < 0
    sign = -1 if negative else 1
    threshold = overflow_threshold(format, negative)
    largest = Fraction(abs(format.lowest) if negative and format.kind == "integer" else format.max)
    if format.mantissa == 0:
        even = "exactly halfway rounds away too: with one significant bit there is no even number"
    elif overflows(sign * threshold, format):
        even = "exactly halfway rounds away too: the largest number's last bit is 1"
    else:
        even = "exactly halfway still rounds to the largest number, whose last bit is 0"
    end, after, halfway = (among(sign * value, format) for value in (largest, 2 * threshold - largest, threshold))
    where = "at" if abs(result.number) == threshold else "beyond"
    return [
        f"The {'lowest' if negative else 'largest'} number of {format.name} is {end}. If the numbers went on, {after} "
        f"would come next; halfway lies {halfway}.",
        f"The number lies {where} it, so it overflows ({even}).",
        _instead(result),
    ]


def _instead(result: Encoded) -> str:
    """What represents an overflow, an infinity or a NaN."""
    format, stored = result.format, result.stored
    if stored is None:
        return f"{format.name} has no NaN, so that nothing can stand for it."
    name = {"zero": "Zero", "infinity": "Infinity", "nan": "NaN"}.get(stored.category)
    if name is None:
        neither = "" if format.has_infinity or format.has_nan else f"{format.name} has neither infinity nor NaN: "
        return f"{neither}the largest number is stored: {among(stored.value, format)}, {stored.hex}."
    lacks = f"{format.name} has no infinity: " if stored.category == "nan" and not format.has_infinity else ""
    return f"{lacks}{name} is stored: {stored.hex}."
