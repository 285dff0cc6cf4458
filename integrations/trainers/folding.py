"""Code shared by the trainers: clipping inside the next step, checks of the scaler, and metrics for logs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from halfstep.integrations.monitor import AmpMonitor
from halfstep.numerics.scaling.decision import LARGEST_NORM, StepsOnVerdict, parameters_of
from halfstep.numerics.scaling.scaler import GradScaler, unwrapped


def checked_scaler(scaler: Any, device: str | None = None) -> GradScaler | None:
    """`scaler`, or if it is None, a scaler with default options on `device`, or None without a device."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"Expected scaler to be a halfstep.GradScaler, but got a {type(scaler).__qualname__} of "
            f"{type(scaler).__module__}: use halfstep.GradScaler, which takes the arguments of torch.amp.GradScaler"
        )
    return GradScaler(device) if scaler is None and device is not None else scaler


def folds(optimizer: Any) -> bool:
    """Whether the steps of an optimizer, or of the one inside a wrapper, clip without writing gradients."""
    return isinstance(unwrapped(optimizer), StepsOnVerdict)


def folds_all(optimizer: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the optimizer's next step can clip `parameters`: it is a halfstep optimizer of all trainable ones."""
    ids, trained = (
        {id(parameter) for parameter in listed if parameter.requires_grad}
        for listed in (parameters_of(optimizer), parameters)
    )
    return folds(optimizer) and bool(ids) and ids == trained


def clip_in_next_step(optimizer: Any, max_norm: float, scaler: GradScaler | None = None) -> torch.Tensor:
    """Make the next step of a halfstep optimizer clip, by calling `clip_grad_norm_` of the scaler or the optimizer.

    Returns the norm. With an infinite `max_norm`, it is computed without clipping.
    """
    inner = unwrapped(optimizer)
    if scaler is not None and scaler.is_enabled():
        return scaler.clip_grad_norm_(inner, LARGEST_NORM if max_norm == math.inf else max_norm)
    return inner.clip_grad_norm_(max_norm)


def scaler_metrics(scaler: Any, monitor: AmpMonitor | None = None) -> dict[str, float]:
    """The `scalars` of the monitor, or else of a `halfstep.GradScaler`; empty without either."""
    if monitor is not None:
        return monitor.scalars()
    return scaler.scalars() if isinstance(scaler, GradScaler) else {}
