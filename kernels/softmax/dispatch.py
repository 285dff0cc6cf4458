"""Which implementation runs: the rule, torch's or C++ on a CPU, or Triton's, over rows or across; what is copied.

And the operators ``halfstep::softmax`` and ``halfstep::softmax_backward``, with derivatives and batching. Arguments of
both are two tensors, then those of `rule.Options`, with a `dim` that is counted from the end.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import chosen, resolve
from halfstep.kernels.multi_tensor import DTYPE_CODES, address, check_addresses
from halfstep.kernels.op import Op, batch_first, no_forward_mode
from halfstep.kernels.softmax import rows, rule, strided
from halfstep.kernels.softmax.layout import Layout, is_transposed, outer_dimensions
from halfstep.kernels.softmax.rule import Options

# The kernels count the elements of a row, and the rows, in 32 bits, and look up to a few blocks beyond the end of a
# row. What needs more is left to the rule, as are rows of more groups than `rows.LONGEST` has.
LONGEST = 2**31 - 2**20
# The sum of torch's kernels loses digits over longer fp32 rows: 41 against 6 units in the last place at 2^20 columns.
LONGEST_OF_TORCH = 2**14
_MASK_CODES = {torch.bool: -2, **DTYPE_CODES}  # -1 stands for none


def _implementation(x: torch.Tensor, dim: int, exact: bool, *dtypes: torch.dtype) -> str:
    """``"torch"``, on a CPU, ``"native"``, exact or long rows there, ``"triton"`` or ``"reference"``."""
    columns, longest = x.shape[dim], min(LONGEST, rows.LONGEST) if exact or dim == -1 else LONGEST
    if torch.float64 in (x.dtype, *dtypes) or columns > longest or x.numel() > LONGEST * columns:
        return "reference"
    if x.device.type == "cpu" and chosen() == "auto" and not exact and (dim != -1 or columns <= LONGEST_OF_TORCH):
        return "torch"
    return resolve(x.device, "softmax")


def _native_forward(layout: Layout, y: torch.Tensor, scale: float, queries: int, log: bool) -> None:
    x, mask = layout.x, layout.mask
    numbers = (ctypes.c_int64 * 11)(*layout.sizes, *layout.x_strides, *layout.mask_strides)
    addresses = address(x), None if mask is None else address(mask), address(y)
    codes = DTYPE_CODES[x.dtype], -1 if mask is None else _MASK_CODES[mask.dtype], DTYPE_CODES[y.dtype]
    native.library("softmax").halfstep_softmax(
        *addresses, numbers, x.shape[-1], queries, scale, *codes, log, native.threads()
    )


def _native_backward(
    grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, scale: float, queries: int, log: bool
) -> None:
    codes = DTYPE_CODES[y.dtype], DTYPE_CODES[dx.dtype]
    native.library("softmax").halfstep_softmax_backward(
        *map(address, (grad, y, dx)), *y.shape, queries, scale, *codes, log, native.threads()
    )


def forward(x: torch.Tensor, mask: torch.Tensor | None, *of: Any) -> torch.Tensor:
    dim, scale, causal, log, exact, dtype = options = Options(*of)
    check_addresses(x, mask)
    implementation = _implementation(x, dim, exact, dtype)
    if implementation == "reference":
        return rule.forward(x, mask, options)
    if implementation == "torch":
        return _forward_of_torch(x, mask, options)
    exact = exact or implementation == "native"
    # The memory of a lazy negation (``x.conj().imag``) holds the opposite numbers.
    x = x.resolve_neg()
    if mask is not None:
        mask = mask.resolve_neg()
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    if mask is not None and dim != -1:
        mask = mask.expand(x.shape)
    into = y
    while dim != -1 and x.shape[-1] == 1:
        dim, x, into = dim + 1, x.squeeze(-1), into.squeeze(-1)
        mask = None if mask is None else mask.squeeze(-1)
    if not (exact or causal) and (dim != -1 or is_transposed(x)):
        strided.forward(outer_dimensions(x, mask, into, dim, True), into, scale, x.shape[dim], log)
        return y
    queries = x.shape[-2] if causal else 0
    launch = _native_forward if implementation == "native" else partial(rows.forward, exact=exact)
    if dim != -1:  # copied
        x, into = x.movedim(dim, -1), into.movedim(dim, -1)
        mask = None if mask is None else mask.movedim(dim, -1)
        moved = torch.empty_like(into, memory_format=torch.contiguous_format)
        launch(outer_dimensions(x, mask, moved, -1, False), moved, scale, queries, log)
        into.copy_(moved)
    else:
        launch(outer_dimensions(x, mask, into, -1, False), into, scale, queries, log)
    return y


def backward(grad: torch.Tensor, y: torch.Tensor, *of: Any) -> torch.Tensor:
    dim, scale, causal, log, exact, dtype = options = Options(*of)
    check_addresses(grad, y)
    implementation = _implementation(y, dim, exact, grad.dtype, dtype)
    if implementation == "reference":
        return rule.backward(grad, y, options)
    if implementation == "torch":
        if log or causal or scale != 1.0 or y.shape[dim] > LONGEST_OF_TORCH or not grad.dtype == y.dtype == dtype:
            return rule.backward(grad, y, options)
        return torch._softmax_backward_data(grad, y, dim, dtype).contiguous()
    exact = exact or implementation == "native"
    grad, y = grad.resolve_neg(), y.resolve_neg()
    dx = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return dx
    if grad.dtype != y.dtype:  # only in second derivatives, and only when the result was given another dtype
        grad, y = grad.float(), y.float()
    inner = math.prod(y.shape[dim + y.ndim + 1 :])
    if inner != 1 and not exact:
        sizes = math.prod(y.shape[:dim]), y.shape[dim], inner
        strided.backward(grad.contiguous(), y.contiguous(), dx, sizes, scale, log)
        return dx
    queries, into = y.shape[-2] if causal else 0, dx
    if inner != 1:  # copied
        grad, y = grad.movedim(dim, -1), y.movedim(dim, -1)
        into = torch.empty_like(y, dtype=dtype, memory_format=torch.contiguous_format)
    grad, y = (tensor.contiguous().view(-1, tensor.shape[dim if inner == 1 else -1]) for tensor in (grad, y))
    launch = _native_backward if implementation == "native" else partial(rows.backward, exact=exact)
    launch(grad, y, into, scale, queries, log)
    return dx if into is dx else dx.copy_(into.movedim(-1, dim))


def _forward_of_torch(x: torch.Tensor, mask: torch.Tensor | None, options: Options) -> torch.Tensor:
    """torch's own kernels, and our rule where they have none or another."""
    dim, scale, causal, log, _, dtype = options
    if x.numel() == 0 or x.shape[dim] > LONGEST_OF_TORCH:
        return rule.forward(x, mask, options)
    plain = mask is None and not causal and scale == 1.0
    # With another dtype of the result, torch rounds before it computes. In 16 bits its logarithm, and its kernel for
    # other dimensions than the last, round on the way.
    exact = dtype == x.dtype and (dtype == torch.float32 or (dim == -1 and not log))
    z = x if plain and exact else rule.logits(x, mask, scale, causal, torch.float32)
    y = torch.log_softmax(z, dim) if log else torch.softmax(z, dim)
    if y.select(dim, 0).isnan().any():  # a NaN spoils its whole row; torch makes one of a row with nothing to keep
        nothing = (z.amax(dim) == -math.inf).unsqueeze(dim)
        y = y.masked_fill(nothing, -math.inf if log else 0.0)
    return y.to(dtype).contiguous()


