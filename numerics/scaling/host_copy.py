"""Copies of numbers on the device, which the host reads without waiting."""

from __future__ import annotations

from collections import deque

import torch

from halfstep.kernels.streams import capturing, download


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
        download(numbers, memory, event)
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
