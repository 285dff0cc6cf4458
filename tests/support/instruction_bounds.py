"""What cases beyond the limits need of machine instructions per element, by the operations that their results take.

Each operation is counted in the fewest instructions that sm_100 has for it, 16-bit values two to a register, separate
fp32 operations on two elements at a time. Addresses, masks, loops, waits and what a thread does once are not counted.
It is a bound for the method of the kernel: another method could need fewer. A test compares each group with the
instructions of the same classes that the compiled kernel issues, of which there must be as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TARGET, GPU = "sm_100", "B200"  # the machine code whose instructions are counted, and the GPU of the limit
# Classes of software_gpu/sass.py. Integer operations are one group, since the compiler chooses among them.
GROUPS = {
    "fp32": ("float", "special"),
    "integer": ("shift", "permute", "logic", "integer", "product", "convert"),
    "minimum": ("minmax",),
    "choice": ("choice",),
    "branch": ("control",),
    "memory": ("global",),
}


class Part(NamedTuple):
    """Machine instructions per element of one operation, by group."""

    what: str
    counts: Mapping[str, float]


ROOT = Part(
    "root: reciprocal root 1, products 2, corrections 2; its range: difference, comparison, branch 3",
    {"fp32": 5, "integer": 1, "choice": 1, "branch": 3},
)
QUOTIENT = Part(
    "quotient: reciprocal 1, corrections 5; its range: check, branch 3", {"fp32": 6, "choice": 1, "branch": 3}
)
UPDATE = Part(
    "14 separate fp32 operations, two elements at a time; two caps; a choice for each moving average, one for infinite "
    "weights and its comparison",
    {"fp32": 7, "minimum": 2, "choice": 4},
)
NEAREST = Part("two roundings to nearest, two elements at a time", {"integer": 1})
UNPACK = Part("four 16-bit values to fp32", {"integer": 4})
WINDOW = Part(
    "a place from three thresholds: widening, sign, start of the window, 3 shifts, 2 sums; clamp, search for elements "
    "outside",
    {"integer": 8, "minimum": 2},
)
JOIN = Part("join: remainder to its place, sum, NaN with a choice", {"integer": 2, "choice": 2})
SPLIT = Part("split: NaN, sum, difference, two to a register twice", {"minimum": 1, "integer": 3})
COUNTERS = Part("one bit into two words of 32 places: its shift 2, two additions of three bits 4", {"integer": 6})

NEEDED: dict[str, tuple[Part, ...]] = {
    "AdamW bf16 split, bf16 moments, zero gradients and moments": (
        *(UNPACK, UPDATE, ROOT, QUOTIENT, NEAREST, JOIN, SPLIT),
        Part("5 loads and 4 stores of 16 bytes, for eight elements", {"memory": 9 / 8}),
        Part("the subroutines of a root and of a quotient of zero", {"subroutines": 41}),
    ),
    "statistics bf16": (WINDOW, COUNTERS, Part("a load of 16 bytes, for eight elements", {"memory": 1 / 8})),
    "statistics fp32": (
        *(WINDOW._replace(what=WINDOW.what.replace("widening, ", ""), counts={"integer": 7, "minimum": 2}), COUNTERS),
        Part("a load of 16 bytes, for four elements", {"memory": 1 / 4}),
    ),
    "statistics bf16 with errors": (
        *(WINDOW, COUNTERS, QUOTIENT),
        Part("one more word for the error: place and counters", {"integer": 6}),
        Part("a load of 16 bytes, for eight elements", {"memory": 1 / 8}),
    ),
}  # fmt: skip


def needed(case: str) -> dict[str, float]:
    """The instructions that a case needs per element, by group; "subroutines" are not in the machine code's classes."""
    sums: dict[str, float] = {}
    for part in NEEDED[case]:
        for group, count in part.counts.items():
            sums[group] = sums.get(group, 0.0) + count
    return sums


def issued(row: Mapping[str, Any]) -> dict[str, float]:
    """The instructions that a kernel issues per element, by group; "other" are those of no group."""
    classes = dict(row["machine_classes"])
    sums = {group: sum(classes.pop(name, 0.0) for name in names) for group, names in GROUPS.items()}
    inside = sum(sums.values()) + sum(classes.values())
    return {**sums, "other": sum(classes.values()), "subroutines": max(0.0, row["machine"] - inside)}


def markdown(record: Mapping[str, Any]) -> str:
    """A table of what each case needs, issues and may issue within the limits."""
    from halfstep.bench import predict

    lines = [
        f"Machine instructions per element on {TARGET}: those that the operations need, for the method of the kernel;",
        "those that it issues; and those that the limit of B200 allows. **Bold**: what is needed exceeds that, so the",
        "method cannot be within the limit. `tests/support/instruction_bounds.py` names the operations.",
        "",
        f"| case | needed: {', '.join(GROUPS)}, subroutines | in all | issued | in all | allowed |",
        f"|{'---|' * 6}",
    ]
    found = {
        (one.case, one.kernel): one.issue
        for one in predict.limits({"targets": {TARGET: {case: record["targets"][TARGET][case] for case in NEEDED}}})
        if one.gpu == GPU
    }
    for (case, kernel), share in found.items():
        row = record["targets"][TARGET][case][kernel]
        need, issues = needed(case), issued(row)
        allowed, whole = predict.ISSUE_LIMIT[GPU] / share * row["machine"], sum(need.values())
        cells = [", ".join(f"{of.get(name, 0.0):.1f}" for name in [*GROUPS, "subroutines"]) for of in (need, issues)]
        shown = f"**{whole:.1f}**" if whole > allowed else f"{whole:.1f}"
        lines.append(
            f"| {case} | {cells[0]} | {shown} | {cells[1]}, other {issues['other']:.1f} | {row['machine']:.1f} "
            f"| {allowed:.1f} |"
        )
    return "\n".join(lines)
