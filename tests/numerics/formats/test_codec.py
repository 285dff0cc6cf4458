"""The codec's interface: inputs, outputs and errors."""

import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from errors import refuses

import halfstep
from halfstep.numerics.formats import codec, exact
from halfstep.numerics.formats.table import UnknownFormat, formats

ALL = tuple(oracle.SPECS)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp64", np.uint64), ("tf32", np.uint32), ("fp16", np.uint16), ("e2m1fn", np.uint8), ("int8", np.uint8),
     ("e5m7", np.uint16), ("e9m8", np.uint32)],
)  # fmt: skip
def test_codes_come_in_the_smallest_type(name: str, dtype: type) -> None:
    codes, single = halfstep.encode([1.0, 2.0], name), halfstep.encode(1.0, name)
    assert codes.dtype == dtype and codes.shape == (2,)
    assert isinstance(single, dtype) and single == codes[0]
    assert isinstance(halfstep.decode(single, name), np.float64) and halfstep.decode(single, name) == 1.0


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_shapes_are_preserved(shape: tuple[int, ...]) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    codes = codec.encode(values, "fp32")
    for result in (codec.encode(values, "fp16"), codec.round_to(values, "bf16"), codec.decode(codes, "fp32")):
        assert isinstance(result, np.ndarray) and result.shape == shape
    codes = codec.encode(torch.from_numpy(values), "fp16")
    assert codes.shape == values.shape == codec.decode(codes, "fp16").shape and codes.dtype == torch.uint16
    assert codec.decode([], "fp16").shape == (0,)


def test_any_layout_of_memory() -> None:
    values = np.random.default_rng(0).standard_normal((7, 12)).astype(np.float32)
    codes = codec.encode(values, "bf16")
    np.testing.assert_array_equal(codec.encode(values.T, "bf16"), codes.T)
    np.testing.assert_array_equal(codec.encode(values[::2, ::-3], "bf16"), codes[::2, ::-3])
    np.testing.assert_array_equal(codec.encode(values.astype(">f4"), "bf16"), codes)
    np.testing.assert_array_equal(codec.encode(torch.from_numpy(values).t(), "bf16").numpy(), codes.T)
    np.testing.assert_array_equal(codec.decode(codes.T, "bf16"), codec.decode(codes, "bf16").T)
    before = values.copy()
    values.flags.writeable = False
    np.testing.assert_array_equal(codec.encode(values, "bf16"), codes)
    np.testing.assert_array_equal(values, before)


REAL = [np.float16, np.float32, np.float64, np.longdouble, np.int8, np.int64, np.uint16, np.uint64, np.bool_,
        ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn,
        ml_dtypes.int4]  # fmt: skip


@pytest.mark.parametrize("dtype", REAL, ids=lambda dtype: np.dtype(dtype).name)
def test_every_real_dtype(dtype: type) -> None:
    values = np.array([1, 2, 4, 1, 3, 4]).astype(dtype)
    for name in ("fp16", "e8m0fnu", "int8"):
        expected = [oracle.rounded(Fraction(float(value)), name, "nearest") for value in values]
        assert codec.encode(values, name).tolist() == expected
        assert [int(codec.encode(value, name)) for value in values] == expected, "numpy's scalars"
    assert codec.round_to(values, "fp64").tolist() == values.astype(np.float64).tolist()


def test_integers_round_once() -> None:
    """int64 and uint64 hold what float64 does not, and a list of Python integers any number."""
    value = 2**63 - 1
    for number in (value, np.int64(value), np.array([value]), [value], [value, 0.5], np.uint64(value)):
        codes = np.atleast_1d(codec.encode(number, "fp64", "toward_zero"))
        assert codes[0] == int(np.float64(2**63 - 1024).view(np.uint64)), type(number)
    above_a_tie = 2**60 + 2**35 + 1
    assert codec.encode(above_a_tie, "e11m24") == codec.encode(2**60 + 2**36, "e11m24")
    assert codec.encode(np.array([above_a_tie, 0]), "e11m24")[0] == codec.encode(2**60 + 2**36, "e11m24")
    assert codec.encode([10**400, -(10**400)], "fp16").tolist() == [0x7C00, 0xFC00]
    assert codec.encode([2**63, -1], "fp64").tolist() == codec.encode([2.0**63, -1.0], "fp64").tolist()


