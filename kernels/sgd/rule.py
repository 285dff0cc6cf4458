"""The specification of SGD with momentum: one step of a tensor, in plain torch. C++ and Triton give the same bits.

Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), as torch.optim.SGD has it.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

Group = namedtuple("Group", "lr weight_decay maximize max_norm momentum dampening")
# The numbers of a tensor and step, fp32. gscale is +-clip / scale. keep and add are the factors of buffer and
# gradient: momentum and 1 - dampening, in the first step 0 and 1.
Hyper = namedtuple("Hyper", "gscale decay lr momentum keep add")


def sgd(
    layout: Any,  # says whether there is momentum, whether it is Nesterov's, and whether weight_decay is not 0
    w: torch.Tensor,  # fp32, any shape: the weight, or its master
    grad: torch.Tensor,  # fp32, shape of w
    moments: list[torch.Tensor],  # fp32, shape of w: the momentum buffer, if there is one
    hyper: Hyper,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """The new w and, with momentum, buffer. Each operation is a separate IEEE fp32 operation, in this order."""
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
