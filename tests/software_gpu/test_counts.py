"""The counts recorded by `make bounds` are those of the kernels."""

import json
from pathlib import Path

import generated
import pytest
import triton
from software_gpu.counts import TABLE, cases, counted, markdown
from software_gpu.gpu import SoftwareGPU
from software_gpu.peers import of_machine_code

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
                    assert row["least"] <= row["sectors"] <= 1.3 * row["least"], (target, case, kernel)
                    ragged = 1.01 if "causal" in case else 1.0
                    assert row["fresh"] <= ragged * row["least"], (target, case, kernel)  # what memory has to move


def test_machine_code_without_loops_is_counted_by_the_logits_that_a_thread_copies() -> None:
    """By hand: eight instructions, an untaken one included, for 16 logits; two loads and a store of 16 bytes."""
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR8][R2.64] ;
        /*0020*/              @!P0 LDGSTS.E.128 [R9+0x400], desc[UR8][R2.64+0x400] ;
        /*0030*/                   LDG.E R4, desc[UR8][R2.64] ;
        /*0040*/                   MUFU.EX2 R5, R4 ;
        /*0050*/                   STG.E.128 desc[UR8][R12.64], R28 ;
        /*0060*/                   STG.E desc[UR8][R12.64], R28 ;
        /*0070*/               @P0 EXIT ;
.L_x_1:
        /*0080*/                   BRA `(.L_x_1);
        /*0090*/                   NOP;
"""
    assert of_machine_code(sass) == (8 / 16, 48 / 16)
