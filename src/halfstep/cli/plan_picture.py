"""The stacked bars of ``halfstep plan --out``: a bar per plan, a colour per kind of memory, and a line for the card.

Strategies on several numbers of GPUs have a second panel with the bytes that each GPU sends in a step.
"""

from __future__ import annotations

from itertools import pairwise
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
        group: sum(part["bytes"] for part in counted if part["name"] in names)
        for group, _, names in MEMORY_KINDS
        if any(part["name"] in names for part in counted)
    }


def draw(path: Path, content: dict[str, Any]) -> None:
    """Draw the plans of `content` (what ``--json`` prints) to `path`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plans, gpu = content["plans"], content["plans"][0]["card"]
    stacks = [stack(plan) for plan in plans]
    largest = max(max(plan["totals"]["peak"] for plan in plans), 1)
    unit, name = unit_of(largest, 30)
    present = [(group, colour) for group, colour, _ in MEMORY_KINDS if any(sizes.get(group) for sizes in stacks)]
    # The line of a card far larger than all bars would make them short. Its memory is then given in the title.
    lines = gpu is not None and gpu["memory"] < 4 * largest
    scaled = len(numbers_of_gpus(content)) > 1
    head = 0.45 + 0.21 * -(-(len(present) + 2 * lines) // ACROSS)
    rows = _rows(plans) if scaled else [float(row) for row in range(len(plans))]
    height = head + 0.6 + (0.26 if scaled else 0.32) * (rows[-1] + 1)
    drawing = figure(9.5, height)
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    drawing.get_layout_engine().set(rect=(0, 0, 1, 1 - head / height))  # the head is above the axes
    panels = drawing.subplots(1, 1 + scaled, squeeze=False, width_ratios=(5, 2)[: 1 + scaled])[0]
    label_style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
    label_style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    for plan, row, sizes in zip(plans, rows, stacks, strict=True):
        start = 0.0
        for group, colour in present:
            size = sizes.get(group, 0) / unit
            panels[0].barh(row, size, left=start, color=colour, edgecolor="white", linewidth=0.4, height=0.74)
            start += size
        host = plan["totals"]["host"]
        label = digits(start) + (f"  (+ {digits(host / unit)} on the host)" if host else "")
        panels[0].annotate(label, (start, row), (5, 0), **label_style)
        if scaled:
            sent = plan["bytes_sent"] / unit
            panels[1].barh(row, sent, color="#666666", height=0.74)
            panels[1].annotate(digits(sent), (sent, row), (5, 0), **label_style)
    for value, style, label in (("memory", "-", gpu["name"]), ("usable", "--", "after the reserve")) if lines else ():
        line = panels[0].axvline(
            gpu[value] / unit, color="black", linewidth=1.2, linestyle=style, label=label, zorder=2
        )
        line.set_path_effects([withStroke(linewidth=2.6, foreground="white")])  # visible on dark bars too
    # Room for the number after each bar: a share of the axis, since the size of the text is fixed.
    ends = [plan["totals"]["peak"] / unit / (0.76 if plan["totals"]["host"] else 0.92) for plan in plans]
    panels[0].set_xlim(0, max(1.02 * max(largest, gpu["memory"] if lines else 0) / unit, *ends))
    panels[0].set_yticks(rows, [plan["label"] for plan in plans], fontsize=8)
    if scaled:
        panels[1].set_xlim(0, 1.25 * max(plan["bytes_sent"] for plan in plans) / unit)
        panels[1].set_yticks([])
    for axes, label in zip(panels, ("per GPU at the peak", "that each GPU sends in a step"), strict=False):
        axes.set_ylim(rows[-1] + 0.5, -0.5)
        axes.set_xlabel(f"{name} {label}", fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        tidy(axes, "x", ("top", "right", "left"))
    handles: list[Any] = [Patch(color=colour, label=group) for group, colour in present]
    handles += panels[0].get_legend_handles_labels()[0] if lines else []
    legend = {"loc": "upper left", "bbox_to_anchor": (0.005, 1 - 0.32 / height), "ncols": ACROSS, "frameon": False}
    drawing.legend(handles=handles, fontsize=8, borderpad=0, **legend)
    drawing.text(0.01, 1 - 0.1 / height, _title(content, lines), fontsize=9.5, ha="left", va="top")
    save(drawing, path, dpi=120)


def _rows(plans: list[dict[str, Any]]) -> list[float]:
    """The positions of the bars, with a gap between strategies."""
    rows = [0.0]
    for before, plan in pairwise(plan["settings"]["strategy"] for plan in plans):
        rows.append(rows[-1] + (1 if plan == before else 1.5))
    return rows


def _title(content: dict[str, Any], lines: bool) -> str:
    plan = content["plans"][0]
    settings, gpu = plan["settings"], plan["card"]
    shared = {"layouts": settings["strategy"], "strategies": plan["layout"]["name"]}.get(content["compare"])
    parts = [f"{plan['parameters']:,} parameters, {gpus_of(content)}", *([shared] if shared else [])]
    if settings["model"] is not None and settings["batch"] is not None:
        sequences = f"{settings['batch']} sequence{'s' * (settings['batch'] > 1)} of {settings['seq']}"
        parts.append(f"{sequences}, checkpointing {settings['checkpointing']}")
    if gpu is not None and not lines:
        parts.append(f"{gpu['name']} has {gpu['memory'] / GIB:g} GiB")
    return "; ".join(parts)
