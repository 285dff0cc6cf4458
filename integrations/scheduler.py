"""A wrapper of learning rate schedulers that does not advance on steps that the loss scaler skipped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.numerics.scaling.scaler import GradScaler

OWN = ("scheduler", "scaler", "_skips")


class SkipCount:
    """Reports after each step of a scaler whether it was skipped. Each skip is reported once.

    The host never waits: on a CPU, a skip is reported for its own step; on a GPU, one or two steps later.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler, self._answer = scaler, False
        self._updates, self._reported = scaler._updates, scaler.skips_known()

    def was_skipped(self, all_steps: bool = False) -> bool:
        """Whether any step since the last call was skipped or, with `all_steps`, whether all of them were.

        Without an `update` in between, the answer stays the same.
        """
        if updates := self._scaler._updates - self._updates:
            skips = self._scaler.skips_known() - self._reported
            self._answer = skips >= (updates if all_steps else 1)
            self._updates += updates
            self._reported += min(skips, updates)  # skips of earlier steps that arrived late are left for later calls
        return self._answer

    def __reduce__(self) -> Any:
        return SkipCount, (self._scaler,)  # a copied scaler counts from 0


def _passed_on(name: str) -> Any:
    """A method that calls the wrapped scheduler's method of this name."""
    return lambda self, *args, **kwargs: getattr(self.scheduler, name)(*args, **kwargs)


class SkipAwareScheduler(LRScheduler):
    """Advance a learning rate scheduler only for optimizer steps that the scaler did not skip.

    Call `step` after every ``scaler.update()``, where you would call the wrapped scheduler's `step`. It advances if any
    step was taken since the last call, so a schedule stepped once per epoch, or by a metric, is held only if all steps
    in between were skipped. Further calls before the next ``update()`` do the same as the first, because Accelerate
    steps a schedule once per process. The host never waits. On a CPU, skips are known immediately, so the schedule is
    exact. On a GPU, a skip is known one or two steps later: the skipped step counts as taken, and the schedule is held
    once afterwards.

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
        # Do not call the base class's __init__, which would advance the optimizer's schedule again.
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(
                f"Expected scheduler to be an object with a method step(), but got a {type(scheduler).__name__}"
            )
        if not isinstance(scaler, GradScaler):
            raise TypeError(f"Expected scaler to be a halfstep.GradScaler, but got a {type(scaler).__name__}")
        self.scheduler, self.scaler, self._skips = scheduler, scaler, SkipCount(scaler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if a step was taken since the last call, as far as the host knows."""
        if not self._skips.was_skipped(all_steps=True):
            self.scheduler.step(*args, **kwargs)

    # torch's composite schedulers call the methods that begin with an underscore.
    get_last_lr, get_lr = _passed_on("get_last_lr"), _passed_on("get_lr")
    state_dict, load_state_dict = _passed_on("state_dict"), _passed_on("load_state_dict")
    _initial_step, _update_lr = _passed_on("_initial_step"), _passed_on("_update_lr")

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # not set yet while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value) if name in OWN else setattr(self.scheduler, name, value)
