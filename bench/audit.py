"""``halfstep bench audit``: compile every kernel variant for every target, with no GPU, and read the machine code.

Per variant and target it prints what the compiled code moves per element against the least possible, how wide its
accesses are, what it takes of the machine, and how long the least possible traffic takes at datasheet bandwidth. It
fails (status 1) where a variant does not compile, spills, or promises the reference's bits and contains a fused
multiply-add, an approximation or flushed subnormals. What is counted and how: ``machine_code.py``.

A family lists its variants in a function ``variants()``; ``--module`` audits any other module that has one.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAMILIES = ("halfstep.kernels.adam", "halfstep.kernels.cast", "halfstep.kernels.softmax", "halfstep.kernels.unscale")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

# Memory bandwidth in bytes per second, from the makers' datasheets: A100 80GB SXM, H100 SXM, H200 SXM, B200, MI300X.
BANDWIDTH = {
    "sm_80": {"A100": 2.039e12},
    "sm_90": {"H100": 3.35e12, "H200": 4.8e12},
    "sm_100": {"B200": 8.0e12},
    "gfx942": {"MI300X": 5.3e12},
}

# Warps, blocks and shared bytes per multiprocessor, from NVIDIA's CUDA programming guide, "Compute Capabilities".
_LIMITS = {"sm_80": (64, 32, 164 << 10), "sm_90": (64, 32, 228 << 10), "sm_100": (64, 32, 228 << 10)}
_REGISTERS = 65536
_SHARED_RESERVED = 1024  # per block, taken by the driver
# Set in a restarted process, so that one that still finds interpreted kernels stops instead of restarting for ever.
_RESTARTED = "HALFSTEP_AUDIT_RESTARTED"


@dataclass
class Row:
    """What the audit found for one variant on one target. Bytes are per element; None where it did not compile.

    Attributes:
        access_bits: the narrowest access of the bulk path, per thread; ``access_widths`` counts all of its widths.
        spills: instructions that touch local memory (NVIDIA) or spilled registers (AMD).
        occupancy: the share of the machine's warps that registers, shared memory and block limits let live at once.
        floor_ms: milliseconds per 10^9 elements that `floor_bytes` take at datasheet bandwidth, by machine.
        problems: why the variant fails the audit; empty if it passes.
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
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    barriers: int | None = None
    layout_conversions: int | None = None
    occupancy: float | None = None
    floor_ms: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def occupancy(target: str, registers: int, shared_bytes: int, num_warps: int) -> float | None:
    """Share of a multiprocessor's warps that can live at once; None for a target whose limits are not listed.

    Registers are handed out 256 at a time per warp, from four partitions of the register file.
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


def gpu_target(name: str) -> Any:
    """Triton's description of a target such as ``"sm_90"`` or ``"gfx942"``."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    # AMD's data center chips (gfx9) run 64 lanes in step, its graphics chips (gfx10 and later) 32.
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def compile_variant(variant: Any, target: str) -> Any:
    """Compile one `halfstep.kernels.variant.Variant` ahead of time. Returns Triton's compiled kernel, not loaded."""
    import triton
    from triton.compiler import ASTSource

    names = list(variant.kernel.arg_names)
    given = {*variant.signature, *variant.constexprs}
    if given != set(names):
        raise ValueError(
            f"variant {variant.name!r} names the arguments {sorted(given)}; allowed are exactly those of the kernel: "
            f"{names}; correct its signature or constexprs"
        )
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in names},
        constexprs=variant.constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16},
    )
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": not variant.exact, **variant.options}
    return triton.compile(source, target=gpu_target(target), options=options)


