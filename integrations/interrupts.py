"""Signals kept back while something must not be left half done, and delivered at moments that suit.

Python runs a signal's handler between any two bytecodes of the main thread: also inside a callback from C++, which an
exception ends with an abort, between two collectives, after which the other ranks wait in vain, and in a destructor,
which swallows the exception. Inside `held` a signal is only noted. `poll` delivers what was noted, and so does the end
of `held`: the handlers that were there before are called, and raise KeyboardInterrupt or whatever they raise.

`apply` makes calls that belong together (a step over the tensors of two dtypes, a checkpoint taken over into state and
weights), which were decided before: there is no bytecode between them.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

# Those that are kept back in a step, where to look at every signal would take longer than a launch.
_USUAL = [getattr(signal, name) for name in ("SIGINT", "SIGTERM") if hasattr(signal, name)]

# Of the main thread, the only one that runs handlers: those that `held` has taken the place of, and what came since.
_previous: dict[int, Callable[..., Any]] = {}
_noted: list[int] = []


def _note_signal(number: int, frame: Any) -> None:
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
def held(numbers: Collection[int] | None = None) -> Iterator[None]:
    """Keep back signals with a handler in Python until `poll` or the end; inside itself, or in threads, nothing.

    Args:
        numbers: which; None for all.
    """
    if _previous or threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[..., Any]] = {}
    try:
        for number in signal.valid_signals() if numbers is None else numbers:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, _note_signal)
        _previous.update(before)
        yield
    finally:
        _restore_handlers(before)


def _restore_handlers(before: dict[int, Callable[..., Any]]) -> None:
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


def apply(calls: Sequence[partial[Any]]) -> None:
    """Make calls one after the other; an interrupt that arrives meanwhile is raised afterwards.

    Between them runs no Python. If one of them is a function in Python, Ctrl-C and SIGTERM are kept back too. What
    remains are exceptions that a debugger or another thread injects (``PyThreadState_SetAsyncExc``) into such a
    function, as Triton's launches and the reference are, and errors raised by a call itself.
    """
    if any(isinstance(call.func, FunctionType) for call in calls):
        with held(_USUAL):
            deque(map(partial.__call__, calls), maxlen=0)
    else:
        deque(map(partial.__call__, calls), maxlen=0)
