"""Optimizers of halfstep with scalers of torch.

torch's scalers read ``optimizer._step_supports_amp_scaling``. If it is true, they leave unscaling and skipping to
``step()`` and do not combine the flag over ranks: under FSDP1 the rank with the Inf skips while the others step
(`ShardedGradScaler` with ``fused=True``). Lightning then refuses to clip, and Accelerate, which checks whether
``step()`` was called, never notices a skipped step. For optimizers of halfstep the attribute is therefore False: these
scalers unscale in place, reduce their flag where they can, and do not call ``step()`` after an overflow.
`halfstep.GradScaler` does not read the attribute.

`torch.amp.GradScaler` does not reduce its flag for plain tensors, so it is wrong under FSDP1 with every optimizer.
Reading the attribute is the only moment before the first step at which an optimizer meets its scaler, so the error is
raised there.

torch's scalers copy the scale to the CPU and do not wait for it: gradients on the CPU are multiplied by whatever was in
that memory before. They are refused there, too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from halfstep.numerics.scaling.verdict import StepsOnVerdict, parameters_of


class StepSupportsAmpScaling:
    """The class attribute ``_step_supports_amp_scaling`` of an optimizer, which is always False.

    A value that is set on an instance takes precedence. Raises a RuntimeError if a scaler of torch reads it whose scale
    is on a GPU and a parameter on the CPU, or the other way round, or which reduces no flag where FSDP1 shards.
    """

    def __get__(self, optimizer: Any, owner: Any = None) -> bool:
        # The reader of an attribute is visible only in its frame.
        asking = None if optimizer is None else sys._getframe(1).f_locals.get("self")
        if isinstance(asking, torch.amp.GradScaler):
            _refuse_other_devices(asking, optimizer)
            if _reduces_nothing(type(asking)):
                _refuse_cut_parameters(optimizer)
        return False


def _reduces_nothing(scaler: type[torch.amp.GradScaler]) -> bool:
    """Whether a class is torch's plain scaler, or a subclass that unscales in the same way."""
    plain = torch.amp.GradScaler
    return scaler.unscale_ is plain.unscale_ and scaler._unscale_grads_ is plain._unscale_grads_


def _refuse_other_devices(scaler: torch.amp.GradScaler, optimizer: StepsOnVerdict) -> None:
    devices = {parameter.device for parameter in parameters_of(optimizer)}
    if scaler._scale is not None and not {device.type for device in devices} <= {scaler._scale.device.type}:
        raise RuntimeError(
            f"Expected scaler to be halfstep.GradScaler for parameters on {', '.join(sorted(map(str, devices)))} and a "
            f"loss scale on {scaler._scale.device}, but got {type(scaler).__qualname__} of torch: it copies numbers "
            "from the GPU to the CPU without waiting for them, and uses them before they have arrived"
        )


def _refuse_cut_parameters(optimizer: StepsOnVerdict) -> None:
    parameters = parameters_of(optimizer)
    flat = any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters)
    if flat and optimizer._checker.find_topology(parameters).cut_by_fsdp1:
        raise RuntimeError(
            "Expected scaler to be halfstep.GradScaler or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler "
            "for parameters sharded by FullyShardedDataParallel, but got torch.amp.GradScaler: it does not combine its "
            "overflow flag over these ranks, so after an Inf on one rank the others would step"
        )
