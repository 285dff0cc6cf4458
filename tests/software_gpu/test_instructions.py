"""What the machine computes, instruction by instruction, against numpy, ml_dtypes and exact fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from software_gpu.gpu import SoftwareGPU
from software_gpu.ptx import UnknownPTX
from software_gpu.snippets import kernel

_REGISTER = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}
HALVES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
EVERY_HALF = np.arange(65536, dtype="u2")


def apply(
    machine: SoftwareGPU, instruction: str, result: np.dtype | str, *inputs: np.ndarray, constant: str = ""
) -> np.ndarray:
    """Run one instruction on arrays of equal length, a multiple of 32: its results, of the type `result`."""
    result = np.dtype(result)
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


class Case(NamedTuple):
    """An instruction, its inputs, what it gives, and the constants that follow the registers."""

    instruction: str
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    constant: str = ""


def python_integer(name: str, a: int, b: int, bits: int) -> int:
    """Two integers, read as the instruction reads them, by Python's own arithmetic."""
    operations: dict[str, Callable[[], int]] = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul": lambda: a * b >> bits if ".hi" in name else a * b,
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "xor": lambda: a ^ b,
        "div": lambda: int(Fraction(a, b)) if b else -1,
        "rem": lambda: a - b * int(Fraction(a, b)) if b else a,
    }
    return operations[name.split(".")[0]]()


