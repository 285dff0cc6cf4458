"""Recorded bounds of the compiled kernels, so that no regression goes unnoticed.

Bytes, spills, shared memory, barriers and layout conversions may not increase, access widths may not decrease, and
registers may increase by one allocation unit. With another version of Triton, only bytes and spills are compared,
since the others depend on the compiler: Triton 3.9 counts layout conversions that exchange nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

MEASURES = (
    *("bytes_read", "bytes_written", "access_bits", "registers", "spills", "shared_bytes", "barriers"),
    "layout_conversions",
)
# The measures to compare whatever the version of Triton.
EVERYWHERE = ("bytes_read", "bytes_written", "spills")
# NVIDIA GPUs allocate registers to a thread in units of 8. An unrelated edit can change the count within a unit.
REGISTER_SLACK = 8

Entry = dict[str, float | None]


class Bounds(NamedTuple):
    """The Triton version that compiled the recorded kernels, and the measures of each row, by `key`."""

    triton: str
    entries: dict[str, Entry]


def key(row: dict[str, Any]) -> str:
    return f"{row['kernel']} | {row['variant']} | {row['target']}"


def entry(row: dict[str, Any]) -> Entry:
    """The measures of a row to record. Integral values become ints, so that they are written without a fraction."""
    values = ((measure, row[measure]) for measure in MEASURES)
    return {name: int(value) if value is not None and value == int(value) else value for name, value in values}


def load(path: Path) -> Bounds:
    """Read bounds from a file. Raises a ValueError if it is missing, or was not written by `save`."""
    try:
        content = json.loads(path.read_text())
        return Bounds(content["triton"], content["bounds"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected {path} to be written by `halfstep bench audit --record`: {type(error).__name__}: {error}"
        ) from error


def save(bounds: Bounds, path: Path) -> None:
    """Write bounds to a file: one line per entry, sorted."""
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(bounds.entries.items())]
    body = ",\n".join(lines)
    path.write_text(f'{{"triton": {json.dumps(bounds.triton)}, "bounds": {{\n{body}\n}}}}\n')


def _covers(name: str, families: Collection[str] | None, targets: Collection[str]) -> bool:
    """Whether an audit of `families` (None: all) for `targets` includes the entry `name`."""
    kernel, _, target = name.split(" | ")
    return target in targets and (families is None or kernel.partition(".")[0] in families)


def _beyond(measure: str, value: float | None, limit: float | None) -> str | None:
    """How a measure violates its bound; None if it does not."""
    if value is None or limit is None:
        return "not" if value is not limit else None
    if measure == "access_bits":
        return "below" if value < limit else None
    return "above" if value > limit + (REGISTER_SLACK if measure == "registers" else 0) else None


def departures(
    rows: list[dict[str, Any]],
    bounds: Bounds,
    triton: str,
    families: Collection[str] | None,
    targets: Collection[str],
    remedy: str,
) -> list[str]:
    """One sentence for each violation of `bounds`, and for each row or entry without a counterpart.

    `triton` is the version that compiled the rows; the audit covered `families` (None: all) and `targets`.
    """
    measures = MEASURES if triton == bounds.triton else EVERYWHERE
    audited = {key(row): row for row in rows}
    gone = {name for name in bounds.entries if _covers(name, families, targets)} - audited.keys()
    sentences = [f"{name}: recorded, but no variant has this name any more; record: {remedy}" for name in gone]
    for name, row in audited.items():
        bound = bounds.entries.get(name)
        if bound is None:
            sentences.append(f"{name}: no bounds are recorded; look at it, and record: {remedy}")
            continue
        for measure in measures:
            if relation := _beyond(measure, row[measure], bound[measure]):
                slack = f" + {REGISTER_SLACK}" if measure == "registers" else ""
                sentences.append(f"{name}: {measure} {row[measure]} is {relation} the recorded {bound[measure]}{slack}")
    return sorted(sentences)


def record(
    rows: list[dict[str, Any]],
    path: Path,
    triton: str,
    families: Collection[str] | None,
    targets: Collection[str],
) -> str:
    """Write the bounds of `rows` to `path`, keeping entries that this audit does not cover. Returns a one-line summary.
    Raises a ValueError if such entries were recorded with another version of Triton.
    """
    old = load(path) if path.exists() else Bounds(triton, {})
    kept = {name: values for name, values in old.entries.items() if not _covers(name, families, targets)}
    if kept and old.triton != triton:
        raise ValueError(
            f"Expected all kernels and targets for {path}, which was recorded with Triton {old.triton} and not "
            f"{triton}, but got only some: leave out --module and --target"
        )
    entries = kept | {key(row): entry(row) for row in rows}
    save(Bounds(triton, entries), path)
    changed = sum(entries.get(name) != old.entries.get(name) for name in entries | old.entries)
    return f"{path}: {len(rows)} recorded, {changed} entries differ"
