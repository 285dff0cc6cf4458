"""What the machine computes, instruction by instruction, against numpy, ml_dtypes and exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from software_gpu.gpu import SoftwareGPU
from software_gpu.ptx import UnknownPTX
from software_gpu.snippets import kernel

_REGISTER = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}


def apply(
    machine: SoftwareGPU, instruction: str, result: np.dtype, *inputs: np.ndarray, constant: str = ""
) -> np.ndarray:
    """Run one instruction on arrays of equal length, a multiple of 32: its results, of the type `result`."""
    wide = max(result.itemsize, *(array.itemsize for array in inputs))
    body, names = [], []
    for at, array in enumerate(inputs):
        name = f"{_REGISTER[array.itemsize]}{at + 1}"
        body.append(f"\tld.global.b{8 * array.itemsize} {{ {name} }}, [ %rd{11 + at} + 0 ];")
        names.append(name)
    into = f"{_REGISTER[result.itemsize]}9"
    body.append(f"\t{instruction} \t{', '.join([into, *names, *filter(None, [constant])])};")
    body.append(f"\tst.global.b{8 * result.itemsize} [ %rd10 + 0 ], {{ {into} }};")
    tensors = [torch.empty(len(inputs[0]) * wide, dtype=torch.uint8)]
    for array in inputs:
        spread = np.zeros((len(array), wide), np.uint8)
        spread[:, : array.itemsize] = array.view(np.uint8).reshape(len(array), -1)
        tensors.append(torch.tensor(spread.reshape(-1)))
    tensors += [tensors[-1]] * (4 - len(tensors))
    machine.run_text(kernel("\n".join(body), wide), *tensors, grid=len(inputs[0]) // 32)
    spread = tensors[0].numpy().reshape(-1, wide)[:, : result.itemsize]
    return np.ascontiguousarray(spread).reshape(-1).view(result)


def integers(kind: str, seed: int, count: int = 1024) -> np.ndarray:
    """Random integers of all magnitudes, with 0, 1, -1 and the ends among them."""
    dtype = np.dtype(kind)
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**64, count, dtype=np.uint64, endpoint=False)
    bits >>= generator.integers(0, 64, count, dtype=np.uint64)
    values = bits.astype(f"u{dtype.itemsize}")
    values[generator.integers(0, count, count // 2)] *= np.array(-1).astype(values.dtype)
    ends = np.array([0, 1, 2**64 - 1, 1 << (8 * dtype.itemsize - 1), (1 << (8 * dtype.itemsize - 1)) - 1], np.uint64)
    values[: len(ends)] = ends.astype(values.dtype)
    return generator.permutation(values).view(dtype)


def floats(kind: str, seed: int, count: int = 1024) -> np.ndarray:
    """Random bit patterns, half of them of moderate size, with zeros, infinities, NaN and subnormals among them."""
    dtype = np.dtype(kind)
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 2**64, count, dtype=np.uint64).astype(f"u{dtype.itemsize}").view(dtype)
    values[::2] = generator.standard_normal((count + 1) // 2).astype(dtype)
    info = np.finfo(dtype)
    ends = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, info.smallest_subnormal, 1.0, 1.0]
    values[1 : 1 + len(ends)] = ends
    return generator.permutation(values)


def python_integer(name: str, a: int, b: int, bits: int) -> int:
    """Two integers, read as the instruction reads them, by Python's own arithmetic."""
    match name.split(".")[0]:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b >> bits if ".hi" in name else a * b
        case "min":
            return min(a, b)
        case "max":
            return max(a, b)
        case "and":
            return a & b
        case "or":
            return a | b
        case "xor":
            return a ^ b
        case "div":
            return int(Fraction(a, b)) if b else -1
        case "rem":
            return a - b * int(Fraction(a, b)) if b else a
    raise ValueError(name)


BINARY = [
    f"{name}.{kind}{bits}"
    for name in ("add", "sub", "mul.lo", "min", "max", "div", "rem")
    for kind in "su"
    for bits in (32, 64)
]
BINARY += [f"{name}.b{bits}" for name in ("and", "or", "xor") for bits in (16, 32, 64)] + ["mul.hi.u32", "mul.hi.s32"]


