"""The audit as Markdown: one line per kernel variant, its targets side by side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any


def number(value: float | None) -> str:
    """At most five digits; a dash for None."""
    return "-" if value is None else f"{value:.5g}"


def _cell(rows: list[dict[str, Any]], show: Callable[[dict[str, Any]], str]) -> str:
    """One value if all targets agree, otherwise one per target."""
    values = [show(row) for row in rows]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """A sort key: kernel, variant, then the targets of NVIDIA by number, then those of AMD."""
    digits = row["target"].removeprefix("sm_")
    return row["kernel"], row["variant"], not digits.isdecimal(), int(digits) if digits.isdecimal() else 0, digits


def table(rows: list[dict[str, Any]]) -> str:
    """The table of `rows`, as `halfstep.bench.audit.rows.audit` returns them."""
    rows = sorted(rows, key=_order)
    targets = list(dict.fromkeys(row["target"] for row in rows))
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "bytes read + written": lambda row: f"{number(row['bytes_read'])} + {number(row['bytes_written'])}",
        "access bits": lambda row: number(row["access_bits"]),
        "registers": lambda row: number(row["registers"]),
        "shared bytes": lambda row: number(row["shared_bytes"]),
        "barriers": lambda row: number(row["barriers"]),
        "conversions": lambda row: number(row["layout_conversions"]),
    }
    if any(row["spills"] for row in rows):
        columns["spills"] = lambda row: number(row["spills"])
    lines = [
        f"Bytes per element; where targets differ, {' / '.join(targets)}."
        + ("" if "spills" in columns else " No spills."),
        "",
        f"| kernel | variant | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    shown = None
    for (kernel, variant), group in groupby(rows, key=lambda row: (row["kernel"], row["variant"])):
        members = list(group)
        cells = " | ".join(_cell(members, show) for show in columns.values())
        lines.append(f"| {'' if kernel == shown else f'`{kernel}`'} | {variant} | {cells} |")
        shown = kernel
    return "\n".join(lines)
