"""``halfstep bench audit``: compile every kernel variant for every target, with no GPU, and read the machine code.

Per variant and target it prints what the compiled code moves per element against the least possible, how wide its
accesses are, what it takes of the machine, and how long the least possible traffic takes at datasheet bandwidth. It
fails (status 1) where a variant does not compile, spills, has more threads or shared memory than a block may have, or
promises the reference's bits and contains a fused multiply-add, an approximation or flushed subnormals. What is counted
and how: ``machine_code.py``.

A family lists its variants in a function ``variants()``; ``--module`` audits any other module that has one. ``--peers``
adds the kernels of installed peers with their own launch settings; what they do wrong is shown and does not fail.
``--bounds`` and ``--record`` hold the rows to what was recorded before: ``audit_bounds.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfstep.bench import audit_bounds, audit_markdown
from halfstep.cli.command_line import Parser, UsageError, input_file, output_file, run, whole

PEERS = "halfstep.bench.audit_peers"
FAMILIES = tuple(
    f"halfstep.kernels.{family}" for family in ("adam", "cast", "loss_scale", "softmax", "statistics", "unscale")
)
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
        access_bits: the narrowest access of the bulk path, per thread; ``access_widths`` counts all of its widths, and
            ``operand_bits`` gives the narrowest by the width of the operand's elements, both in bits.
        shared_bytes: per block, without what the driver reserves.
        spills: instructions that touch local memory (NVIDIA) or spilled registers (AMD).
        occupancy: the share of the machine's warps that registers, shared memory and block limits let live at once.
        floor_ms: milliseconds per 10^9 elements that `floor_bytes` take at datasheet bandwidth, by machine.
        peer: the distribution that the kernel belongs to; None for halfstep's own.
        problems: why the variant fails the audit; empty if it passes. A peer's do not fail the audit.
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
    """Bytes of shared memory that a block may have: AMD's gfx9 gives 64 KiB."""
    return _LIMITS[target][2] - _SHARED_RESERVED if target in _LIMITS else 64 << 10


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
    described = gpu_target(target)
    options = {
        "num_warps": variant.warps(described.warp_size),
        "enable_fp_fusion": not variant.exact,
        **variant.options,
    }
    return triton.compile(source, target=described, options=options)


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage of `cubin`, kept in Triton's cache: nvdisasm takes longer than all the rest."""
    import triton
    from triton.runtime.cache import get_cache_manager

    from halfstep.bench import machine_code

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


def _inspect(row: Row, variant: Any, compiled: Any) -> None:
    """Fill `row` from the compiled kernel."""
    from halfstep.bench import machine_code
    from halfstep.kernels.backend import MOST_THREADS

    ttgir = compiled.asm["ttgir"]
    warps, lanes = compiled.metadata.num_warps, gpu_target(row.target).warp_size
    threads = warps * lanes
    if threads > MOST_THREADS:
        row.problems.append(f"{warps} warps of {lanes} lanes are {threads} threads; {MOST_THREADS} can be launched")
    most = most_shared(row.target)
    if compiled.metadata.shared > most:
        row.problems.append(f"{compiled.metadata.shared} bytes of shared memory per block; {most} can be had")
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
    elements = variant.elements or machine_code.tile_elements(ttgir)
    if elements:
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
    from halfstep.bench import audit_peers

    module, index, target = job
    variant = _listed(module)[index]
    floor = variant.bytes_read + variant.bytes_written
    peer = audit_peers.find().peers[index] if module == PEERS else None
    row = Row(
        # A peer's kernel is named with its package: liger_kernel, not liger_kernel.ops.softmax.
        kernel=f"{variant.kernel.__module__.partition('.')[0] if peer else module.rpartition('.')[2]}"
        f".{variant.kernel.__name__}",
        variant=variant.name,
        target=target,
        floor_bytes=floor,
        floor_read=variant.bytes_read,
        floor_written=variant.bytes_written,
        peer=peer,
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
    """Audit every variant of `modules` for every target in `jobs` processes; with 1 in this one.

    Returns:
        One `Row` per variant and target, as a dictionary, in the order of the modules.
    """
    work = [
        (module, index, target) for module in modules for index in range(len(_listed(module))) for target in targets
    ]
    rows = []
    with contextlib.ExitStack() as stack:
        results: Iterator[dict[str, Any]] = map(_audit_one, work)
        if min(jobs, len(work)) > 1:
            # spawn, not fork: importing torch starts threads, and a fork in a threaded process may hang.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(min(jobs, len(work)), context))
            results = pool.map(_audit_one, work)
        for row in results:
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
            style="red" if row["problems"] and not row["peer"] else None,
        )
    console.print(table)
    for row in rows:
        for problem in row["problems"]:
            verdict, style = ("PEER", None) if row["peer"] else ("FAIL", "red")
            line = f"{verdict} {row['kernel']} {row['variant']} on {row['target']}: {problem}"
            console.print(escape(line), style=style)
    own = [row for row in rows if not row["peer"]]
    failing = _failing(rows)
    verdict = f"{len(failing)} of {len(own)} fail" if failing else f"all {len(own)} pass"
    console.print(
        f"Bytes per element, from the machine code against the least the job needs. {verdict}, in {seconds:.0f} s."
    )


