"""Streams, events and graphs of the model of a GPU (stream_model.py): recorded work, and its allowed orders."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

DEVICE = torch.device("cuda", 0)


class Ticket:
    """One recording of an event."""

    def __init__(self, stream: Stream, graph: Graph | None) -> None:
        self.stream, self.graph, self.done = stream, graph, False


class Stream:
    """`torch.cuda.Stream`: work in the order in which it was recorded."""

    def __init__(self, model: Any, number: int) -> None:
        self.model, self.cuda_stream, self.device = model, number, DEVICE
        self.queue: deque[Callable[[], bool]] = deque()
        self.graph: Graph | None = None  # that it is captured into

    def push(self, work: Callable[[], object]) -> None:
        if self.graph is not None:
            self.graph.nodes.append(work)
            return
        self.queue.append(lambda: (work(), True)[1])
        self.model.go_on()

    def advance(self) -> bool:
        """Execute the first work. Returns False if it waits, or if there is none."""
        if not self.queue:
            return False
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            done = self.queue[0]()
        if done:
            self.queue.popleft()
        return done

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.model) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        ticket = event.ticket
        if ticket is None:
            return
        if ticket.graph is not None:
            if self.graph is None and ticket.graph.capturing:
                self.graph = ticket.graph  # it joins the capture
                ticket.graph.streams.append(self)
            return
        if self.graph is not None:
            self.graph.fail("dependency created on uncaptured work in another stream")
        self.queue.append(lambda: ticket.done)
        self.model.go_on()

    def wait_stream(self, other: Stream) -> None:
        if other is not self:
            self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.model.blocks("Stream.synchronize", [self])

    def query(self) -> bool:
        return not self.queue

    def __hash__(self) -> int:
        return self.cuda_stream

    def __eq__(self, other: object) -> bool:
        return self is other


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.ticket: Ticket | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.model.current if stream is None else stream
        self.ticket = ticket = Ticket(stream, stream.graph)
        stream.push(lambda: setattr(ticket, "done", True))

    def wait(self, stream: Stream | None = None) -> None:
        (self.model.current if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        for graph in self.model.captures():
            graph.fail("operation not permitted when stream is capturing: an event is queried")
        return self.ticket is None or self.ticket.done

    def synchronize(self) -> None:
        if self.ticket is not None and not self.ticket.done:
            self.model.blocks("Event.synchronize", [self.ticket.stream], until=self.ticket)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Pool:
    """The memory of a graph. It exists as long as the graph, and does not keep the graph alive."""

    def __init__(self, graph: Graph) -> None:
        self.graph = weakref.ref(graph)


class Graph:
    """`torch.cuda.CUDAGraph`: the captured work, which contains addresses, and its memory."""

    def __init__(self, model: Any, keep_graph: bool = False) -> None:
        self.model = model
        self.nodes: list[Callable[[], object]] = []
        self.streams: list[Stream] = []
        self.capturing, self.failure = False, ""
        self.own = Pool(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        assert self.model.current is not self.model.default, "the default stream cannot be captured"
        self.model.current.graph, self.capturing = self, True
        self.streams = [self.model.current]

    def capture_end(self) -> None:
        for stream in self.streams:
            stream.graph = None
        self.capturing = False
        if self.failure:
            self.nodes.clear()
            raise RuntimeError(f"operation failed due to a previous error during capture: {self.failure}")

    def fail(self, why: str) -> None:
        """Make the capture invalid."""
        self.failure = why
        raise RuntimeError(f"CUDA error: {why}")

    def replay(self) -> None:
        assert self.nodes and not self.capturing, "nothing was captured"
        for node in self.nodes:
            self.model.current.push(node)

    def pool(self) -> Pool:
        return self.own

    def reset(self) -> None:
        self.nodes.clear()
