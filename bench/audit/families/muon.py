"""Muon's kernels: the momentum kernel by dtype, and the weight kernel by master."""

from __future__ import annotations

import torch

from halfstep.bench.audit.families.adam import name, step_variant
from halfstep.bench.audit.launches import Variant
from halfstep.kernels import muon
from halfstep.kernels.backend import TRITON_NAMES
from halfstep.kernels.multi_tensor import FLOATS
from halfstep.kernels.muon import (
    FULL_MASTER,
    NO_MASTER,
    RESULT,
    SPLIT24_MASTER,
    SPLIT_MASTER,
    MomentumLayout,
    WeightLayout,
)


def _momentum(layout: MomentumLayout) -> Variant:
    state = "8-bit" if layout.coded else TRITON_NAMES[layout.state]
    flags = ["nesterov"] * layout.nesterov + ["stochastic"] * layout.stochastic
    title, state_bytes = ", ".join([f"{TRITON_NAMES[layout.grad]} grad, {state} state", *flags]), layout.state.itemsize
    read, written = layout.grad.itemsize + state_bytes, state_bytes + layout.param.itemsize
    return step_variant(muon.MOMENTUM, layout, title, read, written)


def _weight(layout: WeightLayout) -> Variant:
    weight = layout.param.itemsize + {SPLIT_MASTER: 2, SPLIT24_MASTER: 1, FULL_MASTER: 4, NO_MASTER: 0}[layout.master]
    read = weight if layout.master != FULL_MASTER else 4
    return step_variant(muon.WEIGHT, layout, name(layout), read + layout.grad.itemsize, weight)


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
