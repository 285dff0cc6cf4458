"""The report of train_gpt.py: report.json, report.html, and the printed table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from halfstep.cli import figures
from halfstep.cli.results_picture import draw_exponents
from halfstep.cli.terminal import Table, say, show
from halfstep.integrations.doctor import Finding
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent

# Readable on light and dark backgrounds, and by colour-blind readers; the run without masters has a warning colour.
COLOURS = {"fp32": "#7f8ba0", "bf16": "#1f8fd6", "fp16": "#16a07a", "bf16 without master": "#dd6b1f"}
PARTS = ("param", "gradient", "optimizer")
EMULATED = (
    "On this CPU the {names} matrix products were emulated: accumulated in fp32 and rounded once, as in a tensor core, "
    "with its underflow and overflow. These times say nothing about a GPU."
)


def _against(content: dict[str, Any]) -> dict[str, str]:
    """The change of each run's validation loss relative to fp32; empty without an fp32 run to compare with."""
    losses = {run["name"]: run["final_val_loss"] for run in content["runs"]}
    base = next((losses[run["name"]] for run in content["runs"] if run["precision"] == "fp32"), None)
    if base is None or len(losses) < 2:
        return {}
    changes = {name: f"{100 * (loss / base - 1):+.2f} %" for name, loss in losses.items() if loss is not None}
    return {name: change.replace("-", "\N{MINUS SIGN}") for name, change in changes.items()}


def cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table in the terminal and on the page."""
    head = ["run", "optimizer", "train loss", "val loss", "vs fp32", "skipped", "scale"]
    head += [*(f"{part}\nB/param" for part in ("weight", "grad", "state")), "step\nms", "optimizer\nms"]
    head += ["tokens/s", "MFU"]
    against, rows = _against(content), []
    for run in content["runs"]:
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (run["final_train_loss"], run["final_val_loss"]))
        scaled = ("-", "-") if run["final_scale"] is None else (str(run["skipped_steps"]), f"{run['final_scale']:,.0f}")
        sizes = (f"{run[f'{part}_bytes_per_param']:.2f}" for part in PARTS)
        speeds = (f"{run['step_ms_p50']:.1f}", f"{run['optimizer_ms_p50']:.2f}", f"{run['tokens_per_s']:,.0f}")
        mfu = "-" if run["mfu"] is None else f"{percent(run['mfu'])} %"
        named = (run["name"], run["optimizer"], *losses, against.get(run["name"], "-"))
        rows.append([*named, *scaled, *sizes, *speeds, mfu])
    return head, rows


def outcome(content: dict[str, Any]) -> str:
    """One sentence that compares the runs with fp32; empty without an fp32 run to compare with."""
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
    """A note on the text, with its unigram entropy as a baseline for losses, and on MFU."""
    data = content["data"]
    return (
        f"Losses in nats per byte. Unigram entropy of the text ({data['name']}, {data['bytes']:,} bytes, files: "
        f"{data['files']:,}): {content['unigram_entropy']:.4f}. MFU: FLOPs of the model's matrix products as a share "
        "of the peak that the datasheet of a GPU gives."
    )


def notes(content: dict[str, Any]) -> list[str]:
    """Caveats for readers of the report."""
    emulated = sorted({run["precision"] for run in content["runs"] if run["emulated"]})
    return [EMULATED.format(names=" and ".join(emulated))] if emulated else []


def overflows(content: dict[str, Any]) -> list[str]:
    """For each run with a loss scale, how many steps it skipped, and which parameters overflowed."""
    return [f"{run['name']}: {run['overflow']['text']}" for run in content["runs"] if run["overflow"]]


def show_table(content: dict[str, Any]) -> None:
    """Print the head of the page and the overflows."""
    head, rows = cells(content)
    lines = [line for text in overflows(content) for line in text.splitlines()]
    table = Table(head, rows, range(2, len(head)), ruled=True)
    for part in filter(None, [outcome(content), table, sentence(content), *lines, *notes(content)]):
        show(part) if part is table else say(part)


def counted(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The first run in each 16-bit format whose gradients were counted."""
    by_format = {run["precision"]: run for run in reversed(content["runs"]) if run["gradients"]}
    return [by_format[precision] for precision in ("fp16", "bf16") if precision in by_format]


def smooth(losses: Sequence[float | None], span: int) -> list[tuple[int, float]]:
    """(step, mean of the finite losses among the last `span`) for each step that has any."""
    ends = range(1, len(losses) + 1)
    recent = ((end, [loss for loss in losses[max(0, end - span) : end] if loss is not None]) for end in ends)
    return [(end, fmean(finite)) for end, finite in recent if finite]


# -------------------------------------------------------------------------------------------------------------- curves


def drawing(title: str, draw: Callable[[Any], None], keys: Iterable[tuple[str, str]] = ()) -> str:
    """A figure drawn by `draw` on matplotlib's axes, as SVG in the colours of the page, with `keys` as its legend."""
    figure, stream = figures.figure(5.2, 2.9), io.StringIO()
    axes = figure.add_subplot(facecolor="none")
    figure.patch.set_visible(False)
    draw(axes)
    axes.set_title("")
    figures.tidy(axes, "y")
    figures.save(figure, stream)
    svg = "".join(stream.getvalue().partition("<svg")[1:])
    svg = svg.replace("#000000", "currentColor").replace("#e5e5e5", "var(--edge)")
    spans = (f'<span style="--c: {COLOURS[name]}">{escape(f"{name} {words}")}</span>' for name, words in keys)
    return f"<figure><h2>{escape(title)}</h2>{svg}<figcaption>{''.join(spans)}</figcaption></figure>"


