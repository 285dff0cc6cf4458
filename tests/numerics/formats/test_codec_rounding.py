"""Every code and every threshold of every format, in every mode, against an oracle of rational numbers.

`codec.py` (float64, whole arrays) and `exact.py` (rational numbers, one at a time), which share the rule by which a
fraction is rounded, are compared with tests/support/codec_oracle.py (a sorted table), which shares no code.
"""

import hashlib
import math
from fractions import Fraction

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from implementations import ALL as ALL_IMPLEMENTATIONS
from implementations import using

import halfstep
from halfstep.numerics.formats import codec, exact
from halfstep.numerics.formats.arrays import BLOCK_ELEMENTS
from halfstep.numerics.formats.table import custom, formats

pytestmark = pytest.mark.sample(3)

ALL = tuple(oracle.SPECS)
SEED, OFFSET = 12345678901234567, 3


def some_codes(name: str) -> np.ndarray:
    """All codes of a format of 16 bits or less; of wider ones a sample with every special."""
    form = formats[name]
    if form.bits <= 16:
        return np.arange(form.codes, dtype=np.uint64)
    edges = [0, 1, *(form.largest_code + k for k in (-1, 0, 1, 2)), *((1 << form.mantissa) + k for k in (-1, 0, 1))]
    drawn = np.random.default_rng(form.bits).integers(0, form.codes, 3000, dtype=np.uint64)
    codes = np.concatenate([drawn, np.array(edges, np.uint64)])
    return np.concatenate([codes, codes ^ np.uint64(form.sign_bit)])


@pytest.mark.parametrize("name", ALL)
def test_every_code_decodes_to_its_definition(name: str) -> None:
    codes = some_codes(name)
    values = codec.decode(codes, name)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        number = oracle.value_of(code, name)
        same = Fraction(value) == number if math.isfinite(number) else str(abs(value)) == str(abs(number))
        assert same and (number != number or math.copysign(1, value) == math.copysign(1, number)), hex(code)
        if formats[name].bits != 16 or code % 5 == 0:  # enough of the slower one
            single = np.float64(exact.decode_exact(code, name))
            assert single.view(np.uint64) == np.float64(value).view(np.uint64), "NaN's payload included"


@pytest.mark.parametrize("name", ALL)
def test_every_value_encodes_to_its_code(name: str) -> None:
    """Values of the format never move, in any mode; NaN keeps sign and payload with nan="payload"."""
    codes, form = some_codes(name), formats[name]
    values = codec.decode(codes, name)
    number = ~np.isnan(values)
    for rounding in exact.ENCODE_ROUNDINGS:
        seed = SEED if rounding == "stochastic" else None
        np.testing.assert_array_equal(codec.encode(values[number], name, rounding, seed=seed), codes[number])
    if not number.all():
        quiet = codes[~number] | np.uint64(form.nan_code if form.kind == "ieee" else 0)
        np.testing.assert_array_equal(codec.encode(values[~number], name, nan="payload"), quiet)
        singles = {exact.encode_exact(value, name, nan="payload") for value in values[~number].tolist()}
        assert singles == set(quiet.tolist())
        assert set(codec.encode(values[~number], name).tolist()) == {oracle.canonical_nan(name)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[pytest.mark.exhaustive] * (formats[name].bits == 16 and (name, dtype) != ("fp16", np.float32)),
        )
        for name in oracle.SMALL
        for dtype in (np.float32, np.float64)
    ],
)
def test_every_value_and_midpoint_with_the_floats_around_it(name: str, dtype: type) -> None:
    """Complete for a monotone rounding: its result changes only between these neighbours."""
    probes, codes, positions = oracle.thresholds(name, dtype)
    assert len(probes) >= 6 * (len(oracle.table(name)) - 1) - 2 ** (formats[name].mantissa + 3)
    assert np.all(np.diff(probes) > 0) and set(positions.tolist()) == {0, 1, 2, 3}
    for rounding in oracle.ENCODE_ROUNDINGS:
        for negative in (False, True):
            encoded = codec.encode(-probes if negative else probes, name, rounding)
            expected = oracle.expected(codes, positions, negative, name, rounding)
            wrong = np.flatnonzero(encoded != expected)
            assert not wrong.size, (rounding, negative, probes[wrong[:3]], encoded[wrong[:3]], expected[wrong[:3]])


