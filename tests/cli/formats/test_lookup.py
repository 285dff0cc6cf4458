"""The output of format, encode, decode, why and compare: known facts, the JSON's schema, and the codec's results."""

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_run import STEADY, lines, results

from halfstep.cli.formats.compare import shared_values
from halfstep.cli.formats.values import Stored, encoded, overflow_threshold, overflows, rounded, roundings
from halfstep.numerics.formats.exact import decode_exact, encode_exact, parse_number
from halfstep.numerics.formats.table import Format, formats


def encode(number: str, format: str, *options: str) -> dict[str, Any]:
    (result,) = results("encode", number, "-f", format, *options)
    return result


@pytest.mark.parametrize(
    ("words", "code", "value", "outcome"),
    [
        ("2.5 -f fp16", "0x4100", "2.5", "exact"),
        ("1.0001 -f fp16", "0x3c00", "1", "rounded"),
        ("-65520 -f fp16", "0xfc00", "-inf", "overflow"),
        ("-2^-25 -f fp16", "0x8000", "-0", "underflow"),
        ("inf -f e4m3fn", "0x7f", "nan", "overflow"),
        ("-129 -f int8", "0x80", "-128", "saturated"),
        ("nan -f int8", None, None, "none"),
        ("0.1 -f e5m7", "0x05cd", "0.10009765625", "rounded"),
        ("100 -f e2m1fn --overflow nan", None, None, "none"),
        ("1e6 -f fp16 --overflow saturate", "0x7bff", "65504", "saturated"),
        ("1e6 -f fp16 --rounding toward_zero", "0x7bff", "65504", "saturated"),
    ],
)
def test_encode_gives_code_value_and_outcome(words: str, code: str | None, value: str | None, outcome: str) -> None:
    (result,) = results("encode", *words.split())
    assert (result["code"], result["value"] and result["value"]["decimal"], result["outcome"]) == (code, value, outcome)


def test_seeds_and_formats_are_taken_from_the_options() -> None:
    options = ("--rounding", "stochastic", "--seed")
    drawn = [[encode("1.3", "e2m1", *options, str(seed))["code"] for seed in range(40)] for _ in range(2)]
    assert drawn[0] == drawn[1] and set(drawn[0]) == {"0x2", "0x3"}
    assert [result["format"] for result in results("why", "0.1", "fp16", "-f", "bf16")] == ["fp16", "bf16"]
    assert [result["format"] for result in results("why", "0.1")] == list(formats)
    assert [result["format"] for result in results("why", "0.1", "fp6")] == ["e2m3fn", "e3m2fn"]


def test_the_error_is_in_ulps_of_the_format() -> None:
    error = encode("1.0001", "fp16")["error"]
    assert (error["fraction"], error["ulps"]) == ("-1/10000", "-0.1024")
    assert encode("2^-26", "fp16")["error"]["ulps"] == "-0.25"  # of the subnormals' distance
    assert encode("1/3", "bf16")["error"]["decimal"] is None


@pytest.mark.parametrize("number", ["-2.5", "-inf", "-1/3", "-0x1p-3", "-.5", "-(1+2)", "-∞"])
def test_negative_numbers_need_no_separator(number: str) -> None:
    spelled = results("encode", "-f", "fp16", "--", number)
    assert results("encode", number, "-f", "fp16") == results("encode", "--format=fp16", number) == spelled
    assert spelled[0]["input"]["text"] == number


def test_several_numbers_and_formats_in_any_order() -> None:
    expected = list(itertools.product(("1", "-2"), ("fp16", "bf16")))
    for words in (
        ("1", "-2", "-f", "fp16", "bf16"),
        ("-f", "half", "bfloat16", "fp16", "--", "1", "-2"),
        ("1", "--format=fp16", "-2", "-f", "bf16"),
    ):
        assert [(result["input"]["text"], result["format"]) for result in results("encode", *words)] == expected


