"""The counts recorded by `make bounds` are those of the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import generated
import pytest
import triton
from software_gpu.counts import TABLE, cases, counted, markdown
from software_gpu.gpu import SoftwareGPU

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RECORD = json.loads((ROOT / "tests" / "kernels" / "instruction_counts.json").read_text())


@pytest.mark.parametrize("name", ["foreach_check bf16", "AdamW bf16 split", "softmax bf16, 333 columns"])
def test_counts_equal_the_record(machine: SoftwareGPU, name: str) -> None:
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"recorded with Triton {RECORD['triton']}")
    assert counted(machine, name) == RECORD["targets"][machine.target][name]


def test_every_case_is_recorded() -> None:
    assert all(set(recorded) == set(cases()) for recorded in RECORD["targets"].values())


def test_the_table_in_the_documentation_is_that_of_the_record() -> None:
    assert generated.read(TABLE, PAGE) == markdown(RECORD), "make bounds writes it"


def test_few_sectors_beyond_the_minimum_are_touched() -> None:
    """A warp's request touches few more 32-byte sectors than its bytes fill. Causal rows end within one."""
    for target, recorded in RECORD["targets"].items():
        for case, kernels in recorded.items():
            for kernel, row in kernels.items():
                if row["instructions"] > 1:  # what works on the whole tensor
                    assert row["sectors"] <= 1.3 * row["least"], (target, case, kernel)
                    ragged = 1.01 if "causal" in case else 1.0
                    assert row["fresh"] <= ragged * row["least"], (target, case, kernel)  # what memory has to move
