"""Explanations: the rule that decided, stochastic rounding and double rounding, each compared with the codec."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lookup_run import STEADY, lines, results

from halfstep.cli.formats.rules import chances, double_roundings
from halfstep.cli.formats.values import encoded, overflow_threshold, overflows
from halfstep.numerics.formats.exact import decode_exact, encode_exact
from halfstep.numerics.formats.table import formats


def why(number: str, format: str, *more: str) -> dict[str, Any]:
    (found,) = results("why", number, format, *more)
    return found


@pytest.mark.parametrize(
    ("number", "format", "rule", "says"),
    [
        ("2.5", "fp16", "exact", ["nothing is rounded", "2.498046875 below and 2.501953125 above"]),
        ("1.0001", "fp16", "nearer", ["2^-10 = 0.0009765625 apart", "0.1024 ulp above 1", "nearer one is taken: 1."]),
        ("1+2^-11", "fp16", "tie", ["exactly halfway between 1 and 1.0009765625", "0 01111 0000000000 ends in 0"]),
        ("1+3*2^-11", "fp16", "tie", ["0 01111 0000000010 ends in 0 and is taken, 0 01111 0000000001 ends in 1"]),
        ("-1-2^-11", "fp16", "tie", ["exactly halfway between -1.0009765625 and -1", "1 01111 0000000000 ends in 0"]),
        ("6e-8", "fp16", "nearer", ["Below 2^-14", "all 2^-24 = 5.9604644775390625e-8 apart", "precision 1 is"]),
        ("1e-5", "fp16", "nearer", ["Of the 11 bits of precision 8 are left"]),
        ("2^-25", "fp16", "tie", ["Ties go to even", "no larger than 2^-25 = 2.98023223876953125e-8", "becomes zero"]),
        ("2^-26", "fp16", "nearer", ["smaller than the least of them", "becomes zero"]),
        ("65504.5", "fp16", "nearer", ["below 65536", "The nearer one is taken: 65504."]),
        ("65520", "fp16", "overflow", ["largest number of fp16 is 65504", "65536 would come next; halfway lies 65520",
                                        "lies at it", "halfway rounds away too", "Infinity is stored: 0x7c00"]),
        ("1e9", "fp16", "overflow", ["lies beyond it"]),
        ("-1e9", "fp16", "overflow", ["lowest number of fp16 is -65504", "-65536 would come next", "stored: 0xfc00"]),
        ("464", "e4m3", "tie", ["0 1111 110 ends in 0 and is taken, 0 1111 111 ends in 1"]),
        ("500", "e4m3", "overflow", ["halfway lies 464", "still rounds to the largest number, whose last bit is 0",
                                      "e4m3fn has no infinity: NaN is stored: 0x7f"]),
        ("7", "e2m1", "overflow", ["e2m1fn has neither infinity nor NaN: the largest number is stored: 6, 0x7"]),
        ("-500", "int8", "overflow", ["lowest number of int8 is -128", "halfway lies -128.5", "stored: -128, 0x80"]),
        ("2.5", "int8", "tie", ["The numbers of int8 are 1 apart", "0 0000010 ends in 0 and is taken"]),
        ("-128.5", "int8", "tie", ["halfway between -129 and -128", "to even: 1 0000000 ends in 0 and is taken."]),
        ("3", "e8m0", "tie_up", ["powers of two", "exactly halfway between 2 and 4", "Ties go away from zero"]),
        ("-3", "e4m0", "tie_up", ["exactly halfway between -4 and -2", "Ties go away from zero"]),
        ("192", "e4m0", "overflow", ["largest number of e4m0 is 128", "one significant bit there is no even number"]),
        ("2^-7", "e4m0", "tie", ["Ties go to even: 0 0000 ends in 0 and is taken, 0 0001 ends in 1", "becomes zero"]),
        ("0", "e8m0", "least", ["e8m0fnu has no zero", "2^-127"]),
        ("-3", "e8m0", "sign", ["e8m0fnu has no sign, and nan stands for negative numbers"]),
        ("1e-60", "e8m0", "least", ["everything below its least number, 2^-127"]),
        ("inf", "fp16", "special", ["An infinity is not rounded", "Infinity is stored: 0x7c00"]),
        ("inf", "e4m3", "special", ["has no infinity: NaN is stored"]),
        ("nan", "fp16", "special", ["NaN is not rounded", "NaN is stored: 0x7e00"]),
        ("nan", "e2m1", "special", ["e2m1fn has no NaN, so that nothing can stand for it"]),
    ],
)  # fmt: skip
def test_the_rule_and_its_words(number: str, format: str, rule: str, says: list[str]) -> None:
    found = why(number, format)
    assert found["rule"] == rule
    told = " ".join(found["explanation"])
    for words in says:
        assert words in told
    shown = " ".join(line.strip() for line in lines("why", number, format, COLUMNS="80"))
    for sentence in found["explanation"]:
        assert sentence in shown


def test_formats_may_be_named_as_in_encode() -> None:
    assert results("why", "0.1", "-f", "fp16", "bf16") == results("why", "0.1", "fp16", "bf16")
    assert [one["format"] for one in results("why", "0.1", "fp16", "-f", "bf16")] == ["fp16", "bf16"]


def test_saturation_is_told() -> None:
    assert (
        "the largest number is stored: 65504, 0x7bff."
        in why("1e9", "fp16", "--overflow", "saturate")["explanation"][-1]
    )
    assert (
        why("1e9", "e2m1", "--overflow", "nan")["explanation"][-1]
        == "e2m1fn has no NaN, so that nothing can stand for it."
    )


def test_neighbours_and_roundings() -> None:
    found = why("-1.3", "bf16")
    assert (found["below"]["code"], found["above"]["code"]) == ("0xbfa7", "0xbfa6")
    assert found["midpoint"]["decimal"] == "-1.30078125"
    assert found["ulp"]["hex"] == "0x1p-7"
    assert found["roundings"] == {
        "nearest": "0xbfa6",
        "nearest_away": "0xbfa6",
        "toward_zero": "0xbfa6",
        "up": "0xbfa6",
        "down": "0xbfa7",
        "odd": "0xbfa7",
    }
    probability = {one["code"]: Fraction(one["probability"]) for one in found["stochastic"]}
    assert set(probability) == {"0xbfa6", "0xbfa7"} and sum(probability.values()) == 1
    assert abs(probability["0xbfa7"] - Fraction(4, 10)) < Fraction(1, 2**31)


_FORMATS = st.sampled_from([*formats, "e4m0", "e5m7", "e3m4fn", "e2m2fnuz"])
_NUMBERS = st.fractions(max_denominator=2**40) | st.builds(
    lambda fraction, power: fraction * Fraction(2) ** power,
    st.fractions(min_value=-4, max_value=4, max_denominator=1000),
    st.integers(-160, 160),
)


@settings(STEADY, max_examples=200)
@given(_NUMBERS, _FORMATS, st.integers(0, 2**63 - 1))
def test_chance_stores_one_of_the_two(number: Fraction, format: str, seed: int) -> None:
    row = formats[format]
    expected = chances(number, row, "inf")
    assert sum(share for share, _ in expected) == 1
    drawn = encode_exact(number, row, "stochastic", seed=seed)
    assert drawn in [found.stored.code for _, found in expected if found.stored]


@pytest.mark.parametrize(
    ("number", "format"),
    [
        ("1.3", "e4m3"),
        ("2^-20", "fp16"),
        ("100/3", "fp16"),
        ("65530", "fp16"),
        ("0.3", "int8"),
        ("5", "e8m0"),
        ("-2^-140/3", "bf16"),
    ],
)
def test_chance_is_as_often_as_told(number: str, format: str) -> None:
    found = why(number, format)["stochastic"]
    drawn = [encode_exact(number, format, "stochastic", seed=seed) for seed in range(2000)]
    for one in found:
        share, seen = float(Fraction(one["probability"])), drawn.count(int(one["code"], 16)) / len(drawn)
        assert abs(seen - share) < 5 * math.sqrt(share * (1 - share) / len(drawn)) + 1e-9


@STEADY
@given(_NUMBERS, _FORMATS)
def test_overflow_begins_at_the_threshold(number: Fraction, format: str) -> None:
    """Against the codec, which says infinity or NaN where the format has one."""
    row = formats[format]
    assume(row.has_nan or row.has_infinity)
    threshold = overflow_threshold(row)
    for one in (
        number,
        threshold,
        threshold * (1 - Fraction(1, 2**70)),
        threshold * (1 + Fraction(1, 2**70)),
        -threshold,
    ):
        stored = decode_exact(encode_exact(one, row), row)
        assert overflows(one, row) == (isinstance(stored, float) and stored != 0)


@pytest.mark.parametrize("format", ["e2m3fn", "e3m2fn", "e2m1fn", "int8"])
def test_overflow_begins_at_the_threshold_where_nothing_else_is_stored(format: str) -> None:
    """Against the same format with one exponent more, in which the numbers go on."""
    row = formats[format]
    for sign in (1, -1):
        threshold = overflow_threshold(row, negative=sign < 0)
        largest = Fraction(row.max if sign > 0 else -row.lowest)
        following = 2 * threshold - largest
        even = row.largest_code % 2 == 0 if format != "int8" or sign > 0 else True
        assert overflows(sign * threshold, row) is not even
        assert not overflows(sign * (threshold - Fraction(1, 10**9)), row)
        assert overflows(sign * (threshold + Fraction(1, 10**9)), row)
        assert following == largest + Fraction(row.ulp(row.max))


@STEADY
@given(_NUMBERS, _FORMATS)
def test_rounding_twice_is_what_the_codec_makes_of_it(number: Fraction, format: str) -> None:
    row = formats[format]
    direct = encode_exact(number, row)
    told = {tuple(one.name for one in found.via): found.found.stored for found in double_roundings(number, row)}
    held: Any = number
    via: tuple[str, ...] = ()
    for name in ("fp64", "fp32"):
        if formats[name].bits <= row.bits:
            break
        via, held = (*via, name), decode_exact(encode_exact(held, name), name)
        twice = encode_exact(held, row)
        if twice != direct and decode_exact(twice, row) != decode_exact(direct, row):
            stored = told.pop(via)
            assert stored is not None and stored.code == twice
    assert told == {}


def test_rounding_twice_is_told() -> None:
    found = why("1 + 2^-11 + 2^-40", "fp16")
    assert [(one["via"], one["code"]) for one in found["rounded_twice"]] == [(["fp64", "fp32"], "0x3c00")]
    assert [one["via"] for one in why("1 + 2^-11 + 2^-80", "fp16")["rounded_twice"]] == [["fp64"], ["fp64", "fp32"]]
    assert why("1.0001", "fp16")["rounded_twice"] == []
    shown = " ".join(line.strip() for line in lines("why", "1 + 2^-11 + 2^-40", "fp16", COLUMNS="80"))
    assert "first to fp64 and fp32, the number is 1.00048828125, and that becomes 1 instead of 1.0009765625" in shown


@pytest.mark.parametrize(
    ("number", "format", "drawn"),
    [("1.7", "fp16", True), ("65510", "fp16", True), ("65530", "fp16", True), ("65536", "fp16", False),
     ("1", "fp16", False), ("inf", "fp16", False), ("-3", "e8m0", False), ("0", "e8m0", True), ("-65510", "fp16", True),
     ("1e-9", "fp16", True), ("-1e-9", "fp16", True), ("470", "e4m3", True), ("-128.2", "int8", True)],
)  # fmt: skip
def test_a_line_is_drawn_between_neighbours(number: str, format: str, drawn: bool) -> None:
    assert any("┼" in line for line in lines("why", number, format)) == drawn


def test_the_line_marks_the_end_that_is_stored() -> None:
    def line(number: str, format: str) -> str:
        return next(line.strip() for line in lines("why", number, format) if "┼" in line)

    assert line("1.0001", "fp16").startswith("●") and line("1.0009", "fp16").endswith("●")
    assert line("-1.3", "bf16").endswith("●")
    assert "●" not in line("65530", "fp16")
    assert line("1e-9", "fp16").startswith("●") and line("-1e-9", "fp16").endswith("●")


def test_the_line_has_the_code_of_the_zero_on_its_side() -> None:
    assert lines("why", "-1e-9", "fp16")[3].split()[-1] == "0x8000"
    assert lines("why", "1e-9", "fp16")[3].split()[0] == "0x0000"


def test_encoded_says_underflow_only_of_what_is_lost() -> None:
    assert encoded(Fraction(0), formats["fp16"]).outcome == "exact"
    assert encoded(-0.0, formats["e4m3fnuz"]).outcome == "exact"
    assert encoded(Fraction(1, 2**30), formats["fp16"]).outcome == "underflow"
    assert encoded(Fraction(1, 2**130), formats["e8m0fnu"]).outcome == "rounded"
