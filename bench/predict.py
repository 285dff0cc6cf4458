"""``halfstep bench predict``: what limits each kernel on a GPU, from what it was counted to do in software.

A kernel takes at least as long as the slowest of three: global memory, the issue of its instructions, and shared
memory. Per element,

    memory = 32 * sectors / (part that a copy reaches * bandwidth)
    issue = thread instructions / (multiprocessors * 4 schedulers * 32 lanes * clock)
    shared = wavefronts / (multiprocessors * clock)

The counts are of PTX, executed (docs/software_gpu.md); ptxas makes more or fewer machine instructions of it, so a ratio
is an estimate, and no time is printed. Bandwidths are those of `audit`. Multiprocessors and clocks: NVIDIA's
whitepapers on A100 and H100; for B200 what is commonly reported, which is not checked. The part of the bandwidth that a
copy reaches: from the measurements that Liger-Kernel publishes (benchmark/data); none of it was measured here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.bench.audit.rows import BANDWIDTH
from halfstep.cli.command_line import Parser, UsageError, input_file, run
from halfstep.cli.terminal import ruled, terminal

COUNTS_FILE = Path("tests/kernels/instruction_counts.json")
SECTOR = 32  # bytes


class GPU(NamedTuple):
    """What the prediction needs of a GPU: clock in Hz, and the part of the bandwidth that a copy reaches."""

    target: str
    multiprocessors: int
    clock: float
    copied: float


GPUS = {
    "A100": GPU("sm_80", 108, 1.41e9, 0.83),
    "H100": GPU("sm_90", 132, 1.755e9, 0.90),
    "B200": GPU("sm_100", 148, 1.85e9, 0.80),
}
# Most of the time of memory that the issue of instructions may take; where the two overlap badly, more shows.
ISSUE_LIMIT = {"A100": 0.60, "H100": 0.60, "B200": 0.85}
SHARED_LIMIT = 0.20


@dataclass(frozen=True)
class Prediction:
    """One kernel on one GPU.

    Attributes:
        bytes: of global memory per element, in whole sectors.
        issue: time to issue its instructions over the time of memory.
        shared: time of shared memory over the time of memory.
        within: whether neither is above its limit.
    """

    case: str
    kernel: str
    gpu: str
    bytes: float
    issue: float
    shared: float
    within: bool


def predict(counts: dict[str, Any]) -> Iterator[Prediction]:
    """From counts as `make bounds` records them. Kernels that move less than a byte per element are left out."""
    for name, gpu in GPUS.items():
        for case, kernels in counts["targets"].get(gpu.target, {}).items():
            for kernel, counted in kernels.items():
                moved = SECTOR * counted["sectors"]
                if moved < 1:
                    continue
                memory = moved / (gpu.copied * BANDWIDTH[gpu.target][name])
                issue = counted["instructions"] / (gpu.multiprocessors * 128 * gpu.clock) / memory
                shared = counted["wavefronts"] / (gpu.multiprocessors * gpu.clock) / memory
                within = issue <= ISSUE_LIMIT[name] and shared <= SHARED_LIMIT
                yield Prediction(case, kernel, name, moved, issue, shared, within)


def _parser() -> Parser:
    parser = Parser("bench predict", "Predict what limits each kernel on a GPU, from recorded counts, without one.")
    parser.add_argument(
        "--counts",
        type=input_file,
        default=COUNTS_FILE,
        metavar="FILE",
        help=f"counts that make bounds recorded (default: {COUNTS_FILE})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _cell(found: Prediction | None) -> str:
    """Issue and shared memory in percent, with a star if one is above its limit."""
    if found is None:
        return ""
    return f"{100 * found.issue:.0f} + {100 * found.shared:.0f}{' ' if found.within else '*'}"


def _run(options: argparse.Namespace) -> int:
    try:
        counts = json.loads(options.counts.read_text(encoding="utf-8"))
        predictions = list(predict(counts))
    except OSError as error:
        raise UsageError(
            f"--counts {options.counts} cannot be read: {error.strerror}; it comes with a checkout of halfstep: run "
            "this in its root, or name the file"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"expected --counts to be a file of make bounds, but got {options.counts}, which holds no counts"
        ) from error
    if options.json:
        print(json.dumps({"triton": counts["triton"], "predictions": [asdict(one) for one in predictions]}, indent=2))
        return 0
    limits = f"{ISSUE_LIMIT['H100']:.0%} ({ISSUE_LIMIT['B200']:.0%} on B200)"
    rows: dict[tuple[str, str], dict[str, Prediction]] = {}
    for one in predictions:
        rows.setdefault((one.case, one.kernel), {})[one.gpu] = one
    cells = [
        (
            *case,
            f"{next(iter(row.values())).bytes:.1f}",
            *(_cell(row.get(name)) for name in GPUS),
        )
        for case, row in rows.items()
    ]
    screen = terminal()
    title = f"Predicted from the PTX of Triton {counts['triton']}: issue + shared memory, % of the time of memory"
    body = ruled(("case", "kernel", "bytes", *GPUS), cells, (False, False, *[True] * (1 + len(GPUS))), screen)
    note = f"* issue above {limits} or shared memory above {SHARED_LIMIT:.0%}"
    screen.show([*screen.title(title), *body, "", *screen.wrap(note)], sys.stdout)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench predict`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