@pytest.mark.parametrize("name", BINARY)
def test_integers(machine: SoftwareGPU, name: str) -> None:
    kind = name.split(".")[-1].replace("b", "u")
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    a, b = integers(dtype.str, 1), integers(dtype.str, 2)
    bits = 8 * dtype.itemsize
    expected = [python_integer(name, int(x), int(y), bits) % 2**bits for x, y in zip(a, b, strict=True)]
    found = apply(machine, name, np.dtype(f"u{dtype.itemsize}"), a, b)
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["mul.wide.s32", "mul.wide.u32"])
def test_wide_products(machine: SoftwareGPU, name: str) -> None:
    kind = "i4" if ".s" in name else "u4"
    a, b, c = integers(kind, 3), integers(kind, 4), integers("i8", 5)
    products = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert apply(machine, name, np.dtype("u8"), a, b).tolist() == [product % 2**64 for product in products]
    sums = [(product + int(z)) % 2**64 for product, z in zip(products, c, strict=True)]
    assert apply(machine, name.replace("mul", "mad"), np.dtype("u8"), a, b, c).tolist() == sums


@pytest.mark.parametrize(
    "name", ["shl.b16", "shl.b32", "shl.b64", "shr.u16", "shr.u32", "shr.s32", "shr.u64", "shr.s64"]
)
@pytest.mark.parametrize("distance", [0, 1, 7, 15, 31, 32, 63, 200])
def test_shifts(machine: SoftwareGPU, name: str, distance: int) -> None:
    bits = int(name[5:])
    a = integers(f"{'i' if '.s' in name else 'u'}{bits // 8}", 6)
    shifted = [int(x) << distance if name.startswith("shl") else int(x) >> distance for x in a]
    found = apply(machine, name, np.dtype(f"u{bits // 8}"), a, constant=str(distance))
    assert found.tolist() == [value % 2**bits for value in shifted]


@pytest.mark.parametrize("selector", [0x3210, 0x3340, 0x7610, 0x0123, 0x5410, 0xBA98, 0x8F4C, 0x7777])
def test_byte_permutation(machine: SoftwareGPU, selector: int) -> None:
    a, b = integers("u4", 7), integers("u4", 8)
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        pool = struct.pack("<II", x, y)
        chosen = [selector >> 4 * k & 15 for k in range(4)]
        picked = [pool[k & 7] if k < 8 else 255 * (pool[k & 7] >> 7) for k in chosen]
        expected.append(int.from_bytes(bytes(picked), "little"))
    assert apply(machine, "prmt.b32", np.dtype("u4"), a, b, constant=hex(selector) + "U").tolist() == expected


@pytest.mark.parametrize("distance", [0, 1, 4, 31, 36])
def test_funnel_shifts(machine: SoftwareGPU, distance: int) -> None:
    low, high = integers("u4", 7), integers("u4", 8)
    pairs = [int(y) << 32 | int(x) for x, y in zip(low, high, strict=True)]
    found = apply(machine, "shf.r.wrap.b32", np.dtype("u4"), low, high, constant=str(distance))
    assert found.tolist() == [pair >> distance % 32 & 0xFFFFFFFF for pair in pairs]


@pytest.mark.parametrize(
    ("values", "function"),
    [
        (0xEA, lambda a, b, c: a & b | c),
        (0xE4, lambda a, b, c: a & c | b & ~c),
        (0x96, lambda a, b, c: a ^ b ^ c),
        (0x40, lambda a, b, c: a & b & ~c),
    ],
)
def test_functions_of_three_bits(machine: SoftwareGPU, values: int, function: Callable[..., np.ndarray]) -> None:
    a, b, c = integers("u4", 7), integers("u4", 8), integers("u4", 9)
    found = apply(machine, "lop3.b32", np.dtype("u4"), a, b, c, constant=str(values))
    assert (found == function(a, b, c)).all()


@pytest.mark.parametrize(("begin", "count"), [(0, 32), (3, 4), (31, 1), (5, 0), (28, 10), (2, 1), (0, 1), (40, 3)])
def test_bit_fields(machine: SoftwareGPU, begin: int, count: int) -> None:
    values = integers("u4", 9)
    unsigned = [int(x) >> begin & (1 << count) - 1 for x in values]
    assert apply(machine, "bfe.u32", np.dtype("u4"), values, constant=f"{begin}, {count}").tolist() == unsigned
    signed = []
    for x in values.tolist():
        sign = x >> min(begin + count - 1, 31) & 1 if count else 0
        endless = x - (x >> 31 << 32)  # the sign bit goes on above bit 31
        field = endless >> begin & (1 << count) - 1
        signed.append((field - (sign << count)) % 2**32)
    assert apply(machine, "bfe.s32", np.dtype("u4"), values, constant=f"{begin}, {count}").tolist() == signed


@pytest.mark.parametrize("name", ["add.s16x2", "sub.s16x2", "max.s16x2", "min.u16x2"])
def test_pairs_of_integers(machine: SoftwareGPU, name: str) -> None:
    kind = "i2" if ".s" in name else "u2"
    a, b = integers(kind, 23, 2048), integers(kind, 24, 2048)
    expected = [python_integer(name, int(x), int(y), 16) % 2**16 for x, y in zip(a, b, strict=True)]
    assert apply(machine, name, np.dtype("u4"), a.view("u4"), b.view("u4")).view("u2").tolist() == expected


def test_signs_of_16_bits(machine: SoftwareGPU) -> None:
    codes = np.arange(65536, dtype="u2")
    for kind in ("f16", "bf16"):
        assert (apply(machine, f"abs.{kind}", codes.dtype, codes) == codes & 0x7FFF).all()
        assert (apply(machine, f"neg.{kind}", codes.dtype, codes) == codes ^ 0x8000).all()
        pairs = codes.view("u4")
        assert (apply(machine, f"abs.{kind}x2", pairs.dtype, pairs).view("u2") == codes & 0x7FFF).all()
        assert (apply(machine, f"neg.{kind}x2", pairs.dtype, pairs).view("u2") == codes ^ 0x8000).all()


def test_numbers_narrower_than_their_registers(machine: SoftwareGPU) -> None:
    """They lie in the low bits; what is above them does not count."""
    for bits, held in ((8, "u4"), (8, "u2"), (16, "u4"), (8, "u8"), (16, "u8"), (32, "u8")):
        values = integers(held, 25)
        low = (values & np.array((1 << bits) - 1, held)).astype("i8")
        signed = low - ((low >> bits - 1) << bits)
        to = 64 if bits == 32 else 32
        assert apply(machine, f"cvt.s{to}.s{bits}", np.dtype(f"i{to // 8}"), values).tolist() == signed.tolist()
        assert apply(machine, f"cvt.u{to}.u{bits}", np.dtype(f"u{to // 8}"), values).tolist() == low.tolist()


