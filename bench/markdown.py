"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int]) -> list[str]:
    """The lines of a table. The columns `left` are aligned to the left, the others to the right."""
    aligned = ["---" if column in left else "---:" for column in range(len(headings))]
    lines = ["| " + " | ".join(headings) + " |", "|" + "|".join(aligned) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
