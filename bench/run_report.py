"""The output of `halfstep bench run`: tables for the terminal and in Markdown, JSON, and two pictures.

One row per provider and size; the row of one that failed has the reason instead of times. Those that are not installed
are listed once below, with the reason.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.bench.harness import OK, UNAVAILABLE, Result, ours
from halfstep.bench.markdown import table
from halfstep.cli import figures
from halfstep.cli.machine import processor_name
from halfstep.cli.terminal import Table, text
from halfstep.kernels.backend import triton


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of the measurements: versions, device, threads and date."""
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
    """The results for JSON; see `harness`."""
    return {**about, "results": [asdict(result) for result in results]}


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Write the results to a file atomically, each on a line."""
    unfinished = path.with_suffix(".tmp")
    head, rows = json.dumps({**about, "results": []}, indent=1), (json.dumps(asdict(result)) for result in results)
    unfinished.write_text(head.replace('"results": []', '"results": [\n' + ",\n".join(rows) + "\n]") + "\n")
    unfinished.replace(path)


def write(folder: Path, about: dict[str, Any], results: Sequence[Result]) -> list[str]:
    """Write ``results.json``, ``table.md`` and the pictures. Returns why there are no pictures, if there are none."""
    write_json(folder / "results.json", about, results)
    (folder / "table.md").write_text(markdown(about, results))
    try:
        draw(folder, about, results)
    except ImportError as error:
        return [str(error)]
    return []


# -------------------------------------------------------------------------------------------------------------- tables


def _digits(value: float | None) -> str:
    """Three significant digits, without an exponent if the number is short."""
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


def _by_operation(results: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    """The results of one operation and dtype at all sizes, with a title, except those of unavailable providers."""
    available = (result for result in results if result.status != UNAVAILABLE)
    groups = groupby(available, lambda result: f"{result.operation}, {result.dtype}")
    return [(title, list(group)) for title, group in groups]


def _sections(results: Iterable[Result]) -> Iterator[tuple[str, str, list[Result], list[str], list[list[str]]]]:
    """Title, bound, results, headings and rows of each table, without empty columns."""
    for title, group in _by_operation(results):
        columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, group))}
        rows = []
        for result in group:
            why = "" if result.status == OK else f" ({result.status}: {result.reason})"
            size = f"{result.size[result.axis]:,}"
            rows.append([size, result.provider + why, *(cell(result) for cell in columns.values())])
        bound = f"rrors {group[0].error_unit}, at most {_digits(group[0].bound)}"
        yield title, bound, group, [group[0].axis, "provider", *columns], rows


def _footnotes(about: dict[str, Any], results: Sequence[Result]) -> list[str]:
    """Sentences that explain the columns, and one for each unavailable provider."""
    reasons: dict[str, dict[str, None]] = {}
    for result in results:
        if result.status == UNAVAILABLE:
            reasons.setdefault(result.provider, {})[result.reason] = None
    return [
        "GB/s counts the least bytes that the job needs in the provider's layout. 'of copy' is the time of a copy of "
        "as many bytes over the provider's, in the same rounds; large copies reached "
        f"{_digits(about['copy_gb_per_s'])} GB/s. 'vs best other' is the time of the best other provider over this "
        "one's: above 1 is faster than all others. Errors are against float64.",
        *(f"Not measured: {provider}: {'; '.join(why)}." for provider, why in reasons.items()),
    ]


def headline(about: dict[str, Any]) -> str:
    """One line with versions, device, threads and date."""
    threads = f", {about['threads']} thread{'s' if about['threads'] > 1 else ''}" if about["threads"] else ""
    triton = f", triton {about['triton']}" if about["triton"] else ""
    modes = ", quick" * about["quick"] + ", processor time" * about.get("processor_time", False)
    versions = f"halfstep {about['halfstep']}, torch {about['torch']}{triton}"
    return f"{versions}, {about['device']}{threads}, {about['date']}{modes}"


def tables(about: dict[str, Any], results: Sequence[Result]) -> list[Any]:
    """One table per operation and dtype for a terminal, and the footnotes."""
    parts: list[Any] = []
    for title, bound, group, headings, rows in _sections(results):
        shown: list[list[Any]] = []
        for result, (size, provider, *cells), before in zip(group, rows, [None, *rows], strict=False):
            style = "bad" if result.status != OK else "strong" if ours(result.provider) else ""
            repeated = before is not None and before[0] == size
            shown.append(["" if repeated else size, text(provider, style), *cells])
        right = [column for column in range(len(headings)) if column != 1]
        parts += [f"{title} (e{bound})", Table(headings, shown, right), ""]
    return [*parts, headline(about), *_footnotes(about, results)]


def markdown(about: dict[str, Any], results: Sequence[Result]) -> str:
    """The tables in Markdown."""
    lines = [headline(about) + ".", ""]
    for title, bound, _, headings, rows in _sections(results):
        lines += [f"### {title}", "", f"E{bound}.", "", *table(headings, rows, {1}), ""]
    return "\n".join([*lines, *(f"{note}\n" for note in _footnotes(about, results))])


# ------------------------------------------------------------------------------------------------------------ pictures

# Colours of Okabe and Ito (2008), which colour-blind readers can tell apart, the same in all pictures.
COLOURS = {
    "halfstep": "#D55E00", "torch eager": "#0072B2", "torch fused": "#0072B2", "torch amp + foreach norm": "#0072B2",
    "torch foreach": "#56B4E9", "torch.compile": "#009E73", "torch naive": "#999999", "liger-kernel": "#CC79A7",
    "torch-optimi": "#CC79A7", "flashoptim": "#000000", "torchao": "#8C6D31", "bitsandbytes": "#B8860B",
    "apex": "#5B3A8C", "transformer-engine": "#7FB800",
}  # fmt: skip
MOST_PERCENT = 200  # of the copy bandwidth; higher values show caches or noise, not memory


def _draw_panel(axes: Any, title: str, results: list[Result], in_time: bool) -> None:
    """One line per provider over the sizes: milliseconds with a band from p20 to p80, or the share of a copy."""
    results = sorted((r for r in results if r.status == OK), key=lambda r: r.size[r.axis])
    for provider in dict.fromkeys(result.provider for result in results):
        line = [result for result in results if result.provider == provider]
        sizes, strong = [result.size[result.axis] for result in line], ours(provider)
        # The longest name with which it begins: layouts of one library have the same colour.
        colour = COLOURS.get(max(filter(provider.startswith, COLOURS), key=len, default=""), "#444444")
        values = [100 * (r.copy_fraction or 0.0) for r in line]
        if in_time:
            low, values, high = ([getattr(r, f"{p}_us") / 1e3 for r in line] for p in ("p20", "p50", "p80"))
            axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        style = {"linestyle": "-" if provider in COLOURS else "--", "marker": "o", "zorder": 2 + strong}
        axes.plot(sizes, values, label=provider, color=colour, linewidth=1.3 + 1.1 * strong, markersize=4, **style)
    axis, elements = results[0].axis, results[0].size.get("elements", 0)
    axes.set_xscale("log", base=10 if axis == "tensors" else 2)
    axes.set_xlabel(f"tensors ({elements:,} elements in all)".replace(",", " ") if axis == "tensors" else axis)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("ms per step (p50; band p20 to p80)" if in_time else "% of copying as many bytes", fontsize=9)
    if in_time:
        axes.set_yscale("log")
    else:
        axes.axhline(100, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
        axes.set_ylim(0, min(MOST_PERCENT, 110 * max(1.0, *(r.copy_fraction or 0.0 for r in results))))
    figures.tidy(axes, "both")


def draw(folder: Path, about: dict[str, Any], results: Sequence[Result]) -> list[Path]:
    """Write the pictures, without operations that were measured at one size only. Returns their paths.

    Raises ImportError where matplotlib is not installed.
    """
    drawn = []
    groups = [
        (title, group)
        for title, group in _by_operation(results)
        if len({r.size[r.axis] for r in group if r.status == OK}) > 1
    ]
    for name, title, in_time in (
        ("roofline.png", f"Share of the copy bandwidth, cut at {MOST_PERCENT} %", False),
        ("step.png", "Whole AMP step: check, norm, clip, update, weights, scale", True),
    ):
        panels = [(operation, group) for operation, group in groups if (group[0].group == "step") is in_time]
        if not panels:
            continue
        columns = min(3, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = figures.figure(max(4.4 * columns, 6.6), 1.2 + 3.0 * rows)
        figure.suptitle(f"{title}\n{headline(about)}", x=0.01, ha="left", fontsize=10)
        legend: dict[str, Any] = {}
        for index, (operation, group) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, index)
            _draw_panel(axes, operation, group, in_time)
            legend |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        where = {"loc": "outside lower left", "ncols": max(3, 2 * columns)}
        figure.legend(legend.values(), legend.keys(), frameon=False, fontsize=9, **where)
        figures.save(figure, folder / name)
        drawn.append(folder / name)
    return drawn
