"""Gradient release: the optimizer steps inside the backward, so that the gradients of all parameters never coexist.

Without it, bf16 gradients take 2 bytes per parameter until the backward ends. `step_in_backward` collects complete
gradients in buckets, updates the parameters of a bucket once all of its gradients are complete, and replaces these by
`FreedGradient`, which raises an error if its values are read. Results are bit-identical to a step after the backward.
At any time the gradients of one bucket exist: at most ``bucket_bytes`` plus one gradient, or more if gradients complete
in another order than in the first backward. FSDP2 frees its buffer of a unit with the last gradient in it.

Before the first parameter changes, clipping needs the norm of all gradients, and loss scaling must know whether all of
them are finite. So a step takes two backwards, as in LOMO (Lv et al., 2023): one that only checks and frees gradients
(`StepInBackward.check`), and one that steps; or it clips by the norm of the previous step, so that the first large
gradients are not clipped. With a process group, two buckets exist at a time, one being averaged, and one being filled.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations.buckets import (
    BUCKET_BYTES,
    BackwardSteps,
    Bucket,
    BucketReduction,
    call_if_alive,
    check_bucket_bytes,
)
from halfstep.integrations.optim.classes import LayoutOptimizer, attribute
from halfstep.kernels.unscale import Verdict
from halfstep.numerics.scaling.decision import Checker, Decision, norm_of, parameters_of
from halfstep.numerics.scaling.scaler import GradScaler, unwrapped
from halfstep.numerics.scaling.sharding import checked_group, default_group, is_sharded, local
from halfstep.numerics.scaling.stand_ins import gradient_of, remove_stand_in
from halfstep.numerics.scaling.wrappers import wrapped_by

READ = (
    "to clip, set max_grad_norm of the optimizer and call step_in_backward with clipping='exact' or 'previous', or use "
    "a trainer of halfstep.integrations.trainers; for a scaler, pass scaler= and clip by scaler.clip_grad_norm_; to "
    "read each gradient, register a post-accumulate hook before step_in_backward"
)
ADD = (
    "to add gradients, run all backwards but the last in `with handle.accumulate():`; zero_grad() cannot discard a "
    "step; with reentrant checkpointing, use use_reentrant=False"
)
INSTEAD = "call remove() and step after the backward"
DDP_KEEPS = (
    "DistributedDataParallel, whose buckets keep all gradients and are reduced after the step: pass the inner model "
    "and process_group=, which averages each bucket before its step"
)


class StepInBackward:
    """The handle returned by `step_in_backward`. The optimizer refers to it; keep it only to call its methods.

    Attributes:
        bucket_bytes: a bucket of at least this size takes no more gradients.
        clipping: where the norm for clipping comes from: ``"exact"``, ``"previous"`` or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: LayoutOptimizer,
        bucket_bytes: int,
        clipping: Literal["exact", "previous"] | None,
        scaler: GradScaler | None,
        process_group: Any,
    ) -> None:
        self.bucket_bytes, self.clipping = bucket_bytes, clipping
        self._optimizer = optimizer
        self._model = weakref.ref(model)
        self._scaler = scaler
        self._checker: Checker | None = None  # inside `check`; with "previous", while the norm of a step accumulates
        # From `check` until `step` after the backward that used it; with "previous", from the previous step.
        self._verdict: Verdict | None = None
        self._ended = False  # with "previous", whether the norm of this step is complete
        self._stepped = False  # whether a backward has used the verdict of `check`
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._last: dict[Any, Bucket] = {}  # the bucket being filled, by key
        self._began = False  # whether a backward has run
        self._accumulating = False
        self._lock = threading.RLock()  # autograd calls the hooks from one thread per device
        self._steps = BackwardSteps("a backward that steps", (READ, ADD, INSTEAD), self._take, self._finish)
        self._hooks: list[Any] = []
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                self._hooks += self._steps.hook(parameter)
        before, after, steps = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step), self._steps
        self._hooks += [
            optimizer.register_load_state_dict_post_hook(lambda *_: steps.clear(failed=True)),
            optimizer.register_step_pre_hook(lambda _, *arguments: call_if_alive(before, *arguments)),
            optimizer.register_step_post_hook(lambda *_: call_if_alive(after)),
        ]
        self._reduction: BucketReduction | None = None
        if process_group is not None:
            self._reduction = BucketReduction(process_group)
            self._assign_all(model, process_group)

    @property
    def _checks(self) -> bool:
        """Whether each step needs a backward in `check`."""
        return self.clipping == "exact" or self._scaler is not None

    @property
    def buckets(self) -> list[int]:
        """The bytes of gradients per bucket. Without a process group, the first backward creates the buckets."""
        return [bucket.size for bucket in self._buckets]

    def accumulate(self) -> AbstractContextManager[None]:
        """A context in which backwards only accumulate into ``.grad``: for all but the last micro-batch of a step.

        All gradients then exist until the last backward, which steps and frees them one by one. Under FSDP2,
        ``set_requires_gradient_sync(False)`` has the same effect on the step, with unsharded gradients.

        Raises:
            RuntimeError: the step needs a backward in `check`, which would free the accumulated gradients.
        """
        if self._checks:
            raise RuntimeError(
                "Expected no accumulation with clipping='exact' or a scaler, whose check frees the accumulated "
                "gradients: accumulation keeps all of them in any case, so call remove() and step after the backward"
            )
        return attribute(self, "_accumulating", True)

    @contextmanager
    def check(self) -> Iterator[None]:
        """A context for the first backward of a step with ``clipping="exact"`` or a scaler.

        Its gradients are checked and freed, and no parameter changes. Then run the same backward again, which steps:
        keep the graph (``retain_graph=True``), or recompute the same loss with the same random numbers. All ranks must
        enter the context, because they combine their norms when it ends.

        Raises:
            RuntimeError: the steps need no check, gradients of an earlier backward exist, or no backward ran in the
                context.
        """
        optimizer, scaler = self._optimizer, self._scaler
        if not self._checks:
            raise RuntimeError(
                "Expected clipping='exact' or a scaler in step_in_backward, but got neither: its steps need no check()"
            )
        self._refuse_without_hook()
        if any(gradient_of(p) is not None for p in parameters_of(optimizer)) or _has_accumulated(self._model()):
            raise RuntimeError(
                "Expected no gradient before check(), which frees the gradients, but got some of an earlier backward: "
                "call zero_grad(), or to accumulate, remove() and step after the backward"
            )
        self._verdict, self._stepped = None, False
        self._checker = optimizer.checker if scaler is None else scaler.checker(optimizer)
        self._checker.begin_parts()
        try:
            yield
        finally:
            checker, self._checker = self._checker, None
        verdict = checker.end_parts() if scaler is None else scaler.end_parts(optimizer)
        if verdict is None:
            raise RuntimeError(
                "Expected a backward in check(), but no parameter of the optimizer got a gradient: call backward() in "
                "the context"
            )
        self._verdict = verdict

    def state_dict(self) -> dict[str, float | None]:
        """State for resuming with ``clipping="previous"``: the last sum of squares. Waits for the device."""
        verdict = self._verdict if self.clipping == "previous" else None
        return {"sum_of_squares": None if verdict is None else verdict.sum_of_squares.item()}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: `state` was not returned by `state_dict`.
        """
        squares = state.get("sum_of_squares")
        if "sum_of_squares" not in state or not (squares is None or type(squares) is float):
            raise ValueError(f"Expected a state with 'sum_of_squares', a float or None, but got {state!r}")
        self._verdict = None
        if squares is not None:
            self._verdict = Verdict.empty(0, torch.device("cpu"))
            self._verdict.sum_of_squares.fill_(squares)

    def remove(self) -> None:
        """Stop stepping in the backward. Gradients of later backwards are kept for ``optimizer.step()``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in parameters_of(self._optimizer):
            remove_stand_in(parameter)
        self._optimizer.step_parts_by(None)

    def _take(self, parameter: torch.Tensor) -> None:
        """Called by autograd, or by FSDP2 after its reduction, when the gradient of a parameter is complete."""
        with self._lock:
            if self._accumulating:
                self._steps.refuse_second_gradient(parameter)
                return
            if not self._began:
                if is_wrapped_by_ddp(parameters_of(self._optimizer)):
                    self.remove()
                    raise RuntimeError(f"Expected the model not to be wrapped by {DDP_KEEPS}")
                self._began = True
            if self._steps.begin():
                self._refuse_without_check()
            self._steps.refuse_second_gradient(parameter)
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.device_type == "cuda" and parameter.device.type == "cpu":
                torch.cuda.current_stream().synchronize()  # FSDP2's CPUOffloadPolicy is still copying the gradient
            bucket = self._bucket_of.get(id(parameter))
            if bucket is None:
                assert parameter.grad is not None  # autograd calls the hook after it has stored the gradient
                bucket = self._assign(parameter, local(parameter.grad))
            stream = torch.cuda.current_stream(parameter.device) if parameter.device.type == "cuda" else None
            bucket.arrived[id(parameter)] = parameter, stream
            # While the first backward fills a bucket, all members so far have arrived, so its size decides.
            filled = self._reduction is not None or bucket is not self._buckets[-1]
            if len(bucket.arrived) == len(bucket.members) and (filled or bucket.size >= self.bucket_bytes):
                self._complete(bucket)

    def _assign(self, parameter: torch.Tensor, grad: torch.Tensor, key: Any = None) -> Bucket:
        """Add a parameter to the last bucket of this key, or to a new one if that is full."""
        bucket = self._last.get(key)
        if bucket is None or bucket.size >= self.bucket_bytes:
            bucket = self._last[key] = Bucket(len(self._buckets))
            self._buckets.append(bucket)
        self._bucket_of[id(parameter)] = bucket
        bucket.members.append(parameter)
        bucket.size += grad.numel() * grad.element_size()
        return bucket

    def _assign_all(self, model: torch.nn.Module, group: Any) -> None:
        """Assign all parameters to buckets in reverse order of the optimizer, which makes them the same on all ranks.

        Also broadcasts parameters and buffers from the first rank.
        """
        for parameter in reversed(parameters_of(self._optimizer)):
            if parameter.requires_grad:
                self._assign(parameter, parameter, (parameter.dtype, parameter.device))
        first = torch.distributed.get_global_rank(group, 0)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                values = tensor.clone(memory_format=torch.contiguous_format)
                torch.distributed.broadcast(values, first, group=group)
                tensor.copy_(values)

    def _complete(self, bucket: Bucket) -> None:
        """Use the gradients of a complete bucket. With a process group, reduce buckets in order before their use."""
        reduction = self._reduction
        if reduction is None:
            with self._arrived(bucket) as ready:
                self._use(bucket.part, ready)
            return
        reduction.complete.add(bucket.part)
        while reduction.following in reduction.complete:
            self._use(*reduction.end())
            bucket = self._buckets[reduction.following]
            with self._arrived(bucket):
                self._steps.use()
                reduction.begin(bucket)
            reduction.following += 1

    @contextmanager
    def _arrived(self, bucket: Bucket) -> Iterator[list[torch.Tensor]]:
        """A context that uses the bucket's gradients that have arrived, and yields their parameters."""
        ready = [parameter for parameter in bucket.members if id(parameter) in bucket.arrived]
        # Autograd computes gradients on the streams of the forward. Those streams will also reuse the memory of the
        # gradients, and read the parameters.
        streams = {(stream, parameter.device) for parameter, stream in bucket.arrived.values() if stream is not None}
        pairs = [(stream, torch.cuda.current_stream(device)) for stream, device in streams]
        others = [(stream, current) for stream, current in pairs if stream != current]
        bucket.arrived = {}
        for stream, current in others:
            current.wait_stream(stream)
        yield ready
        for stream, current in others:
            stream.wait_stream(current)

    def _use(self, part: int, parameters: list[torch.Tensor]) -> None:
        """Check the gradients of a bucket, or update its parameters, and free the gradients."""
        if not parameters:
            return
        optimizer, freed = self._optimizer, list(map(self._steps.stand_in, parameters))
        if self._checks and self._checker is not None:
            self._checker.add_part(parameters, None if self._scaler is None else self._scaler.factor())
            for parameter, stand_in in zip(parameters, freed, strict=True):
                parameter.grad = stand_in
            return
        if self.clipping is None and self._scaler is None and optimizer.max_grad_norm is not None:
            raise RuntimeError(
                f"Expected max_grad_norm of the optimizer to stay None, but got {optimizer.max_grad_norm}: call "
                "step_in_backward with clipping='exact' or 'previous'"
            )
        if self.clipping == "previous":
            self._norm_parts().add_part(parameters)
        step = partial(optimizer.step_part, part, parameters, freed)
        with self._steps.stepping(parameters, freed, optimizer.param_groups):
            decision = self._decision()
            step() if decision is None else optimizer.apply(decision, step)

    def _decision(self) -> Decision | None:
        """The decision about the current step; None if it neither unscales nor clips."""
        if self._scaler is not None:
            return self._scaler.decision(self._optimizer)
        limit = self._optimizer.max_grad_norm
        return None if self._verdict is None else Decision(self._verdict, None, limit, skips=False)

    def _refuse_without_check(self) -> None:
        """Raise if this backward would step without the check that it needs."""
        if not self._checks or self._checker is not None:
            return
        self._refuse_without_hook()
        optimizer, scaler = self._optimizer, self._scaler
        checked = self._verdict is not None and not self._stepped
        # `update` or `unscale_` may have been called in the meantime.
        if not checked or (scaler is not None and scaler.verdict_of(optimizer) is not self._verdict):
            raise RuntimeError(
                "Expected check() before a backward that steps with clipping='exact' or a scaler, but got none since "
                "the last step: run the backward inside `with handle.check():` first, with retain_graph=True, and "
                "then again"
            )

    def _refuse_without_hook(self) -> None:
        """Raise if a trained parameter has no hook, so that its gradient would escape the check."""
        for parameter in parameters_of(self._optimizer):
            if parameter.requires_grad and not self._steps.has_hook(parameter):
                raise RuntimeError(
                    "Expected no new trainable parameters after step_in_backward with clipping='exact' or a scaler, "
                    f"but got one of shape {tuple(parameter.shape)}: after requires_grad_() or add_param_group(), call "
                    "remove() and step_in_backward again"
                )

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before `optimizer.step()`, which steps all gradients that no backward has stepped."""
        optimizer = self._optimizer
        if self._checks:
            self._refuse_without_hook()
        closure = any(argument is not None for argument in (*args[1:], *kwargs.values()))  # it will run a backward
        self._steps.check_step(optimizer.param_groups, [] if closure else parameters_of(optimizer))
        if self._reduction is not None and any(gradient_of(p) is not None for p in parameters_of(optimizer)):
            raise RuntimeError(
                "Expected no gradient at the step with process_group=, but got some that no backward has averaged over "
                "its ranks: call zero_grad(); run the last backward outside of accumulate(); call step_in_backward "
                "again after requires_grad_()"
            )
        if self.clipping is None or self._scaler is not None:  # the scaler decides
            return
        self._end_norm()
        optimizer.decide(self._decision())

    def _end_norm(self) -> None:
        """With ``clipping="previous"``, complete the norm of this step, to which the next step clips."""
        if self.clipping != "previous" or self._ended:
            return
        checker = self._norm_parts()
        left = [parameter for parameter in parameters_of(self._optimizer) if gradient_of(parameter) is not None]
        if left:
            checker.add_part(left)
        self._verdict, self._checker = checker.end_parts() or self._verdict, None
        self._ended = True

    def _norm_parts(self) -> Checker:
        """The checker that accumulates the norm of this step with ``clipping="previous"``."""
        if self._checker is None:
            self._checker, self._ended = self._optimizer.checker, False
            self._checker.begin_parts()
        return self._checker

    def norm(self, max_norm: float | None) -> torch.Tensor:
        """The 2-norm of the gradients of the backward that has stepped, for trainers. Call it on all ranks.

        Args:
            max_norm: the norm to which the trainer clips, which must equal the optimizer's ``max_grad_norm``; None if
                the trainer does not clip.

        Returns:
            The norm, a 0-dim fp32 tensor; NaN if it was not computed, as without clipping and without a scaler.

        Raises:
            RuntimeError: the backward has clipped to another norm, or not at all.
        """
        limit = None if self.clipping is None else self._optimizer.max_grad_norm
        if max_norm is not None and max_norm != limit:
            raise RuntimeError(
                "Expected a trainer to clip to the optimizer's max_grad_norm, to which the backward has clipped, "
                f"but got {max_norm} with max_grad_norm={limit}: create the optimizer with max_grad_norm={max_norm} "
                "and call step_in_backward with clipping='previous', or disable clipping in the trainer"
            )
        self._end_norm()
        if self._verdict is None:
            return torch.full((), math.nan, dtype=torch.float32, device="cpu")
        return norm_of(self._verdict)

    def _after_step(self) -> None:
        self._steps.clear()  # a closure may have run a backward
        if self.clipping is None:
            return
        self._ended = False
        if self._checks:
            self._verdict = None

    def _finish(self, failed: bool) -> None:
        """Called when a backward has ended: use incomplete buckets, in which some parameters got no gradient."""
        with self._lock:
            for bucket in self._buckets:
                if failed:  # `step` uses the gradients that remain
                    bucket.arrived = {}
                elif bucket.arrived or self._reduction is not None:
                    self._complete(bucket)
            if self._reduction is not None:
                if not failed:
                    self._use(*self._reduction.end())
                self._reduction.restart()
            self._stepped |= self._checker is None and not failed


def is_wrapped_by_ddp(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether DistributedDataParallel wraps any of the parameters, so that ranks would step with local gradients."""
    ids = set(map(id, parameters))
    wrappers = wrapped_by("DistributedDataParallel")
    return any(id(parameter) in ids for wrapper in wrappers for parameter in wrapper.parameters())


