"""Moments in 8 bits: blocks of 128 consecutive elements of a row share an exponent byte, and each element has a code.

A row is one index of dimension 0 of the whole tensor, the other dimensions flattened. Each row begins a block, and its
last block may be short. So a range of rows of a tensor has the codes and exponents that it has in the whole.

    exponent byte E     0: all elements of the block are 0        255: all are NaN
    signed code         sign, 4 bits e and 3 bits f of a float with subnormals: with e = 15 for the block's largest
                        numbers, 2^(E - 127) * 2^(e - 15) * (1 + f / 8), for e = 0 2^(E - 127) * 2^-14 * f / 8
    positive code       5 bits e and 3 bits f, without subnormals: 2^(E - 127) * 2^(e - 31) * (1 + f / 8)

The exponent is that of the largest *rounded* number, so what was decoded is encoded with the same bits. Numbers with 3
bits of mantissa are the upper 12 bits of an fp32 pattern. Rounding adds a `noise` of 20 bits to the pattern and drops
the lower 20: random bits for stochastic rounding, 2^19 for rounding to nearest, ties away from zero. Where a signed
number is below the smallest normal one of its block, it is first rounded to a multiple of 2^-20 units, as rounding.py
says.

A positive number is never rounded to 0 in a block that has other numbers: below the smallest code it takes that code,
2^-31 of the block's largest power of two. A second moment that is 0 while the first one is not would divide by zero.

Every decoded number is 0 or a normal number of fp32. Therefore the exponent byte of a block of signed numbers is at
least 18; blocks of smaller numbers, below 2^-109, become 0. That of positive numbers is at least 32, so that no code
stands for less than 2^-126; blocks without a number above 2^-129 become 0, and those with none above 2^-128 may.

A NaN, an infinity and a number that rounds to more than the largest code can say make a block of NaN: nothing that is
not finite is hidden. Codes in blocks of 0 and of NaN are 0.

A byte for 128 elements is 0.8 % of the codes. An exponent instead of a scale needs no division, and its products are
exact.
"""

from __future__ import annotations

import torch

from halfstep.kernels.backend import cuda_capability_geq, jit, tl
from halfstep.kernels.block_instructions import (
    constraints,
    decode_positive_assembly,
    decode_signed_assembly,
    encode_positive_assembly,
    encode_signed_assembly,
)

SPAN = 128  # elements of a block
DROPPED = 20  # bits that rounding drops from an fp32 pattern
HALF = 1 << (DROPPED - 1)  # the noise of rounding to nearest
LEAST_SIGNED, LEAST_POSITIVE, NAN_BLOCK = 18, 32, 255  # exponent bytes
NOTHING = 1 << (DROPPED + 1)  # patterns plus noise below this are of blocks of zeros
LARGEST_POSITIVE = 1.875 * 2.0**127  # the largest positive number with 3 bits of mantissa, pattern 0x7f700000

# --------------------------------------------------------------------------------------------------------- reference


def blocks_per_row(columns: int) -> int:
    """The number of blocks, and of exponent bytes, in a row of `columns` elements."""
    return (columns + SPAN - 1) // SPAN


def rows_and_columns(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """The shape of a tensor of at least one dimension as a matrix whose rows are the indices of dimension 0."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """A tensor of shape ``(rows, columns)`` as ``(rows, blocks, 128)``, the last block filled up with zeros."""
    rows, columns = x.shape
    count = blocks_per_row(columns)
    return torch.nn.functional.pad(x, (0, count * SPAN - columns)).reshape(rows, count, SPAN)


def _in_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The reverse of `_in_blocks`, contiguous."""
    return x.reshape(x.shape[0], x.shape[1] * SPAN)[:, :columns].contiguous()


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) in fp32, for int32 exponents from 1 to 254; 0 for 0 and NaN for 255."""
    # Not torch.where, which would need a tensor for the number: beside fake tensors that would be a real one.
    return (exponent << 23).masked_fill(exponent == NAN_BLOCK, 0x7FC00000).view(torch.float32)


def _patterns(x: torch.Tensor, noise: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
    """Magnitudes in blocks as int32 patterns, the exponent of each block's largest rounded one, the noise in blocks."""
    magnitude = _in_blocks(x).view(torch.int32) & 0x7FFFFFFF
    if isinstance(noise, torch.Tensor):
        noise = _in_blocks(noise)
    # A NaN's pattern plus noise would not fit 32 bits.
    return magnitude, (magnitude.long() + noise).amax(-1, keepdim=True), noise


