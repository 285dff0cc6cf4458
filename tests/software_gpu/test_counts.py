"""What `make bounds` recorded of the kernels is what they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton
from software_gpu.counts import TABLE, cases, class_of, counted, markdown
from software_gpu.gpu import SoftwareGPU

from halfstep.bench.audit.markdown import between

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests" / "kernels" / "instruction_counts.json").read_text())


@pytest.mark.parametrize("name", ["foreach_check bf16", "AdamW bf16 split", "softmax bf16, 333 columns"])
def test_the_record_holds(machine: SoftwareGPU, name: str) -> None:
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"recorded with Triton {RECORD['triton']}")
    assert counted(machine, name) == RECORD["targets"][machine.target][name]


def test_every_case_is_recorded() -> None:
    assert all(set(recorded) == set(cases()) for recorded in RECORD["targets"].values())


def test_the_table_in_the_documentation_is_that_of_the_record() -> None:
    text = (ROOT / "docs" / "performance_tables.md").read_text()
    start, end = between(TABLE, text)
    assert text[start:end] == markdown(RECORD, "sm_90"), "make bounds writes it"


def test_sectors_are_used() -> None:
    """A warp's request touches few more 32-byte sectors than its bytes fill. Casts to narrower formats read 8 or 16
    elements per thread in several requests, of which each finds half of its sectors in the cache."""
    for target, recorded in RECORD["targets"].items():
        for case, kernels in recorded.items():
            for kernel, row in kernels.items():
                if row["instructions"] > 1:  # what works on the whole tensor
                    most = 1.7 if kernel == "cast_kernel" else 1.3
                    assert row["sectors"] <= most * row["least"], (target, case, kernel)


def test_classes() -> None:
    assert [class_of(name) for name in ("ex2.approx.f32", "ld.shared.b32", "atom.global.gpu.add.u64", "add.s32")] == [
        "special",
        "shared",
        "global",
        "arithmetic",
    ]
