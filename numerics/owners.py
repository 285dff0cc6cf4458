"""Which parameters Muon steps, which rank orthogonalizes each of their matrices, and the memory and messages needed.

The optimizer and the planner share these rules. Importing this module does not import torch.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

MOST = 1 << 25  # maximum elements of the matrices that share scratch memory; a single matrix may be larger
ROUND = 1 << 22  # elements of the matrices of an owner that ranks exchange while it orthogonalizes others
ALIGNMENT = 64  # elements; matrices in scratch memory start at multiples of it
FOR_ADAMW = ("embed", "head")

Ranges = Sequence[tuple[int, int]]


def is_matrix(name: str, shape: Sequence[int], adamw: Sequence[str] = FOR_ADAMW) -> bool:
    """Whether Muon steps a parameter of this name and shape: not a vector, and no word of its name is in `adamw`."""
    words = rf"(?:^|[._])(?:{'|'.join(map(re.escape, adamw)) or '(?!)'})(?:[._]|$)"
    return len(shape) > 1 and prod(shape[1:]) > 1 and re.search(words, name) is None


@lru_cache(maxsize=1024)
def cut(size: int, ranks: int) -> Ranges:
    """Where the part of each rank starts and ends in a dimension, chunked as by DTensor and `torch.chunk`."""
    chunk = -(-size // ranks)
    return list(pairwise(min(rank * chunk, size) for rank in range(ranks + 1)))


def cuts_matrices(shape: Sequence[int], dim: int, ranges: Ranges, blocks: int = 1) -> bool:
    """Whether a shard boundary is inside a matrix. Three dimensions are a batch; otherwise `blocks` divide the rows."""
    rows = 1 if len(shape) == 3 else max(shape[0] // blocks, 1)
    return dim > 0 or any(begin % rows for begin, _ in ranges)


def padded(elements: int) -> int:
    """The elements that a matrix or a part of one takes in scratch memory, including padding."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def in_parts(sizes: Sequence[int], most: float, least: int = 1) -> Iterator[range]:
    """Ranges of matrices that are updated together: up to `most` elements, or `least` matrices if these have more."""
    start, elements = 0, 0
    for index, size in enumerate(sizes):
        if index - start >= least and elements + size > most:
            yield range(start, index)
            start, elements = index, 0
        elements += size
    yield range(start, len(sizes))


def assigned(work: Sequence[int], ranks: int) -> list[int]:
    """A rank for each item, assigned greedily: the largest item first, each to the rank with the least work so far."""
    loads, owners = [(0, rank) for rank in range(min(ranks, len(work)))], [0] * len(work)
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + work[index], owners[index]))
    return owners


def owners_of(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix."""
    return assigned([min(shape[0], prod(shape[1:])) * prod(shape) for shape in shapes], ranks)


class Round(NamedTuple):
    """Matrices that are exchanged together. Parts are counted in elements of scratch memory, padding included."""

    owned: list[int]  # the indices of those that this rank orthogonalizes
    sent: list[int]  # the elements that this rank sends to each rank, including itself, before the iteration
    received: list[int]  # the elements that it receives from each rank, and sends back after the iteration


class Ownership:
    """Sharded matrices and their owners, which depend only on the shapes and the number of ranks.

    Args:
        shapes: shapes of the full matrices.
        cuts: for each matrix, the sharded dimension, and where the part of each rank starts and ends in it.
        rank: this rank.

    Attributes:
        order: the indices of the matrices in the order of their parts in memory, round by round.
        rounds: of all ranks equally many.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], cuts: Sequence[tuple[int, Ranges]], rank: int) -> None:
        self.shapes, self.cuts, self.rank, ranks = shapes, cuts, rank, len(cuts[0][1])
        owners, last, elements = owners_of(shapes, ranks), [0] * ranks, [0] * ranks
        round_of = []
        for shape, owner in zip(shapes, owners, strict=True):
            if elements[owner] >= ROUND:
                last[owner], elements[owner] = last[owner] + 1, 0
            elements[owner] += prod(shape)
            round_of.append(last[owner])
        self.order = sorted(range(len(shapes)), key=lambda index: (round_of[index], owners[index], index))
        self.rounds = [Round([], [0] * ranks, [0] * ranks) for _ in range(max(last) + 1)]
        for index in self.order:
            owned, sent, received = self.rounds[round_of[index]]
            sent[owners[index]] += self.elements(index, rank)
            if owners[index] == rank:
                owned.append(index)
                for origin in range(ranks):
                    received[origin] += self.elements(index, origin)

    def elements(self, index: int, rank: int) -> int:
        """The elements of scratch memory for the part of a rank."""
        dim, ranges = self.cuts[index]
        begin, end = ranges[rank]
        return padded(prod(self.shapes[index]) // max(self.shapes[index][dim], 1) * (end - begin))

    @property
    def received(self) -> int:
        """The elements that this rank receives from all ranks, including itself."""
        return sum(sum(each.received) for each in self.rounds)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to others per step, in bf16: parts to their owners, and results back."""
        return 2 * sum(sum(each.sent) + sum(each.received) - 2 * each.sent[self.rank] for each in self.rounds)