def test_counting_bits(machine: SoftwareGPU) -> None:
    values = integers("u4", 10)
    assert apply(machine, "popc.b32", np.dtype("u4"), values).tolist() == [int(x).bit_count() for x in values]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits; every NaN is the one that NVIDIA GPUs make."""
    assert found.dtype == expected.dtype
    unsigned = f"u{found.dtype.itemsize}"
    canonical = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[found.dtype.itemsize]
    bits = np.where(np.isnan(expected), np.array(canonical, unsigned), expected.view(unsigned))
    np.testing.assert_array_equal(found.view(unsigned), bits)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_is_that_of_ieee(machine: SoftwareGPU, name: str, bits: int) -> None:
    kind = f"f{bits // 8}"
    a, b = floats(kind, 11), floats(kind, 12)
    with np.errstate(all="ignore"):
        expected = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name](a, b)
    assert_same(apply(machine, f"{name}.rn.f{bits}", a.dtype, a, b), expected)


@pytest.mark.parametrize("bits", [32, 64])
def test_square_roots(machine: SoftwareGPU, bits: int) -> None:
    a = floats(f"f{bits // 8}", 13)
    with np.errstate(all="ignore"):
        assert_same(apply(machine, f"sqrt.rn.f{bits}", a.dtype, a), np.sqrt(a))


def test_fma_rounds_once(machine: SoftwareGPU) -> None:
    generator = np.random.default_rng(14)
    a, b = (generator.standard_normal(4096).astype("f4") for _ in "ab")
    c = (-a * b * (1 + generator.integers(-2, 3, 4096) * 2.0**-23)).astype("f4")  # cancels nearly all
    found = apply(machine, "fma.rn.f32", np.dtype("f4"), a, b, c)
    rounded_twice = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        nearest = np.float32(float(exact))  # the cancelled sum has few bits: fp64 holds it
        assert Fraction(float(exact)) == exact
        assert result == nearest
        rounded_twice += np.float32(np.float32(x) * np.float32(y)) + np.float32(z) != nearest
    assert rounded_twice > 1000  # so that the test tells one rounding from two


def test_flushing_instructions_flush(machine: SoftwareGPU) -> None:
    tiny = np.float32(2.0**-126)
    a = np.array([tiny, tiny / 2, -tiny / 2, 1.5] * 8, "f4")
    b = np.array([0.5, 1.0, 1.0, tiny] * 8, "f4")
    c = np.zeros(32, "f4")
    kept = apply(machine, "fma.rn.f32", a.dtype, a, b, c)
    flushed = apply(machine, "fma.rn.ftz.f32", a.dtype, a, b, c)
    assert kept.tolist() == (a * b).tolist()
    assert flushed.tolist() == [0.0, 0.0, 0.0, float(tiny) * 1.5] * 8
    one = np.ones(32, "f4")
    assert apply(machine, "mul.rn.ftz.f32", a.dtype, a, b).tolist() == flushed.tolist()
    assert apply(machine, "mul.ftz.f32", a.dtype, a, one).tolist() == [float(tiny), 0.0, -0.0, 1.5] * 8
    assert apply(machine, "add.rn.ftz.f32", a.dtype, a, a).tolist() == [2 * float(tiny), 0.0, 0.0, 3.0] * 8
    assert apply(machine, "sub.rn.ftz.f32", a.dtype, a * 1.5, a).tolist() == [0.0, 0.0, 0.0, 0.75] * 8


@pytest.mark.parametrize(("name", "kind"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_conversions_to_16_bits_and_back(machine: SoftwareGPU, name: str, kind: type) -> None:
    generator = np.random.default_rng(15)
    values = np.concatenate([floats("f4", 16, 65536), generator.standard_normal(65536).astype("f4")])
    # ties: exactly between two neighbours
    codes = generator.integers(0, 2**16, 65536).astype("u2")
    with np.errstate(all="ignore"):
        low = codes.view(kind).astype("f4")
        high = (codes + np.uint16(1)).view(kind).astype("f4")
        values = np.concatenate([values, ((low.astype("f8") + high) / 2).astype("f4")])
        expected = values.astype(kind)
    found = apply(machine, f"cvt.rn.{name}.f32", np.dtype("u2"), values)
    same = (found == expected.view("u2")) | (np.isnan(values) & (found == 0x7FFF))
    assert same.all(), values[~same][:5]
    every = np.arange(65536, dtype="u2")
    back = apply(machine, f"cvt.f32.{name}", np.dtype("f4"), every)
    wide = every.view(kind).astype("f4")
    assert ((back == wide) | (np.isnan(back) & np.isnan(wide))).all()


@pytest.mark.parametrize(("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_conversions_to_8_bits_and_back(machine: SoftwareGPU, name: str, kind: type) -> None:
    """To nearest even; overflow and infinities become the largest finite number, NaN the code 0x7F."""
    every = np.arange(256, dtype="u1")
    numbers = every.view(kind).astype("f4")
    ordered = np.sort(numbers[np.isfinite(numbers)])
    ties = ((ordered[1:].astype("f8") + ordered[:-1]) / 2).astype("f4")
    near = [np.nextafter(ties, np.float32(end)).astype("f4") for end in (-np.inf, np.inf)]
    normal = np.random.default_rng(30).standard_normal(65536).astype("f4")
    values = np.concatenate([numbers, ties, *near, floats("f4", 31, 65536), normal, normal * np.float32(2.0**-12)])
    values = np.concatenate([values, -values])[: values.size * 2 // 64 * 64]
    with np.errstate(all="ignore"):
        expected = np.clip(values, ordered[0], ordered[-1]).astype(kind).view("u1")
    expected = np.where(np.isnan(values), 0x7F, expected).astype("u1")
    low, high = values[::2].copy(), values[1::2].copy()
    found = apply(machine, f"cvt.rn.satfinite.{name}x2.f32", np.dtype("u2"), high, low).view("u1")
    assert found.tolist() == expected.tolist()
    pairs = np.stack([every.repeat(256), np.tile(every, 256)], axis=-1).reshape(-1).view("u2")
    halves = apply(machine, f"cvt.rn.f16x2.{name}x2", np.dtype("u4"), pairs).view("f2")
    wanted = pairs.view("u1").view(kind).astype("f2")
    assert np.isnan(halves).tolist() == np.isnan(wanted).tolist()
    assert halves[~np.isnan(wanted)].view("u2").tolist() == wanted[~np.isnan(wanted)].view("u2").tolist()
    assert (halves[np.isnan(wanted)].view("u2") == 0x7FFF).all()


@pytest.mark.parametrize("to", ["s32", "s64"])
def test_conversions_to_integers_truncate_and_saturate(machine: SoftwareGPU, to: str) -> None:
    values = floats("f4", 17)
    bits = int(to[1:])
    found = apply(machine, f"cvt.rzi.{to}.f32", np.dtype(f"i{bits // 8}"), values)
    for value, result in zip(values.tolist(), found.tolist(), strict=True):
        top = 2 ** (bits - 1)
        expected = 0 if math.isnan(value) else max(-top, min(top - 1, value if math.isinf(value) else int(value)))
        assert result == expected, value


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_pass_over_nan_and_tell_zeros_apart(machine: SoftwareGPU, name: str) -> None:
    a = np.array([1, np.nan, 2, np.nan, 0.0, -0.0, -np.inf, 5], "f4").repeat(4)
    b = np.array([2, 3, np.nan, np.nan, -0.0, 0.0, 7, 5], "f4").repeat(4)
    expected = {"max": [2, 3, 2, np.nan, 0.0, 0.0, 7, 5], "min": [1, 3, 2, np.nan, -0.0, -0.0, -np.inf, 5]}[name]
    assert_same(apply(machine, f"{name}.f32", a.dtype, a, b), np.array(expected, "f4").repeat(4))
    low, high, best = ((values.view("u4") >> 16).astype("u2") for values in (a, b, np.array(expected, "f4").repeat(4)))
    best = np.where(best & 0x7FFF > 0x7F80, 0x7FFF, best).astype("u2")  # a NaN is the GPU's
    assert apply(machine, f"{name}.bf16", low.dtype, low, high).tolist() == best.tolist()
    pairs = [values.repeat(2).view("u4") for values in (low, high, best)]
    assert apply(machine, f"{name}.bf16x2", pairs[0].dtype, *pairs[:2]).tolist() == pairs[2].tolist()


@pytest.mark.parametrize("end", [1, -1])
def test_approximations_run_at_either_end_of_their_error(machine: SoftwareGPU, end: int) -> None:
    """2^-22 of the value: 2 ulp, as the PTX ISA bounds ex2.approx and div.full."""
    values = np.linspace(-20, 20, 1024, dtype="f4")
    with machine.set(inexact=end):
        powers = apply(machine, "ex2.approx.f32", np.dtype("f4"), values)
        quotients = apply(machine, "div.full.f32", np.dtype("f4"), values, values[::-1].copy())
    for found, exact in ((powers, 2.0 ** values.astype("f8")), (quotients, values.astype("f8") / values[::-1])):
        error = (found / exact - 1) * end
        assert 2.0**-23 < error.min() and error.max() < 2.0**-22 + 2.0**-23
    ends = np.array([-np.inf, np.inf, 0.0, -0.0, np.nan, -1000, 200, 1] * 4, "f4")
    with machine.set(inexact=end):
        found = apply(machine, "ex2.approx.f32", np.dtype("f4"), ends)
    assert found[[0, 1, 5, 6]].tolist() == [0.0, np.inf, 0.0, np.inf] and np.isnan(found[4])


def test_packed_pairs(machine: SoftwareGPU) -> None:
    a, b = (floats("f4", seed, 2048) for seed in (18, 19))
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        with np.errstate(all="ignore"):
            expected = function(a, b)
        found = apply(machine, f"{name}.rn.f32x2", np.dtype("u8"), a.view("u8"), b.view("u8"))
        assert_same(found.view("f4"), expected)


def test_mixed_operands(machine: SoftwareGPU) -> None:
    for name, kind in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        half = np.random.default_rng(20).standard_normal(1024).astype(kind)
        c = np.random.default_rng(21).standard_normal(1024).astype("f4")
        found = apply(machine, f"sub.rn.f32.{name}", np.dtype("f4"), half.view("u2"), c)
        assert_same(found, half.astype("f4") - c)


def test_shuffles_votes_and_reductions(machine: SoftwareGPU) -> None:
    values = np.random.default_rng(22).integers(-(2**31), 2**31, 64).astype("i4")
    found = apply(machine, "shfl.sync.bfly.b32", np.dtype("i4"), values, constant="5, 31, -1")
    assert found.tolist() == [values[at ^ 5] for at in range(64)]
    from_lanes = np.random.default_rng(23).integers(0, 32, 64).astype("i4")
    found = apply(machine, "shfl.sync.idx.b32", np.dtype("i4"), values, from_lanes, constant="31, -1")
    assert found.tolist() == [values[at // 32 * 32 + lane] for at, lane in enumerate(from_lanes)]
    found = apply(machine, "redux.sync.max.s32", np.dtype("i4"), values, constant="-1")
    assert found.tolist() == [values[:32].max()] * 32 + [values[32:].max()] * 32
    found = apply(machine, "redux.sync.min.s32", np.dtype("i4"), values, constant="-1")
    assert found.tolist() == [values[:32].min()] * 32 + [values[32:].min()] * 32
    positive = values.view("u4")
    found = apply(machine, "redux.sync.min.u32", np.dtype("u4"), positive, constant="-1")
    assert found.tolist() == [positive[:32].min()] * 32 + [positive[32:].min()] * 32
    body = """
	ld.global.b32 { %r1 }, [ %rd11 + 0 ];
	setp.gt.s32 	%p1, %r1, 0;
	vote.sync.ballot.b32 	%r2, %p1, -1;
	st.global.b32 [ %rd10 + 0 ], { %r2 };"""
    result, given = torch.empty(64, dtype=torch.int32), torch.tensor(values)
    machine.run_text(kernel(body), result, given, given, given, grid=2)
    for half in (0, 1):
        ballot = sum(1 << lane for lane in range(32) if values[32 * half + lane] > 0)
        assert (result[32 * half : 32 * half + 32].numpy().view("u4") == ballot).all()


def test_matrices_are_loaded_and_stored_across_lanes(machine: SoftwareGPU) -> None:
    """A round trip through shared memory with a transpose on one side transposes four 8 x 8 matrices."""
    body = """
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd11 + 0 ];
	shl.b32 	%r5, %r10, 4;
	STORE.sync.aligned.m8n8.x4.shared.b16 [%r5], {%r1, %r2, %r3, %r4};
	bar.sync 	0;
	ldmatrix.sync.aligned.m8n8.x4.LOAD {%r6, %r7, %r8, %r9}, [%r5];
	st.global.v4.b32 [ %rd10 + 0 ], { %r6, %r7, %r8, %r9 };"""
    given = torch.arange(256, dtype=torch.int16)
    for load in ("shared.b16", "trans.shared.b16"):
        result = torch.empty(256, dtype=torch.int16)
        text = body.replace("STORE", "stmatrix").replace("LOAD", load)
        machine.run_text(kernel(text, 16), result, given, given, given, shared_bytes=512)
        # [lane][matrix][2]: lane l holds the elements 2 (l % 4) and the next of row l / 4
        into, back = (t.view(8, 4, 4, 2).permute(2, 0, 1, 3).reshape(4, 8, 8) for t in (given, result))
        assert torch.equal(back, into.transpose(1, 2) if "trans" in load else into)


def test_lanes_that_took_different_branches_meet_again(machine: SoftwareGPU) -> None:
    """A loop of as many rounds as the lane's number, after which all lanes shuffle together."""
    body = """
	mov.b32 	%r1, 0;
	mov.b32 	%r2, 0;
$L__BB0_1:
	setp.ge.s32 	%p1, %r1, %r10;
	@%p1 bra 	$L__BB0_3;
	add.s32 	%r2, %r2, %r1;
	add.s32 	%r1, %r1, 1;
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	shfl.sync.bfly.b32	%r3, %r2, 1, 31, -1;
	st.global.b32 [ %rd10 + 0 ], { %r3 };"""
    result = torch.empty(32, dtype=torch.int32)
    machine.run_text(kernel(body), result, result, result, result)
    assert result.tolist() == [(lane ^ 1) * ((lane ^ 1) - 1) // 2 for lane in range(32)]


def test_registers_of_inline_assembly(machine: SoftwareGPU) -> None:
    """Each block declares its own, under names that other blocks use too, of one width."""
    block = """
{
	.reg .b16 %lower, %upper;
	.reg .b32 %sum;
	mov.b32 {%lower, %upper}, %r1;
	mov.b32 %sum, {%upper, %lower};
	add.u32 %r1, %sum, 1;
}"""
    body = f"""
	ld.global.b32 {{ %r1 }}, [ %rd11 + 0 ];{block}{block}
	st.global.b32 [ %rd10 + 0 ], {{ %r1 }};"""
    given, result = torch.arange(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    machine.run_text(kernel(body), result, given, given, given)
    assert torch.equal(result, given + 0x10001)
    with pytest.raises(UnknownPTX, match="registers %sum of 4 and of 8 bytes"):
        machine.run_text(kernel(body + block.replace(".b32 %sum;", ".b64 %sum;")), result, given, given, given)


def test_what_is_not_known_is_named(machine: SoftwareGPU) -> None:
    with pytest.raises(UnknownPTX, match=r"tested, PTX line \d+: 'sin\.approx\.f32 .*': the machine does not know sin"):
        machine.run_text(kernel("\tsin.approx.f32 \t%r1, %r2;"))
    with pytest.raises(UnknownPTX, match=r"%rs1 has 2 bytes where the operation takes 4"):
        machine.run_text(kernel("\tadd.s32 \t%r1, %rs1, %r2;"))


@pytest.mark.parametrize(("name", "kind"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_fma_of_halves_rounds_once(machine: SoftwareGPU, name: str, kind: type) -> None:
    generator = np.random.default_rng(26)
    a, b = (generator.standard_normal(4096).astype(kind) for _ in "ab")
    c = (-(a.astype("f8") * b.astype("f8")) * (1 + generator.integers(-3, 4, 4096) * 2.0**-12)).astype(kind)
    c[::2] = (generator.standard_normal(2048) * 2.0 ** generator.integers(-14, 14, 2048)).astype(kind)
    found = apply(machine, f"fma.rn.{name}", np.dtype("u2"), *(array.view("u2") for array in (a, b, c)))
    # A product of halves and a third within 2^30 of it fit fp64.
    expected = (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype(kind)
    twice = (a * b + c).astype(kind)
    assert (found == expected.view("u2")).all()
    assert (expected != twice).sum() > 100  # so that the test tells one rounding from two
    pairs = apply(machine, f"fma.rn.{name}x2", np.dtype("u4"), *(array.view("u4") for array in (a, b, c)))
    assert (pairs.view("u2") == found).all()
    sums = apply(machine, f"add.rn.{name}", np.dtype("u2"), a.view("u2"), c.view("u2"))
    assert (sums == (a.astype("f8") + c.astype("f8")).astype(kind).view("u2")).all()
    differences = apply(machine, f"sub.{name}", np.dtype("u2"), a.view("u2"), c.view("u2"))
    assert (differences == (a.astype("f8") - c.astype("f8")).astype(kind).view("u2")).all()
    pairs = apply(machine, f"add.{name}x2", np.dtype("u4"), a.view("u4"), c.view("u4"))
    assert (pairs.view("u2") == sums).all()


@pytest.mark.parametrize("name", ["max.f32", "min.f32", "max.NaN.f32"])
def test_the_largest_of_three(machine: SoftwareGPU, name: str) -> None:
    rng = np.random.default_rng(12)
    a, b, c = (rng.choice(np.array([-1.5, 0.0, 2.0, 3.0, math.inf, math.nan], "f4"), 256) for _ in range(3))
    with np.errstate(invalid="ignore"):
        chosen = {"max.f32": np.fmax, "min.f32": np.fmin, "max.NaN.f32": np.maximum}[name]
        assert_same(apply(machine, name, np.dtype("f4"), a, b, c), chosen(chosen(a, b), c))


def test_reciprocal_roots_and_logarithms(machine: SoftwareGPU) -> None:
    values = np.array([0.25, 1.0, 4.0, 2.0**-126, 2.0**100, 9.0, 2.0**-130, 0.0] * 4, "f4")
    with np.errstate(divide="ignore"):
        roots, flushed = 1 / np.sqrt(values.astype("f8")), np.where(values < 2.0**-126, 0, values.astype("f8"))
        assert_same(apply(machine, "rsqrt.approx.f32", np.dtype("f4"), values), roots.astype("f4"))
        assert_same(apply(machine, "rsqrt.approx.ftz.f32", np.dtype("f4"), values), (1 / np.sqrt(flushed)).astype("f4"))
        assert_same(apply(machine, "rcp.approx.ftz.f32", np.dtype("f4"), values), (1 / flushed).astype("f4"))
        assert_same(apply(machine, "sqrt.approx.ftz.f32", np.dtype("f4"), values), np.sqrt(flushed).astype("f4"))
        assert_same(apply(machine, "lg2.approx.ftz.f32", np.dtype("f4"), values), np.log2(flushed).astype("f4"))


def test_what_flashoptim_quantizes_with(machine: SoftwareGPU) -> None:
    codes = integers("i4", 27)
    assert apply(machine, "cvt.s8.s32", np.dtype("i2"), codes).tolist() == codes.astype("i1").tolist()
    a = np.array([1.5, -1.5, 0.0, -0.0, 2.0**-140, -(2.0**-140), -7.0, np.inf] * 4, "f4")
    b = np.array([-2.0, -1.0, 3.0, 3.0, -4.0, 5.0, 0.5, -1.0] * 4, "f4")
    floors = apply(machine, "cvt.rmi.ftz.f32.f32", a.dtype, a)
    assert floors.tolist() == [1.0, -2.0, 0.0, 0.0, 0.0, 0.0, -7.0, np.inf] * 4
    assert apply(machine, "copysign.f32", a.dtype, a, b).tolist() == np.copysign(b, a).tolist()
    least = apply(machine, "min.xorsign.abs.f32", a.dtype, a, b)
    signs = np.signbit(a) != np.signbit(b)
    assert least.tolist() == (np.where(signs, -1, 1) * np.minimum(abs(a), abs(b))).tolist()
