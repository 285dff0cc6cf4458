"""How long a kernel issues instructions and uses shared memory, over how long it uses memory, on each GPU.

    memory = 32 * (fresh sectors + repeated ones that miss the cache) / (reached share of the bandwidth * bandwidth)
    issue  = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

The counts are recorded by ``make bounds``, while a software GPU executes the kernels (docs/software_gpu.md). A sector
is fresh if no instruction of the launch accessed it before. The others miss the cache in proportion to the part of the
data of the running blocks that exceeds `CACHE_KEPT` of it. No time is predicted: the order of instructions and the host
are not modelled. The GPUs' numbers are the manufacturers', for B200 commonly reported ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.cli.figures import figure, save, tidy

COUNTS_FILE = Path("tests/kernels/instruction_counts.json")
SECTOR = 32  # bytes
REGISTERS = 65536  # of a multiprocessor of an NVIDIA GPU
SHARED_RESERVED = 1024  # bytes per block, reserved by NVIDIA's driver
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads
# The largest allowed ratio of the time to issue instructions to the time of memory. The two overlap imperfectly.
ISSUE_LIMIT = {"A100": 0.60, "H100": 0.60, "H200": 0.85, "B200": 0.85, "MI300X": 0.85}
LABELLED = 9  # kernels per GPU: those beyond the limit with the most instructions


class GPU(NamedTuple):
    target: str  # the architecture, for example "sm_90"
    multiprocessors: int
    lanes: int  # threads per clock for which a multiprocessor issues an instruction
    clock: float  # in Hz
    bandwidth: float  # bytes per second, from the datasheet
    cache: float  # bytes of the second-level cache
    shared: int  # bytes of shared memory of a multiprocessor
    reached: float  # share of the bandwidth that kernels reach; 1 if it is not known


GPUS = {
    "A100": GPU("sm_80", 108, 128, 1.41e9, 2.039e12, 40e6, 164 << 10, 0.77),
    "H100": GPU("sm_90", 132, 128, 1.755e9, 3.35e12, 50e6, 228 << 10, 0.90),
    "H200": GPU("sm_90", 132, 128, 1.755e9, 4.8e12, 50e6, 228 << 10, 0.90),
    "B200": GPU("sm_100", 148, 128, 1.85e9, 8.0e12, 126e6, 228 << 10, 0.80),
    "MI300X": GPU("gfx942", 304, 64, 2.1e9, 5.3e12, 256e6, 64 << 10, 1.0),
}


def resident(gpu: GPU, threads: int, registers: int, shared_bytes: int) -> int:
    """The number of blocks of `threads` that a multiprocessor holds at a time.

    Registers are allocated to warps in units of 256, from four partitions of the register file.
    """
    lanes = 64 if gpu.target.startswith("gfx") else 32
    warps = max(1, threads // lanes)
    if lanes == 64:  # each of 4 units has 512 registers per lane, allocated in units of 8, and holds 8 waves
        fitting = 4 * min(8, 512 // max(8, math.ceil(registers / 8) * 8))
    else:
        fitting = min(64, REGISTERS // 4 // max(256, math.ceil(registers * 32 / 256) * 256) * 4)
    blocks = min(32, fitting // warps)
    if shared_bytes:
        blocks = min(blocks, gpu.shared // (shared_bytes + (SHARED_RESERVED if lanes == 32 else 0)))
    return max(1, blocks)


class Ratios(NamedTuple):
    """What a kernel takes on a GPU."""

    case: str
    kernel: str
    gpu: str
    bytes: float  # of global memory per element, in whole sectors
    issue: float  # time to issue the instructions, as the machine code has them, over the time of memory
    shared: float  # time of shared memory over the time of memory


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
    """Draw every recorded kernel on the roofline of each GPU, the speed that issue leaves over that of memory alone."""
    rows, drawing = list(ratios(counts)), figure(14, 14)
    grid = list(drawing.subplots(3, 2).flat)
    colours = {family: f"C{index}" for index, family in enumerate(dict.fromkeys(row.case.split()[0] for row in rows))}
    for axes, (gpu, limit) in zip(grid, ISSUE_LIMIT.items(), strict=False):
        points = [(row.issue, 1 / max(1.0, row.issue), row.case) for row in rows if row.gpu == gpu]
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
