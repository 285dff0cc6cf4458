"""The kernel that sums gradients received from other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.rank_sum import rank_sum_kernel, sum_of_ranks


def variants() -> Iterator[Variant]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        parts, out = torch.empty(2, 64, dtype=dtype, device="cpu"), torch.empty(64, device="cpu")
        yield Variant(rank_sum_kernel, name, partial(sum_of_ranks, parts, out, 2.0), 2 * dtype.itemsize, 4)
