"""Classify the values of an array in a format by rounding each in float64 and with ml_dtypes, without bit arithmetic.

A format is given by its properties in `halfstep.formats`: emin, emax, mantissa bits, and the overflow threshold.
"""

from dataclasses import dataclass, field

import numpy as np

from halfstep.numerics.formats.table import Format


@dataclass
class Fallen:
    """The counts of an array's elements by class, and the relative rounding errors of those that have one."""

    zero: int
    flushed: int
    subnormal: int
    normal: int
    overflow: int
    infinite: int
    nan: int
    errors: np.ndarray = field(repr=False)


def scaled(values: np.ndarray, scale: float) -> np.ndarray:
    """Scaled values in float64: exact for a power of two, otherwise the fp32 product."""
    if np.frexp(scale)[0] == 0.5:
        return values.astype(np.float64) * scale
    with np.errstate(all="ignore"):
        return (values.astype(np.float32) * np.float32(scale)).astype(np.float64)


def rounded(y: np.ndarray, format: Format) -> np.ndarray:
    """Finite numbers rounded to nearest even, as if the format had no largest number."""
    exponent = np.maximum(np.frexp(y)[1].astype(np.int64) - 1, format.emin) - format.mantissa
    return np.ldexp(np.rint(np.ldexp(y, -exponent)), exponent)


def fall(values: np.ndarray, scale: float, format: Format) -> Fallen:
    """Count the elements of an fp32 array times `scale` in `format`."""
    x = values.astype(np.float64)
    y = scaled(values, scale)
    finite = np.isfinite(x)
    over_fp32 = finite & np.isinf(y)
    zero = x == 0
    number = np.where(finite & ~over_fp32, y, 0.0)
    on_grid = rounded(number, format)
    overflow = over_fp32 | (finite & (np.abs(on_grid) > format.max))
    flushed = finite & ~zero & ~overflow & (on_grid == 0)
    subnormal = finite & ~zero & ~overflow & ~flushed & (np.abs(number) < format.min_normal)
    normal = finite & ~zero & ~overflow & ~flushed & ~subnormal
    has_error = flushed | subnormal | normal
    with np.errstate(all="ignore"):
        error = np.where(number == 0, 1.0, np.abs(number - on_grid) / np.abs(number))
    counts = (int(part.sum()) for part in (zero, flushed, subnormal, normal, overflow, np.isinf(x), np.isnan(x)))
    return Fallen(*counts, errors=error[has_error].astype(np.float32))


def exponents(values: np.ndarray, scale: float) -> dict[int, int]:
    """The number of values with each exponent e, 2^e <= |y| < 2^(e + 1): those of fp32, and one more on each side."""
    y = scaled(values, scale)
    taken = np.isfinite(values) & (values != 0)
    exponent = np.where(y == 0, -151, np.frexp(np.where(np.isinf(y), 2.0**128, y))[1].astype(np.int64) - 1)
    unique, counts = np.unique(exponent[taken].clip(-151, 128), return_counts=True)
    return dict(zip(unique.tolist(), counts.tolist(), strict=True))
