"""The output of `halfstep bench run`: tables for the terminal and in Markdown, JSON, and two pictures.

The tables have one row per provider and size. Providers that are not installed are listed once below, with the reason.
A provider that failed its check or raised an exception has the reason in its row instead of times.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import halfstep
from halfstep.bench.harness import OK, UNAVAILABLE, Result, ours
from halfstep.cli import figures
from halfstep.cli.machine import processor_name
from halfstep.cli.terminal import Table, text
from halfstep.kernels.backend import triton

ROOFLINE, STEP = "roofline.png", "step.png"


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of the measurements: versions, device, threads and date."""
    return {
        "halfstep": halfstep.__version__,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor as the system reports it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def as_json(about: dict[str, Any], results: Sequence[Result]) -> str:
    """The results as JSON; see `harness`."""
    return json.dumps({**about, "results": [asdict(result) for result in results]}, indent=1)


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """Write `as_json` to a file atomically."""
    beside = path.with_suffix(".tmp")
    beside.write_text(as_json(about, results) + "\n")
    beside.replace(path)


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


def _memory(size: int | None) -> str:
    return "" if size is None else _digits(size / 2**20) if size >= 2**14 else "0"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "p20 µs": lambda r: _digits(r.p20_us),
    "p50 µs": lambda r: _digits(r.p50_us),
    "p80 µs": lambda r: _digits(r.p80_us),
    "graph µs": lambda r: _digits(r.graph_us),
    "host µs": lambda r: _digits(r.host_us),
    "GB/s": lambda r: _digits(r.gb_per_s),
    "of copy": lambda r: "" if r.copy_fraction is None else f"{r.copy_fraction:.0%}",
    "launches": lambda r: "" if r.launches is None else f"{r.launches:,}",
    "extra MiB": lambda r: _memory(r.extra_bytes),
    "error": lambda r: _digits(r.error),
    "vs best other": lambda r: "" if r.speedup is None else f"{r.speedup:.2f}",
}


def by_operation(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """The results of one operation and dtype at all sizes, with a title."""
    for (operation, dtype), group in itertools.groupby(results, lambda r: (r.operation, r.dtype)):
        yield f"{operation}, {dtype}", list(group)


def _error_allowed(results: Sequence[Result]) -> str:
    return f"errors {results[0].error_unit}, at most {_digits(results[0].bound)}"


def absent(results: Sequence[Result]) -> list[str]:
    """The unavailable providers, each with the reasons."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.status == UNAVAILABLE:
            known = reasons.setdefault(result.provider, [])
            if result.reason not in known:
                known.append(result.reason)
    return [f"{provider}: {'; '.join(why)}" for provider, why in reasons.items()]


def _table(results: list[Result]) -> tuple[list[str], list[tuple[Result, list[str]]]]:
    """Headings and rows, without empty columns."""
    here = [result for result in results if result.status != UNAVAILABLE]
    columns = {name: cell for name, cell in COLUMNS.items() if any(cell(result) for result in here)}
    rows = []
    for result in here:
        cells = [cell(result) for cell in columns.values()]
        rows.append((result, [f"{result.size[result.axis]:,}", result.provider, *cells]))
    return [here[0].axis if here else "", "provider", *columns], rows


def footnotes(about: dict[str, Any], results: Sequence[Result]) -> list[str]:
    """Sentences that explain the columns."""
    notes = [
        "GB/s counts the least bytes that the job needs. 'of copy' is the time of a copy of as many bytes over the "
        f"provider's, in the same rounds; large copies reached {_digits(about['copy_gb_per_s'])} GB/s. 'vs best other' "
        "is the time of the best other provider over this one's: above 1 is faster than all others. Errors are against "
        "float64.",
    ]
    return notes + [f"Not measured: {line}." for line in absent(results)]


def headline(about: dict[str, Any]) -> str:
    """One line with versions, device, threads and date."""
    threads = f", {about['threads']} thread{'s' if about['threads'] > 1 else ''}" if about["threads"] else ""
    triton = f", triton {about['triton']}" if about["triton"] else ""
    quick = ", quick" if about["quick"] else ""
    clock = ", processor time" if about.get("processor_time") else ""
    versions = f"halfstep {about['halfstep']}, torch {about['torch']}{triton}"
    return f"{versions}, {about['device']}{threads}, {about['date']}{quick}{clock}"


def tables(about: dict[str, Any], results: Sequence[Result]) -> list[Any]:
    """One table per operation and dtype, and the footnotes."""
    parts: list[Any] = []
    for title, group in by_operation(results):
        headings, rows = _table(group)
        if not rows:
            continue
        shown, before = [], None
        for result, cells in rows:
            first, provider, *figures = cells
            style = "bad" if result.status != OK else "strong" if ours(result.provider) else ""
            if result.status != OK:
                provider += f" ({result.status.upper()}: {result.reason})"
            shown.append(["" if first == before else first, text(provider, style), *figures])
            before = first
        right = [column for column in range(len(headings)) if column != 1]
        parts += [f"{title} ({_error_allowed(group)})", Table(headings, shown, right), ""]
    return [*parts, headline(about), *footnotes(about, results)]


def markdown(about: dict[str, Any], results: Sequence[Result]) -> str:
    """The tables in Markdown."""
    lines = [headline(about) + ".", ""]
    for title, group in by_operation(results):
        headings, rows = _table(group)
        if not rows:
            continue
        lines += [f"### {title}", "", f"E{_error_allowed(group)[1:]}.", ""]
        lines += ["| " + " | ".join(headings) + " |"]
        lines.append("|" + "|".join("---" if index == 1 else "---:" for index in range(len(headings))) + "|")
        for result, cells in rows:
            if result.status != OK:
                cells[1] += f" ({result.status}: {result.reason})".replace("|", "/")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join([*lines, *(f"{note}\n" for note in footnotes(about, results))])


# ------------------------------------------------------------------------------------------------------------ pictures

# Colours that colour-blind readers can tell apart (Okabe and Ito, 2008), the same in all pictures.
PROVIDER_COLOURS = {
    "halfstep": "#D55E00",
    "halfstep full master": "#E69F00",
    "torch eager": "#0072B2",
    "torch fused": "#0072B2",
    "torch amp + foreach norm": "#0072B2",
    "torch foreach": "#56B4E9",
    "torch.compile": "#009E73",
    "torch naive": "#999999",
    "liger-kernel": "#CC79A7",
    "torch-optimi": "#CC79A7",
    "flashoptim": "#000000",
    "torchao": "#8C6D31",
    "torchao 8 bit": "#8C6D31",
    "apex": "#5B3A8C",
    "transformer-engine": "#7FB800",
}


HEAD = 1.2  # inches for title and legend
MOST_PERCENT = 200  # of the copy bandwidth; higher values show caches or noise, not memory


def _lines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The measured results of each provider, in order of size."""
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result.status == OK:
            lines.setdefault(result.provider, []).append(result)
    return {name: sorted(line, key=lambda r: r.size[r.axis]) for name, line in lines.items()}


def _draw_lines(axes: Any, results: Sequence[Result], value: Callable[[Result], float | None]) -> None:
    for provider, line in _lines(results).items():
        axes.plot(
            [result.size[result.axis] for result in line],
            [value(result) for result in line],
            label=provider,
            color=PROVIDER_COLOURS.get(provider, "#444444"),
            linewidth=2.4 if ours(provider) else 1.3,
            linestyle="--" if provider == "halfstep full master" else "-",
            marker="o",
            markersize=4 if ours(provider) else 3,
            zorder=3 if ours(provider) else 2,
        )
    first = results[0]
    binary = first.axis != "tensors"
    axes.set_xscale("log", base=2 if binary else 10)
    axes.set_xlabel(first.axis if binary else f"tensors ({first.size['elements']:,} elements in all)".replace(",", " "))
    figures.tidy(axes, "both")


def _figure(count: int, columns: int, title: str) -> tuple[Any, list[Any]]:
    rows = math.ceil(count / columns)
    figure = figures.figure(4.4 * columns, HEAD + 3.0 * rows, layout=None)
    figure.text(0.012, 1 - 0.12 / figure.get_figheight(), title, ha="left", va="top", fontsize=10)
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(count)]
    return figure, panels


def _save(figure: Any, panels: list[Any], path: Path) -> None:
    """Save a figure with one legend for all panels, between the title and the panels."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    height, across = figure.get_figheight(), max(2, int(figure.get_figwidth() / 2.2))
    figure.legend(
        found.values(),
        found.keys(),
        loc="upper left",
        bbox_to_anchor=(0.004, 1 - 0.5 / height),
        ncols=across,
        frameon=False,
        fontsize=9,
    )
    top = 0.65 + 0.22 * math.ceil(len(found) / across)
    figure.tight_layout(rect=(0, 0, 1, 1 - top / height))
    figures.save(figure, path)


def draw(folder: Path, about: dict[str, Any], results: Sequence[Result]) -> list[Path]:
    """Write the pictures, without operations that were measured at one size only.

    Returns:
        The files written.
    """
    panels_of = [
        (title, group)
        for title, group in by_operation(results)
        if len({r.size[r.axis] for r in group if r.status == OK}) > 1
    ]
    drawn = []
    roofline = [(title, group) for title, group in panels_of if group[0].group != "step"]
    if roofline:
        columns = min(3, len(roofline))
        figure, panels = _figure(
            len(roofline), columns, f"Share of the copy bandwidth, cut at {MOST_PERCENT} %\n{headline(about)}"
        )
        for axes, (title, group) in zip(panels, roofline, strict=True):
            _draw_lines(axes, group, lambda r: None if r.copy_fraction is None else 100 * r.copy_fraction)
            axes.axhline(100, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
            shares = [100 * r.copy_fraction for r in group if r.copy_fraction is not None]
            axes.set_ylim(0, min(MOST_PERCENT, 1.1 * max(100.0, *shares)))
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_ylabel("% of copying as many bytes", fontsize=9)
        _save(figure, panels, folder / ROOFLINE)
        drawn.append(folder / ROOFLINE)
    steps = [(title, group) for title, group in panels_of if group[0].group == "step"]
    if steps:
        figure, panels = _figure(
            len(steps), len(steps), f"Whole AMP step: check, norm, clip, update, weights, scale\n{headline(about)}"
        )
        for axes, (title, group) in zip(panels, steps, strict=True):
            _draw_lines(axes, group, lambda r: None if r.p50_us is None else r.p50_us / 1e3)
            for provider, line in _lines(group).items():
                low, high = ([1e-3 * getattr(r, key) for r in line] for key in ("p20_us", "p80_us"))
                sizes = [r.size[r.axis] for r in line]
                axes.fill_between(
                    sizes, low, high, color=PROVIDER_COLOURS.get(provider, "#444444"), alpha=0.15, linewidth=0
                )
            axes.set_yscale("log")
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_ylabel("ms per step (p50; band p20 to p80)", fontsize=9)
        _save(figure, panels, folder / STEP)
        drawn.append(folder / STEP)
    return drawn
