"""What all optimizers of halfstep are: steps, masters and state, for any rule. A rule is a subclass; see `Adam`."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from halfstep.integrations.optim.foreign_codes import check_masters, with_our_names
from halfstep.integrations.optim.options import Group, check_format, check_parameter, matched_groups, plain_number
from halfstep.integrations.optim.state import Masters, fitted_state, full_master, like, loaded_state, saved_state
from halfstep.integrations.optim.step_plan import WHOLE, LaunchGroup, StepPlan, StepPlans, apply
from halfstep.kernels.optimizer.layout import CONTROL_DTYPES, Control
from halfstep.kernels.rounding import join_master
from halfstep.kernels.streams import all_to_device, capturing
from halfstep.numerics.scaling.decision import StepsOnVerdict, parameters_of, skipping_zeros
from halfstep.numerics.scaling.options import MAX_NORM
from halfstep.numerics.scaling.sharding import default_group, is_flat, is_sharded, local, settle_gradients
from halfstep.numerics.scaling.stand_ins import gradient_of, gradients_of
from halfstep.numerics.scaling.wrappers import modules_of_fsdp2, watch_zero
from halfstep.numerics.state_layout import CODE_KEYS, MOMENTS, REMAINDER, StateLayout

Writes = list[tuple[list[torch.Tensor], list[partial[Any]]]]
Grads = list[torch.Tensor | None]

_gradient = attrgetter("grad")
# What dynamo does with the frames to come: None for nothing.
_dynamo_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _is_zero(lr: torch.Tensor | float) -> bool:
    """Whether a learning rate is known to be 0. Tensors on other devices than the CPU are not read."""
    return bool(lr == 0) if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu" else False


class Rule(NamedTuple):
    """What distinguishes an optimizer from others."""

    kernels: Any  # the module with the operands, `Layout`, `Batch` and `launch`, such as kernels/adam
    moments: tuple[str, ...]  # their names in the order of their operands; options may need only the first of them
    check: Callable[[Group], None]  # raises unless the options of a group are allowed; it calls `check_options`
    # The fields of the kernels' `Layout` that the options of a group decide, but for those of the state.
    variant: Callable[[Group], dict[str, bool]]
    # What the kernels' `Group` has, but for the norm, by name: numbers, or tensors with one element; from the options,
    # and the shape of the parameter if they differ `by_shape`.
    numbers: Callable[[Group, torch.Size | None], dict[str, Any]] = lambda group, shape: group
    # A parameter's saved state with what `torch.optim` leaves out of it.
    translated: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] = lambda state, parameter: state
    fixed_options: tuple[str, ...] = ()  # those that a checkpoint does not change, in addition to those of the layout
    by_shape: bool = False
    linear: bool = False  # whether codes in 8 bits are linear
    launch_group: type[LaunchGroup] = LaunchGroup  # what updates the parameters of a launch, if more than a launch
    most: float = math.inf  # elements on a rank of parameters that are updated together
    # The process group whose ranks have to update a parameter together; None if each does so alone.
    exchanging: Callable[[torch.Tensor, Group], Any] = lambda parameter, group: None
    # Where ranks update parameters together, it sets gradients to zeros that only other ranks have.
    complete: Callable[[LayoutOptimizer, list[torch.Tensor], Grads], None] | None = None

    def moments_of(self, group: Group) -> tuple[str, ...]:
        layout = self.kernels.Layout(torch.float32, torch.float32, torch.float32, 0, **self.variant(group))
        return self.moments[: layout.moments]


class LayoutOptimizer(StepsOnVerdict, Optimizer):
    """An optimizer whose state is held in layouts. The arguments of `__init__` of a subclass are options of groups."""

    _rule: Rule

    state_dict_format: Literal["held", "canonical"]

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments`: the ``locals()`` of the `__init__` of a subclass."""
        options = {name: value for name, value in arguments.items() if name != "self"}
        params, max_grad_norm = options.pop("params"), options.pop("max_grad_norm")
        state_dict_format = options.pop("state_dict_format")
        self._rule_of(options).check(options)
        check_format(state_dict_format)
        if max_grad_norm is not None:
            MAX_NORM.checked("max_grad_norm", max_grad_norm)
        self.max_grad_norm, self.state_dict_format = max_grad_norm, state_dict_format
        self._plans = StepPlans()
        watch_zero()
        Optimizer.__init__(self, params, options)

    # --------------------------------------------------------------------------------------------------------- groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        self.__dict__.setdefault("max_grad_norm", None)
        self.__dict__.setdefault("state_dict_format", "held")
        self._plans = StepPlans()
        watch_zero()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._agree()

    @torch.no_grad()
    def __getstate__(self) -> dict[str, Any]:
        state: dict[Any, Any] = defaultdict(dict, self.state)
        for parameter in parameters_of(self):
            if parameter in state and full_master(state[parameter]) is not None:
                state[parameter] = {**state[parameter], "master": self._master(parameter)}
        options = {"max_grad_norm": self.max_grad_norm, "state_dict_format": self.state_dict_format}
        return {**Optimizer.__getstate__(self), "state": state, **options}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError, ValueError: an option or a parameter is not allowed. The optimizer is unchanged.
        """
        if isinstance(param_group, dict):  # otherwise torch raises
            options = {**self.defaults, **param_group}
            self._rule_of(options).check(options)
        Optimizer.add_param_group(self, param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[-1]
        added.update({name: plain_number(value) for name, value in added.items() if name != "params"})
        try:
            for index, parameter in enumerate(added["params"]):
                # Frozen parameters may be of any kind, such as quantized weights. They are checked if they get a
                # gradient.
                if parameter.requires_grad and not is_lazy(parameter):
                    check_parameter(parameter, f"parameter {index} of group {number}", added["master_weights"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        positive = not all(MOMENTS[moment] for moment in self._rule_of(added).moments_of(added))
        if positive and added["state_dtype"] == "8bit" and added["rounding"] == "nearest":
            warnings.warn(
                f"group {number} rounds moments of 8 bits to nearest: with betas[1] near 1, its steps are less than "
                "half the distance of two codes, so that second moments stop changing; leave rounding out, or use "
                "rounding='stochastic'",
                UserWarning,
                stacklevel=5,  # the line that creates the optimizer
            )
        self._forget()

    def _forget(self) -> None:
        """Discard the plans, which are derived from parameters and state."""
        self._plans.of_part = {}

    def _rule_of(self, group: Group) -> Rule:
        return self._rule

    def _layout(self, parameter: torch.Tensor, group: Group) -> StateLayout:
        rule = self._rule_of(group)
        return StateLayout.of(parameter, group, rule.moments_of(group), rule.linear)

    def _targets(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that are stepped for parameters, which have their gradients: the parameters themselves, or
        copies of them in other memory. The state of a parameter is on the device of its target."""
        return parameters

    def _target(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._targets([parameter])[0]

    def _update_targets(self) -> None:
        """Make targets that are copies hold the values of their parameters, before state is read or written."""

    def _bucket(self, parameter: torch.Tensor) -> int:
        """Different launches update the parameters of different buckets."""
        return 0

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
            return loss
        with torch.no_grad():
            self._update_parameters()
        if not self._lasts and self._decision is not None:
            self.decide(None)
        return loss

    @torch._disable_dynamo
    @torch.no_grad()
    def _step_on_device(self) -> None:
        self._update_parameters()

    def _update_parameters(self) -> None:
        # torch.distributed.checkpoint takes a step with lr 0 and zero gradients to create the state. Ranks without
        # gradients never have state, so they take part in the first such step only, as the other ranks do.
        first_at_rest = not self.state and not self._plans.stepped_without_gradients
        first_at_rest = first_at_rest and all(_is_zero(group["lr"]) for group in self.param_groups)
        parameters = self._targets(parameters_of(self))
        grads = list(map(_gradient, parameters))
        types = set(map(type, grads))
        if not types <= {torch.Tensor, type(None)}:
            settle_gradients(parameters)
            grads = gradients_of(parameters)
            types = set(map(type, grads))
        if self._rule.complete is not None:
            self._rule.complete(self, parameters, grads)
        if type(None) in types:
            parameters = [parameter for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not parameters:
            if not self._plans.stepped_without_gradients:
                self._warn_if_sharded_since()
            # Other ranks may have gradients and wait for this rank in their reduction.
            self._plans.stepped_without_gradients = True
            self._control(self._limit())
            if first_at_rest:
                self.checker.verdict(keep=False)
            return
        self._advance(WHOLE, parameters, grads, first_at_rest)

    def step_parts_by(self, handle: Any) -> None:
        """Let an object step parts of the parameters by `step_part`; None: `step` updates all of them again."""
        self._forget()
        self.backward_handle = handle
        self._plans.stepped_without_gradients |= handle is not None  # such steps are now usual

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
        parameters = self._targets(parameters)
        if set(map(type, map(_gradient, parameters))) != {torch.Tensor}:
            settle_gradients(parameters)
        self._advance(part, parameters, list(map(_gradient, parameters)), freed=freed)

    def _advance(
        self,
        part: int,
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        first_at_rest: bool = False,
        freed: Iterable[torch.Tensor | None] = (),
    ) -> None:
        """Update parameters with their gradients by the plan of a part.

        `first_at_rest` says whether to change nothing if all gradients are 0. The ``.grad`` of each parameter becomes
        that of `freed`; they stay if it is empty.
        """
        controlled = part == WHOLE or self._decision is not None
        plan, limit = self._plans.of_part.get(part), self._limit() if controlled else None
        recording = any(map(capturing, {grads[0].device, *(() if plan is None else plan.devices)}))
        if recording or plan is None or not plan.describes(self, parameters, grads, limit):
            plan = StepPlan(self, parameters, grads, recording)
            if not recording:
                self._plans.of_part[part] = plan
        control = self._control(limit) if controlled else Control()
        if first_at_rest:
            verdict = self.checker.verdict(keep=False)
            assert verdict is not None
            control = skipping_zeros(control, verdict)
        if plan.changed:
            plan.write_tables(self.param_groups, limit)
        controls = {}  # the calls hold addresses in these
        for device in plan.devices:
            controls[device] = Control(*all_to_device(control, device, CONTROL_DTYPES))
        writes: Writes = []
        for launch in plan.launches:
            of_launch = grads if len(launch.indices) == len(grads) else [grads[index] for index in launch.indices]
            table, control = plan.tables[launch.device, launch.rule.kernels], controls[launch.device]
            writes.append((launch.parameters, launch.prepare(of_launch, table, control)))
        writes[-1][1].extend(map(partial, repeat(setattr), parameters, repeat("grad"), freed))
        self._commit(part, writes)
        for launch in plan.launches:
            if not recording or not capturing(launch.device):
                launch.finish()
        if recording:  # the tensors that a replay writes to must be kept alive
            lists = (launch.batch.lists[operand] for launch in plan.launches for operand in launch.state_of)
            self._plans.recorded.update((id(tensor), tensor) for tensor in chain.from_iterable(lists))

    def _warn_if_sharded_since(self) -> None:
        """Warn if the model was sharded after the optimizer was created, whose parameters the model no longer uses.

        In this case they have no gradients, while DTensors of the same shapes do. The search runs once, when no
        parameter has a gradient, and only in a process group.
        """
        trained = [p for p in parameters_of(self) if p.requires_grad and not is_lazy(p)]
        if default_group() is None or not trained or any(map(is_sharded, trained)):
            return
        leaves = [p for module in modules_of_fsdp2() for p in module.parameters() if is_sharded(p) and p.requires_grad]
        with_gradient = {leaf.shape for leaf in leaves if gradient_of(leaf) is not None}
        shapes = {parameter.shape for parameter in trained}
        if shapes & with_gradient and shapes <= {leaf.shape for leaf in leaves}:
            warnings.warn(
                f"none of the {len(trained)} parameters of this optimizer has a gradient, while DTensors of the same "
                "shapes do: the model was sharded after the optimizer was made, so that it trains nothing; make the "
                "optimizer after fully_shard",
                UserWarning,
                stacklevel=5,
            )

    # ------------------------------------------------------------------------------------------------------- masters

    def _agree(self) -> None:
        """Store that all parameters and their full masters hold the same weights now."""
        self._plans.agreed.clear()
        self._plans.agreed.note(self._targets(parameters_of(self)))

    def _master(self, parameter: torch.Tensor, compare: bool = False) -> torch.Tensor | None:
        """The present fp32 master; None for fp32 parameters. Changes nothing. `Agreements.written` explains `compare`.

        So masters lose no bits if other weights, such as averages, are swapped in for an evaluation or a checkpoint.
        """
        target, state = self._target(parameter), self.state.get(parameter, {})
        if target.dtype == torch.float32 or not isinstance(state.get("master"), torch.Tensor):
            return None
        master = full_master(state)
        if master is None:
            return like(target, join_master(local(target.detach()), local(state["master"])))
        written = self._plans.agreed.written(target, master, compare)
        return master if written is None else like(target, written)

    def masters(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """The fp32 weight of each parameter: its master, or the parameter itself if it has none.

        Full masters and fp32 parameters are not copied. The next step changes them, so clone those that you keep, and
        do not write to them. A split master is joined when it is looked up, so that iterating over `items` holds one of
        them at a time. The masters of DTensors are DTensors.

        A moving average of the weights, which would not change in bf16::

            average = {p: master.clone() for p, master in optimizer.masters().items()}
            for p, master in optimizer.masters().items():  # after each step
                average[p].lerp_(master, 1 - decay)
        """
        self._update_targets()
        return Masters(self)

    @torch._disable_dynamo
    @torch.no_grad()
    def refresh_master(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Set masters to the present parameters, discarding the bits beyond the parameter's dtype.

        Call this after replacing weights by unrelated ones, or after writing them through ``.data``, which full masters
        do not notice. The call does not wait for the device.

        Args:
            parameters: one or more parameters of this optimizer; None for all.

        Raises:
            ValueError: a tensor is not a parameter of this optimizer. Nothing was changed.
        """
        self._update_targets()
        all_parameters = parameters_of(self)
        ids = set(map(id, all_parameters))
        if parameters is None:
            parameters = all_parameters
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for index, parameter in enumerate(chosen):
            if id(parameter) not in ids:
                raise ValueError(
                    f"Expected parameters[{index}] to be a parameter of this optimizer, but got another of shape "
                    f"{tuple(parameter.shape)} and dtype {parameter.dtype}"
                )
        for parameter, target in zip(chosen, self._targets(chosen), strict=True):
            if "master" in (state := self.state.get(parameter, {})):
                master = local(state["master"])
                master.zero_() if full_master(state) is None else master.copy_(local(target.detach()))
        self._plans.agreed.note(self._targets(chosen))

    # --------------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of each parameter as it is held, in the bytes that it takes in memory. Allocates nothing.

        * ``step``, and moments in fp32 or bf16 as ``exp_avg`` and ``exp_avg_sq``;
        * moments in 8 bits as ``exp_avg_codes`` and ``exp_avg_scale`` ...;
        * a full master as ``master``, in fp32. It is copied where other code has written the parameter since;
        * the remainder of a split master as ``master_remainder``.

        Integers of 16 bits, which NCCL and gloo do not transfer, are shown as pairs of bytes in one more dimension.
        `load_state_dict` loads it into every layout, with the same bits. As in torch, the tensors are those of the
        optimizer, which the next step changes.

        With ``state_dict_format="canonical"`` it is what `canonical_state_dict` returns; so it is always for parameters
        that FullyShardedDataParallel has flattened, whose ``optim_state_dict`` allows one dtype per parameter.

        Raises:
            ValueError: the attribute `state_dict_format` is neither ``"held"`` nor ``"canonical"``.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            >>> optimizer = halfstep.AdamW([weight])
            >>> weight.grad = torch.ones_like(weight)
            >>> optimizer.step()
            >>> list(optimizer.state_dict()["state"][0])
            ['step', 'exp_avg', 'exp_avg_sq', 'master_remainder']
            >>> list(optimizer.canonical_state_dict()["state"][0])
            ['step', 'exp_avg', 'exp_avg_sq', 'master']
        """
        check_format(self.state_dict_format)
        self._update_targets()
        # Hooks see what is saved, so they run at the end.
        hooks = self._optimizer_state_dict_post_hooks
        with attribute(self, "_optimizer_state_dict_post_hooks", OrderedDict()):
            packed = Optimizer.state_dict(self)
        for index, parameter in enumerate(parameters_of(self)):
            if (state := packed["state"].get(index)) is None:
                continue
            written = None if full_master(state) is None else self._master(parameter, compare=True)
            canonical = self.state_dict_format == "canonical" or is_flat(parameter)
            packed["state"][index] = saved_state(state, self._target(parameter), written, canonical)
        # The layout is not loaded. It is saved because code that loads flat checkpoints expects every option: dtypes as
        # text, which all readers support, and split masters only with remainders, so that a load notices missing ones.
        for group in packed["param_groups"]:
            group["state_dtype"] = str(group["state_dtype"]).removeprefix("torch.")
            master = group["master_weights"]
            if any(REMAINDER in packed["state"].get(index, {}) for index in group["params"]):
                group["master_weights"] = "split" if master == "auto" else master
            elif master in ("split", "split24"):
                group["master_weights"] = "auto"
        for hook in list(hooks.values()):
            replaced = hook(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    def held_state_dict(self) -> dict[str, Any]:
        """What `state_dict` returns with ``state_dict_format="held"``, the default."""
        with saving(self, "held"):
            return self.state_dict()

    def canonical_state_dict(self) -> dict[str, Any]:
        """The state in fp32 on the CPU: ``step``, ``exp_avg``, ``exp_avg_sq``, ``master`` ... of each parameter.

        It is the same for every layout, and loads into torch's and other optimizers. There is no ``master`` for fp32
        parameters, and none with ``master_weights=None``. It takes 8 to 16 bytes per parameter on the host, and
        memory for a few rows of a parameter on a GPU. Tensors that are in fp32 on the CPU are not copied. DTensors
        stay DTensors, whose local tensors are on the CPU.
        """
        with saving(self, "canonical"):
            return self.state_dict()

    @torch.no_grad()
    def _complete_state(self, parameter: torch.Tensor, group: Group) -> dict[str, Any]:
        """The state of a parameter in its layout, with missing entries created. It is replaced after all of them exist.

        Other code, such as ``ZeroRedundancyOptimizer.load_state_dict``, may have assigned codes and remainders under
        the names of a checkpoint, moments in other dtypes, and masters of other kinds.
        """
        target, layout, state = self._target(parameter), self._layout(parameter, group), self.state.get(parameter) or {}
        if any(key in state for key in (REMAINDER, *CODE_KEYS)):
            where, final = "state of parameter with a gradient", bool(self._plans.recorded)
            state, weight = loaded_state(state, target, layout, where, final=final)
            self._set_state(parameter, state, weight)
        master = full_master(state)
        written = None if master is None else self._plans.agreed.written(target, master)
        fitted, weight = fitted_state(state, target, layout, written)
        if fitted is not state:
            if "master" in fitted and "master" not in state:
                self._plans.agreed.note([target])
            self._set_state(parameter, fitted, weight)
        return fitted

    def _set_state(self, parameter: torch.Tensor, state: dict[str, Any], weight: torch.Tensor | None) -> None:
        self.state[parameter] = state
        if weight is not None:
            local(self._target(parameter).detach()).copy_(weight)

    @torch.no_grad()
    def fit_masters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Convert loaded masters of another layout now, and not in the first step. Load these parameters first."""
        self._update_targets()
        loaded = set(map(id, parameters))
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in loaded and self.state.get(parameter):
                    self._complete_state(parameter, group)

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an Adam or AdamW of halfstep, torch, apex or TransformerEngine with the same bits.

        The model may be loaded before or after, with the same bits. There are two exceptions, for which load the model
        first: a full master that is loaded into a split layout, where the weights halfway between two bf16 numbers
        would differ, and a load after a step was captured in a CUDA graph, into another layout.

        States of the 8-bit optimizers of bitsandbytes, torchao and flashoptim are decoded by their rules. flashoptim's
        masters belong to the present parameters: load the model first. Under sharding, pass such states to
        `halfstep.integrations.checkpoint.load_optimizer`.

        The options that define the layout (`master_weights`, `state_dtype`, `rounding`) are not loaded; all others are.
        If the checkpoint has a master, the parameter is set to the rounded master.

        apex and TransformerEngine store the step count per group: it becomes that of each parameter with state.
        TransformerEngine's masters are loaded for fp16 and bf16 parameters; those of fp32 parameters, which
        TransformerEngine does not update, are left out. apex saves no masters:
        `halfstep.integrations.checkpoint.with_masters` adds them. Neither checkpoint stores whether weight decay is
        decoupled; that depends on the class that loads it.

        If a step was captured in a CUDA graph, the state is copied into the tensors that the graph uses.

        Raises:
            ValueError: groups, parameters, shapes, keys or numbers do not match. The optimizer and its parameters are
                unchanged, as they are after Ctrl-C.
        """
        state_dict = dict(state_dict)
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._load(state_dict)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._update_targets()
        groups, owners = matched_groups(self.param_groups, state_dict, self._rule.fixed_options)
        for group in groups:
            self._rule_of(group).check(group)
        check_masters(owners, state_dict)
        loaded, fresh = {}, defaultdict[Any, Any](dict)
        for index, saved in state_dict["state"].items():
            if index not in owners:
                fresh[index] = saved
            elif saved:
                parameter, group, saved_group = owners[index]
                where, target = f"state of parameter {index}", self._target(parameter)
                entries = self._rule_of(group).translated(with_our_names(where, target, saved, saved_group), target)
                layout, final = self._layout(parameter, group), bool(self._plans.recorded)
                fresh[parameter], weight = loaded_state(entries, target, layout, where, final)
                loaded[parameter] = target, weight
        # Everything has been validated. The plan is discarded first, because it is derived from the old state.
        self._forget()
        pairs = ((local(target.detach()), weight) for target, weight in loaded.values() if weight is not None)
        writes: list[partial[Any]] = [partial(values.copy_, weight) for values, weight in pairs]
        for parameter in loaded:
            writes += self._in_place(parameter, fresh[parameter])
        writes.append(partial(self.__dict__.update, state=fresh, param_groups=groups))
        writes.append(partial(self._plans.agreed.clear))
        self._commit(WHOLE, [(list(loaded), writes)])
        self._agree()

    def _commit(self, part: int, writes: Writes) -> None:
        """Make the calls of a step or a load (then `part` is `WHOLE`): all of them, whatever interrupts.

        Each pair is parameters, and the calls that write these and their state. Their order does not matter.
        """
        apply(list(chain.from_iterable(map(itemgetter(1), writes))))

    def _in_place(self, parameter: torch.Tensor, state: dict[str, Any]) -> list[partial[Any]]:
        """Calls that copy a loaded state into the tensors that CUDA graphs use, which replace those in `state`."""
        calls, recorded = [], self._plans.recorded
        for key, tensor in self.state.get(parameter, {}).items() if recorded else ():
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or id(local(tensor)) not in recorded:
                continue
            if (value.shape, value.dtype, value.device) == (tensor.shape, tensor.dtype, tensor.device):
                calls.append(partial(local(tensor).copy_, local(value)))
                state[key] = tensor
        return calls


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this context an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def saving(optimizer: Any, form: Literal["held", "canonical"]) -> AbstractContextManager[None]:
    """In this context ``optimizer.state_dict()`` of an optimizer of halfstep has a format, also for code that calls it
    by its name; those of others stay."""
    has_format = isinstance(optimizer, LayoutOptimizer)
    return attribute(optimizer, "state_dict_format", form) if has_format else nullcontext()
