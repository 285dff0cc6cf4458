"""A sequence of calls that Ctrl-C does not divide.

What belongs together (a step over the tensors of two dtypes, a checkpoint taken over into state and weights) is first
decided and then applied here. Python raises KeyboardInterrupt between two bytecodes of the main thread. Here there are
none between the calls, and if one of them is a function in Python, SIGINT waits until the last one has returned.

What remains: an exception that a debugger or another thread injects (``PyThreadState_SetAsyncExc``) while a call runs
Python code of its own, as Triton's launches and the reference do, and an error raised by a call itself.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any

_call = partial.__call__


def apply(calls: Sequence[partial[Any]]) -> None:
    """Call one after the other; an interrupt that arrives meanwhile is raised afterwards."""
    python = any(isinstance(call.func, FunctionType) for call in calls)
    handler = signal.getsignal(signal.SIGINT) if python else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        deque(map(_call, calls), maxlen=0)  # a loop in C
        return
    held: list[tuple[Any, ...]] = []
    try:
        signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
        deque(map(_call, calls), maxlen=0)
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
