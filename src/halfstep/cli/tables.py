"""Tables on screens too narrow for them: several beneath one another, with the first column in each."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table


def _width(column: Column) -> int:
    """The least that shows all of a column: its longest line, or word where lines may be folded."""
    texts = [str(column.header), *map(str, column.cells)]
    return max(
        (cell_len(part) for text in texts for part in (text.split("\n") if column.no_wrap else text.split())), default=0
    )


def show(console: Console, table: Table) -> None:
    """Print a table of texts, cut between columns where the screen ends."""
    first, *others = table.columns
    groups: list[list[Column]] = [[]]
    _, right, _, before = table.padding
    beside = right + before + 1  # of each cell: its padding and a line
    ends = 1 if table.pad_edge else 1 - right - before
    room = left = console.width - _width(first) - beside - ends
    for column in others:
        taken = _width(column) + beside
        if taken > left and groups[-1]:
            groups.append([])
            left = room
        groups[-1].append(column)
        left -= taken
    if len(groups) == 1:
        console.print(table)
        return
    kept: dict[str, Any] = {
        name: getattr(table, name) for name in ("box", "padding", "pad_edge", "title_justify", "title_style")
    }
    for number, group in enumerate(groups):
        part = Table(**kept, caption_justify=table.caption_justify)
        part.title = table.title if number == 0 else None
        part.caption = table.caption if number == len(groups) - 1 else None
        for column in (first, *group):
            part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
        cells = zip(*(column.cells for column in (first, *group)), strict=True)
        for row, texts in zip(table.rows, cells, strict=True):
            part.add_row(*texts, style=row.style, end_section=row.end_section)
        console.print(part)
