"""Counter-based random words for stochastic rounding: the same bits for any launch shape, device or sharding.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One call turns
a counter and a key into four 32-bit words, so an element's word depends on nothing but its name:

    word(i) = Philox(counter = (low(i // 4), high(i // 4), step, stream), key = (low(seed), high(seed)))[i % 4]

`i` is the element's index, row by row, in the whole tensor, of which a process may hold a part; `stream` tells tensors
apart, `step` the times the same tensor is rounded. A block of consecutive elements costs one call per four.

About 20 integer instructions per element, which hide behind the memory traffic of a cast or an optimizer step.
"""

from __future__ import annotations

import torch

from halfstep.kernels.backend import jit, tl

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# --------------------------------------------------------------------------------------------------------- reference


def check_seed(seed: object) -> int:
    """A seed as the kernels take it.

    Raises:
        TypeError: not an integer.
        ValueError: negative, or 2^63 and more.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"Expected seed to be an integer from 0 to 2^63 - 1, but got {seed!r}, a {type(seed).__name__}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"Expected seed to be from 0 to 2^63 - 1, but got {seed}: reduce it with seed % 2**63")
    return seed


def reference_words(
    index: torch.Tensor, seed: int | torch.Tensor, step: int | torch.Tensor = 0, stream: int | torch.Tensor = 0
) -> torch.Tensor:
    """The words of elements, in plain torch on any device.

    Args:
        index: int64, any shape: the elements' indices, from 0.
        seed: 64 bits, or a 0-dim int64 tensor.
        step, stream: 32 bits each, or int64 tensors that broadcast with `index`.

    Returns:
        int64 of the shape of `index`, values from 0 to 2^32 - 1.
    """
    group = index >> 2

    def word(value: int | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.int64, device=index.device) & _MASK

    c0, c1, c2, c3 = torch.broadcast_tensors(group & _MASK, (group >> 32) & _MASK, word(step), word(stream))
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(ROUNDS):
        # The product wraps to a negative int64; the mask after the shift takes its upper 32 bits all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    which = index & 3
    return torch.where(which == 0, c0, torch.where(which == 1, c1, torch.where(which == 2, c2, c3)))


# ----------------------------------------------------------------------------------------------------------- kernels


@jit
def words_of(index, seed, step, stream):
    """The word of each element of a block of int64 indices, as uint32: one Philox call per element.

    `seed` is an integer; of `step` and `stream` the lower 32 bits count.
    """
    group = index >> 2
    low = group.to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    fill = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, (fill + step).to(tl.uint32), (fill + stream).to(tl.uint32))
    which = index & 3
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))


@jit
def words_of_groups(group, seed, step, stream, BLOCK: tl.constexpr):
    """The words of four consecutive elements for each of a block of int64 groups, an element's index // 4."""
    low = group.to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    fill = tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, (fill + step).to(tl.uint32), (fill + stream).to(tl.uint32))
    # join puts its operands side by side in a new last dimension: (a, b, c, d) of each group in this order.
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@jit
def consecutive_words(first, seed, step, stream, BLOCK: tl.constexpr):
    """The words of elements `first` (int64, a multiple of 4) to ``first + BLOCK``: one Philox call per four."""
    return words_of_groups((first >> 2) + tl.arange(0, BLOCK // 4), seed, step, stream, BLOCK)
