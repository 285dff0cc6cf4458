"""DistributedDataParallel: overflow and norm are known when the backward ends.

`overlap_overflow_check` registers a communication hook that reduces each bucket and checks it right after, while the
backward goes on. All ranks see the same reduced numbers, so nothing more is sent, and `GradScaler.step` reads no
gradient but in the optimizer itself.

Three hooks to choose from; each divides before it reduces, and each runs on every backend that can add up its dtype
(gloo and NCCL can):

    "none"   the bits of DistributedDataParallel without a hook
    "fp16"   g / ranks rounded to fp16, added in fp16; half the bytes on the wire. A gradient of 70000 on one of two
             ranks arrives as 35000, where casting first makes it infinite. Only what lies beyond 65504 after the
             division overflows.
    "bf16"   the same in bf16: fp32's range, 8 bits of precision
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the hooks' annotations with the types.
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations.overlap import EarlyCheck, checked_scaler, in_backward, same_order
from halfstep.numerics.scaling.scaler import GradScaler

Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


# ---------------------------------------------------------------------------------------------------------- the hooks


def _group(state: Any) -> Any:
    return dist.group.WORLD if state is None else state


def _sum(tensor: torch.Tensor, group: Any) -> Future[Any]:
    return dist.all_reduce(tensor, group=group, async_op=True).get_future()


def mean_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The mean over ranks in the gradients' own dtype: what DistributedDataParallel does without a hook.

    Args:
        state: the process group; None for the default one.
        bucket: of gradients.
    """
    group = _group(state)
    # As DistributedDataParallel has it: by the reciprocal, which for 3 ranks is not the same as a division.
    return _sum(bucket.buffer().mul_(1.0 / group.size()), group).then(_only)


def _only(done: Future[Any]) -> torch.Tensor:
    found = done.value()
    reduced: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
    return reduced


