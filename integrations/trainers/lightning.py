"""Lightning: `MixedPrecision` and `HalfPrecision` plugins with halfstep's loss scaling, clipping and skipped steps.

Lightning's mixed-precision plugin takes a scaler, but unscales and clips by writing gradients, and advances schedules
after a skipped step. Its plugin for 16-bit weights has no scaler. The classes here have the same names as Lightning's,
which stores a plugin's state under its class name: checkpoints of either load into the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch import plugins as theirs
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ReduceLROnPlateau

from halfstep.integrations.monitor import AmpMonitor
from halfstep.integrations.scheduler import SkipAwareScheduler
from halfstep.integrations.trainers.folding import checked_scaler, clip_in_next_step, folds, scaler_metrics
from halfstep.numerics.scaling.scaler import GradScaler


class MixedPrecision(theirs.MixedPrecision):
    """Lightning's plugin of the same name, with fp32 weights and a 16-bit forward.

    ``gradient_clip_val`` clips inside the step of a halfstep optimizer. If the module or a callback overrides
    ``on_before_optimizer_step``, which may read gradients, they are unscaled in place first.

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: the device type of the forward, as for `torch.autocast`.
        scaler: a `halfstep.GradScaler` for ``"16-mixed"``. Default: one with default options.

    Raises:
        TypeError: `scaler` is not a `halfstep.GradScaler`.
    """

    scaler: GradScaler | None

    def __init__(self, precision: Any, device: str, scaler: GradScaler | None = None) -> None:
        super().__init__(precision, device, checked_scaler(scaler, device if precision == "16-mixed" else None))

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Wrap the schedules, so that they do not advance on skipped steps, except those driven by a metric."""
        if self.scaler is not None:
            for config in lr_schedulers:
                if not isinstance(config.scheduler, (SkipAwareScheduler, ReduceLROnPlateau)):
                    config.scheduler = SkipAwareScheduler(config.scheduler, self.scaler)
        return super().connect(model, optimizers, lr_schedulers)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, which includes the backward, then clip, step and update the scale."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # no backward took place
            self._after_closure(model, optimizer)
            return result
        if not folds(optimizer) or _looks_at_gradients(model):
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return output

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by norm in the next step if the optimizer can, otherwise in place."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM and folds(optimizer):
            clip_in_next_step(optimizer, clip_val, self.scaler)
            return
        if self.scaler is not None and not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)
        theirs.Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class HalfPrecision(theirs.HalfPrecision, MixedPrecision):
    """Lightning's plugin of the same name, with 16-bit weights, whose masters the optimizer keeps.

    It steps and clips like `MixedPrecision`.

    Args:
        precision: ``"16-true"`` or ``"bf16-true"``.
        scaler: a `halfstep.GradScaler`. Default: one with default options for ``"16-true"``, none for bf16.
        device: the device type of the default scaler.

    Raises:
        TypeError: `scaler` is not a `halfstep.GradScaler`.
    """

    def __init__(self, precision: Any = "16-true", scaler: GradScaler | None = None, device: str = "cuda") -> None:
        theirs.HalfPrecision.__init__(self, precision)
        self.scaler = checked_scaler(scaler, device if precision == "16-true" else None)


def _looks_at_gradients(model: Any) -> bool:
    """Whether the module or a callback overrides a hook between the backward and the step."""
    hooks = "on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping"
    return any(is_overridden(hook, model) for hook in hooks) or any(
        is_overridden(hook, callback, Callback) for callback in model.trainer.callbacks for hook in hooks[:2]
    )


class ScalerMonitor(Callback):
    """Logs the `scalars` of a monitor, or of the precision plugin's scaler, after each step that Lightning logs.

    Args:
        monitor: a `halfstep.AmpMonitor` of the module, which is attached to the first optimizer.
    """

    def __init__(self, monitor: AmpMonitor | None = None) -> None:
        self.monitor = monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor."""
        if self.monitor is not None:
            self.monitor.attach(trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log the metrics. Only the first call waits for the device."""
        if trainer._logger_connector.should_update_logs:
            pl_module.log_dict(scaler_metrics(getattr(trainer.precision_plugin, "scaler", None), self.monitor))
