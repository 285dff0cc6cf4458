"""Shared by the scripts for several ranks: devices, the process group, data to learn, and whether training worked."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist


def batch(step: int, rank: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic data, different on each rank: a function of 32 inputs to learn."""
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    targets = torch.tanh(inputs[:, :8] + inputs[:, 8:16])
    return inputs.to(device, dtype), targets.to(device)


def run(name: str, train: Callable[[int, torch.device], list[float]]) -> NoReturn:
    """Connect the ranks, train, print the first and the last loss, and end with status 1 if the loss did not halve.

    `train` receives the rank and its device, and returns the losses, or an empty list where it does not know them.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    everyone: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, train(dist.get_rank(), device))
    losses = next(filter(None, everyone))
    if dist.get_rank() == 0:
        print(f"{name}: loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    dist.barrier()  # if a rank left early, its closed connections would be errors on the others
    sys.stdout.flush()
    # Gloo's threads can block the end of their group, and abort a Python that shuts down.
    os._exit(0 if losses[-1] < losses[0] / 2 else 1)
