"""The codec beside ml_dtypes, gfloat, softfloatpy, numpy and torch: all codes, all thresholds, and who is wrong where.

A disagreement has a test that says whose it is, and holds it against rational numbers.
"""

from __future__ import annotations

from fractions import Fraction

import codec_oracle as oracle
import codec_walk
import ml_dtypes
import numpy as np
import pytest
import torch

from halfstep.kernels.philox import reference_words
from halfstep.numerics.formats import arrays, codec, philox_words
from halfstep.numerics.formats.table import formats

pytestmark = pytest.mark.sample(3)

gfloat = pytest.importorskip("gfloat", reason="needs gfloat")
_of = pytest.importorskip("gfloat.formats")

IN_ML_DTYPES = [name for name in oracle.SMALL if formats[name].ml_dtypes]


def hand_built(name: str) -> object:
    """gfloat has no row for the FNUZ formats, but knows how to decode them."""
    form = formats[name]
    return gfloat.FormatInfo(
        name, 8, form.precision, bias=form.bias, is_signed=True, domain=gfloat.Domain.Finite, has_nz=False,
        num_high_nans=0, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip


IN_GFLOAT = {
    "fp16": _of.format_info_binary16,
    "bf16": _of.format_info_bfloat16,
    "e4m3fn": _of.format_info_ocp_e4m3,
    "e5m2": _of.format_info_ocp_e5m2,
    "e2m3fn": _of.format_info_ocp_e2m3,
    "e3m2fn": _of.format_info_ocp_e3m2,
    "e2m1fn": _of.format_info_ocp_e2m1,
    "e4m3fnuz": hand_built("e4m3fnuz"),
    "e5m2fnuz": hand_built("e5m2fnuz"),
    "e8m0fnu": _of.format_info_ocp_e8m0,
}
MODES = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    """Equal values, zeros by their sign; a NaN equals any NaN."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    alike = ((one == other) & (np.signbit(one) == np.signbit(other))) | (np.isnan(one) & np.isnan(other))
    wrong = np.flatnonzero(~alike)
    assert not wrong.size, (wrong.size, wrong[:3], one[wrong[:3]], other[wrong[:3]])


def both_signs(name: str, dtype: type) -> np.ndarray:
    probes = oracle.thresholds(name, dtype)[0]
    return np.concatenate([probes, -probes, np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)])


# ----------------------------------------------------------------------------------------------------------- all codes


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_every_code_as_ml_dtypes_reads_it(name: str) -> None:
    codes = np.arange(formats[name].codes, dtype=np.uint16 if formats[name].bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(getattr(ml_dtypes, formats[name].ml_dtypes)).astype(np.float64)
    assert_same(codec.decode(codes, name), theirs)


@pytest.mark.parametrize("name", IN_GFLOAT)
def test_every_code_as_gfloat_reads_it(name: str) -> None:
    codes = np.arange(formats[name].codes)
    assert_same(codec.decode(codes, name), gfloat.decode_ndarray(IN_GFLOAT[name], codes))


# --------------------------------------------------------------------------------------------------- all thresholds


@pytest.mark.parametrize("name", [name for name in IN_ML_DTYPES if name != "e8m0fnu"])
def test_every_threshold_as_ml_dtypes_rounds_it(name: str) -> None:
    values = both_signs(name, np.float32)
    form = formats[name]
    with np.errstate(all="ignore"):
        theirs = values.astype(getattr(ml_dtypes, form.ml_dtypes)).view(np.uint16 if form.bits == 16 else np.uint8)
    if not form.has_nan:
        values, theirs = values[:-1], theirs[:-1]  # ml_dtypes makes -0.0 of NaN there; we raise
    ours = codec.encode(values, name)
    assert_same(codec.decode(ours, name), codec.decode(theirs, name))


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", [name for name in IN_GFLOAT if name != "e8m0fnu"])
def test_every_threshold_as_gfloat_rounds_it(name: str, rounding: str) -> None:
    values = both_signs(name, np.float64)
    if not formats[name].has_nan:
        values = values[:-1]
    if not formats[name].has_infinity:
        values = values[np.isfinite(values) | np.isnan(values)]
    for overflow in ("inf", "saturate"):
        if overflow == "inf" and not (formats[name].has_infinity or formats[name].has_nan):
            continue  # gfloat raises
        theirs = gfloat.round_ndarray(IN_GFLOAT[name], values, MODES[rounding], overflow == "saturate")
        assert_same(codec.round_to(values, name, rounding, overflow=overflow), theirs)


@pytest.mark.parametrize(
    ("source", "name", "conversion"),
    [("Float32", "fp16", "f32_to_f16"), ("Float64", "fp16", "f64_to_f16"), ("Float32", "bf16", "f32_to_bf16")],
)
def test_thresholds_as_softfloat_rounds_them(source: str, name: str, conversion: str) -> None:
    """Berkeley SoftFloat as the third voice, in its five modes."""
    soft = pytest.importorskip("softfloatpy", reason="needs softfloatpy, Python 3.11 or later")
    modes = {"nearest": 0, "toward_zero": 1, "down": 2, "up": 3, "nearest_away": 4}
    kind, convert = getattr(soft, source), getattr(soft, conversion)
    dtype = np.float32 if source == "Float32" else np.float64
    values = np.random.default_rng(0).choice(both_signs(name, dtype)[:-1], 3000, replace=False)
    before = soft.get_rounding_mode()
    try:
        for rounding, number in modes.items():
            soft.set_rounding_mode(soft.RoundingMode(number))
            theirs = [
                int.from_bytes(convert(kind.from_bytes(value.tobytes()[::-1])).to_bytes(), "big") for value in values
            ]
            np.testing.assert_array_equal(codec.encode(values, name, rounding), theirs)
    finally:
        soft.set_rounding_mode(before)


@pytest.mark.parametrize("name", codec_walk.FORMATS)
def test_patterns_all_over_fp32_as_torch_and_ml_dtypes_convert_them(name: str) -> None:
    """What `make exhaustive` does for all 2^32, for every 4099th: no difference without a reason."""
    counted = codec_walk.walk(name, step=4099)
    assert "unexplained" not in counted
    reasons = {key for key in counted if ":" in key and not key.endswith("alike")}
    both = "between 2^-127 and 1.5 * 2^-127 goes to 2^-126, which is farther"
    assert reasons == {
        "e4m3fn": {"torch: saturates, infinities too, since 2.12"} if codec_walk.torch_saturates() else set(),
        "e8m0fnu": {f"torch: {both}", f"ml_dtypes: {both}", "ml_dtypes: zero is NaN",
                    "torch: drops the sign of negative numbers"},
    }.get(name, set())  # fmt: skip


# -------------------------------------------------------------------------------------------------------- who is wrong


def nearest(value: Fraction, name: str) -> float:
    return float(oracle.value_of(oracle.rounded(value, name, "nearest"), name))


def test_e8m0_just_above_its_least_number() -> None:
    """torch and ml_dtypes round everything between 2^-127 and 2^-126 up, though the first is nearer up to halfway."""
    value = np.array([1.01 * 2.0**-127], np.float32)
    assert nearest(Fraction(float(value[0])), "e8m0fnu") == 2.0**-127
    assert codec.encode(value, "e8m0fnu").tolist() == [0]
    assert codec_walk.by_torch(value, "e8m0fnu").tolist() == [1]
    assert value.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [1]


def test_e8m0_below_its_least_number() -> None:
    """gfloat returns a number that the format does not hold (its issue 62)."""
    assert gfloat.round_ndarray(IN_GFLOAT["e8m0fnu"], np.array([2.0**-130])).tolist() == [2.0**-130]
    assert codec.round_to(2.0**-130, "e8m0fnu") == 2.0**-127


def test_double_rounding_of_float64() -> None:
    """torch goes through fp32 on the way from fp64 to fp16, bf16 and FP8; ml_dtypes too. numpy's fp16 does not."""
    for name, power in (("fp16", 11), ("bf16", 8), ("e4m3fn", 4)):
        value = 1 + 2.0**-power + 2.0**-40  # above the midpoint of 1 and its successor by less than fp32 sees
        right = nearest(Fraction(value), name)
        assert right == 1 + 2.0 ** (1 - power)
        assert codec.round_to(value, name) == right == codec.round_to(np.array([value]), name)[0]
        assert torch.tensor(value, dtype=torch.float64).to(getattr(torch, formats[name].torch)).double().item() == 1.0
        if name == "fp16":
            assert float(np.float16(value)) == right
        else:
            assert float(np.float64(value).astype(getattr(ml_dtypes, formats[name].ml_dtypes))) == 1.0


def test_double_rounding_of_integers() -> None:
    value = 2**24 + 2**16 + 1
    assert nearest(Fraction(value), "bf16") == 2**24 + 2**17
    assert codec.round_to(value, "bf16") == codec.round_to(np.array([value]), "bf16")[0] == 2**24 + 2**17
    assert torch.tensor(value).bfloat16().item() == 2**24
    assert float(np.array([value]).astype(ml_dtypes.bfloat16)[0]) == 2**24


def test_double_rounding_of_texts() -> None:
    text = "1.00048828125000000000000001"  # above the midpoint by less than float64 sees
    right = nearest(Fraction(text), "fp16")
    assert right == 1 + 2.0**-10
    assert codec.round_to(text, "fp16") == right and codec.round_to([text], "fp16").tolist() == [right]
    assert float(np.float16(text)) == 1.0


def test_overflow_of_e4m3fn() -> None:
    """torch saturates since 2.12, infinities too; ml_dtypes gives NaN. Both are to be had here, by name."""
    values = np.array([464.0, 465.0, np.inf, -1e9], np.float32)
    theirs = values.astype(ml_dtypes.float8_e4m3fn).astype(float)
    assert_same(codec.round_to(values, "e4m3fn"), theirs)
    assert codec.round_to(values, "e4m3fn", overflow="saturate").tolist() == [448, 448, 448, -448]
    if codec_walk.torch_saturates():
        assert torch.tensor(values).to(torch.float8_e4m3fn).float().tolist() == [448, 448, 448, -448]


def test_nan_in_formats_without() -> None:
    """ml_dtypes makes -0.0 of it without a word, gfloat raises, and so does the codec."""
    nan = np.array([np.nan], np.float32)
    assert nan.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist() == [0x8]
    with pytest.raises(ValueError, match="No NaN"):
        gfloat.round_float(IN_GFLOAT["e2m1fn"], float("nan"))
    with pytest.raises(ValueError, match="Expected values without NaN for e2m1fn, which has none, but got one: pass"):
        codec.encode(nan, "e2m1fn")


def test_the_word_of_an_element_is_that_of_the_kernels() -> None:
    seed, first = 2**63 - 12345, 2**34 + 3  # beyond 32 bits, in the middle of a group
    want = reference_words(torch.arange(first, first + 4099), seed).numpy()
    np.testing.assert_array_equal(arrays.random_words(first, 4099, seed), want)
    assert [philox_words.word(first + i, seed) for i in range(9)] == want[:9].tolist()