def chart(
    title: str, words: str, curves: Mapping[str, Sequence[Sequence[float]]], *, zero: bool = False,
    stairs: bool = False, powers: bool = False, level: float | None = None, marks: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """Curves over steps, for the runs that have values, with a legend that formats the last values with `words`.

    The y axis may start at `zero` or be logarithmic with `powers` of two; `stairs` hold each value until the next;
    `level` is the unigram entropy; `marks` are drawn as crosses.
    """
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return ""

    def draw(axes: Any) -> None:
        for name, curve in curves.items():
            width, alpha = (4, 0.5) if name == "fp32" else (1.6, 1)  # other curves may coincide with fp32's
            style = "steps-post" if stairs else "default"
            axes.plot(*zip(*curve, strict=True), color=COLOURS[name], linewidth=width, alpha=alpha, drawstyle=style)
        if level:
            axes.axhline(level, color="#888888", linestyle=":")
            axes.text(0.01, level, "unigram entropy", transform=axes.get_yaxis_transform(), va="bottom", fontsize=9)
        axes.plot(*zip(*marks, strict=True) if marks else ((), ()), "x", color=COLOURS["bf16 without master"])
        if zero:
            axes.set_ylim(0)
        if powers:
            axes.set_yscale("log", base=2)

    return drawing(title, draw, [(name, words.format(curve[-1][1])) for name, curve in curves.items()])


def charts(content: dict[str, Any]) -> list[str]:
    """Losses, memory, loss scale, and exponents of gradients."""
    runs, trained, validated, memory, scales, skipped = content["runs"], {}, {}, {}, {}, []
    steps = max(run["steps"] for run in runs)
    span = max(1, steps // 40)
    for run in runs:
        name, scale = run["name"], run["scale"] or []
        trained[name] = smooth(run["train_loss"], span)
        validated[name] = [(step, loss) for step, loss in run["validation"] if step >= steps * 0.38]
        sizes = [*run["memory"], [run["steps"], *run["memory"][-1][1:]]]
        memory[name] = [(step, sum(parts) / 1e6) for step, *parts in sizes]
        scales[name] = list(enumerate(scale, 1))
        skipped += [(step, scale[step - 1]) for step in run["skipped"]]
    title = "Training loss" + (f", mean of {span} steps" if span > 1 else "")
    return [
        chart(title, "{:.4f}", trained, level=content["unigram_entropy"]),
        chart("Validation loss, the later part closer", "{:.4f}", validated),
        chart("Memory at the end of each backward, MB", "{:.4g} MB", memory, zero=True, stairs=True),
        chart("Loss scale, and skipped steps", "{:,.0f}", scales, stairs=True, powers=True, marks=skipped),
        *map(histogram, counted(content)),
    ]


def histogram(run: Mapping[str, Any]) -> str:
    """A histogram of the exponents of a run's gradients, and what happens to them in its format."""
    counts = run["gradients"]["statistics"]
    exponents = {int(exponent): number for exponent, number in counts["total"]["exponents"].items()}
    shape = exponents, counts["total"]["elements"], formats[counts["format"]], counts["scale"], "gradients"
    title = f"Gradients in {run['name']}" + (f" at scale {counts['scale']:,.0f}" if run["scale"] else "")
    return drawing(title, lambda axes: draw_exponents(axes, *shape))


# ---------------------------------------------------------------------------------------------------------------- page


def page(content: dict[str, Any]) -> str:
    """report.html: a single file with all curves and tables."""
    runs = content["runs"]
    troubles = [f"{run['name']}: {run['trouble']}" for run in runs if run["trouble"]]
    try:
        drawings = charts(content)
    except ImportError as error:  # no matplotlib
        drawings, troubles = [], [*troubles, str(error)]
    above = [("outcome", outcome(content)), *(("note", note) for note in (*troubles, *notes(content)))]
    opening = "".join(f'<p class="{style}">{escape(words)}</p>' for style, words in above if words)
    head, rows = cells(content)
    lines = zip([name.replace("\n", " ") for name in head], *rows, strict=True)  # one column per run
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    findings = [(run["name"], Finding(**finding)) for run in runs for finding in run["findings"]]
    blocks = [(f"{name}: found by halfstep.doctor after the last step", str(finding)) for name, finding in findings]
    blocks += [("Overflows", text) for text in overflows(content)]
    words = ", after rounding: values that were flushed before count as zero"
    blocks += [(f"Gradients, {run['name']}{words}", run["gradients"]["text"]) for run in counted(content)]
    settings = {name: value for name, value in content.items() if name not in ("runs", "unigram_entropy")}
    blocks.append(("Settings and machine", json.dumps(settings, indent=1, default=str)))
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>train_gpt.py</title>'
        f"<style>{style}</style></head><body><main><h1>train_gpt.py</h1>{opening}<table>{table}</table>"
        f"<p>{escape(sentence(content))} Bytes are those of weights, gradients and optimizer in one process.</p>"
        f'<div class="charts">{"".join(drawings)}</div>'
        + "".join(f"<h2>{escape(title)}</h2><pre>{escape(text)}</pre>" for title, text in blocks)
        + "</main></body></html>\n"
    )


def write(folder: Path, content: dict[str, Any]) -> list[Path]:
    """Write the files, each atomically, and return their paths."""
    text = json.dumps(content, indent=1, allow_nan=False, default=str) + "\n"
    files = {"report.json": text, "report.html": page(content)}
    for name, data in files.items():
        unfinished = folder / f".{name}"
        unfinished.write_text(data, encoding="utf-8")
        unfinished.replace(folder / name)
    return [folder / name for name in files]