def test_exact_numbers_are_not_rounded_to_float64_first() -> None:
    text = "1.00048828125000000000000001"
    assert float(text) == 1 + 2.0**-11
    for value in (text, Fraction(text), Decimal(text)):
        assert codec.encode(value, "fp16") == 0x3C01
        assert codec.encode([value, value], "fp16").tolist() == [0x3C01] * 2
        assert codec.encode(np.array([value], dtype=object), "fp16").tolist() == [0x3C01]
        assert codec.round_to(value, "fp16", "down") == 1.0
    long = np.longdouble(1) + np.longdouble(2) ** -11 + np.longdouble(2) ** -60
    if long != 1 + 2.0**-11:  # elsewhere it is float64
        assert codec.encode(long, "fp16") == codec.encode(np.array([long]), "fp16")[0] == 0x3C01
    specials = np.array([np.longdouble("nan"), np.longdouble("-inf"), np.longdouble("-0")])
    assert codec.encode(specials, "fp16").tolist() == [0x7E00, 0xFC00, 0x8000]
    texts = np.array(["0.1", "1e-400", "-inf", "nan"])
    assert codec.encode(texts, "fp16", "up").tolist() == [0x2E67, 1, 0xFC00, 0x7E00]
    assert codec.encode(np.array([b"0.5", b"-0"]), "fp16").tolist() == [0x3800, 0x8000]


def test_the_sign_of_zero() -> None:
    for value in (-0.0, "-0", "-0.0e5", Decimal("-0"), np.float32(-0.0), np.array(-0.0), np.longdouble(-0.0)):
        for name in ("fp16", "e4m3fn", "e2m1fn", "fp64"):
            code = int(codec.encode(value, name))
            assert code == formats[name].sign_bit, (value, name)
            assert math.copysign(1, float(codec.decode(code, name))) == -1
        assert codec.encode(value, "e5m2fnuz") == 0 == codec.encode(value, "int8")
    assert codec.encode([0, -0.0, 0.0], "fp16").tolist() == [0, 0x8000, 0]
    assert codec.encode(-1e-9, "fp16") == 0x8000, "what underflows keeps its sign"


def test_nan_policies() -> None:
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFA12345], np.uint32)  # two quiet, two signalling
    values = patterns.view(np.float32)
    assert codec.encode(values, "fp16").tolist() == [0x7E00] * 4
    assert codec.encode(values, "fp16", nan="payload").tolist() == [0x7E00, 0xFE00, 0x7E00, 0xFF09]
    assert codec.encode(values, "bf16", nan="payload").tolist() == [0x7FC0, 0xFFC0, 0x7FC0, 0xFFE1]
    assert codec.encode(values, "e4m3fn", nan="payload").tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert codec.encode(values, "e5m2fnuz", nan="payload").tolist() == [0x80] * 4
    for name in ALL:
        assert codec.encode(values, name, nan="zero").tolist() == [0] * 4
        assert exact.encode_exact(math.nan, name, nan="zero") == 0
        with pytest.raises(ValueError, match="values without NaN with nan='raise', but got one: pass"):
            codec.encode(values, name, nan="raise")
    assert codec.encode([1.0, math.inf], "fp16", nan="raise").tolist() == [0x3C00, 0x7C00]


