"""Launches of the Triton kernels for sums over the last dimension: tiles, warps, vectors and pieces of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from halfstep.kernels.backend import MOST_THREADS, by_address, launch_kernel, most_warps
from halfstep.kernels.multi_tensor import address
from halfstep.kernels.softmax.layout import Rows, mask_operand
from halfstep.kernels.softmax.row_kernels import FINISH, PARTIAL, WHOLE, backward_row_kernel, forward_row_kernel

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
SHORT_RUN = 64  # elements of a row that lie together in a part, where it has as many: 128 bytes of 16-bit numbers


@functools.lru_cache(maxsize=4096)
def tile_shape(columns: int, vector: int, ends: bool, per_thread: int, lanes: int) -> tuple[dict[str, int], int]:
    """Shape of a tile that holds whole rows, and its warps.

    Up to 32 times `per_thread` columns, a row stays within a warp, so that no reduction crosses warps: no barrier and
    no shared memory.

    Args:
        columns: of a row.
        vector: elements of a vector.
        ends: whether the elements at the ends of a row need a lane each.
        per_thread: elements of a row that a thread holds, or a quarter more.
        lanes: of a warp.
    """
    block = max(16, 1 << (columns - 1).bit_length())
    most = max(1, per_thread // vector)  # parts
    least = max(1, min(32, SHORT_RUN // vector, block // vector))
    if ends:
        columns, least = columns // vector * vector, max(least, 2 * vector)
    across = max(least, block // (most * vector))
    whole = -(-block // (across * vector))
    step = -(-whole // 4)  # a few numbers of parts are enough: a form is compiled for each
    parts = -(-columns // (across * vector * step)) * step
    if across > least and most > 1 and columns <= (most + step) * vector * across // 2:
        across, parts = across // 2, most + step
    rows, warps = 1, max(1, across // lanes)
    if across <= 32:
        rows = SHORT_WARPS * lanes // across * (1 << max(1, most // parts).bit_length() - 1)
        warps = SHORT_WARPS
    return {"PARTS": parts, "ROWS": rows, "LANES": across, "VECTOR": vector}, warps


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """How many programs for pieces the device runs at a time; 16 stands for a device that is interpreted."""
    if device.type != "cuda":
        return 16
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count * (MOST_THREADS // PIECE_THREADS)


def _pieces(rows: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Pieces per row and columns of each, so that few rows keep the whole device busy."""
    wished = min(_programs_at_once(device) // rows, MOST_PIECES)
    if wished < 2:
        return 1, columns
    span = -(-columns // (wished * PIECE)) * PIECE
    return -(-columns // span), span


def held_columns(columns: int, tile: int, loop: int) -> int:
    """How many columns of a row longer than a tile to hold in registers: so that its last trip masks the fewest."""
    return min((tile, tile * 3 // 4), key=lambda held: held + -(-(columns - held) // loop) * loop)


def _vector(line: int, tensor: torch.Tensor, columns: int, strides: Sequence[int] = ()) -> int:
    """The most elements, up to `line`, that each row of a tensor can be cut into without a rest on either side.

    `strides` need not contain multiples of `columns`.
    """
    return math.gcd(line, columns, address(tensor) // tensor.element_size(), *strides)


def _in_step(line: int, sizes: Sequence[int], *tensors: tuple[torch.Tensor, Sequence[int]]) -> bool:
    """Whether rows of all tensors, given with their strides, begin equally far from multiples of `line` elements."""
    begins = []
    for tensor, strides in tensors:
        steps = [step for size, step in zip(sizes, strides, strict=True) if size > 1]
        begins.append([address(tensor) // tensor.element_size(), *steps])
    return all((one - other) % line == 0 for of in begins[1:] for one, other in zip(begins[0], of, strict=True))


def _launch(
    kernel: Any,
    tensors: tuple[torch.Tensor, ...],  # of which the last is written
    sizes: tuple[int, ...],  # of which the first two are rows and columns
    scale: float,
    fixed: dict[str, Any],
    tile: int,  # elements that a program can hold
    loop: int,  # elements of a trip over the rest
    partials: int,  # numbers that each piece of a row leaves
) -> None:
    """Launch once for whole rows, or twice for rows in pieces."""
    (count, columns, *_), device = sizes, tensors[-1].device
    operands = [*map(by_address, tensors)]
    rest, stages, pieces, span, held, per_thread = operands[-1], [WHOLE], 1, 1, columns, tile // MOST_THREADS
    if columns > tile:
        pieces, span = _pieces(count, columns, device)
        held = held_columns(columns, tile, loop)
    if pieces > 1:
        stages, held, per_thread = [PARTIAL, FINISH], PIECE, PIECE // PIECE_THREADS
        rest = torch.empty(partials * count * pieces, dtype=torch.float32, device=device)
    vector, lanes = fixed["VECTOR"], MOST_THREADS // most_warps(device)
    shape, warps = tile_shape(held, vector, fixed["ENDS"], per_thread, lanes)
    constants = {**fixed, **shape, "PIECES": 1 if pieces == 1 else MOST_PIECES, "LOOP": 0, "num_warps": warps}
    if columns > tile:
        trip = shape["PARTS"] if pieces > 1 else max(1, loop // (shape["LANES"] * vector))
        constants |= {"ROWS": 1, "LOOP": trip}
    wide = max(sizes) >= 2**31 and tuple(size >= 2**31 for size in sizes)
    form = (wide, *(tensor.dtype for tensor in tensors))
    operands += [rest, *sizes, pieces, span, float(scale)]
    programs = -(-count * pieces // constants["ROWS"])
    for stage in stages:
        launch_kernel(kernel, device, programs, operands, {**constants, "STAGE": stage}, *form)


def forward(rows: Rows, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the forward kernel into the contiguous `y`. `queries`: rows of one causal matrix, 0 for none."""
    (a, b, c), columns, x = rows.sizes, rows.columns, rows.x
    mask, kind = mask_operand(x, rows.mask)
    line = 16 // max(x.element_size(), y.element_size())
    y_strides = (b * c * columns, c * columns, columns)
    vector = _vector(_vector(line, x, columns, rows.x_strides), y, columns)
    ends = vector < line and columns >= SHORTEST_WITH_ENDS
    ends = ends and _in_step(line, rows.sizes, (x, rows.x_strides), (y, y_strides))
    if ends:
        vector = line
    aligned = kind > 0 and rows.mask_column == 1
    aligned = aligned and _in_step(vector, rows.sizes, (x, rows.x_strides), (mask, rows.mask_strides))
    sizes = (a * b * c, columns, max(queries, 1), b, c, *rows.x_strides, *rows.mask_strides, rows.mask_column)
    fixed = {"MASK": kind, "CAUSAL": queries > 0, "LOG": log, "FLAT": a * b == 1}
    fixed |= {"OF_X": kind == 0 and not queries and scale >= 0, "MASK_ALIGNED": aligned}
    fixed |= {"VECTOR": vector, "ENDS": ends}
    loop = FORWARD_LOOP if vector == 8 and kind == 0 else FORWARD_LOOP // 2
    tile = FORWARD_TILE if vector > 1 else FORWARD_TILE // 2
    _launch(forward_row_kernel, (x, mask, y), sizes, scale, fixed, tile, loop, 2)


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the backward kernel on contiguous tensors. `queries`: rows of one causal matrix, 0 for none."""
    columns = y.shape[-1]
    count = y.numel() // columns
    vector = line = 16 // max(y.element_size(), dx.element_size())
    for tensor in (grad, y, dx):
        vector = _vector(vector, tensor, columns)
    ends = vector < line and columns >= SHORTEST_WITH_ENDS
    ends = ends and _in_step(line, (count,), *((tensor, (columns,)) for tensor in (grad, y, dx)))
    if ends:
        vector = line
    sizes = (count, columns, max(queries, 1))
    fixed = {"CAUSAL": queries > 0, "LOG": log, "VECTOR": vector, "ENDS": ends}
    _launch(backward_row_kernel, (grad, y, dx), sizes, scale, fixed, BACKWARD_TILE, BACKWARD_LOOP, 1)
