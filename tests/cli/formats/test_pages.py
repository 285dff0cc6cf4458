"""The page of the lookup shows what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from lookup_run import said

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = r"\$ halfstep ((?:format|encode|decode|why|compare|ladder) .*)\n"


def shown(page: str) -> list[tuple[str, str]]:
    """Commands of the lookup on a page, and the output beneath each."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        _, *parts = re.split(COMMANDS, block)
        found += list(zip(parts[::2], parts[1::2], strict=True))
    return found


@pytest.mark.parametrize(("command", "output"), shown("docs/lookup.md"))
def test_the_page_shows_what_is_printed(command: str, output: str) -> None:
    status, out, errors = said(*shlex.split(command), COLUMNS="80")
    assert (out + errors).rstrip() == output.rstrip()
    assert status == (2 if errors else 0)


def test_the_page_shows_something() -> None:
    assert len(shown("docs/lookup.md")) >= 4
