"""A learning-rate schedule that counts the steps that were taken, not those that a loss scaler skipped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.numerics.scaler import GradScaler


class SkipAwareScheduler:
    """Steps a scheduler only for steps of the optimizer that the scaler did not skip.

    Call `step` once after every ``scaler.update()``, wherever the wrapped scheduler's own would have been called. The
    host never waits: on a CPU it knows at once whether the step was skipped, so the schedule is exact. On a GPU news
    of a skip arrives a step or two later; until then the step counts as taken, and the schedule then stands still once.

    Args:
        scheduler: any of torch's schedulers that is stepped once per iteration.
        scaler: the scaler that steps the optimizer.

    Raises:
        TypeError: `scheduler` has no ``step``, or `scaler` is not a `halfstep.GradScaler`.
    """

    def __init__(self, scheduler: LRScheduler, scaler: GradScaler) -> None:
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(f"scheduler is a {type(scheduler).__name__}; allowed are objects with a method step()")
        if not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler is a {type(scaler).__name__}; allowed is halfstep.GradScaler")
        self.scheduler, self.scaler = scheduler, scaler
        self._skips_counted = scaler.skips_known()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless a step was skipped since the last call that was not yet allowed for."""
        known = self.scaler.skips_known()
        if known > self._skips_counted:
            self._skips_counted += 1
            return
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rates that the wrapped scheduler set last."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped scheduler, saved with or without this wrapper."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet: while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)
