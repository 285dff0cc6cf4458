"""What a GPU sends in a step: for data parallelism, for tensor parallelism, and to its host.

Volumes are those of ring algorithms, which no other undercuts. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from halfstep.numerics.planning.plan_layouts import Layout
from halfstep.numerics.planning.plan_shapes import Transformer
from halfstep.numerics.planning.plan_sharding import Shards, Strategy, groups


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


def _collective(
    name: str, what: str, share: Fraction, elements: int, width: Fraction, ranks: int, times: int, note: str = ""
) -> Collective:
    each = share * width * times
    return Collective(
        name, what, -(-(each * elements).numerator // (each * elements).denominator), each, ranks, times, note
    )


def communication(
    strategy: Strategy,
    ranks: int,
    *,
    parameters: int,
    gradient_width: Fraction,
    weight_width: Fraction,
    accumulate: int = 1,
    shard_size: int | None = None,
    kept: int = 0,
) -> tuple[Collective, ...]:
    """What one GPU sends in a step for data parallelism.

    DDP all-reduces gradients: 2·(N − 1)/N × their bytes. ZeRO-1 and 2 reduce-scatter them and gather weights, which is
    as much where both have one width; ZeRO-3 and FSDP gather weights twice, 1.5 times as much (Rajbhandari et al., §7).

    Args:
        ranks: data-parallel GPUs.
        parameters: of the model (of one tensor-parallel part), with what shards are padded by.
        gradient_width: bytes of a gradient as it is sent; less than its own where a hook compresses.
        weight_width: bytes of a weight as it is gathered.
        accumulate: micro-batches in a step. DDP, ZeRO-1 and torch's send once (``no_sync``); the others, which hold no
            whole gradient, with each micro-batch.
        shard_size: GPUs of one group, for ``hsdp``.
        kept: parameters gathered once per micro-batch instead of twice: the root unit of FSDP1 and FSDP2.
    """
    ways, replicas = groups(strategy, ranks, shard_size)
    if ranks == 1:
        return ()
    reduce, once = 2 * ring(ranks), ring(ways)
    if strategy.by == "nothing":
        return (_collective("all-reduce", "gradients", reduce, parameters, gradient_width, ranks, 1),)
    if strategy.by == "parameters":
        return (
            _collective("all-reduce", "gradients", reduce, parameters, gradient_width, ranks, 1),
            _collective("broadcast", "weights", once, parameters, weight_width, ranks, 1, "from each weight's owner"),
        )
    times = accumulate if strategy.gradients else 1
    scatter = _collective("reduce-scatter", "gradients", once, parameters, gradient_width, ways, times)
    if not strategy.gathers:
        return scatter, _collective("all-gather", "weights", once, parameters, weight_width, ways, 1)
    passes = [_collective("all-gather", "weights, forward", once, parameters, weight_width, ways, times)]
    again = _collective("all-gather", "weights, backward", once, parameters - kept, weight_width, ways, times)
    if kept:
        again = Collective(
            again.name,
            again.what,
            again.bytes,
            Fraction(parameters - kept, parameters) * (again.per_parameter or 0),
            ways,
            times,
            "the root unit stays gathered",
        )
    rest: list[Collective] = [*passes, again, scatter] if ways > 1 else []
    if replicas > 1:
        share, size = 2 * ring(replicas) / ways, gradient_width
        rest.append(_collective("all-reduce", "shards of gradients", share, parameters, size, replicas, times))
    return tuple(rest)


def over_the_bus(row: Layout, how: Strategy, mine: Shards, accumulate: int) -> tuple[Collective, ...]:
    """What goes between a GPU and its host when states, or everything, are offloaded."""
    gradients = sum(size * count for size, count in (mine.gradients if how.gradients else mine.states))
    if how.offloads == "states":
        weights, times = sum(size * count for size, count in mine.states), 1
    else:
        weights, times = sum(size * count for size, count in mine.weights), 2 * accumulate
    down = gradients * row.gradients.width * (accumulate if how.gradients else 1)
    return (
        Collective("copy to the host", "gradients", down, None, 1, accumulate if how.gradients else 1),
        Collective("copy from the host", "weights", weights * row.weights.width * times, None, 1, times),
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
