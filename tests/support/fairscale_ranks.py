"""A rank that trains with fairscale's OSS and `halfstep.AdamW`, for tests/integrations/trainers/test_fairscale.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import FullyShardedDataParallel
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from trainer_tools import (
    BROKEN,
    DTYPES,
    LR,
    SAVED,
    STEPS,
    batch,
    broken_backward,
    error,
    network,
    same_bits,
    scaler_for,
    state_of,
)

import halfstep


def made(kind: str, seed: int) -> tuple[Any, ...]:
    model = network(seed).to(DTYPES[kind])
    optimizer = OSS(model.parameters(), optim=halfstep.AdamW, lr=LR)
    # Its own wrapper reduces each gradient to the rank that steps it.
    wrapped = (
        ShardedDataParallel(model, optimizer) if kind == "bf16" else torch.nn.parallel.DistributedDataParallel(model)
    )
    return model, optimizer, wrapped, scaler_for(kind)


def steps(model: Any, optimizer: Any, wrapped: Any, scaler: Any, numbers: range) -> list[Any]:
    found = []
    for step in numbers:
        inputs, targets = batch(step, dist.get_rank())
        loss = error(wrapped(inputs.to(model[0].weight.dtype)), targets)
        optimizer.zero_grad()
        breaks = step == BROKEN and dist.get_rank() == 1 and scaler is not None
        with broken_backward(list(model.parameters())[:1], breaks):
            (loss if scaler is None else scaler.scale(loss)).backward()
        before = [one.detach().clone() for one in model.parameters()]
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        found.append([loss.item(), same_bits(before, [one.detach() for one in model.parameters()])])
    return found


def whole(folder: Path, kind: str) -> dict[str, Any]:
    model, optimizer, wrapped, scaler = made(kind, 0)
    found = steps(model, optimizer, wrapped, scaler, range(SAVED))
    state = {"model": model.state_dict()}
    for rank in range(2):
        optimizer.consolidate_state_dict(rank)  # both ranks take part; this one gets it
        if rank == dist.get_rank():
            state["optimizer"] = optimizer.state_dict()
    state["scaler"] = None if scaler is None else scaler.state_dict()
    torch.save(state, folder / f"{kind}{dist.get_rank()}.pt")
    rest = steps(model, optimizer, wrapped, scaler, range(SAVED, STEPS))
    inputs, targets = batch(0)
    fit = [error(one(inputs.to(DTYPES[kind])), targets).item() for one in (network().to(DTYPES[kind]), model)]
    again, resumed, wrapped_again, new_scaler = made(kind, 1)
    saved = torch.load(folder / f"{kind}{dist.get_rank()}.pt", weights_only=False)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    if new_scaler is not None:
        new_scaler.load_state_dict(saved["scaler"])
    same = steps(again, resumed, wrapped_again, new_scaler, range(SAVED, STEPS)) == rest
    return {
        "fit": fit,
        "held": [held for _, held in found + rest],
        "masters": sorted({str(one["master"].dtype) for one in optimizer.optim.state.values() if "master" in one}),
        "parameters": sum(len(group["params"]) for group in optimizer.optim.param_groups),
        "optimizer": type(optimizer.optim) is halfstep.AdamW,
        "scale": None if scaler is None else scaler.get_scale(),
        "weights": [one.detach().clone() for one in model.parameters()],
        "resumed": same and same_bits(state_of(optimizer.optim), state_of(resumed.optim)),
    }


def refused() -> str:
    """What its FSDP says of weights in bf16."""
    try:
        FullyShardedDataParallel(network().bfloat16(), compute_device=torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def run(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {**{kind: whole(Path(folder), kind) for kind in DTYPES}, "FSDP": refused()}
