"""Triton kernels and launches for sums over a dimension that is not the last one, or over the last of a transposed x.

Tiles keep neighbouring elements in neighbouring lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.kernels.backend import MOST_THREADS, jit, launch_kernel, most_warps, tl
from halfstep.kernels.multi_tensor import alignments
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax.blocks import LOWEST, PLAIN, exponential, gradient, logits, summand
from halfstep.kernels.softmax.layout import as_strided_rows, mask_operand

# Elements of a tile: one that holds all columns of its sums, which stay in registers, and one of a loop over columns.
STRIDED_FORWARD, STRIDED_BACKWARD, STRIDED_LOOP = 32768, 16384, 4096
EACH = 64  # of a tile of whole sums, elements that a thread holds: the more, the fewer go from thread to thread


@jit
def _neighbours(tile, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """The indices of a tile along the dimension in which neighbours lie, for a result of elements of `BYTES` bytes.

    The compiler is told that no more neighbours than 16 bytes of the result lie in a run. A thread would otherwise load
    16 of a mask of bytes, and exchange results with others through shared memory before it stores them.
    """
    RUN: tl.constexpr = WIDTH if WIDTH * BYTES < 16 else 16 // BYTES
    return tl.max_contiguous(tile.to(tl.int64) * WIDTH + tl.arange(0, WIDTH), RUN)


@jit
def _logits(x, mask, inside, scale, MASK: tl.constexpr, POLICY: tl.constexpr):
    """z of a tile in fp32, from pointers to its elements; -inf for those that are not `inside`."""
    values = tl.load(x, mask=inside, other=0.0, eviction_policy=POLICY)
    masks = values if MASK == PLAIN else tl.load(mask, mask=inside, other=0)
    return tl.where(inside, logits(values, masks, scale, MASK), float("-inf"))


@jit
def _from_neighbour(tile, AXIS: tl.constexpr):
    """The fp32 numbers at the other one of two places along an axis. Between lanes of a warp, this is one shuffle."""
    bits = tile.to(tl.int32, bitcast=True)
    return (tl.xor_sum(bits, axis=AXIS, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)


@jit
def _over_columns(tile, MAX: tl.constexpr, HALVINGS: tl.constexpr, HELD: tl.constexpr):
    """Maxima or sums over the columns of a tile, which `_to_columns` gives back to all of them.

    A thread has HELD columns of 2^HALVINGS sums or more side by side, of which its neighbours in the warp have other
    columns. Two such neighbours need not exchange all of their sums: each one passes on half of them and completes the
    other half, and then half of those with the next neighbour, so that 7 shuffles do for 8 sums instead of 24. No
    result depends on how the compiler distributes the tile; only the number of exchanges does.

    Returns:
        A tile of (2^HALVINGS, sums / 2^HALVINGS): sum `i` is at (i % 2^HALVINGS, with its bits reversed, and the rest).
    """
    APART: tl.constexpr = tile.shape[0] // HELD
    SIDE: tl.constexpr = tile.shape[1] >> HALVINGS
    tile = tl.reshape(tile, (HELD, APART, tile.shape[1]))
    part = tl.max(tile, axis=0) if MAX else tl.sum(tile, axis=0)
    odd = (tl.arange(0, 2) == 1)[None, :, None, None]
    for done in tl.static_range(HALVINGS):
        pairs = tl.reshape(part, (APART >> (done + 1), 2, SIDE << done, 2, 1 << (HALVINGS - done - 1)))
        first, second = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
        kept = tl.where(odd, second, first)
        other = _from_neighbour(tl.where(odd, first, second), 1)
        part = tl.maximum(kept, other) if MAX else kept + other
    part = tl.reshape(part, (APART >> HALVINGS, 1 << HALVINGS, SIDE))
    return tl.max(part, axis=0) if MAX else tl.sum(part, axis=0)


@jit
def _to_columns(sums, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr):
    """A tile with what `_over_columns` made, in all of its COLUMNS."""
    SIDE: tl.constexpr = sums.shape[1]
    odd = (tl.arange(0, 2) == 1)[None, :, None, None, None]
    for done in tl.static_range(HALVINGS):
        sums = tl.reshape(sums, (1 << done, 2, 1 << (HALVINGS - done - 1), SIDE, 1 << done))
        other = _from_neighbour(sums, 1)
        both = tl.join(tl.where(odd, other, sums), tl.where(odd, sums, other))
        sums = tl.permute(both, (0, 1, 2, 3, 5, 4))
    sums = tl.reshape(sums, (1, 1 << HALVINGS, SIDE << HALVINGS))
    whole = tl.broadcast_to(sums, (COLUMNS >> HALVINGS, 1 << HALVINGS, SIDE << HALVINGS))
    return tl.reshape(whole, (COLUMNS, SIDE << HALVINGS))


@functools.partial(jit, do_not_specialize=["size_b", "tiles"])
def forward_strided_kernel(
    x,  # three outer dimensions a, b and c, and the columns of each sum; neighbours lie along c
    mask,  # seen like x; x itself where there is none
    y,  # seen like x
    columns,  # terms of a sum
    size_b,  # sizes of the outer dimensions
    size_c,
    x_a,  # steps of x along the outer dimensions and from column to column, in elements
    x_b,
    x_c,
    x_column,
    mask_a,  # the same of the mask
    mask_b,
    mask_c,
    mask_column,
    y_a,  # the same of y
    y_b,
    y_c,
    y_column,
    tiles,  # that size_c takes
    scale,  # what x is multiplied by
    MASK: tl.constexpr,  # PLAIN, BOOLEAN or ADDITIVE
    LOG: tl.constexpr,  # the logarithm of the softmax
    ONE_PASS: tl.constexpr,  # columns <= COLUMNS: a tile holds whole sums
    COLUMNS: tl.constexpr,  # shape of a tile
    WIDTH: tl.constexpr,
    HALVINGS: tl.constexpr,  # of the sums that a thread has side by side, as it exchanges them
    HELD: tl.constexpr,  # columns of a thread
):
    """WIDTH sums side by side, for a dimension in which neighbours lie apart, COLUMNS of each at a time."""
    program = tl.program_id(0)
    a, b = program // tiles // size_b, program // tiles % size_b
    c = _neighbours(program % tiles, WIDTH, y.dtype.element_ty.primitive_bitwidth // 8)
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
        z = _logits(x + (column * x_column + x_side), mask_block, inside, scale, MASK, "")
        m = tl.maximum(_over_columns(z, True, HALVINGS, HELD), LOWEST)
        z -= _to_columns(m, COLUMNS, HALVINGS)
        e = exponential(z)
        s = _over_columns(e, False, HALVINGS, HELD)
        s = tl.where(s == 0.0, 1.0, s)
        if LOG:
            result = z - _to_columns(tl.log(s), COLUMNS, HALVINGS)
        else:
            result = e * _to_columns(1.0 / s, COLUMNS, HALVINGS)
        tl.store(y + (column * y_column + y_side), from_float32(result, y.dtype.element_ty), mask=inside)
    else:
        m = tl.full((COLUMNS, WIDTH), LOWEST, tl.float32)
        s = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for start in range(0, columns, COLUMNS):
            column = (start + lane).to(tl.int64)[:, None]
            inside = (column < columns) & side
            mask_block = mask + (column * mask_column + mask_side)
            z = _logits(x + (column * x_column + x_side), mask_block, inside, scale, MASK, "evict_last")
            higher = tl.maximum(m, z)
            s = s * exponential(m - higher) + exponential(z - higher)
            m = higher
        top = tl.max(m, axis=0)[None, :]
        total = tl.sum(s * exponential(m - top), axis=0)
        total = tl.where(total == 0.0, 1.0, total)[None, :]
        shift, factor = tl.log(total), 1.0 / total
        for start in range(0, columns, COLUMNS):
            column = (start + lane).to(tl.int64)[:, None]
            inside = (column < columns) & side
            mask_block = mask + (column * mask_column + mask_side)
            x_block = x + (column * x_column + x_side)
            z = _logits(x_block, mask_block, inside, scale, MASK, "evict_first") - top
            result = z - shift if LOG else exponential(z) * factor
            tl.store(y + (column * y_column + y_side), from_float32(result, y.dtype.element_ty), mask=inside)


@functools.partial(jit, do_not_specialize=["columns", "tiles"])
def backward_strided_kernel(
    grad,  # gradient of the result; like y and dx contiguous, of shape (outer, columns, inner)
    y,  # the result
    dx,  # gradient of x
    columns,  # terms of a sum
    inner,  # elements from one column to the next
    tiles,  # that inner takes
    scale,  # what x was multiplied by
    LOG: tl.constexpr,  # y is the logarithm of the softmax
    ONE_PASS: tl.constexpr,  # columns <= COLUMNS: a tile holds whole sums
    COLUMNS: tl.constexpr,  # shape of a tile
    WIDTH: tl.constexpr,
):
    """The derivative over the middle dimension of contiguous (outer, columns, inner) tensors, tiled as forward."""
    program = tl.program_id(0)
    c = _neighbours(program % tiles, WIDTH, dx.dtype.element_ty.primitive_bitwidth // 8)
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
        total = tl.sum(tl.where(inside, summand(dy, p, LOG), 0.0), axis=0)[None, :]
        result = gradient(dy, p, total, scale, LOG)
        tl.store(dx + offset, from_float32(result, dx.dtype.element_ty), mask=inside)
    else:
        sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
        for start in range(0, columns, COLUMNS):
            column = start + lane
            inside = (column < columns)[:, None] & side
            offset = column.to(tl.int64)[:, None] * inner + c[None, :]
            dy = to_float32(tl.load(grad + offset, mask=inside, other=0.0, eviction_policy="evict_last"))
            p = to_float32(tl.load(y + offset, mask=inside, other=0.0, eviction_policy="evict_last"))
            sums += tl.where(inside, summand(dy, p, LOG), 0.0)
        total = tl.sum(sums, axis=0)[None, :]
        for start in range(0, columns, COLUMNS):
            column = start + lane
            inside = (column < columns)[:, None] & side
            offset = column.to(tl.int64)[:, None] * inner + c[None, :]
            dy = to_float32(tl.load(grad + offset, mask=inside, other=0.0, eviction_policy="evict_first"))
            p = to_float32(tl.load(y + offset, mask=inside, other=0.0, eviction_policy="evict_first"))
            result = gradient(dy, p, total, scale, LOG)
            tl.store(dx + offset, from_float32(result, dx.dtype.element_ty), mask=inside)


def tile_shape(columns: int, across: int, one_pass: int, most: int = 32) -> tuple[dict[str, int], int]:
    """Shape of the tiles, with the warps of a kernel, and how many tiles lie side by side.

    A tile has 32 sums or more where there are as many, and all columns where `one_pass` elements hold them.

    Args:
        columns: terms of a sum.
        across: sums that lie side by side.
        one_pass: elements that a tile of whole sums may have.
        most: warps that a program may have.
    """
    side = 1 << (across - 1).bit_length()
    tall = 1 << (columns - 1).bit_length()
    whole = tall * min(side, 32) <= one_pass
    if whole:
        width = min(side, max(32, 4096 // tall), 256)
        warps = min(most, max(1, tall * width // (32 * EACH)))
    else:
        width, warps = min(side, 64), 8
        tall = STRIDED_LOOP // width
    fixed = {"ONE_PASS": whole, "COLUMNS": tall, "WIDTH": width, "num_warps": warps}
    return fixed, -(-across // width)


def exchange(shape: dict[str, int], run: int, most: int = 32) -> dict[str, int]:
    """How the threads of a tile of `tile_shape` exchange their sums (`_over_columns`).

    Args:
        shape: of the tile.
        run: neighbours that a thread stores together.
        most: warps that a program may have.
    """
    lanes = MOST_THREADS // most
    held = shape["COLUMNS"] * shape["WIDTH"] // (shape["num_warps"] * lanes * run)
    halvings = min(run, lanes * run // shape["WIDTH"]).bit_length() - 1  # lanes of a warp that have the same sums
    if shape["ONE_PASS"] and held and halvings > 0:
        return {"HALVINGS": halvings, "HELD": held}
    return {"HALVINGS": 0, "HELD": 1}


def _launch(
    kernel: Any,
    tensors: Sequence[torch.Tensor],
    programs: int,
    sizes: Sequence[int],
    scale: float,
    fixed: dict[str, Any],
) -> None:
    # Triton compiles forms of their own for sizes that are 1, that 16 divides, and that need 64 bits, and for GPUs of
    # AMD for tensors of less than 2 GB.
    kinds = [(size == 1) + 2 * (size % 16 == 0) + 4 * (size >= 2**31) for size in sizes]
    small = [tensor.untyped_storage().nbytes() < 2**31 for tensor in tensors]
    form = *alignments(tensors), *small, *(tensor.dtype for tensor in tensors), *kinds
    launch_kernel(kernel, tensors[-1].device, programs, (*tensors, *sizes, float(scale)), fixed, *form)


def forward(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor, dim: int, scale: float, log: bool) -> None:
    """Launch the forward kernel: `x` of two dimensions or more, not empty, into the contiguous `y`."""
    rows, columns = as_strided_rows(x, mask, y, dim), x.shape[dim]
    a, b, c = rows.sizes
    fixed, tiles = tile_shape(columns, c, STRIDED_FORWARD, most_warps(y.device))
    # Otherwise Triton does not know that all rows can be cut into vectors, and a thread has one neighbour.
    vectors = rows.x_strides[2] == 1 and c % 16 == 0
    fixed |= exchange(fixed, 16 // y.element_size() if vectors else 1, most_warps(y.device))
    operand, kind = mask_operand(rows.x, rows.mask)
    fixed |= {"MASK": kind, "LOG": log}
    strides = *rows.x_strides, *rows.mask_strides, *rows.y_strides
    _launch(forward_strided_kernel, (rows.x, operand, y), a * b * tiles, (columns, b, c, *strides, tiles), scale, fixed)


def backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sizes: tuple[int, int, int], scale: float, log: bool
) -> None:
    """Launch the backward kernel on contiguous tensors of (outer, columns, inner) elements."""
    outer, columns, inner = sizes
    fixed, tiles = tile_shape(columns, inner, STRIDED_BACKWARD, most_warps(y.device))
    fixed["LOG"] = log
    _launch(backward_strided_kernel, (grad, y, dx), outer * tiles, (columns, inner, tiles), scale, fixed)
