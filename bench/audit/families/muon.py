"""The kernels of Muon: of the momentum by its dtype, and of the weight by its master."""

from __future__ import annotations

from functools import partial

import torch

from halfstep.bench.audit.families.adam import name
from halfstep.bench.audit.launches import Variant
from halfstep.kernels import muon
from halfstep.kernels.backend import TRITON_NAMES
from halfstep.kernels.multi_tensor import FLOATS, TensorTable
from halfstep.kernels.muon import (
    FULL_MASTER,
    NO_MASTER,
    RESULT,
    SPLIT24_MASTER,
    SPLIT_MASTER,
    MomentumLayout,
    WeightLayout,
)
from halfstep.kernels.optimizer.launch import Family
from halfstep.kernels.optimizer.layout import KernelLayout


def _step(family: Family, layout: KernelLayout) -> None:
    table = TensorTable(layout.sizes([(1, 128)]), layout.operands, layout.chunk, torch.device("cpu"))
    hyper = torch.empty(1, family.hyper_columns, device="cpu")
    groups = torch.empty(1, family.group_columns, dtype=torch.float64, device="cpu")
    batch = muon.Batch(layout, table, [], torch.zeros(1, dtype=torch.int64, device="cpu"), hyper)
    family.step(batch, groups, muon.Control())


def _momentum(layout: MomentumLayout) -> Variant:
    state = "8-bit" if layout.coded else TRITON_NAMES[layout.state]
    flags = ["nesterov"] * layout.nesterov + ["stochastic"] * layout.stochastic
    # Rows of whole blocks, two tiles a trip on NVIDIA GPUs and one on AMD's, and rows of multiples of 16.
    copies, on = (3, {"gfx942": 2}) if layout.coded else (1, {})
    return Variant(
        muon.MOMENTUM.kernel,
        ", ".join([f"{TRITON_NAMES[layout.grad]} grad, {state} state", *flags]),
        partial(_step, muon.MOMENTUM, layout),
        layout.grad.itemsize + layout.state.itemsize,
        layout.state.itemsize + layout.param.itemsize,
        copies=copies,
        copies_on=on,
    )


def _weight(layout: WeightLayout) -> Variant:
    weight = layout.param.itemsize + {SPLIT_MASTER: 2, SPLIT24_MASTER: 1, FULL_MASTER: 4, NO_MASTER: 0}[layout.master]
    read = weight if layout.master != FULL_MASTER else 4
    launch = partial(_step, muon.WEIGHT, layout)
    return Variant(muon.WEIGHT.kernel, name(layout), launch, read + layout.grad.itemsize, weight)


def variants() -> list[Variant]:
    f32, f16, bf16 = FLOATS
    momenta = [
        MomentumLayout(bf16, f32, f32, RESULT, True),
        MomentumLayout(bf16, bf16, f32, RESULT, False),
        MomentumLayout(bf16, bf16, bf16, RESULT, True),
        MomentumLayout(bf16, bf16, bf16, RESULT, True, stochastic=True),
        MomentumLayout(bf16, bf16, torch.int8, RESULT, False),
        MomentumLayout(bf16, bf16, torch.int8, RESULT, True, stochastic=True),
    ]
    weights = [
        WeightLayout(f32, bf16, bf16, NO_MASTER),
        WeightLayout(f16, bf16, bf16, FULL_MASTER),
        WeightLayout(bf16, bf16, bf16, NO_MASTER, stochastic=True),
        WeightLayout(bf16, bf16, bf16, SPLIT_MASTER),
        WeightLayout(bf16, bf16, bf16, SPLIT24_MASTER, stochastic=True),
    ]
    return [*map(_momentum, momenta), *map(_weight, weights)]
