"""The specification of SGD with momentum: one step of a tensor, in plain torch. C++ and Triton give the same bits.

Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), as torch.optim.SGD has it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Group = namedtuple("Group", "lr weight_decay maximize max_norm momentum dampening")


class Hyper(NamedTuple):
    """The numbers of a tensor and step, fp32: 0-dim tensors here, scalars in kernels."""

    gscale: Any  # +-clip / scale: sign (maximize), loss scale and clip factor in one number
    decay: Any  # weight_decay
    lr: Any
    momentum: Any
    keep: Any  # the factor of the buffer: momentum, or 0 in the first step
    add: Any  # the factor of the gradient: 1 - dampening, or 1 in the first step


def sgd(
    layout: Any,  # says whether there is momentum, whether it is Nesterov's, and whether weight_decay is not 0
    w: torch.Tensor,  # fp32, any shape: the weight, or its master
    grad: torch.Tensor,  # fp32, shape of w
    moments: Sequence[torch.Tensor],  # fp32, shape of w: the momentum buffer, if there is one
    hyper: Hyper,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """The new w and, with momentum, buf. Each operation is a separate IEEE fp32 operation, in this order:

    g    = grad * gscale
    g    = g + decay * w                                only with weight decay
    buf  = keep * buf + add * g                         only with momentum
    d    = buf; with Nesterov momentum g + momentum * buf; without momentum g
    w    = w - lr * d
    """
    g = grad * hyper.gscale
    if layout.decays:
        g = g + hyper.decay * w
    if not layout.momentum:
        return (w - hyper.lr * g,)
    buf = hyper.keep * moments[0] + hyper.add * g
    d = g + hyper.momentum * buf if layout.nesterov else buf
    return w - hyper.lr * d, buf


def numbers(group: Any, count: torch.Tensor, gscale: torch.Tensor) -> Hyper:
    """The numbers of each tensor at step `count`, from 1 on: in fp64, then rounded to fp32 once."""
    keep, add = torch.where(count > 1, group.momentum, 0.0), torch.where(count > 1, 1.0 - group.dampening, 1.0)
    return Hyper(*(number.float() for number in (gscale, group.weight_decay, group.lr, group.momentum, keep, add)))
