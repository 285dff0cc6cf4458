"""The random words of kernels/philox.py without torch: Philox4x32-7 with the seed as key and the element as counter.

The same code works on Python integers and on numpy arrays of uint64, which hold the products of 32-bit numbers.
"""

from __future__ import annotations

from typing import Any

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7


def four_words(group: Any, seed: int) -> tuple[Any, Any, Any, Any]:
    """The 32-bit words of elements ``8 * group`` to ``8 * group + 7``: step 0, stream 0 of `kernels.philox`.

    Each has the 16 bits of two elements, those of the first one in the lower half.
    """
    c0, c1, c2, c3 = group & _MASK, group >> 32 & _MASK, group & 0, group & 0
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def word(index: int, seed: int) -> int:
    """The random word of one element: its 16 random bits, a one and 15 zeros."""
    both = int(four_words(index // 8, seed)[index % 8 // 2])
    return (both >> 16 if index % 2 else both & 0xFFFF) << 16 | 0x8000
