"""``halfstep bench run``: times of every kernel and of the entire AMP step, compared with other libraries.

``harness.py`` describes how it measures, ``cases/`` what. Exit status: 0, even if a peer failed; 1 if a halfstep
provider was wrong or raised; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from halfstep.bench.cases import GROUPS, cases, sizes_for
from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, make_folder, whole
from halfstep.cli.terminal import Progress, show, text

COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
SECONDS = {True: 0.25, False: 1.0}  # time per case, with and without --quick


def _parser() -> Parser:
    parser = Parser(
        "bench run",
        description="Measure every kernel and the AMP step, and the same operations in torch (eager, fused, foreach "
        "and compiled) and in the installed peers, on a GPU if there is one, otherwise on the CPU.",
    )
    option = parser.add_argument
    option("groups", nargs="*", choices=GROUPS, metavar="GROUP", help=f"{', '.join(GROUPS)} (default: all)")
    option("--only", metavar="TEXT", help="only cases whose name contains TEXT, such as '8-bit' or '1,000 tensors'")
    option(
        "--module", action="append", metavar="MODULE",
        help="also measure the cases() of this module, and only the groups named; may be repeated",
    )  # fmt: skip
    option("--quick", action="store_true", help="fewer and smaller cases, none that compiles slowly")
    option("--out", type=a_path, metavar="DIR", help="also write DIR/results.json")
    option("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's)")
    option(
        "--processor-time", action="store_true",
        help="measure the processor time of the calling thread, for a busy CPU; needs --threads 1",
    )  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.out is not None:
        make_folder(options.out)
    import torch

    from halfstep.bench import run_report
    from halfstep.bench.harness import FAILED, WRONG, Result, measure, ours
    from halfstep.bench.timing import CpuClock, clock_for, copy_gb_per_s

    if options.processor_time and (options.threads != 1 or torch.cuda.is_available()):
        raise UsageError("--processor-time measures one thread on a CPU; add --threads 1, or leave it out")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    groups = list(dict.fromkeys(options.groups)) or (() if options.module else GROUPS)
    listed = cases(groups, sizes_for(device.type, options.quick), options.module or ())
    chosen = [case for case in listed if not options.only or options.only in case.name]
    if not chosen:
        titles = dict.fromkeys(f"{case.operation}, {case.dtype}" for case in listed)
        raise UsageError(
            f"--only {options.only!r} is in the name of none of {len(listed)} cases, such as {listed[0].name!r}; use a "
            f"part of a name, which begins with {'; '.join(titles)}"
        )
    clock = CpuClock(time.thread_time) if options.processor_time else clock_for(device)
    about = {**run_report.environment(device), "quick": options.quick}
    if options.processor_time:
        about["processor_time"] = True
    about["copy_gb_per_s"] = copy_gb_per_s(clock, COPY_BYTES[device.type])
    results: list[Result] = []
    with Progress(len(chosen)) as progress:
        for index, case in enumerate(chosen, 1):
            results += measure(
                case,
                device,
                seconds=SECONDS[options.quick],
                clock=clock,
                progress=lambda doing: progress.show(text=doing),
            )
            progress.show(index)
            if options.out is not None:  # after each case, in case the command is interrupted
                run_report.write_json(options.out / "results.json", about, results)
    command_line.answer(options, lambda: run_report.as_dict(about, results), lambda: run_report.tables(about, results))
    bad = [result for result in results if ours(result.provider) and result.status in (WRONG, FAILED)]
    if bad:
        lines = [f"{r.operation}, {r.dtype}: {r.provider} {r.status}: {r.reason}" for r in bad]
        show(*(text(line, "bad") for line in lines), stream=sys.stderr)
    return 1 if bad else 0


def main(argv: Sequence[str]) -> int:
    return command_line.run(_parser(), argv, _run)
