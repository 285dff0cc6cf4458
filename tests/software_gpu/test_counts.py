"""What `make bounds` recorded of the kernels is what they take."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import generated
import pytest
import torch
import triton
from software_gpu import sass, snippets
from software_gpu.counts import TABLE, cases, counted, markdown
from software_gpu.gpu import COUNTS, SoftwareGPU

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RECORD = json.loads((ROOT / "tests" / "kernels" / "instruction_counts.json").read_text())


@pytest.mark.parametrize("name", ["foreach_check bf16", "AdamW bf16 split", "softmax bf16, 333 columns"])
def test_the_record_holds(machine: SoftwareGPU, name: str) -> None:
    if RECORD["triton"] != triton.__version__:
        pytest.skip(f"recorded with Triton {RECORD['triton']}")
    assert counted(machine, name) == RECORD["targets"][machine.target][name]


def test_every_case_is_recorded() -> None:
    assert all(set(recorded) == set(cases()) for recorded in RECORD["targets"].values())


def test_the_table_in_the_documentation_is_that_of_the_record() -> None:
    assert generated.read(TABLE, PAGE) == markdown(RECORD), "make bounds writes it"


def test_sectors_are_used() -> None:
    """A warp's request touches few more 32-byte sectors than its bytes fill. Causal rows end within one."""
    for target, recorded in RECORD["targets"].items():
        for case, kernels in recorded.items():
            for kernel, row in kernels.items():
                if row["instructions"] > 1:  # what works on the whole tensor
                    assert row["sectors"] <= 1.3 * row["least"], (target, case, kernel)
                    ragged = 1.01 if "causal" in case else 1.0
                    assert row["fresh"] <= ragged * row["least"], (target, case, kernel)  # what memory has to move


def counted_by_opcode(
    machine: SoftwareGPU, body: str, *tensors: torch.Tensor, grid: int = 1
) -> dict[str, dict[str, int]]:
    """What each instruction of a small kernel was counted to do."""
    given = [*tensors, *[tensors[0]] * (4 - len(tensors))]
    machine.launches.clear()
    with machine.set(keep=True, counting=True):
        machine.run_text(snippets.kernel(body), *given, grid=grid)
    (launch,) = machine.launches
    assert launch.counts is not None
    rows = [dict(zip(COUNTS, row, strict=True)) for row in launch.counts.tolist()]
    return dict(zip(launch.program.opcodes, rows, strict=True))


