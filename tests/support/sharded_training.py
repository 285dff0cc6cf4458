"""A rank of two that trains under FSDP2, for tests/integrations/test_sharded.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import halfstep

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


STOCHASTIC: dict[str, Any] = {
    "lr": 1e-2,
    "seed": 5,
    "master_weights": None,
    "state_dtype": torch.bfloat16,
    "rounding": "stochastic",
}


def model_of(dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    # 7 rows over 2 ranks: uneven shards; the one-element bias leaves rank 1 with none of it.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def backward(model: torch.nn.Module, scaler: Any, step: int, dtype: torch.dtype) -> None:
    """A backward with the same batch on every rank, so that the mean is the gradient of one process."""
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
    scaler.scale(model(inputs).float().square().mean()).backward()


def run(rank: int) -> dict[str, Any]:
    return {
        "overflow": overflow_on_one_rank(rank),
        "norm": clipped_norm(),
        "resumed": save_and_resume(),
        "stochastic": stochastic_steps(shard=True),
    }


def overflow_on_one_rank(rank: int) -> dict[str, Any]:
    """The outcome on this rank of an Inf in the shard of rank 1."""
    model = fully_shard(model_of(torch.bfloat16))
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scales, changed = [], []
    for step in range(3):
        optimizer.zero_grad()
        backward(model, scaler, step, torch.bfloat16)
        if step == 1 and rank == 1:
            next(model.parameters()).grad._local_tensor.view(-1)[0] = float("inf")
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = [p.to_local() for p in model.parameters()]
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return {"scales": scales, "changed": changed}


def clipped_norm() -> float:
    model = fully_shard(model_of(torch.float32))
    optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=0.1)
    backward(model, halfstep.GradScaler("cpu", enabled=False), 0, torch.float32)
    optimizer.step()
    assert optimizer.grad_norm is not None
    return float(optimizer.grad_norm)


def stochastic_steps(shard: bool) -> dict[str, torch.Tensor]:
    """Unsharded parameters after three steps with stochastic rounding, sharded or not."""
    model = model_of(torch.bfloat16)
    if shard:
        model = fully_shard(model)
    optimizer = halfstep.AdamW(model.parameters(), **STOCHASTIC)
    for step in range(3):
        # Whole gradients that are the same everywhere, so that nothing but the rounding can differ.
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            grad = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements) if shard else grad
        optimizer.step()
    return {name: getattr(p.detach(), "full_tensor", p.detach)() for name, p in model.named_parameters()}


def save_and_resume() -> dict[str, Any]:
    """Five steps, a full checkpoint, a new model and five more steps, compared with ten steps."""
    model = fully_shard(model_of(torch.bfloat16))
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    scaler = halfstep.GradScaler("cpu", enabled=False)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, scaler, step, torch.bfloat16)
        optimizer.step()
    saved = (get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL))
    payload = [saved]
    dist.broadcast_object_list(payload, src=0)  # full state dicts are filled on rank 0 only
    fresh = fully_shard(model_of(torch.bfloat16, seed=1))
    other = halfstep.AdamW(fresh.parameters(), lr=5.0)
    set_model_state_dict(fresh, payload[0][0], options=StateDictOptions(full_state_dict=True))
    set_optimizer_state_dict(fresh, other, payload[0][1], options=StateDictOptions(full_state_dict=True))
    for m, o in ((model, optimizer), (fresh, other)):
        for step in range(5, 10):
            o.zero_grad()
            backward(m, scaler, step, torch.bfloat16)
            o.step()
    runs = ((model, optimizer), (fresh, other))
    optimizer.state_dict_format = other.state_dict_format = "canonical"
    ends = [get_optimizer_state_dict(m, o, options=FULL).get("state") for m, o in runs]
    return {"uninterrupted": ends[0], "resumed": ends[1]}
