"""The kernel that counts exponents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.backend import TRITON_NAMES
from halfstep.kernels.cells import Grid, width
from halfstep.kernels.statistics import count_kernel, foreach_count_


def variants() -> Iterator[Variant]:
    grid = Grid(dropped=13, emin=-14, emax=15, overflow=(2**11 - 1) << 12)
    for dtype, name in TRITON_NAMES.items():
        for errors in (False, True):
            x = torch.zeros(64, dtype=dtype, device="cpu")
            counts = torch.zeros(1, width(errors), dtype=torch.int64, device="cpu")
            scale = torch.ones((), dtype=torch.float32, device="cpu")
            launch = partial(foreach_count_, [x], counts, grid, scale=scale, inverted=True)
            title = name + " with errors" * errors
            yield Variant(count_kernel, title, launch, bytes_read=dtype.itemsize)
