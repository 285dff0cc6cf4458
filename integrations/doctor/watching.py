"""Examine steps: clipping, loss scaling, schedules, autocast, and which weights a step changes."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from halfstep.integrations.doctor.findings import Diagnosis, Finding, count, dtype_name, dtypes_of, find
from halfstep.integrations.doctor.rules import doctor, examine, lost_updates
from halfstep.integrations.doctor.setup import Entry, Setup, innermost, nonfinite, sample, size_of
from halfstep.integrations.optim.classes import LayoutOptimizer, attribute
from halfstep.numerics.scaling.stand_ins import gradient_of


@contextmanager
def watch(model: torch.nn.Module, optimizer: Any, scaler: Any = None, scheduler: Any = None) -> Iterator[Watched]:
    """Watch some training steps, and report what is wrong with them.

    Hooks on the model and the optimizer, and wrapped methods of `scaler` and `scheduler`, observe each step; they are
    removed when the block ends. Results do not change. Inside the block, each step waits for the device several times,
    and copies at most 65,536 elements of each parameter.

    Args:
        model, optimizer, scaler: as for `halfstep.doctor`.
        scheduler: the learning rate scheduler, or a sequence of them; None if there is none.

    Yields:
        A `Watched`, whose ``diagnosis`` is set when the block ends.

    Raises:
        TypeError: as for `halfstep.doctor`.

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
    setup = Setup(model, optimizer, scaler)
    before = examine(setup)
    schedulers = [] if scheduler is None else [scheduler] if hasattr(scheduler, "step") else list(scheduler)
    with ExitStack() as stack:
        watched = Watched(setup, stack)
        watched._attach(schedulers)
        yield watched
    after = doctor(model, optimizer, scaler)
    findings = {finding.name: finding for finding in (*before.findings, *after.findings, *watched._findings())}
    if "optimizer-of-other-parameters" not in after.names:  # the steps have shown that they are copies
        findings.pop("optimizer-of-other-parameters", None)
    if watched._broken and (values := findings.get("values-not-finite")):
        findings[values.name] = replace(values, what=f"{values.what}; {watched._broken}")
    skipped = f" ({watched.skipped} skipped)" if watched.skipped else ""
    watched.diagnosis = Diagnosis.of(f"{before.examined}, {count(watched.steps, 'step')}{skipped}", findings.values())


def _unseen(method: Callable[..., Any]) -> Any:
    """Keep a hook out of compiled graphs and of autograd."""
    return torch._disable_dynamo(torch.no_grad()(method))


