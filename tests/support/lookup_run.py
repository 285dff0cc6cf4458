"""Run a command of the lookup in this process, and read what it said."""

from __future__ import annotations

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
    """An environment without what changes the output, but for `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        yield


class Stream(io.TextIOWrapper):
    """A stream of some encoding that is, or is not, a terminal."""

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
    """Exit status, standard output and standard error of ``halfstep`` and these words."""
    out, errors = Stream(encoding, terminal), io.StringIO()
    with surroundings(**{**PLAIN, **variables}), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(words)
    return status, out.text(), errors.getvalue()


def lines(*words: str, **more: Any) -> list[str]:
    """What a command printed, line by line, if all went well."""
    status, out, errors = said(*words, **more)
    assert (status, errors) == (0, ""), errors
    return out.splitlines()


def results(*words: str) -> list[dict[str, Any]]:
    """The results in a command's JSON, which is as documented."""
    status, out, errors = said(words[0], "--json", *words[1:])
    assert (status, errors) == (0, ""), errors

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    answer = json.loads(out, parse_constant=refuse)
    assert wrong_with(answer) == []
    found: list[dict[str, Any]] = answer["results"]
    return found


def complaint(*words: str) -> str:
    """What a command said on standard error when it refused."""
    status, out, errors = said(*words)
    assert (status, out) == (2, ""), (status, out)
    assert errors.count("\n") == 1
    return errors.strip()
