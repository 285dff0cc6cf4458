"""Adam and AdamW, drop-ins for torch's."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from halfstep.integrations.optim.checkpoints import CanonicalState, check_format
from halfstep.integrations.optim.options import (
    OPTIONS,
    check_number,
    check_options,
    check_parameter,
    is_zero,
    plain_number,
)
from halfstep.integrations.optim.state import WHOLE
from halfstep.integrations.optim.step_plan import StepPlan, all_contiguous
from halfstep.kernels import adam
from halfstep.kernels.streams import all_to_device, capturing
from halfstep.kernels.unscale import Factor, Verdict
from halfstep.numerics.scaling.scaler import MAX_NORM
from halfstep.numerics.scaling.sharding import default_group, is_sharded, settle_gradients
from halfstep.numerics.scaling.stand_ins import FreedGradient, gradient_of, gradients_of, refuse_freed
from halfstep.numerics.scaling.verdict import Decision, norm_of, parameters_of
from halfstep.numerics.scaling.wrappers import modules_of_fsdp2, watch_zero

_gradient = attrgetter("grad")
LARGEST_NORM = torch.finfo(torch.float32).max  # clips nothing: the factor is 1, and gradients times 1 keep their bits
# What dynamo does with the frames to come: None for nothing.
_dynamo_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _control_on(control: adam.Control, device: torch.device) -> adam.Control:
    """The control of a step with the dtypes and the device that the kernels need. Waits only for numbers of a GPU that
    a step on the CPU needs."""
    numbers = control.grad_scale, control.found_inf, control.sum_of_squares
    if all(map(is_, numbers, repeat(None))):
        return control
    return adam.Control(*all_to_device(numbers, device, (torch.float32, torch.float32, torch.float64)))


def _skipping_zeros(control: adam.Control, verdict: Verdict) -> adam.Control:
    """The same control, except that the step is skipped if the gradients of all ranks are 0. Step counts stay too.

    Without L2 decay the step would change no moments, and with eps = 0 the update would be 0 / 0.
    """
    # The sum is 0 only if all elements are: chunks are scaled before they are squared, so none underflows completely.
    nothing = (verdict.sum_of_squares == 0).float()
    if control.found_inf is not None:
        found_inf = control.found_inf.reshape(()).to(device=nothing.device, dtype=torch.float32)
        nothing = torch.maximum(nothing, found_inf)
    return adam.Control(control.grad_scale, nothing, control.sum_of_squares)


_ARGUMENTS = """

    Args:
        params: iterable of parameters, of ``(name, parameter)`` pairs, or of group dicts; fp32, fp16 and bf16 may be
            mixed. As in torch, a parameter given twice in a group raises a warning; it is stepped once.
        lr: learning rate; a float, or a one-element tensor that is read on the device.
        betas: decay rates of the two moments, each from 0 to below 1.
        eps: added to the root of the second moment.
        weight_decay: {decay}.
        amsgrad: divide by the largest second moment so far (Reddi et al., 2018).
        maximize: ascend instead of descend.
        foreach, capturable, fused: accepted as torch accepts them; every step is fused and capturable.
        differentiable: must be False.
{extra}        master_weights: ``"split"`` (bf16 weight + 16-bit remainder = exact fp32 master, 2 B per parameter),
            ``"full"`` (fp32 copy, 4 B), ``"split24"`` (bf16 weight + 8-bit remainder = master of 24 bits, 1 B; use
            ``rounding="stochastic"`` with it), ``None`` (round the weight every step), or ``"auto"``: split for bf16,
            full for fp16. fp32 parameters need none.
        state_dtype: dtype of the moments, fp32 or bf16, or ``"8bit"``: a byte per element, and one or two bytes for
            each 32 elements of a row; moments of vectors and of parameters of less than 4,096 elements stay in fp32.
            Rounded to nearest, a second moment in bf16 or 8 bits with beta2 near 1 stops changing once its updates are
            below half an ulp: use ``rounding="stochastic"`` with bf16. It is the default with 8 bits.
        rounding: ``"nearest"``, ``"stochastic"``, or ``"auto"``: stochastic with ``state_dtype="8bit"``, to nearest
            otherwise. Stochastic rounding rounds bf16 and 8-bit moments, 16-bit
            parameters without a master, and masters of 24 bits, to either neighbour, with probabilities that make the
            mean exact.
            It does not change fp32 numbers and exact masters. The random bits depend on the seed, the parameter's
            position in the optimizer, its step and the element's index in the whole parameter (with FSDP1, whose flat
            shards do not record their positions, in the shard).
        seed: seed of stochastic rounding, 0 to 2^63 - 1; saved and loaded with the options of the groups.
        max_grad_norm: clip all gradients together to this 2-norm inside the step; the gradients are not written.
        state_dict_format: what `state_dict` returns, also to code that calls it by its name. ``"held"``: the state as
            it is in memory, for which nothing is allocated. ``"canonical"``: `canonical_state_dict`, for code that
            looks up the names of torch's optimizers. It is an attribute too, which can be changed.

    Raises:
        ValueError, RuntimeError: a hyper-parameter is out of its range or not supported.
        TypeError: a parameter that requires a gradient is not a dense fp32, fp16 or bf16 tensor, or `seed` is not an
            integer. Frozen parameters may be of any kind.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = halfstep.{name}([weight], lr=1e-4)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight.data  # the step is too small for bf16
        tensor([1., 1., 1.], dtype=torch.bfloat16)
        >>> optimizer.masters()[weight]  # the fp32 master has taken it
        tensor([0.9999, 0.9999, 0.9999])
