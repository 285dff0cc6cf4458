"""Calls of softmax.cpp, the kernels for the CPU."""

from __future__ import annotations

import ctypes

import torch

from halfstep.kernels import native
from halfstep.kernels.multi_tensor import DTYPE_CODES, address
from halfstep.kernels.softmax.layout import Rows

_NO_MASK, _BOOLEAN = -1, 3
_Geometry = ctypes.c_int64 * 12


def forward(rows: Rows, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Compute rows of any strides, with a mask or without, into the contiguous `y`.

    `queries` is the number of rows of one causal matrix, 0 without `causal`.
    """
    x, mask = rows.x, rows.mask
    geometry = _Geometry(*rows.sizes, rows.columns, *rows.x_strides, *rows.mask_strides, rows.mask_column, queries)
    kind = _NO_MASK if mask is None else _BOOLEAN if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype]
    dtypes = DTYPE_CODES[x.dtype], DTYPE_CODES[y.dtype], kind
    mask_address = None if mask is None else address(mask)
    native.function("softmax", "softmax")(
        address(x), mask_address, address(y), ctypes.addressof(geometry), scale, log, *dtypes, native.threads()
    )


def plain_forward(x: torch.Tensor, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Compute contiguous rows without a mask. For small tensors this call saves half of the host time."""
    columns = x.shape[-1]
    rows, dtypes = x.numel() // columns, (DTYPE_CODES[x.dtype], DTYPE_CODES[y.dtype])
    native.function("softmax", "softmax_rows")(
        address(x), address(y), rows, columns, queries, scale, log, *dtypes, native.threads()
    )


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    """Compute the gradient `dx` of contiguous rows from the result `y` and its gradient."""
    columns = y.shape[-1]
    rows, dtypes = y.numel() // columns, (DTYPE_CODES[y.dtype], DTYPE_CODES[dx.dtype])
    native.function("softmax", "softmax_backward")(
        address(grad), address(y), address(dx), rows, columns, queries, scale, log, *dtypes, native.threads()
    )


def strided_forward(x: torch.Tensor, y: torch.Tensor, sizes: tuple[int, int, int], scale: float, log: bool) -> None:
    """Compute over the middle dimension of contiguous tensors of one dtype and of `sizes` (outer, columns, inner)."""
    dtype, threads = DTYPE_CODES[y.dtype], native.threads()
    native.function("softmax", "softmax_strided")(address(x), address(y), *sizes, scale, log, dtype, threads)


def strided_backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sizes: tuple[int, int, int], scale: float, log: bool
) -> None:
    """Compute the gradient over the middle dimension, for tensors like those of `strided_forward`."""
    dtype, threads = DTYPE_CODES[dx.dtype], native.threads()
    native.function("softmax", "softmax_strided_backward")(
        address(grad), address(y), address(dx), *sizes, scale, log, dtype, threads
    )
