"""Text for a terminal, a pipe or a file: colours, width, tables, and the characters that the output can show.

No third-party library is used, since importing one would take longer than the rest of a lookup.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from halfstep.numerics.messages import printable

PIPE_WIDTH = 160  # columns of an output that is not a terminal, which breaks no lines

# SGR parameters by meaning, from the sixteen colours that every theme has.
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

# Replacements for characters that cannot be shown. Those used in tables and pictures take one column too.
_ASCII = str.maketrans(
    {"─": "-", "├": "|", "┤": "|", "┼": "+", "▲": "^", "●": "o", "≈": "~", "≤": "<=", "≥": ">=", "→": "->", "±": "+-"}
)
RULE: tuple[str, ...] = ()  # a row of a table that is drawn as a horizontal line
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_COLOUR = re.compile(rf"(\x1b\[(?:0|{'|'.join(STYLES.values())})m)")


class Terminal(NamedTuple):
    """The capabilities of a stream.

    Attributes:
        width: number of columns.
        colour: whether to write escape codes.
        unicode: whether lines and arrows can be shown; otherwise they are replaced by ASCII.
    """

    width: int = PIPE_WIDTH
    colour: bool = False
    unicode: bool = True

    def paint(self, text: str, style: str) -> str:
        """`text` in a style of `STYLES`, line by line, if colours are wanted."""
        if not self.colour:
            return text
        return "\n".join(f"\x1b[{STYLES[style]}m{line}\x1b[0m" if line else line for line in text.split("\n"))

    def show(self, lines: Sequence[str], stream: TextIO) -> None:
        """Write lines. Characters that cannot be printed or that the stream's encoding does not have are escaped.

        Lines hold text of others, such as names of files and tensors: of escape codes, only colours reach the terminal.
        """
        text = "\n".join(self._safe(line.rstrip()) for line in lines) + "\n"
        if not self.unicode:
            text = text.translate(_ASCII)
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()

    def _safe(self, line: str) -> str:
        parts = _COLOUR.split(line) if self.colour else [line]
        return "".join(part if place % 2 else printable(part) for place, part in enumerate(parts))

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """Break a paragraph into lines of at most the width; `indent` precedes every line but the first."""
        lines, line = [], ""
        for word in text.split():
            joined = f"{line} {word}" if line.strip() else line + word
            if visible(joined) > self.width and line.strip():
                lines.append(line)
                joined = indent + word
            line = joined
        return [*lines, line]

    def title(self, text: str) -> list[str]:
        """The lines above a table: a paragraph in bold type and an empty line."""
        return [*(self.paint(line, "strong") for line in self.wrap(text)), ""]


def say(text: str, stream: TextIO | None = None) -> None:
    """Write one line as `Terminal.show` does, to standard output if `stream` is None."""
    stream = sys.stdout if stream is None else stream
    terminal(stream).show([text], stream)


def visible(text: str) -> int:
    """The number of columns that `text` takes. Escape codes take none."""
    return len(_ESCAPE.sub("", text))


def pad(text: str, width: int, right: bool = False) -> str:
    """`text` filled with spaces to a width, on the left if `right`."""
    space = " " * (width - visible(text))
    return space + text if right else text + space


def _lines_of(row: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: str) -> list[str]:
    """The lines of one row of a table, of whose cells each may have several; a rule for the row `RULE`."""
    if not row:
        return ["─" * (sum(widths) + len(gap) * (len(widths) - 1))]
    cells = [cell.split("\n") for cell in row]
    height = max(map(len, cells))
    return [
        gap.join(
            pad(cell[number] if number < len(cell) else "", width, at_right)
            for cell, width, at_right in zip(cells, widths, right, strict=True)
        ).rstrip()
        for number in range(height)
    ]


def _width_of(cell: str) -> int:
    return max(map(visible, cell.split("\n")))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], gap: str = "  ") -> list[str]:
    """The lines of a table with aligned columns.

    Args:
        header: the names of the columns. As in all cells, a line break starts another line of the same cell.
        rows: the cells of each row, or `RULE` for a horizontal line.
        right: for each column, whether it is aligned to the right.
        gap: text between two columns.
    """
    every = (header, *rows)
    widths = [max(_width_of(row[column]) for row in every if row) for column in range(len(header))]
    return [line for row in every for line in _lines_of(row, widths, right, gap)]


def fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[bool],
    width: int,
    gap: str = "  ",
    folds: bool = False,
) -> list[str]:
    """The lines of a table in at most `width` columns of the screen.

    A table that is too wide becomes several tables one below the other, each with the first column.

    Args:
        header, rows, right, gap: see `table`.
        width: columns of the screen.
        folds: whether cells of the last column may be broken between words.
    """
    every = (header, *rows)
    least = [max(_width_of(row[column]) for row in every if row) for column in range(len(header))]
    if folds:
        least[-1] = max((len(word) for row in every if row for word in row[-1].split()), default=0)
    last, taken = min(2, len(header)), sum(least[:2]) + len(gap)
    while last < len(header) and taken + len(gap) + least[last] <= width:
        taken += len(gap) + least[last]
        last += 1
    if last == len(header):
        if folds:
            room = Terminal(max(width - (taken - least[-1]), least[-1]))
            every = tuple([*row[:-1], "\n".join(room.wrap(row[-1]))] if row else row for row in every)
        return table(every[0], every[1:], right, gap)
    rest = [0, *range(last, len(header))]
    beneath = [[row[place] for place in rest] if row else RULE for row in every]
    return [
        *table(header[:last], [row[:last] for row in rows], right[:last], gap),
        "",
        *fitted(beneath[0], beneath[1:], [right[place] for place in rest], width, gap, folds),
    ]


def ruled(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], screen: Terminal, folds: bool = False
) -> list[str]:
    """The lines of a table that fits the screen, with a rule below its header."""
    return fitted([screen.paint(name, "strong") for name in header], [RULE, *rows], right, screen.width, folds=folds)


class Progress:
    """One line on standard error that shows how far work has come. It is shown on terminals only.

    Args:
        total: units of work.
        patience: seconds before the line appears for the first time.
        stream: where the line is written.
    """

    BAR = 20  # columns

    def __init__(self, total: float, patience: float = 0.0, stream: TextIO | None = None) -> None:
        self.total = total
        self.done = 0.0
        self.text = ""
        self._stream = sys.stderr if stream is None else stream
        self._screen = terminal(self._stream)
        self._start = time.monotonic()
        self._appears = self._start + patience
        self._visible = False

    def __enter__(self) -> Progress:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, done: float | None = None, text: str | None = None) -> None:
        """Update the line, with another number of completed units and another text if they are given."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else text
        now = time.monotonic()
        if not self._stream.isatty() or now < self._appears:
            return
        share = min(1.0, self.done / self.total) if self.total else 0.0
        filled = int(self.BAR * share)
        left = f"{(now - self._start) * (1 / share - 1):,.0f} s left" if 0 < share < 1 else ""
        line = f"{'#' * filled}{'.' * (self.BAR - filled)} {share:4.0%}  {self.text}  {left}"
        self._stream.write(f"\r{line[: self._screen.width - 1]}\x1b[K")
        self._stream.flush()
        self._visible = True

    def clear(self) -> None:
        """Remove the line. The next `show` writes it again."""
        if self._visible:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._visible = False


def _set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _colour(stream: TextIO) -> bool:
    """Whether to write colours: https://no-color.org first, then variables that force colours, then the stream."""
    if os.environ.get("NO_COLOR"):
        return False
    if _set("FORCE_COLOR") or _set("CLICOLOR_FORCE"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb" and os.environ.get("CLICOLOR") != "0"


def _unicode(stream: TextIO) -> bool:
    """Whether lines can be drawn: the encoding has them, and the locale is not the plain C locale."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    if locale in ("C", "POSIX"):  # Python writes UTF-8 even then (PEP 540), but the terminal may not read it
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
    """The capabilities of `stream` (standard output if None), from the environment."""
    stream = sys.stdout if stream is None else stream
    return Terminal(_width(stream), _colour(stream), _unicode(stream))
