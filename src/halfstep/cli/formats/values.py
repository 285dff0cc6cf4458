"""A number in a format: code, fields, value, error, outcome, and the rule that decides its rounding."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from halfstep.cli.formats import number_text
from halfstep.cli.formats.number_text import number_dict
from halfstep.numerics.formats.exact import Irrational, Number, decode_exact, encode_exact, ulp_exact
from halfstep.numerics.formats.table import Format, formats


def finite(number: Number) -> bool:
    """Whether the number is neither an infinity nor a NaN. -0.0 is finite."""
    return isinstance(number, Fraction) or number == 0


def code_text(code: int, format: Format) -> str:
    """A code in hexadecimal, with leading zeros."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


@dataclass(frozen=True)
class Stored:
    """A code of a format."""

    code: int
    format: Format

    @cached_property
    def value(self) -> Number:
        """The exact value: a Fraction, or a float for an infinity, NaN or -0.0."""
        return decode_exact(self.code, self.format)

    @property
    def hex(self) -> str:
        """The code in hexadecimal, with leading zeros."""
        return code_text(self.code, self.format)

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """The names and bits of the fields, from the most significant one."""
        form, bits = self.format, f"{self.code:0{self.format.bits}b}"
        first, second = int(form.signed), int(form.signed) + form.exponent
        fields = (("sign", bits[:first]), ("exponent", bits[first:second]), ("mantissa", bits[second:]))
        return tuple((name, digits) for name, digits in fields if digits)

    @property
    def bits(self) -> str:
        """The bits of the fields, separated by spaces."""
        return " ".join(digits for _, digits in self.fields)

    @property
    def sort(self) -> str:
        """``zero``, ``subnormal``, ``normal``, ``infinity`` or ``nan``."""
        if not finite(self.value):
            return "nan" if self.value != self.value else "infinity"
        if self.value == 0:
            return "zero"
        return "subnormal" if abs(Fraction(self.value)) < Fraction(self.format.min_normal) else "normal"

    @cached_property
    def shortest(self) -> str:
        """The shortest decimal that rounds to the value, or the name of a special value."""
        return number_text.shortest(self.code, self.format)

    def text(self, width: int) -> str:
        """The value in at most `width` columns: all its digits, or ≈ and the shortest decimal."""
        text = number_text.fitting(self.value, width, 1)
        return f"≈{self.shortest}" if text.startswith("≈") else text

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format.name,
            "code": self.hex,
            "bits": {"sign": "", "exponent": "", "mantissa": "", **dict(self.fields)},
            "class": self.sort,
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

    @property
    def ulps(self) -> Fraction | None:
        """The error in ulps of the given number, as if the exponent had no upper limit."""
        return None if self.error is None else self.error / Fraction(ulp_exact(self.number, self.format))

    @property
    def ulps_text(self) -> str:
        """The error in ulps, with its sign; empty if there is none."""
        return "" if self.ulps is None else ("+" if self.ulps > 0 else "") + distance(self.ulps)

    @property
    def relative(self) -> Fraction | None:
        return self.error / Fraction(self.number) if self.error is not None and self.number != 0 else None

    @property
    def outcome(self) -> str:
        """What became of the number.

        ``"exact"``: stored without error. ``"rounded"``: a neighbour is stored. ``"underflow"``: became zero, and was
        not. ``"overflow"``: became infinity, or NaN in a format without. ``"saturated"``: beyond the largest number,
        which is stored. ``"none"``: a NaN in a format without.
        """
        if self.stored is None:
            return "none"
        if self.number != self.number:
            return "exact"
        if self.stored.sort in ("nan", "infinity"):
            return "exact" if self.stored.value == self.number else "overflow"
        if self.error == 0:
            return "exact"
        if overflows(self.number, self.format):
            return "saturated"
        return "underflow" if self.stored.sort == "zero" else "rounded"

    @property
    def outcome_text(self) -> str:
        """The outcome, and whether the result is subnormal."""
        outcome = self.outcome
        if self.stored is not None and self.stored.sort == "subnormal" and outcome in ("exact", "rounded"):
            return "exact subnormal" if outcome == "exact" else "subnormal"
        if outcome == "overflow" and not self.format.signed and self.number < 0:
            return "no sign"
        return "no NaN" if outcome == "none" else outcome

    @cached_property
    def ends(self) -> tuple[Fraction, Fraction]:
        """The values on both sides of a finite number, as if the exponent had no upper limit."""
        exact, least = Fraction(self.number), Fraction(self.format.min_normal)
        if self.format.kind == "scale" and exact < least:
            return Fraction(0), least
        step = Fraction(ulp_exact(exact, self.format))
        low = exact // step * step
        return low, low + step

    @property
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
        if self.ends[0] == number and format.lowest <= number <= format.max:
            return "exact"
        if format.kind == "scale" and number <= 0:
            return "sign" if number < 0 else "least"
        if overflows(number, format):
            return "overflow"
        if format.kind == "scale" and number < format.min_normal:
            return "least"
        if 2 * Fraction(number) == sum(self.ends):
            return "tie_up" if format.mantissa == 0 and abs(Fraction(number)) >= format.min_normal else "tie"
        return "nearer"

    def as_dict(self) -> dict[str, Any]:
        error = None
        if self.error is not None and self.ulps is not None:
            relative = None if self.relative is None else number_text.rounded(self.relative, 6)
            error = {**number_dict(self.error), "ulps": number_text.rounded(self.ulps, 6), "relative": relative}
        empty = {"format": self.format.name, **dict.fromkeys(("code", "bits", "class", "value"))}
        return {**(self.stored.as_dict() if self.stored else empty), "outcome": self.outcome, "error": error}


