"""Triton kernels for sums over the last dimension.

A program works on a tile of whole rows, or on one long row, or on a piece of one. The tile stays in registers, so that
rows which it holds are read once. What a longer row has beyond its tile is read twice: forward for the maximum and the
sum, and backward, from its end, for the result. What was read last is then read again first, while it is still in L2.

A tile is a tuple of PARTS blocks of shape (ROWS, LANES, VECTOR), which lie one after the other along the row, so that
its length need not be a power of two. A thread holds whole vectors of neighbouring columns. What can be done once per
vector instead of once per element is: asking whether it lies in the row, and rescaling the sum.

Vectors begin on 16-byte boundaries. Where rows begin elsewhere (ENDS), as every second row of an odd length does, the
tile begins at the first boundary in the row, and the elements before it and after the last whole vector, fewer than
two vectors, are handled one per lane beside the tile. Where the operands of a row begin at different distances from
the boundaries, vectors have one element.

If there are few long rows, each is cut into pieces: one launch leaves the maximum and sum of each piece, a second one
puts them together in the same order every time and writes.

Triton compiles a kernel again for an integer that is 1 and for one that 16 divides. What the kernels gain from that
the launcher finds out and passes as constants, so that nothing is left for Triton to specialise.
"""

from __future__ import annotations

import functools

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax.blocks import LOWEST, PLAIN, constant, exponential, gradient, logits, summand

