"""Blocks of numbers that share a scale, one block at a time in rational arithmetic: the specification of the codec.

Let a be the largest magnitude of a block, E the format of its elements, with m bits of mantissa and the largest number
``E.max`` = M 2^emax, 1 <= M < 2. An element v becomes v / X, rounded to E; beyond ``E.max``, that with its sign.

**MX** (OCP Microscaling formats 1.0, 6.3). X is a power of two, of E8M0: 2^(e - emax), where a = A 2^e, 1 <= A < 2, and
by the rule, named as in torchao's `ScaleCalculationMode`, e is one more:

    floor   never (OCP): where A > M, the largest elements saturate
    ceil    if A > 1
    even    if a, rounded to m bits of mantissa with ties away from zero, is 2^(e + 1)
    rceil   if A > M: the least X with which no element saturates (NVIDIA's cuBLAS and TransformerEngine)

Where E8M0 has no such power, X is 2^-127, or overflows. Nothing else is rounded.

**NVFP4** (NVIDIA). X = s g, where g is a number of fp32, by default that of `global_scale`, and s one of E4M3. The
arithmetic is that of fp32, each operation rounded once, numbers first to fp32, as in torchao:

    g = max(amax / 2688, 2^-117)        amax the largest finite magnitude of all blocks, 2688 = 448 * 6
    s = (a / 6) / g                     rounded to E4M3 to nearest even, subnormals kept
    q = v * ((1 / g) / s)               rounded to E

**Special blocks.** A NaN or an infinity makes the scale of its block NaN, and its codes 0: E may have neither, and with
the others of the block, nothing that is not finite is hidden. So does a scale that overflows. Where overflow saturates,
X is the largest scale instead, also for an infinity. A block of zeros has the scale of code 0, 2^-127 in E8M0 and 0 in
E4M3, and its zeros keep their signs; so do all numbers of a block whose E4M3 scale is rounded to 0, as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from halfstep.numerics.formats import exact
from halfstep.numerics.formats.exact import Number, code_of, decode_exact, power_of_two
from halfstep.numerics.formats.table import BlockFormat, formats

LEAST_GLOBAL, LARGEST_GLOBAL = 2.0**-117, 2.0**118  # between them, no reciprocal above is subnormal or infinite
_FP32 = formats.element("fp32")


def in_float32(number: Number) -> Number:
    """A number rounded to fp32, to nearest even."""
    return decode_exact(code_of(number, _FP32), _FP32)


def rounded_first(number: Number, form: BlockFormat) -> Number:
    """A number as the arithmetic begins: rounded to fp32 for formats with a global scale."""
    return in_float32(number) if form.has_global_scale else number


def global_scale(largest: Number, form: BlockFormat) -> Fraction:
    """The g of blocks whose largest finite magnitude is `largest`."""
    return max(Fraction(in_float32(Fraction(largest) / Fraction(form.largest))), Fraction(LEAST_GLOBAL))


def scale_code(largest: Number, form: BlockFormat, overflow: str = "inf", g: Fraction = Fraction(1)) -> int:
    """The code of the scale of a block, where overflow ``"inf"`` and ``"nan"`` both give NaN.

    `largest` is the largest magnitude of the block, or NaN if it has a NaN; `g` is the global scale.
    """
    if isinstance(largest, float) and largest != 0:
        saturates = largest == math.inf and overflow == "saturate"
        return exact.beyond_code(False, form.scale, "saturate" if saturates else "nan")
    a = Fraction(largest)
    if form.has_global_scale:
        quotient = in_float32(Fraction(in_float32(a / Fraction(form.element.max))) / g)
        return code_of(quotient, form.scale, overflow=overflow)
    if not a:
        return 0
    exponent, element = power_of_two(a), form.element
    mantissa = a / Fraction(2) ** exponent
    limits = {"ceil": Fraction(1), "rceil": Fraction(element.max) / 2**element.emax}
    if form.rule == "even":
        exponent += mantissa >= 2 - Fraction(1, 2 << element.mantissa)
    elif form.rule in limits:
        exponent += mantissa > limits[form.rule]
    code = exponent - element.emax - form.scale.emin
    return exact.beyond_code(False, form.scale, overflow) if code > form.scale.largest_code else max(code, 0)


def quotient(number: Number, scale: Fraction, form: BlockFormat, g: Fraction = Fraction(1)) -> Number:
    """What is rounded to the format of elements: a number, which is not NaN, over a scale that is not 0."""
    if isinstance(number, float):  # an infinity or -0.0
        return number
    if not form.has_global_scale:
        return number / scale
    reciprocal = in_float32(Fraction(in_float32(1 / g)) / scale)
    return in_float32(number * Fraction(reciprocal))


def encode_block(
    values: Iterable[Any], format: Any, rounding: str = "nearest", *, overflow: str = "inf", subnormals: bool = True,
    words: Sequence[int] | None = None, global_scale: Fraction | float = Fraction(1),
) -> tuple[list[int], int]:  # fmt: skip
    """The code of each element of one block, and that of its scale, computed in rational arithmetic.

    `values` are at most ``format.size`` numbers of any type that `exact` takes, and `words` a random word for each, for
    ``"stochastic"``. The options are those of `codec.encode`; rounding is that of the elements.

    Examples:
        >>> from halfstep.numerics.formats.blocks import encode_block
        >>> encode_block([0.1, 3, -100], "mxfp4")  # in steps of 2^4: 0, 0 and -6
        ([0, 0, 15], 131)
    """
    form = formats[format]
    numbers, g = [rounded_first(exact.exact(value), form) for value in values], Fraction(global_scale)
    magnitudes = [-number if number < 0 else number for number in numbers]
    nan = any(number != number for number in numbers)
    scale = scale_code(math.nan if nan else max(magnitudes), form, overflow, g)
    unit = decode_exact(scale, form.scale)
    if unit != unit:
        return [0] * len(numbers), scale
    codes = []
    for number, word in zip(numbers, words or [0] * len(numbers), strict=True):
        sign = -0.0 if number < 0 or (isinstance(number, float) and number == 0) else Fraction(0)
        part = quotient(number, Fraction(unit), form, g) if unit else sign
        codes.append(code_of(part, form.element, rounding, "saturate", "canonical", subnormals, word))
    return codes, scale


def decode_block(codes: Iterable[int], scale: int, format: Any, global_scale: Fraction | float = 1) -> list[Number]:
    """The exact values of the codes of one block, the reverse of `encode_block`; NaN where the scale is NaN."""
    form = formats[format]
    unit, values = decode_exact(scale, form.scale), [decode_exact(code, form.element) for code in codes]
    if unit != unit:
        return [math.nan] * len(values)
    step = Fraction(unit) * Fraction(global_scale)
    return [value if isinstance(value, float) else value * step or (-0.0 if value < 0 else value) for value in values]
