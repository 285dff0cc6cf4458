"""Ctrl-C ends a command in one line, with status 130, from here on: also while modules are imported.

``halfstep.__main__`` imports this first. Inside `main`, which closes files and flushes output, Ctrl-C is an exception.
"""

from __future__ import annotations

import os
import sys
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
