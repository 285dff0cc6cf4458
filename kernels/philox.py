"""Counter-based random bits for stochastic rounding: the same for any launch shape, device or sharding.

Philox4x32-7 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): seven rounds are
the fewest with which they found no failure in BigCrush. One call turns a counter and a key into four words of 32 bits,
which serve eight elements with 16 random bits each, so an element's bits depend on nothing but its name:

    w0, w1, w2, w3 = Philox(counter = (low(i // 8), high(i // 8), step, stream), key = (low(seed), high(seed)))
    k              = i % 8 // 2
    draw 0         = half of w[k]                                 the lower half for even i, the upper one for odd i
    draw 1         = half of w[k] ^ w[k + 1]                      k + 1 and k + 2 modulo 4
    draw 2         = half of w[k] ^ w[k + 1] ^ w[k + 2]

`i` is the element's index, row by row, in the whole tensor, of which a process may hold a part; `stream` tells tensors
apart, `step` the times the same tensor is rounded. Draws 1 and 2 are for elements that round more than one number. The
twelve combinations of the words of a call differ, and a sum modulo 2 of uniform, independent bits is uniform and
independent of any other: of all 24 draws of a call, any two are independent, so that rounding errors add up with the
variance of independent ones. Three of them may determine each other.

**Words.** Rounding code takes a draw r as the 32-bit number ``2^16 r + 2^15``: the bits that are looked at are the
upper ones. Where 16 bits or fewer are dropped, that is r without its lower bits; where more are dropped, the set bit
makes the probability the nearest multiple of 2^-16.

A call takes 27 machine instructions (a product of 64 bits and an exclusive or of three numbers, twice per round, of
which one product is the same for all elements): 3.4 per element with one draw, 0.5 more for each of the other two.
"""

from __future__ import annotations

import torch

from halfstep.kernels.backend import constant, cuda_capability_geq, jit, tl

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7

# --------------------------------------------------------------------------------------------------------- reference


