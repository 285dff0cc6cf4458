"""What only steps show: clipping, loss scaling, schedules, autocast, and which weights a step changes."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from halfstep.integrations.doctor.at_rest import doctor, fp16_without_scaler, lost_finding
from halfstep.integrations.doctor.findings import Diagnosis, Finding, in_bytes, in_order, some
from halfstep.integrations.doctor.setup import (
    HALF,
    Held,
    Setup,
    dtype_name,
    dtypes_of,
    innermost,
    names_of,
    nonfinite,
    sample,
    world_size,
)
from halfstep.integrations.optim.state import OptimizerState
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.scaling.topology import local


class Watched:
    """The result of `watch`.

    Attributes:
        diagnosis: what was found, at rest after the steps and in them; set when the block ends.
        steps: the number of steps of optimizers that were seen.
        skipped: the number of those that a loss scaler skipped.
    """

    def __init__(self) -> None:
        self.diagnosis = Diagnosis("nothing watched")
        self.steps = 0
        self.skipped = 0

    def __str__(self) -> str:
        return str(self.diagnosis)


@contextmanager
def watch(model: torch.nn.Module, optimizer: Any, scaler: Any = None, scheduler: Any = None) -> Iterator[Watched]:
    """Watch some steps of a training, and find what is wrong with it.

    Hooks on the model and the optimizer, and wrapped methods of `scaler` and `scheduler`, see each step; they are taken
    away when the block ends. Nothing that is computed changes. While it is on, each step waits for the device several
    times, and at most 65,536 elements of each parameter are copied.

    Args:
        model, optimizer, scaler: as for `halfstep.doctor`.
        scheduler: the learning rate scheduler, or a sequence of them; None if there is none.

    Yields:
        An object whose ``diagnosis`` is set when the block ends.

    Raises:
        TypeError: as `halfstep.doctor`.

    Examples:
        >>> from halfstep.integrations.doctor import watch
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer) as watched:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 8)).sum().backward()
        ...         optimizer.step()  # without zero_grad()
        >>> watched.diagnosis.names
        ['gradients-not-cleared']
    """
    watched = Watched()
    before = doctor(model, optimizer, scaler)  # refuses what cannot be examined
    watcher = _Watcher(Setup(model, optimizer, scaler), scheduler, watched)
    with ExitStack() as stack:
        watcher.attach(stack)
        yield watched
    last = doctor(model, optimizer, scaler)
    after = {finding.name: finding for finding in (*before.findings, *last.findings, *watcher.findings())}
    if "optimizer-of-other-parameters" not in last.names:  # the steps showed them to be copies
        after.pop("optimizer-of-other-parameters", None)
    if "values-not-finite" in after and watcher.broken:
        first = after["values-not-finite"]
        after[first.name] = replace(first, what=f"{first.what}; {watcher.broken}")
    if "weights-unchanged" in after or not watcher.lost_matters():
        after.pop("updates-lost", None)
    examined = f"{before.examined}, {watched.steps} step{'s' * (watched.steps != 1)}"
    examined += f" ({watched.skipped} skipped)" if watched.skipped else ""
    watched.diagnosis = in_order(examined, list(after.values()))


class _Watcher:
    """What the hooks see, and what follows from it."""

    def __init__(self, setup: Setup, scheduler: Any, watched: Watched) -> None:
        self.setup, self.scaler, self.watched = setup, setup.scaler, watched
        single = scheduler is None or hasattr(scheduler, "step")
        self.schedulers: list[Any] = [] if scheduler is None else [scheduler] if single else list(scheduler)
        self.seen: dict[str, Finding] = {}
        self._of: dict[int, list[Held]] = defaultdict(list)  # by the id of their optimizer
        for one in setup.held:
            self._of[id(one.owner)].append(one)
        self._weights: dict[int, torch.Tensor] = {}  # samples before a step, by id
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradients after a step, and their versions
        self._clips: dict[int, int] = defaultdict(int)  # since the last step, by id
        self._stepped: set[int] = set()  # ids of parameters stepped since their last gradient
        self.broken = ""  # the first step after which a weight was not finite, in words
        self._scaled = False  # whether a backward began at a scaled loss since the last step
        self._backward = False  # whether a gradient was computed since the last step
        self._ran = False  # whether the optimizer's step ran in the scaler's
        self._in_scaler = False  # whether the scaler's step is running
        self._since_schedule = [0, 0]  # steps taken and skipped since a schedule advanced
        self._first = [sample(one.parameter).clone() for one in setup.held]
        self._gradients = False  # whether a step had a gradient that is finite and not 0
        self._finite = True  # whether the gradients of this step are finite
        self._dtypes: dict[torch.dtype, str] = {}  # of autocast, and the module in which it was seen
        self._elsewhere = ""
        self._eager = False  # whether a module ran that is not compiled, whose autocast is seen
        self._lost: dict[str, list[int]] = {}
        self._overflows: dict[str, int] = defaultdict(int)

    def _note(self, finding: Finding) -> None:
        self.seen.setdefault(finding.name, finding)

    # ----------------------------------------------------------------------------------------------------------- hooks

    def attach(self, stack: ExitStack) -> None:
        """Attach all hooks, and detach them when `stack` closes."""
        self._stack = stack
        for name, parameter in self.setup.trainable():
            handle = parameter.register_post_accumulate_grad_hook(lambda of, name=name: self._after_gradient(of, name))
            stack.callback(handle.remove)
        for module in self.setup.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                stack.callback(module.register_forward_pre_hook(self._before_forward).remove)
        for optimizer in self.setup.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
                stack.callback(optimizer.register_step_post_hook(self._after_step).remove)
        if self.scaler is not None:
            self._wrap(stack, self.scaler, "scale", self._in_scale)
            self._wrap(stack, self.scaler, "step", self._in_scaler_step)
        for scheduler in self.schedulers:
            self._wrap(stack, scheduler, "step", self._in_schedule)
        # clip_grad_norm_ looks this function up when it is called, however it was imported.
        self._wrap(stack, clip_grad, "_clip_grads_with_norm_", self._in_clip)

    @staticmethod
    def _wrap(stack: ExitStack, of: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method = getattr(of, name, None)
        if method is None:
            return
        own, values = name in vars(of), vars(of)  # written directly: classes may forward attributes that are set
        values[name] = lambda *arguments, **options: wrapper(of, method, *arguments, **options)
        stack.callback(lambda: values.update({name: method}) if own else values.pop(name))

    def _before_forward(self, module: torch.nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._eager = True
        device = next(module.parameters(recurse=False)).device.type
        for kind in {device, "cpu", "cuda"}:
            if torch.is_autocast_enabled(kind):
                if kind == device:
                    self._dtypes.setdefault(torch.get_autocast_dtype(kind), type(module).__name__)
                else:
                    self._elsewhere = f'autocast("{kind}") around {type(module).__name__} on {device}'

    @torch._disable_dynamo
    @torch.no_grad()
    def _after_gradient(self, parameter: torch.Tensor, name: str) -> None:
        grad, key = gradient_of(parameter), id(parameter)
        self._backward = True
        self._stepped.discard(key)
        used = self._used.pop(key, None)
        # A gradient that was cleared is another tensor, or was written once more.
        if grad is not None and used is not None and used[0]() is grad and grad._version == used[1] + 1:
            self._note(
                Finding(
                    "gradients-not-cleared",
                    "error",
                    name,
                    "its gradient was added to the one that the last step used",
                    "each step uses the sum of the gradients of all steps before it",
                    "call optimizer.zero_grad() after each step",
                )
            )
        if self._unscaled_of(key):
            self._note(
                Finding(
                    "accumulated-after-unscale",
                    "error",
                    name,
                    "a scaled gradient was added to one that unscale_ had already unscaled",
                    "the new gradient counts as many times as the loss scale says",
                    "call unscale_ and clip once, after the last micro-batch of a step",
                )
            )

    def _unscaled_of(self, key: int) -> bool:
        """Whether the scaler has unscaled the gradient of a parameter for the step to come."""
        if self.scaler is None or not hasattr(self.scaler, "_per_optimizer_states"):
            return False
        states = self.scaler._per_optimizer_states
        done = {known for known in states if states[known]["stage"] is OptState.UNSCALED}
        return any(owner in done and any(id(one.parameter) == key for one in held) for owner, held in self._of.items())

    @torch._disable_dynamo
    @torch.no_grad()
    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._ran = self._finite = True
        held = self._of[id(optimizer)]
        self._weights = {id(one.parameter): sample(one.parameter).clone() for one in held}
        if self.scaler is not None and self._scaled and not self._in_scaler and float(self.scaler.get_scale()) != 1:
            unscaled = all(
                self._unscaled_of(id(one.parameter)) for one in held if gradient_of(one.parameter) is not None
            )
            self._note(
                Finding(
                    "step-without-scaler",
                    "error",
                    type(optimizer).__name__,
                    "optimizer.step() was called, and not scaler.step(optimizer)",
                    "steps whose gradients overflow are not skipped: weights become NaN"
                    if unscaled
                    else f"gradients are {self.scaler.get_scale():g} times too large, and overflows are not skipped",
                    "call scaler.step(optimizer)",
                )
            )
        for one in held:
            grad = gradient_of(one.parameter)
            if grad is None or grad.is_sparse or grad.is_meta:
                continue
            found = sample(grad)
            if not bool(found.isfinite().all()):
                self._overflows[one.name] += 1
                self._finite = False
            elif bool((found != 0).any()):
                self._gradients = True

    @torch._disable_dynamo
    @torch.no_grad()
    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self.watched.steps += 1
        held = self._of[id(optimizer)]
        if not self.broken and any(nonfinite([one.parameter for one in held])):
            grads = "finite" if self._finite else "not finite"
            self.broken = f"seen in weights after step {self.watched.steps}, whose gradients were {grads}"
        for one in held:
            key, grad = id(one.parameter), gradient_of(one.parameter)
            before = self._weights.pop(key, None)
            if before is None or before.is_meta:
                continue
            after = sample(one.parameter)
            changed = after != before
            if grad is not None and not grad.is_sparse and not one.keeps_updates and not self.setup.own_copies:
                counts = self._lost.setdefault(one.name, [0, 0])
                due = (sample(grad) != 0) & (float(one.group.get("lr") or 0.0) > 0)
                counts[0] += int(due.sum())
                counts[1] += int((due & ~changed).sum())
        self._end_step(held, optimizer)

    def _end_step(self, held: Sequence[Held], optimizer: Any) -> None:
        """Forget what belongs to one step, and remember which gradients it used."""
        limit = getattr(optimizer, "max_grad_norm", None) if isinstance(optimizer, OptimizerState) else None
        clips = max((self._clips[id(one.parameter)] for one in held), default=0)
        if clips + (limit is not None) > 1:
            self._note(
                Finding(
                    "clipped-twice",
                    "warning",
                    type(optimizer).__name__,
                    f"clip_grad_norm_ was called {clips} time{'s' * (clips != 1)} before a step"
                    + (f" of an optimizer that clips by itself (max_grad_norm={limit:g})" if limit is not None else ""),
                    "the smaller limit holds, and gradients are read and written once more: "
                    f"{in_bytes(2 * clips * self._gradient_bytes(held))} of traffic per step",
                    "clip once, with max_grad_norm= of halfstep.AdamW, which reads gradients once and writes none",
                )
            )
        for one in held:
            key, grad = id(one.parameter), gradient_of(one.parameter)
            self._clips.pop(key, None)
            if grad is not None:
                self._used[key] = weakref.ref(grad), grad._version
                self._stepped.add(key)
        self._scaled = self._backward = False

    def _gradient_bytes(self, held: Sequence[Held]) -> int:
        grads = [local(grad) for one in held if (grad := gradient_of(one.parameter)) is not None]
        return sum(grad.numel() * grad.element_size() for grad in grads)

    # --------------------------------------------------------------------------------------------------- what it wraps

    @torch._disable_dynamo
    def _in_scale(self, scaler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        for loss in tree_leaves(result):
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                self._stack.callback(loss.register_hook(self._in_scaled_backward).remove)
        return result

    @torch._disable_dynamo
    def _in_scaled_backward(self, grad: torch.Tensor) -> None:
        self._scaled = True

    @torch._disable_dynamo
    def _in_scaler_step(self, scaler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        given = arguments[0] if arguments else options.get("optimizer")
        inside = list(innermost(given))
        optimizer = next((one for one in self.setup.optimizers if any(one is other for other in inside)), given)
        if self._backward and not self._scaled and float(scaler.get_scale()) != 1:
            self._note(
                Finding(
                    "loss-not-scaled",
                    "error",
                    type(scaler).__name__,
                    "the scaler unscales gradients of a loss that scaler.scale(loss) did not scale",
                    f"gradients are divided by {scaler.get_scale():g}, so that small ones and eps decide the step",
                    "call scaler.scale(loss).backward()",
                )
            )
        self._ran = False
        before = self._first_weights(optimizer)
        self._in_scaler = True
        try:
            result = method(*arguments, **options)
        finally:
            self._in_scaler = False
        held = self._of[id(optimizer)]
        states = getattr(scaler, "_per_optimizer_states", {})
        known = [states[key] for key in {id(given), id(optimizer)} if key in states]
        flags = [flag for one in known for flag in one.get("found_inf_per_device", {}).values()]
        flags += [one["verdict"].found_inf for one in known if one.get("verdict") is not None]
        skipped = not self._ran or any(map(bool, flags))
        if skipped and self._ran:
            skipped = self._first_weights_equal(optimizer, before)
        self._since_schedule[skipped] += 1
        if skipped:
            self.watched.skipped += 1
            if not self._ran:
                self.watched.steps += 1
                for one in held:
                    grad = gradient_of(one.parameter)
                    if grad is not None and not bool(sample(grad).isfinite().all()):
                        self._overflows[one.name] += 1
                self._end_step(held, optimizer)
        return result

    def _first_weights(self, optimizer: Any) -> list[torch.Tensor]:
        return [sample(one.parameter, 64).clone() for one in self._of[id(optimizer)]]

    def _first_weights_equal(self, optimizer: Any, before: list[torch.Tensor]) -> bool:
        now = [sample(one.parameter, 64) for one in self._of[id(optimizer)]]
        return all(map(torch.equal, now, before))

    @torch._disable_dynamo
    def _in_schedule(self, scheduler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = getattr(scheduler, "last_epoch", None)
        result = method(*arguments, **options)
        after = getattr(scheduler, "last_epoch", None)
        (taken, skipped), self._since_schedule = self._since_schedule, [0, 0]
        if skipped and not taken and before is not None and after != before:
            self._note(
                Finding(
                    "schedule-advanced-on-skip",
                    "warning",
                    type(scheduler).__name__,
                    "the schedule advanced after a step that the loss scaler had skipped",
                    "the learning rate runs ahead of the steps: warm-up is shorter, and the decay ends early",
                    "wrap it in halfstep.SkipAwareScheduler(scheduler, scaler)",
                )
            )
        return result

    @torch._disable_dynamo
    def _in_clip(self, module: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        given = arguments[0] if arguments else options.get("parameters", ())
        parameters = [given] if isinstance(given, torch.Tensor) else list(given)
        arguments = (parameters, *arguments[1:]) if arguments else arguments
        options = {**options, "parameters": parameters} if "parameters" in options else options
        own = {id(one.parameter): one for one in self.setup.held}
        mine = [own[id(one)] for one in parameters if id(one) in own]
        with_gradient = [one for one in parameters if one.grad is not None]
        if not with_gradient or (mine and all(id(one.parameter) in self._stepped for one in mine)):
            self._note(
                Finding(
                    "clipping-without-effect",
                    "error",
                    some(names_of(mine)) if mine else f"{len(parameters):,} parameters",
                    "clip_grad_norm_ was called after the step, whose gradients it changes too late"
                    if with_gradient
                    else "clip_grad_norm_ got no parameter with a gradient, as from a generator that was used before, "
                    "or before backward()",
                    "gradients are not clipped",
                    "call it between backward() and the step, with model.parameters()",
                )
            )
        for one in mine:
            self._clips[id(one.parameter)] += 1
        scaled = self.scaler is not None and self._scaled and float(self.scaler.get_scale()) != 1
        still = [one for one in mine if one.parameter.grad is not None and not self._unscaled_of(id(one.parameter))]
        if scaled and still and self.scaler is not None:
            self._note(
                Finding(
                    "clipped-scaled-gradients",
                    "error",
                    some(names_of(still)),
                    "clip_grad_norm_ was called on gradients that are multiplied by the loss scale",
                    f"the limit is {self.scaler.get_scale():g} times as strict as it says, and changes with the scale",
                    "call scaler.unscale_(optimizer) first, or use max_grad_norm= of halfstep.AdamW",
                )
            )
        if mine and self.setup.wraps("FullyShardedDataParallel") and world_size() > 1:
            self._note(
                Finding(
                    "clipped-by-local-norm",
                    "error",
                    "FullyShardedDataParallel",
                    "torch.nn.utils.clip_grad_norm_ takes the norm of the shards of its own rank",
                    "each rank scales its shards by another factor",
                    "call model.clip_grad_norm_(max_norm), or use max_grad_norm= of halfstep.AdamW",
                )
            )
        return function(*arguments, **options)

    # ------------------------------------------------------------------------------------------------------ at the end

    def lost_matters(self) -> bool:
        """Whether the steps had updates to lose; without any, what is said at rest holds."""
        counts = [count for count in self._lost.values() if count[0]]
        return not counts or sum(count[1] for count in counts) > 0.01 * sum(count[0] for count in counts)

    def findings(self) -> Iterator[Finding]:
        """What the steps showed."""
        yield from self.seen.values()
        setup, watched = self.setup, self.watched
        taken = watched.steps - watched.skipped
        pairs = [(sample(one.parameter), first) for one, first in zip(setup.held, self._first, strict=True)]
        moved = any(not first.is_meta and not torch.equal(now.to(first), first) for now, first in pairs)
        counts = {name: (count[0], count[1]) for name, count in self._lost.items() if count[0]}
        if counts and moved and self.lost_matters():
            yield lost_finding(counts, f"of the updates in {taken} step{'s' * (taken != 1)}")
        rates = any(float(one.group.get("lr") or 0) for one in setup.held)
        if taken and rates and not moved and not self._gradients and not self._overflows:
            yield Finding(
                "steps-without-gradients",
                "error",
                some(names_of(setup.held)),
                f"in {taken} step{'s' * (taken != 1)}, no gradient was there or other than 0, and no weight changed",
                "nothing is trained",
                "call loss.backward() before the step, and zero_grad() after it",
            )
        if taken and rates and not moved and self._gradients:
            yield Finding(
                "weights-unchanged",
                "error",
                some(names_of(setup.held)),
                f"{taken} step{'s' * (taken != 1)} with gradients changed no weight",
                "nothing is trained",
                _WHY_UNCHANGED,
            )
        if watched.skipped >= 3 and not taken:
            names = sorted(self._overflows, key=lambda name: -self._overflows[name])
            yield Finding(
                "every-step-skipped",
                "error",
                some(names) if names else "all gradients",
                f"the loss scaler skipped all {watched.skipped} steps: these gradients are not finite",
                "nothing is trained, and the loss scale falls with each step",
                "find the first operation that overflows: halfstep.integrations.doctor.first_nonfinite",
            )
        yield from self._autocast()

    def _autocast(self) -> Iterator[Finding]:
        setup = self.setup
        if self._elsewhere and not self._dtypes:
            yield Finding(
                "autocast-without-effect",
                "warning",
                self._elsewhere,
                "autocast is enabled for another device than that of the weights",
                "all operations run in the dtype of the weights, at the memory and time of that",
                "pass autocast the device type of the model",
            )
        for dtype, module in self._dtypes.items():
            half = [one for one in setup.held if one.parameter.dtype in HALF and not one.keeps_updates]
            if half and not setup.own_copies:
                yield Finding(
                    "autocast-over-16-bit-weights",
                    "error",
                    some(names_of(half)),
                    f"autocast({dtype_name(dtype)}) expects fp32 weights, and these are in "
                    f"{dtypes_of([one.parameter for one in half])}: the upcast to fp32 did not happen",
                    "weights are updated in 16 bits, which autocast is there to avoid",
                    "load the model with dtype=torch.float32 under autocast, or use halfstep.AdamW, which keeps fp32 "
                    "masters of 16-bit weights, without autocast",
                )
            if dtype == torch.float16 and self.scaler is None and not setup.computes_in_fp16():
                yield fp16_without_scaler(f"autocast(fp16) around {module}")
        if (
            self.scaler is not None
            and self._eager
            and self.watched.steps
            and torch.float16 not in self._dtypes
            and not setup.computes_in_fp16()
        ):
            size = sum(local(one.parameter).numel() * one.parameter.element_size() for one in setup.held)
            yield Finding(
                "scaler-without-fp16",
                "warning",
                type(self.scaler).__name__,
                "nothing is computed in fp16, and a loss scaler is enabled",
                f"each step reads the gradients once more: {in_bytes(size)}",
                "pass enabled=False: bf16 and fp32 have the range that fp16 lacks",
            )


_WHY_UNCHANGED = (
    "check that the optimizer holds these parameters and not copies of them, and that the learning rate is not too "
    "small for their dtype"
)
