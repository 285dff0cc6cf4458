"""Triton kernels for sums over the last dimension.

Rows up to one block are read once and stay in registers, several of them per program where short; longer rows are read
twice, and where there are few of them each is cut into pieces for several programs: one launch leaves the maximum and
sum of each piece, a second one puts them together in the same order every time and writes.

Columns that `causal` drops are not loaded: the limit is rounded up to 16 columns so that the compiler still sees that
neighbouring lanes share the mask and loads 128 bits at a time.

Where a row begins off a 16-byte boundary, as every second row of an odd length does, its block begins at the boundary
below: LINE elements lie between the boundaries (0 where the compiler sees that all rows begin on one), the first
`lead` of the block belong to the row before. A line that holds an element of the row is loaded whole, which never
touches a page without one, and what is not the row's is set aside; lines that are the row's are stored whole, the few
elements at its two ends one by one.

Triton compiles a kernel again for an integer that is 1 and for one that 16 divides. Of columns and strides it learns
so where accesses can be wide. Of the numbers that are not to be specialised, which change with every batch and
sequence length, it would learn nothing.
"""

from __future__ import annotations

import functools

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax.blocks import BOOLEAN, LOWEST, PLAIN, constant, gradient, logits, summand

WHOLE, PARTIAL, FINISH = constant(0), constant(1), constant(2)  # stages of a long row


