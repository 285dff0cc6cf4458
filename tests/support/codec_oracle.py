"""The values of codes and the codes of values by definition, with rational numbers and a sorted table.

Nothing here imports halfstep. The fields of the formats are written down again, from the specifications.
"""

import bisect
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

ENCODE_ROUNDINGS = ("nearest", "nearest_away", "toward_zero", "up", "down", "odd")


@dataclass(frozen=True)
class Spec:
    """A format as defined in its specification."""

    exponent: int  # bits of the field, as of the mantissa
    mantissa: int
    bias: int
    infinities: bool  # whether the largest exponent with mantissa zero is infinity
    nans: range  # codes of NaN without their sign
    nan_alone: bool = False  # whether the code of negative zero is NaN
    signed: bool = True

    @property
    def bits(self) -> int:
        return self.exponent + self.mantissa + self.signed

    @property
    def sign(self) -> int:
        return 2 ** (self.bits - 1)


def _ieee(exponent: int, mantissa: int) -> Spec:
    top = (2**exponent - 1) * 2**mantissa
    return Spec(exponent, mantissa, 2 ** (exponent - 1) - 1, True, range(top + 1, top + 2**mantissa))


SPECS = {
    "fp64": _ieee(11, 52),
    "fp32": _ieee(8, 23),
    "tf32": _ieee(8, 10),
    "fp16": _ieee(5, 10),
    "bf16": _ieee(8, 7),
    "e5m2": _ieee(5, 2),
    "e4m3fn": Spec(4, 3, 7, False, range(0x7F, 0x80)),  # OFP8, table 1
    "e4m3fnuz": Spec(4, 3, 8, False, range(0), nan_alone=True),  # arXiv:2206.02915
    "e5m2fnuz": Spec(5, 2, 16, False, range(0), nan_alone=True),
    "e8m0fnu": Spec(8, 0, 127, False, range(0xFF, 0x100), signed=False),  # OCP MX, 5.4.1
    "e2m3fn": Spec(2, 3, 1, False, range(0)),  # OCP MX, 5.3.2
    "e3m2fn": Spec(3, 2, 3, False, range(0)),
    "e2m1fn": Spec(2, 1, 1, False, range(0)),  # OCP MX, 5.3.3
    "int8": Spec(0, 7, 0, False, range(0)),
}
SMALL = tuple(name for name, spec in SPECS.items() if spec.bits <= 16)  # all of whose codes are looked at
# Of these, `make test` leaves those of 16 bits to `make exhaustive` where each code takes long.
PARAMETERS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (SPECS[name].bits == 16)) for name in SMALL]


def value_of(code: int, name: str) -> Fraction | float:
    """The value of a code: a fraction, or a float for infinities, NaN and -0.0."""
    spec = SPECS[name]
    if name == "int8":
        return Fraction(code - 256 if code >= 128 else code)
    negative = spec.signed and code >= spec.sign
    magnitude = code - spec.sign if negative else code
    if magnitude in spec.nans or (negative and magnitude == 0 and spec.nan_alone):
        return math.nan
    field, rest = divmod(magnitude, 2**spec.mantissa)
    if spec.infinities and field == 2**spec.exponent - 1:
        return -math.inf if negative else math.inf
    part = Fraction(rest, 2**spec.mantissa)
    if not spec.signed:  # E8M0 has no zero
        value = Fraction(2) ** (field - spec.bias)
    elif field == 0:
        value = Fraction(2) ** (1 - spec.bias) * part
    else:
        value = Fraction(2) ** (field - spec.bias) * (1 + part)
    if negative:
        return -value if value else -0.0
    return value


@cache
def table(name: str) -> list[Fraction]:
    """The non-negative finite values in order. The index is the code."""
    spec = SPECS[name]
    last = spec.sign if spec.signed else 2**spec.bits
    values = [value_of(code, name) for code in range(last)]
    return [value for value in values if isinstance(value, Fraction)]


@cache
def extended(name: str) -> list[Fraction]:
    """The table and one more number, the next value if the format had no largest one."""
    values = table(name)
    top = values[-1]
    step = top if name == "e8m0fnu" else top - values[-2]
    return [*values, top + step]


def with_sign(magnitude: int, negative: bool, name: str) -> int:
    """The code with a sign, from that of the magnitude."""
    spec = SPECS[name]
    if not negative:
        return magnitude
    if name == "int8":
        return (256 - magnitude) % 256
    if magnitude == 0 and spec.nan_alone:
        return 0
    return magnitude + spec.sign


