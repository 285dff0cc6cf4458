"""FSDP2: send gradients in 16 bits, sum them in fp32, and keep the sums in fp32.

With ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``, FSDP2 converts the ranks' 16-bit gradients to fp32, sends and
sums them in fp32, and then rounds the sum to the dtype of the sharded parameter, which leaves 8 bits of precision in
bf16. `send_gradients_in_16_bits` halves the bytes sent and changes no sum. An optimizer with fp32 masters can use the
bits lost at the end: `keep_reduced_gradients` keeps the sum, so that ``.grad`` of a bf16 parameter is fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from halfstep.kernels.rank_sum import Ranges, sum_and_check, sum_of_ranks
from halfstep.kernels.unscale import PartialCheck
from halfstep.numerics.scaling.early_checks import Request, hand_over
from halfstep.numerics.scaling.sharding import shard_of


def keep_reduced_gradients(model: torch.nn.Module) -> None:
    """Make FSDP2 keep reduced gradients in fp32 instead of rounding them to the parameters' dtype.

    Call this after ``fully_shard`` and before the first step. ``.grad`` of 16-bit parameters is then an fp32 DTensor,
    a view of the reduced buffer: the scaler, clipping and the optimizer see the same fp32 values, gradients accumulate
    in fp32, and nothing is copied. Gradients take 2 more bytes per parameter of the shard; FSDP2 allocates the fp32
    buffer in any case, and would free it after rounding. `halfstep.AdamW` accepts gradients whose dtype differs from
    the parameter's; torch's optimizers may not.

    Args:
        model: a model that ``fully_shard`` was applied to, as a whole or in parts, with
            ``MixedPrecisionPolicy(reduce_dtype=torch.float32)``. HSDP and CPU offload are supported.

    Raises:
        ValueError: FSDP2 shards no part of the model, or reduces a part in another dtype. Nothing is changed.
        RuntimeError: FSDP2 has different internals in this version of torch.

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
    groups = _groups(model, "keep_reduced_gradients")
    for name, group in groups:
        for param in group.fsdp_params:
            _check(name, group, param, param.sharded_param.dtype)
    for _, group in groups:
        _keep(group)


