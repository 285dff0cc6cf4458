"""torchft: `OptimizerWrapper` with loss scaling, clipping and skipped steps of halfstep.

torchft's wrapper steps the optimizer if its group of replicas commits. A replica that joins or recovers gets its
weights, state and scale from another inside that question, after the backward. Gradients are therefore unscaled,
checked and clipped after it here, and a refused commit leaves the scale as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torchft.optim import OptimizerWrapper as _OptimizerWrapper

from halfstep.integrations.trainers.folding import SkipCount, clip_in_next_step, scaler_metrics, scaler_or_raise
from halfstep.numerics.scaling.scaler import MAX_NORM, GradScaler


class OptimizerWrapper(_OptimizerWrapper):
    """`torchft.OptimizerWrapper` for optimizers of halfstep: the same arguments, and two more.

    Call `step` instead of ``scaler.step`` and ``scaler.update``. The state that the manager sends to other replicas
    must contain that of the scaler.

    Args:
        scaler: a `halfstep.GradScaler` for fp16. All replicas have the same averaged gradients, so they skip alike.
        max_norm: the 2-norm to which steps clip the unscaled gradients. None: they do not clip.

    Attributes:
        step_was_skipped: whether the last step was refused or skipped. On a GPU an overflow is known one or two steps
            later.
        refused: the number of refused commits since the start of the process.
        grad_norm: the norm of the unscaled gradients before clipping in the last step that was not refused: 0-dim.

    Raises:
        TypeError: `scaler` is not a `halfstep.GradScaler`.
        ValueError: `max_norm` is not a finite number above 0.
    """

    def __init__(
        self,
        manager: Any,
        optim: torch.optim.Optimizer,
        scaler: GradScaler | None = None,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(manager, optim)
        self.scaler = scaler_or_raise(scaler)
        self.max_norm = None if max_norm is None else MAX_NORM.checked("max_norm", max_norm)
        self.step_was_skipped, self.refused = False, 0
        self.grad_norm: torch.Tensor | None = None
        self._skips = None if scaler is None else SkipCount(scaler)

    def step(self, closure: None = None) -> None:
        """Step and update the scale, if the replicas commit."""
        if closure is not None:
            raise ValueError("Expected closure to be None, but got one: torchft's wrapper does not support closures")
        if not self.manager.should_commit():
            self.step_was_skipped = True
            self.refused += 1
            return
        if self.max_norm is not None:
            self.grad_norm = clip_in_next_step(self.optim, self.max_norm, self.scaler)
        if self.scaler is None or self._skips is None:
            self.optim.step()
            self.step_was_skipped = False
            return
        self.scaler.step(self.optim)
        self.scaler.update()
        self.step_was_skipped = self._skips.was_skipped()

    def scaler_metrics(self) -> dict[str, float]:
        """``refused_commits``, and with a scaler ``loss_scale`` and ``skipped_steps``. Waits for the device."""
        return {**scaler_metrics(self.scaler), "refused_commits": float(self.refused)}