def hard_values(name: str, dtype: type, count: int) -> np.ndarray:
    """Values of every size the format knows and some beyond, with zeros, infinities and the ends of the dtype."""
    form, info = formats[name], np.finfo(dtype)
    rng = np.random.default_rng(len(name))
    least, most = math.log2(form.min_subnormal) - 3, math.log2(form.max) + 3
    powers = rng.uniform(max(least, info.minexp - info.nmant), min(most, info.maxexp - 1), count)
    edges = [0.0, math.inf, info.smallest_subnormal, info.max, form.max, form.min_normal, form.min_subnormal]
    with np.errstate(over="ignore"):
        edges += [form.overflow, np.nextafter(form.overflow, 0), np.nextafter(form.overflow, math.inf), 128.5, 128.6]
        values = (np.exp2(powers) * rng.choice([-1, 1], count)).astype(dtype)
        ends = np.array(edges, np.float64).astype(dtype)
    return np.concatenate([values, ends, -ends])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", oracle.SMALL)
def test_every_mode_and_policy(name: str, dtype: type) -> None:
    values = hard_values(name, dtype, 16)
    numbers = [exact.exact(value) for value in values.tolist()]
    for rounding in exact.ENCODE_ROUNDINGS:
        for overflow in exact.OVERFLOWS[: 3 if formats[name].has_nan else 2]:
            for flush in (False, True):
                options: dict = {"overflow": overflow, "subnormals": not flush}
                if rounding == "stochastic":
                    options |= {"seed": SEED, "offset": OFFSET}
                codes = codec.encode(values, name, rounding, **options).tolist()
                listed = codec.encode(numbers, name, rounding, **options).tolist()
                for i, (number, *found) in enumerate(zip(numbers, codes, listed, strict=True)):
                    if rounding == "stochastic":
                        options["offset"] = OFFSET + i
                    word = exact.random_word(OFFSET + i, SEED)
                    expected = oracle.rounded(number, name, rounding, overflow, word, flush)
                    found.append(exact.encode_exact(number, name, rounding, **options))
                    assert found == [expected] * 3, (rounding, options, number)


OWN_FORMATS = [
    *[custom(e, m, kind) for e, m in ((2, 1), (4, 2), (3, 6), (6, 9)) for kind in ("ieee", "fn", "fnuz", "finite")],
    custom(5, 0, "finite"),
    custom(8, 0, "ieee"),
    custom(1, 3, "finite"),
    custom(4, 3, "fn", bias=-3),
    custom(5, 2, bias=40),
    custom(8, 3, "finite"),  # beyond fp32's largest
    custom(8, 5, bias=130),  # below fp32's least normal
    custom(9, 6),
    custom(11, 10),
    custom(11, 22),  # codes beyond 32 bits, of fp32 values with fewer bits
    custom(11, 20, bias=1040),  # among fp64's subnormals
]


