"""What cases beyond the limits need of machine instructions per element, by the operations that their results take.

Each operation is counted in the fewest instructions that sm_100 has for it, 16-bit values two to a register, separate
fp32 operations on two elements at a time. Masks, loops, waits and what a thread does once are not counted, and
addresses only where a part names them.
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
    "exchange": ("exchange",),
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
    "a place from three thresholds: widening, sign, 3 shifts, 2 sums; start of the window and clamp in one, search for "
    "elements outside",
    {"integer": 7, "minimum": 2},
)
JOIN = Part("join: remainder to its place, sum, NaN with a choice", {"integer": 2, "choice": 2})
SPLIT = Part("split: NaN, sum, difference, two to a register twice", {"minimum": 1, "integer": 3})
COUNTERS = Part("one bit into two words of 32 places: its shift 2, two additions of three bits 4", {"integer": 6})

# Moments in 8 bits, whose kernel checks and branches once per thread, which holds eight elements.
CODED_UPDATE = Part(
    "14 separate fp32 operations, two elements at a time; a cap; a branch for eight elements",
    {"fp32": 7, "minimum": 1, "branch": 1 / 8},
)
CODED_ROOT = Part(
    "root: reciprocal root 1, 2 products and 2 corrections two elements at a time; quotient: reciprocal 1, 5 others "
    "two elements at a time",
    {"fp32": 1 + 2 + 1 + 2.5},
)
CODED_CHECK = Part(
    "ranges, for eight elements: 4 minima of three numbers for each of 2 bounds, 3 comparisons, a branch",
    {"minimum": 8 / 8, "choice": 3 / 8, "branch": 1 / 8},
)
CODED_DECODE = Part(
    "gradient to fp32 1; signed codes, for two: spread, move, sign 3, to fp32 2, products with their powers 1; "
    "positive codes: byte 1, product and sum 1",
    {"integer": 1 + 2.5 + 2, "fp32": 0.5},
)
CODED_ENCODE = Part(
    "extremes of three numbers three times; signed codes: 2 products two at a time, move and round 1, sign 1; positive "
    "codes: difference with a maximum 1, product and sum 1; pack 3 for four twice",
    {"fp32": 1, "integer": 1 + 1 + 1 + 2 * 3 / 4, "minimum": 1.5 + 1},
)
CODED_DRAWS = Part(
    "random bits, for eight elements: the number of their call 2, 13 products, 14 exclusive ors of three, 8 for the "
    "second and third draw",
    {"integer": 37 / 8},
)
CODED_WORDS = Part("random words of two moments to their places", {"integer": 2})
CODED_MEMORY = Part(
    "3 loads and 2 stores of 16 bytes (8 for bytes), 2 and 2 of codes, 2 and 2 of scales, for eight elements",
    {"memory": 13 / 8},
)
CODED_SCALES = Part(
    "what each of the four threads of a block does for its eight elements. Scales to a power, a base and a step: 4, "
    "comparison, choice. Extremes between threads: two to a register 3, 4 shuffles, 4 maxima. Scale of first moments: "
    "rounding, mask, shift 3, minimum, product, 2 comparisons, 2 choices; of second ones: 10, 3 maxima, 2 comparisons, "
    "3 choices",
    {"integer": 20 / 8, "choice": 11 / 8, "exchange": 4 / 8, "minimum": 8 / 8, "fp32": 1 / 8},
)
CODED_ADDRESSES = Part(
    "addresses of two tiles: gradients and weights 1 each, codes 2 each, which have no product; scales 3",
    {"integer": 9 / 16},
)
CODED = (
    *(CODED_UPDATE, CODED_ROOT, CODED_CHECK, CODED_DECODE, CODED_ENCODE, CODED_SCALES, CODED_ADDRESSES),
    CODED_MEMORY,
)
CODED_SPLIT = Part("join: remainder, sum; split: sum 1, two to a register twice", {"integer": 2 + 2})

NEEDED: dict[str, tuple[Part, ...]] = {
    "AdamW bf16 split, bf16 moments, zero gradients and moments": (
        *(UNPACK, UPDATE, ROOT, QUOTIENT, NEAREST, JOIN, SPLIT),
        Part("5 loads and 4 stores of 16 bytes, for eight elements", {"memory": 9 / 8}),
        Part("the subroutines of a root and of a quotient of zero", {"subroutines": 41}),
    ),
    "AdamW bf16 split, 8-bit moments": (*CODED, CODED_SPLIT),
    "AdamW bf16 split, 8-bit moments, stochastic": (*CODED, CODED_SPLIT, CODED_DRAWS, CODED_WORDS),
    "AdamW bf16 split24, 8-bit moments, stochastic": (
        *(*CODED, CODED_DRAWS, CODED_WORDS),
        Part("join: byte with its sign 1, weight to its place 0.5, sum 1", {"integer": 2.5}),
        Part("split: word 1, sum 1, two to a register, four to a register and back", {"integer": 2 + 0.5 + 4 / 4}),
    ),
    "AdamW bf16 no master, 8-bit moments, stochastic": (
        *(*CODED[:-1], CODED_DRAWS, CODED_WORDS),
        Part("weight to fp32 1; its rounding: word 1, sum 1, two to a register", {"integer": 3 + 0.5}),
        Part("2 loads and a store of 16 bytes, the others as above, for eight elements", {"memory": 11 / 8}),
    ),
    "statistics bf16": (WINDOW, COUNTERS, Part("a load of 16 bytes, for eight elements", {"memory": 1 / 8})),
    "statistics fp32": (
        *(WINDOW._replace(what=WINDOW.what.replace("widening, ", ""), counts={"integer": 6, "minimum": 2}), COUNTERS),
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
    from halfstep.bench.audit import roofline

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
        for one in roofline.ratios({"targets": {TARGET: {case: record["targets"][TARGET][case] for case in NEEDED}}})
        if one.gpu == GPU
    }
    for (case, kernel), share in found.items():
        row = record["targets"][TARGET][case][kernel]
        need, issues = needed(case), issued(row)
        allowed, whole = roofline.ISSUE_LIMIT[GPU] / share * row["machine"], sum(need.values())
        cells = [", ".join(f"{of.get(name, 0.0):.1f}" for name in [*GROUPS, "subroutines"]) for of in (need, issues)]
        shown = f"**{whole:.1f}**" if whole > allowed else f"{whole:.1f}"
        lines.append(
            f"| {case} | {cells[0]} | {shown} | {cells[1]}, other {issues['other']:.1f} | {row['machine']:.1f} "
            f"| {allowed:.1f} |"
        )
    return "\n".join(lines)
