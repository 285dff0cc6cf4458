"""The results of known implementations that differ: saturation, NaN, zero, and rounding twice.

Each row is a rule written down from what an implementation does or a specification says. Those of torch, ml_dtypes and
numpy are tested against what is installed; OCP's come from the OFP8 specification 1.0, 2023, table of conversions.
All begin with a Python float, thus with the float64 nearest to the number.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

from halfstep.cli.formats.number_text import fitting, number_dict
from halfstep.cli.formats.values import finite
from halfstep.numerics.formats.exact import Number, decode_exact, encode_exact
from halfstep.numerics.formats.table import AMBIGUOUS, Format, formats

_FP8 = AMBIGUOUS["fp8"]


class Implementation(NamedTuple):
    """How one implementation casts.

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
            if formats[name].bits <= format.bits and name != "fp64":
                break  # from float64 to float64 nothing is rounded
            number = decode_exact(encode_exact(number, name), name)
        if format.kind == "integer":  # C's conversion: toward zero, and undefined outside the range
            whole = Fraction(math.trunc(number)) if finite(number) else None
            return whole if whole is not None and format.lowest <= whole <= format.max else None
        if number != number:
            return -0.0 if not format.has_nan else math.nan
        if format.kind == "scale":
            if number <= 0 and self.scale == "nan":
                return math.nan
            number = -number if number < 0 else number
            if format.min_normal < number < 2 * format.min_normal:
                return Fraction(2 * format.min_normal)  # fp32's subnormals go up whatever is beyond their first bit
        overflow = "saturate" if format.name in self.saturates else "inf"
        return decode_exact(encode_exact(number, format, overflow=overflow), format)


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
        others = [name for name in self.names if not name.startswith("torch")]
        return ", ".join(["torch", *others] if len(self.names) - len(others) == 2 else self.names)

    @property
    def text(self) -> str:
        return "undefined" if self.value is None else fitting(self.value, 20, 9)


def conversions(number: Number, format: Format) -> list[Conversion]:
    """The values and who stores them, in the order of the table; empty if all store the nearest number."""
    stored: dict[str, Conversion] = {}  # by text, in which NaN equals NaN
    for implementation in IMPLEMENTATIONS:
        if format.name in implementation.formats:
            value = implementation.cast(number, format)
            stored.setdefault(_key(value), Conversion(value, [])).names.append(implementation.name)
    nearest = None if number != number and not format.has_nan else decode_exact(encode_exact(number, format), format)
    if all(conversion.value == nearest or key == _key(nearest) for key, conversion in stored.items()):
        return []
    return list(stored.values())


def _key(value: Number | None) -> str:
    return "nan" if value is not None and value != value else repr(value)
