"""FSDP2: reduced gradients that stay in fp32.

With ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``, FSDP2 sums the ranks' gradients in fp32 and then rounds the
sum to the dtype of the sharded parameter, which for bf16 leaves 8 bits of precision. An optimizer with fp32 masters
could use the bits that are lost. `keep_reduced_gradients` keeps the sum: ``.grad`` of a bf16 parameter is then fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def keep_reduced_gradients(model: torch.nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32 instead of rounding them to the parameters' dtype.

    Call this after ``fully_shard`` and before the first step. ``.grad`` of 16-bit parameters is then an fp32 DTensor
    that uses the memory of the reduced buffer: the scaler, clipping and the optimizer see the same fp32 numbers,
    gradient accumulation adds in fp32, and nothing is copied. Gradients take 2 more bytes per parameter of the shard;
    FSDP2 allocates the fp32 buffer in any case and would free it after rounding. `halfstep.AdamW` accepts gradients of
    another dtype than the parameter's; torch's optimizers may not.

    Args:
        model: a model to which, or to parts of which, ``fully_shard`` was applied with
            ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``. HSDP and CPU offload are supported.

    Raises:
        ValueError: FSDP2 shards no part of the model, or reduces a part in another dtype. Nothing was changed.
        RuntimeError: the FSDP2 of this version of torch has different internals.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        >>> from halfstep.integrations.fsdp import keep_reduced_gradients
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = torch.nn.Linear(4, 2).bfloat16()
        >>> policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        >>> model = fully_shard(model, mesh=mesh, mp_policy=policy)
        >>> keep_reduced_gradients(model)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.dtype, model.weight.grad.dtype
        (torch.bfloat16, torch.float32)
        >>> dist.destroy_process_group()
    """
    groups = []
    for name, module in model.named_modules():
        for group in parameter_groups(module):
            _check(name, group)
            groups.append(group)
    if not groups:
        raise ValueError(
            "Expected model to have a module sharded by FSDP2, but got none: call "
            "torch.distributed.fsdp.fully_shard(model) first"
        )
    for group in groups:
        _keep(group)


def parameter_groups(module: torch.nn.Module) -> list[Any]:
    """The parameters that FSDP2 gathers and reduces together: one group per mesh of a module it shards."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    # Earlier versions of torch have at most one.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _check(name: str, group: Any) -> None:
    if not hasattr(group, "_init_mp_dtypes"):
        raise RuntimeError(
            f"Expected torch from 2.11 to 2.15, but got {torch.__version__}, whose FSDP2 stores its dtypes elsewhere: "
            "do without keep_reduced_gradients"
        )
    for param in group.fsdp_params:
        policy = param.mp_policy if hasattr(param, "mp_policy") else group.mp_policy  # one per parameter since 2.15
        if policy.reduce_dtype != torch.float32 and param.sharded_param.dtype != torch.float32:
            raise ValueError(
                f"Expected reduce_dtype of module {name!r} to be torch.float32, but got {policy.reduce_dtype}: shard "
                "it with mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def _keep(group: Any) -> None:
    determine = group._init_mp_dtypes
    if hasattr(group, "_init_reduce_scatter_param_order"):  # since torch 2.15, FSDP2 rounds to the parameter's dtype
        for param in group.fsdp_params:  # for gradients, which it otherwise reads before the first forward only
            param.sharded_param.grad_dtype = torch.float32
            param._capture_grad_dtype_policy(param.sharded_param)
        determine()
        group._init_reduce_scatter_param_order()
        return

    def without_rounding() -> None:
        determine()
        group._orig_dtype = None  # FSDP2 rounds to this dtype, if there is one
        for param in group.fsdp_params:
            param.sharded_param.grad_dtype = None  # allows gradients of any dtype

    # FSDP2 determines the dtypes before the first forward, and again whenever parameters were moved or replaced.
    group._init_mp_dtypes = without_rounding
    without_rounding()
