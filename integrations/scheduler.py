"""A learning rate scheduler that does not count the steps that a loss scaler skipped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.numerics.scaling.scaler import GradScaler

OWN = ("scheduler", "scaler", "_skips_counted", "_updates_seen", "_holds")


class SkipAwareScheduler(LRScheduler):
    """Step a learning rate scheduler only for optimizer steps that the scaler did not skip.

    Call `step` after every ``scaler.update()``, where you would call the wrapped scheduler's `step`. It advances if any
    step was taken since the last call, so a schedule stepped once per epoch, or by a metric, is held only if all steps
    in between were skipped. Further calls before the next ``update()`` do the same as the first, because Accelerate
    steps a schedule once per process. The host never waits. On a CPU it knows immediately whether the step was skipped,
    so the schedule is exact. On a GPU it learns of a skip a step or two later; until then the step counts as taken, and
    the schedule is then held once.

    It is an `LRScheduler`. All attributes except `scheduler` and `scaler` are those of the wrapped scheduler.

    Args:
        scheduler: any of torch's schedulers, or an object with a method ``step()``.
        scaler: the scaler that steps the optimizer.

    Raises:
        TypeError: `scheduler` has no ``step``, or `scaler` is not a `halfstep.GradScaler`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = halfstep.AdamW([weight], lr=1.0)
        >>> scaler = halfstep.GradScaler("cpu")
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        >>> scheduler = halfstep.SkipAwareScheduler(scheduler, scaler)
        >>> for factor in (1.0, float("inf"), 1.0):
        ...     optimizer.zero_grad()
        ...     scaler.scale((weight * factor).sum()).backward()
        ...     _ = scaler.step(optimizer)
        ...     scaler.update()
        ...     scheduler.step()
        >>> scheduler.get_last_lr()  # two steps of three were taken
        [0.25]
    """

    scheduler: Any
    scaler: GradScaler

    def __init__(self, scheduler: LRScheduler, scaler: GradScaler) -> None:
        # The base class's __init__ is not called, because it would step the optimizer's schedule again.
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(
                f"Expected scheduler to be an object with a method step(), but got a {type(scheduler).__name__}"
            )
        if not isinstance(scaler, GradScaler):
            raise TypeError(f"Expected scaler to be a halfstep.GradScaler, but got a {type(scaler).__name__}")
        self.scheduler, self.scaler = scheduler, scaler
        self._start()

    def _start(self) -> None:
        """Ignore the steps that the scaler has skipped before."""
        self._skips_counted, self._updates_seen = self.scaler.skips_known(), self.scaler._updates
        self._holds = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if a step was taken since the last call, as far as the host knows."""
        updates = self.scaler._updates - self._updates_seen
        if updates:
            self._updates_seen += updates
            skips = self.scaler.skips_known() - self._skips_counted
            self._holds = skips >= updates
            # Skips that become known late hold as many later calls, unless a step was also taken.
            self._skips_counted += updates if self._holds else skips
        if not self._holds:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rates that the wrapped scheduler set last."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """The result of the wrapped scheduler's ``get_lr``."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the wrapped scheduler, saved with or without this wrapper."""
        self.scheduler.load_state_dict(state_dict)

    # SequentialLR calls these methods of its schedulers.

    def _initial_step(self) -> None:
        self.scheduler._initial_step()

    def _update_lr(self, epoch: int | None = None) -> None:
        self.scheduler._update_lr(epoch)

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # not set yet, during unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()  # a copy of a scaler counts again
