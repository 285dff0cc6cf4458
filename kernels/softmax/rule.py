"""Softmax and log-softmax in plain torch, the specification of all implementations.

Over the dimension `dim`, with ``z = scale * x + mask``; a boolean mask (True = keep) and `causal` put -inf where they
drop:

    m = max(z)    e = exp(z - m)    s = sum(e)
    softmax:      y = e / s                     dx = scale * y * (dy - sum(dy * y))
    log-softmax:  y = (z - m) - log(s)          dx = scale * (dy - exp(y) * sum(dy))

All of it in fp32 (fp64 when an operand or the result is fp64). `scale` is never rounded to 16 bits.

**The exact form** has the same bits in every implementation and on every device, whatever else is in the batch. A row
is cut into groups of `GROUP` columns, the last one filled up with -inf, each with its own maximum:

    m_g = max(z)    e = exp(z - m_g)    s_g = folded(e)    m = max(m_g)    w_g = exp(m_g - m)    s = folded(s_g * w_g)
    softmax:      y = e * (w_g / s)                 dx = scale * (y * (dy - folded(dy * y)))
    log-softmax:  y = (z - m) - log(s)              dx = scale * (dy - exp(y) * folded(dy))

Each operation rounds to fp32, exp and log are those of ``kernels/exponential.py``, exp the precise one where the result
is fp32, and `folded` is a sum in a fixed order; in the backward it runs over the sums of the groups too. Zeros of sums
and of dx are positive.

* A row with nothing to keep (all -inf, masked or not) is 0, its logarithm -inf, its gradient 0.
* -inf elsewhere gives 0 (log: -inf), never NaN. An output of -inf is a constant: gradients that reach it are ignored.
* NaN or +inf that is kept makes the whole row NaN, as in torch. What a boolean mask or `causal` drops is not looked at.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from halfstep.kernels.exponential import reference_exp, reference_log

GROUP = 2048  # columns


class Options(NamedTuple):
    dim: int
    scale: float
    causal: bool
    log: bool
    exact: bool
    dtype: torch.dtype  # of the result


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


def folded(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, in a fixed order: the upper half is added to the lower half until one is left.

    Missing terms are 0, so that the order does not depend on how many there are: those whose numbers are equal modulo
    2^k meet before others do. So it can be computed from vectors that begin anywhere in the row.
    """
    terms = torch.nn.functional.pad(terms, (0, (1 << (terms.shape[-1] - 1).bit_length()) - terms.shape[-1]))
    while terms.shape[-1] > 1:
        lower, upper = terms.chunk(2, -1)
        terms = lower + upper
    return terms.squeeze(-1) + 0.0  # -0.0, the sum of negative zeros, becomes 0.0


def _groups(terms: torch.Tensor, dim: int, value: float) -> torch.Tensor:
    """The groups of each row, (..., groups, columns), the last filled up with `value`."""
    terms = terms.movedim(dim, -1)
    columns = terms.shape[-1]
    terms = torch.nn.functional.pad(terms, (0, -columns % GROUP if columns > GROUP else 0), value=value)
    return terms.unflatten(-1, (-1, min(columns, GROUP)))


def _exact_forward(z: torch.Tensor, dim: int, log: bool, precise: bool) -> torch.Tensor:
    groups = _groups(z, dim, -math.inf)
    tops = groups.amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
    top = tops.amax(-2, keepdim=True)
    e, weights = reference_exp(groups - tops, precise), reference_exp(tops - top, precise)
    s = folded(folded(e) * weights.squeeze(-1))[..., None, None]
    s = torch.where(s == 0, 1.0, s)
    y = (groups - top) - reference_log(s) if log else e * (weights / s)
    return y.flatten(-2)[..., : z.shape[dim]].movedim(-1, dim)


def _exact_sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    return folded(folded(_groups(terms, dim, 0.0))).unsqueeze(dim)


def forward(x: torch.Tensor, mask: torch.Tensor | None, options: Options) -> torch.Tensor:
    """y, of the shape of `x`; arguments as in `halfstep.softmax`."""
    dim, scale, causal, log, exact, dtype = options
    compute = math_dtype(x.dtype, dtype)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    z = logits(x, mask, scale, causal, compute)
    if exact:
        return _exact_forward(z, dim, log, dtype == torch.float32).to(dtype).contiguous()
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


def backward(dy: torch.Tensor, y: torch.Tensor, options: Options) -> torch.Tensor:
    """dx, from the result and its gradient."""
    dim, scale, causal, log, exact, dtype = options
    compute = math_dtype(dy.dtype, y.dtype, dtype)
    if y.numel() == 0:
        return torch.empty(y.shape, dtype=dtype, device=y.device)
    dy, y = dy.to(compute), y.to(compute)
    constants = _constants(y, causal, log)
    if constants is not None:  # before anything is multiplied: NaN above the diagonal is not looked at
        dy, y = dy.masked_fill(constants, 0.0), y.masked_fill(constants, -math.inf if log else 0.0)
    terms = dy if log else dy * y
    total = _exact_sum(terms, dim) if exact else terms.sum(dim, keepdim=True)
    if log:
        e = reference_exp(y, dtype == torch.float32) if exact else y.exp()
        dx = scale * (dy - e * total)
    else:
        dx = scale * (y * (dy - total))
    if exact:
        dx = dx + 0.0  # -0.0 becomes 0.0
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