def send_gradients_in_16_bits(
    model: torch.nn.Module, *, round_accumulated: bool = False, check_sums: bool = False
) -> None:
    """Make FSDP2's reduce-scatter send gradients in the dtype of the backward, and sum them in fp32.

    Call this after ``fully_shard``. Each rank sends the parts of its 16-bit gradients to the ranks that have their
    shards (``all_to_all_single``), which sum them in fp32 in rank order. The sums are those of an fp32 reduce-scatter
    that adds in this order, on every backend; each of N ranks sends 2 (N - 1) / N bytes per element instead of
    4 (N - 1) / N. Memory stays the same: two 16-bit buffers, to send and to receive, replace one fp32 buffer.

    Gradients that were accumulated over micro-batches without communication (``set_requires_gradient_sync(False)``) are
    fp32 sums, and are sent in fp32, so that none of their bits is lost. Under HSDP, shards are all-reduced over the
    replicas in fp32 as before.

    Args:
        model: a model that ``fully_shard`` was applied to, as a whole or in parts, with
            ``MixedPrecisionPolicy(reduce_dtype=torch.float32)`` and, unless its parameters have 16 bits, a 16-bit
            ``param_dtype``.
        round_accumulated: also send accumulated gradients in 16 bits, rounded to nearest.
        check_sums: if a scaler or ``max_grad_norm`` of halfstep checks gradients that are unchanged sums, check those
            of later steps as they are computed, with the same bits, so that they are not read again. These gradients
            are DTensors of a derived class until other code accesses their shards.

    Raises:
        ValueError: FSDP2 shards no part of the model, or reduces 16-bit gradients of a part in another dtype, or there
            are no 16-bit gradients. Nothing is changed.
        RuntimeError: FSDP2 has different internals in this version of torch.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        >>> from halfstep.integrations.fsdp import send_gradients_in_16_bits
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = fully_shard(torch.nn.Linear(4, 2), mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
        >>> send_gradients_in_16_bits(model)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> dist.destroy_process_group()
    """
    reduces = []
    for name, group in _groups(model, "send_gradients_in_16_bits"):
        param = group.fsdp_params[0]  # FSDP2 reduces gradients of one dtype together
        dtype = _policy(group, param).param_dtype or param.sharded_param.dtype
        _check(name, group, param, dtype)
        if dtype != torch.float32:
            reduces.append(_Reduce(group, dtype, round_accumulated, check_sums))
    if not reduces:
        raise ValueError(
            "Expected 16-bit gradients in a part of model, but got none: shard it with "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    for reduce in reduces:
        reduce.group.post_backward, reduce.group._reduce_scatter_comm = reduce.post_backward, reduce


class _Reduce(ReduceScatter):
    """The reduce-scatter of a group of parameters."""

    def __init__(self, group: Any, dtype: torch.dtype, round_accumulated: bool, check_sums: bool) -> None:
        self.group, self.dtype = group, dtype
        self.round_accumulated, self.check_sums = round_accumulated, check_sums
        self.reduce = group.post_backward
        self.sent: torch.dtype | None = None  # the dtype of the next buffer, if it differs from FSDP2's
        self.request = Request()  # of a check by the optimizer of these parameters
        self.shards = Ranges([], 0)  # where they were in the last sum
        self.sum: torch.Tensor | None = None  # that of the present reduction
        self.version = 0  # which it had then
        self.checks: list[PartialCheck] | None = []  # of its shards; None if they will be added to other gradients

    def post_backward(self, *unused: Any) -> None:
        """Set the dtype, then call FSDP2's method, which allocates a buffer without telling the gradients' dtype."""
        grads = [unsharded_grad(param) for param in self.group.fsdp_params]
        wide = any(grad.dtype.itemsize > 2 for grad in grads if grad is not None)  # accumulated gradients
        self.sent = None if wide and not self.round_accumulated else self.dtype
        accumulates = any(param.sharded_param.grad is not None for param in self.group.fsdp_params)
        self.checks = None if accumulates else []
        self.reduce(*unused)
        total, self.sum = self.sum, None
        if self.check_sums and total is not None and total._version == self.version:
            self._hand_over(total)

    def _hand_over(self, total: torch.Tensor) -> None:
        """Let the next verdict use the checks of the gradients that are views of the sum."""
        group, parameters = self.group, [param.sharded_param for param in self.group.fsdp_params]
        hooks = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)
        if hooks or group._all_reduce_hook is not None or isinstance(group.mesh_info, DDPMeshInfo):
            return  # they may have written, as HSDP does
        grads = [(grad, shard_of(grad)) for parameter in parameters if (grad := parameter.grad) is not None]
        grads = [(grad, shard) for grad, shard in grads if shard._base is total]
        checks = dict(zip(self.shards.ranges, self.checks or (), strict=False))
        for grad, shard in grads:
            check = checks.get((shard.storage_offset(), shard.numel()))
            hand_over(grad, shard, self.request, check)
            if check is not None:
                grad.__class__ = _Unread
        ranges = sorted((shard.storage_offset(), shard.numel()) for _, shard in grads)
        if ranges and ranges != self.shards.ranges:
            self.shards = Ranges(ranges, total.numel())

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        dtype, self.sent = self.sent or dtype, None
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        # As bytes, because not all backends support 16-bit dtypes.
        dist.all_to_all_single(received.view(torch.uint8), input_tensor.view(torch.uint8), group=group)
        mean, divided = op == dist.ReduceOp.AVG, op == dist.ReduceOp.PREMUL_SUM
        divisor = group.size() if mean else self.group.gradient_divide_factor if divided else 1.0
        parts = received.view(group.size(), -1)
        if self.request.made and self.checks is not None and sum(self.shards.padded) == output_tensor.numel():
            self.checks = sum_and_check(parts, output_tensor, divisor, self.shards, self.request.factor)
        else:
            sum_of_ranks(parts, output_tensor, divisor)
        self.sum, self.version = output_tensor, output_tensor._version


