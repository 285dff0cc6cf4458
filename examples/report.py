"""The report of train_gpt.py: report.json, report.png and report.html, and the printed table."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from halfstep.cli import figures
from halfstep.cli.machine import processor_name, version_of
from halfstep.cli.results import overflow_kind
from halfstep.cli.results_picture import draw_exponents
from halfstep.cli.terminal import Table, say, show
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.overflow import Overflow

# Colour-blind readers can tell them apart; the run without masters has a warning colour.
RUN_COLOURS = {"fp32": "#4c566a", "bf16": "#0072b2", "fp16": "#009e73", "bf16 without master": "#d55e00"}
OVERFLOW = ("parameter", "steps with", "first step", "last step")
EMULATED = (
    "On this CPU the {names} matrix products were emulated: accumulated in fp32 and rounded once, as in a tensor core, "
    "with its underflow and overflow. These times say nothing about a GPU."
)


def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine, without its name and its user, and the versions of packages (None: absent)."""
    known = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    versions = {name: version_of(name) for name in ("halfstep", "torch", "numpy", "triton")}
    return {"machine": known, "versions": {"python": platform.python_version(), **versions}}


PARTS = ("param", "gradient", "optimizer")


def _against(content: dict[str, Any]) -> dict[str, str]:
    """The validation loss of each run against that of fp32, if there are both."""
    losses = {run["name"]: run["final_val_loss"] for run in content["runs"]}
    base = next((losses[run["name"]] for run in content["runs"] if run["precision"] == "fp32"), None)
    if base is None or len(losses) < 2:
        return {}
    return {name: f"{100 * (loss / base - 1):+.2f} %" for name, loss in losses.items() if loss is not None}


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
    against, kept = _against(content), {}
    for run in content["runs"]:
        kept[run["name"]] = f"{sum(run[f'{part}_bytes_per_param'] for part in PARTS):.3g}"
    base = next((run for run in content["runs"] if run["precision"] == "fp32" and run["name"] in against), None)
    others = [f"{name} {change} ({kept[name]})" for name, change in against.items() if base and name != base["name"]]
    if base is None or not others:
        return ""
    loss = f"{base['final_val_loss']:.4f}, and bytes per parameter (fp32: {kept[base['name']]})"
    return f"Validation loss against fp32's {loss}: {', '.join(others)}."


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
    missing = find_spec("matplotlib") is None
    said = [EMULATED.format(names=" and ".join(emulated))] if emulated else []
    return [*said, *[f"no report.png: {figures.MISSING}"] * missing]


def overflows(content: dict[str, Any]) -> Iterator[tuple[str, list[list[object]]]]:
    """How many steps each run with a loss scale skipped, and the parameters that overflowed."""
    for run in content["runs"]:
        if known := run["overflow"]:
            parameters = [Overflow(**parameter) for parameter in known["parameters"]]
            rows: list[list[object]] = [[p.name, overflow_kind(p), p.first_step, p.last_step] for p in parameters]
            yield f"{run['name']}: {known['skipped']:,} of {known['steps']:,} steps skipped", rows


def show_table(content: dict[str, Any]) -> None:
    """Print the table, the parameters that overflowed, and notes."""
    head, rows = cells(content)
    for line in filter(None, [outcome(content)]):
        say(line)
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
    found = {run["precision"]: run for run in reversed(content["runs"]) if run["gradients"]}
    return [found[precision] for precision in ("fp16", "bf16") if precision in found]


def smooth(losses: Sequence[float | None], span: int) -> tuple[list[int], list[float]]:
    """The running mean over the last `span` steps with a finite loss, and the steps that have one."""
    parts = ((end, losses[max(0, end - span) : end]) for end in range(1, len(losses) + 1))
    finite = [(end, kept) for end, part in parts if (kept := [loss for loss in part if loss is not None])]
    return [end for end, _ in finite], [sum(kept) / len(kept) for _, kept in finite]


# ------------------------------------------------------------------------------------------------------------- picture


def picture(content: dict[str, Any]) -> bytes | None:
    """report.png: losses, loss scale, bytes per parameter, exponents of gradients. None without matplotlib."""
    sampled = counted(content)
    try:
        figure = figures.figure(13, 13 if sampled else 9)
    except ImportError:
        return None
    runs, where = content["runs"], content["machine"]
    grid = figure.add_gridspec(3 if sampled else 2, 2)
    losses, closer, scales, sizes = (figure.add_subplot(grid[place // 2, place % 2]) for place in range(4))
    draw_losses(losses, closer, runs, content["unigram_entropy"])
    draw_scale(scales, next((run for run in runs if run["scale"]), None))
    draw_bytes(sizes, runs)
    for axes in (losses, closer, scales, sizes):
        figures.tidy(axes, "y")
    for place, run in enumerate(sampled):
        axes = figure.add_subplot(grid[2, place if len(sampled) > 1 else slice(0, 2)])
        known, total = run["gradients"], run["gradients"]["total"]
        exponents = {int(exponent): number for exponent, number in total["exponents"].items()}
        draw_exponents(axes, exponents, total["elements"], formats[known["format"]], known["scale"], "gradients")
    figure.suptitle(
        f"{content['model']['parameters']:,} parameters, {content['training']['batch']} windows of "
        f"{content['model']['context']} bytes per step, {runs[0]['strategy']}, processes: {runs[0]['world_size']}, "
        f"{where['cpu'] if where['device'] == 'CPU' else where['device']}",
        fontsize=12,
    )
    buffer = io.BytesIO()
    figures.save(figure, buffer)
    return buffer.getvalue()


def draw_losses(losses: Any, closer: Any, runs: Sequence[Mapping[str, Any]], entropy: float) -> None:
    """Training losses, smoothed, and the later validations."""
    steps = max(run["steps"] for run in runs)
    span = max(1, steps // 40)
    for run in runs:
        # fp32 is drawn broad and pale below the others, so that both are visible where they agree.
        style: dict[str, Any] = {"color": RUN_COLOURS[run["name"]], "linewidth": 1.6, "label": run["name"]}
        if run["name"] == "fp32" and len(runs) > 1:
            style |= {"linewidth": 5.0, "alpha": 0.45, "solid_capstyle": "round"}
        losses.plot(*smooth(run["train_loss"], span), **style)
        if points := run["validation"]:
            style["label"] = f"{points[-1][1]:.4f}  {run['name']}"
            closer.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
    losses.axhline(entropy, color="black", linestyle=":", linewidth=1.2, label=f"unigram entropy {entropy:.3f}")
    losses.set(title=f"Training loss, mean of {span} steps", xlabel="step", ylabel="nats per byte")
    losses.legend(frameon=False)
    late = [loss for run in runs for step, loss in run["validation"] if step >= steps * 0.4]
    if late:
        margin = max((max(late) - min(late)) * 0.08, 0.005)
        closer.set_ylim(min(late) - margin, max(late) + margin)
        closer.set_xlim(steps * 0.38, steps * 1.02)
        closer.legend(frameon=False, title="at the end", alignment="left")
    closer.set(title="Validation loss, the later part closer", xlabel="step", ylabel="nats per byte")


def draw_scale(axes: Any, run: Mapping[str, Any] | None) -> None:
    """The loss scale in each step, and the skipped steps."""
    if run is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no fp16 run: no loss scale", ha="center", va="center", color="#777777", fontsize=11)
        return
    scale, skipped = run["scale"], run["skipped"]
    axes.step(range(1, len(scale) + 1), scale, where="mid", color=RUN_COLOURS[run["name"]], linewidth=1.8)
    cross = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": "#d55e00", "linestyle": "none"}
    axes.plot(skipped, [scale[step - 1] for step in skipped], label=f"skipped step ({len(skipped)})", **cross)
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scale) / 2, max(scale) * 3)
    axes.set(title="Loss scale (fp16)", xlabel="step", ylabel="scale")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="best")


def draw_bytes(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """The bytes per parameter of weights, gradients and optimizer state, one on the other."""
    names, colours = [run["name"] for run in runs], [RUN_COLOURS[run["name"]] for run in runs]
    bottom = [0.0] * len(runs)
    for part, key, alpha in (("weights", "param", 1.0), ("gradients", "gradient", 0.65), ("state", "optimizer", 0.35)):
        heights = [run[f"{key}_bytes_per_param"] for run in runs]
        bars = axes.bar(names, heights, bottom=bottom, color=colours, alpha=alpha, width=0.72, edgecolor="white")
        labels, ink = [f"{part} {height:.3g}" for height in heights], "black" if alpha < 0.5 else "white"
        axes.bar_label(bars, labels, label_type="center", color=ink, fontsize=9)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.bar_label(bars, [f"{top:.3g}" for top in bottom], fontweight="bold")
    axes.set_ylim(0, max(bottom) * 1.1)
    axes.set(title="Bytes per parameter, measured (one process)", ylabel="bytes")
    if len(runs) == 1:
        axes.set_xlim(-1.2, 1.2)


# ---------------------------------------------------------------------------------------------------------------- page

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1280px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.15em; margin-top: 2em; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85em; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35em 0.7em; text-align: right; border-bottom: 1px solid #8884; vertical-align: bottom; }
td { white-space: nowrap; } .left td { white-space: normal; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
.outcome { font-size: 1.15em; }
.note { background: light-dark(#fff6e5, #3a2a10); border-left: 4px solid #d55e00; padding: 0.6em 1em; }
"""


def text(value: object) -> str:
    """A value in the page."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return escape(f"{value:,}" if isinstance(value, int) else str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def gradients_of(run: Mapping[str, Any]) -> str:
    """Where the gradients of a run fall in its format, and the advice on its loss scale."""
    counts, kinds = run["gradients"], ("zero", "flushed", "subnormal", "normal", "overflow")
    rows = [
        [row["name"], row["elements"], *(percent(row[kind] / max(1, row["elements"])) for kind in kinds)]
        for row in (*counts["worst"], counts["total"])
    ]
    at = f", at the last scale of {counts['scale']:,.0f}" if run["scale"] else ""
    return section(
        f"Gradients, {run['name']}",
        f"Counted in {counts['steps']} steps{at}, after rounding to {counts['format']}: flushed values count as zero. "
        "The worst parameters, and all together:",
        table(("parameter", "elements", *(f"{kind} %" for kind in kinds)), rows)
        + f"<pre>{text(counts['advice'] and counts['advice']['text'])}</pre>",
    )


def section(title: str, words: str, content: str) -> str:
    """A heading, a paragraph where there is one, and `content` in HTML."""
    return f"<h2>{text(title)}</h2>" + (f"<p>{text(words)}</p>" if words else "") + content


def page(content: dict[str, Any], png: bytes | None) -> str:
    """report.html: a single file with the picture and all tables."""
    runs = content["runs"]
    troubles = [f"{run['name']}: {run['trouble']}" for run in runs if run["trouble"]]
    parts = [f'<p class="outcome">{text(line)}</p>' for line in filter(None, [outcome(content)])]
    parts += [f'<p class="note">{text(note)}</p>' for note in (*troubles, *notes(content))]
    parts += [
        table(*cells(content)),
        f"<p>{text(sentence(content))} Bytes are those of the tensors in one process.</p>",
    ]
    if png:
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append(f'<img alt="losses, loss scale, bytes per parameter, gradients" src="{source}">')
    for run in runs:
        for finding in run["findings"]:
            title = (
                f"Found by halfstep.doctor after the last step: {run['name']}: {finding['severity']}, {finding['name']}"
            )
            rows = [(name, finding[name]) for name in ("where", "what", "stake", "remedy")]
            parts.append(section(title, "", table((), rows, "left")))
    parts += [section("Overflows", skipped, table(OVERFLOW, rows, "left")) for skipped, rows in overflows(content)]
    parts += map(gradients_of, counted(content))
    for title in ("model", "training", "layout", "data", "machine", "versions"):
        named = [(name.replace("_", " "), value) for name, value in content[title].items()]
        parts.append(section(title.capitalize(), "", table((), named, "left")))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>train_gpt.py</title>'
        f"<style>{STYLE}</style></head><body><h1>train_gpt.py</h1>{''.join(parts)}</body></html>\n"
    )


def write(folder: Path, content: dict[str, Any]) -> list[Path]:
    """Write the files, each at once, and return their paths. Without matplotlib there is no report.png."""
    png = picture(content)
    files = {"report.json": (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()}
    files |= {"report.png": png} if png else {}
    files["report.html"] = page(content, png).encode()
    for name, data in files.items():
        unfinished = folder / f".{name}"
        unfinished.write_bytes(data)
        unfinished.replace(folder / name)
    return [folder / name for name in files]
