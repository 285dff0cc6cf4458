"""Gradients that are used and freed during the backward: their buckets, and what was stepped with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from halfstep.integrations.optim.options import option_values
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import (
    FreedGradient,
    freed_gradient,
    gradient_of,
    is_stand_in,
    is_zeroed,
    remove_stand_in,
)

BUCKET_BYTES = 25 * 2**20
# What to do instead of reading gradients, of adding some, and of stepping in the backward.
READ = (
    "to clip, set max_grad_norm of the optimizer and call step_in_backward with clipping='exact' or 'previous', or use "
    "a trainer of halfstep.integrations.trainers; for a scaler, pass scaler= and clip by scaler.clip_grad_norm_; to "
    "read each gradient, register a post-accumulate hook before step_in_backward"
)
ADD = (
    "to add gradients, run all backwards but the last in `with handle.accumulate():`; zero_grad() cannot discard a "
    "step; with reentrant checkpointing, use use_reentrant=False; freeze parameters that a loss does not train"
)
INSTEAD = "call remove() and step after the backward"


def check_bucket_bytes(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"Expected bucket_bytes to be an integer of at least 1, but got {size!r}")


def call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    """Call the method of an object unless the object was deleted: a hook does not keep what it serves."""
    alive = method()
    if alive is not None:
        alive(*arguments)


def before_accumulation(
    parameter: weakref.ref[torch.Tensor], method: weakref.WeakMethod[Callable[..., None]], grad: torch.Tensor
) -> None:
    """Call the method of an object with a parameter of which autograd has a gradient, before it stores or adds it.

    If the object was deleted, remove the stand-in that it has left.
    """
    alive = parameter()
    if alive is not None:
        call_if_alive(method, alive)
        if method() is None:
            remove_stand_in(alive)


# If a compiled function calls the backward, dynamo would trace these hooks, and all that they call.
_eval_frame = torch._C._dynamo.eval_frame
_skip = _eval_frame._FrameAction.SKIP
for _hook in (call_if_alive, before_accumulation):
    _eval_frame.set_code_exec_strategy(_hook.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))


@dataclass(eq=False)
class Bucket:
    """Parameters that are stepped together by the plan `part`, and whose gradients take `size` bytes."""

    part: int
    size: int = 0
    # In the order in which their gradients were first complete.
    members: list[torch.Tensor] = field(default_factory=list)
    # By id, those whose gradient is complete and not yet used, and the CUDA stream that computed it.
    arrived: dict[int, tuple[torch.Tensor, torch.cuda.Stream | None]] = field(default_factory=dict)


class BackwardSteps:
    """What backwards have stepped since the last `step()` of an optimizer, and the stand-ins for these gradients.

    A step after the backward would have other results if code in between discards or computes a gradient, or sets an
    option; if the backward fails, so that some parameters are stepped and others are not; or if `step()` is called
    twice. All of these raise a RuntimeError.

    Args:
        take: the method to call when the gradient of a parameter is complete. It calls `begin`.
        finish: the one to call when a backward that has computed gradients has ended, with whether it has failed.
    """

    def __init__(self, take: Callable[[torch.Tensor], None], finish: Callable[[bool], None]) -> None:
        # torch's garbage collection does not see hooks, so they must not refer to the optimizer, which refers to the
        # parameters.
        self._take, self._finish = weakref.WeakMethod(take), weakref.WeakMethod(finish)
        self._freed: dict[int, torch.Tensor] = {}  # by the id of each parameter with a hook, its stand-in
        # The backwards that run, by torch's number. autograd keeps the callback until the backward ends or fails.
        self._running: dict[int, weakref.ref[partial[None]]] = {}
        self._taking: set[int] = set()  # those whose gradients are taken
        self._stepping: set[int] = set()  # those that have stepped
        self._failed = False  # whether one of these has failed, and no state was loaded since
        self._stepped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, parameters and stand-ins
        self._options: list[Any] = []  # with which they were stepped
        self._removed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # stand-ins removed in this backward
        self._lock = threading.RLock()  # one thread of autograd per device calls the hooks

    def hook(self, parameter: torch.Tensor) -> list[Any]:
        """Make autograd call `take` for a parameter. Returns the handles of the hooks."""
        self._freed[id(parameter)] = freed_gradient(parameter, READ)
        before = partial(before_accumulation, weakref.ref(parameter), weakref.WeakMethod(self._remove))
        after = partial(call_if_alive, self._take)
        return [
            parameter.register_hook(unserializable_hook(before)),
            parameter.register_post_accumulate_grad_hook(after),
        ]

    def has_hook(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._freed

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """What replaces the gradient of a parameter."""
        stand_in, grad = self._freed[id(parameter)], parameter.grad
        assert grad is not None
        # FSDP2 may have set the local part of the stand-in to the gradient.
        if grad is stand_in or (stand_in.dtype, stand_in.device) != (grad.dtype, parameter.device):
            stand_in = self._freed[id(parameter)] = freed_gradient(parameter, READ)
        local(stand_in).zeroed = False  # type: ignore[attr-defined]
        return stand_in

    # ------------------------------------------------------------------------------------------------------ backwards

    def begin(self, takes: bool = True) -> bool:
        """Note the present backward. Returns whether its first gradient is taken, and it is no part of another one."""
        number = torch._C._current_graph_task_id()
        if number == -1:
            return False
        if number not in self._running:
            self.refuse_failed()
            end: partial[None] = partial(call_if_alive, weakref.WeakMethod(self._end), number)
            lost = weakref.WeakMethod(self._end)
            torch.autograd.Variable._execution_engine.queue_callback(end)
            self._running[number] = weakref.ref(end, lambda _: call_if_alive(lost, number, True))
        first = takes and not self._taking
        if takes:
            self._taking.add(number)
        return first

    def refuse_failed(self) -> None:
        """Raise if a backward has failed after it had stepped some parameters."""
        if torch._C._current_graph_task_id() == -1:  # autograd may not have deleted one that failed in another thread
            for number in list(self._running):
                self._end(number, failed=True)
        if self._failed:
            raise RuntimeError(
                "Expected a backward that steps to end, but got one that failed after it had stepped some of the "
                "parameters: load model and optimizer from a checkpoint, from which training can go on; where a "
                f"backward may fail, {INSTEAD}"
            )

    def _end(self, number: int, failed: bool = False) -> None:
        """Called by autograd when a backward has ended, and again when it is deleted, which it also is if it fails."""
        with self._lock:
            if self._running.pop(number, None) is None:
                return
            if not self._running:
                self._restore()
        self._failed |= failed and number in self._stepping
        if number in self._taking:
            call_if_alive(self._finish, failed)
        self._taking.discard(number)
        self._stepping.discard(number)

    def _remove(self, parameter: torch.Tensor) -> None:
        """Called by autograd when it has a gradient of a parameter, which it would add to the stand-in."""
        grad = parameter.grad
        if grad is not None and is_stand_in(grad):
            with self._lock:
                self.begin(takes=False)
                self._removed[id(parameter)] = parameter, grad
                parameter.grad = None

    def _restore(self) -> None:
        """Put the stand-ins back for which no gradient was stored, such as by `torch.autograd.grad`."""
        removed, self._removed = self._removed, {}
        for parameter, stand_in in removed.values():
            if parameter.grad is None:
                parameter.grad = stand_in

    # ---------------------------------------------------------------------------------------------------------- steps

    @contextmanager
    def stepping(
        self, parameters: list[torch.Tensor], stand_ins: list[torch.Tensor], groups: list[dict[str, Any]]
    ) -> Iterator[None]:
        """A context in which parameters are stepped, whose gradients become the stand-ins."""
        before = set(self._stepping)
        self._stepping.update(self._running)
        ids = list(map(id, parameters))
        self._stepped.update(zip(ids, zip(parameters, stand_ins, strict=True), strict=True))
        self._options = option_values(groups)
        try:
            yield
        except BaseException:
            if gradient_of(parameters[0]) is not None:  # nothing was changed
                self._stepping = before
                for key in ids:
                    del self._stepped[key]
            raise

    def refuse_second_gradient(self, parameter: torch.Tensor) -> None:
        """Raise if a backward has stepped a parameter, which has another gradient now, since the last `step`."""
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "Expected optimizer.step() after a backward that steps, but got another gradient of a parameter of "
                f"shape {tuple(parameter.shape)} before it: {ADD}"
            )

    def check_step(self, groups: list[dict[str, Any]], unused: list[torch.Tensor]) -> None:
        """Raise if `step()` would have other results than a step after the backward. What follows is another step.

        One of the parameters `unused` must have been stepped if they have stand-ins only.
        """
        self.refuse_failed()
        if not self._stepped:
            self._refuse_second_step(unused)
            return
        parameters, stand_ins = zip(*self._stepped.values(), strict=True)
        changed = (
            not all(map(is_, map(attrgetter("grad"), parameters), stand_ins))
            or set(map(type, stand_ins)) != {FreedGradient}  # others may contain gradients
            or any(map(attrgetter("zeroed"), stand_ins))
        )
        for parameter in parameters if changed else ():
            if gradient_of(parameter) is not None:
                self.refuse_second_gradient(parameter)
        self._stepped = {}
        if option_values(groups) != self._options:
            raise RuntimeError(
                "Expected the options of the groups to stay from a backward that steps to step(), but got other ones, "
                "such as another lr: set them before the backward, or after step()"
            )
        for parameter in parameters if changed else ():
            if parameter.grad is None or is_zeroed(parameter.grad):
                raise RuntimeError(
                    f"Expected gradients to stay from a backward that steps to step(), but got "
                    f"{'None' if parameter.grad is None else 'zeros'} as .grad of a parameter of shape "
                    f"{tuple(parameter.shape)}, which has been stepped: to discard gradients, {INSTEAD}"
                )

    def _refuse_second_step(self, parameters: list[torch.Tensor]) -> None:
        """Raise if all gradients are those that an earlier step has used."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grads and not any(is_zeroed(grad) or not is_stand_in(grad) for grad in grads):
            raise RuntimeError(
                "Expected a backward that steps before each step(), but got none since the last step(): its gradients, "
                f"which this step would use again, were freed; call zero_grad() after the step, or {INSTEAD}"
            )

    def clear(self, failed: bool = False) -> None:
        """Forget what was stepped and, with `failed`, that a backward has failed."""
        self._stepped = {}
        if failed:
            self._failed, self._running, self._stepping, self._taking = False, {}, set(), set()
