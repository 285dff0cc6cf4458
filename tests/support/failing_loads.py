"""Two ranks that load checkpoints that do not fit, under FSDP2 and FSDP1, for test_checkpoint_unchanged.py."""

import shutil
import sys
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import storage


def _wrapped(kind: str, value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2)).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    if kind == "FSDP2":
        return fully_shard(model)  # type: ignore[return-value]
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def _bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Any:
    states = [dict(optimizer.state.get(p, {})) for group in optimizer.param_groups for p in group["params"]]
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    content = [[p.detach() for p in model.parameters()], states, groups, scaler.state_dict()]
    return attacks.bits(tree_map_only(DTensor, DTensor.to_local, content))


def _tampered(good: Path, path: Path, name: str) -> None:
    shutil.copytree(good, path)
    if name == "scale":
        attacks.change_json(path, lambda tree: tree["scaler"].update(scale=-1.0))
    elif name == "group":
        attacks.change_json(path, lambda tree: tree["optimizer"]["param_groups"][0].update(lr=-1.0))
    elif name == "shard":
        file = path / "optimizer-00002-of-00002.safetensors"
        attacks.change_header(file, lambda header: header.update(x=header.pop("state.1.weight.exp_avg")))
    attacks.seal(path)


class Unpicklable(Exception):
    """An error that ranks cannot send each other: it is pickled with one argument of two."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


FAULTS: dict[str, Any] = {
    "full disk on rank 1": OSError(28, "No space left on device"),
    "unpicklable on rank 1": Unpicklable("of its own", "kind"),
    "interrupted on rank 1": KeyboardInterrupt(),
    "other parameters on rank 1": None,
    "other state on rank 1": None,
    "a part of the state": None,
}


def saves(rank: int, folder: Path) -> dict[str, tuple[str | None, bool]]:
    """Saves that fail on one rank: the error on each, and whether the earlier checkpoint and nothing else is there."""
    found: dict[str, tuple[str | None, bool]] = {}
    write = storage.write_file
    for asynchronous in (False, True):
        model = _wrapped("FSDP2", 0.5)
        optimizer = attacks.optimizer_of(model)
        run = folder / f"saves {asynchronous}"
        good = checkpoint.save(run, 1, model=model, optimizer=optimizer)
        for name, fault in FAULTS.items():
            if rank == 1 and fault is not None:

                def fail(path: Path, pieces: Any, fault: BaseException = fault) -> Any:
                    raise fault

                storage.write_file = fail
            saved = torch.nn.Linear(rank + 1, 2, bias=bool(rank)) if "parameters" in name else model
            state: dict[str, Any] = {"x": Unpicklable("a", "b") if "other state" in name and rank == 1 else 1}
            if name == "a part of the state":  # whose other part only rank 1 has
                state["x"] = model[0].weight
            error = None
            try:
                pending: Any = checkpoint.save(run, 2, state, model=saved, asynchronous=asynchronous)
                if asynchronous:
                    pending.result()
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
            storage.write_file = write
            dist.barrier()
            found[f"{name}, {asynchronous}"] = error, list(run.iterdir()) == [good]
            dist.barrier()
        checkpoint.load(good, model=model, optimizer=optimizer)
    return found


def run(rank: int, folder: Path) -> dict[str, tuple[str | None, bool]]:
    found: dict[str, tuple[str | None, bool]] = {}
    for kind in ("FSDP2", "FSDP1"):
        model = _wrapped(kind, 0.5)
        good = checkpoint.save(
            folder / kind, 1, model=model, optimizer=attacks.optimizer_of(model), scaler=attacks.scaler_of()
        )
        for name in ("scale", "group", "shard"):
            path = folder / kind / name
            if rank == 0:
                _tampered(good, path, name)
            dist.barrier()
        for name in ("scale", "group", "shard", "rank 1 alone fails", "rank 1 is stopped", "other groups"):
            model = _wrapped(kind, -1.0)
            optimizer = attacks.optimizer_of(model)
            scaler = attacks.scaler_of()
            if name == "other groups":
                optimizer = halfstep.AdamW([{"params": [p]} for p in model.parameters()])
            if name.startswith("rank 1") and rank == 1:

                def late(state: Any, name: str = name) -> None:
                    sys.exit(5) if "stopped" in name else print(1 / 0)

                scaler.load_state_dict = late  # type: ignore[method-assign]
            before = _bits(model, optimizer, scaler)
            path = folder / kind / name if name in ("scale", "group", "shard") else good
            error = None
            try:
                checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
            found[f"{name}, {kind}"] = error, _bits(model, optimizer, scaler) == before
    return found
