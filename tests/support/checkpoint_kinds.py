"""Two ranks that save and load checkpoints of FSDP1, torch's AdamW and CPU offload, for test_checkpoint_kinds.py."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import whole
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.optim.classes import saving

WORLD = 2
BEFORE, AFTER = 3, 2


def model_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def flat(model: torch.nn.Module, use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Train with the same batch on every rank. The mean of two equal gradients is exact."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with warnings.catch_warnings(), saving(optimizer, "canonical"):
        warnings.simplefilter("ignore", FutureWarning)
        state = get_optimizer_state_dict(model, optimizer)["state"]
        return whole({"model": get_model_state_dict(model), "optimizer": state})


def reference(dtype: torch.dtype = torch.bfloat16, begun_by: Any = None) -> list[dict[str, Any]]:
    """The state of one process when the others save, and at the end. `begun_by`: the optimizer that ours continues."""
    model = model_of(dtype)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    first = optimizer if begun_by is None else begun_by(model.parameters(), lr=1e-2)
    train(model, first, 0, BEFORE)
    saved = state_of(model, first)
    if begun_by is not None:
        optimizer.load_state_dict(first.state_dict())
    train(model, optimizer, BEFORE, BEFORE + AFTER)
    return [saved, state_of(model, optimizer)]


# With offload_to_cpu, torch's default here, all states of a parameter become one on CPUs: see `torchs_full_state`.
KINDS: dict[str, tuple[StateDictType, Any, Any]] = {
    "full": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False),
        FullOptimStateDictConfig(offload_to_cpu=False),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}


def by_fsdp1(kind: str, use_orig_params: bool) -> dict[str, Any]:
    """State dicts of FSDP1's functions: their content, the state after loading, and the state after further steps."""
    model = flat(model_of(), use_orig_params)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, BEFORE)
    fresh = flat(model_of(seed=1), use_orig_params)
    other = halfstep.AdamW(fresh.parameters(), lr=5.0)
    with FullyShardedDataParallel.state_dict_type(model, *KINDS[kind]):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
        saved = whole({"model": weights, "optimizer": state["state"]})
    with FullyShardedDataParallel.state_dict_type(fresh, *KINDS[kind]):
        fresh.load_state_dict(weights)
        other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(fresh, other, state))
    loaded = state_of(fresh, other)
    train(fresh, other, BEFORE, BEFORE + AFTER)
    return {"saved": saved, "loaded": loaded, "end": state_of(fresh, other)}


def _wrapped(name: str, model: torch.nn.Module) -> torch.nn.Module:
    if name == "FSDP2":
        return fully_shard(model)
    if name == "FSDP2, CPU offload":
        return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if name == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    return flat(model, use_orig_params=name == "FSDP1, original parameters")


WRAPS = ("FSDP1, flat", "FSDP1, original parameters", "DDP", "FSDP2", "FSDP2, CPU offload")


def between(folder: Path) -> dict[str, Any]:
    """Save with each wrapping and load with the next, half of them in the background."""
    for number, name in enumerate(WRAPS):
        model = _wrapped(name, model_of())
        optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 0, BEFORE)
        pending = checkpoint.save(
            folder / name,
            BEFORE,
            model=model,
            optimizer=optimizer,
            optimizer_state="canonical",  # FSDP1 loads nothing else
            asynchronous=bool(number % 2),
        )
        train(model, optimizer, BEFORE, BEFORE + 1)  # must not reach what is being written
        if not isinstance(pending, Path):
            pending.result()
    found = {}
    for source, name in zip(WRAPS, (*WRAPS[1:], WRAPS[0]), strict=True):
        model = _wrapped(name, model_of(seed=1))
        optimizer = halfstep.AdamW(model.parameters(), lr=5.0)
        checkpoint.load(folder / source / f"step-{BEFORE:08d}", model=model, optimizer=optimizer)
        loaded = state_of(model, optimizer)
        train(model, optimizer, BEFORE, BEFORE + AFTER)
        found[f"{source} -> {name}"] = {"loaded": loaded, "end": state_of(model, optimizer)}
    return found


def from_torch(folder: Path) -> dict[str, Any]:
    """torch's AdamW under FSDP2, saved by torch, and continued by ours after loading with torch and with halfstep."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = fully_shard(model_of(dtype))
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, theirs, 0, BEFORE)
        saved = state_of(model, theirs)
        path = folder / str(dtype)
        dcp.save(
            {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, theirs)},
            checkpoint_id=path,
        )
        for way in ("ours", "torch"):
            fresh = fully_shard(model_of(dtype, seed=1))
            optimizer = halfstep.AdamW(fresh.parameters(), lr=5.0)
            if way == "ours":
                checkpoint.load(path, model=fresh, optimizer=optimizer)
            else:
                set_from_torch(path, fresh, optimizer)
            loaded = state_of(fresh, optimizer)
            train(fresh, optimizer, BEFORE, BEFORE + AFTER)
            found[str(dtype), way] = {"saved": saved, "loaded": loaded, "end": state_of(fresh, optimizer)}
            found[str(dtype), way]["lr"] = optimizer.param_groups[0]["lr"]
    return found


def set_from_torch(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load with only the entries that the file has: no masters, and no options that torch's AdamW lacks."""
    with saving(optimizer, "canonical"):
        state: Any = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    for entry in state["optimizer"]["state"].values():
        entry.pop("master", None)
    for group in state["optimizer"]["param_groups"]:
        for name in ("seed", "master_weights", "state_dtype", "rounding"):
            group.pop(name)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def run(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "FSDP1": {(kind, orig): by_fsdp1(kind, orig) for kind in KINDS for orig in (True, False)},
        "between": between(folder / "between"),
        "torch": from_torch(folder / "torch"),
    }
