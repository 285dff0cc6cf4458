"""A number in a format: code, value, error, outcome, what other casts make of overflow, and why, in exact texts."""

from __future__ import annotations

import decimal as arithmetic
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import Any

from halfstep.numerics.formats import exact
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, Number
from halfstep.numerics.formats.table import Format, formats

# ------------------------------------------------------------------------------------------------------ numbers as text

_LONGEST = 1100  # digits; the exact decimal of fp64's least number has 751, and more than that nobody reads
_EXACT = arithmetic.Context(prec=3 * _LONGEST, traps=[arithmetic.Inexact])


def finite(number: Number) -> bool:
    """Whether the number is neither an infinity nor a NaN. -0.0 is finite."""
    return isinstance(number, Fraction) or number == 0


def _quotient(x: Fraction, context: arithmetic.Context) -> Decimal:
    """`x` as Python's decimal arithmetic divides: rounded once, and through no float."""
    return context.divide(Decimal(x.numerator), Decimal(x.denominator))


def _placed(x: Decimal, limit: int = 16) -> str:
    """The digits of `x`, without an e if its exponent is from -4 to `limit`."""
    x = x.normalize(_EXACT)
    return f"{x:f}" if -4 <= x.adjusted() <= limit else f"{x:e}".replace("e+", "e")


def decimal(x: Fraction) -> str | None:
    """All decimal digits of `x`; None if there are infinitely many, as for 1/3, or too many to read."""
    if max(x.numerator.bit_length(), x.denominator.bit_length()) > 4 * _LONGEST:
        return None
    try:
        every_digit = _quotient(x, _EXACT)
    except arithmetic.Inexact:
        return None
    return _placed(every_digit) if -int(every_digit.as_tuple().exponent) <= _LONGEST else None


def rounded(x: Fraction, digits: int) -> str:
    """`x` rounded to a number of significant decimal digits, to nearest, ties to even."""
    near = _quotient(x, arithmetic.Context(prec=digits, rounding=arithmetic.ROUND_HALF_EVEN))
    return _placed(near, min(digits - 1, 16)) if x else "0"  # no zeros that are no digits of it


def special(number: float) -> str:
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
    return f"2^{exact.power_of_two(Fraction(number))} " + (f"≈ {text[1:]}" if text.startswith("≈") else f"= {text}")


