"""How the kernels see a tensor and its mask: as sums numbered over three dimensions, with strides in elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """A tensor, its mask and its softmax seen as sums over one dimension, numbered over three outer ones."""

    x: torch.Tensor  # copied, as the mask is, only where three outer dimensions do not suffice
    mask: torch.Tensor | None
    sizes: Sequence[int]  # of the outer dimensions
    x_strides: Sequence[int]  # of the outer dimensions and the summed one
    mask_strides: Sequence[int]
    y_strides: Sequence[int]


def _merged(dims: Iterable[Sequence[int]]) -> list[Sequence[int]]:
    """Merge neighbouring dimensions, each a size and a stride of every operand, through which all step with one stride,
    to three, filled up with size 1, or more."""
    merged: list[Sequence[int]] = []
    for size, *strides in dims:
        if size == 1:
            continue
        if merged and all(outer == stride * size for outer, stride in zip(merged[-1][1:], strides, strict=True)):
            merged[-1] = merged[-1][0] * size, *strides
        else:
            merged.append((size, *strides))
    return [(1, 0, 0, 0)] * (3 - len(merged)) + merged


def outer_dimensions(x: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor, dim: int, lanes: bool) -> Layout:
    """See `x` (not empty), its mask and the contiguous `y` as sums over `dim`.

    With `lanes`, the last outer dimension is the one in which neighbours of x lie. Without, the sums have the order of
    y, and x is copied if its columns do not lie side by side.
    """
    columns = x.shape[dim]
    if not lanes:
        if x.stride(-1) != 1 and columns != 1:
            x = x.contiguous()
        if mask is None and x.is_contiguous():
            rows = 0, 0, columns, 1
            return Layout(x, None, (1, 1, x.numel() // columns), rows, rows, rows)
    full = x if mask is None else mask.expand(x.shape)
    while True:
        tensors = [tensor.movedim(dim, -1) for tensor in (x, full, y)]
        order = list(range(x.ndim - 1))
        unit = [d for d in order if lanes and tensors[0].stride(d) == 1 and tensors[0].shape[d] > 1]
        if unit:
            order.append(order.pop(unit[-1]))
        dims = _merged((tensors[0].shape[d], *(tensor.stride(d) for tensor in tensors)) for d in order)
        if len(dims) == 3:
            break
        if x.is_contiguous():
            full = full.contiguous()
        else:
            x = x.contiguous()
            full = x if mask is None else full
    sizes, *outer = zip(*dims, strict=True)
    strides = [(*steps, tensor.stride(-1)) for steps, tensor in zip(outer, tensors, strict=True)]
    return Layout(x, None if mask is None else full, sizes, *strides)


def mask_operand(x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The mask as Triton's kernels take it, `x` in place of none, and its kind: PLAIN, BOOLEAN or ADDITIVE."""
    if mask is None:
        return x, 0
    return (mask.view(torch.uint8), 1) if mask.dtype == torch.bool else (mask, 2)


def is_transposed(x: torch.Tensor) -> bool:
    """Whether neighbours of `x` lie in another dimension than the last."""
    return x.stride(-1) != 1 < x.shape[-1] and any(
        step == 1 < size for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )
