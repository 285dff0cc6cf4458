"""Which implementation runs: reference, C++ or Triton, over rows or across them, and what is copied before."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from halfstep.kernels import native
from halfstep.kernels.backend import native_on_cpu, resolve
from halfstep.kernels.multi_tensor import DTYPE_CODES, check_addresses
from halfstep.kernels.softmax import cpu, row_launches, strided
from halfstep.kernels.softmax.layout import as_rows, is_transposed, outer_inner
from halfstep.kernels.softmax.reference import reference_backward, reference_forward

# The kernels count the elements of a row in 32 bits, and look up to a few blocks beyond its end. The Triton kernels
# count rows in 32 bits too: more of them, which nobody was seen to have, are left to the reference.
LONGEST = 2**31 - 2**20
# On a CPU torch's own backward of fp32 rows up to this length is the same formula, and calling it needs less Python;
# over longer rows its sum loses digits (41 against 6 units in the last place at 2^20 fp32 columns). In 16-bit formats
# ours is the faster one.
TORCHS_ROWS = 2**14


def _countable(x: torch.Tensor, dim: int, implementation: str) -> bool:
    """Whether 32 bits are enough to count what an implementation counts in them."""
    columns = x.shape[dim]
    return columns <= LONGEST and (implementation == "native" or x.numel() <= LONGEST * columns)


def usual_code(x: torch.Tensor) -> int | None:
    """The code of the dtype of a plain, contiguous tensor with rows on the CPU, for `usual_forward`.

    Returns None for others, and if `Op` must see the call.
    """
    if is_dynamo_compiling() or torch.autograd.forward_ad._current_level >= 0:
        return None
    module = native.calls() if native_on_cpu(x, "softmax") else None
    if module is None or not 0 <= (code := module.code(x)) < len(DTYPE_CODES):
        return None
    shape = x.shape
    return code if shape and shape[-1] <= LONGEST else None


def usual_forward(x: torch.Tensor, scale: float, log: bool, code: int) -> torch.Tensor:
    """`forward` over the last dimension, without a mask or a derivative. It takes half of the time on small tensors."""
    y = torch.empty_like(x)
    columns = x.shape[-1]
    native.function("softmax", "softmax_rows")(
        x, y, x.numel() // columns, columns, 0, scale, log, code, code, native.threads()
    )
    return y


def torchs_backward(y: torch.Tensor, scale: float, log: bool) -> bool:
    """Whether the gradient of plain rows is left to torch's own kernel, which also knows its derivative."""
    return y.dtype is torch.float32 and scale == 1.0 and not log and y.shape[-1] <= TORCHS_ROWS


def quick_backward(
    grad: torch.Tensor, y: torch.Tensor, options: tuple[int, float, bool, bool, torch.dtype]
) -> torch.Tensor | None:
    """`backward` over the last dimension of plain, contiguous CPU tensors of one dtype that needs no derivative.

    Returns None for others, and if `Op` must see the call. It takes a third of the time on small tensors.
    """
    dim, scale, causal, log, dtype = options
    if is_dynamo_compiling() or torch.is_grad_enabled() or dim != -1 or causal or dtype is not y.dtype:
        return None
    module = native.calls() if native_on_cpu(y, "softmax") else None
    if module is None or not 0 <= (code := module.code(y)) < len(DTYPE_CODES):
        return None
    if module.code(grad) != code or torch.autograd.forward_ad._current_level >= 0:
        return None
    columns = y.shape[-1] if y.ndim else LONGEST + 1
    if columns > LONGEST:
        return None
    if torchs_backward(y, scale, log):
        return torch._softmax_backward_data(grad, y, -1, dtype)
    dx = torch.empty_like(y)
    native.function("softmax", "softmax_backward")(
        *(grad, y, dx, y.numel() // columns, columns, 0, scale, log, code, code, native.threads())
    )
    return dx


def forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    if x.dtype == torch.float64 or dtype == torch.float64:
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    implementation = resolve(x.device, "softmax")
    if implementation == "reference" or not _countable(x, dim, implementation):
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    # The memory of a lazy negation (``x.conj().imag``) holds the opposite numbers.
    x = x.resolve_neg()
    if mask is not None:
        mask = mask.resolve_neg()
    plain = implementation == "native" and mask is None and dim == -1 and x.is_contiguous()
    if plain and x.numel() > 0:
        y = torch.empty_like(x, dtype=dtype)
        cpu.plain_forward(x, y, scale, x.shape[-2] if causal else 0, log)
        return y
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
    if implementation == "triton" and not causal and (dim != -1 or is_transposed(x)):
        strided.forward(x, mask, into, dim, scale, log)
        return y
    if dim != -1:
        if mask is None and dtype == x.dtype:
            cpu.strided_forward(x.contiguous(), y, outer_inner(x.shape, dim), scale, log)
            return y
        moved_mask = None if mask is None else mask.movedim(dim, -1)
        into.copy_(forward(x.movedim(dim, -1), moved_mask, -1, scale, False, log, dtype).movedim(-1, dim))
        return y
    launch = row_launches.forward if implementation == "triton" else cpu.forward
    launch(as_rows(x, mask), into, scale, x.shape[-2] if causal else 0, log)
    return y


def backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    implementation = resolve(y.device, "softmax")
    wide = torch.float64 in (grad.dtype, y.dtype, dtype)
    if implementation == "reference" or wide or not _countable(y, dim, implementation):
        return reference_backward(grad, y, dim, scale, causal, log, dtype)
    grad, y = grad.resolve_neg(), y.resolve_neg()
    plain = implementation == "native" and dim == -1 and not causal and grad.dtype == y.dtype == dtype
    if plain and torchs_backward(y, scale, log):
        return torch._softmax_backward_data(grad, y, -1, dtype)
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
        launch = row_launches.backward if implementation == "triton" else cpu.backward
        launch(grad, y, dx, scale, y.shape[-2] if causal else 0, log)
    elif implementation == "triton":
        strided.backward(grad, y, dx, sizes, scale, log)
    elif dtype == y.dtype:
        cpu.strided_backward(grad, y, dx, sizes, scale, log)
    else:
        moved = backward(grad.movedim(dim, -1), y.movedim(dim, -1), -1, scale, False, log, dtype)
        dx.copy_(moved.movedim(-1, dim))
    return dx
