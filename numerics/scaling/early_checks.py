"""Checks of gradients by the launch that computes them, which spare a verdict after the backward a reading of them.

Who computes a gradient hands over its check by `hand_over`; `early_checks` returns it as long as the gradient has not
changed. Its factor is that of the last verdict, so the first step has no early checks, and the next ones have none
where the scale was changed in between, or where no verdict asks.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.kernels.unscale import Factor, PartialCheck
from halfstep.numerics.scaling.sharding import shard_of


class Request:
    """What the last verdict on some gradients has multiplied them by, and whether there was one."""

    made = False
    factor: Factor | None = None


class EarlyCheck(NamedTuple):
    """The check of a gradient, and the versions that its shard and the factor have had since."""

    request: Request
    shard: torch.Tensor
    check: PartialCheck | None  # None: not yet asked for
    factor: Factor | None
    versions: tuple[int, int]

    @classmethod
    def of(cls, request: Request, shard: torch.Tensor, check: PartialCheck | None) -> EarlyCheck:
        return cls(request, shard, check, request.factor, (shard._version, _version(request.factor)))


_early: MutableMapping[torch.Tensor, EarlyCheck] = WeakTensorKeyDictionary()


def _version(factor: Factor | None) -> int:
    return factor.value._version if factor is not None and isinstance(factor.value, torch.Tensor) else 0


def _equal(factor: Factor | None, other: Factor | None) -> bool:
    if factor is None or other is None:
        return factor is other
    return factor.value is other.value and factor.inverted == other.inverted


def hand_over(grad: torch.Tensor, early: EarlyCheck) -> None:
    """Keep what is known about a gradient for `early_checks`.

    With a check, `grad` must be a DTensor of a class with `unread_shard`, which it loses when its shard is accessed.
    """
    _early[grad] = early


def early_checks(
    parameters: list[torch.Tensor], slots: Sequence[int], factor: Factor | None
) -> list[PartialCheck | None]:
    """For each slot, the check of the gradient of this parameter times a factor, which is on its device. None stands
    for a gradient to be checked now. Empty if there are no early checks at all."""
    checks: list[PartialCheck | None] = []
    for slot in slots if _early else ():
        grad: Any = parameters[slot].grad
        early, check = _early.get(grad), None
        if early is not None and early.shard is shard_of(grad) and early.shard._version == early.versions[0]:
            early.request.made, early.request.factor = True, factor
            unread = hasattr(type(grad), "unread_shard")
            if unread and _equal(early.factor, factor) and _version(factor) == early.versions[1]:
                check = early.check
        checks.append(check)
    return checks
