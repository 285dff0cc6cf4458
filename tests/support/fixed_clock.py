"""A clock for `halfstep.bench.timing` on which calls take given times."""

from collections.abc import Callable, Sequence
from typing import Any

from halfstep.bench.timing import CpuClock


class FixedClock(CpuClock):
    """Calls take given times. The copy, for which none is given, takes one second."""

    def __init__(self, seconds: dict[Any, Sequence[float]]) -> None:
        super().__init__()
        self.taken = {call: list(values) for call, values in seconds.items()}
        self.orders: list[list[Any]] = []

    def seconds(self, call: Callable[[], Any]) -> float:
        return 1.0

    def round(self, calls: Sequence[tuple[Callable[[], Any], int]]) -> list[float]:
        self.orders.append([call for call, _ in calls])
        return [self.taken[call].pop(0) if call in self.taken else 1.0 for call, _ in calls]

    def details(self, call: Callable[[], Any]) -> dict[str, Any]:
        return {}
