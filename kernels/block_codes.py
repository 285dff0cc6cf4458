"""Moments in 8 bits: blocks of 32 consecutive elements of a row share a scale, and each element has a code of a byte.

A row is one index of dimension 0 of the whole tensor, the other dimensions flattened. Each row begins a block, and its
last block may be short. So a range of rows of a tensor has the codes and scales that it has in the whole.

**Signed numbers** (first moments). The scale is a byte E: 0 if all elements of the block are 0, 255 if all are NaN.
A code has a sign, 4 bits e and 3 bits f of a float with subnormals: with e = 15 for the block's largest numbers,
2^(E - 127) * 2^(e - 15) * (1 + f / 8), for e = 0 2^(E - 127) * 2^-14 * f / 8. E is the exponent of the block's largest
number, rounded up to 3 bits of mantissa.

**Positive numbers** (second moments). A code counts steps between fp32 patterns, which are integers in the order of the
numbers: it stands for the pattern

    base + code * 2^s          base a power of two, s from 16 to 20

so that a block whose numbers are close to each other has up to 7 bits of mantissa (s = 16), one over 8 powers of two
has 5 and one over 32 has 3 (s = 20). The base is the power of two at or below the block's smallest number, and s the
least with which 255 steps reach the largest one. Where none does, s is 20, the base is 31 powers of two below the
largest number rounded up to 3 bits, and smaller numbers take the base, the code 0: a second moment that is 0 while the
first one is not would divide by zero. The scale has 16 bits, the upper ones of the base's pattern with s in its lower 5
bits; 0 if all elements are 0, 0x7FC0 if all are NaN.

**Linear codes** (the momentum of Muon, whose products amplify small singular values most). A code is a signed integer
from -127 to 127 that counts units, and the scale a byte E, which says that the unit is 2^(E - 127): the least power of
two, from 2^-103 on, of which 127 reach the block's largest number. It is 255 if all are NaN, and 0 before the first
step.

Numbers between two codes are rounded by `noise` of 24 bits: random bits for stochastic rounding, 2^23 for rounding to
nearest, ties away from zero; 0xFFFFFF rounds up and 0 down. What a code's step is divided into is compared with as many
upper bits of the noise. Signed numbers below the smallest normal one of their block are first rounded to a multiple of
2^-20 units, as rounding.py says.

Scales depend on the numbers and not on the noise. What was decoded is encoded as the same numbers, whatever the noise.

Linear codes are rounded as floor(x / unit + noise / 2^24), of which the quotient is first rounded down to 24 bits below
the point: without bias for negative numbers too, but the noise of rounding to nearest rounds ties up.

Every decoded number is 0 or a normal number of fp32. Therefore the exponent byte of a block of signed numbers is at
least 18; blocks of smaller numbers, below 2^-109, become 0. No base is below 2^-126; blocks without a number above
127/128 of that become 0.

A NaN, an infinity and a number beyond 1.875 * 2^127 (for linear codes 127 * 2^121) make a block of NaN: nothing that is
not finite is hidden. Codes in blocks of 0 and of NaN are 0.

Three bytes for 32 elements are 5 % of the two codes of each. A power of two instead of another scale needs no division,
and its products are exact.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from halfstep.kernels import block_instructions as ptx
from halfstep.kernels.backend import constant, cuda_capability_geq, jit, tl
from halfstep.kernels.block_instructions import LARGEST_POSITIVE as LARGEST_POSITIVE
from halfstep.kernels.block_instructions import constraints

SPAN = 32  # elements of a block
NOISE_BITS = 24
HALF, UP = 1 << (NOISE_BITS - 1), (1 << NOISE_BITS) - 1  # the noise of rounding to nearest, and of rounding up
DROPPED = 20  # bits that rounding to 3 bits of mantissa drops from an fp32 pattern
LEAST_SIGNED, NAN_BLOCK = 18, 255  # exponent bytes
LEAST_STEP = 16  # the least s
NAN_RANGE = 0x7FC0  # the scale of a block of positive numbers that are NaN
# The exponent bytes of the least unit, so that 2^24 / unit is a number of fp32, and of the largest.
LEAST_UNIT, LARGEST_UNIT = 24, 248
_BELOW_127 = 0x1FFFF  # carries the mantissas above that of 127 to the next exponent
# The upper 16 bits of the patterns of `LARGEST_POSITIVE` (3 bits of mantissa), of 2^-126 and of a power of two.
_LARGEST, _LEAST, _BINADE = 0x7F70, 0x80, 0x80

# --------------------------------------------------------------------------------------------------------- reference


def blocks_per_row(columns: int) -> int:
    """The number of blocks, and of scales, in a row of `columns` elements."""
    return (columns + SPAN - 1) // SPAN


def rows_and_columns(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """The shape of a tensor of at least one dimension as a matrix whose rows are the indices of dimension 0."""
    return shape[0], prod(shape[1:])


def _in_blocks(x: Any, filler: int = 0) -> Any:
    """A tensor of shape ``(rows, columns)`` as ``(rows, blocks, SPAN)``, the last one filled up; a number as it is."""
    if isinstance(x, int):
        return x
    rows, columns = x.shape
    count = blocks_per_row(columns)
    return torch.nn.functional.pad(x, (0, count * SPAN - columns), value=filler).reshape(rows, count, SPAN)


def _in_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The reverse of `_in_blocks`, contiguous."""
    return x.reshape(x.shape[0], x.shape[1] * SPAN)[:, :columns].contiguous()


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) in fp32, for int32 exponents from 1 to 254; 0 for 0 and NaN for 255."""
    # Not torch.where, which would need a tensor for the number: beside fake tensors that would be a real one.
    return (exponent << 23).masked_fill(exponent == NAN_BLOCK, 0x7FC00000).view(torch.float32)


def noise_of(words: torch.Tensor | None) -> torch.Tensor | int:
    """The noise of random words (int64, as those of philox.py), or that of rounding to nearest for None."""
    return HALF if words is None else (words >> (32 - NOISE_BITS)).to(torch.int32)


def encode_signed(x: torch.Tensor, noise: torch.Tensor | int = HALF) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed codes and exponents of fp32 numbers, in plain torch on any device.

    Args:
        x: fp32, shape ``(rows, columns)``.
        noise: int32 of the same shape, from 0 to 2^24 - 1, or one number; see `noise_of`.

    Returns:
        Codes of the shape of `x` and exponents of shape ``(rows, blocks_per_row(columns))``, both uint8.
    """
    bits = _in_blocks(x).view(torch.int32)
    magnitude, noise = bits & 0x7FFFFFFF, _in_blocks(noise) >> (NOISE_BITS - DROPPED)
    largest = magnitude.amax(-1, keepdim=True).long()  # the pattern of a NaN does not leave room in an int32
    exponent = (largest + ((1 << DROPPED) - 1) >> 23).clamp(max=NAN_BLOCK).to(torch.int32)
    exponent = exponent.masked_fill(exponent < LEAST_SIGNED, 0)
    usable = (exponent > 0) & (exponent < NAN_BLOCK)
    # As numbers with an exponent bias of 7, like E4M3: the block's largest are from 2^8 to below 2^9.
    scaled = magnitude.view(torch.float32) * _power(262 - exponent.masked_fill(~usable, 135))
    pattern = scaled.view(torch.int32)
    normal = (pattern - (120 << 23) + noise) >> DROPPED
    units = scaled.masked_fill(~(scaled < 2.0**-6), 0.0) * 2.0**9  # of all others, NaN among them, no integer is made
    small = ((units * 2.0**DROPPED).round().to(torch.int32) + noise) >> DROPPED
    code = torch.where(pattern < 121 << 23, small, normal) | (bits >> 24 & 0x80)
    code = code.masked_fill(~usable, 0).to(torch.uint8)
    return _in_rows(code, x.shape[1]), exponent.squeeze(-1).to(torch.uint8)


