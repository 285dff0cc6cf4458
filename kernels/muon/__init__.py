"""Muon over lists of matrices: see `rule.py` for the maths, kernels/optimizer for what all optimizers share.

A step launches a kernel over all momentum buffers, which writes the matrices in bf16 to scratch memory, orthogonalizes
these one by one, and launches a kernel over all weights. Bytes per element of both kernels with a 16-bit gradient:
split master 12 + 10 = 22 with a buffer in fp32, 8 + 10 = 18 in bf16, 6.06 + 10 = 16.06 in 8 bits, whose codes are
linear (see block_codes.py); two less with a master of 24 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from halfstep.kernels.muon import kernels, rule
from halfstep.kernels.muon.rule import Products
from halfstep.kernels.optimizer.launch import Family
from halfstep.kernels.optimizer.layout import *  # noqa: F403 (callers take operands, masters, Batch and Control here)
from halfstep.kernels.optimizer.layout import RESULT, KernelLayout, rounds_stochastically


@dataclass(frozen=True)
class MomentumLayout(KernelLayout):
    nesterov: bool

    @property
    def moments(self) -> int:
        return 1


@dataclass(frozen=True)
class WeightLayout(KernelLayout):
    @property
    def moments(self) -> int:
        return 0


@dataclass(frozen=True)
class Layout(MomentumLayout):
    """The layout of matrices, and how they are orthogonalized. No kernel is compiled for it, but for its two parts."""

    products: Products = field(kw_only=True)

    @property
    def in_rows(self) -> bool:
        return True

    @property
    def momentum(self) -> MomentumLayout:
        """That of the first kernel, which rounds nothing stochastically but the buffer."""
        stochastic = self.stochastic and self.state != torch.float32
        return MomentumLayout(torch.bfloat16, self.grad, self.state, RESULT, self.nesterov, stochastic=stochastic)

    @property
    def weight(self) -> WeightLayout:
        """That of the second kernel, whose gradient is a matrix in bf16."""
        stochastic = self.stochastic and rounds_stochastically(self.param, torch.float32, self.master)
        return WeightLayout(self.param, torch.bfloat16, torch.bfloat16, self.master, stochastic=stochastic)


MOMENTUM = Family("muon_momentum", rule.momentum, rule, kernels, library="muon")
WEIGHT = Family("muon_weight", rule.weight, rule, kernels, library="muon", prepares=False)
FAMILY = MOMENTUM


def orthogonalize(matrices: list[torch.Tensor], products: Products) -> None:
    """Replace bf16 tensors of shape ``(count, rows, columns)`` by what `rule.orthogonalized` makes of each matrix."""
    device = matrices[0].device
    backend = torch.backends.cuda.matmul
    reduced = backend.allow_bf16_reduced_precision_reduction if device.type == "cuda" else None
    # Code that steps inside of torch.autocast would have products in fp16.
    with torch.autocast(device.type, enabled=False):
        try:
            if reduced:
                backend.allow_bf16_reduced_precision_reduction = False
            for batch in matrices:
                for matrix in batch if batch.numel() else ():
                    matrix.copy_(rule.orthogonalized(matrix, products))
        finally:
            if reduced:
                backend.allow_bf16_reduced_precision_reduction = reduced
