"""Who trains: one process, or the ranks of a DDP or FSDP2 job that torchrun started."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

_T = TypeVar("_T")

STRATEGIES = ("single", "ddp", "fsdp")


class WorldError(ValueError):
    """The strategy, the device and the way the process was started do not fit. The message says what to type."""


@dataclass(frozen=True)
class World:
    """This process's place among all that train together."""

    strategy: str
    device: torch.device
    rank: int = 0
    size: int = 1

    def rows(self, batch: int) -> range:
        """This rank's rows of a global batch of `batch` rows."""
        share = batch // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` over all ranks; a NaN or infinity on any rank stays one."""
        if self.size == 1:
            return values
        values = values.to(self.device)
        dist.all_reduce(values)
        return values / self.size

    def objects(self, value: _T) -> list[_T]:
        """What every rank has of something that can be pickled, in rank order. Tensors are on the CPU."""
        if self.size == 1:
            return [value]
        everyone = [value] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as the strategy trains it. Under FSDP2 each block and the rest are sharded; nothing is cast."""
        if self.strategy == "ddp":
            return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        if self.strategy == "fsdp":
            for block in model.get_submodule("blocks").children():
                fully_shard(block)
            fully_shard(model)
        return model


def _environment(strategy: str) -> tuple[int, int, int]:
    """Rank, world size and local rank as torchrun sets them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise WorldError(
            f"--strategy {strategy} needs the processes torchrun starts, and {', '.join(missing)} is not set; "
            f"type: torchrun --nproc-per-node 2 -m halfstep train --strategy {strategy} …"
        )
    try:
        rank, size, local = (int(os.environ[name]) for name in names[:3])
    except ValueError as error:
        raise WorldError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {error}; start with torchrun"
        ) from error
    return rank, size, local


def check(strategy: str, device: str, batch: int) -> None:
    """Refuse what cannot work, before processes connect.

    Raises:
        WorldError: not started as the strategy needs it, or `batch` does not divide.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise WorldError("--device cuda, but torch finds no GPU on this machine; use --device cpu, or leave it out")
    if strategy == "single":
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise WorldError(
                f"--strategy single, but torchrun started {started} processes; use --strategy ddp or fsdp, "
                "or no torchrun"
            )
        return
    _, size, local = _environment(strategy)
    if batch % size:
        raise WorldError(
            f"--batch {batch} is the global batch and does not divide by {size} processes; "
            f"allowed are multiples of {size}"
        )
    if device != "cpu" and torch.cuda.is_available() and local >= torch.cuda.device_count():
        raise WorldError(
            f"local rank {local} has no GPU of its own: there are {torch.cuda.device_count()}; start that many "
            "processes per node, or use --device cpu"
        )


def reshard(model: nn.Module) -> None:
    """Let go of the whole parameters that FSDP2 keeps after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def world(strategy: str, device: str) -> Iterator[World]:
    """Connect the processes for the length of the block: NCCL on GPUs, gloo on CPUs."""
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if strategy == "single":
        yield World(strategy, torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        return
    rank, size, local = _environment(strategy)
    own = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=own if kind == "cuda" else None)
    try:
        yield World(strategy, own, rank, size)
        dist.barrier()  # a rank that leaves early takes its connections from under the others
    finally:
        gc.collect()  # models hold on to the group in cycles; they must go first
        dist.destroy_process_group()
