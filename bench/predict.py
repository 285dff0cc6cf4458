"""``halfstep bench predict``: predictions of the time and the limits of kernels on GPUs, from recorded counts.

`predictor` describes the model, its constants and its limits. `make bounds` records the counts of halfstep's kernels,
and of those of installed peers, while a software GPU executes them (docs/software_gpu.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.bench import predictor
from halfstep.bench.predictor import ERROR, GPUS, SECTOR
from halfstep.cli.command_line import Parser, UsageError, input_file, run
from halfstep.cli.numbers import whole
from halfstep.cli.roofline_picture import Panel, Point
from halfstep.cli.terminal import Terminal, ruled, terminal

COUNTS_FILE = Path("tests/kernels/instruction_counts.json")
ELEMENTS = 1 << 26  # of a call
SHOWN = ("A100", "H100", "H200", "B200", "MI300X")
# The largest allowed ratio of the time to issue instructions to the time of memory. The two overlap imperfectly.
ISSUE_LIMIT = {"A100": 0.60, "H100": 0.60, "H200": 0.85, "B200": 0.85, "MI300X": 0.85}
SHARED_LIMIT = 0.20
# The case of halfstep that does the same job as a peer's case.
BESIDE = {
    "optimi AdamW bf16, Kahan": "AdamW bf16 split, bf16 moments",
    "flashoptim AdamW bf16, bf16 moments": "AdamW bf16 split, bf16 moments",
    "flashoptim AdamW bf16, 8-bit moments": "AdamW bf16 split, bf16 moments",
}


@dataclass(frozen=True)
class Limits:
    """The limits of one kernel on one GPU.

    Attributes:
        bytes: bytes of global memory per element, in whole sectors.
        issue: time to issue the instructions, as the machine code has them, over the time of memory.
        shared: time of shared memory over the time of memory.
        in_flight: bytes in flight over the product of bandwidth and latency.
        resident: blocks on a multiprocessor at a time.
        waves: waves of blocks of a call, as a fraction.
        tail: the most time that the last, incomplete wave of a call adds, over the time without it.
        within: whether `issue` and `shared` are within their limits.
    """

    case: str
    kernel: str
    gpu: str
    bytes: float
    issue: float
    shared: float
    in_flight: float
    resident: int
    waves: float
    tail: float
    within: bool


@dataclass(frozen=True)
class Time:
    """The predicted time of one call on one GPU.

    Attributes:
        peer: the library; None for halfstep.
        predicted_us: the predicted time in microseconds.
        error_us: the error of the prediction: 90 % of the calls held back from the fit were within this relative error.
    """

    case: str
    peer: str | None
    gpu: str
    elements: int
    predicted_us: float
    error_us: float


def read(path: Path) -> dict[str, Any]:
    """The counts that `make bounds` recorded in a file.

    Raises:
        UsageError: the file cannot be read, or contains no counts.
    """
    try:
        counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        list(limits(counts)), list(times(counts, 1)), counts["triton"]
    except OSError as error:
        raise UsageError(
            f"--counts {path} cannot be read: {error.strerror}; it comes with a checkout of halfstep: run this in its "
            "root, or name the file"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(
            f"expected --counts to be a file of make bounds, but got {path}, which holds no counts"
        ) from error
    return counts


def limits(counts: dict[str, Any], elements: int = ELEMENTS) -> Iterator[Limits]:
    """The limits of all kernels in recorded counts, except those that move less than a byte per element.

    Args:
        counts: as `read` returns them.
        elements: of a call, for its waves.
    """
    for name in SHOWN:
        gpu = GPUS[name]
        for case, kernels in counts["targets"].get(gpu.target, {}).items():
            for kernel, counted in kernels.items():
                moved = SECTOR * counted["sectors"]
                if moved < 1:
                    continue
                # By the machine code. Times are predicted with the weights of PTX to which the model was fitted.
                exact = {**counted, "issued": counted.get("machine", counted["issued"])}
                launch = predictor.scaled(exact, counted["elements"])
                call = predictor.scaled(exact, elements)
                parts = predictor.parts(gpu, launch)
                issue, shared = parts["issue"] / parts["memory"], parts["shared"] / parts["memory"]
                yield Limits(
                    case=case,
                    kernel=kernel,
                    gpu=name,
                    bytes=moved,
                    issue=issue,
                    shared=shared,
                    in_flight=predictor.in_flight(gpu, launch),
                    resident=predictor.resident(gpu, launch),
                    waves=predictor.waves(gpu, call),
                    tail=predictor.tail(gpu, call),
                    within=issue <= ISSUE_LIMIT[name] and shared <= SHARED_LIMIT,
                )


def times(counts: dict[str, Any], elements: int) -> Iterator[Time]:
    """The times of halfstep's cases, each followed by those of its peers, on the GPUs whose constants were fitted."""
    for name in SHOWN:
        gpu = GPUS[name]
        if gpu.reached is None:
            continue
        own, peers = counts["targets"].get(gpu.target, {}), counts.get("peers", {}).get(gpu.target, {})
        theirs: dict[str, list[str]] = {case: [] for case in own}
        for case in peers:  # those without a case of halfstep come last
            theirs.setdefault(BESIDE.get(case, case.removeprefix("liger ")), []).append(case)
        for case, beside in theirs.items():
            rows = [(case, None, own[case])] if case in own else []
            rows += [(peer, peers[peer]["peer"], peers[peer]["kernels"]) for peer in beside]
            for called, peer, of in rows:
                launches = [predictor.scaled(counted, elements) for counted in of.values()]
                predicted = 1e6 * predictor.seconds(gpu, launches)
                yield Time(called, peer, name, elements, predicted, ERROR.ninth * predicted)


