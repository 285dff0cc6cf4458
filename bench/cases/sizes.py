"""Which sizes are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases.

    Attributes:
        elements: of a softmax's input, whatever the number of columns, and of all tensors together in the other groups.
        columns: of softmax.
        cast_elements: of casts of one tensor.
        tensors: numbers of tensors among which `elements` are divided.
        large: elements of the one large tensor of the Adam cases; 0 leaves it out.
        slow: whether to include providers that take seconds to compile or loop over many tensors in Python.
        compiled: the most tensors for which a list is compiled: time grows with them, a second each on a CPU.
    """

    elements: int
    columns: tuple[int, ...]
    cast_elements: tuple[int, ...]
    tensors: tuple[int, ...]
    large: int
    slow: bool = True
    compiled: int = 1


FULL_COLUMNS = tuple(2**power for power in range(8, 21, 2))
FULL_TENSORS = (1, 100, 1_000, 10_000)


def sizes_for(device: torch.device, quick: bool) -> Sizes:
    """The grid of `halfstep bench run`; on a GPU tensors are larger than its caches, and nothing is too slow."""
    if device.type == "cuda":
        if quick:
            return Sizes(2**24, (256, 2**14, 2**20), (2**20, 2**24), (1, 1_000), 0)
        return Sizes(
            2**26, FULL_COLUMNS, tuple(2**power for power in range(14, 29, 2)), FULL_TENSORS, 2**28, compiled=100
        )
    if quick:
        return Sizes(2**20, (256, 2**14, 2**20), (2**14, 2**22), (1, 1_000), 0, slow=False)
    return Sizes(2**22, FULL_COLUMNS, tuple(2**power for power in range(12, 25, 4)), FULL_TENSORS, 2**24)
