"""How much of a GPU's issue slots and shared memory kernels use: the formula and the limits."""

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
from software_gpu import roofline

EXACT = "an exponential of eleven operations for 4 bytes; precision='fast' exceeds no limit"
ZERO = "the slow path of the root and the quotient of a zero"
# Cases beyond a limit, and the most that they may be beyond it: issue over memory on H100 and B200, shared memory over
# memory on B200; and why. The first pattern that fits counts.
EXCEPTIONS: dict[str, tuple[float, float, float, str]] = {
    "statistics fp32": (3.58, 6.67, 0.90, "a histogram takes 100 instructions per element"),
    "statistics bf16 with errors*": (13.8, 26.1, 3.46, "two histograms and a division"),
    "statistics bf16*": (7.20, 13.5, 1.79, "a histogram takes 100 instructions per element"),
    "AdamW bf16 split, bf16 moments, zero gradients and moments": (0.62, 1.07, 0.20, ZERO),
    "AdamW bf16 no master, 8-bit moments, stochastic": (0.71, 1.01, 0.20, "three random roundings for 10 bytes in all"),
    "cast bf16 to mxfp8, stochastic": (0.68, 1.19, 0.20, "a random word and a scale for 3 bytes"),
    "cast bf16 to mxfp4, stochastic": (0.82, 1.44, 0.20, "the same for 2.5 bytes"),
    "cast bf16 to mxfp4*": (0.66, 0.85, 0.20, "sm_90 has no instruction that rounds to 4 bits"),
    "cast bf16 to nvfp4": (
        0.85,
        1.03,
        0.20,
        "three divisions per scale, in both threads that have elements of a block",
    ),
    "log_probabilities bf16, * entropy": (0.69, 1.14, 0.20, "two sums for 2 bytes"),
    "log_probabilities bf16, * exact": (0.98, 1.24, 0.20, "an exponential of eleven operations for 2 bytes"),
    "softmax bf16, 64 columns": (0.72, 1.01, 0.20, EXACT),
    "softmax bf16, 333 columns": (0.72, 0.99, 0.20, EXACT),
    "softmax bf16, 1,024 columns, causal": (0.83, 1.07, 0.20, EXACT),
    "log_softmax bf16, 4,096 columns": (0.60, 0.97, 0.20, EXACT),
    "softmax bf16, 50,257 columns": (0.77, 0.96, 0.20, EXACT),
    "softmax bf16, 16 rows of 262,144": (0.64, 0.95, 0.20, EXACT),
    "Muon bf16 split, 8-bit momentum, stochastic, rows of 1,040": (
        0.63,
        1.00,
        0.20,
        "6 bytes in all, and short blocks",
    ),
}


def counts(**changes: Any) -> dict[str, Any]:
    """A record of 2^20 elements in 512 blocks of 256 threads, of 32 bytes each, read once."""
    plain = {"elements": 1 << 20, "blocks": 512, "threads": 256, "registers": 32, "shared_bytes": 0, "trips": 1.0}
    work = {"issued": 100.0, "sectors": 1.0, "loaded": 0.5, "fresh": 1.0, "wavefronts": 0.4, "spilled": 0}
    return {"triton": "3.7.1", "targets": {"sm_90": {"a case": {"a_kernel": {**plain, **work, **changes}}}}}


def test_issue_and_shared_memory_times_are_relative_to_memory_time() -> None:
    """A kernel that moves 32 B per element, at 0.9 * 3.35 TB/s: 10.61 ps. An H100 issues 29.65 instructions per ps."""
    ratios = {row.gpu: row for row in roofline.ratios(counts())}
    assert set(ratios) == {"H100", "H200"}
    row = ratios["H100"]
    assert row.bytes == 32
    assert row.issue == pytest.approx(100 / (132 * 128 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)
    assert row.shared == pytest.approx(0.4 / (132 * 1.755) * 0.9 * 3350 / 32, rel=1e-12)


def test_repeated_sectors_count_unless_cached() -> None:
    """512 running blocks of 2,048 elements each, 32 bytes an element: 34 MB, which an H100's cache of 50 MB holds."""
    (kept, _), (missed, _) = (
        list(roofline.ratios(counts(sectors=3.0, elements=elements))) for elements in (1 << 20, 1 << 22)
    )
    assert kept.issue == next(roofline.ratios(counts())).issue
    share = 1 - 0.81 * 50e6 / (32 * 2**22)
    assert missed.issue == pytest.approx(kept.issue / (1 + 2 * share))


def test_counts_of_machine_code_take_precedence() -> None:
    counted, weighted = (next(roofline.ratios(counts(**changes))) for changes in ({"machine": 80.0}, {}))
    assert counted.issue == pytest.approx(0.8 * weighted.issue)


def test_the_recorded_kernels_are_within_the_limits() -> None:
    """Issue at most 60 % of the time of memory on an H100 and 85 % on a B200, shared memory at most 20 %; what is
    beyond is named above, and may not get worse."""
    beyond, used = [], set()
    for row in roofline.ratios(json.loads(roofline.COUNTS_FILE.read_text())):
        pattern = next((pattern for pattern in EXCEPTIONS if fnmatchcase(row.case, pattern)), None)
        used.add(pattern)
        h100, b200, shared = EXCEPTIONS[pattern][:3] if pattern else (0.60, 0.85, 0.20)
        most = {"H100": h100, "B200": b200}.get(row.gpu)
        if most is not None and (row.issue > most or row.shared > shared):
            beyond.append(f"{row.case} on {row.gpu}: issue {row.issue:.2f}, shared {row.shared:.2f}")
    assert not beyond
    assert set(EXCEPTIONS) <= used, "an exception that nothing needs"