def _inspect(row: Row, variant: Any, compiled: Any) -> None:
    """Fill `row` from the compiled kernel."""
    import triton

    from halfstep.bench import machine_code

    ttgir = compiled.asm["ttgir"]
    uniform = machine_code.uniform_sites(ttgir)
    if "ptx" in compiled.asm:
        with tempfile.TemporaryDirectory(prefix="halfstep-audit-") as folder:
            text = machine_code.sass(compiled.asm["cubin"], triton.knobs.nvidia.nvdisasm.path, Path(folder))
            usage = machine_code.resource_usage(triton.knobs.nvidia.cuobjdump.path, Path(folder))
        counted = machine_code.bulk(list(machine_code.ptx_accesses(compiled.asm["ptx"])), uniform)
        emitted = machine_code.bulk(list(machine_code.sass_accesses(text)), uniform)
        taken = machine_code.sass_resources(text, usage)
        inexact = machine_code.ptx_inexact(compiled.asm["ptx"])
        row.occupancy = occupancy(row.target, taken.registers, taken.shared_bytes, variant.num_warps)
    else:
        text = compiled.asm["amdgcn"]
        counted = emitted = machine_code.bulk(list(machine_code.amd_accesses(text)), uniform)
        taken = machine_code.amd_resources(text)
        inexact = machine_code.amd_inexact(compiled.asm["llir"], text)
        row.occupancy = machine_code.amd_occupancy(text)
    elements = variant.elements or machine_code.tile_elements(ttgir)
    if elements:
        threads = compiled.metadata.num_warps * gpu_target(row.target).warp_size
        row.bytes_read, row.bytes_written = (
            sum(access.bits // 8 for access in counted if access.writes is writes) * threads / elements
            for writes in (False, True)
        )
    if emitted:
        row.access_bits = min(access.bits for access in emitted)
        for access in sorted(emitted, key=lambda access: -access.bits):
            row.access_widths[str(access.bits)] = row.access_widths.get(str(access.bits), 0) + 1
    row.registers, row.spills = taken.registers, taken.spills
    row.shared_bytes, row.barriers = max(taken.shared_bytes, compiled.metadata.shared), taken.barriers
    row.layout_conversions = machine_code.layout_conversions(ttgir)
    if row.spills:
        row.problems.append(f"{row.spills} spills")
    if variant.exact and inexact:
        row.problems.append(f"promises the reference's bits, but contains {', '.join(inexact)}")


@functools.cache
def _listed(module: str) -> list[Any]:
    """The variants of a module.

    Raises:
        ValueError: there is no such module, or it lists none.
    """
    try:
        variants = list(importlib.import_module(module).variants())
    except ModuleNotFoundError as error:
        raise ValueError(f"--module {module}: {error}; allowed are modules on Python's path, by dotted name") from error
    except AttributeError as error:
        raise ValueError(
            f"--module {module}: {error}; it needs a function variants(), see kernels/variant.py"
        ) from error
    if not variants:
        raise ValueError(f"--module {module}: its variants() lists nothing, so there is nothing to audit")
    return variants


def _audit_one(job: tuple[str, int, str]) -> dict[str, Any]:
    """Compile and inspect one variant for one target; runs in a worker process."""
    module, index, target = job
    variant = _listed(module)[index]
    floor = variant.bytes_read + variant.bytes_written
    row = Row(
        kernel=f"{module.rpartition('.')[2]}.{variant.kernel.__name__}",
        variant=variant.name,
        target=target,
        floor_bytes=floor,
        floor_read=variant.bytes_read,
        floor_written=variant.bytes_written,
        floor_ms={machine: 1e12 * floor / rate for machine, rate in BANDWIDTH.get(target, {}).items()},
    )
    try:
        _inspect(row, variant, compile_variant(variant, target))
    except Exception as error:  # whatever the compiler raises is the finding, and the other variants still count
        lines = str(error).strip().splitlines() or [""]
        row.problems.append(f"does not compile: {type(error).__name__}: {lines[-1]}")
    return asdict(row)


def audit(
    modules: list[str], targets: list[str], jobs: int, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[dict[str, Any]]:
    """Audit every variant of `modules` for every target in `jobs` processes.

    Returns:
        One `Row` per variant and target, as a dictionary, in the order of the modules.
    """
    work = [
        (module, index, target) for module in modules for index in range(len(_listed(module))) for target in targets
    ]
    rows = []
    # spawn, not fork: importing torch starts threads, and a fork in a threaded process may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, min(jobs, len(work))), mp_context=context) as pool:
        for row in pool.map(_audit_one, work):
            rows.append(row)
            progress(len(rows), len(work))
    return rows


# --- printing --------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _against(value: float | None, floor: float) -> str:
    return f"{_number(value)} / {_number(floor)}"


def print_table(rows: list[dict[str, Any]], seconds: float) -> None:
    """Print the rows as a table, what fails below it, and a verdict."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=200)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel and variant")
    table.add_column("target")
    for heading in (
        "read/least",
        "written/least",
        "access bits",
        "regs",
        "spills",
        "shared",
        "barriers",
        "conversions",
    ):
        table.add_column(heading, justify="right")
    table.add_column("occupancy", justify="right")
    table.add_column("least ms per 10^9")
    for row in rows:
        widths = "+".join(f"{count}x{bits}" for bits, count in row["access_widths"].items()) or "-"
        least = " ".join(f"{machine} {time_ms:.2f}" for machine, time_ms in row["floor_ms"].items())
        table.add_row(
            escape(f"{row['kernel']} {row['variant']}"),
            row["target"],
            _against(row["bytes_read"], row["floor_read"]),
            _against(row["bytes_written"], row["floor_written"]),
            widths,
            *(_number(row[key]) for key in ("registers", "spills", "shared_bytes", "barriers", "layout_conversions")),
            "-" if row["occupancy"] is None else f"{row['occupancy']:.0%}",
            least,
            style="red" if row["problems"] else None,
        )
    console.print(table)
    failing = [row for row in rows if row["problems"]]
    for row in failing:
        for problem in row["problems"]:
            console.print(escape(f"FAIL {row['kernel']} {row['variant']} on {row['target']}: {problem}"), style="red")
    verdict = f"{len(failing)} of {len(rows)} fail" if failing else f"all {len(rows)} pass"
    console.print(
        f"Bytes per element, from the machine code against the least the job needs. {verdict}, in {seconds:.0f} s."
    )


class _Bar:
    """A progress bar on standard error, once the work has taken two seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._start = time.monotonic()
        self._task: Any = None

    def update(self, done: int, of: int) -> None:
        if self._task is None and time.monotonic() - self._start > 2.0 and sys.stderr.isatty():
            self._progress.start()
            self._task = self._progress.add_task("compiling kernels", total=of)
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()


# --- the command -----------------------------------------------------------------------------------------------------


def _target(name: str) -> str:
    # bf16 conversions need sm_80.
    if not re.fullmatch(r"sm_([89]\d|1\d\d)|gfx\d+[0-9a-f]*", name):
        raise argparse.ArgumentTypeError(
            f"{name!r}; allowed are NVIDIA targets such as sm_90, from sm_80 on, and AMD targets such as gfx942"
        )
    return name


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are whole numbers from 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halfstep bench audit",
        description="Compile every kernel for every target, with no GPU, and read bytes per element, access widths, "
        "registers, spills, shared memory, barriers and layout conversions from the machine code.",
    )
    parser.add_argument(
        "--target",
        action="append",
        type=_target,
        metavar="TARGET",
        help=f"compile for this target only; may be repeated (default: {' '.join(TARGETS)})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--module",
        action="append",
        metavar="MODULE",
        help="audit what this module's variants() lists instead of halfstep's kernels; may be repeated",
    )
    parser.add_argument(
        "--jobs", type=_jobs, default=min(os.cpu_count() or 1, 8), help="processes (default: one per core, at most 8)"
    )
    return parser


def _without_interpreter(argv: list[str]) -> int | None:
    """Run again in a process of its own if kernels are interpreted here: those cannot be compiled.

    Triton decides when a kernel is decorated, so neither removing the variable nor importing again would help.
    """
    backend = sys.modules.get("halfstep.kernels.backend")
    if not os.environ.get("TRITON_INTERPRET") and not (backend is not None and backend.INTERPRET):
        return None
    if os.environ.get(_RESTARTED):
        raise RuntimeError(
            "kernels are still interpreted after a restart without TRITON_INTERPRET; unset it and try again"
        )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment[_RESTARTED] = "1"
    # The working folder must not come first on the path: a folder called `bench` there would be importable.
    environment["PYTHONSAFEPATH"] = "1"
    return subprocess.run([sys.executable, "-m", "halfstep.bench.audit", *argv], env=environment).returncode


def main(argv: list[str] | None = None) -> int:
    """Run ``halfstep bench audit`` with the arguments `argv`. Returns the exit status: 0 if every variant passes."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    status = _without_interpreter(argv)
    if status is not None:
        return status
    try:
        import triton  # noqa: F401
    except ImportError:
        print(
            "halfstep bench audit compiles Triton kernels, and triton is not installed: pip install triton",
            file=sys.stderr,
        )
        return 2
    start, bar = time.monotonic(), _Bar()
    try:
        rows = audit(arguments.module or list(FAMILIES), arguments.target or list(TARGETS), arguments.jobs, bar.update)
    except ValueError as error:
        print(f"halfstep bench audit: {error}", file=sys.stderr)
        return 2
    finally:
        bar.close()
    if arguments.json:
        print(json.dumps({"variants": rows}, indent=1))
    else:
        print_table(rows, time.monotonic() - start)
    return 1 if any(row["problems"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
