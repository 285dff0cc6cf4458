"""What is known of formats and numbers, asked on the command line."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from lookup_run import lines, results

from halfstep.cli.formats import number_text
from halfstep.numerics.formats.table import formats


def encode(number: str, format: str, *more: str) -> dict[str, Any]:
    (found,) = results("encode", number, "-f", format, *more)
    return found


@pytest.mark.parametrize(
    ("number", "format", "code", "value", "outcome"),
    [
        ("2.5", "fp16", "0x4100", "2.5", "exact"),
        ("1.0001", "fp16", "0x3c00", "1", "rounded"),
        ("65504", "fp16", "0x7bff", "65504", "exact"),
        ("65519.99", "fp16", "0x7bff", "65504", "rounded"),
        ("65520", "fp16", "0x7c00", "inf", "overflow"),
        ("-65520", "fp16", "0xfc00", "-inf", "overflow"),
        ("2^-25", "fp16", "0x0000", "0", "underflow"),
        ("-2^-25", "fp16", "0x8000", "-0", "underflow"),
        ("2^-25 + 2^-80", "fp16", "0x0001", "5.9604644775390625e-8", "rounded"),
        ("2^-24", "fp16", "0x0001", "5.9604644775390625e-8", "exact"),
        ("1 + 2^-11 + 2^-40", "fp16", "0x3c01", "1.0009765625", "rounded"),
        ("8", "bf16", "0x4100", "8", "exact"),
        ("3.4e38", "bf16", "0x7f80", "inf", "overflow"),
        ("464", "e4m3fn", "0x7e", "448", "rounded"),
        ("464.001", "e4m3fn", "0x7f", "nan", "overflow"),
        ("inf", "e4m3fn", "0x7f", "nan", "overflow"),
        ("-0", "e4m3fnuz", "0x00", "0", "exact"),
        ("6.5", "e2m1fn", "0x7", "6", "rounded"),
        ("7", "e2m1fn", "0x7", "6", "saturated"),
        ("inf", "int8", "0x7f", "127", "saturated"),
        ("-128.5", "int8", "0x80", "-128", "rounded"),
        ("-129", "int8", "0x80", "-128", "saturated"),
        ("1.5", "e8m0fnu", "0x80", "2", "rounded"),
        ("nan", "e5m2", "0x7e", "nan", "exact"),
        ("1e-400", "fp64", "0x0000000000000000", "0", "underflow"),
    ],
)
def test_what_a_number_becomes(number: str, format: str, code: str, value: str, outcome: str) -> None:
    found = encode(number, format)
    assert (found["code"], found["value"]["decimal"], found["outcome"]) == (code, value, outcome)


def test_fields_of_two_and_a_half() -> None:
    assert encode("2.5", "fp16")["bits"] == {"sign": "0", "exponent": "10000", "mantissa": "0100000000"}
    assert "fp16    0x4100  0 10000 0100000000  2.5" in lines("encode", "2.5", "-f", "fp16")[2]


def test_where_normal_numbers_begin() -> None:
    found = [one["class"] for one in results("decode", "0x0400", "0x03ff", "0x8001", "0x8000", "-f", "fp16")]
    assert found == ["normal", "subnormal", "subnormal", "zero"]


def test_the_same_bits_in_every_format_of_16_bits() -> None:
    found = {one["format"]: one["value"]["decimal"] for one in results("decode", "0x4100")}
    assert found == {"fp16": "2.5", "bf16": "8"}


@pytest.mark.parametrize(
    ("options", "value", "outcome"),
    [
        (["--overflow", "saturate"], "65504", "saturated"),
        (["--overflow", "nan"], "nan", "overflow"),
        (["--rounding", "toward_zero"], "65504", "saturated"),
        (["--rounding", "down"], "65504", "saturated"),
        (["--rounding", "up"], "inf", "overflow"),
    ],
)
def test_roundings_and_overflow_are_passed_on(options: list[str], value: str, outcome: str) -> None:
    found = encode("1e6", "fp16", *options)
    assert (found["value"]["decimal"], found["outcome"]) == (value, outcome)


def test_a_nan_has_no_code_in_formats_without() -> None:
    for format in ("e2m3fn", "e3m2fn", "e2m1fn", "int8"):
        found = encode("nan", format)
        assert (found["code"], found["outcome"]) == (None, "none")
    # The largest number is what overflow becomes there; asked for NaN instead, there is none.
    assert encode("100", "e2m1fn", "--overflow", "nan")["code"] is None
    assert encode("5", "e2m1fn", "--overflow", "nan")["code"] == "0x6"


def test_stochastic_rounding_repeats_with_its_seed() -> None:
    drawn = [encode("1.3", "e2m1", "--rounding", "stochastic", "--seed", str(seed))["code"] for seed in range(40)]
    again = [encode("1.3", "e2m1", "--rounding", "stochastic", "--seed", str(seed))["code"] for seed in range(40)]
    assert drawn == again and set(drawn) == {"0x2", "0x3"}


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


def test_after_two_dashes_everything_is_a_number() -> None:
    assert results("encode", "-f", "fp16", "--", "--2")[0]["value"]["decimal"] == "2"


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


def test_all_formats_are_shown_if_none_is_named() -> None:
    assert [one["format"] for one in results("encode", "2.5")] == list(formats)
    assert [one["name"] for one in results("format")] == list(formats)


def test_figures_of_the_table() -> None:
    (found,) = results("format", "float16")
    assert (found["name"], found["max"]["decimal"], found["overflow"]["decimal"]) == ("fp16", "65504", "65520")
    assert found["min_subnormal"] == {
        "decimal": "5.9604644775390625e-8",
        "hex": "0x1p-24",
        "fraction": "1/16777216",
    }
    assert (found["digits10"], found["max_digits10"], found["largest_code"]) == (3, 5, "0x7bff")
    # Of fp64 it is no float64 number.
    (double,) = results("format", "fp64")
    assert double["overflow"]["fraction"] == str(2**1024 - 2**970)


def test_formats_of_ones_own() -> None:
    (found,) = results("encode", "0.1", "-f", "e5m7")
    assert (found["format"], found["code"]) == ("e5m7", "0x05cd")


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("0x41", {"e4m3fn": "2.25", "e5m2": "2.5", "e4m3fnuz": "1.125", "e5m2fnuz": "1.25", "int8": "65"}),
        ("0b0101", {"e2m1fn": "3"}),
        ("0b010101", {"e2m3fn": "3.25", "e3m2fn": "5"}),
        ("0x3c00", {"fp16": "1"}),
        ("0x0041", {"fp16": "3.874301910400390625e-6"}),
        ("0b000001", {"e2m3fn": "0.125"}),
        ("0x00000001", {"fp32": str(number_text.decimal(Fraction(1, 2**149)))}),
        ("5", {"int8": "5"}),
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
