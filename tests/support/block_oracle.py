"""Blocks of 8-bit codes as kernels/block_codes.py describes them, computed differently: with sorted tables and fp64.

Nothing here imports halfstep.
"""

from __future__ import annotations

import numpy as np
from noise import rounded

SPAN = 128
NEAREST = np.uint32(2**31)  # the word that stands for rounding to nearest
# The magnitudes of all codes of a block whose exponent byte is 127. fp64 holds them, and their products, exactly.
SIGNED = np.array([(e > 0) * 2.0 ** (e - 15) + 2.0 ** (max(e, 1) - 15) * f / 8 for e in range(16) for f in range(8)])
POSITIVE = np.array([2.0 ** (e - 31) * (1 + f / 8) for e in range(32) for f in range(8)])


def blocks(columns: int) -> list[slice]:
    """The blocks of a row."""
    return [slice(start, min(start + SPAN, columns)) for start in range(0, columns, SPAN)]


def decoded(codes: np.ndarray, exponents: np.ndarray, signed: bool) -> np.ndarray:
    """The fp32 numbers of codes of shape ``(rows, columns)``."""
    result = np.empty(codes.shape, np.float64)
    for row, at in np.ndindex(exponents.shape):
        part = slice(at * SPAN, (at + 1) * SPAN)
        power = np.nan if exponents[row, at] == 255 else np.ldexp(1.0, int(exponents[row, at]) - 127)
        power = 0.0 if exponents[row, at] == 0 else power
        code = codes[row, part].astype(np.int64)
        if signed:
            result[row, part] = np.copysign(SIGNED[code & 127], np.where(code >= 128, -1.0, 1.0)) * power
        else:
            result[row, part] = POSITIVE[code] * power
    single = result.astype(np.float32)
    assert (single == result)[np.isfinite(result)].all()
    return single


def encoded(x: np.ndarray, random: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents of fp32 numbers of shape ``(rows, columns)``.

    Args:
        random: uint32 of the same shape; None rounds to nearest.
    """
    parts = blocks(x.shape[1])
    random = np.full(x.shape, NEAREST) if random is None else random
    codes, exponents = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], len(parts)), np.uint8)
    for row in range(x.shape[0]):
        for at, part in enumerate(parts):
            codes[row, part], exponents[row, at] = _block(x[row, part], random[row, part], signed)
    return codes, exponents


def _block(x: np.ndarray, random: np.ndarray, signed: bool) -> tuple[np.ndarray | int, int]:
    with np.errstate(all="ignore"):
        magnitude = np.abs(x)
        if not np.isfinite(magnitude).all():
            return 0, 255
        near = rounded(magnitude, 3, -126, float.fromhex("0x1.ep127"), random)
        largest = np.float64(near.max())
        if np.isinf(largest):
            return 0, 255
        exponent = int(np.frexp(largest)[1]) - 1 if largest > 0 else -200
        if signed:
            if exponent < 18 - 127:
                return 0, 0
            near = rounded(magnitude, 3, exponent - 14, np.inf, random)
            table = SIGNED
        else:
            # 2^-149 times the magnitude and the 20 bits of noise
            if (np.ldexp(magnitude.astype(np.float64), 149) + (random >> np.uint32(12))).max() < 2.0**21:
                return 0, 0
            exponent = max(exponent, 32 - 127)
            near = np.maximum(near.astype(np.float64), np.ldexp(POSITIVE[0], exponent))
            table = POSITIVE
    code = np.searchsorted(np.ldexp(table, exponent), near.astype(np.float64))
    assert (np.ldexp(table, exponent)[code] == near).all()
    return (code + 128 * np.signbit(x) if signed else code).astype(np.uint8), exponent + 127