def hex_float(x: Fraction) -> str | None:
    """`x` as a hexadecimal float of C and Python, ``0x1.4p+1``; None if it is not a binary fraction."""
    if x == 0:
        return "0x0p+0"
    if x.denominator & (x.denominator - 1):
        return None
    exponent = exact.power_of_two(x)
    mantissa = abs(x) / Fraction(2) ** exponent - 1
    digits = -(-(mantissa.denominator.bit_length() - 1) // 4)
    text = f".{int(mantissa * 16**digits):0{digits}x}" if digits else ""
    return f"{'-' if x < 0 else ''}0x1{text}p{exponent:+d}"


def number_dict(number: Number) -> dict[str, str | None]:
    """A number in the form of all JSON of the lookup. Infinities and NaN have only a decimal."""
    if isinstance(number, float):
        zero = number == 0
        return {"decimal": special(number), "hex": "-0x0p+0" if zero else None, "fraction": "0" if zero else None}
    legible = number.denominator.bit_length() < 8000 > number.numerator.bit_length()
    return {"decimal": decimal(number), "hex": hex_float(number), "fraction": str(number) if legible else None}


def code_text(code: int, format: Format) -> str:
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
        return exact.decode_exact(self.code, self.format)

    @cached_property
    def hex(self) -> str:
        return code_text(self.code, self.format)

    @cached_property
    def fields(self) -> dict[str, str]:
        """The bits of the fields by their names, from the most significant one."""
        form, bits = self.format, f"{self.code:0{self.format.bits}b}"
        first, second = int(form.signed), int(form.signed) + form.exponent
        fields = {"sign": bits[:first], "exponent": bits[first:second], "mantissa": bits[second:]}
        return {name: digits for name, digits in fields.items() if digits}

    @cached_property
    def category(self) -> str:
        """``zero``, ``subnormal``, ``normal``, ``infinity`` or ``nan``."""
        if not finite(self.value):
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
            near = [side for side in sides if exact.code_of(Fraction(side), self.format) == self.code]
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
    """A number rounded to a format; `stored` is None if the format has no code for the result."""

    number: Number
    format: Format
    stored: Stored | None
    refusal: str = ""  # why there is none, where somebody said so

    @cached_property
    def error(self) -> Fraction | None:
        """The stored value minus the given one; None unless both are finite."""
        if self.stored is None or not finite(self.number) or not finite(self.stored.value):
            return None
        return Fraction(self.stored.value) - Fraction(self.number)

    @cached_property
    def ulps_text(self) -> str:
        """The error in ulps of the given number, as if the exponent had no upper limit; empty if there is none."""
        if self.error is None:
            return ""
        return ("+" if self.error > 0 else "") + distance(self.error / (self.ends[1] - self.ends[0]))

    @property
    def relative(self) -> Fraction | None:
        return self.error / Fraction(self.number) if self.error is not None and self.number != 0 else None

    @cached_property
    def outcome(self) -> str:
        """What became of the number; docs/lookup.md defines the outcomes."""
        if self.stored is None:
            return "none"
        if self.number != self.number or self.stored.value == self.number:
            return "exact"
        if not finite(self.stored.value):
            return "overflow"
        if overflows(self.number, self.format):
            return "saturated"
        return "underflow" if self.stored.category == "zero" else "rounded"

    @cached_property
    def outcome_text(self) -> str:
        """The outcome, and whether the result is subnormal."""
        if self.outcome == "none":
            return "no NaN"
        if self.outcome == "overflow" and not self.format.signed and self.number < 0:
            return "no sign"
        if self.stored is not None and self.stored.category == "subnormal" and self.outcome in ("exact", "rounded"):
            return "exact subnormal" if self.outcome == "exact" else "subnormal"
        return self.outcome

    @property
    def elsewhere(self) -> str | None:
        """What casts of other libraries make of a number that overflows, where they differ."""
        return ELSEWHERE.get(self.format.name) if overflows(self.number, self.format) else None

    @cached_property
    def ends(self) -> tuple[Fraction, Fraction]:
        """The values on both sides of a finite number, one ulp apart, as if the exponent had no upper limit."""
        number = Fraction(self.number)
        step = Fraction(2) ** exact.unit_exponent(number, self.format)
        low = number // step * step
        return low, low + step

    @cached_property
    def rule(self) -> str:
        """The rule that decides rounding to nearest, to which `reasons` gives the words."""
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
        if self.error is not None:
            ulps, relative = self.error / (self.ends[1] - self.ends[0]), self.relative
            error = {**number_dict(self.error), "ulps": rounded(ulps, 6)}
            error["relative"] = None if relative is None else rounded(relative, 6)
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
    """The magnitude from or beyond which rounding to nearest overflows: the exact value of `Format.overflow`."""
    largest = Fraction(-format.lowest if negative and format.kind == "integer" else format.max)
    return largest + Fraction(2) ** exact.unit_exponent(largest, format) / 2


def overflows(number: Number, format: Format) -> bool:
    if not finite(number):
        return number == number
    if format.kind == "scale" and number < 0:
        return True
    size, minus = abs(Fraction(number)), number < 0
    return size > format.max and exact.unlimited_code(size, minus, format) > exact.largest_magnitude(minus, format)


def encoded(number: Number, format: Format, rounding: str = "nearest", overflow: str = "inf", word: int = 0) -> Encoded:
    """`number` rounded to a format; see `halfstep.numerics.formats.exact` for the modes and the random word."""
    if number != number and not format.has_nan:
        return Encoded(number, format, None)
    refuses = overflow == "nan" and not format.has_nan
    code = exact.code_of(number, format, rounding, "inf" if refuses else overflow, word=word)
    result = Encoded(number, format, Stored(code, format))
    return Encoded(number, format, None) if refuses and result.outcome == "saturated" else result


def double_roundings(number: Number, format: Format) -> list[tuple[list[Format], Encoded]]:
    """The wider formats, in which numbers are held before a cast, that change the result of rounding to nearest."""
    if not finite(number):
        return []
    direct, changed, via = str(exact.decode_exact(exact.code_of(number, format), format)), [], []
    for wide in (formats["fp64"], formats["fp32"]):
        if wide.bits <= format.bits:
            break
        via.append(wide)
        number = exact.decode_exact(exact.code_of(number, wide), wide)
        result = encoded(number, format)
        if result.stored is not None and str(result.stored.value) != direct:
            changed.append(([*via], result))
    return changed


def roundings(
    number: Number, format: Format, encode: Callable[[Number, str], Encoded]
) -> list[tuple[Encoded, str, Fraction | None]]:
    """What `encode`, which rounds a number in a mode, makes of it: results, modes, chances of stochastic results."""
    rows: list[tuple[Encoded, str, Fraction | None]]
    rows = [(encode(number, mode), mode, None) for mode in ENCODE_ROUNDINGS[:-1]]
    ends = [(encode(side, "nearest").stored, chance) for side, chance in _chances(number, format)]
    if ends[0][0] == ends[-1][0]:
        ends = [(ends[0][0], Fraction(1))]
    return rows + [(Encoded(number, format, stored), "stochastic", chance) for stored, chance in ends]


def _chances(number: Number, format: Format) -> list[tuple[Number, Fraction]]:
    """The numbers that stochastic rounding can choose and their probabilities: toward zero first, then away from it.

    The noise has 32 bits (31 among the subnormals of formats with fewer exponents than fp32), so that a probability is
    a multiple of 2^-32 (2^-31), rounded down for the one away from zero.
    """
    if not finite(number) or number == 0 or (format.kind == "scale" and number < format.min_normal):
        return [(number, Fraction(1))]
    magnitude, step = abs(Fraction(number)), Fraction(2) ** exact.unit_exponent(Fraction(number), format)
    units, part = divmod(magnitude / step, 1)
    steps = 2**31 if format.has_subnormals and format.emin > -126 and magnitude < format.min_normal else 2**32
    share = Fraction(part * steps // 1, steps)
    sides: list[Number] = [units * step, (units + 1) * step]
    if number < 0:
        sides = [-side if side else -0.0 for side in sides]
    return [(side, chance) for side, chance in zip(sides, (1 - share, share), strict=True) if chance]


# What casts make of overflow and infinities where they differ, tested with the torch and ml_dtypes that are installed.
# OCP's modes are those of the OFP8 specification 1.0, 2023, table of conversions.
ELSEWHERE = {
    "e4m3fn": "the largest number in torch from 2.12 on, NVIDIA's instructions and OCP's saturating mode; "
    "NaN in older torch, ml_dtypes and OCP's other mode",
    "e5m2": "the largest number in NVIDIA's instructions and OCP's saturating mode; "
    "infinity in torch, ml_dtypes and OCP's other mode",
}


# ----------------------------------------------------------------------------------------------------------------- why

_WORDS = {  # of a mode: its name in a sentence, and which of two numbers it takes
    "toward_zero": ("toward zero", "the one nearer to zero"), "up": ("up", "the upper one"),
    "down": ("down", "the lower one"), "odd": ("to odd", "the one whose last bit is 1"),
}  # fmt: skip


def reasons(result: Encoded, rounding: str = "nearest") -> list[str]:
    """Why a number is rounded so in any mode but ``"stochastic"``, in sentences; subnormal results are kept."""
    format, number, rule = result.format, result.number, result.rule
    if rule == "special":
        return ["An infinity is not rounded." if number == number else "NaN is not rounded.", _instead(result)]
    if rule == "exact":
        below, above = (among(exact.next_exact(number, format, up=up), format) for up in (False, True))
        nothing = f"It is a number of {format.name}: nothing is rounded."
        return [nothing, f"The next ones are {below} below and {above} above."]
    if rule == "sign":
        stands = "nothing" if result.stored is None else among(result.stored.value, format)
        return [f"{format.name} has no sign, and {stands} stands for negative numbers."]
    if rule == "least":
        return [f"{format.name} has no zero: everything below its least number, 2^{format.emin}, becomes that."]
    negative = number < 0
    inner, outer = sorted(map(abs, result.ends))
    last, name = Fraction(format.lowest if negative else format.max), "lowest" if negative else "largest"
    limit = f"{among(last, format)}, the {name} number of {format.name}"
    if inner > abs(last):
        sentences, end = [f"The number lies beyond {limit}."], outer
    else:
        part = (abs(Fraction(number)) - inner) / (outer - inner)
        end = outer if exact.moves_away(int(inner / (outer - inner)), part, rounding, negative, 0, format) else inner
        value = among(result.stored.value if result.stored and end <= abs(last) else -end if negative else end, format)
        sentences = [*_obstacle(result), _step(result), _where(result), _decision(result, rounding, part, value)]
    if end > abs(last):
        beyond = "It" if inner > abs(last) else f"That is beyond {limit}: it"
        if exact.stops_at_the_end(rounding, negative, format) and result.stored is not None:
            kept = f"{among(last, format)} is stored, {result.stored.hex}"
            return [*sentences, f"Rounding {_WORDS[rounding][0]} does not overflow: {kept}."]
        threshold = overflow_threshold(format, negative) * (-1 if negative else 1)
        at = among(threshold, format)
        since = f"from {at} on" if rounding == "nearest_away" or overflows(threshold, format) else f"beyond {at}"
        about = f", as does every number {since}" if rounding.startswith("nearest") else ""
        return [*sentences, f"{beyond} overflows{about}.", _instead(result)]
    if end == 0 and rounding.startswith("nearest"):
        half = power(Fraction(format.min_subnormal) / 2)
        sentences.append(f"Whatever is no larger than {half}, half the least number, becomes zero.")
    return sentences


def _decision(result: Encoded, rounding: str, part: Fraction, value: str) -> str:
    """Why of the two neighbours this `value` is taken; `part` is how far the number lies from zero between them."""
    single = result.format.mantissa == 0 and abs(Fraction(result.number)) >= result.format.min_normal
    if rounding == "odd" and single:
        return f"With one significant bit, rounding to odd is rounding toward zero: {value}."
    if rounding in _WORDS:
        mode, side = _WORDS[rounding]
        return f"Rounding {mode} takes {side}: {value}."
    if 2 * part != 1:
        return f"The nearer one is taken: {value}."
    if rounding == "nearest" and not single:
        return f"Ties go to even, the one whose last bit is 0: {value}."
    reason = ", since with one significant bit none is even (IEEE 754-2019, 4.3.1)" if rounding == "nearest" else ""
    return f"Ties go away from zero{reason}: {value}."


def double_rounding_words(via: list[Format], twice: Encoded, result: Encoded) -> str:
    if twice.stored is None:
        return ""
    format, wide = result.format, " and ".join(format.name for format in via)
    direct = exact.decode_exact(exact.code_of(result.number, format), format)
    becomes = f"and that becomes {among(twice.stored.value, format)} instead of {among(direct, format)}."
    return f"Rounded twice: first to {wide}, the number is {all_digits(twice.number)}, {becomes}"


def _obstacle(result: Encoded) -> list[str]:
    """Why a finite number between two numbers of the format is none itself; empty where its size is the reason."""
    format, number = result.format, Fraction(result.number)
    denominator, numerator = number.denominator, abs(number.numerator)
    if format.kind in ("scale", "integer"):
        fractional = format.kind == "integer" and denominator > 1
        return [f"The number is not an integer, and {format.name} has integers only."] if fractional else []
    if denominator & (denominator - 1):
        terms = f", {number} in lowest terms," if max(denominator, numerator).bit_length() < 40 else ""
        return [f"The denominator of the number{terms} is not a power of two: no binary format has it exactly."]
    significant = (numerator // (numerator & -numerator)).bit_length()
    if significant <= format.precision:
        return []
    return [f"The number has {significant} significant bits, and {format.name} has {format.precision}."]


def _step(result: Encoded) -> str:
    format, step = result.format, result.ends[1] - result.ends[0]
    if format.kind == "integer":
        return f"The numbers of {format.name} are 1 apart: 1 ulp."
    if format.kind == "scale":
        return f"The numbers of {format.name} are powers of two."
    low = exact.power_of_two(Fraction(result.number))
    if low >= format.emin:
        return f"From 2^{low} to 2^{low + 1} the numbers of {format.name} are {power(step)} apart: 1 ulp."
    left = max(low - (format.emin - format.mantissa) + 1, 0)
    return (
        f"Below 2^{format.emin} the numbers of {format.name} are subnormal, all {power(step)} apart: 1 ulp. Of the "
        f"{format.precision} bits of precision {left} {'is' if left == 1 else 'are'} left."
    )


def _where(result: Encoded) -> str:
    (low, high), number = result.ends, Fraction(result.number)
    first, second, middle = (among(value, result.format) for value in (low, high, (low + high) / 2))
    if 2 * number == low + high:
        return f"The number is exactly halfway between {first} and {second}."
    below, above = distance((number - low) / (high - low)), distance((high - number) / (high - low))
    return f"The number is {below} ulp above {first} and {above} ulp below {second}; the midpoint is {middle}."


def _instead(result: Encoded) -> str:
    """What represents an overflow, an infinity or a NaN."""
    format, stored = result.format, result.stored
    if stored is None:
        return f"{format.name} has no NaN, so that nothing can stand for it."
    largest = f"The {'lowest' if result.number < 0 else 'largest'} number, {among(stored.value, format)},"
    name = {"zero": "Zero", "infinity": "Infinity", "nan": "NaN"}.get(stored.category, largest)
    lacks = ""
    if result.number == result.number and not format.has_infinity and (stored.category == "nan" or not format.has_nan):
        lacks = f"{format.name} has {'no infinity' if format.has_nan else 'neither infinity nor NaN'}: "
    return f"{lacks}{name} is stored: {stored.hex}."
