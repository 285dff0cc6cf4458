"""Formats of blocks: the rules by hand, by their definitions in rational numbers, and beside ml_dtypes and gfloat."""

import math
from fractions import Fraction

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from block_values import midpoints_of_nvfp4, some_blocks

import halfstep
from halfstep.kernels.formats import SCALE_RULES
from halfstep.kernels.philox import reference_words
from halfstep.numerics.formats import blocks
from halfstep.numerics.formats.table import BlockFormat, UnknownFormat, formats

OF_OCP = {"mxfp8_e4m3": 448, "mxfp8_e5m2": 57344, "mxfp6_e2m3": 7.5, "mxfp6_e3m2": 28, "mxfp4": 6}  # largest elements
NAMES = [f"{name}_{rule}" for name in OF_OCP for rule in SCALE_RULES] + ["nvfp4"]
NAN, INF = math.nan, math.inf


def dtype_of(form: BlockFormat) -> type:
    return getattr(ml_dtypes, form.element.ml_dtypes)


# ------------------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("name", "values", "codes", "scale"),
    [
        # 500 = 1.95 * 2^8: with the scale 1 it is beyond 448 and saturates; 3 is 0 1000 100.
        ("mxfp8_e4m3", [3, -100, 500], [0x44, 0xEC, 0x7E], 127),
        ("mxfp8_e4m3_ceil", [3, -100, 500], [0x3C, 0xE4, 0x78], 128),
        ("mxfp8_e4m3_even", [3, -100, 500], [0x3C, 0xE4, 0x78], 128),  # with three bits 500 is 512
        ("mxfp8_e4m3_even", [3, -100, 495], [0x44, 0xEC, 0x7E], 127),  # and 495 is 480
        ("mxfp8_e4m3_rceil", [3, -100, 448], [0x44, 0xEC, 0x7E], 127),
        ("mxfp8_e4m3_rceil", [3, -100, 449], [0x3C, 0xE4, 0x76], 128),
        ("mxfp8_e4m3_ceil", [1, 256], [0x38, 0x78], 127),  # a power of two needs no more
        ("mxfp8_e5m2", [1, 2.0**-20], [0x78, 0x28], 112),
        ("mxfp6_e2m3", [1, 7.5, -0.125], [8, 31, 33], 127),
        ("mxfp6_e3m2", [28, 0.0625, -0.03125], [31, 1, 32], 127),  # a tie between 0 and 1/16 goes to zero
        ("mxfp4", [6, 5, 2.5, 0.25, 0.75, -7.9], [7, 6, 4, 0, 2, 15], 127),
        ("mxfp4", [0, -0.0], [0, 8], 0),
        ("mxfp4", [2.0**-126, 2.0**-127], [4, 2], 0),  # over 2^-127, the least scale
        ("mxfp8", [2.0**-149, 2.0**-127], [0, 0x38], 0),
        ("mxfp4", [1, NAN], [0, 0], 255),
        ("mxfp4", [1, -INF], [0, 0], 255),
        ("mxfp8_e5m2", [1, INF], [0, 0], 255),  # which has an infinity; then the others would become zeros
        ("mxfp4", ["2^129", 1], [6, 0], 254),
        ("mxfp4", ["2^130", 1], [0, 0], 255),
        ("mxfp4", [2.0**127, 2.0**124], [6, 1], 252),
        # 6 is the largest: g = 6 / 2688, and s = 448; the second block has a scale of 0.
        ("nvfp4", [6, -1, 0.3, 0.2] + 12 * [0] + [1e-6, -1e-6], [7, 10, 1, 0, *12 * [0], 0, 8], [0x7E, 0]),
        ("nvfp4", [0, -0.0], [0, 8], 0),
        ("nvfp4", [*16 * [1], 1, NAN], [*16 * [7], 0, 0], [0x7E, 0x7F]),  # the other block stays
        ("nvfp4", [*16 * [1], 1, INF], [*16 * [7], 0, 0], [0x7E, 0x7F]),
    ],
)
def test_by_hand(name: str, values: list, codes: list, scale: int | list) -> None:
    coded = halfstep.encode(values, name)
    assert (coded.codes.tolist(), coded.scales.tolist()) == (codes, np.atleast_1d(scale).tolist())
    for dtype in () if str in map(type, values) else (np.float32, np.float64):
        again = halfstep.encode(np.array(values, dtype), name)
        assert (again.codes.tolist(), again.scales.tolist()) == (codes, coded.scales.tolist())
    if len(values) <= formats[name].size:
        g = 1 if coded.global_scale is None else float(coded.global_scale)
        assert blocks.encode_block(values, name, global_scale=g) == (codes, np.atleast_1d(scale)[0])