@pytest.mark.parametrize("name", ["e2m3fn", "e3m2fn", "e2m1fn", "int8"])
def test_formats_without_nan_refuse_it(name: str) -> None:
    for value in (math.nan, "nan", np.array([1.0, math.nan], np.float32), torch.tensor(math.nan)):
        for nan in ("canonical", "payload"):
            with pytest.raises(ValueError, match=f"Expected values without NaN for {name}, which has none, but got"):
                codec.encode(value, name, nan=nan)
    with pytest.raises(ValueError, match=f"Expected overflow to be 'inf' or 'saturate' for {name}, which has no NaN"):
        codec.encode(1.0, name, overflow="nan")
    saturated = codec.encode([1e9, -math.inf], name, overflow="saturate").tolist()
    assert codec.encode([1e9, -math.inf], name).tolist() == saturated


def test_tensors_of_any_dtype_are_encoded_and_decoded() -> None:
    values = torch.tensor([[1.0, -2.5], [math.inf, 1e-8]])
    codes = halfstep.encode(values, torch.float16)
    assert codes.dtype == torch.uint16 and codes.tolist() == [[0x3C00, 0xC100], [0x7C00, 0]]
    back = halfstep.decode(codes, "fp16")
    assert back.dtype == torch.float64 and back.tolist() == [[1.0, -2.5], [math.inf, 0.0]]
    assert halfstep.decode(values.half().view(torch.int16), "fp16").tolist() == back.tolist(), "bits of a signed type"
    assert halfstep.encode(torch.tensor(2.5, requires_grad=True), "bf16").item() == 0x4020
    assert halfstep.encode(torch.tensor([1 - 1j]).conj().imag, "bf16").tolist() == [0x3F80], "a negated view"
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz)
    for dtype in (*kinds, torch.float8_e8m0fnu, torch.int64, torch.uint8, torch.bool):
        values = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0]).to(dtype)
        assert codec.round_to(values.clone(), "fp32").tolist() == values.double().tolist(), dtype


@pytest.mark.parametrize(
    ("dtype", "name", "result"),
    [
        (torch.float32, "fp16", torch.float32),
        (torch.bfloat16, "e4m3fn", torch.bfloat16),
        (torch.bfloat16, "int8", torch.bfloat16),  # 8 significant bits
        (torch.float16, "e5m2", torch.float16),
        (torch.float32, "e8m0fnu", torch.float32),
        (torch.float16, "bf16", torch.float64),
        (torch.bfloat16, "fp16", torch.float64),
        (torch.float32, "fp64", torch.float64),
        (torch.float8_e4m3fn, "e5m2", torch.float64),
        (torch.float8_e5m2, "e5m2", torch.float8_e5m2),
        (torch.int8, "int8", torch.float64),
    ],
    ids=str,
)
def test_round_to_keeps_the_dtype_that_holds_the_format(dtype: torch.dtype, name: str, result: torch.dtype) -> None:
    values = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    rounded = codec.round_to(values, name)
    assert rounded.dtype == result
    assert rounded.double().tolist() == codec.round_to(values.double().numpy(), name).tolist()
    if result == dtype and formats[name].bits <= 8:  # every value of the format is there
        every = codec.decode(np.arange(formats[name].codes), name)
        every = every[~np.isnan(every)]
        assert (torch.from_numpy(every).to(dtype).double().numpy() == every).all()


@pytest.mark.parametrize(
    ("values", "seed"),
    [(torch.full((64,), 1.3), torch.manual_seed), (np.full(64, 1.3), random.seed)],
    ids=["torch", "python"],
)
def test_the_generator_of_the_library_governs_the_noise(values: Any, seed: Any) -> None:
    seed(5)
    first, second = (codec.encode(values, "e4m3fn", "stochastic").tolist() for _ in range(2))
    seed(5)
    assert codec.encode(values, "e4m3fn", "stochastic").tolist() == first != second


# ----------------------------------------------------------------------------------------------------------- neighbours


