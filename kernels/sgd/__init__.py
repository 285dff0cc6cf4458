"""SGD over lists of tensors: see `rule.py` for the maths, kernels/optimizer for what all optimizers share.

Bytes per element with a 16-bit gradient, read + written: split master 6 + 4 = 10 without momentum, 10 + 8 = 18 with a
buffer in fp32, 8 + 6 = 14 in bf16, 7.03 + 5.03 in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from halfstep.kernels.optimizer.launch import Family
from halfstep.kernels.optimizer.layout import *  # noqa: F403 (callers take operands, masters, Batch and Control here)
from halfstep.kernels.optimizer.layout import DECAY, LR, ROWS, KernelLayout
from halfstep.kernels.sgd import kernels, rule

MOMENTUM, DAMPENING, GROUP_COLUMNS = *kernels.GROUP, kernels.GROUP_COLUMNS
HYPER_COLUMNS = 1 + len(rule.Hyper._fields)


class Options(NamedTuple):
    MOMENTUM: bool
    NESTEROV: bool
    DECAYS: bool


@dataclass(frozen=True)
class Layout(KernelLayout):
    """What a kernel is compiled for: a layout of any optimizer, with the options of SGD."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: int
    momentum: bool
    nesterov: bool
    decays: bool
    stochastic: bool = False

    @property
    def moments(self) -> tuple[int, ...]:
        return (ROWS.M,) if self.momentum else ()

    @property
    def options(self) -> Options:
        return Options(self.momentum, self.nesterov, self.decays)


def _rule(
    layout: Layout, w: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor], numbers: Any, *_: Any
) -> tuple[torch.Tensor, ...]:
    return rule.sgd(w, grad, moments[0] if moments else None, rule.Hyper(*numbers), layout.nesterov, layout.decays)


def _numbers(groups: torch.Tensor, count: torch.Tensor, gscale: torch.Tensor) -> rule.Hyper:
    lr, decay, momentum, dampening = groups[:, [LR, DECAY, MOMENTUM, DAMPENING]].T
    return rule.numbers(lr, decay, momentum, dampening, count, gscale)


FAMILY = Family("sgd", _rule, _numbers, kernels.prepare_kernel, kernels.sgd_kernel, kernels.coded_sgd_kernel)
launch, step = FAMILY.launch, FAMILY.step
