"""Triton kernels and launches for sums over the last dimension.

A program works on a tile of whole rows, or on one long row, or on a piece of one. The tile stays in registers. What a
longer row has beyond it is read twice: forward for the maximum and the sum, and backward, from its end, for the result,
so that what was read last is read again first, while it is still in L2.

A tile is a tuple of PARTS blocks of shape (ROWS, LANES, VECTOR), one after the other along the row, so that its length
need not be a power of two. A thread holds whole vectors of neighbouring columns, which are masked and rescaled at once.

Vectors begin on 16-byte boundaries. Where rows begin elsewhere (ENDS), the tile begins at the first boundary in the
row, and the elements before it and after the last whole vector are handled one per lane beside the tile. Where the
operands of a row begin at different distances from the boundaries, vectors have one element.

If there are few long rows, each is cut into pieces: one launch leaves the maximum and sum of each piece, a second one
puts them together in the same order every time and writes. The launcher passes what Triton would find out of integers
that are 1, or that 16 divides, as constants, so that no kernel is compiled again for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels.backend import MOST_THREADS, by_address, constant, jit, launch_kernel, most_warps, tl
from halfstep.kernels.multi_tensor import address, alignments
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax import arithmetic
from halfstep.kernels.softmax.layout import Layout, mask_operand

# What a launch does: whole rows, or pieces of rows in two steps.
WHOLE, PARTIAL, FINISH = map(constant, range(3))


class Rows(NamedTuple):
    """How many rows and columns, and rows of a causal matrix; pieces of a row, and columns of a piece."""

    rows: int
    columns: int
    queries: int
    splits: int = 1  # pieces
    span: int = 1


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


class Operands(NamedTuple):
    """What the forward kernel reads and writes. `mask` is x where there is none, `partial` is y for whole rows."""

    x: Any  # its columns lie side by side
    mask: Any  # seen as rows like x
    y: Any  # contiguous
    partial: Any  # fp32, (rows, splits, 2): maximum and sum of each piece
    scale: float


class GradientOperands(NamedTuple):
    """What the backward kernel reads and writes, all of it contiguous. `partial` is dx for whole rows."""

    grad: Any
    y: Any
    dx: Any
    partial: Any  # fp32, (rows, splits): the sum of each piece
    scale: float


class Tile(NamedTuple):
    """How many blocks a tile has, and their shape."""

    PARTS: int
    ROWS: int
    LANES: int
    VECTOR: int


class Form(NamedTuple):
    MASK: int  # PLAIN, BOOLEAN or ADDITIVE
    CAUSAL: bool  # drop the columns above the diagonal
    LOG: bool  # y is the logarithm of the softmax
    ENDS: bool  # rows may begin or end off a boundary
    FLAT: bool = True  # one stride leads from each row to the next
    OF_X: bool = False  # no mask, not causal, no negative scale: the largest x makes the largest z
    MASK_ALIGNED: bool = False  # columns of the mask lie side by side, and its vectors where those of x do
    PIECES: int = 1  # power of two, no less than the pieces of a row
    STAGE: int = 0  # WHOLE, PARTIAL or FINISH
    DROPS: bool = False  # parts of a tile that `causal` drops in all rows of a program are not computed
    TILE: Tile | None = None
    TRIP: Tile | None = None  # over the rest of a row; of 0 parts if the tile holds it all


class _Span(NamedTuple):
    """What a program handles of its rows; `begin`, `last` and `read` are counted from the first boundary."""

    head: Any  # columns before the first boundary
    body: Any  # columns in whole vectors
    begin: Any  # of the tile
    last: Any  # end of what is written
    read: Any  # end of what is read
    limit: Any  # the first column that `causal` drops
    longest: Any  # the largest `limit` of the program's rows


class _Inputs(NamedTuple):
    """x and the mask from the first boundary of a row on, the mask's step from column to column, and the scale."""

    x: Any
    mask: Any
    mask_step: Any
    scale: Any


