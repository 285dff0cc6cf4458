"""Ctrl-C ends a command in one line, with status 130, and not with a traceback.

``halfstep.__main__`` imports this first. While a command runs, Ctrl-C is an exception, as always in Python: files are
closed and temporary ones removed. In an import it is none, since torch's C++ would swallow it, and neither before nor
after the command: there it ends the process at once.
"""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType


def interrupted() -> int:
    """Say that the command was interrupted. Returns its exit status."""
    print("halfstep: interrupted", file=sys.stderr, flush=True)
    return 130


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        os._exit(interrupted())
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _uncaught


def end(number: int, frame: FrameType | None) -> None:
    """A handler of signals: end the process at once."""
    os._exit(interrupted())


def end_or_raise(number: int, frame: FrameType | None) -> None:
    """A handler of signals: as `end` in an import, and otherwise an exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            end(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def handle_interrupts(before: object, handler: object) -> None:
    """Handle Ctrl-C by `handler`, unless it is not handled as `before`: ignored, where the process was started so."""
    import signal

    if signal.getsignal(signal.SIGINT) is (before or signal.default_int_handler):
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
