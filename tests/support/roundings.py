"""Every rounding of kernels/rounding.py, computed with sorted tables of fractions, one number at a time."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch

NUMPY = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
DTYPES = tuple(NUMPY)
HAS_INFINITY = {dtype: dtype != torch.float8_e4m3fn for dtype in DTYPES}


@cache
def grid(dtype: torch.dtype) -> list[Fraction]:
    """The non-negative finite values in the order of their codes, and one more that represents overflow."""
    form = NUMPY[dtype]
    unsigned = np.uint8 if form.itemsize == 1 else np.uint16
    codes = np.arange(2 ** (8 * form.itemsize - 1), dtype=unsigned)
    with np.errstate(invalid="ignore"):  # ml_dtypes raises the flag on signalling NaNs
        wide = codes.view(form).astype(np.float64)
    values = [Fraction(x) for x in wide.tolist() if math.isfinite(x)]
    return [*values, 2 * values[-1] - values[-2]]


@cache
def _floats(dtype: torch.dtype) -> list[float]:
    """The numbers of `grid`, exactly: to search, since fractions are compared slowly."""
    return list(map(float, grid(dtype)))


@cache
def points(dtype: torch.dtype, every: int = 1) -> np.ndarray:
    """The thresholds of rounding: values, midpoints and quarter points, with the neighboring fp32 values."""
    values = np.array(grid(dtype)[::every], dtype=np.float64)  # exact, as are the sums of their quarters
    exact = values[:-1, None] + np.diff(values)[:, None] * (np.arange(4) / 4)
    patterns = exact.ravel().astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.unique(np.concatenate([patterns + offset for offset in (-1, 0, 1)]).clip(0, 0x7F800000))
    edges = [x for x in (*map(float, grid(dtype)[-3:]), 2.0**-149, 2.0**-60) if x < 2.0**128]
    largest = np.array(edges, dtype=np.float32).view(np.uint32)
    near = np.unique(np.concatenate([near, largest, largest - 1, largest + 1, [0x7F7FFFFF, 0x7F800000]]))
    return np.concatenate([near, near | 0x80000000]).astype(np.uint32).view(np.float32)


def code(value: float, dtype: torch.dtype, rounding: str, saturate: bool, word: int) -> int | None:
    """The code that an fp32 `value` rounds to; None is any NaN."""
    values, form = grid(dtype), NUMPY[dtype]
    sign = 1 << (8 * form.itemsize - 1) if math.copysign(1.0, value) < 0 else 0
    largest = len(values) - 2
    beyond = largest + 1 if HAS_INFINITY[dtype] else None
    if math.isnan(value):
        return None
    if math.isinf(value):
        return sign | largest if saturate else None if beyond is None else sign | beyond
    exact = abs(Fraction(value))
    below = bisect.bisect_right(_floats(dtype), abs(value)) - 1
    if below == largest + 1:
        result = below
    else:
        unit = values[below + 1] - values[below]
        part = (exact - values[below]) / unit
        if rounding == "nearest":
            up = part > Fraction(1, 2) or (part == Fraction(1, 2) and below % 2 == 1)
        elif rounding == "toward_zero":
            up = False
        else:
            dropped = 23 - mantissa(dtype)
            near = Fraction(round(part * 2**dropped), 2**dropped)  # the part itself, save among subnormals
            up = near + Fraction(word >> (32 - dropped), 2**dropped) >= 1
        result = below + up
    if result > largest:
        if saturate or rounding == "toward_zero":
            return sign | largest
        return None if beyond is None else sign | beyond
    return sign | result


def mantissa(dtype: torch.dtype) -> int:
    """Stored mantissa bits."""
    return ml_dtypes.finfo(NUMPY[dtype]).nmant