@jit
def row_offset(row, size_b, size_c, stride_a, stride_b, stride_c, FLAT: tl.constexpr):
    """Where rows begin, in elements. FLAT: all rows lie one `stride_c` apart."""
    if FLAT:
        return row.to(tl.int64) * stride_c
    else:
        rest = row // size_c
        within = (row % size_c).to(tl.int64) * stride_c + (rest % size_b).to(tl.int64) * stride_b
        return within + (rest // size_b).to(tl.int64) * stride_a


@jit
def aligned_pointer(pointer, offset, VECTOR: tl.constexpr):
    """A pointer, or a block of pointers, of which the compiler knows that a vector begins `offset` elements on.

    The sum is made here because the compiler keeps what it knows with the operation that made a value.
    """
    bytes: tl.constexpr = VECTOR * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    if offset.type.is_block():
        return tl.multiple_of(pointer + offset, [bytes, bytes, bytes])
    else:
        return tl.multiple_of(pointer + offset, bytes)


@jit
def _position(rows, form: tl.constexpr, tile: tl.constexpr):
    """The rows of a program, their columns (0 beyond the last row), and where its piece begins."""
    columns = rows.columns
    begin = 0
    if form.STAGE == WHOLE:
        row = tl.program_id(0)
        if tile.ROWS > 1:
            row = (row * tile.ROWS + tl.arange(0, tile.ROWS))[:, None, None]
            columns = tl.where(row < rows.rows, columns, 0)
    else:
        row = tl.program_id(0) // rows.splits
        begin = tl.multiple_of(tl.program_id(0) % rows.splits * rows.span, tl.constexpr(tile.VECTOR))
    return row, columns, begin


@jit
def _span(rows, row, columns, begin, address, form: tl.constexpr, tile: tl.constexpr):
    """The `_Span` of rows that begin at `address`."""
    limit = columns
    longest = 0
    if form.CAUSAL:
        limit = tl.minimum(columns, (row % rows.queries + 1).to(tl.int32))
        longest = limit
        if tile.ROWS > 1:
            # The last of the rows, unless another causal matrix begins among them: then it is among the longest.
            longest = tl.program_id(0) * tile.ROWS % rows.queries + tile.ROWS
    head = 0
    body = columns
    if form.ENDS:
        size: tl.constexpr = address.dtype.scalar.element_ty.primitive_bitwidth // 8
        head = tl.minimum((-(address.to(tl.int64) // size) & (tile.VECTOR - 1)).to(tl.int32), columns)
        body = (columns - head) // tile.VECTOR * tile.VECTOR
    last = body
    if form.STAGE != WHOLE:
        last = tl.minimum(body, begin + rows.span)
    read = last
    if form.CAUSAL:
        read = tl.minimum(last, limit - head)
    return _Span(head, body, begin, last, read, limit, longest)


@jit
def _ends(span, columns, form: tl.constexpr, tile: tl.constexpr):
    """The columns before a row's first whole vector and after its last, one per lane; which exist, and which count."""
    if form.STAGE != WHOLE:  # the first piece of a row has both of its ends
        columns = tl.where(span.begin == 0, columns, 0)
    lane = tl.arange(0, tile.LANES)[None, :, None]
    column = tl.where(lane < tile.VECTOR, lane, span.head + span.body + lane - tile.VECTOR)
    exists = tl.where(lane < tile.VECTOR, lane < tl.minimum(span.head, columns), column < columns)
    return column, exists, exists & (column < span.limit)


@jit
def _vectors(begin, PART: tl.constexpr, tile: tl.constexpr):
    return begin + (PART * tile.LANES + tl.arange(0, tile.LANES)[None, :, None]) * tile.VECTOR


@jit
def _elements(begin, PART: tl.constexpr, tile: tl.constexpr):
    return _vectors(begin, PART, tile) + tl.arange(0, tile.VECTOR)[None, None, :]


@jit
def _kept(span, PART: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """Whether `causal` keeps an element of a part in any row of the program: the same for all threads."""
    if form.DROPS:
        return span.begin + PART * tile.LANES * tile.VECTOR < span.longest
    else:
        return True


@jit
def _loaded(row, step, begin, end, POLICY: tl.constexpr, tile: tl.constexpr):
    """The parts of a tile that begins at `begin`, as they are in memory: all are asked for before the first is needed.

    Elements are counted from `row`, each a `step` apart. Vectors that begin at `end` or later have any values.
    """
    parts = ()
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        inside = _vectors(begin, part, tile) < end
        parts += (tl.load(row + _elements(begin, part, tile) * step, mask=inside, eviction_policy=POLICY),)  # type: ignore[assignment]
    return parts


@jit
def _logits(inputs, begin, span, POLICY: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    xs = _loaded(inputs.x, 1, begin, span.read, POLICY, tile)
    masks = xs
    if form.MASK != arithmetic.PLAIN:
        masks = _loaded(inputs.mask, inputs.mask_step, begin, span.read, "", tile)
    zs = ()
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        if _kept(span, part, form, tile):
            z = arithmetic.logits(xs[part], masks[part], inputs.scale, form.MASK)
            if form.CAUSAL:
                z = tl.where(_elements(begin, part, tile) < span.limit - span.head, z, float("-inf"))
        else:
            z = tl.full(xs[part].shape, float("-inf"), tl.float32)
        zs += (z,)  # type: ignore[assignment]
    return xs, zs


@jit
def _tops(xs, zs, tops, scale, begin, span, form: tl.constexpr, tile: tl.constexpr):
    """The maximum of z over the vectors of each lane and `tops`."""
    for part in tl.static_range(tl.constexpr(tile.PARTS)):  # apart from `_logits`: in its loop they take more registers
        if _kept(span, part, form, tile):
            if form.OF_X:  # multiplies the largest x instead of all
                top = tl.max(to_float32(xs[part]), axis=2, keep_dims=True) * scale
            else:
                top = tl.max(zs[part], axis=2, keep_dims=True)
            tops = tl.where(_vectors(begin, part, tile) < span.read, tl.maximum(tops, top), tops)
    return tops


@jit
def _exponentials(zs, top, begin, span, form: tl.constexpr, tile: tl.constexpr):
    es = ()
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        if _kept(span, part, form, tile):
            e = arithmetic.exponential(zs[part] - top)
        else:
            e = zs[part]  # not looked at
        es += (e,)  # type: ignore[assignment]
    sums = tl.full((tile.ROWS, tile.LANES, 1), 0.0, tl.float32)
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        if _kept(span, part, form, tile):
            sums += _in_lanes(es[part], begin, part, span, tile)
    return es, sums


@jit
def _in_lanes(terms, begin, PART: tl.constexpr, span, tile: tl.constexpr):
    return tl.where(_vectors(begin, PART, tile) < span.read, tl.sum(terms, axis=2, keep_dims=True), 0.0)


@jit
def _store(y, zs, es, top, norm, begin, span, form: tl.constexpr, tile: tl.constexpr):
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        if _kept(span, part, form, tile):
            result = arithmetic.normalized(zs[part] - top, es[part], norm, form.LOG)
        else:  # NaN if the row holds one
            nothing = arithmetic.normalized(float("-inf") - top, 0.0, norm, form.LOG)
            result = tl.broadcast_to(nothing, zs[part].shape)
        inside = _vectors(begin, part, tile) < span.last
        tl.store(y + _elements(begin, part, tile), from_float32(result, y.dtype.scalar.element_ty), mask=inside)


@jit
def _per_lane(block):
    """A block of one value per lane, (ROWS, LANES, 1), as (ROWS, LANES): in three dimensions, Triton would carry a copy
    per element of a vector through a loop.
    """
    return tl.max(block, axis=2)


# Sizes are arguments of their own: for integers in a tuple that are 1, or that 16 divides, Triton compiles forms anew.
# They come first: with the scale between addresses and sizes, ptxas takes more instructions to load these on sm_100.
@functools.partial(jit, do_not_specialize=[*Rows._fields, *Strides._fields])
def forward_row_kernel(
    rows, columns, queries, splits, span, size_b, size_c, x_a, x_b, x_c, mask_a, mask_b, mask_c, mask_column,
    operands, form: tl.constexpr,
):  # fmt: skip
    """Softmax of the rows of a tile, or of one longer row or piece."""
    tile: tl.constexpr = form.TILE
    trip: tl.constexpr = form.TRIP
    x, mask, y, partial, scale = operands
    rows = Rows(rows, columns, queries, splits, span)
    row, columns, begin = _position(rows, form, tile)
    x_row = row_offset(row, size_b, size_c, x_a, x_b, x_c, form.FLAT)
    mask_row = x_row
    if form.MASK != arithmetic.PLAIN:
        mask_row = row_offset(row, size_b, size_c, mask_a, mask_b, mask_c, form.FLAT)
    y_row = row.to(tl.int64) * columns
    span = _span(rows, row, columns, begin, x + x_row, form, tile)
    x_body = aligned_pointer(x, x_row + span.head, tile.VECTOR)
    y_body = aligned_pointer(y, y_row + span.head, tile.VECTOR)
    mask_column = mask_column.to(tl.int64)  # those of a transposed mask of 50,000 by 50,000 lie that far apart
    if form.MASK_ALIGNED:
        inputs = _Inputs(x_body, aligned_pointer(mask, mask_row + span.head, tile.VECTOR), 1, scale)
    else:
        inputs = _Inputs(x_body, mask + (mask_row + span.head * mask_column), mask_column, scale)

    xs, zs = _logits(inputs, begin, span, "", form, tile)
    if form.ENDS:
        end, exists, kept = _ends(span, columns, form, tile)
        x_end = tl.load(x + (x_row + end), mask=kept, other=0.0)
        mask_end = x_end
        if form.MASK != arithmetic.PLAIN:
            mask_end = tl.load(mask + (mask_row + end * mask_column), mask=kept, other=0)
        z_end = tl.where(kept, arithmetic.logits(x_end, mask_end, scale, form.MASK), float("-inf"))
    rest = begin + tile.PARTS * tile.LANES * tile.VECTOR
    TRIP: tl.constexpr = trip.PARTS * trip.LANES * trip.VECTOR
    if form.STAGE == FINISH:
        split = tl.arange(0, form.PIECES)
        pair = partial + 2 * (row * rows.splits + split)
        tops = tl.load(pair, mask=split < rows.splits, other=arithmetic.LOWEST)
        top = tl.max(tops, axis=0)
        sums = tl.load(pair + 1, mask=split < rows.splits, other=0.0) * arithmetic.exponential(tops - top)
        total = tl.sum(sums, axis=0)
        es = _exponentials(zs, top, begin, span, form, tile)[0]
    else:
        lowest = tl.full((tile.ROWS, tile.LANES, 1), arithmetic.LOWEST, tl.float32)
        tops = _tops(xs, zs, lowest, scale, begin, span, form, tile)
        if form.ENDS:
            tops = tl.maximum(tops, z_end)
        if trip.PARTS > 0:
            m = tl.full((tile.ROWS, tile.LANES), arithmetic.LOWEST, tl.float32)
            s = tl.full((tile.ROWS, tile.LANES), 0.0, tl.float32)
            for start in range(rest, span.read, TRIP):
                xs_, zs_ = _logits(inputs, start, span, "evict_last", form, trip)
                higher = _tops(xs_, zs_, m[:, :, None], scale, start, span, form, trip)
                trip_sums = _exponentials(zs_, higher, start, span, form, trip)[1]
                s = s * arithmetic.exponential(m - _per_lane(higher)) + _per_lane(trip_sums)
                m = _per_lane(higher)
            tops = tl.maximum(tops, m[:, :, None])
        top = tl.max(tops, axis=1, keep_dims=True)
        es, sums = _exponentials(zs, top, begin, span, form, tile)
        if form.ENDS:
            sums += arithmetic.exponential(z_end - top)
        if trip.PARTS > 0:
            sums += s[:, :, None] * arithmetic.exponential(m[:, :, None] - top)
        total = tl.sum(sums, axis=1, keep_dims=True)
    if form.STAGE == PARTIAL:
        tl.store(partial + 2 * tl.program_id(0), tl.max(top))  # the one number that it holds
        tl.store(partial + 2 * tl.program_id(0) + 1, tl.max(total))
    else:
        norm = arithmetic.normalizer(total, form.LOG)
        _store(y_body, zs, es, top, norm, begin, span, form, tile)
        if form.ENDS:
            result = arithmetic.normalized(z_end - top, arithmetic.exponential(z_end - top), norm, form.LOG)
            tl.store(y + (y_row + end), from_float32(result, y.dtype.element_ty), mask=exists)
        if trip.PARTS > 0:
            trips = tl.cdiv(span.last - rest, TRIP)
            for back in range(0, trips):
                start = rest + (trips - 1 - back) * TRIP
                zs_ = _logits(inputs, start, span, "evict_first", form, trip)[1]
                es_ = _exponentials(zs_, top, start, span, form, trip)[0]
                _store(y_body, zs_, es_, top, norm, start, span, form, trip)


@jit
def _summed(grad, y, begin, span, POLICY: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """Tiles of the gradient and of the result, and what the vectors of each lane add to the sum of their row."""
    dys = _loaded(grad, 1, begin, span.read, POLICY, tile)
    ys = _loaded(y, 1, begin, span.read, POLICY, tile)
    sums = tl.full((tile.ROWS, tile.LANES, 1), 0.0, tl.float32)
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        term = arithmetic.summand(to_float32(dys[part]), to_float32(ys[part]), form.LOG)
        if form.CAUSAL:
            term = tl.where(_elements(begin, part, tile) < span.limit - span.head, term, 0.0)
        sums += _in_lanes(term, begin, part, span, tile)
    return dys, ys, sums


@jit
def _store_gradient(dx, dys, ys, total, scale, begin, span, form: tl.constexpr, tile: tl.constexpr):
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        result = arithmetic.gradient(to_float32(dys[part]), to_float32(ys[part]), total, scale, form.LOG)
        if form.CAUSAL:
            result = tl.where(_elements(begin, part, tile) < span.limit - span.head, result, 0.0)
        inside = _vectors(begin, part, tile) < span.last
        tl.store(dx + _elements(begin, part, tile), from_float32(result, dx.dtype.scalar.element_ty), mask=inside)


@functools.partial(jit, do_not_specialize=Rows._fields)
def backward_row_kernel(rows, columns, queries, splits, span, operands, form: tl.constexpr):
    """The derivative of the rows of a tile, or of one longer row or piece; tiles and loops as in the forward kernel."""
    tile: tl.constexpr = form.TILE
    trip: tl.constexpr = form.TRIP
    grad, y, dx, partial, scale = operands
    rows = Rows(rows, columns, queries, splits, span)
    row, columns, begin = _position(rows, form, tile)
    base = row.to(tl.int64) * columns
    span = _span(rows, row, columns, begin, y + base, form, tile)
    grad_body = aligned_pointer(grad, base + span.head, tile.VECTOR)
    y_body = aligned_pointer(y, base + span.head, tile.VECTOR)
    dx_body = aligned_pointer(dx, base + span.head, tile.VECTOR)

    dys, ys, sums = _summed(grad_body, y_body, begin, span, "", form, tile)
    if form.ENDS:
        end, exists, kept = _ends(span, columns, form, tile)
        dy_end = to_float32(tl.load(grad + (base + end), mask=kept, other=0.0))
        y_end = to_float32(tl.load(y + (base + end), mask=kept, other=0.0))
        sums += tl.where(kept, arithmetic.summand(dy_end, y_end, form.LOG), 0.0)
    rest = begin + tile.PARTS * tile.LANES * tile.VECTOR
    TRIP: tl.constexpr = trip.PARTS * trip.LANES * trip.VECTOR
    if form.STAGE == FINISH:
        split = tl.arange(0, form.PIECES)
        total = tl.sum(tl.load(partial + row * rows.splits + split, mask=split < rows.splits, other=0.0), axis=0)
    else:
        if trip.PARTS > 0:
            trip_sums = tl.full((tile.ROWS, tile.LANES), 0.0, tl.float32)
            for start in range(rest, span.read, TRIP):
                trip_sums += _per_lane(_summed(grad_body, y_body, start, span, "evict_last", form, trip)[2])
            sums += trip_sums[:, :, None]
        total = tl.sum(sums, axis=1, keep_dims=True)
    if form.STAGE == PARTIAL:
        tl.store(partial + tl.program_id(0), tl.max(total))  # the one number that it holds
    else:
        _store_gradient(dx_body, dys, ys, total, scale, begin, span, form, tile)
        if form.ENDS:
            result = tl.where(kept, arithmetic.gradient(dy_end, y_end, total, scale, form.LOG), 0.0)
            tl.store(dx + (base + end), from_float32(result, dx.dtype.element_ty), mask=exists)
        if trip.PARTS > 0:
            trips = tl.cdiv(span.last - rest, TRIP)
            for back in range(0, trips):
                start = rest + (trips - 1 - back) * TRIP
                dys_, ys_, _ = _summed(grad_body, y_body, start, span, "evict_first", form, trip)
                _store_gradient(dx_body, dys_, ys_, total, scale, start, span, form, trip)


# ------------------------------------------------------------------------------------------------------------- launches

# Elements of a tile that one program holds in registers without spilling on any target, with 1,024 threads; forward
# half of them where vectors have one element, whose addresses take registers too.
FORWARD_TILE, BACKWARD_TILE = 32768, 16384
# Elements that a trip over the rest of a longer row takes; half of them forward, where there is a mask or vectors have
# fewer than 8, so that the registers suffice.
FORWARD_LOOP, BACKWARD_LOOP = 16384, 8192
PIECE = 8192  # elements; a piece of a row is a multiple of it
PIECE_THREADS = 512
MOST_PIECES = 256  # of a row
SHORTEST_WITH_ENDS = 64  # columns; in shorter rows the elements at both ends are too large a part
SHORT_WARPS = 4  # of a program that has several rows: fewer make so many programs that launching them takes long
SHORT_THREAD = 8  # elements of a thread there, in vectors, unless a row needs more: 32 take 1.4 to 1.7 times as long
SHORT_RUN = 64  # elements of a row that lie together in a part, where it has as many: 128 bytes of 16-bit numbers


@functools.lru_cache(maxsize=4096)
def tile_shape(columns: int, vector: int, ends: bool, per_thread: int, lanes: int) -> tuple[Tile, int]:
    """A tile that holds whole rows, and its warps.

    Up to 32 times `per_thread` columns, a row stays within a warp: no barrier and no shared memory. A thread holds
    `per_thread` elements of a row, or a quarter more. With `ends`, each of the elements at both ends needs a lane.
    """
    block = max(16, 1 << (columns - 1).bit_length())
    max_parts = max(1, per_thread // vector)
    min_lanes = max(1, min(32, SHORT_RUN // vector, block // vector))
    if ends:
        columns, min_lanes = columns // vector * vector, max(min_lanes, 2 * vector)
    across = max(min_lanes, block // (max_parts * vector))
    whole = -(-block // (across * vector))
    step = -(-whole // 4)  # a few numbers of parts are enough: a form is compiled for each
    parts = -(-columns // (across * vector * step)) * step
    if across > min_lanes and max_parts > 1 and columns <= (max_parts + step) * vector * across // 2:
        across, parts = across // 2, max_parts + step
    if across > 32:
        return Tile(parts, 1, across, vector), max(1, across // lanes)
    most = max_parts if vector == 1 else SHORT_THREAD // vector
    rows = SHORT_WARPS * lanes // across * (1 << max(1, most // parts).bit_length() - 1)
    return Tile(parts, rows, across, vector), SHORT_WARPS


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """How many programs for pieces the device runs at a time; 16 stands for a device that is interpreted."""
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count * (MOST_THREADS // PIECE_THREADS)


def _pieces(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Pieces per row and columns of each, so that few rows keep the whole device busy."""
    wished = min(_programs_at_once(device) // rows, MOST_PIECES)
    if wished < 2:
        return 1, columns
    span = -(-columns // (wished * PIECE)) * PIECE
    return -(-columns // span), span


def held_columns(columns: int, tile: int, loop: int) -> int:
    """How many columns of a row longer than a tile to hold in registers: so that its last trip masks the fewest."""
    return min((tile, tile * 3 // 4), key=lambda width: width + -(-(columns - width) // loop) * loop)


def row_begins(tensor: torch.Tensor, strides: Sequence[int]) -> list[int]:
    """Where a tensor begins, in elements, and the strides of its rows, that of columns left out."""
    return [address(tensor) // tensor.element_size(), *strides[:-1]]


def _in_step(line: int, *begins: list[int]) -> bool:
    """Whether rows of all tensors begin equally far from multiples of `line` elements."""
    return all((a - b) % line == 0 for numbers in begins[1:] for a, b in zip(begins[0], numbers, strict=True))


def _vector(line: int, columns: int, *begins: list[int]) -> tuple[int, bool]:
    """The elements of a vector, up to `line`: the most that each row can be cut into without a rest on either side.

    Or `line`, and True, if only the elements at both ends of rows keep vectors from being so long.
    """
    vector = math.gcd(line, columns, *(number for begin in begins for number in begin))
    ends = vector < line and columns >= SHORTEST_WITH_ENDS and _in_step(line, *begins)
    return (line if ends else vector), ends


def _launch(
    kernel: Any,
    operands: Any,  # `Operands` or `GradientOperands`
    rows: Rows,
    strides: Sequence[int],
    form: Form,
    vector: int,
    tile_limit: int,  # elements
    loop: int,  # elements of a trip over the rest
    partials: int,  # numbers that each piece of a row leaves
) -> None:
    """Launch once for whole rows, or twice for rows in pieces."""
    tensors, device, splits = operands[:3], operands[2].device, 1
    stages: Sequence[int] = (0,)
    columns, per_thread = rows.columns, tile_limit // MOST_THREADS
    long = columns > tile_limit
    if long:
        splits, span = _pieces(rows.rows, columns, device)
        rows, columns = rows._replace(splits=splits, span=span), held_columns(columns, tile_limit, loop)
    if splits > 1:
        stages, columns, per_thread = (1, 2), PIECE, PIECE // PIECE_THREADS
        partial = torch.empty(partials * rows.rows * splits, dtype=torch.float32, device=device)
        operands = operands._replace(partial=partial)
    tile, warps = tile_shape(columns, vector, form.ENDS, per_thread, MOST_THREADS // most_warps(device))
    trip = tile._replace(PARTS=0)
    if long:
        tile = tile._replace(ROWS=1)
        trip = tile if splits > 1 else tile._replace(PARTS=max(1, loop // (tile.LANES * vector)))
    # More branches than in programs of whole short rows take registers that there are not.
    form = form._replace(PIECES=1 if splits == 1 else MOST_PIECES, DROPS=form.CAUSAL and not long and not form.ENDS)
    form = form._replace(TILE=tile, TRIP=trip)
    sizes = (*rows, *strides)
    # What Triton compiles forms of their own for: integers that need 64 bits, addresses that 16 divides, and dtypes.
    wide = max(sizes) >= 2**31 and tuple(size >= 2**31 for size in sizes)
    key = wide, *alignments(tensors), *(tensor.dtype for tensor in tensors)
    operands = type(operands)(*map(by_address, operands[:4]), operands.scale)
    for stage in stages:
        constants = {"form": form._replace(STAGE=stage), "num_warps": warps}
        launch_kernel(kernel, device, -(-rows.rows * splits // tile.ROWS), (*sizes, operands), constants, *key)


def forward(layout: Layout, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the forward kernel into the contiguous `y`. `queries`: rows of one causal matrix, 0 for none."""
    (a, b, c), columns, x = layout.sizes, layout.x.shape[-1], layout.x
    mask, mask_kind = mask_operand(x, layout.mask)
    begins = row_begins(x, layout.x_strides)
    line = 16 // max(x.element_size(), y.element_size())
    vector, ends = _vector(line, columns, begins, row_begins(y, layout.y_strides))
    aligned = (
        mask_kind > 0
        and layout.mask_strides[-1] == 1
        and _in_step(vector, begins, row_begins(mask, layout.mask_strides))
    )
    of_x = mask_kind == 0 and not queries and scale >= 0
    form = Form(mask_kind, queries > 0, log, ends, FLAT=a * b == 1, OF_X=of_x, MASK_ALIGNED=aligned)
    rows = Rows(a * b * c, columns, max(queries, 1))
    strides = Strides(b, c, *layout.x_strides[:-1], *layout.mask_strides)
    loop = FORWARD_LOOP if vector == 8 and mask_kind == 0 else FORWARD_LOOP // 2
    tile = FORWARD_TILE if vector > 1 else FORWARD_TILE // 2
    operands = Operands(x, mask, y, y, float(scale))
    _launch(forward_row_kernel, operands, rows, strides, form, vector, tile, loop, partials=2)


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the backward kernel on contiguous tensors. `queries`: rows of one causal matrix, 0 for none."""
    columns = y.shape[-1]
    rows = Rows(y.numel() // columns, columns, max(queries, 1))
    line = 16 // max(y.element_size(), dx.element_size())
    vector, ends = _vector(line, columns, *(row_begins(tensor, ()) for tensor in (grad, y, dx)))
    form = Form(0, queries > 0, log, ends)
    operands = GradientOperands(grad, y, dx, dx, float(scale))
    _launch(backward_row_kernel, operands, rows, (), form, vector, BACKWARD_TILE, BACKWARD_LOOP, partials=1)
