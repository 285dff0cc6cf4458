"""What format, encode, decode, why and compare answer: known facts, the JSON's shape, and the codec's own results."""

from __future__ import annotations

import math
import re
import shlex
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lookup_run import STEADY, lines, results, said

from halfstep.cli.formats.commands import column_of
from halfstep.cli.formats.values import chances, double_roundings, encoded, overflow_threshold, overflows
from halfstep.cli.pages import explore
from halfstep.numerics.formats.exact import decode_exact, encode_exact, parse_number
from halfstep.numerics.formats.table import formats


def encode(number: str, format: str, *more: str) -> dict[str, Any]:
    (found,) = results("encode", number, "-f", format, *more)
    return found


@pytest.mark.parametrize(
    ("number", "format", "code", "value", "outcome"),
    [
        ("2.5", "fp16", "0x4100", "2.5", "exact"),
        ("1.0001", "fp16", "0x3c00", "1", "rounded"),
        ("-65520", "fp16", "0xfc00", "-inf", "overflow"),
        ("-2^-25", "fp16", "0x8000", "-0", "underflow"),
        ("464.001", "e4m3fn", "0x7f", "nan", "overflow"),
        ("inf", "e4m3fn", "0x7f", "nan", "overflow"),
        ("-129", "int8", "0x80", "-128", "saturated"),
        ("nan", "e5m2", "0x7e", "nan", "exact"),
        ("nan", "int8", None, None, "none"),
        ("1e-400", "fp64", "0x0000000000000000", "0", "underflow"),
        ("0.1", "e5m7", "0x05cd", "0.10009765625", "rounded"),
    ],
)
def test_what_a_number_becomes(number: str, format: str, code: str | None, value: str | None, outcome: str) -> None:
    one = encode(number, format)
    assert (one["code"], one["value"] and one["value"]["decimal"], one["outcome"]) == (code, value, outcome)


def test_a_format_without_nan_has_no_code_for_overflow_to_nan() -> None:
    assert encode("100", "e2m1fn", "--overflow", "nan")["code"] is None
    assert encode("5", "e2m1fn", "--overflow", "nan")["code"] == "0x6"


def test_options_reach_the_codec() -> None:
    assert encode("1e6", "fp16", "--overflow", "saturate")["outcome"] == "saturated"
    assert encode("1e6", "fp16", "--rounding", "toward_zero")["code"] == "0x7bff"
    chance = ("--rounding", "stochastic", "--seed")
    drawn = [[encode("1.3", "e2m1", *chance, str(seed))["code"] for seed in range(40)] for _ in range(2)]
    assert drawn[0] == drawn[1] and set(drawn[0]) == {"0x2", "0x3"}
    assert [one["format"] for one in results("why", "0.1", "fp16", "-f", "bf16")] == ["fp16", "bf16"]
    assert [one["format"] for one in results("why", "0.1")] == list(formats)


def test_the_error_is_in_ulps_of_the_format() -> None:
    error = encode("1.0001", "fp16")["error"]
    assert (error["fraction"], error["ulps"]) == ("-1/10000", "-0.1024")
    assert encode("2^-26", "fp16")["error"]["ulps"] == "-0.25"  # of the subnormals' distance
    assert encode("1/3", "bf16")["error"]["decimal"] is None


@pytest.mark.parametrize("number", ["-2.5", "-inf", "-nan", "-1/3", "-0x1p-3", "-2^-24", "-.5", "-(1+2)", "-∞"])
def test_numbers_that_begin_with_a_minus(number: str) -> None:
    spelled = results("encode", "-f", "fp16", "--", number)
    assert results("encode", number, "-f", "fp16") == results("encode", "-f", "fp16", number) == spelled
    assert spelled[0]["input"]["text"] == number


def test_several_numbers_and_formats_in_any_order() -> None:
    wanted = [(number, format) for number in ("1", "-2") for format in ("fp16", "bf16")]
    for words in (
        ("1", "-2", "-f", "fp16", "bf16"),
        ("-f", "fp16", "bf16", "1", "-2"),
        ("1", "-f", "fp16", "-2", "-f", "bf16"),
        ("1", "--format", "fp16", "--format=bf16", "--", "-2"),
        ("-f", "half", "bfloat16", "fp16", "1", "-2"),
    ):
        assert [(one["input"]["text"], one["format"]) for one in results("encode", *words)] == wanted
    assert results("encode", "-f", "fp16", "--", "--2")[0]["value"]["decimal"] == "2"