@pytest.mark.parametrize("name", oracle.PARAMETERS)
def test_next_up_and_down_walk_through_all_numbers(name: str) -> None:
    form = formats[name]
    values = {float(value) for value in (oracle.value_of(code, name) for code in range(form.codes)) if value == value}
    finite = np.array(sorted(value for value in values if not math.isinf(value)))
    beyond = math.inf if form.has_infinity else math.nan if form.has_nan else None
    at = np.arange(len(finite) - 1)
    if len(at) > 1000:
        at = np.concatenate([at[:99], at[len(at) // 2 - 99 :][:198], at[-99:]])
    low, high = finite[at], finite[at + 1]
    for between in (low, (low + high) / 2):
        np.testing.assert_array_equal(codec.next_up(between, name), high)
    for between in (high, (low + high) / 2):
        np.testing.assert_array_equal(codec.next_down(between, name), low)
    ends = codec.next_down(finite[0], name), codec.next_up(finite[-1], name)
    np.testing.assert_array_equal(ends, (finite[0], finite[-1]) if beyond is None else (-beyond, beyond))
    np.testing.assert_array_equal(codec.next_up([-math.inf, finite[0] * 4 - 1], name), [finite[0]] * 2)
    np.testing.assert_array_equal(codec.next_down([math.inf, finite[-1] * 4], name), [finite[-1]] * 2)
    assert np.isnan(codec.next_up(math.nan, name)) and np.isnan(codec.next_down([math.nan], name)[0])


def test_next_up_and_down_keep_the_sign_of_zero() -> None:
    for name in oracle.SMALL:
        if formats[name].has_negative_zero:
            least = formats[name].min_subnormal
            around = codec.next_up(-least, name), codec.next_down(least, name)
            assert [str(float(number)) for number in around] == ["-0.0", "0.0"]


@pytest.mark.parametrize("name", ["fp64", "fp32"])
def test_next_and_ulp_as_numpy_has_them(name: str) -> None:
    dtype = np.dtype(formats[name].numpy)
    patterns = np.random.default_rng(0).integers(0, 2 ** (8 * dtype.itemsize), 3000, dtype=np.uint64)
    values = patterns.astype(f"u{dtype.itemsize}").view(dtype)
    values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(codec.next_up(values, name), np.nextafter(values, dtype.type(np.inf)))
        np.testing.assert_array_equal(codec.next_down(values, name), np.nextafter(values, dtype.type(-np.inf)))
        spaced = np.abs(values[np.isfinite(values) & (np.abs(values) < np.finfo(dtype).max)])
        np.testing.assert_array_equal(codec.ulp(spaced, name), np.spacing(spaced))


@pytest.mark.parametrize("name", ALL)
def test_ulp_is_that_of_the_format(name: str) -> None:
    values = [0.0, 1.0, -1.5, 2.0**-130, 3e38, 1e300, -math.inf, formats[name].max, formats[name].min_normal]
    expected = [formats[name].ulp(value) for value in values]
    assert codec.ulp(values, name).tolist() == expected
    assert math.isnan(codec.ulp(math.nan, name))
    assert codec.ulp("1e-400", name) == formats[name].ulp(0.0)
    assert codec.ulp(2**60 - 1, name) == formats[name].ulp(2.0**59), "not that of 2^60, which float64 makes of it"


def test_neighbours_of_exact_overflowing_and_tiny_numbers() -> None:
    around = codec.neighbours("0.1", "fp16")
    assert (around.code_below, around.code_above, around.code_nearest) == (0x2E66, 0x2E67, 0x2E66)
    assert around.nearest == around.below and not around.exact and around.error == around.below - Fraction(1, 10)
    same = codec.neighbours(-1, "bf16")
    assert same.exact and same.below == same.above == same.nearest == -1 and same.midpoint is None and same.error == 0
    assert (same.previous, same.next) == (Fraction(-129, 128), Fraction(-255, 256))
    over = codec.neighbours(1e6, "fp16")
    assert (over.below, over.above, over.midpoint, over.nearest, over.error) == (65504, math.inf, 65520, math.inf, None)
    under = codec.neighbours(-1e6, "fp16")
    assert (under.below, under.above, under.midpoint, under.code_below) == (-math.inf, -65504, -65520, 0xFC00)
    assert codec.neighbours(7, "e2m1fn").above is None and codec.neighbours(7, "e2m1fn").code_above is None
    assert codec.neighbours(-130, "int8").midpoint == Fraction(-257, 2)
    low = codec.neighbours(0, "e8m0fnu")
    assert low.above == Fraction(2) ** -127 and math.isnan(low.below) and low.midpoint is None
    tiny = codec.neighbours(-1e-30, "fp16")
    assert math.copysign(1, tiny.above) == -1 and tiny.code_above == 0x8000 and tiny.below == -(Fraction(2) ** -24)
    with pytest.raises(ValueError, match="Expected value to be a finite number"):
        codec.neighbours(math.inf, "fp16")


@pytest.mark.parametrize("name", oracle.PARAMETERS)
def test_neighbours_enclose_the_number(name: str) -> None:
    form, values = formats[name], oracle.extended(name)
    for index in range(0, len(values) - 2, max(1, len(values) // 40)):
        for part in (Fraction(1, 3), Fraction(1, 2)):
            value = values[index] + part * (values[index + 1] - values[index])
            for sign in (1, -1) if form.signed else (1,):
                around = codec.neighbours(sign * value, form)
                inner, outer = sign * values[index], sign * values[index + 1]
                assert {around.below, around.above} == {inner, outer} and around.below < around.above
                assert around.midpoint == (inner + outer) / 2 and around.ulp == abs(outer - inner)
                assert around.code_nearest == oracle.rounded(sign * value, name, "nearest")


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((1.0, "fp16", "even"), {}, ValueError, "'toward_zero', 'up', 'down', 'odd', 'stochastic', but got 'even'"),
        ((1.0, "fp16"), {"subnormals": "yes"}, TypeError, "Expected subnormals to be True (kept) or False (flushed to"),
        ((1.0, "fp16"), {"seed": 3}, ValueError, "Expected seed to be None with rounding='nearest', which uses no"),
        ((1.0, "fp16", "stochastic"), {"seed": -1}, ValueError, "Expected seed to be from 0 to 9223372036854775807,"),
        ((1.0, "fp16", "stochastic"), {"offset": 1.5}, TypeError, "Expected offset to be an integer from 0 to "),
        ((1.0, "fp17"), {}, UnknownFormat, "unknown format 'fp17'; did you mean"),
        ((1j, "fp16"), {}, TypeError, "Expected a real number (int, float, Fraction, Decimal or numpy's) or a string"),
        ((np.array(["2020"], "M8[Y]"), "fp16"), {}, TypeError, "but got type datetime64[Y]"),
        (("one", "fp16"), {}, ValueError, "'one' is not a number. Write"),
        (([1.0, [2.0]], "fp16"), {}, (TypeError, ValueError), ""),
        ((torch.tensor([1j]), "fp16"), {}, TypeError, "Expected a dense tensor of real numbers, but got"),
        ((torch.eye(2).to_sparse(), "fp16"), {}, TypeError, "Expected a dense tensor of real numbers, but got"),
        ((torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "fp16"), {}, TypeError,
         "Expected a dtype with one number per element, but got"),
    ],
    ids=str,
)  # fmt: skip
def test_encode_refuses_bad_arguments(arguments: tuple, options: dict, error: type, message: str) -> None:
    refuses(error, message, lambda: codec.encode(*arguments, **options))


@pytest.mark.parametrize(
    ("codes", "name", "error", "message"),
    [
        ([0, 256], "e4m3fn", ValueError, "Expected codes of e4m3fn to be from 0 to 0xff, but got 0x100"),
        ([-1, 5], "fp16", ValueError, "Expected codes of fp16 to be from 0 to 0xffff, but got -0x1"),
        (["1"], "fp16", TypeError, "Expected codes to be integers from 0 to"),
        (torch.tensor([1.0]), "fp16", TypeError, "Expected codes to be integers from 0 to "),
    ],
    ids=str,
)
def test_decode_refuses_bad_codes(codes: object, name: str, error: type, message: str) -> None:
    refuses(error, message, lambda: codec.decode(codes, name))