def noise_of(words: torch.Tensor | None) -> torch.Tensor | int:
    """The noise of random words (int64, as those of philox.py), or that of rounding to nearest for None."""
    return HALF if words is None else (words >> (32 - DROPPED)).to(torch.int32)


def encode_signed(x: torch.Tensor, noise: torch.Tensor | int = HALF) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed codes and exponents of fp32 numbers, in plain torch on any device.

    Args:
        x: fp32, shape ``(rows, columns)``.
        noise: int32 of the same shape, from 0 to 2^20 - 1, or one number; see `noise_of`.

    Returns:
        Codes of the shape of `x` and exponents of shape ``(rows, blocks_per_row(columns))``, both uint8.
    """
    magnitude, largest, noise = _patterns(x, noise)
    exponent = (largest >> 23).clamp(max=NAN_BLOCK).to(torch.int32)
    exponent = exponent.masked_fill(exponent < LEAST_SIGNED, 0)
    usable = (exponent > 0) & (exponent < NAN_BLOCK)
    # As numbers with an exponent bias of 7, like E4M3: the block's largest are from 2^8 to below 2^9.
    scaled = magnitude.view(torch.float32) * _power(262 - exponent.masked_fill(~usable, 135))
    pattern = scaled.view(torch.int32)
    normal = (pattern - (120 << 23) + noise) >> DROPPED
    units = scaled.masked_fill(~(scaled < 2.0**-6), 0.0) * 2.0**9  # of all others, NaN among them, no integer is made
    small = ((units * 2.0**DROPPED).round().to(torch.int32) + noise) >> DROPPED
    code = torch.where(pattern < 121 << 23, small, normal) | (_in_blocks(x).view(torch.int32) >> 24 & 0x80)
    code = code.masked_fill(~usable, 0).to(torch.uint8)
    return _in_rows(code, x.shape[1]), exponent.squeeze(-1).to(torch.uint8)


def decode_signed(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of signed codes.

    Args:
        codes: uint8, shape ``(rows, columns)``.
        exponents: uint8, shape ``(rows, blocks_per_row(columns))``.
    """
    code = _in_blocks(codes).to(torch.int32)
    # The pattern of the fp16 number 2^-8 times as large, whose exponent bias is 15.
    half = ((code & 0x7F) << 7 | (code & 0x80) << 8).to(torch.int16).view(torch.float16)
    return _in_rows(half.float() * _power(exponents.to(torch.int32)).unsqueeze(-1), codes.shape[1])


def encode_positive(x: torch.Tensor, noise: torch.Tensor | int = HALF) -> tuple[torch.Tensor, torch.Tensor]:
    """Positive codes and exponents of fp32 numbers, whose signs are ignored; arguments as for `encode_signed`."""
    magnitude, largest, noise = _patterns(x, noise)
    exponent = (largest >> 23).clamp(LEAST_POSITIVE, NAN_BLOCK).to(torch.int32)
    exponent = exponent.masked_fill(largest < NOTHING, 0)
    usable = (exponent > 0) & (exponent < NAN_BLOCK)
    code = ((magnitude.long() + noise) >> DROPPED) - ((exponent - 31) << 3)
    code = code.clamp(min=0).masked_fill(~usable, 0).to(torch.uint8)
    return _in_rows(code, x.shape[1]), exponent.squeeze(-1).to(torch.uint8)


