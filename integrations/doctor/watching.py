"""What only steps show: clipping, loss scaling, schedules, autocast, and which weights a step changes."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from halfstep.integrations.doctor.at_rest import doctor, examine, lost_updates
from halfstep.integrations.doctor.findings import (
    Diagnosis,
    Finding,
    count,
    dtype_name,
    dtypes_of,
    find,
    in_order,
)
from halfstep.integrations.doctor.setup import Entry, Setup, innermost, nonfinite, sample, size_of
from halfstep.integrations.optim.state import OptimizerState
from halfstep.numerics.scaling.stand_ins import gradient_of


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
    setup = Setup(model, optimizer, scaler)
    before = examine(setup)
    single = scheduler is None or hasattr(scheduler, "step")
    watcher = _Watcher(setup, ([] if scheduler is None else [scheduler]) if single else list(scheduler), watched)
    with ExitStack() as stack:
        watcher.attach(stack)
        yield watched
    after = doctor(model, optimizer, scaler)
    findings = {finding.name: finding for finding in (*before.findings, *after.findings, *watcher.findings())}
    if "optimizer-of-other-parameters" not in after.names:  # the steps showed them to be copies
        findings.pop("optimizer-of-other-parameters", None)
    if "values-not-finite" in findings and watcher.broken:
        first = findings["values-not-finite"]
        findings[first.name] = replace(first, what=f"{first.what}; {watcher.broken}")
    if "weights-unchanged" in findings or not watcher.lost_matters():
        findings.pop("updates-lost", None)
    skipped = f" ({watched.skipped} skipped)" if watched.skipped else ""
    watched.diagnosis = in_order(f"{before.examined}, {count(watched.steps, 'step')}{skipped}", findings.values())


def _unseen(method: Callable[..., Any]) -> Any:
    """Keeps a hook out of compiled graphs and of autograd."""
    return torch._disable_dynamo(torch.no_grad()(method))


class _Watcher:
    """What the hooks see, and what follows from it."""

    def __init__(self, setup: Setup, schedulers: list[Any], watched: Watched) -> None:
        self.setup, self.scaler, self.schedulers, self.watched = setup, setup.scaler, schedulers, watched
        self.broken = ""  # the first step after which a weight was not finite, in words
        self._seen: dict[str, Finding] = {}
        self._entries: dict[int, list[Entry]] = defaultdict(list)  # by the id of their optimizer
        for entry in setup.entries:
            self._entries[id(entry.owner)].append(entry)
        # Of each parameter, by id:
        self._initial = {id(entry.parameter): sample(entry.parameter).clone() for entry in setup.entries}
        self._weights: dict[int, torch.Tensor] = {}  # before a step
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # gradient after a step, and its version
        self._clips = Counter[int]()  # since the last step
        self._stepped: set[int] = set()  # since its last gradient
        # Of the step to come or running:
        self._scaled = False  # whether a backward began at a scaled loss
        self._backward = False  # whether a gradient was computed
        self._in_scaler = self._ran = False  # whether the scaler's step is running, and has run the optimizer's
        self._finite = True  # whether the gradients are finite
        # Of all steps:
        self._since_schedule = [0, 0]  # steps taken and skipped since a schedule advanced
        self._gradients = False  # whether a step had a gradient that is finite and not 0
        self._dtypes: dict[torch.dtype, str] = {}  # of autocast, and the module in which it was seen
        self._elsewhere = ""  # autocast for another device
        self._eager = False  # whether a module ran that is not compiled, whose autocast is seen
        self._lost: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # updates, and lost ones, by name
        self._overflows = Counter[str]()  # steps with a gradient that is not finite, by name

    def _note(self, name: str, where: Any, **values: Any) -> None:
        self._seen.setdefault(name, find(name, where, **values))

    @property
    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

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
            self._wrap(self.scaler, "scale", self._in_scale)
            self._wrap(self.scaler, "step", self._in_scaler_step)
        for scheduler in self.schedulers:
            self._wrap(scheduler, "step", self._in_schedule)
        # clip_grad_norm_ looks this function up when it is called, however it was imported.
        self._wrap(clip_grad, "_clip_grads_with_norm_", self._in_clip)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        method, values = getattr(owner, name, None), vars(owner)
        if method is None:
            return
        overridden = name in values  # written directly: classes may forward attributes that are set
        values[name] = torch._disable_dynamo(lambda *args, **kwargs: wrapper(owner, method, *args, **kwargs))
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
        key = id(parameter)
        self._backward = True
        self._stepped.discard(key)
        grad, used = gradient_of(parameter), self._used.pop(key, None)
        # A gradient that was cleared is another tensor, or was written once more.
        if grad is not None and used is not None and used[0]() is grad and grad._version == used[1] + 1:
            self._note("gradients-not-cleared", name)
        if self._is_unscaled(key):
            self._note("accumulated-after-unscale", name)

    def _is_unscaled(self, key: int) -> bool:
        """Whether the scaler has unscaled the gradient of a parameter for the step to come."""
        states = getattr(self.scaler, "_per_optimizer_states", {})
        return any(
            states[owner]["stage"] is OptState.UNSCALED and any(id(entry.parameter) == key for entry in entries)
            for owner, entries in self._entries.items()
            if owner in states
        )

    @_unseen
    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._ran = self._finite = True
        entries = self._entries[id(optimizer)]
        self._weights = {id(entry.parameter): sample(entry.parameter).clone() for entry in entries}
        if self._scaled and not self._in_scaler and self._scale != 1:
            unscaled = all(self._is_unscaled(id(entry.parameter)) for entry in entries if entry.grad is not None)
            stake = "" if unscaled else f"; gradients are {self._scale:g} times too large"
            self._note("step-without-scaler", type(optimizer).__name__, stake=stake)
        for entry in entries:
            grad = entry.grad
            if grad is None or grad.is_sparse or grad.is_meta:
                continue
            values = sample(grad)
            if not bool(values.isfinite().all()):
                self._overflows[entry.name] += 1
                self._finite = False
            else:
                self._gradients |= bool((values != 0).any())

    @_unseen
    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self.watched.steps += 1
        entries = self._entries[id(optimizer)]
        if not self.broken and any(nonfinite(entry.parameter) for entry in entries):
            grads = "finite" if self._finite else "not finite"
            self.broken = f"seen in weights after step {self.watched.steps}, whose gradients were {grads}"
        for entry in entries:
            before, grad = self._weights.pop(id(entry.parameter), None), entry.grad
            if before is None or before.is_meta or grad is None or grad.is_sparse:
                continue
            if not entry.keeps_updates and not self.setup.steps_copies:
                due = (sample(grad) != 0) & (entry.lr > 0)
                self._lost[entry.name][0] += int(due.sum())
                self._lost[entry.name][1] += int((due & (sample(entry.parameter) == before)).sum())
        self._end_step(entries, optimizer)

    def _end_step(self, entries: Sequence[Entry], optimizer: Any) -> None:
        """Forget what belongs to one step, and remember which gradients it used."""
        limit = getattr(optimizer, "max_grad_norm", None) if isinstance(optimizer, OptimizerState) else None
        clips = max((self._clips.pop(id(entry.parameter), 0) for entry in entries), default=0)
        if clips + (limit is not None) > 1:
            what = f" of an optimizer that clips by itself (max_grad_norm={limit:g})" if limit is not None else ""
            traffic = 2 * clips * size_of(*(entry.grad for entry in entries))
            self._note("clipped-twice", type(optimizer).__name__, calls=count(clips, "time"), what=what, bytes=traffic)
        for entry in entries:
            if (grad := entry.grad) is not None:
                self._used[id(entry.parameter)] = weakref.ref(grad), grad._version
                self._stepped.add(id(entry.parameter))
        self._scaled = self._backward = False

    # ------------------------------------------------------------------------------------------------- wrapped methods

    def _in_scale(self, scaler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        note = torch._disable_dynamo(lambda grad: setattr(self, "_scaled", True))
        for loss in tree_leaves(result):
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                self._stack.callback(loss.register_hook(note).remove)
        return result

    def _in_scaler_step(self, scaler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        argument = arguments[0] if arguments else options.get("optimizer")
        inside = list(map(id, innermost(argument)))
        optimizer = next((optimizer for optimizer in self.setup.optimizers if id(optimizer) in inside), argument)
        entries = self._entries[id(optimizer)]
        if self._backward and not self._scaled and self._scale != 1:
            self._note("loss-not-scaled", type(scaler).__name__, scale=self._scale)
        before = [sample(entry.parameter, 64).clone() for entry in entries]
        self._in_scaler, self._ran = True, False
        try:
            result = method(*arguments, **options)
        finally:
            self._in_scaler = False
        states = getattr(scaler, "_per_optimizer_states", {})
        states = [states[key] for key in {id(argument), id(optimizer)} if key in states]
        flags = [flag for state in states for flag in state.get("found_inf_per_device", {}).values()]
        flags += [state["verdict"].found_inf for state in states if state.get("verdict") is not None]
        unchanged = all(map(torch.equal, before, (sample(entry.parameter, 64) for entry in entries)))
        skipped = not self._ran or (unchanged and any(map(bool, flags)))
        self._since_schedule[skipped] += 1
        self.watched.skipped += skipped
        if not self._ran:
            self.watched.steps += 1
            grads = {entry.name: sample(entry.grad) for entry in entries if entry.grad is not None}
            self._overflows.update(name for name, grad in grads.items() if not bool(grad.isfinite().all()))
            self._end_step(entries, optimizer)
        return result

    def _in_schedule(self, scheduler: Any, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = getattr(scheduler, "last_epoch", None)
        result = method(*arguments, **options)
        (taken, skipped), self._since_schedule = self._since_schedule, [0, 0]
        if skipped and not taken and before is not None and getattr(scheduler, "last_epoch", None) != before:
            self._note("schedule-advanced-on-skip", type(scheduler).__name__)
        return result

    def _in_clip(self, module: Any, function: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, parameters))
        entries = [entry for entry in self.setup.entries if id(entry.parameter) in ids]
        if all(parameter.grad is None for parameter in parameters):
            what = "clip_grad_norm_ got no gradient, as from a generator that was used before, or before backward()"
            self._note("clipping-without-effect", count(len(parameters), "parameter"), what=what)
        elif entries and all(id(entry.parameter) in self._stepped for entry in entries):
            what = "clip_grad_norm_ was called after the step, whose gradients it changes too late"
            self._note("clipping-without-effect", entries, what=what)
        self._clips.update({id(entry.parameter) for entry in entries})
        still = [entry for entry in entries if entry.grad is not None and not self._is_unscaled(id(entry.parameter))]
        if self._scaled and still and self._scale != 1:
            self._note("clipped-scaled-gradients", still, scale=self._scale)
        if entries and self.setup.is_flat():
            self._note("clipped-by-local-norm", "FullyShardedDataParallel")
        return function(parameters, *args, **kwargs)

    # ------------------------------------------------------------------------------------------------------ at the end

    def lost_matters(self) -> bool:
        """Whether the steps had updates to lose; without any, what is said at rest holds."""
        updates, lost = (sum(pair[index] for pair in self._lost.values()) for index in (0, 1))
        return not updates or lost > 0.01 * updates

    def findings(self) -> Iterator[Finding]:
        """What the steps showed."""
        yield from self._seen.values()
        entries, watched = self.setup.entries, self.watched
        taken = watched.steps - watched.skipped
        steps = count(taken, "step")
        pairs = [(sample(entry.parameter), self._initial[id(entry.parameter)]) for entry in entries]
        moved = any(not old.is_meta and not torch.equal(new.to(old), old) for new, old in pairs)
        if moved:
            yield from lost_updates(self._lost, f"of the updates in {steps}")
        elif taken and any(entry.lr for entry in entries):
            if self._gradients:
                yield find("weights-unchanged", entries, steps=steps)
            elif not self._overflows:
                yield find("steps-without-gradients", entries, steps=steps)
        if watched.skipped >= 3 and not taken:
            worst = [name for name, _ in self._overflows.most_common()]
            yield find("every-step-skipped", worst or "all gradients", steps=count(watched.skipped, "step"))
        yield from self._autocast()

    def _autocast(self) -> Iterator[Finding]:
        setup, fp16 = self.setup, self.setup.computes_in_fp16()
        if self._elsewhere and not self._dtypes:
            yield find("autocast-without-effect", self._elsewhere)
        half = [entry for entry in setup.entries if entry.half and not entry.keeps_updates]
        dtypes = dtypes_of(entry.parameter for entry in half)
        for dtype, module in self._dtypes.items():
            if half and not setup.steps_copies:
                yield find("autocast-over-16-bit-weights", half, dtype=dtype_name(dtype), dtypes=dtypes)
            if dtype == torch.float16 and self.scaler is None and not fp16:
                yield find("fp16-without-scaler", f"autocast(fp16) around {module}")
        seen = self._eager and self.watched.steps
        if self.scaler is not None and seen and torch.float16 not in self._dtypes and not fp16:
            size = size_of(*(entry.parameter for entry in setup.entries))
            yield find("scaler-without-fp16", type(self.scaler).__name__, bytes=size)
