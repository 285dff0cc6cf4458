"""Which implementation runs: reference, torch's or Triton's, over rows or across them, and what is copied before."""

from __future__ import annotations

import torch

from halfstep.kernels.backend import chosen, resolve
from halfstep.kernels.multi_tensor import check_addresses
from halfstep.kernels.softmax import cpu, row_launches, strided
from halfstep.kernels.softmax.layout import as_rows, is_transposed, outer_inner
from halfstep.kernels.softmax.reference import reference_backward, reference_forward

# The kernels count the elements of a row, and the rows, in 32 bits, and look up to a few blocks beyond the end of a
# row. What needs more is left to the reference.
LONGEST = 2**31 - 2**20


def _implementation(x: torch.Tensor, dim: int, *dtypes: torch.dtype) -> str:
    """``"torch"``, on a CPU, ``"triton"`` or ``"reference"``."""
    columns = x.shape[dim]
    if torch.float64 in (x.dtype, *dtypes) or columns > LONGEST or x.numel() > LONGEST * columns:
        return "reference"
    return "torch" if x.device.type == "cpu" and chosen() == "auto" else resolve(x.device, "softmax")


def forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    implementation = _implementation(x, dim, dtype)
    if implementation == "reference":
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    if implementation == "torch":
        check_addresses(x, mask)
        return cpu.forward(x, mask, dim, scale, causal, log, dtype)
    # The memory of a lazy negation (``x.conj().imag``) holds the opposite numbers.
    x = x.resolve_neg()
    if mask is not None:
        mask = mask.resolve_neg()
    check_addresses(x, mask)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    if mask is not None:
        mask = mask.expand(x.shape) if dim != -1 else mask
    into = y
    while dim != -1 and x.shape[-1] == 1:
        dim, x, into = dim + 1, x.squeeze(-1), into.squeeze(-1)
        mask = None if mask is None else mask.squeeze(-1)
    if not causal and (dim != -1 or is_transposed(x)):
        strided.forward(x, mask, into, dim, scale, log)
    else:
        row_launches.forward(as_rows(x, mask), into, scale, x.shape[-2] if causal else 0, log)
    return y


def backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    implementation = _implementation(y, dim, grad.dtype, dtype)
    if implementation == "reference":
        return reference_backward(grad, y, dim, scale, causal, log, dtype)
    if implementation == "torch":
        check_addresses(grad, y)
        return cpu.backward(grad, y, dim, scale, causal, log, dtype)
    grad, y = grad.resolve_neg(), y.resolve_neg()
    check_addresses(grad, y)
    if y.is_contiguous():
        dx = torch.empty_like(y, dtype=dtype)
    else:
        dx = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return dx
    if grad.dtype != y.dtype:  # only in second derivatives, and only when the result was given another dtype
        grad, y = grad.float(), y.float()
    grad, y = grad.contiguous(), y.contiguous()
    sizes = (0, 0, 1) if dim == -1 else outer_inner(y.shape, dim)
    if sizes[2] == 1:
        if dim != -1:
            grad, y = grad.view(sizes[:2]), y.view(sizes[:2])
        row_launches.backward(grad, y, dx, scale, y.shape[-2] if causal else 0, log)
    else:
        strided.backward(grad, y, dx, sizes, scale, log)
    return dx
