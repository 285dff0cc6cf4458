"""The codec beside ml_dtypes and gfloat: every code, and every value and midpoint with the floats around them.

What each of them does otherwise is in tests/cli/formats/test_implementations.py and docs/lookup.md.
"""

from __future__ import annotations

import codec_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch

from halfstep.kernels.philox import reference_words
from halfstep.numerics.formats import arrays, codec, philox_words
from halfstep.numerics.formats.table import formats

pytestmark = pytest.mark.sample(3)

gfloat = pytest.importorskip("gfloat", reason="needs gfloat")
infos = pytest.importorskip("gfloat.formats")
IN_ML_DTYPES = [name for name in oracle.SMALL if formats[name].ml_dtypes]
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


@pytest.mark.parametrize("name", IN_ML_DTYPES)
def test_every_code_and_threshold_in_ml_dtypes(name: str) -> None:
    form, dtype = formats[name], getattr(ml_dtypes, formats[name].ml_dtypes)
    codes = np.arange(form.codes, dtype=np.uint16 if form.bits == 16 else np.uint8)
    with np.errstate(all="ignore"):
        assert_same(codec.decode(codes, name), codes.view(dtype).astype(np.float64))
        if name != "e8m0fnu":  # whose last binade they round up
            values = both_signs(name, np.float32)
            assert_same(codec.round_to(values, name), values.astype(dtype).astype(np.float64))


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


def test_the_word_of_an_element_is_that_of_the_kernels() -> None:
    seed, first = 2**63 - 12345, 2**34 + 3  # beyond 32 bits, in the middle of a group
    words = reference_words(torch.arange(first, first + 4099), seed).numpy()
    np.testing.assert_array_equal(arrays.random_words(first, 4099, seed), words)
    assert [philox_words.word(first + i, seed) for i in range(9)] == words[:9].tolist()
