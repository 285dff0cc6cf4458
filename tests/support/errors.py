"""The text of an error, for tests that compare it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def error_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error of class `kind` that `call` must raise."""
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)
