"""Parse numbers as people write them, exactly: "0.1" is one tenth, not the float64 number next to it.

    sum      = product {("+" | "-") product}
    product  = signed {("*" | "/") signed}
    signed   = ("+" | "-") signed | power
    power    = atom [("^" | "**") signed]
    atom     = decimal | hexadecimal float | "inf" | "nan" | "pi" | "e" | "sqrt" atom | "(" sum ")"

Examples are "1e-400", "0x1.8p-3", "1/3", "2^-24", "-(1 + 2^-11)/3" and "sqrt(2)/2". The text is not evaluated as
Python, and results are limited to 2^±65536, which is far beyond the range of every format.

pi, e and roots that are not rational have 50 digits here. That decides every rounding of at most 53 bits, and what is
computed from them is rational where it agrees with a short fraction to 43 digits, such as sqrt(2)^2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction


class Irrational(Fraction):
    """The first 50 digits of a number whose digits never end, such as pi: enough to round it to every format."""


Special = float  # an infinity, a NaN (with sign and payload) or -0.0, which no Fraction represents
Number = Fraction | Special

LARGEST_TEXT = 4000  # characters
LARGEST_POWER = 65536  # of two; about 19,700 of ten
_LARGEST_DECIMAL_POWER = 19_000

_TOKEN = re.compile(
    r"""
      (?P<hexadecimal> 0x (?: [0-9a-f]+ (?:\.[0-9a-f]*)? | \.[0-9a-f]+ ) (?: p [+-]?[0-9]+ )? )
    | (?P<decimal> (?: [0-9]+ (?:_[0-9]+)* (?:\.[0-9]*)? | \.[0-9]+ ) (?: e [+-]?[0-9]+ )? )
    | (?P<special> infinity | inf | nan )
    | (?P<irrational> (?: pi | e | sqrt ) \b )
    | (?P<operator> \*\* | [-+*/^()] )
    """,
    re.VERBOSE,
)
_WRITTEN_OTHERWISE = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{INFINITY}": "inf", "π": "pi", "√": "sqrt "}
)
_CONSTANTS = {
    "pi": Fraction("3.1415926535897932384626433832795028841971693993751"),
    "e": Fraction("2.7182818284590452353602874713526624977572470936999"),
}


def parse_number(text: str) -> Number:
    """The exact value of a text.

    Returns:
        A Fraction, `Irrational` if it has only its first digits, or a float for an infinity, NaN or -0.0.

    Raises:
        ValueError: the text is not a number, or its magnitude is outside 2^±65536. The message says what is wrong.

    Examples:
        >>> from halfstep.numerics.formats.codec import parse_number
        >>> parse_number("2^-24"), parse_number("0x1.8p-3"), parse_number("-(1 + 2^-11)")
        (Fraction(1, 16777216), Fraction(3, 16), Fraction(-2049, 2048))
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"Expected a number of at most {LARGEST_TEXT} characters, but got {len(text)}")
    return _Parser(text).result()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        plain = text.translate(_WRITTEN_OTHERWISE).lower()
        at = 0
        while at < len(plain):
            if plain[at].isspace():
                at += 1
                continue
            token = _TOKEN.match(plain, at)
            if not token:
                raise self._error(f"{plain[at:].split()[0]!r} is not understood")
            self._tokens.append((str(token.lastgroup), token.group()))
            at = token.end()
        self._at = 0
        self._depth = 0
        self._irrational = False

    def result(self) -> Number:
        value = self._chain("+-")
        if self._at < len(self._tokens):
            raise self._error(f"{self._tokens[self._at][1]!r} is not expected there")
        if not self._irrational or not isinstance(value, Fraction) or not value:
            return value
        unit = Fraction(2) ** (value.numerator.bit_length() - value.denominator.bit_length())
        near = (value / unit).limit_denominator(2**56) * unit
        return near if abs(value - near) * 2**145 < abs(value) else Irrational(value)

    def _shown(self) -> str:
        return repr(self._text if len(self._text) <= 60 else self._text[:57] + "...")

    def _error(self, why: str) -> ValueError:
        return ValueError(
            f"{self._shown()} is not a number: {why}. Write decimals (1e-400), hexadecimal floats (0x1.8p-3), "
            "inf, nan, fractions (1/3), powers (2^-24), pi, e, sqrt(2), and sums and products of these"
        )

    def _take(self, *operators: str) -> str | None:
        """The next token, if it is one of `operators`."""
        if self._at < len(self._tokens) and self._tokens[self._at][1] in operators:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _chain(self, operators: str) -> Number:
        """A sum (of products) or a product (of signed numbers)."""
        operand = self._signed if operators == "*/" else lambda: self._chain("*/")
        value = operand()
        while sign := self._take(*operators):
            value = self._applied(sign, value, operand())
        return value

    def _applied(self, sign: str, one: Number, other: Number) -> Number:
        left, right = self._finite(one, sign), self._finite(other, sign)
        if sign in "+-":
            if left == right == 0 and _negative(one) and _negative(other) == (sign == "+"):
                return one  # -0 + -0 and -0 - 0 are -0; all other sums of zeros are 0
            value = left + right if sign == "+" else left - right
            if self._irrational and 0 < abs(value) * 2**60 < abs(left):
                raise self._error("the first 18 digits cancel out, and of pi, e and roots only 50 are there")
            return self._limited(value)
        if sign == "/" and right == 0:
            raise self._error("it divides by zero; an infinity is written inf")
        if left == 0 or right == 0:
            return -0.0 if _negative(one) != _negative(other) else Fraction(0)
        return self._limited(left * right if sign == "*" else left / right)

    def _signed(self) -> Number:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        if not negative:
            return value
        if isinstance(value, Fraction) and value != 0:
            return -value
        return -float(value) if value or _negative(value) else -0.0

    def _power(self) -> Number:
        base = self._atom()
        sign = self._take("^", "**")
        if not sign:
            return base
        exponent = self._finite(self._deeper(self._signed), sign)
        root = self._finite(base, sign)
        if exponent.denominator != 1:
            raise self._error("an exponent is not an integer")
        if root == 0 and exponent < 0:
            raise self._error("it divides by zero; an infinity is written inf")
        if root in (0, 1, -1):
            return root if exponent % 2 or root == 1 else Fraction(int(exponent == 0 or root != 0))
        # |root|^n has at least n bits before or after the binary point, so this limits the work as well.
        if abs(exponent) * max(root.numerator.bit_length() - 1, root.denominator.bit_length() - 1) > 2 * LARGEST_POWER:
            raise self._too_far()
        return self._limited(root ** int(exponent))

    def _atom(self) -> Number:
        if self._take("("):
            value = self._deeper(lambda: self._chain("+-"))
            if not self._take(")"):
                raise self._error("a parenthesis is not closed")
            return value
        if self._at == len(self._tokens):
            raise self._error("it ends too early" if self._tokens else "it is empty")
        kind, token = self._tokens[self._at]
        if kind == "operator":
            raise self._error(f"{token!r} is not expected there")
        self._at += 1
        if kind == "irrational":
            self._irrational = True
            return self._root() if token == "sqrt" else _CONSTANTS[token]
        if kind == "special":
            return math.nan if token == "nan" else math.inf
        if kind == "hexadecimal":
            return self._literal(token[2:], "p", 16, 2, 4, LARGEST_POWER)
        return self._literal(token.replace("_", ""), "e", 10, 10, 1, _LARGEST_DECIMAL_POWER)

    def _root(self) -> Number:
        """The square root of the atom that follows."""
        value = self._deeper(self._atom)
        square = self._finite(value, "sqrt")
        if square < 0:
            raise self._error("a square root of a negative number is not real")
        top, under = math.isqrt(square.numerator), math.isqrt(square.denominator)
        if (top * top, under * under) == (square.numerator, square.denominator):
            return Fraction(top, under) if square else value
        product = square.numerator * square.denominator  # the root is that of this, divided by the denominator
        places = max(0, 166 - product.bit_length() // 2)
        return self._limited(Fraction(math.isqrt(product << 2 * places), square.denominator << places))

    def _deeper(self, rule: Callable[[], Number]) -> Number:
        self._depth += 1
        if self._depth > 50:
            raise self._error("it is nested more than 50 deep")
        value = rule()
        self._depth -= 1
        return value

    def _literal(self, token: str, mark: str, base: int, root: int, per_digit: int, largest: int) -> Fraction:
        """Digits of a base, times a power of `root` behind a mark; a digit after the point is worth `per_digit`."""
        digits, _, power = token.partition(mark)
        whole, _, part = digits.partition(".")
        significand = int(whole + part, base)
        if not significand:
            return Fraction(0)
        if power and (len(power.lstrip("+-").lstrip("0")) > 9 or abs(int(power)) > largest):
            raise self._too_far()
        return self._limited(Fraction(significand) * Fraction(root) ** (int(power or 0) - per_digit * len(part)))

    def _finite(self, value: Number, operator: str) -> Fraction:
        if isinstance(value, float) and value != 0:
            raise self._error(f"{operator!r} is not defined here for infinities and NaN, which stand alone")
        return Fraction(value)

    def _limited(self, value: Fraction) -> Fraction:
        numerator, denominator = abs(value.numerator).bit_length(), value.denominator.bit_length()
        far = value != 0 and abs(numerator - denominator) > LARGEST_POWER
        if far or max(numerator, denominator) > 2 * LARGEST_POWER:
            raise self._too_far()
        return value

    def _too_far(self) -> ValueError:
        return ValueError(
            f"Expected magnitudes from 2^-{LARGEST_POWER} to 2^{LARGEST_POWER}, also of intermediate results, but got "
            f"{self._shown()}: for infinity write inf, for zero 0"
        )


def _negative(value: Number) -> bool:
    return value < 0 or (isinstance(value, float) and math.copysign(1.0, value) < 0)
