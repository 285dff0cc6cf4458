"""What format, why and compare answer for formats of blocks: known facts, the JSON, and the codec's own results."""

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from lookup_run import lines, results

import halfstep
from halfstep.numerics.formats.codec import rounding_errors
from halfstep.numerics.formats.exact import parse_number


def shown(*words: str) -> str:
    return " ".join(" ".join(lines(*words, COLUMNS="80")).split())


def test_why_a_block() -> None:
    screen = shown("why", "0.1", "3", "-100", "500", "mxfp8")
    for words in (
        "The largest magnitude, 500, decides the scale. It is from 2^8 to 2^9, and 448, the largest number of e4m3fn,",
        "The rule floor takes the power of two at or below it: the scale is 2^8 / 2^8 = 2^0 = 1, 0x7f.",
        "0.1 0.1 0x1d 0.1015625 1.56 % rounded",
        "500 500 0x7e 448 -10.4 % saturated",
        "floor 0x7f 1 10.2 % ceil 0x80 2 2.48 % even 0x80 2 2.48 % rceil 0x80 2 2.48 %",
    ):
        assert words in screen
    rceil = "The rule rceil takes the least scale with which nothing saturates: the scale is 2^9 / 2^8 = 2^1 = 2, 0x80."
    assert rceil in shown("why", "500", "mxfp8_rceil")
    assert "e8m0fnu ends at 2^-127: the scale is 2^-127" in shown("why", "1e-45", "mxfp4")
    assert "e8m0fnu ends at 2^127: the scale is NaN, 0xff." in shown("why", "1e400", "1", "mxfp4")
    assert "The block has -inf: its scale is nan, 0xff." in shown("why", "1", "-inf", "mxfp4")
    assert "The block has nan: its scale is nan, 0xff." in shown("why", "inf", "nan", "1", "mxfp4")
    assert "The block has only zeros: its scale is 0, 0x00." in shown("why", "0", "-0", "nvfp4")
    screen = shown("why", "3", "6", "nvfp4")
    assert (
        "The global scale is ≈0.00223214, that over 2688 in fp32. Over 6, the largest number of e2m1fn, and" in screen
    )
    assert "it rounds to 448, 0x7e." in screen


@pytest.mark.parametrize("form", ["mxfp8_e5m2", "mxfp6_e2m3_even", "mxfp4_rceil", "nvfp4"])
def test_json_of_a_block_is_what_the_codec_stores(form: str) -> None:
    numbers = ["1/3", "-7", "0.05", "-0", "100"]
    (result,) = results("why", *numbers, form)
    coded = halfstep.encode(numbers, form)
    assert int(result["scale"]["code"], 16) == coded.scales[0] and result["decides"] == 4
    assert [int(row["code"], 16) for row in result["elements"]] == coded.codes.tolist()
    assert [float(Fraction(row["stored"]["fraction"])) for row in result["elements"]] == halfstep.decode(
        coded, form
    ).tolist()
    assert [row["input"]["text"] for row in result["elements"]] == numbers and result["format"]["name"] == form
    assert result["rms"] == pytest.approx(rounding_errors(numbers, form).relative)
    if form != "nvfp4":
        scale = Fraction(result["scale"]["value"]["fraction"])
        for row, number in zip(result["elements"], map(parse_number, numbers), strict=True):
            assert Fraction(row["value"]["fraction"]) * scale - Fraction(row["error"]["fraction"]) * scale == number


def test_formats_are_all_those_asked_for() -> None:
    assert [row["format"]["name"] for row in results("why", "1", "2")] == [
        "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"
    ]  # fmt: skip
    assert [row["format"]["name"] for row in results("why", "1", "mxfp6")] == ["mxfp6_e2m3", "mxfp6_e3m2"]
    assert results("format", "nvfp4", "fp16")[0] == halfstep.formats["nvfp4"].as_dict()
    assert "e2m1fn, 32 in a block bits 4.25 per number scale e8m0fnu: powers of two by the rule ceil" in shown(
        "format", "mxfp4_ceil"
    )
    assert "nvfp4 e2m1fn, 16 in a block 4.5 per number" in shown("format", "nvfp4", "fp16")


def test_compare_by_errors(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((8, 70)).astype(np.float32)
    x[0, 0] = np.inf
    np.save(tmp_path / "x.npy", x)
    for row in results("compare", "mxfp8", "nvfp4", "bf16", "--file", str(tmp_path / "x.npy")):
        form = row["format"]
        stored = halfstep.round_to(x, form)
        finite, size = np.isfinite(stored), 1 if form == "bf16" else halfstep.formats[form].size
        error, norm = stored[finite] - x[finite], np.sqrt(np.square(x[finite].astype(np.float64)).mean())
        assert row["not_finite"] == size == (~finite).sum() and row["largest"] == np.abs(error).max()
        assert row["zeros"] == (stored == 0).sum() and row["bits"] == halfstep.formats[form].bits
        assert row["rms"] == pytest.approx(np.sqrt(np.square(error).mean()))
        assert row["relative"] == pytest.approx(row["rms"] / norm)
    pairs = itertools.pairwise(
        results("compare", "bf16", "mxfp8_rceil", "mxfp8", "mxfp4", "--numbers", "0.1", "3", "-100", "500")
    )
    assert all(better["relative"] < worse["relative"] for better, worse in pairs)
    assert "mxfp4 4.25 22.8 % 12.9 116 2 0" in shown("compare", "mxfp4", "--numbers", "0.1", "3", "-100", "500")
