"""A rank of two that trains with all pairings of optimizer, scaler and strategy, for test_pairings.py.

For each pairing, a small model takes three steps, once with unscaling in `step` and once with `unscale_` before it. In
the second step a gradient has an Inf: in the shard of the last rank if gradients are sharded, otherwise in all copies,
as after a reduction. The test compares the weights, scales and step counts of all ranks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.numerics.scaling.sharding import local

WORLD = 2
STEPS, BROKEN = 3, 1

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "halfstep.AdamW": partial(halfstep.AdamW, lr=0.01),
    "torch.optim.AdamW": partial(torch.optim.AdamW, lr=0.01),
    "torch.optim.AdamW(fused=True)": partial(torch.optim.AdamW, lr=0.01, fused=True),
}
SCALERS: dict[str, Callable[..., Any]] = {
    "halfstep.GradScaler": halfstep.GradScaler,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "ShardedGradScaler": ShardedGradScaler,
}


def fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


STRATEGIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "one process": lambda model: model,
    "DDP": DistributedDataParallel,
    "FSDP1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
    "FSDP2": fsdp2,
}
SHARDED = ("FSDP1", "FSDP2")
# torch's scaler combines no flags over the ranks of FSDP1.
PAIRS = [
    (optimizer, scaler, strategy)
    for optimizer in OPTIMIZERS
    for scaler in SCALERS
    for strategy in STRATEGIES
    if "halfstep" in optimizer + scaler and (scaler, strategy) != ("torch.amp.GradScaler", "FSDP1")
]


def train(model: torch.nn.Module, optimizer: Any, scaler: Any, strategy: str, unscale: bool) -> str:
    """Three steps, the second with an Inf. The control, whose scaler is disabled, omits the second step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(inputs).square().mean()).backward()
        if step == BROKEN and not scaler.is_enabled():
            continue
        if step == BROKEN and (strategy not in SHARDED or dist.get_rank() == WORLD - 1):
            held = [local(p.grad) for p in model.parameters() if p.grad is not None and local(p.grad).numel()]
            held[0].view(-1)[0] = float("inf")
        try:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        except RuntimeError as caught:
            return str(caught)
        scaler.update()
    return ""


def bare() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))


def cell(optimizer_name: str, scaler_name: str, strategy: str, unscale: bool) -> dict[str, Any]:
    """The outcome of one pairing on this rank: flat shard of the weights, step counts, scale, and the error."""
    model = STRATEGIES[strategy](bare())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = SCALERS[scaler_name]("cpu", init_scale=8.0)
    error = train(model, optimizer, scaler, strategy, unscale)
    steps = {float(local(state["step"])) for state in optimizer.state.values() if "step" in state}
    weights = [local(p.detach()).reshape(-1).clone() for p in model.parameters()]
    return {"weights": weights, "steps": sorted(steps), "scale": scaler.get_scale(), "error": error}


def control() -> list[torch.Tensor]:
    """The weights of one process after the steps without the one that overflows, without a scaler."""
    model = bare()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), halfstep.GradScaler("cpu", enabled=False), "", False)
    return [p.detach().reshape(-1) for p in model.parameters()]


def norms_below_the_limit() -> dict[str, list[torch.Tensor]]:
    """The norms that clipping under FSDP2 returns, with torch and with our scaler, by parameter dtype.

    Each of torch's optimizers unscales the gradients in place once more. The limit is too large to change them.
    """
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = fsdp2(bare().to(dtype))
        scaler = halfstep.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(3, 4, dtype=dtype)).float().mean()).backward()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)]
        for make in OPTIMIZERS.values():
            scaler.scale(torch.zeros(()))
            optimizer = make(model.parameters())
            norms.append(scaler.clip_grad_norm_(optimizer, 1e6))
            scaler.step(optimizer)
            scaler.update()
        found[str(dtype)] = [getattr(norm, "full_tensor", lambda norm=norm: norm)().clone() for norm in norms]
    return found


def run(rank: int) -> dict[Any, Any]:
    warnings.simplefilter("ignore")  # of FSDP: no accelerator, deprecated
    logging.disable(logging.WARNING)
    found: dict[Any, Any] = {(*pair, unscale): cell(*pair, unscale) for pair in PAIRS for unscale in (False, True)}
    found["control"] = control()
    found["norms"] = norms_below_the_limit()
    return found
