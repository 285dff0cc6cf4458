"""Softmax and log-softmax with scale, mask and causal mask, forward and backward.

Over one dimension, with ``z = scale * x + mask``; a boolean mask (True = keep) and ``causal`` put -inf where they drop:

    m = max(z)    e = exp(z - m)    s = sum(e)
    softmax:      y = e / s                     dx = scale * y * (dy - sum(dy * y))
    log-softmax:  y = (z - m) - log(s)          dx = scale * (dy - exp(y) * sum(dy))

All of it in fp32 (fp64 when input or output is fp64); `scale` is never rounded to 16 bits.

Rules for the values that are not numbers, the same in every implementation:

* A row with nothing to keep (all -inf, masked or not) is 0, its logarithm -inf, its gradient 0.
* -inf elsewhere gives 0 (log: -inf), never NaN. An output of -inf is a constant: gradients that reach it are ignored.
* NaN or +inf that is kept makes the whole row NaN, as in torch. What a boolean mask or `causal` drops is not looked at.

Bytes per element: forward reads `x` once and writes `y` once (read twice beyond one block of the GPU kernel); backward
reads `dy` and `y` and writes `dx`. Neither `x` nor a mask is kept for the backward. `causal` reads the lower triangle
only, about half. Masks are read through their strides, so a broadcast mask costs its own size, not that of `x`.
No copy is made for a dimension that is not the last one, nor for a transposed `x`; one is for strides that leave no two
neighbours together, for `causal` on a transposed `x`, and for a gradient that is not contiguous.

Online rescaling for long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. Starting `m`
from the lowest finite number instead of -inf is what keeps blocks of -inf from making NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import MOST_THREADS, jit, most_warps, on_device, resolve, tl
from halfstep.kernels.multi_tensor import DTYPE_CODES, address, check_addresses
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.variant import Variant

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_LARGEST_SCALE = torch.finfo(torch.float32).max
# The kernels count the elements of a row in 32 bits, and look up to a few blocks beyond its end.
LONGEST = 2**31 - 2**20
# On a CPU torch's own backward of fp32 rows up to this length is the same formula and takes 4 to 30% less time, as it
# is called without ctypes; over longer rows its sum loses digits (41 against 6 units in the last place at 2^20 fp32
# columns). In 16-bit formats ours is the faster one.
TORCHS_ROWS = 2**14

# --------------------------------------------------------------------------------------------------------- reference


def _math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _dropped_by_causal(x: torch.Tensor) -> torch.Tensor:
    """True above the diagonal of the last two dimensions."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def reference_forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The specification of the forward pass in plain torch, on any device."""
    compute = _math_dtype(x.dtype, dtype)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    z = x.to(compute) * scale
    if mask is not None:
        z = torch.where(mask, z, -math.inf) if mask.dtype == torch.bool else z + mask.to(compute)
    if causal:
        z = z.masked_fill(_dropped_by_causal(x), -math.inf)
    # Not below the lowest finite number: -inf - -inf would be NaN. A NaN passes through clamp.
    z = z - z.amax(dim, keepdim=True).clamp(min=torch.finfo(compute).min)
    e = z.exp()
    s = e.sum(dim, keepdim=True)
    s = torch.where(s == 0, 1.0, s)  # asking s > 0 instead would hide a NaN
    y = z - s.log() if log else e / s
    return y.to(dtype).contiguous()


