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
from typing import Any, NamedTuple

from halfstep.bench.audit.gpus import GPU, GPUS, resident

SECTOR = 32  # bytes
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads


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
