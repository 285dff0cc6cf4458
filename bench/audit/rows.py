"""The rows of the audit, one per variant and target: compile a kernel without a GPU and analyze its machine code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import multiprocessing
import pkgutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.bench.audit import families, machine_code
from halfstep.bench.audit.launches import Launch, Variant, gpu_target, recorded
from halfstep.bench.audit.roofline import GPUS, SHARED_RESERVED, resident
from halfstep.bench.cases import listed

FAMILIES = tuple(f"{families.__name__}.{module.name}" for module in pkgutil.iter_modules(families.__path__))
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
_GPU_OF = {gpu.target: gpu for gpu in GPUS.values()}


@dataclass
class AuditRow:
    """The audit of one variant on one target. Bytes are per element. Values are None if the variant did not compile."""

    kernel: str
    variant: str
    target: str
    bytes_read: float | None = None  # that the bulk path moves
    bytes_written: float | None = None
    floor_read: float = 0.0  # the least possible bytes
    floor_written: float = 0.0
    access_bits: int | None = None  # width of the narrowest access of the bulk path, per thread
    operand_bits: dict[str, int] = field(default_factory=dict)  # the same, by the width of the elements
    registers: int | None = None
    spills: int | None = None  # instructions that access local memory (NVIDIA), or spilled registers (AMD)
    shared_bytes: int | None = None  # per block, without the bytes that the driver reserves
    barriers: int | None = None
    layout_conversions: int | None = None
    occupancy: float | None = None  # share of the warps that registers, shared memory and block limits allow
    problems: list[str] = field(default_factory=list)  # why the variant fails the audit


def most_shared(target: str) -> int:
    """The largest shared memory of a block, in bytes: 64 KiB on AMD's gfx9."""
    return _GPU_OF[target].shared - SHARED_RESERVED if target.startswith("sm_") and target in _GPU_OF else 64 << 10


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> float | None:
    """The share of the warps of a multiprocessor that can be resident; None for a target without a GPU in `GPUS`."""
    if target not in _GPU_OF:
        return None
    max_warps, lanes = (64, 32) if target.startswith("sm_") else (32, 64)
    return resident(_GPU_OF[target], num_warps * lanes, registers, shared_bytes) * num_warps / max_warps


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage of `cubin`. They are cached in Triton's cache, since nvdisasm takes most of the time."""
    import triton
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(hashlib.sha256(f"halfstep audit {triton.__version__}".encode() + cubin).hexdigest())
    kept = cache.get_file("kernel.sass"), cache.get_file("kernel.usage")
    if all(kept):
        text, usage = (Path(file).read_text() for file in kept)
        return text, usage
    with tempfile.TemporaryDirectory(prefix="halfstep-audit-") as folder:
        file, tools = Path(folder, "kernel.cubin"), triton.knobs.nvidia
        file.write_bytes(cubin)
        text = machine_code.output_of(tools.nvdisasm.path, "-g", "-c", file)
        usage = machine_code.output_of(tools.cuobjdump.path, "--dump-resource-usage", file)
    cache.put(text, "kernel.sass", binary=False)
    cache.put(usage, "kernel.usage", binary=False)
    return text, usage


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
        text, usage = _disassembled(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        counted = machine_code.bulk(list(machine_code.ptx_accesses(ptx)), ttgir)
        emitted = machine_code.bulk(list(machine_code.sass_accesses(text, machine_code.ptx_shifted_lines(ptx))), ttgir)
        resources = machine_code.sass_resources(text, usage)
        inexact = machine_code.ptx_inexact(ptx)
    else:
        text = compiled.asm["amdgcn"]
        counted = emitted = machine_code.bulk(list(machine_code.amd_accesses(text)), ttgir)
        resources = machine_code.amd_resources(text)
        inexact = machine_code.amd_inexact(compiled.asm["llir"], text)
    elements = machine_code.tile_elements(ttgir)
    if variant.tile:
        elements = math.prod(int(np.prod(launch.constant(name))) for name in variant.tile)
    if elements:
        elements *= variant.copies_on.get(row.target, variant.copies)
        row.bytes_read, row.bytes_written = (
            sum(access.bits // 8 for access in counted if access.writes is writes) * threads / elements
            for writes in (False, True)
        )
    if emitted:
        row.access_bits = min(access.bits for access in emitted)
        row.operand_bits = {str(key): bits for key, bits in machine_code.operand_bits(emitted, ttgir).items()}
    row.registers, row.spills, row.barriers = resources.registers, resources.spills, resources.barriers
    row.shared_bytes = compiled.metadata.shared
    row.occupancy = occupancy(row.target, resources.registers, compiled.metadata.shared, warps)
    row.layout_conversions = machine_code.layout_conversions(ttgir)
    if row.spills:
        row.problems.append(f"{row.spills} spills")
    if variant.exact and inexact:
        row.problems.append(f"promises the reference's bits, but contains {', '.join(inexact)}")


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
    # spawn, not fork: importing torch starts threads, and forking a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) if processes > 1 else contextlib.nullcontext() as pool:
        rows = []
        for row in map(_audit_one, work) if pool is None else pool.map(_audit_one, work):
            rows.append(row)
            progress(len(rows), len(work))
    return rows
