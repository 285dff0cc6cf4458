"""The kernels of log-probabilities and cross-entropy: rows of whole vectors and, if odd, of single elements.

Bytes are per logit: `row_kernel`, which puts the chunks of a row together, has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.log_probabilities.dispatch import backward
from halfstep.kernels.log_probabilities.kernels import chunk_kernel, gradient_kernel, row_kernel

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = (
    *("bf16", "bf16 scaled", "bf16 entropy", "bf16 mean", "bf16 odd", "bf16 exact", "bf16 exact entropy"),
    *("fp16", "fp32", "fp32 exact mean"),
)


def variants() -> Iterator[Variant]:
    for name in NAMES:
        dtype_name, *form = name.split(" ")
        columns, temperature = 4096 + ("odd" in form), 0.7 if "scaled" in form else 1.0
        logits = torch.empty(2, columns, dtype=_DTYPES[dtype_name], device="cpu")
        targets = torch.zeros(2, dtype=torch.int64, device="cpu")
        rows = torch.empty(6, 2, dtype=torch.float32, device="cpu")
        options = temperature, -100, "entropy" in form, "mean" in form, "exact" in form, False
        forward = partial(torch.ops.halfstep.log_probabilities, logits, targets, *options)
        gradient = partial(backward, rows, logits, targets, rows, *options)
        # A chunk is moved in parts. Of 32 threads that hold the numbers of two chunks, two store them, and all are
        # counted.
        parts, size = (8 if dtype_name == "fp32" else 4), logits.element_size()
        numbers = 2 + ("entropy" in form) + ("mean" in form)
        exact: dict[str, Any] = {"exact": "exact" in form, "fused": "exact" in form}
        yield Variant(chunk_kernel, name, forward, size, 4 * numbers / 64, copies=parts, **exact)
        yield Variant(row_kernel, name, forward, **exact)
        yield Variant(gradient_kernel, name, gradient, size, size, copies=parts, **exact)
