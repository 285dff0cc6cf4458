"""What commands print: rich's texts, tables and progress bars in the width, colours and characters of the output.

Text of others, such as names of files and tensors, passes `text`, which escapes what is not printable; rich never
parses markup. rich is imported when something is shown, so that ``--json`` and ``--version`` do not wait for it.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from halfstep.numerics.messages import printable

if TYPE_CHECKING:
    from rich.text import Text

UNBROKEN = 100_000  # columns of an output that is not a terminal, whose lines are not broken
STYLES = {
    "sign": "red", "exponent": "green", "mantissa": "cyan", "good": "green", "note": "yellow", "bad": "red",
    "strong": "bold", "faint": "dim", "": "",
}  # fmt: skip
# Replacements for characters that cannot be shown. Each takes one column.
_ASCII = str.maketrans(dict(zip("─├┤┼▲●≈÷…", "-||+^o~/~", strict=True)))


def has_colour(stream: TextIO) -> bool:
    """Whether to write colours: https://no-color.org first, then variables that force colours, then the stream."""
    if os.environ.get("NO_COLOR"):
        return False
    if {os.environ.get("FORCE_COLOR", "0"), os.environ.get("CLICOLOR_FORCE", "0")} - {"", "0"}:
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb" and os.environ.get("CLICOLOR") != "0"


def has_lines(stream: TextIO) -> bool:
    """Whether lines can be drawn: the encoding has them, and the locale is not the plain C locale."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if locale in ("C", "POSIX"):  # Python writes UTF-8 even then (PEP 540), but the terminal may not read it
        return False
    try:
        return bool("─├▲●≈".encode(stream.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        return False


def width(stream: TextIO | None = None) -> int:
    """Columns of `stream` (standard output if None): COLUMNS, those of the terminal, or `UNBROKEN`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or 80
    except (OSError, ValueError):
        return UNBROKEN


def text(words: str, style: str = "") -> Text:
    """`words` in a style of `STYLES`. Characters that cannot be printed are escaped."""
    from rich.text import Text

    line = Text(words if words.isprintable() else printable(words))
    line.stylize(STYLES[style])  # unlike a style of the whole text, this leaves out the padding of a cell
    return line


def joined(*parts: str | Text, by: str = "") -> Text:
    """Texts one after the other."""
    return text(by).join([text(part) if isinstance(part, str) else part for part in parts])


class Table:
    """A table without borders, which becomes several below one another where the screen is too narrow for it.

    Args:
        header: the names of the columns, which may have several lines; empty for none.
        rows: the cells of each row. An empty row is a horizontal line.
        right: indices of the columns that are aligned to the right.
        ruled: whether the header is bold and has a line below it.
        wraps: the index of a column whose cells may be broken between words.
    """

    def __init__(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[Any]],  # of str and Text
        right: Iterable[int] = (),
        *,
        ruled: bool = False,
        wraps: int | None = None,
    ) -> None:
        from rich.cells import cell_len

        self.header, self.right, self.ruled, self.wraps = header, set(right), ruled, wraps
        self.rows = [[text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        words = [name.split("\n") for name in header] or [[] for _ in max(self.rows, key=len, default=[None])]
        for row in self.rows:
            for column, cell in enumerate(row):
                words[column] += cell.plain.split() if column == wraps else [cell.plain]
        self.widths = [max(map(cell_len, column), default=0) for column in words]
        self.width = sum(self.widths) + 2 * (len(self.widths) - 1)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        needed, room = [width + 2 for width in self.widths], options.max_width
        parts = [[*range(min(2, len(needed)))]]
        for column in range(2, len(needed)):
            if sum([needed[shown] for shown in parts[-1]]) + needed[column] - 2 <= room:
                parts[-1].append(column)
            else:
                parts.append([0, column])
        for number, columns in enumerate(parts):
            if number:
                yield ""
            yield self._part(columns, room)

    def _part(self, columns: Sequence[int], room: int) -> Any:
        from rich.box import Box
        from rich.table import Table as Grid
        from rich.text import Text

        blank, line = "    \n", " ── \n"  # a rule below the header, and one between sections
        fits = sum([self.widths[column] + 2 for column in columns]) - 2 <= room
        grid = Grid(
            box=Box(blank * 2 + line + blank + line * 2 + blank * 2) if self.ruled else None,
            padding=(0, 1 if self.ruled else 2, 0, 0), show_edge=False, pad_edge=False,
            show_header=bool(self.header), header_style="",
        )  # fmt: skip
        for column in columns:
            header = Text(self.header[column] if self.header else "")
            header.stylize(STYLES["strong" if self.ruled else "faint"])
            grid.add_column(
                header,
                justify="right" if column in self.right else "left",
                no_wrap=fits and column != self.wraps,
                overflow="fold",
            )
        for row in self.rows:
            if row:
                grid.add_row(*[row[column] for column in columns])
            else:
                grid.add_section()
        return grid


def rendered(parts: Iterable[Any], columns: int, colour: bool = False) -> list[str]:
    """The lines of texts, `Table`s and other things that rich draws."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=columns, force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, markup=False, emoji=False, highlight=False, legacy_windows=False,
    )  # fmt: skip
    with console.capture() as captured:
        for part in parts:
            console.print(text(part) if isinstance(part, str) else part)
    return [line.rstrip() for line in captured.get().removesuffix("\n").split("\n")]


def show(*parts: Any, stream: TextIO | None = None, columns: int | None = None) -> None:
    """Write texts and tables, one below the other, to `stream` (standard output if None)."""
    stream = sys.stdout if stream is None else stream
    lines = "\n".join(rendered(parts, columns or width(stream), has_colour(stream))) + "\n"
    if not has_lines(stream):
        lines = lines.translate(_ASCII)
    encoding = stream.encoding or "utf-8"
    stream.write(lines.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def say(words: str | Text, stream: TextIO | None = None) -> None:
    """Write one line, which is never broken."""
    show(words, stream=stream, columns=UNBROKEN)


class Progress:
    """A bar on a terminal that shows how far work has come, and that is removed at the end.

    Args:
        total: units of work.
        patience: seconds before the bar appears.
        stream: where it is shown; standard error if None.
    """

    def __init__(self, total: float, patience: float = 0.0, stream: TextIO | None = None) -> None:
        self.total, self.done, self.text = total, 0.0, ""
        self._stream = sys.stderr if stream is None else stream
        self._appears = time.monotonic() + patience
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, done: float | None = None, text: str | None = None) -> None:
        """Show `done` and `text`, or what was shown before where they are None."""
        self.done = self.done if done is None else done
        self.text = self.text if text is None else printable(text)
        if not self._stream.isatty() or os.environ.get("TERM") == "dumb" or time.monotonic() < self._appears:
            return
        if self._bar is None:
            self._bar = _bar(self._stream)
            self._bar.add_task("")
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0], completed=self.done, total=self.total or None, description=self.text, refresh=True
        )

    def clear(self) -> None:
        """Remove the bar. The next `show` draws it again."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(stream: TextIO) -> Any:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    return progress.Progress(
        *[progress.BarColumn(20)] * has_lines(stream),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
        console=Console(file=stream, width=width(stream), force_terminal=True, no_color=not has_colour(stream)),
        transient=True, expand=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip
