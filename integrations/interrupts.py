"""Delay signals while an operation must not be interrupted, and deliver them at safe points.

Python may run a signal handler between any two bytecodes of the main thread: inside a callback from C++, where an
exception aborts the process; between two collectives, which makes the other ranks wait forever; or in a destructor,
which ignores the exception. Inside `held`, signals are only recorded. `poll` and the end of `held` deliver them by
calling the previous handlers, which may raise KeyboardInterrupt or another exception.

`apply` of optim/step_plan.py runs prepared calls, such as a step over tensors of two dtypes, without a bytecode in
between.
"""

from __future__ import annotations

import _signal  # `signal` wraps it with enums, which take longer than a launch
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

# The signals that a step delays. Replacing the handlers of all signals would take longer than a launch.
USUAL = [getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name)]

# The handlers that `held` has replaced, and the signals received since. Only the main thread runs handlers.
_previous: dict[int, Callable[..., Any]] = {}
_noted: list[int] = []


def _note_signal(number: int, frame: Any) -> None:
    _noted.append(number)


def poll() -> None:
    """Deliver the signals received since `held` was entered. Their handlers may raise."""
    if not _noted or threading.current_thread() is not threading.main_thread():
        return
    while _noted:
        number = _noted.pop(0)
        if number in _previous:
            _previous[number](number, sys._getframe())


@contextmanager
def held(numbers: Collection[int] | None = None) -> Iterator[None]:
    """Delay all or some signals that have a Python handler until `poll` or the end of the block.

    It has no effect when nested, or outside the main thread.
    """
    if _previous or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[..., Any]] = {}
    try:
        for number in signal.valid_signals() if numbers is None else numbers:
            handler = _signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                _signal.signal(number, _note_signal)
        _previous.update(before)
        yield
    finally:
        _restore_handlers(before)


def _restore_handlers(before: dict[int, Callable[..., Any]]) -> None:
    raised: BaseException | None = None
    while True:
        try:  # a handler may raise as soon as it is restored, before the others are
            for number, handler in before.items():
                _signal.signal(number, handler)
            _previous.clear()
            break
        except BaseException as error:
            raised = raised or error
    while _noted:
        number = _noted.pop(0)
        before[number](number, sys._getframe())
    if raised is not None:
        raise raised
