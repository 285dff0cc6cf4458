"""How each strategy divides weights, gradients and states among GPUs, and what a GPU sends in a step.

Sharding, where torch does it, is torch's to the element (2.13): FSDP2 chunks each parameter's first dimension and pads
the weights and gradients of short shards, but not the states (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
_fsdp_collectives.py); FSDP1 pads the flat parameter of each unit (fsdp/_flat_param.py); ZeroRedundancyOptimizer gives
whole parameters, largest first, each to the rank that has least so far (distributed/optim). ``zero1`` to ``zero3``
are the paper's (Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models, 2020, §5),
as in DeepSpeed: one flat buffer, and for stage 3 each parameter, in equal parts rounded up. Volumes sent are those of
ring algorithms, which no other undercuts.

Needs no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from halfstep.numerics.messages import divides
from halfstep.numerics.planning.layouts import Layout
from halfstep.numerics.planning.models import Transformer, Unit, parameters_of, tensors_of

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
    weights: bool = False
    gradients: bool = False
    states: bool = False
    by: str = "nothing"
    buckets: bool = False
    gathers: bool = False
    offloads: str = ""
    text: str = ""


def _everything(name: str, by: str, text: str) -> Strategy:
    return Strategy(name, True, True, True, by, gathers=True, offloads="all", text=text)


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", text="one GPU"),
        Strategy("ddp", buckets=True, text="DistributedDataParallel: nothing divided"),
        Strategy("zero1", states=True, by="flat", offloads="states", text="ZeRO-1: states divided"),
        Strategy(
            "zero1-torch", states=True, by="parameters", buckets=True, text="ZeroRedundancyOptimizer: whole parameters"
        ),
        Strategy("zero2", gradients=True, states=True, by="flat", offloads="states", text="ZeRO-2: gradients too"),
        _everything("zero3", "elements", "ZeRO-3: everything, each parameter flat"),
        _everything("fsdp", "rows", "FSDP2: everything, by rows of each parameter"),
        _everything("fsdp1", "units", "FSDP1: everything, one flat tensor per unit"),
        _everything("hsdp", "rows", "FSDP2 inside groups, replicas across them"),
    )
}


@dataclass(frozen=True)
class Shards:
    """What one rank holds, as local tensors, and by how much each part is divided."""

    weights: Locals
    gradients: Locals
    states: Locals


def _rows(shape: tuple[int, ...], ways: int, rank: int | None) -> int:
    """Elements of a rank's chunk of the first dimension; the padded, largest one without a rank."""
    first = shape[0] if shape else 1
    chunk = -(-first // ways)
    return math.prod(shape[1:]) * (chunk if rank is None else max(0, min(chunk, first - rank * chunk)))


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
    whole = tuple((tensor.elements, count) for tensor, count in tensors_of(units))
    if ways == 1 or strategy.by == "nothing":
        return Shards(whole, whole, whole)
    if strategy.by == "flat" or (strategy.by == "parameters" and not shaped):
        part = ((-(-parameters_of(units) // ways), 1),)
        return Shards(whole, part if strategy.gradients else whole, part)
    if strategy.by == "parameters":
        given = dealt([size for size, count in whole for _ in range(count)], ways)
        sizes = max(given, key=sum) if rank is None else given[rank]
        return Shards(whole, whole, tuple((size, 1) for size in sizes))
    if strategy.by == "units":
        flat = tuple((-(-one.elements // ways), one.count) for one in units)
        return Shards(flat, flat, flat)
    if strategy.by == "elements":
        parts = tuple((-(-size // ways), count) for size, count in whole)
        return Shards(parts, parts, parts)
    every = [(tensor.shape, count) for tensor, count in tensors_of(units)]
    largest, mine = (tuple((_rows(shape, ways, which), count) for shape, count in every) for which in (None, rank))
    return Shards(largest, largest, mine)


def elements(held: Iterable[tuple[int, int]]) -> int:
    """Of all local tensors."""
    return sum(size * count for size, count in held)


def padded(units: Sequence[Unit], strategy: Strategy, ways: int, shaped: bool = True) -> int:
    """Elements of a model's gathered weights and unreduced gradients: its parameters, with every short shard padded."""
    if strategy.by == "parameters":
        return parameters_of(units)
    mine = shard(units, strategy, ways, shaped=shaped)
    return ways * elements(mine.states if strategy.by == "flat" else mine.gradients)


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


# --------------------------------------------------------------------------------------------------- what GPUs send


@dataclass(frozen=True)
class Collective:
    """One kind of message in a step.

    Args:
        name: the operation.
        what: is sent.
        bytes: that one GPU sends in a step, in all.
        per_parameter: the same for each parameter of the model.
        ranks: that take part.
        times: in a step.
        note: what one would not expect.
    """

    name: str
    what: str
    bytes: int
    per_parameter: Fraction | None
    ranks: int
    times: int
    note: str = ""


def ring(ranks: int) -> Fraction:
    """Share of a buffer that each rank sends to gather or to reduce-scatter it: (N − 1)/N. An all-reduce is both.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009): no algorithm sends
    less.
    """
    return Fraction(ranks - 1, ranks)


def communication(
    strategy: Strategy,
    ranks: int,
    ways: int,
    *,
    parameters: int,
    gradient_width: Fraction,
    weight_width: Fraction,
    accumulate: int = 1,
    kept: int = 0,
) -> tuple[Collective, ...]:
    """What one GPU sends in a step for data parallelism.

    DDP all-reduces gradients: 2·(N − 1)/N × their bytes. ZeRO-1 and 2 reduce-scatter them and gather weights, which is
    as much where both have one width; ZeRO-3 and FSDP gather weights twice, 1.5 times as much (Rajbhandari et al., §7).

    Args:
        ranks: data-parallel GPUs.
        ways: GPUs of one group, among which the model is divided; see `groups`.
        parameters: of the model (of one tensor-parallel part), with what shards are padded by.
        gradient_width: bytes of a gradient as it is sent; less than its own where a hook compresses.
        weight_width: bytes of a weight as it is gathered.
        accumulate: micro-batches in a step. DDP, ZeRO-1 and torch's send once (``no_sync``); the others, which hold no
            whole gradient, with each micro-batch.
        kept: parameters gathered once per micro-batch instead of twice: the root unit of FSDP1 and FSDP2.
    """
    if ranks == 1:
        return ()
    times, once = accumulate if strategy.gradients else 1, ring(ways)

    def sent(name: str, what: str, share: Fraction, to: int = ways, count: int = times, note: str = "") -> Collective:
        each = share * (gradient_width if "gradients" in what else weight_width) * count
        return Collective(name, what, math.ceil(each * parameters), each, to, count, note)

    summed = sent("all-reduce", "gradients", 2 * ring(ranks), ranks, 1)
    if strategy.by == "nothing":
        return (summed,)
    if strategy.by == "parameters":
        return summed, sent("broadcast", "weights", once, ranks, 1, "from each weight's owner")
    scattered = sent("reduce-scatter", "gradients", once)
    if not strategy.gathers:
        return scattered, sent("all-gather", "weights", once, ways, 1)
    again, note = once * Fraction(parameters - kept, parameters), "the root unit stays gathered" if kept else ""
    forward, backward = (
        sent("all-gather", "weights, forward", once),
        sent("all-gather", "weights, backward", again, note=note),
    )
    divided = (forward, backward, scattered) if ways > 1 else ()
    replicas = ranks // ways
    if replicas == 1:
        return divided
    return (*divided, sent("all-reduce", "shards of gradients", 2 * ring(replicas) / ways, replicas))


def over_the_bus(row: Layout, how: Strategy, mine: Shards, accumulate: int) -> tuple[Collective, ...]:
    """What goes between a GPU and its host when states, or everything, are offloaded."""
    gradients, down = (mine.gradients, accumulate) if how.gradients else (mine.states, 1)
    weights, up = (mine.states, 1) if how.offloads == "states" else (mine.weights, 2 * accumulate)
    sizes = elements(gradients) * row.gradients.width * down, elements(weights) * row.weights.width * up
    return (
        Collective("copy to the host", "gradients", sizes[0], None, 1, down),
        Collective("copy from the host", "weights", sizes[1], None, 1, up),
    )


def between_layers(
    row: Layout, model: Transformer, batch: int, seq: int, t: int, accumulate: int
) -> tuple[Collective, ...]:
    """Tensor parallelism: two all-reduces of s·b·h per block forward and two backward (Shoeybi et al., 2019, §3).

    With sequence parallelism each becomes a reduce-scatter and an all-gather of as many bytes. Embedding and head, cut
    along the vocabulary, need one more each: of the looked-up rows forward, of the head's input backward. The loss
    takes of each token's logits the maximum, the sum of exponentials and the target's, in fp32.
    """
    tokens = batch * seq
    activation = tokens * model.hidden * row.compute.width
    listed = (
        ("activations", activation, 4 * model.layers * accumulate),
        ("activations at embedding and head", activation, 2 * accumulate),
        ("loss", 4 * tokens, 3 * accumulate),
    )
    return tuple(
        Collective("all-reduce", what, -(-(2 * (t - 1) * size * times) // t), None, t, times)
        for what, size, times in listed
    )