@pytest.mark.parametrize(
    "form", [*map(formats.get, ("fp32", "tf32", "fp64")), *OWN_FORMATS], ids=lambda form: form.name
)
def test_wide_formats_and_your_own(form: codec.Format) -> None:
    """Their tables are too long to write down: arrays and single numbers agree, in rational numbers and in float64."""
    codes = np.unique(np.random.default_rng(0).integers(0, form.codes, 40, dtype=np.uint64))
    values = codec.decode(codes, form)
    values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        half = np.array([form.ulp(value) / 2 for value in values.tolist()])
        near = [values, values * 1.01, values + half, values - half / 2, values * 2.0**-30, [0.0, -0.0, 1e308]]
        wide = np.concatenate(near)
        wide = wide[~np.isnan(wide)]
        inputs = (wide, wide.astype(np.float32))
        if form.numpy:
            np.testing.assert_array_equal(codec.round_to(wide, form), wide.astype(form.numpy).astype(np.float64))
    for array in inputs:
        for rounding in exact.ENCODE_ROUNDINGS:
            seed = SEED if rounding == "stochastic" else None
            encoded = codec.encode(array, form, rounding, seed=seed).tolist()
            for i, (value, code) in enumerate(zip(array.tolist(), encoded, strict=True)):
                assert code == exact.encode_exact(value, form, rounding, seed=seed, offset=i), (rounding, value.hex())


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2"])
def test_subnormals_read_as_zero_elsewhere_are_seen(name: str) -> None:
    """`torch.set_flush_denormal` changes the arithmetic of the whole thread, not what is encoded and decoded."""
    tiny = np.array([1, 2, 0x7FFFFF, 0x80000001, 0x400000, 0x200000], np.uint32).view(np.float32)
    tinier = np.array([1, 2, 2**52 - 1, 2**63 + 1, 2**51, 2**50], np.uint64).view(np.float64)

    def results() -> list[list[float]]:
        modes, wide = ("nearest", "up", "down", "odd", "toward_zero"), "e8m0fnu" if name == "e5m2" else "fp64"
        arrays = [codec.encode(x, form, mode) for x in (tiny, tinier) for form in (name, wide) for mode in modes]
        return [x.tolist() for x in (*arrays, codec.decode([1, 2, 0x8001, 0x7FFFFF], "fp32"))]

    before = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    try:
        assert results() == before
    finally:
        torch.set_flush_denormal(False)
    assert any(before[1]) and before[-1][0] == 2.0**-149


# ---------------------------------------------------------------------------------------------------------- stochastic


CAST = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def assert_as_cast(values: torch.Tensor, dtype: torch.dtype, rounding: str, saturate: bool = False) -> None:
    """The codec's codes are those of a cast in the implementation chosen outside; a NaN is any NaN."""
    form = formats[dtype]
    seed = {"seed": SEED, "offset": 8} if rounding == "stochastic" else {}
    cast = halfstep.cast(values, dtype, rounding=rounding, saturate=saturate, **seed).cpu()
    codes = codec.encode(values, form, rounding, overflow="saturate" if saturate else "inf", **seed).numpy()
    expected = cast.view(torch.int16 if form.bits == 16 else torch.uint8).numpy().view(codes.dtype)
    nan = torch.isnan(cast).numpy()
    assert (nan == np.isnan(codec.decode(codes, form))).all()
    np.testing.assert_array_equal(codes[~nan], expected[~nan])


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", CAST, ids=str)
def test_the_same_codes_as_cast(dtype: torch.dtype, implementation: str) -> None:
    """Patterns spread over all of fp32, and all codes of the other formats; fewer under Triton's interpreter."""
    step = 2**20 - 1 if implementation == "triton" else 2**14 - 1
    patterns = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    with using(implementation, "cast") as device:
        for rounding in ("nearest", "toward_zero", "stochastic"):
            for saturate in (False, True):
                assert_as_cast(torch.from_numpy(patterns.view(np.float32)).to(device), dtype, rounding, saturate)
        for source in set(CAST) - {dtype}:
            codes = torch.arange(2 ** (8 * source.itemsize)).to(torch.int16 if source.itemsize == 2 else torch.uint8)
            assert_as_cast(codes.view(source).to(device), dtype, "nearest" if implementation == "triton" else rounding)


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "bf16", "tf32", "int8"])
def test_where_a_word_makes_the_difference(name: str) -> None:
    """Values made for their words: one step of the noise less and they stay, that step more and they move."""
    form, count = formats[name], 200
    words = [exact.random_word(i, SEED) for i in range(count)]
    unit = form.ulp(form.max / 4)  # of a number in the middle, and k units of it
    base = form.max / 4 - (form.max / 4) % unit
    normal = [(base, unit, Fraction(2**32 - word, 2**32), Fraction(1, 2**32)) for word in words]
    # Among subnormals, that of 23 - m bits: of the part that is rounded to so many, and of the word.
    steps = 23 - form.mantissa
    tiny = [(5 * form.min_subnormal, form.min_subnormal, Fraction(2**steps - (word >> (32 - steps)), 2**steps),
             Fraction(1, 2**steps)) for word in words]  # fmt: skip
    if name in ("bf16", "tf32"):  # whose subnormals are those of fp32 and rounded as its normal numbers are
        tiny = [(5 * form.min_subnormal, form.min_subnormal, part, step) for _, _, part, step in normal]
    for cases in (normal,) if name == "int8" else (normal, tiny):
        for stays in (False, True):
            exactly = [Fraction(b) + (part - stays * step) * Fraction(u) for b, u, part, step in cases]
            values = np.array([float(value) for value in exactly])
            assert all(Fraction(x) == value for x, value in zip(values.tolist(), exactly, strict=True))
            expected = [Fraction(b) + (not stays) * Fraction(u) for b, u, _, _ in cases]
            assert codec.round_to(values, name, "stochastic", seed=SEED).tolist() == expected
            assert codec.round_to(exactly, name, "stochastic", seed=SEED).tolist() == expected