def canonical_nan(name: str) -> int | None:
    """The quiet NaN of payload zero."""
    spec = SPECS[name]
    if spec.nan_alone:
        return spec.sign
    if not spec.nans:
        return None
    return spec.nans[len(spec.nans) // 2] if spec.infinities else spec.nans[0]


def beyond(negative: bool, name: str, overflow: str) -> int:
    """The code that overflow and infinities become."""
    spec, count = SPECS[name], len(table(name))
    largest = 128 if name == "int8" and negative else 127 if name == "int8" else count - 1
    if name == "e8m0fnu" and negative:
        largest = 0
    nan = canonical_nan(name)
    if overflow == "saturate" or (overflow == "inf" and not spec.infinities and nan is None):
        return largest if name == "e8m0fnu" else with_sign(largest, negative, name)
    if overflow == "inf" and spec.infinities:
        return with_sign(count, negative, name)
    assert nan is not None
    return nan


def rounded(
    value: Fraction | float, name: str, rounding: str, overflow: str = "inf", word: int = 0, flush: bool = False
) -> int:
    """The code that a value rounds to, by its position between two values of the table. NaN is the canonical one."""
    if value != value:
        nan = canonical_nan(name)
        assert nan is not None
        return nan
    negative = value < 0 or (isinstance(value, float) and math.copysign(1, value) < 0)
    if isinstance(value, float) and math.isinf(value):
        return beyond(negative, name, overflow)
    spec, exact, values = SPECS[name], abs(Fraction(value)), extended(name)
    if name == "e8m0fnu" and exact and negative:
        return beyond(True, name, overflow)
    if name == "int8" and negative:
        values = [*values, Fraction(129)]
    index = bisect.bisect_left(values, exact)
    top = len(values) - 1  # the last value represents overflow and is not in the format
    if index < len(values) and values[index] == exact:
        chosen = index
    elif index == 0:
        chosen = 0  # below E8M0's least number
    elif index > top:
        chosen = top + 1 if rounding != "odd" else top
    else:
        left, right = exact - values[index - 1], values[index] - exact
        below, above = index - 1, index
        # The last bit of the significand: that of the code, but with one bit alone it is always set, save of zero.
        even_below = below % 2 == 0 if spec.mantissa else below == 0 and name != "e8m0fnu"
        up = {
            "nearest": right < left or (right == left and not even_below),
            "nearest_away": right <= left,
            "toward_zero": False,
            "up": not negative,
            "down": negative,
            "odd": even_below,
            "stochastic": _moves(left / (left + right), word, exact, name),
        }[rounding]
        chosen = above if up else below
    if chosen >= top:
        stops = rounding in ("toward_zero", "odd") or rounding == ("up" if negative else "down")
        return beyond(negative, name, "saturate" if stops else overflow)
    if flush and name not in ("int8", "e8m0fnu") and chosen < 2**spec.mantissa:
        chosen = 0
    if name == "e8m0fnu":
        return chosen
    return with_sign(chosen, negative, name)


def _moves(part: Fraction, word: int, magnitude: Fraction, name: str) -> bool:
    """Whether a random word rounds a number away from zero that is `part` of an ulp above the smaller neighbor."""
    spec = SPECS[name]
    floating = name not in ("int8", "e8m0fnu")
    if floating and 1 - spec.bias > -126 and magnitude < Fraction(2) ** (1 - spec.bias):
        steps = 2 ** (23 - spec.mantissa)
        return word * steps // 2**32 + round(part * steps) >= steps
    return word >= 2**32 - part * 2**32


# ------------------------------------------------------------------------------------------- probes, with answers known


@cache
def ladder(name: str) -> np.ndarray:
    """`extended` as float64, exactly."""
    values = np.array([float(value) for value in extended(name)])
    assert all(Fraction(x) == value for x, value in zip(values.tolist(), extended(name), strict=True))
    return values


def thresholds(name: str, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every value and midpoint of a format that `dtype` represents, with the neighboring floats of `dtype`.

    Returns:
        The probes (positive, increasing); the code of the value at or below each; and the position of the probe above
        this value: 0 at the value, 1 below the midpoint, 2 at the midpoint, 3 above it.
    """
    values = ladder(name)
    middles = (values[:-1] + values[1:]) / 2
    points = np.concatenate([values[:-1], middles])
    points = points[points.astype(dtype).astype(np.float64) == points].astype(dtype)
    probes = np.unique([np.nextafter(points, dtype(end)) for end in (-np.inf, np.inf)] + [points])
    probes = probes[probes >= values[0]]
    codes = np.searchsorted(values, probes.astype(np.float64), side="right") - 1
    position = 2 + np.sign(probes.astype(np.float64) - middles[codes]).astype(int)
    return probes, codes, np.where(values[codes] == probes, 0, position)


def expected(codes: np.ndarray, places: np.ndarray, negative: bool, name: str, rounding: str) -> np.ndarray:
    """The codes that `thresholds` must round to, by the definition of the mode; overflow as with ``"inf"``."""
    spec = SPECS[name]
    odd_below = codes % 2 == 1 if spec.mantissa else (codes > 0) | (name == "e8m0fnu")
    up = {
        "nearest": (places == 3) | ((places == 2) & odd_below),
        "nearest_away": places >= 2,
        "toward_zero": places < 0,
        "up": (places > 0) & (not negative),
        "down": (places > 0) & negative,
        "odd": (places > 0) & ~odd_below,
    }[rounding]
    chosen = codes + up
    result = np.array([with_sign(int(code), negative and name != "e8m0fnu", name) for code in chosen.tolist()])
    over = chosen == len(table(name))
    stops = rounding == "odd"  # the other modes that stop do not get there
    if name != "int8" or not negative:
        result[over] = beyond(negative, name, "saturate" if stops else "inf")
    if name == "e8m0fnu" and negative:
        result[:] = beyond(True, name, "inf")
    return result
