"""Every rounding of kernels/rounding.py by the definitions of `codec_oracle`, one number at a time."""

import math
from fractions import Fraction
from functools import cache

import codec_oracle
import ml_dtypes
import numpy as np
import torch

NUMPY = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = dict(zip(NUMPY, ("fp16", "bf16", "e4m3fn", "e5m2"), strict=True))
DTYPES = tuple(NUMPY)


def grid(dtype: torch.dtype) -> list[Fraction]:
    """The non-negative finite values in the order of their codes, and one more that represents overflow."""
    return codec_oracle.extended(NAMES[dtype])


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
    if math.isnan(value):
        return None
    name, number = NAMES[dtype], Fraction(value) if value and math.isfinite(value) else value
    result = codec_oracle.rounded(number, name, rounding, "saturate" if saturate else "inf", word)
    return None if result == codec_oracle.canonical_nan(name) else result
