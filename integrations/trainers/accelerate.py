"""Accelerate: an `Accelerator` with halfstep's loss scaling, clipping and skipped steps.

Accelerate has no argument for a scaler, clips by writing gradients, and detects a skipped step only because
``optimizer.step`` was not called, whereas halfstep optimizers are called and skip on the device. The `Accelerator` here
overrides the methods concerned, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from halfstep.integrations.optim.classes import attribute
from halfstep.integrations.scheduler import SkipCount
from halfstep.integrations.trainers.folding import checked_scaler, clip_in_next_step, folds_all, scaler_metrics
from halfstep.numerics.scaling.decision import parameters_of
from halfstep.numerics.scaling.scaler import GradScaler


class SkipAwareOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer wrapper, with a `step_was_skipped` that asks the scaler."""

    _loading = False  # whether the accelerator is loading a checkpoint

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: GradScaler | None = None) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self._skips = None if self.scaler is None else SkipCount(self.scaler)

    def step(self, closure: Any = None) -> None:
        """Step and update the scale, unless gradients are being accumulated.

        If the gradients of several optimizers were unscaled or clipped together, the last step updates the scale.
        """
        if self.scaler is None or not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        if self._loading or (self.scaler._scale is None and all(group["lr"] == 0 for group in self.param_groups)):
            # Before torch loads an FSDP2 checkpoint, it creates the state with a step at a learning rate of 0, which
            # must bypass the scaler.
            self.optimizer.step(closure)
            return
        self.scaler.step(self.optimizer, closure)
        if not self.scaler.awaits_step():
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the step was skipped. Does not wait: on a GPU, a skip is reported one or two steps later."""
        return self._skips is not None and self._skips.was_skipped()


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for halfstep optimizers: the same arguments, and `scaler`.

    * With ``mixed_precision="fp16"`` the scaler is a `halfstep.GradScaler`, with the options of ``GradScalerKwargs``.
    * `clip_grad_norm_` of all parameters of one optimizer returns their norm without writing gradients; the next step
      clips. Other calls clip in place, as in Accelerate.
    * `optimizer_step_was_skipped` and ``optimizer.step_was_skipped`` are true after a skipped step, so prepared
      schedules do not advance.

    Args:
        scaler: a scaler for options that ``GradScalerKwargs`` does not have, or for fp16 weights with
            ``mixed_precision="no"``. Default: a new one where Accelerate creates one, with ``mixed_precision="fp16"``.

    Raises:
        TypeError: `scaler` is not a `halfstep.GradScaler`.
        ValueError: both `scaler` and ``GradScalerKwargs`` were passed.
    """

    _clipped: set[int] | None = None  # while clip_grad_norm_ calls Accelerate's, the ids of its parameters

    def __init__(self, *args: Any, scaler: GradScaler | None = None, **kwargs: Any) -> None:
        self.scaler: Any = None
        super().__init__(*args, **kwargs)
        self._use(scaler)

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator, scaler: GradScaler | None = None) -> Accelerator:
        """Convert an accelerator that a library created to this class, in place, before it prepares anything.

        Raises:
            TypeError: the accelerator belongs to another subclass, or `scaler` is not a `halfstep.GradScaler`.
            RuntimeError: the accelerator has already prepared an optimizer.
        """
        if type(accelerator) not in (accelerate.Accelerator, cls):
            raise TypeError(
                f"Expected accelerator to be an accelerate.Accelerator, but got a {type(accelerator).__qualname__}: "
                f"derive that class from {cls.__module__}.Accelerator"
            )
        if accelerator._optimizers:
            raise RuntimeError(
                "Expected an accelerator that has not prepared an optimizer, but got one with "
                f"{len(accelerator._optimizers)}: call adopt before prepare"
            )
        accelerator.__class__ = cls  # the library has no hook for the class, and refers to this object already
        accelerator._use(scaler)
        return accelerator

    def _use(self, scaler: GradScaler | None) -> None:
        if checked_scaler(scaler) is not None and self.scaler_handler is not None:
            raise ValueError(
                "Expected scaler or GradScalerKwargs, but got both: pass the options to halfstep.GradScaler"
            )
        if scaler is None and self.scaler is not None and not isinstance(self.scaler, GradScaler):
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            scaler = GradScaler(self.device.type, **options)
        if scaler is not None:
            self.scaler = scaler

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Prepare an optimizer; see `accelerate.Accelerator.prepare_optimizer`.

        Raises:
            TypeError: the attribute `scaler` was set to something other than a `halfstep.GradScaler`.
        """
        checked_scaler(self.scaler)
        if not isinstance(optimizer, AcceleratedOptimizer):
            placed = self.device_placement if device_placement is None else device_placement
            optimizer = SkipAwareOptimizer(optimizer, placed, self.scaler)
            optimizer._is_accelerate_prepared = True  # makes Accelerate's method leave it as it is
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale a loss and compute its gradients; see `accelerate.Accelerator.backward`.

        Raises:
            RuntimeError: the attribute `scaler` was set after an optimizer was prepared, so it would not unscale.
        """
        wrappers = [wrapper for wrapper in self._optimizers if isinstance(wrapper, SkipAwareOptimizer)]
        if any(wrapper.scaler is not self.scaler for wrapper in wrappers):
            raise RuntimeError(
                "Expected accelerator.scaler to be that of the prepared optimizers, but got another: pass scaler= to "
                "Accelerator, or set it before prepare"
            )
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of some optimizers in place, by default of all prepared ones not unscaled yet.

        When `clip_grad_norm_` calls this, only optimizers that have any of its parameters are unscaled.
        """
        if self.scaler is None:
            return
        if optimizer is None:
            optimizer = [wrapper for wrapper in self._optimizers if not self.scaler.is_unscaled(wrapper)]
        if (ids := self._clipped) is not None:
            optimizer = [wrapper for wrapper in optimizer if not ids.isdisjoint(map(id, parameters_of(wrapper)))]
        for wrapper in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            self.scaler.unscale_(wrapper)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients; see `accelerate.Accelerator.clip_grad_norm_`.

        If `parameters` are those of one prepared halfstep optimizer and `norm_type` is 2, its next step clips, and
        gradients are neither unscaled nor written.

        Returns:
            The norm of the unscaled gradients before clipping, over all ranks.
        """
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if norm_type == 2 and max_norm > 0 and self.sync_gradients:
            for optimizer in self._optimizers:
                if isinstance(optimizer, SkipAwareOptimizer) and folds_all(optimizer, parameters):
                    return clip_in_next_step(optimizer, max_norm, self.scaler)
        with attribute(self, "_clipped", set(map(id, parameters))):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint of `save_state`; see `accelerate.Accelerator.load_state`."""
        with ExitStack() as stack:
            for wrapper in self._optimizers:
                if isinstance(wrapper, SkipAwareOptimizer):
                    stack.enter_context(attribute(wrapper, "_loading", True))
            super().load_state(*args, **kwargs)

    def scaler_metrics(self) -> dict[str, float]:
        """``halfstep/scale`` and ``halfstep/skipped`` for `log`; empty without a scaler."""
        return scaler_metrics(self.scaler)