def reference_backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The specification of the backward pass in plain torch, on any device."""
    compute = _math_dtype(grad.dtype, y.dtype, dtype)
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=dtype, device=y.device)
    dy, p = grad.to(compute), y.to(compute)
    if causal:  # before anything is multiplied: NaN above the diagonal is not looked at
        dropped = _dropped_by_causal(y)
        dy, p = dy.masked_fill(dropped, 0.0), p.masked_fill(dropped, -math.inf if log else 0.0)
    if log:
        dy = dy.masked_fill(p == -math.inf, 0.0)
        dx = (scale * (dy - p.exp() * dy.sum(dim, keepdim=True))).masked_fill(p == -math.inf, 0.0)
    else:
        dx = scale * (p * (dy - (dy * p).sum(dim, keepdim=True)))
    if causal:
        dx = dx.masked_fill(dropped, 0.0)
    return dx.to(dtype).contiguous()


# ----------------------------------------------------------------------------------------------------------- kernels
# Rows up to one block are read once and stay in registers, several of them per program where short; longer rows
# are read twice, and where there are few of them each is cut into pieces for several programs: one launch leaves the
# maximum and sum of each piece, a second one puts them together in the same order every time and writes. A dimension
# that is not the last one has kernels of its own, whose tiles keep neighbouring elements in neighbouring lanes.
#
# Columns that `causal` drops are not loaded: the limit is rounded up to 16 columns so that the compiler still sees that
# neighbouring lanes share the mask and loads 128 bits at a time.
#
# Where a row begins off a 16-byte boundary, as every second row of an odd length does, its block begins at the boundary
# below: LINE elements lie between the boundaries (0 where the compiler sees that all rows begin on one), the first
# `lead` of the block belong to the row before. A line that holds an element of the row is loaded whole, which never
# touches a page without one, and what is not the row's is set aside; lines that are the row's are stored whole, the few
# elements at its two ends one by one.
#
# Triton compiles a kernel anew for an integer that is 1 and for one that 16 divides. Of columns and strides it learns
# so where accesses can be wide. Of the numbers that are not to be specialised, which change with every batch and
# sequence length, it would learn nothing.

if tl is not None:
    LOWEST = tl.constexpr(-3.4028234663852886e38)
    PLAIN, BOOLEAN, ADDITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
    WHOLE, PARTIAL, FINISH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def _up(x, LINE: tl.constexpr):
    return (x + (LINE - 1)) // LINE * LINE


@jit
def _down(x, LINE: tl.constexpr):
    return x // LINE * LINE


@jit
def _along(mask, column, mask_column):
    """Where a row of the mask has its columns. In 64 bits: of a transposed mask of 50,000 by 50,000 they lie so far."""
    return mask + column.to(tl.int64) * mask_column


@jit
def _ends(lead, columns, LINE: tl.constexpr):
    """The columns of a row, or rows, before its first whole line and after its last, and which of these there are."""
    lane = tl.arange(0, 2 * LINE)[None, :]
    column = tl.where(lane < LINE, lane, _down(lead + columns, LINE) - lead + lane - LINE)
    return column, tl.where(lane < LINE, lane < _up(lead, LINE) - lead, column < columns)


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
        return (at >= _up(lead, LINE)) & (at < _down(lead + columns, LINE))
    else:
        return (at >= lead) & (at < lead + columns)


@jit
def _logits(x, mask, inside, mask_inside, kept, scale, MASK: tl.constexpr, POLICY: tl.constexpr):
    """A block of z in fp32. `x` and `mask` point at the elements, the insides say which to load, `kept` which count."""
    z = to_float32(tl.load(x, mask=inside, other=0.0, eviction_policy=POLICY)) * scale
    if MASK == BOOLEAN:
        kept = kept & (tl.load(mask, mask=mask_inside, other=0) != 0)
    elif MASK == ADDITIVE:
        z += to_float32(tl.load(mask, mask=mask_inside, other=0.0))
    return tl.where(kept, z, float("-inf"))


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
        inside = exists & (at < _up(lead + limit, LINE))
        x_block = tl.multiple_of(x - _lead(x, LINE), 16)[:, None] + at
    else:
        real = exists & (column < columns)
        inside = real
        if CAUSAL:
            inside = real & (column < _up(limit, 16))
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
    z = _logits(x_block, mask_block, inside, mask_inside, kept, scale, MASK, "")
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
        z = _logits(x[:, None] + column, mask_block, kept, kept, kept, scale, MASK, "") - top
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
    loaded = _up(limit, 16)
    if LINE > 0:
        lead = _lead(x, LINE)
        loaded = _up(lead + limit, LINE)
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
            z = _logits(x_line + at, mask_block, inside, mask_inside, kept, scale, MASK, "evict_last")
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
            z = _logits(x_line + at, mask_block, inside, mask_inside, kept, scale, MASK, "evict_first") - top
            result = z - shift if LOG else tl.exp(z) * factor
            tl.store(y_line + at, from_float32(result, y.dtype.element_ty), mask=real)
        if LINE > 0 and Y_IN_STEP:
            if begin == 0:
                column, there = _ends(lead, columns, LINE)
                at = column + lead
                kept = there & (column < limit)
                mask_block = _along(mask, column, mask_column)
                z = _logits(x_line + at, mask_block, kept, kept, kept, scale, MASK, "") - top
                result = z - shift if LOG else tl.exp(z) * factor
                tl.store(y_line + at, from_float32(result, y.dtype.element_ty), mask=there)


@jit
def _gradient(dy, p, total, scale, kept, LOG: tl.constexpr):
    """dx of a block; `total` is sum(dy) or sum(dy * y)."""
    if LOG:
        return tl.where(kept & (p != float("-inf")), (dy - tl.exp(p) * total) * scale, 0.0)
    else:
        return tl.where(kept, p * (dy - total) * scale, 0.0)


@jit
def _share(dy, p, kept, LOG: tl.constexpr):
    """What a block adds to `total`."""
    if LOG:
        return tl.where(kept & (p != float("-inf")), dy, 0.0)
    else:
        return tl.where(kept, dy * p, 0.0)


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
        inside = exists & (at < _up(lead + limit, LINE))
        kept = exists & (column >= 0) & (column < limit)
    else:
        offset = base[:, None] + at
        grad_block, y_block, dx_block = grad + offset, y + offset, dx + offset
        real = exists & (column < columns)
        inside, kept = real, real
        if CAUSAL:
            kept = real & (column < limit)
            inside = real & (column < _up(limit, 16))
    dy = to_float32(tl.load(grad_block, mask=inside, other=0.0))
    p = to_float32(tl.load(y_block, mask=inside, other=0.0))
    total = tl.sum(_share(dy, p, kept, LOG), axis=1)[:, None]
    result = _gradient(dy, p, total, scale, kept, LOG)
    tl.store(dx_block, from_float32(result, dx.dtype.element_ty), mask=real)
    if LINE > 0:
        column, there = _ends(lead, columns, LINE)
        there = exists & there
        kept = there & (column < limit)
        offset = base[:, None] + column
        dy = to_float32(tl.load(grad + offset, mask=kept, other=0.0))
        p = to_float32(tl.load(y + offset, mask=kept, other=0.0))
        result = _gradient(dy, p, total, scale, kept, LOG)
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
    loaded = _up(limit, 16)
    if LINE > 0:
        lead = _lead(y, LINE)
        loaded = _up(lead + limit, LINE)
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
            sums += _share(dy, p, kept, LOG)
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
            result = _gradient(dy, p, total, scale, kept, LOG)
            tl.store(dx_line + at, from_float32(result, dx.dtype.element_ty), mask=real)
        if LINE > 0:
            if begin == 0:
                column, there = _ends(lead, columns, LINE)
                at = column + lead
                kept = there & (column < limit)
                dy = to_float32(tl.load(grad_line + at, mask=kept, other=0.0))
                p = to_float32(tl.load(y_line + at, mask=kept, other=0.0))
                result = _gradient(dy, p, total, scale, kept, LOG)
                tl.store(dx_line + at, from_float32(result, dx.dtype.element_ty), mask=there)


@functools.partial(jit, do_not_specialize=["size_b", "tiles"])
def forward_strided_kernel(
    x,
    mask,
    y,
    columns,
    size_b,
    size_c,
    x_a,
    x_b,
    x_c,
    x_column,
    mask_a,
    mask_b,
    mask_c,
    mask_column,
    y_a,
    y_b,
    y_c,
    y_column,
    tiles,  # that size_c takes
    scale,
    MASK: tl.constexpr,
    LOG: tl.constexpr,
    ONE_PASS: tl.constexpr,  # columns <= COLUMNS
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH sums side by side, for a dimension in which neighbours lie apart, COLUMNS of each at a time."""
    program = tl.program_id(0)
    a, b = program // tiles // size_b, program // tiles % size_b
    c = (program % tiles).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    side = (c < size_c)[None, :]
    x += a.to(tl.int64) * x_a + b.to(tl.int64) * x_b
    y += a.to(tl.int64) * y_a + b.to(tl.int64) * y_b
    if MASK != PLAIN:
        mask += a.to(tl.int64) * mask_a + b.to(tl.int64) * mask_b
    x_side, mask_side, y_side = (c * x_c)[None, :], (c * mask_c)[None, :], (c * y_c)[None, :]
    lane = tl.arange(0, COLUMNS)
    if ONE_PASS:
        column = lane.to(tl.int64)[:, None]
        inside = (column < columns) & side
        mask_block = mask + (column * mask_column + mask_side)
        z = _logits(x + (column * x_column + x_side), mask_block, inside, inside, inside, scale, MASK, "")
        z -= tl.maximum(tl.max(z, axis=0), LOWEST)[None, :]
        e = tl.exp(z)
        s = tl.sum(e, axis=0)
        s = tl.where(s == 0.0, 1.0, s)[None, :]
        result = z - tl.log(s) if LOG else e * (1.0 / s)
        tl.store(y + (column * y_column + y_side), from_float32(result, y.dtype.element_ty), mask=inside)
    else:
        m = tl.full((COLUMNS, WIDTH), LOWEST, tl.float32)
        s = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for start in range(0, columns, COLUMNS):
            column = (start + lane).to(tl.int64)[:, None]
            inside = (column < columns) & side
            mask_block = mask + (column * mask_column + mask_side)
            z = _logits(x + (column * x_column + x_side), mask_block, inside, inside, inside, scale, MASK, "evict_last")
            higher = tl.maximum(m, z)
            s = s * tl.exp(m - higher) + tl.exp(z - higher)
            m = higher
        top = tl.max(m, axis=0)[None, :]
        total = tl.sum(s * tl.exp(m - top), axis=0)
        total = tl.where(total == 0.0, 1.0, total)[None, :]
        shift, factor = tl.log(total), 1.0 / total
        for start in range(0, columns, COLUMNS):
            column = (start + lane).to(tl.int64)[:, None]
            inside = (column < columns) & side
            mask_block = mask + (column * mask_column + mask_side)
            x_block = x + (column * x_column + x_side)
            z = _logits(x_block, mask_block, inside, inside, inside, scale, MASK, "evict_first") - top
            result = z - shift if LOG else tl.exp(z) * factor
            tl.store(y + (column * y_column + y_side), from_float32(result, y.dtype.element_ty), mask=inside)


