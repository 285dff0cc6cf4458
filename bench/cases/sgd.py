"""SGD with momentum over many tensors and over one large tensor, for three jobs, checked like the Adam cases.

Bytes per weight: 20 with fp32 weights and momentum buffer, 18 with bf16 weights and exact fp32 masters, 14 with a bf16
buffer too. torch does all jobs with fp32 masters and an fp32 buffer, and with copies as in the Adam cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.adam import EXACT, ROUNDED, Job, optimizer_cases, stepping
from halfstep.bench.harness import Case

HYPER: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
RULE = partial(torch.optim.SGD, **HYPER)
FP32, BF16 = torch.float32, torch.bfloat16


def cases(sizes: Sizes) -> Iterator[Case]:
    names = ("fused", "foreach")
    torchs = {f"torch {name}": partial(stepping, partial(RULE, **{name: True}), masters=True) for name in names}
    ours = (partial(halfstep.SGD, **HYPER, state_dtype=state) for state in (FP32, BF16))
    fp32, bf16 = ({"halfstep": partial(stepping, optimizer), **torchs} for optimizer in ours)
    jobs = (
        Job("fp32", FP32, 20, EXACT, fp32),
        Job("bf16, fp32 master", BF16, 18, EXACT, fp32),
        Job("bf16, bf16 momentum", BF16, 14, ROUNDED, bf16),
    )
    return optimizer_cases("sgd", "sgd", jobs, RULE, sizes)
