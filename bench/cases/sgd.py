"""SGD with momentum over many tensors, for three jobs; checked as the Adam cases.

torch does the jobs with fp32 masters and a momentum buffer in fp32, and copies between the masters and the bf16 weights
and gradients; it is measured by the bytes of the job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.adam import EXACT, ROUNDED, OptimizerInputs, prepare, rows_and_columns, stepping, update_error
from halfstep.bench.harness import Case, Prepared
from halfstep.numerics.state_layout import StateLayout

HYPER: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
RULE = partial(torch.optim.SGD, **HYPER)
# Name, dtype, formats of weights, master and momentum buffer, and the bound.
JOBS = (
    ("fp32", torch.float32, "fp32", None, "fp32", EXACT),
    ("bf16, fp32 master", torch.bfloat16, "bf16", "split", "fp32", EXACT),
    ("bf16, bf16 momentum", torch.bfloat16, "bf16", "split", "bf16", ROUNDED),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _halfstep(state: str, inputs: OptimizerInputs) -> Prepared:
    return stepping(partial(halfstep.SGD, **HYPER, state_dtype=DTYPES[state]), inputs)


def _torch(option: str, inputs: OptimizerInputs) -> Prepared:
    return stepping(partial(RULE, **{option: True}), inputs, masters=True)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every job with each number of tensors."""
    for name, dtype, param, master, state, bound in JOBS:
        for tensors in sizes.tensors:
            shape = (tensors, *rows_and_columns(sizes.elements // tensors))
            elements = math.prod(shape)
            moved = sum(StateLayout(param, master, state, ("momentum_buffer",)).moved()) + dtype.itemsize
            yield Case(
                group="sgd",
                operation="sgd",
                dtype=name,
                size={"tensors": tensors, "elements": elements},
                axis="tensors",
                bytes_moved=int(moved * elements),
                bound=bound,
                error_unit="as a share of the update",
                prepare=partial(prepare, shape=shape, dtype=dtype, rule=RULE),
                providers={
                    "halfstep": partial(_halfstep, state),
                    "torch fused": partial(_torch, "fused"),
                    "torch foreach": partial(_torch, "foreach"),
                },
                error=update_error,
            )