def test_overflow_of_scales() -> None:
    for name, code, largest in (("mxfp4", 254, 6 * 2.0**127), ("nvfp4", 0x7E, 6 * 448.0)):
        options = {"global_scale": 1.0} if name == "nvfp4" else {}
        for values in ([1.0, -(2.0**131)], [1, -INF], [1.0, -INF]):  # as floats and as other numbers
            assert np.isnan(halfstep.round_to(values, name, **options)).all()
            coded = halfstep.encode(values, name, overflow="saturate", **options)
            assert coded.scales.tolist() == [code]
            assert halfstep.decode(coded, name).tolist()[1] == -largest
    assert halfstep.round_to([1.0, NAN], "mxfp4", nan="zero").tolist() == [1, 0]
    assert halfstep.round_to(["1", "nan", 7], "mxfp4", nan="zero").tolist() == [1, 0, 6]
    for values in ([1.0, NAN], ["1", "nan"]):
        with pytest.raises(ValueError, match="Expected values without NaN"):
            halfstep.encode(values, "mxfp4", nan="raise")


# ----------------------------------------------------------------------------------------------------------- oracles


def scale_of(largest: Fraction, name: str) -> Fraction:
    """The scale by the definition of its rule, found among all powers of two."""
    largest_element, form = Fraction(OF_OCP[name.rsplit("_", 1)[0]]), formats[name]
    top = max(Fraction(2) ** e for e in range(20) if 2**e <= largest_element)
    powers = [Fraction(2) ** e for e in range(-127, 128)]
    floor = max([power for power in powers if power * top <= largest], default=powers[0])
    match name.rsplit("_", 1)[1]:
        case "ceil":
            return next(power for power in powers if largest <= power * top)
        case "rceil":
            return next(power for power in powers if largest <= power * largest_element)
        case "even":  # the step of numbers with as many bits as the element's
            step = floor * top / 2**form.element.mantissa
            rounded = (largest / step + Fraction(1, 2)) // 1 * step
            return floor * (2 if rounded >= 2 * floor * top else 1)
    return floor


@pytest.mark.parametrize("name", NAMES[:-1])
def test_the_rules_by_their_definitions(name: str) -> None:
    form = formats[name]
    for row in some_blocks(60, form.size).tolist():
        numbers = [Fraction(value) for value in row]
        scale = scale_of(max(map(abs, numbers)), name)
        codes, code = blocks.encode_block(row, name)
        assert oracle.value_of(code, "e8m0fnu") == scale, row
        limit, element = Fraction(form.element.max), form.element.name
        saturated = [min(max(number / scale, -limit), limit) for number in numbers]
        values = [oracle.value_of(each, element) for each in codes]
        assert values == [oracle.value_of(oracle.rounded(x, element, "nearest"), element) for x in saturated], row
        assert blocks.decode_block(codes, code, name) == [Fraction(value) * scale for value in values]


