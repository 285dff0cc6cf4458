"""The processes of a training: a single process, or the ranks of a torchrun job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

_T = TypeVar("_T")

STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "tp")
COMPRESSIONS = ("none", "fp16", "bf16")


class LaunchError(ValueError):
    """The strategy or the device does not match the way the process was started. The message gives the command."""


@dataclass(frozen=True)
class ExecutionOptions:
    """Options for memory and communication. Checkpoints do not depend on them.

    Args:
        shard_size: ranks over which HSDP shards; 0 for the ranks of a node.
        accumulate: micro-batches per step.
        activation_checkpointing: whether only the inputs of blocks are saved, and blocks recomputed in the backward.
        cpu_offload: whether FSDP2 holds weights, gradients and the state of the optimizer on the CPU.
        compress: dtype in which DDP sends gradients.
    """

    shard_size: int = 0
    accumulate: int = 1
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    compress: Literal["none", "fp16", "bf16"] = "none"


@dataclass(frozen=True)
class ThisRank:
    """This process among all processes of the training."""

    strategy: str
    device: torch.device
    rank: int = 0
    size: int = 1
    layout: ExecutionOptions = ExecutionOptions()

    def rows(self, batch: int) -> range:
        """This rank's rows of a global batch of `batch` rows. Tensor-parallel ranks share all of them."""
        if self.strategy == "tp":
            return range(batch)
        share = batch // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of `values` over all ranks. A NaN or an infinity on any rank is kept."""
        if self.size == 1:
            return values
        values = values.to(self.device)
        dist.all_reduce(values)
        return values / self.size

    def objects(self, value: _T) -> list[_T]:
        """The picklable objects of all ranks, in rank order. Tensors are on the CPU."""
        if self.size == 1:
            return [value]
        everyone = [value] * self.size
        dist.all_gather_object(everyone, value)
        return everyone


