"""Signals kept back while something must not be left half done, and delivered at moments that suit.

Python runs a signal's handler between any two bytecodes of the main thread: also inside a callback from C++, which an
exception ends with an abort, between two collectives, after which the other ranks wait in vain, and in a destructor,
which swallows the exception. Inside `held` a signal is only noted. `poll` delivers what was noted, and so does the end
of `held`: the handlers that were there before are called, and raise KeyboardInterrupt or whatever they raise.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of the main thread, the only one that runs handlers: those that `held` has taken the place of, and what came since.
_previous: dict[int, Callable[..., Any]] = {}
_noted: list[int] = []


def _note(number: int, frame: Any) -> None:
    _noted.append(number)


def poll() -> None:
    """Deliver the signals that came since `held` began; from here their handlers may raise."""
    if not _noted or threading.current_thread() is not threading.main_thread():
        return
    while _noted:
        number = _noted.pop(0)
        if number in _previous:
            _previous[number](number, sys._getframe())


@contextmanager
def held() -> Iterator[None]:
    """Keep back all signals with a handler in Python until `poll` or the end; inside itself, or in threads, nothing."""
    if _previous or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[..., Any]] = {}
    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, _note)
        _previous.update(before)
        yield
    finally:
        _give_back(before)


def _give_back(before: dict[int, Callable[..., Any]]) -> None:
    raised: BaseException | None = None
    while True:
        try:  # a handler that is back may raise before the last one is
            for number, handler in before.items():
                signal.signal(number, handler)
            _previous.clear()
            break
        except BaseException as error:
            raised = raised or error
    while _noted:
        number = _noted.pop(0)
        before[number](number, sys._getframe())
    if raised is not None:
        raise raised