def _compressed(dtype: torch.dtype, group: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    shrunk = torch.empty_like(buffer, dtype=dtype)
    torch.mul(buffer, 1.0 / group.size(), out=shrunk)  # multiplied in fp32 and rounded once

    def decompress(done: Future[Any]) -> torch.Tensor:
        return buffer.copy_(_only(done))

    return _sum(shrunk, group).then(decompress)


def mean_in_fp16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The mean over ranks, sent and added up in fp16, divided before it is rounded; arguments as of `mean_hook`."""
    return _compressed(torch.float16, _group(state), bucket)


def mean_in_bf16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The mean over ranks, sent and added up in bf16, divided before it is rounded; arguments as of `mean_hook`."""
    return _compressed(torch.bfloat16, _group(state), bucket)


HOOKS: dict[str, Hook] = {"none": mean_hook, "fp16": mean_in_fp16_hook, "bf16": mean_in_bf16_hook}


# ---------------------------------------------------------------------------------------------------------- the check


def overlap_overflow_check(
    model: DistributedDataParallel,
    scaler: GradScaler,
    *,
    hook: Literal["none", "fp16", "bf16"] | Hook = "none",
    state: Any = None,
) -> None:
    """Check each bucket of gradients as soon as it is reduced, so that `scaler.step` need not.

    Flag, flags per parameter and norm have the bits of the usual check, and with the default hook training has the bits
    of DistributedDataParallel without one. Gradients accumulated in `no_sync` are checked with the backward that
    reduces their sum; unused parameters, rebuilt buckets, ``static_graph`` and ``gradient_as_bucket_view`` change
    nothing. Where gradients were changed between backward and `step`, and wherever the answer does not cover every
    gradient of the optimizer (parameters outside of the model, sparse gradients, inside a CUDA graph), the scaler makes
    its usual pass: see `halfstep.integrations.overlap`.

    Args:
        model: after which the optimizers may still be made; several may share it.
        scaler: whose `step`, `clip_grad_norm_` and `update` are used; disabled, only the hook is registered.
        hook: how to reduce; ``"fp16"`` and ``"bf16"`` halve what is sent. Or a communication hook of your own, with
            its `state`, which must return the reduced bucket.
        state: handed to `hook`. For the hooks by name the process group, by default the model's.

    Raises:
        TypeError: `model` is no DistributedDataParallel, `scaler` is not ours, or `hook` cannot be called.
        ValueError: `hook` is an unknown name.
        RuntimeError: the model has a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__qualname__}; allowed is a torch.nn.parallel.DistributedDataParallel: wrap the "
            "model in it first; for fully_shard use halfstep.integrations.fsdp.overlap_overflow_check"
        )
    checked_scaler(scaler)
    if isinstance(hook, str) and hook not in HOOKS:
        raise ValueError(f"hook is {hook!r}; allowed are {', '.join(map(repr, HOOKS))} or a communication hook")
    if not isinstance(hook, str) and not callable(hook):
        raise TypeError(f"hook is a {type(hook).__qualname__}; allowed are {', '.join(map(repr, HOOKS))} or a function")
    if model._comm_hooks:
        raise RuntimeError(
            f"model has the communication hook {model._comm_hooks[0][0].__qualname__!r}; allowed is none before this "
            "call, since DistributedDataParallel takes one: make the model anew, and pass a hook of yours as hook="
        )
    group = model.process_group if isinstance(hook, str) and state is None else state
    reduce = HOOKS[hook] if isinstance(hook, str) else hook
    if hook == "none" and model.gradient_as_bucket_view and group.size() & (group.size() - 1):
        reduce = _MeanOfViews(model).hook
    overlap = _Overlap(model, scaler, partial(reduce, group))
    model.register_comm_hook(overlap, overlap_hook)


class _MeanOfViews:
    """`mean_hook` with the bits of ``gradient_as_bucket_view`` where the number of ranks is no power of two.

    DistributedDataParallel divides gradients that lie in the bucket already, and multiplies those that it copies there
    by the reciprocal. Which are which is seen as each gradient is accumulated, before it is copied.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._addresses: dict[int, int] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._addresses[id(parameter)] = parameter.grad.data_ptr()

    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        size = state.size()
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            address = self._addresses.pop(id(parameter), None)
            if address is None or address == view.data_ptr():
                view.div_(size)
            else:
                view.mul_(1.0 / size)
        return _sum(bucket.buffer(), state).then(_only)


def overlap_hook(state: "_Overlap", bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """What `overlap_overflow_check` registers."""
    return state.reduce_and_check(bucket)


class _Part:
    """One bucket of one backward.

    Attributes:
        parameters: whose gradients it holds.
        addresses: of each gradient in the bucket.
        before: the gradients before the reduced ones are copied to them, and their versions.
        checked: whether its reduced numbers were checked.
    """

    def __init__(self, bucket: dist.GradBucket, views: Sequence[torch.Tensor]) -> None:
        self.parameters = bucket.parameters()
        self.addresses = [view.data_ptr() for view in views]
        grads = [parameter.grad for parameter in self.parameters]
        self.before = [(grad, -1 if grad is None else grad._version) for grad in grads]
        self.checked = False


class _Overlap:
    """The state of `overlap_hook`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        scaler: GradScaler,
        reduce: Callable[[dist.GradBucket], Future[torch.Tensor]],
    ) -> None:
        # On a CPU the thread that has reduced a bucket checks it, beside those of the backward.
        self._early = EarlyCheck(scaler, model.parameters(), threads=1)
        self._reduce = reduce
        self._in_buckets = bool(model.gradient_as_bucket_view)
        self._parts: list[_Part] = []  # of the backward under way
        early = weakref.ref(self._early)

        def forget(module: torch.nn.Module, inputs: Any) -> None:
            held = early()
            if held is not None and torch.is_grad_enabled():
                held.forget()  # gradients that nobody asked about need not live through another forward

        model.register_forward_pre_hook(forget)

    def reduce_and_check(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if bucket.index() == 0:
            # Buckets are reduced in the order of their indices, so that one before has come to nothing if it is open.
            self._parts = []
        parts = self._parts
        flat = bucket.buffer()
        # Not for the buckets of zeros of a rank that has joined (`DistributedDataParallel.join`).
        if not in_backward() or not self._early.can_check(flat):
            return self._reduce(bucket)
        views = bucket.gradients()
        part = _Part(bucket, views)
        parts.append(part)
        if bucket.is_last():
            Variable._execution_engine.queue_callback(partial(self._after_finishing, parts))
        sizes, dtype = [view.numel() for view in views], flat.dtype

        def check(done: Future[Any]) -> torch.Tensor:
            reduced = _only(done)
            if self._parts is parts and reduced.dtype == dtype and reduced.numel() == flat.numel():
                pieces = views if reduced.data_ptr() == flat.data_ptr() else reduced.reshape(-1).split(sizes)
                part.checked = self._early.check(part.parameters, pieces)
            return reduced

        return self._reduce(bucket).then(check)

    def _after_finishing(self, parts: list[_Part]) -> None:
        """Queue behind the callback in which DistributedDataParallel hands over the reduced gradients."""
        Variable._execution_engine.queue_callback(partial(self._seal, parts))

    def _seal(self, parts: list[_Part]) -> None:
        """The reduced gradients are in their places: what was checked is what is there."""
        for part in parts:
            if not part.checked:
                continue
            for parameter, address, (grad, version) in zip(part.parameters, part.addresses, part.before, strict=True):
                now = parameter.grad
                if now is None or not same_order(parameter, now):
                    continue
                if self._in_buckets:
                    handed_over = now.data_ptr() == address
                else:
                    # Of a parameter that no rank has used the gradient stays what it was.
                    handed_over = now is not grad or now._version == version + 1
                if handed_over:
                    self._early.seal(parameter)
        self._parts = []
