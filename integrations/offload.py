"""Adam and AdamW whose masters and moments are in the memory of the host, and whose steps run there.

The device holds the weights and, during the backward, the gradients that are being copied. Each gradient is copied to
the host as soon as it is complete, and freed. The C++ kernels step there, bucket by bucket in the order in which
gradients arrive: a bucket waits for its own gradients only, and its weights return while the next one is stepped. The
norm, where it is needed, waits for all gradients. Weights and state have the bits of a step on the device.

All launches of a step are prepared before the first gradient is waited for. Waits, launches and copies are then one
sequence of calls that nothing interrupts (interrupts.py), so that a step in buckets is made as a whole or not at all.

The optimizer's ``param_groups`` and ``state`` contain the copies of the parameters on the host, of which each is pinned
if the parameter is on a GPU. Gradients of several backwards are added on the host, in the dtype of the gradient, as
autograd adds them. Clipping, scaling and skipping are therefore those of an optimizer on the CPU, for our scaler and
torch's.

Bytes per parameter in bf16 with fp32 moments: 2 on the device; on the host 2 for the weight, 2 for the remainder, 8 for
the moments and 2 for the gradient. Each step copies 2 to the host and 2 back.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from operator import methodcaller
from typing import Any, Literal, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from halfstep.integrations.buckets import call_if_alive
from halfstep.integrations.interrupts import apply
from halfstep.integrations.optim.classes import Adam, AdamW
from halfstep.integrations.optim.state import WHOLE
from halfstep.integrations.release import BUCKET_BYTES, is_wrapped_by_ddp
from halfstep.kernels.multi_tensor import FLOATS
from halfstep.numerics.scaling.topology import is_sharded

IN_BACKWARD = ("copy", "step", None)


class _Mirror:
    """A parameter and its copy on the host.

    Attributes:
        parameter: the parameter.
        host: its copy, which the optimizer steps. Its gradient is that of the parameter, once it has arrived.
        bucket: the number of the parameters that are stepped together with it.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        values = parameter.detach()
        self.host = torch.nn.Parameter(_on_host(values).copy_(values), requires_grad=parameter.requires_grad)
        self.bucket = 0
        self._staging: torch.Tensor | None = None  # the memory of the next gradient to arrive
        self._arriving: torch.cuda.Event | None = None  # recorded after the copy of a gradient into `_staging`
        self._full = False  # whether there is such a gradient
        self._seen = self._now()

    def _now(self) -> tuple[int, int]:
        return self.parameter._version, self.parameter.data_ptr()

    def take(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """Begin to copy the gradient of the parameter, on a stream that has waited for it. `taken` must follow."""
        if self._full:  # of an earlier backward
            apply(_arrivals([self]))
        grad = self.parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Expected a parameter of shape {tuple(grad.shape)} to have a dense gradient, but got layout "
                f"{grad.layout}: use sparse=False in the embedding"
            )
        if self._staging is None or self._staging is self.host.grad or self._staging.dtype != grad.dtype:
            self._staging = _on_host(self.host, grad.dtype, like=grad)
        if stream is None:
            self._staging.copy_(grad)
        else:
            with torch.cuda.stream(stream):
                self._staging.copy_(grad, non_blocking=True)
                self._arriving = stream.record_event()
        return self._arriving

    def taken(self) -> None:
        """Free the gradient of the parameter. An interrupt before this leaves it there, to be taken again."""
        _each(setattr, (self, self.parameter), ("_full", "grad"), (True, None))()

    def attach(self) -> None:
        """Set the gradient of the copy to a gradient that is being copied, unless it has one of earlier backwards."""
        if self._full and self.host.grad is None:
            self.host.grad = self._staging

    @torch.no_grad()
    def give_back(self) -> None:
        """Return the gradient to the parameter, from where it would be copied again."""
        apply(_arrivals([self]))
        if self.host.grad is not None and self.parameter.grad is None:
            grad = self.host.grad.to(self.parameter.device, copy=True)
            _each(setattr, (self.parameter, self.host), repeat("grad"), (grad, None))()

    def forget(self) -> None:
        """Drop a gradient that is being copied."""
        if self._full and self._arriving is not None:
            self._arriving.synchronize()
        self._full = False

    def take_outside_write(self) -> None:
        """Copy the parameter if other code has written it since the last step."""
        if self._now() != self._seen:
            self.host.copy_(self.parameter)
            self._seen = self._now()

    def sent(self) -> None:
        """Note that the parameter has the weights of the copy."""
        self._seen = self._now()


