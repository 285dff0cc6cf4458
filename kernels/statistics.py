"""Count where the elements of many tensors fall in a number format. Reads each element once; all counts are exact.

    y = x * scale                         exact if `scale` is a power of two, otherwise one fp32 product
    |y| = (1 + fraction / 2^23) * 2^e     also for subnormal fp32 numbers, with e down to -149
    cell[e, class] += 1                   class 0: fraction = 0; 1: fraction > 0; 2: fraction >= overflow of the format

Zeros, infinities and NaNs have rows of their own. How rounding to a format with m mantissa bits and exponents from emin
to emax treats an element follows from its cell, because every threshold is the start of a cell:

    flushed      0 < |y| <= 2^(emin - m - 1)      a tie rounds to the even code, zero: class 0 of one row
    subnormal    above that, and |y| < 2^emin
    overflow     |y| from half a step above the largest number: class 2 of row emax, and all rows above

One table therefore holds the answer for every power of two as scale. Exponents beyond both ends of fp32, which only
occur through the scale, are counted in row -151 (flushed in every format) and in row 128 (overflow in every format).

With `errors`, a histogram of relative rounding errors is counted too, for elements that are not 0 and do not overflow:

    r = |y - round(y)| / |y|              a quotient of two numbers of at most 24 bits, rounded to fp32 once

It has one bin for r = 0, 8 bins per octave from 2^-24 to 1, whose upper end is at most 12.5% above the lower one, and
one bin for r = 1, the elements that are flushed. The largest r is kept exactly.

Bytes per element: reads it (2 or 4 B) and writes nothing; per tensor, 8 B for each of its 849 or 1044 counts. Counts
are int64 integers, so their sums do not depend on the order.

**How the Triton kernel counts.** A program is one warp and counts one chunk. Each lane sets one bit in a 64-bit word
per element, whose place is the element's cell in a window of 62 cells, about 21 exponents, and adds the words as 64
binary numbers side by side ("bit-sliced" counters): bit p of `sums[i]` is bit i of the count of place p. One addition
of three bits in all 64 places takes five logical operations, and adding n words about n of them. At the end of a chunk
the lanes add their counts. Place 63 counts zeros. The window lies around the largest exponent of a sample of 32
elements of the chunk; elements outside of it are found by two comparisons per block and counted one by one, or with
`tl.histogram` where there are many.

Errors are counted in the same way. Of the 192 bins between r = 0 and r = 1, bf16 elements can only fall into the 64
largest ones, fp16 elements into 88, because the error is at least one unit in the last place of the element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import MOST_THREADS, interpreting, jit, most_warps, on_device, resolve, tl, triton_dtype
from halfstep.kernels.loss_scale import inverse, inverse_block
from halfstep.kernels.multi_tensor import (
    ADDRESSES,
    DTYPE_CODES,
    TableCache,
    TensorTable,
    address,
    all_flattened,
    by_dtype,
    check_addresses,
    check_tensor_list,
    own_operations,
)
from halfstep.kernels.rounding import to_float32
from halfstep.kernels.threads import threads

CHUNK = 16384  # elements of one program; at most 65535, since the counts of a program are added in 16 bits
BLOCK = 1024  # elements that 32 lanes load and count at a time, half as many with errors

LOWEST, HIGHEST = -151, 128  # exponents of the first and the last row of numbers
CLASSES = 3
ZERO = HIGHEST - LOWEST + 1  # rows
INFINITE, NOT_A_NUMBER = ZERO + 1, ZERO + 2
ROWS = NOT_A_NUMBER + 1
CELLS = ROWS * CLASSES
PER_OCTAVE = 8
ERROR_BINS = 24 * PER_OCTAVE + 2  # r = 0, the octaves below 1, and r = 1


class Grid(NamedTuple):
    """The parameters of a format for counting. It must have a mantissa bit and lie within fp32's range.

    Attributes:
        dropped: the number of bits by which its mantissa is shorter than that of fp32, 0 to 22.
        emin, emax: the exponents of its smallest normal number and of its largest number.
        overflow: the fraction, in units of 2^-23, from which a number of exponent emax overflows; 2^23 if none does.
    """

    dropped: int
    emin: int
    emax: int
    overflow: int


def width(errors: bool) -> int:
    """The number of counts per tensor: cells; with `errors`, also the bins and the bits of the largest error."""
    return CELLS + ERROR_BINS + 1 if errors else CELLS


# --------------------------------------------------------------------------------------------------------- reference


def _reference_scale(scale: torch.Tensor | None, inverted: bool, device: torch.device) -> tuple[Any, Any]:
    """(factor, shift): a power of two is added to the exponents; any other scale is a factor in fp32."""
    if scale is None:
        return 1.0, 0
    bits = scale.view(torch.int32)
    power = (bits & 0x7FFFFF) == 0
    exponent = (bits >> 23) - 127
    factor = inverse(scale) if inverted else scale
    shift = torch.where(power, -exponent if inverted else exponent, 0)
    return torch.where(power, 1.0, factor), shift


def _reference_count(
    x: torch.Tensor, counts: torch.Tensor, grid: Grid, scale: torch.Tensor | None, inverted: bool
) -> None:
    """Add the elements of one flat fp32 tensor to its row of counts."""
    factor, shift = _reference_scale(scale, inverted, x.device)
    given = x.view(torch.int32) & 0x7FFFFFFF
    magnitude = (x * factor).view(torch.int32) & 0x7FFFFFFF
    small = magnitude < 0x800000  # subnormal: convert the integer number of units of 2^-149 to a normal number
    key = torch.where(small, magnitude.float().view(torch.int32), magnitude)
    exponent = (key >> 23) - torch.where(small, 127 + 149, 127) + shift
    fraction = key & 0x7FFFFF
    row = exponent.clamp(LOWEST, HIGHEST) - LOWEST
    cell = row * CLASSES + (fraction != 0).int() + (fraction >= grid.overflow).int()
    cell = torch.where(given >= 0x7F800000, INFINITE * CLASSES, cell)
    cell = torch.where(given > 0x7F800000, NOT_A_NUMBER * CLASSES, cell)
    cell = torch.where(given == 0, ZERO * CLASSES, cell)
    ones = torch.ones((), dtype=torch.int64, device=x.device).expand(x.numel())
    counts.scatter_add_(0, cell.long(), ones)
    if counts.numel() == CELLS:
        return
    significand = fraction | 0x800000
    # The number of bits that rounding drops. From 25 on, all numbers round to zero.
    cut = (grid.dropped + (grid.emin - exponent).clamp(min=0)).clamp(max=25)
    unit = torch.ones_like(cut) << cut
    rest = significand & (unit - 1)
    error = torch.minimum(rest, unit - rest)
    relative = (error.float() / significand.float()).view(torch.int32)
    counted = (cell < ZERO * CLASSES) & (
        (exponent < grid.emax) | ((exponent == grid.emax) & (fraction < grid.overflow))
    )
    place = torch.where(error == 0, 0, (relative >> 20) - ((127 - 24) << 3) + 1)
    counts[CELLS:].scatter_add_(0, torch.where(counted, place, 0).long(), counted.long())
    if x.numel():
        counts[-1].clamp_(min=torch.where(counted, relative, 0).amax().long())


# ----------------------------------------------------------------------------------------------------------- kernels

if tl is not None:
    _LOWEST, _HIGHEST, _CLASSES = tl.constexpr(LOWEST), tl.constexpr(HIGHEST), tl.constexpr(CLASSES)
    _ZERO, _INFINITE = tl.constexpr(ZERO * CLASSES), tl.constexpr(INFINITE * CLASSES)
    _NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER * CLASSES)
    _CELLS, _ERROR_BINS = tl.constexpr(CELLS), tl.constexpr(ERROR_BINS)
    _DATA_ROW, _COUNTS_ROW = tl.constexpr(ADDRESSES), tl.constexpr(ADDRESSES + 1)
    # The window has 21 exponents, of which 19 lie below the largest one of the sample. `_WINDOW` is its length in units
    # of fp32 bit patterns. Place 0 stays empty, place 63 is for zeros.
    _SPAN, _BELOW, _WINDOW = tl.constexpr(21), tl.constexpr(19), tl.constexpr((21 << 23) - 1)
    # Exponent fields of the window. Within them, the rounding error of an element and the number that rounds it (see
    # `_count_errors`) are normal numbers.
    _FIRST_FIELD, _LAST_FIELD = tl.constexpr(26), tl.constexpr(231)
    # Bit patterns of 2^-24, 2^-16 and 2^-8, where the bins of the three words of errors begin.
    _LEAST, _OCTAVE_16, _OCTAVE_8 = (tl.constexpr((127 - octave) << 23) for octave in (24, 16, 8))
    # Elements outside the window are counted in histograms of `_SLOTS` counts, `_PARTS` of which cover all cells.
    _SLOTS, _PARTS = tl.constexpr(256), tl.constexpr(-(-CELLS // 256))


@jit
def _add_16(sums, x, VECTOR: tl.constexpr):
    """Add 16 words per lane to `sums`; returns the sums, and a word whose bits are worth 16 and are still to be added.

    The words of a lane are `VECTOR` neighbours each, as the lane loads them, so that no word changes its lane.
    """
    LANES: tl.constexpr = x.shape[0] // 16
    # Four blocks of four neighbours per lane.
    first, last = tl.split(tl.trans(tl.reshape(x, (2, LANES * 8))))
    if VECTOR == 8:
        fours_1 = tl.split(tl.reshape(first, (LANES * 4, 2)))
        fours_2 = tl.split(tl.reshape(last, (LANES * 4, 2)))
    else:
        fours_1 = tl.split(tl.trans(tl.reshape(first, (2, LANES * 4))))
        fours_2 = tl.split(tl.trans(tl.reshape(last, (2, LANES * 4))))
    parts = (fours_1[0], fours_1[1], fours_2[0], fours_2[1])
    ones, twos, fours, eights = sums[0], sums[1], sums[2], sums[3]
    for part in tl.static_range(4):
        even, odd = tl.split(tl.reshape(parts[part], (LANES * 2, 2)))
        a, b = tl.split(tl.reshape(even, (LANES, 2)))
        c, d = tl.split(tl.reshape(odd, (LANES, 2)))
        # Each of these triples adds three bits of equal worth: the sum, and what is carried.
        mixed = ones ^ a
        two = (ones & a) | (mixed & b)
        ones = mixed ^ b
        mixed = ones ^ c
        other_two = (ones & c) | (mixed & d)
        ones = mixed ^ d
        mixed = twos ^ two
        four = (twos & two) | (mixed & other_two)
        twos = mixed ^ other_two
        if part % 2 == 0:
            kept_four = four
        else:
            mixed = fours ^ kept_four
            eight = (fours & kept_four) | (mixed & four)
            fours = mixed ^ four
            if part == 1:
                kept_eight = eight
            else:
                mixed = eights ^ kept_eight
                sixteen = (eights & kept_eight) | (mixed & eight)
                eights = mixed ^ eight
    return (ones, twos, fours, eights, sums[4], sums[5], sums[6], sums[7], sums[8], sums[9]), sixteen


@jit
def _add_carries(sums, a, b):
    """Add two words whose bits are worth 16 to `sums`."""
    mixed = sums[4] ^ a
    bit_4, carry = mixed ^ b, (sums[4] & a) | (mixed & b)
    bit_5, carry = sums[5] ^ carry, sums[5] & carry
    bit_6, carry = sums[6] ^ carry, sums[6] & carry
    bit_7, carry = sums[7] ^ carry, sums[7] & carry
    bit_8, carry = sums[8] ^ carry, sums[8] & carry
    return (sums[0], sums[1], sums[2], sums[3], bit_4, bit_5, bit_6, bit_7, bit_8, sums[9] ^ carry)


@jit
def _gather(sums, LANES: tl.constexpr):
    """(place, how often all lanes together counted it) for the 64 places, in an order that needs no exchanges."""
    MASK: tl.constexpr = 0x5555555555555555
    shift = tl.arange(0, 8).to(tl.int64)[:, None] * 2
    even = tl.zeros((8, LANES), tl.int64)  # each number holds four counts of 16 bits: places 2k, 2k + 16, + 32, + 48
    odd = tl.zeros((8, LANES), tl.int64)
    for pair in tl.static_range(5):
        # Two bits of each count at a time, from the highest ones: of the even places, then of the odd ones.
        low, high = sums[8 - 2 * pair], sums[9 - 2 * pair]
        two = (low & MASK) | ((high & MASK) << 1)
        even = (even << 2) | ((two[None, :] >> shift) & 0x0003000300030003)
        two = ((low >> 1) & MASK) | (high & ~MASK)
        odd = (odd << 2) | ((two[None, :] >> shift) & 0x0003000300030003)
    low = tl.join(tl.sum(even.to(tl.int32), axis=1), tl.sum(odd.to(tl.int32), axis=1))
    high = tl.join(tl.sum((even >> 32).to(tl.int32), axis=1), tl.sum((odd >> 32).to(tl.int32), axis=1))
    both = tl.join(low, high)
    found = tl.reshape(tl.join(both & 0xFFFF, both >> 16), (64,))
    at = tl.arange(0, 64)  # its digits, from the highest on: k, odd, the upper half, the upper count of the half
    return ((at >> 3) << 1) + ((at >> 2) & 1) + ((at & 2) << 4) + ((at & 1) << 4), found


@jit
def _count_cells(cells, given, base, above, VECTOR: tl.constexpr):
    """Count 16 elements per lane in the window. Returns as `_add_16` does.

    `given` is the magnitude's bit pattern, and `above` is 2^24 + 1 - overflow. The place of an element is
    3 * (exponent in the window) + class, as a sum of three numbers that change at the starts of the three classes.
    """
    within = tl.minimum((given - base).to(tl.uint32, bitcast=True), _WINDOW).to(tl.int32, bitcast=True)
    place = (within >> 23) + ((within + 1) >> 23) + ((within + above) >> 23)
    return _add_16(cells, tl.full(place.shape, 1, tl.int64) << place.to(tl.int64), VECTOR)


@jit
def _count_errors(
    errors_0,  # sums of elements by the last 6 bits of their bin, from an error of 2^-24 on
    errors_1,  # the same, from 2^-16 on
    errors_2,  # the same, from 2^-8 on
    given,  # bit patterns of the magnitudes, 16 per lane
    base,
    limit,  # elements whose distance from `base` is below it have an error: inside the window and no overflow
    least,  # bit pattern of the power of two where the window begins
    normal,  # exponent field, in place, of the smallest number that the format holds as a normal one
    dropped,  # in the place of an exponent field
    WORDS: tl.constexpr,  # how many of the three sums are counted
    VECTOR: tl.constexpr,
):
    """Count the relative rounding errors of 16 elements per lane: the three sums, and the bits of the largest error."""
    size = tl.maximum(given, least).to(tl.float32, bitcast=True)
    # The last bit of this power of two is one step of the format, so adding and subtracting it rounds to that step.
    rounder = (tl.maximum(given & 0x7F800000, normal) + dropped).to(tl.float32, bitcast=True)
    error = tl.abs(size - ((size + rounder) - rounder))
    # GPUs divide 0 by a slower path. This replaces it by a number whose relative error is below 2^-24.
    error = tl.maximum(error, (least - (25 << 23)).to(tl.float32, bitcast=True))
    relative = tl.div_rn(error, size).to(tl.int32, bitcast=True)
    relative = tl.where((given - base).to(tl.uint32, bitcast=True) < limit.to(tl.uint32), relative, 0)
    bit = tl.full(given.shape, 1, tl.int64) << ((relative >> 20) & 63).to(tl.int64)
    zero = tl.zeros_like(errors_2[0])
    errors_2, carry = _add_16(errors_2, tl.where(relative >= _OCTAVE_8, bit, 0), VECTOR)
    errors_2 = _add_carries(errors_2, carry, zero)
    if WORDS > 1:
        errors_1, carry = _add_16(errors_1, tl.where(relative >= _OCTAVE_16, bit, 0), VECTOR)
        errors_1 = _add_carries(errors_1, carry, zero)
    if WORDS > 2:
        errors_0, carry = _add_16(errors_0, tl.where(relative >= _LEAST, bit, 0), VECTOR)
        errors_0 = _add_carries(errors_0, carry, zero)
    return errors_0, errors_1, errors_2, tl.max(relative, axis=0)


@jit
def _classify(x, factor, shift, dropped, emin, emax, overflow, ERRORS: tl.constexpr):
    """(cell, bin of the error, bits of the error) of any elements; the last two are only valid with ERRORS."""
    given = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = (x * factor).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    small = magnitude < 0x800000
    key = tl.where(small, magnitude.to(tl.float32).to(tl.int32, bitcast=True), magnitude)
    exponent = (key >> 23) - tl.where(small, 276, 127) + shift
    fraction = key & 0x7FFFFF
    row = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST) - _LOWEST
    cell = row * _CLASSES + (fraction != 0).to(tl.int32) + (fraction >= overflow).to(tl.int32)
    cell = tl.where(given >= 0x7F800000, _INFINITE, cell)
    cell = tl.where(given > 0x7F800000, _NOT_A_NUMBER, cell)
    cell = tl.where(given == 0, _ZERO, cell)
    if ERRORS:
        significand = fraction | 0x800000
        cut = tl.minimum(dropped + tl.maximum(emin - exponent, 0), 25)
        unit = tl.full(cut.shape, 1, tl.int32) << cut
        rest = significand & (unit - 1)
        error = tl.minimum(rest, unit - rest)
        relative = tl.div_rn(error.to(tl.float32), significand.to(tl.float32)).to(tl.int32, bitcast=True)
        counted = (cell < _ZERO) & ((exponent < emax) | ((exponent == emax) & (fraction < overflow)))
        place = tl.where(error == 0, 0, (relative >> 20) - 823)  # (127 - 24) * 8 - 1
        return cell, tl.where(counted, place, _ERROR_BINS), tl.where(counted, relative, 0)
    else:
        return cell, cell, cell


@jit
def _add_up(counts, place, wanted, PARTS: tl.constexpr, FEW: tl.constexpr):
    """Add 1 to ``counts[place]`` for each element of a block that is `wanted`. Returns their number.

    Up to `FEW` elements are added one by one. More of them could all be for one address, which is slow.
    """
    number = tl.sum(wanted.to(tl.int32), axis=0)
    if number <= FEW:
        tl.atomic_add(counts + place, tl.full(place.shape, 1, tl.int64), mask=wanted)
    else:
        slot = tl.arange(0, _SLOTS)
        for part in range(PARTS):
            here = wanted & (place // _SLOTS == part)
            others = place.shape[0] - tl.sum(here.to(tl.int32), axis=0)
            if others < place.shape[0]:
                found = tl.histogram(tl.where(here, place % _SLOTS, 0), _SLOTS)
                found = tl.where(slot == 0, found - others, found)
                tl.atomic_add(counts + part * _SLOTS + slot, found.to(tl.int64), mask=found != 0)
    return number


@jit
def _count_apart(x, apart, row, factor, shift, dropped, emin, emax, overflow, ERRORS: tl.constexpr, FEW: tl.constexpr):
    """Count those elements of a block that `apart` marks: (their number, bits of the largest error)."""
    cell, place, relative = _classify(x, factor, shift, dropped, emin, emax, overflow, ERRORS)
    number = _add_up(row, cell, apart, _PARTS, FEW)
    if ERRORS:
        _add_up(row + _CELLS, place, apart & (place < _ERROR_BINS), 1, FEW)
    return number, tl.max(tl.where(apart, relative, 0), axis=0)


@jit
def _magnitudes(x, factor, POWER: tl.constexpr):
    """The bit patterns of |x * factor|, of which only those of zeros are zero. POWER: the factor is 1."""
    given = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not POWER:
        given = tl.maximum(tl.abs(x * factor).to(tl.int32, bitcast=True), tl.minimum(given, 1))
    return given


@jit
def _count_outside(
    data,  # address of the first element; not known to be aligned, since loads here need not be wide
    begin,  # first element to look at
    end,
    base,  # where the window begins
    row,  # and what follows: see `_count_apart`
    factor,
    shift,
    dropped,
    emin,
    emax,
    overflow,
    POWER: tl.constexpr,  # whether the factor is 1
    ERRORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load elements again and count those outside the window: (their number, bits of the largest error).

    In small blocks, which need few registers.
    """
    at = tl.arange(0, BLOCK)
    number = tl.full((), 0, tl.int32)
    biggest = tl.full((), 0, tl.int32)
    for first in range(begin, end, BLOCK):
        x = to_float32(tl.load(data + first + at, mask=first + at < end, other=0.0))
        distance = _magnitudes(x, factor, POWER) - base
        outside = (x.to(tl.int32, bitcast=True) << 1 != 0) & (distance.to(tl.uint32, bitcast=True) >= _WINDOW)
        found, largest = _count_apart(x, outside, row, factor, shift, dropped, emin, emax, overflow, ERRORS, FEW=4)
        number += found
        biggest = tl.maximum(biggest, largest)
    return number, biggest


