"""Every code and every threshold of every format, in every mode, against an oracle of rational numbers.

Three implementations that share no code meet here: `arrays.py` (integers, whole arrays), `exact.py` (rational
numbers, one at a time) and tests/support/codec_oracle.py (a sorted table).
"""

from __future__ import annotations

import math
from fractions import Fraction

import codec_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL as ALL_IMPLEMENTATIONS
from implementations import using

import halfstep
from halfstep.numerics.formats import codec, exact, philox_words
from halfstep.numerics.formats.arrays import BLOCK_ELEMENTS
from halfstep.numerics.formats.table import custom, formats

pytestmark = pytest.mark.sample(3)

ALL = tuple(oracle.SPECS)
SEED, OFFSET = 12345678901234567, 3


def some_codes(name: str) -> np.ndarray:
    """All codes of a format of 16 bits or less; of the others a sample with every special."""
    form = formats[name]
    if form.bits <= 16:
        return np.arange(form.codes, dtype=np.uint64)
    rng = np.random.default_rng(form.bits)
    edges = [0, 1, form.largest_code - 1, form.largest_code, form.largest_code + 1, form.largest_code + 2]
    edges += [(1 << form.mantissa) + k for k in (-1, 0, 1)]
    codes = np.concatenate([rng.integers(0, form.codes, 3000, dtype=np.uint64), np.array(edges, np.uint64)])
    return np.concatenate([codes, codes ^ np.uint64(form.sign_bit)])


def same_number(one: float, other: Fraction | float) -> bool:
    """Equal, zeros by their sign; a NaN equals any NaN."""
    if other != other:
        return math.isnan(one)
    if isinstance(other, float) and math.isinf(other):
        return one == other
    return Fraction(one) == other and (one != 0 or math.copysign(1, one) == math.copysign(1, float(other)))


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("name", ALL)
def test_every_code_decodes_to_its_definition(name: str) -> None:
    codes = some_codes(name)
    values = codec.decode(codes, name)
    assert values.dtype == np.float64
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        meant = oracle.value_of(code, name)
        assert same_number(value, meant), (hex(code), value, meant)
        if formats[name].bits == 16 and code % 5:
            continue  # enough of the slower one
        alone = exact.decode_exact(code, name)
        assert np.float64(alone).view(np.uint64) == np.float64(value).view(np.uint64), "NaN's payload included"


@pytest.mark.parametrize("name", ALL)
def test_every_value_encodes_to_its_code(name: str) -> None:
    """Values of the format never move, in any mode; NaN keeps sign and payload with nan="payload"."""
    codes = some_codes(name)
    values = codec.decode(codes, name)
    number = ~np.isnan(values)
    for rounding in codec.ENCODE_ROUNDINGS:
        options = {"seed": SEED} if rounding == "stochastic" else {}
        np.testing.assert_array_equal(codec.encode(values[number], name, rounding, **options), codes[number])
    if (~number).any():
        form = formats[name]
        kept = codec.encode(values[~number], name, nan="payload")
        quiet = codes[~number] | np.uint64(form.nan_code if form.kind == "ieee" else 0)
        np.testing.assert_array_equal(kept, quiet)
        assert {exact.encode_exact(value, name, nan="payload") for value in values[~number].tolist()} == set(
            quiet.tolist()
        )
        assert set(codec.encode(values[~number], name).tolist()) == {oracle.canonical_nan(name)}


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", oracle.SMALL)
def test_every_value_and_midpoint_with_the_floats_around_it(name: str, dtype: type) -> None:
    """Complete for a monotone rounding: its result changes only between these neighbours."""
    probes, codes, places = oracle.thresholds(name, dtype)
    assert len(probes) >= 6 * (len(oracle.table(name)) - 1) - 2 ** (formats[name].mantissa + 3)
    assert np.all(np.diff(probes) > 0) and set(places.tolist()) == {0, 1, 2, 3}
    for rounding in oracle.ENCODE_ROUNDINGS:
        for negative in (False, True):
            got = codec.encode(-probes if negative else probes, name, rounding)
            want = oracle.expected(codes, places, negative, name, rounding)
            wrong = np.flatnonzero(got != want)
            assert not wrong.size, (rounding, negative, probes[wrong[:3]], got[wrong[:3]], want[wrong[:3]])


def hard_values(name: str, dtype: type, count: int) -> np.ndarray:
    """Values of every size the format knows and some beyond, with zeros, infinities and the ends of the dtype."""
    form, info = formats[name], np.finfo(dtype)
    rng = np.random.default_rng(len(name))
    least, most = math.log2(form.min_subnormal) - 3, math.log2(form.max) + 3
    powers = rng.uniform(max(least, info.minexp - info.nmant), min(most, info.maxexp - 1), count)
    values = (np.exp2(powers) * rng.choice([-1, 1], count)).astype(dtype)
    edge = [0.0, math.inf, info.smallest_subnormal, info.max, form.max, form.min_normal, form.min_subnormal]
    with np.errstate(over="ignore"):
        edge += [form.overflow, np.nextafter(form.overflow, 0), np.nextafter(form.overflow, math.inf), 128.5, 128.6]
        edges = np.array(edge, np.float64).astype(dtype)
    return np.concatenate([values, edges, -edges])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", oracle.SMALL)
def test_every_mode_and_policy(name: str, dtype: type) -> None:
    form = formats[name]
    values = hard_values(name, dtype, 16)
    for rounding in codec.ENCODE_ROUNDINGS:
        for overflow in codec.OVERFLOWS[: 3 if form.has_nan else 2]:
            for flush in (False, True):
                options: dict = {"overflow": overflow, "subnormals": not flush}
                if rounding == "stochastic":
                    options |= {"seed": SEED, "offset": OFFSET}
                codes = codec.encode(values, name, rounding, **options)
                for i, (value, code) in enumerate(zip(values.tolist(), codes.tolist(), strict=True)):
                    if rounding == "stochastic":
                        options["offset"] = OFFSET + i
                    number = exact.exact(value)
                    want = oracle.rounded(number, name, rounding, overflow, philox_words.word(OFFSET + i, SEED), flush)
                    alone = exact.encode_exact(number, name, rounding, **options)
                    assert code == alone == want, (rounding, options, value.hex(), hex(code), hex(alone), hex(want))


@pytest.mark.parametrize("name", ["fp32", "tf32", "fp64"])
def test_wide_formats(name: str) -> None:
    """Their tables are too long to write down: `exact.py`, proved above, judges, and numpy where it can."""
    values = hard_values(name, np.float64, 120)
    with np.errstate(all="ignore"):
        if name == "fp32":
            np.testing.assert_array_equal(codec.encode(values, name), values.astype(np.float32).view(np.uint32))
        if name == "fp64":
            np.testing.assert_array_equal(codec.encode(values, name), values.view(np.uint64))
    for rounding in codec.ENCODE_ROUNDINGS:
        codes = codec.encode(values, name, rounding, seed=SEED if rounding == "stochastic" else None)
        for i, (value, code) in enumerate(zip(values.tolist(), codes.tolist(), strict=True)):
            options = {"seed": SEED, "offset": i} if rounding == "stochastic" else {}
            assert code == exact.encode_exact(value, name, rounding, **options), (rounding, value.hex())


MY_FORMATS = [
    *[custom(e, m, kind) for e, m in ((2, 1), (4, 2), (3, 6), (6, 9)) for kind in ("ieee", "fn", "fnuz", "finite")],
    custom(5, 0, "finite"),
    custom(8, 0, "ieee"),
    custom(1, 3, "finite"),
    custom(4, 3, "fn", bias=-3),
    custom(5, 2, bias=40),
    custom(8, 3, "finite"),  # beyond fp32's largest
    custom(8, 5, bias=130),  # below fp32's least normal
    custom(8, 7, bias=126),
    custom(9, 6),
    custom(11, 10),
    custom(11, 22),  # codes beyond 32 bits, of fp32 values with fewer bits
    custom(11, 20, bias=1040),  # among fp64's subnormals
    custom(10, 40, bias=1000),
]


