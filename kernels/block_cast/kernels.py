"""Triton's kernels of casts to formats of blocks: the bits of rule.py.

A program takes `Form.SCALES` consecutive scales, and the elements of their blocks as a tile, in which blocks are rows
if they lie along the last dimension, columns if along another one, and the whole tile if they are square. Of a tensor,
a kernel knows the address, and four numbers: the dimensions of its elements are, in order, any number, `first`,
`middle`, `second` and `inner`, of which `second` is blocked, and in square blocks `first`; otherwise that is 1, as
`middle`. Two codes that share a byte are neighbors in a row, or rows that are loaded as two tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from halfstep.kernels.backend import constant, constexpr_function, cuda_capability_geq, jit, tl
from halfstep.kernels.block_cast.rule import LEAST_GLOBAL
from halfstep.kernels.block_codes import absolute, larger
from halfstep.kernels.block_instructions import constraints
from halfstep.kernels.cast_instructions import element_assembly
from halfstep.kernels.multi_tensor import ADDRESSES, locate
from halfstep.kernels.philox import plain, words_of, words_of_groups
from halfstep.kernels.rounding import NEAREST, STOCHASTIC, form_of, to_float32

ROWS, COLUMNS, SQUARE = 1, 0, 2  # what blocks are in a tile; the first two are the axes along which their elements lie
TABLE_ROWS = ("scales", "source", "codes", "numel", "first", "middle", "second", "inner", "stream", "offset")


class Form(NamedTuple):
    """What a kernel is compiled for."""

    SOURCE: str
    ELEMENT: str
    SIZE: int  # elements of a block in each of its dimensions
    BLOCKS: int  # ROWS, COLUMNS or SQUARE
    PAIRS: int  # the axis of the tile along which two codes share a byte, or -1
    SCALES: int  # of a program
    FRACTION: bool  # whether scales are E4M3, times a global scale
    GIVEN: bool  # whether the global scale is given, and not to be computed from the largest magnitude
    CARRY: int  # as `rule.carry_and_emax` gives them
    EMAX: int
    ROUNDING: int
    SATURATE: bool


_ROWS, _COLUMNS, _SQUARE = map(constant, (ROWS, COLUMNS, SQUARE))
_NEAREST, _STOCHASTIC = constant(NEAREST), constant(STOCHASTIC)
_LEAST_GLOBAL = constant(LEAST_GLOBAL)
_OPERAND = {name: constant(ADDRESSES + row) for row, name in enumerate(TABLE_ROWS)}
_SCALES, _SOURCE, _CODES, _NUMEL, _FIRST, _MIDDLE, _SECOND, _INNER, _STREAM, _OFFSET = _OPERAND.values()


@constexpr_function
def _type(name: str) -> Any:
    return tl.pointer_type(tl.dtype(name))


# ----------------------------------------------------------------------------------------------------------- arithmetic


@jit
def _magnitudes(x):
    """What `_largest` takes: numbers on NVIDIA GPUs, patterns elsewhere."""
    if cuda_capability_geq(8, 0):
        return absolute(x)
    else:
        return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@jit
def _largest(x, BLOCKS: tl.constexpr):
    """The largest patterns of blocks of magnitudes."""
    AXIS: tl.constexpr = 1 if BLOCKS == _SQUARE else BLOCKS
    if cuda_capability_geq(8, 0):
        most = tl.reduce(x, AXIS, larger, keep_dims=True)
        if BLOCKS == _SQUARE:
            most = tl.reduce(most, 0, larger, keep_dims=True)
        return most.to(tl.uint32, bitcast=True)
    else:
        most = tl.max(x, AXIS, keep_dims=True)
        return tl.max(most, 0, keep_dims=True) if BLOCKS == _SQUARE else most


@jit
def _rounded(x, ELEMENT: tl.constexpr):
    """Positive finite fp32 numbers rounded to nearest even: codes (int32) and their values, as if no code was the last.

    The unit in the last place of a sum with a power of two is that of the format, so that the sum is rounded as it
    should be, and its pattern counts units.
    """
    FORM: tl.constexpr = form_of(ELEMENT)
    LEAST: tl.constexpr = (128 - FORM.bias) << 23  # the pattern of the smallest normal number
    DROPPED: tl.constexpr = 23 - FORM.mantissa
    binade = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    power = binade + (DROPPED << 23)
    total = x + power.to(tl.float32, bitcast=True)
    code = (total.to(tl.int32, bitcast=True) - power) + ((binade - LEAST) >> DROPPED)
    return code, total - power.to(tl.float32, bitcast=True)


@jit
def _power_scales(largest, FORM: tl.constexpr):
    """Codes of E8M0, and the numbers by which their elements are multiplied."""
    code = tl.maximum(((largest + FORM.CARRY) >> 23).to(tl.int32) - FORM.EMAX, 0)
    code = tl.where(largest >= 0x7F800000, 255, code)
    if FORM.SATURATE:
        code = tl.where(largest == 0x7F800000, 254, code)
    factor = tl.maximum((254 - code) << 23, 1 << 22)  # 2^-127 is subnormal
    return code, factor.to(tl.float32, bitcast=True)


@jit
def _fraction_scales(largest, g, FORM: tl.constexpr):
    """Codes of E4M3, and the numbers by which their elements are multiplied: 0 where the scale is."""
    quotient = tl.div_rn(tl.div_rn(largest.to(tl.float32, bitcast=True), form_of(FORM.ELEMENT).most), g)
    code, scale = _rounded(tl.minimum(quotient, 512.0), "e4m3fn")
    code = tl.where((code > 0x7E) | (largest >= 0x7F800000), 0x7E if FORM.SATURATE else 0x7F, code)
    code = tl.where(largest > 0x7F800000, 0x7F, code)
    scale = tl.minimum(scale, 448.0)
    return code, tl.where(code > 0, tl.div_rn(tl.div_rn(tl.full((), 1.0, tl.float32), g), scale), 0.0)


@jit
def _codes(x, y, words, more, keep, FORM: tl.constexpr):
    """Bytes of codes of elements over their scales, `y` and `more` of those in the upper halves; 0 where `keep` is."""
    RANDOM: tl.constexpr = FORM.ROUNDING == _STOCHASTIC
    FOURS: tl.constexpr = (1 if FORM.PAIRS < 0 else 2) * (2 if RANDOM else 1) + 1
    FP8: tl.constexpr = form_of(FORM.ELEMENT).bits == 8
    if (RANDOM and cuda_capability_geq(8, 0)) or (
        FORM.ROUNDING == _NEAREST and (cuda_capability_geq(8, 9) or (not FP8 and cuda_capability_geq(8, 0)))
    ):
        ASM: tl.constexpr = element_assembly(FORM.ELEMENT, RANDOM, cuda_capability_geq(10, 0))
        INPUTS: tl.constexpr = constraints(1, 4 * FOURS)
        numbers = (x, keep) if FORM.PAIRS < 0 else (x, y, keep)
        if RANDOM:
            numbers += (words,) if FORM.PAIRS < 0 else (words, more)
        return tl.inline_asm_elementwise(ASM, INPUTS, numbers, tl.uint8, is_pure=True, pack=4)
    else:
        code = _code(x, words, FORM)
        if FORM.PAIRS >= 0:
            code |= _code(y, more, FORM) << 4
        return (code & keep).to(tl.uint8)


@jit
def _code(x, word, FORM: tl.constexpr):
    ROW: tl.constexpr = form_of(FORM.ELEMENT)
    DROPPED: tl.constexpr = 23 - ROW.mantissa
    size = tl.minimum(tl.abs(x), form_of(FORM.ELEMENT).most)
    if FORM.ROUNDING == _STOCHASTIC:  # as rounding.py does
        code = (size * 2.0 ** (ROW.bias - 127)).to(tl.uint32, bitcast=True)
        code = (code + (word >> (32 - DROPPED))) >> DROPPED
    else:
        code, value = _rounded(size, FORM.ELEMENT)
        if FORM.ROUNDING != _NEAREST:  # toward zero
            code -= (value > size).to(tl.int32)
        code = code.to(tl.uint32, bitcast=True)
    return code | ((x.to(tl.uint32, bitcast=True) >> (32 - ROW.bits)) & (1 << (ROW.bits - 1)))


# ----------------------------------------------------------------------------------------------------------------- tile


class Tile(NamedTuple):
    """Where the elements of a tile lie, and their codes: the sums of `origin`, and of those of a row and a column."""

    origin: Any
    rows: Any
    columns: Any
    exist: Any
    second: Any  # if codes of two rows share a byte, how far the second ones lie from the first ones, which `rows` has
    code_origin: Any
    code_rows: Any
    code_columns: Any
    code_exist: Any


@jit
def _tile(start, left, shape, FORM: tl.constexpr, SCALES: tl.constexpr, WIDE: tl.constexpr):
    """The tile of scales from `start` on, of which `left` exist. If WIDE, vectors of elements lie side by side."""
    first, middle, second, inner = shape
    SIZE: tl.constexpr = FORM.SIZE
    HALF: tl.constexpr = 2 if FORM.PAIRS == 0 else 1
    SHARED: tl.constexpr = 2 if FORM.PAIRS == 1 else 1
    across, few = tl.cdiv(second, SIZE).to(tl.int32), inner.to(tl.int32)  # fewer than 2^31, as all scales are
    if FORM.BLOCKS == _ROWS:
        rows, columns = tl.arange(0, SCALES)[:, None], tl.arange(0, SIZE)[None, :]
        shared = tl.arange(0, SIZE // SHARED)[None, :]
        if WIDE:
            origin, at, exist = start.to(tl.int64) * SIZE, rows * SIZE, rows < left
            code_exist = exist
        else:
            block, origin = ((start + rows) % across).to(tl.int64), start.to(tl.int64) * 0
            at = ((start + rows) // across).to(tl.int64) * second + block * SIZE
            some = tl.where(rows < left, second - block * SIZE, 0)
            exist, code_exist = columns < some, shared * SHARED < some
        return Tile(origin, at, columns, exist, 0, origin // SHARED, at // SHARED, shared, code_exist)
    elif FORM.BLOCKS == _COLUMNS:
        rows, columns = tl.arange(0, SIZE // HALF)[:, None], tl.arange(0, SCALES)[None, :]
        if WIDE:
            line, inside, inner = start // few, start % few // 16 * 16, inner // 16 * 16
            line_at = ((line // across).to(tl.int64) * second + line % across * SIZE) * inner
            exist = rows * HALF < second - (line % across).to(tl.int64) * SIZE
            origin, code_origin, at, code_at = line_at + inside, line_at // HALF + inside, columns, columns
        else:
            line, inside = (start + columns) // few, (start + columns) % few
            line_at = ((line // across).to(tl.int64) * second + line % across * SIZE) * inner
            exist = rows * HALF < tl.where(columns < left, second - (line % across).to(tl.int64) * SIZE, 0)
            origin = start.to(tl.int64) * 0
            code_origin, at, code_at = origin, line_at + inside, line_at // HALF + inside
        step = rows.to(tl.int64) * inner
        return Tile(origin, HALF * step, at, exist, inner, code_origin, step, code_at, exist)
    else:
        rows, columns = tl.arange(0, SIZE // HALF)[:, None], tl.arange(0, SIZE)[None, :]
        shared, stride = tl.arange(0, SIZE // SHARED)[None, :], middle.to(tl.int64) * second * inner
        last, block, down = start.to(tl.int64) * 0, start, tl.cdiv(first, SIZE).to(tl.int32)
        if not WIDE:  # else `inner` is 1
            last, block = (start % few).to(tl.int64), start // few
        column, block, between = block % across, block // across, last * 0
        if middle != 1:
            between, block = (block % middle.to(tl.int32)).to(tl.int64), block // middle.to(tl.int32)
        if WIDE:
            stride = stride // 16 * 16
        origin = ((block // down).to(tl.int64) * first + block % down * SIZE) * stride
        inside = between * second + column * SIZE
        if not WIDE:
            inside *= inner
        height, width = first - (block % down).to(tl.int64) * SIZE, second - column.to(tl.int64) * SIZE
        exist, code_exist = rows * HALF < height, rows * HALF < height
        if not WIDE:
            exist, code_exist = exist & (columns < width), code_exist & (shared * SHARED < width)
            columns, shared = columns * inner.to(tl.int64), shared * inner.to(tl.int64)
        step = rows.to(tl.int64) * stride
        code_origin = origin // (HALF * SHARED) + inside // SHARED + last
        return Tile(
            origin + inside + last, HALF * step, columns, exist, stride,
            code_origin, step // SHARED, shared, code_exist,
        )  # fmt: skip


@jit
def _load(source, tile, row, index, seed, stream, FORM: tl.constexpr, WIDE: tl.constexpr):
    """The elements of a tile, `row` further, as fp32, and their random words, on NVIDIA GPUs moved down by a byte."""
    DOWN: tl.constexpr = 8 if cuda_capability_geq(8, 0) else 0
    H: tl.constexpr = tile.rows.shape[0]
    W: tl.constexpr = tile.columns.shape[1]
    EACH: tl.constexpr = 128 // form_of(FORM.SOURCE).bits  # elements of a thread side by side
    origin, word = tile.origin + row, tl.full((1, 1), 0, tl.uint32)
    if FORM.ROUNDING == _STOCHASTIC:
        if WIDE:
            runs = tl.reshape(tile.rows + (tl.arange(0, W // EACH) * EACH)[None, :], (H * W // EACH,))
            groups = (index + origin >> 3) + (runs >> 3)
            word = tl.reshape(words_of_groups(groups, runs, seed, 0, stream, 1, EACH, H * W, DOWN, DOWN)[0], (H, W))
        else:
            word = words_of(index + origin + tile.rows + tile.columns, seed, 0, stream, 1)[0] >> DOWN
    at = source.to(_type(FORM.SOURCE)) + origin
    if WIDE:
        at = tl.multiple_of(at, 16)
    return to_float32(tl.load(at + tile.rows + tile.columns, mask=tile.exist, other=0.0)), word


@jit
def _cast_tile(
    source, codes, scales, start, left, shape, g, index, seed, stream,
    FORM: tl.constexpr, SCALES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile = _tile(start, left, shape, FORM, SCALES, WIDE)
    x, word = _load(source, tile, 0, index, seed, stream, FORM, WIDE)
    size, y, more = _magnitudes(x), x, word
    if FORM.PAIRS == 0:
        y, more = _load(source, tile, tile.second, index, seed, stream, FORM, WIDE)
        size = larger(size, _magnitudes(y))
    largest = _largest(size, FORM.BLOCKS)
    if FORM.FRACTION:
        scale, factor = _fraction_scales(largest, g, FORM)
        keep = tl.where(scale == 0x7F, 0, 0xFFFFFFFF).to(tl.uint32)
    else:
        scale, factor = _power_scales(largest, FORM)
        keep = tl.where(scale == 255, 0, 0xFFFFFFFF).to(tl.uint32)
    x, y, keep = x * factor, y * factor, tl.broadcast_to(keep, x.shape)
    if FORM.PAIRS == 1:  # all of them, or the compiler would exchange them for that which it does not know to be shared
        HALVES: tl.constexpr = (x.shape[0], x.shape[1] // 2, 2)
        x, y = tl.split(tl.reshape(x, HALVES))
        keep, _ = tl.split(tl.reshape(keep, HALVES))
        if FORM.ROUNDING == _STOCHASTIC:
            word, more = tl.split(tl.reshape(word, HALVES))
    code = _codes(x, y, word, more, keep, FORM)
    at = codes.to(_type("uint8")) + tile.code_origin
    number = tl.arange(0, SCALES)
    number = number[:, None] if FORM.BLOCKS == _ROWS else number[None, :]
    to = scales.to(_type("uint8")) + start
    if WIDE:  # as many neighbors as a thread has loaded
        EACH: tl.constexpr = 128 // form_of(FORM.SOURCE).bits
        at = tl.multiple_of(at, EACH // 2 if FORM.PAIRS == 1 else EACH)
        to = tl.multiple_of(to, EACH if FORM.BLOCKS == _COLUMNS else 1)
    tl.store(at + tile.code_rows + tile.code_columns, code, mask=tile.code_exist)
    tl.store(to + number, scale.to(tl.uint8), mask=number < left)


@jit
def _cast(source, codes, scales, start, total, shape, whole, index, seed, stream, FORM: tl.constexpr):
    """`whole` is the address of the global scale; or of the largest finite pattern in int64, after which it goes."""
    _, _, second, inner = shape
    g = 1.0
    if FORM.FRACTION:
        g = tl.load(whole.to(_type("fp32")))
        if not FORM.GIVEN:
            g = tl.maximum(tl.div_rn(g, form_of(FORM.ELEMENT).most * 448.0), _LEAST_GLOBAL)
            if start == 0:
                tl.store(whole.to(_type("fp32")) + 2, g)
    wide = (source | codes | scales) % 16 == 0
    if FORM.BLOCKS == _COLUMNS:
        wide = wide & (inner % FORM.SCALES == 0)
    else:
        wide = wide & (inner == 1) & (second % FORM.SIZE == 0)
    if FORM.ROUNDING == _STOCHASTIC:
        wide = wide & (index % 8 == 0)
    left = tl.minimum(total - start, FORM.SCALES).to(tl.int32)
    if wide:
        _cast_tile(source, codes, scales, start, left, shape, g, index, seed, stream, FORM, FORM.SCALES, True)
    else:  # with addresses for all elements, more would not fit the registers
        FEW: tl.constexpr = FORM.SCALES // 4 if FORM.SCALES > 4 else FORM.SCALES
        for some in range(0, left, FEW):
            few = left - some
            _cast_tile(source, codes, scales, start + some, few, shape, g, index, seed, stream, FORM, FEW, False)


@functools.partial(jit, do_not_specialize=[*range(12)])
def block_cast_kernel(
    source, codes, scales, whole, total, first, middle, second, inner, offset, seed_low, seed_high, FORM: tl.constexpr
):
    """One tensor: int64 addresses; the offset and the halves of the seed are `unspecialized`."""
    seed, shape = (plain(seed_high) << 32) | plain(seed_low), (first, middle, second, inner)
    start = tl.program_id(0) * FORM.SCALES
    _cast(source, codes, scales, start, total, shape, whole, plain(offset), seed, 0, FORM)


@functools.partial(jit, do_not_specialize=["tensors", "whole"])
def multi_block_cast_kernel(rows, chunk_tensor, tensors, whole, seed_low, seed_high, FORM: tl.constexpr):
    """A list of tensors, whose table has scales for elements. Two int64 numbers of each lie at `whole`."""
    column, start, _ = locate(rows, chunk_tensor, tensors, FORM.SCALES)
    shape = (
        tl.load(column + _FIRST * tensors),
        tl.load(column + _MIDDLE * tensors),
        tl.load(column + _SECOND * tensors),
        tl.load(column + _INNER * tensors),
    )
    source, codes = tl.load(column + _SOURCE * tensors), tl.load(column + _CODES * tensors)
    scales, total = tl.load(column + _SCALES * tensors), tl.load(column)
    stream, index = tl.load(column + _STREAM * tensors), tl.load(column + _OFFSET * tensors)
    seed = (plain(seed_high) << 32) | plain(seed_low)
    whole += 16 * tl.load(chunk_tensor + tl.program_id(0)).to(tl.int64)
    _cast(source, codes, scales, start.to(tl.int32), total, shape, whole, index, seed, stream, FORM)


# ---------------------------------------------------------------------------------------------------- largest magnitude


@jit
def _most(x):
    """The largest pattern of finite numbers of a block."""
    x = tl.abs(to_float32(x))
    most = tl.max(x, 0)
    if not most < float("inf"):  # hardly ever: a maximum that leaves out what is not finite takes twice as long
        most = tl.max(tl.where(x < float("inf"), x, 0.0), 0)
    return most.to(tl.int32, bitcast=True)


@jit
def _largest_finite(source, to, begin, numel, SOURCE: tl.constexpr, BLOCK: tl.constexpr):
    """Raise the pattern at `to` to the largest one of finite fp32 numbers from `begin` on."""
    left = tl.minimum(numel - begin, BLOCK).to(tl.int32)
    whole, offsets = left // 16 * 16, tl.arange(0, BLOCK)
    if source % 16 == 0:
        at = tl.multiple_of(source.to(_type(SOURCE)) + begin, 16)
        most = _most(tl.load(at + offsets, mask=offsets < whole, other=0.0))
    else:
        at = source.to(_type(SOURCE)) + begin
        most = _most(tl.load(at + offsets, mask=offsets < whole, other=0.0))
    if whole < left:
        rest = whole + tl.arange(0, 16)
        at = source.to(_type(SOURCE)) + begin
        most = tl.maximum(most, _most(tl.load(at + rest, mask=rest < left, other=0.0)))
    tl.atomic_max(to.to(tl.pointer_type(tl.int64)), most.to(tl.int64))


@functools.partial(jit, do_not_specialize=["source", "to", "numel"])
def largest_kernel(source, to, numel, BLOCK: tl.constexpr, SOURCE: tl.constexpr):
    """One tensor: int64 addresses."""
    _largest_finite(source, to, tl.program_id(0).to(tl.int64) * BLOCK, numel, SOURCE, BLOCK)


@functools.partial(jit, do_not_specialize=["tensors", "whole"])
def multi_largest_kernel(
    rows, chunk_tensor, tensors, whole, SCALES: tl.constexpr, EACH: tl.constexpr, SOURCE: tl.constexpr
):
    """A list of tensors, with the table of `multi_block_cast_kernel`; EACH is the elements of a scale."""
    column, start, _ = locate(rows, chunk_tensor, tensors, SCALES)
    to = whole + 16 * tl.load(chunk_tensor + tl.program_id(0)).to(tl.int64)
    source = tl.load(column + _SOURCE * tensors)
    numel = tl.load(column + _NUMEL * tensors)
    if start * EACH < numel:
        _largest_finite(source, to, start * EACH, numel, SOURCE, SCALES * EACH)
