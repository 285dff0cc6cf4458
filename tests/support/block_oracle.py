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


def _in_blocks(x: np.ndarray) -> np.ndarray:
    """The blocks of the rows of a matrix, of shape ``(blocks, SPAN)``: short ones are filled up with zeros."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % SPAN))).reshape(-1, SPAN)


def decoded(codes: np.ndarray, exponents: np.ndarray, signed: bool) -> np.ndarray:
    """The fp32 numbers of codes of shape ``(rows, columns)``."""
    power = np.ldexp(1.0, exponents.astype(np.int64) - 127)
    power = np.select([exponents == 0, exponents == 255], [0.0, np.nan], power)
    power = np.repeat(power, SPAN, axis=1)[:, : codes.shape[1]]
    code = codes.astype(np.int64)
    result = power * (np.copysign(SIGNED[code & 127], 127.5 - code) if signed else POSITIVE[code])
    single = result.astype(np.float32)
    assert (single == result)[np.isfinite(result)].all()
    return single


def encoded(x: np.ndarray, random: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents of fp32 numbers of shape ``(rows, columns)``.

    Args:
        random: uint32 of the same shape; None rounds to nearest.
    """
    rows, columns = x.shape
    random = np.full(x.shape, NEAREST) if random is None else random
    with np.errstate(all="ignore"):
        codes, exponents = _encoded_blocks(_in_blocks(x), _in_blocks(random), signed)
    count = -(-columns // SPAN)
    return codes.reshape(rows, count * SPAN)[:, :columns], exponents.reshape(rows, count)


def _encoded_blocks(x: np.ndarray, random: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The codes of blocks, of their shape, and an exponent for each block."""
    magnitude = np.abs(x)
    near = rounded(magnitude, 3, -126, float.fromhex("0x1.ep127"), random)
    largest = near.max(axis=1, initial=0.0).astype(np.float64)
    spoiled = ~np.isfinite(largest)
    exponent = np.frexp(np.where(spoiled, 1.0, largest))[1].astype(np.int64) - 1
    exponent = np.where(largest > 0, exponent, -200)
    if signed:
        zero = exponent < 18 - 127
        near = rounded(magnitude, 3, exponent[:, None] - 14, np.inf, random).astype(np.float64)
        table = SIGNED
    else:
        # 2^-149 times the magnitude and the 20 bits of noise
        noisy = np.ldexp(magnitude.astype(np.float64), 149) + (random >> np.uint32(12))
        zero = noisy.max(axis=1, initial=0.0) < 2.0**21
        exponent = np.maximum(exponent, 32 - 127)
        near = np.maximum(near.astype(np.float64), np.ldexp(POSITIVE[0], exponent)[:, None])
        table = POSITIVE
    empty = zero | spoiled
    units = np.where(empty[:, None], table[0], np.ldexp(near, -exponent[:, None]))
    code = np.searchsorted(table, units)
    assert (table[code] == units).all()
    if signed:
        code = code + 128 * np.signbit(x)
    codes = np.where(empty[:, None], 0, code).astype(np.uint8)
    return codes, np.select([spoiled, zero], [255, 0], exponent + 127).astype(np.uint8)