"""


class Adam(CanonicalState, torch.optim.Adam):
    __doc__ = (
        "Adam (Kingma and Ba, 2015) with exact fp32 master weights, a drop-in for `torch.optim.Adam`."
        + _ARGUMENTS.format(
            decay="L2 penalty: ``weight_decay`` times the weight is added to the gradient",
            extra="        decoupled_weight_decay: decay the weight as AdamW does.\n",
            name="Adam",
        )
    )

    # AdamW and this class inherit from torch's classes of the same names, for frameworks that use `isinstance`, but use
    # none of their methods: what they do not define is called on `torch.optim.Optimizer` by name.

    # torch's scalers then unscale in place, reduce their flag where they can, and do not call step() after an overflow,
    # on which Accelerate relies. With True, ShardedGradScaler would not reduce it, and Lightning would not clip.
    _step_supports_amp_scaling = False
    backward_handle: Any = None  # what steps parts of the parameters in the backward: integrations/release.py

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        self._set_up(locals())

    def _set_up(self, arguments: dict[str, Any]) -> None:
        """Initialize the optimizer from the arguments of `__init__`, by name."""
        defaults = {name: arguments[name] for name in OPTIONS}
        max_grad_norm, state_dict_format = arguments["max_grad_norm"], arguments["state_dict_format"]
        check_options(defaults)
        check_format(state_dict_format)
        if max_grad_norm is not None:
            check_number(
                max_grad_norm, "Invalid max_grad_norm value", "None and finite numbers above 0", lambda x: x > 0
            )
        self.max_grad_norm, self.state_dict_format = max_grad_norm, state_dict_format
        self._agreed = {}
        self._begin()
        Optimizer.__init__(self, arguments["params"], defaults)

    def _begin(self) -> None:
        """Initialize the attributes that pickles and copies of an optimizer do not contain."""
        watch_zero()
        self._plans = {}
        self._squares: torch.Tensor | None = None
        self._stepped_without_gradients = False
        self._recorded = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        self.__dict__.setdefault("max_grad_norm", None)
        self.__dict__.setdefault("state_dict_format", "held")
        self._begin()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._agree()

    @torch.no_grad()
    def __getstate__(self) -> dict[str, Any]:
        self._note_agreed()
        state: dict[Any, Any] = defaultdict(dict, self.state)
        for parameter in self._with_full_master():
            state[parameter] = {**state[parameter], "master": self._master(parameter)}
        options = {"max_grad_norm": self.max_grad_norm, "state_dict_format": self.state_dict_format}
        return {**Optimizer.__getstate__(self), "state": state, **options}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError, ValueError: an option or a parameter is not allowed. The optimizer is unchanged.
        """
        if isinstance(param_group, dict):  # otherwise torch raises
            check_options({**self.defaults, **param_group})
        Optimizer.add_param_group(self, param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[-1]
        added.update({name: plain_number(added[name]) for name in ("lr", "betas", "eps", "weight_decay")})
        try:
            for index, parameter in enumerate(added["params"]):
                # Frozen parameters may be of any kind, such as quantized weights. They are checked if they get a
                # gradient.
                if parameter.requires_grad and not is_lazy(parameter):
                    check_parameter(parameter, f"parameter {index} of group {number}", added["master_weights"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if added["state_dtype"] == "8bit" and added["rounding"] == "nearest":
            warnings.warn(
                f"group {number} rounds moments of 8 bits to nearest: with betas[1] near 1, its steps are less than "
                "half the distance of two codes, so that second moments stop changing; leave rounding out, or use "
                "rounding='stochastic'",
                UserWarning,
                stacklevel=5,  # the line that creates the optimizer
            )
        self._forget()

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
            norm: torch.Tensor = self.backward_handle.norm(None if only_norm else max_norm)
            return norm
        parameters = parameters_of(self)
        if only_norm and any(isinstance(parameter.grad, FreedGradient) for parameter in parameters):
            return torch.full((), math.nan, dtype=torch.float32, device="cpu")
        refuse_freed(parameters, "clipping")
        verdict = self.checker.verdict()
        if verdict is None:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        self.decide(Decision(verdict, None, max_norm, skips=False))
        return norm_of(verdict)

    # ---------------------------------------------------------------------------------------------------------- step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: a function that computes the loss and the gradients again and returns the loss. It is called first.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: an option of a group is out of range. Nothing was changed.
            RuntimeError: a gradient is sparse. Nothing was changed.
            TypeError: a dtype is not supported. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A decision is made by a scaler or a step in the backward, which are never compiled. Keeping dynamo away takes
        # five Python calls, which are spared where it is not at work.
        if self._decision is None and (is_dynamo_compiling() or _dynamo_callback() is not None):
            self._step_on_device()
        else:
            self._update()
        return loss

    @torch._disable_dynamo
    def _step_on_device(self) -> None:
        self._update()

    def _update(self) -> None:
        enabled = torch.is_grad_enabled()
        try:  # as torch.no_grad, which makes seven Python calls
            torch._C._set_grad_enabled(False)
            self._update_parameters()
        finally:
            torch._C._set_grad_enabled(enabled)
        if not self._lasts and self._decision is not None:
            self.decide(None)

    def _update_parameters(self) -> None:
        groups, limit = self.param_groups, self._limit()
        changed = self._check_changed_options(WHOLE, limit)
        # torch.distributed.checkpoint takes a step with lr 0 and zero gradients to create the state. Ranks without
        # gradients never have state, so they take part in the first such step only, as the other ranks do.
        first_at_rest = not self.state and not self._stepped_without_gradients
        first_at_rest = first_at_rest and all(is_zero(group["lr"]) for group in groups)
        parameters = parameters_of(self)
        grads = list(map(_gradient, parameters))
        kinds = set(map(type, grads))
        if not kinds <= {torch.Tensor, type(None)}:
            settle_gradients(parameters)
            grads = gradients_of(parameters)
            kinds = set(map(type, grads))
        if type(None) in kinds:
            parameters = [parameter for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not parameters:
            if not self._stepped_without_gradients:
                self._warn_if_sharded_since()
            # Other ranks may have gradients and wait for this rank in their reduction.
            self._stepped_without_gradients = True
            self._control(limit)
            if first_at_rest:
                self.checker.verdict(keep=False)
            return
        self._advance(WHOLE, parameters, grads, limit, changed, first_at_rest)

    def _check_changed_options(self, part: int, limit: float | None) -> bool:
        """Whether an option of any group may have changed since the last step of a part; options are then checked."""
        plan, groups = self._plans.get(part), self.param_groups
        changed = plan is None or plan.options_may_differ(groups, limit)
        if changed:
            for group in groups:
                check_options(group)
        return changed

    def step_parts_by(self, handle: Any) -> None:
        """Let an object step parts of the parameters by `step_part`; None: `step` updates all of them again."""
        self._forget()
        self.backward_handle = handle
        self._stepped_without_gradients |= handle is not None  # such steps are now usual

    @torch.no_grad()
    def step_part(
        self, part: int, parameters: list[torch.Tensor], freed: Iterable[torch.Tensor | None] = repeat(None)
    ) -> None:
        """Update some of the parameters, without hooks. It clips, unscales and skips as decided elsewhere, or not.

        Args:
            part: a number of at least 0 of these parameters, whose launches are kept under it.
            parameters: those to update, each with a gradient.
            freed: what their ``.grad`` becomes.
        """
        limit = None if self._decision is None else self._limit()
        changed = self._check_changed_options(part, limit)
        if set(map(type, map(_gradient, parameters))) != {torch.Tensor}:
            settle_gradients(parameters)
        self._advance(part, parameters, list(map(_gradient, parameters)), limit, changed, freed=freed)

    def _advance(
        self,
        part: int,
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        limit: float | None,
        changed: bool,
        first_at_rest: bool = False,
        freed: Iterable[torch.Tensor | None] = (),
    ) -> None:
        """Update parameters with their gradients by the plan of a part.

        `changed` says whether an option may have changed since its last step, `first_at_rest` whether to change nothing
        if all gradients are 0. The ``.grad`` of each parameter becomes that of `freed`; they stay if it is empty.
        """
        groups, plan = self.param_groups, self._plans.get(part)
        contiguous = all_contiguous(grads)
        recording = capturing(grads[0].device) or (
            plan is not None and len(plan.batches) > 1 and any(capturing(batch.device) for batch, _ in plan.batches)
        )
        if recording:
            plan = StepPlan(self, parameters, grads, recording)
        elif (
            plan is None
            or (changed and not plan.has_layouts_of(groups))
            or not plan.describes(self, parameters, grads, contiguous)
        ):
            self._forget(part)
            plan = self._plans[part] = StepPlan(self, parameters, grads)
        control = adam.Control() if part != WHOLE and self._decision is None else self._control(limit)
        if first_at_rest:
            verdict = self.checker.verdict(keep=False)
            assert verdict is not None
            control = _skipping_zeros(control, verdict)
        writes: list[tuple[list[torch.Tensor], list[partial[Any]]]] = []
        needed: dict[torch.device, tuple[torch.Tensor, adam.Control]] = {}  # the calls hold addresses in them
        for batch, indices in plan.batches:
            own = grads if len(indices) == len(grads) else [grads[index] for index in indices]
            if batch.device not in needed:
                table = plan.group_table(batch.device, groups, limit, changed)
                needed[batch.device] = table, _control_on(control, batch.device)
            writes.append((batch.parameters, batch.prepare(own, contiguous, *needed[batch.device])))
        writes[-1][1].extend(map(partial, repeat(setattr), parameters, repeat("grad"), freed))
        self._commit(part, writes)
        if recording:  # nothing was executed, and the tensors that a replay writes to must be kept alive
            for batch, _ in plan.batches:
                if not capturing(batch.device):
                    batch.finish()
            held = (one for batch, _ in plan.batches for operand in batch.keys for one in batch.batch.lists[operand])
            self._recorded.update((id(one), one) for one in held)
            return
        for batch, _ in plan.batches:
            batch.finish()
        if changed or not plan.knows_options:
            plan.stepped(groups, limit)

    def _limit(self) -> float | None:
        """The 2-norm to which the next step clips: the smaller of the scaler's and the optimizer's own, or None."""
        own, decision = self.max_grad_norm, self._decision
        if decision is None or decision.max_norm is None:
            return own
        return decision.max_norm if own is None else min(own, decision.max_norm)

    def _control(self, limit: float | None) -> adam.Control:
        """Scale, flag and norm of this step, as decided elsewhere or, if clipping needs it, checked here."""
        decision, squares = self._decision, None
        self.last_verdict = None if decision is None else decision.verdict
        if decision is None:  # torch's scalers set these attributes on optimizers whose step() unscales
            scale, found_inf = (self._number(getattr(self, name, None)) for name in ("grad_scale", "found_inf"))
        else:
            scale, found_inf = decision.scale, decision.verdict.found_inf if decision.skips else None
            # Gradients that were unscaled in place may have changed since, so their sum is computed again.
            if decision.scale is not None or decision.max_norm is not None:
                squares = decision.verdict.sum_of_squares
        if limit is None:
            return adam.Control(scale, found_inf)
        if squares is None:
            factor = None if scale is None else Factor(scale.float().reshape(()), inverted=True)
            verdict = self.checker.verdict(factor)
            squares = None if verdict is None else verdict.sum_of_squares
            self.last_verdict = verdict if decision is None else decision.verdict
        self._squares = squares
        return adam.Control(scale, found_inf, squares)

    def _number(self, value: Any) -> torch.Tensor | None:
        """A number that other code has set, as a tensor."""
        if value is None or isinstance(value, torch.Tensor):
            return value
        device = next((parameter.device for parameter in parameters_of(self)), None)
        return torch.full((), float(value), dtype=torch.float32, device=device)

    def _warn_if_sharded_since(self) -> None:
        """Warn if the model was sharded after the optimizer was created, whose parameters the model no longer uses.

        In this case they have no gradients, while DTensors of the same shapes do. The search runs once, when no
        parameter has a gradient, and only in a process group.
        """
        own = [parameter for parameter in parameters_of(self) if parameter.requires_grad and not is_lazy(parameter)]
        if default_group() is None or not own or any(map(is_sharded, own)):
            return
        leaves = [p for module in modules_of_fsdp2() for p in module.parameters() if is_sharded(p) and p.requires_grad]
        with_gradient = {leaf.shape for leaf in leaves if gradient_of(leaf) is not None}
        shapes = {parameter.shape for parameter in own}
        if shapes & with_gradient and shapes <= {leaf.shape for leaf in leaves}:
            warnings.warn(
                f"none of the {len(own)} parameters of this optimizer has a gradient, while DTensors of the same "
                "shapes do: the model was sharded after the optimizer was made, so that it trains nothing; make the "
                "optimizer after fully_shard",
                UserWarning,
                stacklevel=5,
            )


class AdamW(Adam, torch.optim.AdamW):
    __doc__ = (
        "AdamW (Loshchilov and Hutter, 2019) with exact fp32 master weights, a drop-in for `torch.optim.AdamW`."
        + _ARGUMENTS.format(
            decay="decoupled decay: the weight shrinks by ``lr * weight_decay`` of itself per step",
            extra="",
            name="AdamW",
        )
    )

    # As torch's: whatever is loaded into an AdamW decays as AdamW does.
    _fixed_options = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        self._set_up({**locals(), "decoupled_weight_decay": True})
