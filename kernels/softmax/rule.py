"""Softmax and log-softmax in plain torch, the specification of all implementations.

Over the dimension `dim`, with ``z = scale * x + mask``; a boolean mask (True = keep) and `causal` put -inf where they
drop:

    m = max(z)    e = exp(z - m)    s = sum(e)
    softmax:      y = e / s                     dx = scale * y * (dy - sum(dy * y))
    log-softmax:  y = (z - m) - log(s)          dx = scale * (dy - exp(y) * sum(dy))

All of it in fp32 (fp64 when an operand or the result is fp64). `scale` is never rounded to 16 bits.

* A row with nothing to keep (all -inf, masked or not) is 0, its logarithm -inf, its gradient 0.
* -inf elsewhere gives 0 (log: -inf), never NaN. An output of -inf is a constant: gradients that reach it are ignored.
* NaN or +inf that is kept makes the whole row NaN, as in torch. What a boolean mask or `causal` drops is not looked at.
"""

from __future__ import annotations

import math

import torch


def math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which operands and results of `dtypes` are computed."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _above_diagonal(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def logits(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, compute: torch.dtype
) -> torch.Tensor:
    """z in the dtype `compute`."""
    z = x.to(compute) * scale
    if mask is not None:
        z = torch.where(mask, z, -math.inf) if mask.dtype == torch.bool else z + mask.to(compute)
    return z.masked_fill(_above_diagonal(x), -math.inf) if causal else z


def forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """y in `dtype`, of the shape of `x`; arguments as in `halfstep.softmax`."""
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


def _constants(y: torch.Tensor, causal: bool, log: bool) -> torch.Tensor | None:
    """True where y does not depend on x and no gradient passes; None if there is no such element."""
    dropped = _above_diagonal(y).expand(y.shape) if causal else None
    if not log:
        return dropped
    return y == -math.inf if dropped is None else dropped | (y == -math.inf)


def backward(
    dy: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """dx in `dtype`, from the result and its gradient."""
    compute = math_dtype(dy.dtype, y.dtype, dtype)
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=dtype, device=y.device)
    dy, y = dy.to(compute), y.to(compute)
    constants = _constants(y, causal, log)
    if constants is not None:  # before anything is multiplied: NaN above the diagonal is not looked at
        dy, y = dy.masked_fill(constants, 0.0), y.masked_fill(constants, -math.inf if log else 0.0)
    if log:
        dx = scale * (dy - y.exp() * dy.sum(dim, keepdim=True))
    else:
        dx = scale * (y * (dy - (dy * y).sum(dim, keepdim=True)))
    if constants is not None:
        dx = dx.masked_fill(constants, 0.0)
    return dx.to(dtype).contiguous()


def double_backward(
    ddx: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `dy` and `y`, from `ddx`, the gradient of dx. Can be differentiated again."""
    compute = math_dtype(ddx.dtype, dy.dtype, y.dtype)
    u, g, p = scale * ddx.to(compute), dy.to(compute), y.to(compute)
    constants = _constants(p, causal, log)
    if constants is not None:
        g, p = g.masked_fill(constants, 0.0), p.masked_fill(constants, -math.inf if log else 0.0)
    if log:
        p = p.exp()
        of_dy = u - (u * p).sum(dim, keepdim=True)
        of_y = -u * p * g.sum(dim, keepdim=True)
        if constants is not None:
            of_dy = of_dy.masked_fill(constants, 0.0)
    else:
        inner = (u * p).sum(dim, keepdim=True)
        of_dy = p * (u - inner)
        of_y = u * (g - (g * p).sum(dim, keepdim=True)) - g * inner
    return of_dy.to(dy.dtype), of_y.to(y.dtype)
