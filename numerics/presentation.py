"""Texts and pictures of results, which `halfstep.cli` makes.

This layer must not import `halfstep.cli`, so ``halfstep/__init__.py``, which may import every layer, stores the name of
the presenting module in `module`.
"""

from __future__ import annotations

import importlib
from typing import Any

module = ""  # dotted name of the module that has the functions


def shown(function: str, *arguments: Any) -> Any:
    """The result of a function of the presenting module, which is imported at its first use."""
    return getattr(importlib.import_module(module), function)(*arguments)
