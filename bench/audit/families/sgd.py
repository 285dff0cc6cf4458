"""SGD's kernels: variants with different layouts of the weight and the momentum buffer."""

from __future__ import annotations

import torch

from halfstep.bench.audit.families.adam import variant
from halfstep.bench.audit.launches import Variant
from halfstep.kernels import sgd
from halfstep.kernels.multi_tensor import FLOATS
from halfstep.kernels.sgd import FULL_MASTER, NO_MASTER, SPLIT24_MASTER, SPLIT_MASTER, Layout


def variants() -> list[Variant]:
    f32, f16, bf16 = FLOATS
    layouts = [
        *(Layout(f32, f32, f32, NO_MASTER, momentum, False, False) for momentum in (False, True)),
        Layout(f16, f16, f32, FULL_MASTER, True, False, False),
        Layout(bf16, bf16, f32, SPLIT_MASTER, True, True, True),
        Layout(bf16, bf16, f32, NO_MASTER, False, False, False, stochastic=True),
        Layout(bf16, bf16, bf16, SPLIT_MASTER, True, False, False, stochastic=True),
        Layout(bf16, bf16, torch.uint8, SPLIT_MASTER, True, True, True),
        Layout(bf16, bf16, torch.uint8, SPLIT24_MASTER, True, False, False, stochastic=True),
    ]
    return [variant(sgd, layout, ("momentum_buffer",)) for layout in layouts]
