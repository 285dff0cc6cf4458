"""Gradients that are used and freed during the backward: their buckets, records of what was stepped, and their
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
from halfstep.numerics.scaling.stand_ins import FreedGradient, freed_gradient, gradient_of, is_stand_in, is_zeroed

BUCKET_BYTES = 25 * 2**20


def check_bucket_bytes(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"Expected bucket_bytes to be an integer of at least 1, but got {size!r}")


def call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    """Call a bound method unless its object was deleted: hooks must not keep the object alive."""
    alive = method()
    if alive is not None:
        alive(*arguments)


def before_accumulation(
    parameter: weakref.ref[torch.Tensor], method: weakref.WeakMethod[Callable[..., None]], grad: torch.Tensor
) -> None:
    """Call a bound method with a parameter, before autograd stores or accumulates the parameter's gradient.

    If the object was deleted, remove the stand-in that it left behind.
    """
    alive = parameter()
    if alive is not None:
        call_if_alive(method, alive)
        if method() is None and is_stand_in(alive.grad):
            alive.grad = None


# If a compiled function runs the backward, dynamo would trace these hooks and everything that they call.
_eval_frame = torch._C._dynamo.eval_frame
_skip = _eval_frame._FrameAction.SKIP
for _hook in (call_if_alive, before_accumulation):
    _eval_frame.set_code_exec_strategy(_hook.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))


@dataclass
class Bucket:
    """Parameters that are stepped together."""

    part: int  # of the step plan
    size: int = 0  # bytes of the gradients
    members: list[torch.Tensor] = field(default_factory=list)  # in the order in which their gradients first completed
    # By id, the parameters whose gradient is complete and not yet used, and the CUDA streams that computed them.
    arrived: dict[int, tuple[torch.Tensor, torch.cuda.Stream | None]] = field(default_factory=dict)


class BackwardSteps:
    """Records what backwards have stepped since the last `step()` of an optimizer, and the stand-ins for gradients.

    Results would differ from a step after the backward if code in between discarded or computed a gradient, or set an
    option; if the backward failed after stepping some of the parameters; or if `step()` was called twice. All of these
    raise a RuntimeError.
    """

    def __init__(
        self,
        name: str,  # of the backward, in errors
        remedies: tuple[str, str, str],  # instead of reading gradients, adding to them, and stepping in the backward
        take: Callable[[torch.Tensor], None],  # to call when the gradient of a parameter is complete; it calls `begin`
        finish: Callable[[bool], None],  # to call when a backward that computed gradients ends, with whether it failed
    ) -> None:
        self._name = name
        self._read, self._add, self._instead = remedies
        # The garbage collector does not see references from hooks, so they must not refer to the optimizer, which
        # refers to the parameters.
        self._take, self._finish = weakref.WeakMethod(take), weakref.WeakMethod(finish)
        self._freed: dict[int, torch.Tensor] = {}  # the stand-in of each parameter with a hook, by id
        # The running backwards, by torch's graph task id. autograd keeps the callback until the backward ends or fails.
        self._running: dict[int, weakref.ref[partial[None]]] = {}
        self._taking: set[int] = set()  # running backwards whose gradients are taken
        self._stepping: set[int] = set()  # running backwards that have stepped
        self._failed = False  # whether one of the latter has failed, and no state was loaded since
        self._stepped: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (parameter, stand-in) by the parameter's id
        self._options: list[Any] = []  # the options with which they were stepped
        self._removed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the same, removed in this backward
        self._lock = threading.RLock()  # autograd calls the hooks from one thread per device

    def hook(self, parameter: torch.Tensor) -> list[Any]:
        """Make autograd call `take` for a parameter. Returns the handles of the hooks."""
        self._freed[id(parameter)] = freed_gradient(parameter, self._read)
        before = partial(before_accumulation, weakref.ref(parameter), weakref.WeakMethod(self._remove))
        hook_before = parameter.register_hook(unserializable_hook(before))
        return [hook_before, parameter.register_post_accumulate_grad_hook(partial(call_if_alive, self._take))]

    def has_hook(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._freed

    def stand_in(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stand-in that replaces the gradient of a parameter."""
        stand_in, grad = self._freed[id(parameter)], parameter.grad
        assert grad is not None
        # FSDP2 may have set the local part of the stand-in to the gradient.
        if grad is stand_in or (stand_in.dtype, stand_in.device) != (grad.dtype, parameter.device):
            stand_in = self._freed[id(parameter)] = freed_gradient(parameter, self._read)
        local(stand_in).zeroed = False  # type: ignore[attr-defined]
        return stand_in

    # ------------------------------------------------------------------------------------------------------ backwards

    def begin(self, takes: bool = True) -> bool:
        """Register the current backward. Returns whether this is its first gradient, outside of other backwards."""
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
        """Raise if a backward has failed after stepping some parameters."""
        if torch._C._current_graph_task_id() == -1:  # one that failed in another thread may not have been deleted yet
            for number in list(self._running):
                self._end(number, failed=True)
        if self._failed:
            raise RuntimeError(
                f"Expected {self._name} to complete, but got one that failed after stepping some of the parameters: "
                f"load model and optimizer from a checkpoint; if a backward may fail, {self._instead}"
            )

    def _end(self, number: int, failed: bool = False) -> None:
        """Called when a backward has ended, and again when autograd deletes it, which also happens if it fails."""
        with self._lock:
            if self._running.pop(number, None) is None:
                return
            if not self._running:  # restore stand-ins for which no gradient was stored, as with `torch.autograd.grad`
                removed, self._removed = self._removed, {}
                for parameter, stand_in in removed.values():
                    if parameter.grad is None:
                        parameter.grad = stand_in
        self._failed |= failed and number in self._stepping
        if number in self._taking:
            call_if_alive(self._finish, failed)
        self._taking.discard(number)
        self._stepping.discard(number)

    def was_removed(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter had a stand-in when the current backward computed its gradient."""
        return id(parameter) in self._removed and not is_zeroed(self._removed[id(parameter)][1])

    def _remove(self, parameter: torch.Tensor) -> None:
        """Called before autograd accumulates the gradient of a parameter, so that it does not add to the stand-in."""
        grad = parameter.grad
        if grad is not None and is_stand_in(grad):
            with self._lock:
                self.begin(takes=False)
                self._removed[id(parameter)] = parameter, grad
                parameter.grad = None

    # ---------------------------------------------------------------------------------------------------------- steps

    def use(self) -> None:
        """Record that the running backwards have used gradients, and so cannot be repeated."""
        self._stepping.update(self._running)

    @contextmanager
    def stepping(
        self, parameters: list[torch.Tensor], stand_ins: list[torch.Tensor], groups: list[dict[str, Any]]
    ) -> Iterator[None]:
        """A context in which parameters are stepped, and their gradients replaced by the stand-ins."""
        before = set(self._stepping)
        self.use()
        ids = list(map(id, parameters))
        self._stepped.update(zip(ids, zip(parameters, stand_ins, strict=True), strict=True))
        self._options = option_values(groups)
        try:
            yield
        except BaseException:
            if gradient_of(parameters[0]) is not None:  # the step failed before it changed anything
                self._stepping = before
                for key in ids:
                    del self._stepped[key]
            raise

    def refuse_second_gradient(self, parameter: torch.Tensor) -> None:
        """Raise if a backward has stepped the parameter since the last `step`: it must not get another gradient."""
        if id(parameter) in self._stepped:
            raise RuntimeError(self._second_gradient(parameter))

    def _second_gradient(self, parameter: torch.Tensor) -> str:
        return (
            f"Expected optimizer.step() after {self._name}, but got another gradient of a parameter of shape "
            f"{tuple(parameter.shape)}: {self._add}; freeze parameters that a loss should not train"
        )

    def check_step(self, groups: list[dict[str, Any]], unused: list[torch.Tensor]) -> None:
        """Raise if results would differ from a step after the backward, then forget what was stepped.

        If nothing was stepped, also raise if stand-ins are the only gradients of the parameters `unused`.
        """
        self.refuse_failed()
        if not self._stepped:
            grads = [parameter.grad for parameter in unused if parameter.grad is not None]
            if grads and not any(is_zeroed(grad) or not is_stand_in(grad) for grad in grads):
                raise RuntimeError(
                    f"Expected {self._name} before each step(), but got none since the last step(), whose gradients "
                    f"were freed and cannot be used again: call zero_grad() after the step, or {self._instead}"
                )
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
                f"Expected the options of the groups not to change between {self._name} and step(), but got other "
                "ones: set lr and others before the backward, or after step()"
            )
        for parameter in parameters if changed else ():
            if parameter.grad is None or is_zeroed(parameter.grad):
                raise RuntimeError(
                    f"Expected gradients not to be discarded between {self._name} and step(), but got "
                    f"{'None' if parameter.grad is None else 'zeros'} as .grad of a parameter of shape "
                    f"{tuple(parameter.shape)}, which has been stepped: to discard gradients, {self._instead}"
                )

    def clear(self, failed: bool = False) -> None:
        """Forget what was stepped and, with `failed`, that a backward failed."""
        self._stepped = {}
        if failed:
            self._failed, self._running, self._stepping, self._taking = False, {}, set(), set()


class BucketReduction:
    """Averages buckets of gradients over the ranks of a group, one at a time and in the same order on all ranks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.following = 0  # the number of the next bucket to reduce
        self.complete: set[int] = set()  # numbers of buckets ready to be reduced
        self._running: tuple[Bucket, list[torch.Tensor], torch.Tensor, set[int], Any] | None = None

    @torch.no_grad()
    def begin(self, bucket: Bucket) -> None:
        """Start to average the gradients of a bucket, which are copied and freed.

        They are reduced as one tensor, in which a parameter without a gradient on this rank counts as 0. It ends with
        one flag per parameter: whether any rank has a gradient.
        """
        members = bucket.members
        # Each gradient is aligned to 16 bytes, which kernels read fastest.
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
                torch.mul(grad, 1.0 / self._group.size(), out=average)  # like DistributedDataParallel
                member.grad = None
        work = torch.distributed.all_reduce(flat, group=self._group, async_op=True)
        self._running = bucket, averages, marks, missing, work

    def end(self) -> tuple[int, list[torch.Tensor]]:
        """Wait for the running reduction, if any. Returns its bucket's part, and the parameters that got a gradient."""
        if self._running is None:
            return 0, []
        (bucket, averages, marks, missing, work), self._running = self._running, None
        work.wait()
        if missing:  # only this makes the host wait for the device
            missing = {index for index, mark in enumerate(marks.tolist()) if mark == 0}
        ready = []
        for index, (member, average) in enumerate(zip(bucket.members, averages, strict=True)):
            if index not in missing:
                member.grad = average
                ready.append(member)
        return bucket.part, ready

    def restart(self) -> None:
        """Discard what a failed backward has left, and restart from the first bucket."""
        self._running, self.following, self.complete = None, 0, set()
