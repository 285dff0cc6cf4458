"""``halfstep bench audit``: compile every kernel variant for every target, without a GPU, and analyze the machine code.

For each variant and target it prints the bytes that the code moves per element and the least possible, the widths of
its accesses, and the registers, shared memory, barriers and layout conversions that it uses.
It fails (status 1) if a variant does not compile, spills, exceeds the threads or the shared memory of a block, or
promises the bits of the reference but contains a fused multiply-add, an approximation or flushed subnormals.
``machine_code.py`` describes what is counted, and how.

A family lists its variants in a function ``variants()``. Problems of peers are shown and do not fail the audit.
``bounds.py`` compares the rows with recorded bounds.
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
from pathlib import Path
from typing import Any

from halfstep.bench.audit import bounds as audit_bounds
from halfstep.bench.audit import peers, roofline
from halfstep.bench.audit.rows import FAMILIES, PEERS, TARGETS, audit
from halfstep.cli.command_line import Parser, UsageError, a_path, answer, make_folder, output_file, run
from halfstep.cli.numbers import whole
from halfstep.cli.roofline_picture import draw
from halfstep.cli.terminal import Progress, Table, joined, say, text

# --- printing --------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """At most five digits; a dash for None."""
    return "-" if value is None else f"{value:.5g}"


# The heading of a column, and the measures of a row that it shows.
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


def _cell(row: dict[str, Any], heading: str) -> str:
    if heading == "occupancy" and row["occupancy"] is not None:
        return f"{row['occupancy']:.0%}"
    return " + ".join(number(row[measure]) for measure in COLUMNS[heading])


def table(rows: list[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """A caption, headings and one line of cells per variant, with those of all targets where they differ."""
    spills = any(row["spills"] for row in rows)
    headings = [heading for heading in COLUMNS if spills or heading != "spills"]
    lines, before = [], ""
    for (kernel, variant), group in groupby(sorted(rows, key=_name), _name):
        of_targets = list(group)
        line = [kernel if kernel != before else "", variant]
        for heading in headings:
            cells = [_cell(row, heading) for row in of_targets]
            line.append(cells[0] if len(set(cells)) == 1 else " / ".join(cells))
        lines.append(line)
        before = kernel
    targets = " / ".join(dict.fromkeys(row["target"] for row in rows))
    caption = "Bytes per element, from the machine code, and the least that the job needs; "
    caption += f"where targets differ, {targets}." + " No spills." * (not spills)
    return caption, ["kernel", "variant", *headings], lines


def _name(row: dict[str, Any]) -> tuple[str, str]:
    return row["kernel"], row["variant"]


def shown(rows: list[dict[str, Any]], seconds: float) -> list[Any]:
    """The rows as a table, the problems, and a summary."""
    caption, headings, lines = table(rows)
    parts: list[Any] = [caption, "", Table(headings, lines, range(2, len(headings)))]
    for row in rows:
        verdict = text("PEER") if row["peer"] else text("FAIL", "bad")
        where = f" {row['kernel']} {row['variant']} on {row['target']}: "
        parts += [joined(verdict, where, problem) for problem in row["problems"]]
    count, failing = sum(not row["peer"] for row in rows), len(_failing(rows))
    return [*parts, f"{f'{failing} of {count} fail' if failing else f'all {count} pass'}, in {seconds:.0f} s."]


def _failing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that fail the audit."""
    return [row for row in rows if row["problems"] and not row["peer"]]


# --- the command -----------------------------------------------------------------------------------------------------


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
        "registers, spills, shared memory, barriers and layout conversions from the machine code.",
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
    option("--peers", action="store_true", help="also compile the kernels of installed peers, as they launch them")
    option("--bounds", type=a_path, metavar="FILE", help="fail if a row violates the bounds recorded in FILE")
    option(
        "--record", type=output_file, metavar="FILE",
        help="record the rows as bounds in FILE; with --module or --target, only those of its rows",
    )  # fmt: skip
    option(
        "--out", type=a_path, metavar="DIR", help="also draw all kernels on the roofline of each GPU: DIR/roofline.png"
    )
    option(
        "--jobs", type=whole(1), default=min(os.cpu_count() or 1, 8), metavar="N",
        help="processes (default: one per core, at most 8)",
    )  # fmt: skip
    return parser


def _draw(folder: Path) -> None:
    counts = roofline.read()
    picture = make_folder(folder) / "roofline.png"
    draw(picture, roofline.panels(counts), f"Predicted from executed kernels of Triton {counts['triton']}, cold cache")
    say(f"wrote {picture}", sys.stderr)


def _audit_as_asked(arguments: argparse.Namespace) -> int:
    """Audit, print, compare and record. Returns the exit status. A module or file that cannot be used: ValueError."""
    if arguments.bounds:  # what is wrong is refused before the audit, which takes minutes
        audit_bounds.load(arguments.bounds)
    if arguments.out:
        _draw(arguments.out)
    if os.environ.get("TRITON_INTERPRET"):
        raise UsageError("TRITON_INTERPRET is set, and what is interpreted cannot be compiled; unset it")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("it compiles Triton kernels, and triton is not installed: pip install triton")
    import triton

    modules = list(dict.fromkeys(arguments.module or FAMILIES))
    targets = list(dict.fromkeys(arguments.target or TARGETS))
    families = {module.rpartition(".")[2] for module in arguments.module} if arguments.module else None
    if arguments.peers:
        variants, left_out = peers.find()
        modules += [PEERS] if variants else []
        for line in left_out:
            say(line, sys.stderr)
    start = time.monotonic()
    with Progress(1.0, patience=2.0) as progress:
        rows = audit(modules, targets, arguments.jobs, lambda done, of: progress.show(done / of, "compiling kernels"))
    failing = _failing(rows)
    seconds = time.monotonic() - start
    answer(arguments, lambda: {"variants": rows}, lambda: shown(rows, seconds))
    rows = [row for row in rows if not row["peer"]]
    departures = []
    if arguments.bounds:
        bounds = audit_bounds.load(arguments.bounds)
        remedy = f"halfstep bench audit --record {shlex.quote(str(arguments.bounds))}"
        departures = audit_bounds.departures(rows, bounds, triton.__version__, families, targets, remedy)
        if triton.__version__ != bounds.triton:
            say(
                f"{arguments.bounds} was recorded with Triton {bounds.triton}, this is {triton.__version__}, so only "
                f"{', '.join(audit_bounds.EVERYWHERE)} are compared",
                sys.stderr,
            )
        for line in departures:
            say(f"FAIL {line}", sys.stderr)
    if arguments.record:
        if failing:
            say(f"{arguments.record}: not written, since {len(failing)} rows fail", sys.stderr)
            return 1
        say(audit_bounds.record(rows, arguments.record, triton.__version__, families, targets), sys.stderr)
    return 1 if failing or departures else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench audit`` with the arguments `argv`. Returns the exit status: 0 if every variant passes."""
    return run(_parser(), argv, _audit_as_asked, (ValueError,))