def _arrivals(mirrors: Iterable[_Mirror]) -> list[partial[Any]]:
    """The calls that wait for gradients that are being copied, and add them to those of earlier backwards."""
    full = [mirror for mirror in mirrors if mirror._full]
    for mirror in full:
        mirror.attach()
    later = [mirror for mirror in full if mirror.host.grad is not mirror._staging]
    return [
        _each(methodcaller("synchronize"), [one._arriving for one in full if one._arriving is not None]),
        _each(torch.Tensor.add_, [one.host.grad for one in later], [one._staging for one in later]),
        _each(setattr, full, repeat("_full"), repeat(False)),
    ]


def _each(function: Callable[..., Any], *columns: Iterable[Any]) -> partial[Any]:
    """One call without Python code of ours that calls a function with each row of some columns."""
    return partial(deque, map(function, *columns), 0)


class _InFlight(NamedTuple):
    """A gradient that is being copied. It exists until the copy has ended."""

    ended: torch.cuda.Event
    grad: torch.Tensor
    size: int


def _on_host(values: torch.Tensor, dtype: torch.dtype | None = None, like: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialized memory for a tensor on the host, pinned if `like`, or the tensor itself, is on a GPU."""
    pinned = (values if like is None else like).device.type == "cuda"
    shape = torch.empty_like(values, device="meta")
    made = torch.empty(shape.numel(), dtype=dtype or values.dtype, device="cpu", pin_memory=pinned)
    return torch.as_strided(made, shape.shape, shape.stride())


class _GroupOnDevice(dict[str, Any]):
    """A group of an offloaded optimizer with the parameters on the device. Options are set in both."""

    def __init__(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        super().__init__({**group, "params": parameters})
        self._group = group

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._group[name] = value


class _ByParameter(Mapping[torch.Tensor, Any]):
    """Values of the copies on the host, by the parameters on the device."""

    def __init__(self, values: Mapping[torch.Tensor, Any], mirrors: dict[int, _Mirror]) -> None:
        self._of_hosts, self._mirrors = values, mirrors

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        if id(parameter) not in self._mirrors:
            raise KeyError("not a parameter of this optimizer")
        return self._of_hosts[self._mirrors[id(parameter)].host]

    def __iter__(self) -> Iterator[torch.Tensor]:
        held = set(self._of_hosts)
        return (mirror.parameter for mirror in self._mirrors.values() if mirror.host in held)

    def __len__(self) -> int:
        return len(self._of_hosts)


def _looks_up_parameters() -> bool:
    """Whether the code that reads an attribute looks parameters up in the model, and so needs those on the device."""
    # The reader of an attribute is visible only in its frame.
    return sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


class _Offloaded(Adam):
    """The common part of both optimizers: copies between the device and the host around the step of the base class."""

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
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"Expected bucket_bytes to be an integer of at least 1, but got {bucket_bytes!r}")
        if in_backward == "step" and options.get("max_grad_norm") is not None:
            raise ValueError(
                f"Expected max_grad_norm to be None with in_backward='step', but got {options['max_grad_norm']}: the "
                "norm is known after the backward; use in_backward='copy'"
            )
        self.in_backward, self.bucket_bytes = in_backward, bucket_bytes
        self._mirrors: dict[int, _Mirror] = {}  # by the id of the parameter on the device
        self._by_host: dict[int, _Mirror] = {}  # by the id of its copy
        self._of_bucket: list[list[_Mirror]] = []
        self._arrived: dict[int, set[int]] = {}  # by bucket, the ids of parameters whose gradient is complete
        self._in_flight: deque[_InFlight] = deque()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._steps: list[Future[None]] = []
        self._worker: Executor | None = None
        self._stepping: int | None = None  # the thread that steps
        self._lock = threading.RLock()  # one thread of autograd per device calls the hooks
        self._began = False  # whether a backward was seen
        super().__init__(params, *args, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the copies on the host. Reading them waits for the gradients that are being copied, so that
        scalers and other code find all of them. `torch.distributed.checkpoint.state_dict` finds the parameters on the
        device."""
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if _looks_up_parameters():
            return self._groups_on_device(groups)
        if threading.get_ident() != self._stepping:
            self._settle()
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _groups_on_device(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.state:  # a first step with gradients of 0 follows, unless the parameters have some
            for mirror in self._mirrors.values():
                mirror.give_back()
        parameters = [[self._by_host[id(host)].parameter for host in group["params"]] for group in groups]
        return [_GroupOnDevice(group, own) for group, own in zip(groups, parameters, strict=True)]

    @property
    def state(self) -> Any:
        """The state by the copies on the host; in `torch.distributed.checkpoint.state_dict` by the parameters."""
        state = self.__dict__["state"]
        if not _looks_up_parameters():
            return state
        # torch takes a step with gradients of 0 if there is no state. The steps of a backward may be creating it.
        self._finish_steps()
        return _ByParameter(state, self._mirrors)

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, of which the optimizer makes copies on the host.

        Raises:
            TypeError, ValueError: an option or a parameter is not allowed. The optimizer is unchanged.
        """
        added: dict[int, _Mirror] = {}  # by the id of the parameter
        if isinstance(param_group, dict) and "params" in param_group:
            given = param_group["params"]
            members = [given] if isinstance(given, torch.Tensor) else list(given)
            param_group = {**param_group, "params": [self._mirrored(one, added) for one in members]}
        super().add_param_group(param_group)
        take = weakref.WeakMethod(self._take)
        self._mirrors |= added
        self._by_host |= {id(mirror.host): mirror for mirror in added.values()}
        for mirror in added.values():
            if self.in_backward is not None and mirror.parameter.requires_grad:
                mirror.parameter.register_post_accumulate_grad_hook(partial(call_if_alive, take))
        self._fill_buckets()

    def _mirrored(self, member: Any, added: dict[int, _Mirror]) -> Any:
        """A member of a group with the copy of its parameter, which is put into `added` if it is new."""
        if isinstance(member, tuple) and len(member) == 2:
            return member[0], self._mirrored(member[1], added)
        if not isinstance(member, torch.Tensor):
            return member  # the base class raises
        known = self._mirrors.get(id(member)) or added.get(id(member))
        if known is not None:
            return known.host
        if self.in_backward == "step" and member.requires_grad and member.dtype == torch.float16:
            raise TypeError(
                "Expected parameters in fp32 or bf16 with in_backward='step', but got one in torch.float16, whose loss "
                "must be scaled: use in_backward='copy' with a scaler, or train in bf16"
            )
        if is_sharded(member) or getattr(member, "_fsdp_flattened", False):
            raise TypeError(
                f"Expected a parameter that is not sharded, but got one of shape {tuple(member.shape)} under FSDP: use "
                "fully_shard(..., offload_policy=CPUOffloadPolicy()) with halfstep.AdamW, which steps on the host too"
            )
        if not member.is_leaf or member.dtype not in FLOATS or member.device.type == "meta":
            raise TypeError(
                "Expected a parameter to be a leaf in fp32, fp16 or bf16 with memory, but got "
                f"{'a leaf' if member.is_leaf else 'a computed tensor'} in {member.dtype} on {member.device}: move the "
                "model to its device first"
            )
        added[id(member)] = _Mirror(member)
        return added[id(member)].host

    def _fill_buckets(self) -> None:
        """Divide the parameters among buckets, in the order in which their gradients usually arrive."""
        self._forget()
        self._of_bucket = []
        size = self.bucket_bytes
        for mirror in reversed(self._mirrors.values()):
            if size >= self.bucket_bytes:
                self._of_bucket.append([])
                size = 0
            mirror.bucket = len(self._of_bucket) - 1
            self._of_bucket[-1].append(mirror)
            size += mirror.host.numel() * mirror.host.element_size()
        self._arrived = {number: set() for number in range(len(self._of_bucket))}

    # ------------------------------------------------------------------------------------------------------ backward

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams of a GPU on which gradients leave and weights return."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient of a parameter is complete."""
        with self._lock:
            if not self._began:
                if is_wrapped_by_ddp(mirror.parameter for mirror in self._mirrors.values()):
                    raise RuntimeError(
                        "Expected the model not to be wrapped by DistributedDataParallel, whose gradients are reduced "
                        "after they are complete: use in_backward=None, which copies them in step()"
                    )
                self._began = True
            mirror = self._mirrors[id(parameter)]
            self._copy_out(mirror)
            # At most two buckets of gradients are on their way.
            while self._in_flight and (
                sum(one.size for one in self._in_flight) > 2 * self.bucket_bytes or self._in_flight[0].ended.query()
            ):
                self._in_flight.popleft().ended.synchronize()
            if self.in_backward != "step":
                return
            arrived, bucket = self._arrived[mirror.bucket], self._of_bucket[mirror.bucket]
            arrived.add(id(parameter))
            if len(arrived) == sum(one.parameter.requires_grad for one in bucket):
                self._arrived[mirror.bucket] = set()
                self._steps.append(self._submit(partial(self._step_bucket, mirror.bucket)))

    def _copy_out(self, mirror: _Mirror) -> None:
        """Begin to copy a gradient to the host."""
        parameter, grad = mirror.parameter, mirror.parameter.grad
        assert grad is not None
        stream = None
        if parameter.device.type == "cuda":
            stream, _ = self._streams_of(parameter.device)
            stream.wait_stream(torch.cuda.current_stream(parameter.device))
        ended = mirror.take(stream)
        if ended is not None:
            self._in_flight.append(_InFlight(ended, grad, grad.numel() * grad.element_size()))
        mirror.taken()

    def _submit(self, call: partial[None]) -> Future[None]:
        """Run a call in the thread of this optimizer, one after the other."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "halfstep-offload")
        return self._worker.submit(call)

    def _step_bucket(self, number: int) -> None:
        """Step the parameters of a bucket that have a gradient, and send their weights."""
        self._stepping = threading.get_ident()
        try:
            with torch.no_grad():
                self._step_received(number)
        finally:
            self._stepping = None

    def _step_received(self, number: int) -> None:
        ready = []
        for mirror in self._of_bucket[number]:
            apply(_arrivals([mirror]))
            if mirror.host.grad is not None:
                mirror.take_outside_write()
                ready.append(mirror)
        if ready:
            self._step_part(number, [mirror.host for mirror in ready])
        for mirror in ready:
            mirror.sent()

    # ---------------------------------------------------------------------------------------------------------- step

    def _bucket_number(self, parameter: torch.Tensor) -> int:
        return self._by_host[id(parameter)].bucket

    @torch.no_grad()
    def _collect(self) -> None:
        """Wait for the steps of buckets, and begin to copy the gradients that are still on the device."""
        if self._steps:
            wait(self._steps)
            for device in self._gpus(self._mirrors.values()):
                torch.cuda.current_stream(device).wait_stream(self._streams_of(device)[1])
            steps, self._steps = self._steps, []
            for step in steps:
                step.result()
        for bucket in self._of_bucket:
            for mirror in bucket:
                if mirror.parameter.grad is not None:
                    self._copy_out(mirror)
        self._arrived = {number: set() for number in range(len(self._of_bucket))}

    def _settle(self) -> None:
        """Wait for the steps of buckets, and for all gradients."""
        self._collect()
        with torch.no_grad():
            apply(_arrivals(self._mirrors.values()))
        self._in_flight.clear()

    def _update_parameters(self) -> None:
        if self._limit() is not None or not self.state:
            self._settle()  # all gradients decide about the norm, and whether a first step with lr 0 is taken
        else:
            self._collect()
        for mirror in self._mirrors.values():
            mirror.take_outside_write()
            mirror.attach()
        stepped = [mirror for mirror in self._mirrors.values() if mirror.host.grad is not None]
        try:
            self._stepping = threading.get_ident()
            super()._update_parameters()
        finally:
            self._stepping = None
        self._in_flight.clear()
        for mirror in stepped:
            mirror.sent()

    def _commit(self, part: int, writes: list[tuple[list[torch.Tensor], list[partial[Any]]]]) -> None:
        """Write weights on the host and begin to copy them to the device, bucket by bucket.

        The weights of a bucket leave before the gradients of the next one are waited for.
        """
        calls: list[partial[Any]] = []
        written: list[_Mirror] = []
        for hosts, own in sorted(writes, key=lambda one: list(map(self._bucket_number, one[0][:1]))):
            mirrors = [self._by_host[id(host)] for host in hosts]
            calls += [*_arrivals(mirrors), *own]
            calls.append(_each(torch.Tensor.copy_, [one.parameter for one in mirrors], hosts, repeat(True)))
            written += mirrors
        with ExitStack() as stack:
            for device in self._gpus(written):
                back, now = self._streams_of(device)[1], torch.cuda.current_stream(device)
                back.synchronize()  # copies of the last step read the weights on the host
                if part == WHOLE:  # in the backward, all that read the weights was complete before their gradient was
                    back.wait_stream(now)
                    calls.append(partial(type(now).wait_stream, now, back))
                stack.enter_context(torch.cuda.stream(back))
            apply(calls)

    def _gpus(self, mirrors: Iterable[_Mirror]) -> set[torch.device]:
        """The GPUs of parameters."""
        return {device for device in {mirror.parameter.device for mirror in mirrors} if device.type == "cuda"}

    def _finish_steps(self) -> None:
        """Wait for the steps of a backward, and raise the error of one that failed."""
        for step in self._steps:
            step.result()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients, those that are being copied too."""
        with self._lock:
            for mirror in self._mirrors.values():
                mirror.forget()
                mirror.parameter.grad = None
            self._in_flight.clear()
        super().zero_grad(set_to_none)

    # --------------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        self._take_device()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._take_device()
        super().load_state_dict(state_dict)
        for mirror in self._mirrors.values():
            mirror.sent()

    def masters(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """The fp32 weight of each parameter on the device; see `halfstep.AdamW.masters`. The masters are on the
        host."""
        self._take_device()
        return _ByParameter(super().masters(), self._mirrors)

    def refresh_master(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Set masters to the present parameters on the device; see `halfstep.AdamW.refresh_master`."""
        self._take_device()
        if parameters is not None:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            parameters = [self._mirrors[id(one)].host if id(one) in self._mirrors else one for one in given]
        super().refresh_master(parameters)

    @torch.no_grad()
    def _take_device(self) -> None:
        """Copy parameters that other code has written, after the steps of a backward."""
        self._finish_steps()
        for mirror in self._mirrors.values():
            mirror.take_outside_write()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"Expected no copy or pickle of a {type(self).__name__}, which belongs to the parameters on the device: "
            "save state_dict(), and load it into an optimizer of the copied model"
        )


_DOCS = """

    A drop-in for `halfstep.{name}`: the same arguments, bits and checkpoints. The parameters stay on the device, or on
    several. ``param_groups`` holds their copies on the host, whose options, such as the learning rate, may be changed
    as usual. `halfstep.GradScaler` and torch's work with it.

    Args:
        params: as for `halfstep.{name}`. Parameters must be on their device and must not be sharded; for FSDP2 use its
            ``CPUOffloadPolicy``.
        in_backward: what happens to a gradient as soon as it is complete. ``"copy"``: it is copied to the host and
            freed. ``"step"``: in addition, the parameters of a bucket are stepped when their gradients are complete,
            while the backward goes on; without clipping and scaling, which need all gradients first. None: nothing,
            `step` copies all gradients; for DistributedDataParallel, whose gradients are not reduced before.
        bucket_bytes: parameters are stepped together whose gradients take so many bytes. Smaller buckets return
            earlier, and cost a launch each. During the backward, gradients of at most two buckets and one more gradient
            are on their way to the host.

    Raises:
        TypeError: a parameter is sharded, on the meta device, or not a leaf in fp32, fp16 or bf16.
        ValueError: `in_backward` or `bucket_bytes` is not allowed, or ``in_backward="step"`` is combined with
            ``max_grad_norm``; and as `halfstep.{name}`.

    Examples:
        >>> from halfstep.integrations.offload import Offloaded{name}
        >>> model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        >>> optimizer = Offloaded{name}(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> model.weight.grad is None  # it is on the host
        True
        >>> optimizer.step()
        >>> optimizer.masters()[model.weight].device
        device(type='cpu')
"""


class OffloadedAdam(_Offloaded):
    __doc__ = "Adam with masters, moments and step on the host." + _DOCS.format(name="Adam")


class OffloadedAdamW(_Offloaded, AdamW):
    __doc__ = "AdamW with masters, moments and step on the host." + _DOCS.format(name="AdamW")
