"""How long a kernel takes on a GPU, predicted from what it was counted to do in software.

A call takes, from its first launch to its last,

    t = first launch + further launches * a gap + sum over launches of max(memory, cache, issue, shared)

    memory = (32 * (fresh sectors + repeated ones that miss the cache) + spilled registers that miss it)
             / (part that is reached * bandwidth)
    cache = (32 * all sectors + bytes of spilled registers) / (bytes per clock * multiprocessors * clock)
    issue = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

A sector is fresh where no instruction of the launch touched it before. Of the others, as many miss as the data of the
blocks that run at a time exceeds a part of the second-level cache. How many blocks run at a time follows from threads,
registers and shared memory. The calls start with a cold cache, as triton.testing.do_bench empties it.

Where the constants come from: bandwidths, multiprocessors, clocks and caches are the makers' (NVIDIA's whitepapers on
A100 and H100, AMD's CDNA 3 whitepaper; for B200 what is commonly reported). The others are fitted to half of the times
that Liger-Kernel publishes of its kernels (`tests/support/published_times.py`), and `ERROR` is what the other half
showed. Nothing was measured here.

Left out: the order of instructions and what waits for what, so that a kernel of few warps or long chains is slower;
ptxas where it makes more of the code than `tests/support/software_gpu/counts.py` knows; the unit for square roots and
exponentials; a last wave of few blocks; the host, which rules calls that it takes longer to make than the GPU to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SECTOR = 32  # bytes
WAVEFRONT = 128
REGISTERS = 65536  # of a multiprocessor of NVIDIA's


class GPU(NamedTuple):
    """What a prediction needs of a GPU.

    Attributes:
        bandwidth: bytes per second, of the datasheet.
        lanes: threads that a multiprocessor issues an instruction for, per clock.
        clock: in Hz.
        cache: bytes of the second level.
        shared: bytes of shared memory of a multiprocessor.
        reached: part of the bandwidth that the fit found; None where nothing was measured that it could be fitted to.
        first: seconds until the first launch runs, from the fit.
    """

    target: str
    multiprocessors: int
    lanes: int
    clock: float
    bandwidth: float
    cache: float
    shared: int
    reached: float | None
    first: float


# Fitted; see above.
REACHED = {"A100": 0.77, "H100": 0.90, "B200": 0.80}  # of a B200: what copies are said to reach
FIRST = {"A100": 9.3e-6, "H100": 6.3e-6, "B200": 2.0e-6}
GAP = 6.1e-6  # seconds between launches
CACHE_PER_CLOCK = 64.0  # bytes, of one multiprocessor
CACHE_KEPT = 0.81  # part of the second-level cache that repeated reads find
LATENCY = 600e-9  # seconds of a load from memory: the size of it; published ones are 470 to 800
WAIT = 88e-6  # seconds that a call loses where the host waits for the GPU and only then launches on


class Error(NamedTuple):
    """What was found of the half of the published times that nothing was fitted to.

    Attributes:
        rows: how many.
        median: of the relative errors, without sign.
        ninth: their 90th percentile.
    """

    rows: int
    median: float
    ninth: float


# Of all calls from 10 us on, and of those that are forward, or backward and predicted to take 100 us and more: what
# shorter backward calls take is the host's time, which is not predicted.
ERROR_ALL = Error(54, 0.071, 0.579)
ERROR = Error(42, 0.067, 0.171)

GPUS = {
    "A100": GPU("sm_80", 108, 128, 1.41e9, 2.039e12, 40e6, 164 << 10, REACHED["A100"], FIRST["A100"]),
    "H100": GPU("sm_90", 132, 128, 1.755e9, 3.35e12, 50e6, 228 << 10, REACHED["H100"], FIRST["H100"]),
    "H100 PCIe": GPU("sm_90", 114, 128, 1.755e9, 2.0e12, 50e6, 228 << 10, REACHED["H100"], FIRST["H100"]),
    "H200": GPU("sm_90", 132, 128, 1.755e9, 4.8e12, 50e6, 228 << 10, REACHED["H100"], FIRST["H100"]),
    "B200": GPU("sm_100", 148, 128, 1.85e9, 8.0e12, 126e6, 228 << 10, REACHED["B200"], FIRST["B200"]),
    "MI300X": GPU("gfx942", 304, 64, 2.1e9, 5.3e12, 256e6, 64 << 10, None, 0.0),
}


def resident(gpu: GPU, launch: Mapping[str, Any]) -> int:
    """How many blocks of a launch a multiprocessor holds at a time.

    Registers are handed out 256 at a time per warp, from four partitions of the register file.
    """
    lanes = 64 if gpu.target.startswith("gfx") else 32
    warps = max(1, launch["threads"] // lanes)
    if lanes == 64:  # 512 registers a lane and 8 waves for each of 4 units
        fitting = 4 * min(8, 512 // max(1, launch["registers"]))
    else:
        fitting = min(64, REGISTERS // 4 // max(256, math.ceil(launch["registers"] * 32 / 256) * 256) * 4)
    blocks = min(32, fitting // warps)
    if launch["shared_bytes"]:
        blocks = min(blocks, gpu.shared // (launch["shared_bytes"] + 1024))
    return max(1, blocks)


def parts(gpu: GPU, launch: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that each part of a GPU takes for a launch; memory at the datasheet's bandwidth where none was fitted."""
    blocks = min(launch["blocks"], resident(gpu, launch) * gpu.multiprocessors)
    in_use = SECTOR * launch["fresh"] * blocks / max(1, launch["blocks"])
    missed = max(0.0, 1 - CACHE_KEPT * gpu.cache / in_use) if in_use else 0.0
    read = SECTOR * (launch["fresh"] + missed * (launch["sectors"] - launch["fresh"]))
    spilled = launch["spilled"] * launch["threads"] * launch["blocks"] * launch["trips"]
    if spilled:  # half of it is stored and then loaded; what does not fit the cache goes to memory
        read += spilled * max(0.0, 1 - CACHE_KEPT * gpu.cache / (launch["spilled"] / 2 * launch["threads"] * blocks))
    cycles = gpu.multiprocessors * gpu.clock
    return {
        "memory": read / ((gpu.reached or 1.0) * gpu.bandwidth),
        "cache": (SECTOR * launch["sectors"] + spilled) / (CACHE_PER_CLOCK * cycles),
        "issue": launch["issued"] / (gpu.lanes * cycles),
        "shared": launch["wavefronts"] / cycles,
    }