def restarts() -> int:
    """The number of times that torchrun has restarted the processes of this job after a failure."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def _environment(strategy: str) -> tuple[int, int, int]:
    """Rank, world size and local rank as torchrun sets them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        partly = (
            f", which sets {', '.join(names)}: here {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
        raise LaunchError(
            f"--strategy {strategy} trains in several processes that torchrun starts"
            f"{partly if len(missing) < len(names) else ''}; type: "
            f"torchrun --nproc-per-node {4 if strategy == 'hsdp' else 2} -m halfstep train --strategy {strategy} …"
        )
    try:
        rank, size, local = (int(os.environ[name]) for name in names[:3])
    except ValueError:
        rank = size = local = -1
    if not (0 <= rank < size and 0 <= local < size):
        given = ", ".join(f"{name}={os.environ[name]}" for name in names[:3])
        raise LaunchError(
            "Expected torchrun's variables to be integers, RANK and LOCAL_RANK from 0 to below WORLD_SIZE, but got "
            f"{given}: start with torchrun, which sets them"
        )
    return rank, size, local


def shard_size(layout: ExecutionOptions, size: int) -> int:
    """The number of ranks, of `size`, over which HSDP shards: the chosen number, or the ranks of a node.

    Raises:
        LaunchError: it does not divide `size`.
    """
    allowed = [number for number in range(2, size) if size % number == 0]
    if not allowed:
        raise LaunchError(
            f"--strategy hsdp needs at least two replicas of at least two shards, which {size} processes cannot form; "
            "type: torchrun --nproc-per-node 4 -m halfstep train --strategy hsdp --shard-size 2 …"
        )
    given = layout.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if given not in allowed:
        what = f"--shard-size {given}" if layout.shard_size else f"--strategy hsdp on nodes of {given} processes"
        raise LaunchError(
            f"{what} does not divide {size} processes into shards and copies; pass --shard-size "
            f"{' or '.join(map(str, allowed))}, or use --strategy fsdp"
        )
    return given


def check(strategy: str, device: str, batch: int, heads: int, layout: ExecutionOptions) -> None:
    """Check the options before the processes connect.

    Args:
        strategy, device, layout: the options.
        batch: windows per step, over all processes.
        heads: attention heads of the model, which tensor parallelism shards.

    Raises:
        LaunchError: options cannot be combined, the process was not started as the strategy requires, or a size is not
            divisible as required.
    """
    for option, given, those in (
        ("--shard-size", layout.shard_size != 0, ("hsdp",)),
        ("--cpu-offload", layout.cpu_offload, ("fsdp", "hsdp")),
        (f"--compress {layout.compress}", layout.compress != "none", ("ddp", "zero1")),
    ):
        if given and strategy not in those:
            raise LaunchError(
                f"expected --strategy {' or '.join(those)} with {option}, but got {strategy}: choose one of these, or "
                f"leave {option} out"
            )
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda, but torch finds no GPU on this machine; use --device cpu, or leave it out")
    if strategy == "single":
        started = os.environ.get("WORLD_SIZE", "1")
        if started != "1":
            raise LaunchError(
                f"--strategy single, but torchrun has started {started} processes; use --strategy "
                f"{', '.join(STRATEGIES[1:-1])} or {STRATEGIES[-1]}, or start without torchrun"
            )
        size = local = 0
    else:
        _, size, local = _environment(strategy)
    if strategy == "hsdp":
        shard_size(layout, size)
    if strategy == "tp":
        if heads % size:
            fitting = [str(number) for number in range(1, heads + 1) if heads % number == 0]
            raise LaunchError(
                f"expected {' or '.join(fitting)} processes with --strategy tp, which divides the model's {heads} "
                f"heads, but got {size}: pass one of these to torchrun's --nproc-per-node, or another --size"
            )
        size = 1  # all ranks use the whole batch
    if size > 1 and batch % size:
        raise LaunchError(
            f"expected --batch, the global batch, to be a multiple of the {size} processes, but got {batch}"
        )
    parts = max(size, 1) * layout.accumulate
    if batch % parts:
        of = f"{size} processes times --accumulate" if size > 1 else "--accumulate"
        raise LaunchError(
            f"expected --batch, the global batch, to be a multiple of {parts} ({of} {layout.accumulate}), but got "
            f"{batch}"
        )
    if device != "cpu" and torch.cuda.is_available() and local >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local} has no GPU of its own: there are {torch.cuda.device_count()}; start that many "
            "processes per node, or use --device cpu"
        )


def _join(backend: str, device: torch.device, rank: int, size: int) -> None:
    """Connect to the other processes."""
    bound = device if device.type == "cuda" else None
    if not restarts() or os.environ.get("GROUP_WORLD_SIZE") != "1":
        dist.init_process_group(backend, device_id=bound)
        return
    # After a restart, torchrun's store still has the addresses of the dead processes. On one node, all ranks know the
    # same number of restarts and use it as a prefix. On several nodes, each torchrun has its own count.
    store, _, _ = next(iter(rendezvous("env://")))
    store = dist.PrefixStore(f"restart {restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)


# Process groups that were left. They are never freed: torch would join the threads of Gloo while it holds the GIL, for
# which a thread that still frees the tensors of the last message waits. The process ends by `os._exit`.
_left: list[Any] = []


@contextmanager
def world(strategy: str, device: str, layout: ExecutionOptions) -> Iterator[ThisRank]:
    """A context in which the processes are connected: with NCCL on GPUs, with Gloo on CPUs."""
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if strategy == "single":
        own = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        yield ThisRank(strategy, own, layout=layout)
        return
    rank, size, local = _environment(strategy)
    own = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(own)
        backend = "cpu:gloo,cuda:nccl" if layout.cpu_offload else "nccl"  # offloaded gradients are reduced on the CPU
    _join(backend, own, rank, size)
    try:
        yield ThisRank(strategy, own, rank, size, layout)
        dist.barrier()  # if a rank left early, its closed connections would be errors on the others
    finally:
        _left.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
