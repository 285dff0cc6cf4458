"""What the machine for AMD computes, where its instructions are not those of other machines, against numpy.

The plain ones are proved by the kernels, which have the bits of the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from software_gpu.gpu import SoftwareGPU
from software_gpu.snippets import wave_kernel

LANES = 128


def numbers(kind: str, seed: int) -> np.ndarray:
    """Bits of a type for every lane: random ones, small integers, and what is special among its numbers."""
    generator = np.random.default_rng(seed)
    width = max(16, int(kind[1:]))
    bits = generator.integers(0, 2**64, LANES, dtype=np.uint64)
    bits[::3] = generator.integers(0, 70, len(bits[::3]), dtype=np.uint64)
    if kind[0] == "f":
        mantissa = {16: 10, 32: 23, 64: 52}[width]
        one = ((1 << width - mantissa - 2) - 1) << mantissa
        top = ((1 << width - mantissa - 1) - 1) << mantissa
        special = [0, 1, (1 << mantissa) - 1, 1 << mantissa, one, one + 1, top - 1, top, top + 1]
        special.append(top + (1 << mantissa - 1))
        bits[1::3] = one + generator.integers(-3 << mantissa, 3 << mantissa, len(bits[1::3]))
        bits[: 2 * len(special)] = [*special, *(value | 1 << width - 1 for value in special)]
        return generator.permutation(bits)
    bits[:6] = [0, 1, 2**32 - 1, 2**31, 2**64 - 1, 2**63]
    return generator.permutation(bits)


def run_vector(machine: SoftwareGPU, line: str, inputs: np.ndarray) -> np.ndarray:
    """One instruction over v10, v12, v14 and VCC, with v20 before it: (v20, the mask that it made) of each lane."""
    loads = "\n".join(
        f"\tglobal_load_dwordx2 v[{10 + 2 * at}:{11 + 2 * at}], v1, s[6:7] offset:{8 * at}" for at in range(3)
    )
    body = f"""{loads}
	global_load_dwordx2 v[20:21], v1, s[6:7] offset:24
	v_lshrrev_b32_e32 v30, 3, v0
	v_and_b32_e32 v30, 1, v30
	v_cmp_ne_u32_e32 vcc, 0, v30
	s_mov_b64 s[20:21], 0
	{line}
	s_or_b64 vcc, vcc, s[20:21]
	v_mov_b32_e32 v22, vcc_lo
	v_mov_b32_e32 v23, vcc_hi
	global_store_dwordx4 v1, v[20:23], s[4:5]"""
    given = torch.from_numpy(inputs.astype(np.uint64).view(np.int64).copy())
    result = torch.zeros(LANES, 4, dtype=torch.int64)
    machine.run_text(wave_kernel(body, 32), result, given, given, given, grid=LANES // 64, threads=64)
    return result.numpy().view(np.uint64)[:, :2]


def words_of(machine: SoftwareGPU, line: str, *inputs: np.ndarray) -> np.ndarray:
    """The lower words of what `run_vector` gives for an instruction on up to three inputs, and a fourth: before it."""
    given = np.zeros((LANES, 4), np.uint64)
    for at, array in enumerate(inputs):
        given[:, at] = array
    return run_vector(machine, line, given)[:, 0]


def test_wide_products_and_permutations(machine: SoftwareGPU) -> None:
    a, b, c = (numbers("u64", seed) for seed in range(3))
    low = np.uint64(0xFFFFFFFF)
    x, y = a & low, b & low
    assert np.array_equal(words_of(machine, "v_mad_u64_u32 v[20:21], vcc, v10, v12, v[14:15]", a, b, c), x * y + c)
    signed = x.astype(np.uint32).view(np.int32).astype(np.int64) * y.astype(np.uint32).view(np.int32)
    expected = (signed + c.view(np.int64)).view(np.uint64)
    assert np.array_equal(words_of(machine, "v_mad_i64_i32 v[20:21], vcc, v10, v12, v[14:15]", a, b, c), expected)
    short = [(value << np.uint64(40)).view(np.int64) >> 40 for value in (x, y)]
    got = words_of(machine, "v_mul_i32_i24_e32 v20, v10, v12", a, b) & low
    assert np.array_equal(got, (short[0] * short[1]).view(np.uint64) & low)
    chosen = np.array([[12, 13, 255, 0], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]], np.uint8).view(np.uint32).ravel()
    got = words_of(machine, "v_perm_b32 v20, v10, v12, v14", a, b, np.resize(chosen, LANES)) & low
    for lane in range(LANES):
        data = (int(x[lane]) << 32 | int(y[lane])).to_bytes(8, "little")
        choices = [*data, *(255 * (data[at] >> 7) for at in (1, 3, 5, 7)), 0, *[255] * 243]
        word = bytes(choices[at] for at in int(np.resize(chosen, LANES)[lane]).to_bytes(4, "little"))
        assert int(got[lane]) == int.from_bytes(word, "little")


def test_fused_multiply_add_onto_its_result(machine: SoftwareGPU) -> None:
    """Small integers, where a fused one is exact, and one that is not: (1 + 2^-12)^2 - 1."""
    ones = np.arange(LANES).astype(np.float32)
    bits = ones.view(np.uint32).astype(np.uint64)
    got = words_of(machine, "v_fmac_f32_e32 v20, v10, v12", bits, bits, bits * 0, bits) & np.uint64(0xFFFFFFFF)
    assert np.array_equal(got.astype(np.uint32).view(np.float32), ones * ones + ones)
    near = np.full(LANES, np.float32(1 + 2.0**-12)).view(np.uint32)
    for line in ("v_fmamk_f32 v20, v10, 0x3f800800, v14", "v_fma_f32 v20, v10, v12, -1.0"):
        minus = np.full(LANES, np.float32(-1)).view(np.uint32)
        got = words_of(machine, line, near, near, minus) & np.uint64(0xFFFFFFFF)
        assert set(got.astype(np.uint32).view(np.float32)) == {np.float32(2.0**-11 + 2.0**-24)}


def test_mixed_operands(machine: SoftwareGPU) -> None:
    """Three numbers, each of fp32 or in a half of a register: 1.5 * 2 + x."""
    one, two = 0x3E00, 0x4000  # 1.5 and 2 in fp16
    x = np.arange(LANES).astype(np.float32)
    inputs = np.full(LANES, one << 16 | 7), np.full(LANES, two), x.view(np.uint32), np.full(LANES, 0xABCD1234)
    sums = (3 + x).astype(np.float32)
    halves = sums.astype(np.float16).view(np.uint16).astype(np.uint64)
    for name, expected in (
        ("v_fma_mix_f32", sums.view(np.uint32)),
        ("v_fma_mixlo_f16", halves | 0xABCD0000),
        ("v_fma_mixhi_f16", halves << np.uint64(16) | np.uint64(0x1234)),
    ):
        got = words_of(machine, f"{name} v20, v10, v12, v14 op_sel:[1,0,0] op_sel_hi:[1,1,0]", *inputs)
        assert np.array_equal(got & np.uint64(0xFFFFFFFF), expected)


# The lane that a lane reads, or None.
OTHER_LANES: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[2,3,0,1]": lambda lane: lane ^ 2,
    "row_shl:3": lambda lane: lane + 3 if lane % 16 < 13 else None,
    "row_shr:5": lambda lane: lane - 5 if lane % 16 >= 5 else None,
    "row_ror:4": lambda lane: lane // 16 * 16 + (lane - 4) % 16,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_mirror": lambda lane: lane ^ 15,
    "row_half_mirror": lambda lane: lane ^ 7,
}


@pytest.mark.parametrize("control", OTHER_LANES)
@pytest.mark.parametrize(("rows", "banks"), [(15, 15), (10, 15), (15, 5)])
@pytest.mark.parametrize("zero", [False, True])
def test_lanes_of_another(machine: SoftwareGPU, control: str, rows: int, banks: int, zero: bool) -> None:
    source = OTHER_LANES[control]
    values = np.arange(LANES, dtype=np.uint64) + 1000
    line = f"v_mov_b32_dpp v20, v10 {control} row_mask:{rows:#x} bank_mask:{banks:#x}{' bound_ctrl:1' * zero}"
    got = words_of(machine, line, values, values * 0, values * 0, values * 0 + 7) & np.uint64(0xFFFFFFFF)
    for at in range(LANES):
        lane, there = at % 64, source(at % 64)
        runs = rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1 and (there is not None or zero)
        expected = 7 if not runs else 0 if there is None else 1000 + at - lane + there
        assert int(got[at]) == expected, at


PARTS = {"BYTE_0": (0, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16), "WORD_1": (16, 16), "DWORD": (0, 32)}


@pytest.mark.parametrize("rest", ["UNUSED_PAD", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("into", PARTS)
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_registers(machine: SoftwareGPU, part: str, into: str, rest: str) -> None:
    a, b, before = (numbers("u32", seed) & np.uint64(0xFFFFFFFF) for seed in range(3))
    line = f"v_add_u32_sdwa v20, sext(v10), v12 dst_sel:{into} dst_unused:{rest} src0_sel:{part} src1_sel:WORD_1"
    got = words_of(machine, line, a, b, a * 0, before) & np.uint64(0xFFFFFFFF)
    low, width = PARTS[part]
    to, wide = PARTS[into]
    for at in range(LANES):
        field = int(a[at]) >> low & (2**width - 1)
        total = (field - (2**width if field >> (width - 1) else 0) + (int(b[at]) >> 16)) % 2**wide
        kept = int(before[at]) & ~((2**wide - 1) << to) if rest == "UNUSED_PRESERVE" else 0
        assert int(got[at]) == kept | total << to


@pytest.mark.parametrize("inexact", [0, 1, -1, 2])
def test_approximations_are_within_their_error(machine: SoftwareGPU, inexact: int) -> None:
    x = np.abs(np.random.default_rng(1).normal(size=LANES)).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    for name, function in (("rcp", lambda v: 1 / v), ("sqrt", np.sqrt), ("exp", np.exp2), ("log", np.log2)):
        with machine.set(inexact=inexact):
            got = words_of(machine, f"v_{name}_f32_e32 v20, v10", bits) & np.uint64(0xFFFFFFFF)
        exact = function(x.astype(np.float64))
        error = np.abs(got.astype(np.uint32).view(np.float32) - exact) / np.spacing(np.abs(exact).astype(np.float32))
        assert error.max() <= (0.5 if inexact == 0 else 1.0)
        assert (error.max() > 0.6) == (inexact != 0)


@pytest.mark.parametrize("inexact", [0, 1, -1, 2])
def test_divisions_and_roots_are_rounded_once(machine: SoftwareGPU, inexact: int) -> None:
    """What Triton compiles them to, from the machine's approximations: over all exponents, subnormal results too."""
    from amd_kernels import quotient_and_root_kernel

    generator = np.random.default_rng(3)
    a, b = (torch.from_numpy(generator.integers(0, 2**32, 2**15, dtype=np.uint32).view(np.float32)) for _ in range(2))
    b[::5] = b[::5].abs().clamp(1e38, 3e38)
    a[::7] *= 2.0**-100
    quotient, root = torch.empty_like(a), torch.empty_like(a)
    with machine.set(inexact=inexact):
        quotient_and_root_kernel[(2**15 // 1024,)](a, b, quotient, root, 1024)
    with np.errstate(all="ignore"):
        for mine, expected in ((quotient, a.numpy() / b.numpy()), (root, np.sqrt(a.numpy()))):
            wrong = (mine.numpy().view(np.uint32) != expected.view(np.uint32)) & ~(
                np.isnan(expected) & mine.isnan().numpy()
            )
            assert not wrong.any(), (a[wrong][:3], b[wrong][:3], mine[wrong][:3], expected[wrong][:3])
