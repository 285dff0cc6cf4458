"""Random bits and stochastic rounding, computed differently from the kernels: 64-bit products in numpy.

Nothing here imports halfstep. `words` is checked against Python integers in tests/kernels/test_philox.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from roundings import NUMPY

LOWER = np.uint64(0xFFFFFFFF)
# Stored mantissa bits, smallest normal exponent, largest finite number.
GRIDS = {torch.float16: (10, -14, 65504.0), torch.bfloat16: (7, -126, float.fromhex("0x1.fep127"))}


@dataclass(frozen=True)
class Noise:
    """The identity of the random bits of a tensor, which may be a part of a larger one.

    Its element i is element ``base + i // inner * inner_whole + i % inner`` of the whole.
    """

    seed: int  # of the optimizer
    stream: int  # of the parameter
    base: int = 0
    inner: int = 0  # 0: the tensor's size, one run
    inner_whole: int = 0

    def place(self, size: int) -> tuple[int, int, int]:
        return (self.base, self.inner or max(size, 1), self.inner_whole or max(size, 1))

    def words(self, size: int, step: int, draw: int = 0) -> np.ndarray:
        """uint32, one per element."""
        base, inner, inner_whole = self.place(size)
        i = np.arange(size, dtype=np.int64)
        index = base + i // inner * inner_whole + i % inner
        return words(index.astype(np.uint64), self.seed, step, self.stream, draw)


def words(index: np.ndarray, seed: int, step: int, stream: int, draw: int = 0) -> np.ndarray:
    """The words of kernels/philox.py for uint64 indices, as uint32."""
    call, place = np.divmod(index, np.uint64(8))
    counter = [call & LOWER, call >> np.uint64(32), *(np.full_like(call, value) for value in (step, stream))]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for number in range(7):
        k0, k1 = ((key[i] + np.uint64(number * weyl)) & LOWER for i, weyl in ((0, 0x9E3779B9), (1, 0xBB67AE85)))
        left, right = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        high = np.uint64(32)
        counter = [(right >> high) ^ counter[1] ^ k0, right & LOWER, (left >> high) ^ counter[3] ^ k1, left & LOWER]
    # The eight draws of 16 bits of a call, as they lie in memory with the lowest byte first.
    mixed = [np.bitwise_xor.reduce([counter[(k + further) % 4] for further in range(draw + 1)]) for k in range(4)]
    draws = np.stack(mixed, axis=-1).astype("<u4").view("<u2")
    chosen = np.take_along_axis(draws, place[..., None].astype(np.int64), axis=-1)[..., 0]
    return chosen.astype(np.uint32) * np.uint32(2**16) + np.uint32(2**15)


def stochastic(values: np.ndarray, dtype: torch.dtype, random: np.ndarray) -> np.ndarray:
    """fp32 values rounded stochastically to fp16 or bf16, with uint32 words of the same shape."""
    with np.errstate(all="ignore"):
        return rounded(values, *GRIDS[dtype], random).astype(NUMPY[dtype])


def to_24_bits(values: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    """fp32 values with 15 bits of mantissa: rounded to nearest even, or stochastically."""
    return rounded(values, 15, -126, float.fromhex("0x1.fffep127"), random)


def rounded(
    values: np.ndarray, mantissa: int, least: int | np.ndarray, largest: float, random: np.ndarray | None
) -> np.ndarray:
    """fp32 values rounded to a grid, still in fp32: stochastically, up with the probability of the fraction of a
    unit that is left, or to nearest even if `random` is None. `least` is the exponent of the smallest normal number."""
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        exact = values.astype(np.float64)
    magnitude = np.abs(exact)
    finite = np.where(np.isfinite(magnitude), magnitude, 1.0)
    exponent = np.frexp(finite)[1].astype(np.int64) - 1  # finite = f * 2^exponent, 1 <= f < 2
    unit = np.ldexp(1.0, np.maximum(exponent, least) - mantissa)
    whole = np.floor(finite / unit)
    part = finite / unit - whole
    dropped = 23 - mantissa
    if random is None:
        up = np.rint(finite / unit) > whole
    else:
        up = part + (random >> np.uint32(32 - dropped)).astype(np.float64) / 2**dropped >= 1
        # Below a smallest normal number that is not fp32's own, a part of a unit may be finer than that.
        finer = (finite < np.ldexp(1.0, least)) & (least > np.int64(-126))
        if finer.any():
            near = np.rint(part * 2**dropped) / 2**dropped
            up = np.where(finer, near + (random >> np.uint32(32 - dropped)) / 2.0**dropped >= 1, up)
    result = (whole + up) * unit
    result = np.where(result > largest, np.inf, result)
    result = np.copysign(np.where(np.isfinite(magnitude), result, magnitude), exact)
    with np.errstate(all="ignore"):
        return result.astype(np.float32)
