"""Lightning Fabric: a `Fabric` and precision plugins with halfstep's loss scaling and clipping.

Fabric selects the plugin by name, and its `clip_gradients` writes gradients. The `Fabric` here selects halfstep's
plugins for the 16-bit names, and clips in the next step.
"""

from __future__ import annotations

from typing import Any

import lightning.fabric as theirs
import torch
from lightning.fabric.plugins import HalfPrecision as _HalfPrecision
from lightning.fabric.plugins import MixedPrecision as _MixedPrecision

from halfstep.integrations.trainers.folding import checked_scaler, clip_in_next_step, folds, scaler_metrics
from halfstep.numerics.scaling.scaler import GradScaler, unwrapped

MIXED, HALF = ("16-mixed", "bf16-mixed"), ("16-true", "bf16-true")


class FabricMixedPrecision(_MixedPrecision):
    """Fabric's `MixedPrecision`, with fp32 weights and a 16-bit forward: its scaler is a `halfstep.GradScaler`."""

    def __init__(self, precision: Any, device: str, scaler: GradScaler | None = None) -> None:
        super().__init__(precision, device, checked_scaler(scaler, device if precision == "16-mixed" else None))


class FabricHalfPrecision(_HalfPrecision, _MixedPrecision):
    """Fabric's `HalfPrecision`, with 16-bit weights, and with a scaler for fp16, as in `MixedPrecision`."""

    def __init__(self, precision: Any = "16-true", device: str = "cuda", scaler: GradScaler | None = None) -> None:
        super().__init__(precision)
        self.scaler = checked_scaler(scaler, device if precision == "16-true" else None)


class Fabric(theirs.Fabric):
    """`lightning.fabric.Fabric` for halfstep optimizers: the same arguments, and `scaler`.

    * ``precision="16-mixed"``, ``"bf16-mixed"``, ``"16-true"`` and ``"bf16-true"`` select the plugins of this module,
      also on a CPU.
    * `clip_gradients` with ``max_norm`` returns the norm without writing gradients; the next step clips.
    * `load` loads scalers and schedules under FSDP2 too.

    Args:
        scaler: a `halfstep.GradScaler` for fp16. Default: one with default options, on the device of `accelerator`.

    Attributes:
        scaler: the scaler; None if the loss is not scaled. It may be part of the state passed to `save` and `load`.

    Raises:
        TypeError: `scaler` is not a `halfstep.GradScaler`.
        ValueError: a scaler was passed, but `precision` needs none.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        precision: Any = None,
        plugins: Any = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        if checked_scaler(scaler) is not None and precision not in ("16-mixed", "16-true"):
            raise ValueError(f"Expected precision to be '16-mixed' or '16-true' with a scaler, but got {precision!r}")
        if precision in MIXED + HALF:
            device = "cuda" if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else "cpu"
            cls: Any = FabricMixedPrecision if precision in MIXED else FabricHalfPrecision
            listed = [] if plugins is None else plugins if isinstance(plugins, (list, tuple)) else [plugins]
            plugins, precision = [*listed, cls(precision, device, scaler)], None
        super().__init__(accelerator=accelerator, strategy=strategy, precision=precision, plugins=plugins, **kwargs)

    @property
    def scaler(self) -> Any:
        return getattr(self._precision, "scaler", None)

    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Clip gradients; see `lightning.fabric.Fabric.clip_gradients`.

        With ``max_norm``, the 2-norm and a halfstep optimizer, the next step clips, and no gradient is written.

        Raises:
            RuntimeError: the norm is not finite, `error_if_nonfinite` is true, and there is no scaler to skip the step.
        """
        if max_norm is not None and clip_val is None and norm_type == 2 and folds(optimizer):
            norm = clip_in_next_step(optimizer, max_norm, self.scaler)
            if error_if_nonfinite and self.scaler is None and not norm.isfinite():
                unwrapped(optimizer).decide(None)
                raise RuntimeError(
                    f"Expected the norm of the gradients to be finite, but got {norm.item()}: pass "
                    "error_if_nonfinite=False to take this step anyway"
                )
            return norm
        error_if_nonfinite = error_if_nonfinite and self.scaler is None
        return super().clip_gradients(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)

    def load(self, path: Any, state: Any = None, strict: bool = True, **options: Any) -> dict[str, Any]:
        """Load a checkpoint into the objects in `state`; see `lightning.fabric.Fabric.load`.

        Under FSDP2, Fabric loads only models and optimizers, and replaces scalers and schedules in `state` by their
        saved state dicts. This method loads them too.
        """
        objects = dict(state or {})
        rest: dict[str, Any] = super().load(path, state, strict, **options)
        for name, target in objects.items():
            if isinstance(state[name], dict) and hasattr(target, "load_state_dict"):
                target.load_state_dict(state[name])
                state[name] = target
        return rest

    def scaler_metrics(self) -> dict[str, float]:
        """``halfstep/scale`` and ``halfstep/skipped`` for `log_dict`; empty without a scaler."""
        return scaler_metrics(self.scaler)
