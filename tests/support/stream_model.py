"""A model of a GPU's streams and graphs for tests, which runs our real host code with an asynchronous device.

In a `Model`, tensors on ``model.device`` claim to be on ``cuda:0``. Their memory is that of the model
(stream_memory.py). Operations on them return immediately. The operations, launches of our kernels, copies, fills and
frees are recorded on the current stream and executed later: in any order that streams and events allow
(``order="random"``), as late as possible (``"late"``) or immediately (``"at once"``). Launches contain addresses and
numbers, and read their tables when they are executed. Graphs are captured and replayed. Calls that PyTorch and CUDA
refuse during a capture are refused here.

Pinned and pageable memory are distinguished. As in PyTorch, pinned memory that was freed is reused when a later
allocation finds by a query of events that its copies are done, which a capture forbids. `blocking` lists every call in
which the host waited for the device, and `pageable` every copy from memory that is not pinned. With
``torch.cuda.set_sync_debug_mode("error")``, waiting calls raise.

Simplifications: there are one device and one thread, in which work for a thread pool runs at once, captured nodes are
replayed in the order of their capture, and copies from pageable memory read the host immediately.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from stream_memory import Memory
from stream_queues import DEVICE, Event, Graph, Pool, Stream, Ticket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from halfstep.kernels import adam, backend, cast, loss_scale, native, rank_sum, statistics, unscale
from halfstep.kernels.block_cast import dispatch as block_cast
from halfstep.kernels.log_probabilities import dispatch
from halfstep.kernels.optimizer import launch
from halfstep.numerics.scaling.stand_ins import StandIn

aten = torch.ops.aten
LAUNCHERS = (block_cast, cast, dispatch, launch, loss_scale, rank_sum, statistics, unscale)
# Of the launches that read a table: how many of its rows are addresses.
ADDRESS_ROWS = {"adam": adam.OPERANDS, "block_cast": 3, "check": 1, "cast": 2, "rank_sum_check": 0}
# Operations that tell the host something about the elements.
TELLING = (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.is_nonzero, aten._unique2)
# Those that an index of garbage would have fail while it is only recorded.
INDEXING = (aten.index, aten.index_select, aten.gather)
EMPTY = (aten.empty_like, aten.new_empty, aten.new_empty_strided)
# Operations that change what a tensor is, not its elements.
OF_THE_HOST = (aten.set_, aten.detach_, aten.resize_, aten.t_, aten.squeeze_, aten.unsqueeze_, aten.transpose_)


class _Function:
    """A C++ function that replaces a kernel. A call records it, with addresses and numbers only."""

    def __init__(self, model: Model, name: str, function: Any) -> None:
        vars(self).update(model=model, name=name, function=function)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.function, name, value)

    def __call__(self, *arguments: Any) -> None:
        listed = (
            arguments[0] if isinstance(arguments[0], ctypes.Array) else arguments
        )  # those of optimizers are one array
        plain = [getattr(argument, "value", argument) for argument in listed]
        rows, chunk_tensor, tensors, chunks = (plain + [0] * 4)[:4]
        if rows not in self.model.memory:  # tensors of the CPU
            self.function(*arguments)
            return
        if self.name == "halfstep_check" and plain[4] is not None and plain[4] not in self.model.memory:
            number = ctypes.c_float.from_address(plain[4]).value  # passed by value: the host's memory is gone later
            arguments = (*arguments[:4], ctypes.addressof(kept := ctypes.c_float(number)), *arguments[5:])
        else:
            kept = None

        def run(kept: Any = kept) -> None:
            kind = self.name.removeprefix("halfstep_")
            if kind in ADDRESS_ROWS:
                self.model.check_table(kind, rows, chunk_tensor, tensors, chunks)
            self.function(*arguments)

        self.model.launches.append(self.name)
        self.model.current.push(run)


class _Library:
    """A C++ library whose functions are recorded."""

    def __init__(self, model: Model, library: ctypes.CDLL) -> None:
        self._model, self._library = model, library
        self._functions: dict[str, _Function] = {}

    def __getattr__(self, name: str) -> _Function:
        if name not in self._functions:
            self._functions[name] = _Function(self._model, name, getattr(self._library, name))
        return self._functions[name]


class _Deferred(TorchDispatchMode):
    """Operations on tensors of the device allocate their results at once. The stream executes them later."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in: Any = next((one for one in types if issubclass(one, StandIn)), None)
        if stand_in is not None:  # it decides itself; the copies that it makes are those of Python code
            with self, _Python(self.model):
                return stand_in.__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self.model.operation(func, args, kwargs or {})


