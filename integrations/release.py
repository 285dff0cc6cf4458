"""Gradient release: the optimizer steps inside the backward, so that the gradients of a whole model never coexist.

Without it, a bf16 gradient takes 2 bytes per parameter until the backward has ended. `step_in_backward` collects
complete gradients in buckets, updates the parameters of a bucket when its gradients are complete, and frees the
gradients. The bits are those of a step after the backward.

At any time the gradients of one bucket exist, of at most ``bucket_bytes`` and one gradient. FSDP2 reduces the gradients
of a unit into one buffer, which is freed when the last of them is: two more units may then be in memory. If gradients
become complete in another order than in the first backward, more buckets are filled at the same time.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations.optim.classes import Adam
from halfstep.numerics.scaling.scaler import unwrapped
from halfstep.numerics.scaling.topology import local
from halfstep.numerics.scaling.verdict import parameters_of

BUCKET_BYTES = 25 * 2**20
DDP_KEEPS = (
    "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: use fully_shard with a "
    "mesh of shape (ranks, 1), which replicates without keeping them"
)


class _Bucket:
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


class StepInBackward:
    """What `step_in_backward` returns. The optimizer refers to it, so keep it only to call its methods.

    Attributes:
        bucket_bytes: the size from which a bucket takes no more gradients.
    """

    def __init__(self, optimizer: Adam, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._optimizer = optimizer
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._backward = -1  # torch's number of the backward that will call `_finish`
        self._accumulating = False
        self._lock = threading.RLock()  # one thread of autograd per device calls the hooks
        # torch's garbage collection does not see these hooks, so they must not refer to the optimizer, which refers to
        # the parameters.
        take = weakref.WeakMethod(self._take)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, take))
            for parameter in parameters_of(optimizer)
            if parameter.requires_grad
        ]

    @property
    def buckets(self) -> list[int]:
        """Bytes of the gradients of each bucket. The first backward fills the buckets; before it there are none."""
        return [bucket.size for bucket in self._buckets]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context in which backwards only add to ``.grad``: for all but the last micro-batch of a step.

        The gradients of all parameters then exist until the last backward, in which each is stepped and freed. Under
        FSDP2, ``set_requires_gradient_sync(False)`` has the same effect on the step, with unsharded gradients.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def remove(self) -> None:
        """Step no longer in the backward. Gradients that later backwards compute wait for ``optimizer.step()``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._optimizer._forget()
        self._optimizer._stepping_in_backward = None

    def _take(self, parameter: torch.Tensor) -> None:
        """Called by autograd, or by FSDP2 after its reduction, when the gradient of a parameter is complete."""
        if self._accumulating:
            return
        with self._lock:
            if not self._buckets:
                self._refuse_ddp()
            running = torch._C._current_graph_task_id()
            if running != self._backward:
                if self._backward != -1:  # the last backward failed; `step` takes the gradients that it left
                    for one in self._buckets:
                        one.arrived = {}
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
                self._backward = running
            bucket = self._bucket_of.get(id(parameter)) or self._assign(parameter)
            stream = torch.cuda.current_stream(parameter.device) if parameter.device.type == "cuda" else None
            bucket.arrived[id(parameter)] = parameter, stream
            # While the first backward fills a bucket, all its members have arrived: it is then complete by its size.
            is_open = bucket is self._buckets[-1] and bucket.size < self.bucket_bytes
            if len(bucket.arrived) == len(bucket.members) and not is_open:
                self._step(bucket)

    def _refuse_ddp(self) -> None:
        """Raise if DistributedDataParallel wraps the parameters, which the model passed to us need not show.

        Each rank would step with its own gradients. The search over all objects runs once, and only in a process group.
        """
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        own = set(map(id, parameters_of(self._optimizer)))
        wrappers = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
        if any(id(parameter) in own for wrapper in wrappers for parameter in wrapper.parameters()):
            self.remove()
            raise RuntimeError(f"Expected the model not to be wrapped by {DDP_KEEPS}")

    def _assign(self, parameter: torch.Tensor) -> _Bucket:
        """Put a parameter into the last bucket, or into a new one if that is full."""
        if not self._buckets or self._buckets[-1].size >= self.bucket_bytes:
            self._buckets.append(_Bucket(len(self._buckets)))
        bucket = self._bucket_of[id(parameter)] = self._buckets[-1]
        bucket.members.append(parameter)
        assert parameter.grad is not None  # autograd calls the hook after it has stored the gradient
        grad = local(parameter.grad)
        bucket.size += grad.numel() * grad.element_size()
        return bucket

    def _step(self, bucket: _Bucket) -> None:
        """Update the parameters of a bucket whose gradients are complete, and free these."""
        ready = [parameter for parameter in bucket.members if id(parameter) in bucket.arrived]
        # Parts of the forward may have run on other streams, on which autograd then computes their gradients. Those
        # streams also reuse the memory of the gradients, and read the parameters.
        streams = {(stream, parameter.device) for parameter, stream in bucket.arrived.values() if stream is not None}
        others = [(stream, now) for stream, device in streams if (now := torch.cuda.current_stream(device)) != stream]
        bucket.arrived = {}
        for other, now in others:
            now.wait_stream(other)
        self._optimizer._step_part(bucket.part, ready)
        for other, now in others:
            other.wait_stream(now)

    def _finish(self) -> None:
        """Called by autograd when the backward has ended: step the buckets of which some parameters had no gradient."""
        with self._lock:
            self._backward = -1
            for bucket in self._buckets:
                if bucket.arrived:
                    self._step(bucket)


