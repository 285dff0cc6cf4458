"""The text of an error, for tests that check it."""

from collections.abc import Callable
from typing import Any

import pytest


def error_of(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error of class `kind` that `call` must raise."""
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def refuses(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Check that `call` raises an error with this text in it."""
    message = error_of(kind, call)
    assert text in message, message
