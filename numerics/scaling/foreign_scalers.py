"""What an optimizer of halfstep tells scalers that are not ours.

torch's scalers read ``optimizer._step_supports_amp_scaling``. Where it is true they leave unscaling and skipping to
``step()``, and on that path the flag is never combined over ranks: under FSDP1 the rank with the Inf skips and the
others step (`ShardedGradScaler` with ``fused=True``). Lightning refuses to clip, and Accelerate, which looks at whether
``step()`` was called, believes that no step was ever skipped. So ours say no: those scalers unscale in place, reduce
their flag where they can, and do not call ``step()`` after an overflow. `halfstep.GradScaler` does not ask.

`torch.amp.GradScaler` reduces nothing for plain tensors, so under FSDP1 it cannot be right with any optimizer. The
question is the one moment before the first step at which an optimizer sees its scaler, and the error is raised there.
"""

from __future__ import annotations

import sys
from itertools import repeat
from typing import Any

import torch

from halfstep.numerics.scaling.verdict import StepsOnVerdict, parameters_of


class StepSupportsAmpScaling:
    """The class attribute ``_step_supports_amp_scaling`` of an optimizer: False for whoever asks.

    A value that somebody sets on an instance takes its place.

    Raises:
        RuntimeError: `torch.amp.GradScaler` asks, and FSDP1 has cut the optimizer's parameters.
    """

    def __get__(self, optimizer: Any, owner: Any = None) -> bool:
        if optimizer is not None:
            # Nothing is passed along: whose method asks is seen in its frame only.
            asking = sys._getframe(1).f_locals.get("self")
            if isinstance(asking, torch.amp.GradScaler) and _reduces_nothing(type(asking)):
                _refuse_cut_parameters(optimizer)
        return False


def _reduces_nothing(scaler: type[torch.amp.GradScaler]) -> bool:
    """Whether it is torch's plain scaler, or a subclass that unscales as that one does."""
    plain = torch.amp.GradScaler
    return scaler.unscale_ is plain.unscale_ and scaler._unscale_grads_ is plain._unscale_grads_


def _refuse_cut_parameters(optimizer: StepsOnVerdict) -> None:
    parameters = parameters_of(optimizer)
    if not any(map(getattr, parameters, repeat("_fsdp_flattened"), repeat(False))):
        return
    if optimizer._checker.find_topology(parameters).cut_by_fsdp1:
        raise RuntimeError(
            "Expected scaler to be halfstep.GradScaler or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler "
            "for parameters sharded by FullyShardedDataParallel, but got torch.amp.GradScaler: it does not combine its "
            "overflow flag over these ranks, so after an Inf on one rank the others would step"
        )