def waves(gpu: GPU, launch: Mapping[str, Any]) -> float:
    """How many times the blocks of a launch fill the GPU."""
    return float(launch["blocks"] / (resident(gpu, launch) * gpu.multiprocessors))


def in_flight(gpu: GPU, launch: Mapping[str, Any]) -> float:
    """Bytes that a full GPU asks for at a time, over those that its bandwidth times its latency needs (Little's law).

    All that a warp loads in one trip of its loop counts as asked for at a time.
    """
    asked = SECTOR * launch["loaded"] / (launch["blocks"] * launch["trips"])
    return float(asked * resident(gpu, launch) * gpu.multiprocessors / (gpu.bandwidth * LATENCY))


def scaled(recorded: Mapping[str, Any], elements: int) -> dict[str, Any]:
    """What a kernel takes for so many elements, from a record of it per element."""
    sums = {name: recorded[name] * elements for name in ("issued", "sectors", "loaded", "fresh", "wavefronts")}
    return {**recorded, **sums, "blocks": math.ceil(recorded["blocks"] * elements / recorded["elements"])}


def seconds(
    gpu: GPU, launches: Iterable[Mapping[str, Any]], other_bytes: Iterable[float] = (), waits: bool = False
) -> float:
    """Predicted seconds of a call.

    Args:
        launches: what each takes in all: ``blocks`` of ``threads``, ``registers``, ``shared_bytes``, ``spilled``,
            ``trips``, ``issued``, ``sectors``, ``fresh``, ``wavefronts``.
        other_bytes: what other kernels move of which nothing else is known, each.
        waits: whether the host waits for the GPU in between.

    Raises:
        ValueError: nothing was fitted for this GPU.
    """
    if gpu.reached is None:
        raise ValueError(
            f"Expected a GPU with fitted constants, but got one of {gpu.target}: no times are predicted for it"
        )
    each = [max(parts(gpu, launch).values()) for launch in launches]
    each += [moved / (gpu.reached * gpu.bandwidth) for moved in other_bytes]
    return gpu.first + GAP * (len(each) - 1) + sum(each) + WAIT * waits