# ------------------------------------------------------------------------------------------------------------ operators


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, mask, *ctx.options, _ = inputs  # dim, scale, causal, log, exact
    ctx.x_dtype = x.dtype
    ctx.mask_dtype, ctx.mask_shape = (None, None) if mask is None else (mask.dtype, mask.shape)
    ctx.save_for_backward(output)


def _differentiate_forward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    dx = dmask = None
    if ctx.needs_input_grad[0]:
        dx = softmax_backward(grad, y, *ctx.options, ctx.x_dtype)
    if ctx.needs_input_grad[1]:
        dim, _, causal, log, exact = ctx.options
        dz = softmax_backward(grad, y, dim, 1.0, causal, log, exact, rule.math_dtype(grad.dtype, y.dtype))
        dmask = dz.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)
    return dx, dmask, None, None, None, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, y, *ctx.options, _ = inputs
    ctx.save_for_backward(grad, y)


def _differentiate_backward(ctx: Any, grad_of_dx: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *rule.double_backward(grad_of_dx, *ctx.saved_tensors, *ctx.options[:4]), *[None] * 6


def _batch_forward(info: Any, in_dims: Any, x: Any, mask: Any, *options: Any) -> tuple[torch.Tensor, int]:
    x = batch_first(x, in_dims[0], info.batch_size)
    if mask is not None and in_dims[1] is not None:
        mask = mask.movedim(in_dims[1], 0)
        mask = mask.reshape(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:])
    return softmax(x, mask, *options), 0


def _batch_backward(info: Any, in_dims: Any, grad: Any, y: Any, *options: Any) -> tuple[torch.Tensor, int]:
    grad, y = (batch_first(t, d, info.batch_size) for t, d in zip((grad, y), in_dims[:2], strict=True))
    return softmax_backward(grad, y, *options), 0


def _fake(like: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.empty(like.shape, dtype=options[-1], device=like.device)


_no_forward_mode = no_forward_mode("halfstep.softmax and log_softmax", "torch.softmax")
_OPTIONS = "int dim, float scale, bool causal, bool log, bool exact, ScalarType dtype"
softmax = Op(
    f"softmax(Tensor x, Tensor? mask, {_OPTIONS}) -> Tensor",
    operands=2,
    compute=forward,
    fake=_fake,
    save=_save_forward,
    differentiate=_differentiate_forward,
    tangent=_no_forward_mode,
    batch=_batch_forward,
)
softmax_backward = Op(
    f"softmax_backward(Tensor grad, Tensor y, {_OPTIONS}) -> Tensor",
    operands=2,
    compute=backward,
    fake=_fake,
    save=_save_backward,
    differentiate=_differentiate_backward,
    tangent=_no_forward_mode,
    batch=_batch_backward,
)