def test_fresh_sectors_are_those_of_the_launch(machine: SoftwareGPU) -> None:
    """Two blocks of 32 threads load the same 128 bytes, and store 128 bytes each."""
    body = """
	ld.param.b64 	%rd1, [tested_param_1];
	mul.wide.u32 	%rd2, %r10, 4;
	add.s64 	%rd1, %rd1, %rd2;
	ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	st.global.b32 [ %rd10 + 0 ], { %r1 };
	ld.global.s32 { %r2 }, [ %rd1 + 0 ];"""
    to, source = torch.zeros(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    found = counted_by_opcode(machine, body, to, source, grid=2)
    assert [found[name]["sectors"] for name in ("ld.global.b32", "st.global.b32", "ld.global.s32")] == [8, 8, 8]
    assert [found[name]["fresh"] for name in ("ld.global.b32", "st.global.b32", "ld.global.s32")] == [4, 8, 0]


@pytest.mark.parametrize(
    ("instruction", "x", "y", "slow"),
    [
        ("sqrt.rn.f32 %r5, %r1", 2.0, 0.0, 0),
        ("sqrt.rn.f32 %r5, %r1", 2.0**-100, 0.0, 0),
        ("sqrt.rn.f32 %r5, %r1", 0.0, 0.0, 1),
        ("sqrt.rn.f32 %r5, %r1", 2.0**-110, 0.0, 1),
        ("sqrt.rn.f32 %r5, %r1", float("inf"), 0.0, 1),
        ("div.rn.f32 %r5, %r1, %r2", 2.0, 3.0, 0),
        ("div.rn.f32 %r5, %r1, %r2", 0.0, 3.0, 1),
        ("div.rn.f32 %r5, %r1, %r2", 1.0, 2.0**-130, 1),
        ("div.rn.f32 %r5, %r1, %r2", 1.0, float("nan"), 1),
        ("div.rn.f32 %r5, %r1, %r2", 2.0**100, 2.0**-100, 1),
    ],
)
def test_a_warp_is_slow_where_one_lane_is(
    machine: SoftwareGPU, instruction: str, x: float, y: float, slow: int
) -> None:
    """One lane of the second of two blocks has the operands; the others have 1 and 1."""
    body = f"""
	ld.global.b32 {{ %r1 }}, [ %rd11 + 0 ];
	ld.global.b32 {{ %r2 }}, [ %rd12 + 0 ];
	{instruction};
	st.global.b32 [ %rd10 + 0 ], {{ %r5 }};"""
    tensors = [torch.ones(64) for _ in range(3)]
    tensors[1][40], tensors[2][40] = x, y
    found = counted_by_opcode(machine, body, *tensors, grid=2)
    assert found[instruction.split()[0]]["slow"] == slow


def machine_counts(machine: SoftwareGPU, body: str, *tensors: torch.Tensor, grid: int = 1) -> Counter[str]:
    """How often each machine instruction of a small kernel is issued to a warp."""
    counts = counted_by_opcode(machine, body, *tensors, grid=grid)
    assert counts
    (launch,) = machine.launches
    assert launch.counts is not None
    warps = {
        line: int(row[COUNTS.index("warps")])
        for line, row in zip(launch.program.lines, launch.counts.tolist(), strict=True)
    }
    return sass.issued(sass.assembled(snippets.kernel(body), machine.target), warps)


LOAD_TWO = """
	ld.global.b32 { %r1 }, [ %rd11 + 0 ];
	ld.global.b32 { %r2 }, [ %rd12 + 0 ];"""
STORE = "\n\tst.global.b32 [ %rd10 + 0 ], { %r5 };"


def test_what_ptxas_puts_together_is_counted_once(machine: SoftwareGPU) -> None:
    """Two exclusive ors are one instruction, the halves of a product too; two warps of each block run all of it."""
    body = LOAD_TWO + "\n\txor.b32 %r3, %r1, %r2;\n\txor.b32 %r5, %r3, %r10;" + STORE
    tensors = [torch.ones(128, dtype=torch.int32) for _ in range(3)]
    found = machine_counts(machine, body, *tensors, grid=4)
    assert (found["LOP3.LUT"], found["LDG.E"], found["STG.E"]) == (4, 8, 4)


def test_a_loop_is_counted_as_often_as_it_ran(machine: SoftwareGPU) -> None:
    """Five trips, of which ptxas makes copies."""
    body = (
        LOAD_TWO
        + """
	mov.b32 %r5, %r2;
	mov.b32 %r4, 0;
$again:
	ex2.approx.ftz.f32 %r5, %r5;
	add.s32 %r4, %r4, 1;
	setp.lt.s32 %p1, %r4, %r1;
	@%p1 bra $again;"""
        + STORE
    )
    given = [torch.full((32,), value, dtype=torch.int32) for value in (0, 5, 0)]
    found = machine_counts(machine, body, *given)
    assert found["MUFU.EX2"] == 5


def test_subroutines_and_their_calls_are_left_out(machine: SoftwareGPU) -> None:
    """With a zero or without one: what the subroutine takes is added from the table."""
    body = LOAD_TWO + "\n\tdiv.rn.f32 %r5, %r1, %r2;" + STORE
    ones, other = torch.ones(32), torch.zeros(32)
    usual, zero = (machine_counts(machine, body, ones, value, ones) for value in (ones, other))
    assert usual == zero and usual["FCHK"] == 1 and not any(name.startswith("CALL") for name in usual)
    assert (usual["FFMA"], usual["MUFU.RCP"], usual["BRA"]) == (5, 1, 1)