_SHARD: Any = vars(DTensor)["_local_tensor"]


def _read(grad: Any) -> torch.Tensor:
    grad.__class__ = DTensor
    return _SHARD.__get__(grad)


def _assign(grad: Any, shard: torch.Tensor) -> None:
    grad.__class__ = DTensor
    _SHARD.__set__(grad, shard)


# A gradient that was checked, until something accesses its shard: then it is a usual DTensor again. The version of the
# shard does not tell whether it was changed: functions on lists of DTensors, among them torch's `clip_grad_norm_`,
# writes through `.data` and collectives leave it as it is. halfstep's own code increments it, and uses `unread_shard`.
_Unread: Any = type(
    "_Unread",
    (DTensor,),
    {"__slots__": (), "unread_shard": _SHARD, "_local_tensor": property(_read, _assign)},
)


def parameter_groups(module: torch.nn.Module) -> list[Any]:
    """The parameters that FSDP2 gathers and reduces together: one group per mesh of a sharded module."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    # Older versions of torch have at most one group.
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def unsharded_grad(param: Any) -> torch.Tensor | None:
    """The gradient of an FSDP2 parameter before its reduction."""
    if not hasattr(param, "_unsharded_param"):
        return None
    accumulated: torch.Tensor | None = param.unsharded_accumulated_grad  # since torch 2.15, every gradient
    return param.unsharded_param.grad if accumulated is None else accumulated


def _policy(group: Any, param: Any) -> Any:
    return param.mp_policy if hasattr(param, "mp_policy") else group.mp_policy  # one per parameter since torch 2.15


def _groups(model: torch.nn.Module, function: str) -> list[tuple[str, Any]]:
    """The parameter groups of FSDP2 in a model, with the names of their modules."""
    groups = [(name, group) for name, module in model.named_modules() for group in parameter_groups(module)]
    if not groups:
        raise ValueError(
            "Expected model to have a module sharded by FSDP2, but got none: call "
            "torch.distributed.fsdp.fully_shard(model) first"
        )
    for internal in ("_init_mp_dtypes", "_reduce_scatter_comm", "post_backward"):
        if not all(hasattr(group, internal) for _, group in groups):
            raise RuntimeError(
                f"Expected torch 2.11 to 2.15, but got {torch.__version__}, whose FSDP2 has no {internal}: do not call "
                f"{function}"
            )
    return groups


def _check(name: str, group: Any, param: Any, dtype: torch.dtype) -> None:
    """Raise if FSDP2 sums gradients of `dtype` in another dtype than fp32."""
    reduced = _policy(group, param).reduce_dtype
    if torch.float32 not in (reduced, dtype):
        raise ValueError(
            f"Expected reduce_dtype of module {name!r} to be torch.float32, but got {reduced}: shard it with "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )


def _keep(group: Any) -> None:
    determine = group._init_mp_dtypes
    if hasattr(group, "_init_reduce_scatter_param_order"):  # since torch 2.15, FSDP2 rounds to `grad_dtype`
        for param in group.fsdp_params:  # FSDP2 reads it before the first forward only, so make it read it again
            param.sharded_param.grad_dtype = torch.float32
            param._capture_grad_dtype_policy(param.sharded_param)
        determine()
        group._init_reduce_scatter_param_order()
        return

    def without_rounding() -> None:
        determine()
        group._orig_dtype = None  # FSDP2 rounds to this dtype unless it is None
        for param in group.fsdp_params:
            param.sharded_param.grad_dtype = None  # allows gradients of any dtype

    # FSDP2 determines the dtypes before the first forward, and again after parameters were moved or replaced.
    group._init_mp_dtypes = without_rounding
    without_rounding()
