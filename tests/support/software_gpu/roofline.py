"""How long a kernel issues instructions and uses shared memory, over how long it uses memory, on each GPU.

    memory = 32 * (fresh sectors + repeated ones that miss the cache) / (reached share of the bandwidth * bandwidth)
    issue  = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

The counts are recorded by ``make bounds``, while the software GPU executes the kernels. A sector is fresh if no
instruction of the launch accessed it before. The others miss the cache in proportion to the part of the data of the
running blocks that exceeds `CACHE_KEPT` of it. No time is predicted: the order of instructions and the host are not
modelled. The GPUs' numbers are the manufacturers', for B200 commonly reported ones.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.bench.audit.rows import resident

COUNTS_FILE = Path(__file__).parents[2] / "kernels" / "instruction_counts.json"
SECTOR = 32  # bytes
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads


class GPU(NamedTuple):
    target: str  # the architecture, for example "sm_90"
    multiprocessors: int
    lanes: int  # threads per clock for which a multiprocessor issues an instruction
    clock: float  # in Hz
    bandwidth: float  # bytes per second, from the datasheet
    cache: float  # bytes of the second-level cache
    reached: float  # share of the bandwidth that kernels reach; 1 if it is not known


GPUS = {
    "A100": GPU("sm_80", 108, 128, 1.41e9, 2.039e12, 40e6, 0.77),
    "H100": GPU("sm_90", 132, 128, 1.755e9, 3.35e12, 50e6, 0.90),
    "H200": GPU("sm_90", 132, 128, 1.755e9, 4.8e12, 50e6, 0.90),
    "B200": GPU("sm_100", 148, 128, 1.85e9, 8.0e12, 126e6, 0.80),
    "MI300X": GPU("gfx942", 304, 64, 2.1e9, 5.3e12, 256e6, 1.0),
}


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
    blocks = resident(gpu.target, counts["threads"], counts["registers"], counts["shared_bytes"])
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