def panels(counts: dict[str, Any]) -> list[Panel]:
    """The rooflines of the GPUs, with the kernel of each case that issues the most instructions."""
    made = []
    for name in SHOWN:
        gpu = GPUS[name]
        cases = dict(counts["targets"].get(gpu.target, {}))
        cases |= {case: peer["kernels"] for case, peer in counts.get("peers", {}).get(gpu.target, {}).items()}
        memory = gpu.bandwidth * (gpu.reached or 1.0)
        points = []
        for case, kernels in cases.items():
            counted = max(kernels.values(), key=lambda kernel: float(kernel["issued"]))
            parts = predictor.parts(gpu, predictor.scaled(counted, counted["elements"]))
            moved = parts["memory"] * memory
            if SECTOR * counted["sectors"] >= 1:
                per_byte = counted["issued"] * counted["elements"] / moved
                points.append(Point(case, per_byte, moved / max(parts.values())))
        issue = gpu.multiprocessors * gpu.lanes * gpu.clock
        made.append(Panel(name, memory, issue, ISSUE_LIMIT[name], points))
    return made


def _parser() -> Parser:
    parser = Parser(
        "bench predict",
        "Predict the time of each kernel on a GPU, and what limits it, from recorded counts, without a GPU.",
    )
    parser.add_argument(
        "--counts",
        type=input_file,
        default=COUNTS_FILE,
        metavar="FILE",
        help=f"counts that make bounds recorded (default: {COUNTS_FILE})",
    )
    parser.add_argument(
        "--elements", type=whole(1), default=ELEMENTS, metavar="N", help="elements of a call (default: 2^26)"
    )
    parser.add_argument("--limits", action="store_true", help="print what limits each kernel instead of times")
    parser.add_argument("--json", action="store_true", help="print JSON, with times and limits, instead of a table")
    return parser


def _of_limits(found: list[Limits], triton: str, screen: Terminal) -> list[str]:
    """The lines of the table of limits."""
    rows: dict[tuple[str, str], dict[str, Limits]] = {}
    for one in found:
        rows.setdefault((one.case, one.kernel), {})[one.gpu] = one
    cells = []
    for (case, kernel), row in rows.items():
        of = [row.get(name) for name in SHOWN]
        ratios = [f"{100 * p.issue:.0f} + {100 * p.shared:.0f}{' ' if p.within else '*'}" if p else "" for p in of]
        cells.append((case, kernel, f"{next(iter(row.values())).bytes:.1f}", *ratios))
    title = f"Predicted from the kernels of Triton {triton}: issue + shared memory, % of the time of memory"
    note = (
        f"* issue above {ISSUE_LIMIT['H100']:.0%} (A100, H100) or {ISSUE_LIMIT['B200']:.0%}, or shared memory above "
        f"{SHARED_LIMIT:.0%}. MI300X: against the bandwidth of the datasheet, and shared memory is not counted."
    )
    body = ruled(("case", "kernel", "bytes", *SHOWN), cells, (False, False, *[True] * (1 + len(SHOWN))), screen)
    return [*screen.title(title), *body, "", *screen.wrap(note)]


def _of_times(found: list[Time], triton: str, elements: int, screen: Terminal) -> list[str]:
    """The lines of the table of times."""
    rows: dict[tuple[str, str], dict[str, Time]] = {}
    for one in found:
        rows.setdefault((one.case, one.peer or "halfstep"), {})[one.gpu] = one
    names = [name for name in SHOWN if GPUS[name].reached is not None]
    cells = []
    for (case, of), row in rows.items():
        on = [row.get(name) for name in names]
        cells.append((case, of, *(f"{one.predicted_us:.0f} ± {one.error_us:.0f}" if one else "" for one in on)))
    title = f"Predicted µs of a call with {elements:,} elements, kernels of Triton {triton}, cold cache"
    note = (
        f"Predicted, none measured: of {ERROR.rows} published times of other kernels to which nothing was fitted, half "
        f"were within {ERROR.median:.0%}, nine of ten within {ERROR.ninth:.0%}, which is the ± here. H200 is taken to "
        "be an H100 with more bandwidth."
    )
    header = ("case", "kernels of", *(f"predicted, {name}" for name in names))
    body = ruled(header, cells, (False, False, *[True] * len(names)), screen)
    return [*screen.title(title), *body, "", *screen.wrap(note)]


def _run(options: argparse.Namespace) -> int:
    counts = read(options.counts)
    limiting, predicted = list(limits(counts, options.elements)), list(times(counts, options.elements))
    if options.json:
        content = {
            "triton": counts["triton"],
            "error": ERROR._asdict(),
            "predicted_times": [asdict(one) for one in predicted],
            "limits": [asdict(one) for one in limiting],
        }
        print(json.dumps(content, indent=2))
        return 0
    screen = terminal()
    if options.limits:
        lines = _of_limits(limiting, counts["triton"], screen)
    else:
        lines = _of_times(predicted, counts["triton"], options.elements, screen)
    screen.show(lines, sys.stdout)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench predict`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
