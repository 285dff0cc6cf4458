"""Launches of the Triton kernels for sums over the last dimension: blocks, warps, pieces of rows and lines."""

from __future__ import annotations

import functools
from typing import Any

import torch

from halfstep.kernels.backend import by_address, most_warps, on_device
from halfstep.kernels.multi_tensor import DTYPE_CODES, address
from halfstep.kernels.softmax.layout import Rows, mask_operand
from halfstep.kernels.softmax.row_kernels import (
    backward_long_kernel,
    backward_tile_kernel,
    forward_long_kernel,
    forward_tile_kernel,
)

# Longest row that one block holds in registers without spilling on any target, by warps of 32 lanes.
FORWARD_ONE_PASS = 32768
BACKWARD_ONE_PASS = 16384
LOOP_BLOCK, LOOP_WARPS = 8192, 16
MOST_PIECES = 256  # of a row
SHORTEST_LINED = 128  # columns; in shorter rows the lines lost at both ends are too large a part


def tile_shape(columns: int, per_warp: int, most: int = 32) -> tuple[int, int, int]:
    """ROWS, BLOCK and warps of a tile kernel. Up to 512 columns one warp has whole rows to itself, so that no reduction
    crosses warps: no barrier and no shared memory."""
    block = max(16, 1 << (columns - 1).bit_length())
    if block <= 512:
        return 1024 // block, block, 1
    return 1, block, min(most, max(2, block // per_warp))


def loop_block(line: int, mask_kind: int) -> int:
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


def _launch(
    kernels: tuple[Any, Any],  # of short rows and of long ones
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, ...],  # of which the first two are rows and columns
    scale: float,
    fixed: dict[str, Any],
    one_pass: int,
    per_warp: int,
    block: int,  # of long rows
    partials: int,  # numbers that each piece of a row leaves
) -> None:
    """The kernel of short rows once, or that of long ones once for whole rows and twice for rows in pieces."""
    tile_kernel, long_kernel = kernels
    count, columns = sizes[:2]
    reach = columns + max(fixed["LINE"] - 1, 0)  # lanes from the boundary below a row to its end, at most
    fixed |= {"WIDE": count >= 2**30}
    device = tensors[-1].device
    operands: list[Any] = [*map(by_address, tensors)] if fixed["LINE"] else [*tensors]
    with on_device(device):
        if reach <= one_pass:
            tile, block, warps = tile_shape(reach, per_warp, most_warps(device))
            fixed |= {"ROWS": tile, "BLOCK": block, "num_warps": warps}
            tile_kernel[(-(-count // tile),)](*operands, *sizes, scale, **fixed)
            return
        fixed |= {"BLOCK": block, "num_warps": LOOP_WARPS}
        pieces, span = _pieces(count, reach, device)
        if pieces == 1:
            long_kernel[(count,)](*operands, operands[-1], *sizes, 1, 1, scale, **fixed, STAGE=0, PIECES=1)
            return
        partial = torch.empty(partials * count * pieces, dtype=torch.float32, device=device)
        for stage in (1, 2):
            long_kernel[(count * pieces,)](
                *operands, partial, *sizes, pieces, span, scale, **fixed, STAGE=stage, PIECES=MOST_PIECES
            )


def forward(rows: Rows, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the forward kernels into the contiguous `y`. `queries`: rows of one causal matrix, 0 for none."""
    a, b, c = rows.sizes
    mask, kind = mask_operand(rows.x, rows.mask)
    line, mask_in_step, y_in_step = _lines(rows, y)
    sizes = (a * b * c, rows.columns, max(queries, 1), b, c, *rows.x_strides, *rows.mask_strides, rows.mask_column)
    fixed = {"MASK": kind, "CAUSAL": queries > 0, "LOG": log, "FLAT": a * b == 1}
    fixed |= {"LINE": line, "MASK_IN_STEP": mask_in_step, "Y_IN_STEP": y_in_step}
    kernels = forward_tile_kernel, forward_long_kernel
    _launch(kernels, (rows.x, mask, y), sizes, scale, fixed, FORWARD_ONE_PASS, 1024, loop_block(line, kind), 2)


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Launch the backward kernels on contiguous tensors. `queries`: rows of one causal matrix, 0 for none."""
    columns = y.shape[-1]
    line = 0
    if columns >= SHORTEST_LINED and (columns % 16 or any(address(tensor) % 16 for tensor in (grad, y, dx))):
        line = _boundaries(y, dx)
        if not (_in_step(line, y, grad) and _in_step(line, y, dx)):
            line = 0
    sizes = (y.numel() // columns, columns, max(queries, 1))
    fixed = {"CAUSAL": queries > 0, "LOG": log, "LINE": line}
    kernels = backward_tile_kernel, backward_long_kernel
    _launch(kernels, (grad, y, dx), sizes, scale, fixed, BACKWARD_ONE_PASS, 512, LOOP_BLOCK, 1)
