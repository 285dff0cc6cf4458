"""The kernel that updates the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from halfstep.bench.audit.families.adam import amp_step
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.loss_scale import loss_scale_kernel


def variants() -> Iterator[Variant]:
    yield Variant(loss_scale_kernel, "update", amp_step)
    yield Variant(loss_scale_kernel, "update, refill on clean", partial(amp_step, hysteresis_refill="clean_step"))