def _call(take: weakref.WeakMethod[Any], parameter: torch.Tensor) -> None:
    """Call a method unless its object was deleted."""
    method = take()
    if method is not None:
        method(parameter)


def step_in_backward(model: torch.nn.Module, optimizer: Adam, *, bucket_bytes: int = BUCKET_BYTES) -> StepInBackward:
    """Update parameters inside ``backward()``, as soon as their gradients are complete, and free the gradients.

    The training loop stays as it is: ``optimizer.step()`` updates the parameters that still have a gradient, usually
    none, and calls its hooks; ``zero_grad()`` has nothing to free; schedulers follow ``step()`` as before. The weights
    have the same bits as with a step after the backward.

    Call this after the model is on its device and sharded. FSDP2, HSDP and tensor parallelism are supported; FSDP2
    calls the steps after each reduction, on its stream.

    Args:
        model: the model whose backward steps.
        optimizer: a halfstep optimizer of parameters of `model`, or a wrapper as Accelerate's. It must not clip, since
            the norm of all gradients is only known after the backward.
        bucket_bytes: gradients are collected until they take this many bytes on this rank, and then stepped by one
            launch per dtype. A bucket is larger by up to one gradient.

    Returns:
        A handle with `StepInBackward.accumulate` for gradient accumulation and `StepInBackward.remove`.

    Raises:
        TypeError: `optimizer` is not an optimizer of halfstep, or has fp16 parameters, whose loss must be scaled: an
            overflow found in the last gradient could not undo the steps before it.
        ValueError: the optimizer clips, steps in the backward already, or has parameters that are not in the model; the
            model is wrapped by DistributedDataParallel, which keeps its gradients, or by FSDP1; or `bucket_bytes` is
            not a positive integer. Nothing was changed.

    Note:
        The loss must not be scaled; ``scaler.step(optimizer)`` of an enabled scaler raises, since no gradient is left
        to unscale. A step after each of several backwards of one iteration is rarely meant: use
        `StepInBackward.accumulate` for all but the last. Reentrant activation checkpointing computes the gradient of a
        parameter that several segments share in several parts, and each would be stepped: use ``use_reentrant=False``.

    Examples:
        >>> from halfstep.integrations.release import step_in_backward
        >>> model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        >>> optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
        >>> handle = step_in_backward(model, optimizer)
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> bool((model.weight != before).all()), model.weight.grad
        (True, None)
        >>> optimizer.step()  # for its hooks and the schedulers
    """
    optimizer = unwrapped(optimizer)
    _check(model, optimizer, bucket_bytes)
    optimizer._forget()
    optimizer._stepped_without_gradients = True  # steps without gradients are now usual
    handle = optimizer._stepping_in_backward = StepInBackward(optimizer, bucket_bytes)
    return handle


def _check(model: Any, optimizer: Any, bucket_bytes: Any) -> None:
    if not isinstance(optimizer, Adam):
        raise TypeError(
            f"Expected optimizer to be a halfstep.Adam or halfstep.AdamW, but got a {type(optimizer).__name__}"
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"Expected bucket_bytes to be an integer of at least 1, but got {bucket_bytes!r}")
    if optimizer._stepping_in_backward is not None:
        raise ValueError("Expected optimizer not to step in the backward already: call remove() on the first handle")
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"Expected max_grad_norm of the optimizer to be None, but got {optimizer.max_grad_norm}: the norm is known "
            "after the backward; do not clip, or step after the backward"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(f"Expected model not to be wrapped, but module {name!r} is a {DDP_KEEPS}")
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"Expected model not to be wrapped, but module {name!r} is a FullyShardedDataParallel (FSDP1): use "
                "FSDP2 (torch.distributed.fsdp.fully_shard)"
            )
    of_model = {id(parameter) for parameter in model.parameters()}
    for index, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in of_model:
            raise ValueError(
                f"Expected parameter {index} of the optimizer to be one of model, but it is not: make the optimizer of "
                "the sharded model's parameters, and pass that model"
            )
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise TypeError(
                f"Expected parameter {index} of the optimizer to be fp32 or bf16, but got torch.float16, whose loss "
                "must be scaled: a step that has begun cannot be skipped; train in bf16, or step after the backward"
            )
