"""Decisions: what a step does about a verdict on its gradients.

A `Decision` is a verdict and what follows from it: the scale to divide by, the norm to clip to, and whether to skip. A
scaler, a step in the backward or a trainer passes it to the optimizer by `StepsOnVerdict.apply` or
`StepsOnVerdict.decide`. Otherwise the optimizer decides by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from halfstep.kernels.optimizer.layout import Control
from halfstep.kernels.unscale import Factor, Verdict
from halfstep.numerics.scaling.options import MAX_NORM
from halfstep.numerics.scaling.stand_ins import is_freed, refuse_freed
from halfstep.numerics.scaling.verdict import Checker, norm_of, parameters_of

LARGEST_NORM = torch.finfo(torch.float32).max  # clips nothing: the factor is 1, and gradients times 1 keep their bits


def skipping_zeros(control: Control, verdict: Verdict) -> Control:
    """The same control, except that the step is skipped if the gradients of all ranks are 0. Step counts stay too.

    Without L2 decay the step would change no moments, and with eps = 0 the update would be 0 / 0.
    """
    # The sum is 0 only if all elements are: chunks are scaled before they are squared, so none underflows completely.
    nothing = (verdict.sum_of_squares == 0).float()
    if control.found_inf is not None:
        found_inf = control.found_inf.reshape(()).to(device=nothing.device, dtype=torch.float32)
        nothing = torch.maximum(nothing, found_inf)
    return Control(control.grad_scale, nothing, control.sum_of_squares)


class Decision(NamedTuple):
    """The decision about one step of an optimizer: that of a scaler, or of a step in the backward."""

    verdict: Verdict  # on the unscaled gradients
    scale: torch.Tensor | None  # 0-dim fp32, divides the gradients; None if they were unscaled before, and may differ
    max_norm: float | None  # to which `step` clips, using the verdict's norm; None: no limit but the optimizer's own
    skips: bool = True  # whether the step is skipped if the verdict found non-finite numbers, as with a scaler


class StepsOnVerdict:
    """Base of optimizers that unscale, clip and skip inside their step, as a `Decision` says: those of halfstep.

    Attributes:
        max_grad_norm: the 2-norm to which each step clips, or None.
        backward_handle: what steps parts of the parameters in the backward (integrations/release.py), or None.
    """

    step: Callable[..., Any]
    max_grad_norm: float | None
    backward_handle: Any = None
    # torch's scalers then unscale in place, reduce their flag where they can, and do not call step() after an overflow,
    # on which Accelerate relies. With True, ShardedGradScaler would not reduce it, and Lightning would not clip.
    _step_supports_amp_scaling = False
    _checker: Checker | None = None
    _last_verdict: Verdict | None = None
    _squares: torch.Tensor | None = None  # of the last step that clipped
    _decision: Decision | None = None  # about the present or the next step
    _lasts = False  # whether the decision stays when a step has been taken

    @property
    def checker(self) -> Checker:
        """The checker of this optimizer's gradients where no scaler checks them."""
        if self._checker is None:
            self._checker = Checker(self)
        return self._checker

    @property
    def last_verdict(self) -> Verdict | None:
        """The verdict by which the last step was taken; None if nothing checked its gradients."""
        return self._last_verdict

    def apply(self, decision: Decision, step: Callable[[], Any] | None = None) -> Any:
        """Take a step that unscales, clips and skips as decided elsewhere, by a loss scaler for example.

        `step` is what to call, by default ``self.step``: the step of a wrapper calls that of this optimizer. Returns
        what it returns.
        """
        self._decision, self._lasts = decision, True
        try:
            return self.step() if step is None else step()
        finally:
            self._decision, self._lasts = None, False

    def decide(self, decision: Decision | None) -> None:
        """Make the next step unscale, clip and skip as `decision` says, or as without one; later steps do not."""
        self._decision, self._lasts = decision, False

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The 2-norm of the unscaled gradients before clipping in the last step that clipped: 0-dim, on the device."""
        return None if self._squares is None else self._squares.sqrt().float()

    @torch._disable_dynamo
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip all gradients together to a 2-norm in the next step, without a scaler; nothing is written.

        The gradients are read once, for the norm, and must not change before the step, which an overflow does not skip.
        If the backward has stepped, it has clipped to ``max_grad_norm``, which must be `max_norm` then.

        Args:
            max_norm: a number above 0. Infinity only computes the norm.

        Returns:
            The norm before clipping, over all ranks: 0-dim fp32, on the device of the gradients. NaN if it is not
            known, since the backward has stepped without clipping.

        Raises:
            ValueError: `max_norm` is not above 0.
            RuntimeError: the backward has stepped without clipping, or has clipped to another norm.
        """
        only_norm = max_norm == math.inf
        max_norm = LARGEST_NORM if only_norm else MAX_NORM.checked("max_norm", max_norm)
        if self.backward_handle is not None:
            return self.backward_handle.norm(None if only_norm else max_norm)
        parameters = parameters_of(self)
        if only_norm and any(is_freed(parameter.grad) for parameter in parameters):
            return torch.full((), math.nan, dtype=torch.float32, device="cpu")
        refuse_freed(parameters, "clipping")
        verdict = self.checker.verdict()
        if verdict is None:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        self.decide(Decision(verdict, None, max_norm, skips=False))
        return norm_of(verdict)

    def _limit(self) -> float | None:
        """The 2-norm to which the next step clips: the smaller of the scaler's and the optimizer's own, or None."""
        limit, decision = self.max_grad_norm, self._decision
        if decision is None or decision.max_norm is None:
            return limit
        return decision.max_norm if limit is None else min(limit, decision.max_norm)

    def _control(self, limit: float | None) -> Control:
        """Scale, flag and norm of this step, as decided elsewhere or, if clipping needs it, checked here."""
        decision, squares = self._decision, None
        self._last_verdict = None if decision is None else decision.verdict
        if decision is None:  # torch's scalers set these attributes on optimizers whose step() unscales
            scale, found_inf = (self._number(getattr(self, name, None)) for name in ("grad_scale", "found_inf"))
        else:
            scale, found_inf = decision.scale, decision.verdict.found_inf if decision.skips else None
            # Gradients that were unscaled in place may have changed since, so their sum is computed again.
            if decision.scale is not None or decision.max_norm is not None:
                squares = decision.verdict.sum_of_squares
        if limit is None:
            return Control(scale, found_inf)
        if squares is None:
            factor = None if scale is None else Factor(scale.float().reshape(()), inverted=True)
            verdict = self.checker.verdict(factor)
            squares = None if verdict is None else verdict.sum_of_squares
            self._last_verdict = verdict if decision is None else decision.verdict
        self._squares = squares
        return Control(scale, found_inf, squares)

    def _number(self, value: Any) -> torch.Tensor | None:
        if value is None or isinstance(value, torch.Tensor):
            return value
        device = next((parameter.device for parameter in parameters_of(self)), None)
        return torch.full((), float(value), dtype=torch.float32, device=device)
