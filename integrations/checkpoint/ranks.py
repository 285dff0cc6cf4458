"""The ranks that save or load a checkpoint together, and their communication."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from halfstep.integrations.checkpoint.folder import CheckpointError

T = TypeVar("T")

# The default group, and a group of all ranks for checkpoints only. These are weak references, because torch aborts at
# exit if a group is alive after destroy_process_group.
_own_group: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def _group_for_checkpoints() -> Any:
    """A gloo group of all ranks, so that collectives of a save in a thread do not mix with those of training."""
    global _own_group
    default = dist.group.WORLD
    known = _own_group[1]() if _own_group is not None and _own_group[0]() is default else None
    if known is None:
        known = dist.new_group(backend="gloo")
        _own_group = weakref.ref(default), weakref.ref(known)
    return known


class Ranks:
    """The ranks that save or load together. They exchange small objects over gloo."""

    def __init__(self, process_group: Any = None, alone: bool = False) -> None:
        self.rank, self.size = 0, 1
        self.group: Any = None
        if alone or not (dist.is_available() and dist.is_initialized()):
            return
        base = dist.group.WORLD if process_group is None else process_group
        self.rank, self.size = dist.get_rank(base), dist.get_world_size(base)
        if self.rank < 0:
            raise ValueError(
                "Expected process_group to contain the calling rank, but it does not: call save and load on the "
                "group's ranks only"
            )
        if self.size == 1:
            return
        # A new group of some ranks would need the other ranks to take part, so the given group is used.
        self.group = _group_for_checkpoints() if base is dist.group.WORLD else base
        if "cpu:" not in dist.get_backend_config(self.group):
            raise ValueError(
                "Expected process_group to have a backend for CPUs, but got "
                f'{dist.get_backend_config(self.group)}: make it with new_group(ranks, backend="gloo")'
            )

    def together(self, function: Callable[[], T]) -> list[T]:
        """The results of `function` on all ranks. If it raises on one rank, all ranks raise, so that none waits.

        KeyboardInterrupt and other exceptions that end a program are raised again on their rank, after the other ranks
        know of them.
        """
        mine: Any = None
        error: str | None = None
        cause: BaseException | None = None
        try:
            mine = function()
        except CheckpointException as failed:  # raised by torch on all ranks; not an `Exception`
            rank, (first, _) = min(failed.failures.items())
            error, cause = f"rank {rank}: {error_text(first)}", first if isinstance(first, Exception) else None
        except BaseException as failed:
            error, cause = error_text(failed), failed
        answers: list[Any] = [(mine, error)]
        try:
            if self.group is not None:
                answers = [None] * self.size
                dist.all_gather_object(answers, (mine, error), group=self.group)
        except RuntimeError as lost:  # a rank was killed
            raise CheckpointError(error or f"a rank does not answer: {lost}") from lost
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        errors = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
        if errors:
            where = f"rank {errors[0][0]}: " if self.size > 1 and not errors[0][1].startswith("rank ") else ""
            raise CheckpointError(f"{where}{errors[0][1]}") from cause
        return [answer for answer, _ in answers]

    def first(self, function: Callable[[], T]) -> T:
        """The result of `function` on the first rank, the only one that calls it."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def error_text(error: BaseException) -> str:
    """An error in one line, also of those that say nothing by themselves."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, Exception) and not isinstance(error, LookupError) and str(error):
        return str(error)
    return f"it was ended by {type(error).__name__}" + (f": {error}" if str(error) else "")
