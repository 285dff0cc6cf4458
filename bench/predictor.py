"""Predictions of the time of kernels on GPUs, from counts of their instructions and memory accesses.

The time of a call, from its first launch to its last, is

    t = first launch + further launches * a gap + sum over launches of max(memory, cache, issue, shared)

    memory = (32 * (fresh sectors + repeated ones that miss the cache) + spilled registers that miss it)
             / (reached share of the bandwidth * bandwidth)
    cache = (32 * all sectors + bytes of spilled registers) / (bytes per clock * multiprocessors * clock)
    issue = machine instructions * lanes of a warp / (multiprocessors * lanes per clock * clock)
    shared = wavefronts of 128 bytes / (multiprocessors * clock)

A sector is fresh if no instruction of the launch accessed it before. Other accesses miss the cache in proportion to the
part of the data of the running blocks that exceeds `CACHE_KEPT` of the second-level cache. The number of running blocks
follows from threads, registers and shared memory. A call starts with a cold cache, as in `triton.testing.do_bench`.

Bandwidths, multiprocessors, clocks and caches are those of the manufacturers (NVIDIA's whitepapers on A100 and H100,
AMD's CDNA 3 whitepaper; for B200 commonly reported values). The other constants are fitted to half of the times that
Liger-Kernel publishes of its kernels (`tests/support/published_times.py`). `ERROR` is the error on the other half.
Nothing was measured here.

The model does not include the order of instructions and their dependencies, so a kernel with few warps or long chains
of dependent instructions is slower; instructions that ptxas adds and `tests/support/software_gpu/counts.py` does not
know; the unit for square roots and exponentials; a last wave of few blocks; and the time of the host, which dominates
calls that take the host longer than the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SECTOR = 32  # bytes
REGISTERS = 65536  # of a multiprocessor of an NVIDIA GPU


class GPU(NamedTuple):
    """The properties of a GPU that predictions use.

    Attributes:
        target: the architecture, for example ``"sm_90"``.
        multiprocessors: their number.
        lanes: threads per clock for which a multiprocessor issues an instruction.
        clock: in Hz.
        bandwidth: bytes per second, from the datasheet.
        cache: bytes of the second-level cache.
        shared: bytes of shared memory of a multiprocessor.
        reached: fitted share of the bandwidth; None if there were no times to fit it to.
        first: fitted time until the first launch runs, in seconds.
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


# Fitted, except the share for B200, which is reported for copies.
REACHED = {"A100": 0.77, "H100": 0.90, "B200": 0.80}
FIRST = {"A100": 9.3e-6, "H100": 6.3e-6, "B200": 2.0e-6}
GAP = 6.1e-6  # seconds between launches
CACHE_PER_CLOCK = 64.0  # bytes from the second-level cache to one multiprocessor, per clock
CACHE_KEPT = 0.81  # share of the second-level cache that holds data for repeated reads
LATENCY = 600e-9  # seconds of a load from memory; published values are 470 to 800 ns
WAIT = 88e-6  # seconds that a call loses if the host waits for the GPU between launches


class Error(NamedTuple):
    """The errors of the predictions of the published times that were held back from the fit.

    Attributes:
        rows: number of these times.
        median: median of the absolute relative errors.
        ninth: their 90th percentile.
    """

    rows: int
    median: float
    ninth: float


