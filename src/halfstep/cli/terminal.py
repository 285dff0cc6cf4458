"""Text for a terminal, a pipe or a file: colour, width, and characters the output can show.

No library for this: importing one costs more than everything else an answer takes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

PIPE_WIDTH = 160  # columns of what is no terminal: nothing there folds, so a table may be as wide as it likes

# SGR parameters by meaning, of the sixteen colours every theme has.
STYLES = {
    "sign": "31",
    "exponent": "32",
    "mantissa": "36",
    "good": "32",
    "note": "33",
    "bad": "31",
    "strong": "1",
    "faint": "2",
}

# What stands for a character where it cannot be shown; of one column each where columns matter.
_ASCII = str.maketrans(
    {"─": "-", "├": "|", "┤": "|", "┼": "+", "▲": "^", "●": "o", "≈": "~", "≤": "<=", "≥": ">=", "→": "->", "±": "+-"}
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(NamedTuple):
    """What a stream can show.

    Attributes:
        width: columns.
        colour: whether escape codes are wanted.
        unicode: whether lines and arrows can be shown; ASCII stands for them otherwise.
    """

    width: int = PIPE_WIDTH
    colour: bool = False
    unicode: bool = True

    def paint(self, text: str, style: str) -> str:
        """`text` in a style of `STYLES`, if colours are wanted."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self.colour and text else text

    def show(self, lines: Sequence[str], stream: TextIO) -> None:
        """Write lines, with what the stream's encoding has no character for replaced."""
        text = "\n".join(line.rstrip() for line in lines) + "\n"
        if not self.unicode:
            text = text.translate(_ASCII)
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """A paragraph, folded at the width; `indent` goes before every line but the first."""
        lines, line = [], ""
        for word in text.split():
            joined = f"{line} {word}" if line.strip() else line + word
            if visible(joined) > self.width and line.strip():
                lines.append(line)
                joined = indent + word
            line = joined
        return [*lines, line]


def visible(text: str) -> int:
    """Columns that `text` takes, escape codes taking none."""
    return len(_ESCAPE.sub("", text))


def pad(text: str, width: int, right: bool = False) -> str:
    """`text` filled with spaces to a width, on the left if `right`."""
    space = " " * (width - visible(text))
    return space + text if right else text + space


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], gap: str = "  ") -> list[str]:
    """Aligned columns. `right` says for each column whether it is aligned to the right."""
    widths = [max(visible(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        gap.join(pad(cell, width, at_right) for cell, width, at_right in zip(row, widths, right, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int, gap: str = "  "
) -> list[str]:
    """The same in a width: where it is too wide, in several tables beneath one another, the first column in each."""
    whole = table(header, rows, right, gap)
    columns = len(header)
    if columns <= 2 or max(map(visible, whole)) <= width:
        return whole
    last = columns - 1
    while last > 2 and max(map(visible, table(header[:last], [row[:last] for row in rows], right[:last], gap))) > width:
        last -= 1
    rest = [0, *range(last, columns)]
    beneath = ([row[place] for place in rest] for row in (header, *rows))
    return [
        *table(header[:last], [row[:last] for row in rows], right[:last], gap),
        "",
        *fitted(next(beneath), list(beneath), [right[place] for place in rest], width, gap),
    ]


def _set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _colour(stream: TextIO) -> bool:
    """Whether to colour: https://no-color.org first, then what forces colour, then whether someone looks at it."""
    if os.environ.get("NO_COLOR"):
        return False
    if _set("FORCE_COLOR") or _set("CLICOLOR_FORCE"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb" and os.environ.get("CLICOLOR") != "0"


def _unicode(stream: TextIO) -> bool:
    """Whether lines can be drawn: the encoding has them, and the user did not ask for the plain C locale."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    if locale in ("C", "POSIX"):  # Python writes UTF-8 there all the same (PEP 540); the terminal may not read it
        return False
    try:
        "─├▲●≈≤→".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _width(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return PIPE_WIDTH


def terminal(stream: TextIO | None = None) -> Terminal:
    """What `stream` (standard output if None) can show, from the environment."""
    stream = sys.stdout if stream is None else stream
    return Terminal(_width(stream), _colour(stream), _unicode(stream))
