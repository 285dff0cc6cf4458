"""The stacked bars of ``halfstep plan --out``: a bar per plan, a colour per kind of memory, and a line for the card.

Strategies on several numbers of GPUs have a second panel with the bytes that each GPU sends in a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.cli.figures import figure, save, tidy
from halfstep.cli.plan_tables import digits, gpus_of, numbers_of_gpus, unit_of
from halfstep.numerics.planning.catalog import GIB

# Colours of Okabe and Ito, which colour-blind readers can tell apart. Adjacent kinds also differ in lightness.
MEMORY_KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("weights", "#0072b2", ("weights", "frozen weights")),
    ("gradients", "#e69f00", ("gradients", "accumulated gradients")),
    ("master or remainder", "#56b4e9", ("master", "remainder")),
    ("moments", "#004d40", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "scalars")),
    (
        *("buckets and gathered units", "#cc79a7"),
        ("buckets", "compressed bucket", "gathered weights", "unreduced gradients"),
    ),
    ("cast weights", "#f0e442", ("cast weights",)),
    ("activations", "#d55e00", ("activations", "recomputed", "outer activations")),
    ("logits and loss", "#999999", ("logits", "loss")),
    ("step temporaries", "#000000", ("step temporaries",)),
)
ACROSS = 4  # entries of the legend side by side


def stack(plan: dict[str, Any]) -> dict[str, int]:
    """The bytes of each kind at the peak: memory that is always allocated, and that of the larger phase."""
    totals = plan["totals"]
    phases = ("always", "backward" if totals["backward"] >= totals["step"] else "step")
    counted = [part for part in plan["parts"] if part["place"] == "gpu" and part["phase"] in phases]
    return {
        kind: sum(part["bytes"] for part in counted if part["name"] in names)
        for kind, _, names in MEMORY_KINDS
        if any(part["name"] in names for part in counted)
    }


def draw(path: Path, content: dict[str, Any]) -> None:
    """Draw the plans of `content` (what ``--json`` prints) to `path`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plans = content["plans"]
    stacks = [stack(plan) for plan in plans]
    largest = max(max(plan["totals"]["peak"] for plan in plans), 1)
    unit, name = unit_of(largest, 30)
    gpu = plans[0]["card"]
    present = [(kind, colour) for kind, colour, _ in MEMORY_KINDS if any(each.get(kind) for each in stacks)]
    # The line of a card far larger than all bars would make them short. Its memory is then given in the title.
    drawn = gpu is not None and gpu["memory"] < 4 * largest
    head = 0.45 + 0.21 * -(-(len(present) + 2 * drawn) // ACROSS)
    scaled = len(numbers_of_gpus(content)) > 1
    places = _places(plans) if scaled else [float(row) for row in range(len(plans))]
    height = head + 0.6 + (0.26 if scaled else 0.32) * (places[-1] + 1)
    drawing = figure(9.5, height)
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    drawing.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))  # the head is above the axes
    axes, *others = drawing.subplots(1, 1 + scaled, squeeze=False, width_ratios=(5, 2)[: 1 + scaled])[0]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    label_style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": box}
    for plan, row, sizes in zip(plans, places, stacks, strict=True):
        start = 0.0
        for kind, colour in present:
            size = sizes.get(kind, 0) / unit
            axes.barh(row, size, left=start, color=colour, edgecolor="white", linewidth=0.4, height=0.74)
            start += size
        host = plan["totals"]["host"]
        text = digits(start) + (f"  (+ {digits(host / unit)} on the host)" if host else "")
        axes.annotate(text, (start, row), (5, 0), **label_style)
    reach = largest / unit
    if gpu is not None and drawn:
        for value, style, text in ((gpu["memory"], "-", gpu["name"]), (gpu["usable"], "--", "after the reserve")):
            line = axes.axvline(value / unit, color="black", linewidth=1.2, linestyle=style, label=text, zorder=2)
            line.set_path_effects([withStroke(linewidth=2.6, foreground="white")])  # visible on dark bars too
        reach = max(reach, gpu["memory"] / unit)
    # Room for the number after each bar: a share of the axis, since the size of the text is fixed.
    ends = [plan["totals"]["peak"] / unit / (0.76 if plan["totals"]["host"] else 0.92) for plan in plans]
    axes.set_xlim(0, max(1.02 * reach, *ends))
    axes.set_yticks(places, [plan["label"] for plan in plans], fontsize=8)
    _plain(axes, places, f"{name} per GPU at the peak")
    for sent in others:
        values = [plan["bytes_sent"] / unit for plan in plans]
        sent.barh(places, values, color="#666666", height=0.74)
        for row, value in zip(places, values, strict=True):
            sent.annotate(digits(value), (value, row), (5, 0), **label_style)
        sent.set_xlim(0, 1.25 * max(values))
        sent.set_yticks([])
        _plain(sent, places, f"{name} that each GPU sends in a step")
    handles: list[Any] = [Patch(color=colour, label=kind) for kind, colour in present]
    handles += axes.get_legend_handles_labels()[0] if drawn else []
    legend = {"loc": "upper left", "bbox_to_anchor": (0.005, 1 - 0.32 / height), "ncols": ACROSS, "frameon": False}
    drawing.legend(handles=handles, fontsize=8, borderpad=0, **legend)
    drawing.text(0.01, 1 - 0.1 / height, _title(content, gpu, drawn), fontsize=9.5, ha="left", va="top")
    save(drawing, path, dpi=120)


def _places(plans: list[dict[str, Any]]) -> list[float]:
    """The positions of the bars, with a gap between strategies."""
    places: list[float] = []
    for plan, before in zip(plans, [None, *plans], strict=False):
        apart = before is not None and plan["settings"]["strategy"] != before["settings"]["strategy"]
        places.append(places[-1] + 1 + 0.5 * apart if places else 0.0)
    return places


def _plain(axes: Any, places: list[float], label: str) -> None:
    axes.set_ylim(places[-1] + 0.5, -0.5)
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    tidy(axes, "x", ("top", "right", "left"))


def _title(content: dict[str, Any], gpu: dict[str, Any] | None, drawn: bool) -> str:
    first = content["plans"][0]
    settings = first["settings"]
    parts = [f"{first['parameters']:,} parameters, {gpus_of(content)}"]
    if content["compare"] == "layouts":
        parts.append(settings["strategy"])
    elif content["compare"] == "strategies":
        parts.append(first["layout"]["name"])
    if settings["model"] is not None and settings["batch"] is not None:
        sequences = f"{settings['batch']} sequence{'s' * (settings['batch'] > 1)} of {settings['seq']}"
        parts.append(f"{sequences}, checkpointing {settings['checkpointing']}")
    if gpu is not None and not drawn:
        parts.append(f"{gpu['name']} has {gpu['memory'] / GIB:g} GiB")
    return "; ".join(parts)
