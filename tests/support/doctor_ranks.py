"""A rank of two whose training set-ups the doctor examines, for tests/integrations/distributed/test_doctor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import LayerNorm, Linear, Module, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep.integrations.doctor import doctor, watch

WORLD = 2
BF16, FP16 = torch.bfloat16, torch.float16


def net(dtype: torch.dtype = torch.float32) -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(8, 16), Tanh(), Linear(16, 8), LayerNorm(8)).to(dtype)


def examined(
    model: Module,
    optimizer: Any,
    scaler: Any = None,
    clip: Callable[[], Any] | None = None,
    steps: int = 3,
    overflow: bool = False,
) -> list[str]:
    """The names of what is found before, in and after some steps, of which rank 1 may overflow in the second."""
    found = doctor(model, optimizer, scaler).names
    with watch(model, optimizer, scaler) as watched:
        for step in range(steps):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            factor = float("inf") if overflow and step == 1 and dist.get_rank() == 1 else 1.0
            loss = model(inputs.to(next(model.parameters()).dtype)).float().square().mean() * factor
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None and clip is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip()
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
    return found + watched.diagnosis.names + doctor(model, optimizer, scaler).names


def _flat(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True, **options)


def _in_fp16() -> Any:
    return MixedPrecision(param_dtype=FP16, reduce_dtype=FP16)


def _sharded(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = net(dtype)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def _parallel() -> Module:
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def replicas() -> list[str]:
    model = DistributedDataParallel(net(BF16), gradient_as_bucket_view=True)
    return examined(model, halfstep.AdamW(model.parameters()))


def replicas_clipped() -> list[str]:
    model = DistributedDataParallel(net())
    return examined(model, torch.optim.AdamW(model.parameters()), clip=lambda: clip_grad_norm_(model.parameters(), 1.0))


def zero1() -> list[str]:
    model = DistributedDataParallel(net())
    return examined(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW))


def fsdp2() -> list[str]:
    model = _sharded()
    return examined(model, torch.optim.AdamW(model.parameters()), clip=lambda: clip_grad_norm_(model.parameters(), 1.0))


def fsdp2_in_bf16() -> list[str]:
    model = _sharded(BF16)
    return examined(model, halfstep.AdamW(model.parameters(), max_grad_norm=1.0))


def fsdp2_in_fp16() -> list[str]:
    model = _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    return examined(model, torch.optim.AdamW(model.parameters()), scaler, overflow=True)


def tensor_parallel_in_fp16() -> list[str]:
    model = _parallel().half()
    scaler = halfstep.GradScaler("cpu", init_scale=256.0)
    return examined(model, halfstep.AdamW(model.parameters()), scaler, overflow=True)


def fsdp1_in_fp16() -> list[str]:
    model = _flat(mixed_precision=_in_fp16())
    scaler = ShardedGradScaler(device="cpu", init_scale=256.0)
    optimizer = torch.optim.AdamW(model.parameters())
    return examined(model, optimizer, scaler, clip=lambda: model.clip_grad_norm_(1.0), overflow=True)


def fsdp1_with_torchs_scaler() -> list[str]:
    model = _flat(mixed_precision=_in_fp16())
    return doctor(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")).names


def fsdp1_without_a_scaler() -> list[str]:
    model = _flat(mixed_precision=_in_fp16())
    return doctor(model, torch.optim.SGD(model.parameters(), lr=0.1)).names


def fsdp1_with_a_fused_optimizer() -> list[str]:
    model = _flat(mixed_precision=_in_fp16())
    scaler = ShardedGradScaler(device="cpu")
    return doctor(model, torch.optim.AdamW(model.parameters(), fused=True), scaler).names


def fsdp1_clipped_by_shards() -> list[str]:
    model = _flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return examined(model, optimizer, clip=lambda: clip_grad_norm_(model.parameters(), 1.0))


def an_optimizer_from_before() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    return doctor(model, optimizer).names


def tensor_parallel_with_torchs_scaler() -> list[str]:
    model = _parallel()
    return doctor(model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")).names


class Local(torch.optim.SGD):
    """As optimizers that keep the state of this rank's shard as a plain tensor."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.to_local())


def plain_state_of_shards() -> list[str]:
    model = _sharded()
    optimizer = Local(model.parameters(), lr=0.1)
    optimizer.step()
    return doctor(model, optimizer).names


def an_optimizer_that_cannot_shard() -> list[str]:
    Local.__module__ = "bitsandbytes.optim.adamw"
    try:
        model = _sharded()
        return doctor(model, Local(model.parameters(), lr=0.1)).names
    finally:
        Local.__module__ = __name__


HEALTHY = [
    replicas,
    replicas_clipped,
    zero1,
    fsdp2,
    fsdp2_in_bf16,
    fsdp2_in_fp16,
    tensor_parallel_in_fp16,
    fsdp1_in_fp16,
]
# What is reproduced, and the finding that names it.
ISSUES = {
    fsdp1_with_torchs_scaler: "scaler-not-sharded",
    fsdp1_without_a_scaler: "fp16-without-scaler",
    fsdp1_with_a_fused_optimizer: "fused-under-sharded-scaler",  # pytorch/pytorch#140514
    fsdp1_clipped_by_shards: "clipped-by-local-norm",
    an_optimizer_from_before: "optimizer-of-other-parameters",  # pytorch/pytorch#149205
    tensor_parallel_with_torchs_scaler: "scaler-of-one-mesh",
    plain_state_of_shards: "state-not-sharded",
    an_optimizer_that_cannot_shard: "optimizer-cannot-shard",  # bitsandbytes #89, #1633
}


def run(rank: int) -> dict[str, list[str]]:
    return {build.__name__: build() for build in [*HEALTHY, *ISSUES]}
