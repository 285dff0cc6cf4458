"""The picture of ``halfstep bench audit --out``: every counted kernel on the roofline of each GPU.

The horizontal axis shows the instructions that a kernel issues per byte, the vertical axis the bandwidth that memory,
the issue of its instructions and shared memory allow. At the bend of the roofline, issue takes as long as memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.cli.figures import figure, save, tidy

# Name, beginning of a case, colour and marker. The colours are those of Okabe and Ito, which colour-blind readers can
# tell apart. The shapes differ too, for prints without colour.
FAMILIES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("Adam", ("Adam",), "#0072b2", "o"),
    ("check, unscale", ("foreach_check", "foreach_unscale"), "#e69f00", "s"),
    ("cast", ("cast", "foreach_cast"), "#009e73", "^"),
    ("softmax", ("softmax", "log_softmax"), "#cc79a7", "D"),
    ("statistics", ("statistics",), "#d55e00", "v"),
    ("peers", ("",), "#777777", "x"),
)
_NAMED = 9  # labelled kernels per panel: those with the most instructions per byte


class Point(NamedTuple):
    """One kernel on one GPU: its name, instructions issued per byte of memory, and predicted bytes per second."""

    name: str
    per_byte: float
    reached: float


class Panel(NamedTuple):
    """One GPU: bytes that copies reach and instructions per second, and the largest ratio of issue to memory time."""

    gpu: str
    memory: float
    issue: float
    limit: float
    points: Sequence[Point]


def family(name: str) -> int:
    """The index in `FAMILIES` of the family of a case."""
    return next(index for index, (_, prefixes, _, _) in enumerate(FAMILIES) if name.startswith(prefixes))


def draw(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draw the panels to `path`, two side by side, with a legend after the last one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawing = figure(14, 4.6 * (len(panels) // 2 + 1) + 0.6)
    from matplotlib.lines import Line2D

    grid = list(drawing.subplots(len(panels) // 2 + 1, 2, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel)
    handles = [Line2D([], [], color=c, marker=marker, linestyle="none", label=name) for name, _, c, marker in FAMILIES]
    handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="most that issue may take"))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    grid[-1].legend(handles=handles, loc="upper left", frameon=False, fontsize=11)
    drawing.suptitle(title, x=0.01, ha="left", fontsize=13)
    save(drawing, path)


def _draw_panel(axes: Any, panel: Panel) -> None:
    ridge = panel.issue / panel.memory
    lowest = min([ridge / 8, *(point.per_byte for point in panel.points)]) / 1.3
    highest = max([ridge * 4, *(point.per_byte for point in panel.points)]) * 1.3
    axes.plot([lowest, ridge, highest], [1, 1, ridge / highest], color="black", linewidth=1.2)
    axes.axvline(ridge * panel.limit, color="black", linewidth=0.8, linestyle=":")
    for point in panel.points:
        _, _, colour, marker = FAMILIES[family(point.name)]
        axes.plot(point.per_byte, point.reached / panel.memory, marker=marker, color=colour, markersize=5)
    above = sorted(panel.points, key=lambda point: -point.per_byte)[:_NAMED]
    above = sorted((point for point in above if point.per_byte > ridge * panel.limit), key=lambda point: -point.reached)
    arrow = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkB": 3, "relpos": (1, 0.5)}
    for index, point in enumerate(above):
        corner, text = (point.per_byte, point.reached / panel.memory), (0.02, 0.62 - 0.068 * index)
        axes.annotate(point.name, corner, text, textcoords="axes fraction", fontsize=7.5, va="center", arrowprops=arrow)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(lowest, highest)
    axes.set_ylim(0.01, 1.5)
    axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1.0], ["1 %", "3 %", "10 %", "30 %", "100 %"])
    axes.minorticks_off()
    ticks = [tick for tick in (0.3, 1, 3, 10, 30, 100, 300) if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    tidy(axes, "both")
    axes.set(xlabel="instructions issued per byte of memory", ylabel="predicted part of what a copy reaches")
    title = f"{panel.gpu}: {panel.memory / 1e12:.2f} TB/s, {panel.issue / 1e12:.1f} T instructions/s"
    axes.set_title(title, loc="left")
