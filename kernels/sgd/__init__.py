"""SGD over lists of tensors: see `rule.py` for the maths, kernels/optimizer for what all optimizers share.

Bytes per element with a 16-bit gradient, read + written: split master 6 + 4 = 10 without momentum, 10 + 8 = 18 with a
buffer in fp32, 8 + 6 = 14 in bf16, 7.03 + 5.03 in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.kernels.optimizer.launch import Family
from halfstep.kernels.optimizer.layout import *  # noqa: F403 (callers take operands, masters, Batch and Control here)
from halfstep.kernels.sgd import kernels, rule


@dataclass(frozen=True)
class Layout(KernelLayout):  # noqa: F405
    momentum: bool
    nesterov: bool
    decays: bool

    @property
    def moments(self) -> int:
        return int(self.momentum)


FAMILY = Family("sgd", rule.sgd, rule, kernels)
launch, step = FAMILY.launch, FAMILY.step