def by_ml_dtypes(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and values of blocks in the last dimension, by numpy's fp32 and ml_dtypes."""
    form, dtype = formats[name], dtype_of(formats[name])
    largest, top = np.abs(values).max(-1, keepdims=True), np.float32(form.element.max)
    if name == "nvfp4":
        g = np.float32(max(largest.max() / np.float32(2688), np.float32(2.0**-117)))
        with np.errstate(all="ignore"):
            scales = (largest / np.float32(6) / g).astype(ml_dtypes.float8_e4m3fn)
            scaled = values * (np.float32(1) / g / scales.astype(np.float32))
        scaled = np.where(scales == 0, np.copysign(np.float32(0), values), scaled)
        unit = scales.astype(np.float64) * np.float64(g)
    else:
        mantissa, exponent = np.frexp(largest.astype(np.float64))  # mantissa from 1/2 to 1
        rule = name.rsplit("_", 1)[1]
        limit = {"floor": 1, "ceil": 0.5, "even": 1 - 2.0 ** -(form.element.mantissa + 2)}
        limit = limit.get(rule, np.frexp(float(top))[0])
        more = mantissa >= limit if rule == "even" else mantissa > limit
        exponent = np.where(largest == 0, -127, exponent - np.frexp(float(top))[1] + more).clip(-127, 127)
        unit = np.ldexp(1.0, exponent)
        scaled, scales = values / unit, (exponent + 127).astype(np.uint8)
    elements = scaled.clip(-top, top).astype(np.float32).astype(dtype)
    return elements.view(np.uint8), scales.view(np.uint8)[..., 0], elements.astype(np.float64) * unit


@pytest.mark.parametrize("name", NAMES)
def test_100000_blocks_beside_ml_dtypes(name: str) -> None:
    values = some_blocks(100_000 if name.endswith(("floor", "nvfp4")) else 20_000, formats[name].size)
    values = values * np.float32(2.0**-20) if name == "nvfp4" else values  # blocks far below the largest are zeros
    codes, scales, decoded = by_ml_dtypes(values, name)
    coded = halfstep.encode(values, name)
    np.testing.assert_array_equal(coded.scales[:, 0], scales)
    np.testing.assert_array_equal(coded.codes, codes)
    np.testing.assert_array_equal(halfstep.decode(coded, name), decoded)


def test_fp32_arithmetic_of_nvfp4() -> None:
    g = np.float32(0.7)
    rows, quotients, scales = midpoints_of_nvfp4(300, g)
    coded = halfstep.encode(rows, "nvfp4", global_scale=float(g))
    expected = quotients.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(coded.codes, expected)
    np.testing.assert_array_equal(coded.scales, scales.view(np.uint8))
    for row, codes, scale in zip(rows.tolist(), expected.tolist(), coded.scales.tolist(), strict=True):
        assert blocks.encode_block(row, "nvfp4", global_scale=float(g)) == (codes, scale[0])
    once = rows / (np.float64(g) * scales.astype(np.float64))
    assert (once.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) != expected).sum() > 100


@pytest.mark.parametrize(
    "count", [pytest.param(30, id="30"), pytest.param(31_250, id="31250", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("floor", "nvfp4"))])
def test_beside_gfloat_and_the_exact_rule(name: str, count: int) -> None:
    gfloat = pytest.importorskip("gfloat", reason="needs gfloat")
    infos = pytest.importorskip("gfloat.formats")
    form = formats[name]
    values = some_blocks(count, form.size, seed=1)
    coded, decoded = halfstep.encode(values, name), halfstep.round_to(values, name)
    g = 1.0 if coded.global_scale is None else float(coded.global_scale)
    theirs = "mxfp4_e2m1" if name == "mxfp4_floor" else name.removesuffix("_floor")
    info = getattr(infos, f"format_info_{theirs}", None)
    assert (info is None) == (name == "nvfp4")
    for row, codes, scale, stored in zip(values, coded.codes.tolist(), coded.scales, decoded, strict=True):
        assert blocks.encode_block(row.tolist(), name, global_scale=g) == (codes, scale[0])
        exact = blocks.decode_block(codes, int(scale[0]), name, g)
        assert list(map(float, exact)) == stored.tolist()
        if info is not None:
            theirs = gfloat.quantize_block(info, row.astype(np.float64), gfloat.compute_scale_amax)
            np.testing.assert_array_equal(theirs, stored)


# ------------------------------------------------------------------------------------------------- arrays and rounding


