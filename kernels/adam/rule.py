"""The specification of Adam and AdamW: one step of a tensor, in plain torch. C++ and Triton give the same bits.

Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled weight decay regularization" (2019);
Reddi et al., "On the convergence of Adam and beyond" (2018) for ``amsgrad``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from halfstep.kernels.optimizer.reference import sqrt_fp64
from halfstep.kernels.rounding import exact_sqrt

Group = namedtuple("Group", "lr weight_decay maximize max_norm beta1 beta2 eps decoupled_weight_decay")


class Hyper(NamedTuple):
    """The numbers of a tensor and step, fp32: 0-dim tensors here, scalars in kernels."""

    gscale: Any  # +-clip / loss scale (-: maximize), with clip = min(1, max_norm / (sqrt(sum of squares) + 1e-6))
    decay: Any  # weight_decay; with decoupled decay lr * weight_decay
    factor_m: Any  # of the first moving average: 1 - beta1 if that is below 0.5, else -beta1
    factor_v: Any  # the same with beta2
    root: Any  # 1 / sqrt(1 - beta2^t)
    eps: Any
    step_size: Any  # lr / (1 - beta1^t)


def adam(
    w: torch.Tensor,  # fp32, any shape: the weight, or its master
    grad: torch.Tensor,  # fp32, shape of w
    m: torch.Tensor,  # fp32, shape of w: the first moment
    v: torch.Tensor,  # fp32, shape of w: the second moment
    top: torch.Tensor | None,  # fp32, shape of w: the largest second moment; None without amsgrad
    hyper: Hyper,
    l2: bool,  # decay is added to the gradient (Adam), not to the update (AdamW)
    largest: float,  # what squares are capped at: the largest number that a second moment can hold
    stored: Callable[[torch.Tensor], torch.Tensor],  # a second moment as it comes back from its storage
) -> tuple[torch.Tensor, ...]:
    """The new w, m, v and, with amsgrad, top. Each operation is a separate IEEE fp32 operation, in this order:

        g    = grad * gscale
        g    = g + decay * w                                only with L2 decay
        m    = m + (1 - beta1) * (g - m)                    for beta1 <= 0.5: g - beta1 * (g - m)
        q    = min(g * g, largest)                          the square of a huge g must not stick at inf
        v    = v + (1 - beta2) * (q - v)                    likewise for beta2 <= 0.5
        top  = max(top, stored v)                           only with amsgrad; it then replaces v below
        d    = step_size * (m / (sqrt(v) * root + eps))
        d    = d + decay * w                                only with decoupled decay; 0 where w is infinite
        w    = w - d

    Moving averages take the incremental form because 1 - beta is small and exact where beta rounded to fp32 is not:
    with beta2 = 0.999 the two-product form converges to a second moment 1.3e-5 too large. Decay and update are
    subtracted together, so a weight is rounded once per step.
    """

    def at_most(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > largest, largest, x)  # NaN stays NaN

    g = grad * hyper.gscale
    if l2:
        g = g + hyper.decay * w
    m = average(m, g, hyper.factor_m)
    v = average(at_most(v), at_most(g * g), hyper.factor_v)
    used = v
    if top is not None:
        v_stored = stored(v)
        used = top = torch.where((v_stored > top) | v_stored.isnan(), v_stored, top)
    d = hyper.step_size * (m / (exact_sqrt(used) * hyper.root + hyper.eps))
    if not l2:
        d = d + torch.where(w.isinf(), 0.0, hyper.decay * w)
    return (w - d, m, v) if top is None else (w - d, m, v, top)


def numbers(
    group: Group,  # fp64, as gscale: each of shape (tensors,)
    count: torch.Tensor,  # int64: t, the step count after this step, at least 1
    gscale: torch.Tensor,
) -> Hyper:
    """The numbers of each tensor, in fp64 and then rounded to fp32 once."""
    lr, decay = group.lr, group.weight_decay
    return Hyper(
        gscale.float(),
        torch.where(group.decoupled_weight_decay != 0, lr * decay, decay).float(),
        factor(group.beta1),
        factor(group.beta2),
        (1.0 / sqrt_fp64(1.0 - power(group.beta2, count))).float(),
        group.eps.float(),
        (lr / (1.0 - power(group.beta1, count))).float(),
    )


def average(before: torch.Tensor, new: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A moving average; the sign of the factor says which form applies."""
    return torch.where(factor > 0, before, new) + factor * (new - before)


def factor(beta: torch.Tensor) -> torch.Tensor:
    """The factor of a moving average in fp32: 1 - beta if that is below 0.5, else -beta."""
    weight = (1.0 - beta).float()
    return torch.where(weight < 0.5, weight, -beta.float())


def power(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """base ** exponent in fp64 by repeated squaring, lowest bit first: the same bits everywhere, which pow has not."""
    result = torch.ones_like(base)
    for bit in range(31):
        result = torch.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result
