"""The rows of the audit, one per variant and target: kernels are compiled without a GPU, and their code analyzed."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import pkgutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.bench.audit import families, machine_code
from halfstep.bench.audit.launches import Launch, Variant, gpu_target, recorded
from halfstep.bench.cases import listed

FAMILIES = tuple(f"{families.__name__}.{module.name}" for module in pkgutil.iter_modules(families.__path__))
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "gfx942": 64 << 10}  # bytes of a multiprocessor
SHARED_RESERVED = 1024  # bytes per block, reserved by NVIDIA's driver
TARGETS = tuple(SHARED)


@dataclass
class AuditRow:
    """The audit of one variant on one target. Bytes are per element. Values are None if the variant did not compile."""

    kernel: str
    variant: str
    target: str
    bytes_read: float | None = None  # by the bulk path
    bytes_written: float | None = None
    floor_read: float = 0.0  # the minimum possible
    floor_written: float = 0.0
    access_bits: int | None = None  # width of the narrowest access of the bulk path, per thread
    operand_bits: dict[str, int] = field(default_factory=dict)  # the same, by the width of the elements
    registers: int | None = None  # per thread
    spills: int | None = None  # bytes per thread
    shared_bytes: int | None = None  # per block, without the bytes that the driver reserves
    barriers: int | None = None
    layout_conversions: int | None = None
    occupancy: float | None = None  # fraction of the warps that registers, shared memory and block limits allow
    problems: list[str] = field(default_factory=list)  # why the variant fails the audit


def resident(target: str, threads: int, registers: int, shared_bytes: int) -> int:
    """The number of blocks of `threads` that are resident on a multiprocessor of `target` at a time.

    Registers are allocated to warps in units of 256, from four partitions of the register file.
    """
    lanes = 64 if target.startswith("gfx") else 32
    warps = max(1, threads // lanes)
    if lanes == 64:  # each of 4 units has 512 registers per lane, allocated in units of 8, and holds 8 waves
        fitting = 4 * min(8, 512 // max(8, math.ceil(registers / 8) * 8))
    else:
        fitting = min(64, 65536 // 4 // max(256, math.ceil(registers * 32 / 256) * 256) * 4)
    blocks = min(32, fitting // warps)
    if shared_bytes:
        blocks = min(blocks, SHARED[target] // (shared_bytes + (SHARED_RESERVED if lanes == 32 else 0)))
    return max(1, blocks)


def most_shared(target: str) -> int:
    """The maximum shared memory of a block, in bytes: 64 KiB on AMD's gfx9."""
    return SHARED[target] - SHARED_RESERVED if target.startswith("sm_") and target in SHARED else 64 << 10


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> float | None:
    """The fraction of a multiprocessor's warps that can be resident; None for a target that is not in `TARGETS`."""
    if target not in SHARED:
        return None
    max_warps, lanes = (64, 32) if target.startswith("sm_") else (32, 64)
    return resident(target, num_warps * lanes, registers, shared_bytes) * num_warps / max_warps


def _resource_usage(cubin: bytes) -> str:
    import triton

    with tempfile.TemporaryDirectory(prefix="halfstep-audit-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _inspect(row: AuditRow, variant: Variant, launch: Launch, compiled: Any) -> None:
    from halfstep.kernels.backend import MOST_THREADS

    ttgir = compiled.asm["ttgir"]
    warps, lanes = compiled.metadata.num_warps, gpu_target(row.target).warp_size
    threads = warps * lanes
    if threads > MOST_THREADS:
        row.problems.append(f"{warps} warps of {lanes} lanes are {threads} threads; at most {MOST_THREADS} are allowed")
    limit = most_shared(row.target)
    if compiled.metadata.shared > limit:
        row.problems.append(f"{compiled.metadata.shared} bytes of shared memory per block; at most {limit} are allowed")
    if "ptx" in compiled.asm:
        text = compiled.asm["ptx"]
        accesses = machine_code.ptx_accesses(text)
        resources = machine_code.ptx_resources(text, _resource_usage(compiled.asm["cubin"]))
        inexact = machine_code.ptx_inexact(text)
    else:
        text = compiled.asm["amdgcn"]
        accesses = machine_code.amd_accesses(text)
        resources = machine_code.amd_resources(text)
        inexact = machine_code.amd_inexact(compiled.asm["llir"], text)
    if variant.fused:  # the compiler may add none to those that are written
        inexact = [name for name in inexact if "fma" not in name and "fused multiply-add" not in name]
        inexact += ["permitted contractions"] if launch.options["enable_fp_fusion"] else []
    bulk = machine_code.bulk(list(accesses), ttgir)
    elements = machine_code.tile_elements(ttgir)
    if variant.tile:
        elements = math.prod(int(np.prod(launch.constant(name))) for name in variant.tile)
    if elements:
        elements *= variant.copies_on.get(row.target, variant.copies)
        row.bytes_read, row.bytes_written = (
            sum(access.bits // 8 for access in bulk if access.writes is writes) * threads / elements
            for writes in (False, True)
        )
    if bulk:
        row.access_bits = min(access.bits for access in bulk)
        row.operand_bits = {str(key): bits for key, bits in machine_code.operand_bits(bulk, ttgir).items()}
    row.registers, row.spills, row.barriers = resources.registers, resources.spills, resources.barriers
    row.shared_bytes = compiled.metadata.shared
    row.occupancy = occupancy(row.target, resources.registers, compiled.metadata.shared, warps)
    row.layout_conversions = machine_code.layout_conversions(ttgir)
    if row.spills:
        row.problems.append(f"spills {row.spills} bytes per thread")
    if variant.exact and inexact:
        row.problems.append(f"must be bit-identical to the reference, but contains {', '.join(inexact)}")


@functools.cache
def _listed(module: str) -> list[Variant]:
    return listed(module, "variants")


def _audit_one(job: tuple[str, int, str]) -> dict[str, Any]:
    """Launch, compile and inspect one variant for one target; runs in a worker process."""
    module, index, target = job
    variant = _listed(module)[index]
    kernel = f"{module.rpartition('.')[2]}.{variant.kernel.__name__}"
    row = AuditRow(kernel, variant.name, target, floor_read=variant.bytes_read, floor_written=variant.bytes_written)
    try:
        launch = recorded(variant, target)
        _inspect(row, variant, launch, launch.compile(target))
    except Exception as error:  # reported in the row; the other variants are still audited
        lines = str(error).strip().splitlines() or [""]
        row.problems.append(f"does not compile: {type(error).__name__}: {lines[-1]}")
    return asdict(row)


def audit(
    modules: list[str], targets: list[str], jobs: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[dict[str, Any]]:
    """Audit every variant of `modules` for every target, in `jobs` processes, or in this one if `jobs` is 1.

    Returns the `AuditRow`s as dictionaries, in the order of the modules.
    """
    work = [
        (module, index, target) for module in modules for index in range(len(_listed(module))) for target in targets
    ]
    processes = min(jobs, len(work))
    # spawn, not fork: importing torch starts threads, and forking a multithreaded process may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) if processes > 1 else contextlib.nullcontext() as pool:
        rows = []
        for row in map(_audit_one, work) if pool is None else pool.map(_audit_one, work):
            rows.append(row)
            progress(len(rows), len(work))
    return rows
