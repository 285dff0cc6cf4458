"""A number in a format, on the screen and in JSON: code, fields, value, error and outcome."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from halfstep.cli.formats import number_text
from halfstep.numerics.formats.exact import decode_exact, encode_exact, ulp_exact
from halfstep.numerics.formats.parse import Number
from halfstep.numerics.formats.table import Format


def finite(number: Number) -> bool:
    """Whether the number is neither an infinity nor a NaN. -0.0 is finite."""
    return isinstance(number, Fraction) or number == 0


def special_text(number: float) -> str:
    """The text of an infinity, NaN or -0.0."""
    return "nan" if number != number else "-0" if number == 0 else "inf" if number > 0 else "-inf"


def number_dict(number: Number) -> dict[str, str | None]:
    """A number in the form of all JSON of the lookup. Infinities and NaN have only a decimal."""
    if isinstance(number, float):
        text, zero = special_text(number), number == 0
        return {"decimal": text, "hex": "-0x0p+0" if zero else None, "fraction": "0" if zero else None}
    return {
        "decimal": number_text.decimal(number),
        "hex": number_text.hex_float(number),
        "fraction": str(number) if number.denominator.bit_length() < 8000 > number.numerator.bit_length() else None,
    }


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
        if isinstance(self.value, float) and self.value != 0:
            return "nan" if self.value != self.value else "infinity"
        if self.value == 0:
            return "zero"
        return "subnormal" if abs(Fraction(self.value)) < Fraction(self.format.min_normal) else "normal"

    @cached_property
    def shortest(self) -> str:
        """The shortest decimal that rounds to the value, or the name of a special value."""
        if isinstance(self.value, float):
            return special_text(self.value)
        return number_text.shortest(self.code, self.format)

    def text(self, width: int) -> str:
        """The value in at most `width` columns: all its digits, or ≈ and the shortest decimal."""
        if isinstance(self.value, float):
            return special_text(self.value)
        whole = number_text.decimal(self.value)
        return whole if whole is not None and len(whole) <= width else f"≈{self.shortest}"

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
        return Fraction(self.stored.value) - Fraction(self.number)

    @property
    def ulps(self) -> Fraction | None:
        """The error in ulps of the given number, as if the exponent had no upper limit."""
        return None if self.error is None else self.error / Fraction(ulp_exact(self.number, self.format))

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

    def as_dict(self) -> dict[str, Any]:
        error = None
        if self.error is not None and self.ulps is not None:
            relative = None if self.relative is None else number_text.rounded(self.relative, 6)
            error = {**number_dict(self.error), "ulps": number_text.rounded(self.ulps, 6), "relative": relative}
        empty = {"format": self.format.name, **dict.fromkeys(("code", "bits", "class", "value"))}
        return {**(self.stored.as_dict() if self.stored else empty), "outcome": self.outcome, "error": error}


def code_text(code: int, format: Format) -> str:
    """A code in hexadecimal, with leading zeros."""
    return f"0x{code:0{-(-format.bits // 4)}x}"


def overflow_threshold(format: Format, negative: bool = False) -> Fraction:
    """The exact value of `Format.overflow`, the threshold of overflow for rounding to nearest."""
    largest = -format.lowest if negative and format.kind == "integer" else format.max
    return Fraction(largest) + Fraction(ulp_exact(Fraction(largest), format)) / 2


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
    found = Encoded(number, format, Stored(code, format))
    return Encoded(number, format, None) if refuses and found.outcome == "saturated" else found
