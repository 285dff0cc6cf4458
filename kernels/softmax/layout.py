"""How the kernels see a tensor and its mask: as rows numbered over three dimensions, with strides in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """A tensor and its mask seen as rows numbered over three dimensions; strides in elements.

    Attributes:
        x, mask: the tensors, copied only where three dimensions cannot tell where their rows begin.
        sizes, x_strides, mask_strides: of the three dimensions.
        columns, mask_column: how many, and the mask's step from one to the next.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    mask_strides: tuple[int, ...]
    columns: int
    mask_column: int


def _merge(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge neighbouring dimensions through which every operand steps with one stride.

    Args:
        sizes: of the dimensions.
        strides: of the same dimensions, one sequence per operand.

    Returns:
        The sizes and, per operand, the strides of what is left: three dimensions, filled up with size 1, or more.
    """
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
    missing = 3 - len(merged)
    return (*[1] * missing, *merged), [(*[0] * missing, *step) for step in steps]


def _simpler(x: torch.Tensor, full: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy `x` or, where that is contiguous, its expanded mask, so that more dimensions can be merged.

    Without a mask `full` is `x`, and so is the second result.
    """
    if x.is_contiguous():
        return x, full.contiguous()
    x = x.contiguous()
    return x, x if mask is None else full


def as_rows(x: torch.Tensor, mask: torch.Tensor | None) -> Rows:
    """See `x` (at least one dimension, not empty) and its mask as rows over the last dimension."""
    columns = x.shape[-1]
    if x.stride(-1) != 1 and columns != 1:
        x = x.contiguous()
    if mask is None and x.is_contiguous():
        return Rows(x, None, (1, 1, x.numel() // columns), (0, 0, columns), (0, 0, 0), columns, 0)
    full = x if mask is None else mask.expand(x.shape)
    while True:
        sizes, (x_strides, mask_strides) = _merge(x.shape[:-1], x.stride()[:-1], full.stride()[:-1])
        if len(sizes) == 3:
            break
        x, full = _simpler(x, full, mask)
    if mask is None:
        return Rows(x, None, sizes, x_strides, mask_strides, columns, 0)
    return Rows(x, full, sizes, x_strides, mask_strides, columns, full.stride(-1))


class StridedRows(NamedTuple):
    """A tensor and its mask seen as rows side by side: sizes and strides of three outer dimensions and the summed one.

    Attributes:
        x, mask: the tensors, copied only where three outer dimensions do not do.
        sizes: of the outer dimensions; lanes run over the last.
        x_strides, mask_strides, y_strides: of the outer dimensions and the summed one.
    """

    x: torch.Tensor
    mask: torch.Tensor | None
    sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    mask_strides: tuple[int, ...]
    y_strides: tuple[int, ...]


def as_strided_rows(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor, dim: int) -> StridedRows:
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
        if len(sizes) == 3:
            break
        x, full = _simpler(x, full, mask)
    strides = [(*step, tensor.stride(-1)) for step, tensor in zip(steps, tensors, strict=True)]
    return StridedRows(x, None if mask is None else full, sizes, *strides)


def mask_operand(x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The mask as Triton's kernels take it, `x` in place of none, and its kind: PLAIN, BOOLEAN or ADDITIVE."""
    if mask is None:
        return x, 0
    return (mask.view(torch.uint8), 1) if mask.dtype == torch.bool else (mask, 2)


def outer_inner(shape: torch.Size, dim: int) -> tuple[int, int, int]:
    """Sizes before, of and after dimension `dim`, which counts from the end."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + len(shape) + 1 :])


def is_transposed(x: torch.Tensor) -> bool:
    """Whether neighbours of `x` lie in another dimension than the last."""
    return x.stride(-1) != 1 < x.shape[-1] and any(
        step == 1 < size for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )
