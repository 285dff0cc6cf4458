"""The report of train_gpt.py: report.json, report.html, and the printed table."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from halfstep.cli.machine import processor_name, version_of
from halfstep.cli.results import overflow_kind
from halfstep.cli.results_picture import KINDS, zones
from halfstep.cli.terminal import Table, say, show
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.overflow import Overflow

# On light and dark ground. Colour-blind readers can tell them apart; the run without masters has a warning colour.
RUN_COLOURS = {
    "fp32": ("#4c566a", "#a7b1c2"),
    "bf16": ("#0072b2", "#56b4e9"),
    "fp16": ("#00785a", "#3cc79b"),
    "bf16 without master": ("#b84a00", "#ff9a4d"),
}
LOOKS = {name: f"run{i}" for i, name in enumerate(RUN_COLOURS)}  # classes of colours
COLOURS = "".join(f".run{i} {{ --c: light-dark({a}, {b}); }} " for i, (a, b) in enumerate(RUN_COLOURS.values()))
COLOURS += "".join(f".{zone} {{ --c: {colour}; }} " for zone, (colour, _) in KINDS.items() if " " not in zone)
OVERFLOW = ("parameter", "steps with", "first step", "last step")
EMULATED = (
    "On this CPU the {names} matrix products were emulated: accumulated in fp32 and rounded once, as in a tensor core, "
    "with its underflow and overflow. These times say nothing about a GPU."
)


def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine, without its name and its user, and the versions of packages (None: absent)."""
    described = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    versions = {name: version_of(name) for name in ("halfstep", "torch", "numpy", "triton")}
    return {"machine": described, "versions": {"python": platform.python_version(), **versions}}


PARTS = ("param", "gradient", "optimizer")


def _against(content: dict[str, Any]) -> dict[str, str]:
    """The validation loss of each run against that of fp32, if there are both."""
    losses = {run["name"]: run["final_val_loss"] for run in content["runs"]}
    base = next((losses[run["name"]] for run in content["runs"] if run["precision"] == "fp32"), None)
    if base is None or len(losses) < 2:
        return {}
    changes = {name: f"{100 * (loss / base - 1):+.2f} %" for name, loss in losses.items() if loss is not None}
    return {name: change.replace("-", "\N{MINUS SIGN}") for name, change in changes.items()}


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table on the screen and in the page."""
    head = ["run", "optimizer", "train loss", "val loss", "vs fp32", "skipped", "scale"]
    head += [*(f"{part}\nB/param" for part in ("weight", "grad", "state")), "step\nms", "optimizer\nms"]
    head += ["tokens/s", "MFU"]
    against, rows = _against(content), []
    for run in content["runs"]:
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (run["final_train_loss"], run["final_val_loss"]))
        scaled = ("-", "-") if run["final_scale"] is None else (str(run["skipped_steps"]), f"{run['final_scale']:,.0f}")
        rows.append(
            [
                *(run["name"], run["optimizer"], *losses, against.get(run["name"], "-"), *scaled),
                *(f"{run[f'{part}_bytes_per_param']:.2f}" for part in PARTS),
                *(f"{run['step_ms_p50']:.1f}", f"{run['optimizer_ms_p50']:.2f}", f"{run['tokens_per_s']:,.0f}"),
                "-" if run["mfu"] is None else f"{percent(run['mfu'])} %",
            ]
        )
    return head, rows


def outcome(content: dict[str, Any]) -> str:
    """What the runs show beside fp32, in one sentence; empty if there is no fp32 run to compare with."""
    against, parts, base = _against(content), [], ""
    for run in content["runs"]:
        size = f"{sum(run[f'{part}_bytes_per_param'] for part in PARTS):.3g} B"
        name = run["name"] + (" with halfstep" if run["optimizer"].startswith("halfstep") else "")
        if run["precision"] == "fp32" and run["name"] in against:
            base = f"In fp32: {run['final_val_loss']:.4f} at {size}."
        elif run["name"] in against:
            measured = f"at {size}" if parts else f"validation loss at {size} per parameter"
            parts.append(f"{name}: {against[run['name']]} {measured}")
    return f"{'; '.join(parts)}. {base}" if parts else ""


def sentence(content: dict[str, Any]) -> str:
    """About the text, with the unigram entropy to compare losses with, and about MFU."""
    data = content["data"]
    return (
        f"Losses in nats per byte. Unigram entropy of the text ({data['name']}, {data['bytes']:,} bytes, files: "
        f"{data['files']:,}): {content['unigram_entropy']:.4f}. MFU: FLOPs of the model's matrix products as a share "
        "of the peak that the datasheet of a GPU gives."
    )


def notes(content: dict[str, Any]) -> list[str]:
    """What a reader of the report must know about it."""
    emulated = sorted({run["precision"] for run in content["runs"] if run["emulated"]})
    return [EMULATED.format(names=" and ".join(emulated))] if emulated else []


def overflows(content: dict[str, Any]) -> Iterator[tuple[str, list[list[object]]]]:
    """How many steps each run with a loss scale skipped, and the parameters that overflowed."""
    for run in content["runs"]:
        if overflow := run["overflow"]:
            parameters = [Overflow(**parameter) for parameter in overflow["parameters"]]
            rows: list[list[object]] = [[p.name, overflow_kind(p), p.first_step, p.last_step] for p in parameters]
            yield f"{run['name']}: {overflow['skipped']:,} of {overflow['steps']:,} steps skipped", rows


def show_table(content: dict[str, Any]) -> None:
    head, rows = cells(content)
    if words := outcome(content):
        say(words)
    show(Table(head, rows, range(2, len(head)), ruled=True))
    say(sentence(content))
    for skipped, overflowed in overflows(content):
        say(skipped)
        if overflowed:
            show(Table(OVERFLOW, [list(map(str, row)) for row in overflowed], (2, 3)))
    for note in notes(content):
        say(note)


def counted(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The first run in each 16-bit format whose gradients were counted."""
    by_format = {run["precision"]: run for run in reversed(content["runs"]) if run["gradients"]}
    return [by_format[precision] for precision in ("fp16", "bf16") if precision in by_format]


def smooth(losses: Sequence[float | None], span: int) -> list[tuple[int, float]]:
    """The steps that have a finite loss among the last `span` ones, and its mean over these."""
    ends = range(1, len(losses) + 1)
    recent = ((end, [loss for loss in losses[max(0, end - span) : end] if loss is not None]) for end in ends)
    return [(end, fmean(finite)) for end, finite in recent if finite]


# -------------------------------------------------------------------------------------------------------------- curves

LEFT, RIGHT, TOP, BOTTOM, WIDTH = 50, 410, 8, 204, 420  # of a drawing, in its own units
MEMORY = "{:.4g} MB: weights {:.3g}, gradients {:.3g}, state {:.3g}"
Curves = Sequence[tuple[str, Sequence[tuple[float, float, str]]]]  # by run: step, value, and its text for the pointer


def ticks(low: float, high: float, limit: int) -> list[float]:
    """At most so many round numbers from `low` to `high`."""
    step = 10.0 ** math.floor(math.log10((high - low) / limit))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= limit * 1.001)
    return [number * step for number in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]


def drawing(title: str, bottom: int, parts: Iterable[str], caption: str = "", attributes: str = "") -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {bottom + 24}" role="img" tabindex="0" aria-label="{text(title)}">'
    svg = f"{head}{''.join(parts)}</svg>"
    return f"<figure{attributes}><h2>{text(title)}</h2>{svg}<figcaption>{caption}</figcaption></figure>"


def label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}</text>'


def bar(zone: str, x: float, width: float, top: float, bottom: float, words: str = "") -> str:
    size = f'width="{width:.1f}" height="{bottom - top:.1f}"'
    return f'<rect class="{zone}" x="{x:.1f}" y="{top:.1f}" {size}><title>{words or zone}</title></rect>'


def chart(
    title: str, curves: Curves, *, zero: bool = False, stairs: bool = False, powers: bool = False,
    level: tuple[float, str] | None = None, marks: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """Curves over steps as SVG, with what report.mjs shows at the pointer.

    `stairs` hold until the next value, `powers` are exponents of two, `level` is a dotted line, `marks` are crosses.
    """
    curves = [(name, points) for name, points in curves if points]
    if not curves:
        return ""
    steps, values = ([float(point[i]) for _, points in curves for point in points] for i in (0, 1))
    values += [level[0]] if level else []
    margin = 1.0 if powers else (max(values) - min(values)) * 0.06 or max(values) * 0.1
    low, high = 0.0 if zero else min(values) - margin, max(values) + margin
    first, last = min(steps), max(*steps, 1.0)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * (step - first) / (last - first or 1)

    def y(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)

    parts = []
    for value in ticks(low, high, 5):
        if not powers or value == int(value):
            parts.append(f'<path class="grid" d="M{LEFT} {y(value)}H{RIGHT}"/>')
            parts.append(label(LEFT - 5, y(value) + 4, "end", f"2^{value:.0f}" if powers else f"{value:.6g}"))
    parts += [label(x(step), BOTTOM + 15, "middle", f"{step:.6g}") for step in ticks(first, max(last, first + 1), 6)]
    if level:
        parts.append(f'<path class="level" d="M{LEFT} {y(level[0])}H{RIGHT}"/>')
        parts.append(label(LEFT + 4, y(level[0]) - 4, "start", level[1]))
    for name, points in curves:
        line = " ".join((f"H{x(a):.1f}V{y(b)}" if stairs else f"L{x(a):.1f} {y(b)}") for a, b, _ in points)
        parts.append(f'<path class="{LOOKS[name]}" d="M{x(points[0][0]):.1f} {y(points[0][1])}{line}"/>')
    parts += [f'<path class="skip" d="M{x(a) - 3:.1f} {y(b) - 3:.1f}l6 6m0-6l-6 6"/>' for a, b in marks]
    data = [[*zip(*points, strict=True)][::2] for _, points in curves]
    shown = json.dumps({"left": LEFT, "right": RIGHT, "width": WIDTH, "first": first, "last": last, "curves": data})
    keys = (f'<span class="{LOOKS[a]}">{text(a)} <output>{text(b[-1][2])}</output></span>' for a, b in curves)
    caption = f"<output>step {last:.0f}</output>{''.join(keys)}"
    return drawing(title, BOTTOM, [*parts, '<path class="at" d=""/>'], caption, f" data-curves='{escape(shown)}'")


def charts(content: dict[str, Any]) -> list[str]:
    """Losses, memory, loss scale, and exponents of gradients."""
    runs, trained, validated, memory, scales, skipped = content["runs"], [], [], [], [], []
    steps = max(run["steps"] for run in runs)
    span = max(1, steps // 40)
    for run in runs:
        name, scale = run["name"], run["scale"] or []
        trained.append((name, [(step, loss, f"{loss:.4f}") for step, loss in smooth(run["train_loss"], span)]))
        late = [(step, loss, f"{loss:.4f}") for step, loss in run["validation"] if step >= steps * 0.38]
        validated.append((name, late))
        points = [*run["memory"], [run["steps"], *run["memory"][-1][1:]]]
        sizes = [(step, [size / 1e6 for size in (sum(parts), *parts)]) for step, *parts in points]
        memory.append((name, [(step, size[0], MEMORY.format(*size)) for step, size in sizes]))
        scales.append((name, [(step, math.log2(value), f"{value:,.0f}") for step, value in enumerate(scale, 1)]))
        skipped += [(step, math.log2(scale[step - 1])) for step in run["skipped"]]
    entropy = (content["unigram_entropy"], "unigram entropy")
    return [
        chart("Training loss" + (f", mean of {span} steps" if span > 1 else ""), trained, level=entropy),
        chart("Validation loss, the later part closer", validated),
        chart("Memory at the end of each backward, MB", memory, zero=True, stairs=True),
        chart("Loss scale, and skipped steps", scales, stairs=True, powers=True, marks=skipped),
        *map(histogram, counted(content)),
    ]


def histogram(run: Mapping[str, Any]) -> str:
    """The exponents of a run's gradients under the range of its format, by what becomes of them there."""
    total, scale = run["gradients"]["total"], run["gradients"]["scale"]
    counts = {int(exponent): number for exponent, number in total["exponents"].items()}
    limits, low, high = zones(counts, formats[run["gradients"]["format"]], scale)
    shift, tallest, bottom = math.log2(scale), max(counts.values(), default=1), BOTTOM // 2

    def x(exponent: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(exponent, low), high) - low) / (high - low)

    parts = [label(x(e), bottom + 15, "middle", f"2^{e:.0f}") for e in ticks(low, high, 8) if e == int(e)]
    parts += [bar(f"zone {zone}", x(start), x(end) - x(start), TOP, bottom) for zone, (start, end) in limits.items()]
    for exponent, number in counts.items():
        zone = next(zone for zone, (start, end) in limits.items() if start <= exponent - shift < end)
        words = f"2^{exponent - shift:.0f}: {percent(number / max(1, total['elements']))} %, {zone}"
        top, width = bottom - (bottom - TOP) * number / tallest, 0.86 * (RIGHT - LEFT) / (high - low)
        parts.append(bar(zone, x(exponent - shift), width, top, bottom, words))
    keys = (f'<span class="{zone}">{zone}</span>' for zone, (start, end) in limits.items() if x(start) < x(end))
    title = f"Gradients in {run['name']}" + (f" at scale {scale:,.0f}" if shift else "")
    return drawing(title, bottom, parts, caption="".join(keys))


# ---------------------------------------------------------------------------------------------------------------- page


def text(value: object) -> str:
    """A value in the page."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return escape(f"{value:,}" if isinstance(value, int) else str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], style: str = "") -> str:
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{style}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def gradients_of(run: Mapping[str, Any]) -> str:
    """Where the gradients of a run fall in its format, and the advice on its loss scale."""
    counts, shares = run["gradients"], ("zero", "flushed", "subnormal", "normal", "overflow")
    rows = [
        [row["name"], row["elements"], *(percent(row[name] / max(1, row["elements"])) for name in shares)]
        for row in (*counts["worst"], counts["total"])
    ]
    at = f", at the last scale of {counts['scale']:,.0f}" if run["scale"] else ""
    return section(
        f"Gradients, {run['name']}",
        f"Counted in {counts['steps']} steps{at}, after rounding to {counts['format']}: flushed values count as zero. "
        "The worst parameters, and all together:",
        table(("parameter", "elements", *(f"{name} %" for name in shares)), rows, "wide")
        + f"<pre>{text(counts['advice'] and counts['advice']['text'])}</pre>",
    )


def section(title: str, words: str, content: str) -> str:
    """A heading, a paragraph where there is one, and `content` in HTML."""
    return f"<h2>{text(title)}</h2>" + (f"<p>{text(words)}</p>" if words else "") + content


def page(content: dict[str, Any]) -> str:
    """report.html: a single file with all curves and tables."""
    runs = content["runs"]
    troubles = [f"{run['name']}: {run['trouble']}" for run in runs if run["trouble"]]
    parts = [f'<p class="outcome">{text(line)}</p>' for line in filter(None, [outcome(content)])]
    parts += [f'<p class="note">{text(note)}</p>' for note in (*troubles, *notes(content))]
    head, rows = cells(content)
    rows = [[cell.replace(".", ".\u200b", 2) if cell == row[1] else cell for cell in row] for row in rows]  # may break
    names, *lines = zip([name.replace("\n", " ") for name in head], *rows, strict=True)  # a column for each run
    parts += [
        table(names, lines),
        f"<p>{text(sentence(content))} Bytes are those of weights, gradients and optimizer in one process.</p>",
        f'<div class="charts">{"".join(charts(content))}</div>',
    ]
    for run in runs:
        for finding in run["findings"]:
            title = "Found by halfstep.doctor after the last step: "
            title += f"{run['name']}: {finding['severity']}, {finding['name']}"
            rows = [[name, finding[name]] for name in ("where", "what", "stake", "remedy")]
            parts.append(section(title, "", table((), rows, "left")))
    for skipped, overflowed in overflows(content):
        parts.append(section("Overflows", skipped, table(OVERFLOW, overflowed, "left") if overflowed else ""))
    parts += map(gradients_of, counted(content))
    settings = ""
    for title in ("model", "training", "layout", "data", "machine", "versions"):
        named = [(name.replace("_", " "), value) for name, value in content[title].items()]
        settings += f"<div>{section(title.capitalize(), '', table((), named, 'left'))}</div>"
    style, script = (
        Path(__file__).with_name(f"report.{suffix}").read_text(encoding="utf-8") for suffix in ("css", "mjs")
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>train_gpt.py</title>'
        f"<style>{style}{COLOURS}</style></head><body><main><h1>train_gpt.py</h1>{''.join(parts)}"
        f'<details><summary>Settings and machine</summary><div class="charts">{settings}</div></details></main>'
        f'<script type="module">{script}</script></body></html>\n'
    )


def write(folder: Path, content: dict[str, Any]) -> list[Path]:
    """Write the files, each at once, and return their paths."""
    files = {"report.json": json.dumps(content, indent=1, allow_nan=False) + "\n", "report.html": page(content)}
    for name, data in files.items():
        unfinished = folder / f".{name}"
        unfinished.write_text(data, encoding="utf-8")
        unfinished.replace(folder / name)
    return [folder / name for name in files]