def _failing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that fail the audit."""
    return [row for row in rows if row["problems"] and not row["peer"]]


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
            f"{name!r} is not allowed; allowed are NVIDIA targets from sm_80 on, such as sm_90, and AMD targets as "
            "gfx942"
        )
    return name


def _parser() -> Parser:
    parser = Parser(
        "bench audit",
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
        "--peers", action="store_true", help="also compile the kernels of installed peers, as they launch them"
    )
    parser.add_argument(
        "--bounds", type=input_file, metavar="FILE", help="fail where a row leaves the bounds recorded in FILE"
    )
    parser.add_argument(
        "--record",
        type=output_file,
        metavar="FILE",
        help="record the rows as bounds in FILE; with --module or --target, only those of its rows",
    )
    parser.add_argument(
        "--markdown",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the table as Markdown or, with FILE, put it between FILE's markers; after --record, of all bounds",
    )
    parser.add_argument(
        *("--jobs",),
        type=whole(1),
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes (default: one per core, at most 8)",
    )
    return parser


def _without_interpreter(argv: Sequence[str]) -> int | None:
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


def _audit_as_asked(arguments: argparse.Namespace) -> int:
    """Audit, print, compare and record. Returns the exit status.

    Raises:
        ValueError: a module or file that was named cannot be used.
    """
    import triton

    from halfstep.bench import audit_peers

    modules = list(dict.fromkeys(arguments.module or FAMILIES))
    targets = list(dict.fromkeys(arguments.target or TARGETS))
    families = {module.rpartition(".")[2] for module in arguments.module} if arguments.module else None
    peers_missing: tuple[str, ...] = ()
    if arguments.peers:
        found = audit_peers.find()
        peers_missing = found.left_out
        modules = [*modules, *([PEERS] if found.variants else [])]
    for line in peers_missing:
        print(line, file=sys.stderr)

    start, bar = time.monotonic(), _Bar()
    try:
        rows = audit(modules, targets, arguments.jobs, bar.update)
    finally:
        bar.close()
    own = [row for row in rows if not row["peer"]]
    failing = _failing(rows)
    if arguments.json:
        print(json.dumps({"variants": rows}, indent=1))
    elif arguments.markdown != "-":
        print_table(rows, time.monotonic() - start)

    left = []
    if arguments.bounds:
        bounds = audit_bounds.load(arguments.bounds)
        remedy = f"halfstep bench audit --record {arguments.bounds}"
        left = audit_bounds.departures(own, bounds, triton.__version__, families, targets, remedy)
        if triton.__version__ != bounds.triton:
            print(
                f"{arguments.bounds} was recorded with Triton {bounds.triton}, this is {triton.__version__}, so only "
                f"{', '.join(audit_bounds.EVERYWHERE)} are compared",
                file=sys.stderr,
            )
        for line in left:
            print(f"FAIL {line}", file=sys.stderr)
    if arguments.record:
        if failing:
            print(f"{arguments.record}: not written, since {len(failing)} rows fail", file=sys.stderr)
            return 1
        print(audit_bounds.record(own, arguments.record, triton.__version__, families, targets), file=sys.stderr)
        own = audit_markdown.from_bounds(audit_bounds.load(arguments.record).entries)
    if arguments.markdown:
        tables = {audit_markdown.OURS: own}
        # Half a table of peers would stand in the place of a whole one.
        if arguments.peers and not peers_missing:
            tables[audit_markdown.PEERS] = [row for row in rows if row["peer"]]
        for name, members in tables.items():
            if arguments.markdown == "-":
                print(audit_markdown.table(members), end="\n\n")
            else:
                audit_markdown.write(name, audit_markdown.table(members), Path(arguments.markdown))
    return 1 if failing or left else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench audit`` with the arguments `argv`. Returns the exit status: 0 if every variant passes."""

    def command(arguments: argparse.Namespace) -> int:
        status = _without_interpreter(argv)
        if status is not None:
            return status
        if importlib.util.find_spec("triton") is None:
            raise UsageError("it compiles Triton kernels, and triton is not installed: pip install triton")
        return _audit_as_asked(arguments)

    return run(_parser(), argv, command, (ValueError,))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
