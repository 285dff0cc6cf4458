"""Dynamic loss scaling that never waits for the device: a drop-in for `torch.amp.GradScaler`.

The algorithm is that of Micikevicius et al., "Mixed precision training" (2018), section 3.2. The loss is multiplied by
S, and the gradients by 1/S. A step whose unscaled gradients are not all finite is skipped, and S is multiplied by
`backoff_factor`. After `growth_interval` consecutive steps without overflow, S is multiplied by `growth_factor`. If S
is a power of two, scaling changes no bit of normal numbers.

Differences from torch's scaler, which has a fault in each of these cases:

* A check reads gradients and never writes them; optimizers of halfstep unscale inside their own step.
* fp16 gradients are accepted and unscaled in fp32. Gradients may have different dtypes.
* The flag passed to optimizers is 0 or 1 for any number of devices. torch's fused kernels treat 2 as no overflow.
* Gradients are checked after unscaling, so that a scale below 1 cannot turn finite gradients into infinite updates.
* The scale never becomes 0, infinite or NaN.
* All ranks that hold any part of an optimizer's parameters decide alike, including those without a gradient. One packed
  reduction suffices for FSDP1, FSDP2, tensor parallelism and several meshes at once.
* An fp16 or bf16 loss is scaled in fp32. In fp16 a loss of 1 would overflow at S = 65536.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep.kernels import loss_scale
from halfstep.kernels.loss_scale import DECIDED, LAST_SKIPPED, SKIPPED
from halfstep.kernels.multi_tensor import all_have_memory
from halfstep.kernels.streams import HostCopy, all_to_device, to_device
from halfstep.kernels.unscale import Factor, Verdict
from halfstep.numerics.scaling import options
from halfstep.numerics.scaling.decision import Checker, Combination, Decision, StepsOnVerdict, norm_of, parameters_of
from halfstep.numerics.scaling.overflow import Overflow, OverflowReport, names_of, overflows
from halfstep.numerics.scaling.sharding import NOWHERE, checked_group, is_sharded, local, settle_gradients, topology_of
from halfstep.numerics.scaling.stand_ins import is_stand_in, refuse_freed
from halfstep.numerics.scaling.wrappers import is_zero

NO_GRADIENT = "No inf checks were recorded for this optimizer: none of its parameters has a gradient."
STEPPED_TWICE = "step() has already been called since the last update()."


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _clip_is_due(state: dict[str, Any]) -> bool:
    """Whether a step that was not taken yet must clip the gradients."""
    return "max_norm" in state and state["stage"] is not OptState.STEPPED


def stepping(optimizer: Any) -> Any:
    """The optimizer whose step is executed: the local part of a `ZeroRedundancyOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "optim", optimizer) if is_zero(optimizer) else optimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer in a wrapper that holds it as ``optimizer`` or ``optim``, as in Accelerate, Fabric and torchft.

    A scaler stores its knowledge under the innermost optimizer, so that it may be called with either. A wrapper must
    have the same parameters as what it holds: the local part of a `ZeroRedundancyOptimizer` has only some of them.
    """
    passed: set[int] = set()
    while id(optimizer) not in passed:
        passed.add(id(optimizer))
        inner = (getattr(optimizer, name, None) for name in ("optimizer", "optim"))
        optimizer = next((wrapped for wrapped in inner if _wraps(optimizer, wrapped)), optimizer)
    return optimizer


def _wraps(outer: Any, inner: Any) -> bool:
    """Whether a wrapper steps all parameters of what it holds, and no others."""
    groups, inner_groups = getattr(outer, "param_groups", None), getattr(inner, "param_groups", None)
    if groups is None or inner_groups is None or not callable(getattr(inner, "step", None)) or is_zero(outer):
        return False
    if groups is inner_groups:
        return True
    parameters, inner_parameters = parameters_of(outer), parameters_of(inner)
    return len(parameters) == len(inner_parameters) and all(map(is_, parameters, inner_parameters))


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaler with the methods, attributes and state_dict keys of `torch.amp.GradScaler`.

    Args:
        device: device type of the scale, ``"cuda"`` or ``"cpu"``.
        init_scale: the initial scale.
        growth_factor: factor by which the scale grows after `growth_interval` steps without overflow; above 1.
        backoff_factor: factor by which the scale shrinks after an overflow; between 0 and 1.
        growth_interval: number of consecutive steps without overflow before the scale grows.
        enabled: if False, all methods pass through.
        min_scale: the smallest scale. Default: 2^-126, the smallest with a finite inverse.
        max_scale: the largest scale. Default: 2^126, or `init_scale` if that is larger.
        hysteresis: number of overflows before the scale shrinks. Each overflow skips its step.
        hysteresis_refill: when the count of overflows restarts: ``"growth"``, when the scale grows (Megatron-LM and
            DeepSpeed), or ``"clean_step"``, after any step without overflow (apex, DeepSpeed's
            ``consecutive_hysteresis``).
        write_back: leave unscaled gradients in ``.grad`` after `step`, as torch's fused optimizers do. This writes
            every gradient once more; by default `step` only reads them.
        process_group: an additional group (or a 1-D device mesh) whose ranks hold other parameters of the same model
            without showing it (pipeline stages, experts as plain tensors). Its ranks skip together, and norms are over
            the parameters of all ranks. Plain tensors are counted on each rank of the group, so where they are copies
            (pipeline stages under DistributedDataParallel) it must contain only one rank of each stage.

    Raises:
        ValueError: a number is out of its range, or this rank is not in `process_group`.

    Note:
        With a halfstep optimizer, `step` never waits for the device. With other optimizers that do not handle the
        found_inf flag themselves (those with ``fused=True`` do), `step` reads one flag from the device, as torch's
        scaler does. After `step`, ``.grad`` still holds the scaled gradients; `unscale_` or `write_back` unscale them
        in place. An fp16 gradient unscaled in place is rounded to fp16 again; inside the step it is not.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = halfstep.AdamW([weight], lr=0.1)
        >>> scaler = halfstep.GradScaler("cpu", init_scale=2.0**16)
        >>> loss = (weight.float() * 2).sum()
        >>> scaler.scale(loss).backward()  # 2 * 2^16 overflows fp16
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.data, scaler.get_scale()  # the step was skipped, and the scale halved
        (tensor([1., 1.], dtype=torch.float16), 32768.0)
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True, *,
        min_scale: float | None = None, max_scale: float | None = None, hysteresis: int = 1,
        hysteresis_refill: str = "growth", write_back: bool = False, process_group: Any = None,
    ) -> None:  # fmt: skip
        if hysteresis_refill not in ("growth", "clean_step"):
            raise ValueError(
                f"Expected hysteresis_refill to be 'growth' or 'clean_step', but got {hysteresis_refill!r}"
            )
        if enabled:
            growth_factor = options.GROWTH_FACTOR.checked("growth_factor", growth_factor)
            backoff_factor = options.BACKOFF_FACTOR.checked("backoff_factor", backoff_factor)
            growth_interval = options.COUNT.checked("growth_interval", growth_interval)
            hysteresis = options.COUNT.checked("hysteresis", hysteresis)
            for name, value in (("min_scale", min_scale), ("max_scale", max_scale), ("init_scale", init_scale)):
                if value is not None:
                    options.ANY_SCALE.checked(name, value)
            low = options.SMALLEST_SCALE if min_scale is None else min_scale
            high = max(options.USUAL_MAX_SCALE, init_scale) if max_scale is None else max_scale
            init_scale = options.scale_between(low, high).checked("init_scale", init_scale)
            self._min_scale, self._max_scale = float(low), float(high)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._hysteresis = hysteresis
        self._refill_on_clean = hysteresis_refill == "clean_step"
        self._init_hysteresis_tracker = hysteresis
        self._begin()
        self._process_group, self.write_back = checked_group(process_group), write_back

    def _begin(self) -> None:
        """Initialize what pickles and copies do not contain. The tensors are created with the scale at first use."""
        self._hysteresis_tracker: torch.Tensor | None = None
        self._skipped: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._decided: torch.Tensor | None = None  # the element of `_counts` with the number of steps
        self._updates = 0  # calls of update(), counted on the host
        self._host_copy, self._scale_copy = HostCopy(), HostCopy()
        self._checkers: dict[int, Checker] = {}  # by the optimizer's id
        self._joint, self._combination = NOWHERE, Combination()  # of all optimizers together

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._skipped = torch.zeros((), dtype=torch.float32, device=dev)
        self._counts = torch.zeros(3, dtype=torch.int64, device=dev)
        self._decided = self._counts[DECIDED]

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or an iterable of losses, by the scale, in fp32 at least."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            wide = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
            return wide * to_device(self._scale, outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, but got {outputs!r}")

    # ----------------------------------------------------------------------------------------------------- checking

    def checker(self, optimizer: torch.optim.Optimizer) -> Checker:
        """The checker of an optimizer's gradients, which is stored for as long as the optimizer exists."""
        checker = self._checkers.get(id(optimizer))
        if checker is None or checker.optimizer() is not optimizer:
            # The checkers of deleted optimizers would keep their parameters alive.
            self._checkers = {key: old for key, old in self._checkers.items() if old.optimizer() is not None}
            checker = self._checkers[id(optimizer)] = Checker(optimizer, self._process_group)
        return checker

    def factor(self) -> Factor:
        """What unscales a gradient. Raises an AssertionError if `scale` was never called."""
        return Factor(self._check_scale_growth_tracker("check")[0], inverted=True)

    def end_parts(self, optimizer: torch.optim.Optimizer) -> Verdict | None:
        """End a check in parts by the `checker` of an optimizer, whose next step uses the verdict."""
        return self._check(optimizer, None)

    def _check(self, optimizer: torch.optim.Optimizer, factor: Factor | None, write: bool = False) -> Verdict | None:
        """Check an optimizer's gradients times a factor, or end a check in parts. The verdict stays until `update`."""
        checker = self.checker(optimizer)
        if factor is None:
            verdict = checker.end_parts(self._decided)
        else:
            if not self._per_optimizer_states.keys() <= {id(optimizer)}:
                self._refuse_twice(optimizer)
            verdict = checker.verdict(factor, write=write, step=self._decided)
        state = self._per_optimizer_states[id(optimizer)]
        # A single entry, so that torch's sum over devices is 0 or 1.
        state["found_inf_per_device"] = {} if verdict is None else {verdict.found_inf.device: verdict.found_inf}
        state["verdict"], state["checker"] = verdict, checker
        return verdict

    def _refuse_twice(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if gradients of these parameters were unscaled or must be clipped for the step of another optimizer.

        They would be unscaled twice, or not clipped. This happens if a wrapper that does not expose its optimizer was
        passed before.
        """
        ids = set(map(id, parameters_of(optimizer)))
        for key, state in self._per_optimizer_states.items():
            if key == id(optimizer) or not (state["stage"] is OptState.UNSCALED or _clip_is_due(state)):
                continue
            earlier = state["checker"].optimizer()
            if earlier is not None and not ids.isdisjoint(map(id, parameters_of(earlier))):
                raise RuntimeError(
                    "Expected one object for unscale_, clip_grad_norm_ and step, but got a "
                    f"{type(optimizer).__qualname__} after a {type(earlier).__qualname__} with the same parameters "
                    "since the last update(): pass the wrapper, or the optimizer in it, to all of them"
                )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale an optimizer's gradients in place; see `torch.amp.GradScaler.unscale_`.

        `update` may follow without a step of this optimizer, if the caller decides to leave the step out.

        Raises:
            RuntimeError: the method was called twice since the last `update`, or after `step`, or the same gradients
                were unscaled or clipped for another optimizer.
        """
        super().unscale_(unwrapped(optimizer))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        self._check(optimizer, Factor(inv_scale), write=True)
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._check(unwrapped(optimizer), self.factor())
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super()._found_inf_per_device(unwrapped(optimizer))

    # ------------------------------------------------------------------------------------------------ step and update

    @torch._disable_dynamo  # it cannot be compiled, and tracing it causes warnings
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients overflowed; see `torch.amp.GradScaler.step`.

        A wrapper around an optimizer (held as ``optimizer`` or ``optim``) is treated as by torch's scaler: its
        gradients are unscaled in place, one flag is read, and the wrapper is not called if they overflowed.

        Raises:
            RuntimeError: a closure was passed, or `step` was called twice before `update`, or the same gradients were
                unscaled or clipped for another optimizer.
            AssertionError: no parameter has a gradient, or `scale` was never called.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or any(map(callable, args)):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: a closure would compute new "
                "gradients after the check; call the closure yourself, then step(optimizer)"
            )
        kwargs.pop("closure", None)
        scale, _ = self._check_scale_growth_tracker("step")
        inner = optimizer
        if hasattr(optimizer, "optimizer") or hasattr(optimizer, "optim"):
            inner = unwrapped(optimizer)
        if inner is not optimizer:  # a wrapper, which may be a subclass of the optimizer's class, as Fabric's
            return self._step_wrapper(optimizer, inner, *args, **kwargs)
        if not isinstance(inner, StepsOnVerdict):
            inner = stepping(optimizer)
        if not isinstance(inner, StepsOnVerdict):
            # With parameters on the CPU and the scale on a GPU, torch's fused steps copy scale and flag without waiting
            # and read them before they have arrived.
            if {parameter.device.type for parameter in parameters_of(optimizer)} - {scale.device.type}:
                return self._step_wrapper(optimizer, optimizer, *args, **kwargs)
            return super().step(optimizer, *args, **kwargs)
        decision = self.decision(optimizer)
        if decision is None:
            raise AssertionError(NO_GRADIENT)
        result: float | None = inner.apply(decision, partial(optimizer.step, *args, **kwargs))
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return result

    def decision(self, optimizer: torch.optim.Optimizer) -> Decision | None:
        """The decision about the next step of an optimizer of halfstep, whose gradients are checked if they were not.

        None if no parameter has a gradient, on any rank. Raises a RuntimeError if `step` was called already.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(STEPPED_TWICE)
        if state["stage"] is OptState.READY and self.write_back:
            self.unscale_(optimizer)
        elif "verdict" not in state:
            assert self._scale is not None
            self._check(optimizer, Factor(self._scale, inverted=True))
        verdict = state["verdict"]
        scale = self._scale if state["stage"] is OptState.READY else None
        return None if verdict is None else Decision(verdict, scale, state.get("max_norm"))

    def verdict_of(self, optimizer: torch.optim.Optimizer) -> Verdict | None:
        """The verdict on an optimizer's gradients since the last `update`; None if there is none yet."""
        return self._per_optimizer_states.get(id(optimizer), {}).get("verdict")

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's gradients were unscaled in place, and its step has not been taken."""
        return self._per_optimizer_states.get(id(unwrapped(optimizer)), {}).get("stage") is OptState.UNSCALED

    def awaits_step(self) -> bool:
        """Whether gradients were unscaled or are to be clipped for a step that has not been taken."""
        states = self._per_optimizer_states.values()
        return any(state["stage"] is OptState.UNSCALED or _clip_is_due(state) for state in states)

    def _step_wrapper(self, wrapper: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step a wrapper. It may do more than step, so it is not called if the step is skipped."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(STEPPED_TWICE)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError(NO_GRADIENT)
        if "max_norm" in state:
            self._clip_in_place(optimizer, state.pop("max_norm"))
        result = self._maybe_opt_step(wrapper, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    @torch._disable_dynamo
    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Clip the unscaled gradients of an optimizer in its next `step`, all of them together, to a 2-norm.

        With an optimizer of halfstep, gradients are not written and not read again: the norm comes from the check that
        `step` needs in any case, and the factor is applied in the step. Gradients must not change before `step`. With
        other optimizers, gradients are unscaled and clipped in place, as by `unscale_` and
        `torch.nn.utils.clip_grad_norm_`, but over all ranks that hold any part of the parameters.

        Args:
            optimizer: the optimizer, or a wrapper around it. Call this before ``step(optimizer)``.
            max_norm: a finite number above 0.

        Returns:
            The norm of the unscaled gradients before clipping, 0-dim on their device. It is not finite if they
            overflowed; the step is then skipped. Its dtype is fp32 for optimizers of halfstep, and for others that of
            the gradients, as for `torch.nn.utils.clip_grad_norm_`.

        Raises:
            ValueError: `max_norm` is out of range.
            RuntimeError: `step` was called already since the last `update`, or the same gradients were unscaled or
                clipped for another optimizer. `update` raises if no step follows and the gradients are finite.
        """
        max_norm = options.MAX_NORM.checked("max_norm", max_norm)
        optimizer = unwrapped(optimizer)
        if not self._enabled or not isinstance(stepping(optimizer), StepsOnVerdict):
            if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
            return self._clip_in_place(optimizer, max_norm)
        self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        decision = self.decision(optimizer)
        if decision is None:
            return _zero()
        state["max_norm"] = max_norm
        return norm_of(decision.verdict)

    @torch.no_grad()
    def _clip_in_place(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        parameters, checker = parameters_of(optimizer), self.checker(optimizer)
        topology = checker.find_topology(parameters)
        if not topology.settled:
            settle_gradients(parameters)
        refuse_freed(parameters, "a scaler")
        grads = [grad for grad in map(attrgetter("grad"), parameters) if grad is not None]
        shards = [local(grad).gradient() if is_stand_in(grad) else local(grad) for grad in grads]  # type: ignore[attr-defined]
        # For subclasses torch's function computes the norm.
        if (not topology.groups and topology.settled) or not all_have_memory(shards):
            whole: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return whole.full_tensor() if is_sharded(whole) else whole
        verdict = checker.verdict(keep=False)  # the verdict of `unscale_` is still needed
        norm = _zero() if verdict is None else norm_of(verdict)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # the formula of torch
        for device in dict.fromkeys(map(attrgetter("device"), shards)):
            torch._foreach_mul_([shard for shard in shards if shard.device == device], to_device(factor, device))
        # As in torch, the dtype of the gradients; on ranks without gradients that of the parameters.
        return norm.to(functools.reduce(torch.promote_types, {tensor.dtype for tensor in grads or parameters}))

    @torch._disable_dynamo
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale after the step, in one launch; see `torch.amp.GradScaler.update`.

        Args:
            new_scale: a scale to set instead.

        Raises:
            ValueError: `new_scale` is a number out of range.
            AssertionError: no optimizer was stepped or unscaled since the last update.
            RuntimeError: `clip_grad_norm_` was called for an optimizer that was not stepped.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        self._refuse_lost_limits()
        self._updates += 1
        if new_scale is not None:
            if not isinstance(new_scale, torch.Tensor):
                new_scale = options.scale_between(self._min_scale, self._max_scale).checked("new_scale", new_scale)
            super().update(new_scale)
            scale.clamp_(self._min_scale, self._max_scale)
            self._scale_copy.take(scale)
            return
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        overflow = flags[0]
        if len(flags) > 1 or overflow.device != scale.device:
            overflow = torch.stack(all_to_device(flags, scale.device)).amax()
        overflow = self._agreed(overflow)
        assert self._hysteresis_tracker is not None and self._skipped is not None and self._counts is not None
        state = loss_scale.State(scale, growth_tracker, self._hysteresis_tracker, self._skipped, self._counts)
        factors = (self._growth_factor, self._backoff_factor, min(self._growth_interval, 2**31 - 1))
        limits = (self._min_scale, self._max_scale)
        rules = loss_scale.Rules(*factors, self._hysteresis, self._refill_on_clean, *limits)
        loss_scale.update(state, overflow, rules)
        self._host_copy.take(self._counts)
        self._scale_copy.take(scale)
        self._per_optimizer_states.clear()

    def _refuse_lost_limits(self) -> None:
        """Raise if finite gradients had to be clipped in a step that was not taken."""
        for state in self._per_optimizer_states.values():
            if _clip_is_due(state) and not state["verdict"].found_inf.item():
                optimizer = state["checker"].optimizer()
                raise RuntimeError(
                    "Expected scaler.step(optimizer) between clip_grad_norm_ and update(), but got none for "
                    f"{type(optimizer).__qualname__}, whose gradients are neither unscaled nor clipped: to leave a "
                    "step out, use scaler.unscale_ and torch.nn.utils.clip_grad_norm_"
                )

    def _agreed(self, overflow: torch.Tensor) -> torch.Tensor:
        """The flag combined over all ranks, if the optimizers are distributed over different sets of ranks."""
        if len(self._per_optimizer_states) < 2:
            return overflow
        topologies = [state["checker"].topology for state in self._per_optimizer_states.values() if "checker" in state]
        if len({topology.members for topology in topologies}) < 2:
            return overflow
        parameters = [parameter for topology in topologies for parameter in topology.parameters]
        self._joint = topology_of(parameters, self._joint, self._process_group)
        return self._combination.combine(self._joint, [overflow], []).found_inf.to(overflow.device)

    # ----------------------------------------------------------------------------------------------- what was skipped

    @property
    def step_skipped(self) -> torch.Tensor:
        """Whether the last step before `update` was skipped: 0-dim fp32, 1.0 or 0.0, on the device of the scale.

        The next `update` overwrites it. With several optimizers, it is 1.0 if any of them skipped its step.
        """
        return _zero() if self._skipped is None else self._skipped

    def last_step_skipped(self) -> bool | None:
        """Whether the last step that the host knows of was skipped. Does not wait for the device.

        On a CPU this is always the last step. On a GPU, the first call starts a copy to the host after each `update`,
        and each call returns the newest one that has arrived, which is usually one or two steps old.

        Returns:
            Whether that step was skipped; None if the host knows of no step yet.
        """
        counts = self._arrived_counts()
        return None if counts is None or counts[DECIDED] == 0 else counts[LAST_SKIPPED] == counts[DECIDED]

    def skips_known(self) -> int:
        """The number of skipped steps that the host knows of, without waiting; see `last_step_skipped`."""
        counts = self._arrived_counts()
        return 0 if counts is None else counts[SKIPPED]

    def _arrived_counts(self, wait: bool = False) -> list[int] | None:
        counts = None if self._counts is None else self._host_copy.newest(self._counts, wait)
        return None if counts is None else counts.tolist()

    def scalars(self) -> dict[str, float]:
        """``halfstep/scale`` and ``halfstep/skipped``, the number of skipped steps, for a log; empty if disabled.

        On a GPU only the first call waits for the device; later ones return the newest numbers that have arrived.
        """
        if not self._enabled:
            return {}
        scale = None if self._scale is None else self._scale_copy.newest(self._scale, wait=True)
        counts = self._arrived_counts(wait=True)
        return {
            "halfstep/scale": self._init_scale if scale is None else scale.item(),
            "halfstep/skipped": 0.0 if counts is None else float(counts[SKIPPED]),
        }

    def overflow_report(self, named_parameters: Iterable[tuple[str, torch.Tensor]] = ()) -> OverflowReport:
        """Which parameters overflowed, with Inf or NaN, how often and since when. Waits for the device.

        The launch that combines each check counts this on the device, at no extra cost. With sharded parameters, each
        rank reports its own shards. Counts are not pickled.

        Args:
            named_parameters: ``model.named_parameters()``, for the names. Without it, the names are those that the
                optimizer was created with, or positions in the optimizer.
        """
        named = list(named_parameters)
        rows: list[Overflow] = []
        for number, checker in enumerate(self._checkers.values()):
            if (optimizer := checker.optimizer()) is not None:
                names = names_of(optimizer, number, named)
                rows += [row for counts in checker.counts.values() for row in overflows(counts, names)]
        rows.sort(key=lambda row: (-row.inf_steps - row.nan_steps, row.first_step, row.name))
        totals = [0, 0, 0] if self._counts is None else self._counts.tolist()
        return OverflowReport(totals[DECIDED], totals[SKIPPED], totals[LAST_SKIPPED], rows)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state with the keys of torch's scaler. Waits for the device.

        With hysteresis above 1 there is also ``"_hysteresis_tracker"``. The state is empty if the scaler is disabled.
        """
        state = super().state_dict()
        if self._enabled and self._hysteresis > 1:
            tracker = self._hysteresis_tracker
            state["_hysteresis_tracker"] = self._init_hysteresis_tracker if tracker is None else int(tracker.item())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Raises:
            RuntimeError: the state is empty (it was saved from a disabled scaler).
            KeyError: a key is missing. The scaler is unchanged.
            ValueError: an entry is not a number, or out of its range. The scaler is unchanged.
        """
        if not self._enabled:
            return
        if state_dict:
            missing = [key for key in super().state_dict() if key not in state_dict]
            if missing:
                raise KeyError(
                    "Expected the state of a scaler, as GradScaler.state_dict() returns it, but got one without "
                    f"{', '.join(missing)}"
                )
            saved = {key: option for key, option in options.SAVED.items() if key in state_dict}
            state_dict = {key: option.checked(key, state_dict[key]) for key, option in saved.items()}
        super().load_state_dict(state_dict)
        self._init_hysteresis_tracker = state_dict.get("_hysteresis_tracker", self._hysteresis)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows: a finite number above 1, or a ValueError is raised."""
        super().set_growth_factor(options.GROWTH_FACTOR.checked("growth_factor", new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of the scale after an overflow: between 0 and 1, or a ValueError is raised."""
        super().set_backoff_factor(options.BACKOFF_FACTOR.checked("backoff_factor", new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of consecutive steps without overflow before the scale grows: an integer of at least 1."""
        super().set_growth_interval(options.COUNT.checked("growth_interval", new_interval))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled and self._hysteresis_tracker is not None:
            state["_init_hysteresis_tracker"] = int(self._hysteresis_tracker.item())
        fresh = object.__new__(type(self))
        fresh._begin()
        return {**state, **vars(fresh)}
