"""Exact numbers as text, against Python's and numpy's own."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_run import STEADY

from halfstep.cli.formats import values
from halfstep.numerics.formats.exact import decode_exact, encode_exact, power_of_two
from halfstep.numerics.formats.table import formats

_FINITE = st.floats(allow_nan=False, allow_infinity=False)


@STEADY
@given(_FINITE)
def test_decimal_is_every_digit(value: float) -> None:
    text = values.decimal(Fraction(value))
    assert text is not None
    with localcontext() as context:
        context.prec = 1100
        assert Decimal(text) == Decimal(value)
    assert Fraction(text) == Fraction(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(1, 10), "0.1"),
        (Fraction(-1, 10**4), "-0.0001"),
        (Fraction(1, 10**5), "1e-5"),
        (Fraction(123, 10**7), "1.23e-5"),
        (Fraction(10**16), "10000000000000000"),
        (Fraction(10**17), "1e17"),
        (Fraction(65504), "65504"),
        (Fraction(1, 3), None),
        (Fraction(1, 2**4000), None),
        (Fraction(2**5000), None),
    ],
)
def test_decimal_notation(value: Fraction, text: str | None) -> None:
    assert values.decimal(value) == text


@STEADY
@given(st.fractions().filter(bool))
def test_power_of_two_is_floor_of_the_logarithm(value: Fraction) -> None:
    exponent = power_of_two(value)
    assert Fraction(2) ** exponent <= abs(value) < Fraction(2) ** (exponent + 1)


@STEADY
@given(_FINITE)
def test_hex_float_is_read_back_by_python(value: float) -> None:
    text = values.hex_float(Fraction(value))
    assert text is not None and float.fromhex(text) == value
    assert text.lstrip("-").startswith("0x1" if value else "0x0p+0")


def test_hex_float_of_what_is_none_or_no_float64() -> None:
    assert values.hex_float(Fraction(1, 3)) is None
    assert values.hex_float(Fraction(2**70 + 1)) == "0x1.000000000000000004p+70"
    assert values.hex_float(Fraction(-5, 2**2000)) == "-0x1.4p-1998"


@STEADY
@given(st.fractions(), st.integers(1, 20))
def test_rounded_is_decimals_rounding(value: Fraction, digits: int) -> None:
    with localcontext() as context:
        context.prec = 60  # a fraction of these denominators is no tie in 60 digits unless it is one
        near = Decimal(value.numerator) / Decimal(value.denominator)
        context.prec = digits
        assert Decimal(values.rounded(value, digits)) == +near


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (Fraction(45035), 4, "4.504e4"),
        (Fraction(4503), 4, "4503"),
        (Fraction(-99999), 4, "-1e5"),
        (Fraction(9999, 10), 3, "1e3"),
        (Fraction(2, 3), 3, "0.667"),
        (Fraction(1, 30000), 2, "3.3e-5"),
        (Fraction(0), 3, "0"),
    ],
)
def test_rounded_writes_no_digit_that_is_none(value: Fraction, digits: int, text: str) -> None:
    assert values.rounded(value, digits) == text


@settings(STEADY, max_examples=300)
@given(_FINITE)
def test_shortest_of_fp64_is_pythons_repr(value: float) -> None:
    text = values.Stored(encode_exact(abs(value), "fp64"), formats["fp64"]).shortest
    assert float(text) == abs(value)
    assert _digits(text) == _digits(repr(abs(value)))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e8m0fnu", "e2m1fn", "int8", "e4m0"])
def test_shortest_is_shortest_and_names_its_code(name: str) -> None:
    """Against every decimal with a digit less."""
    row = formats[name]
    for code in range(row.codes):
        value = decode_exact(code, row)
        if isinstance(value, float) or value == 0:
            continue
        text = values.Stored(code, row).shortest
        assert encode_exact(text, row) == code
        digits, exponent = _digits(text)
        if len(digits) > 1:
            unit = Fraction(10) ** (exponent + 1)
            below = math.floor(abs(value) / unit)
            for count in range(max(below - 2, 0), below + 4):
                fewer = count * unit * (1 if value > 0 else -1)
                assert encode_exact(fewer, row) != code or fewer == 0


def _digits(text: str) -> tuple[str, int]:
    """Significant digits, and the power of ten of the last one."""
    _, digits, exponent = Decimal(text).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent)
