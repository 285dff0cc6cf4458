"""What commands print: rich's texts, tables and progress bars, on any output.

Text of others, such as names of files and tensors, passes `text`, which escapes what is not printable; rich never
parses markup. rich is imported when something is shown, so that ``--json`` and ``--version`` do not wait for it.
"""

from __future__ import annotations

import io
import os
import shutil
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
_ASCII = str.maketrans("─├┤┼▲●━╸╺≈÷…", "-||+^o---~/~")  # for an output whose encoding has none of these


def width() -> int:
    """Columns of the screen: COLUMNS, those of the terminal of standard output, or `UNBROKEN`."""
    return shutil.get_terminal_size((UNBROKEN, 24)).columns


def text(words: str, style: str = "") -> Text:
    """`words` in a style of `STYLES`. Characters that cannot be printed are escaped."""
    from rich.text import Text

    line = Text(words if words.isprintable() else printable(words))
    line.stylize(STYLES[style])  # unlike a style of the whole text, this leaves out the padding of a cell
    return line


def joined(*parts: str | Text, by: str = "") -> Text:
    return text(by).join([text(part) if isinstance(part, str) else part for part in parts])


class Table:
    """A table without borders, which becomes several below one another where the screen is too narrow for it.

    Names in the `header` may have several lines. Cells are str and Text; an empty row is a horizontal line. The columns
    `right` are aligned to the right, and cells of the column `wraps` may be broken between words. If the table is
    `ruled`, the header is bold and has a line below it.
    """

    def __init__(
        self, header: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = (), *, ruled: bool = False,
        wraps: int | None = None,
    ) -> None:  # fmt: skip
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
        room = options.max_width
        parts = [[*range(min(2, len(self.widths)))]]
        for column in range(2, len(self.widths)):
            if sum([self.widths[shown] + 2 for shown in parts[-1]]) + self.widths[column] <= room:
                parts[-1].append(column)
            else:
                parts.append([0, column])
        for number, columns in enumerate(parts):
            yield from [""] * bool(number)
            yield self._part(columns, room)

    def _part(self, columns: Sequence[int], room: int) -> Any:
        from rich.box import Box
        from rich.table import Table as Grid
        from rich.text import Text

        blank, line = "    \n", " ── \n"  # a rule below the header, and one between sections
        fits = sum([self.widths[column] + 2 for column in columns]) - 2 <= room
        grid = Grid(
            box=Box(blank * 2 + line + blank + line * 2 + blank * 2, ascii=True) if self.ruled else None,
            padding=(0, 1 if self.ruled else 2, 0, 0), show_edge=False, pad_edge=False,
            show_header=bool(self.header), header_style="",
        )  # fmt: skip
        for column in columns:
            header = Text(self.header[column] if self.header else "")
            header.stylize(STYLES["strong" if self.ruled else "faint"])
            justify: Any = "right" if column in self.right else "left"
            grid.add_column(header, justify=justify, no_wrap=fits and column != self.wraps, overflow="fold")
        for row in self.rows:
            if row:
                grid.add_row(*[row[column] for column in columns])
            else:
                grid.add_section()
        return grid


def _console(stream: TextIO | None, columns: int | None) -> Any:
    """A console of rich, with colours if NO_COLOR, FORCE_COLOR, TERM and the stream allow them."""
    from rich.console import Console

    plain = stream is None or bool(os.environ.get("NO_COLOR"))
    return Console(
        file=stream or io.StringIO(), width=columns, color_system=None if plain else "auto", markup=False, emoji=False,
        highlight=False, legacy_windows=False,
    )  # fmt: skip


def rendered(parts: Iterable[Any], columns: int, stream: TextIO | None = None) -> list[str]:
    """The lines of texts, `Table`s and other things that rich draws; with the colours of `stream`, if there is one."""
    console = _console(stream, columns)
    with console.capture() as captured:
        for part in parts:
            console.print(text(part) if isinstance(part, str) else part)
    return [line.rstrip() for line in captured.get().removesuffix("\n").split("\n")]


def show(*parts: Any, stream: TextIO | None = None, columns: int | None = None) -> None:
    """Write texts and tables, one below the other, to `stream` (standard output if None)."""
    stream = sys.stdout if stream is None else stream
    lines = "\n".join(rendered(parts, columns or width(), stream)) + "\n"
    encoding = stream.encoding or "utf-8"
    try:
        lines.encode(encoding)
    except UnicodeEncodeError:
        lines = lines.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(lines)
    stream.flush()


def say(words: str | Text, stream: TextIO | None = None) -> None:
    """Write one line, which is never broken."""
    show(words, stream=stream, columns=UNBROKEN)


class Progress:
    """A bar on a terminal for `total` units of work, from `patience` seconds on, which is removed at the end."""

    def __init__(self, total: float, patience: float = 0.0, stream: TextIO | None = None) -> None:
        from rich import progress
        from rich.table import Column

        stream, self.done = sys.stderr if stream is None else stream, 0.0
        self._appears = time.monotonic() + patience
        described = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = progress.Progress(
            progress.BarColumn(20), progress.TaskProgressColumn(), progress.TimeRemainingColumn(),
            progress.TextColumn("{task.description}", markup=False, table_column=described),
            console=_console(stream, None), disable=not stream.isatty() or os.environ.get("TERM") == "dumb",
            transient=True, expand=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total or None)

    def __enter__(self) -> Progress:
        self.show()
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, done: float | None = None, text: str | None = None) -> None:
        """Show `done` and `text`, or what was shown before where they are None."""
        self.done = self.done if done is None else done
        self._bar.update(self._task, completed=self.done, description=None if text is None else printable(text))
        if not self._bar.disable and time.monotonic() >= self._appears:
            self._bar.start()
            self._bar.refresh()

    def clear(self) -> None:
        """Remove the bar. The next `show` draws it again."""
        if self._bar.live.is_started:
            self._bar.stop()
