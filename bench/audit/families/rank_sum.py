"""The kernels that sum gradients received from other ranks, and check the sums."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.rank_sum import (
    Ranges,
    rank_sum_check_kernel,
    rank_sum_kernel,
    sum_and_check,
    sum_of_ranks,
)
from halfstep.kernels.unscale import Factor


def variants() -> Iterator[Variant]:
    factor = Factor(torch.ones((), dtype=torch.float32, device="cpu"), inverted=True)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        parts, out = torch.empty(2, 64, dtype=dtype, device="cpu"), torch.empty(64, device="cpu")
        yield Variant(rank_sum_kernel, name, partial(sum_of_ranks, parts, out, 2.0), 2 * dtype.itemsize, 4)
        checked = partial(sum_and_check, parts, out, 2.0, Ranges([(0, 64)], 64), factor)
        yield Variant(rank_sum_check_kernel, f"{name} check", checked, 2 * dtype.itemsize, 4)
