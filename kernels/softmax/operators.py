"""The operators ``halfstep::softmax`` and ``halfstep::softmax_backward``, with derivatives and batching.

Arguments of both are two tensors, then ``dim`` (from the end), ``scale``, ``causal``, ``log``, ``dtype`` of the result.
"""

from __future__ import annotations

from typing import Any

import torch

from halfstep.kernels.op import Op, batch_first
from halfstep.kernels.softmax.dispatch import backward, forward
from halfstep.kernels.softmax.reference import math_dtype, reference_double_backward


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, mask, *ctx.options, _ = inputs  # dim, scale, causal, log
    ctx.x_dtype = x.dtype
    ctx.mask_dtype, ctx.mask_shape = (None, None) if mask is None else (mask.dtype, mask.shape)
    ctx.save_for_backward(output)


def _differentiate_forward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    dx = dmask = None
    needed = ctx.needs_input_grad
    if needed[0]:
        dx = softmax_backward(grad, y, *ctx.options, ctx.x_dtype)
    if needed[1]:
        dim, _, causal, log = ctx.options
        dz = softmax_backward(grad, y, dim, 1.0, causal, log, math_dtype(grad.dtype, y.dtype))
        dmask = dz.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)
    return dx, dmask, None, None, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, y, *ctx.options, _ = inputs
    ctx.save_for_backward(grad, y)


def _differentiate_backward(ctx: Any, gg: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad, y = ctx.saved_tensors
    return *reference_double_backward(gg, grad, y, *ctx.options), None, None, None, None, None


def _batch_forward(info: Any, in_dims: Any, x: Any, mask: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    x = batch_first(x, in_dims[0], info.batch_size)
    if mask is not None and in_dims[1] is not None:
        mask = mask.movedim(in_dims[1], 0)
        mask = mask.reshape(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:])
    return softmax(x, mask, *rest), 0


def _batch_backward(info: Any, in_dims: Any, grad: Any, y: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    grad, y = (batch_first(t, d, info.batch_size) for t, d in zip((grad, y), in_dims[:2], strict=True))
    return softmax_backward(grad, y, *rest), 0


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "halfstep.softmax and log_softmax have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode "
        "(torch.func.vjp, jacrev or jacrev(jacrev(...))), or torch.softmax"
    )


def _fake(like: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(like.shape, dtype=rest[-1], device=like.device)


_OPTIONS = "int dim, float scale, bool causal, bool log, ScalarType dtype"

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
