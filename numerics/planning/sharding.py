"""How each strategy shards weights, gradients and states over GPUs, and the bytes that a GPU sends per step.

Shards of FSDP and ZeroRedundancyOptimizer have exactly the sizes of those of torch 2.13. FSDP2 splits the first
dimension of each parameter, and pads weights and gradients of smaller shards, but not states
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _fsdp_collectives.py). FSDP1 pads the flat parameter of each unit
(fsdp/_flat_param.py). ZeroRedundancyOptimizer assigns whole parameters, the largest first, each to the rank with the
fewest elements so far (distributed/optim). ``zero1`` to ``zero3`` follow the paper (Rajbhandari et al., ZeRO: memory
optimizations toward training trillion parameter models, 2020, §5) and DeepSpeed: one flat buffer, or each parameter in
stage 3, is divided into equal parts, rounded up. Bytes sent are those of ring algorithms, which are optimal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

from halfstep.numerics.owners import MOST, Ownership, assigned, cut, cuts_matrices, in_parts, padded
from halfstep.numerics.planning.layouts import Layout
from halfstep.numerics.planning.models import Tensor, Unit, each_tensor_of, parameters_of, tensors_of
from halfstep.numerics.state_layout import LEAST_CODED

BUSES = (("4.0", 25 * 10**9), ("5.0", 55 * 10**9))  # PCIe x16 generation, and achievable bytes per second of copies


@dataclass(frozen=True)
class Strategy:
    """How a strategy of data parallelism shards memory."""

    name: str  # on the command line
    weights: bool = False  # whether weights are sharded, and gathered unit by unit for forward and backward
    gradients: bool = False
    states: bool = False
    # What is split: "nothing", "flat" (one flat buffer), "parameters" (each rank gets entire parameters), "rows" (of
    # each parameter), "units" (one flat parameter per unit) or "elements" (each parameter, flattened).
    by: str = "nothing"
    buckets: bool = False  # whether DDP's buckets are allocated in addition to the gradients
    text: str = ""  # a one-line description

    @property
    def offloads(self) -> bool:
        """Whether `offload` is supported. It moves states to the host, and sharded weights and gradients too."""
        return self.by != "parameters"

    @property
    def by_rows(self) -> bool:
        """Whether shards consist of whole rows."""
        return self.by in ("nothing", "rows")

    def holds(self, row: Layout) -> bool:
        """Whether shards fit the states: whole rows for blocks of codes, and DTensors or replicas for Muon."""
        return self.by_rows or (row.adamw is None and (self.by == "parameters" or not row.needs_rows))

    def releases(self, row: Layout) -> bool:
        """Whether `halfstep.integrations.release` can step in the backward, where Muon cannot exchange matrices."""
        return row.ours and self.by_rows and (row.adamw is None or not self.states)


_everything = partial(Strategy, weights=True, gradients=True, states=True)
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", text="one GPU"),
        Strategy("ddp", buckets=True, text="DistributedDataParallel: nothing divided"),
        Strategy("zero1", states=True, by="flat", text="ZeRO-1: states divided"),
        Strategy("zero1-torch", states=True, by="parameters", buckets=True,
                 text="ZeroRedundancyOptimizer: whole parameters"),
        Strategy("zero2", gradients=True, states=True, by="flat", text="ZeRO-2: gradients too"),
        _everything("zero3", by="elements", text="ZeRO-3: everything, each parameter flat"),
        _everything("fsdp", by="rows", text="FSDP2: everything, by rows of each parameter"),
        _everything("fsdp1", by="units", text="FSDP1: everything, one flat tensor per unit"),
        _everything("hsdp", by="rows", text="FSDP2 inside groups, replicas across them"),
    )
}  # fmt: skip


# Local tensors of a rank as (elements, count, row length), where a row is one index of dimension 0. The row length is 0
# for vectors, for parameters with fewer than `LEAST_CODED` elements, and for shards that are not whole rows.
Locals = tuple[tuple[int, int, int], ...]


class Shards(NamedTuple):
    """The local tensors of one rank."""

    weights: Locals
    gradients: Locals
    states: Locals


def elements(tensors: Iterable[tuple[int, int, int]]) -> int:
    """The total number of elements of local tensors."""
    return sum(size * count for size, count, _ in tensors)


class Scratch(NamedTuple):
    """What a rank needs to orthogonalize Muon's matrices."""

    parts: int  # elements of scratch memory for its own parts
    received: int  # elements of scratch memory for parts of other ranks
    copies: int  # bytes of copies of the largest matrix; 0 if shapes are unknown
    sent: int  # bytes sent to other ranks per step
    host: int  # with offloading: elements of scratch memory on the host
    copied: int  # with offloading: elements copied to the GPU and back per step
    exchanged: int  # parameters whose matrices ranks exchange; 0 if shapes are unknown


