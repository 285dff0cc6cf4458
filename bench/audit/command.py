"""``halfstep bench audit``: compile every kernel variant for every target, without a GPU, and analyze the code.

It fails (exit status 1) if a variant does not compile, spills, exceeds the threads or the shared memory of a block, or
must be bit-identical to the reference but contains a fused multiply-add, an approximation or flushed subnormals; and
with ``--bounds``, if a row is worse than recorded. Modules list their `launches.Variant`s in a function ``variants()``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from halfstep.bench.audit import bounds as audit_bounds
from halfstep.bench.audit.rows import FAMILIES, TARGETS, audit
from halfstep.cli.command_line import Parser, UsageError, a_path, answer, output_file, run, whole
from halfstep.cli.terminal import Progress, Table, joined, say, text

# The measures of a row that each column shows, by the column's heading.
COLUMNS = {
    "read + written": ("bytes_read", "bytes_written"),
    "least": ("floor_read", "floor_written"),
    "access bits": ("access_bits",),
    "registers": ("registers",),
    "shared bytes": ("shared_bytes",),
    "barriers": ("barriers",),
    "conversions": ("layout_conversions",),
    "occupancy": ("occupancy",),
    "spills": ("spills",),
}


def _number(value: float | None, measure: str) -> str:
    """A value with at most five digits; a dash for None."""
    return "-" if value is None else f"{value:.0%}" if measure == "occupancy" else f"{value:.5g}"


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["kernel"], row["variant"]


def shown(rows: list[dict[str, Any]], seconds: float) -> list[Any]:
    """A table with one line per variant, and one value per target where they differ; the problems; and a summary."""
    lines, before = [], ""
    for (kernel, variant), group in groupby(sorted(rows, key=_name), _name):
        of_targets = list(group)
        line = [kernel if kernel != before else "", variant]
        for measures in COLUMNS.values():
            cells = [" + ".join(_number(row[measure], measure) for measure in measures) for row in of_targets]
            line.append(cells[0] if len(set(cells)) == 1 else " / ".join(cells))
        lines.append(line)
        before = kernel
    targets = " / ".join(dict.fromkeys(row["target"] for row in rows))
    caption = "Bytes per element, from the compiled code, and the least that the job needs; where targets differ, "
    parts: list[Any] = [f"{caption}{targets}.", ""]
    parts.append(Table(["kernel", "variant", *COLUMNS], lines, range(2, 2 + len(COLUMNS))))
    for row in rows:
        where = f" {row['kernel']} {row['variant']} on {row['target']}: "
        parts += [joined(text("FAIL", "bad"), where, problem) for problem in row["problems"]]
    failing = sum(bool(row["problems"]) for row in rows)
    summary = f"{failing} of {len(rows)} fail" if failing else f"all {len(rows)} pass"
    return [*parts, f"{summary}, in {seconds:.0f} s."]


def _target(name: str) -> str:
    # bf16 conversions need sm_80.
    if not re.fullmatch(r"sm_([89]\d|1\d\d)|gfx\d+[0-9a-f]*", name):
        raise argparse.ArgumentTypeError(
            f"expected an NVIDIA target from sm_80 on, such as sm_90, or an AMD target such as gfx942, but got {name!r}"
        )
    return name


def _parser() -> Parser:
    parser = Parser(
        "bench audit",
        description="Compile every kernel for every target, without a GPU, and read bytes per element, access widths, "
        "registers, spills, shared memory, barriers and layout conversions from the compiled code.",
    )
    option = parser.add_argument
    option(
        "--target", action="append", type=_target, metavar="TARGET",
        help=f"compile for this target only; may be repeated (default: {' '.join(TARGETS)})",
    )  # fmt: skip
    option(
        "--module", action="append", metavar="MODULE",
        help="audit the variants() of this module instead of halfstep's kernels; may be repeated",
    )  # fmt: skip
    option("--bounds", type=a_path, metavar="FILE", help="fail if a row violates the bounds recorded in FILE")
    option(
        "--record", type=output_file, metavar="FILE",
        help="record the rows as bounds in FILE; with --module or --target, only those of its rows",
    )  # fmt: skip
    option(
        "--jobs", type=whole(1), default=min(os.cpu_count() or 1, 8), metavar="N",
        help="processes (default: one per core, at most 8)",
    )  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    """Audit, print, compare and record. Returns the exit status. Raises ValueError for an unusable module or file."""
    bounds = audit_bounds.load(options.bounds) if options.bounds else None  # before the audit, which takes minutes
    if os.environ.get("TRITON_INTERPRET"):
        raise UsageError("TRITON_INTERPRET is set, which replaces the compiler by an interpreter; unset it")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("it compiles Triton kernels, but triton is not installed: pip install triton")
    import triton

    modules = list(dict.fromkeys(options.module or FAMILIES))
    targets = list(dict.fromkeys(options.target or TARGETS))
    families = {module.rpartition(".")[2] for module in options.module} if options.module else None
    start = time.monotonic()
    with Progress(1.0, patience=2.0) as progress:
        rows = audit(modules, targets, options.jobs, lambda done, of: progress.show(done / of, "compiling kernels"))
    seconds = time.monotonic() - start
    answer(options, lambda: {"variants": rows}, lambda: shown(rows, seconds))
    failing = sum(bool(row["problems"]) for row in rows)
    departures = []
    if bounds:
        remedy = f"halfstep bench audit --record {shlex.quote(str(options.bounds))}"
        departures = audit_bounds.departures(rows, bounds, triton.__version__, families, targets, remedy)
        if triton.__version__ != bounds.triton:
            say(
                f"{options.bounds} was recorded with Triton {bounds.triton}, this is {triton.__version__}, so only "
                f"{', '.join(audit_bounds.EVERYWHERE)} are compared",
                sys.stderr,
            )
        for line in departures:
            say(f"FAIL {line}", sys.stderr)
    if options.record and failing:
        say(f"{options.record}: not written, since {failing} rows fail", sys.stderr)
    elif options.record:
        say(audit_bounds.record(rows, options.record, triton.__version__, families, targets), sys.stderr)
    return 1 if failing or departures else 0


def main(argv: Sequence[str]) -> int:
    return run(_parser(), argv, _run, (ValueError,))
