"""How long a kernel issues instructions and uses shared memory, over how long it uses memory, on each GPU.

    memory = 32 * (fresh sectors + repeated ones that miss the cache) / (reached share of the bandwidth * bandwidth)
    issue  = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

The counts are recorded by ``make bounds``, while a software GPU executes the kernels (docs/software_gpu.md). A sector
is fresh if no instruction of the launch accessed it before. The others miss the cache in proportion to the part of the
data of the running blocks that exceeds `CACHE_KEPT` of it. Nothing here was measured on a GPU, and no time is
predicted: the order of instructions, their dependencies and the time of the host are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.bench.audit.gpus import GPU, GPUS, resident
from halfstep.cli.figures import figure, save, tidy

COUNTS_FILE = Path("tests/kernels/instruction_counts.json")
SECTOR = 32  # bytes
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads
# The largest allowed ratio of the time to issue instructions to the time of memory. The two overlap imperfectly.
ISSUE_LIMIT = {"A100": 0.60, "H100": 0.60, "H200": 0.85, "B200": 0.85, "MI300X": 0.85}
LABELLED = 9  # kernels per GPU: those beyond the limit with the most instructions


class Ratios(NamedTuple):
    """What a kernel takes on a GPU.

    Attributes:
        bytes: bytes of global memory per element, in whole sectors.
        issue: time to issue the instructions, as the machine code has them, over the time of memory.
        shared: time of shared memory over the time of memory.
    """

    case: str
    kernel: str
    gpu: str
    bytes: float
    issue: float
    shared: float


def seconds(gpu: GPU, counts: Mapping[str, Any], instructions: float) -> tuple[float, float, float]:
    """The seconds that memory, issue and shared memory take for a recorded launch.

    Args:
        gpu: the GPU.
        counts: a record of the launch: ``elements``; per element ``sectors``, ``fresh`` and ``wavefronts``; ``blocks``,
            ``threads``, ``registers``, ``shared_bytes``, ``spilled`` and ``trips``.
        instructions: issued per element, times the lanes of a warp.
    """
    elements, cycles = counts["elements"], gpu.multiprocessors * gpu.clock
    blocks = resident(gpu, counts["threads"], counts["registers"], counts["shared_bytes"])
    running = min(counts["blocks"], blocks * gpu.multiprocessors)
    kept = CACHE_KEPT * gpu.cache
    in_use = SECTOR * counts["fresh"] * elements * running / max(1, counts["blocks"])
    missed = max(0.0, 1 - kept / in_use) if in_use else 0.0
    moved = SECTOR * elements * (counts["fresh"] + missed * (counts["sectors"] - counts["fresh"]))
    if counts["spilled"]:  # stores and loads of the same bytes; those that exceed the cache go to memory
        spilled = counts["spilled"] * counts["threads"] * counts["blocks"] * counts["trips"]
        moved += spilled * max(0.0, 1 - kept / (counts["spilled"] / 2 * counts["threads"] * running))
    return (
        moved / (gpu.reached * gpu.bandwidth),
        instructions * elements / (gpu.lanes * cycles),
        counts["wavefronts"] * elements / cycles,
    )


def ratios(counts: dict[str, Any]) -> Iterator[Ratios]:
    """The ratios of all kernels in recorded counts, except those that move less than a byte per element."""
    for name, gpu in GPUS.items():
        for case, kernels in counts["targets"].get(gpu.target, {}).items():
            for kernel, counted in kernels.items():
                if SECTOR * counted["sectors"] < 1:
                    continue
                # As ptxas makes them; for AMD by weights.
                memory, issue, shared = seconds(gpu, counted, counted.get("machine", counted["issued"]))
                yield Ratios(case, kernel, name, SECTOR * counted["sectors"], issue / memory, shared / memory)


def draw(path: Path, counts: dict[str, Any]) -> None:
    """Draw every recorded kernel on the roofline of each GPU: below it, shared memory is slower than issue and memory.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows, drawing = list(ratios(counts)), figure(14, 14)
    grid = list(drawing.subplots(3, 2).flat)
    colours = {family: f"C{index}" for index, family in enumerate(dict.fromkeys(row.case.split()[0] for row in rows))}
    for axes, (gpu, limit) in zip(grid, ISSUE_LIMIT.items(), strict=False):
        points = [(row.issue, 1 / max(1.0, row.issue, row.shared), row.case) for row in rows if row.gpu == gpu]
        low, high = min(points)[0] / 1.3, max(points)[0] * 1.3
        axes.plot([low, 1, high], [1, 1, 1 / high], color="black", linewidth=1.2)
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":", label="most that issue may take")
        for family, colour in colours.items():
            of_family = [(x, y) for x, y, case in points if case.split()[0] == family]
            axes.plot(*zip(*of_family, strict=True), "o", color=colour, markersize=5, label=family)
        slowest = sorted((point for point in points if point[0] > limit), reverse=True)[:LABELLED]
        for index, (x, y, case) in enumerate(reversed(slowest)):
            arrow = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "relpos": (1, 0.5)}
            at = {"textcoords": "axes fraction", "fontsize": 7.5, "va": "center", "arrowprops": arrow}
            axes.annotate(case, (x, y), (0.02, 0.62 - 0.068 * index), **at)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(0.01, 1.5), title=gpu)
        axes.set(xlabel="time to issue instructions over time of memory", ylabel="speed over that of memory alone")
        tidy(axes, "both")
    grid[-1].set_axis_off()
    grid[-1].legend(*grid[0].get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=11)
    drawing.suptitle(f"Predicted from executed kernels of Triton {counts['triton']}, cold cache", x=0.01, ha="left")
    save(drawing, path)