@pytest.mark.parametrize("form", MY_FORMATS, ids=lambda form: form.name)
def test_formats_of_your_own(form: codec.Format) -> None:
    """Arrays and single numbers agree, by two ways that share nothing; decoding undoes encoding."""
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, form.codes, 40, dtype=np.uint64))
    values = codec.decode(codes, form)
    values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        up, down = codec.next_up(values, form), codec.next_down(values, form)
        near = [values, values * 1.01, (values + up) / 2, (values + down) / 2, values * 2.0**-30, [0.0, -0.0, 1e308]]
        both = np.concatenate(near)
        both = both[~np.isnan(both)]
        inputs = (both, both.astype(np.float32))
    for inputs_of in inputs:
        for rounding in codec.ENCODE_ROUNDINGS:
            seed = SEED if rounding == "stochastic" else None
            got = codec.encode(inputs_of, form, rounding, seed=seed).tolist()
            for i, (value, code) in enumerate(zip(inputs_of.tolist(), got, strict=True)):
                want = exact.encode_exact(value, form, rounding, seed=seed, offset=i)
                assert code == want, (rounding, value.hex(), hex(code), hex(want))


@settings(deadline=None, max_examples=150)
@given(
    st.floats() | st.fractions() | st.integers(-(2**70), 2**70),
    st.sampled_from([name for name in oracle.SMALL if formats[name].has_nan]),
    st.sampled_from(oracle.ENCODE_ROUNDINGS),
    st.sampled_from(codec.OVERFLOWS),
)
def test_any_number(value: float | Fraction | int, name: str, rounding: str, overflow: str) -> None:
    number = exact.exact(value)
    want = oracle.rounded(number, name, rounding, overflow)
    assert codec.encode(value, name, rounding, overflow=overflow) == want
    assert codec.encode([value], name, rounding, overflow=overflow).tolist() == [want]


# ------------------------------------------------------------------------------------------------------- known by hand


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2"])
def test_subnormals_read_as_zero_elsewhere_are_seen(name: str) -> None:
    """`torch.set_flush_denormal` changes the arithmetic of the whole thread, not what is encoded and decoded."""
    tiny = np.array([1, 2, 0x7FFFFF, 0x80000001, 0x400000, 0x200000], np.uint32).view(np.float32)
    modes = ("nearest", "up", "down", "odd", "toward_zero")
    before = [codec.encode(tiny, name, mode) for mode in modes]
    wide = [codec.encode(tiny, "e8m0fnu" if name == "e5m2" else "fp64", mode) for mode in modes]
    values = codec.decode(np.array([1, 2, 0x8001, 0x7FFFFF]), "fp32")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    try:
        after = [codec.encode(tiny, name, mode) for mode in modes]
        wide_after = [codec.encode(tiny, "e8m0fnu" if name == "e5m2" else "fp64", mode) for mode in modes]
        values_after = codec.decode(np.array([1, 2, 0x8001, 0x7FFFFF]), "fp32")
    finally:
        torch.set_flush_denormal(False)
    for one, other in ((before, after), (wide, wide_after), ([values], [values_after])):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
    assert (before[1] != 0).any() and values[0] == 2.0**-149


# ---------------------------------------------------------------------------------------------------------- stochastic


