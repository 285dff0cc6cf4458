"""What the trainers share: clipping inside the next step, skips without waiting, and numbers for their logs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep.integrations.monitor import AmpMonitor
from halfstep.numerics.scaling.scaler import MAX_NORM, GradScaler, unwrapped
from halfstep.numerics.scaling.stand_ins import FreedGradient, refuse_freed
from halfstep.numerics.scaling.verdict import Decision, StepsOnVerdict, parameters_of

LARGEST_NORM = torch.finfo(torch.float32).max  # clips nothing: the factor is 1, and gradients times 1 keep their bits


def checked_scaler(scaler: Any, device: str | None = None) -> GradScaler | None:
    """The argument `scaler`; if it is None, a scaler with the default options on `device`, or None without one.

    Raises:
        TypeError: it is neither None nor a `halfstep.GradScaler`.
    """
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"Expected scaler to be a halfstep.GradScaler, but got a {type(scaler).__qualname__} of "
            f"{type(scaler).__module__}: use halfstep.GradScaler, which takes the arguments of torch.amp.GradScaler"
        )
    return GradScaler(device) if scaler is None and device is not None else scaler


def folds(optimizer: Any) -> bool:
    """Whether the steps of an optimizer, or of the one in a wrapper, clip without writing gradients."""
    return isinstance(unwrapped(optimizer), StepsOnVerdict)


def folds_all(optimizer: Any, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the next step of an optimizer can clip: it is of halfstep and has all trainable ones of `parameters`."""
    ids = {id(parameter) for parameter in parameters_of(optimizer) if parameter.requires_grad}
    return folds(optimizer) and bool(ids) and ids == {id(one) for one in parameters if one.requires_grad}


def clip_in_next_step(optimizer: Any, max_norm: float, scaler: GradScaler | None = None) -> torch.Tensor:
    """Make the next step of an optimizer of halfstep clip its gradients, all together, to a 2-norm.

    The gradients are read once, for the norm, and not written. They must not change before the step. If the backward
    has stepped, it has clipped to the ``max_grad_norm`` of the optimizer, which must be `max_norm` then.

    Args:
        optimizer: the optimizer, or a wrapper around it.
        max_norm: a number above 0. Infinity only computes the norm.
        scaler: the scaler that steps the optimizer, if there is one. Without it, an overflow skips no step.

    Returns:
        The norm of the unscaled gradients before clipping, over all ranks: 0-dim fp32, on their device. NaN if it is
        not known, since the backward has stepped without clipping.

    Raises:
        ValueError: `max_norm` is not above 0.
        RuntimeError: the backward has stepped without clipping, or has clipped to another norm.
    """
    only_norm = max_norm == math.inf
    max_norm = LARGEST_NORM if max_norm == math.inf else MAX_NORM.checked("max_norm", max_norm)
    inner = unwrapped(optimizer)
    if scaler is not None and scaler.is_enabled():
        return scaler.clip_grad_norm_(inner, max_norm)
    if inner._stepping_in_backward is not None:
        norm: torch.Tensor = inner._stepping_in_backward.norm(None if only_norm else max_norm)
        return norm
    own = parameters_of(inner)
    if only_norm and any(isinstance(one.grad, FreedGradient) for one in own):
        return torch.full((), math.nan, dtype=torch.float32, device="cpu")
    refuse_freed(own, "clipping")
    verdict = inner._checker.verdict()
    if verdict is None:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    first = inner._decision is None
    inner._decision = Decision(verdict, None, max_norm, skips=False)
    if first:  # otherwise no step followed the last call, whose hook is still there
        handle: Any = None

        def forget(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer._decision = None
            handle.remove()

        handle = inner.register_step_post_hook(forget)
    norm = verdict.sum_of_squares.sqrt().float()
    return norm


def is_unscaled(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether an optimizer's gradients were unscaled in place, and its step has not been taken."""
    return scaler._per_optimizer_states.get(id(unwrapped(optimizer)), {}).get("stage") is OptState.UNSCALED


def awaits_step(scaler: GradScaler) -> bool:
    """Whether gradients were unscaled or are to be clipped for a step that has not been taken."""
    return any(
        state["stage"] is OptState.UNSCALED or ("max_norm" in state and state["stage"] is OptState.READY)
        for state in scaler._per_optimizer_states.values()
    )


def scaler_metrics(scaler: Any, monitor: AmpMonitor | None = None) -> dict[str, float]:
    """The `scalars` of a monitor, or else of a scaler of halfstep; empty without both."""
    if monitor is not None:
        return monitor.scalars()
    return scaler.scalars() if isinstance(scaler, GradScaler) else {}
