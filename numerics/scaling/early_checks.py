"""Checks of gradients by the launch that computes them, so that a verdict after the backward need not read them again.

`hand_over` keeps the check of a gradient, and `early_checks` returns it while the gradient and the factor of its check
have not changed. That factor is the one of the last verdict, so gradients of the first step have no early checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.kernels.unscale import Factor, PartialCheck


class Request:
    """What the last verdict on some gradients has multiplied them by, and whether there was one."""

    made = False
    factor: Factor | None = None


class _Early(NamedTuple):
    request: Request
    shard: torch.Tensor
    version: int  # of the shard
    check: PartialCheck | None
    factor: Factor | None
    state: object  # of the factor


handed_over: Any = WeakTensorKeyDictionary()  # `_Early` by gradient


def _state(factor: Factor | None) -> object:
    return factor and (id(factor.value), getattr(factor.value, "_version", 0), factor.inverted)


def hand_over(grad: torch.Tensor, shard: torch.Tensor, request: Request, check: PartialCheck | None) -> None:
    """Keep a gradient's check as requested for `early_checks`; None to receive requests only.

    With a check, the class of `grad` must have `unread_shard` and lose it when anything else accesses the shard.
    """
    handed_over[grad] = _Early(request, shard, shard._version, check, request.factor, _state(request.factor))


def early_checks(
    parameters: list[torch.Tensor], slots: Sequence[int], factor: Factor | None
) -> list[PartialCheck | None]:
    """For each slot, the check of the gradient of this parameter times a factor, which is on its device; None stands
    for a gradient to be checked now."""
    checks: list[PartialCheck | None] = []
    for slot in slots:
        grad: Any = parameters[slot].grad
        early, check = handed_over.get(grad), None
        if early is not None and early.shard._version == early.version:
            if hasattr(type(grad), "unread_shard") and early.state == _state(factor):
                check = early.check
            early.request.made, early.request.factor = early.check is check, factor  # one in vain is not repeated
        checks.append(check)
    return checks