def test_limits_of_formats_are_exact() -> None:
    (half,), (double,) = results("format", "float16"), results("format", "fp64")
    assert half["min_subnormal"] == {"decimal": "5.9604644775390625e-8", "hex": "0x1p-24", "fraction": "1/16777216"}
    assert double["overflow"]["fraction"] == str(2**1024 - 2**970)  # which is no float64 number


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("0x41", {"e4m3fn": "2.25", "e5m2": "2.5", "e4m3fnuz": "1.125", "e5m2fnuz": "1.25", "e8m0fnu": None,
                  "int8": "65"}),
        ("0b0101", {"e2m1fn": "3"}),
        ("0b010101", {"e2m3fn": "3.25", "e3m2fn": "5"}),
        ("0x0041", {"fp16": "3.874301910400390625e-6", "bf16": None}),
        ("0x3f80_0000", {"fp32": "1"}),
        ("0x3f8", {"fp16": "6.0558319091796875e-5", "bf16": None}),
        ("0x1fc00", {"tf32": "1"}),
        ("15360", {"fp16": "1", "bf16": None}),
        ("1065353216", {"fp32": "1"}),
        ("0x41 -w 16", {"fp16": "3.874301910400390625e-6", "bf16": None}),
        ("0x3c00 -f fp16 fp32", {"fp16": "1", "fp32": None}),
    ],
)  # fmt: skip
def test_the_number_of_digits_gives_the_width_of_a_code(words: str, read: dict[str, str | None]) -> None:
    values = {result["format"]: result["value"]["decimal"] for result in results("decode", *words.split())}
    assert set(values) == set(read) and all(value in (None, values[name]) for name, value in read.items())


@pytest.mark.parametrize(
    ("number", "decimal", "hexadecimal"),
    [("-1/10000", "-0.0001", None), ("123e-7", "1.23e-5", None), ("1e16", "10000000000000000", "0x1.1c37937e08p+53"),
     ("1e17", "1e17", "0x1.6345785d8ap+56"), ("2^-4000", None, "0x1p-4000"), ("2^5000", None, "0x1p+5000"),
     ("2^70 + 1", "1.180591620717411303425e21", "0x1.000000000000000004p+70")],
)  # fmt: skip
def test_notations_of_a_number(number: str, decimal: str | None, hexadecimal: str | None) -> None:
    given = encode(number, "fp16")["input"]
    assert (given["decimal"], given["hex"]) == (decimal, hexadecimal)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(Fraction(45035), 4, "4.504e4"), (Fraction(4503), 4, "4503"), (Fraction(-99999), 4, "-1e5"),
     (Fraction(2, 3), 3, "0.667"), (Fraction(1, 30000), 2, "3.3e-5"), (Fraction(0), 3, "0")],
)  # fmt: skip
def test_rounded_uses_an_exponent_instead_of_padding_zeros(value: Fraction, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


@settings(STEADY, max_examples=200)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_shortest_of_fp64_is_pythons_repr(value: float) -> None:
    text = Stored(encode_exact(abs(value), "fp64"), formats["fp64"]).shortest
    assert float(text) == abs(value) and digits_of(text) == digits_of(repr(abs(value)))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e8m0fnu", "int8", "e4m0"])
def test_no_shorter_decimal_encodes_to_the_code(name: str) -> None:
    """Against every decimal with a digit less."""
    row = formats[name]
    for code in range(row.codes):
        value = decode_exact(code, row)
        if isinstance(value, float) or value == 0:
            continue
        digits, exponent = digits_of(Stored(code, row).shortest)
        unit = Fraction(10) ** (exponent + 1) * (1 if value > 0 else -1)
        for count in range(max(math.floor(value / unit) - 2, 1), math.floor(value / unit) + 4):
            assert len(digits) == 1 or encode_exact(count * unit, row) != code


def digits_of(text: str) -> tuple[str, int]:
    """Significant digits, and the power of ten of the last one."""
    _, digits, exponent = Decimal(text).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent)


# ----------------------------------------------------------------------------------------------------------------- JSON


NUMBERS = ("2.5", "-0", "1/3", "-1e-7", "2^-25", "500", "1e60", "-inf", "nan", "1+2^-11+2^-40", "2^-9000")


