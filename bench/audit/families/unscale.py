"""The kernels that check and unscale gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.backend import TRITON_NAMES
from halfstep.kernels.unscale import Factor, Tally, check, check_kernel, finish_kernel


def variants() -> Iterator[Variant]:
    """For each dtype, a check with a loss scale and an in-place unscale; and the kernel that combines their results."""
    scale = torch.ones((), dtype=torch.float32, device="cpu")
    tally = Tally(torch.zeros(1, 4, dtype=torch.int32, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"))
    for dtype, name in TRITON_NAMES.items():
        x = torch.zeros(64, dtype=dtype, device="cpu")
        by_scale = partial(check, [x], Factor(scale, inverted=True))
        yield Variant(check_kernel, f"{name} check", by_scale, x.itemsize)
        unscale = partial(halfstep.foreach_unscale_, [x], scale)
        yield Variant(check_kernel, f"{name} unscale", unscale, x.itemsize, x.itemsize)
    yield Variant(finish_kernel, "finish", partial(check, [x], tally=tally))
