"""The cases of `halfstep bench run`: one module per group, with a function ``cases(sizes)``.

Needs no torch, so that the command refuses wrong arguments quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.bench.modules import listed

if TYPE_CHECKING:
    from halfstep.bench.harness import Case

GROUPS = ("softmax", "cast", "unscale", "adam", "sgd", "step")


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases.

    Attributes:
        elements: elements of the input of a softmax, and of all tensors together in the other groups.
        columns: numbers of columns of a softmax.
        cast_elements: elements of a single tensor that is cast.
        tensors: numbers of tensors into which `elements` are divided.
        large: elements of the large tensor of the Adam cases; 0 for none.
        slow: whether to include providers that take seconds to compile.
        looped: the most tensors for providers that call many operations for each tensor.
        compiled: the most tensors of a list that is compiled, which takes about a second per tensor on a CPU.
    """

    elements: int
    columns: tuple[int, ...]
    cast_elements: tuple[int, ...]
    tensors: tuple[int, ...]
    large: int
    slow: bool = True
    looped: int = 1_000
    compiled: int = 1


FULL_COLUMNS = tuple(2**power for power in range(8, 21, 2))
FULL_TENSORS = (1, 100, 1_000, 10_000)
QUICK_COLUMNS, QUICK_TENSORS = (256, 2**14, 2**20), (1, 1_000)


def sizes_for(device_type: str, quick: bool) -> Sizes:
    """The sizes of `halfstep bench run` on ``"cpu"`` or ``"cuda"``. On a GPU, tensors are larger than its caches."""
    if device_type == "cuda":
        if quick:
            return Sizes(2**24, QUICK_COLUMNS, (2**20, 2**24), QUICK_TENSORS, 0, looped=100)
        casts = tuple(2**power for power in range(14, 29, 2))
        return Sizes(2**26, FULL_COLUMNS, casts, FULL_TENSORS, 2**28, compiled=100)
    if quick:
        return Sizes(2**20, QUICK_COLUMNS, (2**14, 2**22), QUICK_TENSORS, 0, slow=False, looped=100)
    return Sizes(2**22, FULL_COLUMNS, (2**12, 2**16, 2**20, 2**24), FULL_TENSORS, 2**24)


def cases(groups: Sequence[str], sizes: Sizes, modules: Sequence[str] = ()) -> list[Case]:
    """All cases of `groups`, then of other `modules`. A case may need several times the memory of the bytes it moves.

    Raises:
        UsageError: one of `modules` cannot be imported, or lists no cases.
    """
    homes = [*(f"halfstep.bench.cases.{group}" for group in groups), *modules]
    return [case for home in homes for case in listed(home, "cases", sizes)]