CAST = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def assert_as_cast(values: torch.Tensor, dtype: torch.dtype, rounding: str, saturate: bool, offset: int = 5) -> None:
    """The codec's codes are those of a cast in the implementation chosen outside; a NaN is any NaN."""
    form = formats[dtype]
    seed = {"seed": SEED, "offset": offset} if rounding == "stochastic" else {}
    cast = halfstep.cast(values, dtype, rounding=rounding, saturate=saturate, **seed).cpu()
    codes = codec.encode(values, form, rounding, overflow="saturate" if saturate else "inf", **seed).numpy()
    want = cast.view(torch.int16 if form.bits == 16 else torch.uint8).numpy().view(codes.dtype)
    nan = torch.isnan(cast).numpy()
    assert (nan == np.isnan(codec.decode(codes, form))).all()
    np.testing.assert_array_equal(codes[~nan], want[~nan])


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", CAST, ids=str)
@pytest.mark.parametrize("saturate", [False, True])
def test_the_same_codes_as_cast_from_fp32(dtype: torch.dtype, saturate: bool, implementation: str) -> None:
    """Patterns spread over all of fp32, in every implementation; fewer under Triton's interpreter."""
    step = 2**20 - 1 if implementation == "triton" else 2**14 - 1
    patterns = np.arange(0, 2**32, step, dtype=np.uint64).astype(np.uint32)
    with using(implementation, "cast") as device:
        for rounding in ("nearest", "toward_zero", "stochastic"):
            assert_as_cast(torch.from_numpy(patterns.view(np.float32)).to(device), dtype, rounding, saturate)


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("source", CAST, ids=str)
def test_the_same_codes_as_cast_from_every_code(source: torch.dtype, implementation: str) -> None:
    """All codes of 16 and 8 bits, to the other formats."""
    carrier = torch.int16 if source.itemsize == 2 else torch.uint8
    codes = torch.arange(2 ** (8 * source.itemsize)).to(carrier).view(source)
    with using(implementation, "cast") as device:
        for target in CAST:
            if target != source:
                rounding = "nearest" if implementation == "triton" else "stochastic"
                assert_as_cast(codes.to(device), target, rounding, False, offset=8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", CAST, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic"])
def test_the_same_codes_as_cast_from_2_24_patterns(dtype: torch.dtype, rounding: str) -> None:
    patterns = np.arange(3, 2**32, 2**8, dtype=np.uint64).astype(np.uint32)
    for implementation in ("reference", "native"):
        with using(implementation, "cast"):
            assert_as_cast(torch.from_numpy(patterns.view(np.float32)), dtype, rounding, False)


@pytest.mark.parametrize("name", ["fp16", "e4m3fn", "bf16", "tf32", "int8"])
def test_where_a_word_makes_the_difference(name: str) -> None:
    """Values made for their words: one step of the noise less and they stay, that step more and they move."""
    form, count = formats[name], 200
    words = [philox_words.word(i, SEED) for i in range(count)]
    unit = float(codec.ulp(form.max / 4, name))  # of a number in the middle, and k units of it
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
            want = [Fraction(b) + (not stays) * Fraction(u) for b, u, _, _ in cases]
            assert codec.round_to(values, name, "stochastic", seed=SEED).tolist() == want
            assert codec.round_to(exactly, name, "stochastic", seed=SEED).tolist() == want


@pytest.mark.parametrize(("name", "rounding"), [("e4m3fn", "nearest"), ("int8", "up"), ("e4m3fn", "stochastic")])
def test_each_element_is_encoded_as_if_it_were_alone(name: str, rounding: str) -> None:
    """Blocks and a rest, with specials in one of them; noise belongs to the index in row-major order."""
    values = np.random.default_rng(0).standard_normal((2, BLOCK_ELEMENTS + 2501)).astype(np.float32) * 4
    values[1, 3000:3004] = [math.inf, -math.inf, -0.0, 3e38]
    seed = {"seed": 9} if rounding == "stochastic" else {}
    codes = codec.encode(values, name, rounding, **seed)
    flat, whole = values.ravel(), codes.ravel()
    for start in (0, BLOCK_ELEMENTS - 6, BLOCK_ELEMENTS + 5497, 2 * BLOCK_ELEMENTS - 7, flat.size - 13):
        part = range(start, start + 13)
        offset = {i: seed and {"offset": i} for i in part}
        assert whole[start : start + 13].tolist() == [
            int(codec.encode(flat[i], name, rounding, **seed, **offset[i])) for i in part
        ]
        assert whole[start : start + 13].tolist() == [
            exact.encode_exact(float(flat[i]), name, rounding, **seed, **offset[i]) for i in part
        ]
    np.testing.assert_array_equal(codec.encode(values[:, ::2], name, "nearest"), codec.encode(values, name)[:, ::2])
    if seed:
        assert (codec.encode(values, name, rounding, seed=10) != codes).any()
