"""The output of `halfstep bench run` and `gpu`: tables for the terminal, and JSON."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.bench.harness import OK, UNAVAILABLE, Result, ours
from halfstep.cli.machine import processor_name
from halfstep.cli.terminal import Table, text
from halfstep.kernels.backend import triton


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "halfstep": halfstep.__version__,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def as_dict(about: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    return {**about, "results": [asdict(result) for result in results]}


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Write the results to a file atomically, one per line. An infinite error becomes ``Infinity``."""
    unfinished = path.with_suffix(".tmp")
    head, rows = json.dumps({**about, "results": []}, indent=1), (json.dumps(asdict(result)) for result in results)
    unfinished.write_text(head.replace('"results": []', '"results": [\n' + ",\n".join(rows) + "\n]") + "\n")
    unfinished.replace(path)


def _digits(value: float | None) -> str:
    """A number with three significant digits, in scientific notation only if it would be long."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.1e}"
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "p20 µs": lambda r: _digits(r.p20_us),
    "p50 µs": lambda r: _digits(r.p50_us),
    "p80 µs": lambda r: _digits(r.p80_us),
    "graph µs": lambda r: _digits(r.graph_us),
    "host µs": lambda r: _digits(r.host_us),
    "GB/s": lambda r: _digits(r.gb_per_s),
    "of copy": lambda r: "" if r.copy_fraction is None else f"{r.copy_fraction:.0%}",
    "launches": lambda r: "" if r.launches is None else f"{r.launches:,}",
    "extra MiB": lambda r: _digits(r.extra_bytes and r.extra_bytes * (r.extra_bytes >= 2**14) / 2**20),
    "error": lambda r: _digits(r.error),
    "vs best other": lambda r: "" if r.speedup is None else f"{r.speedup:.2f}",
}


def _headline(about: dict[str, Any]) -> str:
    threads = f", {about['threads']} thread{'s' if about['threads'] > 1 else ''}" if about["threads"] else ""
    triton = f", triton {about['triton']}" if about["triton"] else ""
    modes = ", quick" * about["quick"] + ", processor time" * about.get("processor_time", False)
    versions = f"halfstep {about['halfstep']}, torch {about['torch']}{triton}"
    return f"{versions}, {about['device']}{threads}, {about['date']}{modes}"


def tables(about: dict[str, Any], results: Sequence[Result]) -> list[Any]:
    """One table per operation and dtype, without empty columns, and footnotes."""
    parts: list[Any] = []
    available = (result for result in results if result.status != UNAVAILABLE)
    for title, group in groupby(available, lambda result: f"{result.operation}, {result.dtype}"):
        of_title = list(group)
        columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, of_title))}
        rows: list[list[Any]] = []
        before = ""
        for result in of_title:
            why = "" if result.status == OK else f" ({result.status}: {result.reason})"
            style = "bad" if why else "strong" if ours(result.provider) else ""
            size = f"{result.size[result.axis]:,}"
            provider = text(result.provider + why, style)
            rows.append(["" if size == before else size, provider, *(cell(result) for cell in columns.values())])
            before = size
        first, headings = of_title[0], [of_title[0].axis, "provider", *columns]
        right = [column for column in range(len(headings)) if column != 1]
        bound = f"errors {first.error_unit}, at most {_digits(first.bound)}"
        parts += [f"{title} ({bound})", Table(headings, rows, right), ""]
    reasons: dict[str, dict[str, None]] = {}
    for result in results:
        if result.status == UNAVAILABLE:
            reasons.setdefault(result.provider, {})[result.reason] = None
    return [
        *parts,
        _headline(about),
        "GB/s counts the least bytes that the job needs in the provider's layout. 'of copy' is the time of a copy of "
        "as many bytes over the provider's, in the same rounds; large copies reached "
        f"{_digits(about['copy_gb_per_s'])} GB/s. 'vs best other' is the time of the best other provider over this "
        "one's: above 1 is faster than all others. Errors are against float64.",
        *(f"Not measured: {provider}: {'; '.join(why)}." for provider, why in reasons.items()),
    ]