@jit
def _row_offset(row, size_b, size_c, stride_a, stride_b, stride_c, FLAT: tl.constexpr):
    """Where a row begins, in elements. FLAT: one stride tells."""
    if FLAT:
        return row.to(tl.int64) * stride_c
    else:
        rest = row // size_c
        within = (row % size_c).to(tl.int64) * stride_c + (rest % size_b).to(tl.int64) * stride_b
        return within + (rest // size_b).to(tl.int64) * stride_a


@jit
def _lead(row, LINE: tl.constexpr):
    """How many elements each row begins after the boundary below."""
    size: tl.constexpr = row.dtype.scalar.element_ty.primitive_bitwidth // 8
    return (row.to(tl.int64) // size % LINE).to(tl.int32)


@jit
def _round_up(x, LINE: tl.constexpr):
    return (x + (LINE - 1)) // LINE * LINE


@jit
def _round_down(x, LINE: tl.constexpr):
    return x // LINE * LINE


@jit
def _along(mask, column, mask_column):
    """Where a row of the mask has its columns. In 64 bits: of a transposed mask of 50,000 by 50,000 they lie so far."""
    return mask + column.to(tl.int64) * mask_column


@jit
def _ends(lead, columns, LINE: tl.constexpr):
    """The columns of a row, or rows, before its first whole line and after its last, and which of these there are."""
    lane = tl.arange(0, 2 * LINE)[None, :]
    column = tl.where(lane < LINE, lane, _round_down(lead + columns, LINE) - lead + lane - LINE)
    return column, tl.where(lane < LINE, lane < _round_up(lead, LINE) - lead, column < columns)


@jit
def _window(at, lead, columns, limit, loaded, LINE: tl.constexpr):
    """The columns of a block that stand `at` lanes from the boundary below the row; which to load; which count."""
    column = at - lead
    if LINE > 0:
        return column, at < loaded, (column >= 0) & (column < limit)
    else:
        return column, (at < columns) & (at < loaded), at < limit


@jit
def _writable(at, lead, columns, LINE: tl.constexpr, IN_STEP: tl.constexpr):
    """Which of a block to store: if in step, whole lines."""
    if LINE == 0:
        return at < columns
    elif IN_STEP:
        return (at >= _round_up(lead, LINE)) & (at < _round_down(lead + columns, LINE))
    else:
        return (at >= lead) & (at < lead + columns)


@functools.partial(jit, do_not_specialize=["rows", "queries", "size_b", "size_c"])
def forward_tile_kernel(
    x,
    mask,
    y,
    rows,
    columns,
    queries,  # rows of one causal matrix
    size_b,
    size_c,
    x_a,
    x_b,
    x_c,
    mask_a,
    mask_b,
    mask_c,
    mask_column,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,  # 2^31 rows or more
    LINE: tl.constexpr,
    MASK_IN_STEP: tl.constexpr,  # rows of the mask begin where those of x do, seen from the boundaries
    Y_IN_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole rows of at most BLOCK columns."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    column = at
    exists = (row < rows)[:, None]
    x += _row_offset(row, size_b, size_c, x_a, x_b, x_c, FLAT)
    limit = columns
    if CAUSAL:
        limit = (row % queries + 1)[:, None]
    if LINE > 0:
        lead = _lead(x, LINE)[:, None]
        column = at - lead
        if CAUSAL:
            limit = tl.minimum(limit, columns).to(tl.int32)
        real = exists & _writable(at, lead, columns, LINE, False)
        inside = exists & (at < _round_up(lead + limit, LINE))
        x_block = tl.multiple_of(x - _lead(x, LINE), 16)[:, None] + at
    else:
        real = exists & (column < columns)
        inside = real
        if CAUSAL:
            inside = real & (column < _round_up(limit, 16))
        x_block = x[:, None] + at
    kept = real
    if CAUSAL:
        kept = real & (column < limit)
    mask_inside = inside
    mask_block = mask
    if MASK != PLAIN:
        mask += _row_offset(row, size_b, size_c, mask_a, mask_b, mask_c, FLAT)
        if LINE > 0 and MASK_IN_STEP:
            mask_block = tl.multiple_of(mask - _lead(x, LINE), LINE if MASK == BOOLEAN else 16)[:, None] + at
        else:
            mask_block = _along(mask[:, None], column, mask_column)
            if LINE > 0:
                mask_inside = kept
    z = logits(x_block, mask_block, inside, mask_inside, kept, scale, MASK, "")
    top = tl.maximum(tl.max(z, axis=1), LOWEST)[:, None]  # LOWEST: -inf - -inf would be NaN
    z -= top
    e = tl.exp(z)
    s = tl.sum(e, axis=1)
    s = tl.where(s == 0.0, 1.0, s)[:, None]  # asking s > 0 instead would hide a NaN
    result = z - tl.log(s) if LOG else e * (1.0 / s)
    y += row.to(tl.int64) * columns
    if LINE > 0 and Y_IN_STEP:
        whole = exists & _writable(at, lead, columns, LINE, True)
        y_block = tl.multiple_of(y - _lead(x, LINE), 16)[:, None] + at
        tl.store(y_block, from_float32(result, y.dtype.scalar.element_ty), mask=whole)
        column, there = _ends(lead, columns, LINE)
        there = exists & there
        kept = there & (column < limit)
        if MASK != PLAIN:
            mask_block = _along(mask[:, None], column, mask_column)
        z = logits(x[:, None] + column, mask_block, kept, kept, kept, scale, MASK, "") - top
        result = z - tl.log(s) if LOG else tl.exp(z) * (1.0 / s)
        tl.store(y[:, None] + column, from_float32(result, y.dtype.scalar.element_ty), mask=there)
    else:
        tl.store(y[:, None] + column, from_float32(result, y.dtype.scalar.element_ty), mask=real)


@functools.partial(jit, do_not_specialize=["rows", "queries", "size_b", "size_c", "pieces"])
def forward_long_kernel(
    x,
    mask,
    y,
    partial,  # maximum and sum of each piece, one pair after the other
    rows,
    columns,
    queries,
    size_b,
    size_c,
    x_a,
    x_b,
    x_c,
    mask_a,
    mask_b,
    mask_c,
    mask_column,
    pieces,  # per row
    span,  # columns of a piece
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    FLAT: tl.constexpr,
    WIDE: tl.constexpr,
    LINE: tl.constexpr,
    MASK_IN_STEP: tl.constexpr,
    Y_IN_STEP: tl.constexpr,
    STAGE: tl.constexpr,  # WHOLE rows, or PARTIAL and then FINISH for rows in pieces
    PIECES: tl.constexpr,  # no less than `pieces`
    BLOCK: tl.constexpr,
):
    """A row of any length, or a piece of one, in two passes."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program
    begin = 0
    if STAGE != WHOLE:
        row = program // pieces
        begin = program % pieces * span
    x += _row_offset(row, size_b, size_c, x_a, x_b, x_c, FLAT)
    if MASK != PLAIN:
        mask += _row_offset(row, size_b, size_c, mask_a, mask_b, mask_c, FLAT)
    limit = columns
    if CAUSAL:
        limit = tl.minimum(limit, (row % queries + 1).to(tl.int32))
    lead = 0
    x_line, mask_line = x, mask
    loaded = _round_up(limit, 16)
    if LINE > 0:
        lead = _lead(x, LINE)
        loaded = _round_up(lead + limit, LINE)
        x_line = tl.multiple_of(x - lead, 16)
        if MASK != PLAIN and MASK_IN_STEP:
            mask_line = tl.multiple_of(mask - lead, LINE if MASK == BOOLEAN else 16)
    first_end = lead + limit
    last_end = lead + columns
    if STAGE != WHOLE:
        first_end = tl.minimum(first_end, begin + span)
        last_end = tl.minimum(last_end, begin + span)
    lane = tl.arange(0, BLOCK)
    if STAGE != FINISH:
        # Lane by lane, so that the loop holds no reduction across threads.
        m = tl.full((BLOCK,), LOWEST, tl.float32)
        s = tl.zeros((BLOCK,), tl.float32)
        for start in range(begin, first_end, BLOCK):
            at = start + lane
            column, inside, kept = _window(at, lead, columns, limit, loaded, LINE)
            mask_block = mask_line + at
            mask_inside = inside
            if LINE == 0 or not MASK_IN_STEP:
                mask_block = _along(mask, column, mask_column)
                if LINE > 0:
                    mask_inside = kept
            z = logits(x_line + at, mask_block, inside, mask_inside, kept, scale, MASK, "evict_last")
            higher = tl.maximum(m, z)
            s = s * tl.exp(m - higher) + tl.exp(z - higher)
            m = higher
        top = tl.max(m, axis=0)
        total = tl.sum(s * tl.exp(m - top), axis=0)
    if STAGE == PARTIAL:
        tl.store(partial + 2 * program, top)
        tl.store(partial + 2 * program + 1, total)
    else:
        if STAGE == FINISH:
            piece = tl.arange(0, PIECES)
            pair = partial + 2 * (row * pieces + piece)
            m = tl.load(pair, mask=piece < pieces, other=LOWEST)
            top = tl.max(m, axis=0)
            total = tl.sum(tl.load(pair + 1, mask=piece < pieces, other=0.0) * tl.exp(m - top), axis=0)
        total = tl.where(total == 0.0, 1.0, total)
        shift, factor = tl.log(total), 1.0 / total
        y_line = y + (row.to(tl.int64) * columns - lead)
        if LINE > 0 and Y_IN_STEP:
            y_line = tl.multiple_of(y_line, 16)
        for start in range(begin, last_end, BLOCK):
            at = start + lane
            column, inside, kept = _window(at, lead, columns, limit, loaded, LINE)
            real = _writable(at, lead, columns, LINE, Y_IN_STEP)
            mask_block = mask_line + at
            mask_inside = inside
            if LINE == 0 or not MASK_IN_STEP:
                mask_block = _along(mask, column, mask_column)
                if LINE > 0:
                    mask_inside = kept
            z = logits(x_line + at, mask_block, inside, mask_inside, kept, scale, MASK, "evict_first") - top
            result = z - shift if LOG else tl.exp(z) * factor
            tl.store(y_line + at, from_float32(result, y.dtype.element_ty), mask=real)
        if LINE > 0 and Y_IN_STEP:
            if begin == 0:
                column, there = _ends(lead, columns, LINE)
                at = column + lead
                kept = there & (column < limit)
                mask_block = _along(mask, column, mask_column)
                z = logits(x_line + at, mask_block, kept, kept, kept, scale, MASK, "") - top
                result = z - shift if LOG else tl.exp(z) * factor
                tl.store(y_line + at, from_float32(result, y.dtype.element_ty), mask=there)


@functools.partial(jit, do_not_specialize=["rows", "queries"])
def backward_tile_kernel(
    grad,
    y,
    dx,
    rows,
    columns,
    queries,
    scale,
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    WIDE: tl.constexpr,
    LINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole rows of at most BLOCK columns; everything contiguous, and in step if LINE is not 0."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    column = at
    exists = (row < rows)[:, None]
    limit = columns
    if CAUSAL:
        limit = (row % queries + 1)[:, None]
    base = row.to(tl.int64) * columns
    if LINE > 0:
        lead = _lead(y + base, LINE)
        grad_block = tl.multiple_of(grad + (base - lead), 16)[:, None] + at
        y_block = tl.multiple_of(y + (base - lead), 16)[:, None] + at
        dx_block = tl.multiple_of(dx + (base - lead), 16)[:, None] + at
        lead = lead[:, None]
        column = at - lead
        if CAUSAL:
            limit = tl.minimum(limit, columns).to(tl.int32)
        real = exists & _writable(at, lead, columns, LINE, True)
        inside = exists & (at < _round_up(lead + limit, LINE))
        kept = exists & (column >= 0) & (column < limit)
    else:
        offset = base[:, None] + at
        grad_block, y_block, dx_block = grad + offset, y + offset, dx + offset
        real = exists & (column < columns)
        inside, kept = real, real
        if CAUSAL:
            kept = real & (column < limit)
            inside = real & (column < _round_up(limit, 16))
    dy = to_float32(tl.load(grad_block, mask=inside, other=0.0))
    p = to_float32(tl.load(y_block, mask=inside, other=0.0))
    total = tl.sum(summand(dy, p, kept, LOG), axis=1)[:, None]
    result = gradient(dy, p, total, scale, kept, LOG)
    tl.store(dx_block, from_float32(result, dx.dtype.element_ty), mask=real)
    if LINE > 0:
        column, there = _ends(lead, columns, LINE)
        there = exists & there
        kept = there & (column < limit)
        offset = base[:, None] + column
        dy = to_float32(tl.load(grad + offset, mask=kept, other=0.0))
        p = to_float32(tl.load(y + offset, mask=kept, other=0.0))
        result = gradient(dy, p, total, scale, kept, LOG)
        tl.store(dx + offset, from_float32(result, dx.dtype.element_ty), mask=there)


@functools.partial(jit, do_not_specialize=["rows", "queries", "pieces"])
def backward_long_kernel(
    grad,
    y,
    dx,
    partial,  # the sum of each piece
    rows,
    columns,
    queries,
    pieces,
    span,
    scale,
    CAUSAL: tl.constexpr,
    LOG: tl.constexpr,
    WIDE: tl.constexpr,
    LINE: tl.constexpr,
    STAGE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of any length, or a piece of one, in two passes; contiguous and in step as in the tile kernel."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    row = program
    begin = 0
    if STAGE != WHOLE:
        row = program // pieces
        begin = program % pieces * span
    base = row.to(tl.int64) * columns
    grad += base
    y += base
    dx += base
    limit = columns
    if CAUSAL:
        limit = tl.minimum(limit, (row % queries + 1).to(tl.int32))
    lead = 0
    grad_line, y_line, dx_line = grad, y, dx
    loaded = _round_up(limit, 16)
    if LINE > 0:
        lead = _lead(y, LINE)
        loaded = _round_up(lead + limit, LINE)
        grad_line, y_line = tl.multiple_of(grad - lead, 16), tl.multiple_of(y - lead, 16)
        dx_line = tl.multiple_of(dx - lead, 16)
    first_end = lead + limit
    last_end = lead + columns
    if STAGE != WHOLE:
        first_end = tl.minimum(first_end, begin + span)
        last_end = tl.minimum(last_end, begin + span)
    lane = tl.arange(0, BLOCK)
    if STAGE != FINISH:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(begin, first_end, BLOCK):
            at = start + lane
            column, inside, kept = _window(at, lead, columns, limit, loaded, LINE)
            dy = to_float32(tl.load(grad_line + at, mask=inside, other=0.0, eviction_policy="evict_last"))
            p = to_float32(tl.load(y_line + at, mask=inside, other=0.0, eviction_policy="evict_last"))
            sums += summand(dy, p, kept, LOG)
        total = tl.sum(sums, axis=0)
    if STAGE == PARTIAL:
        tl.store(partial + program, total)
    else:
        if STAGE == FINISH:
            piece = tl.arange(0, PIECES)
            total = tl.sum(tl.load(partial + row * pieces + piece, mask=piece < pieces, other=0.0), axis=0)
        for start in range(begin, last_end, BLOCK):
            at = start + lane
            column, inside, kept = _window(at, lead, columns, limit, loaded, LINE)
            real = _writable(at, lead, columns, LINE, True)
            dy = to_float32(tl.load(grad_line + at, mask=inside, other=0.0, eviction_policy="evict_first"))
            p = to_float32(tl.load(y_line + at, mask=inside, other=0.0, eviction_policy="evict_first"))
            result = gradient(dy, p, total, scale, kept, LOG)
            tl.store(dx_line + at, from_float32(result, dx.dtype.element_ty), mask=real)
        if LINE > 0:
            if begin == 0:
                column, there = _ends(lead, columns, LINE)
                at = column + lead
                kept = there & (column < limit)
                dy = to_float32(tl.load(grad_line + at, mask=kept, other=0.0))
                p = to_float32(tl.load(y_line + at, mask=kept, other=0.0))
                result = gradient(dy, p, total, scale, kept, LOG)
                tl.store(dx_line + at, from_float32(result, dx.dtype.element_ty), mask=there)