@pytest.mark.parametrize(
    "words",
    [
        ("format", "e5m7", *formats),
        ("encode", *NUMBERS),
        ("encode", "1e9", "--overflow", "nan", "--rounding", "stochastic", "--seed", "1"),
        ("decode", "0x00", "0x7c00", "0xffffffff", "0x7fff0", "0x7ff0000000000001", "0b1111"),
        ("compare", "fp16", "bf16", "e8m0", "int8"),
        *(("why", number, *formats) for number in NUMBERS),
        ("why", "1e9", "fp16", "e4m3", "e2m1", "--overflow", "nan"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_prints_what_is_documented(words: tuple[str, ...]) -> None:
    assert results(*words)  # which compares it with tests/support/lookup_schema.py


_OWN = st.builds(
    lambda exponent, mantissa, kind: f"e{exponent}m{mantissa}{kind}",
    st.integers(2, 10),
    st.integers(1, 30),
    st.sampled_from(["", "fn", "fnuz", "finite"]),
)
_TEXTS = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.fractions(max_denominator=10**6).map(str),
    st.builds(lambda sign, power: f"{sign}2^{power}", st.sampled_from(["", "-"]), st.integers(-1100, 1100)),
)


@settings(STEADY, max_examples=50)
@given(_TEXTS, st.sampled_from(list(formats)) | _OWN)
def test_decode_reads_what_encode_prints(text: str, format: str) -> None:
    (result,) = results("encode", "-f", format, "--", text)
    if result["code"] is None:
        return
    (read,) = results("decode", result["code"], "-f", format)
    for key in ("code", "bits", "class", "value"):
        assert read[key] == result[key]
    row, code = formats[format], int(result["code"], 16)
    assert code == encode_exact(text, row) and len(result["code"]) == 2 + -(-row.bits // 4)
    assert "".join(result["bits"].values()) == f"{code:0{row.bits}b}"
    value, number = decode_exact(code, row), parse_number(text)
    if isinstance(value, Fraction):
        assert Fraction(result["value"]["decimal"]) == Fraction(result["value"]["fraction"]) == value
        assert float.fromhex(result["value"]["hex"]) == value
        assert encode_exact(result["value"]["shortest"], row) == encode_exact(result["value"]["decimal"], row)
        if isinstance(number, Fraction) or math.isfinite(number):
            assert Fraction(result["error"]["fraction"]) == value - Fraction(number)
            assert (result["outcome"] == "exact") == (value == number)


# ------------------------------------------------------------------------------------------------------------------ why


@pytest.mark.parametrize(
    ("words", "rule", "says"),
    [
        ("2.5 fp16", "exact", ["nothing is rounded", "2.498046875 below and 2.501953125 above"]),
        ("1.0001 fp16", "nearer", ["10001/10000 in lowest terms, is not a power of two", "2^-10 = 0.0009765625 apart",
                                   "0.1024 ulp above 1", "the midpoint is 1.00048828125", "nearer one is taken: 1."]),
        ("1+3*2^-11 fp16", "tie", ["has 12 significant bits", "the one whose last bit is 0: 1.001953125."]),
        ("-1-2^-11 fp16", "tie", ["exactly halfway between -1.0009765625 and -1", "whose last bit is 0: -1."]),
        ("6e-8 fp16", "nearer", ["Below 2^-14", "all 2^-24 = 5.9604644775390625e-8 apart", "precision 1 is"]),
        ("2^-26 fp16", "nearer", ["precision 0 are left", "no larger than 2^-25 = 2.98", "becomes zero"]),
        ("65520 fp16", "overflow", ["halfway between 65504 and 65536", "whose last bit is 0: 65536.",
                                    "beyond 65504, the largest number of fp16: it overflows, as does every number from "
                                    "65520 on.", "Infinity is stored: 0x7c00"]),
        ("500 e4m3", "overflow", ["every number beyond 464", "e4m3fn has no infinity: NaN is stored: 0x7f"]),
        ("7 e2m1", "overflow", ["whose last bit is 0: 8.", "every number from 7 on.",
                                "e2m1fn has neither infinity nor NaN: The largest number, 6, is stored: 0x7"]),
        ("2.5 int8", "tie", ["is not an integer", "are 1 apart", "whose last bit is 0: 2."]),
        ("3 e8m0", "tie_up", ["powers of two", "exactly halfway between 2 and 4", "away from zero, since with"]),
        ("192 e4m0", "overflow", ["one significant bit none is even", "beyond 128, the largest number of e4m0"]),
        ("0 e8m0", "least", ["e8m0fnu has no zero", "2^-127"]),
        ("-3 e8m0", "sign", ["e8m0fnu has no sign, and nan stands for negative numbers"]),
        ("inf e4m3", "special", ["An infinity is not rounded", "has no infinity: NaN is stored"]),
        ("nan e2m1", "special", ["NaN is not rounded", "e2m1fn has no NaN, so that nothing can stand for it"]),
        ("0.1 bf16 --rounding up", "nearer", ["Rounding up takes the upper one: 0.10009765625."]),
        ("1+2^-11 fp16 --rounding odd", "tie", ["Rounding to odd takes the one whose last bit is 1: 1.0009765625."]),
        ("3 e4m0 --rounding odd", "tie_up", ["With one significant bit, rounding to odd is rounding toward zero: 2."]),
        ("2.5 int8 --rounding nearest_away", "tie", ["Ties go away from zero: 3."]),
        ("464 e4m3 --rounding nearest_away", "tie", ["from zero: 480.", "as does every number from 464 on."]),
    ],
)  # fmt: skip
def test_why_explains_the_rule_that_decided(words: str, rule: str, says: list[str]) -> None:
    (result,) = results("why", *words.split())
    assert result["rule"] == rule
    explanation = " ".join(result["explanation"])
    assert [text for text in says if text not in explanation] == []
    shown = " ".join(line.strip() for line in lines("why", *words.split(), COLUMNS="80"))
    assert all(sentence in shown for sentence in result["explanation"])


def test_neighbours_and_roundings() -> None:
    (result,) = results("why", "-1.3", "bf16")
    assert (result["below"]["code"], result["above"]["code"]) == ("0xbfa7", "0xbfa6")
    assert (result["midpoint"]["decimal"], result["ulp"]["hex"]) == ("-1.30078125", "0x1p-7")
    assert [mode for mode, code in result["roundings"].items() if code == "0xbfa7"] == ["down", "odd"]
    probability = {end["code"]: Fraction(end["probability"]) for end in result["stochastic"]}
    assert set(probability) == {"0xbfa6", "0xbfa7"} and sum(probability.values()) == 1
    assert abs(probability["0xbfa7"] - Fraction(4, 10)) < Fraction(1, 2**31)


_SOME_FORMATS = st.sampled_from([*formats, "e4m0", "e5m7", "e3m4fn", "e2m2fnuz"])
_NUMBERS = st.fractions(max_denominator=2**40) | st.builds(
    lambda fraction, power: fraction * Fraction(2) ** power,
    st.fractions(min_value=-4, max_value=4, max_denominator=1000),
    st.integers(-160, 160),
)


@settings(STEADY, max_examples=100)
@given(_NUMBERS, _SOME_FORMATS, st.integers(0, 2**63 - 1))
def test_chance_stores_one_of_the_two(number: Fraction, format: str, seed: int) -> None:
    row = formats[format]
    expected = roundings(number, row, lambda value, mode: encoded(value, row, mode))[6:]
    assert sum(chance for _, _, chance in expected) == 1
    drawn = encode_exact(number, row, "stochastic", seed=seed)
    assert drawn in [end.stored.code for end, _, _ in expected if end.stored]


@pytest.mark.parametrize(("number", "format"), [("2^-20", "fp16"), ("65530", "fp16"), ("-2^-140/3", "bf16")])
def test_stochastic_rounding_has_the_stated_probability(number: str, format: str) -> None:
    drawn = [encode_exact(number, format, "stochastic", seed=seed) for seed in range(600)]
    for end in results("why", number, format)[0]["stochastic"]:
        share, seen = float(Fraction(end["probability"])), drawn.count(int(end["code"], 16)) / len(drawn)
        assert abs(seen - share) < 5 * math.sqrt(share * (1 - share) / len(drawn)) + 1e-9


@pytest.mark.parametrize("format", ["fp64", "bf16", "e4m3fn", "e5m2fnuz", "e2m3fn", "e2m1fn", "int8", "e4m0"])
def test_overflow_begins_at_the_threshold(format: str) -> None:
    row, near = formats[format], Fraction(1, 10**20)
    for sign in (1, -1):
        threshold = overflow_threshold(row, negative=sign < 0)
        assert 2 * threshold - Fraction(row.max if sign > 0 else -row.lowest) * 2 == row.ulp(row.max)
        even = format == "e4m3fn" or (format == "int8" and sign < 0)  # of 448 and -128 the last bit is 0
        assert overflows(sign * threshold, row) is not even
        assert not overflows(sign * threshold * (1 - near), row) and overflows(sign * threshold * (1 + near), row)


def test_double_rounding_is_explained() -> None:
    (result,) = results("why", "1 + 2^-11 + 2^-40", "fp16")
    assert [(twice["via"], twice["code"]) for twice in result["rounded_twice"]] == [(["fp64", "fp32"], "0x3c00")]
    shown = " ".join(line.strip() for line in lines("why", "1 + 2^-11 + 2^-40", "fp16", COLUMNS="80"))
    assert "first to fp64 and fp32, the number is 1.00048828125, and that becomes 1 instead of 1.0009765625" in shown


# --------------------------------------------------------------------------------------------------- compare, screen


SMALL = [name for name in formats if formats[name].bits <= 8] + ["e3m4", "e4m3ieee", "e5m2finite", "e2m0", "e3m2b6"]


@pytest.mark.parametrize(("words", "says"), [
    ("fp16 bf16", "bf16 reaches 2^112 times further up. bf16 reaches 2^109 times further down. Near 1 fp16's numbers "
     "are 2^3 times closer together. They share 8,705 values: 13.7 % of fp16's 63,489 and 13.3 % of bf16's 65,281."),
    ("e4m3fn e4m3fnuz", "e4m3fn reaches 2^1 times further up. e4m3fnuz reaches 2^1 times further down. They share 239 "
     "values: 94.5 % of e4m3fn's 253 and 93.7 % of e4m3fnuz's 255."),
    ("bf16 fp32", "fp32 reaches 2^16 times further down. Near 1 fp32's numbers are 2^16 times closer together. fp32 "
     "holds every value of bf16: casting there and back loses nothing."),
])  # fmt: skip
def test_compare_describes_range_precision_and_shared_values(words: str, says: str) -> None:
    assert says in " ".join(" ".join(lines("compare", *words.split())).split())


def test_shared_values_are_counted() -> None:
    def every_value(row: Format) -> set[object]:
        return {value for value in (decode_exact(code, row) for code in range(row.codes)) if value == value}

    values = {name: every_value(formats[name]) for name in (*SMALL, "e5m5", "e8m2")}
    for first, second in itertools.product(values, repeat=2):
        assert shared_values(formats[first], formats[second]) == len(values[first] & values[second]), (first, second)
    for row in formats.values():
        assert shared_values(row, row) == row.values


def test_outcomes_and_numbers_are_shown_in_words() -> None:
    for number, format, outcome in (
        ("2^-24", "fp16", "exact subnormal"), ("2^-14", "fp16", "exact"), ("6e-8", "fp16", "subnormal"),
        ("1e9", "e2m1", "saturated"), ("nan", "e2m1", "no NaN"), ("-1", "e8m0", "no sign"),
        ("1e-9", "fp16", "underflow"),
    ):  # fmt: skip
        assert lines("encode", number, "-f", format)[2].endswith(f"  {outcome}")
    assert lines("encode", "\N{MINUS SIGN}2.5", "-f", "fp16")[0] == "\N{MINUS SIGN}2.5 = -2.5 = -0x1.4p+1 = -5/2"
    assert lines("encode", "\N{MINUS SIGN}2.5", encoding="latin-1")[0].startswith("\\u22122.5 = -2.5 ")
    assert "+0.499999999" in lines("encode", "1+2^-11+2^-40", "-f", "fp16")[2], "which is no tie"
    assert "+0.5 " in lines("encode", "1+3*2^-11", "-f", "fp16")[2]
    assert encoded(Fraction(1, 10), formats["bf16"]).outcome_text == "rounded"
