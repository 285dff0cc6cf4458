"""The strategies: how model and optimizer are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.cli.train import tensor_parallel
from halfstep.cli.train.world import ThisRank, shard_size
from halfstep.integrations import checkpoint, ddp, zero


def wrap(model: nn.Module, world: ThisRank) -> nn.Module:
    """The model wrapped for the strategy, without casts. FSDP2 shards each block, and the rest."""
    kind = world.device.type
    if world.strategy in ("ddp", "zero1"):
        return DistributedDataParallel(model, device_ids=[world.device] if kind == "cuda" else None)
    if world.strategy in ("fsdp", "hsdp"):
        mesh = init_device_mesh(kind, (world.size,))
        if world.strategy == "hsdp":
            shards = shard_size(world.layout, world.size)
            names = ("replicate", "shard")
            mesh = init_device_mesh(kind, (world.size // shards, shards), mesh_dim_names=names)
        offload = CPUOffloadPolicy(pin_memory=kind == "cuda") if world.layout.cpu_offload else OffloadPolicy()
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, offload_policy=offload)
        fully_shard(model, mesh=mesh, offload_policy=offload)
    if world.strategy == "tp":
        return tensor_parallel.divide(model, init_device_mesh(kind, (world.size,)))
    return model


def compress_gradients(model: nn.Module, world: ThisRank) -> None:
    """Make DDP send the gradients of a wrapped model in the dtype of --compress."""
    if isinstance(model, DistributedDataParallel) and world.layout.compress != "none":
        model.register_comm_hook(model.process_group, ddp.HOOKS[world.layout.compress])


@contextmanager
def backward_of(model: nn.Module, last: bool) -> Iterator[None]:
    """A context for one micro-batch: gradients are not reduced before the last one of the step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_optimizer(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], world: ThisRank, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer of the wrapped model's parameters. Under ZeRO-1 each rank holds a part of its state."""
    if world.strategy == "zero1":
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)
    if world.strategy == "tp" and kind is torch.optim.AdamW:
        options["foreach"] = False  # foreach does not support lists of DTensors and plain tensors
    return kind(groups, **options)


def local_state(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """The state on this rank, by parameter."""
    held: Mapping[Any, Any] = getattr(optimizer, "optim", optimizer).state
    return held


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The complete state of the optimizer on the CPU, at least on the first rank. Collective."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return zero.state_dict(optimizer)
    whole: dict[str, Any] = checkpoint.gather(optimizer.state_dict())
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of `gather_optimizer` under any strategy."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        zero.load_state_dict(optimizer, state)
    else:
        checkpoint.load_optimizer(optimizer, state)


def counts_here(parameter: torch.Tensor, world: ThisRank) -> bool:
    """Whether this rank counts its shard of a parameter. Of several copies, one is counted."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None  # its mesh has all ranks
    return not any(
        at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    )
