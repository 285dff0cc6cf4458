"""Fit the predictor of ``halfstep bench predict`` to published times, and measure its error on others.

    python tests/support/published_times.py all_benchmark_data.csv

The times are those of Liger-Kernel's kernels on an A100, two H100 and a B200: ``benchmark/data/all_benchmark_data.csv``
of https://github.com/linkedin/Liger-Kernel (BSD 2-Clause), which is not part of this project. The counts of the kernels
are in tests/bench/published_counts.json (`software_gpu.published`). The pairs of GPU and kernel are divided into two
halves by their alphabetical order. The fit uses only the first half.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from halfstep.bench import predictor

COUNTS = Path(__file__).parents[1] / "bench" / "published_counts.json"
GPUS = {
    "A100": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100 PCIe": "NVIDIA H100 PCIe",
    "B200": "NVIDIA B200",
}
HOST_OF_BACKWARD = 100e-6  # seconds
SHORTEST = 10e-6  # seconds; what is measured below says more of the launch than of the kernel


@dataclass(frozen=True)
class Measured:
    """A published time, in seconds, and the counts of the call."""

    counted: dict[str, Any]
    seconds: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.counted["gpu"], self.counted["kernel"].split()[0]


def of_triton(counted: dict[str, Any]) -> bool:
    """Whether the Triton kernels of a call move at least as many bytes as its torch kernels."""
    own = sum(predictor.SECTOR * launch["fresh"] for launch in counted["launches"])
    return bool(counted["launches"]) and own >= sum(moved for _, moved in counted["torch"])


def read(times: Path, counts: Path = COUNTS) -> list[Measured]:
    """The published times of the calls that were counted."""
    found = {}
    with times.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["metric_name"] == "speed":
                kernel = f"rope {row['x_name']}" if row["kernel_name"] == "rope" else row["kernel_name"]
                key = kernel, row["kernel_provider"], row["kernel_operation_mode"], row["gpu_name"], int(row["x_value"])
                found[key] = float(row["y_value_50"]) / 1e3
    result = []
    for counted in json.loads(counts.read_text()):
        if "error" not in counted and of_triton(counted):
            names = (counted[name] for name in ("kernel", "provider", "mode"))
            result.append(Measured(counted, found[(*names, GPUS[counted["gpu"]], counted["size"])]))
    return result


def halves(rows: list[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The rows for the fit and those held back: alternate kernels of each GPU in alphabetical order."""
    held = set()
    pairs = sorted({row.pair for row in rows})
    for gpu in {gpu for gpu, _ in pairs}:
        held |= {pair for at, pair in enumerate(pair for pair in pairs if pair[0] == gpu) if at % 2}
    return [row for row in rows if row.pair not in held], [row for row in rows if row.pair in held]


def predicted(counted: dict[str, Any]) -> float:
    """Predicted seconds of a call."""
    waits = any(name.startswith("_local_scalar") for name, _ in counted["torch"])
    moved = [moved for _, moved in counted["torch"]]
    return predictor.seconds(predictor.GPUS[counted["gpu"]], counted["launches"], moved, waits)


def ruled_by_the_gpu(row: Measured) -> bool:
    """Whether the GPU, and not the host, determines the time of a call, as far as it can be told without measuring.

    In all but one of the published backward calls, autograd takes 90 to 300 us on the host.
    """
    return row.counted["mode"] != "backward" or predicted(row.counted) > HOST_OF_BACKWARD


def error(rows: Iterable[Measured], which: Callable[[Measured], bool] = lambda row: True) -> predictor.Error:
    """The errors of the predictions of calls of at least 10 us."""
    off = sorted(
        abs(predicted(row.counted) / row.seconds - 1) for row in rows if row.seconds >= SHORTEST and which(row)
    )
    return predictor.Error(len(off), statistics.median(off), off[min(len(off) - 1, int(0.9 * len(off)))])


CONSTANTS = ("REACHED", "FIRST", "GAP", "CACHE_KEPT", "WAIT")
LEAST_FIRST = 2e-6  # seconds: less is no launch
# What is fitted, and the most that it can be.
FITTED = (
    # No fitted kernel is limited by the memory of a B200: what part of its bandwidth is reached cannot be seen here.
    *(("REACHED", family, 0.97) for family in ("A100", "H100")),
    *(("FIRST", family, 20e-6) for family in ("A100", "H100", "B200")),
    ("GAP", None, 20e-6),
    ("CACHE_KEPT", None, 1.0),
    ("WAIT", None, 1e-3),
)


def _gpus() -> dict[str, predictor.GPU]:
    made = {}
    for name, gpu in predictor.GPUS.items():
        family = {"H200": "H100", "H100 PCIe": "H100"}.get(name, name)
        if gpu.reached is not None:
            gpu = gpu._replace(reached=predictor.REACHED[family], first=predictor.FIRST[family])
        made[name] = gpu
    return made


def mean(rows: Iterable[Measured]) -> float:
    """The objective of the fit: the mean error of calls that the GPU determines, each counted as at most 40 %."""
    with mock.patch.object(predictor, "GPUS", _gpus()):
        off = [min(abs(math.log(predicted(row.counted) / row.seconds)), 0.4) for row in rows if ruled_by_the_gpu(row)]
    return sum(off) / len(off)


def fit(rows: list[Measured]) -> dict[str, Any]:
    """Fitted constants, found one at a time in decreasing steps from the present ones."""
    before = {name: copy.copy(getattr(predictor, name)) for name in CONSTANTS}
    try:
        best = mean(rows)
        for step in (0.3, 0.15, 0.08, 0.04, 0.02, 0.01):
            while (now := _step(rows, step, best)) < best:
                best = now
        return {name: copy.copy(getattr(predictor, name)) for name in CONSTANTS}
    finally:
        vars(predictor).update(before)


def _step(rows: list[Measured], step: float, best: float) -> float:
    """Multiply or divide each constant by 1 + `step` if that is better. Returns the mean error."""
    for name, family, most in FITTED:
        place, key = (vars(predictor), name) if family is None else (getattr(predictor, name), family)
        for factor in (1 + step, 1 / (1 + step)):
            before = place[key]
            place[key] = max(min(before * factor, most), LEAST_FIRST if name == "FIRST" else 0.0)
            now = mean(rows)
            if now < best - 1e-6:
                best = now
            else:
                place[key] = before
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description="Fit the predictor to published times, and print what it misses by.")
    parser.add_argument("times", type=Path, help="Liger-Kernel's benchmark/data/all_benchmark_data.csv")
    parser.add_argument(
        "--refit", action="store_true", help="fit first, instead of taking the constants that are there"
    )
    given = parser.parse_args()
    rows = read(given.times)
    known, held = halves(rows)
    if given.refit:
        vars(predictor).update(fit(known))
        predictor.GPUS.update(_gpus())
    for name in CONSTANTS:
        print(name, "=", getattr(predictor, name))
    for what, some in (("fitted to", known), ("held back", held)):
        print(what, "all:", error(some), "| the GPU rules:", error(some, ruled_by_the_gpu))
    print("| GPU | kernel | mode | half | calls | median error | largest |")
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for row in rows:
        half = "held back" if row in held else "fitted to"
        groups.setdefault((row.counted["gpu"], row.counted["kernel"].split()[0], row.counted["mode"], half), []).append(
            row
        )
    for names, some in sorted(groups.items()):
        off = [predicted(row.counted) / row.seconds - 1 for row in some]
        middle, most = statistics.median(map(abs, off)), max(off, key=abs)
        print(f"| {' | '.join(names)} | {len(some)} | {100 * middle:.0f} % | {100 * most:+.0f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