def integer_cases() -> Iterator[Case]:
    names = [
        f"{name}.{kind}{bits}"
        for name in ("add", "sub", "mul.lo", "min", "max", "div", "rem")
        for kind in "su"
        for bits in (32, 64)
    ]
    names += [f"{name}.b{bits}" for name in ("and", "or", "xor") for bits in (16, 32, 64)]
    for name in [*names, "mul.hi.u32", "mul.hi.s32", "add.s16x2", "sub.s16x2", "max.s16x2", "min.u16x2"]:
        kind, _, pair = name.split(".")[-1].partition("x")
        bits, held = int(kind[1:]), f"u{int(kind[1:]) // 8 * (2 if pair else 1)}"
        a, b = (integers(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}", seed, 2048) for seed in (1, 2))
        results = [python_integer(name, int(x), int(y), bits) % 2**bits for x, y in zip(a, b, strict=True)]
        yield Case(name, (a.view(held), b.view(held)), np.array(results, f"u{bits // 8}").view(held))
    for name in ("mul.wide.s32", "mul.wide.u32"):
        kind = "i4" if ".s" in name else "u4"
        a, b, c = integers(kind, 3), integers(kind, 4), integers("i8", 5)
        products = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
        yield Case(name, (a, b), np.array([product % 2**64 for product in products], "u8"))
        sums = [(product + int(z)) % 2**64 for product, z in zip(products, c, strict=True)]
        yield Case(name.replace("mul", "mad"), (a, b, c), np.array(sums, "u8"))
    for name in ("shl.b16", "shl.b32", "shl.b64", "shr.u16", "shr.u32", "shr.s32", "shr.u64", "shr.s64"):
        bits = int(name[5:])
        a = integers(f"{'i' if '.s' in name else 'u'}{bits // 8}", 6)
        for by in (0, 1, 7, 15, 31, 32, 63, 200):
            shifted = [(int(x) << by if name.startswith("shl") else int(x) >> by) % 2**bits for x in a]
            yield Case(name, (a,), np.array(shifted, f"u{bits // 8}"), str(by))
    a, b, c = (integers("u4", seed) for seed in (7, 8, 9))
    for selector in (0x3210, 0x3340, 0x7610, 0x0123, 0x5410, 0xBA98, 0x8F4C, 0x7777):
        chosen, picked = [selector >> 4 * k & 15 for k in range(4)], []
        for pool in (struct.pack("<II", x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)):
            picked.append(bytes(pool[k & 7] if k < 8 else 255 * (pool[k & 7] >> 7) for k in chosen))
        yield Case("prmt.b32", (a, b), np.frombuffer(b"".join(picked), "u4"), hex(selector) + "U")
    pairs = b.astype("u8") << np.uint64(32) | a
    for by in (0, 1, 4, 31, 36):
        yield Case("shf.r.wrap.b32", (a, b), (pairs >> np.uint64(by % 32)).astype("u4"), str(by))
    bitwise = {0xEA: a & b | c, 0xE4: a & c | b & ~c, 0x96: a ^ b ^ c, 0x40: a & b & ~c}
    yield from (Case("lop3.b32", (a, b, c), result, str(values)) for values, result in bitwise.items())
    for begin, count in ((0, 32), (3, 4), (31, 1), (5, 0), (28, 10), (2, 1), (0, 1), (40, 3)):
        fields, signed = [], []
        for x in c.tolist():
            fields.append(x >> begin & (1 << count) - 1)
            sign = x >> min(begin + count - 1, 31) & 1 if count else 0
            endless = x - (x >> 31 << 32)  # the sign bit goes on above bit 31
            signed.append(((endless >> begin & (1 << count) - 1) - (sign << count)) % 2**32)
        yield Case("bfe.u32", (c,), np.array(fields, "u4"), f"{begin}, {count}")
        yield Case("bfe.s32", (c,), np.array(signed, "u4"), f"{begin}, {count}")
    for kind, codes in (("", EVERY_HALF), ("x2", EVERY_HALF.view("u4"))):
        for half in HALVES:
            yield Case(f"abs.{half}{kind}", (codes,), (EVERY_HALF & 0x7FFF).view(codes.dtype))
            yield Case(f"neg.{half}{kind}", (codes,), (EVERY_HALF ^ 0x8000).view(codes.dtype))
    # Narrower than their registers: in the low bits, and what is above them does not count.
    for bits, held in ((8, "u4"), (8, "u2"), (16, "u4"), (8, "u8"), (16, "u8"), (32, "u8")):
        values = integers(held, 25)
        low = (values & np.array((1 << bits) - 1, held)).astype("i8")
        to = 64 if bits == 32 else 32
        yield Case(f"cvt.s{to}.s{bits}", (values,), (low - ((low >> bits - 1) << bits)).astype(f"i{to // 8}"))
        yield Case(f"cvt.u{to}.u{bits}", (values,), low.astype(f"u{to // 8}"))
    yield Case("cvt.s8.s32", (integers("i4", 27),), integers("i4", 27).astype("i1").astype("i2"))
    yield Case("popc.b32", (a,), np.array([int(x).bit_count() for x in a], "u4"))


def float_cases() -> Iterator[Case]:
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    for kind, bits in (("f4", 32), ("f8", 64)):
        a, b = floats(kind, 11, 2048), floats(kind, 12, 2048)
        for name, function in operations.items():
            yield Case(f"{name}.rn.f{bits}", (a, b), function(a, b))
            if bits == 32 and name != "div":
                yield Case(f"{name}.rn.f32x2", (a.view("u8"), b.view("u8")), canonical(function(a, b)).view("u8"))
        yield Case(f"sqrt.rn.f{bits}", (a,), np.sqrt(a))
    values = floats("f4", 17)
    for bits in (32, 64):
        top = 2 ** (bits - 1)
        whole = [
            0 if x != x else max(-top, min(top - 1, x if math.isinf(x) else int(x)))
            for x in values.astype("f8").tolist()
        ]
        yield Case(f"cvt.rzi.s{bits}.f32", (values,), np.array([int(x) for x in whole], f"i{bits // 8}"))
    a = np.array([1, np.nan, 2, np.nan, 0.0, -0.0, -np.inf, 5], "f4").repeat(8)
    b = np.array([2, 3, np.nan, np.nan, -0.0, 0.0, 7, 5], "f4").repeat(8)
    best = {"max": [2, 3, 2, np.nan, 0.0, 0.0, 7, 5], "min": [1, 3, 2, np.nan, -0.0, -0.0, -np.inf, 5]}
    for name, listed in best.items():  # a NaN beside a number is passed over, and -0 is below 0
        chosen = np.array(listed, "f4").repeat(8)
        yield Case(f"{name}.f32", (a, b), chosen)
        low, high, of = ((x.view("u4") >> 16).astype("u2") for x in (a, b, canonical(chosen)))
        yield Case(f"{name}.bf16", (low, high), of)
        yield Case(f"{name}.bf16x2", (low.view("u4"), high.view("u4")), of.view("u4"))
    a, b, c = (floats("f4", seed, 256) for seed in (40, 41, 42))
    for name, function in (("max.f32", np.fmax), ("min.f32", np.fmin), ("max.NaN.f32", np.maximum)):
        yield Case(name, (a, b, c), function(function(a, b), c))
    for half, kind in HALVES.items():
        x = np.random.default_rng(20).standard_normal(1024).astype(kind)
        y = np.random.default_rng(21).standard_normal(1024).astype("f4")
        yield Case(f"sub.rn.f32.{half}", (x.view("u2"), y), x.astype("f4") - y)
        exact = EVERY_HALF.view(kind).astype("f4")
        wide = EVERY_HALF.astype("u4") << np.uint32(16) if half == "bf16" else exact  # whose NaN keep their bits
        yield Case(f"cvt.f32.{half}", (EVERY_HALF,), wide)
        # Ties, exactly between two neighbours, among others.
        codes = np.random.default_rng(15).integers(0, 2**16, 65536).astype("u2")
        ties = (codes.view(kind).astype("f8") + (codes + np.uint16(1)).view(kind).astype("f8")) / 2
        values = np.concatenate([floats("f4", 16, 65536), ties.astype("f4")])
        yield Case(f"cvt.rn.{half}.f32", (values,), canonical(values.astype(kind)).view("u2"))
    tiny = np.float32(2.0**-126)  # what flushes takes what is below for 0, and gives 0 for it
    a, b = (np.array(x * 8, "f4") for x in ([tiny, tiny / 2, -tiny / 2, 1.5], [0.5, 1.0, 1.0, tiny]))
    one, flushed = np.ones(32, "f4"), np.array([0.0, 0.0, -0.0, float(tiny) * 1.5] * 8, "f4")
    yield Case("fma.rn.f32", (a, b, 0 * one), a * b + np.float32(0))
    yield Case("fma.rn.ftz.f32", (a, b, 0 * one), flushed + np.float32(0))
    yield Case("mul.rn.ftz.f32", (a, b), flushed)
    yield Case("mul.ftz.f32", (a, one), np.array([tiny, 0.0, -0.0, 1.5] * 8, "f4"))
    yield Case("add.rn.ftz.f32", (a, a), np.array([2 * tiny, 0.0, -0.0, 3.0] * 8, "f4"))
    yield Case("sub.rn.ftz.f32", (a * np.float32(1.5), a), np.array([0.0, 0.0, 0.0, 0.75] * 8, "f4"))
    x = np.array([0.25, 1.0, 4.0, 2.0**-126, 2.0**100, 9.0, 2.0**-130, 0.0] * 4, "f4")
    zeroed = np.where(x < 2.0**-126, 0, x.astype("f8"))
    yield Case("rsqrt.approx.f32", (x,), (1 / np.sqrt(x.astype("f8"))).astype("f4"))
    yield Case("rsqrt.approx.ftz.f32", (x,), (1 / np.sqrt(zeroed)).astype("f4"))
    yield Case("rcp.approx.ftz.f32", (x,), (1 / zeroed).astype("f4"))
    yield Case("sqrt.approx.ftz.f32", (x,), np.sqrt(zeroed).astype("f4"))
    yield Case("lg2.approx.ftz.f32", (x,), np.log2(zeroed).astype("f4"))
    # What flashoptim quantizes with.
    a = np.array([1.5, -1.5, 0.0, -0.0, 2.0**-140, -7.0, np.inf, -2.5] * 4, "f4")
    b = np.array([-2.0, -1.0, 3.0, 3.0, -4.0, 0.5, -1.0, 5.0] * 4, "f4")
    yield Case("cvt.rmi.ftz.f32.f32", (a,), np.floor(np.where(abs(a) < tiny, 0 * a, a)))
    yield Case("copysign.f32", (a, b), np.copysign(b, a))
    signs = np.where(np.signbit(a) != np.signbit(b), -1, 1).astype("f4")
    yield Case("min.xorsign.abs.f32", (a, b), signs * np.minimum(abs(a), abs(b)))


def canonical(values: np.ndarray) -> np.ndarray:
    """The same with the NaN that NVIDIA GPUs make."""
    unsigned = f"u{values.itemsize}"
    nan = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[values.itemsize]
    return np.where(np.isnan(values), np.array(nan, unsigned), values.view(unsigned)).view(values.dtype)


def check(machine: SoftwareGPU, case: Case) -> None:
    expected = canonical(case.expected) if case.expected.dtype.kind == "f" else case.expected
    found = apply(machine, case.instruction, expected.dtype, *case.inputs, constant=case.constant)
    unsigned = f"u{expected.itemsize}"
    np.testing.assert_array_equal(found.view(unsigned), expected.view(unsigned), f"{case.instruction} {case.constant}")


def test_integers(machine: SoftwareGPU) -> None:
    for case in integer_cases():
        check(machine, case)


def test_numbers(machine: SoftwareGPU) -> None:
    with np.errstate(all="ignore"):
        for case in float_cases():
            check(machine, case)


def test_fma_rounds_once(machine: SoftwareGPU) -> None:
    generator = np.random.default_rng(14)
    a, b = (generator.standard_normal(4096).astype("f4") for _ in "ab")
    c = (-a * b * (1 + generator.integers(-2, 3, 4096) * 2.0**-23)).astype("f4")  # cancels nearly all
    found = apply(machine, "fma.rn.f32", "f4", a, b, c)
    rounded_twice = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        nearest = np.float32(float(exact))  # the cancelled sum has few bits: fp64 holds it
        assert Fraction(float(exact)) == exact
        assert result == nearest
        rounded_twice += np.float32(np.float32(x) * np.float32(y)) + np.float32(z) != nearest
    assert rounded_twice > 1000  # so that the test tells one rounding from two


@pytest.mark.parametrize("name", HALVES)
def test_fma_of_halves_rounds_once(machine: SoftwareGPU, name: str) -> None:
    kind, generator = HALVES[name], np.random.default_rng(26)
    a, b = (generator.standard_normal(4096).astype(kind) for _ in "ab")
    c = (-(a.astype("f8") * b.astype("f8")) * (1 + generator.integers(-3, 4, 4096) * 2.0**-12)).astype(kind)
    c[::2] = (generator.standard_normal(2048) * 2.0 ** generator.integers(-14, 14, 2048)).astype(kind)
    # A product of halves and a third within 2^30 of it fit fp64.
    once = (a.astype("f8") * b.astype("f8") + c.astype("f8")).astype(kind)
    assert (once != (a * b + c).astype(kind)).sum() > 100  # so that the test tells one rounding from two
    total = (a.astype("f8") + c.astype("f8")).astype(kind)
    for instruction, inputs, expected in (
        (f"fma.rn.{name}", (a, b, c), once),
        (f"add.rn.{name}", (a, c), total),
        (f"sub.{name}", (a, c), (a.astype("f8") - c.astype("f8")).astype(kind)),
    ):
        check(machine, Case(instruction, tuple(x.view("u2") for x in inputs), expected.view("u2")))
        if not instruction.startswith("sub"):
            check(machine, Case(f"{instruction}x2", tuple(x.view("u4") for x in inputs), expected.view("u4")))


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
    check(machine, Case(f"cvt.rn.satfinite.{name}x2.f32", (high, low), expected.view("u2")))
    pairs = np.stack([every.repeat(256), np.tile(every, 256)], axis=-1).reshape(-1).view("u2")
    halves = canonical(pairs.view("u1").view(kind).astype("f2"))
    check(machine, Case(f"cvt.rn.f16x2.{name}x2", (pairs,), halves.view("u4")))


@pytest.mark.parametrize("end", [1, -1])
def test_approximations_run_at_either_end_of_their_error(machine: SoftwareGPU, end: int) -> None:
    """2^-22 of the value: 2 ulp, as the PTX ISA bounds ex2.approx and div.full."""
    values = np.linspace(-20, 20, 1024, dtype="f4")
    ends = np.array([-np.inf, np.inf, 0.0, -0.0, np.nan, -1000, 200, 1] * 4, "f4")
    with machine.set(inexact=end):
        powers = apply(machine, "ex2.approx.f32", "f4", values)
        quotients = apply(machine, "div.full.f32", "f4", values, values[::-1].copy())
        found = apply(machine, "ex2.approx.f32", "f4", ends)
    for result, exact in ((powers, 2.0 ** values.astype("f8")), (quotients, values.astype("f8") / values[::-1])):
        error = (result / exact - 1) * end
        assert 2.0**-23 < error.min() and error.max() < 2.0**-22 + 2.0**-23
    assert found[[0, 1, 5, 6]].tolist() == [0.0, np.inf, 0.0, np.inf] and np.isnan(found[4])


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
