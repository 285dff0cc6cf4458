"""Dynamic loss scaling that never waits for the device: a drop-in for `torch.amp.GradScaler`.

Micikevicius et al., "Mixed precision training" (2018), §3.2. The loss is multiplied by S, gradients by 1/S; a step
whose unscaled gradients are not all finite is skipped and S multiplied by `backoff_factor`; after `growth_interval`
clean steps in a row S is multiplied by `growth_factor`. With S a power of two, scaling changes no bit.

What differs from torch's, each because torch's goes wrong there:

* Checking reads gradients and never writes them; optimizers of halfstep unscale inside their own step.
* fp16 gradients are accepted and unscaled in fp32; gradients of different dtypes may be mixed.
* The flag handed to optimizers is 0 or 1, whatever the number of devices: torch's fused kernels take 2 for "go ahead".
* Overflow is looked for after unscaling, so a scale below 1 cannot turn finite gradients into infinite updates.
* The scale never becomes 0, infinite or NaN.
* With DTensor gradients (FSDP2, tensor parallel) every rank of every mesh involved takes the same decision.
* A fp16 or bf16 loss is scaled in fp32; at S = 65536 an fp16 loss of 1 would overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep.numerics.gradients import GradientCheck, check_gradients

# 1 / scale must be finite too.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


def _in_fp32(outputs: Any) -> Any:
    """Losses in 16-bit formats as fp32, inside whatever lists and tuples they stand."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(map(_in_fp32, outputs))
    return map(_in_fp32, outputs) if isinstance(outputs, Iterable) else outputs