def test_figures_are_exact() -> None:
    (half,), (double,) = results("format", "float16"), results("format", "fp64")
    assert half["min_subnormal"] == {"decimal": "5.9604644775390625e-8", "hex": "0x1p-24", "fraction": "1/16777216"}
    assert (half["name"], half["largest_code"], half["overflow"]["decimal"]) == ("fp16", "0x7bff", "65520")
    assert double["overflow"]["fraction"] == str(2**1024 - 2**970)  # which is no float64 number


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("0x41", {"e4m3fn": "2.25", "e5m2": "2.5", "e4m3fnuz": "1.125", "e5m2fnuz": "1.25", "int8": "65"}),
        ("0b0101", {"e2m1fn": "3"}),
        ("0b010101", {"e2m3fn": "3.25", "e3m2fn": "5"}),
        ("0x4100", {"fp16": "2.5", "bf16": "8"}),
        ("0x0041", {"fp16": "3.874301910400390625e-6"}),
        ("0x3f80_0000", {"fp32": "1"}),
        ("0x3f8", {"fp16": "6.0558319091796875e-5"}),
        ("0x1fc00", {"tf32": "1"}),
        ("0x3ff0000000000000", {"fp64": "1"}),
        ("65", {"int8": "65"}),
        ("15360", {"fp16": "1"}),
        ("1065353216", {"fp32": "1"}),
    ],
)
def test_the_digits_say_how_wide_a_code_is(code: str, read: dict[str, str]) -> None:
    found = {one["format"]: one for one in results("decode", code)}
    widths = {formats[name].bits for name in found}
    assert len(widths) == 1 and set(found) == {name for name in formats if {formats[name].bits} == widths}
    for name, value in read.items():
        assert found[name]["value"]["decimal"] == value


def test_width_and_format_overrule_the_digits() -> None:
    assert [one["format"] for one in results("decode", "0x41", "-w", "16")] == ["fp16", "bf16"]
    assert [one["code"] for one in results("decode", "0x41", "-f", "fp16", "fp32")] == ["0x0041", "0x00000041"]
    assert [one["class"] for one in results("decode", "0xff", "0x80", "-f", "e5m2")] == ["nan", "zero"]


# ----------------------------------------------------------------------------------------------------------------- JSON


NUMBERS = ("2.5", "0", "-0", "1/3", "-1e-7", "2^-25", "500", "1e60", "inf", "-inf", "nan", "1+2^-11+2^-40", "2^-9000")