def _has_accumulated(model: torch.nn.Module | None) -> bool:
    """Whether FSDP2 has accumulated gradients that it has not reduced yet."""
    if model is None or default_group() is None:
        return False
    from halfstep.integrations.fsdp import parameter_groups, unsharded_grad

    return any(
        unsharded_grad(param) is not None
        for module in model.modules()
        for group in parameter_groups(module)
        for param in group.fsdp_params
    )


def step_in_backward(
    model: torch.nn.Module,
    optimizer: LayoutOptimizer,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    clipping: Literal["exact", "previous"] | None = None,
    scaler: GradScaler | None = None,
    process_group: Any = None,
) -> StepInBackward:
    """Update parameters inside ``backward()``, as soon as their gradients are complete, and free the gradients.

    The training loop stays the same: ``optimizer.step()`` updates the parameters that still have a gradient, usually
    none, and calls its hooks; schedulers follow it as before. Weights are bit-identical to those of a step after the
    backward. Call this once the model is on its device and sharded, by FSDP2, HSDP or tensor parallelism.

    Args:
        model: the model whose backward steps.
        optimizer: a halfstep optimizer of parameters of `model`, or a wrapper of one, such as Accelerate's.
        bucket_bytes: gradients are collected until they take this many bytes on this rank, and then stepped by one
            launch per dtype. A bucket may exceed it by up to one gradient.
        clipping: how to clip to the optimizer's ``max_grad_norm``. ``"exact"`` computes the norm in an additional
            backward, see `StepInBackward.check`. ``"previous"`` uses the norm of the previous step, and does not clip
            the first step. It reads each gradient once more, and all ranks must call ``optimizer.step()`` after each
            backward. Save its norm with `StepInBackward.state_dict`. None for optimizers without ``max_grad_norm``.
        scaler: the loss scaler, required for fp16 parameters. Each step then needs a `StepInBackward.check`, which
            detects an overflow before a parameter changes. Call ``scaler.clip_grad_norm_`` after the check, and
            ``scaler.step`` and ``scaler.update`` after the backward that steps.
        process_group: the ranks that train replicas of `model`, which must not be wrapped by DistributedDataParallel.
            Parameters and buffers are broadcast from its first rank, and each bucket of gradients is averaged over the
            ranks before it is used, from the last parameter to the first. All ranks must run the same backwards.
            Buffers, such as BatchNorm statistics, are not synchronized again.

    Returns:
        A handle with `StepInBackward.check`, `StepInBackward.accumulate` for gradient accumulation and
        `StepInBackward.remove`.

    Raises:
        TypeError, ValueError: an argument is invalid, or does not fit the others. Nothing is changed.

    Note:
        With several backwards per iteration, use `StepInBackward.accumulate` for all but the last; otherwise each of
        them steps. Reentrant activation checkpointing computes the gradient of a parameter that several segments share
        in several parts, and each part would be stepped: use ``use_reentrant=False``.

    Examples:
        >>> from halfstep.integrations.release import step_in_backward
        >>> model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        >>> optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
        >>> handle = step_in_backward(model, optimizer)
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> bool((model.weight != before).all()), model.weight.grad
        (True, FreedGradient(shape=(1, 4), dtype=torch.bfloat16, device='cpu'))
        >>> optimizer.step()  # for its hooks and the schedulers
    """
    inner = unwrapped(optimizer)
    _check(model, inner, bucket_bytes, clipping, scaler)
    if scaler is not None and inner is not optimizer:
        raise TypeError(
            f"Expected a halfstep optimizer with a scaler, but got a {type(optimizer).__name__} around one, whose "
            "gradients scaler.step unscales in place: pass the wrapped optimizer, also to scaler.step"
        )
    process_group = _checked_group(model, inner, process_group)
    handle = StepInBackward(model, inner, bucket_bytes, clipping, scaler, process_group)
    inner.step_parts_by(handle)
    return handle


