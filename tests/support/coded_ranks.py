"""Two ranks that train with moments in 8 bits under FSDP2, for tests/integrations/distributed/test_coded_shards.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.optim.state import MOMENTS, decoded

WORLD = 2
BEFORE, AFTER = 3, 2
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "state_dtype": "8bit",
    "master_weights": "split24",
    "rounding": "stochastic",
    "amsgrad": True,
}


def model_of() -> torch.nn.Module:
    """Matrices of an odd number of rows, which two ranks share unevenly; one with short last blocks, one small one."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(300, 33), torch.nn.Tanh(), torch.nn.Linear(33, 257, bias=False), torch.nn.Linear(257, 2)
    return torch.nn.Sequential(*layers).bfloat16()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients that depend on its number and the parameter alone."""
    for index, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * number + index)).bfloat16()
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad
    optimizer.step()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The unsharded parameters and moments. Collective."""
    found = [whole(p.detach()).float() for p in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        # Not as they lie in memory: of the same moments, some blocks have several codes, and gloo gathers no 16 bits.
        found += [whole(decoded(state, key, parameter)) for key in MOMENTS]
    return [one.clone() for one in found]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: Any) -> None:
    for number in numbers:
        step(model, optimizer, number)


def refused() -> str:
    """The error of FSDP1."""
    model = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"))
    optimizer = halfstep.AdamW(model.parameters(), **OPTIONS)
    model(torch.ones(2, 300).bfloat16()).float().sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def run(rank: int, folder: Path) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [0, 1])

    def sharded() -> tuple[torch.nn.Module, halfstep.AdamW]:
        model = fully_shard(model_of(), mesh=mesh)
        return model, halfstep.AdamW(model.parameters(), **OPTIONS)

    model, optimizer = sharded()
    steps(model, optimizer, range(BEFORE))
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[next(model.parameters())].items()}
    before = held(model, optimizer)
    checkpoint.save(folder / "ours", BEFORE, model=model, optimizer=optimizer, optimizer_state="canonical")
    weights = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder / "torch")
    steps(model, optimizer, range(BEFORE, BEFORE + AFTER))

    ours, resumed = sharded()
    path = checkpoint.newest(folder / "ours")
    assert path is not None
    checkpoint.load(path, model=ours, optimizer=resumed)
    loaded = held(ours, resumed)
    steps(ours, resumed, range(BEFORE, BEFORE + AFTER))

    theirs, other = sharded()
    state = {"model": get_model_state_dict(theirs), "optimizer": get_optimizer_state_dict(theirs, other)}
    dcp.load(state, checkpoint_id=folder / "torch")
    set_model_state_dict(theirs, state["model"])
    set_optimizer_state_dict(theirs, other, state["optimizer"])
    steps(theirs, other, range(BEFORE, BEFORE + AFTER))
    result = {
        "shapes": shapes,
        "before": before,
        "loaded": loaded,
        "after": held(model, optimizer),
        "ours": held(ours, resumed),
        "torch": held(theirs, other),
        "weights": weights,
        "refused": refused(),
    }
    dist.barrier()
    return result
