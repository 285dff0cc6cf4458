"""Ctrl-C ends a command in one line, with status 130, and not with a traceback.

``halfstep.__main__`` imports this first. While a command runs, Ctrl-C is an exception, as always in Python: files are
closed and temporary ones removed. Before and after it is none: torch's C++ would swallow it in the middle of an import.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType


def interrupted() -> int:
    """Say that the command was interrupted. Returns its exit status."""
    print("halfstep: interrupted", file=sys.stderr, flush=True)
    return 130


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os._exit(interrupted())
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _uncaught


def _end(number: int, frame: object) -> None:
    os._exit(interrupted())


def end_at_once() -> None:
    """From now on, Ctrl-C ends the process at once. It stays ignored where the process was started so."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """From now on, Ctrl-C is an exception again."""
    import signal

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Importing:
    """For imports while a command runs: Ctrl-C ends the process at once. In a thread of a server it changes nothing."""

    def __enter__(self) -> None:
        with suppress(ValueError):  # signals belong to the main thread
            end_at_once()

    def __exit__(self, *error: object) -> None:
        with suppress(ValueError):
            raise_again()
