"""Parsing numbers: exact, safe, and with helpful errors."""

import math
import time
from fractions import Fraction

import pytest
from errors import refuses
from hypothesis import given
from hypothesis import strategies as st

from halfstep.numerics.formats.exact import LARGEST_POWER, exact, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("1e-400", Fraction(1, 10**400)),
        ("5.", Fraction(5)),
        ("1_000.25", Fraction(4001, 4)),
        ("1E3", Fraction(1000)),
        ("0x1.8p-3", Fraction(3, 16)),
        ("0X.8P+1", Fraction(1)),
        ("-0x1p-1074", -Fraction(1, 2**1074)),
        ("1/3", Fraction(1, 3)),
        ("-2/6", Fraction(-1, 3)),
        ("2^-24", Fraction(1, 2**24)),
        ("2**-24", Fraction(1, 2**24)),
        ("-2^2", Fraction(-4)),
        ("(-2)^2", Fraction(4)),
        ("2^3^2", Fraction(512)),
        ("2^-(1+2)", Fraction(1, 8)),
        ("(2/3)^-2", Fraction(9, 4)),
        ("65504 + 16 - 2 * 3", Fraction(65514)),
        ("8/2/2", Fraction(2)),
        ("8-2-2", Fraction(4)),
        ("1--1", Fraction(2)),
        ("0^0", Fraction(1)),
        ("(-1)^1000000001", Fraction(-1)),
        ("0e999999999999", Fraction(0)),
        (f"2^{LARGEST_POWER - 1}", Fraction(2) ** (LARGEST_POWER - 1)),
        ("\N{MINUS SIGN}3\N{MULTIPLICATION SIGN}2", Fraction(-6)),
        ("  7  ", Fraction(7)),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_notations_parse_to_exact_values(text: str, value: Fraction) -> None:
    number = parse_number(text)
    assert number == value and type(number) is Fraction


def test_signed_zeros_infinities_and_nan_parse() -> None:
    for text in ("-0", "-0.0", "-0e5", "-0x0p0", "-(0)", "- - -0", "-0*3", "0/-5", "+-0"):
        assert str(parse_number(text)) == "-0.0", text
    for text in ("0", "--0", "-0*-3", "0 - 0", "-0 - -0", "0 * 5", "-0 + 0"):
        assert str(parse_number(text)) == "0", text  # a Fraction
    assert parse_number("inf") == parse_number("Infinity") == parse_number("+INF") == math.inf
    assert parse_number("-inf") == parse_number("-\N{INFINITY}") == -math.inf
    assert math.isnan(parse_number("nan")) and math.copysign(1, parse_number("-NaN")) == -1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"{text!r} is not a number. Write decimals (1e-400), hexadecimal floats (0x1.8p-3), inf, nan")
          for text in ("", "abc", "0.1f", "L", "__import__('os')", "1 2", "(1", "2*", "2(3)", "1//2", "1,2", "1#2")),
        *((text, "is not a number. Write decimals") for text in ("(" * 300 + "1" + ")" * 300, "-" * 3000 + "1")),
        ("1/0", "it divides by zero; an infinity is written inf"),
        ("0^-1", "it divides by zero"),
        ("inf + 1", "infinities and NaN stand alone"),
        ("2 * nan", "infinities and NaN stand alone"),
        ("2^0.5", "an exponent is not an integer"),
        *((text, "too large or too small") for text in (
            "2^" * 60 + "1", "1e99999", "1e-99999999999999999999", "10^10^10", "(3/2)^99999999", "2^65000 * 2^65000")),
        ("1" * 4001, "Expected a number of at most 4000 characters, but got 4001"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_other_texts_are_refused_with_a_reason(text: str, message: str) -> None:
    start = time.process_time()
    refuses(ValueError, message, lambda: parse_number(text))
    assert time.process_time() - start < 5, "hostile exponents cost nothing"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_as_repr_and_hex(value: float) -> None:
    for text in (value.hex(), f"{Fraction(value)}"):
        number = parse_number(text)
        assert number == Fraction(value)
    assert float(parse_number(repr(value))) == value
    assert math.copysign(1, float(parse_number(value.hex()))) == math.copysign(1, value)


@given(st.text(alphabet="0123456789.+-*/^()exp_ infL", max_size=30))
def test_anything_gives_a_number_or_a_value_error(text: str) -> None:
    try:
        number = parse_number(text)
    except ValueError as error:
        assert str(error)
    else:
        assert isinstance(number, (Fraction, float))


def test_exact_refuses_what_is_no_number() -> None:
    for value in (1j, None, [1], b"1", object()):
        with pytest.raises(TypeError, match="Expected a real number"):
            exact(value)