def check_seed(seed: object) -> int:
    """Validate a seed for the kernels: a TypeError if it is no integer, a ValueError if it is out of range."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"Expected seed to be an integer from 0 to 2^63 - 1, but got {seed!r}, a {type(seed).__name__}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"Expected seed to be from 0 to 2^63 - 1, but got {seed}: reduce it with seed % 2**63")
    return seed


def reference_words(
    index: torch.Tensor,
    seed: int | torch.Tensor,
    step: int | torch.Tensor = 0,
    stream: int | torch.Tensor = 0,
    draw: int = 0,
) -> torch.Tensor:
    """The words of elements, in plain torch on any device.

    Args:
        index: int64, any shape: the elements' indices, from 0.
        seed: 64 bits, or a 0-dim int64 tensor.
        step, stream: 32 bits each, or int64 tensors that broadcast with `index`.
        draw: 0, 1 or 2.

    Returns:
        int64 of the shape of `index`: 16 random bits, a one and 15 zeros.
    """
    group = index >> 3

    def word(value: int | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.int64, device=index.device) & _MASK

    c0, c1, c2, c3 = torch.broadcast_tensors(group & _MASK, (group >> 32) & _MASK, word(step), word(stream))
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(ROUNDS):
        # The product may wrap to a negative int64. Shift and mask still give its upper 32 bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK

    def of_pair(pair: torch.Tensor) -> torch.Tensor:
        return torch.where(pair == 0, c0, torch.where(pair == 1, c1, torch.where(pair == 2, c2, c3)))

    pair = index >> 1 & 3
    mixed = of_pair(pair)
    for further in range(1, draw + 1):
        mixed = mixed ^ of_pair(pair + further & 3)
    half = torch.where(index & 1 == 1, mixed >> 16, mixed & 0xFFFF)
    return half << 16 | 0x8000


def unspecialized(value: int) -> int:
    """Maps a number below 2^60 to an odd negative 64-bit integer, as an operand of a kernel, which takes its `plain`.

    Triton compiles separate kernels for 32-bit integers, for 1 and for multiples of 16. This value is none of these.
    """
    return 2 * value + 1 - 2**62


# ----------------------------------------------------------------------------------------------------------- kernels

_ROUNDS = constant(ROUNDS)
_FIRST, _SECOND = map(constant, _MULTIPLIERS)
_FIRST_WEYL, _SECOND_WEYL = map(constant, _WEYL)


@jit
def plain(value):
    return (value + 4611686018427387904) >> 1


@jit
def _product(x, FACTOR: tl.constexpr):
    """The upper and the lower 32 bits of the products of a block of uint32.

    On NVIDIA GPUs, one instruction gives both. The compiler would take two, as it does in `tl.philox`.
    """
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise(
            "{\n.reg .b64 %product;\nmul.wide.u32 %product, $2, $3;\nmov.b64 {$1, $0}, %product;\n}",
            "=r,=r,r,r",
            [x, tl.full((), FACTOR, tl.uint32)],
            (tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        product = x.to(tl.uint64) * FACTOR
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@jit
def _of_group(group, seed, step, stream):
    """The four words of each of a block of int64 groups; `seed` is an integer, of `step` and `stream` 32 bits count."""
    c0 = group.to(tl.uint32)
    c1 = (group >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + tl.cast(step, tl.uint32)
    c3 = tl.zeros_like(c0) + tl.cast(stream, tl.uint32)
    key = tl.cast(seed, tl.uint64)
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, _FIRST)
        high1, low1 = _product(c2, _SECOND)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, _FIRST_WEYL, sanitize_overflow=False)
        k1 = tl.add(k1, _SECOND_WEYL, sanitize_overflow=False)
    return c0, c1, c2, c3


@jit
def _mixed(a, b, c, d, DRAW: tl.constexpr):
    """The words whose halves are a draw, of the words of a call."""
    if DRAW == 0:
        return a, b, c, d
    elif DRAW == 1:
        return a ^ b, b ^ c, c ^ d, d ^ a
    else:
        return a ^ b ^ c, b ^ c ^ d, c ^ d ^ a, d ^ a ^ b


@jit
def _chosen(index, a, b, c, d):
    """The word of each element of a block of indices, of the words of its call."""
    low = index.to(tl.uint32)
    pair = (low >> 1) & 3
    word = tl.where(pair == 0, a, tl.where(pair == 1, b, tl.where(pair == 2, c, d)))
    return (tl.where(low & 1 == 1, word, word << 16) & 0xFFFF0000) | 0x8000


@jit
def _halves(words, DOWN: tl.constexpr):
    """Both halves of each word as words of elements, side by side in a new last dimension."""
    if DOWN:
        LOWER: tl.constexpr = "prmt.b32 $0, $1, 0x80, 0x5104;" if DOWN == 8 else "prmt.b32 $0, $1, 0x80, 0x5541;"
        UPPER: tl.constexpr = "prmt.b32 $0, $1, 0x80, 0x5324;" if DOWN == 8 else "prmt.b32 $0, $1, 0x80, 0x5543;"
        return tl.join(
            tl.inline_asm_elementwise(LOWER, "=r,r", [words], tl.uint32, is_pure=True, pack=1),
            tl.inline_asm_elementwise(UPPER, "=r,r", [words], tl.uint32, is_pure=True, pack=1),
        )
    else:
        return tl.join((words << 16) | 0x8000, (words & 0xFFFF0000) | 0x8000)


@jit
def _side_by_side(first, a, b, c, d, EACH: tl.constexpr, BLOCK: tl.constexpr, DOWN: tl.constexpr):
    """The words of `EACH` consecutive elements for each of a block of indices `first`, of the words of their calls."""
    if EACH == 8:
        # join puts its operands side by side in a new last dimension: (a, b, c, d) of each group in this order.
        words = tl.join(tl.join(a, c), tl.join(b, d))
    else:
        second = (first.to(tl.uint32) & 4) != 0
        words = tl.join(tl.where(second, c, a), tl.where(second, d, b))
    return tl.reshape(_halves(words, DOWN), (BLOCK,))


@jit
def words_of(index, seed, step, stream, DRAWS: tl.constexpr):
    """Draws 0, 1 and 2 of each element of a block of int64 indices, as uint32 words: one Philox call per element.

    With DRAWS 1 the other two are draw 0 again, which costs nothing. `seed`, `step` and `stream` as in `_of_group`.
    """
    a, b, c, d = _of_group(index >> 3, seed, step, stream)
    word = _chosen(index, a, b, c, d)
    if DRAWS == 1:
        return word, word, word
    else:
        a1, b1, c1, d1 = _mixed(a, b, c, d, 1)
        a2, b2, c2, d2 = _mixed(a, b, c, d, 2)
        return word, _chosen(index, a1, b1, c1, d1), _chosen(index, a2, b2, c2, d2)


@jit
def words_of_groups(
    group, first, seed, step, stream, DRAWS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    DOWN: tl.constexpr = 0,  # 8, on NVIDIA GPUs only: words are moved down by as many bits
    DOWN_FIRST: tl.constexpr = 0,  # as DOWN, of draw 0; or 24: words are moved down so far, and 0x8000 is added
):  # fmt: skip
    """`words_of` for runs of EACH consecutive elements, BLOCK in total, in the groups of eight elements `group`.

    The runs begin at `first`, multiples of EACH of which three bits count. With EACH 8, one Philox call serves eight
    elements. With EACH 4, it serves four: threads with only four of them repeat the call of their neighbor.
    """
    a, b, c, d = _of_group(group, seed, step, stream)
    word = _side_by_side(first, a, b, c, d, EACH, BLOCK, DOWN_FIRST)
    if DRAWS == 1:
        return word, word, word
    else:
        a1, b1, c1, d1 = _mixed(a, b, c, d, 1)
        a2, b2, c2, d2 = _mixed(a, b, c, d, 2)
        return (
            word,
            _side_by_side(first, a1, b1, c1, d1, EACH, BLOCK, DOWN),
            _side_by_side(first, a2, b2, c2, d2, EACH, BLOCK, DOWN),
        )
