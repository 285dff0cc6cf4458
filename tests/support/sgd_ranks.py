"""A model, the layouts of SGD, and what ranks of FSDP2 compare for test_sgd.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import halfstep

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}
LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {},
    "split24, 8 bits": {"master_weights": "split24", "state_dtype": "8bit"},
    "bf16 buffer, stochastic": {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
    "no master, stochastic": {"master_weights": None, "rounding": "stochastic"},
    "full": {"master_weights": "full"},
}


def net(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)).to(dtype)


def loss_of(model: torch.nn.Sequential, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 64, generator=generator).to(model[0].weight.dtype)
    return model(inputs).float().square().mean()


def train_scaled(model: torch.nn.Sequential, optimizer: Any, scale: float) -> None:
    scaler = halfstep.GradScaler("cpu", init_scale=scale)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


def of_shards(rank: int) -> dict[str, list[Any]]:
    """For each layout, whether the weights and buffers of FSDP2 on two ranks are those of one process."""
    mesh, results = init_device_mesh("cpu", (2,)), {}
    for name, layout in LAYOUTS.items():
        sharded, whole, tensors = net(), net(), []
        for module in (sharded[0], sharded[2], sharded):
            fully_shard(module, mesh=mesh)
        for model in (sharded, whole):
            optimizer = halfstep.SGD(model.parameters(), max_grad_norm=0.05, **OPTIONS, **layout)
            train_scaled(model, optimizer, 256.0)
            buffers = (optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters())
            tensors.append([*model.parameters(), *buffers])
        results[name] = [torch.equal(shards.full_tensor(), tensor) for shards, tensor in zip(*tensors, strict=True)]
    return results
