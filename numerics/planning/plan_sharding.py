"""Who holds what: how each strategy divides weights, gradients and states among GPUs.

Sharding, where torch does it, is torch's to the element (2.13): FSDP2 chunks each parameter's first dimension and pads
the weights and gradients of short shards, but not the states (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
_fsdp_collectives.py); FSDP1 pads the flat parameter of each unit (fsdp/_flat_param.py); ZeroRedundancyOptimizer gives
whole parameters, largest first, each to the rank that has least so far (distributed/optim). ``zero1`` to ``zero3``
are the paper's (Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020, §5),
as in DeepSpeed: one flat buffer, and for stage 3 each parameter, in equal parts rounded up.

Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.numerics.planning.plan_errors import divides
from halfstep.numerics.planning.plan_shapes import Unit, parameters_of, tensors_of

# Local tensors: elements of one, and how many there are.
Locals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Strategy:
    """How data parallelism divides its memory.

    Args:
        name: on the command line.
        weights, gradients, states: whether they are divided.
        by: what is divided: ``"nothing"``, ``"flat"``, ``"parameters"`` (whole ones are dealt out), ``"rows"``,
            ``"units"`` (one flat parameter per unit) or ``"elements"`` (each parameter's, flat).
        buckets: whether DDP's buckets stand beside the gradients.
        gathers: whether weights are gathered unit by unit for forward and backward.
        offloads: what ``offload`` moves to the host: ``""``, ``"states"`` or ``"all"``.
        text: one line about it.
    """

    name: str
    weights: bool
    gradients: bool
    states: bool
    by: str
    buckets: bool
    gathers: bool
    offloads: str
    text: str


STRATEGIES = {
    s.name: s
    for s in (
        Strategy("single", False, False, False, "nothing", False, False, "", "one GPU"),
        Strategy("ddp", False, False, False, "nothing", True, False, "", "DistributedDataParallel: nothing divided"),
        Strategy("zero1", False, False, True, "flat", False, False, "states", "ZeRO-1: states divided"),
        Strategy(
            "zero1-torch",
            False,
            False,
            True,
            "parameters",
            True,
            False,
            "",
            "ZeroRedundancyOptimizer: whole parameters",
        ),
        Strategy("zero2", False, True, True, "flat", False, False, "states", "ZeRO-2: gradients too"),
        Strategy("zero3", True, True, True, "elements", False, True, "all", "ZeRO-3: everything, each parameter flat"),
        Strategy("fsdp", True, True, True, "rows", False, True, "all", "FSDP2: everything, by rows of each parameter"),
        Strategy("fsdp1", True, True, True, "units", False, True, "all", "FSDP1: everything, one flat tensor per unit"),
        Strategy("hsdp", True, True, True, "rows", False, True, "all", "FSDP2 inside groups, replicas across them"),
    )
}


@dataclass(frozen=True)
class Shards:
    """What one rank holds, as local tensors, and by how much each part is divided."""

    weights: Locals
    gradients: Locals
    states: Locals


def _every(units: Sequence[Unit]) -> list[tuple[tuple[int, ...], int]]:
    return [(tensor.shape, count) for tensor, count in tensors_of(units)]


def _rows(shape: tuple[int, ...], ways: int, rank: int | None) -> int:
    """Elements of a rank's chunk of the first dimension; the padded, largest one without a rank."""
    first = shape[0] if shape else 1
    inner = 1
    for size in shape[1:]:
        inner *= size
    chunk = -(-first // ways)
    return inner * (chunk if rank is None else max(0, min(chunk, first - rank * chunk)))


def dealt(sizes: Sequence[int], ways: int) -> list[list[int]]:
    """Which of the parameters each rank steps under ZeroRedundancyOptimizer: largest first, to the rank with least."""
    loads = [(0, rank) for rank in range(ways)]
    given: list[list[int]] = [[] for _ in range(ways)]
    for size in sorted(sizes, reverse=True):
        load, rank = heapq.heappop(loads)
        given[rank].append(size)
        heapq.heappush(loads, (load + size, rank))
    return given


def shard(units: Sequence[Unit], strategy: Strategy, ways: int, rank: int | None = None, shaped: bool = True) -> Shards:
    """What one rank holds of a model divided `ways` ways.

    Args:
        rank: whose share; None for the rank that holds most.
        shaped: whether `units` are the model's parameters; if they only say how many there are, whole ones cannot be
            dealt out, and every rank is taken to have as many.
    """
    every = _every(units)
    whole = tuple((tensor.elements, count) for tensor, count in tensors_of(units))
    if ways == 1 or strategy.by == "nothing":
        return Shards(whole, whole, whole)
    if strategy.by == "flat" or (strategy.by == "parameters" and not shaped):
        part = ((-(-parameters_of(units) // ways), 1),)
        return Shards(whole, part if strategy.gradients else whole, part)
    if strategy.by == "parameters":
        given = dealt([size for size, count in whole for _ in range(count)], ways)
        mine = max(given, key=sum) if rank is None else given[rank]
        return Shards(whole, whole, tuple((size, 1) for size in mine))
    if strategy.by == "units":
        flat = tuple((-(-one.elements // ways), one.count) for one in units)
        return Shards(flat, flat, flat)
    if strategy.by == "elements":
        parts = tuple((-(-size // ways), count) for size, count in whole)
        return Shards(parts, parts, parts)
    padded = tuple((_rows(shape, ways, None), count) for shape, count in every)
    mine_only = tuple((_rows(shape, ways, rank), count) for shape, count in every)
    return Shards(padded, padded, mine_only)


def padded(units: Sequence[Unit], strategy: Strategy, ways: int, shaped: bool = True) -> int:
    """Elements of a model's gathered weights and unreduced gradients: its parameters, with every short shard padded."""
    if strategy.by == "parameters":
        return parameters_of(units)
    mine = shard(units, strategy, ways, shaped=shaped)
    each = mine.states if strategy.by == "flat" else mine.gradients
    return ways * sum(size * count for size, count in each)


def groups(strategy: Strategy, ranks: int, shard_size: int | None) -> tuple[int, int]:
    """Ways in which a model is divided, and replicas of it, on so many data-parallel GPUs.

    Raises:
        ValueError: a group size where there are no groups, none for ``hsdp``, or one that does not divide.
    """
    if strategy.name != "hsdp":
        if shard_size is not None:
            raise ValueError(
                f"shard is {shard_size}, and strategy {strategy.name!r} has no groups; leave it out, or take 'hsdp'"
            )
        return (ranks, 1) if strategy.states else (1, ranks)
    if shard_size is None:
        raise ValueError("strategy is 'hsdp' and shard is not given; give the GPUs of one group, as --shard 8")
    divides("shard", shard_size, "the number of data-parallel GPUs", ranks, "every group needs as many GPUs")
    return shard_size, ranks // shard_size