class _Python(TorchFunctionMode):
    """Python functions of tensors: device, copies to and from the host, creation."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self.model.answers.get(func)
        if own is not None:
            return own(func, *args, **kwargs)
        device = kwargs.get("device")
        if device is not None or kwargs.get("pin_memory"):
            return self.model.make(func, args, kwargs)
        return func(*args, **kwargs)


class Model:
    """The device; a context manager, inside which everything runs on it.

    Args:
        order: the order in which work is executed; see above. `seed` is that of the random one.
        kernels: the implementation of ours: ``"native"`` (C++), ``"triton"`` (the interpreter) or ``"reference"``.

    Attributes:
        device: the device to pass to functions of torch.
        blocking: names of the calls in which the host has waited.
        pageable: copies from or to memory that is not pinned.
        launches: names of the launched kernels.
    """

    def __init__(
        self,
        order: str = "random",
        seed: int = 0,
        kernels: str = "native",
        size: int = 1 << 24,
    ) -> None:
        if kernels == "triton" and not backend.TAKES_CPU_TENSORS:
            pytest.skip("the memory of the model is the host's, where kernels of a GPU cannot run")
        self.device, self.order, self.kernels = DEVICE, order, kernels
        self.blocking: list[str] = []
        self.pageable: list[str] = []
        self.launches: list[str] = []
        self.refusing = False
        self.current_device = 0
        self._random = random.Random(seed)
        self.memory, self.pinned = Memory(size, self._freed), Memory(size, self._freed_pinned)
        self._left: set[int] = set()  # blocks freed while another stream than theirs was current
        # By the address of a pinned block: copies under way, for blocks that were copied; bytes, for those freed since.
        self._in_use: dict[int, int] = {}
        self._freed_in_use: dict[int, int] = {}
        self._numbers = itertools.count()
        self._streams: list[Stream] = []
        self.default = self.current = self.stream()
        self.answers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda func, tensor: DEVICE if self.claims(tensor) else func(tensor),
            torch.Tensor.is_cuda.__get__: lambda func, tensor: self.is_here(tensor),
            torch.Tensor.is_cpu.__get__: lambda func, tensor: not self.is_here(tensor) and func(tensor),
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda func, tensor: self._to(func, tensor, "cpu"),
            torch.Tensor.cuda: lambda func, tensor, *rest, **options: self._to(func, tensor, DEVICE, **options),
            torch.Tensor.tolist: lambda func, tensor: func(self._to(func, tensor, "cpu")),
            torch.Tensor.numpy: lambda func, tensor: func(self._to(func, tensor, "cpu")),
            torch.Tensor.pin_memory: lambda func, tensor: self.new_pinned(tensor).copy_(tensor),
            torch.Tensor.is_pinned: lambda func, tensor: self.pinned.holds(tensor),
            torch.Tensor.register_post_accumulate_grad_hook: self._hook,
        }

    # ------------------------------------------------------------------------------------------------------ context

    def __enter__(self) -> Model:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        _forget()
        self._stack.callback(_forget)
        fake = {
            "Stream": lambda *arguments, **options: self.stream(),
            "Event": partial(Event, self),
            "CUDAGraph": type("CUDAGraph", (Graph,), {"__init__": lambda own, **options: Graph.__init__(own, self)}),
            "stream": self.on,
            "graph": self._graph,
            "device": self._on_device,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.default,
            "current_device": lambda: self.current_device,
            "device_count": lambda: 1,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.current_device == 0 and self.current.graph is not None,
            "synchronize": lambda device=None: self.blocks("synchronize", self._streams),
            "set_sync_debug_mode": lambda mode: setattr(self, "refusing", mode == "error"),
            "_sleep": lambda cycles: None,
        }
        fake["CUDAGraph"].get_currently_capturing_graph = staticmethod(lambda: self.current.graph)  # type: ignore
        enter(mock.patch.multiple(torch.cuda, **fake))
        enter(
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda index: self.current.cuda_stream, create=True
            )
        )
        for module in LAUNCHERS:
            enter(mock.patch.object(module, "resolve", partial(self._resolve, module.resolve)))
            if hasattr(module, "native"):
                enter(mock.patch.object(module, "native", self._native()))
        enter(mock.patch.object(ThreadPoolExecutor, "submit", _run_at_once))
        enter(mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", self._grouping()))
        if self.kernels == "triton":
            from triton.runtime.interpreter import InterpretedFunction

            enter(mock.patch.object(backend, "_lanes", lambda device: 32))  # the device has no properties
            enter(mock.patch.object(InterpretedFunction, "run", self._interpreted(InterpretedFunction.run)))
        enter(mock.patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(self._stand_in)))
        enter(_Deferred(self))
        enter(_Python(self))
        return self

    def _hook(self, func: Any, tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        """`torch.Tensor.register_post_accumulate_grad_hook`. Autograd calls hooks without the modes of its caller."""

        def call(parameter: torch.Tensor) -> None:
            with _Python(self):
                hook(parameter)

        return func(tensor, call)

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                for stream in self._streams:
                    self._drain(stream)
        finally:
            self._stack.close()

    def _resolve(self, usual: Callable[..., str], device: torch.device, family: str) -> str:
        if device.type != "cuda":
            return usual(device, family)
        return "reference" if family in ("softmax", "statistics") and self.kernels == "native" else self.kernels

    def _native(self) -> Any:
        libraries: dict[str, _Library] = {}

        def library(name: str) -> Any:
            if name not in libraries:
                libraries[name] = _Library(self, native.library(name))
            return libraries[name]

        return mock.Mock(wraps=native, library=library)

    def _grouping(self) -> Callable[..., Any]:
        """torch's grouping by device. The C++ original would take the tensors of the device for CPU tensors."""

        def grouped(lists: list[list[torch.Tensor]], with_indices: bool = False) -> Any:
            indices: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index, tensor in enumerate(lists[0]):
                indices.setdefault((tensor.device, tensor.dtype), []).append(index)
            return {
                key: ([[one[index] for index in own] if one else [] for one in lists], own if with_indices else [])
                for key, own in indices.items()
            }

        return grouped

    def _interpreted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            with torch._C.DisableTorchFunction():
                plain = [self.alias(one) if isinstance(one, torch.Tensor) else one for one in arguments]

            def work() -> None:
                name = kernel.__name__.removesuffix("_kernel").removeprefix("multi_")
                if name in ADDRESS_ROWS and kernel.arg_names[0] == "rows":
                    self.check_table(name, plain[0].data_ptr(), plain[1].data_ptr(), plain[2], grid[0])
                run(kernel, *plain, grid=grid, warmup=warmup, **options)

            self.launches.append(kernel.__name__)
            self.current.push(work)

        return record

    # ------------------------------------------------------------------------------------------------------ streams

    def stream(self) -> Stream:
        """A new stream."""
        self._streams.append(Stream(self, next(self._numbers)))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.current_device = self.current_device, device.index or 0
        try:
            yield
        finally:
            self.current_device = before

    @contextmanager
    def _graph(self, graph: Graph, **options: Any) -> Iterator[None]:
        """`torch.cuda.graph`."""
        self.blocks("synchronize", self._streams, counted=False)
        with self.on(options.get("stream") or self.stream()):
            graph.capture_begin()
            try:
                yield
            finally:
                graph.capture_end()

    def captures(self) -> list[Graph]:
        """The present captures."""
        return [stream.graph for stream in self._streams if stream.graph is not None]

    def go_on(self) -> None:
        """Called after something is recorded: the device executes work according to its order."""
        if self.order == "at once":
            for stream in self._streams:
                self._drain(stream)
        elif self.order == "random":
            for _ in range(self._random.choice((0, 0, 0, 1, 1, 2, 9))):
                self._random.choice(self._streams).advance()

    def _drain(self, stream: Stream, until: Ticket | None = None) -> None:
        while stream.queue and not (until is not None and until.done):
            if not stream.advance():
                for other in self._streams:  # it waits for one of them
                    if other is not stream and other.advance():
                        break
                else:
                    raise AssertionError("streams wait for each other")

    def blocks(self, what: str, streams: list[Stream], counted: bool = True, until: Ticket | None = None) -> None:
        """The host waits for streams, or until one of them has executed an event."""
        for graph in self.captures():
            graph.fail(f"operation not permitted when stream is capturing: {what}")
        if counted:
            self.blocking.append(what)
            if self.refusing:
                raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        for stream in streams:
            self._drain(stream, until)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context in which reads are not counted."""
        before = len(self.blocking), len(self.pageable), self.refusing
        self.refusing = False
        yield
        del self.blocking[before[0] :], self.pageable[before[1] :]
        self.refusing = before[2]

    # ------------------------------------------------------------------------------------------------------- memory

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device. A DTensor has no memory: its shard is."""
        return not (tensor.is_meta or hasattr(tensor, "_local_tensor")) and self.memory.holds(tensor)

    def claims(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor or its shard is on the device, or stands in for one that is."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        return self.is_here(tensor) or "of_the_model" in vars(tensor)

    def _stand_in(self, cls: Any, *arguments: Any, device: torch.device, **options: Any) -> Any:
        """A tensor without memory. Parameters on the device, whose ``.grad`` it becomes, are on the CPU for torch."""
        made = torch._C.TensorBase._make_wrapper_subclass(
            cls, *arguments, device=torch.device("cpu") if device == DEVICE else device, **options
        )
        if device == DEVICE:
            vars(made)["of_the_model"] = True
        return made

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of device or pinned memory, by its address."""
        return (self.memory if self.memory.holds(tensor) else self.pinned).alias(tensor)

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, from the pool of the current stream or of its capture."""
        pool = self.current if self.current.graph is None else self.current.graph.own
        made = self.memory.new(pool, like.shape, like.stride(), like.dtype)
        block = made.untyped_storage()
        if (offset := block.data_ptr() - self.memory.start) in self._left:
            self._left.remove(offset)
            self.current.push(partial(self.memory.poison, offset, block.nbytes()))
        return made

    def new_pinned(self, like: torch.Tensor) -> torch.Tensor:
        if self.current.graph is None:  # else from the pool of the graph, which needs no query of an event
            self._reuse_pinned()
        return self.pinned.new(None, like.shape, like.stride(), like.dtype)

    def _reuse_pinned(self) -> None:
        """Make freed blocks available whose copies are done, until the first one whose copies are not."""
        for block, size in list(self._freed_in_use.items()):
            for graph in self.captures():
                graph.fail("operation not permitted when stream is capturing: an event of pinned memory is queried")
            if self._in_use[block]:
                return
            del self._in_use[block], self._freed_in_use[block]
            self.pinned.give(None, block, size)

    def _freed(self, pool: Stream | Pool, offset: int, size: int) -> None:
        poison = partial(self.memory.poison, offset, size)
        if isinstance(pool, Stream):
            if pool is self.current and pool.graph is None:
                pool.queue.append(lambda: (poison(), True)[1])
            else:  # nothing can take it before that stream is current again
                self._left.add(offset)
        elif (graph := pool.graph()) is not None and graph.capturing:
            graph.nodes.append(poison)
        else:
            return  # it stays the graph's
        self.memory.give(pool, offset, size)

    def _freed_pinned(self, pool: None, offset: int, size: int) -> None:
        if not self._in_use.get(offset):
            self.pinned.poison(offset, size)
        if offset in self._in_use:
            self._freed_in_use[offset] = size
        else:
            self.pinned.give(None, offset, size)

    def check_table(self, kind: str, rows: int, chunk_tensor: int, tensors: int, chunks: int) -> None:
        """Refuse a launch whose table no longer exists."""
        table = self.memory.numbers(rows, (2 + ADDRESS_ROWS[kind]) * tensors, np.int64).reshape(-1, tensors)
        owners = self.memory.numbers(chunk_tensor, chunks, np.int32) if chunks else np.zeros(0, np.int32)
        known = (owners >= 0) & (owners < tensors)
        assert known.all(), f"{kind}: chunk {int((~known).argmax())} of the table belongs to no tensor"
        for address in table[2:][:, table[0] != 0].ravel().tolist():
            assert address == 0 or address in self.memory, f"{kind}: the table holds {address:#x}, which is no address"
        assert (table[0] < len(self.memory._bytes)).all(), f"{kind}: the table holds no sizes"

    # --------------------------------------------------------------------------------------------------- operations

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of ATen."""
        tensors = list(_tensors(itertools.chain(args, kwargs.values())))
        packet = func.overloadpacket
        if not any(map(self.is_here, tensors)) or packet in OF_THE_HOST:
            return func(*args, **kwargs)
        if packet is aten.copy_:
            return self._copy(*args, **kwargs)
        if packet in TELLING or (packet is aten.index and any(t.dtype == torch.bool for t in tensors[1:])):
            self.blocks(str(packet), [self.current])
            return tree_map_only(torch.Tensor, self._filled, func(*args, **kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = self._operand(packet, leaf)
        aliases, options = tree_unflatten(leaves, spec)
        if func._schema.is_mutable:
            self.current.push(partial(_run, func, aliases, options, ()))
            return _written(func, args, kwargs)
        if packet in INDEXING:
            args = tree_map_only(torch.Tensor, lambda t: t if t.is_floating_point() else torch.zeros_like(t), args)
        results = func(*args, **kwargs)
        found, shape = tree_flatten(results)
        made = [one if not isinstance(one, torch.Tensor) or self.is_here(one) else self.new(one) for one in found]
        fresh = [self.alias(new) for new, one in zip(made, found, strict=True) if new is not one]
        if fresh and packet not in EMPTY:
            self.current.push(partial(_run, func, aliases, options, fresh))
        return tree_unflatten(made, shape)

    def _operand(self, packet: Any, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_here(tensor):
            return self.alias(tensor)
        if packet in (aten.index, aten.index_put_, aten._index_put_impl_):
            self._pageable("an index from the host")
            self.blocks("an index from the host", [self.current])
        elif tensor.dim():
            raise RuntimeError(f"{packet}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        return tensor.clone()

    def _pageable(self, what: str) -> None:
        for graph in self.captures():
            graph.fail(f"a copy from pageable memory is captured: {what}")
        self.pageable.append(what)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        here, there = self.is_here(target), self.is_here(source)
        if here and there:
            self.current.push(partial(self.alias(target).copy_, self.alias(source)))
            return target
        host = source if here else target
        what = f"a copy {'to' if here else 'from'} the device"
        if not self.pinned.holds(host):
            self._pageable(what)
            if here:
                self.current.push(partial(self.alias(target).copy_, source.clone()))
            if not here or not non_blocking:
                self.blocks(what, [self.current])
            if not here:
                target.copy_(source)
            return target
        block = host.untyped_storage().data_ptr() - self.pinned.start
        copy = partial(self.alias(target).copy_, self.alias(source))
        if self.current.graph is not None:
            self.current.push(copy)  # no stream waits for a replay
        else:
            self._in_use[block] = self._in_use.get(block, 0) + 1

            def work() -> None:
                copy()
                self._in_use[block] -= 1
                if not self._in_use[block] and block in self._freed_in_use:
                    self.pinned.poison(block, self._freed_in_use[block])

            self.current.push(work)
        if not non_blocking:
            self.blocks(what, [self.current])
        return target

    # ------------------------------------------------------------------------------------------------ Python's calls

    def make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function with a device or pinned memory as an argument, whose result depends on no elements."""
        options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        device = kwargs.get("device")
        with _disable_current_modes():
            result = func(*args, **options, **({} if device is None else {"device": _host(device)}))
        if kwargs.get("pin_memory"):
            return self.new_pinned(result)
        if device is None or torch.device(device).type != "cuda":
            return result
        if func in (torch.tensor, torch.as_tensor):
            return self._to(func, result, DEVICE)
        empty = "empty" in func.__name__
        return self.new(result) if empty else self._filled(result)

    def _filled(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, filled with numbers from the arguments of a launch."""
        made = self.new(host)
        self.current.push(partial(self.alias(made).copy_, host))
        return made

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = kwargs.pop("copy", False)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        with _disable_current_modes():
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            device = DEVICE if self.is_here(args[0]) else torch.device("cpu")
        here = self.is_here(tensor)
        there = here if device is None else device.type == "cuda"
        options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
        if here == there or tensor.is_meta or (device is not None and device.type == "meta"):
            if device is not None and device.type == "meta":
                options["device"] = device
            return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, **options)
        with _disable_current_modes():
            like = torch.empty_like(tensor, dtype=dtype or tensor.dtype)
            target = self.new(like) if there else self.new_pinned(like) if non_blocking else like
        return target.copy_(tensor, non_blocking=non_blocking)


def _run_at_once(pool: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    """`ThreadPoolExecutor.submit` without a thread, in which no mode would be active."""
    future: Future[Any] = Future()
    try:
        future.set_result(call(*arguments, **options))
    except Exception as error:
        future.set_exception(error)
    return future


def _forget() -> None:
    """Clear the caches of the kernels, whose tensors are in the memory of one model."""
    for module in (cast, statistics, unscale):
        for cache in module._tables.values():
            cache._tables.clear()


def _host(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device("cpu") if device.type == "cuda" else device


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _run(func: Any, args: Any, kwargs: Any, into: Any) -> None:
    results = func(*args, **kwargs)
    if into:
        found = [one for one in tree_flatten(results)[0] if isinstance(one, torch.Tensor)]
        for target, value in zip(into, found, strict=True):
            target.copy_(value)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation that writes into its arguments: these arguments."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written.append(given)
    returned = len(func._schema.returns)
    return None if not returned else written[0] if returned == 1 else tuple(written[:returned])
