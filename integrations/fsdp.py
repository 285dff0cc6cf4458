"""FSDP2: gradients that keep the bits of their reduction.

With ``MixedPrecisionPolicy(reduce_dtype=torch.float32)`` the ranks' gradients are summed in fp32, and the sum is then
rounded to the dtype of the sharded parameter: with bf16 parameters, to 8 bits. A master could take up those that are
lost. `keep_reduced_gradients` leaves the sum as it is: ``.grad`` of a bf16 parameter is then fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def keep_reduced_gradients(model: torch.nn.Module) -> None:
    """Have FSDP2 leave reduced gradients in fp32 instead of rounding them to the parameters' dtype.

    Call it after ``fully_shard`` and before the first step. ``.grad`` of 16-bit parameters is then an fp32 DTensor over
    the reduced buffer itself: scaler, clipping and optimizer all see the same fp32 numbers, gradient accumulation adds
    in fp32, and nothing is copied. It costs 2 bytes more per parameter of the shard while gradients live; FSDP2 has the
    fp32 buffer anyway until it is rounded. `halfstep.AdamW` takes gradients of another dtype than the parameter's;
    torch's optimizers may not.

    Args:
        model: with ``fully_shard`` applied to it or to parts of it, each with
            ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``, HSDP and CPU offload included.

    Raises:
        ValueError: nothing in it is sharded by FSDP2, or a part reduces in another dtype; nothing was changed.
        RuntimeError: this torch has no ``Tensor.grad_dtype``, or its FSDP2 is another one inside.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise RuntimeError(
            f"Expected a torch with Tensor.grad_dtype, but got {torch.__version__}: update torch, or do without "
            "keep_reduced_gradients"
        )
    groups = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                _check(name, group)
                groups.append(group)
    if not groups:
        raise ValueError(
            "Expected model to have a module sharded by FSDP2, but got none: call "
            "torch.distributed.fsdp.fully_shard(model) first"
        )
    for group in groups:
        _keep(group)


def _groups(module: FSDPModule) -> list[Any]:
    """The parameters that FSDP2 gathers and reduces together: one group for a module, several with several meshes."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # older torch has one at most
        one = getattr(state, "_fsdp_param_group", None)
        several = [] if one is None else [one]
    return list(several)


def _check(name: str, group: Any) -> None:
    if not hasattr(group, "_init_mp_dtypes") or not hasattr(group, "mp_policy"):  # torch 2.15: one for each parameter
        raise RuntimeError(
            f"Expected torch 2.14 or earlier, but got {torch.__version__}, whose FSDP2 stores its dtypes elsewhere: do "
            "without keep_reduced_gradients"
        )
    reduce_dtype = group.mp_policy.reduce_dtype
    dtypes = {param.sharded_param.dtype for param in group.fsdp_params}
    if reduce_dtype != torch.float32 and dtypes != {torch.float32}:
        raise ValueError(
            f"Expected reduce_dtype of module {name!r} to be torch.float32, but got {reduce_dtype}: shard it with "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )


def _keep(group: Any) -> None:
    determine = group._init_mp_dtypes

    def without_rounding() -> None:
        determine()
        group._orig_dtype = None  # to which FSDP2 rounds
        for param in group.fsdp_params:
            param.sharded_param.grad_dtype = None  # any

    # FSDP2 determines the dtypes before the first forward, and once more whenever parameters were moved or replaced.
    group._init_mp_dtypes = without_rounding
    without_rounding()
