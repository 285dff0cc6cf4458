"""Shards that are stepped with stochastic rounding, and those that cannot be: cases of one of four ranks.

The ranks communicate nothing.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from errors import error_of
from states import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep

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
INTERLEAVED = "rows, over the second dimension first"  # as in FSDP2 with tensor parallelism
# Moments in 8 bits: rows with a short last block, and columns cut at multiples of 32 elements of a row.
CODED: dict[str, Any] = {"state_dtype": "8bit", "master_weights": "split24", "amsgrad": True}
ROWS = ("rows, uneven, one empty", "replicated and rows", "rows twice")


def gradient(index: int, step: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that depends only on the arguments."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(shape, generator=generator).to(dtype)


def piece(value: torch.Tensor, cut: str) -> torch.Tensor:
    """The shard of this rank, split as by torch.chunk, over the first mesh dimension first."""
    rank = dist.get_rank()
    if cut == INTERLEAVED:
        return value.chunk(4)[rank % 2 * 2 + rank // 2].contiguous()
    mesh_shape, dims = CUTS[cut]
    coordinate = (rank,) if len(mesh_shape) == 1 else divmod(rank, mesh_shape[1])
    for at, ways, dim in zip(coordinate, mesh_shape, dims, strict=True):
        if dim is not None:
            size = value.shape[dim]
            each = -(-size // ways)
            value = value[(slice(None),) * dim + (slice(min(at * each, size), min((at + 1) * each, size)),)]
    return value.contiguous()


def distributed(part: torch.Tensor, mesh_shape: tuple[int, ...], placements: Any, shape: Any) -> DTensor:
    stride, mesh = torch.empty(shape).stride(), init_device_mesh("cpu", mesh_shape)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def sharded(value: torch.Tensor, cut: str) -> DTensor:
    """`value` as a DTensor of this rank."""
    mesh_shape, placements = (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]
    if cut != INTERLEAVED:
        mesh_shape, dims = CUTS[cut]  # type: ignore[assignment]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]  # type: ignore[misc]
    return distributed(piece(value, cut), mesh_shape, placements, value.shape)


def trained(shape: tuple[int, ...], of: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Three steps of the second of two parameters. Returns the shard of the rank."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    first, parameter = torch.nn.Parameter(torch.ones(3).bfloat16()), torch.nn.Parameter(of(start))
    optimizer = halfstep.AdamW([first, parameter], **{**OPTIONS, **options})
    for step in range(3):
        parameter.grad = of(gradient(0, step, shape, torch.bfloat16))
        optimizer.step()
    held = {"parameter": parameter.detach(), **optimizer.state[parameter]}
    return {name: getattr(tensor, "_local_tensor", tensor).clone() for name, tensor in held.items()}


def shards_have_the_bits_of_the_whole(cut: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Weights, moments, and codes with their exponents, which are sharded like their rows or blocks."""
    whole = trained(shape, lambda value: value, options)
    assert len(whole) == (9 if options else 4)
    expected = {name: value if name == "step" else piece(value, cut) for name, value in whole.items()}
    assert same_bits(trained(shape, lambda value: sharded(value, cut), options), expected)


def parts_that_lie_in_no_range_are_refused(part: torch.Tensor, placements: list[Any], shape: tuple[int, ...]) -> None:
    """Columns, and rows in an interleaved order."""
    parameter = torch.nn.Parameter(distributed(part.bfloat16(), (2, 2), placements, shape))
    parameter.grad = torch.ones_like(parameter)
    message = error_of(ValueError, halfstep.AdamW([parameter], **OPTIONS).step)
    assert (parameter.detach()._local_tensor == 1).all()  # type: ignore[attr-defined]
    halfstep.AdamW([parameter], **{**OPTIONS, "rounding": "nearest"}).step()  # the remedy works
    assert message.startswith("Expected parameter 0 with a gradient (group 0) to be sharded by a range of rows")
    assert message.endswith(
        f"got placements {tuple(placements)} on a mesh of shape (2, 2): shard evenly, or use rounding='nearest'"
    )


def parts_that_cut_blocks_are_refused(cut: str, shape: tuple[int, ...]) -> None:
    message = error_of(ValueError, lambda: trained(shape, lambda value: sharded(value, cut), CODED))
    assert message.startswith(
        "Expected parameter 0 with a gradient (group 0) to be sharded by rows, or in dimension 1 at multiples "
        f"of 32 elements of a row, with state_dtype='8bit', but got shape {shape} and placements "
    )
    assert message.endswith(
        "use fully_shard, which shards by rows, or state_dtype=torch.bfloat16 or torch.float32 in a parameter group of "
        "its own"
    )
    trained(shape, lambda value: sharded(value, cut), {**CODED, "state_dtype": torch.bfloat16})


_STEPPED: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    *((cut, shape, {}) for cut, shape in zip(CUTS, itertools.cycle(SHAPES), strict=False)),
    *((cut, shape, CODED) for cut, shape in itertools.product(ROWS, ((33, 300), (5, 40, 40)))),
    *(
        (cut, shape, CODED)
        for cut, shape in itertools.product(
            ("columns, uneven", "rows and columns", "columns twice"), ((9, 1023), (9, 8, 64))
        )
    ),
    *((INTERLEAVED, (8, 6, 4), {}), (INTERLEAVED, (32, 9, 40), CODED)),
]
ON_FOUR_RANKS: dict[str, Callable[[], None]] = {
    **{
        f"{cut} of {shape}{', 8 bits' * bool(options)}": partial(shards_have_the_bits_of_the_whole, cut, shape, options)
        for cut, shape, options in _STEPPED
    },
    **{
        f"{cut} of {shape}, cut blocks": partial(parts_that_cut_blocks_are_refused, cut, shape)
        for cut, shape in (("columns, uneven", (9, 1000)), ("last", (9, 8, 512)), ("columns twice", (30, 900)))
    },
    "no range of columns": partial(
        parts_that_lie_in_no_range_are_refused, torch.ones(4, 3, 3), [Shard(1), Shard(2)], (4, 6, 6)
    ),
    "no range of rows": partial(
        parts_that_lie_in_no_range_are_refused, torch.ones(3, 2), [_StridedShard(0, split_factor=2), Shard(0)], (9, 2)
    ),
}