class Watched:
    """The result of `watch`. Its hooks identify parameters and optimizers by their id.

    Attributes:
        diagnosis: the findings before, during and after the steps; set when the block ends.
        steps: the number of optimizer steps observed.
        skipped: how many of them the loss scaler skipped.
    """

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.diagnosis = Diagnosis("nothing watched")
        self.steps = self.skipped = 0
        self._setup, self._scaler, self._stack = setup, setup.scaler, stack
        self._entries: dict[int, list[Entry]] = defaultdict(list)  # by optimizer
        for entry in setup.entries:
            self._entries[id(entry.owner)].append(entry)
        # By parameter:
        self._owners = {id(entry.parameter): id(entry.owner) for entry in setup.entries}
        self._weights = {id(entry.parameter): sample(entry.parameter) for entry in setup.entries}  # after a step
        # The gradient that the last step used, and its version, until the next gradient arrives:
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._clips = Counter[int]()  # since the last step
        # Of the next or current step:
        self._scaled = self._backward = False  # whether a backward ran from a scaled loss; whether any backward ran
        self._in_scaler = False  # whether the scaler's step is running
        # Of all steps:
        self._broken = ""  # a description of the first step after which a weight was not finite
        self._updates, self._lost = Counter[str](), Counter[str]()  # numbers of updates and of lost updates, by name
        self._since_schedule = [0, 0]  # steps taken and skipped since a schedule advanced
        self._moved = self._gradients = False  # whether a weight changed; whether a gradient was finite and not 0
        self._dtypes: dict[torch.dtype, str] = {}  # autocast dtypes, and the class of the first module under each
        self._elsewhere = ""  # a description of an autocast for another device
        self._eager = False  # whether a module ran uncompiled; in compiled ones autocast is not visible
        self._overflows = Counter[str]()  # number of steps with a non-finite gradient, by name
        self._seen: dict[str, Finding] = {}

    def __str__(self) -> str:
        return str(self.diagnosis)

    def _note(self, name: str, where: Any, **values: Any) -> None:
        self._seen.setdefault(name, find(name, where, **values))

    @property
    def _scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def _is_unscaled(self, parameter: int) -> bool:
        """Whether the scaler has unscaled the gradient of a parameter for the next step."""
        states = getattr(self._scaler, "_per_optimizer_states", {})
        return states.get(self._owners.get(parameter), {}).get("stage") is OptState.UNSCALED

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _attach(self, schedulers: list[Any]) -> None:
        """Attach all hooks, and detach them when the stack closes."""
        at_the_end = self._stack.callback
        for name, parameter in self._setup.trainable:
            hook = partial(self._after_gradient, name=name)
            at_the_end(parameter.register_post_accumulate_grad_hook(hook).remove)
        for module in self._setup.model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                at_the_end(module.register_forward_pre_hook(self._before_forward).remove)
        for optimizer in self._setup.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                at_the_end(optimizer.register_step_post_hook(lambda of, *_: self._after_step(of)).remove)
        if self._scaler is not None:
            self._wrap(self._scaler, "scale", self._in_scale)
            self._wrap(self._scaler, "step", self._in_scaler_step)
        for scheduler in schedulers:
            self._wrap(scheduler, "step", partial(self._in_schedule, scheduler))
        # However it was imported, clip_grad_norm_ looks up this function at each call.
        self._wrap(clip_grad, "_clip_grads_with_norm_", self._in_clip)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method, values = getattr(owner, name), vars(owner)
        overridden = name in values
        values[name] = torch._disable_dynamo(partial(wrapper, method))  # classes may forward setattr
        self._stack.callback(lambda: values.update({name: method}) if overridden else values.pop(name))

    def _before_forward(self, module: torch.nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._eager = True
        device = next(module.parameters(recurse=False)).device.type
        for enabled in filter(torch.is_autocast_enabled, {device, "cpu", "cuda"}):
            if enabled == device:
                self._dtypes.setdefault(torch.get_autocast_dtype(enabled), type(module).__name__)
            else:
                self._elsewhere = f'autocast("{enabled}") around {type(module).__name__} on {device}'

    @_unseen
    def _after_gradient(self, parameter: torch.Tensor, name: str) -> None:
        self._backward = True
        grad, used = gradient_of(parameter), self._used.pop(id(parameter), None)
        # Clearing a gradient replaces the tensor, or writes it once more.
        if grad is not None and used is not None and used[0]() is grad and grad._version == used[1] + 1:
            self._note("gradients-not-cleared", name)
        if self._is_unscaled(id(parameter)):
            self._note("accumulated-after-unscale", name)

    @_unseen
    def _after_step(self, optimizer: Any) -> None:
        if self._scaled and not self._in_scaler and self._scale != 1:
            entries = self._entries[id(optimizer)]
            unscaled = all(self._is_unscaled(id(entry.parameter)) for entry in entries if entry.grad is not None)
            stake = "" if unscaled else f"; gradients are {self._scale:g} times too large"
            self._note("step-without-scaler", type(optimizer).__name__, stake=stake)
        self._end_step(optimizer, stepped=True)

    def _end_step(self, optimizer: Any, stepped: bool) -> None:
        """Compare weights and gradients with those before the step, and reset what belongs to one step."""
        self.steps += 1
        entries, finite = self._entries[id(optimizer)], True
        for entry in entries:
            key, grad, weight = id(entry.parameter), entry.grad, sample(entry.parameter)
            before, self._weights[key] = self._weights[key], weight
            if grad is not None:
                self._used[key] = weakref.ref(grad), grad._version
            if weight.is_meta or (weight.shape, weight.device) != (before.shape, before.device):
                continue
            kept = weight == before
            self._moved |= not bool(kept.all())
            if grad is None or grad.is_sparse:
                continue
            values = sample(grad)
            if not bool(values.isfinite().all()):
                self._overflows[entry.name] += 1
                finite = False
                continue
            nonzero = values != 0
            self._gradients |= bool(nonzero.any())
            if stepped and entry.lr > 0 and not entry.keeps_updates and not self._setup.steps_copies:
                self._updates[entry.name] += int(nonzero.sum())
                self._lost[entry.name] += int((nonzero & kept).sum())
        if not self._broken and any(nonfinite(entry.parameter) for entry in entries):
            grads = "finite" if finite else "not finite"
            self._broken = f"seen in weights after step {self.steps}, whose gradients were {grads}"
        limit = getattr(optimizer, "max_grad_norm", None) if isinstance(optimizer, LayoutOptimizer) else None
        clips = max((self._clips.pop(id(entry.parameter), 0) for entry in entries), default=0)
        if clips + (limit is not None) > 1:
            owner = f" of an optimizer that also clips (max_grad_norm={limit:g})" if limit is not None else ""
            traffic = 2 * clips * size_of(*(entry.grad for entry in entries))
            self._note("clipped-twice", type(optimizer).__name__, calls=count(clips, "time"), what=owner, bytes=traffic)
        self._scaled = self._backward = False

    # ------------------------------------------------------------------------------------------------- wrapped methods

    def _in_scale(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note = torch._disable_dynamo(lambda grad: setattr(self, "_scaled", True))
        for loss in tree_leaves(result):
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                self._stack.callback(loss.register_hook(note).remove)
        return result

    def _in_scaler_step(self, method: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._backward and not self._scaled and self._scale != 1:
            self._note("loss-not-scaled", type(self._scaler).__name__, scale=self._scale)
        before = self.steps
        with attribute(self, "_in_scaler", True):
            result = method(optimizer, *args, **kwargs)
        inner = next(innermost(optimizer), optimizer)
        states = getattr(self._scaler, "_per_optimizer_states", {})  # by the argument in torch's, by `inner` in ours
        states = [states.get(key, {}) for key in (id(optimizer), id(inner))]
        flags = [flag for state in states for flag in state.get("found_inf_per_device", {}).values()]
        ran = self.steps > before
        skipped = not ran or any(map(bool, flags))
        self._since_schedule[skipped] += 1
        self.skipped += skipped
        if not ran:
            _unseen(self._end_step)(inner, stepped=False)
        return result

    def _in_schedule(self, scheduler: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = getattr(scheduler, "last_epoch", None)
        result = method(*args, **kwargs)
        (stepped, skipped), self._since_schedule = self._since_schedule, [0, 0]
        if skipped and not stepped and before is not None and getattr(scheduler, "last_epoch", None) != before:
            self._note("schedule-advanced-on-skip", type(scheduler).__name__)
        return result

    def _in_clip(self, function: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, parameters))
        entries = [entry for entry in self._setup.entries if id(entry.parameter) in ids]
        if all(parameter.grad is None for parameter in parameters):
            text = "clip_grad_norm_ got no gradients: it was called before backward(), or with an exhausted generator"
            self._note("clipping-without-effect", count(len(parameters), "parameter"), what=text)
        elif entries and all(id(entry.parameter) in self._used for entry in entries):
            text = "clip_grad_norm_ was called after the step, which is too late"
            self._note("clipping-without-effect", entries, what=text)
        self._clips.update({id(entry.parameter) for entry in entries})
        still = [entry for entry in entries if entry.grad is not None and not self._is_unscaled(id(entry.parameter))]
        if self._scaled and still and self._scale != 1:
            self._note("clipped-scaled-gradients", still, scale=self._scale)
        if entries and self._setup.is_flat():
            self._note("clipped-by-local-norm", "FullyShardedDataParallel")
        return function(parameters, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------ at the end

    def _findings(self) -> Iterator[Finding]:
        """The findings of all steps."""
        yield from self._seen.values()
        setup, stepped = self._setup, self.steps - self.skipped
        entries, steps = setup.entries, count(stepped, "step")
        if self._moved:
            yield from lost_updates(self._updates, self._lost, f"of the updates in {steps}")
        if not self._moved and stepped and any(entry.lr for entry in entries):
            if self._gradients:
                yield find("weights-unchanged", entries, steps=steps)
            elif not self._overflows:
                yield find("steps-without-gradients", entries, steps=steps)
        if self.skipped >= 3 and not stepped:
            worst = [name for name, _ in self._overflows.most_common()]
            yield find("every-step-skipped", worst or "all gradients", steps=count(self.skipped, "step"))
        # Autocast:
        fp16 = setup.computes_in_fp16()
        if self._elsewhere and not self._dtypes:
            yield find("autocast-without-effect", self._elsewhere)
        half = [entry for entry in entries if entry.half and not entry.keeps_updates]
        dtypes = dtypes_of(entry.parameter for entry in half)
        for dtype, module in self._dtypes.items():
            if half and not setup.steps_copies:
                yield find("autocast-over-16-bit-weights", half, dtype=dtype_name(dtype), dtypes=dtypes)
            if dtype == torch.float16 and self._scaler is None and not fp16:
                yield find("fp16-without-scaler", f"autocast(fp16) around {module}")
        if self._scaler is not None and self._eager and self.steps and torch.float16 not in self._dtypes and not fp16:
            size = size_of(*(entry.parameter for entry in entries))
            yield find("scaler-without-fp16", type(self._scaler).__name__, bytes=size)