def _checked_group(model: torch.nn.Module, optimizer: LayoutOptimizer, group: Any) -> Any:
    """The process group, or the group of a mesh, after checking that its ranks have the same parameters."""
    group = checked_group(group)
    if group is None:
        return None
    for index, parameter in enumerate(parameters_of(optimizer)):
        if is_sharded(parameter):
            raise ValueError(
                f"Expected parameter {index} of the optimizer to be a replica with process_group=, but it is sharded: "
                "FSDP2 and HSDP average their gradients themselves, so leave process_group out"
            )
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    of_ranks: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(of_ranks, tensors, group=group)
    for rank, of_rank in enumerate(of_ranks):
        if of_rank != of_ranks[0]:
            differing = next(pair for pair in zip_longest(of_ranks[0], of_rank) if pair[0] != pair[1])
            raise ValueError(
                f"Expected the same parameters and buffers on all ranks of process_group, but rank {rank} has "
                f"{differing[1]} where rank 0 has {differing[0]}: create the same model on all ranks"
            )
    return group


def _check(model: Any, optimizer: Any, bucket_bytes: Any, clipping: Any, scaler: Any) -> None:
    if not isinstance(optimizer, LayoutOptimizer):
        raise TypeError(f"Expected optimizer to be a halfstep optimizer, but got a {type(optimizer).__name__}")
    if hasattr(optimizer, "in_backward"):
        raise TypeError(
            f"Expected optimizer to step on the device, but got a {type(optimizer).__name__}: create it with "
            "in_backward='step' instead"
        )
    check_bucket_bytes(bucket_bytes)
    if optimizer.backward_handle is not None:
        raise ValueError("Expected optimizer not to step in the backward already: call remove() on the first handle")
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
                f"Expected parameter {index} of the optimizer to be one of model, but it is not: create the optimizer "
                "with the parameters of the sharded model, and pass that model"
            )
        if parameter.requires_grad and parameter.dtype == torch.float16 and scaler is None:
            raise TypeError(
                f"Expected parameter {index} of the optimizer to be fp32 or bf16 without a scaler, but got "
                "torch.float16, whose loss must be scaled: pass scaler=, or train in bf16"
            )
    limit = optimizer.max_grad_norm
    if clipping not in (None, "exact", "previous"):
        raise ValueError(f"Expected clipping to be None, 'exact' or 'previous', but got {clipping!r}")
    if clipping is None and limit is not None:
        raise ValueError(
            f"Expected max_grad_norm of the optimizer to be None, but got {limit}: pass clipping='exact' or 'previous'"
        )
    if clipping is not None and limit is None:
        raise ValueError(f"Expected max_grad_norm of the optimizer to be set with clipping={clipping!r}, but got None")
    if scaler is not None and (not isinstance(scaler, GradScaler) or not scaler.is_enabled()):
        raise TypeError(
            f"Expected scaler to be None or an enabled halfstep.GradScaler, but got a {type(scaler).__name__}"
            f"{' that is disabled' if isinstance(scaler, GradScaler) else ''}"
        )
    if scaler is not None and clipping == "previous":
        raise ValueError(
            "Expected clipping to be 'exact' with a scaler, but got 'previous': a step that has begun could not be "
            "undone at an overflow"
        )
    if scaler is not None and scaler.write_back:
        raise ValueError("Expected a scaler with write_back=False, but got True: gradients are freed in the backward")
