"""The certificate: what all 2^32 fp32 inputs become, recorded once, and computed again by `make exhaustive`.

`python tests/support/codec_walk.py --record` writes codec_certificate.json; docs/exactness.md prints it.
"""

from __future__ import annotations

import json

import codec_oracle as oracle
import codec_walk
import numpy as np
import pytest

from halfstep.numerics.formats import codec

RECORDED = json.loads(codec_walk.CERTIFICATE.read_text())


def test_the_certificate_covers_every_conversion_and_leaves_nothing_unexplained() -> None:
    assert set(RECORDED) == set(codec_walk.FORMATS)
    for name, counted in RECORDED.items():
        assert counted["patterns"] == 2**32 and counted["NaN"] == 2 * (2**23 - 1)
        assert "unexplained" not in counted
        for who in ("torch", "ml_dtypes"):
            told = [count for key, count in counted.items() if key.startswith(who)]
            assert sum(told) in ((0, 2**32) if who == "ml_dtypes" and name == "fp16" else (2**32,))


@pytest.mark.parametrize("count", [3, 5])
def test_a_difference_without_a_reason_is_seen(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk can fail: it reports a peer that has `count` wrong results."""
    right = codec_walk.by_torch

    def wrong(values: np.ndarray, name: str) -> np.ndarray:
        codes = right(values, name).copy()
        codes[1000 : 1000 + count] ^= 1
        return codes

    monkeypatch.setattr(codec_walk, "by_torch", wrong)
    assert codec_walk.walk("bf16", step=65537)["unexplained"] == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", codec_walk.FORMATS)
def test_all_patterns_to_nearest_even(name: str) -> None:
    counted = codec_walk.walk(name)
    assert counted["sha256"] == RECORDED[name]["sha256"]
    assert "unexplained" not in counted
    if codec_walk.torch_saturates():  # the counts of torch's differences are those of 2.12 and later
        assert counted == RECORDED[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounding", ["nearest_away", "toward_zero", "up", "down", "odd"])
@pytest.mark.parametrize("name", codec_walk.FORMATS)
def test_patterns_all_over_in_the_other_modes(name: str, rounding: str) -> None:
    """Every 257th pattern, 2^24 in all: each code is the right one of the two that enclose the value.

    By a search in the oracle's table, in float64, where values, midpoints and differences of neighbours are exact.
    """
    ladder = oracle.ladder(name)
    for part in range(4):
        patterns = np.arange(part * 2**30, (part + 1) * 2**30, 257, dtype=np.uint64).astype(np.uint32)
        values = patterns.view(np.float32)
        values = values[np.isfinite(values) & (np.abs(values) < ladder[-2])].astype(np.float64)
        negative = np.signbit(values)
        if name == "e8m0fnu":
            values, negative = values[~negative], negative[~negative]
        magnitude = np.abs(values)
        if not magnitude.size:
            continue
        below = np.searchsorted(ladder, magnitude, side="right") - 1
        exact = ladder[below.clip(0)] == magnitude
        middle = (ladder[below.clip(0)] + ladder[below.clip(0) + 1]) / 2
        even = below % 2 == 0 if name != "e8m0fnu" else np.zeros(below.shape, bool)
        up = {
            "nearest_away": magnitude >= middle,
            "toward_zero": np.zeros(below.shape, bool),
            "up": ~negative,
            "down": negative,
            "odd": even,
        }[rounding] & ~exact
        chosen = np.where(below < 0, 0, below + up)  # below E8M0's least number there is only itself
        codes = codec.encode(values, name, rounding).astype(np.int64)
        single = codec.encode(values.astype(np.float32), name, rounding)
        np.testing.assert_array_equal(codes, single)
        sign = 0 if name == "e8m0fnu" else oracle.SPECS[name].sign
        minus = negative & ((chosen > 0) | (not oracle.SPECS[name].nan_alone))
        np.testing.assert_array_equal(codes, chosen + minus * sign)
