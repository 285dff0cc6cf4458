"""Recorded bounds of the compiled kernels: what the audit found once, and what no change may make worse unseen.

The file holds one line per kernel, variant and target, sorted, so that a change reads as a diff of numbers. Bytes,
spills, shared memory, barriers and layout conversions may not rise, access widths may not fall, registers may rise by
one step of the hardware's allocation. Another Triton is another compiler: with it only bytes, spills and layout
conversions are held to the bounds, which no register allocator changes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AT_MOST = ("bytes_read", "bytes_written", "registers", "spills", "shared_bytes", "barriers", "layout_conversions")
AT_LEAST = ("access_bits",)
MEASURES = ("bytes_read", "bytes_written", "access_bits", *AT_MOST[2:])
# What holds with every version of the compiler.
EVERYWHERE = ("bytes_read", "bytes_written", "spills", "layout_conversions")
# One step of what NVIDIA hands out per thread: an unrelated edit can move the count within a step.
REGISTER_SLACK = 8

Entry = dict[str, float | None]


@dataclass
class Bounds:
    """The recorded bounds, by `key`.

    Attributes:
        triton: the version that compiled what was recorded.
    """

    triton: str
    entries: dict[str, Entry] = field(default_factory=dict)


def key(row: dict[str, Any]) -> str:
    """What names a row of the audit in the file."""
    return f"{row['kernel']} | {row['variant']} | {row['target']}"


def entry(row: dict[str, Any]) -> Entry:
    """What the file keeps of a row. Whole numbers of bytes are written without a fraction."""
    kept = {measure: row[measure] for measure in MEASURES}
    return {name: int(value) if value is not None and value == int(value) else value for name, value in kept.items()}


def load(path: Path) -> Bounds:
    """Read the file.

    Raises:
        ValueError: it is missing, or no file that `save` wrote.
    """
    try:
        content = json.loads(path.read_text())
        return Bounds(content["triton"], content["bounds"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected {path} to be written by `halfstep bench audit --record`: {type(error).__name__}: {error}"
        ) from error


def save(bounds: Bounds, path: Path) -> None:
    """Write the file: one line per entry, sorted."""
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in sorted(bounds.entries.items())]
    body = ",\n".join(lines)
    path.write_text(f'{{"triton": {json.dumps(bounds.triton)}, "bounds": {{\n{body}\n}}}}\n')


def _covers(name: str, families: Collection[str] | None, targets: Collection[str]) -> bool:
    """Whether an audit of `families` (None: of all) for `targets` would have met the entry `name`."""
    kernel, _, target = name.split(" | ")
    return target in targets and (families is None or kernel.partition(".")[0] in families)


def departures(
    rows: list[dict[str, Any]],
    bounds: Bounds,
    triton: str,
    families: Collection[str] | None,
    targets: Collection[str],
    remedy: str,
) -> list[str]:
    """Where `rows` leave `bounds`, one sentence each, with the `remedy` where a row or an entry has no counterpart.

    Args:
        rows: the audit's, a peer's left out.
        triton: the version that compiled them.
        families: the kernel families that were audited; None for all there are.
        targets: the targets they were compiled for.
        remedy: the command that records.
    """
    found = []
    strict = triton == bounds.triton
    for row in rows:
        bound = bounds.entries.get(key(row))
        if bound is None:
            continue
        for measure in MEASURES if strict else EVERYWHERE:
            value, limit = row[measure], bound[measure]
            if value is None or limit is None:
                wrong, relation = value is not limit, "not"
            elif measure in AT_LEAST:
                wrong, relation = value < limit, "below"
            else:
                wrong, relation = value > limit + REGISTER_SLACK * (measure == "registers"), "above"
            if wrong:
                slack = f" + {REGISTER_SLACK}" if measure == "registers" else ""
                found.append(f"{key(row)}: {measure} {value} is {relation} the recorded {limit}{slack}")
    audited = {key(row) for row in rows}
    covered = {name for name in bounds.entries if _covers(name, families, targets)}
    found += _by_variant(audited - bounds.entries.keys(), f"no bounds are recorded; look at it, and record: {remedy}")
    found += _by_variant(covered - audited, f"recorded, but no variant has this name any more; record: {remedy}")
    return sorted(found)


def _by_variant(names: Collection[str], sentence: str) -> list[str]:
    """One line per variant, its targets together."""
    targets: dict[str, list[str]] = {}
    for name in sorted(names):
        variant, _, target = name.rpartition(" | ")
        targets.setdefault(variant, []).append(target)
    return [f"{variant} | {', '.join(of)}: {sentence}" for variant, of in targets.items()]


def record(
    rows: list[dict[str, Any]],
    path: Path,
    triton: str,
    families: Collection[str] | None,
    targets: Collection[str],
) -> str:
    """Write the bounds of `rows` to `path`; what this audit did not cover stays. Returns a summary in one line.

    Raises:
        ValueError: what would stay was recorded with another Triton.
    """
    old = load(path) if path.exists() else Bounds(triton)
    kept = {name: values for name, values in old.entries.items() if not _covers(name, families, targets)}
    if kept and old.triton != triton:
        raise ValueError(
            f"Expected all kernels and targets for {path}, which was recorded with Triton {old.triton} and not "
            f"{triton}, but got a part: leave out --module and --target"
        )
    fresh = {key(row): entry(row) for row in rows}
    save(Bounds(triton, kept | fresh), path)
    new, gone = fresh.keys() - old.entries.keys(), old.entries.keys() - kept.keys() - fresh.keys()
    changed = [name for name in fresh.keys() & old.entries.keys() if fresh[name] != old.entries[name]]
    return f"{path}: {len(fresh)} recorded, of which {len(new)} new and {len(changed)} changed; {len(gone)} gone"
