"""Launches of the C++ code (kernels/softmax.cpp), which computes the exact form, also where it is not asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from halfstep.kernels import native
from halfstep.kernels.log_probabilities.kernels import Rows, as_rows
from halfstep.kernels.log_probabilities.rule import Options, Row
from halfstep.kernels.multi_tensor import DTYPE_CODES, address


def _last_arguments(rows: int, x: Rows, dx: Rows, options: Options) -> tuple[Any, float]:
    """``Statistics`` of softmax.cpp, and the scale."""
    strides = x.inner, x.stride_a, x.stride_b, dx.stride_a, dx.stride_b
    flags = DTYPE_CODES[x.tensor.dtype], options.entropy, options.mean, native.threads()
    numbers = rows, x.tensor.shape[-1], options.ignore_index, *strides, *flags
    return (ctypes.c_int64 * len(numbers))(*numbers), 1.0 / options.temperature


def forward(logits: torch.Tensor, targets: torch.Tensor, options: Options) -> torch.Tensor:
    """`rule.forward`."""
    x, targets = as_rows(logits), targets.long().contiguous()
    results = torch.empty(len(Row._fields), *targets.shape, dtype=torch.float32, device=logits.device)
    native.library("softmax").halfstep_log_probabilities(
        *map(address, (x.tensor, targets, results)), *_last_arguments(targets.numel(), x, x, options)
    )
    return results


def backward(
    grads: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    results: torch.Tensor,
    options: Options,
    out: torch.Tensor,
) -> None:
    """`rule.backward`. `out` is `logits` or contiguous."""
    x, columns = as_rows(logits), logits.shape[-1]
    dx = x if out is logits else Rows(out, x.inner, x.inner * columns, columns)
    tensors = grads.contiguous(), x.tensor, targets.long().contiguous(), results.contiguous(), dx.tensor
    native.library("softmax").halfstep_log_probabilities_backward(
        *map(address, tensors), *_last_arguments(targets.numel(), x, dx, options)
    )
    if dx.tensor is not out:
        out.copy_(dx.tensor)
