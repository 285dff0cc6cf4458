"""The rows of the audit, one per variant and target: compile a kernel without a GPU and analyze its machine code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import math
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfstep.bench.audit import machine_code, peers
from halfstep.bench.audit.launches import Launch, Variant, gpu_target, recorded
from halfstep.bench.audit.roofline import GPUS

PEERS = "halfstep.bench.audit.peers"
FAMILIES = tuple(
    f"halfstep.bench.audit.families.{family}"
    for family in ("adam", "cast", "loss_scale", "softmax", "statistics", "unscale")
)
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


# Warps, blocks and shared bytes per multiprocessor, from NVIDIA's CUDA programming guide, "Compute Capabilities".
_LIMITS = {"sm_80": (64, 32, 164 << 10), "sm_90": (64, 32, 228 << 10), "sm_100": (64, 32, 228 << 10)}
_REGISTERS = 65536
_SHARED_RESERVED = 1024  # bytes per block, reserved by the driver


@dataclass
class AuditRow:
    """The audit of one variant on one target. Bytes are per element. Values are None if the variant did not compile.

    Attributes:
        bytes_read, bytes_written: bytes that the bulk path moves.
        floor_bytes, floor_read, floor_written: the least possible bytes.
        access_bits: width of the narrowest access of the bulk path, per thread.
        access_widths: number of accesses of the bulk path, by width.
        operand_bits: width of the narrowest access, by the width of the elements.
        shared_bytes: shared memory per block, without the bytes that the driver reserves.
        spills: instructions that access local memory (NVIDIA), or spilled registers (AMD).
        occupancy: share of the warps of a multiprocessor that registers, shared memory and block limits allow.
        floor_ms: time of `floor_bytes` at the bandwidth of the datasheet, in milliseconds per 10^9 elements, by GPU.
        peer: the distribution that the kernel belongs to; None for halfstep.
        problems: why the variant fails the audit; empty if it passes. Problems of peers do not fail the audit.
    """

    kernel: str
    variant: str
    target: str
    bytes_read: float | None = None
    bytes_written: float | None = None
    floor_bytes: float = 0.0
    floor_read: float = 0.0
    floor_written: float = 0.0
    access_bits: int | None = None
    access_widths: dict[str, int] = field(default_factory=dict)
    operand_bits: dict[str, int] = field(default_factory=dict)
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    barriers: int | None = None
    layout_conversions: int | None = None
    occupancy: float | None = None
    floor_ms: dict[str, float] = field(default_factory=dict)
    peer: str | None = None
    problems: list[str] = field(default_factory=list)


def most_shared(target: str) -> int:
    """The largest shared memory of a block, in bytes: 64 KiB on AMD's gfx9."""
    return _LIMITS[target][2] - _SHARED_RESERVED if target in _LIMITS else 64 << 10


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> float | None:
    """The share of the warps of a multiprocessor that can be resident; None for a target whose limits are not listed.

    Registers are allocated to warps in units of 256, from four partitions of the register file.
    """
    if target not in _LIMITS:
        return None
    max_warps, max_blocks, max_shared = _LIMITS[target]
    per_warp = max(256, math.ceil(registers * 32 / 256) * 256)
    warps = min(max_warps, _REGISTERS // 4 // per_warp * 4)
    blocks = min(max_blocks, warps // num_warps)
    if shared_bytes:
        blocks = min(blocks, max_shared // (shared_bytes + _SHARED_RESERVED))
    return blocks * num_warps / max_warps


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
        text = machine_code.sass(cubin, triton.knobs.nvidia.nvdisasm.path, Path(folder))
        usage = machine_code.resource_usage(triton.knobs.nvidia.cuobjdump.path, Path(folder))
    cache.put(text, "kernel.sass", binary=False)
    cache.put(usage, "kernel.usage", binary=False)
    return text, usage


def _inspect(row: AuditRow, variant: Variant, launch: Launch, compiled: Any) -> None:
    """Fill in `row` from the compiled kernel."""
    from halfstep.kernels.backend import MOST_THREADS

    ttgir = compiled.asm["ttgir"]
    warps, lanes = compiled.metadata.num_warps, gpu_target(row.target).warp_size
    threads = warps * lanes
    if threads > MOST_THREADS:
        row.problems.append(f"{warps} warps of {lanes} lanes are {threads} threads; at most {MOST_THREADS} are allowed")
    most = most_shared(row.target)
    if compiled.metadata.shared > most:
        row.problems.append(f"{compiled.metadata.shared} bytes of shared memory per block; at most {most} are allowed")
    if "ptx" in compiled.asm:
        text, usage = _disassembled(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        counted = machine_code.bulk(list(machine_code.ptx_accesses(ptx)), ttgir)
        emitted = machine_code.bulk(list(machine_code.sass_accesses(text, machine_code.ptx_shifted_lines(ptx))), ttgir)
        taken = machine_code.sass_resources(text, usage)
        inexact = machine_code.ptx_inexact(ptx)
        row.occupancy = occupancy(row.target, taken.registers, compiled.metadata.shared, warps)
    else:
        text = compiled.asm["amdgcn"]
        counted = emitted = machine_code.bulk(list(machine_code.amd_accesses(text)), ttgir)
        taken = machine_code.amd_resources(text)
        inexact = machine_code.amd_inexact(compiled.asm["llir"], text)
        row.occupancy = machine_code.amd_occupancy(text, compiled.metadata.shared, warps)
    elements = math.prod(map(launch.constant, variant.tile)) if variant.tile else machine_code.tile_elements(ttgir)
    if elements:
        elements *= variant.copies_on.get(row.target, variant.copies)
        row.bytes_read, row.bytes_written = (
            sum(access.bits // 8 for access in counted if access.writes is writes) * threads / elements
            for writes in (False, True)
        )
    if emitted:
        row.access_bits = min(access.bits for access in emitted)
        for access in sorted(emitted, key=lambda access: -access.bits):
            row.access_widths[str(access.bits)] = row.access_widths.get(str(access.bits), 0) + 1
        row.operand_bits = {str(key): bits for key, bits in machine_code.operand_bits(emitted, ttgir).items()}
    row.registers, row.spills, row.barriers = taken.registers, taken.spills, taken.barriers
    row.shared_bytes = compiled.metadata.shared
    row.layout_conversions = machine_code.layout_conversions(ttgir)
    if row.spills:
        row.problems.append(f"{row.spills} spills")
    if variant.exact and inexact:
        row.problems.append(f"promises the reference's bits, but contains {', '.join(inexact)}")


@functools.cache
def _listed(module: str) -> list[Variant]:
    """The variants of a module.

    Raises:
        ValueError: there is no such module, or it lists no variants.
    """
    try:
        variants = list(importlib.import_module(module).variants())
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected --module to be a module on Python's path, by dotted name, but got {module}: {error}"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"--module {module}: {error}; it needs a function variants(), see bench/audit/launches.py"
        ) from error
    if not variants:
        raise ValueError(f"--module {module}: its variants() lists nothing, so there is nothing to audit")
    return variants


def _audit_one(job: tuple[str, int, str]) -> dict[str, Any]:
    """Launch, compile and inspect one variant for one target; runs in a worker process."""
    module, index, target = job
    variant = _listed(module)[index]
    floor = variant.bytes_read + variant.bytes_written
    peer = peers.find().peers[index] if module == PEERS else None
    row = AuditRow(
        # The name of a peer's kernel begins with its package: liger_kernel, not liger_kernel.ops.softmax.
        kernel=f"{variant.kernel.__module__.partition('.')[0] if peer else module.rpartition('.')[2]}"
        f".{variant.kernel.__name__}",
        variant=variant.name,
        target=target,
        floor_bytes=floor,
        floor_read=variant.bytes_read,
        floor_written=variant.bytes_written,
        peer=peer,
        floor_ms={name: 1e12 * floor / gpu.bandwidth for name, gpu in GPUS.items() if gpu.target == target},
    )
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

    Returns:
        One `AuditRow` per variant and target, as a dictionary, in the order of the modules.
    """
    work = [
        (module, index, target) for module in modules for index in range(len(_listed(module))) for target in targets
    ]
    rows = []
    with contextlib.ExitStack() as stack:
        results: Iterator[dict[str, Any]] = map(_audit_one, work)
        if min(jobs, len(work)) > 1:
            # spawn, not fork: importing torch starts threads, and forking a process with threads may hang.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(min(jobs, len(work)), context))
            results = pool.map(_audit_one, work)
        for row in results:
            rows.append(row)
            progress(len(rows), len(work))
    return rows
