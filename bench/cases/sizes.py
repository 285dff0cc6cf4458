"""The sizes of the cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases.

    Attributes:
        elements: elements of the input of a softmax, and of all tensors together in the other groups.
        columns: numbers of columns of a softmax.
        cast_elements: elements of a single tensor that is cast.
        tensors: numbers of tensors into which `elements` are divided.
        large: elements of the large tensor of the Adam cases; 0 for none.
        slow: whether to include providers that take seconds to compile, or loop over many tensors in Python.
        compiled: the most tensors of a list that is compiled, which takes about a second per tensor on a CPU.
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
    """The sizes of `halfstep bench run`. On a GPU, tensors are larger than its caches."""
    if device.type == "cuda":
        if quick:
            return Sizes(2**24, (256, 2**14, 2**20), (2**20, 2**24), (1, 1_000), 0)
        return Sizes(
            2**26, FULL_COLUMNS, tuple(2**power for power in range(14, 29, 2)), FULL_TENSORS, 2**28, compiled=100
        )
    if quick:
        return Sizes(2**20, (256, 2**14, 2**20), (2**14, 2**22), (1, 1_000), 0, slow=False)
    return Sizes(2**22, FULL_COLUMNS, tuple(2**power for power in range(12, 25, 4)), FULL_TENSORS, 2**24)
