"""Checks as a scaler runs them: in place, with the loss scale, into preallocated memory."""

from collections.abc import Sequence
from typing import Any

import torch

import halfstep
from halfstep.kernels import unscale
from halfstep.kernels.multi_tensor import all_have_memory
from halfstep.kernels.unscale import Factor, Verdict


def unscaled(tensors: Sequence[torch.Tensor], inv_scale: Any) -> Verdict:
    """The verdict on tensors that are multiplied in place; with None they are only read."""
    listed = list(tensors)
    if not listed:
        return halfstep.foreach_check(listed)
    factor = unscale._checked_factor(inv_scale, listed[0].device)
    return unscale.check(listed, factor, write=factor is not None, in_memory=all_have_memory(listed))


def over(tensors: Sequence[torch.Tensor], scale: torch.Tensor, **options: Any) -> Verdict:
    """The verdict on ``tensor / scale``."""
    return unscale.check(list(tensors), Factor(scale, inverted=True), **options)
