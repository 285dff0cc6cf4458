"""The kernel that updates the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.loss_scale import loss_scale_kernel


def _update(refill: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    scaler = halfstep.GradScaler("cpu", hysteresis_refill=refill)
    scaler.scale(torch.zeros((), device="cpu"))
    scaler.step(halfstep.AdamW([parameter]))
    scaler.update()


def variants() -> Iterator[Variant]:
    """Both rules of the hysteresis."""
    yield Variant(loss_scale_kernel, "update", partial(_update, "growth"))
    yield Variant(loss_scale_kernel, "update, refill on clean", partial(_update, "clean_step"))
