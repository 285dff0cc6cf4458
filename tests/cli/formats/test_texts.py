"""Exact numbers as text, against Python's own."""

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
def test_decimal_and_hexadecimal_have_every_digit(value: float) -> None:
    text, hexadecimal = values.decimal(Fraction(value)), values.hex_float(Fraction(value))
    assert text is not None and Fraction(text) == Fraction(value)
    assert hexadecimal is not None and float.fromhex(hexadecimal) == value
    assert hexadecimal.lstrip("-").startswith("0x1" if value else "0x0p+0")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(1, 10), "0.1"),
        (Fraction(-1, 10**4), "-0.0001"),
        (Fraction(123, 10**7), "1.23e-5"),
        (Fraction(10**16), "10000000000000000"),
        (Fraction(10**17), "1e17"),
        (Fraction(1, 3), None),
        (Fraction(1, 2**4000), None),
        (Fraction(2**5000), None),
    ],
)
def test_decimal_notation(value: Fraction, text: str | None) -> None:
    assert values.decimal(value) == text


def test_hex_float_of_what_is_no_float64() -> None:
    assert values.hex_float(Fraction(1, 3)) is None
    assert values.hex_float(Fraction(2**70 + 1)) == "0x1.000000000000000004p+70"
    assert values.hex_float(Fraction(-5, 2**2000)) == "-0x1.4p-1998"


@STEADY
@given(st.fractions().filter(bool), st.integers(1, 20))
def test_rounded_and_power_of_two(value: Fraction, digits: int) -> None:
    with localcontext() as context:
        context.prec = 60  # a fraction of these denominators is no tie in 60 digits unless it is one
        near = Decimal(value.numerator) / Decimal(value.denominator)
        context.prec = digits
        assert Decimal(values.rounded(value, digits)) == +near
    exponent = power_of_two(value)
    assert Fraction(2) ** exponent <= abs(value) < Fraction(2) ** (exponent + 1)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(Fraction(45035), 4, "4.504e4"), (Fraction(4503), 4, "4503"), (Fraction(-99999), 4, "-1e5"),
     (Fraction(2, 3), 3, "0.667"), (Fraction(1, 30000), 2, "3.3e-5"), (Fraction(0), 3, "0")],
)  # fmt: skip
def test_rounded_writes_no_digit_that_is_none(value: Fraction, digits: int, text: str) -> None:
    assert values.rounded(value, digits) == text


@settings(STEADY, max_examples=200)
@given(_FINITE)
def test_shortest_of_fp64_is_pythons_repr(value: float) -> None:
    text = values.Stored(encode_exact(abs(value), "fp64"), formats["fp64"]).shortest
    assert float(text) == abs(value) and digits_of(text) == digits_of(repr(abs(value)))


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e8m0fnu", "int8", "e4m0"])
def test_shortest_is_shortest_and_names_its_code(name: str) -> None:
    """Against every decimal with a digit less."""
    row = formats[name]
    for code in range(row.codes):
        value = decode_exact(code, row)
        if isinstance(value, float) or value == 0:
            continue
        text = values.Stored(code, row).shortest
        assert encode_exact(text, row) == code
        digits, exponent = digits_of(text)
        unit = Fraction(10) ** (exponent + 1) * (1 if value > 0 else -1)
        for count in range(max(math.floor(value / unit) - 2, 1), math.floor(value / unit) + 4):
            assert len(digits) == 1 or encode_exact(count * unit, row) != code


def digits_of(text: str) -> tuple[str, int]:
    """Significant digits, and the power of ten of the last one."""
    _, digits, exponent = Decimal(text).normalize().as_tuple()
    return "".join(map(str, digits)), int(exponent)
