"""Launches of the C++ code (kernels/softmax.cpp), with the arguments of those in rows.py."""

from __future__ import annotations

import ctypes

import torch

from halfstep.kernels import native
from halfstep.kernels.multi_tensor import DTYPE_CODES, address
from halfstep.kernels.softmax.layout import Layout

_MASKS = {torch.bool: -2, **DTYPE_CODES}


def forward(layout: Layout, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    x, mask = layout.x, layout.mask
    numbers = (ctypes.c_int64 * 11)(*layout.sizes, *layout.x_strides, *layout.mask_strides)
    addresses = address(x), None if mask is None else address(mask), address(y)
    codes = DTYPE_CODES[x.dtype], -1 if mask is None else _MASKS[mask.dtype], DTYPE_CODES[y.dtype]
    native.library("softmax").halfstep_softmax(
        *addresses, numbers, x.shape[-1], queries, scale, *codes, log, native.threads()
    )


def backward(grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    rows, codes = y.numel() // y.shape[-1], (DTYPE_CODES[y.dtype], DTYPE_CODES[dx.dtype])
    native.library("softmax").halfstep_softmax_backward(
        *map(address, (grad, y, dx)), rows, y.shape[-1], queries, scale, *codes, log, native.threads()
    )
