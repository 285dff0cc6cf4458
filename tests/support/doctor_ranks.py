"""A rank of two whose training set-ups the doctor examines, for tests/integrations/distributed/test_doctor.py."""

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


def _flat_in_fp16() -> FullyShardedDataParallel:
    return _flat(mixed_precision=MixedPrecision(param_dtype=FP16, reduce_dtype=FP16))


def _sharded(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = net(dtype)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def _parallel() -> Module:
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Local(torch.optim.SGD):
    """As optimizers that keep the state of this rank's shard as a plain tensor."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.to_local())


class Unsharded(Local):
    """As those of a library that is known to fail."""


Unsharded.__module__ = "bitsandbytes.optim.adamw"


def an_optimizer_from_before() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return at_rest(fully_shard(model), optimizer)


def plain_state_of_shards() -> list[str]:
    model = _sharded()
    optimizer = Local(model.parameters(), lr=0.1)
    optimizer.step()
    return at_rest(model, optimizer)


def at_rest(model: Module, optimizer: Any, scaler: Any = None) -> list[str]:
    """The names of what is found without a step. An optimizer may be a class."""
    if isinstance(optimizer, type):
        optimizer = optimizer(model.parameters(), lr=0.1)
    return doctor(model, optimizer, scaler).names


def clipped(model: Module, optimizer: Any, *scaler: Any, **options: Any) -> list[str]:
    """Clips with torch's function; with a scaler, by the method that FSDP1 has for it."""
    clip = getattr(model, "clip_grad_norm_", None) if scaler else None
    norm = (lambda: clip(1.0)) if clip is not None else (lambda: clip_grad_norm_(model.parameters(), 1.0))
    return examined(model, optimizer(model.parameters(), lr=1e-3), *scaler, clip=norm, **options)


def trained(model: Module, make: Callable[[Any], Any], *scaler: Any, **options: Any) -> list[str]:
    return examined(model, make(model.parameters()), *scaler, **options)


def fused(parameters: Any, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


AdamW, GradScaler = torch.optim.AdamW, torch.amp.GradScaler
HEALTHY: dict[str, Callable[[], list[str]]] = {
    "replicas": lambda: trained(DistributedDataParallel(net(BF16), gradient_as_bucket_view=True), halfstep.AdamW),
    "replicas, clipped": lambda: clipped(DistributedDataParallel(net()), AdamW),
    "ZeRO-1": lambda: trained(DistributedDataParallel(net()), lambda given: ZeroRedundancyOptimizer(given, AdamW)),
    "FSDP2": lambda: clipped(_sharded(), AdamW),
    "FSDP2 in bf16": lambda: trained(_sharded(BF16), lambda given: halfstep.AdamW(given, max_grad_norm=1.0)),
    "FSDP2 in fp16": lambda: trained(
        _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=FP16)),
        AdamW,
        GradScaler("cpu", init_scale=256.0),
        overflow=True,
    ),
    "tensor parallel in fp16": lambda: trained(
        _parallel().half(), halfstep.AdamW, halfstep.GradScaler("cpu", init_scale=256.0), overflow=True
    ),
    "FSDP1 in fp16": lambda: clipped(
        _flat_in_fp16(), AdamW, ShardedGradScaler(device="cpu", init_scale=256.0), overflow=True
    ),
}
# What is reproduced, and the finding that names it.
ISSUES: dict[Callable[[], list[str]], str] = {
    lambda: at_rest(_flat_in_fp16(), torch.optim.SGD, GradScaler("cpu")): "scaler-not-sharded",
    lambda: at_rest(_flat_in_fp16(), torch.optim.SGD): "fp16-without-scaler",
    # pytorch/pytorch#140514
    lambda: at_rest(model := _flat_in_fp16(), fused(model.parameters(), 0.1), ShardedGradScaler(device="cpu")): (
        "fused-under-sharded-scaler"
    ),
    lambda: clipped(_flat(), torch.optim.SGD): "clipped-by-local-norm",
    an_optimizer_from_before: "optimizer-of-other-parameters",  # pytorch/pytorch#149205
    lambda: at_rest(_parallel(), AdamW, GradScaler("cpu")): "scaler-of-one-mesh",
    plain_state_of_shards: "state-not-sharded",
    lambda: at_rest(_sharded(), Unsharded): "optimizer-cannot-shard",  # bitsandbytes #89, #1633
}


def run(rank: int) -> dict[str, list[str]]:
    names = {name: build() for name, build in HEALTHY.items()}
    return names | {finding: build() for build, finding in ISSUES.items()}
