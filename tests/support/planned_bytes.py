"""Processes whose memory and messages are counted, for test_planning_sharded.py."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from counted_bytes import Messages, counted, storage_bytes
from gpt import GPT, Block, Precision, shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.numerics.planning import Transformer

WORLD = 2
# Every strategy trains this one. Five positions are uneven shards, of which the last of four ranks has none, and the
# eight elements of a norm even ones.
SHAPE = shape(layers=2, width=8, heads=2, context=5)
CODED = replace(SHAPE, hidden=40)  # matrices of more than 4,096 elements, and smaller ones
PLAIN = Precision("fp32", torch.float32, emulated=False)
BATCH = 3


def of_muon(model: nn.Module) -> list[dict[str, Any]]:
    """As `halfstep.muon_groups` makes them of models whose embedding has a usual name."""
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in matrices)]
    return [{"params": matrices}, {"params": others, "algorithm": "adamw"}]


def strategies(mesh: Any) -> dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]]:
    """The wrapped GPT and its optimizer under each strategy."""
    ours = partial(halfstep.AdamW, lr=1e-3)

    def replicated(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(GPT(SHAPE, PLAIN, seed=0).to(dtype))
        return model, ours(model.parameters())

    def zero1(
        shape: Transformer = SHAPE,
        dtype: torch.dtype = torch.bfloat16,
        kind: type[torch.optim.Optimizer] = halfstep.AdamW,
        **options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(GPT(shape, PLAIN, seed=0).to(dtype))
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=1e-3, **options)

    def sharded(
        dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer] = ours, shape: Transformer = SHAPE, **policy: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        groups = of_muon if getattr(make, "func", None) is halfstep.Muon else nn.Module.parameters
        model = GPT(shape, PLAIN, seed=0).to(dtype)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        return fully_shard(model, mesh=mesh, **policy), make(groups(model))

    def fsdp1() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, units = GPT(SHAPE, PLAIN, seed=0).bfloat16(), ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=False
        )
        return model, ours(model.parameters())

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    coded, muon = partial(ours, state_dtype="8bit"), partial(halfstep.Muon, lr=1e-3)
    return {
        "ddp": partial(replicated, torch.bfloat16),
        "ddp, fp32": partial(replicated, torch.float32),
        "zero1-torch": zero1,
        "zero1-torch, 8bit": partial(zero1, CODED, state_dtype="8bit"),
        "zero1-torch, torch": partial(zero1, SHAPE, torch.float32, torch.optim.AdamW),
        "fsdp": partial(sharded, torch.bfloat16),
        "fsdp, fp16": partial(sharded, torch.float16),
        "fsdp, 8bit": partial(sharded, torch.bfloat16, coded, CODED),
        "fsdp, torch": partial(sharded, torch.float32, torch.optim.AdamW),
        "fsdp, fp32 gathered as bf16": partial(sharded, torch.float32, mp_policy=mixed),
        "fsdp1": fsdp1,
        "fsdp, muon": partial(sharded, torch.bfloat16, muon),
        "fsdp, muon, 8bit": partial(sharded, torch.bfloat16, partial(muon, state_dtype="8bit"), CODED),
    }


def backward(model: nn.Module, scaler: halfstep.GradScaler) -> None:
    tokens = torch.randint(256, (BATCH, SHAPE.seq + 1))
    scaler.scale(model(tokens[:, :-1], tokens[:, 1:])).backward()


def under_ddp(view: bool) -> dict[str, int]:
    """Bytes of gradients, of these and buckets, and of reductions. Shared storages count once."""
    model = DistributedDataParallel(GPT(SHAPE, PLAIN, seed=0).bfloat16(), gradient_as_bucket_view=view)
    buckets: list[torch.Tensor] = []

    def keep(state, bucket):  # DDP compares annotations with its classes, and here they are text
        buckets.append(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, keep)
    for _ in range(2):  # the buckets are rebuilt after the first backward
        buckets.clear()
        model.zero_grad()
        backward(model, halfstep.GradScaler("cpu"))
    gradients = [p.grad for p in model.parameters()]
    reduced = sum(bucket.numel() * bucket.element_size() for bucket in buckets)
    return {
        **{"gradients": storage_bytes(gradients), "gradients and buckets": storage_bytes([*gradients, *buckets])},
        "reduced": reduced,
    }


def one_step(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, Any]:
    """The bytes on a rank after its third step, and every collective of that step, with clipping and a loss scale."""
    model, optimizer = make()
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    for _ in range(3):  # DDP builds its buckets in the first, and optimizers their states
        with Messages() as seen:
            optimizer.zero_grad()
            backward(model, scaler)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    held = counted(model.parameters(), getattr(optimizer, "optim", optimizer))
    if isinstance(optimizer, halfstep.Muon):
        held["scratch"] = storage_bytes(optimizer._plans.scratch)
    return {"held": held, "sent": {name: math.ceil(size) for name, size in seen.sent.items()}}


@contextmanager
def joined(rank: int, world: int, port: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
        gc.collect()  # as in rank_processes.py
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_two() -> dict[str, Any]:
    made = strategies(init_device_mesh("cpu", (WORLD,)))
    buckets = {"ddp": under_ddp(view=False), "ddp view": under_ddp(view=True)}
    return {**buckets, "strategies": {name: one_step(make) for name, make in made.items()}}


def on_four() -> dict[str, Any]:
    """Trainings on four ranks: HSDP in two groups of two, and strategies for any number of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = strategies(init_device_mesh("cpu", (2 * WORLD,)))
    results = {name.replace("fsdp", "hsdp"): one_step(strategies(mesh)[name]) for name in ("fsdp", "fsdp, muon")}
    return results | {f"{name} on 4": one_step(made[name]) for name in ("zero1-torch", "fsdp", "fsdp, muon")}


def run(rank: int, ports: list[int]) -> dict[str, Any]:
    """The first two processes alone, then all four."""
    result: dict[str, Any] = {"strategies": {}}
    if rank < WORLD:
        with joined(rank, WORLD, ports[0]):
            result = on_two()
    with joined(rank, 2 * WORLD, ports[1]):
        result["strategies"] |= on_four()
    return result


def measured() -> list[dict[str, Any]]:
    """The counts of each of the four ranks."""
    with rank_processes.ports(2) as ports:
        return rank_processes.run(run, 2 * WORLD, ports, join=False)
