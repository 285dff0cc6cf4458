"""Adam, AdamW, SGD and Muon that keep masters and moments in host memory, and step there.

The device has the weights and, during the backward, the gradients that are being copied. Each gradient is copied to the
host as soon as it is complete, and freed. The C++ kernels step on the host, bucket by bucket in the order in which
gradients arrive: a bucket waits only for its own gradients, and its weights are copied back while the next one steps.
If the norm is needed, it waits for all gradients. Weights and state are bit-identical to those of a step on the device.

All launches of a step are prepared before it waits for the first gradient. Waits, launches and copies are then one
uninterruptible sequence of calls (`apply`), so that a step in buckets takes place completely or not at all.

``param_groups`` and ``state`` refer to the parameters on the device, as in any optimizer. The optimizer steps copies of
them on the host, pinned if the parameter is on a GPU. Gradients of several backwards are accumulated on the host, in
the dtype of the gradient, as in autograd. Clipping, scaling and skipping therefore work as for an optimizer on the CPU,
with halfstep's scaler and torch's. The copy of a DTensor is a DTensor with the same placements and a local tensor on
the host, as under FSDP2's ``CPUOffloadPolicy``: sharded gradients, states and checkpoints are those of `AdamW` there.

Muon's matrices are orthogonalized on the device of their parameters, in a copy of the scratch memory that one launch on
the host writes and another reads. Between these two, the host launches what updates other parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain, groupby, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_leaves, tree_map_only

from halfstep.integrations.buckets import BUCKET_BYTES, BackwardSteps, call_if_alive, check_bucket_bytes
from halfstep.integrations.optim.adam import Adam, AdamW
from halfstep.integrations.optim.classes import LayoutOptimizer, Writes
from halfstep.integrations.optim.muon import Muon
from halfstep.integrations.optim.options import Group
from halfstep.integrations.optim.sgd import SGD
from halfstep.integrations.optim.state import like, moved, written_last
from halfstep.integrations.optim.step_plan import WHOLE, apply, each
from halfstep.integrations.release import is_wrapped_by_ddp
from halfstep.kernels.multi_tensor import FLOATS
from halfstep.kernels.streams import Waiting
from halfstep.numerics.scaling.decision import parameters_of
from halfstep.numerics.scaling.sharding import is_flat, local, settled
from halfstep.numerics.scaling.stand_ins import StandIn, is_freed, is_stand_in, is_zeroed, remove_stand_in

aten = torch.ops.aten

IN_BACKWARD = ("copy", "step", None)
CPU = torch.device("cpu")
READ = "use in_backward='copy', which keeps gradients for clipping, scaling and other code"
INSTEAD = "use in_backward='copy'"
ADD = f"to add, set or discard gradients, {INSTEAD}"


class HostGradient(StandIn):
    """Stands in for a gradient on the host, or for a view of it. Operations return what the gradient would give.

    Writes to the stand-in go to the gradient on the host; other results are on the device. The gradient is that of the
    mirror `of`, or the tensor `of`.
    """

    def __init__(self, like: torch.Tensor, device: torch.device, *, of: weakref.ref[_Mirror] | torch.Tensor) -> None:
        self._of = of

    def _owner(self) -> tuple[_Offloaded, _Mirror]:
        """The optimizer and the mirror that own the gradient."""
        mirror = None if isinstance(self._of, torch.Tensor) else self._of()
        optimizer = None if mirror is None else mirror.owner()
        if mirror is None or optimizer is None:
            raise RuntimeError(
                f"Expected the optimizer that keeps the gradient of a parameter of shape {tuple(self.shape)} on the "
                "host to exist, but it was deleted: set .grad to None"
            )
        return optimizer, mirror

    def gradient(self) -> torch.Tensor:
        """The gradient on the host, once it has arrived."""
        if isinstance(self._of, torch.Tensor):
            return self._of
        optimizer, mirror = self._owner()
        return optimizer._gradient_on_host(mirror)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.add_.Tensor and not kwargs and _is_accumulation(*args):
            optimizer, mirror = args[0]._owner()
            optimizer._add(mirror, args[1])
            return args[0]
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = _written(func, args, kwargs)
        collective = func.namespace == "_c10d_functional"  # NCCL needs tensors on the device
        if collective or (written and not any(isinstance(tensor, cls) for tensor in written)):
            args, kwargs = tree_map_only(cls, lambda leaf: leaf.gradient().to(leaf.device), (args, kwargs))
            return func(*args, **kwargs)
        device = next(leaf.device for leaf in leaves if isinstance(leaf, cls))
        on_host = {id(leaf): leaf.gradient() if isinstance(leaf, cls) else leaf.cpu() for leaf in leaves}
        args, kwargs = tree_map_only(torch.Tensor, lambda leaf: on_host[id(leaf)], (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in written:
            if not isinstance(tensor, cls) and on_host[id(tensor)] is not tensor:
                tensor.copy_(on_host[id(tensor)])
        argument_of = {id(on_host[id(leaf)]): leaf for leaf in leaves}

        def returned(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in argument_of:
                return argument_of[id(tensor)]
            if func.is_view:
                return cls(tensor, device, of=tensor)
            return tensor if "device" in kwargs else tensor.to(device)

        return tree_map_only(torch.Tensor, returned, result)

    def _numbers(self, reader: str) -> torch.Tensor:
        return self.gradient()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _is_accumulation(grad: Any, added: Any) -> bool:
    """Whether a gradient on the device is added to an entire gradient on the host, as autograd does."""
    whole = isinstance(grad, HostGradient) and not isinstance(grad._of, torch.Tensor)
    if not whole or type(added) is not torch.Tensor or added.layout != torch.strided:
        return False
    return (added.shape, added.dtype, added.device) == (grad.shape, grad.dtype, grad.device)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes."""
    schema = func._schema.arguments
    values = [*zip(schema, args, strict=False), *((item, kwargs[item.name]) for item in schema if item.name in kwargs)]
    return [
        leaf
        for argument, value in values
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


class _Mirror:
    """A parameter and its copy on the host, which the optimizer steps. The copy gets the gradient once it arrives.

    The copy of a DTensor is also a DTensor, of this rank's shard, and so is the copy's gradient.
    """

    def __init__(self, parameter: torch.Tensor, owner: weakref.ref[_Offloaded]) -> None:
        self.parameter, self.owner = parameter, owner
        shard = local(parameter.detach())
        copy = like(parameter, _on_host(shard).copy_(shard))
        self.host = torch.nn.Parameter(copy, requires_grad=parameter.requires_grad)
        self.host.grad_dtype = None  # allows any dtype, for `keep_reduced_gradients`
        self.bucket = 0  # the number of the bucket that it is stepped with
        self.hooked = False  # whether autograd calls the optimizer when its gradient is complete
        self.weight = local(self.host.detach()).data  # writes to it do not increment the version of the copy
        self.staging: torch.Tensor | None = None  # memory for the next gradient to arrive
        self.arriving: torch.cuda.Event | None = None  # recorded after the copy of a gradient to `staging`
        self.full = False  # whether `staging` has, or is receiving, a gradient
        self._stand_in: torch.Tensor | None = None
        self.seen = written_last(parameter)  # when it last had the weight of the copy
        weakref.finalize(self, _orphan, weakref.ref(parameter)).atexit = False

    def stand_in(self) -> torch.Tensor:
        """The stand-in that replaces the gradient of the parameter while it is on the host."""
        assert self.staging is not None
        stand_in, device = self._stand_in, self.parameter.device
        if stand_in is None or stand_in.dtype != self.staging.dtype or stand_in.device != device:
            gradient = HostGradient(local(self.staging), device, of=weakref.ref(self))
            stand_in = self._stand_in = like(self.parameter, gradient)
        return stand_in

    def attach(self) -> None:
        """Make the gradient that is arriving that of the copy, unless it has one from earlier backwards."""
        if self.full and self.host.grad is None:
            self.host.grad = self.staging

    def forget(self) -> None:
        """Drop the gradient on the host, even if it is still being copied."""
        if self.full and self.arriving is not None:
            self.arriving.synchronize()
        self.full, self.host.grad = False, None


def _orphan(parameter: weakref.ref[torch.Tensor]) -> None:
    """Remove the stand-in of a parameter whose optimizer was deleted together with the gradient."""
    alive = parameter()
    if alive is not None:
        remove_stand_in(alive)


def _sent(mirrors: Iterable[_Mirror]) -> None:
    """Record that parameters now equal their copies."""
    for mirror in mirrors:
        mirror.seen = written_last(mirror.parameter)


def _arrivals(mirrors: Iterable[_Mirror]) -> list[partial[Any]]:
    """Calls that wait for gradients that are being copied, and add them to those of earlier backwards."""
    full = [mirror for mirror in mirrors if mirror.full]
    for mirror in full:
        mirror.attach()
    later: list[Any] = [(mirror.host.grad, mirror.staging) for mirror in full if mirror.host.grad is not mirror.staging]
    return [
        each(methodcaller("synchronize"), [mirror.arriving for mirror in full if mirror.arriving is not None]),
        each(torch.Tensor.add_, [local(grad) for grad, _ in later], [local(grad) for _, grad in later]),
        each(setattr, full, repeat("full"), repeat(False)),
    ]


def _gpus(mirrors: Iterable[_Mirror]) -> set[torch.device]:
    return {mirror.parameter.device for mirror in mirrors if mirror.parameter.device.type == "cuda"}


class _Streams(NamedTuple):
    """The streams of a GPU that copy gradients and weights to the host, and weights back."""

    gradients: torch.cuda.Stream
    weights: torch.cuda.Stream
    back: torch.cuda.Stream


def _on_host(values: torch.Tensor, dtype: torch.dtype | None = None, like: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialized memory for a tensor on the host, pinned if `like`, or the tensor itself, is on a GPU."""
    pinned = (values if like is None else like).device.type == "cuda"
    shape = torch.empty_like(values, device="meta")
    memory = torch.empty(shape.numel(), dtype=dtype or values.dtype, device="cpu", pin_memory=pinned)
    return torch.as_strided(memory, shape.shape, shape.stride())


class _Offloaded(LayoutOptimizer):
    """The common base of these optimizers, whose targets are copies of the parameters on the host."""

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        in_backward: Literal["copy", "step"] | None = "copy",
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        if in_backward not in IN_BACKWARD:
            raise ValueError(f"Expected in_backward to be 'copy', 'step' or None, but got {in_backward!r}")
        check_bucket_bytes(bucket_bytes)
        if in_backward == "step":
            _refuse_limit(options.get("max_grad_norm"))
            if isinstance(self, Muon):
                raise ValueError(
                    "Expected in_backward to be 'copy' or None for Muon, but got 'step', whose products would change "
                    f"torch's setting of bf16 reductions during the backward: {INSTEAD}"
                )
        self.in_backward, self.bucket_bytes = in_backward, bucket_bytes
        self._mirrors: dict[int, _Mirror] = {}  # by the id of the parameter on the device
        self._of_bucket: list[list[_Mirror]] = []
        self._known: list[torch.Tensor] = []  # the parameters that have copies
        self._exchanged: list[torch.Tensor] = []  # those of them that ranks update together
        self._arrived: dict[int, set[int]] = {}  # by bucket, the ids of parameters whose gradient is complete
        # Gradients that are being copied, each kept alive until the event that follows its copy.
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._streams: dict[torch.device, _Streams] = {}
        self._weights_arriving: dict[int, list[torch.cuda.Event]] = {}  # by bucket
        self._steps: list[Future[None]] = []  # steps of buckets during a backward
        self._record = BackwardSteps(
            "a backward with in_backward='step'", (READ, ADD, INSTEAD), self._take, self._after_backward
        )
        self._submit = ThreadPoolExecutor(1, "halfstep-offload").submit  # one worker: steps run in order
        self._lock = threading.RLock()  # autograd calls the hooks from one thread per device
        self._began = False  # whether a backward has run
        super().__init__(params, *args, **options)  # type: ignore[arg-type]  # of the other base

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, and make copies of its parameters on the host.

        Raises:
            TypeError, ValueError: an option or a parameter is invalid. The optimizer is unchanged.
        """
        self._finish_steps()  # running steps need copies of all parameters in the groups
        super().add_param_group(param_group)
        try:
            self._follow_groups()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_member(self, member: Any) -> None:
        """Raise unless a parameter can have a copy on the host."""
        if self.in_backward == "step" and member.requires_grad and member.dtype == torch.float16:
            raise TypeError(
                "Expected parameters in fp32 or bf16 with in_backward='step', but got one in torch.float16, whose loss "
                "must be scaled: use in_backward='copy' with a scaler, or train in bf16"
            )
        mesh = getattr(member, "device_mesh", None)
        if mesh is not None and mesh.device_type != "cpu" == member.device.type:
            raise TypeError(
                f"Expected a shard on a {mesh.device_type} device, like its mesh, but got a parameter of shape "
                f"{tuple(member.shape)} on {member.device}: with CPUOffloadPolicy use "
                f"halfstep.{type(self).__name__.removeprefix('Offloaded')}, which steps on the host too"
            )
        if is_flat(member):
            raise TypeError(
                "Expected a parameter that is not flattened, but got a flat parameter of FullyShardedDataParallel of "
                f"shape {tuple(member.shape)}, which replaces its memory in forward and backward: use fully_shard"
            )
        if member.dtype not in FLOATS or member.device.type == "meta":
            raise TypeError(
                f"Expected a parameter in fp32, fp16 or bf16 with memory, but got one in {member.dtype} on "
                f"{member.device}: move the model to its device first"
            )

    def _follow_groups(self) -> None:
        """Update the copies if the parameters in the groups have changed: other code may edit the groups in place."""
        parameters = parameters_of(self)
        if len(parameters) == len(self._known) and all(map(is_, parameters, self._known)):
            return
        self._finish_steps()
        fresh = [parameter for parameter in dict.fromkeys(parameters) if id(parameter) not in self._mirrors]
        for parameter in fresh:
            self._check_member(parameter)
        groups = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        self._exchanged = [p for group, p in groups if self._rule_of(group).exchanging(p, group) is not None]
        for parameter in fresh:
            mirror = self._mirrors[id(parameter)] = _Mirror(parameter, weakref.ref(self))
            self._hook(mirror)
        self._known = parameters
        self._fill_buckets()

    def _hook(self, mirror: _Mirror) -> None:
        """Make autograd call `_take` if the parameter requires a gradient."""
        if self.in_backward is None or mirror.hooked or not mirror.parameter.requires_grad:
            return
        mirror.hooked = True
        if self.in_backward == "step":
            self._record.hook(mirror.parameter)
        else:
            hook = partial(call_if_alive, weakref.WeakMethod(self._take))
            mirror.parameter.register_post_accumulate_grad_hook(hook)

    def _fill_buckets(self) -> None:
        """Assign the parameters to buckets, in the order in which their gradients usually arrive. Those that ranks
        exchange, whose shards differ in size, are in the last one."""
        self._forget()
        self._of_bucket = []
        exchanged = set(map(id, self._exchanged))
        for together in (False, True):
            chosen = [p for p in reversed(dict.fromkeys(self._known)) if (id(p) in exchanged) == together]
            size = self.bucket_bytes
            for mirror in map(self._mirrors.__getitem__, map(id, chosen)):
                if size >= self.bucket_bytes:
                    self._of_bucket.append([])
                    size = 0
                mirror.bucket = len(self._of_bucket) - 1
                self._of_bucket[-1].append(mirror)
                size += 0 if together else mirror.weight.nbytes
        self._arrived = {number: set() for number in range(len(self._of_bucket))}

    def _all(self) -> list[_Mirror]:
        """The parameters in the order of their buckets."""
        return list(chain.from_iterable(self._of_bucket))

    # ------------------------------------------------------------------------------------------------------ backward

    def _streams_of(self, device: torch.device) -> _Streams:
        if device not in self._streams:
            self._streams[device] = _Streams(*(torch.cuda.Stream(device) for _ in _Streams._fields))
        return self._streams[device]

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient of a parameter is complete."""
        with self._lock:
            if not self._began:
                if is_wrapped_by_ddp(parameters_of(self)):
                    raise RuntimeError(
                        "Expected the model not to be wrapped by DistributedDataParallel, whose gradients are reduced "
                        "after they are complete: use in_backward=None, which copies them in step()"
                    )
                self._began = True
            mirror = self._mirrors[id(parameter)]
            if self.in_backward != "step":
                self._collect_from(mirror)
                return
            if self._record.begin():
                _refuse_limit(self.max_grad_norm)
                self._follow_groups()
            self._record.refuse_second_gradient(parameter)
            grad = parameter.grad
            if grad is None or is_freed(grad):  # another hook has removed or replaced it
                return
            if not is_stand_in(grad):  # otherwise FSDP2 has already added it to the gradient on the host
                if not self._record.was_removed(parameter):
                    mirror.forget()
                self._copy_out(mirror, grad)
            self._arrived[mirror.bucket].add(id(parameter))
            trained = sum(member.parameter.requires_grad for member in self._of_bucket[mirror.bucket])
            if len(self._arrived[mirror.bucket]) == trained:
                self._submit_bucket(mirror.bucket)

    def _submit_bucket(self, number: int) -> None:
        """Step the parameters of a bucket whose gradients have arrived, in this optimizer's thread."""
        mirrors = [member for member in self._of_bucket[number] if id(member.parameter) in self._arrived[number]]
        parameters = [member.parameter for member in mirrors]
        self._arrived[number] = set()
        for parameter in parameters:
            parameter.grad = self._record.stand_in(parameter)
        with self._record.stepping(parameters, list(map(attrgetter("grad"), parameters)), self.param_groups):
            self._steps.append(self._submit(partial(self._step_bucket, number, mirrors)))

    @torch.no_grad()
    def _step_bucket(self, number: int, mirrors: list[_Mirror]) -> None:
        """Step the parameters of a bucket, and copy their weights to the device."""
        apply(_arrivals(mirrors))
        self._read_weights(mirrors, last_step_returns=True)
        self.step_part(number, [mirror.parameter for mirror in mirrors])
        _sent(mirrors)

    def _after_backward(self, failed: bool) -> None:
        """Called when a backward with steps has ended. Other code may read the weights afterwards."""
        with self._lock:
            for number, arrived in self._arrived.items():
                if failed:
                    arrived.clear()  # `step` uses these gradients
                elif arrived:  # the other parameters got no gradient
                    self._submit_bucket(number)
        self._wait_for_steps()

    def _collect_from(self, mirror: _Mirror) -> None:
        """Make the gradient on the host that of the parameter: copy it, unless it is there, or drop it."""
        grad = mirror.parameter.grad
        if is_stand_in(grad) and not is_zeroed(grad):
            return
        mirror.forget()  # other code has discarded or replaced it
        if grad is not None:
            self._hook(mirror)
            self._copy_out(mirror, torch.zeros_like(mirror.parameter) if is_zeroed(grad) else grad)

    def _copy_out(self, mirror: _Mirror, grad: torch.Tensor) -> None:
        """Start to copy a gradient to the host, where it is added to that of earlier backwards, and free it.

        If this is interrupted, the gradient stays on the device, and is copied again later.
        """
        parameter, grad = mirror.parameter, local(settled(mirror.parameter, grad))
        if mirror.full:  # `staging` has the gradient of an earlier backward
            apply(_arrivals([mirror]))
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Expected a parameter of shape {tuple(grad.shape)} to have a dense gradient, but got layout "
                f"{grad.layout}: use sparse=False in the embedding"
            )
        if mirror.staging is None or mirror.staging is mirror.host.grad or mirror.staging.dtype != grad.dtype:
            mirror.staging = like(mirror.host, _on_host(mirror.weight, grad.dtype, like=grad))
        mirror.arriving = None
        if parameter.device.type == "cuda":
            stream = self._streams_of(parameter.device).gradients
            stream.wait_stream(torch.cuda.current_stream(parameter.device))
            with torch.cuda.stream(stream):
                local(mirror.staging).copy_(grad, non_blocking=True)
                mirror.arriving = stream.record_event()
            self._in_flight.append((mirror.arriving, grad))
        else:
            local(mirror.staging).copy_(grad)
        each(setattr, (mirror, parameter), ("full", "grad"), (True, mirror.stand_in()))()
        # Limit the gradients that are being copied to two buckets.
        while self._in_flight and (
            sum(copied.nbytes for _, copied in self._in_flight) > 2 * self.bucket_bytes or self._in_flight[0][0].query()
        ):
            self._in_flight.popleft()[0].synchronize()

    @torch.no_grad()
    def _add(self, mirror: _Mirror, grad: torch.Tensor) -> None:
        """Add a gradient to the one on the host."""
        with self._lock:
            # Code other than autograd may write to the tensor while it is being copied.
            self._copy_out(mirror, grad.clone() if grad.device.type == "cuda" else grad)

    @torch.no_grad()
    def _gradient_on_host(self, mirror: _Mirror) -> torch.Tensor:
        """The gradient of a parameter on the host, once it has arrived."""
        with self._lock:
            apply(_arrivals([mirror]))
        if mirror.host.grad is None:
            raise RuntimeError(
                f"Expected the gradient of a parameter of shape {tuple(mirror.host.shape)} to be on the host, but it "
                "was discarded by zero_grad(): do not keep .grad of an offloaded parameter, or copy it with .clone()"
            )
        return local(mirror.host.grad)

    # ---------------------------------------------------------------------------------------------------------- step

    def _read_weights(self, mirrors: list[_Mirror], last_step_returns: bool = False) -> None:
        """Start to copy weights to the host, bucket by bucket; `_commit` waits for them.

        `last_step_returns` says whether weights of the last step may still be on their way to the device.
        """
        self._weights_arriving = {}
        for device in {mirror.parameter.device for mirror in mirrors}:
            of_device, stream = [mirror for mirror in mirrors if mirror.parameter.device == device], None
            if device.type == "cuda":
                _, stream, back = self._streams_of(device)
                stream.wait_stream(back if last_step_returns else torch.cuda.current_stream(device))
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for bucket, members in groupby(of_device, attrgetter("bucket")):
                    for mirror in members:
                        mirror.weight.copy_(local(mirror.parameter), non_blocking=True)
                    if stream is not None:
                        self._weights_arriving.setdefault(bucket, []).append(stream.record_event())
        written = [mirror.host for mirror in mirrors if written_last(mirror.parameter) != mirror.seen]
        if written:
            self._finish_reading()  # full masters are compared with them before the first launch
            torch.autograd.graph.increment_version(written)

    def _finish_reading(self) -> None:
        """Wait for the weights that are being copied to the host."""
        for event in chain.from_iterable(self._weights_arriving.values()):
            event.synchronize()

    def _update_parameters(self) -> None:
        self._follow_groups()
        mirrors = self._all()
        if self.in_backward == "step":
            self._check_step(mirrors)
        with torch.no_grad():
            for mirror in mirrors:
                self._collect_from(mirror)
                mirror.attach()
            if self._limit() is not None or not self.state:
                # The norm needs all gradients, and so does the decision whether to take a first step with lr 0.
                apply(_arrivals(mirrors))
                self._in_flight.clear()
        # Where ranks exchange a parameter, another one may have its gradient.
        shared = {id(parameter) for parameter in self._exchanged if parameter.requires_grad}
        stepped = [mirror for mirror in mirrors if mirror.host.grad is not None or id(mirror.parameter) in shared]
        self._read_weights(stepped)
        super()._update_parameters()
        self._in_flight.clear()
        self._record.clear()
        _sent(stepped)
        for mirror in stepped if self.in_backward == "step" else ():
            if self._record.has_hook(mirror.parameter):
                mirror.parameter.grad, mirror.host.grad = self._record.stand_in(mirror.parameter), None

    def _check_step(self, mirrors: list[_Mirror]) -> None:
        """Wait for the steps of a backward, and raise if `step` would have had other results."""
        try:
            self._finish_steps()
        except BaseException:
            self._record.clear()  # the gradients still exist
            raise
        waiting = any(mirror.full or mirror.host.grad is not None for mirror in mirrors)
        self._record.check_step(self.param_groups, [] if waiting else parameters_of(self))

    def _targets(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self._mirrors[id(parameter)].host for parameter in parameters]

    def _bucket(self, parameter: torch.Tensor) -> int:
        return self._mirrors[id(parameter)].bucket

    def _complete_state(self, parameter: torch.Tensor, group: Group) -> dict[str, Any]:
        self._finish_reading()  # a new master is a copy of the weight
        if parameter in self.state:  # other code may have put tensors on the device into it
            state = self.state[parameter]
            if any(isinstance(value, torch.Tensor) and value.device != CPU for value in state.values()):
                self.state[parameter] = moved(state, CPU)
        return super()._complete_state(parameter, group)

    def _commit(self, part: int, writes: Writes) -> None:
        """Step the weights on the host and start to copy them to the device, bucket by bucket.

        The copies of a bucket are issued before waiting for the gradients of the next one. While matrices are
        orthogonalized on a device, the next launches run first.
        """
        calls: list[partial[Any]] = []
        waiting: list[partial[Any]] = []  # for products on a device, and what follows them
        written: list[_Mirror] = []
        for parameters, launches in writes:
            mirrors = [self._mirrors[id(parameter)] for parameter in parameters]
            arriving = self._weights_arriving.get(mirrors[0].bucket, []) if mirrors else []
            sent = each(torch.Tensor.copy_, list(map(local, parameters)), [one.weight for one in mirrors], repeat(True))
            begun = next((n for n, call in enumerate(launches) if isinstance(call, Waiting)), None)
            calls += [each(methodcaller("synchronize"), arriving), *_arrivals(mirrors), *launches[:begun]]
            calls += waiting if begun is not None else [sent, *waiting]
            waiting = [] if begun is None else [*launches[begun:], sent]
            written += mirrors
        calls += waiting
        with ExitStack() as stack:
            for device in _gpus(written):
                back, current = self._streams_of(device).back, torch.cuda.current_stream(device)
                if part == WHOLE:  # in the backward, everything that reads a weight precedes its gradient
                    back.wait_stream(current)
                    calls.append(partial(type(current).wait_stream, current, back))
                stack.enter_context(torch.cuda.stream(back))
            apply(calls)
        self._weights_arriving = {}

    def _finish_steps(self) -> None:
        """Wait for the steps of a backward, make the device wait for their weights, and raise their errors."""
        self._wait_for_steps()
        steps, self._steps = self._steps, []
        for step in steps:
            step.result()

    def _wait_for_steps(self) -> None:
        if self._steps:
            wait(self._steps)
            for device in _gpus(self._mirrors.values()):
                torch.cuda.current_stream(device).wait_stream(self._streams_of(device).back)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, including those that are being copied, or set them to 0."""
        if set_to_none:
            with self._lock:
                wait(self._steps)
                for mirror in self._mirrors.values():
                    mirror.forget()
                self._in_flight.clear()
        super().zero_grad(set_to_none)

    # --------------------------------------------------------------------------------------------------------- state

    def _load(self, state_dict: dict[str, Any]) -> None:
        super()._load(state_dict)
        self._record.clear(failed=True)
        _sent(self._mirrors.values())

    @torch.no_grad()
    def _update_targets(self) -> None:
        """Copy the parameters to the host, after the steps of a backward."""
        self._follow_groups()
        self._finish_steps()
        self._read_weights(self._all())
        self._finish_reading()
        self._weights_arriving = {}
        _sent(self._mirrors.values())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"Expected no copy or pickle of a {type(self).__name__}, which is tied to the parameters on the device: "
            "save state_dict(), and load it into an optimizer of the copied model"
        )


def _refuse_limit(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise ValueError(
            f"Expected max_grad_norm to be None with in_backward='step', but got {max_grad_norm}: the norm is known "
            "after the backward; use in_backward='copy'"
        )


_DOCS = """

    A drop-in for `halfstep.{name}`: the same arguments, bits and checkpoints. The parameters stay on one or several
    devices, and ``param_groups`` has these, as in any optimizer. It works with `halfstep.GradScaler` and torch's.

    Args:
        params: as for `halfstep.{name}`. Parameters must already be on their device, and sharded if FSDP2 is used.
        in_backward: what happens to a gradient as soon as it is complete. ``"copy"``: it is copied to the host and
            freed. ``"step"``: in addition, a bucket of parameters is stepped once all of its gradients are complete,
            while the backward continues; without clipping and scaling, which need all gradients first. None: nothing;
            `step` copies all gradients. Use this with DistributedDataParallel, which reduces gradients later.
        bucket_bytes: parameters whose gradients take this many bytes are stepped together. Smaller buckets are copied
            back earlier, and cost a launch each. During the backward, gradients of at most two buckets plus one more
            gradient are being copied to the host.

    Raises:
        TypeError: a parameter is on the meta device, on the host by ``CPUOffloadPolicy``, flattened by FSDP1, or not in
            fp32, fp16 or bf16.
        ValueError: `in_backward` or `bucket_bytes` is invalid, or ``in_backward="step"`` is combined with
            ``max_grad_norm`` or Muon; and as for `halfstep.{name}`.

    Examples:
        >>> from halfstep.integrations.offload import Offloaded{name}
        >>> model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        >>> optimizer = Offloaded{name}(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.grad  # stands in for the gradient on the host
        HostGradient(shape=(1, 4), dtype=torch.bfloat16, device='cpu')
        >>> optimizer.step()
        >>> optimizer.masters()[model.weight].device
        device(type='cpu')
"""


class OffloadedAdam(_Offloaded, Adam):
    __doc__ = "Adam with masters, moments and step on the host." + _DOCS.format(name="Adam")


class OffloadedAdamW(_Offloaded, AdamW):
    __doc__ = "AdamW with masters, moments and step on the host." + _DOCS.format(name="AdamW")


class OffloadedSGD(_Offloaded, SGD):
    __doc__ = "SGD with masters, momentum and step on the host." + _DOCS.format(name="SGD")


class OffloadedMuon(_Offloaded, Muon):
    __doc__ = "Muon with masters, momentum and step on the host, products on the device." + _DOCS.format(name="Muon")
