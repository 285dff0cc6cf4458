"""Blocks of 8-bit codes as kernels/block_codes.py describes them, computed differently: with tables, Python's integers
and fp64.

Nothing here imports halfstep.
"""

import numpy as np
from noise import rounded

SPAN = 32
NEAREST, UP = np.uint32(2**31), np.uint32(2**32 - 1)  # the words that stand for rounding to nearest and up
# The magnitudes of all codes of a block whose exponent byte is 127. fp64 holds them, and their products, exactly.
SIGNED = np.array([(e > 0) * 2.0 ** (e - 15) + 2.0 ** (max(e, 1) - 15) * f / 8 for e in range(16) for f in range(8)])
LARGEST = float.fromhex("0x1.ep127")
UNITS = np.ldexp(1.0, np.arange(24, 249) - 127)  # of linear codes, by the exponent byte from 24 on
LARGEST_LINEAR = 127 * UNITS[-1]
NAN_SCALE = 0x7FC0


def positive(base: int, step: int) -> np.ndarray:
    """The numbers of the codes of a block whose base is 2^base and whose codes are 2^step patterns apart."""
    parts = 2 ** (23 - step)  # between two powers of two
    return np.array([2.0 ** (base + code // parts) * (1 + code % parts / parts) for code in range(256)])


def _in_blocks(x: np.ndarray, filler: float = 0) -> np.ndarray:
    """The blocks of the rows of a matrix, of shape ``(blocks, SPAN)``, short ones filled up."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % SPAN)), constant_values=filler).reshape(-1, SPAN)


def decoded(codes: np.ndarray, scales: np.ndarray, signed: bool) -> np.ndarray:
    """The fp32 numbers of codes of shape ``(rows, columns)``."""
    if not signed:
        blocks = [
            np.full(SPAN, {0: 0.0, NAN_SCALE: np.nan}[scale])
            if scale in (0, NAN_SCALE)
            else positive((scale >> 7) - 127, scale & 31)[block]
            for block, scale in zip(_in_blocks(codes), scales.reshape(-1).tolist(), strict=True)
        ]
        wide = np.array(blocks).reshape(codes.shape[0], scales.shape[1] * SPAN)
        return wide[:, : codes.shape[1]].astype(np.float32)
    power = np.ldexp(1.0, scales.astype(np.int64) - 127)
    power = np.select([scales == 0, scales == 255], [0.0, np.nan], power)
    power = np.repeat(power, SPAN, axis=1)[:, : codes.shape[1]]
    code = codes.astype(np.int64)
    result = power * np.copysign(SIGNED[code & 127], 127.5 - code)
    single = result.astype(np.float32)
    assert (single == result)[np.isfinite(result)].all()
    return single


def decoded_linear(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """As `decoded`, of int8."""
    unit = np.concatenate([np.zeros(24), UNITS, np.full(7, np.nan)])[scales]
    return (codes * np.repeat(unit, SPAN, axis=1)[:, : codes.shape[1]]).astype(np.float32)


def encoded_linear(x: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """As `encoded`, int8 and the exponents. fp64 holds quotients of units exactly."""
    rows, columns = x.shape
    noise = np.full(x.shape, NEAREST) if random is None else random
    with np.errstate(invalid="ignore"):  # a signalling NaN, and infinity over infinity
        blocks = _in_blocks(x).astype(np.float64)
        largest = np.abs(blocks).max(axis=1)
        spoiled = ~(largest <= LARGEST_LINEAR)
        number = np.searchsorted(127 * UNITS, np.where(spoiled, 0, largest))  # of the least unit that reaches
        units = np.where(spoiled, np.inf, UNITS[number])
        steps = np.nan_to_num(np.floor(blocks / units[:, None] * 2.0**24)).clip(-(2.0**32), 2.0**32)
    codes = np.floor((steps + (_in_blocks(noise) >> 8)) / 2.0**24)
    codes[spoiled] = 0
    assert (np.abs(codes) <= 127).all()
    shape = rows, -(-columns // SPAN)
    exponents = np.where(spoiled, 255, number + 24).astype(np.uint8).reshape(shape)
    return codes.astype(np.int8).reshape(rows, shape[1] * SPAN)[:, :columns], exponents


def encoded(x: np.ndarray, random: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of fp32 numbers of shape ``(rows, columns)``.

    Args:
        random: uint32 of the same shape; None rounds to nearest.
    """
    rows, columns = x.shape
    random = _in_blocks(np.full(x.shape, NEAREST) if random is None else random)
    exists = _in_blocks(np.ones(x.shape, bool))
    with np.errstate(all="ignore"):
        if signed:
            codes, scales = _signed_blocks(_in_blocks(x), random)
        else:
            codes, scales = _positive_blocks(_in_blocks(np.abs(x)), random, exists)
    count = -(-columns // SPAN)
    return codes.reshape(rows, count * SPAN)[:, :columns], scales.reshape(rows, count)


def _signed_blocks(x: np.ndarray, random: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of blocks, of their shape, and an exponent for each block."""
    magnitude = np.abs(x)
    largest = magnitude.max(axis=1, initial=0.0).astype(np.float64)
    spoiled = ~(largest <= LARGEST)
    fraction, exponent = np.frexp(np.where(spoiled, 1.0, largest))
    exponent = exponent.astype(np.int64) - 1 + (fraction > 15 / 16)  # where it rounds up to a power of two
    zero = (largest == 0) | (exponent < 18 - 127)
    near = rounded(magnitude, 3, exponent[:, None] - 14, np.inf, random).astype(np.float64)
    empty = zero | spoiled
    units = np.where(empty[:, None], 0.0, np.ldexp(near, -exponent[:, None]))
    code = np.searchsorted(SIGNED, units)
    assert (SIGNED[code] == units).all()
    codes = np.where(empty[:, None], 0, code + 128 * np.signbit(x)).astype(np.uint8)
    return codes, np.select([spoiled, zero], [255, 0], exponent + 127).astype(np.uint8)


def _positive_blocks(x: np.ndarray, random: np.ndarray, exists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_signed_blocks`, scales as int16."""
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.int16)
    for number, (block, words, here) in enumerate(zip(x.astype(np.float64), random.tolist(), exists, strict=True)):
        largest, smallest = block[here].max(), block[here].min()
        if not largest <= LARGEST:
            scales[number] = NAN_SCALE
            continue
        if largest <= 127 / 128 * 2.0**-126:
            continue
        base = max(int(np.frexp(smallest)[1]) - 1 if smallest > 0 else -200, -126)
        fitting = [step for step in range(16, 21) if positive(base, step)[255] >= largest]
        if fitting:
            step = fitting[0]
        else:
            fraction, exponent = np.frexp(largest)
            step, base = 20, int(exponent) - 1 + int(fraction > 15 / 16) - 31
        table = positive(base, step)
        patterns = block.astype(np.float32).view(np.int32).tolist()
        codes[number] = [
            min(max(pattern - ((base + 127) << 23), 0) + (word >> 8 + 24 - step) >> step, 255)
            for pattern, word in zip(patterns, words, strict=True)
        ]
        # What a code stands for is not beyond the neighbors of the number in the table, but below the base.
        found = table[codes[number]]
        beside = np.searchsorted(table, block)
        lower, upper = table[np.maximum(beside - 1, 0)], table[np.minimum(beside, 255)]
        assert ((found == lower) | (found == upper) | (block < table[0]) & (found == table[0]))[here].all()
        codes[number][~here] = 0
        scales[number] = (base + 127) << 7 | step
    return codes, scales