@pytest.mark.parametrize(
    "words",
    [
        ("format",),
        ("format", "e5m7"),
        ("encode", *NUMBERS),
        ("encode", "1e9", "--overflow", "nan", "--rounding", "stochastic", "--seed", "1"),
        ("decode", "0x00", "0x0001", "0x7c00", "0xffffffff", "0x7fff0", "0x7ff0000000000001", "0b1111"),
        ("compare", *formats),
        *(("why", number, *formats) for number in NUMBERS),
        ("why", "1e9", "fp16", "e4m3", "e2m1", "--overflow", "saturate"),
        ("why", "1e9", "fp16", "e4m3", "e2m1", "--overflow", "nan"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_prints_what_is_documented(words: tuple[str, ...]) -> None:
    assert results(*words)  # which compares it with tests/support/lookup_schema.py


def test_the_picture_has_json_too(tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    (found,) = results("ladder", "--kind", "range", "-f", "fp16", "--out", str(out))
    assert found == {"file": str(out), "kind": "range", "formats": ["fp16"]}


_OWN = st.builds(
    lambda exponent, mantissa, kind: f"e{exponent}m{mantissa}{kind}",
    st.integers(2, 10),
    st.integers(1, 30),
    st.sampled_from(["", "fn", "fnuz", "finite"]),
)
_FORMATS = st.sampled_from(list(formats)) | _OWN
_TEXTS = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.floats(width=16, allow_nan=False).map(repr),
    st.fractions(max_denominator=10**6).map(str),
    st.builds(lambda sign, power: f"{sign}2^{power}", st.sampled_from(["", "-"]), st.integers(-1100, 1100)),
    st.builds(float.hex, st.floats(allow_nan=False, allow_infinity=False)),
)


@settings(STEADY, max_examples=150)
@given(_TEXTS, _FORMATS)
def test_what_encode_says_is_what_decode_reads(text: str, format: str) -> None:
    (found,) = results("encode", "-f", format, "--", text)
    if found["code"] is None:
        return
    (read,) = results("decode", found["code"], "-f", format)
    for key in ("code", "bits", "class", "value"):
        assert read[key] == found[key]
    row = formats[format]
    assert int(found["code"], 16) == encode_exact(text, row)
    assert len(found["code"]) == 2 + -(-row.bits // 4)
    assert "".join(found["bits"].values()) == f"{int(found['code'], 16):0{row.bits}b}"
    value = decode_exact(int(found["code"], 16), row)
    if isinstance(value, Fraction):
        assert Fraction(found["value"]["decimal"]) == Fraction(found["value"]["fraction"]) == value
        assert float.fromhex(found["value"]["hex"]) == value
        assert encode_exact(found["value"]["shortest"], row) == encode_exact(found["value"]["decimal"], row)
        given = parse_number(text)
        if not (isinstance(given, float) and math.isinf(given)):
            assert Fraction(found["error"]["fraction"]) == value - Fraction(given)
            assert (found["outcome"] == "exact") == (value == given)


# ------------------------------------------------------------------------------------------------------------------ why


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


@pytest.mark.parametrize(
    ("number", "format", "rounding", "says"),
    [
        ("0.1", "bf16", "up", ["The number is 1/10 in lowest terms, and 10 is not a power of two: no binary format",
                               "Rounding up takes the upper one: 0.10009765625."]),
        ("-0.1", "bf16", "down", ["Rounding down takes the lower one: -0.10009765625."]),
        ("-0.1", "bf16", "toward_zero", ["takes the one nearer to zero: -0.099609375."]),
        ("1+2^-11", "fp16", "odd", ["The number has 12 significant bits, and fp16 has 11.",
                                    "takes the one whose last bit is 1, 0 01111 0000000001: 1.0009765625."]),
        ("3", "e4m0", "odd", ["With one significant bit, rounding to odd is rounding toward zero: 2."]),
        ("2.5", "int8", "nearest_away", ["The number is not an integer", "Ties go away from zero: 3."]),
        ("464", "e4m3", "nearest_away", ["exactly halfway to the number after the last one, 464", "so it overflows"]),
        ("-1e9", "fp16", "down", ["beyond it.", "Rounding down leads away from zero, so it overflows.", "0xfc00"]),
        ("-1e9", "fp16", "up", ["Rounding up does not overflow here: -65504 is stored, 0xfbff."]),
        ("1e9", "fp16", "odd", ["Rounding to odd does not overflow here: 65504 is stored, 0x7bff."]),
        ("2.5", "fp16", "up", ["nothing is rounded"]),
    ],
)  # fmt: skip
def test_the_reasons_of_other_rounding_modes(number: str, format: str, rounding: str, says: list[str]) -> None:
    told = why(number, format, "--rounding", rounding)
    assert all(words in " ".join(told["explanation"]) for words in says)
    assert told["code"] == encoded(parse_number(number), formats[format], rounding).stored.hex  # type: ignore[union-attr]
    assert told["elsewhere"] == told["rounded_twice"] == []


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


_SOME_FORMATS = st.sampled_from([*formats, "e4m0", "e5m7", "e3m4fn", "e2m2fnuz"])
_NUMBERS = st.fractions(max_denominator=2**40) | st.builds(
    lambda fraction, power: fraction * Fraction(2) ** power,
    st.fractions(min_value=-4, max_value=4, max_denominator=1000),
    st.integers(-160, 160),
)


@settings(STEADY, max_examples=200)
@given(_NUMBERS, _SOME_FORMATS, st.integers(0, 2**63 - 1))
def test_chance_stores_one_of_the_two(number: Fraction, format: str, seed: int) -> None:
    row = formats[format]
    expected = chances(number, row, "inf")
    assert sum(share for share, _ in expected) == 1
    drawn = encode_exact(number, row, "stochastic", seed=seed)
    assert drawn in [found.stored.code for _, found in expected if found.stored]


@pytest.mark.parametrize(
    ("number", "format"), [("2^-20", "fp16"), ("65530", "fp16"), ("5", "e8m0"), ("-2^-140/3", "bf16")]
)
def test_chance_is_as_often_as_told(number: str, format: str) -> None:
    found = why(number, format)["stochastic"]
    drawn = [encode_exact(number, format, "stochastic", seed=seed) for seed in range(2000)]
    for one in found:
        share, seen = float(Fraction(one["probability"])), drawn.count(int(one["code"], 16)) / len(drawn)
        assert abs(seen - share) < 5 * math.sqrt(share * (1 - share) / len(drawn)) + 1e-9


@STEADY
@given(_NUMBERS, _SOME_FORMATS)
def test_overflow_begins_at_the_threshold(number: Fraction, format: str) -> None:
    """Against the codec, which says infinity or NaN where the format has one."""
    row = formats[format]
    assume(row.has_nan or row.has_infinity)
    threshold, near = overflow_threshold(row), Fraction(1, 2**70)
    for one in (number, threshold, threshold * (1 - near), threshold * (1 + near), -threshold):
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
@given(_NUMBERS, _SOME_FORMATS)
def test_rounding_twice_is_what_the_codec_makes_of_it(number: Fraction, format: str) -> None:
    row = formats[format]
    direct = encode_exact(number, row)
    told = {tuple(one.name for one in found.via): found.result.stored for found in double_roundings(number, row)}
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
    ("number", "format", "ends"),
    [("1.0001", "fp16", "●┤"), ("1.0009", "fp16", "├●"), ("-1.3", "bf16", "├●"), ("65510", "fp16", "●┤"),
     ("65530", "fp16", "├┤"), ("65536", "fp16", ""), ("1", "fp16", ""), ("inf", "fp16", ""), ("-3", "e8m0", ""),
     ("0", "e8m0", "├●"), ("-65510", "fp16", "├●"), ("470", "e4m3", "├┤"), ("-128.2", "int8", "├●"),
     ("1e-9", "fp16", "●┤"), ("-1e-9", "fp16", "├●")],
)  # fmt: skip
def test_the_line_between_neighbours_marks_the_end_that_is_stored(number: str, format: str, ends: str) -> None:
    printed = lines("why", number, format)
    line = next((line.strip() for line in printed if "┼" in line), "")
    assert line[:1] + line[-1:] == ends
    if number.endswith("1e-9"):  # the zero has the sign of its side
        assert printed[3].split()[0 if number == "1e-9" else -1] == ("0x0000" if number == "1e-9" else "0x8000")


# --------------------------------------------------------------------------------------------------------------- screen


def test_what_the_user_wrote_is_shown_in_any_encoding() -> None:
    assert lines("encode", "\N{MINUS SIGN}2.5", "-f", "fp16")[0] == "\N{MINUS SIGN}2.5 = -2.5 = -0x1.4p+1 = -5/2"
    assert (
        lines("encode", "\N{MINUS SIGN}2.5", "-f", "fp16", encoding="latin-1")[0]
        == "\\u22122.5 = -2.5 = -0x1.4p+1 = -5/2"
    )


@pytest.mark.parametrize(
    ("number", "format", "shown"),
    [
        ("1.0001", "fp16", "rounded"),
        ("1", "fp16", "exact"),
        ("2^-24", "fp16", "exact subnormal"),
        ("6e-8", "fp16", "subnormal"),
        ("1e-9", "fp16", "underflow"),
        ("1e9", "fp16", "overflow"),
        ("1e9", "e2m1", "saturated"),
        ("nan", "e2m1", "no NaN"),
        ("-1", "e8m0", "no sign"),
    ],
)
def test_outcomes_as_they_are_shown(number: str, format: str, shown: str) -> None:
    row = lines("encode", number, "-f", format)[2]
    assert re.search(rf"(?:^|  | ){shown}$", row), row


def test_a_number_hardly_off_halfway_does_not_look_like_a_tie() -> None:
    found = lines("encode", "1+2^-11+2^-40", "-f", "fp16")[2]
    assert "+0.499999999" in found
    assert "+0.5 " in lines("encode", "1+3*2^-11", "-f", "fp16")[2]


def test_only_halfway_stands_in_the_middle() -> None:
    for width in (15, 35, 75):
        last = width - 1
        assert [column_of(Fraction(place, 2), width) for place in (0, 1, 2)] == [0, last // 2, last]
        tiny = Fraction(1, 10**9)
        near = [column_of(place, width) for place in (tiny, Fraction(1, 2) - tiny, Fraction(1, 2) + tiny, 1 - tiny)]
        assert near == [1, last // 2 - 1, last // 2 + 1, last - 1]
        assert (column_of(Fraction(-1), width), column_of(Fraction(2), width)) == (0, last)


def shown() -> list[tuple[str, str]]:
    """Commands of the lookup in docs/lookup.md, and the output beneath each."""
    page = Path(__file__).resolve().parents[3] / "docs" / "lookup.md"
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    command = r"\$ halfstep ((?:format|encode|decode|why|compare|ladder) .*)\n"
    parts = [re.split(command, block)[1:] for block in blocks]
    return [pair for each in parts for pair in zip(each[::2], each[1::2], strict=True)]


@pytest.mark.parametrize(("command", "output"), shown())
def test_the_page_shows_what_is_printed(command: str, output: str) -> None:
    status, out, errors = said(*shlex.split(command), COLUMNS="80")
    assert (out + errors).rstrip() == output.rstrip()
    assert status == (2 if errors else 0)


def test_a_name_that_formats_share_is_all_of_them() -> None:
    fp8 = ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"]
    assert [row["format"] for row in results("why", "0.1", "fp8")] == fp8
    assert [row["format"] for row in results("encode", "0.1", "-f", "FP6", "-f", "e5m2")] == [
        "e2m3fn",
        "e3m2fn",
        "e5m2",
    ]
    state = explore._state(explore._parser().parse(["0.1", "fp8"]))
    assert (state["x"], state["f"]) == ("0.1", "e4m3fn")
