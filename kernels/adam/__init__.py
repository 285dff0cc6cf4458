"""Adam and AdamW over lists of tensors, with unscaling, clipping and skipping inside: one launch per dtype combination.

The maths is in `rule.py`; kernels/optimizer describes what all optimizers share.

Bytes per element with a 16-bit gradient, read + written (state fp32): split master 14 + 12 = 26, full master
14 + 14 = 28, no master 12 + 10 = 22; fp32 parameter and gradient 16 + 12 = 28. bf16 state saves 8, amsgrad adds 8 (4 in
bf16), a remainder of 8 bits saves 2. 8-bit state saves 12, less 6 bytes per 32 elements (10 with amsgrad) for scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.kernels.adam import kernels, rule
from halfstep.kernels.optimizer.launch import Family
from halfstep.kernels.optimizer.layout import *  # noqa: F403 (callers take operands, masters, Batch and Control here)


@dataclass(frozen=True)
class Layout(KernelLayout):  # noqa: F405
    amsgrad: bool  # keep the maximum of the second moment
    l2: bool  # add ``weight_decay * w`` to the gradient (Adam) instead of decaying the weight (AdamW)

    @property
    def moments(self) -> int:
        return 3 if self.amsgrad else 2


def _rule(
    layout: Layout, w: Any, grad: Any, moments: Sequence[Any], hyper: rule.Hyper, largest: float, stored: Any
) -> tuple[torch.Tensor, ...]:
    m, v, top = (*moments, None)[:3]
    return rule.adam(w, grad, m, v, top, hyper, layout.l2, largest, stored)


FAMILY = Family("adam", _rule, rule, kernels)
launch, step = FAMILY.launch, FAMILY.step