@dataclass(frozen=True)
class Collective:
    """One kind of communication in a step."""

    name: str  # the operation
    what: str  # the data sent
    bytes: int  # bytes that one GPU sends per step
    ranks: int  # number of participating ranks


def ring(ranks: int) -> Fraction:
    """The fraction of a buffer that each rank sends in an all-gather or reduce-scatter: (N − 1)/N. All-reduce is both.

    No algorithm sends less: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms (2009).
    """
    return Fraction(ranks - 1, ranks)


@dataclass(frozen=True)
class Sharding:
    """A model sharded over GPUs, and the communication of data parallelism."""

    strategy: Strategy
    ranks: int  # data-parallel GPUs
    group: int | None  # GPUs in one group of ``"hsdp"``
    # Whether units have the shapes of the parameters, not only their number. Without shapes, the parameters count as
    # one long row, of which every rank is assumed to have an equal part.
    shaped: bool

    @property
    def divisor(self) -> int:
        """Number of GPUs over which the model is sharded."""
        return self.group or (self.ranks if self.strategy.states else 1)

    def shards(self, units: Sequence[Unit], rank: int | None = None) -> Shards:
        """The local tensors of a rank; if `rank` is None, of the rank that has most."""
        by, divisor, count_of = self.strategy.by, self.divisor, list(tensors_of(units))
        whole = tuple((tensor.elements, count, self._row(tensor)) for tensor, count in count_of)
        if divisor == 1 or by == "nothing":
            return Shards(whole, whole, whole)
        if by == "flat" or (by == "parameters" and not self.shaped):
            size = -(-parameters_of(units) // divisor)
            part = ((size, 1, 0 if self.shaped else size),)
            return Shards(whole, part if self.strategy.gradients else whole, part)
        if by == "parameters":
            # In the order of the model, which breaks ties between parameters of the same size.
            tensors = [(tensor.elements, 1, self._row(tensor)) for tensor in each_tensor_of(units)]
            by_rank: list[list[tuple[int, int, int]]] = [[] for _ in range(min(divisor, len(tensors)))]
            for owner, local in zip(assigned([size for size, *_ in tensors], divisor), tensors, strict=True):
                by_rank[owner].append(local)
            if rank is None:
                return Shards(whole, whole, tuple(max(by_rank, key=elements)))
            return Shards(whole, whole, tuple(by_rank[rank]) if rank < len(by_rank) else ())
        if by in ("units", "elements"):
            sizes = [(unit.elements, unit.count) for unit in units] if by == "units" else [local[:2] for local in whole]
            parts = tuple((-(-size // divisor), count, 0) for size, count in sizes)
            return Shards(parts, parts, parts)
        evenly, states = [], []
        for (tensor, count), (*_, row) in zip(count_of, whole, strict=True):
            rows = tensor.shape[0] if tensor.shape else 1
            chunk, length = -(-rows // divisor), math.prod(tensor.shape[1:])
            size = length * (chunk if rank is None else max(0, min(chunk, rows - rank * chunk)))
            evenly.append((length * chunk, count, row))
            states.append((size, count, row if self.shaped else size))
        return Shards(tuple(evenly), tuple(evenly), tuple(states))

    def _row(self, tensor: Tensor) -> int:
        if not self.shaped:
            return tensor.elements
        coded = len(tensor.shape) > 1 and tensor.elements >= LEAST_CODED
        return math.prod(tensor.shape[1:]) if coded else 0

    def padded(self, units: Sequence[Unit]) -> int:
        """The number of elements of gathered weights or unreduced gradients, including the padding of shards."""
        if self.strategy.by == "parameters":
            return parameters_of(units)
        shards = self.shards(units)
        return self.divisor * elements(shards.states if self.strategy.by == "flat" else shards.gradients)

    def communication(
        self, trained: Sequence[Unit], units: Sequence[Unit], widths: tuple[Fraction, Fraction]
    ) -> tuple[Collective, ...]:
        """What one GPU sends per step for data parallelism.

        DDP all-reduces gradients: 2·(N − 1)/N × their bytes. ZeRO-1 and 2 reduce-scatter gradients and all-gather
        weights, which is as much if both have the same width. ZeRO-3 and FSDP gather weights twice, which makes 1.5
        times as much (Rajbhandari et al., §7), except those of the root unit of FSDP1 and FSDP2. Gradients are those of
        `trained` units, weights those of all `units`; `widths` are the bytes per element of both when sent.
        """
        ranks, divisor, by = self.ranks, self.divisor, self.strategy.by
        if ranks == 1:
            return ()
        once, gradients, weights = ring(divisor), self.padded(trained), self.padded(units)

        def sent(name: str, what: str, share: Fraction, to: int = divisor) -> Collective:
            width, number = (widths[0], gradients) if "gradients" in what else (widths[1], weights)
            return Collective(name, what, math.ceil(share * width * number), to)

        summed = sent("all-reduce", "gradients", 2 * ring(ranks), ranks)
        if by == "nothing":
            return (summed,)
        if by == "parameters":
            return summed, sent("broadcast", "weights", once, ranks)
        scattered = sent("reduce-scatter", "gradients", once)
        if not self.strategy.weights:
            return scattered, sent("all-gather", "weights", once)
        root = self.padded([unit for unit in units if unit.root and by != "elements"] if len(units) > 1 else [])
        forward = sent("all-gather", "weights, forward", once)
        backward = sent("all-gather", "weights, backward", once * Fraction(weights - root, weights))
        divided = (forward, backward, scattered) if divisor > 1 else ()
        groups = ranks // divisor
        across = sent("all-reduce", "shards of gradients", 2 * ring(groups) / divisor, groups)
        return divided if groups == 1 else (*divided, across)


@lru_cache(maxsize=64)  # `ways_to_fit` calls it thousands of times
def scratch_of(units: tuple[Unit, ...], ranks: int, rank: int, shaped: bool, codes: bool) -> Scratch:
    """What the matrices in `units` need. Like `halfstep.Muon`, groups them by whether their momentum is in codes."""
    launches = defaultdict[tuple[bool, bool], list[tuple[int, ...]]](list)
    if not shaped:
        shard = -(-parameters_of(units) // ranks)
        together = min(shard, MOST)
        sent = math.ceil(4 * ring(ranks) * shard)
        return Scratch(together, together if ranks > 1 else 0, 0, sent, min(shard, 2 * MOST), shard, 0)
    matrices, parts, received, sent = list(each_tensor_of(units)), [], 0, 0
    ranks = min(ranks, max(len(matrices), *(matrix.shape[0] for matrix in matrices)))  # the others have no parts
    copies = 0
    for matrix in matrices:
        exchanged = cuts_matrices(matrix.shape, 0, cut(matrix.shape[0], ranks))
        rows, columns = matrix.shape[-2:] if len(matrix.shape) == 3 else (matrix.shape[0], math.prod(matrix.shape[1:]))
        # Two copies in bf16, a third one of exchanged matrices, and two square products of the short side.
        copies = max(copies, (4 + 2 * exchanged) * rows * columns + 4 * min(rows, columns) ** 2)
        launches[codes and matrix.elements >= LEAST_CODED, exchanged].append(matrix.shape)
    flags = sum(len(shapes) for (_, exchanged), shapes in launches.items() if exchanged)
    if rank >= ranks:
        return Scratch(0, 0, 0, 0, 0, 0, flags)
    for (_, exchanged), shapes in sorted(launches.items(), key=lambda launch: launch[0][1]):
        cuts = [(0, cut(shape[0], ranks)) for shape in shapes]
        shards = [
            math.prod(shape[1:]) * (ranges[rank][1] - ranges[rank][0])
            for shape, (_, ranges) in zip(shapes, cuts, strict=True)
        ]
        least = ranks if exchanged else 1
        for indices in in_parts([*map(math.prod, shapes)] if exchanged else shards, MOST * least, least):
            of_part = slice(indices.start, indices.stop)
            parts.append(sum(map(padded, shards[of_part])))
            if exchanged:
                ownership = Ownership(shapes[of_part], cuts[of_part], rank)
                received, sent = max(received, ownership.received), sent + ownership.bytes_sent
    host = sum(max(parts[turn::2], default=0) for turn in (0, 1))
    return Scratch(max(parts), received, copies, sent, host, sum(parts), flags)


def over_the_bus(
    row: Layout, strategy: Strategy, shards: Shards, mirrored: bool, scratch: Scratch | None
) -> tuple[Collective, ...]:
    """The copies between a GPU and its host with offloading."""
    # Strategies that shard weights gather them twice, from the host unless they stay on the GPU.
    padded = strategy.gradients and not mirrored
    gradients = elements(shards.gradients if padded else shards.states) * row.gradients.width
    weights = 2 * elements(shards.weights) if strategy.weights and not mirrored else elements(shards.states)
    to_host = Collective("copy to the host", "gradients", gradients, 1)
    from_host = Collective("copy from the host", "weights", weights * row.weights.width, 1)
    if not mirrored:
        return to_host, from_host
    # `halfstep.integrations.offload` steps from the weights on the device, which other code may have written.
    copies = to_host, replace(from_host, name="copy to the host"), from_host
    if scratch is None:
        return copies
    matrices = (Collective(copy.name, "matrices of Muon", 2 * scratch.copied, 1) for copy in copies[1:])
    return *copies, *matrices