WHOLE, PARTIAL, FINISH = 0, 1, 2  # what a launch does: whole rows, or pieces in two steps
_WHOLE, _PARTIAL, _FINISH = map(constant, (WHOLE, PARTIAL, FINISH))  # as kernels read it
# Arguments that no form of a kernel is compiled for.
FORWARD_GENERAL = [
    *("x", "mask", "y", "partial", "rows", "columns", "queries", "size_b", "size_c"),
    *("x_a", "x_b", "x_c", "mask_a", "mask_b", "mask_c", "mask_column", "pieces", "span"),
]
BACKWARD_GENERAL = ["grad", "y", "dx", "partial", "rows", "columns", "queries", "pieces", "span"]


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
def _before_boundary(row, VECTOR: tl.constexpr):
    """The number of elements of each row (given by its address) before the first address that vector loads can use."""
    size: tl.constexpr = row.dtype.scalar.element_ty.primitive_bitwidth // 8
    return (-(row.to(tl.int64) // size) & (VECTOR - 1)).to(tl.int32)


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
def _vectors(begin, PART: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The first element of each vector in one part of a tile that begins at `begin`."""
    return begin + (PART * LANES + tl.arange(0, LANES)[None, :, None]) * VECTOR


@jit
def _elements(begin, PART: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The elements of one part of a tile that begins at `begin`."""
    return _vectors(begin, PART, LANES, VECTOR) + tl.arange(0, VECTOR)[None, None, :]


@jit
def _kept(begin, most, PART: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Whether `causal` keeps an element of a part in any row of the program, of which `most` is the longest.

    The condition is the same for all threads. What is dropped is then neither computed nor compared, only stored.
    """
    return begin + PART * LANES * VECTOR < most


@jit
def _loaded(
    row,  # where the elements are counted from
    step,  # from one to the next
    begin,
    end,  # vectors that begin here or later are left out: their values are any
    POLICY: tl.constexpr,  # of L2
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The parts of a tile as they are in memory. All are asked for before the first is needed."""
    parts = ()
    for part in tl.static_range(PARTS):
        at = _elements(begin, part, LANES, VECTOR) * step
        values = tl.load(row + at, mask=_vectors(begin, part, LANES, VECTOR) < end, eviction_policy=POLICY)
        parts += (values,)  # type: ignore[assignment]
    return parts


@jit
def _logits(
    xs,  # a tile of x
    masks,  # a tile of the mask
    begin,
    limit,  # the first element that `causal` drops
    most,  # as in `_kept`
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """z of a tile."""
    zs = ()
    for part in tl.static_range(PARTS):
        if not DROPS:
            z = logits(xs[part], masks[part], scale, MASK)
            if CAUSAL:
                z = tl.where(_elements(begin, part, LANES, VECTOR) < limit, z, float("-inf"))
        elif _kept(begin, most, part, LANES, VECTOR):
            z = logits(xs[part], masks[part], scale, MASK)
            z = tl.where(_elements(begin, part, LANES, VECTOR) < limit, z, float("-inf"))
        else:
            z = tl.full(xs[part].shape, float("-inf"), tl.float32)
        zs += (z,)  # type: ignore[assignment]
    return zs


@jit
def _peaks(
    xs,
    zs,
    scale,
    begin,
    end,
    most,  # as in `_kept`
    least,  # where the maximum starts
    OF_X: tl.constexpr,  # the largest x makes the largest z, which saves multiplying all others
    DROPS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The maximum of z over the vectors of each lane."""
    for part in tl.static_range(PARTS):
        inside = _vectors(begin, part, LANES, VECTOR) < end
        if OF_X:
            peak = tl.max(to_float32(xs[part]), axis=2, keep_dims=True) * scale
            least = tl.where(inside, tl.maximum(least, peak), least)
        elif not DROPS:
            least = tl.where(inside, tl.maximum(least, tl.max(zs[part], axis=2, keep_dims=True)), least)
        elif _kept(begin, most, part, LANES, VECTOR):
            least = tl.where(inside, tl.maximum(least, tl.max(zs[part], axis=2, keep_dims=True)), least)
    return least


@jit
def _sums(
    terms,
    begin,
    end,
    most,  # as in `_kept`
    DROPS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The sum of a tile over the vectors of each lane."""
    sums = tl.zeros((terms[0].shape[0], LANES, 1), tl.float32)
    for part in tl.static_range(PARTS):
        inside = _vectors(begin, part, LANES, VECTOR) < end
        if not DROPS:
            sums += tl.where(inside, tl.sum(terms[part], axis=2, keep_dims=True), 0.0)
        elif _kept(begin, most, part, LANES, VECTOR):
            sums += tl.where(inside, tl.sum(terms[part], axis=2, keep_dims=True), 0.0)
    return sums


@jit
def _exponentials(
    zs,
    top,
    begin,
    most,  # as in `_kept`
    DROPS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """exp(z - top) of a tile."""
    es = ()
    for part in tl.static_range(PARTS):
        if not DROPS:
            e = exponential(zs[part] - top)
        elif _kept(begin, most, part, LANES, VECTOR):
            e = exponential(zs[part] - top)
        else:
            e = zs[part]  # not looked at
        es += (e,)  # type: ignore[assignment]
    return es


@jit
def _store(
    y,
    zs,
    es,
    top,
    shift,  # logarithm of the sum
    factor,  # 1 / sum
    begin,
    end,
    most,  # as in `_kept`
    DROPS: tl.constexpr,
    LOG: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write the result of a tile."""
    for part in tl.static_range(PARTS):
        inside = _vectors(begin, part, LANES, VECTOR) < end
        into = y + _elements(begin, part, LANES, VECTOR)
        if not DROPS:
            result = zs[part] - top - shift if LOG else es[part] * factor
        elif _kept(begin, most, part, LANES, VECTOR):
            result = zs[part] - top - shift if LOG else es[part] * factor
        else:
            nothing = float("-inf") - top - shift if LOG else 0.0 * factor  # NaN if the row holds one
            result = tl.broadcast_to(nothing, zs[part].shape)
        tl.store(into, from_float32(result, y.dtype.scalar.element_ty), mask=inside)


@jit
def _per_lane(block):
    """A block of one value per lane, (ROWS, LANES, 1), as (ROWS, LANES).

    In the three-dimensional layout, Triton keeps a copy per element of a vector; carried through a loop, every copy
    would be computed.
    """
    return tl.max(block, axis=2)


@jit
def _end_columns(head, body, columns, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The columns before a row's first whole vector and after its last, one per lane, and which lanes have one."""
    lane = tl.arange(0, LANES)[None, :, None]
    column = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    return column, tl.where(lane < VECTOR, lane < tl.minimum(head, columns), column < columns)


@functools.partial(jit, do_not_specialize=FORWARD_GENERAL)
def forward_row_kernel(
    x,  # rows over three dimensions, each with its columns side by side
    mask,  # seen as rows like x; x itself where there is none
    y,  # contiguous
    partial,  # maximum and sum of each piece of a row, one pair after the other
    rows,
    columns,
    queries,  # rows of one causal matrix
    size_b,  # sizes of the second and the third dimension of the rows
    size_c,
    x_a,  # steps of x from row to row along the three dimensions, in elements
    x_b,
    x_c,
    mask_a,  # the same of the mask
    mask_b,
    mask_c,
    mask_column,  # the mask's step from column to column
    pieces,  # of each row
    span,  # columns of a piece
    scale,  # what x is multiplied by
    MASK: tl.constexpr,  # PLAIN, BOOLEAN or ADDITIVE
    CAUSAL: tl.constexpr,  # drop the columns above the diagonal
    LOG: tl.constexpr,  # the logarithm of the softmax
    FLAT: tl.constexpr,  # one step leads from each row to the next
    OF_X: tl.constexpr,  # no mask, not causal, no negative scale: the largest x makes the largest z
    MASK_ALIGNED: tl.constexpr,  # the mask's columns lie side by side, and its vectors where those of x do
    ENDS: tl.constexpr,  # rows may begin or end off a boundary
    STAGE: tl.constexpr,  # WHOLE, PARTIAL or FINISH
    PIECES: tl.constexpr,  # power of two, no less than `pieces`
    PARTS: tl.constexpr,  # blocks of a tile
    ROWS: tl.constexpr,  # shape of a block
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOP: tl.constexpr,  # blocks that a trip over the rest of a row takes; 0: rows fit in the tile
):
    """Softmax of ROWS rows, or of one longer row or piece."""
    begin = 0
    if STAGE == _WHOLE:
        row = tl.program_id(0)
        if ROWS > 1:
            row = (row * ROWS + tl.arange(0, ROWS))[:, None, None]
            columns = tl.where(row < rows, columns, 0)
    else:
        row = tl.program_id(0) // pieces
        begin = tl.multiple_of(tl.program_id(0) % pieces * span, VECTOR)
    x_row = _row_offset(row, size_b, size_c, x_a, x_b, x_c, FLAT)
    mask_row = x_row
    if MASK != PLAIN:
        mask_row = _row_offset(row, size_b, size_c, mask_a, mask_b, mask_c, FLAT)
    y_row = row.to(tl.int64) * columns
    limit = columns
    most = 0
    # More branches than in these programs take registers that there are not.
    DROPS: tl.constexpr = CAUSAL and LOOP == 0 and STAGE == _WHOLE and not ENDS
    if CAUSAL:
        limit = tl.minimum(columns, (row % queries + 1).to(tl.int32))
        most = limit
        if ROWS > 1:
            # The last of the rows, unless another causal matrix begins among them: then it is among the longest.
            most = tl.program_id(0) * ROWS % queries + ROWS
    head = 0
    body = columns
    if ENDS:
        head = tl.minimum(_before_boundary(x + x_row, VECTOR), columns)
        body = (columns - head) // VECTOR * VECTOR
    # From here on elements are counted from the first boundary. Those to write end at `last`, those to read at `seen`.
    x_body = _aligned(x, x_row + head, VECTOR)
    y_body = _aligned(y, y_row + head, VECTOR)
    if MASK_ALIGNED:
        mask_body = _aligned(mask, mask_row + head, VECTOR)
        mask_step = 1
    else:  # in 64 bits: the columns of a transposed mask of 50,000 by 50,000 lie that far apart
        mask_step = mask_column.to(tl.int64)
        mask_body = mask + (mask_row + head * mask_step)
    last = body
    if STAGE != _WHOLE:
        last = tl.minimum(body, begin + span)
    seen = last
    if CAUSAL:
        seen = tl.minimum(last, limit - head)

    xs = _loaded(x_body, 1, begin, seen, "", PARTS, LANES, VECTOR)
    masks = xs
    if MASK != PLAIN:
        masks = _loaded(mask_body, mask_step, begin, seen, "", PARTS, LANES, VECTOR)
    zs = _logits(xs, masks, begin, limit - head, most, scale, MASK, CAUSAL, DROPS, PARTS, LANES, VECTOR)
    if ENDS:
        with_ends = columns
        if STAGE != _WHOLE:  # the first piece of a row has both of its ends
            with_ends = tl.where(begin == 0, columns, 0)
        end, there = _end_columns(head, body, with_ends, LANES, VECTOR)
        kept = there & (end < limit)
        x_end = tl.load(x + (x_row + end), mask=kept, other=0.0)
        mask_end = x_end
        if MASK != PLAIN:
            mask_end = tl.load(mask + (mask_row + end * mask_column.to(tl.int64)), mask=kept, other=0)
        z_end = tl.where(kept, logits(x_end, mask_end, scale, MASK), float("-inf"))
    rest = begin + PARTS * LANES * VECTOR
    TRIP: tl.constexpr = LOOP * LANES * VECTOR
    if STAGE == _FINISH:
        piece = tl.arange(0, PIECES)
        pair = partial + 2 * (row * pieces + piece)
        tops = tl.load(pair, mask=piece < pieces, other=LOWEST)
        top = tl.max(tops, axis=0)
        total = tl.sum(tl.load(pair + 1, mask=piece < pieces, other=0.0) * exponential(tops - top), axis=0)
        es = _exponentials(zs, top, begin, most, DROPS, PARTS, LANES, VECTOR)
    else:
        # Maxima start from the lowest finite number: from -inf, -inf - -inf would make NaN.
        lowest = tl.full((ROWS, LANES, 1), LOWEST, tl.float32)
        tops = _peaks(xs, zs, scale, begin, seen, most, lowest, OF_X, DROPS, PARTS, LANES, VECTOR)
        if ENDS:
            tops = tl.maximum(tops, z_end)
        if LOOP > 0:
            m = tl.full((ROWS, LANES), LOWEST, tl.float32)
            s = tl.zeros((ROWS, LANES), tl.float32)
            for start in range(rest, seen, TRIP):
                xs_ = _loaded(x_body, 1, start, seen, "evict_last", LOOP, LANES, VECTOR)
                masks_ = xs_
                if MASK != PLAIN:
                    masks_ = _loaded(mask_body, mask_step, start, seen, "", LOOP, LANES, VECTOR)
                zs_ = _logits(xs_, masks_, start, limit - head, most, scale, MASK, CAUSAL, DROPS, LOOP, LANES, VECTOR)
                higher = _peaks(xs_, zs_, scale, start, seen, most, m[:, :, None], OF_X, DROPS, LOOP, LANES, VECTOR)
                es_ = _exponentials(zs_, higher, start, most, DROPS, LOOP, LANES, VECTOR)
                more = _sums(es_, start, seen, most, DROPS, LOOP, LANES, VECTOR)
                s = s * exponential(m - _per_lane(higher)) + _per_lane(more)
                m = _per_lane(higher)
            tops = tl.maximum(tops, m[:, :, None])
        top = tl.max(tops, axis=1, keep_dims=True)
        es = _exponentials(zs, top, begin, most, DROPS, PARTS, LANES, VECTOR)
        sums = _sums(es, begin, seen, most, DROPS, PARTS, LANES, VECTOR)
        if ENDS:
            sums += exponential(z_end - top)
        if LOOP > 0:
            sums += s[:, :, None] * exponential(m[:, :, None] - top)
        total = tl.sum(sums, axis=1, keep_dims=True)
    if STAGE == _PARTIAL:
        tl.store(partial + 2 * tl.program_id(0), tl.max(top))  # the one number that it holds
        tl.store(partial + 2 * tl.program_id(0) + 1, tl.max(total))
    else:
        total = tl.where(total == 0.0, 1.0, total)  # asking total > 0 instead would hide a NaN
        shift, factor = tl.log(total), 1.0 / total
        _store(y_body, zs, es, top, shift, factor, begin, last, most, DROPS, LOG, PARTS, LANES, VECTOR)
        if ENDS:
            result = z_end - top - shift if LOG else exponential(z_end - top) * factor
            tl.store(y + (y_row + end), from_float32(result, y.dtype.element_ty), mask=there)
        if LOOP > 0:
            trips = tl.cdiv(last - rest, TRIP)
            for back in range(0, trips):
                start = rest + (trips - 1 - back) * TRIP
                xs_ = _loaded(x_body, 1, start, seen, "evict_first", LOOP, LANES, VECTOR)
                masks_ = xs_
                if MASK != PLAIN:
                    masks_ = _loaded(mask_body, mask_step, start, seen, "", LOOP, LANES, VECTOR)
                zs_ = _logits(xs_, masks_, start, limit - head, most, scale, MASK, CAUSAL, DROPS, LOOP, LANES, VECTOR)
                es_ = _exponentials(zs_, top, start, most, DROPS, LOOP, LANES, VECTOR)
                _store(y_body, zs_, es_, top, shift, factor, start, last, most, DROPS, LOG, LOOP, LANES, VECTOR)


@jit
def _summed(
    dys,  # tiles of the gradient and of the result
    ps,
    begin,
    end,
    limit,  # the first element that `causal` drops
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """What the vectors of each lane add to the sum of their row."""
    terms = ()
    for part in tl.static_range(PARTS):
        term = summand(to_float32(dys[part]), to_float32(ps[part]), LOG)
        if CAUSAL:
            term = tl.where(_elements(begin, part, LANES, VECTOR) < limit, term, 0.0)
        terms += (term,)  # type: ignore[assignment]
    return _sums(terms, begin, end, 0, False, PARTS, LANES, VECTOR)


@jit
def _store_gradient(
    dx,
    dys,
    ps,
    total,
    scale,
    begin,
    end,
    limit,  # the first element that `causal` drops
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Write dx of a tile."""
    for part in tl.static_range(PARTS):
        result = gradient(to_float32(dys[part]), to_float32(ps[part]), total, scale, LOG)
        if CAUSAL:
            result = tl.where(_elements(begin, part, LANES, VECTOR) < limit, result, 0.0)
        inside = _vectors(begin, part, LANES, VECTOR) < end
        into = dx + _elements(begin, part, LANES, VECTOR)
        tl.store(into, from_float32(result, dx.dtype.scalar.element_ty), mask=inside)


@functools.partial(jit, do_not_specialize=BACKWARD_GENERAL)
def backward_row_kernel(
    grad,  # gradient of the result; contiguous like y and dx
    y,  # the result
    dx,  # gradient of x
    partial,  # the sum of each piece of a row
    rows,
    columns,
    queries,  # rows of one causal matrix
    pieces,  # of each row
    span,  # columns of a piece
    scale,  # what x was multiplied by
    CAUSAL: tl.constexpr,  # columns above the diagonal are dropped
    LOG: tl.constexpr,  # y is the logarithm of the softmax
    ENDS: tl.constexpr,  # rows may begin or end off a boundary
    STAGE: tl.constexpr,  # WHOLE, PARTIAL or FINISH
    PIECES: tl.constexpr,  # power of two, no less than `pieces`
    PARTS: tl.constexpr,  # blocks of a tile
    ROWS: tl.constexpr,  # shape of a block
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    LOOP: tl.constexpr,  # blocks that a trip over the rest of a row takes; 0: rows fit in the tile
):
    """The derivative of ROWS rows, or of one longer row or piece; tiles and loops as in the forward kernel."""
    begin = 0
    if STAGE == _WHOLE:
        row = tl.program_id(0)
        if ROWS > 1:
            row = (row * ROWS + tl.arange(0, ROWS))[:, None, None]
            columns = tl.where(row < rows, columns, 0)
    else:
        row = tl.program_id(0) // pieces
        begin = tl.multiple_of(tl.program_id(0) % pieces * span, VECTOR)
    base = row.to(tl.int64) * columns
    limit = columns
    if CAUSAL:
        limit = tl.minimum(columns, (row % queries + 1).to(tl.int32))
    head = 0
    body = columns
    if ENDS:
        head = tl.minimum(_before_boundary(y + base, VECTOR), columns)
        body = (columns - head) // VECTOR * VECTOR
    grad_body = _aligned(grad, base + head, VECTOR)
    y_body = _aligned(y, base + head, VECTOR)
    dx_body = _aligned(dx, base + head, VECTOR)
    last = body
    if STAGE != _WHOLE:
        last = tl.minimum(body, begin + span)
    seen = last
    if CAUSAL:
        seen = tl.minimum(last, limit - head)
    dropped = limit - head

    dys = _loaded(grad_body, 1, begin, seen, "", PARTS, LANES, VECTOR)
    ps = _loaded(y_body, 1, begin, seen, "", PARTS, LANES, VECTOR)
    if ENDS:
        with_ends = columns
        if STAGE != _WHOLE:  # the first piece of a row has both of its ends
            with_ends = tl.where(begin == 0, columns, 0)
        end, there = _end_columns(head, body, with_ends, LANES, VECTOR)
        kept = there & (end < limit)
        dy_end = to_float32(tl.load(grad + (base + end), mask=kept, other=0.0))
        p_end = to_float32(tl.load(y + (base + end), mask=kept, other=0.0))
    rest = begin + PARTS * LANES * VECTOR
    TRIP: tl.constexpr = LOOP * LANES * VECTOR
    if STAGE == _FINISH:
        piece = tl.arange(0, PIECES)
        total = tl.sum(tl.load(partial + row * pieces + piece, mask=piece < pieces, other=0.0), axis=0)
    else:
        sums = _summed(dys, ps, begin, seen, dropped, CAUSAL, LOG, PARTS, LANES, VECTOR)
        if ENDS:
            sums += tl.where(kept, summand(dy_end, p_end, LOG), 0.0)
        if LOOP > 0:
            more = tl.zeros((ROWS, LANES), tl.float32)
            for start in range(rest, seen, TRIP):
                dys_ = _loaded(grad_body, 1, start, seen, "evict_last", LOOP, LANES, VECTOR)
                ps_ = _loaded(y_body, 1, start, seen, "evict_last", LOOP, LANES, VECTOR)
                more += _per_lane(_summed(dys_, ps_, start, seen, dropped, CAUSAL, LOG, LOOP, LANES, VECTOR))
            sums += more[:, :, None]
        total = tl.sum(sums, axis=1, keep_dims=True)
    if STAGE == _PARTIAL:
        tl.store(partial + tl.program_id(0), tl.max(total))  # the one number that it holds
    else:
        _store_gradient(dx_body, dys, ps, total, scale, begin, last, dropped, CAUSAL, LOG, PARTS, LANES, VECTOR)
        if ENDS:
            result = tl.where(kept, gradient(dy_end, p_end, total, scale, LOG), 0.0)
            tl.store(dx + (base + end), from_float32(result, dx.dtype.element_ty), mask=there)
        if LOOP > 0:
            trips = tl.cdiv(last - rest, TRIP)
            for back in range(0, trips):
                start = rest + (trips - 1 - back) * TRIP
                dys_ = _loaded(grad_body, 1, start, seen, "evict_first", LOOP, LANES, VECTOR)
                ps_ = _loaded(y_body, 1, start, seen, "evict_first", LOOP, LANES, VECTOR)
                _store_gradient(
                    dx_body, dys_, ps_, total, scale, start, last, dropped, CAUSAL, LOG, LOOP, LANES, VECTOR
                )
