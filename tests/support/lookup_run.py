"""Run a lookup command in this process and return its output."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from lookup_schema import wrong_with

from halfstep.__main__ import main

# The same examples each time, however busy the machine is.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
PLAIN = {"COLUMNS": "160"}
_COLOURS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR", "LC_ALL", "LC_CTYPE", "LANG", "COLUMNS")


@contextlib.contextmanager
def surroundings(**variables: str) -> Iterator[None]:
    """An environment without variables that change the output, except `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        yield


class Stream(io.TextIOWrapper):
    """A stream with an encoding, which may claim to be a terminal."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.encoding)


def said(*words: str, encoding: str = "utf-8", terminal: bool = False, **variables: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ``halfstep`` with these arguments."""
    out, errors = Stream(encoding, terminal), io.StringIO()
    with surroundings(**{**PLAIN, **variables}), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(words)
    return status, out.text(), errors.getvalue()


def lines(*words: str, **more: Any) -> list[str]:
    """The lines that a command printed. It must succeed."""
    status, out, errors = said(*words, **more)
    assert (status, errors) == (0, ""), errors
    return out.splitlines()


def results(*words: str) -> list[dict[str, Any]]:
    """The results in the JSON of a command, which must be as documented."""
    status, out, errors = said(words[0], "--json", *words[1:])
    assert (status, errors) == (0, ""), errors

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    answer = json.loads(out, parse_constant=refuse)
    assert wrong_with(answer) == []
    found: list[dict[str, Any]] = answer["results"]
    return found


def complaint(*words: str) -> str:
    """The error of a command that must fail."""
    status, out, errors = said(*words)
    assert (status, out) == (2, ""), (status, out)
    assert errors.count("\n") == 1
    return errors.strip()