@functools.partial(jit, do_not_specialize=["columns", "tiles"])
def backward_strided_kernel(
    grad,
    y,
    dx,
    columns,
    inner,  # elements from one column to the next
    tiles,
    scale,
    LOG: tl.constexpr,
    ONE_PASS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The middle dimension of contiguous (outer, columns, inner) tensors, tiled as in the forward kernel."""
    program = tl.program_id(0)
    c = (program % tiles).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    side = (c < inner)[None, :]
    base = (program // tiles).to(tl.int64) * columns * inner
    grad += base
    y += base
    dx += base
    lane = tl.arange(0, COLUMNS)
    if ONE_PASS:
        inside = (lane < columns)[:, None] & side
        offset = lane.to(tl.int64)[:, None] * inner + c[None, :]
        dy = to_float32(tl.load(grad + offset, mask=inside, other=0.0))
        p = to_float32(tl.load(y + offset, mask=inside, other=0.0))
        total = tl.sum(_share(dy, p, inside, LOG), axis=0)[None, :]
        result = _gradient(dy, p, total, scale, inside, LOG)
        tl.store(dx + offset, from_float32(result, dx.dtype.element_ty), mask=inside)
    else:
        sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for start in range(0, columns, COLUMNS):
            column = start + lane
            inside = (column < columns)[:, None] & side
            offset = column.to(tl.int64)[:, None] * inner + c[None, :]
            dy = to_float32(tl.load(grad + offset, mask=inside, other=0.0, eviction_policy="evict_last"))
            p = to_float32(tl.load(y + offset, mask=inside, other=0.0, eviction_policy="evict_last"))
            sums += _share(dy, p, inside, LOG)
        total = tl.sum(sums, axis=0)[None, :]
        for start in range(0, columns, COLUMNS):
            column = start + lane
            inside = (column < columns)[:, None] & side
            offset = column.to(tl.int64)[:, None] * inner + c[None, :]
            dy = to_float32(tl.load(grad + offset, mask=inside, other=0.0, eviction_policy="evict_first"))
            p = to_float32(tl.load(y + offset, mask=inside, other=0.0, eviction_policy="evict_first"))
            result = _gradient(dy, p, total, scale, inside, LOG)
            tl.store(dx + offset, from_float32(result, dx.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- launchers


class Rows(NamedTuple):
    """A tensor and its mask seen as rows numbered over three dimensions; strides in elements.

    Attributes:
        x, mask: the tensors, copied only where three dimensions cannot tell where their rows begin.
        sizes, x_strides, mask_strides: of the three dimensions.
        columns, mask_column: how many, and the mask's step from one to the next.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    sizes: tuple[int, int, int]
    x_strides: tuple[int, int, int]
    mask_strides: tuple[int, int, int]
    columns: int
    mask_column: int


def _merge(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Fold neighbouring dimensions together where every operand steps through both with one stride."""
    merged: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        if merged and all(step[-1] == stride[dim] * size for step, stride in zip(steps, strides, strict=True)):
            merged[-1] *= size
            for step, stride in zip(steps, strides, strict=True):
                step[-1] = stride[dim]
        else:
            merged.append(size)
            for step, stride in zip(steps, strides, strict=True):
                step.append(stride[dim])
    return merged, steps


def _as_rows(x: torch.Tensor, mask: torch.Tensor | None) -> Rows:
    """See `x` (at least one dimension, not empty) and its mask as rows over the last dimension."""
    columns = x.shape[-1]
    if x.stride(-1) != 1 and columns != 1:
        x = x.contiguous()
    if mask is None and x.is_contiguous():
        return Rows(x, None, (1, 1, x.numel() // columns), (0, 0, columns), (0, 0, 0), columns, 0)
    full = x if mask is None else mask.expand(x.shape)
    sizes, steps = _merge(x.shape[:-1], x.stride()[:-1], full.stride()[:-1])
    if len(sizes) > 3:
        x = x.contiguous()
        sizes, steps = _merge(x.shape[:-1], x.stride()[:-1], full.stride()[:-1])
    if len(sizes) > 3:
        full = full.contiguous()
        sizes, steps = _merge(x.shape[:-1], x.stride()[:-1], full.stride()[:-1])
    missing = 3 - len(sizes)
    a, b, c = [1] * missing + sizes
    xa, xb, xc = [0] * missing + steps[0]
    ma, mb, mc = [0] * missing + steps[1]
    no_mask = mask is None
    return Rows(
        x, None if no_mask else full, (a, b, c), (xa, xb, xc), (ma, mb, mc), columns, 0 if no_mask else full.stride(-1)
    )


_NO_MASK, _BOOLEAN = -1, 3


def _mask_kind(mask: torch.Tensor | None) -> int:
    return _NO_MASK if mask is None else _BOOLEAN if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype]


@functools.cache
def _native() -> ctypes.CDLL:
    library = native.library("softmax")
    assert library is not None
    pointer, i64, i32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
    library.halfstep_softmax.argtypes = [pointer] * 4 + [f32] + [i32] * 5
    library.halfstep_softmax_rows.argtypes = [pointer] * 2 + [i64] * 3 + [f32] + [i32] * 4
    library.halfstep_softmax_backward.argtypes = [pointer] * 3 + [i64] * 3 + [f32] + [i32] * 4
    library.halfstep_softmax_strided.argtypes = [pointer] * 2 + [i64] * 3 + [f32] + [i32] * 3
    library.halfstep_softmax_strided_backward.argtypes = [pointer] * 3 + [i64] * 3 + [f32] + [i32] * 3
    return library


_Geometry = ctypes.c_int64 * 12


def _native_forward(rows: Rows, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    x, mask = rows.x, rows.mask
    geometry = _Geometry(*rows.sizes, rows.columns, *rows.x_strides, *rows.mask_strides, rows.mask_column, queries)
    _native().halfstep_softmax(
        address(x),
        None if mask is None else address(mask),
        address(y),
        ctypes.addressof(geometry),
        scale,
        log,
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[y.dtype],
        _mask_kind(mask),
        native.threads(),
    )


def _native_plain_forward(x: torch.Tensor, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Contiguous and without a mask, which for small tensors saves half of the host time."""
    columns = x.shape[-1]
    _native().halfstep_softmax_rows(
        address(x),
        address(y),
        x.numel() // columns,
        columns,
        queries,
        scale,
        log,
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[y.dtype],
        native.threads(),
    )


def _native_backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool
) -> None:
    columns = y.shape[-1]
    _native().halfstep_softmax_backward(
        address(grad),
        address(y),
        address(dx),
        y.numel() // columns,
        columns,
        queries,
        scale,
        log,
        DTYPE_CODES[y.dtype],
        DTYPE_CODES[dx.dtype],
        native.threads(),
    )


# Longest row that one block holds in registers without spilling on any target, by warps of 32 lanes.
FORWARD_ONE_PASS = 32768
BACKWARD_ONE_PASS = 16384
LOOP_BLOCK, LOOP_WARPS = 8192, 16
MOST_PIECES = 256  # of a row
SHORTEST_LINED = 128  # columns; in shorter rows the lines lost at both ends are too large a part
STRIDED_FORWARD, STRIDED_BACKWARD, STRIDED_LOOP = 32768, 16384, 4096  # elements of a tile; those of one pass first


def _tile(columns: int, per_warp: int, most: int = 32) -> tuple[int, int, int]:
    """ROWS, BLOCK and warps of a tile kernel. Up to 512 columns one warp has whole rows to itself, so that no reduction
    crosses warps: no barrier and no shared memory."""
    block = max(16, 1 << (columns - 1).bit_length())
    if block <= 512:
        return 1024 // block, block, 1
    return 1, block, min(most, max(2, block // per_warp))


def _loop_block(line: int, mask_kind: int) -> int:
    """A mask beside lines takes the registers of half a block."""
    return LOOP_BLOCK // 2 if line and mask_kind else LOOP_BLOCK


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """How many programs of the long kernels the device runs at a time; 16 stands for a device that is interpreted."""
    if device.type != "cuda":
        return 16
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count  # two of 16 warps each


def _pieces(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Pieces per row and columns of each, so that few rows keep the whole device busy."""
    wished = min(_programs_at_once(device) // rows, MOST_PIECES)
    if wished < 2:
        return 1, columns
    span = -(-columns // (wished * LOOP_BLOCK)) * LOOP_BLOCK
    return -(-columns // span), span


def _boundaries(*tensors: torch.Tensor) -> int:
    """LINE of the kernels: elements between 16-byte boundaries of the smallest floating dtype."""
    return 16 // min(tensor.element_size() for tensor in tensors if tensor.dtype in DTYPE_CODES)


def _in_step(line: int, x: torch.Tensor, other: torch.Tensor, *steps: tuple[int, int, int]) -> bool:
    """Whether rows of both begin equally far from a boundary. `steps`: sizes of dimensions, strides of both."""
    apart = address(x) // x.element_size() - address(other) // other.element_size()
    return apart % line == 0 and all((one - two) % line == 0 for size, one, two in steps if size > 1)


def _lines(rows: Rows, y: torch.Tensor) -> tuple[int, bool, bool]:
    """LINE, MASK_IN_STEP and Y_IN_STEP for a forward launch."""
    x, mask = rows.x, rows.mask
    b, c = rows.sizes[1:]
    operands = (x, y) if mask is None else (x, mask, y)
    steps = (*rows.x_strides, rows.columns, *(rows.mask_strides if mask is not None else ()))
    plain = all(step % 16 == 0 for step in steps) and all(address(tensor) % 16 == 0 for tensor in operands)
    if plain or rows.columns < SHORTEST_LINED:
        return 0, False, False
    line = _boundaries(*operands)
    y_strides = (b * c * rows.columns, c * rows.columns, rows.columns)
    y_in_step = _in_step(line, x, y, *zip(rows.sizes, rows.x_strides, y_strides, strict=True))
    mask_in_step = False
    if mask is not None and rows.mask_column == 1:
        mask_in_step = _in_step(line, x, mask, *zip(rows.sizes, rows.x_strides, rows.mask_strides, strict=True))
    return line, mask_in_step, y_in_step


def _triton_forward(rows: Rows, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    a, b, c = rows.sizes
    count, columns = a * b * c, rows.columns
    mask, kind = rows.x, 0
    if rows.mask is not None:
        boolean = rows.mask.dtype == torch.bool
        mask, kind = (rows.mask.view(torch.uint8), 1) if boolean else (rows.mask, 2)
    line, mask_in_step, y_in_step = _lines(rows, y)
    sizes = (count, columns, max(queries, 1), b, c, *rows.x_strides, *rows.mask_strides, rows.mask_column)
    fixed = {
        "MASK": kind,
        "CAUSAL": queries > 0,
        "LOG": log,
        "FLAT": a * b == 1,
        "WIDE": count >= 2**30,
        "LINE": line,
        "MASK_IN_STEP": mask_in_step,
        "Y_IN_STEP": y_in_step,
    }
    reach = columns + max(line - 1, 0)  # lanes from the boundary below a row to its end, at most
    with on_device(y.device):
        if reach <= FORWARD_ONE_PASS:
            tile, block, warps = _tile(reach, 1024, most_warps(y.device))
            forward_tile_kernel[(-(-count // tile),)](
                rows.x, mask, y, *sizes, scale, **fixed, ROWS=tile, BLOCK=block, num_warps=warps
            )
            return
        fixed |= {"BLOCK": _loop_block(line, kind), "num_warps": LOOP_WARPS}
        pieces, span = _pieces(count, reach, y.device)
        if pieces == 1:
            forward_long_kernel[(count,)](rows.x, mask, y, y, *sizes, 1, 1, scale, **fixed, STAGE=0, PIECES=1)
            return
        partial = torch.empty(2 * count * pieces, dtype=torch.float32, device=y.device)
        for stage in (1, 2):
            forward_long_kernel[(count * pieces,)](
                *(rows.x, mask, y, partial, *sizes, pieces, span, scale), **fixed, STAGE=stage, PIECES=MOST_PIECES
            )


def _triton_backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool
) -> None:
    columns = y.shape[-1]
    count = y.numel() // columns
    line = 0
    if columns >= SHORTEST_LINED and (columns % 16 or any(address(tensor) % 16 for tensor in (grad, y, dx))):
        line = _boundaries(y, dx)
        if not (_in_step(line, y, grad) and _in_step(line, y, dx)):
            line = 0
    sizes = (count, columns, max(queries, 1))
    fixed = {"CAUSAL": queries > 0, "LOG": log, "WIDE": count >= 2**30, "LINE": line}
    reach = columns + max(line - 1, 0)
    with on_device(y.device):
        if reach <= BACKWARD_ONE_PASS:
            tile, block, warps = _tile(reach, 512, most_warps(y.device))
            backward_tile_kernel[(-(-count // tile),)](
                grad, y, dx, *sizes, scale, **fixed, ROWS=tile, BLOCK=block, num_warps=warps
            )
            return
        fixed |= {"BLOCK": LOOP_BLOCK, "num_warps": LOOP_WARPS}
        pieces, span = _pieces(count, reach, y.device)
        if pieces == 1:
            backward_long_kernel[(count,)](grad, y, dx, dx, *sizes, 1, 1, scale, **fixed, STAGE=0, PIECES=1)
            return
        partial = torch.empty(count * pieces, dtype=torch.float32, device=y.device)
        for stage in (1, 2):
            backward_long_kernel[(count * pieces,)](
                grad, y, dx, partial, *sizes, pieces, span, scale, **fixed, STAGE=stage, PIECES=MOST_PIECES
            )


class Strips(NamedTuple):
    """A tensor and its mask seen as sums side by side: sizes and strides of three outer dimensions and the summed one.

    Attributes:
        x, mask: the tensors, copied only where three outer dimensions do not do.
        sizes: of the outer dimensions; lanes run over the last.
        x_strides, mask_strides, y_strides: of the outer dimensions and the summed one.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    sizes: tuple[int, int, int]
    x_strides: tuple[int, ...]
    mask_strides: tuple[int, ...]
    y_strides: tuple[int, ...]


def _as_strips(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor, dim: int) -> Strips:
    """See `x` (two dimensions or more, not empty) and its mask as sums over `dim`; `y` is contiguous."""
    full = x if mask is None else mask.expand(x.shape)
    while True:
        tensors = [tensor.movedim(dim, -1) for tensor in (x, full, y)]
        order = list(range(x.ndim - 1))
        # Lanes go where neighbours lie: over the last dimension, unless x has a stride of 1 elsewhere.
        unit = [d for d in order if tensors[0].stride(d) == 1 and tensors[0].shape[d] > 1]
        if unit:
            order.append(order.pop(unit[-1]))
        outer = [[tensor.stride(d) for d in order] for tensor in tensors]
        sizes, steps = _merge([tensors[0].shape[d] for d in order], *outer)
        if len(sizes) <= 3:
            break
        if not x.is_contiguous():
            x = x.contiguous()
            full = x if mask is None else full
        else:
            full = full.contiguous()
    missing = 3 - len(sizes)
    a, b, c = [1] * missing + sizes
    strides = [(*[0] * missing, *step, tensor.stride(-1)) for step, tensor in zip(steps, tensors, strict=True)]
    return Strips(x, None if mask is None else full, (a, b, c), *strides)


def _strided_tile(columns: int, across: int, one_pass: int, most: int = 32) -> tuple[bool, int, int, int]:
    """ONE_PASS, COLUMNS, WIDTH and warps: 32 lanes side by side or more, where there are as many, and in one pass where
    a tile of `one_pass` elements holds all columns."""
    side = 1 << (across - 1).bit_length()
    tall = 1 << (columns - 1).bit_length()
    if tall * min(side, 32) <= one_pass:
        width = min(side, max(32, 4096 // tall), 256)
        return True, tall, width, min(most, max(1, tall * width // 1024))
    width = min(side, 64)
    return False, STRIDED_LOOP // width, width, 8


def _triton_strided_forward(strips: Strips, y: torch.Tensor, columns: int, scale: float, log: bool) -> None:
    a, b, c = strips.sizes
    mask, kind = strips.x, 0
    if strips.mask is not None:
        boolean = strips.mask.dtype == torch.bool
        mask, kind = (strips.mask.view(torch.uint8), 1) if boolean else (strips.mask, 2)
    one_pass, tall, width, warps = _strided_tile(columns, c, STRIDED_FORWARD, most_warps(y.device))
    tiles = -(-c // width)
    with on_device(y.device):
        forward_strided_kernel[(a * b * tiles,)](
            *(strips.x, mask, y, columns, b, c),
            *(*strips.x_strides, *strips.mask_strides, *strips.y_strides, tiles, scale),
            **{"MASK": kind, "LOG": log, "ONE_PASS": one_pass, "COLUMNS": tall, "WIDTH": width, "num_warps": warps},
        )


def _triton_strided_backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sizes: tuple[int, int, int], scale: float, log: bool
) -> None:
    outer, columns, inner = sizes
    one_pass, tall, width, warps = _strided_tile(columns, inner, STRIDED_BACKWARD, most_warps(y.device))
    tiles = -(-inner // width)
    with on_device(y.device):
        backward_strided_kernel[(outer * tiles,)](
            *(grad, y, dx, columns, inner, tiles, scale),
            **{"LOG": log, "ONE_PASS": one_pass, "COLUMNS": tall, "WIDTH": width, "num_warps": warps},
        )


def _outer_inner(shape: torch.Size, dim: int) -> tuple[int, int, int]:
    """Sizes before, of and after dimension `dim`, which counts from the end."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + len(shape) + 1 :])


def _lies_across(x: torch.Tensor) -> bool:
    """Whether neighbours of `x` lie in another dimension than the last, as after a transposition."""
    return x.stride(-1) != 1 < x.shape[-1] and any(
        step == 1 < size for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )


def _forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    if x.dtype == torch.float64 or dtype == torch.float64:
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    implementation = resolve(x.device, "softmax")
    if implementation == "reference" or x.shape[dim] > LONGEST:
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    # The memory of a lazy negation (``x.conj().imag``) holds the opposite numbers.
    x = x.resolve_neg()
    if mask is not None:
        mask = mask.resolve_neg()
    plain = implementation == "native" and mask is None and dim == -1 and x.is_contiguous()
    if plain and x.numel() > 0:
        y = torch.empty_like(x, dtype=dtype)
        _native_plain_forward(x, y, scale, x.shape[-2] if causal else 0, log)
        return y
    check_addresses(x, mask)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    if mask is not None:
        mask = mask.expand(x.shape) if dim != -1 else mask
    into = y
    while dim != -1 and x.shape[-1] == 1:
        dim, x, into = dim + 1, x.squeeze(-1), into.squeeze(-1)
        mask = None if mask is None else mask.squeeze(-1)
    if implementation == "triton" and not causal and (dim != -1 or _lies_across(x)):
        _triton_strided_forward(_as_strips(x, mask, into, dim), into, x.shape[dim], scale, log)
        return y
    if dim != -1:
        if mask is None and dtype == x.dtype:
            sizes = _outer_inner(x.shape, dim)
            x = x.contiguous()
            _native().halfstep_softmax_strided(
                address(x), address(y), *sizes, scale, log, DTYPE_CODES[dtype], native.threads()
            )
            return y
        moved_mask = None if mask is None else mask.movedim(dim, -1)
        into.copy_(_forward(x.movedim(dim, -1), moved_mask, -1, scale, False, log, dtype).movedim(-1, dim))
        return y
    rows = _as_rows(x, mask)
    launch = _triton_forward if implementation == "triton" else _native_forward
    launch(rows, into, scale, x.shape[-2] if causal else 0, log)
    return y


def _backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    implementation = resolve(y.device, "softmax")
    if implementation == "reference" or torch.float64 in (grad.dtype, y.dtype, dtype) or y.shape[dim] > LONGEST:
        return reference_backward(grad, y, dim, scale, causal, log, dtype)
    grad, y = grad.resolve_neg(), y.resolve_neg()
    plain = implementation == "native" and dim == -1 and scale == 1.0 and not causal and not log
    if plain and grad.dtype == y.dtype == dtype == torch.float32 and y.shape[-1] <= TORCHS_ROWS:
        result: torch.Tensor = torch.ops.aten._softmax_backward_data(grad, y, -1, dtype)
        return result
    check_addresses(grad, y)
    if y.is_contiguous():
        dx = torch.empty_like(y, dtype=dtype)
    else:
        dx = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return dx
    if grad.dtype != y.dtype:  # only in second derivatives, and only when the result was given another dtype
        grad, y = grad.float(), y.float()
    grad, y = grad.contiguous(), y.contiguous()
    sizes = (0, 0, 1) if dim == -1 else _outer_inner(y.shape, dim)
    if sizes[2] == 1:
        if dim != -1:
            grad, y = grad.view(sizes[:2]), y.view(sizes[:2])
        launch = _triton_backward if implementation == "triton" else _native_backward
        launch(grad, y, dx, scale, y.shape[-2] if causal else 0, log)
    elif implementation == "triton":
        _triton_strided_backward(grad, y, dx, sizes, scale, log)
    elif dtype == y.dtype:
        _native().halfstep_softmax_strided_backward(
            address(grad),
            address(y),
            address(dx),
            *sizes,
            scale,
            log,
            DTYPE_CODES[dtype],
            native.threads(),
        )
    else:
        moved = _backward(grad.movedim(dim, -1), y.movedim(dim, -1), -1, scale, False, log, dtype)
        dx.copy_(moved.movedim(-1, dim))
    return dx


# ------------------------------------------------------------------------------------------- registration with torch
# Library.define and impl cost about 3 us per call; torch.library.custom_op about 13.

_library = torch.library.Library("halfstep", "FRAGMENT")
_library.define(
    "softmax(Tensor x, Tensor? mask, int dim, float scale, bool causal, bool log, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "softmax_backward(Tensor grad, Tensor y, int dim, float scale, bool causal, bool log, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("softmax", _forward, "CompositeExplicitAutograd")
_library.impl("softmax_backward", _backward, "CompositeExplicitAutograd")
_softmax = torch.ops.halfstep.softmax.default
_softmax_backward = torch.ops.halfstep.softmax_backward.default


@torch.library.register_fake("halfstep::softmax", lib=_library)
def _fake_forward(x: Any, mask: Any, dim: int, scale: float, causal: bool, log: bool, dtype: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.register_fake("halfstep::softmax_backward", lib=_library)
def _fake_backward(grad: Any, y: Any, dim: int, scale: float, causal: bool, log: bool, dtype: Any) -> torch.Tensor:
    return torch.empty(y.shape, dtype=dtype, device=y.device)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, mask, ctx.dim, ctx.scale, ctx.causal, ctx.log, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.mask_dtype, ctx.mask_shape = (None, None) if mask is None else (mask.dtype, mask.shape)
    ctx.save_for_backward(output)


def _differentiate_forward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    dx = dmask = None
    if ctx.needs_input_grad[0]:
        dx = _backward_any(grad, y, ctx.dim, ctx.scale, ctx.causal, ctx.log, ctx.x_dtype)
    if ctx.needs_input_grad[1]:
        compute = _math_dtype(grad.dtype, y.dtype)
        dz = _backward_any(grad, y, ctx.dim, 1.0, ctx.causal, ctx.log, compute)
        dmask = dz.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)
    return dx, dmask, None, None, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, y, ctx.dim, ctx.scale, ctx.causal, ctx.log, _ = inputs
    ctx.save_for_backward(grad, y)


def _differentiate_backward(ctx: Any, gg: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Second derivatives, in plain torch so that they can be differentiated again. `gg` is the gradient of dx."""
    grad, y = ctx.saved_tensors
    compute = _math_dtype(gg.dtype, grad.dtype, y.dtype)
    u, dy, p = ctx.scale * gg.to(compute), grad.to(compute), y.to(compute)
    if ctx.causal:
        dropped = _dropped_by_causal(y)
        dy, p = dy.masked_fill(dropped, 0.0), p.masked_fill(dropped, -math.inf if ctx.log else 0.0)
    if ctx.log:
        constant = p == -math.inf
        p, dy = p.exp(), dy.masked_fill(constant, 0.0)
        through_dy = (u - (u * p).sum(ctx.dim, keepdim=True)).masked_fill(constant, 0.0)
        through_y = -u * p * dy.sum(ctx.dim, keepdim=True)
    else:
        inner = (u * p).sum(ctx.dim, keepdim=True)
        through_dy = p * (u - inner)
        through_y = u * (dy - (dy * p).sum(ctx.dim, keepdim=True)) - dy * inner
    return through_dy.to(grad.dtype), through_y.to(y.dtype), None, None, None, None, None


torch.library.register_autograd("halfstep::softmax", _differentiate_forward, setup_context=_save_forward, lib=_library)
torch.library.register_autograd(
    "halfstep::softmax_backward", _differentiate_backward, setup_context=_save_backward, lib=_library
)


def _batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    """With the dimension that vmap runs over in front; `dim` counts from the end, so nothing else changes."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _vmap_forward(info: Any, in_dims: Any, x: Any, mask: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    x = _batch_first(x, in_dims[0], info.batch_size)
    if mask is not None and in_dims[1] is not None:
        mask = mask.movedim(in_dims[1], 0)
        mask = mask.reshape(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:])
    return _forward_any(x, mask, *rest), 0


def _vmap_backward(info: Any, in_dims: Any, grad: Any, y: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    grad, y = (_batch_first(t, d, info.batch_size) for t, d in zip((grad, y), in_dims[:2], strict=True))
    return _backward_any(grad, y, *rest), 0


torch.library.register_vmap("halfstep::softmax", _vmap_forward, lib=_library)
torch.library.register_vmap("halfstep::softmax_backward", _vmap_backward, lib=_library)


# torch.func transforms refuse operators whose autograd was registered from Python, but take an autograd.Function.


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "halfstep.softmax and log_softmax have no forward-mode derivative (jvp, jacfwd, hessian); allowed is reverse "
        "mode: use torch.func.vjp, jacrev or jacrev(jacrev(...)), or torch.softmax"
    )


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        return _softmax(*args)

    setup_context = staticmethod(_save_forward)
    backward = staticmethod(_differentiate_forward)
    vmap = staticmethod(_vmap_forward)
    jvp = staticmethod(_no_forward_mode)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        return _softmax_backward(*args)

    setup_context = staticmethod(_save_backward)
    backward = staticmethod(_differentiate_backward)
    vmap = staticmethod(_vmap_backward)
    jvp = staticmethod(_no_forward_mode)


class _Eager(torch.autograd.Function):
    """Without the dispatcher, which costs more host time than the launch."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        y = _forward(*args)
        _save_forward(ctx, args, y)
        return y

    backward = staticmethod(_differentiate_forward)


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _is_eager(tensor: torch.Tensor) -> bool:
    """Whether nobody is watching: no compiler, tracer, dispatch mode, tensor subclass or transform."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and (tensor.is_cpu or tensor.is_cuda)
        and not torch.jit.is_tracing()
    )


def _forward_any(x: torch.Tensor, mask: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    if _transformed():
        return _Forward.apply(x, mask, *rest)
    if _is_eager(x) and (mask is None or type(mask) is torch.Tensor):
        if torch.is_grad_enabled() and (x.requires_grad or (mask is not None and mask.requires_grad)):
            return _Eager.apply(x, mask, *rest)
        return _forward(x, mask, *rest)
    return _softmax(x, mask, *rest)


def _backward_any(grad: torch.Tensor, y: torch.Tensor, *rest: Any) -> torch.Tensor:
    if _transformed():
        return _Backward.apply(grad, y, *rest)
    if not torch.is_grad_enabled() and type(y) is torch.Tensor and _is_eager(grad):
        return _backward(grad, y, *rest)
    return _softmax_backward(grad, y, *rest)


# -------------------------------------------------------------------------------------------------- public functions


def _check_mask(x: torch.Tensor, mask: Any) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}; allowed are None and a tensor: use torch.as_tensor(mask)")
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise TypeError(
            f"mask has dtype {mask.dtype}; allowed are bool (True = keep) and float32, float16, bfloat16, float64 "
            "(added to scale * x): convert it with .bool() or .to()"
        )
    if mask.device != x.device:
        raise ValueError(f"mask is on {mask.device}, x on {x.device}; allowed is one device: use mask.to(x.device)")
    # torch 2.8 compiles no zip over unlike lengths.
    fits = mask.ndim <= x.ndim and all(
        size in (1, wide) for size, wide in zip(mask.shape, x.shape[x.ndim - mask.ndim :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, x has shape {tuple(x.shape)}; allowed are shapes that broadcast to "
            "that of x: insert dimensions of size 1 with .unsqueeze()"
        )


def _checked(
    x: torch.Tensor,
    dim: int,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    dtype: torch.dtype | None,
    log: bool,
) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; allowed is a tensor: use torch.as_tensor(x)")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"x has dtype {x.dtype}; allowed are float32, float16, bfloat16 and float64: convert it with .to()"
        )
    if x.layout != torch.strided:
        raise TypeError(f"x has layout {x.layout}; allowed are dense tensors: use .to_dense()")
    if dtype is None:
        dtype = x.dtype
    elif dtype not in FLOATS:
        raise TypeError(f"dtype is {dtype}; allowed are None, float32, float16, bfloat16 and float64")
    if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"scale is a {type(scale).__name__}; allowed is a finite number: multiply x by a tensor yourself"
        )
    if not abs(scale) <= _LARGEST_SCALE:  # written so that a NaN fails; math.isfinite cannot be traced
        raise ValueError(
            f"scale is {scale}; allowed are finite numbers, also in fp32: mask elements with mask=, not with the scale"
        )
    if isinstance(dim, (float, str)) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim is a {type(dim).__name__}; allowed is an integer")
    ndim = x.ndim
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"dim is {dim}, x has {ndim} dimensions; allowed are {-max(ndim, 1)} to {max(ndim, 1) - 1}")
    if dim >= 0:
        dim -= max(ndim, 1)
    if causal:
        if ndim < 2:
            raise ValueError(
                f"causal=True with x of shape {tuple(x.shape)}; allowed are 2 or more dimensions (..., queries, keys): "
                "use x.unsqueeze(0) or causal=False"
            )
        if dim != -1:
            raise ValueError(f"causal=True with dim {dim + ndim} of {ndim}; allowed is the last one: transpose x first")
    if mask is not None:
        _check_mask(x, mask)
    if ndim == 0:
        return _forward_any(x.reshape(1), mask, -1, scale, False, log, dtype).reshape(())
    return _forward_any(x, mask, dim, scale, bool(causal), log, dtype)


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``softmax(scale * x + mask)`` over one dimension, computed in fp32, in one pass over memory.

    A row with nothing to keep is 0 with gradient 0, where torch gives NaN. NaN in stays NaN out. The result is
    contiguous. Differentiable any number of times; works in ``torch.compile``, ``torch.func.grad`` and ``vmap``.
    Unlike torch's, it keeps the input's dtype under autocast: pass ``dtype=torch.float32`` for fp32 results.

    Args:
        x: fp32, fp16 or bf16, any shape and strides. fp64 is computed in fp64 by the plain torch reference.
        dim: the dimension that sums to one.
        scale: a finite number, multiplied in fp32.
        mask: broadcastable to ``x.shape``. Boolean: True keeps. Floating: added to ``scale * x``, may require grad.
        causal: keep element ``[..., i, j]`` only for ``j <= i``, counted from the upper left corner as in
            ``scaled_dot_product_attention(is_causal=True)``; what is dropped is not read. Needs ``dim`` to be the last.
        dtype: of the result; that of `x` by default.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        TypeError: a dtype or type that is not allowed.
        IndexError: `dim` out of range.
        ValueError: `scale` not finite; `mask` of another device or shape; `causal` with another `dim` than the last.
    """
    return _checked(x, dim, scale, mask, causal, dtype, False)


def log_softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The logarithm of `softmax`, same arguments, accurate where softmax itself underflows.

    What is masked is -inf, and so is a whole row with nothing to keep. A result of -inf is a constant: a gradient that
    reaches it is ignored, so masked elements and rows get gradient 0.
    """
    return _checked(x, dim, scale, mask, causal, dtype, True)


# ----------------------------------------------------------------------------------------------------- compile audit

_SIGNATURE_DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}
_STAGES = {0: "", 1: "first half of pieces", 2: "second half of pieces"}


def _line_of(columns: int, *dtypes: str) -> int:
    """What the launcher finds for contiguous tensors."""
    return 0 if columns % 16 == 0 else 16 // min(_SIGNATURE_DTYPES[dtype] for dtype in dtypes)


def _forward_variant(
    columns: int,
    source: str,
    target: str,
    mask: int = 0,
    mask_type: str = "u8",
    causal: bool = False,
    log: bool = False,
    stage: int = 0,
    in_step: bool = True,
) -> Variant:
    line = _line_of(columns, source, target, *([mask_type] if mask == 2 else []))
    reach = columns + max(line - 1, 0)
    one_pass = reach <= FORWARD_ONE_PASS
    tile, block, warps = _tile(reach, 1024) if one_pass else (1, _loop_block(line, mask), LOOP_WARPS)
    pointers = {"x": f"*{source}", "mask": f"*{mask_type}" if mask else f"*{source}", "y": f"*{target}"}
    integers = "rows columns queries size_b size_c x_a x_b x_c mask_a mask_b mask_c mask_column".split()
    fixed = {"MASK": mask, "CAUSAL": causal, "LOG": log, "FLAT": mask == 0, "WIDE": False, "BLOCK": block}
    fixed |= {"LINE": line, "MASK_IN_STEP": mask > 0 and in_step and line > 0, "Y_IN_STEP": in_step and line > 0}
    divisible = ["x", "mask", "y"]
    divisible += [] if line else ["columns", "x_a", "x_b", "x_c", "mask_a", "mask_b", "mask_c"]
    if one_pass:
        fixed["ROWS"] = tile
    else:
        pointers["partial"] = "*fp32" if stage else f"*{target}"
        integers += ["pieces", "span"]
        fixed |= {"STAGE": stage, "PIECES": MOST_PIECES if stage else 1}
        divisible += ["partial", *(["span"] if stage else [])]
        if not stage:
            fixed["span"] = 1
    if mask:  # the launcher's integer 1 is a constant to the compiler
        fixed["mask_column"] = 1
    signature = pointers | {name: "i32" for name in integers if name not in fixed} | {"scale": "fp32"}
    mask_bytes = 1 if mask == 1 else _SIGNATURE_DTYPES.get(mask_type, 0)
    if not mask or (line and not in_step):  # out of step a mask is read an element at a time, which is not counted
        mask_bytes = 0
    words = [f"{columns} {source}->{target}", f"{mask_type} mask" * (mask > 0), "causal" * causal, "log" * log]
    words += [_STAGES[stage], "out of step" * (not in_step)]
    return Variant(
        forward_tile_kernel if one_pass else forward_long_kernel,
        " ".join(filter(None, words)),
        signature,
        fixed,
        divisible_by_16=tuple(divisible),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=(_SIGNATURE_DTYPES[source] + mask_bytes) * (1.0 if one_pass or stage else 2.0),
        bytes_written=0.0 if stage == 1 else _SIGNATURE_DTYPES[target],
        elements=block * tile,
    )


def _backward_variant(
    columns: int, source: str, target: str, causal: bool = False, log: bool = False, stage: int = 0
) -> Variant:
    line = _line_of(columns, source, target)
    reach = columns + max(line - 1, 0)
    one_pass = reach <= BACKWARD_ONE_PASS
    tile, block, warps = _tile(reach, 512) if one_pass else (1, LOOP_BLOCK, LOOP_WARPS)
    pointers = {"grad": f"*{source}", "y": f"*{source}", "dx": f"*{target}"}
    integers = ["rows", "columns", "queries"]
    fixed = {"CAUSAL": causal, "LOG": log, "WIDE": False, "BLOCK": block, "LINE": line}
    divisible = ["grad", "y", "dx", *([] if line else ["columns"])]
    if one_pass:
        fixed["ROWS"] = tile
    else:
        pointers["partial"] = "*fp32" if stage else f"*{target}"
        fixed |= {"STAGE": stage, "PIECES": MOST_PIECES if stage else 1}
        divisible += ["partial", *(["span"] if stage else [])]
        integers += ["pieces", *(["span"] if stage else [])]
        if not stage:
            fixed["span"] = 1
    return Variant(
        backward_tile_kernel if one_pass else backward_long_kernel,
        " ".join(filter(None, [f"{columns} {source}->{target}", "causal" * causal, "log" * log, _STAGES[stage]])),
        pointers | {name: "i32" for name in integers} | {"scale": "fp32"},
        fixed,
        divisible_by_16=tuple(divisible),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=2.0 * _SIGNATURE_DTYPES[source] * (1.0 if one_pass or stage else 2.0),
        bytes_written=0.0 if stage == 1 else _SIGNATURE_DTYPES[target],
        elements=block * tile,
    )


def _strided_variant(
    columns: int, across: int, source: str, target: str, mask: int = 0, log: bool = False, transposed: bool = False
) -> Variant:
    """Forward over the first of two dimensions; `transposed`: over the last one of a transposed x."""
    one_pass, tall, width, warps = _strided_tile(columns, across, STRIDED_FORWARD)
    outer = "columns size_b size_c x_a x_b x_c x_column mask_a mask_b mask_c mask_column y_a y_b y_c y_column tiles"
    fixed = {"MASK": mask, "LOG": log, "ONE_PASS": one_pass, "COLUMNS": tall, "WIDTH": width}
    fixed |= {"x_c": 1, "y_column" if transposed else "y_c": 1, **({"mask_c": 1} if mask else {})}
    integers = [name for name in outer.split() if name not in fixed]
    words = [f"{columns} apart, {across} across {source}->{target}", "u8 mask" * mask, "log" * log]
    return Variant(
        forward_strided_kernel,
        " ".join(filter(None, [*words, "transposed" * transposed])),
        {"x": f"*{source}", "mask": "*u8" if mask else f"*{source}", "y": f"*{target}"}
        | {name: "i32" for name in integers}
        | {"scale": "fp32"},
        fixed,
        divisible_by_16=("x", "mask", "y", *(name for name in integers if name not in ("size_b", "tiles"))),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=(_SIGNATURE_DTYPES[source] + (mask > 0)) * (1.0 if one_pass else 2.0),
        bytes_written=_SIGNATURE_DTYPES[target],
    )


def _strided_backward_variant(columns: int, inner: int, source: str, target: str, log: bool = False) -> Variant:
    one_pass, tall, width, warps = _strided_tile(columns, inner, STRIDED_BACKWARD)
    return Variant(
        backward_strided_kernel,
        f"{columns} apart, {inner} across {source}->{target}" + " log" * log,
        {"grad": f"*{source}", "y": f"*{source}", "dx": f"*{target}"}
        | {name: "i32" for name in ("columns", "inner", "tiles")}
        | {"scale": "fp32"},
        {"LOG": log, "ONE_PASS": one_pass, "COLUMNS": tall, "WIDTH": width},
        divisible_by_16=("grad", "y", "dx", "inner"),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=2.0 * _SIGNATURE_DTYPES[source] * (1.0 if one_pass else 2.0),
        bytes_written=_SIGNATURE_DTYPES[target],
    )


def variants() -> list[Variant]:
    """What the compile audit builds: each code path once or twice, where registers are tightest."""
    return [
        _forward_variant(64, "bf16", "bf16"),
        _forward_variant(333, "bf16", "bf16"),
        _forward_variant(512, "fp32", "fp32"),
        _forward_variant(512, "bf16", "bf16", causal=True),
        _forward_variant(4096, "bf16", "bf16"),
        _forward_variant(FORWARD_ONE_PASS, "fp32", "fp32"),
        _forward_variant(FORWARD_ONE_PASS, "bf16", "bf16", causal=True),
        _forward_variant(FORWARD_ONE_PASS, "bf16", "bf16", mask=1),
        _forward_variant(FORWARD_ONE_PASS, "fp16", "fp32", mask=2, mask_type="fp32", log=True),
        _forward_variant(FORWARD_ONE_PASS - 17, "bf16", "fp32", log=True),
        _forward_variant(FORWARD_ONE_PASS - 17, "fp32", "fp32", causal=True),
        _forward_variant(FORWARD_ONE_PASS - 17, "bf16", "bf16", mask=1),
        _forward_variant(50257, "bf16", "bf16"),
        _forward_variant(50257, "bf16", "bf16", in_step=False),
        _forward_variant(50257, "bf16", "bf16", mask=1, in_step=False),
        _forward_variant(50257, "bf16", "fp32", log=True),
        _forward_variant(50257, "bf16", "bf16", mask=2, mask_type="bf16", causal=True),
        _forward_variant(1 << 20, "fp32", "bf16", log=True),
        _forward_variant(1 << 20, "bf16", "bf16", causal=True),
        _forward_variant(1 << 20, "bf16", "bf16", mask=2, mask_type="bf16"),
        _forward_variant(1 << 20, "bf16", "bf16", stage=1),
        _forward_variant(1 << 20, "bf16", "bf16", stage=2),
        _forward_variant((1 << 20) + 3, "bf16", "bf16", causal=True, stage=1),
        _forward_variant((1 << 20) + 3, "bf16", "fp32", causal=True, log=True, stage=2),
        _strided_variant(64, 4096, "bf16", "bf16"),
        _strided_variant(1024, 4096, "fp32", "bf16", log=True),
        _strided_variant(1024, 4096, "bf16", "bf16", mask=1),
        _strided_variant(8192, 4096, "bf16", "bf16", mask=1),
        _strided_variant(8192, 4096, "fp32", "fp32", log=True),
        _strided_variant(512, 4096, "bf16", "bf16", transposed=True),
        _backward_variant(64, "bf16", "bf16"),
        _backward_variant(333, "bf16", "bf16"),
        _backward_variant(512, "fp32", "fp32"),
        _backward_variant(512, "bf16", "bf16", causal=True, log=True),
        _backward_variant(4096, "bf16", "bf16"),
        _backward_variant(BACKWARD_ONE_PASS, "fp32", "fp16", log=True),
        _backward_variant(BACKWARD_ONE_PASS, "bf16", "bf16", causal=True),
        _backward_variant(BACKWARD_ONE_PASS - 17, "fp32", "fp32"),
        _backward_variant(BACKWARD_ONE_PASS - 17, "bf16", "bf16", causal=True, log=True),
        _backward_variant(50257, "bf16", "bf16"),
        _backward_variant(50257, "fp32", "bf16", causal=True, log=True),
        _backward_variant(1 << 20, "fp32", "fp32"),
        _backward_variant(1 << 20, "bf16", "bf16", causal=True, log=True),
        _backward_variant(1 << 20, "bf16", "bf16", stage=1),
        _backward_variant(1 << 20, "bf16", "bf16", stage=2),
        _backward_variant((1 << 20) + 3, "bf16", "bf16", causal=True, log=True, stage=1),
        _backward_variant((1 << 20) + 3, "bf16", "bf16", causal=True, log=True, stage=2),
        _strided_backward_variant(64, 4096, "bf16", "bf16"),
        _strided_backward_variant(512, 4096, "fp32", "fp32", log=True),
        _strided_backward_variant(8192, 4096, "bf16", "bf16"),
        _strided_backward_variant(8192, 4096, "fp32", "fp32", log=True),
    ]