def test_subnormals_alone_round_what_is_dropped_before_noise_is_added() -> None:
    """A quarter of a step less than moves: that is rounded away among subnormals, and kept in the smallest normal."""
    form = formats["e4m3fn"]
    words = [exact.random_word(i, SEED) for i in range(50)]
    parts = [1 - ((word >> 12) + 0.25) / 2**20 for word in words]
    for units, moves in ((7, True), (8, False), (9, False)):
        values = np.array([(units + part) * form.min_subnormal for part in parts])
        assert codec.encode(values, form, "stochastic", seed=SEED).tolist() == [units + moves] * 50
        assert exact.encode_exact(values[0], form, "stochastic", seed=SEED) == units + moves


@pytest.mark.parametrize(("name", "rounding"), [("e4m3fn", "nearest"), ("int8", "up"), ("e4m3fn", "stochastic")])
def test_each_element_is_encoded_as_if_it_were_alone(name: str, rounding: str) -> None:
    """Blocks and a rest, with specials in one of them; noise belongs to the index in row-major order."""
    values = np.random.default_rng(0).standard_normal((2, BLOCK_ELEMENTS + 2501)).astype(np.float32) * 4
    values[1, 3000:3004] = [math.inf, -math.inf, -0.0, 3e38]
    seed = {"seed": 9} if rounding == "stochastic" else {}
    codes, flat = codec.encode(values, name, rounding, **seed), values.ravel()
    for start in (0, BLOCK_ELEMENTS - 6, BLOCK_ELEMENTS + 5497, 2 * BLOCK_ELEMENTS - 7, flat.size - 13):
        for i in range(start, start + 13):
            offset = seed and {"offset": i}
            single = int(codec.encode(flat[i], name, rounding, **seed, **offset))
            assert codes.ravel()[i] == single == exact.encode_exact(float(flat[i]), name, rounding, **seed, **offset)
    if seed:
        assert (codec.encode(values, name, rounding, seed=10) != codes).any()


DIGESTS = {  # of docs/exactness.md
    "fp16": "de348ec42e6e41f5", "bf16": "7cad0241e73aae46", "e4m3fn": "440f26d6c947a242", "e5m2": "3478f509b4a3fcd8",
    "e4m3fnuz": "eb522af6066c1d94", "e5m2fnuz": "ef14d4cee326fb15", "e8m0fnu": "4e6791e41d5fe7d8",
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DIGESTS)
def test_all_fp32_patterns_to_nearest_even(name: str) -> None:
    digest, chunk = hashlib.sha256(), 2**22
    for start in range(0, 2**32, chunk):
        values = np.arange(start, start + chunk, dtype=np.uint64).astype(np.uint32).view(np.float32)
        digest.update(halfstep.encode(values, name).astype(f"<u{formats[name].bits // 8}").tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[name]
