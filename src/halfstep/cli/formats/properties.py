"""The properties of formats as text, for one format and for several side by side."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from halfstep.cli.formats.number_text import number_dict, short
from halfstep.cli.formats.values import code_text, overflow_threshold, overflows
from halfstep.numerics.formats.exact import power_of_two
from halfstep.numerics.formats.table import FORMAT_KINDS, Format


def fields(format: Format) -> str:
    """The bits of sign, exponent and mantissa."""
    return f"{int(format.signed)}/{format.exponent}/{format.mantissa}"


def special(format: Format) -> str:
    """The special values of a format."""
    return " ".join(["inf"] * format.has_infinity + ["nan"] * format.has_nan) or "neither"


def overflow(format: Format) -> str:
    """The threshold of overflow for rounding to nearest."""
    threshold = overflow_threshold(format)
    return f"{'from' if overflows(threshold, format) else 'beyond'} {short(threshold)}"


def large(number: int, text: str) -> str:
    """A count: `text`, or a power of two above a million."""
    return f"2^{number.bit_length() - 1}" if number > 10**6 and not number & (number - 1) else text


def integers(format: Format) -> str:
    """The largest n for which all integers from 0 to n are numbers of the format."""
    return large(format.integer_range, str(format.integer_range))


def figures(format: Format) -> list[tuple[str, str]]:
    """The names of properties and their texts."""
    named = (("inf", format.infinity_code), ("nan", format.nan_code), ("max", format.largest_code))
    codes = [f"{name} {code_text(code, format)}" for name, code in named if code is not None]
    size = f"{format.bits} bits" + (f" in {format.container}" if format.container else "")
    least_normal, least, eps = (
        f"2^{power_of_two(Fraction(value))} = {short(value)}"
        for value in (format.min_normal, format.min_subnormal, format.eps)
    )
    return [
        ("sign/exponent/mantissa", f"{fields(format)}, {size}"),
        ("bias", str(format.bias)),
        ("largest", short(format.max)),
        ("lowest", short(format.lowest)),
        ("overflow", overflow(format)),
        ("least normal", least_normal),
        ("least above 0", least),
        ("eps, 1 to next", eps),
        ("integers, all to", integers(format)),
        ("digits kept", str(format.digits10)),
        ("digits to tell apart", str(format.max_digits10)),
        ("p log10 2", f"{format.decimal_digits:.2f}"),
        ("values", f"{format.values:,}"),
        ("inf, nan", special(format)),
        ("negative zero", "yes" if format.has_negative_zero else "no"),
        ("codes", ", ".join(codes)),
    ]


def names(format: Format) -> list[tuple[str, str]]:
    """The kind of a format, its aliases, and the dtypes and hardware that support it."""
    packages = ("torch", "numpy", "ml_dtypes")
    dtypes = [f"{package}.{getattr(format, package)}" for package in packages if getattr(format, package)]
    return [
        ("kind", FORMAT_KINDS[format.kind]),
        ("also called", ", ".join(format.aliases) or "-"),
        ("dtypes", ", ".join(dtypes) or "-"),
        ("multiplied by", ", ".join(format.hardware) or "-"),
    ]


def format_dict(format: Format) -> dict[str, Any]:
    """`Format.as_dict` with numbers in the form of all JSON of the lookup, and codes in hexadecimal."""
    row = format.as_dict()
    for name in ("max", "lowest", "min_normal", "min_subnormal", "eps"):
        row[name] = number_dict(Fraction(row[name]))
    row["overflow"] = number_dict(overflow_threshold(format))
    for name in ("infinity_code", "nan_code", "largest_code"):
        row[name] = None if row[name] is None else code_text(row[name], format)
    return row