# Of the calls of at least 10 us, the forward calls and the backward calls with predictions of at least 100 us. Shorter
# backward calls take the time of the host, which is not predicted.
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
    """The number of blocks of a launch that a multiprocessor holds at a time.

    Registers are allocated to warps in units of 256, from four partitions of the register file.
    """
    lanes = 64 if gpu.target.startswith("gfx") else 32
    warps = max(1, launch["threads"] // lanes)
    if lanes == 64:  # each of 4 units has 512 registers per lane and holds 8 waves
        fitting = 4 * min(8, 512 // max(1, launch["registers"]))
    else:
        fitting = min(64, REGISTERS // 4 // max(256, math.ceil(launch["registers"] * 32 / 256) * 256) * 4)
    blocks = min(32, fitting // warps)
    if launch["shared_bytes"]:
        blocks = min(blocks, gpu.shared // (launch["shared_bytes"] + 1024))
    return max(1, blocks)


def parts(gpu: GPU, launch: Mapping[str, Any]) -> dict[str, float]:
    """The seconds that each part of a GPU takes for a launch. Without a fit, memory reaches its full bandwidth."""
    blocks = min(launch["blocks"], resident(gpu, launch) * gpu.multiprocessors)
    in_use = SECTOR * launch["fresh"] * blocks / max(1, launch["blocks"])
    missed = max(0.0, 1 - CACHE_KEPT * gpu.cache / in_use) if in_use else 0.0
    read = SECTOR * (launch["fresh"] + missed * (launch["sectors"] - launch["fresh"]))
    spilled = launch["spilled"] * launch["threads"] * launch["blocks"] * launch["trips"]
    if spilled:  # stores and loads of the same bytes; those that exceed the cache go to memory
        read += spilled * max(0.0, 1 - CACHE_KEPT * gpu.cache / (launch["spilled"] / 2 * launch["threads"] * blocks))
    cycles = gpu.multiprocessors * gpu.clock
    return {
        "memory": read / ((gpu.reached or 1.0) * gpu.bandwidth),
        "cache": (SECTOR * launch["sectors"] + spilled) / (CACHE_PER_CLOCK * cycles),
        "issue": launch["issued"] / (gpu.lanes * cycles),
        "shared": launch["wavefronts"] / cycles,
    }


def waves(gpu: GPU, launch: Mapping[str, Any]) -> float:
    """The number of waves of blocks, as a fraction."""
    return float(launch["blocks"] / (resident(gpu, launch) * gpu.multiprocessors))


def tail(gpu: GPU, launch: Mapping[str, Any]) -> float:
    """The most time that the last, incomplete wave adds, over the time of the blocks on a GPU that is always full.

    The blocks of a wave are taken to end together. On a GPU they do not, and the next ones start in their places.
    """
    fraction = waves(gpu, launch)
    return math.ceil(fraction) / fraction - 1.0


def in_flight(gpu: GPU, launch: Mapping[str, Any]) -> float:
    """Bytes in flight on a full GPU over the product of its bandwidth and latency (Little's law).

    All loads of a warp in one iteration of its loop count as in flight together.
    """
    asked = SECTOR * launch["loaded"] / (launch["blocks"] * launch["trips"])
    return float(asked * resident(gpu, launch) * gpu.multiprocessors / (gpu.bandwidth * LATENCY))


def scaled(recorded: Mapping[str, Any], elements: int) -> dict[str, Any]:
    """The counts of a launch with `elements` elements, from the recorded counts per element."""
    sums = {name: recorded[name] * elements for name in ("issued", "sectors", "loaded", "fresh", "wavefronts")}
    return {**recorded, **sums, "blocks": math.ceil(recorded["blocks"] * elements / recorded["elements"])}


def seconds(
    gpu: GPU, launches: Iterable[Mapping[str, Any]], other_bytes: Iterable[float] = (), waits: bool = False
) -> float:
    """Predicted seconds of a call.

    Args:
        gpu: the GPU.
        launches: the counts of each launch: ``blocks``, ``threads`` of a block, ``registers``, ``shared_bytes``,
            ``spilled``, ``trips``, ``issued``, ``sectors``, ``fresh``, ``wavefronts``.
        other_bytes: bytes that each further kernel moves, if nothing else is known about it.
        waits: whether the host waits for the GPU between launches.

    Raises:
        ValueError: the constants of this GPU were not fitted.
    """
    if gpu.reached is None:
        raise ValueError(
            f"Expected a GPU with fitted constants, but got one of {gpu.target}: no times are predicted for it"
        )
    each = [max(parts(gpu, launch).values()) for launch in launches]
    each += [moved / (gpu.reached * gpu.bandwidth) for moved in other_bytes]
    return gpu.first + GAP * (len(each) - 1) + sum(each) + WAIT * waits