def decode_signed(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of signed codes; shapes and dtypes as `encode_signed` returns them."""
    code = _in_blocks(codes).to(torch.int32)
    # The pattern of the fp16 number 2^-8 times as large, whose exponent bias is 15.
    half = ((code & 0x7F) << 7 | (code & 0x80) << 8).to(torch.int16).view(torch.float16)
    return _in_rows(half.float() * _power(exponents.to(torch.int32)).unsqueeze(-1), codes.shape[1])


def encode_positive(x: torch.Tensor, noise: torch.Tensor | int = HALF) -> tuple[torch.Tensor, torch.Tensor]:
    """Positive codes (uint8) and scales (int16) of fp32 numbers, whose signs are ignored; arguments as for
    `encode_signed`."""
    magnitude, noise = _in_blocks(x).view(torch.int32) & 0x7FFFFFFF, _in_blocks(noise)
    smallest = _in_blocks(x.view(torch.int32) & 0x7FFFFFFF, 0x7FFFFFFF).amin(-1, keepdim=True)
    # In units of 2^16, of which every step is a multiple. The largest number is rounded up to one.
    upper = (magnitude.amax(-1, keepdim=True).long() + 0xFFFF >> 16).to(torch.int32)
    base = torch.maximum(smallest >> 23 << 7, (upper + 15 >> 7 << 7) - 31 * _BINADE).clamp(min=_LEAST)
    # An integer rounded up to 8 bits has 8 + s bits.
    reach = (upper - base).clamp(min=0).float().view(torch.int32) + 0xFFFF >> 23
    shift = (reach - 134).clamp(min=0)
    usable = (upper >= _LEAST) & (upper <= _LARGEST)
    steps = (magnitude - (base << 16)).clamp(min=0).long() << (8 - shift)
    code = (steps + noise >> NOISE_BITS).masked_fill(~usable, 0).to(torch.uint8)
    scale = (base | shift + LEAST_STEP).masked_fill(upper < _LEAST, 0).masked_fill(upper > _LARGEST, NAN_RANGE)
    return _in_rows(code, x.shape[1]), scale.squeeze(-1).to(torch.int16)


def decode_positive(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of positive codes (uint8) and scales (int16); shapes as for `decode_signed`."""
    scale = scales.to(torch.int32).unsqueeze(-1)
    pattern = ((scale & 0xFFE0) << 16) + (_in_blocks(codes).to(torch.int32) << (scale & 31))
    return _in_rows(pattern.view(torch.float32), codes.shape[1])


def encode_linear(x: torch.Tensor, noise: torch.Tensor | int = HALF) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear codes (int8) and exponents (uint8) of fp32 numbers; arguments as for `encode_signed`."""
    blocks, noise = _in_blocks(x), _in_blocks(noise)
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True).long()
    exponent = ((largest + _BELOW_127 >> 23) - 6).clamp(min=LEAST_UNIT).to(torch.int32)
    beyond = exponent > LARGEST_UNIT
    steps = (blocks * _power(278 - exponent)).masked_fill(beyond, 0.0).floor().to(torch.int32)
    codes = (steps + noise >> NOISE_BITS).masked_fill(beyond, 0).to(torch.int8)
    exponent = exponent.masked_fill(beyond, NAN_BLOCK)
    return _in_rows(codes, x.shape[1]), exponent.squeeze(-1).to(torch.uint8)


def decode_linear(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of linear codes (int8) and exponents (uint8); shapes as for `decode_signed`."""
    return _in_rows(_in_blocks(codes).float() * _power(exponents.to(torch.int32)).unsqueeze(-1), codes.shape[1])


def _columns(x: torch.Tensor, rows: int) -> int:
    """How many elements each row has; those of a shard without rows are as long as on other ranks."""
    return x.numel() // rows if rows else prod(x.shape[1:])


def encode(
    x: torch.Tensor, rows: int, signed: bool, noise: torch.Tensor | int = HALF, linear: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of `x`, whose elements are those of `rows` rows, and scales of shape ``(rows, blocks)``."""
    matrix = x.reshape(rows, _columns(x, rows))
    if isinstance(noise, torch.Tensor):
        noise = noise.reshape(matrix.shape)
    codes, scales = (encode_linear if linear else encode_signed if signed else encode_positive)(matrix, noise)
    return codes.reshape(x.shape), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 numbers that `encode` encoded, of the shape of `codes`. Linear codes are those of dtype int8."""
    rows = len(scales)
    matrix = codes.reshape(rows, _columns(codes, rows))
    decode_matrix = decode_linear if codes.dtype == torch.int8 else decode_signed if signed else decode_positive
    return decode_matrix(matrix, scales).reshape(codes.shape)


# ----------------------------------------------------------------------------------------------------------- kernels

_NOISE_BITS, _DROPPED, _SPAN = map(constant, (NOISE_BITS, DROPPED, SPAN))
_LEAST_SIGNED, _LEAST_STEP, _NAN_RANGE = map(constant, (LEAST_SIGNED, LEAST_STEP, NAN_RANGE))
_ALMOST = constant((1 << DROPPED) - 1)  # rounds up to 3 bits
_SEVEN = constant(127 + 7)  # the exponent byte of 2^7
_LARGEST_UPPER, _LEAST_UPPER = constant(_LARGEST), constant(_LEAST)
_LEAST_UNIT, _LARGEST_UNIT, _CARRY = map(constant, (LEAST_UNIT, LARGEST_UNIT, _BELOW_127))


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
def decode_positive_block(codes, scales):
    """A block of positive codes (uint8) as fp32; `scales` (int16) broadcasts."""
    scale = scales.to(tl.uint32)
    return (((scale & 0xFFE0) << 16) + (codes.to(tl.uint32) << (scale & 31))).to(tl.float32, bitcast=True)


@jit
def encode_signed_block(x, noise):
    """fp32 numbers of shape (blocks, SPAN) as (codes of the same shape, exponents of shape (blocks,)), both uint8.

    `noise` is uint32, of the same shape or one number. Elements that do not exist must be 0.
    """
    bits = x.to(tl.uint32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1, keep_dims=True)
    exponent = tl.minimum((largest + _ALMOST) >> 23, 255)
    keep = tl.where((exponent >= _LEAST_SIGNED) & (exponent < 255), 0xFF, 0).to(tl.uint32)
    # The two factors make of the block's largest exponent 15: as fp32 patterns, smaller numbers are then subnormal
    # exactly where they are in 8 bits.
    usable = tl.minimum(tl.maximum(exponent, _LEAST_SIGNED), 254)
    scaled = tl.abs(x) * ((255 - usable) << 23).to(tl.float32, bitcast=True) * 2.0**-113
    scaled = scaled.to(tl.uint32, bitcast=True) + (noise >> (_NOISE_BITS - _DROPPED))
    code = (scaled >> _DROPPED) | ((bits >> 24) & 0x80)
    exponent = tl.where(exponent < _LEAST_SIGNED, 0, exponent)
    return (code & keep).to(tl.uint8), tl.reshape(exponent, (x.shape[0],)).to(tl.uint8)


@jit
def _range(upper, smallest):
    """The bases, the exponent bytes of 2^(7 + s - LEAST_STEP), whether all numbers are finite, and the scales of blocks
    of positive numbers. They follow from the largest patterns, rounded up to their upper 16 bits (int32), and the
    smallest ones, of which the upper 9 bits count; both have the shape (blocks, 1)."""
    base = tl.maximum(smallest & 0x7F800000, (((upper + 15) << 16) & 0x7F800000) - (31 << 23))
    base = tl.maximum(base, 1 << 23)
    reach = (upper - (base >> 16)).to(tl.float32).to(tl.int32, bitcast=True)  # negative in blocks of 0 alone
    power = tl.maximum((reach + 0xFFFF) >> 23, _SEVEN)
    finite = upper <= _LARGEST_UPPER
    scale = tl.where(upper < _LEAST_UPPER, 0, (base >> 16) + (power - (_SEVEN - _LEAST_STEP)))
    scale = tl.where(finite, scale, _NAN_RANGE)
    return base, power, finite, tl.reshape(scale, (upper.shape[0],)).to(tl.int16)


@jit
def encode_positive_block(x, noise, mask):
    """As `encode_signed_block`, as positive codes and scales (int16). `mask` says which elements exist."""
    bits = (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32)
    # The pattern of a NaN does not leave room in 32 bits with a sign.
    largest = tl.max(tl.where(mask, bits, 0), 1, keep_dims=True).to(tl.uint32)
    smallest = tl.min(tl.where(mask, bits, 0x7FFFFFFF), 1, keep_dims=True)
    base, power, finite, scale = _range(((largest + 0xFFFF) >> 16).to(tl.int32), smallest)
    steps = tl.maximum(bits - base, 0).to(tl.uint32) << (8 - (power - _SEVEN)).to(tl.uint32)
    code = (steps + noise) >> _NOISE_BITS
    return tl.where(finite, code, 0).to(tl.uint8), scale


@jit
def decode_linear_block(codes, power):
    """A block of linear codes (int8) as fp32; `power` is that of the exponents, and broadcasts."""
    return codes.to(tl.float32) * power


@jit
def _unit(largest):
    """The exponent bytes of blocks, and 2^24 / unit, or 0 where all are NaN; from the largest patterns (uint32)."""
    exponent = tl.maximum(((largest + _CARRY) >> 23).to(tl.int32) - 6, _LEAST_UNIT)
    usable = exponent <= _LARGEST_UNIT
    factor = tl.where(usable, (278 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    return tl.reshape(tl.where(usable, exponent, 255), (largest.shape[0],)).to(tl.uint8), factor


@jit
def _rounded_down(x):
    """The integer at or below a number. On NVIDIA GPUs, `tl.floor` takes subnormal numbers for 0."""
    if cuda_capability_geq(8, 0):
        return tl.inline_asm_elementwise("cvt.rmi.s32.f32 $0, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)
    else:
        return tl.floor(x).to(tl.int32)


@jit
def encode_linear_block(x, noise):
    """As `encode_signed_block`, as linear codes (int8) and exponents."""
    exponent, factor = _unit(tl.max(x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True))
    steps = _rounded_down(tl.where(factor > 0.0, x * factor, 0.0))
    return ((steps + noise.to(tl.int32)) >> _NOISE_BITS).to(tl.int8), exponent


# As the functions above, four codes in a register, on NVIDIA GPUs. `x` must be what arithmetic gave there: then no NaN
# has a sign, and no positive number either.


@jit
def absolute(x):
    """The compiler's own absolute value is a bit operation each, this one a part of the maximum."""
    return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit
def larger(a, b):
    """The larger number, or NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def widened_packed(x, factor):
    ASSEMBLY: tl.constexpr = ptx.widen_assembly(cuda_capability_geq(10, 0))
    return tl.inline_asm_elementwise(ASSEMBLY, constraints(2, 3), [x, factor], tl.float32, True, 2)


@jit
def decode_signed_packed(codes, power):
    ASSEMBLY: tl.constexpr = ptx.decode_signed_assembly(cuda_capability_geq(10, 0))
    return tl.inline_asm_elementwise(ASSEMBLY, constraints(4, 5), [codes, power], tl.float32, True, 4)


@jit
def decode_positive_packed(codes, scales):
    scale = scales.to(tl.int32)
    base, step = (scale & 0xFFE0) << 16, tl.full(scale.shape, 1, tl.int32) << (scale & 31)
    ASSEMBLY: tl.constexpr = ptx.decode_positive_assembly()
    return tl.inline_asm_elementwise(ASSEMBLY, constraints(4, 9), [codes, step, base], tl.float32, True, 4)


@jit
def _larger_halves(a, b):
    """The larger of two 16-bit numbers each."""
    if cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
    else:
        return tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000) | tl.maximum(a & 0xFFFF, b & 0xFFFF)


@jit
def _by_thread(x, EACH: tl.constexpr):
    """The elements that a thread holds side by side in a dimension of their own."""
    return tl.reshape(x, (x.shape[0], _SPAN // EACH, EACH))


@jit
def extremes_packed(m, v, exists, EACH: tl.constexpr, SHORT: tl.constexpr):
    """The largest patterns of blocks, rounded up to their upper 16 bits, of `v` above those of `m`, and the smallest of
    `v`, each of shape (blocks, 1). EACH elements lie side by side in a thread. If SHORT, `exists` says which threads
    have elements that exist, and elements of `m` that do not must be 0.
    """
    most_m = tl.reduce(_by_thread(absolute(m), EACH), 2, larger).to(tl.uint32, bitcast=True) + 0xFFFF
    most_v = tl.reduce(_by_thread(v, EACH), 2, larger).to(tl.uint32, bitcast=True) + 0xFFFF
    # Two to a register on their way between threads.
    both = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [most_m, most_v], tl.uint32, is_pure=True, pack=1
    )
    smallest = tl.min(_by_thread(v, EACH), 2).to(tl.int32, bitcast=True)
    if SHORT:
        both, smallest = tl.where(exists, both, 0), tl.where(exists, smallest, 0x7FFFFFFF)
    return tl.reduce(both, 1, _larger_halves, keep_dims=True), tl.min(smallest, 1, keep_dims=True)


@jit
def encode_signed_packed(x, largest, word, STOCHASTIC: tl.constexpr):
    """`largest` as `extremes_packed` gives it, `word` is moved down by 8 bits."""
    rounded = (largest << 16) + 0xF0000
    pattern = tl.minimum(rounded, 0x7FFFFFFF)  # of E above 23 other bits
    small = pattern < _LEAST_SIGNED << 23
    factor = tl.where(small | (rounded >= 255 << 23), 0, ~pattern & 0xFF800000)
    factor = factor.to(tl.float32, bitcast=True)  # -2^(128 - E)
    ASSEMBLY: tl.constexpr = ptx.encode_signed_assembly(STOCHASTIC, cuda_capability_geq(10, 0))
    inputs = (x, factor, word) if STOCHASTIC else (x, factor)
    codes = tl.inline_asm_elementwise(ASSEMBLY, constraints(1, 12 if STOCHASTIC else 8), inputs, tl.uint8, True, 4)
    exponent = tl.where(small, 0, pattern >> 23)
    return codes, tl.reshape(exponent, (x.shape[0],)).to(tl.uint8)


@jit
def encode_linear_packed(x, word, STOCHASTIC: tl.constexpr):
    """`word` as in `encode_signed_packed`. Elements that do not exist must be 0."""
    exponent, factor = _unit(tl.reduce(absolute(x), 1, larger, keep_dims=True).to(tl.uint32, bitcast=True))
    ASSEMBLY: tl.constexpr = ptx.encode_linear_assembly(STOCHASTIC)
    inputs = (x, factor, word) if STOCHASTIC else (x, factor)
    codes = tl.inline_asm_elementwise(ASSEMBLY, constraints(1, 12 if STOCHASTIC else 8), inputs, tl.int8, True, 4)
    return codes, exponent


@jit
def encode_positive_packed(x, largest, smallest, word, STOCHASTIC: tl.constexpr):
    """`largest`, `smallest` and `word` as in `encode_signed_packed`."""
    base, power, finite, scale = _range((largest >> 16).to(tl.int32), smallest)
    # Steps are moved up so that the code becomes the upper byte. Of the distance of a shift, five bits count.
    factor = tl.where(finite, (256 << _SEVEN % 32) >> (power & 31), 0)
    ASSEMBLY: tl.constexpr = ptx.encode_positive_assembly(STOCHASTIC)
    inputs = (x, -base, factor, word) if STOCHASTIC else (x, -base, factor)
    codes = tl.inline_asm_elementwise(ASSEMBLY, constraints(1, 16 if STOCHASTIC else 12), inputs, tl.uint8, True, 4)
    return codes, scale
