"""Modules that list what to measure or to audit, from ``--module``."""

from __future__ import annotations

import importlib
from typing import Any

from halfstep.cli.command_line import UsageError


def listed(module: str, function: str, *arguments: object) -> list[Any]:
    """What the function of a module lists.

    Args:
        module: the dotted name of a module on Python's path.
        function: the name of its function, for example ``"variants"``.
        arguments: those of the function.

    Raises:
        UsageError: there is no such module or function, or the list is empty.
    """
    try:
        items = list(getattr(importlib.import_module(module), function)(*arguments))
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected --module to be a module on Python's path, by dotted name, but got {module}: {error}"
        ) from error
    except AttributeError as error:
        raise UsageError(f"--module {module}: {error}; it needs a function {function}()") from error
    if not items:
        raise UsageError(f"--module {module}: its {function}() lists nothing")
    return items
