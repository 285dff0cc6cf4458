"""The GPUs of the audit, and how many blocks of a kernel one of their multiprocessors holds.

Bandwidths, multiprocessors, clocks and caches are those of the manufacturers (NVIDIA's whitepapers on A100 and H100,
AMD's CDNA 3 whitepaper; for B200 commonly reported values).
"""

from __future__ import annotations

import math
from typing import NamedTuple

REGISTERS = 65536  # of a multiprocessor of an NVIDIA GPU
SHARED_RESERVED = 1024  # bytes per block, reserved by NVIDIA's driver


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
