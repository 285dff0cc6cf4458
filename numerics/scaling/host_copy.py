"""Copies of numbers on the device, which the host reads without waiting."""

from __future__ import annotations

from collections import deque

import torch

from halfstep.kernels.streams import capturing, download


class HostCopy:
    """Asynchronous copies of a few integers to the host.

    On a CPU the tensor itself is read. On a GPU, copies start with the first call of `newest`. From then on each `take`
    queues a copy into pinned memory after the work that computes the numbers, and `newest` returns the last copy that
    has arrived. During the capture of a CUDA graph both do nothing, since a query of an event would end the capture.
    """

    SLOTS = 4  # largest number of copies under way; further ones are left out

    def __init__(self) -> None:
        self._asked = False
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self._known: list[int] | None = None

    def take(self, numbers: torch.Tensor) -> None:
        """Queue a copy of `numbers` (int64, 1-dim) as of this point of the current stream."""
        if numbers.device.type == "cpu" or not self._asked or capturing(numbers.device):
            return
        self._look()
        if not self._free:
            if len(self._under_way) == self.SLOTS:
                return
            place = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._free.append((torch.cuda.Event(), place))
        event, place = self._free.pop()
        download(numbers, place, event)
        self._under_way.append((event, place))

    def _look(self) -> None:
        while self._under_way and self._under_way[0][0].query():
            event, place = self._under_way.popleft()
            self._known = place.tolist()
            self._free.append((event, place))

    def newest(self, numbers: torch.Tensor) -> list[int] | None:
        """The newest values that have arrived; None if there are none yet."""
        if numbers.device.type == "cpu":
            known: list[int] = numbers.tolist()
            return known
        self._asked = True
        if not capturing(numbers.device):
            self._look()
        return self._known
