"""Every kernel variant compiles for every target without a GPU: no spills, no contraction, the minimum bytes.

Two nets. The rules below hold for every kernel, whatever was recorded; each exception is named in one table, with its
reason. The bounds in ``audit_bounds.json`` hold each variant to what it had reached; `make bounds` records them.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from halfstep.bench.audit import bounds as audit_bounds
from halfstep.bench.audit import rows as audit

SUPPORT = Path(__file__).parents[1] / "support"
BOUNDS = Path(__file__).parent / "audit_bounds.json"
# Another Triton is another compiler: what it makes is compared with no number that this one reached.
RECORDED_WITH = audit_bounds.load(BOUNDS).triton
recorded = pytest.mark.skipif(
    triton.__version__ != RECORDED_WITH, reason=f"holds numbers of triton {RECORDED_WITH}; this is {triton.__version__}"
)

# (rule, kernel, pattern of the variant's name): why the rule does not hold there.
EXCEPTIONS = {
    (
        "moves the least bytes",
        "adam.prepare_kernel",
        "*",
    ): "runs once per step over parameter groups, not over elements",
    ("moves the least bytes", "loss_scale.loss_scale_kernel", "*"): "moves seven numbers, once per step",
    ("moves the least bytes", "unscale.finish_kernel", "*"): "adds up one number per chunk, not per element",
    ("accesses 64 bits", "unscale.finish_kernel", "*"): "hands over one 32-bit flag per tensor",
    ("accesses fp32 by 128 bits", "unscale.finish_kernel", "*"): "the same",
    ("accesses 64 bits", "adam.prepare_kernel", "*"): "a few hundred bytes in all",
    ("accesses fp32 by 128 bits", "adam.prepare_kernel", "*"): "the same: a few hundred bytes in all",
    ("accesses 64 bits", "cast.cast_kernel", "e?m? to fp32*"): "4 values of 8 bits beside 4 of fp32, which fill 128",
    ("accesses 64 bits", "cast.multi_cast_kernel", "list, e?m? to fp32*"): "the same",
    ("accesses 64 bits", "adam.adam_kernel", "*fp32 state, split24 master*"): (
        "four bytes of remainder beside four fp32 moments: with eight of each, values would move between threads"
    ),
    ("accesses 64 bits", "adam.adam_kernel", "*bf16 state, split24 master, stochastic"): (
        "four bytes of remainder beside four bf16 numbers, which each thread of gfx942 takes in a stochastic step"
    ),
    ("accesses 64 bits", "sgd.sgd_kernel", "*8-bit state*"): "on gfx942, four codes beside four weights, as Adam's",
    ("accesses 64 bits", "muon.muon_momentum_kernel", "*8-bit state*"): "on gfx942, four codes beside four gradients",
    ("accesses 64 bits", "muon.muon_weight_kernel", "*split24 master*"): "on gfx942, four bytes beside four weights",
    ("accesses 64 bits", "adam.adam_kernel", "*8-bit state*"): (
        "on gfx942 and beside fp32, four codes beside four weights: with eight of each, registers would spill"
    ),
    ("keeps its values in registers", "adam.adam_kernel", "*8-bit state*"): (
        "scales are shared by the threads of a block of codes; in short or misaligned rows, by several warps"
    ),
    ("accesses 64 bits", "cast.cast_kernel", "fp32 to e?m?*"): "with 8 of each, loads use half a sector",
    ("accesses 64 bits", "cast.multi_cast_kernel", "list, fp32 to e?m?*"): "the same",
    ("accesses 64 bits", "block_cast.block_cast_kernel", "fp32 to *"): "4 codes beside 4 of fp32, which fill 128",
    ("accesses 64 bits", "block_cast.block_cast_kernel", "*fp4*"): "codes of 4 bits beside numbers that fill 128",
    ("accesses 64 bits", "block_cast.multi_block_cast_kernel", "*fp4*"): "the same",
    ("accesses 64 bits", "softmax.forward_row_kernel", "*out of step*"): (
        "rows of x and of the result begin at different distances from 16 bytes: elements are moved one by one"
    ),
    ("accesses 64 bits", "softmax.forward_row_kernel", "*first launch*"): "stores two numbers per group",
    ("moves the least bytes", "softmax.forward_row_kernel", "*first launch*"): "the same",
    ("accesses fp32 by 128 bits", "softmax.forward_row_kernel", "*first launch*"): "the same",
    ("accesses 64 bits", "softmax.backward_row_kernel", "*first launch*"): "stores a number per group",
    ("moves the least bytes", "softmax.backward_row_kernel", "*first launch*"): "the same",
    ("accesses fp32 by 128 bits", "softmax.backward_row_kernel", "*first launch*"): "the same",
    ("accesses fp32 by 128 bits", "softmax.forward_row_kernel", "*fp16->fp32 fp32 mask*"): (
        "x and the mask are loaded by one line, and the 64 bits are those of x: four fp16 elements beside four of fp32"
    ),
    ("accesses 64 bits", "statistics.count_kernel", "*"): "its time goes into histograms, not into loads",
    ("accesses fp32 by 128 bits", "statistics.count_kernel", "*"): "the same",
    ("moves the least bytes", "log_probabilities.row_kernel", "*"): "a few numbers per 1,024 logits, not per logit",
    ("accesses 64 bits", "log_probabilities.row_kernel", "*"): "the same",
    ("accesses fp32 by 128 bits", "log_probabilities.row_kernel", "*"): "the same",
    ("accesses 64 bits", "log_probabilities.chunk_kernel", "*"): "stores a few fp32 numbers per 1,024 logits",
    ("accesses fp32 by 128 bits", "log_probabilities.chunk_kernel", "*"): "the same",
    ("accesses 64 bits", "log_probabilities.gradient_kernel", "* odd"): (
        "rows begin off 16-byte boundaries, where sums have the order of columns, not of addresses"
    ),
    ("stores what it loaded", "softmax.forward_strided_kernel", "*transposed"): (
        "neighbours of x are the columns of a sum, neighbours of the result are not: one of them has to be exchanged"
    ),
}


def keeps_its_values_in_registers(row: dict[str, Any]) -> bool:
    """What Adam and casts must: a barrier or a conversion between dtypes costs more than narrower accesses."""
    update = row["kernel"].startswith(("adam.", "cast.")) and row["floor_read"] + row["floor_written"] > 0
    return not update or row["barriers"] == row["shared_bytes"] == row["layout_conversions"] == 0


def stores_what_it_loaded(row: dict[str, Any]) -> bool:
    """What sums over another dimension must: a thread stores the elements that it loaded, and exchanges only sums.

    Where sums that were exchanged by halves reach the tile, their layout has another name, which counts as a conversion
    and moves nothing. A tile that is exchanged takes more shared memory than they do.
    """
    if row["kernel"].endswith("forward_strided_kernel"):
        return bool(row["layout_conversions"] <= 2 and row["shared_bytes"] <= 2048)
    return not row["kernel"].endswith("_strided_kernel") or row["layout_conversions"] == 0


RULES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "does not spill": lambda row: row["spills"] == 0,
    # A variant that states no floor moves no elements, and must be named above.
    "moves the least bytes": lambda row: (
        row["floor_read"] + row["floor_written"] > 0
        and (row["bytes_read"], row["bytes_written"]) == (row["floor_read"], row["floor_written"])
    ),
    "accesses 64 bits": lambda row: row["access_bits"] is None or row["access_bits"] >= 64,
    "accesses fp32 by 128 bits": lambda row: row["operand_bits"].get("32", 128) >= 128,
    "keeps its values in registers": keeps_its_values_in_registers,
    "stores what it loaded": stores_what_it_loaded,
}


def run_audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: this one interprets kernels."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "halfstep", "bench", "audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**kept, "PYTHONPATH": path})


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["variants"]


# Every variant for every target takes minutes, and what a change of the tests cannot break: `make audit` runs both
# pairs, and `.ci/run` the first, in which each of the exceptions is needed.
PAIRS = ("sm_90", "gfx942"), ("sm_80", "sm_100")
assert sorted(sum(PAIRS, ())) == sorted(audit.TARGETS)


@pytest.fixture(scope="module", params=[pytest.param(of, marks=pytest.mark.exhaustive) for of in PAIRS], ids="-".join)
def targets(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def audited(targets: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return run_audit("--json", *(word for target in targets for word in ("--target", target)))


@pytest.fixture(scope="module")
def failing() -> subprocess.CompletedProcess[str]:
    return run_audit("--json", "--jobs=1", "--module=failing_kernels", "--target=sm_90", "--target=gfx942")


def test_every_variant_of_every_family_compiles_without_spills_or_contraction(
    audited: subprocess.CompletedProcess[str], targets: tuple[str, ...]
) -> None:
    rows = rows_of(audited)
    failing = {f"{row['kernel']} {row['variant']} {row['target']}": row["problems"] for row in rows if row["problems"]}
    if triton.__version__ == RECORDED_WITH:
        assert not failing
        assert audited.returncode == 0
    else:  # with another one some spill, which changes no bit
        assert not [problem for row in failing.values() for problem in row if not problem.startswith("spills ")]
    listed = {
        (f"{family.rpartition('.')[2]}.{variant.kernel.__name__}", variant.name, target)
        for family in audit.FAMILIES
        for variant in importlib.import_module(family).variants()
        for target in targets
    }
    assert {(row["kernel"], row["variant"], row["target"]) for row in rows} == listed
    assert len(rows) == len(listed), "two variants of one kernel share a name"


@recorded
def test_every_variant_obeys_the_rules_or_is_named(
    audited: subprocess.CompletedProcess[str], targets: tuple[str, ...]
) -> None:
    used, broken = set(), []
    for row in rows_of(audited):
        for rule, holds in RULES.items():
            if holds(row):
                continue
            excepted = {
                (of, kernel, pattern)
                for of, kernel, pattern in EXCEPTIONS
                if (of, kernel) == (rule, row["kernel"]) and fnmatchcase(row["variant"], pattern)
            }
            used |= excepted
            if not excepted:
                broken.append(f"{audit_bounds.key(row)}: does not hold: {rule}: {row}")
    assert not broken, "\n".join(broken)
    unused = set(EXCEPTIONS) - used if targets == PAIRS[0] else set()
    assert not unused, "an exception that nothing needs any more hides the next break"


@recorded
def test_no_variant_leaves_its_recorded_bounds(
    audited: subprocess.CompletedProcess[str], targets: tuple[str, ...]
) -> None:
    left = audit_bounds.departures(
        rows_of(audited), audit_bounds.load(BOUNDS), triton.__version__, None, targets, "make bounds"
    )
    assert not left, "\n".join(left)


def test_every_variant_and_no_other_has_recorded_bounds() -> None:
    """Without compiling: the launches of each family are captured."""
    variants = {
        f"{family.rpartition('.')[2]}.{variant.kernel.__name__} | {variant.name} | {target}"
        for family in audit.FAMILIES
        for variant in importlib.import_module(family).variants()
        for target in audit.TARGETS
    }
    assert variants == set(audit_bounds.load(BOUNDS).entries), "make bounds records them"


def test_what_promises_the_references_bits_says_so() -> None:
    """The audit looks for contractions only where `exact` is set, so leaving it out would pass unseen."""
    for family in ("adam", "block_cast", "cast", "loss_scale", "muon", "rank_sum", "sgd", "statistics", "unscale"):
        for variant in importlib.import_module(f"halfstep.bench.audit.families.{family}").variants():
            assert variant.exact, f"{family} {variant.name}"


def test_the_audit_rejects_what_it_must(failing: subprocess.CompletedProcess[str]) -> None:
    problems = {(row["variant"], row["target"]): "; ".join(row["problems"]) for row in rows_of(failing)}
    assert failing.returncode == 1
    assert "8x fma.rn.f32" in problems["contracted", "sm_90"]
    assert "fused multiply-add" in problems["contracted", "gfx942"]
    assert "8x fma.rn.f32" in problems["fused by hand", "sm_90"]
    assert "x fma" in problems["fused by hand", "gfx942"]  # one, packed or not
    assert "div.full.f32" in problems["approximate", "sm_90"]
    assert problems["approximate", "gfx942"] == ""  # AMD's plain division is correctly rounded
    for target in ("sm_90", "gfx942"):
        assert problems["mistyped", target].startswith("does not compile: CompilationError")
    assert "spills" in problems["spills", "sm_90"]
    assert problems["too many of 64 lanes", "sm_90"] == ""
    assert problems["shared", "sm_90"] == ""
    if triton.__version__ == RECORDED_WITH:  # that of 3.6 needs none
        assert problems["shared", "gfx942"] == "131072 bytes of shared memory per block; at most 65536 are allowed"
    expected = "32 warps of 64 lanes are 2048 threads; at most 1024 are allowed"
    assert problems["too many of 64 lanes", "gfx942"] == expected
