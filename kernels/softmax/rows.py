"""Triton kernels and launches for sums over the last dimension: the bits of the rule's exact form, or its fast form.

A program works on lines of up to `GROUP` columns side by side, which are rows, or the groups of a row, or some of them
where a row is too long for a program. Then one launch leaves the maximum and the sum of each group, and a second one
reads the row again, puts them together and writes. A tile is a tuple of PARTS blocks of shape (LINES, LANES, VECTOR),
one after the other along a line, and stays in registers. No bit of the exact form depends on its shape: see
`rule.folded`. A line of vectors stays within a warp.

Vectors begin on 16-byte boundaries. Where lines begin elsewhere (ENDS), column c of a line stands at position c + head
of its tile: vectors that lie inside of the line are moved whole, and the elements at both ends one by one. What would
pass the end of a block of 2^k positions (WRAPS) stands at its beginning, before the head.

FAST takes the exponential of the device and the cheapest order of sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels import exponential
from halfstep.kernels.backend import (
    EXACT,
    MOST_THREADS,
    by_address,
    constant,
    constexpr_function,
    jit,
    launch_kernel,
    most_warps,
    tl,
)
from halfstep.kernels.multi_tensor import address, alignments
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax import arithmetic
from halfstep.kernels.softmax.layout import Layout, mask_operand
from halfstep.kernels.softmax.rule import GROUP

WHOLE, PARTIAL, FINISH = map(constant, range(3))  # what a launch does
_GROUP, _MINUS_INF = constant(GROUP), constant(-0x800000)  # the bits of -inf


class Rows(NamedTuple):
    """How many rows and columns, rows of a causal matrix, and groups of a row."""

    rows: int
    columns: int
    queries: int
    groups: int = 1


class Strides(NamedTuple):
    """Sizes of the inner two of three outer dimensions, and the strides of x and of the mask, in elements."""

    size_b: int
    size_c: int
    x_a: int
    x_b: int
    x_c: int
    mask_a: int
    mask_b: int
    mask_c: int
    mask_column: int


class Form(NamedTuple):
    FAST: bool
    LOG: bool
    PRECISE: bool  # the exponential
    CAUSAL: bool
    SCALED: bool  # the scale is not 1
    MASK: int = 0  # PLAIN, BOOLEAN or ADDITIVE
    FLAT: bool = True  # one stride leads from each row to the next
    MASK_ALIGNED: bool = False  # columns of the mask lie side by side, and its vectors where those of x do
    ENDS: bool = False  # lines may begin or end off a boundary
    WRAPS: bool = False  # lines may pass the end of the block
    STAGE: int = 0  # WHOLE, PARTIAL or FINISH
    FULL: int = 0  # of the parts of a tile, those in which no line ends
    TAIL: int = -1  # with ENDS, the part in which rows end, or they do so in part NEXT
    NEXT: int = -1
    GROUPS: int = 1  # power of two, no less than the groups of a row: more than 1, and a program's lines are of one row


class Tile(NamedTuple):
    PARTS: int
    LINES: int
    LANES: int
    VECTOR: int


class _Lines(NamedTuple):
    """The lines of a program, in blocks of shape (LINES, 1, 1), or of one line as numbers."""

    row: Any
    begin: Any  # the column of the row at position 0
    head: Any  # the position of the first column
    end: Any  # the position after the last column of the row, which may be far beyond the tile
    read: Any  # the same of what is read: `causal` drops the rest


@constexpr_function
def _halvings(width: Any) -> int:
    return (int(width) - 1).bit_length()


@constexpr_function
def _block(parts: Any, lanes: Any, vector: Any) -> int:  # the interpreter of Triton 3.6 would make a tuple of a tile
    return int(lanes * vector) << (int(parts) - 1).bit_length()


@jit
def _row_offset(row, size_b, size_c, stride_a, stride_b, stride_c, FLAT: tl.constexpr):
    """Where rows begin, in elements. FLAT: all rows lie one `stride_c` apart."""
    if FLAT:
        return row.to(tl.int64) * stride_c
    else:
        rest = row // size_c
        within = (row % size_c).to(tl.int64) * stride_c + (rest % size_b).to(tl.int64) * stride_b
        return within + (rest // size_b).to(tl.int64) * stride_a


@jit
def _aligned(pointer, offset, VECTOR: tl.constexpr):
    """A pointer, or a block of pointers, of which the compiler knows that a vector begins `offset` elements on.

    The sum is made here because the compiler keeps what it knows with the operation that made a value.
    """
    bytes: tl.constexpr = VECTOR * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    if offset.type.is_block():
        return tl.multiple_of(pointer + offset, [bytes, bytes, bytes])
    else:
        return tl.multiple_of(pointer + offset, bytes)


@jit
def _places(groups, form: tl.constexpr, tile: tl.constexpr):
    """The row and the first column of each line."""
    line = tl.program_id(0) * tile.LINES
    among = tl.arange(0, tile.LINES)[:, None, None] if tile.LINES > 1 else 0
    if form.GROUPS > 1:
        return line // groups, (line % groups + among) * _GROUP
    else:
        return line + among, 0


@jit
def _lines(pointer, row, begin, rows, columns, queries, form: tl.constexpr, tile: tl.constexpr):
    """The `_Lines` of rows that begin at `pointer`."""
    head = 0
    if form.ENDS:
        size: tl.constexpr = pointer.dtype.scalar.element_ty.primitive_bitwidth // 8
        head = ((pointer.to(tl.int64) & (tile.VECTOR * size - 1)) // size).to(tl.int32)
    begin -= head
    if form.GROUPS > 1:
        end = tl.minimum(columns - begin, head + _GROUP)
    else:
        end = tl.where(row < rows, columns, 0) - begin
    read = end
    if form.CAUSAL:
        read = tl.minimum(end, (row % queries + 1 - begin).to(tl.int32))
    return _Lines(row, begin, head, end, read)


@jit
def _vectors(PART: tl.constexpr, tile: tl.constexpr):
    """Where the vectors of a part begin."""
    return (PART * tile.LANES + tl.arange(0, tile.LANES)[None, :, None]) * tile.VECTOR


@jit
def _elements(PART: tl.constexpr, tile: tl.constexpr):
    return _vectors(PART, tile) + tl.arange(0, tile.VECTOR)[None, None, :]


# With CAUSAL, masks of stores are made by other comparisons than those of loads. The compiler would keep the result of
# the same one in registers in between, of which GPUs of AMD have too few.
@jit
def _inside(PART: tl.constexpr, STORED: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """Which vectors of a part begin before the end of what is stored or read; with ENDS, of those that do not end later
    than their line."""
    vectors = _vectors(PART, tile)
    if form.CAUSAL and STORED:
        inside = lines.end - vectors >= (tile.VECTOR if form.ENDS else 1)
    elif form.ENDS:
        inside = vectors <= lines.end - tile.VECTOR
        if form.CAUSAL:
            inside &= vectors < lines.read
    else:
        inside = vectors < lines.read
    if form.ENDS and PART == 0:
        inside &= vectors > 0
    return inside


@jit
def _at_ends(PART: tl.constexpr, limit, lines, form: tl.constexpr, tile: tl.constexpr):
    """Which elements of a part are in the line and in no vector that `_inside` finds."""
    vectors = _vectors(PART, tile)
    element = tl.arange(0, tile.VECTOR)[None, None, :]
    beyond = lines.end - vectors
    if PART == 0:
        ragged = (beyond < tile.VECTOR) | (vectors == 0)
    else:
        ragged = beyond < tile.VECTOR
    if form.CAUSAL:
        ragged &= vectors < limit
    inside = element < tl.where(ragged, beyond, 0)
    if PART == 0:
        inside &= element >= tl.where(vectors == 0, lines.head, 0)
    return inside


@jit
def _wrapped(limit, lines, tile: tl.constexpr):
    """Which elements of part 0 stand for those that pass the end of the block."""
    first = (_vectors(0, tile) == 0) & (limit > _block(tile.PARTS, tile.LANES, tile.VECTOR))
    return tl.arange(0, tile.VECTOR)[None, None, :] < tl.where(
        first, lines.end - _block(tile.PARTS, tile.LANES, tile.VECTOR), 0
    )


@jit
def _part(line, step, OTHER: tl.constexpr, PART: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """The vectors of a part, as they are in memory."""
    at, inside = line + _elements(PART, tile) * step, _inside(PART, False, lines, form, tile)
    if form.FULL > PART and not (form.ENDS and PART == 0):
        return tl.load(at, mask=inside)
    else:
        return tl.load(at, mask=inside, other=OTHER)


@jit
def _with_ends(values, line, step, PART: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """A part with the elements at both ends."""
    at = line + _elements(PART, tile) * step
    if form.ENDS and (PART == 0 or PART == form.TAIL or PART == form.NEXT):
        values = tl.load(at, mask=_at_ends(PART, lines.read, lines, form, tile), other=values)
        if form.WRAPS and PART == 0:
            values = tl.load(
                at + _block(tile.PARTS, tile.LANES, tile.VECTOR) * step,
                mask=_wrapped(lines.read, lines, tile),
                other=values,
            )
    return values


@jit
def _loaded(a, b, step, A: tl.constexpr, B: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """The parts of two tiles: all are asked for before the first is needed. A and B stand for what is not read; with
    None for B, only the first."""
    of_a, of_b, all_a, all_b = (), (), (), ()
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        of_a += (_part(a, 1, A, part, lines, form, tile),)  # type: ignore[assignment]
        if B is not None:
            of_b += (_part(b, step, B, part, lines, form, tile),)  # type: ignore[assignment]
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        all_a += (_with_ends(of_a[part], a, 1, part, lines, form, tile),)  # type: ignore[assignment]
        if B is not None:
            all_b += (_with_ends(of_b[part], b, step, part, lines, form, tile),)  # type: ignore[assignment]
    return all_a, all_b


@jit
def _store(line, values, PART: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    at, values = line + _elements(PART, tile), from_float32(values, line.dtype.scalar.element_ty)
    tl.store(at, values, mask=_inside(PART, True, lines, form, tile))
    if form.ENDS:
        if PART == 0:
            tl.store(at, values, mask=_at_ends(PART, lines.end, lines, form, tile))
            if form.WRAPS:
                tl.store(
                    at + _block(tile.PARTS, tile.LANES, tile.VECTOR), values, mask=_wrapped(lines.end, lines, tile)
                )
        elif PART == form.TAIL or PART == form.NEXT:
            tl.store(at, values, mask=_at_ends(PART, lines.end, lines, form, tile))


@jit
def _kept(values, other, PART: tl.constexpr, STORED: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """A part with `other` in what was not read."""
    at = _elements(PART, tile)
    if form.ENDS and PART == 0:
        at = tl.where(at < lines.head, at + _block(tile.PARTS, tile.LANES, tile.VECTOR), at)
    return tl.where((lines.read - at > 0) if STORED else (at < lines.read), values, other)


@jit
def _exp(d, form: tl.constexpr):
    return arithmetic.exponential(d) if form.FAST else exponential.exp(d, form.PRECISE)


@jit
def _halved(terms, LEVELS: tl.constexpr):
    """Blocks of (lines, terms): the upper half is added to the lower half, so many times."""
    for _ in tl.static_range(LEVELS):
        terms = tl.sum(tl.reshape(terms, (terms.shape[0], 2, terms.shape[1] // 2)), axis=1)
    return terms


@jit
def _folded(terms, tile: tl.constexpr):
    """The sum of each line of (LINES, LANES, VECTOR), in (LINES, 1, 1), in the order of `rule.folded`.

    Of two lanes whose elements meet, each passes on one half of them and adds up the other half.
    """
    MEETINGS: tl.constexpr = min(_halvings(tile.LANES), _halvings(tile.VECTOR))
    odd = (tl.arange(0, 2) == 1)[None, :, None, None]
    for done in tl.static_range(MEETINGS):
        pairs = tl.reshape(terms, (tile.LINES << done, 2, tile.LANES >> (done + 1), 2, tile.VECTOR >> (done + 1)))
        lower, upper = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        terms = tl.where(odd, upper, lower) + arithmetic.from_neighbour(tl.where(odd, lower, upper), 1)
    REST: tl.constexpr = tile.LANES >> MEETINGS
    terms = tl.reshape(terms, (tile.LINES << MEETINGS, REST * (tile.VECTOR >> MEETINGS)))
    terms = _halved(terms, _halvings(REST))
    terms = _halved(tl.reshape(terms, (tile.LINES, tile.VECTOR)), _halvings(tile.VECTOR))
    return tl.reshape(terms, (tile.LINES, 1, 1))


@jit
def _sums(parts, form: tl.constexpr, tile: tl.constexpr):
    """The sum of each line of a tile, in (LINES, 1, 1)."""
    PARTS: tl.constexpr = tile.PARTS
    for level in tl.static_range(_halvings(PARTS), 0, -1):
        folded = ()
        for part in tl.static_range(1 << (level - 1)):
            if part + (1 << (level - 1)) < len(parts):
                folded += (parts[part] + parts[part + (1 << (level - 1))],)  # type: ignore[assignment]
            else:
                folded += (parts[part],)  # type: ignore[assignment]
        parts = folded
    if form.FAST:
        return tl.sum(tl.sum(parts[0], axis=2, keep_dims=True), axis=1, keep_dims=True)
    else:
        return _folded(parts[0], tile)


@jit
def _over_lines(sums, form: tl.constexpr):
    """The sum of (LINES, 1, 1), in (1, 1, 1)."""
    lines: tl.constexpr = sums.shape[0]
    if form.FAST:
        return tl.sum(sums, axis=0, keep_dims=True)
    else:  # each warp gets all terms at once, instead of one with each halving
        terms = tl.gather(tl.reshape(sums, (lines,)), tl.arange(0, lines), 0)
        return tl.reshape(_halved(tl.reshape(terms, (1, lines)), _halvings(lines)), (1, 1, 1))


# Sizes are arguments of their own: for integers in a tuple that are 1, or that 16 divides, Triton compiles forms anew.
# They come first: with the scale between addresses and sizes, ptxas takes more instructions to load these on sm_100.
@functools.partial(jit, do_not_specialize=[*Rows._fields, *Strides._fields])
def forward_row_kernel(
    rows, columns, queries, groups, size_b, size_c, x_a, x_b, x_c, mask_a, mask_b, mask_c, mask_column,
    operands, form: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Softmax of the lines of a tile.

    `operands` are x, the mask, y, `partial` and the scale. Columns of x lie side by side; y is contiguous. The mask is
    seen as rows like x, and is x where there is none. `partial` holds the maximum and the sum of each group.
    """
    x, mask, y, partial, scale = operands
    row, begin = _places(groups, form, tile)
    x_row = _row_offset(row, size_b, size_c, x_a, x_b, x_c, form.FLAT)
    lines = _lines(x + x_row, row, begin, rows, columns, queries, form, tile)
    x_line = _aligned(x, x_row + lines.begin, tile.VECTOR)
    if form.MASK == arithmetic.PLAIN:
        xs, _ = _loaded(x_line, x_line, 1, float("-inf"), None, lines, form, tile)
        masks = xs
    else:
        mask_row = _row_offset(row, size_b, size_c, mask_a, mask_b, mask_c, form.FLAT)
        nothing: tl.constexpr = 0 if form.MASK == arithmetic.BOOLEAN else float("-inf")
        if form.MASK_ALIGNED:
            mask_line = _aligned(mask, mask_row + lines.begin, tile.VECTOR)
            xs, masks = _loaded(x_line, mask_line, 1, 0.0, nothing, lines, form, tile)
        else:
            step = mask_column.to(tl.int64)  # those of a transposed mask of 50,000 by 50,000 lie that far apart
            mask_line = mask + (mask_row + lines.begin * step)
            xs, masks = _loaded(x_line, mask_line, step, 0.0, nothing, lines, form, tile)
    zs = ()
    tops = tl.full((tile.LINES, tile.LANES, tile.VECTOR), arithmetic.LOWEST, tl.float32)
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        z = to_float32(xs[part])
        if form.SCALED or form.MASK != arithmetic.PLAIN:
            z = arithmetic.logits(xs[part], masks[part], scale, form.MASK)
        if form.CAUSAL or (form.SCALED and form.MASK == arithmetic.PLAIN):
            z = _kept(z, float("-inf"), part, False, lines, form, tile)
        tops = tl.maximum(tops, z)
        zs += (z,)  # type: ignore[assignment]

    here = partial + 2 * (tl.program_id(0) * tile.LINES + tl.arange(0, tile.LINES)[:, None, None])
    if form.STAGE == FINISH:
        top = tl.load(here)
    else:
        top = tl.max(tl.max(tops, axis=2, keep_dims=True), axis=1, keep_dims=True)
    es = ()
    if form.STAGE != FINISH or not form.LOG:
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            es += (_exp(zs[part] - top, form),)  # type: ignore[assignment]
    if form.STAGE == PARTIAL:
        tl.store(here, top)
        tl.store(here + 1, _sums(es, form, tile))
    else:
        highest, weights = top, tl.full((tile.LINES, 1, 1), 1.0, tl.float32)
        if form.STAGE == FINISH:
            group = tl.arange(0, form.GROUPS)[:, None, None]
            others = partial + 2 * (row * groups + group)
            others_top = tl.load(others, mask=group < groups, other=arithmetic.LOWEST)
            highest = tl.max(others_top, axis=0, keep_dims=True)
            others_sums = tl.load(others + 1, mask=group < groups, other=0.0)
            total = _over_lines(others_sums * _exp(others_top - highest, form), form)
            weights = _exp(top - highest, form)
        elif form.GROUPS > 1:
            highest = tl.max(top, axis=0, keep_dims=True)
            weights = _exp(top - highest, form)
            total = _over_lines(_sums(es, form, tile) * weights, form)
        else:
            total = _sums(es, form, tile)
        total = tl.where(total == 0.0, 1.0, total)  # asking total > 0 instead would hide a NaN
        if form.LOG:
            norm = tl.log(total) if form.FAST else exponential.log(total)
        else:
            norm = weights / total if form.FAST else tl.div_rn(weights, total)
        y_line = _aligned(y, row.to(tl.int64) * columns + lines.begin, tile.VECTOR)
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            result = (zs[part] - highest) - norm if form.LOG else es[part] * norm
            _store(y_line, result, part, lines, form, tile)


