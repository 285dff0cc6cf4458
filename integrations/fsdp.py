"""FSDP2: gradients that keep the bits of their reduction, and that are checked while the backward still runs.

With ``MixedPrecisionPolicy(reduce_dtype=torch.float32)`` the ranks' gradients are summed in fp32, and the sum is then
rounded to the dtype of the sharded parameter: with bf16 parameters, to 8 bits. A master could take up those that are
lost. `keep_reduced_gradients` leaves the sum as it is: ``.grad`` of a bf16 parameter is then fp32.

`overlap_overflow_check` has each group of shards checked right after its reduction, on the stream of the reduction.
What is left for `GradScaler.step` is to add up one number per 4096 elements, and to reduce flag and norm over ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from halfstep.integrations.overlap import EarlyCheck, checked_scaler, in_backward
from halfstep.numerics.scaling.gradients import local
from halfstep.numerics.scaling.scaler import GradScaler


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
            f"torch is {torch.__version__}; allowed are versions with Tensor.grad_dtype: update torch, or do without "
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
            "model has no module sharded by FSDP2; allowed are models after torch.distributed.fsdp.fully_shard(model)"
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
            f"torch is {torch.__version__}, whose FSDP2 keeps its dtypes elsewhere; allowed are versions up to 2.14: "
            "do without keep_reduced_gradients"
        )
    reduce_dtype = group.mp_policy.reduce_dtype
    dtypes = {param.sharded_param.dtype for param in group.fsdp_params}
    if reduce_dtype != torch.float32 and dtypes != {torch.float32}:
        raise ValueError(
            f"reduce_dtype of module {name!r} is {reduce_dtype}; allowed is torch.float32: shard it with "
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


# ---------------------------------------------------------------------------------------------------------- the check


def overlap_overflow_check(model: torch.nn.Module, scaler: GradScaler) -> None:
    """Check the shards of each group of gradients as soon as they are reduced, so that `scaler.step` need not.

    Call it after ``fully_shard``, with the model on its device. What is checked is what the optimizer sees: after all
    reductions (HSDP's too), divisions, rounding to the parameters' dtype and accumulation. Flag, flags per parameter
    and norm have the bits of the usual check. Where gradients were changed between backward and `step`, and wherever
    the answer does not cover them all (parameters that FSDP2 ignores, CPU offload, inside a CUDA graph), the scaler
    makes its usual pass over those on the same device and mesh: see `halfstep.integrations.overlap`.

    Args:
        model: with ``fully_shard`` applied to it or to parts of it; its optimizers may still be made.
        scaler: whose `step`, `clip_grad_norm_` and `update` are used; disabled, it does nothing.

    Raises:
        TypeError: `scaler` is not ours.
        ValueError: nothing in the model is sharded by FSDP2.
        RuntimeError: `scaler` was told of the model before, or writes cannot be seen in this torch.
    """
    checked_scaler(scaler)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is sharded by FullyShardedDataParallel (FSDP1), which has no place after its reduction to check at; "
            "allowed is torch.distributed.fsdp.fully_shard; without this call FSDP1's gradients are checked at step"
        )
    groups = [group for module in model.modules() if isinstance(module, FSDPModule) for group in _groups(module)]
    if not groups:
        raise ValueError(
            "model has no module sharded by FSDP2; allowed are models after torch.distributed.fsdp.fully_shard(model); "
            "for DistributedDataParallel use halfstep.integrations.ddp.overlap_overflow_check"
        )
    parameters = [param.sharded_param for group in groups for param in group.fsdp_params]
    known = [early for reference in scaler._early_checks if (early := reference()) is not None]
    if any(early.covers(parameter) for early in known for parameter in parameters):
        raise RuntimeError(
            "scaler was told of this model, or of a part of it, by overlap_overflow_check before; allowed is one call, "
            "with the whole model"
        )
    _count_writes(parameters[0])
    overlap = _Overlap(EarlyCheck(scaler, parameters))
    for group in groups:
        overlap.watch(group)

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            overlap.begin()

    model.register_forward_pre_hook(begin)  # which also keeps `overlap` as long as the model


def _count_writes(parameter: torch.Tensor) -> None:
    """Have ``torch._foreach`` functions count their writes to DTensors, as they do for plain tensors.

    In torch 2.13 they do not: gradients that ``torch.nn.utils.clip_grad_norm_`` has clipped would pass for unchanged.

    Raises:
        RuntimeError: they do not, and it cannot be changed in the way that this torch is known to allow.
    """
    from torch.distributed.tensor import DTensor

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    if _counts_writes(mesh):
        return
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})

    def counting(operation: Any, arguments: Any, named: Any) -> Any:
        handlers.pop(operation, None)  # so that the call goes DTensor's own way
        try:
            return operation(*arguments, **named)
        finally:
            handlers[operation] = counting
            torch.autograd.graph.increment_version(arguments[0])

    for name in dir(torch):
        if name.startswith("_foreach_") and name.endswith("_"):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                handlers.setdefault(getattr(packet, overload), counting)
    if not _counts_writes(mesh):
        raise RuntimeError(
            f"torch is {torch.__version__}, whose DTensors do not count the writes of torch._foreach functions: "
            "changed gradients could not be told; allowed are versions up to 2.13: do without overlap_overflow_check"
        )


@torch.no_grad()
def _counts_writes(mesh: Any) -> bool:
    from torch.distributed.tensor import DTensor, Replicate

    one = torch.zeros(1, dtype=torch.float32, device=mesh.device_type)
    probe = DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False)
    before = probe._version
    torch._foreach_mul_([probe], 1.0)
    return bool(probe._version > before)


class _Overlap:
    """Which reduced gradients wait to be checked together: those of one group, in one launch per dtype."""

    def __init__(self, early: EarlyCheck) -> None:
        self._early = early
        self._waiting: list[torch.Tensor] = []
        self._group: Any = None
        self._queued = False

    def watch(self, group: Any) -> None:
        """Have the group's parameters call when their gradients are in place."""
        # Of offloaded ones the copy to the CPU may still be under way, and a hook would have FSDP2 wait for it.
        if any(param.offload_to_cpu for param in group.fsdp_params):
            return
        # Not `self`: parameters keep their hooks where Python does not look for cycles.
        parameters = [param.sharded_param for param in group.fsdp_params if param.sharded_param.requires_grad]
        hook = partial(_reduced, weakref.ref(self), weakref.ref(group), len(parameters))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Forget what a backward has left that nobody has asked about, or that was broken off."""
        self._early.forget()
        self._waiting.clear()
        self._queued = False

    def reduced(self, group: Any, size: int, parameter: torch.Tensor) -> None:
        """Take in one of the `size` parameters of a group."""
        if self._group is not group:
            self._check()  # parameters without a gradient leave their group incomplete
            self._group = group
        self._waiting.append(parameter)
        if len(self._waiting) == size or not in_backward():
            self._check()
        elif not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._after_finishing)

    def _after_finishing(self) -> None:
        """Queue behind FSDP2's own callback, in which groups may still be reduced."""
        self._queued = False
        Variable._execution_engine.queue_callback(self._check)

    def _check(self) -> None:
        waiting = [parameter for parameter in self._waiting if parameter.grad is not None]
        self._waiting.clear()
        values: Sequence[torch.Tensor] = [local(parameter.grad) for parameter in waiting if parameter.grad is not None]
        if self._early.check(waiting, values):
            for parameter in waiting:
                self._early.seal(parameter)


def _reduced(overlap: weakref.ref[_Overlap], group: weakref.ref[Any], size: int, parameter: torch.Tensor) -> None:
    """The hook on a sharded parameter: its gradient is reduced, rounded and in its place."""
    alive, of = overlap(), group()
    if alive is not None and of is not None:
        alive.reduced(of, size, parameter)
