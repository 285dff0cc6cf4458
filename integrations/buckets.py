"""Buckets of gradients that are used and freed during the backward, and their reduction over replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from halfstep.numerics.scaling.stand_ins import gradient_of, remove_stand_in


def call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: torch.Tensor) -> None:
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


class Bucket:
    """Parameters that are stepped together.

    Attributes:
        part: the number of its plan in the optimizer.
        size: bytes of its gradients.
        members: its parameters, in the order in which their gradients were first complete.
        arrived: by id, those whose gradient is complete and not yet used, and the CUDA stream that computed it.
    """

    def __init__(self, part: int) -> None:
        self.part = part
        self.size = 0
        self.members: list[torch.Tensor] = []
        self.arrived: dict[int, tuple[torch.Tensor, torch.cuda.Stream | None]] = {}


class BucketReduction:
    """Averages buckets of gradients over the ranks of a group, one after the other and in the same order on all ranks.

    Attributes:
        following: the number of the next bucket to reduce.
        complete: the numbers of the buckets from there on whose gradients are complete.
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
        *places, marks = flat.split([*sizes, len(members)])
        marks.fill_(1.0)
        averages, missing = [], set()
        for index, (member, place) in enumerate(zip(members, places, strict=True)):
            average = place[: member.numel()].view(member.shape)
            averages.append(average)
            place[member.numel() :].zero_()
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
        """Wait for the reduction that is running, if any, and set the gradients of its parameters.

        Returns:
            The bucket, and its parameters of which a rank has a gradient.
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
