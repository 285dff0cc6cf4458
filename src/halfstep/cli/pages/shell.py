"""The command line that a page shows and copies, and that must run nothing but its command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def command_line(command: str, options: Iterable[tuple[str, str]]) -> str:
    """A command with options, by their names without ``--``; an empty text is an option without a value.

    The texts come from the address of the page, that is from whoever wrote the link. Characters that cannot be printed
    are left out, since they could end a paste into a terminal. A value that begins with "-" stays the value of its
    option.
    """
    words = [command]
    for name, text in options:
        value = "".join(filter(str.isprintable, text))
        if value.startswith("-"):
            words.append(shlex.quote(f"--{name}={value}"))
        else:
            words.append(f"--{name} {shlex.quote(value)}" if value else f"--{name}")
    return " ".join(words)
