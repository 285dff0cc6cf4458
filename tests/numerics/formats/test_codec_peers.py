"""The codec beside gfloat: every code, and every value and midpoint with the floats around them.

torch, numpy and ml_dtypes are compared in tests/cli/formats/test_implementations.py.
"""

import math
from fractions import Fraction

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch

from halfstep.kernels.philox import reference_words
from halfstep.numerics.formats import arrays, codec, exact
from halfstep.numerics.formats.table import formats

pytestmark = pytest.mark.sample(3)

gfloat = pytest.importorskip("gfloat", reason="needs gfloat")
infos = pytest.importorskip("gfloat.formats")
IN_GFLOAT = {
    "fp16": infos.format_info_binary16,
    "bf16": infos.format_info_bfloat16,
    "e4m3fn": infos.format_info_ocp_e4m3,
    "e5m2": infos.format_info_ocp_e5m2,
    "e2m3fn": infos.format_info_ocp_e2m3,
    "e3m2fn": infos.format_info_ocp_e3m2,
    "e2m1fn": infos.format_info_ocp_e2m1,
    "e8m0fnu": infos.format_info_ocp_e8m0,
}
MODES = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    """Equal values, zeros by their sign; a NaN equals any NaN."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    alike = ((left == right) & (np.signbit(left) == np.signbit(right))) | (np.isnan(left) & np.isnan(right))
    wrong = np.flatnonzero(~alike)
    assert not wrong.size, (wrong.size, wrong[:3], left[wrong[:3]], right[wrong[:3]])


def both_signs(name: str, dtype: type) -> np.ndarray:
    probes = oracle.thresholds(name, dtype)[0]
    specials = [0.0, -0.0, np.inf, -np.inf] + [np.nan] * formats[name].has_nan  # ml_dtypes makes -0.0 of other NaNs
    return np.concatenate([probes, -probes, np.array(specials, dtype)])


@pytest.mark.parametrize("name", IN_GFLOAT)
def test_every_code_and_threshold_in_gfloat(name: str) -> None:
    form, codes = formats[name], np.arange(formats[name].codes)
    assert_same(codec.decode(codes, name), gfloat.decode_ndarray(IN_GFLOAT[name], codes))
    if name == "e8m0fnu":  # which has no number below 2^-127, as gfloat has (its issue 62)
        return
    values = both_signs(name, np.float64)
    if not form.has_infinity:
        values = values[~np.isinf(values)]
    for rounding, mode in MODES.items():
        for overflow in ("inf", "saturate") if form.has_infinity or form.has_nan else ("saturate",):
            theirs = gfloat.round_ndarray(IN_GFLOAT[name], values, mode, overflow == "saturate")
            assert_same(codec.round_to(values, name, rounding, overflow=overflow), theirs)


def test_other_libraries_do_not_return_the_nearest_value() -> None:
    """The table in docs/comparison.md: each of these results is not the nearest number of the format."""
    tiny, double, integer = float(np.float32(1.01 * 2.0**-127)), 1 + 2.0**-8 + 2.0**-40, 2**24 + 2**16 + 1
    text = "1.00390625000000000000000001"
    for value, name, theirs in (
        (tiny, "e8m0fnu", torch.tensor(tiny).to(torch.float8_e8m0fnu)),
        (tiny, "e8m0fnu", np.float32(tiny).astype(ml_dtypes.float8_e8m0fnu)),
        (2.0**-130, "e8m0fnu", gfloat.round_float(IN_GFLOAT["e8m0fnu"], 2.0**-130)),
        (1 + 2.0**-11 + 2.0**-40, "fp16", torch.tensor(1 + 2.0**-11 + 2.0**-40, dtype=torch.float64).half()),
        (double, "bf16", np.float64(double).astype(ml_dtypes.bfloat16)),
        (integer, "bf16", torch.tensor(integer).bfloat16()),
        (integer, "bf16", np.array(integer).astype(ml_dtypes.bfloat16)),
        (text, "bf16", np.float64(text).astype(ml_dtypes.bfloat16)),
        ("1.00048828125000000000000001", "fp16", np.float16("1.00048828125000000000000001")),
    ):
        nearest = oracle.value_of(oracle.rounded(Fraction(value), name, "nearest"), name)
        assert codec.round_to(value, name) == nearest != float(theirs), (value, name)
    nan = np.array([math.nan], np.float32).astype(ml_dtypes.float4_e2m1fn)
    assert nan.view(np.uint8).tolist() == [0x8], "-0; we raise"
    saturated = float(torch.tensor(1e9).to(torch.float8_e4m3fn)) == 448
    assert saturated == (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12))
    assert math.isnan(float(np.float32(1e9).astype(ml_dtypes.float8_e4m3fn)))


def test_the_word_of_an_element_is_that_of_the_kernels() -> None:
    seed, first = 2**63 - 12345, 2**34 + 3  # beyond 32 bits, in the middle of a group
    words = reference_words(torch.arange(first, first + 4099), seed).numpy()
    np.testing.assert_array_equal(arrays.random_words(first, 4099, seed), words)
    assert [exact.random_word(first + i, seed) for i in range(9)] == words[:9].tolist()