@jit
def _count_block(
    cells,  # what is known so far: see `count_kernel`
    errors_0,
    errors_1,
    errors_2,
    biggest,
    apart,
    data,  # the first element of those loaded by vectors
    begin,  # of the block, from there
    bulk,  # their number
    base,  # and what follows: see `_count_errors`
    limit,
    lowest,
    normal,
    unaligned,  # `data`, of which nothing else is known, and what follows: see `_count_outside`
    row,
    factor,
    shift,
    dropped,
    emin,
    emax,
    overflow,
    POWER: tl.constexpr,
    ERRORS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    VECTOR: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Count a block of elements."""
    LANES: tl.constexpr = BLOCK // (16 if ERRORS else 32)
    at = begin + tl.arange(0, BLOCK)
    # A masked load sets its registers to zero before.
    if begin + BLOCK <= bulk:
        x = tl.load(data + at)
    else:
        x = tl.load(data + at, mask=at < bulk, other=0.0)
    given = _magnitudes(to_float32(x), factor, POWER)
    above = (2 << 23) + 1 - overflow
    zero = tl.zeros((LANES,), tl.int64)
    if ERRORS:
        cells, carry = _count_cells(cells, given, base, above, VECTOR)
        cells = _add_carries(cells, carry, zero)
        errors_0, errors_1, errors_2, largest = _count_errors(
            errors_0, errors_1, errors_2, given, base, limit, lowest << 23, normal, dropped << 23, WORDS, VECTOR
        )
        biggest = tl.maximum(biggest, largest)
    else:
        front, back = tl.split(tl.trans(tl.reshape(given, (2, BLOCK // 2))))
        cells, carry = _count_cells(cells, front, base, above, VECTOR)
        cells, other = _count_cells(cells, back, base, above, VECTOR)
        cells = _add_carries(cells, carry, other)
    pattern = given.to(tl.uint32, bitcast=True)
    outside = tl.max(pattern, axis=0) >= (base + _WINDOW).to(tl.uint32, bitcast=True)
    if tl.min(pattern, axis=0) < base.to(tl.uint32, bitcast=True):  # a zero, or a number below the window
        outside |= tl.min(pattern - 1, axis=0) < (base - 1).to(tl.uint32, bitcast=True)
    if outside:
        end = tl.minimum(begin + BLOCK, bulk)
        number, largest = _count_outside(
            unaligned, begin, end, base, row, factor, shift, dropped, emin, emax, overflow, POWER, ERRORS, SMALL
        )
        apart += number
        biggest = tl.maximum(biggest, largest)
    return cells, errors_0, errors_1, errors_2, biggest, apart


@functools.partial(jit, do_not_specialize=["tensors", "dropped", "emin", "emax", "overflow"])
def count_kernel(
    rows,  # int64 (4, tensors): see multi_tensor.py; operands are the address and the tensor's row in `counts`
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    scale,  # fp32 scalar
    counts,  # int64 (..., width)
    dropped,  # and what follows: see `Grid`
    emin,
    emax,
    overflow,
    DTYPE: tl.constexpr,
    INVERTED: tl.constexpr,  # whether to divide by the scale
    ERRORS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,  # of a warp, which is a program; at least CHUNK / 1023, for counts of 10 bits per lane
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = (chunk - tl.load(rows + tensors + tensor)) * CHUNK
    left = tl.minimum(tl.load(rows + tensor) - start, CHUNK).to(tl.int32)
    address = tl.load(rows + _DATA_ROW * tensors + tensor)
    WIDTH: tl.constexpr = _CELLS + _ERROR_BINS + 1 if ERRORS else _CELLS
    row = counts + tl.load(rows + _COUNTS_ROW * tensors + tensor) * WIDTH
    BYTES: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    # With errors, 32 elements per lane at a time would need more registers than there are.
    BLOCK: tl.constexpr = LANES * (16 if ERRORS else 32)
    SMALL: tl.constexpr = 128 if LANES <= 64 else LANES
    # An error of an fp16 number is at least 2^-11 of it, of a bf16 number 2^-8.
    WORDS: tl.constexpr = 3 if DTYPE == tl.float32 else 2 if DTYPE == tl.float16 else 1

    factor = tl.load(scale)
    bits = factor.to(tl.int32, bitcast=True)
    power = (bits & 0x7FFFFF) == 0
    shift = 0
    if power:
        shift = (bits >> 23) - 127
        factor = 1.0
    if INVERTED:
        shift = -shift
        factor = inverse_block(factor)

    # The window: exponent fields from `lowest` on, without the power of two itself.
    lane = tl.arange(0, LANES)
    first = address.to(tl.pointer_type(DTYPE)) + start
    step = tl.maximum(left // LANES, 1)
    sample = to_float32(tl.load(first + lane * step, mask=lane * step < left, other=0.0)) * factor
    sample = (sample.to(tl.int32, bitcast=True) >> 23) & 0xFF
    top = tl.max(tl.where(sample == 0xFF, 0, sample), axis=0)
    lowest = tl.minimum(tl.maximum(top - _BELOW, _FIRST_FIELD), _LAST_FIELD + 1 - _SPAN)
    # Adding 0 keeps it out of the uniform registers, which the machine instruction of a sum and a minimum cannot read.
    base = (lowest << 23) + 1 + (tensor >> 31)
    normal = emin + 127 - shift
    if ERRORS and (dropped == 0) | (normal + dropped > 254):
        base = -0x80000000  # all elements but zeros lie outside, because `_count_errors` cannot find their errors
    normal = tl.maximum(normal, 0) << 23
    largest_field = emax + 127 - shift
    limit = tl.where(largest_field > 254, 0x7F800000, (tl.maximum(largest_field, 0) << 23) + overflow)
    limit = tl.minimum(tl.maximum(limit - base, 0), _WINDOW)

    # Whole lines of 16 bytes are loaded by vectors; what lies before and after them is counted apart.
    head = tl.minimum((-(address + start * BYTES) & 15).to(tl.int32) // BYTES, left)
    bulk = (left - head) // VECTOR * VECTOR
    # The hint must come after the cast, or the compiler loses it.
    data = tl.multiple_of((address + (start + head) * BYTES).to(tl.pointer_type(DTYPE)), 16)
    zero = tl.zeros((LANES,), tl.int64)
    cells = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    errors_0, errors_1, errors_2 = cells, cells, cells
    biggest = tl.full((), 0, tl.int32)
    apart = tl.full((), 0, tl.int32)
    # One loop runs. The other is for products, which need more operations and have smaller errors.
    for begin in range(0, bulk if power else 0, BLOCK):
        cells, errors_0, errors_1, errors_2, biggest, apart = _count_block(
            cells, errors_0, errors_1, errors_2, biggest, apart, data, begin, bulk, base, limit, lowest, normal,
            first + head, row, factor, shift, dropped, emin, emax, overflow, True, ERRORS, BLOCK, SMALL, VECTOR, WORDS,
        )  # fmt: skip
    for begin in range(0, 0 if power else bulk, BLOCK):
        cells, errors_0, errors_1, errors_2, biggest, apart = _count_block(
            cells, errors_0, errors_1, errors_2, biggest, apart, data, begin, bulk, base, limit, lowest, normal,
            first + head, row, factor, shift, dropped, emin, emax, overflow, False, ERRORS, BLOCK, SMALL, VECTOR, 3,
        )  # fmt: skip
    if bulk < left:
        there = lane < left - bulk
        x = to_float32(tl.load(first + tl.where(lane < head, lane, lane + bulk), mask=there, other=0.0))
        number, largest = _count_apart(x, there, row, factor, shift, dropped, emin, emax, overflow, ERRORS, FEW=16)
        biggest = tl.maximum(biggest, largest)

    place, found = _gather(cells, LANES)
    third = place * 43  # 128 times a third of it, and a little more: for places below 64, quotient and remainder follow
    exponent = lowest + (third >> 7) - 127 + shift
    kind = ((third & 127) * _CLASSES) >> 7
    cell = (tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST) - _LOWEST) * _CLASSES + kind
    # Besides the zeros, place 63 counts the lanes beyond the end, and the elements that were counted apart.
    idle = (bulk + BLOCK - 1) // BLOCK * BLOCK - bulk
    number = tl.where(place == 63, found - idle - apart, found)
    tl.atomic_add(row + tl.where(place == 63, _ZERO, cell), number.to(tl.int64), mask=number != 0)
    if ERRORS:
        # The first and the last bin follow from the cells: r = 1 if and only if the element is flushed.
        tie = emin - 24 + dropped
        number = tl.where(place == 63, 0, found)
        flushed = tl.sum(tl.where((exponent < tie) | ((exponent == tie) & (kind == 0)), number, 0), axis=0)
        exact = tl.sum(tl.where((exponent < emax) | ((exponent == emax) & (kind < 2)), number, 0), axis=0) - flushed
        row += _CELLS + 1
        # Each sum includes those from a larger error on, and r = 1, which has the same last bits as 2^-8.
        place, found = _gather(errors_2, LANES)
        place = (place + 8) & 63
        found -= tl.where(place == 0, flushed, 0)
        exact -= tl.sum(found, axis=0)
        more = tl.zeros_like(found)
        if (WORDS > 1) | (not power):
            _, more = _gather(errors_1, LANES)
            more -= tl.where(place == 0, flushed, 0) + found
            tl.atomic_add(row + 64 + place, more.to(tl.int64), mask=more != 0)
            exact -= tl.sum(more, axis=0)
        if (WORDS > 2) | (not power):
            _, most = _gather(errors_0, LANES)
            most -= tl.where(place == 0, flushed, 0) + found + more
            tl.atomic_add(row + place, most.to(tl.int64), mask=most != 0)
            exact -= tl.sum(most, axis=0)
        tl.atomic_add(row + 128 + place, found.to(tl.int64), mask=found != 0)
        tl.atomic_add(row - 1, exact.to(tl.int64))
        tl.atomic_add(row + 192, flushed.to(tl.int64))
        tl.atomic_max(row + 193, tl.where(biggest < _LEAST, 0, biggest).to(tl.int64))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables: dict[torch.dtype, TableCache] = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in DTYPE_CODES}


def _lanes(device: torch.device) -> int:
    """Lanes of a program: those of a warp. Triton's interpreter is faster with a few operations on large blocks."""
    return CHUNK // 32 if interpreting() else MOST_THREADS // most_warps(device)


def _launch(
    implementation: str,
    table: TensorTable,
    dtype: torch.dtype,
    counts: torch.Tensor,
    grid: Grid,
    scale: torch.Tensor | None,
    inverted: bool,
) -> None:
    """Count the tensors of one dtype."""
    errors = counts.shape[1] > CELLS
    if implementation == "triton":
        check_addresses(scale, counts)
        given = torch.ones((), dtype=torch.float32, device=counts.device) if scale is None else scale
        count_kernel[(table.chunks,)](
            table.rows,
            table.chunk_tensor,
            table.tensors,
            given,
            counts,
            *grid,
            DTYPE=triton_dtype(dtype),
            INVERTED=inverted,
            ERRORS=errors,
            CHUNK=CHUNK,
            LANES=_lanes(counts.device),
            num_warps=1,
            enable_fp_fusion=False,
        )
        return
    native.functions("statistics").halfstep_count(
        *table.places,
        table.tensors,
        table.chunks,
        None if scale is None else address(scale),
        inverted,
        *grid,
        errors,
        DTYPE_CODES[dtype],
        address(counts),
        counts.shape[1],
        threads(),
    )


# ------------------------------------------------------------------------------------------------------------- public


def _check(tensors: list[torch.Tensor], counts: torch.Tensor, rows: Sequence[int], scale: torch.Tensor | None) -> None:
    device = tensors[0].device
    if counts.dtype != torch.int64 or counts.dim() != 2 or not counts.is_contiguous() or counts.device != device:
        raise ValueError(
            f"Expected counts to be contiguous (tensors, width(errors)) int64 on {device}, "
            f"but got {tuple(counts.shape)} {counts.dtype} on {counts.device}"
        )
    if counts.shape[1] not in (CELLS, width(True)):
        raise ValueError(
            f"Expected counts to have {CELLS} or {width(True)} columns, width(errors), but got {counts.shape[1]}"
        )
    if len(rows) != len(tensors) or len(set(rows)) != len(rows) or not 0 <= min(rows) <= max(rows) < counts.shape[0]:
        raise ValueError(
            f"Expected rows to be one distinct row of counts per tensor, {len(tensors)} from 0 to "
            f"{counts.shape[0] - 1}, but got {list(rows)}"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device):
        raise ValueError(
            f"Expected scale to be one fp32 number on {device}, "
            f"but got {tuple(scale.shape)} {scale.dtype} on {scale.device}"
        )


@torch.no_grad()
def foreach_count_(
    tensors: Sequence[torch.Tensor],
    counts: torch.Tensor,
    grid: Grid,
    *,
    scale: torch.Tensor | None = None,
    inverted: bool = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Add to `counts` where the elements of a list of tensors fall: one launch per dtype, nothing waits.

    Args:
        tensors: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        counts: int64 (rows, `width(errors)`), contiguous, on the tensors' device; zero before the first call. The
            number of columns says whether errors are counted.
        grid: the format.
        scale: a one-element fp32 tensor on the device; what is counted is ``tensor * scale``. Must be finite and above
            0, and if a power of two a normal number.
        inverted: count ``tensor / scale`` instead.
        rows: the row of each tensor; None: in order.

    Returns:
        `counts`.

    Raises:
        TypeError: an element of `tensors` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, or `counts`, `rows` or `scale` does not fit.
    """
    listed, in_memory = check_tensor_list(tensors, "tensors")
    if not listed:
        return counts
    places = range(len(listed)) if rows is None else rows
    _check(listed, counts, places, scale)
    flat, device = all_flattened(listed), listed[0].device
    implementation = resolve(device, "statistics") if in_memory else "reference"
    with on_device(device) if in_memory else own_operations(listed):
        for dtype, indices in by_dtype(flat).items():
            group, where = [flat[index] for index in indices], [places[index] for index in indices]
            if implementation == "reference":
                number = None if scale is None else scale.detach().reshape(())
                for tensor, place in zip(group, where, strict=True):
                    _reference_count(tensor.reshape(-1).float(), counts[place], grid, number, inverted)
                continue
            table = _tables[dtype].table(group, numbers=[where])
            if table.chunks:
                _launch(implementation, table, dtype, counts, grid, scale, inverted)
    torch.autograd.graph.increment_version([counts])
    return counts
