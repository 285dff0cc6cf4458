"""The cases of `halfstep bench run`: one module per group, with a function ``cases(sizes)``.

This module does not import torch, so that the command rejects wrong arguments quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfstep.cli.command_line import UsageError

if TYPE_CHECKING:
    from halfstep.bench.harness import Case

GROUPS = ("softmax", "log_probabilities", "cast", "unscale", "adam", "sgd", "muon", "step")


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases."""

    elements: int  # elements of a softmax input; in the other groups, of all tensors together
    columns: tuple[int, ...]  # columns of a softmax
    cast_elements: tuple[int, ...]  # elements of a single tensor to cast
    tensors: tuple[int, ...]  # numbers of tensors to split `elements` into
    large: int  # elements of the large tensor of the optimizer cases; 0 for none
    slow: bool = True  # whether to include providers that take seconds to compile
    looped: int = 1_000  # maximum number of tensors for providers that call many operations per tensor
    compiled: int = 1  # maximum length of a list to compile, which takes about a second per tensor on a CPU


FULL_COLUMNS = tuple(2**power for power in range(8, 21, 2))
FULL_TENSORS = (1, 100, 1_000, 10_000)
QUICK_COLUMNS, QUICK_TENSORS = (256, 2**14, 2**20), (1, 1_000)


def sizes_for(device_type: str, quick: bool) -> Sizes:
    """The sizes of `halfstep bench run` on ``"cpu"`` or ``"cuda"``. On a GPU, tensors exceed the caches."""
    if device_type == "cuda":
        if quick:
            return Sizes(2**24, QUICK_COLUMNS, (2**20, 2**24), QUICK_TENSORS, 0, looped=100)
        casts = tuple(2**power for power in range(14, 29, 2))
        return Sizes(2**26, FULL_COLUMNS, casts, FULL_TENSORS, 2**28, compiled=100)
    if quick:
        return Sizes(2**20, QUICK_COLUMNS, (2**14, 2**22), QUICK_TENSORS, 0, slow=False, looped=100)
    return Sizes(2**22, FULL_COLUMNS, (2**12, 2**16, 2**20, 2**24), FULL_TENSORS, 2**24)


def listed(module: str, function: str, *arguments: object) -> list[Any]:
    """The items that a function of a module returns: cases or variants. Raises a UsageError if there are none."""
    try:
        items = list(getattr(importlib.import_module(module), function)(*arguments))
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected --module to be a module on Python's path, by dotted name, but got {module}: {error}"
        ) from error
    except AttributeError as error:
        raise UsageError(f"--module {module}: {error}; it needs a function {function}()") from error
    if not items:
        raise UsageError(f"--module {module}: its {function}() lists nothing")
    return items


def cases(groups: Sequence[str], sizes: Sizes, modules: Sequence[str] = ()) -> list[Case]:
    """All cases of `groups`, then of other `modules`. A case may need several times as much memory as it moves."""
    homes = [*(f"halfstep.bench.cases.{group}" for group in groups), *modules]
    return [case for home in homes for case in listed(home, "cases", sizes)]
