"""The ranks that save or load one checkpoint together, and what they tell each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from halfstep.integrations.checkpoint_files import CheckpointError

T = TypeVar("T")

# The group of all ranks that is for checkpoints alone, and the default group it was made beside. Only weakly: who keeps
# a group beyond destroy_process_group makes torch abort at exit.
_own_group: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def _group_for_checkpoints() -> Any:
    """A gloo group of all ranks, so that a save in a thread never meets a collective of the training."""
    global _own_group
    default = dist.group.WORLD
    known = _own_group[1]() if _own_group is not None and _own_group[0]() is default else None
    if known is None:
        known = dist.new_group(backend="gloo")
        _own_group = weakref.ref(default), weakref.ref(known)
    return known


class Ranks:
    """The ranks that save or load together, and what they say to each other: small objects, over gloo."""

    def __init__(self, process_group: Any = None) -> None:
        self.rank, self.size = 0, 1
        self.group: Any = None
        if not (dist.is_available() and dist.is_initialized()):
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
        # torch cannot make a group of some ranks without the others' help, unless all are in equally many groups.
        self.group = _group_for_checkpoints() if base is dist.group.WORLD else base
        if "cpu:" not in dist.get_backend_config(self.group):
            raise ValueError(
                "Expected process_group to have a backend for CPUs, but got "
                f'{dist.get_backend_config(self.group)}: make it with new_group(ranks, backend="gloo")'
            )

    def all(self, mine: T) -> list[T]:
        """What each rank gives, in order."""
        if self.group is None:
            return [mine]
        everything: list[Any] = [None] * self.size
        dist.all_gather_object(everything, mine, group=self.group)
        return everything

    def together(self, function: Callable[[], T]) -> list[T]:
        """What `function` gives on each rank; if it raises on one, this raises on all, so that none waits in vain.

        What is no `Exception` (KeyboardInterrupt, SystemExit) is raised again on its rank, once the others know.
        """
        mine: Any = None
        error: str | None = None
        cause: BaseException | None = None
        try:
            mine = function()
        except CheckpointException as failed:  # torch's, of all ranks, and no `Exception`
            error = "; ".join(_error_text(one[0]) for one in failed.failures.values())
            cause = failed.failures.get(self.rank, [RuntimeError(error)])[0]
        except BaseException as failed:
            error, cause = _error_text(failed), failed
        try:
            answers = self.all((mine, error))
        except RuntimeError as lost:  # a rank was killed
            raise CheckpointError(error or f"a rank does not answer: {lost}") from lost
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        errors = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
        if errors:
            where = f"rank {errors[0][0]}: " if self.size > 1 else ""
            raise CheckpointError(f"{where}{errors[0][1]}") from cause
        return [answer for answer, _ in answers]

    def first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first rank, which alone calls it."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _error_text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, Exception) and not isinstance(error, LookupError) and str(error):
        return str(error)
    return (
        f"it was ended by {type(error).__name__}: {error}" if str(error) else f"it was ended by {type(error).__name__}"
    )
