"""Softmax on a CPU: torch's own kernels, and the rules of this package where torch has others.

torch gives NaN for a row with nothing to keep, multiplies by no scale, knows no mask, and lets gradients through an
output of -inf. What its kernels cannot do is computed by the reference.
"""

from __future__ import annotations

import math

import torch

from halfstep.kernels.softmax.reference import logits, reference_backward, reference_forward

# The sum of torch's kernels loses digits over longer fp32 rows: 41 against 6 units in the last place at 2^20 columns.
LONGEST = 2**14


def forward(
    x: torch.Tensor, mask: torch.Tensor | None, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The softmax of `x`, or its logarithm, in `dtype`; arguments as in `halfstep.softmax`."""
    if x.numel() == 0 or x.shape[dim] > LONGEST:
        return reference_forward(x, mask, dim, scale, causal, log, dtype)
    plain = mask is None and not causal and scale == 1.0
    # With another dtype of the result, torch rounds before it computes. In 16 bits its logarithm, and its kernel for
    # other dimensions than the last, round on the way.
    exact = dtype == x.dtype and (dtype == torch.float32 or (dim in (-1, x.dim() - 1) and not log))
    z = x if plain and exact else logits(x, mask, scale, causal, torch.float32)
    y = torch.log_softmax(z, dim) if log else torch.softmax(z, dim)
    spoiled = y.select(dim, 0).isnan()  # a NaN spoils its whole row
    if spoiled.any():
        nothing = (z.amax(dim) == -math.inf).unsqueeze(dim)
        y = y.masked_fill(nothing, -math.inf if log else 0.0)
    return y.to(dtype).contiguous()


def backward(
    grad: torch.Tensor, y: torch.Tensor, dim: int, scale: float, causal: bool, log: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of `x` in `dtype`, from the result `y` and its gradient."""
    if log or causal or scale != 1.0 or y.shape[dim] > LONGEST or not grad.dtype == y.dtype == dtype:
        return reference_backward(grad, y, dim, scale, causal, log, dtype)
    return torch._softmax_backward_data(grad, y, dim, dtype).contiguous()
