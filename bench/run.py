"""``halfstep bench run``: the time of every kernel and of the whole AMP step, compared with other libraries.

The command compares each provider with float64, times those that pass and a plain copy in interleaved rounds, and
prints a table. With ``--out DIR`` it also writes ``results.json``, ``table.md``, ``roofline.png`` and ``step.png``.
``harness.py`` describes how it measures, ``cases/`` what.

Exit status: 0, even if a peer failed; 1 if a provider of halfstep was wrong or raised; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, make_folder
from halfstep.cli.numbers import above_zero, whole
from halfstep.cli.terminal import Progress, show, text

if TYPE_CHECKING:
    from halfstep.bench.harness import Result

GROUP_NAMES = ("softmax", "cast", "unscale", "adam", "step")
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
SECONDS = {True: 0.25, False: 1.0}  # time per case, by --quick


def _parser() -> Parser:
    parser = Parser(
        "bench run",
        description="Measure every kernel and the whole AMP step, and the same operations in torch (eager, fused, "
        "foreach and compiled) and in the installed peers. On a GPU if there is one, otherwise on the CPU.",
    )
    parser.add_argument(
        "groups", nargs="*", choices=GROUP_NAMES, metavar="GROUP", help=f"of {', '.join(GROUP_NAMES)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, nothing that compiles slowly")
    parser.add_argument("--out", type=a_path, metavar="DIR", help="also write JSON, Markdown and pictures to DIR")
    parser.add_argument(
        "--minutes", type=above_zero, metavar="M", help="start no further case after so long (default: no limit)"
    )
    parser.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the processor time of the calling thread, for a CPU that others use too; needs --threads 1",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run(
    groups: Sequence[str],
    quick: bool,
    minutes: float | None = None,
    out: Path | None = None,
    processor_time: bool = False,
) -> tuple[dict[str, Any], list[Result]]:
    """Measure the cases of `groups`. Writes the results so far to `out` after each case, in case of an interruption.

    Returns:
        A description of the environment, and all results. Cases that `minutes` left no time for have none.
    """
    import torch

    from halfstep.bench import run_report
    from halfstep.bench.cases.catalogue import cases
    from halfstep.bench.cases.sizes import sizes_for
    from halfstep.bench.harness import measure
    from halfstep.bench.timing import CpuClock, clock_for, copy_gb_per_s

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    clock, start = CpuClock(time.thread_time) if processor_time else clock_for(device), time.monotonic()
    every = cases(list(dict.fromkeys(groups)) or GROUP_NAMES, sizes_for(device, quick))
    about = {**run_report.environment(device), "quick": quick, "left_out": 0}
    if processor_time:
        about["processor_time"] = True
    about["copy_gb_per_s"] = copy_gb_per_s(clock, COPY_BYTES[device.type])
    results: list[Result] = []
    found: dict[int, list[Result]] = {}
    with Progress(len(every)) as progress:
        for number, index in enumerate(range(len(every)) if minutes is None else largest_first(every)):
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                about["left_out"] = len(every) - number
                break
            found[index] = measure(
                every[index],
                device,
                seconds=SECONDS[quick],
                clock=clock,
                progress=lambda doing: progress.show(text=doing),
            )
            results = [result for _, measured in sorted(found.items()) for result in measured]
            progress.show(number + 1)
            if out is not None:
                run_report.write_json(out / "results.json", about, results)
    return about, results


def largest_first(cases: Sequence[Any]) -> list[int]:
    """An order for a limited time: the largest case of each operation and dtype, then the second largest of each ..."""
    lines: dict[tuple[str, str], list[int]] = {}
    for index, case in enumerate(cases):
        lines.setdefault((case.operation, case.dtype), []).insert(0, index)
    turns = zip_longest(*lines.values())
    return [index for turn in turns for index in turn if index is not None]


def _run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        make_folder(arguments.out)
    # Before torch is imported. Otherwise its allocator warns about memory that was allocated before the memory profile.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch

    from halfstep.bench import run_report
    from halfstep.bench.harness import FAILED, WRONG, ours

    if arguments.processor_time and (arguments.threads != 1 or torch.cuda.is_available()):
        raise UsageError("--processor-time measures one thread on a CPU; add --threads 1, or leave it out")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    about, results = run(arguments.groups, arguments.quick, arguments.minutes, arguments.out, arguments.processor_time)
    if arguments.json:
        print(run_report.as_json(about, results))
    else:
        show(*run_report.tables(about, results))
    notes = []
    if about["left_out"]:
        notes.append(f"--minutes {arguments.minutes:g} were over: {about['left_out']} cases left out")
    if arguments.out is not None:
        run_report.write_json(arguments.out / "results.json", about, results)
        (arguments.out / "table.md").write_text(run_report.markdown(about, results))
        try:
            run_report.draw(arguments.out, about, results)
        except ImportError as error:
            notes.append(str(error))
    bad = [result for result in results if ours(result.provider) and result.status in (WRONG, FAILED)]
    wrong = [f"{one.operation}, {one.dtype}: {one.provider} {one.status}: {one.reason}" for one in bad]
    if notes or wrong:
        show(*(text(note, "note") for note in notes), *(text(line, "bad") for line in wrong), stream=sys.stderr)
    return 1 if bad else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench run`` with the arguments `argv`. Returns the exit status."""
    return command_line.run(_parser(), argv, _run)
