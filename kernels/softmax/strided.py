"""Triton kernels and launches for sums over a dimension that is not the last one, or over the last of a transposed x.

Tiles keep neighbouring elements in neighbouring lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels.backend import MOST_THREADS, jit, launch_kernel, most_warps, tl
from halfstep.kernels.multi_tensor import alignments
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax import arithmetic
from halfstep.kernels.softmax.layout import Layout, mask_operand

# Elements of a tile: one that holds all columns of its sums, which stay in registers, and one of a loop over columns.
STRIDED_FORWARD, STRIDED_BACKWARD, STRIDED_LOOP = 32768, 16384, 4096
EACH = 64  # of a tile of whole sums, elements that a thread holds: the more, the fewer go from thread to thread


class Strides(NamedTuple):
    """Strides of an operand along three outer dimensions and from column to column, in elements."""

    a: int
    b: int
    c: int
    column: int


class Form(NamedTuple):
    ONE_PASS: bool  # a tile holds whole sums
    COLUMNS: int  # shape of a tile
    WIDTH: int
    HALVINGS: int = 0  # of the sums that a thread has side by side, as it exchanges them (`_over_columns`)
    HELD: int = 1  # columns of a thread
    MASK: int = 0  # PLAIN, BOOLEAN or ADDITIVE
    LOG: bool = False  # y is the logarithm of the softmax


class _Plane(NamedTuple):
    """An operand from the first sum of a program on: its stride from column to column, and the offsets of the sums."""

    first: Any
    step: Any
    side: Any


@jit
def _plane(pointer, a, b, c, strides):
    first = pointer + (a.to(tl.int64) * strides.a + b.to(tl.int64) * strides.b)
    return _Plane(first, strides.column, (c * strides.c)[None, :])


@jit
def _at(plane, column):
    return plane.first + (column.to(tl.int64)[:, None] * plane.step + plane.side)


@jit
def _loaded(plane, column, inside, POLICY: tl.constexpr):
    return tl.load(_at(plane, column), mask=inside, other=0.0, eviction_policy=POLICY)


@jit
def _neighbours(tile, WIDTH: tl.constexpr, element: tl.constexpr):
    """The indices of a tile along the dimension in which neighbours lie, for a result of the dtype `element`.

    The compiler is told that no more neighbours than 16 bytes of the result lie in a run, or results would go through
    shared memory before they are stored.
    """
    BYTES: tl.constexpr = element.primitive_bitwidth // 8
    RUN: tl.constexpr = WIDTH if WIDTH * BYTES < 16 else 16 // BYTES
    return tl.max_contiguous(tile.to(tl.int64) * WIDTH + tl.arange(0, WIDTH), RUN)


@jit
def _logits(x, mask, column, inside, scale, POLICY: tl.constexpr, form: tl.constexpr):
    """z of columns of all sums in fp32; -inf for those that are not `inside`."""
    values = _loaded(x, column, inside, POLICY)
    masks = values if form.MASK == arithmetic.PLAIN else tl.load(_at(mask, column), mask=inside, other=0)
    return tl.where(inside, arithmetic.logits(values, masks, scale, form.MASK), float("-inf"))


@jit
def _over_columns(tile, MAX: tl.constexpr, form: tl.constexpr):
    """Maxima or sums over the columns of a tile, which `_to_columns` gives back to all of them.

    A thread has HELD columns of 2^HALVINGS sums or more side by side, of which its neighbours in the warp have other
    columns. Each of two neighbours passes on half of its sums and completes the other half, then half of those with the
    next neighbour: 7 shuffles do for 8 sums instead of 24.

    Returns:
        A tile of (2^HALVINGS, sums / 2^HALVINGS): sum `i` is at (i % 2^HALVINGS, with its bits reversed, and the rest).
    """
    HALVINGS: tl.constexpr = form.HALVINGS
    APART: tl.constexpr = tile.shape[0] // form.HELD
    SIDE: tl.constexpr = tile.shape[1] >> HALVINGS
    tile = tl.reshape(tile, (form.HELD, APART, tile.shape[1]))
    part = tl.max(tile, axis=0) if MAX else tl.sum(tile, axis=0)
    odd = (tl.arange(0, 2) == 1)[None, :, None, None]
    for done in tl.static_range(HALVINGS):
        pairs = tl.reshape(part, (APART >> (done + 1), 2, SIDE << done, 2, 1 << (HALVINGS - done - 1)))
        first, second = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        kept = tl.where(odd, second, first)
        neighbour = arithmetic.from_neighbour(tl.where(odd, first, second), 1)
        part = tl.maximum(kept, neighbour) if MAX else kept + neighbour
    part = tl.reshape(part, (APART >> HALVINGS, 1 << HALVINGS, SIDE))
    return tl.max(part, axis=0) if MAX else tl.sum(part, axis=0)


@jit
def _to_columns(sums, form: tl.constexpr):
    """A tile with what `_over_columns` made, in all of its COLUMNS."""
    HALVINGS: tl.constexpr = form.HALVINGS
    COLUMNS: tl.constexpr = form.COLUMNS
    SIDE: tl.constexpr = sums.shape[1]
    odd = (tl.arange(0, 2) == 1)[None, :, None, None, None]
    for done in tl.static_range(HALVINGS):
        sums = tl.reshape(sums, (1 << done, 2, 1 << (HALVINGS - done - 1), SIDE, 1 << done))
        neighbour = arithmetic.from_neighbour(sums, 1)
        both = tl.join(tl.where(odd, neighbour, sums), tl.where(odd, sums, neighbour))
        sums = tl.permute(both, (0, 1, 2, 3, 5, 4))
    sums = tl.reshape(sums, (1, 1 << HALVINGS, SIDE << HALVINGS))
    whole = tl.broadcast_to(sums, (COLUMNS >> HALVINGS, 1 << HALVINGS, SIDE << HALVINGS))
    return tl.reshape(whole, (COLUMNS, SIDE << HALVINGS))


@functools.partial(jit, do_not_specialize=["size_b", "tiles"])
def forward_strided_kernel(
    x, mask, y, columns, size_b, size_c, x_strides, mask_strides, y_strides, tiles, scale, form: tl.constexpr
):
    """WIDTH sums side by side, for a dimension in which neighbours lie apart, COLUMNS of each at a time.

    All operands are seen as three outer dimensions a, b and c, and the columns of each sum. Neighbours lie along c,
    which takes `tiles`. `mask` is x where there is none.
    """
    program = tl.program_id(0)
    a, b = program // tiles // size_b, program // tiles % size_b
    element: tl.constexpr = y.dtype.element_ty
    c = _neighbours(program % tiles, form.WIDTH, element)
    side = (c < size_c)[None, :]
    x, y = _plane(x, a, b, c, x_strides), _plane(y, a, b, c, y_strides)
    mask = x if form.MASK == arithmetic.PLAIN else _plane(mask, a, b, c, mask_strides)
    lane = tl.arange(0, form.COLUMNS)
    if form.ONE_PASS:
        inside = (lane < columns)[:, None] & side
        z = _logits(x, mask, lane, inside, scale, "", form)
        z -= _to_columns(tl.maximum(_over_columns(z, True, form), arithmetic.LOWEST), form)
        e = arithmetic.exponential(z)
        norm = _to_columns(arithmetic.normalizer(_over_columns(e, False, form), form.LOG), form)
        result = arithmetic.normalized(z, e, norm, form.LOG)
        tl.store(_at(y, lane), from_float32(result, element), mask=inside)
    else:
        m = tl.full((form.COLUMNS, form.WIDTH), arithmetic.LOWEST, tl.float32)
        s = tl.full((form.COLUMNS, form.WIDTH), 0.0, tl.float32)
        for start in range(0, columns, form.COLUMNS):
            inside = (start + lane < columns)[:, None] & side
            z = _logits(x, mask, start + lane, inside, scale, "evict_last", form)
            higher = tl.maximum(m, z)
            s = s * arithmetic.exponential(m - higher) + arithmetic.exponential(z - higher)
            m = higher
        top = tl.max(m, axis=0)[None, :]
        norm = arithmetic.normalizer(tl.sum(s * arithmetic.exponential(m - top), axis=0)[None, :], form.LOG)
        for start in range(0, columns, form.COLUMNS):
            inside = (start + lane < columns)[:, None] & side
            z = _logits(x, mask, start + lane, inside, scale, "evict_first", form) - top
            result = arithmetic.normalized(z, arithmetic.exponential(z), norm, form.LOG)
            tl.store(_at(y, start + lane), from_float32(result, element), mask=inside)


@functools.partial(jit, do_not_specialize=["columns", "tiles"])
def backward_strided_kernel(grad, y, dx, columns, inner, tiles, scale, form: tl.constexpr):
    """The derivative over the middle dimension of contiguous (outer, columns, inner) tensors, tiled as forward."""
    program = tl.program_id(0)
    element: tl.constexpr = dx.dtype.element_ty
    c = _neighbours(program % tiles, form.WIDTH, element)
    side = (c < inner)[None, :]
    base = (program // tiles).to(tl.int64) * columns * inner
    grad, y, dx = (
        _Plane(grad + base, inner, c[None, :]),
        _Plane(y + base, inner, c[None, :]),
        _Plane(dx + base, inner, c[None, :]),
    )
    lane = tl.arange(0, form.COLUMNS)
    if form.ONE_PASS:
        inside = (lane < columns)[:, None] & side
        dy, p = to_float32(_loaded(grad, lane, inside, "")), to_float32(_loaded(y, lane, inside, ""))
        total = tl.sum(tl.where(inside, arithmetic.summand(dy, p, form.LOG), 0.0), axis=0)[None, :]
        result = arithmetic.gradient(dy, p, total, scale, form.LOG)
        tl.store(_at(dx, lane), from_float32(result, element), mask=inside)
    else:
        sums = tl.full((form.COLUMNS, form.WIDTH), 0.0, tl.float32)
        for start in range(0, columns, form.COLUMNS):
            inside = (start + lane < columns)[:, None] & side
            dy = to_float32(_loaded(grad, start + lane, inside, "evict_last"))
            p = to_float32(_loaded(y, start + lane, inside, "evict_last"))
            sums += tl.where(inside, arithmetic.summand(dy, p, form.LOG), 0.0)
        total = tl.sum(sums, axis=0)[None, :]
        for start in range(0, columns, form.COLUMNS):
            inside = (start + lane < columns)[:, None] & side
            dy = to_float32(_loaded(grad, start + lane, inside, "evict_first"))
            p = to_float32(_loaded(y, start + lane, inside, "evict_first"))
            result = arithmetic.gradient(dy, p, total, scale, form.LOG)
            tl.store(_at(dx, start + lane), from_float32(result, element), mask=inside)


def tile_shape(columns: int, across: int, one_pass: int, max_warps: int = 32, run: int = 1) -> tuple[Form, int, int]:
    """The tile of a launch, its warps, and how many tiles lie side by side, for `across` sums of `columns` terms.

    A tile has 32 sums or more where there are as many, and all columns where `one_pass` elements hold them. A program
    may have `max_warps` warps. A thread stores `run` neighbours together, whose sums it exchanges by halves.
    """
    side, tall, lanes = 1 << (across - 1).bit_length(), 1 << (columns - 1).bit_length(), MOST_THREADS // max_warps
    if tall * min(side, 32) > one_pass:
        width = min(side, 64)
        return Form(False, STRIDED_LOOP // width, width), 8, -(-across // width)
    width = min(side, max(32, 4096 // tall), 256)
    warps = min(max_warps, max(1, tall * width // (32 * EACH)))
    form, columns_of_thread = Form(True, tall, width), tall * width // (warps * lanes * run)
    halvings = min(run, lanes * run // width).bit_length() - 1  # lanes of a warp that have the same sums
    if columns_of_thread and halvings > 0:
        form = form._replace(HALVINGS=halvings, HELD=columns_of_thread)
    return form, warps, -(-across // width)


def _launch(
    kernel: Any, tensors: Sequence[torch.Tensor], programs: int, sizes: Sequence[Any], form: Form, warps: int
) -> None:
    """Launch a kernel. `sizes` are integers, or strides, and the scale."""
    # Triton compiles forms of their own for sizes that are 1, that 16 divides, and that need 64 bits, and for GPUs of
    # AMD for tensors of less than 2 GB.
    integers = [size for numbers in sizes[:-1] for size in (numbers if isinstance(numbers, tuple) else (numbers,))]
    specialized = [(size == 1) + 2 * (size % 16 == 0) + 4 * (size >= 2**31) for size in integers]
    small = [tensor.untyped_storage().nbytes() < 2**31 for tensor in tensors]
    key = *alignments(tensors), *small, *(tensor.dtype for tensor in tensors), *specialized
    constants = {"form": form, "num_warps": warps}
    launch_kernel(kernel, tensors[-1].device, programs, (*tensors, *sizes), constants, *key)


def forward(layout: Layout, y: torch.Tensor, scale: float, columns: int, log: bool) -> None:
    a, b, c = layout.sizes
    # Otherwise Triton does not know that all rows can be cut into vectors, and a thread has one neighbour.
    vectors = layout.x_strides[2] == 1 and c % 16 == 0
    run = 16 // y.element_size() if vectors else 1
    form, warps, tiles = tile_shape(columns, c, STRIDED_FORWARD, most_warps(y.device), run)
    mask, mask_kind = mask_operand(layout.x, layout.mask)
    strides = [Strides(*steps) for steps in (layout.x_strides, layout.mask_strides, layout.y_strides)]
    sizes, form = (columns, b, c, *strides, tiles, float(scale)), form._replace(MASK=mask_kind, LOG=log)
    _launch(forward_strided_kernel, (layout.x, mask, y), a * b * tiles, sizes, form, warps)


def backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sizes: tuple[int, int, int], scale: float, log: bool
) -> None:
    """Launch the backward kernel on contiguous tensors of (outer, columns, inner) elements."""
    outer, columns, inner = sizes
    form, warps, tiles = tile_shape(columns, inner, STRIDED_BACKWARD, most_warps(y.device))
    sizes_and_scale = columns, inner, tiles, float(scale)
    _launch(backward_strided_kernel, (grad, y, dx), outer * tiles, sizes_and_scale, form._replace(LOG=log), warps)