def distance(ulps: Fraction) -> str:
    """A number of ulps with four digits, or with as many as distinguish it from one half."""
    texts = (number_text.rounded(ulps, digits) for digits in range(4, 24))
    return next((text for text in texts if text.lstrip("-") != "0.5" or abs(ulps) == Fraction(1, 2)), "≈0.5")


def overflow_threshold(format: Format, negative: bool = False) -> Fraction:
    """The exact value of `Format.overflow`, the threshold of overflow for rounding to nearest."""
    largest = Fraction(-format.lowest if negative and format.kind == "integer" else format.max)
    return largest + Fraction(ulp_exact(largest, format)) / 2


def overflows(number: Number, format: Format) -> bool:
    """Whether rounding to nearest overflows."""
    if not finite(number):
        return number == number
    exact, negative = Fraction(number), number < 0
    if format.kind == "scale" and negative:
        return True
    threshold = overflow_threshold(format, negative)
    if abs(exact) != threshold:
        return abs(exact) > threshold
    # A tie goes to the even one of the largest number and what would come next; up where there is one significant bit.
    return format.mantissa == 0 or bool((format.largest_code + (format.kind == "integer" and negative)) & 1)


def encoded(
    number: Number, format: Format, rounding: str = "nearest", overflow: str = "inf", seed: int | None = None
) -> Encoded:
    """`number` rounded to a format; see `halfstep.numerics.formats.exact.encode_exact` for the modes."""
    if number != number and not format.has_nan:
        return Encoded(number, format, None)
    refuses = overflow == "nan" and not format.has_nan
    code = encode_exact(number, format, rounding, overflow="inf" if refuses else overflow, seed=seed)
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
    direct, changed = str(decode_exact(encode_exact(number, format), format)), []
    via: tuple[Format, ...] = ()
    for wide in (formats["fp64"], formats["fp32"]):
        if wide.bits <= format.bits:
            break
        via, number = (*via, wide), decode_exact(encode_exact(number, wide), wide)
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


def between(one: Encoded) -> tuple[list[tuple[str, str]], str, Fraction, int | None] | None:
    """Where a number lies between two numbers of the format or beyond the largest one; None where nothing is rounded.

    Returns:
        The value and the code of both ends, the value halfway, the position from 0 to 1, and the index of the end that
        is stored, None for neither.
    """
    format = one.format
    if one.rule in ("special", "exact", "sign") or overflows(one.ends[0] if one.number > 0 else one.ends[1], format):
        return None
    exact, (low, high) = Fraction(one.number), one.ends

    def end(value: Fraction) -> tuple[str, str]:
        if overflows(value, format) or (value == 0 and not format.has_zero):
            return number_text.among(value, format), f"not in {format.name}"
        return number_text.among(value, format), code_text(
            encode_exact(value if value or exact > 0 else -0.0, format), format
        )

    value = None if one.stored is None else one.stored.value
    stored = int(value == high) if value in (low, high) else None
    return [end(low), end(high)], number_text.among((low + high) / 2, format), (exact - low) / (high - low), stored