@functools.partial(jit, do_not_specialize=Rows._fields)
def backward_row_kernel(rows, columns, queries, groups, operands, form: tl.constexpr, tile: tl.constexpr):
    """The derivative of the lines of a tile.

    `operands` are the gradient, y, dx, all contiguous, `partial`, which holds the sum of each group, and the scale.
    """
    grad, y, dx, partial, scale = operands
    row, begin = _places(groups, form, tile)
    base = row.to(tl.int64) * columns
    lines = _lines(y + base, row, begin, rows, columns, queries, form, tile)
    line = base + lines.begin
    dx_line = _aligned(dx, line, tile.VECTOR)
    grad_line, y_line = _aligned(grad, line, tile.VECTOR), _aligned(y, line, tile.VECTOR)
    dys, ys = _loaded(grad_line, y_line, 1, 0.0, 0.0, lines, form, tile)
    if form.STAGE == FINISH:
        group = tl.arange(0, form.GROUPS)[:, None, None]
        others = partial + (row * groups + group)
        total = _over_lines(tl.load(others, mask=group < groups, other=0.0), form)
    else:
        terms = ()
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            term = arithmetic.summand(to_float32(dys[part]), to_float32(ys[part]), form.LOG)
            if form.CAUSAL:
                term = _kept(term, 0.0, part, False, lines, form, tile)
            terms += (term,)  # type: ignore[assignment]
        total = _sums(terms, form, tile)
        if form.STAGE == WHOLE and form.GROUPS > 1:
            total = _over_lines(total, form)
    total += 0.0  # -0.0, the sum of negative zeros, becomes 0.0
    if form.STAGE == PARTIAL:
        tl.store(partial + (tl.program_id(0) * tile.LINES + tl.arange(0, tile.LINES)[:, None, None]), total)
    else:
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            dy, p = to_float32(dys[part]), to_float32(ys[part])
            if form.LOG and form.CAUSAL:
                p = _kept(p, float("-inf"), part, True, lines, form, tile)
            result = (dy - _exp(p, form) * total) if form.LOG else p * (dy - total)
            if form.SCALED:
                result *= scale
            result += 0.0  # -0.0 becomes 0.0, as it does where a GPU of AMD converts a product to fp16 at once
            if form.LOG:
                result = tl.where(p.to(tl.int32, bitcast=True) != _MINUS_INF, result, 0.0)  # `summand` compares numbers
            elif form.CAUSAL:
                result = _kept(result, 0.0, part, True, lines, form, tile)
            _store(dx_line, result, part, lines, form, tile)


