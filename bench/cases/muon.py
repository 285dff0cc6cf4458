"""Muon over many square matrices and over one large matrix, for two jobs, checked like the Adam cases.

Together, both kernels of a step move 22 bytes per weight with bf16 weights, exact fp32 masters and fp32 momentum, and
16.06 with 8-bit momentum; most of the time is spent in the matrix products between them. The error is relative to
torch's step in float64, whose products are nevertheless in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.adam import CODED_FROM, ROUNDED, Job, OptimizerInputs, optimizer_cases, stepping
from halfstep.bench.harness import Case, Prepared

HYPER: dict[str, Any] = {"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.1}
RULE = partial(torch.optim.Muon, **HYPER)


def _square(numel: int) -> tuple[int, int]:
    """The sides of a square of at most `numel` elements, rounded down to a multiple of 8 unless below 8."""
    side = math.isqrt(numel)
    return (side // 8 * 8 or side,) * 2


class _Inputs(OptimizerInputs):
    """Gradients that differ between steps by more than a factor, which Muon's normalization would cancel."""

    def scaled(self, grads: torch.Tensor, factor: float) -> torch.Tensor:
        return grads.roll(1 + int(factor), 1) * factor


def _halfstep(inputs: OptimizerInputs, **options: Any) -> Prepared:
    return stepping(partial(halfstep.Muon, **HYPER, **options), inputs)


def cases(sizes: Sizes) -> Iterator[Case]:
    theirs, bf16 = {"torch": partial(stepping, RULE, masters=True)}, torch.bfloat16
    coded = {"halfstep": partial(_halfstep, state_dtype="8bit"), **theirs}
    jobs = (
        Job("bf16, fp32 master", bf16, 22, ROUNDED, {"halfstep": _halfstep, **theirs}),
        Job("bf16, 8-bit momentum", bf16, 16 + Fraction(2, 32), ROUNDED, coded, smallest=CODED_FROM),
    )
    sizes = replace(sizes, tensors=(1, 16))  # each tensor takes some twenty launches
    return optimizer_cases("muon", "muon", jobs, RULE, sizes, _square, _Inputs)
