"""A rank that steps shards with stochastic rounding, for tests/integrations/test_optim_stochastic.py.

The ranks do not communicate (torch's fake process group), but each is a separate process, because DTensor caches
values derived from a mesh, including the rank.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import halfstep

WORLD = 4
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "seed": 8,
    "master_weights": None,
    "state_dtype": torch.bfloat16,
    "rounding": "stochastic",
}
SHAPES = ((5, 6, 8), (9, 50, 12))
# Shape of the mesh, and the dimension that each of its dimensions cuts; None: replicated.
CUTS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "rows, uneven, one empty": ((4,), (0,)),
    "columns, uneven": ((4,), (1,)),
    "last": ((4,), (2,)),
    "replicated and rows": ((2, 2), (None, 0)),
    "rows and columns": ((2, 2), (0, 1)),
    "columns and rows": ((2, 2), (1, 0)),
    "rows and last": ((2, 2), (0, 2)),
    "rows twice": ((2, 2), (0, 0)),
    "columns twice": ((2, 2), (1, 1)),
}
CASES = list(zip(CUTS, itertools.cycle(SHAPES), strict=False))
# Moments in 8 bits: rows with a short last block, and columns cut at multiples of 32 elements of a row.
CODED: dict[str, Any] = {"state_dtype": "8bit", "master_weights": "split24", "amsgrad": True}
ROWS = ("rows, uneven, one empty", "replicated and rows", "rows twice")
CODED_CASES = [
    *itertools.product(ROWS, ((33, 300), (5, 40, 40))),
    *itertools.product(("columns, uneven", "rows and columns", "columns twice"), ((9, 1023), (9, 8, 64))),
]
UNFIT = [("columns, uneven", (9, 1000)), ("last", (9, 8, 512)), ("columns twice", (30, 900))]


def gradient(index: int, step: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that depends only on the arguments."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(shape, generator=generator).to(dtype)


def piece(value: torch.Tensor, rank: int, cut: str) -> torch.Tensor:
    """The shard of a rank, split as by torch.chunk, over the first mesh dimension first."""
    mesh_shape, dims = CUTS[cut]
    coordinate = (rank,) if len(mesh_shape) == 1 else divmod(rank, mesh_shape[1])
    for at, ways, dim in zip(coordinate, mesh_shape, dims, strict=True):
        if dim is not None:
            size = value.shape[dim]
            each = -(-size // ways)
            value = value[(slice(None),) * dim + (slice(min(at * each, size), min((at + 1) * each, size)),)]
    return value.contiguous()


def sharded(value: torch.Tensor, rank: int, cut: str) -> Any:
    """`value` as a DTensor of this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh_shape, dims = CUTS[cut]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    mesh = init_device_mesh("cpu", mesh_shape)
    local = piece(value, rank, cut)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


INTERLEAVED = (8, 6, 4)


def interleaved_piece(value: torch.Tensor, rank: int) -> torch.Tensor:
    """The shard of a rank, with rows split over the second mesh dimension first, as in FSDP2 with TP."""
    first, second = divmod(rank, 2)
    each = len(value) // 4
    start = second * 2 * each + first * each
    return value[start : start + each].contiguous()


def interleaved(value: torch.Tensor, rank: int) -> Any:
    """`interleaved_piece` as a DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    mesh = init_device_mesh("cpu", (2, 2))
    local = interleaved_piece(value, rank)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def train(shape: tuple[int, ...], of: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Three steps of the second of two parameters. Returns the shard of the rank."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    first, parameter = torch.nn.Parameter(torch.ones(3).bfloat16()), torch.nn.Parameter(of(start))
    optimizer = halfstep.AdamW([first, parameter], **{**OPTIONS, **options})
    for step in range(3):
        parameter.grad = of(gradient(0, step, shape, torch.bfloat16))
        optimizer.step()
    held = {"parameter": parameter.detach(), **optimizer.state[parameter]}
    return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in held.items()}


def refused() -> list[str]:
    """The errors for shards that are not contiguous ranges: columns, and rows in an interleaved order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    cases = [
        (torch.ones(4, 3, 3), [Shard(1), Shard(2)], (4, 6, 6)),
        (torch.ones(3, 2), [_StridedShard(0, split_factor=2), Shard(0)], (9, 2)),
    ]
    messages = []
    for local, placements, shape in cases:
        stride = torch.empty(shape).stride()
        start = DTensor.from_local(
            local.bfloat16(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        parameter = torch.nn.Parameter(start)
        parameter.grad = torch.ones_like(start)
        try:
            halfstep.AdamW([parameter], **OPTIONS).step()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        assert (parameter.detach()._local_tensor == 1).all()  # type: ignore[attr-defined]
        halfstep.AdamW([parameter], **{**OPTIONS, "rounding": "nearest"}).step()  # the remedy works
    return messages


def refused_codes(rank: int) -> list[str]:
    """The errors for shards that would cut blocks of 8-bit codes."""
    messages = []
    for cut, shape in UNFIT:
        try:
            train(shape, lambda value, cut=cut: sharded(value, rank, cut), **CODED)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        train(shape, lambda value, cut=cut: sharded(value, rank, cut), **{**CODED, "state_dtype": torch.bfloat16})
    return messages


def run(rank: int) -> dict[str, Any]:
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=WORLD)
    steps = {f"{cut} of {shape}": train(shape, lambda v, cut=cut: sharded(v, rank, cut)) for cut, shape in CASES}
    steps["interleaved"] = train(INTERLEAVED, lambda value: interleaved(value, rank))
    coded = {
        f"{cut} of {shape}": train(shape, lambda v, cut=cut: sharded(v, rank, cut), **CODED)
        for cut, shape in CODED_CASES
    }
    codes = (32, 9, 40)
    coded["interleaved"] = train(codes, lambda value: interleaved(value, rank), **CODED)
    return {"steps": steps, "refused": refused(), "coded": coded, "refused codes": refused_codes(rank)}