# ----------------------------------------------------------------------------------------------------------- launches

FORWARD_TILE, BACKWARD_TILE = 16 * GROUP, 8 * GROUP  # elements that a program holds in registers
EACH = 64  # elements of a thread at most; half of them where vectors have one, as addresses take registers too
# Elements of a thread in short rows. With 32 in rows of 64 columns, they took 1.4 to 1.7 times as long on an H200; but
# with ENDS, each thread pays for both ends.
SHORT, SHORT_WITH_ENDS = 8, 32
RUN = 8  # vectors of a row, at least, that are moved together in a part
LINES = 4  # of a program of two launches
MOST_GROUPS = 4096  # of a row: each program of the second launch reads the numbers of all
LONGEST = MOST_GROUPS * GROUP
# With ENDS, vectors are shorter, because the elements at both ends are moved one by one, and rows are not too short.
VECTOR_WITH_ENDS, SHORTEST_WITH_ENDS = 4, 64


@functools.lru_cache(maxsize=4096)
def tile_shape(columns: int, vector: int, ends: bool, lines: int, lanes: int) -> tuple[Tile, int, int]:
    """A tile of so many lines, or for 0 of as many rows as suit it; its parts in which no line ends, and its warps."""
    block = max(16, 1 << (columns - 1).bit_length())
    reach = min(block, columns + vector - 1) if ends else columns
    across = min(32, max(1, block // max(vector, SHORT_WITH_ENDS if ends else SHORT)))
    across = max(across, block // (EACH if vector > 1 else EACH // 2))

    def parts(across: int, columns: int) -> tuple[int, int]:
        step = -(-block // (4 * across * vector))  # a few numbers are enough: a form is compiled for each
        return -(-columns // (across * vector * step)) * step, columns // (across * vector * step) * step

    while across > RUN and 8 * parts(across // 2, reach)[0] <= 14 * parts(across, reach)[0]:  # wastes fewer elements
        across //= 2
    lines = lines or max(1, 128 // across)
    tile = Tile(parts(across, reach)[0], lines, across, vector)
    return tile, parts(across, columns)[1], max(1, lines * across // lanes)


def _launch(
    kernel: Any,
    tensors: Sequence[torch.Tensor],  # of which the last is written
    rows: Rows,
    strides: Sequence[int],
    scale: float,
    form: Form,
    vector: int,
    limit: int,  # elements of a tile
    partials: int,  # numbers that each group leaves
) -> None:
    """Launch once for rows that a tile holds, or twice."""
    device, columns, partial = tensors[-1].device, rows.columns, tensors[-1]
    groups, lines, longest = -(-columns // GROUP), 0, min(columns, GROUP)
    stages: Sequence[int] = (0,)
    if columns > (limit if vector > 1 else limit // 2):
        stages, lines = (1, 2), LINES
        groups = -(-groups // lines) * lines
        partial = torch.empty(partials * rows.rows * groups, dtype=torch.float32, device=device)
    elif groups > 1:
        groups = lines = 1 << (groups - 1).bit_length()
    tile, full, warps = tile_shape(longest, vector, form.ENDS, lines, MOST_THREADS // most_warps(device))
    if lines and columns % (GROUP * lines):  # some lines are shorter than others
        full = 0
    form = form._replace(FULL=full, GROUPS=1 << (groups - 1).bit_length())
    if form.ENDS:
        rest = (columns - 1) % GROUP + 1
        tail, after = (end // vector // tile.LANES for end in (rest, rest + vector - 1))
        wraps = longest + vector - 1 > 1 << (longest - 1).bit_length()
        form = form._replace(TAIL=tail, NEXT=after, WRAPS=wraps)
    sizes = (*rows._replace(groups=groups), *strides)
    # What Triton compiles forms of their own for: integers that need 64 bits, addresses that 16 divides, and dtypes.
    wide = max(sizes) >= 2**31 and tuple(size >= 2**31 for size in sizes)
    key = wide, *alignments(tensors), *(tensor.dtype for tensor in tensors)
    operands = (*map(by_address, (*tensors, partial)), scale)
    options: dict[str, Any] = {} if form.FAST else EXACT
    for stage in stages:
        constants = {"form": form._replace(STAGE=stage), "tile": tile, "num_warps": warps, **options}
        launch_kernel(kernel, device, -(-rows.rows * groups // tile.LINES), (*sizes, operands), constants, *key)


def _begins(tensor: torch.Tensor, strides: Sequence[int]) -> list[int]:
    """Where a tensor begins, in elements, and the strides of its rows, that of columns left out."""
    return [address(tensor) // tensor.element_size(), *strides[:-1]]


def _apart(*begins: list[int]) -> int:
    """A number that divides what the operands of any row lie apart, counted from multiples of it."""
    return math.gcd(*(a - b for of in begins for a, b in zip(begins[0], of, strict=True)))


def _vector(line: int, columns: int, *begins: list[int]) -> tuple[int, bool]:
    """The elements of a vector, at most `line`, and whether rows may begin or end within one."""
    vector = math.gcd(line, _apart(*begins))  # rows of all operands begin equally far from multiples of it
    whole = math.gcd(vector, columns, *begins[0])
    if vector >= VECTOR_WITH_ENDS > whole and columns >= SHORTEST_WITH_ENDS:
        return VECTOR_WITH_ENDS, True
    return whole, False


def forward(layout: Layout, y: torch.Tensor, scale: float, queries: int, log: bool, exact: bool) -> None:
    """Launch the forward kernel into the contiguous `y`. `queries`: rows of one causal matrix, 0 for none."""
    (a, b, c), x = layout.sizes, layout.x
    mask, mask_kind = mask_operand(x, layout.mask)
    begins = _begins(x, layout.x_strides), _begins(y, layout.y_strides)
    vector, ends = _vector(16 // max(x.element_size(), y.element_size()), x.shape[-1], *begins)
    aligned = layout.mask_strides[-1] == 1 and _apart(begins[0], _begins(mask, layout.mask_strides)) % vector == 0
    form = Form(not exact, log, y.dtype == torch.float32, queries > 0, scale != 1, mask_kind, a * b == 1, aligned, ends)
    rows, strides = Rows(a * b * c, x.shape[-1], max(queries, 1)), (b, c, *layout.x_strides[:3], *layout.mask_strides)
    _launch(forward_row_kernel, (x, mask, y), rows, strides, float(scale), form, vector, FORWARD_TILE, 2)


def backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool, exact: bool
) -> None:
    """Launch the backward kernel on contiguous tensors. `queries`: rows of one causal matrix, 0 for none."""
    columns, tensors = y.shape[-1], (grad, y, dx)
    begins = ([*_begins(tensor, ()), columns] for tensor in tensors)
    vector, ends = _vector(16 // max(y.element_size(), dx.element_size()), columns, *begins)
    form = Form(not exact, log, dx.dtype == torch.float32, queries > 0, scale != 1, ENDS=ends)
    rows = Rows(y.numel() // columns, columns, max(queries, 1))
    _launch(backward_row_kernel, tensors, rows, (), float(scale), form, vector, BACKWARD_TILE, 1)
