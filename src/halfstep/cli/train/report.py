"""The report of a command: report.json, report.png and report.html, and the printed table."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.cli import figures
from halfstep.cli.machine import processor_name, version_of
from halfstep.cli.results import overflow_kind
from halfstep.cli.results_picture import draw_exponents
from halfstep.cli.terminal import Terminal, ruled
from halfstep.cli.train.data import Corpus
from halfstep.cli.train.loop import RunResult, Settings
from halfstep.cli.train.model import SIZES
from halfstep.cli.train.precision import Precision
from halfstep.cli.train.world import ThisRank, restarts, shard_size
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.overflow import Overflow, OverflowReport

# The colour of each run. Colour-blind readers can tell them apart; the run without masters has a warning colour.
RUN_COLOURS = {"fp32": "#4c566a", "bf16": "#0072b2", "fp16": "#009e73", "bf16 without master": "#d55e00"}
SPARE = ("#cc79a7", "#56b4e9")
EMULATED = (
    "On this CPU the {names} matrix products were emulated: {names} operands are multiplied and accumulated in fp32, "
    "and the result is rounded once, in the forward and in the backward. This is the arithmetic of a tensor core, with "
    "its underflow and overflow, but these times say nothing about a GPU."
)


def machine(device: torch.device) -> dict[str, Any]:
    """A description of the machine, without its name and its user."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """The versions of Python and of packages; None for packages that are not installed."""
    packages = ("halfstep", "torch", "numpy", "triton")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def layout(world: ThisRank) -> dict[str, Any]:
    """The strategy of the runs and its options."""
    chosen = {"strategy": world.strategy, "processes": world.size, **asdict(world.layout), "restarts": restarts()}
    chosen["shard_size"] = {
        "fsdp": world.size,
        "hsdp": shard_size(world.layout, world.size) if world.strategy == "hsdp" else None,
    }.get(world.strategy)
    return chosen


def report(results: Sequence[RunResult], settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """The content of report.json."""
    size = SIZES[settings.size]
    device = results[0].world.device
    used = dict.fromkeys(result.run.precision for result in results)
    emulated = [name for name in used if Precision.on(name, device).emulated]
    return {
        "machine": machine(device),
        "versions": versions(),
        "model": {
            "size": settings.size,
            "layers": size.layers,
            "width": size.width,
            "heads": size.heads,
            "context": size.context,
            "parameters": results[0].parameters,
            "trained_parameters": results[0].trained,
        },
        "training": {
            "steps": settings.steps,
            "batch": settings.batch,
            "seed": settings.seed,
            "lr": settings.lr,
            "weight_decay": settings.weight_decay,
            "warmup": settings.warmup,
            "init_scale": settings.init_scale,
            "growth_interval": settings.growth_interval,
            "state_dtype": settings.state_dtype,
            "master_weights": settings.master_weights,
            "init": settings.init,
            "base": settings.base or None,
            "lora": settings.lora,
            "lora_alpha": settings.lora_alpha,
            "validate_every": settings.validate_every or max(1, settings.steps // 10),
            "patience": settings.patience,
        },
        "layout": layout(results[0].world),
        "data": {"name": corpus.name, "files": corpus.files, "bytes": corpus.size, "sha256": corpus.sha256},
        "unigram_entropy": corpus.unigram_entropy,
        "notes": [EMULATED.format(names=" and ".join(emulated))] if emulated else [],
        "runs": [result.row() for result in results],
    }


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cells(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table on the screen and in the page."""
    runs = content["runs"]
    base = next((run["final_val_loss"] for run in runs if run["precision"] == "fp32"), None)
    compared = base is not None and len(runs) > 1
    head = ["run", "optimizer", "train loss", "val loss", *(["vs fp32"] if compared else [])]
    head += ["skipped", "scale", *(f"{part}\nB/param" for part in ("weight", "grad", "state"))]
    head += ["step\nms", "optimizer\nms", "tokens/s", "MFU"]
    rows = []
    for run in runs:
        loss = run["final_val_loss"]
        against = [_shown(None if loss is None else 100 * (loss / base - 1), "+.2f") + " %"] if compared else []
        rows.append(
            [
                run["name"],
                run["optimizer"],
                _shown(run["final_train_loss"], ".4f"),
                _shown(loss, ".4f"),
                *against,
                str(run["skipped_steps"]) if run["final_scale"] is not None else "-",
                _shown(run["final_scale"], ",.0f"),
                f"{run['param_bytes_per_param']:.2f}",
                f"{run['gradient_bytes_per_param']:.2f}",
                f"{run['optimizer_bytes_per_param']:.2f}",
                f"{run['step_ms_p50']:.1f}",
                f"{run['optimizer_ms_p50']:.2f}",
                f"{run['tokens_per_s']:,.0f}",
                f"{percent(run['mfu'])} %",
            ]
        )
    return head, rows


def table(content: dict[str, Any], screen: Terminal) -> list[str]:
    """The table that is printed after training."""
    head, rows = _cells(content)
    return [*ruled(head, rows, [number > 1 for number in range(len(head))], screen), *screen.wrap(sentence(content))]


def sentence(content: dict[str, Any]) -> str:
    """Sentences about the text, with the unigram entropy to compare losses with, and about MFU."""
    data, peaks = content["data"], {run["peak"]["source"] for run in content["runs"]}
    return (
        f"Losses in nats per byte. Unigram entropy of the text ({data['name']}, {data['bytes']:,} bytes in "
        f"{data['files']:,} file{'s' * (data['files'] > 1)}): {content['unigram_entropy']:.4f}. "
        f"MFU: FLOPs of the model as a share of the peak ({'; '.join(sorted(peaks))})."
    )


def overflows(content: dict[str, Any]) -> dict[str, OverflowReport]:
    """The overflow report of each run with a loss scale, by the name of the run."""
    return {
        run["name"]: OverflowReport(
            **{**run["overflow"], "parameters": [Overflow(**one) for one in run["overflow"]["parameters"]]}
        )
        for run in content["runs"]
        if run["overflow"]
    }


def _counted(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The first run in each 16-bit format whose gradients were counted."""
    found = {run["precision"]: run for run in reversed(content["runs"]) if run["gradients"]}
    return [found[precision] for precision in ("fp16", "bf16") if precision in found]


def _gradients(run: dict[str, Any]) -> tuple[str, list[list[str]], str]:
    """A sentence about the gradients of a run, the rows of a table, and the advice."""
    counted = run["gradients"]
    lines = []
    for row in [*counted["worst"], counted["total"]]:
        kinds = ("zero", "flushed", "subnormal", "normal", "overflow")
        shares = (row[name] / max(1, row["elements"]) for name in kinds)
        lines.append([row["name"], f"{row['elements']:,}", *map(percent, shares)])
    scaled = f", at the last scale of {counted['scale']:,.0f}" if run["scale"] else ""
    steps = counted["steps"]
    sentence = (
        f"Counted in {steps} step{'s' * (steps != 1)}{scaled}, after rounding to {counted['format']}: flushed values "
        "count as zero."
    )
    return sentence, lines, "" if counted["advice"] is None else counted["advice"]["text"]


def _write(path: Path, data: bytes) -> None:
    """Replace `path` atomically, so that a reader never sees an incomplete report."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _colours(runs: Sequence[dict[str, Any]]) -> list[str]:
    spare = iter(SPARE * len(runs))
    return [RUN_COLOURS.get(run["name"]) or next(spare) for run in runs]


def _smooth(losses: Sequence[float | None], span: int) -> tuple[list[int], list[float]]:
    """The running mean over the last `span` steps with a finite loss, and the steps that have one."""
    steps, means = [], []
    for end in range(1, len(losses) + 1):
        part = [loss for loss in losses[max(0, end - span) : end] if loss is not None]
        if part:
            steps.append(end)
            means.append(sum(part) / len(part))
    return steps, means


def picture(content: dict[str, Any]) -> bytes | None:
    """report.png: losses, loss scale, bytes per parameter, exponents of gradients. None without matplotlib."""
    try:
        from matplotlib.colors import to_rgb
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError:
        return None

    runs = content["runs"]
    colours = _colours(runs)
    scaled = [(run, colour) for run, colour in zip(runs, colours, strict=True) if run["scale"]]
    counted = _counted(content)
    height, rows = (13, 3) if counted else (9, 2)
    figure = figures.figure(13, height)
    grid = figure.add_gridspec(rows, 2)
    losses, closer, scales, sizes = (figure.add_subplot(grid[place // 2, place % 2]) for place in range(4))
    for place, run in enumerate(counted):
        axes = figure.add_subplot(grid[2, place if len(counted) > 1 else slice(0, 2)])
        known, total = run["gradients"], run["gradients"]["total"]
        exponents = {int(exponent): number for exponent, number in total["exponents"].items()}
        draw_exponents(axes, exponents, total["elements"], formats[known["format"]], known["scale"], "gradients")
    steps = max(len(run["train_loss"]) for run in runs)
    span = max(1, steps // 40)

    for run, colour in zip(runs, colours, strict=True):
        # fp32 is drawn broad and pale below the others, so that both are visible where they agree.
        style: dict[str, Any] = {"color": colour, "linewidth": 1.6, "label": run["name"]}
        if run["name"] == "fp32" and len(runs) > 1:
            style |= {"linewidth": 5.0, "alpha": 0.45, "solid_capstyle": "round"}
        losses.plot(*_smooth(run["train_loss"], span), **style)
        points = run["validation"]
        if points:
            style["label"] = f"{points[-1][1]:.4f}  {run['name']}"
            closer.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
    losses.axhline(content["unigram_entropy"], color="black", linestyle=":", linewidth=1.2)
    losses.annotate(
        f"unigram entropy {content['unigram_entropy']:.3f}",
        (steps, content["unigram_entropy"]),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    losses.set(title=f"Training loss, mean of {span} steps", xlabel="step", ylabel="nats per byte")
    losses.legend(frameon=False)

    late = [loss for run in runs for step, loss in run["validation"] if step >= steps * 0.4]
    if late:
        margin = max((max(late) - min(late)) * 0.08, 0.005)
        closer.set_ylim(min(late) - margin, max(late) + margin)
        closer.set_xlim(steps * 0.38, steps * 1.02)
        closer.legend(frameon=False, title="at the end", alignment="left")
    closer.set(title="Validation loss, the later part closer", xlabel="step", ylabel="nats per byte")

    for run, colour in scaled:
        scales.step(range(1, len(run["scale"]) + 1), run["scale"], where="mid", color=colour, linewidth=1.8)
        skipped = run["skipped"]
        scales.plot(
            skipped,
            [run["scale"][step - 1] for step in skipped],
            linestyle="none",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            color="#d55e00",
            label=f"skipped step ({len(skipped)})",
        )
        scales.set_yscale("log", base=2)
        scales.set_ylim(min(run["scale"]) / 2, max(run["scale"]) * 3)
        scales.legend(frameon=False, loc="best")
    scales.set(title="Loss scale (fp16)", xlabel="step", ylabel="scale")
    scales.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not scaled:
        scales.set_axis_off()
        scales.set_title("")
        scales.text(0.5, 0.5, "no fp16 run: no loss scale", ha="center", va="center", color="#777777", fontsize=11)

    names = [run["name"] for run in runs]
    bottom = [0.0] * len(runs)
    for part, key, strength in (
        ("weights", "param", 1.0),
        ("gradients", "gradient", 0.65),
        ("optimizer\nstate", "optimizer", 0.35),
    ):
        heights = [run[f"{key}_bytes_per_param"] for run in runs]
        shades = [tuple(1 - strength * (1 - channel) for channel in to_rgb(colour)) for colour in colours]
        sizes.bar(names, heights, bottom=bottom, color=shades, width=0.72, edgecolor="white")
        for number, height in enumerate(heights):
            middle = bottom[number] + height / 2
            ink = "black" if strength < 0.5 else "white"
            sizes.text(number, middle, f"{part} {height:.3g}", ha="center", va="center", color=ink, fontsize=9)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for number, top in enumerate(bottom):
        sizes.text(number, top, f"{top:.3g}", ha="center", va="bottom", fontweight="bold")
    sizes.set_ylim(0, max(bottom) * 1.1)
    sizes.set(title="Bytes per parameter, measured (one process)", ylabel="bytes")
    sizes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if len(runs) == 1:
        sizes.set_xlim(-1.2, 1.2)

    for axes in (losses, closer, scales, sizes):
        figures.tidy(axes, "y")
    model, training, where = content["model"], content["training"], content["machine"]
    figure.suptitle(
        f"{model['parameters']:,} parameters, {training['batch']} windows of {model['context']} bytes per step, "
        f"{runs[0]['strategy']}, {runs[0]['world_size']} process{'es' * (runs[0]['world_size'] > 1)}, "
        f"{where['cpu'] if where['device'] == 'CPU' else where['device']}",
        fontsize=12,
    )
    buffer = io.BytesIO()
    figures.save(figure, buffer)
    return buffer.getvalue()


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.15em; margin-top: 2em; }
img { max-width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85em; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35em 0.7em; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
thead th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
.prose td { white-space: normal; }
.note { background: #fff6e5; border-left: 4px solid #d55e00; padding: 0.6em 1em; }
.trouble { background: #fde8e8; border-left: 4px solid #c00; padding: 0.6em 1em; }
"""


def page(content: dict[str, Any], png: bytes | None) -> str:
    """report.html: a single file with the picture and all tables."""

    def text(value: object) -> str:
        if value is None or isinstance(value, bool):
            return {None: "-", True: "yes", False: "no"}[value]
        return html.escape(f"{value:,}" if isinstance(value, int) else str(value))

    def pairs(title: str, entries: dict[str, Any]) -> str:
        rows = "".join(f"<tr><th>{text(k.replace('_', ' '))}</th><td>{text(v)}</td></tr>" for k, v in entries.items())
        return f'<h2>{text(title)}</h2><table class="left">{rows}</table>'

    head, rows = _cells(content)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = "".join(f"<th>{text(name)}</th>" for name in head)
    if png is None:
        image = f'<p class="note">No picture: {text(figures.MISSING)}</p>'
    else:
        source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        image = f'<img alt="losses, loss scale, bytes per parameter" src="{source}">'
    notes = "".join(f'<p class="note">{text(note)}</p>' for note in content["notes"])
    troubles = "".join(
        f'<p class="trouble">{text(run["name"])}: {text(run["trouble"])}</p>'
        for run in content["runs"]
        if run["trouble"]
    )
    overflowed = ""
    for name, known in overflows(content).items():
        lines = "".join(
            f"<tr><td>{text(one.name)}</td><td>{text(overflow_kind(one))}</td>"
            f"<td>{text(one.first_step)}</td><td>{text(one.last_step)}</td></tr>"
            for one in known.parameters
        )
        overflowed += f"<h2>Overflows, {text(name)}</h2><p>{known.skipped:,} of {known.steps:,} steps skipped.</p>"
        if lines:
            top_row = "<tr><th>parameter</th><th>steps with</th><th>first step</th><th>last step</th></tr>"
            overflowed += f'<table class="left"><thead>{top_row}</thead><tbody>{lines}</tbody></table>'
    diagnosed = ""
    for run in content["runs"]:
        for finding in run["findings"]:
            rows_of = ("where", "what", "stake", "remedy")
            lines = "".join(f"<tr><th>{name}</th><td>{text(finding[name])}</td></tr>" for name in rows_of)
            title = f"{run['name']}: {finding['severity']}, {finding['name']}"
            diagnosed += f'<h3>{text(title)}</h3><table class="left prose">{lines}</table>'
    if diagnosed:
        diagnosed = f"<h2>Found by halfstep.doctor after the last step</h2>{diagnosed}"
    gradients = ""
    for run in _counted(content):
        said, shares, advice = _gradients(run)
        cells = ("parameter", "elements", "zero %", "flushed %", "subnormal %", "normal %", "overflow %")
        top_row = "".join(f"<th>{text(cell)}</th>" for cell in cells)
        rest = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in line) + "</tr>" for line in shares)
        gradients += (
            f"<h2>Gradients, {text(run['name'])}</h2><p>{text(said)} The worst parameters, and all together:</p>"
            f'<div class="wide"><table><thead><tr>{top_row}</tr></thead><tbody>{rest}</tbody></table></div>'
            f"<pre>{text(advice)}</pre>"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>halfstep train</title>'
        f"<style>{_STYLE}</style></head><body><h1>halfstep train</h1>"
        f'{troubles}<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<p>{text(sentence(content))} Bytes per parameter are those of the tensors in one process. "
        f"Times are medians over all steps, and tokens/s follow from them.</p>{notes}{image}"
        f"{diagnosed}{overflowed}{gradients}"
        f"{pairs('Model', content['model'])}{pairs('Training', content['training'])}"
        f"{pairs('Strategy', content['layout'])}{pairs('Text', content['data'])}"
        f"{pairs('Machine', content['machine'])}{pairs('Versions', content['versions'])}</body></html>\n"
    )


def write(folder: Path, content: dict[str, Any]) -> list[Path]:
    """Write the files and return their paths. Without matplotlib there is no report.png."""
    written = [folder / "report.json"]
    _write(written[0], (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    png = picture(content)
    if png is not None:
        written.append(folder / "report.png")
        _write(written[-1], png)
    written.append(folder / "report.html")
    _write(written[-1], page(content, png).encode())
    return written
