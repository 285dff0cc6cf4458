"""Count where the elements of many tensors fall in a number format. Reads each element once; all counts are exact.

cells.py describes the table of counts, and `reference` how an element is counted. Counts are int64 integers, so their
sums do not depend on the order.

Bytes per element: reads it (2 or 4 B) and writes nothing; per tensor, 8 B for each of its 849 or 1044 counts. The
Triton kernel adds up a block of elements by `tl.histogram`, for 256 cells or bins at a time that it meets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from halfstep.kernels import cells, multi_tensor
from halfstep.kernels.backend import EXACT, constant, jit, launch_kernel, resolve, tl
from halfstep.kernels.cells import CELLS, CLASSES, ZERO, Grid
from halfstep.kernels.formats import format_of
from halfstep.kernels.loss_scale import inverse, inverse_block
from halfstep.kernels.multi_tensor import ADDRESSES, FLOATS, TableCache, alignments, locate, own_operations
from halfstep.kernels.rounding import to_float32

CHUNK = 16384  # elements of one program
BLOCK = 2048  # elements that it adds up together
PATTERNS = 2**15  # of 16 bits, without the sign

# --------------------------------------------------------------------------------------------------------- reference


def reference(
    x: torch.Tensor,
    counts: torch.Tensor,
    grid: Grid,
    scale: torch.Tensor | None = None,
    inverted: bool = False,
    weights: torch.Tensor | None = None,
) -> None:
    """Add the elements of one tensor to its counts.

        y = x * scale                         or x / scale. A power of two is added to the exponents, so that y is
                                              exact; any other scale, or its inverse, is a factor in fp32
        |y| = (1 + fraction / 2^23) * 2^e
        cell[e, class] += 1
        r = |y - round(y)| / |y|              a quotient of two numbers of at most 24 bits, rounded to fp32 once
        bin[r] += 1

    Args:
        x: (n,) fp32, fp16 or bf16.
        counts: (`width(errors)`,) int64: the cells and, if it is as long, the bins and the largest error.
        grid, scale, inverted: the format, and a 0-dim fp32 number to multiply or divide by; None for 1.
        weights: (n,) int64, how often each element occurs; None for once.
    """
    if weights is None:
        weights = torch.ones((), dtype=torch.int64, device=x.device).expand_as(x)
    factor: Any = 1.0
    shift: Any = 0
    if scale is not None:
        bits = scale.view(torch.int32)
        is_power = (bits & 0x7FFFFF) == 0
        exponent = (bits >> 23) - 127
        shift = torch.where(is_power, -exponent if inverted else exponent, 0)
        factor = torch.where(is_power, 1.0, inverse(scale) if inverted else scale)
    x = x.float()
    unscaled = x.view(torch.int32) & 0x7FFFFFFF
    magnitude = (x * factor).view(torch.int32) & 0x7FFFFFFF
    small = magnitude < 0x800000  # subnormal: convert the integer number of units of 2^-149 to a normal number
    key = torch.where(small, magnitude.float().view(torch.int32), magnitude)
    exponent = (key >> 23) - torch.where(small, 127 + 149, 127) + shift
    fraction = key & 0x7FFFFF
    row = exponent.clamp(cells.LOWEST, cells.HIGHEST) - cells.LOWEST
    cell = row * CLASSES + (fraction != 0).int() + (fraction >= grid.overflow)
    cell = torch.where(unscaled >= 0x7F800000, cells.INFINITE * CLASSES, cell)
    cell = torch.where(unscaled > 0x7F800000, cells.NOT_A_NUMBER * CLASSES, cell)
    cell = torch.where(unscaled == 0, ZERO * CLASSES, cell)
    counts.scatter_add_(0, cell.long(), weights)
    if counts.numel() == CELLS:
        return
    significand = fraction | 0x800000
    # The number of bits that rounding drops. From 25 on, all numbers round to zero.
    cut = (grid.dropped + (grid.emin - exponent).clamp(min=0)).clamp(max=25)
    unit = torch.ones_like(cut) << cut
    remainder = significand & (unit - 1)
    error = torch.minimum(remainder, unit - remainder)
    relative = (error.float() / significand.float()).view(torch.int32)
    inside = (exponent < grid.emax) | ((exponent == grid.emax) & (fraction < grid.overflow))
    counted = inside & (cell < ZERO * CLASSES) & (weights > 0)
    error_bin = torch.where(error == 0, 0, (relative >> 20) - ((127 - 24) << 3) + 1)
    counts[CELLS:].scatter_add_(0, torch.where(counted, error_bin, 0).long(), counted * weights)
    if x.numel():
        counts[-1].clamp_(min=torch.where(counted, relative, 0).amax().long())


def count_on_cpu(
    x: torch.Tensor, counts: torch.Tensor, grid: Grid, scale: torch.Tensor | None = None, inverted: bool = False
) -> None:
    """What `reference` counts of a flat fp32, fp16 or bf16 tensor, with temporaries that fit into the caches.

    Each pattern of a long 16-bit tensor is examined once, with the number of its elements; signs do not count.
    """
    if x.element_size() == 4 or x.numel() < PATTERNS:
        for part in x.split(CHUNK):
            reference(part, counts, grid, scale, inverted)
        return
    patterns = torch.arange(PATTERNS, dtype=torch.int32, device=x.device).to(torch.int16).view(x.dtype)
    weights = torch.zeros(PATTERNS, dtype=torch.int64, device=x.device)
    for part in x.view(torch.int16).split(2**20):
        weights += torch.bincount(part & 0x7FFF, minlength=PATTERNS)
    reference(patterns, counts, grid, scale, inverted, weights)


# ----------------------------------------------------------------------------------------------------------- kernels

_LOWEST, _HIGHEST, _CLASSES = constant(cells.LOWEST), constant(cells.HIGHEST), constant(CLASSES)
_ZERO, _INFINITE = constant(ZERO * CLASSES), constant(cells.INFINITE * CLASSES)
_NOT_A_NUMBER = constant(cells.NOT_A_NUMBER * CLASSES)
_CELLS, _ERROR_BINS = constant(CELLS), constant(cells.ERROR_BINS)
_DATA_ROW, _COUNTS_ROW = constant(ADDRESSES), constant(ADDRESSES + 1)
_SLOTS = constant(256)  # counts of a histogram, whose time grows with them


@jit
def _classify(x, factor, shift, dropped, emin, emax, overflow, ERRORS: tl.constexpr):
    """(cell, bin of the error, bits of the error) of a block; the last two are only valid with ERRORS."""
    unscaled = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = (x * factor).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    small = magnitude < 0x800000
    key = tl.where(small, magnitude.to(tl.float32).to(tl.int32, bitcast=True), magnitude)
    exponent = (key >> 23) - tl.where(small, 276, 127) + shift
    fraction = key & 0x7FFFFF
    row = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST) - _LOWEST
    cell = row * _CLASSES + (fraction != 0).to(tl.int32) + (fraction >= overflow).to(tl.int32)
    cell = tl.where(unscaled >= 0x7F800000, _INFINITE, cell)
    cell = tl.where(unscaled > 0x7F800000, _NOT_A_NUMBER, cell)
    cell = tl.where(unscaled == 0, _ZERO, cell)
    if ERRORS:
        significand = fraction | 0x800000
        cut = tl.minimum(dropped + tl.maximum(emin - exponent, 0), 25)
        unit = tl.full(cut.shape, 1, tl.int32) << cut
        remainder = significand & (unit - 1)
        error = tl.minimum(remainder, unit - remainder)
        relative = tl.div_rn(error.to(tl.float32), significand.to(tl.float32)).to(tl.int32, bitcast=True)
        counted = (cell < _ZERO) & ((exponent < emax) | ((exponent == emax) & (fraction < overflow)))
        error_bin = tl.where(error == 0, 0, (relative >> 20) - 823)  # (127 - 24) * 8 - 1
        return cell, tl.where(counted, error_bin, _ERROR_BINS), tl.where(counted, relative, 0)
    else:
        return cell, cell, cell


@jit
def _add_up(counts, index, counted, LENGTH: tl.constexpr):
    """Add 1 to ``counts[index]`` for each element of a block that is `counted`; all indices are below LENGTH."""
    slot = tl.arange(0, _SLOTS)
    for begin in range(0, LENGTH, _SLOTS):
        inside = counted & (index >= begin) & (index < begin + _SLOTS)
        if tl.max(inside.to(tl.int32), axis=0) > 0:  # the numbers of a tensor have few exponents
            sums = tl.histogram(tl.where(inside, index - begin, 0), _SLOTS, mask=inside)
            tl.atomic_add(counts + begin + slot, sums.to(tl.int64), mask=sums != 0)


@functools.partial(jit, do_not_specialize=["tensors", "dropped", "emin", "emax", "overflow"])
def count_kernel(
    rows, chunk_tensor, tensors,  # of a table whose operands are the address and the tensor's row in `counts`
    scale,  # fp32 scalar
    counts,  # int64 (..., width)
    dropped, emin, emax, overflow,  # see `Grid`
    DTYPE: tl.constexpr,
    INVERTED: tl.constexpr,  # whether to divide by the scale
    ERRORS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column, start, left = locate(rows, chunk_tensor, tensors, CHUNK)
    data = tl.load(column + _DATA_ROW * tensors).to(tl.pointer_type(DTYPE)) + start
    WIDTH: tl.constexpr = _CELLS + _ERROR_BINS + 1 if ERRORS else _CELLS
    row = counts + tl.load(column + _COUNTS_ROW * tensors) * WIDTH
    factor = tl.load(scale)
    bits = factor.to(tl.int32, bitcast=True)
    shift = 0
    if (bits & 0x7FFFFF) == 0:  # a power of two
        shift = (bits >> 23) - 127
        factor = 1.0
    if INVERTED:
        shift = -shift
        factor = inverse_block(factor)
    largest = tl.full((), 0, tl.int32)
    for begin in range(0, left, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        exists = at < left
        x = to_float32(tl.load(data + at, mask=exists, other=0.0))
        cell, error_bin, relative = _classify(x, factor, shift, dropped, emin, emax, overflow, ERRORS)
        _add_up(row, cell, exists, _CELLS)
        if ERRORS:
            _add_up(row + _CELLS, error_bin, exists & (error_bin < _ERROR_BINS), _ERROR_BINS)
            largest = tl.maximum(largest, tl.max(relative, axis=0))
    if ERRORS:
        tl.atomic_max(row + _CELLS + _ERROR_BINS, largest.to(tl.int64))


# ------------------------------------------------------------------------------------------------------------- public

_tables = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in FLOATS}


@torch.no_grad()
def foreach_count_(
    tensors: Sequence[torch.Tensor],
    counts: torch.Tensor,
    grid: Grid,
    *,
    scale: torch.Tensor | None = None,
    inverted: bool = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Add to `counts` where the elements of a list of tensors fall: one launch per dtype, nothing waits.

    Args:
        tensors: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        counts: int64 (rows, `width(errors)`), contiguous, on the tensors' device; zero before the first call. The
            number of columns says whether errors are counted.
        grid: the format.
        scale: a one-element fp32 tensor on the device; what is counted is ``tensor * scale``. Must be finite and above
            0, and if a power of two a normal number.
        inverted: count ``tensor / scale`` instead.
        rows: the row of each tensor, all different; None: in order.

    Returns:
        `counts`.

    Raises:
        TypeError: an element of `tensors` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices.
    """
    listed, in_memory = multi_tensor.check_tensor_list(tensors, "tensors")
    if not listed:
        return counts
    rows = range(len(listed)) if rows is None else rows
    flat, device, errors = multi_tensor.all_flattened(listed), listed[0].device, counts.shape[1] > CELLS
    implementation = resolve(device, "statistics") if in_memory else "reference"
    count = count_on_cpu if in_memory and device.type == "cpu" else reference
    number = None if scale is None else scale.detach().reshape(())
    with own_operations(listed) if implementation == "reference" else nullcontext():
        for dtype, group, group_rows in multi_tensor.by_dtype(flat, rows):
            if implementation == "reference":
                for tensor, row in zip(group, group_rows, strict=True):
                    count(tensor.reshape(-1), counts[row], grid, number, inverted)
                continue
            table = _tables[dtype].table(group, numbers=[group_rows])
            if not table.chunks:
                continue
            number = torch.ones((), dtype=torch.float32, device=device) if number is None else number
            operands = *table.operands, number, counts, *grid
            constants = {"DTYPE": format_of(dtype).triton_type, "INVERTED": inverted, "ERRORS": errors}
            constants |= {"CHUNK": CHUNK, "BLOCK": BLOCK, **EXACT}
            launch_kernel(count_kernel, device, table.chunks, operands, constants, alignments((number, counts)))
    torch.autograd.graph.increment_version([counts])
    return counts
