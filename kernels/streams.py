"""Rules for streams and CUDA graphs in host code, and transfers between the host and devices.

**A graph owns its tables.** Captured work runs in each replay. Between replays there are eager calls, other captures,
and memory that the caller frees. Therefore:

1. A capture does not read what eager calls store for later calls (tables, buffers, verdicts), and does not change what
   they know: that something "was copied" is stored where the copy runs, never where it is captured.
2. What captured work needs in addition to the tensors it processes is allocated during the capture, in the memory of
   the graph, and filled by captured copies or launches. Eager calls never use it.
3. Captured copies read pinned memory that is not written again and that is kept alive as long as the graph (`upload`).
4. Eager calls and graphs share the state of training (parameters, moments, step counts, the scale). It exists before a
   capture, and after a capture it is written in place.

**A table belongs to one stream.** What is kept from call to call is written and read on one stream, since two streams
may call the same function at the same time.

**The host does not wait.** Numbers are transferred through pinned memory (`upload`). An index is a tensor on the device
or a slice, never a list, which would be copied from memory that is not pinned.

**The host waits for what it reads.** ``tensor.to("cpu", non_blocking=True)`` returns before the numbers have arrived,
and work on the CPU would read whatever was there before. Therefore only this module uses ``non_blocking``: copies to a
GPU are asynchronous, copies to the CPU have ended when they are returned (`to_device`, `all_to_device`) or are read
after their event (`HostCopy`, `on_device`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

_Number = TypeVar("_Number", torch.Tensor, torch.Tensor | None)

# The memory that captured copies read: by graph, or forever if torch does not say which graph is captured.
_of_graphs: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
_for_good: list[torch.Tensor] = []


def capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int | None:
    """A number that identifies the current stream of `device`: 0 for devices without streams, None during a capture,
    which must not use the tables of the stream."""
    if device.type != "cuda":
        return 0
    # torch.cuda.current_stream makes an object, which takes longer than all else that is looked up for a table.
    number: int = torch._C._cuda_getCurrentRawStream(device.index)
    return None if capturing(device) else number


def upload(numbers: torch.Tensor, device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor from the host to a device. On a GPU, the host does not wait.

    The copy goes through pinned memory, in the current stream. During a capture it becomes part of the graph, and the
    pinned memory lives as long as the graph, or as long as the process if this version of torch does not tell which
    graph is captured (``CUDAGraph.get_currently_capturing_graph``).

    Args:
        numbers: a tensor on the CPU that is not written later.
        out: a tensor on the device to write to, of the same shape and dtype. Default: a new one; on the CPU, `numbers`.
    """
    if device.type != "cuda":
        return numbers.to(device) if out is None else out.copy_(numbers)
    pinned = numbers.pin_memory()
    if capturing(device):
        _keep(pinned)
    if out is None:
        out = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
    return out.copy_(pinned, non_blocking=True)


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor.to(device, dtype)``. The host waits only for a copy to the CPU, which it is going to read."""
    return tensor.to(device=device, dtype=dtype, non_blocking=device.type == "cuda")


def all_to_device(
    tensors: Sequence[_Number], device: torch.device, dtypes: Sequence[torch.dtype] | None = None
) -> list[_Number]:
    """`to_device` for several tensors; None stays None. The host waits once for all that come from a GPU to the CPU."""
    moved = list(tensors)
    awaited: set[torch.device] = set()
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        dtype = tensor.dtype if dtypes is None else dtypes[index]
        if device.type == "cpu" and tensor.device.type == "cuda":
            moved[index] = tensor.to(device, dtype, non_blocking=True)
            awaited.add(tensor.device)
        elif tensor.device != device or tensor.dtype is not dtype:
            moved[index] = to_device(tensor, device, dtype)
    for source in awaited:
        torch.cuda.current_stream(source).synchronize()
    return moved


class Waiting(partial[Any]):
    """A call that waits for a device. The host may do other work before it."""


def on_device(
    call: Callable[[], object], host: torch.Tensor, memory: torch.Tensor
) -> tuple[partial[Any], partial[Any]]:
    """Two calls: one that copies pinned memory to that of a device, makes a call that writes there, and copies it back,
    on the current stream; and one that waits for all of it."""
    ended = torch.cuda.Event()

    def begin() -> None:
        memory.copy_(host, non_blocking=True)
        call()
        host.copy_(memory, non_blocking=True)
        ended.record(torch.cuda.current_stream(memory.device))

    return partial(begin), Waiting(ended.synchronize)


def _keep(pinned: torch.Tensor) -> None:
    """Hold memory as long as the graph that is being captured."""
    try:
        graph = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", lambda: None)()
    except RuntimeError:  # the capture was not begun by torch
        graph = None
    # The caller's own object, and none that is made for the answer and gone after it.
    if isinstance(graph, torch.cuda.CUDAGraph):
        _of_graphs.setdefault(graph, []).append(pinned)
    else:
        _for_good.append(pinned)


class HostCopy:
    """Asynchronous copies of some numbers to the host.

    On a CPU the tensor itself is read. On a GPU, copies start with the first call of `newest`. From then on each `take`
    queues a copy into pinned memory after the work that computes the numbers, and `newest` returns the last copy that
    has arrived. During the capture of a CUDA graph both do nothing, since a query of an event would end the capture.
    """

    SLOTS = 4  # largest number of copies under way; further ones are left out

    def __init__(self) -> None:
        self._asked = False
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self._known: torch.Tensor | None = None

    def take(self, numbers: torch.Tensor) -> None:
        """Queue a copy of `numbers`, of the same shape and dtype each time, as of this point of the current stream."""
        if numbers.device.type == "cpu" or not self._asked or capturing(numbers.device):
            return
        self._look()
        if not self._free:
            if len(self._under_way) == self.SLOTS:
                return
            memory = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._free.append((torch.cuda.Event(), memory))
        event, memory = self._free.pop()
        with torch.cuda.device(numbers.device):
            memory.copy_(numbers, non_blocking=True)
            event.record()
        self._under_way.append((event, memory))

    def _look(self) -> None:
        while self._under_way and self._under_way[0][0].query():
            event, memory = self._under_way.popleft()
            self._known = memory.clone()
            self._free.append((event, memory))

    def newest(self, numbers: torch.Tensor, wait: bool = False) -> torch.Tensor | None:
        """The newest values that have arrived. If there are none yet: None or, with `wait`, the present ones."""
        if numbers.device.type == "cpu":
            return numbers
        self._asked = True
        if not capturing(numbers.device):
            self._look()
            if self._known is None and wait:
                self._known = numbers.cpu()
        return self._known
