"""Triton kernels and launches with the bits of the rule's exact form, over the last dimension.

A program works on lines of up to `GROUP` columns side by side, which are rows, or the groups of a row, or some of them
where a row is too long for a program. Then one launch leaves the maximum and the sum of each group, and a second one
puts them together and writes. A tile is a tuple of PARTS blocks of shape (LINES, LANES, VECTOR), one after the other
along a line. No bit depends on its shape: see `rule.folded`. A line of vectors stays within a warp.
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
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax import arithmetic
from halfstep.kernels.softmax.layout import Layout, mask_operand
from halfstep.kernels.softmax.rows import aligned_pointer, row_begins, row_offset
from halfstep.kernels.softmax.rule import GROUP

WHOLE, PARTIAL, FINISH = map(constant, range(3))  # what a launch does
_GROUP = constant(GROUP)


class Form(NamedTuple):
    LOG: bool
    PRECISE: bool  # the exponential
    CAUSAL: bool
    SCALED: bool  # the scale is not 1
    MASK: int = 0  # PLAIN, BOOLEAN or ADDITIVE
    FLAT: bool = True  # one stride leads from each row to the next
    STAGE: int = 0  # WHOLE, PARTIAL or FINISH
    FULL: int = 0  # of the parts of a tile, those that lie inside of every line
    GROUPS: int = 1  # power of two, no less than the groups of a row: more than 1, and a program's lines are of one row


class Tile(NamedTuple):
    PARTS: int
    LINES: int
    LANES: int
    VECTOR: int


class _Lines(NamedTuple):
    """The lines of a program, in blocks of shape (LINES, 1, 1), or of one line as numbers."""

    row: Any
    begin: Any  # the first column of the row
    end: Any  # what is written, from `begin` on
    read: Any  # what is read: `causal` drops the rest


@constexpr_function
def _halvings(width: Any) -> int:
    return (int(width) - 1).bit_length()


@jit
def _lines(rows, columns, queries, groups, CAUSAL: tl.constexpr, tile: tl.constexpr):
    line = tl.program_id(0)
    if tile.LINES > 1:
        line = (line * tile.LINES + tl.arange(0, tile.LINES))[:, None, None]
    row = line // groups
    begin = line % groups * _GROUP
    end = tl.where(row < rows, columns, 0) - begin
    read = end
    if CAUSAL:
        read = tl.minimum(end, row % queries + 1 - begin)
    return _Lines(row, begin, end, read)


@jit
def _vectors(PART: tl.constexpr, tile: tl.constexpr):
    """Where the vectors of a part begin in a line."""
    return (PART * tile.LANES + tl.arange(0, tile.LANES)[None, :, None]) * tile.VECTOR


@jit
def _elements(PART: tl.constexpr, tile: tl.constexpr):
    return _vectors(PART, tile) + tl.arange(0, tile.VECTOR)[None, None, :]


@jit
def _loaded(line, end, tile: tl.constexpr):
    """The parts of a tile, as they are in memory: all are asked for before the first is needed."""
    parts = ()
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        parts += (tl.load(line + _elements(part, tile), mask=_vectors(part, tile) < end),)  # type: ignore[assignment]
    return parts


@jit
def _kept(values, other, PART: tl.constexpr, lines, form: tl.constexpr, tile: tl.constexpr):
    """A part with `other` in what was not read."""
    if form.CAUSAL:
        return tl.where(_elements(PART, tile) < lines.read, values, other)
    elif form.FULL <= PART:
        return tl.where(_vectors(PART, tile) < lines.read, values, other)
    else:
        return values


@jit
def _folded(terms):
    """The sum of each line of (lines, terms), in the order of `rule.folded`."""
    for _ in tl.static_range(_halvings(terms.shape[1])):
        terms = tl.sum(tl.reshape(terms, (terms.shape[0], 2, terms.shape[1] // 2)), axis=1)
    return terms


@jit
def _halved(parts, HALF: tl.constexpr, PARTS: tl.constexpr):
    halved = ()
    for part in tl.static_range(HALF):
        if part + HALF < PARTS:
            halved += (parts[part] + parts[part + HALF],)  # type: ignore[assignment]
        else:
            halved += (parts[part],)  # type: ignore[assignment]
    return halved


@jit
def _sums(parts, tile: tl.constexpr):
    """The sum of each line of a tile, in (LINES, 1, 1)."""
    for level in tl.static_range(_halvings(tl.constexpr(tile.PARTS)), 0, -1):
        parts = _halved(parts, 1 << (level - 1), tl.constexpr(tile.PARTS))
    return tl.reshape(_folded(tl.reshape(parts[0], (tile.LINES, tile.LANES * tile.VECTOR))), (tile.LINES, 1, 1))


@jit
def _over_lines(sums):
    """The sum of (LINES, 1, 1), in (1, 1, 1). Each warp gets all terms at once, instead of one with each halving."""
    lines: tl.constexpr = sums.shape[0]
    terms = tl.gather(tl.reshape(sums, (lines,)), tl.arange(0, lines), 0)
    return tl.reshape(_folded(tl.reshape(terms, (1, lines))), (1, 1, 1))


@functools.partial(jit, do_not_specialize=["x", "mask", "y", "partial", "rows", "columns", "queries", "groups"])
def forward_exact_kernel(
    x, mask, y, partial, rows, columns, queries, groups, sizes, x_strides, mask_strides, scale,
    form: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Softmax of the lines of a tile. `partial` holds the maximum and the sum of each group, pair by pair.

    Columns of x lie side by side; y is contiguous. `mask` is seen as rows like x, and is x where there is none.
    """
    lines = _lines(rows, columns, queries, groups, form.CAUSAL, tile)
    x_row = row_offset(lines.row, sizes[0], sizes[1], x_strides[0], x_strides[1], x_strides[2], form.FLAT)
    x_line = aligned_pointer(x, x_row + lines.begin, tile.VECTOR)
    mask_line = x_line
    if form.MASK != arithmetic.PLAIN:
        mask_row = row_offset(
            lines.row, sizes[0], sizes[1], mask_strides[0], mask_strides[1], mask_strides[2], form.FLAT
        )
        mask_line = mask + (mask_row + lines.begin.to(tl.int64) * mask_strides[3])
    xs = _loaded(x_line, lines.read, tile)
    zs = ()
    tops = tl.full((tile.LINES, tile.LANES, tile.VECTOR), arithmetic.LOWEST, tl.float32)
    for part in tl.static_range(tl.constexpr(tile.PARTS)):
        masks = xs[part]
        if form.MASK != arithmetic.PLAIN:
            at = _elements(part, tile).to(tl.int64) * mask_strides[3]
            masks = tl.load(mask_line + at, mask=_vectors(part, tile) < lines.read, other=0)
        z = to_float32(xs[part])
        if form.SCALED or form.MASK != arithmetic.PLAIN:
            z = arithmetic.logits(xs[part], masks, scale, form.MASK)
        z = _kept(z, float("-inf"), part, lines, form, tile)
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
            es += (exponential.exp(zs[part] - top, form.PRECISE),)  # type: ignore[assignment]
    if form.STAGE == PARTIAL:
        tl.store(here, top)
        tl.store(here + 1, _sums(es, tile))
    else:
        highest, weights = top, tl.full((tile.LINES, 1, 1), 1.0, tl.float32)
        if form.STAGE == FINISH:
            group = tl.arange(0, form.GROUPS)[:, None, None]
            others = partial + 2 * (tl.program_id(0) * tile.LINES // groups * groups + group)
            others_top = tl.load(others, mask=group < groups, other=arithmetic.LOWEST)
            highest = tl.max(others_top, axis=0, keep_dims=True)
            others_sums = tl.load(others + 1, mask=group < groups, other=0.0)
            total = _over_lines(others_sums * exponential.exp(others_top - highest, form.PRECISE))
            weights = exponential.exp(top - highest, form.PRECISE)
        elif form.GROUPS > 1:
            highest = tl.max(top, axis=0, keep_dims=True)
            weights = exponential.exp(top - highest, form.PRECISE)
            total = _over_lines(_sums(es, tile) * weights)
        else:
            total = _sums(es, tile)
        total = tl.where(total == 0.0, 1.0, total)  # asking total > 0 instead would hide a NaN
        norm = exponential.log(total) if form.LOG else tl.div_rn(weights, total)
        y_line = aligned_pointer(y, lines.row.to(tl.int64) * columns + lines.begin, tile.VECTOR)
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            result = (zs[part] - highest) - norm if form.LOG else es[part] * norm
            inside = _vectors(part, tile) < lines.end
            tl.store(y_line + _elements(part, tile), from_float32(result, y.dtype.element_ty), mask=inside)


@functools.partial(jit, do_not_specialize=["grad", "y", "dx", "partial", "rows", "columns", "queries", "groups"])
def backward_exact_kernel(
    grad, y, dx, partial, rows, columns, queries, groups, scale, form: tl.constexpr, tile: tl.constexpr
):
    """The derivative of the lines of a tile. All tensors are contiguous. `partial` holds the sum of each group."""
    lines = _lines(rows, columns, queries, groups, form.CAUSAL, tile)
    line = lines.row.to(tl.int64) * columns + lines.begin
    grad_line, y_line = aligned_pointer(grad, line, tile.VECTOR), aligned_pointer(y, line, tile.VECTOR)
    dx_line = aligned_pointer(dx, line, tile.VECTOR)
    dys, ys = _loaded(grad_line, lines.read, tile), _loaded(y_line, lines.read, tile)
    if form.STAGE == FINISH:
        group = tl.arange(0, form.GROUPS)[:, None, None]
        others = partial + (tl.program_id(0) * tile.LINES // groups * groups + group)
        total = _over_lines(tl.load(others, mask=group < groups, other=0.0))
    else:
        terms = ()
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            term = arithmetic.summand(to_float32(dys[part]), to_float32(ys[part]), form.LOG)
            terms += (_kept(term, 0.0, part, lines, form, tile),)  # type: ignore[assignment]
        total = _sums(terms, tile)
        if form.STAGE == WHOLE and form.GROUPS > 1:
            total = _over_lines(total)
    total += 0.0  # -0.0, the sum of negative zeros, becomes 0.0
    if form.STAGE == PARTIAL:
        tl.store(partial + (tl.program_id(0) * tile.LINES + tl.arange(0, tile.LINES)[:, None, None]), total)
    else:
        for part in tl.static_range(tl.constexpr(tile.PARTS)):
            dy, p = to_float32(dys[part]), to_float32(ys[part])
            result = (dy - exponential.exp(p, form.PRECISE) * total) if form.LOG else p * (dy - total)
            if form.SCALED:
                result *= scale
            result += 0.0  # -0.0 becomes 0.0, as it does where a GPU of AMD converts a product to fp16 at once
            if form.LOG:
                result = tl.where(p != float("-inf"), result, 0.0)
            result = _kept(result, 0.0, part, lines, form, tile)
            inside = _vectors(part, tile) < lines.end
            tl.store(dx_line + _elements(part, tile), from_float32(result, dx.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------- launches

FORWARD_TILE, BACKWARD_TILE = 16 * GROUP, 8 * GROUP  # elements that a program holds in registers
EACH = 64  # elements of a thread; a quarter of them where vectors have one, as addresses take registers too
LINES = 4  # of a program of two launches
MOST_GROUPS = 4096  # of a row: each program of the second launch reads the numbers of all
LONGEST = MOST_GROUPS * GROUP


@functools.lru_cache(maxsize=4096)
def tile_shape(columns: int, vector: int, lines: int, lanes: int) -> tuple[Tile, int]:
    """A tile of so many lines, or for 0 of as many rows as suit it, and its warps of so many lanes."""
    block = max(vector, 1 << (columns - 1).bit_length())
    across = max(min(32, block // vector), block // (EACH if vector > 1 else EACH // 4))
    lines = lines or max(1, 128 // across)
    tile = Tile(-(-columns // (across * vector)), lines, across, vector)
    return tile, max(1, lines * across // lanes)


def _launch(
    kernel: Any,
    tensors: Sequence[torch.Tensor],  # of which the last is written
    rows: int,
    columns: int,
    arguments: Sequence[Any],  # queries before the groups; strides, if any, and the scale after them
    form: Form,
    vector: int,
    limit: int,  # elements of a tile
    partials: int,  # numbers that each group leaves
) -> None:
    """Launch once for rows that a tile holds, or twice."""
    device, addresses = tensors[-1].device, [*map(by_address, tensors)]
    groups, lines, partial = -(-columns // GROUP), 0, addresses[-1]
    stages: Sequence[int] = (0,)
    if columns > (limit if vector > 1 else limit // 2):
        stages, lines = (1, 2), LINES
        groups = -(-groups // lines) * lines
        partial = torch.empty(partials * rows * groups, dtype=torch.float32, device=device)
    elif groups > 1:
        groups = lines = 1 << (groups - 1).bit_length()
    tile, warps = tile_shape(min(columns, GROUP), vector, lines, MOST_THREADS // most_warps(device))
    shorter = lines and columns % (GROUP * lines)  # some lines are shorter than others
    full = 0 if shorter else min(columns, GROUP) // (tile.LANES * vector)
    form = form._replace(FULL=full, GROUPS=1 << (groups - 1).bit_length())
    queries, *others = arguments
    operands = *addresses, partial, rows, columns, queries, groups, *others
    integers = [size for numbers in (*others[:-1], operands[4:8]) for size in numbers]
    specialized = [(size == 1) + 2 * (size % 16 == 0) + 4 * (size >= 2**31) for size in integers]
    for stage in stages:
        constants = {"form": form._replace(STAGE=stage), "tile": tile, "num_warps": warps, **EXACT}
        programs, dtypes = -(-rows * groups // tile.LINES), (tensor.dtype for tensor in tensors)
        launch_kernel(kernel, device, programs, operands, constants, *dtypes, *specialized)


def forward(layout: Layout, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the forward kernel into the contiguous `y`. `queries`: rows of one causal matrix, 0 for none."""
    (a, b, c), x = layout.sizes, layout.x
    mask, mask_kind = mask_operand(x, layout.mask)
    vector = math.gcd(16 // max(x.element_size(), y.element_size()), x.shape[-1], *row_begins(x, layout.x_strides))
    vector = math.gcd(vector, *row_begins(y, layout.y_strides))
    form = Form(log, y.dtype == torch.float32, queries > 0, scale != 1, mask_kind, a * b == 1)
    strides = (b, c), tuple(layout.x_strides[:3]), tuple(layout.mask_strides)
    arguments = max(queries, 1), *strides, float(scale)
    _launch(forward_exact_kernel, (x, mask, y), a * b * c, x.shape[-1], arguments, form, vector, FORWARD_TILE, 2)


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the backward kernel on contiguous tensors. `queries`: rows of one causal matrix, 0 for none."""
    columns, tensors = y.shape[-1], (grad, y, dx)
    vector = math.gcd(16 // max(y.element_size(), dx.element_size()), columns)
    vector = math.gcd(vector, *(number for tensor in tensors for number in row_begins(tensor, ())))
    form = Form(log, dx.dtype == torch.float32, queries > 0, scale != 1)
    arguments = max(queries, 1), float(scale)
    _launch(backward_exact_kernel, tensors, y.numel() // columns, columns, arguments, form, vector, BACKWARD_TILE, 1)