def decode_positive(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of positive codes; arguments as for `decode_signed`."""
    fraction = ((_in_blocks(codes).to(torch.int32) << DROPPED) + (96 << 23)).view(torch.float32)
    return _in_rows(fraction * _power(exponents.to(torch.int32)).unsqueeze(-1), codes.shape[1])


def encode(
    x: torch.Tensor, rows: int, signed: bool, noise: torch.Tensor | int = HALF
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of `x`, whose elements are those of `rows` rows, and exponents of shape ``(rows, blocks)``."""
    matrix = x.reshape(rows, x.numel() // max(rows, 1))
    if isinstance(noise, torch.Tensor):
        noise = noise.reshape(matrix.shape)
    codes, exponents = (encode_signed if signed else encode_positive)(matrix, noise)
    return codes.reshape(x.shape), exponents


def decode(codes: torch.Tensor, exponents: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 numbers that `encode` encoded, of the shape of `codes`."""
    rows = len(exponents)
    matrix = codes.reshape(rows, codes.numel() // max(rows, 1))
    return (decode_signed if signed else decode_positive)(matrix, exponents).reshape(codes.shape)


# ----------------------------------------------------------------------------------------------------------- kernels

if tl is not None:
    _DROPPED, _NOTHING = tl.constexpr(DROPPED), tl.constexpr(NOTHING)
    _LEAST_SIGNED, _LEAST_POSITIVE = tl.constexpr(LEAST_SIGNED), tl.constexpr(LEAST_POSITIVE)
    _HALF, _SPAN = tl.constexpr(HALF), tl.constexpr(SPAN)
    _DECODE_SIGNED, _DECODE_POSITIVE = tl.constexpr(decode_signed_assembly()), tl.constexpr(decode_positive_assembly())
    _ENCODE_SIGNED, _ENCODE_SIGNED_STOCHASTIC = (tl.constexpr(encode_signed_assembly(one)) for one in (False, True))
    _ENCODE_POSITIVE = tl.constexpr(encode_positive_assembly())
    _DECODE, _ENCODE, _ENCODE_WITH_WORDS, _ENCODE_PATTERNS = (
        tl.constexpr(constraints(*counts)) for counts in ((4, 5), (1, 8), (1, 12), (1, 8))
    )


@jit
def power_of_exponents(exponents):
    """2^(E - 127) for exponent bytes from 1 to 254; 0 for 0 and NaN for 255."""
    wide = exponents.to(tl.uint32)
    return tl.where(wide == 255, 0x7FC00000, wide << 23).to(tl.float32, bitcast=True)


@jit
def decode_signed_block(codes, power):
    """A block of signed codes (uint8) as fp32; `power` is that of the exponents, and broadcasts."""
    code = codes.to(tl.int8, bitcast=True).to(tl.int16).to(tl.uint16, bitcast=True)
    half = ((code << 7) & 0xBFFF).to(tl.uint16)  # the sign was in both upper bits of fp16, of which the second must go
    half = half.to(tl.float16, bitcast=True)
    return half.to(tl.float32) * power


@jit
def decode_positive_block(codes, power):
    """A block of positive codes (uint8) as fp32; `power` as in `decode_signed_block`."""
    return ((codes.to(tl.uint32) << _DROPPED) + (96 << 23)).to(tl.float32, bitcast=True) * power


@jit
def encode_signed_block(x, noise):
    """fp32 numbers of shape (blocks, 128) as (codes of the same shape, exponents of shape (blocks,)), both uint8.

    `noise` is uint32, of the same shape or one number. Elements that do not exist must be 0.
    """
    bits = x.to(tl.uint32, bitcast=True)
    largest = tl.max((bits & 0x7FFFFFFF) + noise, 1, keep_dims=True)
    exponent = tl.minimum(largest >> 23, 255)
    keep = tl.where((exponent >= _LEAST_SIGNED) & (exponent < 255), 0xFF, 0).to(tl.uint32)
    # The two factors make of the block's largest exponent 15: as fp32 patterns, smaller numbers are then subnormal
    # exactly where they are in 8 bits.
    usable = tl.minimum(tl.maximum(exponent, _LEAST_SIGNED), 254)
    scaled = tl.abs(x) * ((255 - usable) << 23).to(tl.float32, bitcast=True) * 2.0**-113
    code = ((scaled.to(tl.uint32, bitcast=True) + noise) >> _DROPPED) | ((bits >> 24) & 0x80)
    exponent = tl.where(exponent < _LEAST_SIGNED, 0, exponent)
    return (code & keep).to(tl.uint8), tl.reshape(exponent, (x.shape[0],)).to(tl.uint8)


@jit
def encode_positive_block(x, noise):
    """As `encode_signed_block`, as positive codes."""
    rounded = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) + noise
    largest = tl.max(rounded, 1, keep_dims=True)
    exponent = tl.where(largest < _NOTHING, 0, tl.minimum(tl.maximum(largest >> 23, _LEAST_POSITIVE), 255)).to(tl.int32)
    # Beyond every pattern where there are no numbers, so that their codes are 0.
    lowest = tl.where((exponent > 0) & (exponent < 255), (exponent - 31) << 3, 1 << 12)
    code = tl.maximum((rounded >> _DROPPED).to(tl.int32) - lowest, 0)
    return code.to(tl.uint8), tl.reshape(exponent, (x.shape[0],)).to(tl.uint8)


# As the functions above, four codes in a register, on NVIDIA GPUs. `x` must be what arithmetic gave there: then no NaN
# has a sign, and no positive number either.


@jit
def decode_signed_packed(codes, power):
    """`decode_signed_block`."""
    return tl.inline_asm_elementwise(_DECODE_SIGNED, _DECODE, [codes, power], tl.float32, is_pure=True, pack=4)


@jit
def decode_positive_packed(codes, power):
    """`decode_positive_block`."""
    return tl.inline_asm_elementwise(_DECODE_POSITIVE, _DECODE, [codes, power], tl.float32, is_pure=True, pack=4)


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _larger_halves(a, b):
    """The larger of two 16-bit numbers each."""
    if cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        return tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@jit
def _of_threads(x, EACH: tl.constexpr):
    """The largest of the elements that a thread holds side by side, of shape (blocks, threads)."""
    by_thread = tl.reshape(x, (x.shape[0], _SPAN // EACH, EACH))
    if x.dtype == tl.float32:
        return tl.reduce(by_thread, 2, _larger).to(tl.uint32, bitcast=True)
    else:
        return tl.max(by_thread, 2)


@jit
def largest_packed(x, y, EACH: tl.constexpr):
    """The upper halves of the largest patterns of two blocks' rows, that of `y` above: uint32 of shape (blocks, 1).

    Numbers of fp32 without a sign, or patterns; what exponents are made of is in the upper halves. EACH elements lie
    side by side in a thread.
    """
    both = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [_of_threads(x, EACH), _of_threads(y, EACH)], tl.uint32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return tl.reduce(both, 1, _larger_halves, keep_dims=True)


@jit
def encode_signed_packed(x, largest, word, STOCHASTIC: tl.constexpr):
    """`encode_signed_block`; `largest` has the upper half of the largest rounded pattern, `word` is moved down by 8."""
    exponent = tl.minimum(largest >> 7, 255)
    usable = (exponent >= _LEAST_SIGNED) & (exponent < 255)
    factor = tl.where(usable, (511 - exponent) << 23, 0).to(tl.uint32).to(tl.float32, bitcast=True)  # 2^(128 - E)
    if STOCHASTIC:
        codes = tl.inline_asm_elementwise(
            _ENCODE_SIGNED_STOCHASTIC, _ENCODE_WITH_WORDS, [x, factor, word], tl.uint8, is_pure=True, pack=4
        )
    else:
        codes = tl.inline_asm_elementwise(_ENCODE_SIGNED, _ENCODE, [x, factor], tl.uint8, is_pure=True, pack=4)
    exponent = tl.where(exponent < _LEAST_SIGNED, 0, exponent)
    return codes, tl.reshape(exponent, (x.shape[0],)).to(tl.uint8)


@jit
def encode_positive_packed(patterns, largest, NOISE: tl.constexpr):
    """`encode_positive_block`, of patterns to which NOISE is to be added; `largest` as in `encode_signed_packed`."""
    exponent = tl.where(largest < (_NOTHING >> 16), 0, tl.minimum(tl.maximum(largest >> 7, _LEAST_POSITIVE), 255))
    usable = (exponent > 0) & (exponent < 255)
    # Where there are no numbers, what is added makes every pattern negative, or less than 2^20 with the noise.
    added = tl.where(usable, (31 - exponent.to(tl.int32)) << 23, -0x80000000).to(tl.int32) + NOISE
    codes = tl.inline_asm_elementwise(
        _ENCODE_POSITIVE, _ENCODE_PATTERNS, [patterns, added], tl.uint8, is_pure=True, pack=4
    )
    return codes, tl.reshape(exponent, (patterns.shape[0],)).to(tl.uint8)
