"""How results are shown to people: as texts and pictures that `halfstep.cli` makes.

Imports point one way, so a result does not know the module that shows it. ``halfstep/__init__.py``, which knows every
layer, names it in `module`.
"""

from __future__ import annotations

import importlib
from typing import Any

module = ""  # dotted name of the module that has the functions


def shown(function: str, *arguments: Any) -> Any:
    """What a function of the presenting module, imported on first use, makes of the arguments."""
    return getattr(importlib.import_module(module), function)(*arguments)
