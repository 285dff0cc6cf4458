"""The specification in plain torch, on any device: forward, backward, and the backward of the backward."""

from __future__ import annotations

import math

import torch


def math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _dropped_by_causal(x: torch.Tensor) -> torch.Tensor:
    """True above the diagonal of the last two dimensions."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def logits(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, compute: torch.dtype
) -> torch.Tensor:
    """``scale * x + mask`` in the dtype `compute`, -inf where a boolean mask or `causal` drops an element."""
    z = x.to(compute) * scale
    if mask is not None:
        z = torch.where(mask, z, -math.inf) if mask.dtype == torch.bool else z + mask.to(compute)
    return z.masked_fill(_dropped_by_causal(x), -math.inf) if causal else z


def reference_forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The softmax of `x`, or its logarithm, in `dtype`; arguments as in `halfstep.softmax`."""
    compute = math_dtype(x.dtype, dtype)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    z = logits(x, mask, scale, causal, compute)
    # Not below the lowest finite number: -inf - -inf would be NaN. A NaN passes through clamp.
    z = z - z.amax(dim, keepdim=True).clamp(min=torch.finfo(compute).min)
    e = z.exp()
    s = e.sum(dim, keepdim=True)
    s = torch.where(s == 0, 1.0, s)  # asking s > 0 instead would hide a NaN
    y = z - s.log() if log else e / s
    return y.to(dtype).contiguous()


def reference_backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of `x` in `dtype`, from the result `y` and its gradient."""
    compute = math_dtype(grad.dtype, y.dtype, dtype)
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=dtype, device=y.device)
    dy, p = grad.to(compute), y.to(compute)
    if causal:  # before anything is multiplied: NaN above the diagonal is not looked at
        dropped = _dropped_by_causal(y)
        dy, p = dy.masked_fill(dropped, 0.0), p.masked_fill(dropped, -math.inf if log else 0.0)
    if log:
        dy = dy.masked_fill(p == -math.inf, 0.0)
        dx = (scale * (dy - p.exp() * dy.sum(dim, keepdim=True))).masked_fill(p == -math.inf, 0.0)
    else:
        dx = scale * (p * (dy - (dy * p).sum(dim, keepdim=True)))
    if causal:
        dx = dx.masked_fill(dropped, 0.0)
    return dx.to(dtype).contiguous()


def reference_double_backward(
    gg: torch.Tensor, grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `grad` and `y` from `gg`, the gradient of dx.

    Plain torch, so that it can be differentiated again.
    """
    compute = math_dtype(gg.dtype, grad.dtype, y.dtype)
    u, dy, p = scale * gg.to(compute), grad.to(compute), y.to(compute)
    if causal:
        dropped = _dropped_by_causal(y)
        dy, p = dy.masked_fill(dropped, 0.0), p.masked_fill(dropped, -math.inf if log else 0.0)
    if log:
        constant = p == -math.inf
        p, dy = p.exp(), dy.masked_fill(constant, 0.0)
        through_dy = (u - (u * p).sum(dim, keepdim=True)).masked_fill(constant, 0.0)
        through_y = -u * p * dy.sum(dim, keepdim=True)
    else:
        inner = (u * p).sum(dim, keepdim=True)
        through_dy = p * (u - inner)
        through_y = u * (dy - (dy * p).sum(dim, keepdim=True)) - dy * inner
    return through_dy.to(grad.dtype), through_y.to(y.dtype)
