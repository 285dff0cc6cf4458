"""The audit: arguments, occupancy, and the parsers of PTX, AMD assembly and TTGIR on known code."""

import pytest

from halfstep.bench.audit import command, machine_code, rows
from halfstep.bench.audit.machine_code import Access
from halfstep.kernels.block_instructions import EXACT


@pytest.mark.parametrize("target", ["sm_9", "sm_75", "H100", "gfx", "sm_90; rm"])
def test_an_unknown_target_is_refused(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--target", target]) == 2
    assert "expected an NVIDIA target from sm_80 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "expected"),
    [
        ("sm_90", 32, 0, 4, 1.0),  # 64 warps x 32 lanes x 32 registers fill the file exactly
        ("sm_90", 33, 0, 4, 0.75),  # rounded up to 40 registers: 12 warps in each of four partitions
        ("sm_80", 255, 0, 8, 0.125),
        ("sm_80", 16, 0, 1, 0.5),  # 32 blocks of one warp
        ("sm_80", 32, 81 << 10, 4, 0.125),  # two blocks of 82 KiB fill 164
        ("gfx942", 42, 0, 4, 1.0),  # 8 waves per unit, of at most 64 registers
        ("gfx942", 65, 0, 4, 0.875),  # rounded up to 72: 7 waves
        ("gfx942", 42, 16384, 4, 0.5),  # 4 blocks of 4 waves in 64 KiB
        ("sm_75", 32, 0, 4, None),
    ],
)
def test_occupancy_follows_registers_shared_memory_and_warps(
    target: str, registers: int, shared: int, warps: int, expected: float | None
) -> None:
    assert rows.occupancy(target, registers, shared, warps) == expected


PTX = """
	.loc	1 12 30                         // kernel.py:12:30
	@%p8 ld.global.v2.b32 { %r18, %r19 }, [ %rd20 + 0 ];
	ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.nc.b16 { %rs1 }, [ %rd1 + 0 ];
	.loc	1 13 4
	@%p8 st.global.v8.b32 [ %rd20 + 0 ], { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 };
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r3;
	bar.sync 	0;
	@%p1 bar.sync 	0;
	bar.warp.sync 	-1;
	ld.shared.v4.b32 	{%r52, %r53, %r54, %r55}, [%r73];
	ld.param.b64 	%rd8, [k_param_0];
	.file	1 "/somewhere/kernel.py"
"""


def test_accesses_and_resources_are_read_from_ptx() -> None:
    twelve, thirteen = ("kernel.py", 12), ("kernel.py", 13)
    assert list(machine_code.ptx_accesses(PTX)) == [
        Access(False, 64, twelve),
        Access(False, 128, twelve),
        Access(False, 16, twelve),
        Access(True, 256, thirteen),
        Access(False, 128, thirteen),
    ]
    resources = machine_code.ptx_resources(PTX, "REG:54 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:568")
    assert resources == machine_code.Resources(registers=54, spills=8, barriers=2)
    with pytest.raises(ValueError, match="cuobjdump reports no registers: 'Function'"):
        machine_code.ptx_resources(PTX, "Function\n")


INLINE = """
	.file	1 "/somewhere/kernel.py"
	.loc	1 12 14
	// begin inline asm
	.loc	1 12 14
	mov.u32 %r1, 0x0;
	.loc	1 13 14
	ld.global.b32 { %r1 }, [ %rd4 + 0 ];

	// end inline asm
	// begin inline asm
	ld.global.b32 { %r2 }, [ %rd5 + 0 ];
	// end inline asm
	.loc	1 20 14
	// begin inline asm
	st.global.b32 [ %rd6 + 0 ], { %r2 };
	// end inline asm
"""


def test_each_line_of_inline_assembly_may_have_its_own_debug_line() -> None:
    """Triton 3.9 writes them; an access of one value would then count as one of the tile's on the next line."""
    one, twenty = ("kernel.py", 12), ("kernel.py", 20)
    assert list(machine_code.ptx_accesses(INLINE)) == [
        Access(False, 32, one),
        Access(False, 32, one),
        Access(True, 32, twenty),
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fma.rn.f32 	%r1, %r2, %r3, %r4;", ["1x fma.rn.f32"]),
        ("mad.lo.s32 	%r1, %r2, %r3, %r4;", []),
        ("div.rn.f32 	%r1, %r2, %r3;", []),
        ("div.full.f32 	%r1, %r2, %r3;", ["1x div.full.f32"]),
        ("sqrt.approx.ftz.f32 	%r1, %r2;", ["1x sqrt.approx.ftz.f32"]),
        ("ex2.approx.f32 	%r1, %r2;", ["1x ex2.approx.f32"]),
        ("mul.rn.ftz.f32 	%r1, %r2, %r3;", ["1x mul.rn.ftz.f32"]),
    ],
)
def test_inexact_ptx_is_reported(line: str, found: list[str]) -> None:
    assert machine_code.ptx_inexact(f"\t{line}\n") == found


def test_inline_assembly_marked_exact_may_contain_fused_multiply_adds() -> None:
    def assembly(first: str) -> str:
        return f"// begin inline asm\n{{\n{first}\nfma.rn.f32 %r1, %r2, %r3, %r4;\n}}\n// end inline asm\n"

    said, unsaid = assembly(EXACT), assembly("// exactly")
    assert machine_code.ptx_inexact(said) == []
    assert machine_code.ptx_inexact(unsaid) == ["1x fma.rn.f32"]
    assert machine_code.ptx_inexact(said + "fma.rn.f32 %r1, %r2, %r3, %r4;\n" + said) == ["1x fma.rn.f32"]


AMD = """
	.file	1 "/somewhere" "kernel.py"
	.loc	1 12 30 is_stmt 1               ; kernel.py:12:30
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	buffer_load_dwordx4 v[2:5], v35, s[4:7], 0 offen
	global_load_ushort v11, v[4:5], off
	global_load_short_d16_hi v11, v[4:5], off
	.loc	1 13 4
	global_store_dwordx2 v16, v[0:1], s[40:41]
	buffer_store_byte v1, v2, s[4:7], 0 offen
	s_barrier
	ds_read_b128 v[0:3], v4
	global_atomic_or v18, v19, s[42:43]
    .sgpr_spill_count: 1
    .vgpr_count:     42
    .vgpr_spill_count: 2
; Occupancy: 6
"""


def test_accesses_and_resources_are_read_from_amd_assembly() -> None:
    twelve, thirteen = ("kernel.py", 12), ("kernel.py", 13)
    assert list(machine_code.amd_accesses(AMD)) == [
        Access(False, 128, twelve),
        Access(False, 16, twelve),
        Access(False, 16, twelve),
        Access(True, 64, thirteen),
        Access(True, 8, thirteen),
    ]
    resources = machine_code.amd_resources(AMD)
    assert resources == machine_code.Resources(registers=42, spills=12, barriers=1)


BEYOND = "fused multiply-add beyond those of division, square root and conversion"
DIVISION, FMA, FMA_64 = (
    "\tv_div_fixup_f32 v1, v2, v3, v4\n",
    "\tv_fma_f32 v1, v2, v3, v4\n",
    "\tv_fma_f64 v[0:1], v[2:3]\n",
)
ROOT_64, FINE = "\tv_rsq_f64_e32 v[0:1], v[2:3]\n", "\t\t.amdhsa_float_denorm_mode_32 3\n\t\t.amdhsa_ieee_mode 1\n"


