"""Single ranks of 1,024, one after the other in one process, under torch's fake process group, which sends nothing.

What a rank would add to a reduction is recorded there. The test adds up what all ranks add, and gives each the sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from counted_bytes import counted
from planned_bytes import GPT, cut
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, debug
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep

WORLD = 1024
# Two rows of the embedding on each rank with FSDP, so that 272 ranks have none, and no rank above 127 has any of the
# block. Five positions are uneven shards with HSDP, where every rank has something.
SHAPE = {"layers": 1, "hidden": 32, "heads": 8, "vocab": 1504, "seq": 5}
SCALE = 4.0
# The dimensions of the mesh by what they do, the last one fastest.
LAYOUTS = {
    "fsdp": {"shard": 1024},
    "hsdp": {"replicate": 128, "shard": 8},
    "fsdp and tp": {"shard": 128, "tensor": 8},
    "hsdp and tp": {"replicate": 16, "shard": 8, "tensor": 8},
}
# The dimension that tensor parallelism divides, by the end of the name.
TENSOR = {
    "embedding.weight": 0,
    "head.weight": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "up.weight": 0,
    "up.bias": 0,
    "out.weight": 1,
    "down.weight": 1,
}


@functools.cache
def whole() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights and their gradients, times the loss scale, on no rank in particular."""
    made = torch.Generator().manual_seed(7)
    shapes = {name: p.shape for name, p in GPT(SHAPE).named_parameters()}
    weights, grads = (
        {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()} for _ in range(2)
    )
    return {name: (weights[name], grads[name] * SCALE) for name in shapes}


def norm_of_whole() -> float:
    """The norm of the unscaled gradient, each element once, in fp64."""
    return math.sqrt(math.fsum((grad.double() / SCALE).square().sum().item() for _, grad in whole().values()))


@contextmanager
def joined(rank: int, layout: str) -> Iterator[DeviceMesh]:
    """The process group of one rank, and its mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    # DTensor keeps what it derived for a mesh, with the groups of the first of all equal meshes. So none are equal.
    debug._clear_sharding_prop_cache()
    names = tuple(f"{name}{rank}" for name in LAYOUTS[layout])
    try:
        yield init_device_mesh("cpu", tuple(LAYOUTS[layout].values()), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def part(mesh: DeviceMesh, layout: str, *names: str) -> DeviceMesh | None:
    """The dimensions of a mesh with these names; None if it has none of them."""
    have = {name: dim for name, dim in zip(LAYOUTS[layout], mesh.mesh_dim_names or (), strict=True)}
    kept = tuple(have[name] for name in names if name in have)
    return mesh[kept] if kept else None


def wrapped(mesh: DeviceMesh, layout: str) -> nn.Module:
    """The model as a user wraps it."""
    model = GPT(SHAPE).bfloat16()
    if (tensor := part(mesh, layout, "tensor")) is not None:
        cut(model, tensor)
    rows = part(mesh, layout, "replicate", "shard")
    for block in model.blocks:
        fully_shard(block, mesh=rows)
    return fully_shard(model, mesh=rows)


def shard_of(value: torch.Tensor, name: str, mesh: DeviceMesh, layout: str) -> torch.Tensor:
    """A rank's part of a tensor, by `torch.chunk`; an empty one if there are fewer chunks."""
    for dim, (kind, ways) in reversed(list(enumerate(LAYOUTS[layout].items()))):
        along = {"tensor": next((d for end, d in TENSOR.items() if name.endswith(end)), None), "shard": 0}.get(kind)
        if along is not None:
            chunks = value.chunk(ways, along)
            at = (mesh.get_coordinate() or [])[dim]
            value = chunks[at] if at < len(chunks) else value.narrow(along, 0, 0)
    return value.clone(memory_format=torch.contiguous_format)


