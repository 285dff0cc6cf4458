"""Gradients that are used and freed during the backward: their buckets, what was stepped with them, and their
reduction over replicas."""

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


@dataclass
class Bucket:
    """Parameters that are stepped together by the plan `part`, whose gradients take `size` bytes.

    `members` are in the order in which their gradients were first complete. `arrived` has, by id, those whose gradient
    is complete and not yet used, and the CUDA stream that computed it.
    """

    part: int
    size: int = 0
    members: list[torch.Tensor] = field(default_factory=list)
    arrived: dict[int, tuple[torch.Tensor, torch.cuda.Stream | None]] = field(default_factory=dict)


class BackwardSteps:
    """What backwards have stepped since the last `step()` of an optimizer, and the stand-ins for these gradients.

    A step after the backward would have other results if code in between discards or computes a gradient, or sets an
    option; if the backward fails, so that some parameters are stepped and others are not; or if `step()` is called
    twice. All of these raise a RuntimeError.

    Args:
        name: that of the backward, for errors.
        remedies: what to do instead of reading gradients, of adding some, and of a step in the backward.
        take: the method to call when the gradient of a parameter is complete. It calls `begin`.
        finish: the one to call when a backward that has computed gradients has ended, with whether it has failed.
    """

    def __init__(
        self,
        name: str,
        remedies: tuple[str, str, str],
        take: Callable[[torch.Tensor], None],
        finish: Callable[[bool], None],
    ) -> None:
        self._name = name
        self._read, self._add, self._instead = remedies
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
        self._freed[id(parameter)] = freed_gradient(parameter, self._read)
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
            stand_in = self._freed[id(parameter)] = freed_gradient(parameter, self._read)
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
                f"Expected {self._name} to end, but got one that failed after it had stepped some of the parameters: "
                "load model and optimizer from a checkpoint, from which training can go on; where a backward may fail, "
                f"{self._instead}"
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

    def was_removed(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter had a stand-in when its gradient was computed in the present backward."""
        return id(parameter) in self._removed and not is_zeroed(self._removed[id(parameter)][1])

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

    def use(self) -> None:
        """Note that the present backward uses gradients, without which it cannot be repeated."""
        self._stepping.update(self._running)

    @contextmanager
    def stepping(
        self, parameters: list[torch.Tensor], stand_ins: list[torch.Tensor], groups: list[dict[str, Any]]
    ) -> Iterator[None]:
        """A context in which parameters are stepped, whose gradients become the stand-ins."""
        before = set(self._stepping)
        self.use()
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
            raise RuntimeError(self._second_gradient(parameter))

    def _second_gradient(self, parameter: torch.Tensor) -> str:
        return (
            f"Expected optimizer.step() after {self._name}, but got another gradient of a parameter of shape "
            f"{tuple(parameter.shape)} before it: {self._add}; freeze parameters that a loss does not train"
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
                raise RuntimeError(self._second_gradient(parameter))
        self._stepped = {}
        if option_values(groups) != self._options:
            raise RuntimeError(
                f"Expected the options of the groups to stay from {self._name} to step(), but got other ones, such as "
                "another lr: set them before the backward, or after step()"
            )
        for parameter in parameters if changed else ():
            if parameter.grad is None or is_zeroed(parameter.grad):
                raise RuntimeError(
                    f"Expected gradients to stay from {self._name} to step(), but got "
                    f"{'None' if parameter.grad is None else 'zeros'} as .grad of a parameter of shape "
                    f"{tuple(parameter.shape)}, which has been stepped: to discard gradients, {self._instead}"
                )

    def _refuse_second_step(self, parameters: list[torch.Tensor]) -> None:
        """Raise if all gradients are those that an earlier step has used."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if grads and not any(is_zeroed(grad) or not is_stand_in(grad) for grad in grads):
            raise RuntimeError(
                f"Expected {self._name} before each step(), but got none since the last step(): its gradients, which "
                f"this step would use again, were freed; call zero_grad() after the step, or {self._instead}"
            )

    def clear(self, failed: bool = False) -> None:
        """Forget what was stepped and, with `failed`, that a backward has failed."""
        self._stepped = {}
        if failed:
            self._failed, self._running, self._stepping, self._taking = False, {}, set(), set()


class BucketReduction:
    """Averages buckets of gradients over the ranks of a group, one after the other and in the same order on all ranks.

    `following` is the number of the next bucket to reduce, `complete` those from there on whose gradients are complete.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.following = 0
        self.complete: set[int] = set()
        self._running: tuple[Bucket, list[torch.Tensor], torch.Tensor, set[int], Any] | None = None

    @torch.no_grad()
    def begin(self, bucket: Bucket) -> None:
        """Begin to average the gradients of a bucket, which are copied and freed.

        They are reduced as one tensor, in which a parameter without a gradient on this rank counts as 0. A number per
        parameter follows the gradients: whether a rank has one.
        """
        members = bucket.members
        # Each gradient begins at a multiple of 16 bytes, as kernels read it fastest.
        sizes = [-(-member.numel() // 8) * 8 for member in members]
        flat = torch.empty(sum(sizes) + len(members), dtype=members[0].dtype, device=members[0].device)
        *slices, marks = flat.split([*sizes, len(members)])
        marks.fill_(1.0)
        averages, missing = [], set()
        for index, (member, padded) in enumerate(zip(members, slices, strict=True)):
            average = padded[: member.numel()].view(member.shape)
            averages.append(average)
            padded[member.numel() :].zero_()
            grad = gradient_of(member)
            if grad is None:
                missing.add(index)
                average.zero_()
                marks[index] = 0.0
            else:
                torch.mul(grad, 1.0 / self._group.size(), out=average)  # as DistributedDataParallel
                member.grad = None
        work = torch.distributed.all_reduce(flat, group=self._group, async_op=True)
        self._running = bucket, averages, marks, missing, work

    def end(self) -> tuple[Bucket, list[torch.Tensor]] | None:
        """Wait for the reduction that is running, if any. Returns its bucket, and the parameters that a rank has a
        gradient of.
        """
        if self._running is None:
            return None
        (bucket, averages, marks, missing, work), self._running = self._running, None
        work.wait()
        if missing:  # only then does the host wait for a device
            missing = {index for index, mark in enumerate(marks.tolist()) if mark == 0}
        ready = []
        for index, (member, average) in enumerate(zip(bucket.members, averages, strict=True)):
            if index not in missing:
                member.grad = average
                ready.append(member)
        return bucket, ready

    def restart(self) -> None:
        """Forget what a backward that failed has left, and begin with the first bucket."""
        self._running, self.following, self.complete = None, 0, set()