@pytest.mark.parametrize(
    ("llir", "assembly", "found"),
    [
        ("%1 = fmul float %2, %3", "\tv_mul_f32_e32 v1, v2, v3", []),
        ("%1 = fmul contract float %2, %3", "", ["1x contract"]),
        ("%1 = tail call float @llvm.fma.f32(float %2, float %3, float %4)", "", ["1x fma"]),
        ("declare float @llvm.fma.f32(float, float, float)", "", []),
        ("%1 = fdiv float %2, %3, !fpmath !5", "", ["1x !fpmath"]),
        ("%1 = fdiv float %2, %3", DIVISION + FMA * 5, []),
        ("%1 = fdiv float %2, %3", DIVISION + "\tv_fmac_f32_e32 v1, v2, v3\n" * 6, [f"1x f32 {BEYOND}"]),
        ("%4 = fptosi float %39 to i64, !dbg !34", "\tv_fma_f32 v7, v7, s0, |v0|", []),
        ("", ROOT_64 + FMA_64 * 9, [f"2x f64 {BEYOND}"]),
        ("", "\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", [f"1x f32 {BEYOND}"]),
        ("", FINE, []),
        ("", "\t\t.amdhsa_float_denorm_mode_32 0\n", ["1x float_denorm_mode_32 0"]),
        ("", "\t\t.amdhsa_fp16_overflow 1\n", ["1x fp16_overflow 1"]),
        ("", "\ts_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 0", ["1x s_setreg_imm32_b32"]),
    ],
)
def test_inexact_amd_code_is_reported(llir: str, assembly: str, found: list[str]) -> None:
    assert machine_code.amd_inexact(llir, assembly) == found


TTGIR = """
      %a = tt.load %table : !tt.ptr<i64> loc(#loc4)
      %x = tt.load %p, %m, %z : tensor<8x256x!tt.ptr<bf16>, #blocked> loc(#loc5)
      tt.store %q, %x, %m : tensor<1024x!tt.ptr<f32>, #blocked> loc(#loc3)
      %d = tt.load %table : !tt.ptr<i64> loc(#loc3)
      %y = amdg.buffer_load %q[%o], %m {contiguity = 8 : i32} : tensor<512xbf16, #blocked> loc(#loc6)
      %b = amdgpu.buffer_load %q[%o], %m : tensor<512xf8E4M3FN, #blocked> loc(#loc6)
      %k = tt.load %p, %m, %z : tensor<512x!tt.ptr<i1>, #blocked> loc(#loc7)
      %c = ttg.convert_layout %x : tensor<1024xf32, #blocked> -> tensor<1024xf32, #blocked1> loc(#loc3)
#loc1 = loc("/somewhere/kernel.py":4:44)
#loc2 = loc("/somewhere/kernel.py":20:18)
#loc3 = loc("/somewhere/kernel.py":9:4)
#loc4 = loc("a"(#loc1))
#loc5 = loc(callsite(#loc3 at #loc2))
#loc6 = loc("/somewhere/kernel.py":11:4)
#loc7 = loc("/somewhere/kernel.py":12:4)
"""


def test_tiles_and_uniform_lines_are_read_from_ttgir() -> None:
    assert machine_code.uniform_sites(TTGIR) == {("kernel.py", 4)}
    assert machine_code.tile_elements(TTGIR) == 2048
    assert machine_code.layout_conversions(TTGIR) == 1
    assert machine_code.element_bits(TTGIR) == {
        (("kernel.py", 9), False): {16},
        (("kernel.py", 9), True): {32},
        (("kernel.py", 11), False): {8, 16},
        (("kernel.py", 12), False): {8},
    }


def test_the_bulk_path_excludes_uniform_loads_and_narrow_paths() -> None:
    merged, table, wide, buffer, mask, tail = (("kernel.py", line) for line in (0, 4, 9, 11, 12, 30))
    accesses = [
        Access(False, 128, merged),  # by the compiler, from the scalars of several lines
        Access(False, 64, table),
        Access(False, 128, wide),
        Access(False, 64, wide),
        Access(False, 32, wide),  # two elements of bf16
        Access(False, 32, mask),  # four bytes
        Access(False, 16, mask),
        Access(False, 32, buffer),
        Access(False, 32, tail),  # of no known type
        Access(False, 16, tail),
        Access(True, 32, wide),  # the widest that is written
        Access(True, 16, tail),
    ]
    chosen = machine_code.bulk(accesses, TTGIR)
    assert chosen == [
        Access(False, 128, wide),
        Access(False, 64, wide),
        Access(False, 32, mask),
        Access(False, 32, buffer),
        Access(True, 32, wide),
    ]
    assert machine_code.operand_bits(chosen, TTGIR) == {8: 32, 16: 32, 32: 32}