@pytest.mark.parametrize("rounding", ["nearest_away", "toward_zero", "up", "down", "odd", "stochastic"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp6_e3m2_ceil", "mxfp4_even", "nvfp4"])
def test_roundings_and_kinds_of_numbers(name: str, rounding: str) -> None:
    form = formats[name]
    values = some_blocks(24, form.size, seed=2).astype(np.float64)
    if name != "nvfp4":  # whose numbers are rounded to fp32
        values[:12] *= 2.0**-400  # below the least scale
        values[12:16] *= 1 + 2.0**-40
    options = {"seed": 7} if rounding == "stochastic" else {}
    coded = halfstep.encode(values, name, rounding, **options)
    listed = halfstep.encode(values.astype(object), name, rounding, **options)
    words = reference_words(torch.arange(values.size), 7).reshape(values.shape).tolist()
    g = 1.0 if coded.global_scale is None else float(coded.global_scale)
    for row, word, codes, scale in zip(values.tolist(), words, coded.codes, coded.scales, strict=True):
        expected = blocks.encode_block(row, name, rounding, words=word, global_scale=g)
        assert (codes.tolist(), scale[0]) == expected
    np.testing.assert_array_equal(listed.codes, coded.codes)
    np.testing.assert_array_equal(listed.scales, coded.scales)


@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), (-1, -2)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_axes(name: str, axis: int | tuple[int, int]) -> None:
    """Against a loop over the blocks; the last ones are short, and random bits follow the position."""
    values = np.random.default_rng(3).standard_normal((35, 3, 70)).astype(np.float32)
    size, axes = formats[name].size, {each % 3 for each in np.atleast_1d(axis)}
    for rounding, options in (("nearest", {}), ("stochastic", {"seed": 5, "offset": 11})):
        coded = halfstep.encode(torch.from_numpy(values), name, rounding, axis=axis, **options)
        words = reference_words(torch.arange(11, 11 + values.size), 5).reshape(values.shape).numpy()
        assert coded.codes.dtype == coded.scales.dtype == torch.uint8
        g = 1.0 if coded.global_scale is None else float(coded.global_scale)
        shape = tuple(-(-n // size) if each in axes else n for each, n in enumerate(values.shape))
        assert coded.scales.shape == shape
        for index in list(np.ndindex(shape))[::29]:
            part = tuple(slice(at * size, at * size + size) if each in axes else at for each, at in enumerate(index))
            expected = blocks.encode_block(
                values[part].ravel().tolist(), name, rounding, words=words[part].ravel().tolist(), global_scale=g
            )
            assert (coded.codes.numpy()[part].ravel().tolist(), int(coded.scales[index])) == expected
        decoded = halfstep.decode(coded, name, axis=axis)
        assert decoded.dtype == torch.float64 and (decoded - torch.from_numpy(values)).abs().max() < 1.2


def test_names_and_refusals() -> None:
    assert formats["mxfp8"] is formats["mxfp8_e4m3"] is formats["MXFP8-E4M3-floor"]
    assert formats["mxfp8_rceil"].name == "mxfp8_e4m3_rceil" and formats["nvfp4"].element is formats["e2m1"]
    assert [formats[name].bits for name in ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4")] == [8.25, 6.25, 4.25, 4.5]
    for call, message in (
        (lambda: formats["mxfp6"], "format 'mxfp6' is ambiguous: choose 'mxfp6_e2m3' or 'mxfp6_e3m2'"),
        (lambda: formats["nvfp4_ceil"], "did you mean 'nvfp4'?"),
        (lambda: formats.element("mxfp4"), "but got 'mxfp4', one of blocks: choose that of its elements, 'e2m1fn', or"),
        (lambda: halfstep.encode([1], "fp16", axis=0), "Expected axis to be None for fp16, which has no blocks"),
        (lambda: halfstep.encode([1], "mxfp4", global_scale=1), "Expected global_scale to be None for mxfp4"),
        (lambda: halfstep.encode([1], "nvfp4", global_scale=0), "from 2^-117 to 2^118, but got 0"),
        (lambda: halfstep.encode(1, "mxfp4"), "Expected axis to be a dimension, or a pair of them, of the 0 of"),
        (lambda: halfstep.encode([1], "mxfp4", axis=(0, -1)), "but got (0, -1)"),
        (lambda: halfstep.encode([[[1]]], "mxfp4", axis=(0, 1, 2)), "but got (0, 1, 2)"),
        (lambda: halfstep.decode(([1], [1, 2]), "mxfp4"), "Expected scales of shape (1,) for codes of shape (1,)"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert message in str(error.value)
    assert issubclass(UnknownFormat, ValueError)