def _checked(name: str, value: Any, allowed: str, fits: Callable[[Any], bool]) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not fits(value):
        raise ValueError(f"{name} is {value!r}; allowed are {allowed}")
    return value


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaler with the methods, attributes and state_dict keys of `torch.amp.GradScaler`.

    Args:
        device: device type of the scale, ``"cuda"`` or ``"cpu"``.
        init_scale: the first S.
        growth_factor: S is multiplied by this after `growth_interval` clean steps; above 1.
        backoff_factor: S is multiplied by this after an overflow; between 0 and 1.
        growth_interval: clean steps in a row before S grows.
        enabled: if False, every method passes through.
        min_scale: S never falls below this. Default: 2^-126, the least whose inverse is finite.
        max_scale: S never rises above this. Default: 2^126.
        hysteresis: overflows tolerated before S backs off; each still skips its step. Refilled when S grows (Megatron).
        process_group: ranks that must skip together although nothing shows that they share a model (pipeline stages).

    Raises:
        ValueError: a number is out of its range.

    Note:
        `step` with an optimizer of halfstep waits for nothing. Other optimizers that do not take the found_inf flag
        themselves (``fused=True`` does) make `step` read one flag from the device, as torch's scaler does.
        After `step`, ``.grad`` still holds the scaled gradients; call `unscale_` first to have them unscaled in place.
        An fp16 gradient unscaled in place is rounded to fp16 again; inside the step it is not.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        process_group: Any = None,
    ) -> None:
        if enabled:
            in_range = f"numbers from {SMALLEST_SCALE} to {LARGEST_SCALE}"
            _checked("growth_factor", growth_factor, "finite numbers above 1", lambda x: x > 1)
            _checked("backoff_factor", backoff_factor, "numbers between 0 and 1, both excluded", lambda x: 0 < x < 1)
            _checked("growth_interval", growth_interval, "whole numbers from 1", lambda x: x >= 1 and x == int(x))
            _checked("hysteresis", hysteresis, "whole numbers from 1", lambda x: x >= 1 and x == int(x))
            for name, value in (("min_scale", min_scale), ("max_scale", max_scale), ("init_scale", init_scale)):
                if value is not None:
                    _checked(name, value, in_range, lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE)
            low = SMALLEST_SCALE if min_scale is None else min_scale
            high = LARGEST_SCALE if max_scale is None else max_scale
            _checked(
                "init_scale",
                init_scale,
                f"numbers from min_scale {low} to max_scale {high}",
                lambda x: low <= x <= high,
            )
            self._min_scale, self._max_scale = float(low), float(high)
        super().__init__(device, float(init_scale), growth_factor, backoff_factor, growth_interval, enabled)
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._hysteresis_tracker: torch.Tensor | None = None
        self._process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or an iterable of losses, by the scale, in fp32 at least."""
        return super().scale(_in_fp32(outputs)) if self._enabled else outputs

    # ----------------------------------------------------------------------------------------------------- checking

    def _check(self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, write: bool) -> GradientCheck | None:
        """Check an optimizer's gradients times `inv_scale`, and remember the answer until `update`."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads = [grad for grad in map(attrgetter("grad"), parameters) if grad is not None]
        if any(map(attrgetter("is_sparse"), grads)):
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse and not parameter.grad.is_coalesced():
                    # Duplicates may overflow in their sum, which is what the optimizer will see.
                    parameter.grad = parameter.grad.coalesce()
            grads = [grad for grad in map(attrgetter("grad"), parameters) if grad is not None]
        check = check_gradients(grads, inv_scale, write=write, process_group=self._process_group)
        state = self._per_optimizer_states[id(optimizer)]
        # One entry, so that sums over devices stay 0 or 1.
        state["found_inf_per_device"] = {} if check is None else {check.found_inf.device: check.found_inf}
        state["gradient_check"] = check
        return check

    def _inverse(self) -> torch.Tensor:
        assert self._scale is not None
        return self._scale.double().reciprocal().float()

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        self._check(optimizer, inv_scale, write=True)
        result: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        self._check(optimizer, self._inverse(), write=False)
        result: dict[str, Any] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return result

    # ------------------------------------------------------------------------------------------------ step and update

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients overflowed; see `torch.amp.GradScaler.step`.

        Raises:
            RuntimeError: a closure was passed; a second `step` before `update`.
            AssertionError: no gradient was found, or `scale` was never called.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or any(callable(argument) for argument in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a closure would compute new "
                "gradients after the check; call the closure yourself, then step(optimizer)"
            )
        kwargs.pop("closure", None)
        self._check_scale_growth_tracker("step")
        if not getattr(optimizer, "_accepts_sum_of_squares", False):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient."
            )
        check: GradientCheck = state["gradient_check"]
        # torch's protocol for optimizers that unscale and skip by themselves, and the sum of squares for clipping. Once
        # unscaled in place, gradients may have been changed since: the optimizer then sums them again if it clips.
        untouched = state["stage"] is OptState.READY
        optimizer.grad_scale = self._scale if untouched else None  # type: ignore[attr-defined]
        optimizer.found_inf = check.found_inf  # type: ignore[attr-defined]
        optimizer.sum_of_squares = check.sum_of_squares if untouched else None  # type: ignore[attr-defined]
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf, optimizer.sum_of_squares  # type: ignore[attr-defined]
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale after the step; see `torch.amp.GradScaler.update`.

        Args:
            new_scale: set the scale to this instead.

        Raises:
            ValueError: `new_scale` is a number out of range.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if not isinstance(new_scale, torch.Tensor):
                allowed = f"numbers from min_scale {self._min_scale} to max_scale {self._max_scale}"
                _checked("new_scale", new_scale, allowed, lambda x: self._min_scale <= x <= self._max_scale)
                new_scale = float(new_scale)
            super().update(new_scale)
        elif self._hysteresis == 1:
            super().update()
        else:
            self._update_with_hysteresis(scale, growth_tracker)
        scale.clamp_(self._min_scale, self._max_scale)

    def _update_with_hysteresis(self, scale: torch.Tensor, growth_tracker: torch.Tensor) -> None:
        """Back off only when the budget of overflows is spent; any overflow restarts the count of clean steps."""
        if self._hysteresis_tracker is None:
            self._hysteresis_tracker = torch.full_like(growth_tracker, self._init_hysteresis_tracker)
        found = [
            flag.to(scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        overflow = torch.stack(found).amax() != 0
        tracker = self._hysteresis_tracker
        tracker.sub_(overflow.to(tracker.dtype)).clamp_(min=0)
        spent = overflow & (tracker <= 0)
        old = scale.clone()
        torch._amp_update_scale_(
            scale, growth_tracker, spent.float(), self._growth_factor, self._backoff_factor, self._growth_interval
        )
        # A tolerated overflow must not count as a clean step.
        tolerated = overflow & ~spent
        scale.copy_(torch.where(tolerated, old, scale))
        growth_tracker.mul_((~overflow).to(growth_tracker.dtype))
        tracker.copy_(torch.where(scale > old, self._hysteresis, tracker))
        self._per_optimizer_states.clear()

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, with hysteresis above 1 also ``"_hysteresis_tracker"``; empty if disabled. Waits."""
        state = super().state_dict()
        if self._enabled and self._hysteresis > 1:
            tracker = self._hysteresis_tracker
            state["_hysteresis_tracker"] = self._init_hysteresis_tracker if tracker is None else int(tracker.item())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            RuntimeError: the state is empty (it was saved from a disabled scaler).
            KeyError: a key is missing; the scaler is unchanged.
            ValueError: the scale is not finite and positive; the scaler is unchanged.
        """
        if not self._enabled:
            return
        if state_dict:
            missing = [key for key in super().state_dict() if key not in state_dict]
            if missing:
                raise KeyError(
                    f"scaler state lacks {', '.join(missing)}; allowed is what GradScaler.state_dict() returns"
                )
            allowed = f"numbers from {SMALLEST_SCALE} to {LARGEST_SCALE}: start with a fresh scaler instead"
            _checked("scale", state_dict["scale"], allowed, lambda x: SMALLEST_SCALE <= x <= LARGEST_SCALE)
        super().load_state_dict(state_dict)
        self._init_hysteresis_tracker = int(state_dict.get("_hysteresis_tracker", self._hysteresis))
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