def shards(mesh: DeviceMesh, layout: str, values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """A rank's parameters with their gradients, as DTensors placed as `wrapped` places them, but in little time."""
    made = []
    meshes: dict[tuple[str, ...], DeviceMesh | None] = {}
    for name, pair in values.items():
        cut_too = any(name.endswith(end) for end in TENSOR)
        # A row-parallel layer's bias lies on every tensor-parallel rank; norms and positions are not on that dimension.
        known = cut_too or name.endswith(("out.bias", "down.bias"))
        dims = [kind for kind in LAYOUTS[layout] if kind != "tensor" or known]
        kinds: dict[str, Placement] = {"replicate": Replicate(), "shard": Shard(0)}
        along = next((d for end, d in TENSOR.items() if name.endswith(end)), None)
        kinds["tensor"] = Replicate() if along is None else Shard(along)
        on = meshes.get(tuple(dims)) or meshes.setdefault(tuple(dims), part(mesh, layout, *dims))
        parameter, grad = (
            DTensor.from_local(
                shard_of(value, name, mesh, layout),
                on,
                [kinds[kind] for kind in dims],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
            for value in pair
        )
        parameter.requires_grad_()
        parameter.grad = grad
        made.append(parameter)
    return made


def trained(layout: str, ranks: list[int]) -> list[dict[str, Any]]:
    """The bytes on some ranks after a step of training, their shards, and how those of `shards` differ, if they do."""
    found = []
    for rank in ranks:
        with joined(rank, layout) as mesh:
            model = wrapped(mesh, layout)
            optimizer = halfstep.AdamW(model.parameters(), lr=1e-3)
            scaler = halfstep.GradScaler("cpu", init_scale=SCALE)
            tokens = torch.zeros(2, SHAPE["seq"], dtype=torch.int64)
            with loss_parallel():
                loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
                scaler.scale(loss).backward()
            # What was gathered and reduced is nobody's: set what a reduction would have given.
            values = whole()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    for tensor, value in zip((p, p.grad), values[name], strict=True):
                        tensor._local_tensor.copy_(shard_of(value, name, mesh, layout))
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            quick = shards(mesh, layout, values)
            pairs = list(zip(model.named_parameters(), quick, strict=True))
            found.append(
                {
                    "rank": rank,
                    "bytes": counted(model.parameters(), optimizer),
                    "shards": [p._local_tensor.numel() for p in model.parameters()],
                    "states": [
                        {key: part._local_tensor.numel() for key, part in optimizer.state[p].items() if part.dim()}
                        for p in model.parameters()
                    ],
                    "steps": [int(optimizer.state[p]["step"]) for p in model.parameters()],
                    "others": [
                        name
                        for (name, p), other in pairs
                        if p.device_mesh != other.device_mesh
                        or [one.is_replicate() for one in p.placements]
                        != [one.is_replicate() for one in other.placements]
                        or p._local_tensor.shape != other._local_tensor.shape
                    ],
                }
            )
    return found


@contextmanager
def reductions(answer: Callable[[torch.Tensor, Any], None]) -> Iterator[None]:
    """Every `all_reduce` calls `answer` with its numbers and its group instead."""

    def all_reduce(numbers: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        assert op == dist.ReduceOp.SUM and group.size() == WORLD, (op, group.size())
        answer(numbers, group)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


def steps_of(optimizer: Any) -> list[int]:
    """The step count of each parameter."""
    parameters = optimizer.param_groups[0]["params"]
    return [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in parameters]


def stepped(optimizer: Any, answer: Callable[[torch.Tensor, Any], None]) -> dict[str, Any]:
    """A step with a new scaler: its norm, what it skipped and changed, and the scale afterwards."""
    scaler = halfstep.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))
    parameters = optimizer.param_groups[0]["params"]
    before, steps = [p._local_tensor.clone() for p in parameters], steps_of(optimizer)
    calls = 0

    def counting(numbers: torch.Tensor, group: Any) -> None:
        nonlocal calls
        calls += 1
        answer(numbers, group)

    with reductions(counting):
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    held = [p._local_tensor for p in parameters]
    return {
        "norm": norm.item(),
        "scale": scaler.get_scale(),
        "steps": sorted({after - then for after, then in zip(steps_of(optimizer), steps, strict=True)}),
        "changed": any(not torch.equal(a, b) for a, b in zip(before, held, strict=True)),
        "calls": calls,
    }


def added(layout: str, ranks: list[int], faults: tuple[float, ...]) -> torch.Tensor:
    """What some ranks add to the reduction: without a fault, and with each in the last element of the largest shard.

    Returns:
        (ranks, 1 + faults, 2) in fp64: flags and sums of squares.
    """
    values = whole()
    numbers = torch.zeros(len(ranks), 1 + len(faults), 2, dtype=torch.float64)
    for row, rank in zip(numbers, ranks, strict=True):
        with joined(rank, layout) as mesh:
            parameters = shards(mesh, layout, values)
            largest = max((p.grad._local_tensor for p in parameters), key=torch.Tensor.numel).view(-1)
            optimizer, scaler = halfstep.AdamW(parameters, lr=1e-3), halfstep.GradScaler("cpu", init_scale=SCALE)
            for fault, one in zip((None, *faults), row, strict=True):
                if fault is not None and largest.numel():
                    largest[-1] = fault
                scaler.scale(torch.zeros(()))
                with reductions(lambda found, group, to=one: to.copy_(found)):
                    scaler.clip_grad_norm_(optimizer, 1.0)
                scaler._per_optimizer_states.clear()
    return numbers


@functools.cache
def owned(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What each of the 1,024 ranks should add without a fault, in fp64, and how many elements it holds.

    A copy counts at coordinate 0 of the dimensions along which there are copies.
    """
    ways = tuple(LAYOUTS[layout].values())
    squares, held = torch.zeros(ways, dtype=torch.float64), torch.zeros(ways, dtype=torch.int64)
    for name, (_, grad) in whole().items():
        each = (grad.double() / SCALE).square()
        along = next((d for end, d in TENSOR.items() if name.endswith(end)), None)
        copied = along is None
        parts = [each] if copied else each.chunk(LAYOUTS[layout].get("tensor", 1), along)
        for t, own in enumerate(parts):
            for s, rows in enumerate(own.chunk(LAYOUTS[layout]["shard"])):
                at = {"shard": s, "tensor": slice(None) if copied else t}
                held[tuple(at.get(kind, slice(None)) for kind in LAYOUTS[layout])] += rows.numel()
                first = {"shard": s, "tensor": t}
                squares[tuple(first.get(kind, 0) for kind in LAYOUTS[layout])] += rows.sum()
    return squares.flatten(), held.flatten()


def decided(layout: str, ranks: list[int], sums: torch.Tensor) -> list[list[dict[str, Any]]]:
    """The steps of some ranks, each with every one of these sums as the answer to its reduction."""
    values, found = whole(), []
    for rank in ranks:
        with joined(rank, layout) as mesh:
            optimizer = halfstep.AdamW(shards(mesh, layout, values), lr=1e-3)
            found.append([stepped(optimizer, lambda numbers, group, to=one: numbers.copy_(to)) for one in sums])
    return found


def one_decision(layout: str, ranks: list[int], deciding: list[int], faults: tuple[float, ...]) -> dict[str, Any]:
    """Each fault on each of some ranks, and what other ranks, `deciding`, then do.

    Returns:
        ``added``: that of `added`. ``sums`` (1 + ranks * faults): the index among ``given`` of what the reduction gives
        without a fault, and with each fault on each rank. ``given``: the different sums. ``steps``: that of `decided`.
    """
    found = added(layout, ranks, faults)
    every = torch.stack([torch.zeros(WORLD, dtype=torch.float64), owned(layout)[0]], dim=1)
    every[ranks] = found[:, 0]
    sums = [every.sum(0)]
    for rank, own in zip(ranks, found, strict=True):
        for numbers in own[1:]:
            faulty = every.clone()
            faulty[rank] = numbers
            sums.append(faulty.sum(0))
    # Ranks that receive the same numbers decide the same, so each rank steps once for each different sum.
    bits, of = torch.stack(sums).view(torch.int64).unique(dim=0, return_inverse=True)
    given = bits.view(torch.float64)
    return {"added": found, "sums": of, "given": given, "steps": decided(layout, deciding, given)}


def run(
    _: int, trainings: dict[str, list[int]], decisions: dict[str, list[list[int]]], faults: tuple[float, ...]
) -> dict[str, dict[str, Any]]:
    """`trained` and `one_decision` of layouts with their ranks, in one process."""
    return {
        "trained": {layout: trained(layout, ranks) for layout, ranks in trainings.items()},
        "decided": {layout: one_decision(layout, *ranks, faults) for layout, ranks in decisions.items()},
    }
