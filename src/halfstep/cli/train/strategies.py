"""What each strategy makes of the model and the optimizer; `ThisRank` says who takes part."""

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
    """The model as the strategy trains it; nothing is cast. Under FSDP2 each block and the rest are sharded."""
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
    """Have DDP send a wrapped model's gradients in the dtype that was asked for."""
    if isinstance(model, DistributedDataParallel) and world.layout.compress != "none":
        model.register_comm_hook(model.process_group, ddp.HOOKS[world.layout.compress])


@contextmanager
def backward_of(model: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch: gradients stay on their rank until the last one of the step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def reshard(model: nn.Module) -> None:
    """Let go of the whole parameters that FSDP2 keeps after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def make_optimizer(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], world: ThisRank, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer over the wrapped model's parameters; under ZeRO-1 each rank has state for its part of them."""
    if world.strategy == "zero1":
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)
    if world.strategy == "tp" and kind is torch.optim.AdamW:
        options["foreach"] = False  # which takes no DTensors beside plain tensors
    return kind(groups, **options)


def local_state(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """The state this process holds, by parameter."""
    held: Mapping[Any, Any] = getattr(optimizer, "optim", optimizer).state
    return held


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state, whole and on the CPU, on the first rank at least. Collective."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return zero.state_dict(optimizer)
    whole: dict[str, Any] = checkpoint.gather(optimizer.state_dict())
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `gather_optimizer` has gathered, under whatever strategy."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        zero.load_state_dict(optimizer, state)
    else:
        checkpoint.load_optimizer(optimizer, state)


def counts_here(parameter: torch.Tensor, world: ThisRank) -> bool:
    """Whether this rank is the one that speaks for the part of a parameter that it holds; others may hold copies."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None  # its mesh has all ranks
    return not any(
        at for at, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate()
    )
