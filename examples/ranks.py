"""Shared by the multi-rank examples: connecting the processes, synthetic data, and a check that training worked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
Losses = Iterator[torch.Tensor]


class World(NamedTuple):
    """This process among all processes of a training."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def rows(self, batch: int) -> range:
        share = batch // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of `values` over all ranks. NaN or Inf on any rank is preserved."""
        if self.size == 1:
            return values
        values = values.to(self.device)
        dist.all_reduce(values)
        return values / self.size

    def objects(self, value: T) -> list[T]:
        """The picklable objects of all ranks, in rank order. Tensors must be on the CPU."""
        if self.size == 1:
            return [value]
        everyone = [value] * self.size
        dist.all_gather_object(everyone, value)
        return everyone


def restarts() -> int:
    """How often torchrun has restarted the processes of this job after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def connect(alone: bool = False) -> World:
    """Connect to the other processes, if there are any: with NCCL on GPUs, with Gloo on CPUs."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if alone:
        return World(device)
    rank, size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
    if restarts() and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # torchrun's store still has the addresses of the dead processes. On a single node, all ranks have the same
        # number of restarts, and use it as a prefix. On several nodes, each torchrun has its own count.
        store = dist.PrefixStore(f"restart {restarts()}", next(iter(rendezvous("env://")))[0])
    if on_gpu:
        torch.cuda.set_device(device)
    backend, bound = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
    return World(device, rank, size)


def batch(step: int, rank: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data for learning a function of 32 inputs, different on each rank."""
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    targets = torch.tanh(inputs[:, :8] + inputs[:, 8:16])
    return inputs.to(device, dtype), targets.to(device)


def run(name: str, train: Callable[[int, torch.device], Losses]) -> NoReturn:
    """Connect the ranks, train, print the first and last losses, and exit with status 1 if the loss did not halve.

    `train` takes the rank and its device, and yields the losses, or nothing on ranks that do not have them.
    """
    world = connect()
    mine = [loss.item() for loss in list(train(world.rank, world.device))]  # waits for the device only at the end
    losses = next(filter(None, world.objects(mine)))
    if world.rank == 0:
        print(f"{name}: loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    dist.barrier()  # a rank that exits early closes connections, which are errors on the others
    sys.stdout.flush()
    # Gloo's threads can block the destruction of their group, and abort Python at shutdown.
    os._exit(0 if losses[-1] < losses[0] / 2 else 1)
