"""How long a kernel issues instructions and uses shared memory, over how long it uses memory, on each GPU.

    memory = 32 * (fresh sectors + repeated ones that miss the cache) / (reached share of the bandwidth * bandwidth)
    issue  = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

The counts are recorded by ``make bounds``, while a software GPU executes the kernels (docs/software_gpu.md). A sector
is fresh if no instruction of the launch accessed it before. The others miss the cache in proportion to the part of the
data of the running blocks that exceeds `CACHE_KEPT` of it. Nothing here was measured on a GPU, and no time is
predicted: the order of instructions, their dependencies and the time of the host are not modelled.

Bandwidths, multiprocessors, clocks and caches are those of the manufacturers (NVIDIA's whitepapers on A100 and H100,
AMD's CDNA 3 whitepaper; for B200 commonly reported values).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SECTOR = 32  # bytes
REGISTERS = 65536  # of a multiprocessor of an NVIDIA GPU
SHARED_RESERVED = 1024  # bytes per block, reserved by NVIDIA's driver
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        target: the architecture, for example ``"sm_90"``.
        multiprocessors: their number.
        lanes: threads per clock for which a multiprocessor issues an instruction.
        clock: in Hz.
        bandwidth: bytes per second, from the datasheet.
        cache: bytes of the second-level cache.
        shared: bytes of shared memory of a multiprocessor.
        reached: share of the bandwidth that kernels reach; 1 if it is not known.
    """

    target: str
    multiprocessors: int
    lanes: int
    clock: float
    bandwidth: float
    cache: float
    shared: int
    reached: float


GPUS = {
    "A100": GPU("sm_80", 108, 128, 1.41e9, 2.039e12, 40e6, 164 << 10, 0.77),
    "H100": GPU("sm_90", 132, 128, 1.755e9, 3.35e12, 50e6, 228 << 10, 0.90),
    "H200": GPU("sm_90", 132, 128, 1.755e9, 4.8e12, 50e6, 228 << 10, 0.90),
    "B200": GPU("sm_100", 148, 128, 1.85e9, 8.0e12, 126e6, 228 << 10, 0.80),
    "MI300X": GPU("gfx942", 304, 64, 2.1e9, 5.3e12, 256e6, 64 << 10, 1.0),
}


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


def resident(gpu: GPU, launch: Mapping[str, Any]) -> int:
    """The number of blocks of a launch that a multiprocessor holds at a time.

    Registers are allocated to warps in units of 256, from four partitions of the register file.
    """
    lanes = 64 if gpu.target.startswith("gfx") else 32
    warps = max(1, launch["threads"] // lanes)
    if lanes == 64:  # each of 4 units has 512 registers per lane, allocated in units of 8, and holds 8 waves
        fitting = 4 * min(8, 512 // max(8, math.ceil(launch["registers"] / 8) * 8))
    else:
        fitting = min(64, REGISTERS // 4 // max(256, math.ceil(launch["registers"] * 32 / 256) * 256) * 4)
    blocks = min(32, fitting // warps)
    if launch["shared_bytes"]:
        blocks = min(blocks, gpu.shared // (launch["shared_bytes"] + (SHARED_RESERVED if lanes == 32 else 0)))
    return max(1, blocks)


def seconds(gpu: GPU, counts: Mapping[str, Any], instructions: float) -> tuple[float, float, float]:
    """The seconds that memory, issue and shared memory take for a recorded launch.

    Args:
        gpu: the GPU.
        counts: a record of the launch: ``elements``; per element ``sectors``, ``fresh`` and ``wavefronts``; ``blocks``,
            ``threads``, ``registers``, ``shared_bytes``, ``spilled`` and ``trips``.
        instructions: issued per element, times the lanes of a warp.
    """
    elements, cycles = counts["elements"], gpu.multiprocessors * gpu.clock
    running = min(counts["blocks"], resident(gpu, counts) * gpu.multiprocessors)
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
