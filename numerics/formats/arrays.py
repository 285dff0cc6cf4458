"""The codes of fp32 and fp64 arrays, and the values of codes: the arithmetic of `exact.py` in numpy.

A number is s * 2^e with an integer s below 2^53. In units of the target format it is an integer and a fraction that
float64 both holds exactly. s and e come from the bits, and no operand or result below is a float64 subnormal, so
`torch.set_flush_denormal` changes nothing here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.exact import (
    beyond_code,
    nan_code,
    stops_at_the_end,
    subnormal_steps,
)
from halfstep.numerics.formats.table import Format

Array = np.ndarray[Any, Any]
BLOCK_ELEMENTS = 32768  # ten arrays of so many numbers fit the L2 cache
_U = np.uint64


def code_dtype(form: Format) -> type:
    """The smallest unsigned integer type that holds a code."""
    return next(
        t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if form.bits <= bits
    )


def encode_array(
    values: Array,
    form: Format,
    rounding: str,
    overflow: str = "inf",
    nan: str = "canonical",
    subnormals: bool = True,
    seed: int = 0,
    offset: int = 0,
) -> Array:
    """The codes of a flat array of fp32 or fp64. The options are those of `codec.encode`, which checks them."""
    codes: Array = np.empty(values.size, code_dtype(form))
    for start in range(0, values.size, BLOCK_ELEMENTS):
        block = values[start : start + BLOCK_ELEMENTS]
        words = random_words(offset + start, block.size, seed) if rounding == "stochastic" else None
        codes[start : start + BLOCK_ELEMENTS] = _encode(block, form, rounding, overflow, nan, subnormals, words)
    return codes


def _encode(
    values: Array, form: Format, rounding: str, overflow: str, nan: str, subnormals: bool, words: Array | None
) -> Array:
    M, bias, unsigned = (23, 127, np.uint32) if values.dtype == np.float32 else (52, 1023, np.uint64)
    patterns = values.view(unsigned)
    field = (patterns >> M).astype(np.int64)
    negative, field = field > 2 * bias + 1, field & (2 * bias + 1)
    s = ((patterns & ((1 << M) - 1)) | ((field > 0).astype(unsigned) << M)).astype(np.float64)
    e = np.maximum(field, 1) - (bias + M)
    unit = np.zeros_like(e)
    if form.kind != "integer":
        unit = np.where(s == 0, form.emin, np.maximum(e + np.frexp(s)[1] - 1, form.emin)) - form.mantissa
    # All that is below 2^-100 units rounds alike, and all integers above 2^60 overflow.
    s = np.minimum(np.ldexp(s, (e - unit).clip(-153, 60)), 2.0**60)
    code = _rounded(s, rounding, negative, words, form)
    if form.kind == "scale":
        code = np.where(s >= 1, np.maximum(code + (unit - form.emin - 1), 0), 0)
    elif form.kind != "integer":  # as if the exponent had no upper limit
        code += (unit - (form.emin - form.mantissa)) << form.mantissa
    if not subnormals and form.has_subnormals:
        code[code < 1 << form.mantissa] = 0
    rare = (code > form.largest_code + (negative & (form.kind == "integer"))) | (field == 2 * bias + 1)
    if not form.signed:
        rare |= negative & (s != 0)
    elif form.kind == "integer":
        code = np.where(negative, form.codes - code, code)
    else:
        code |= (negative & (form.has_negative_zero | (code != 0))).astype(np.int64) << (form.bits - 1)
    codes: Array = code.astype(code_dtype(form))
    if rare.any():
        codes[rare] = _beyond(values[rare], form, rounding, overflow, nan)
    return codes


def _rounded(s: Array, rounding: str, negative: Array, words: Array | None, form: Format) -> Array:
    """Magnitudes in units rounded to integers, as `exact.py` does it."""
    if rounding == "nearest":
        return np.rint(s).astype(np.int64)
    below = s.astype(np.int64)
    rest = s - below
    if rounding == "nearest_away":
        return below + (rest >= 0.5)
    if rounding == "odd":
        return below | (rest > 0)
    if rounding in ("up", "down"):
        return below + ((rest > 0) & (negative == (rounding == "down")))
    if words is None:
        return below  # toward zero
    moves = rest * 2.0**32 >= 2.0**32 - words
    steps = subnormal_steps(form)
    if steps is not None:
        coarse = np.rint(rest * 2.0**steps) + (words >> (32 - steps)) >= 2**steps
        moves = np.where(below < 1 << form.mantissa, coarse, moves)
    return below + moves


def _beyond(values: Array, form: Format, rounding: str, overflow: str, nan: str) -> Array:
    """The codes of numbers that overflow, infinities and NaNs, and of negative numbers in a format without sign."""
    codes, negative, infinite = np.empty(values.size, _U), np.signbit(values), np.isinf(values)
    for sign in (False, True):
        ended = "saturate" if stops_at_the_end(rounding, sign, form) else overflow
        codes[negative == sign] = beyond_code(sign, form, ended)
        codes[(negative == sign) & infinite] = beyond_code(sign, form, overflow)
    is_nan = np.isnan(values)
    if is_nan.any():
        with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs
            codes[is_nan] = nan_code(values[is_nan].astype(np.float64).view(_U), form, nan)
    return codes


def random_words(first: int, count: int, seed: int) -> Array:
    """The random words of elements `first` to ``first + count - 1``, as uint32."""
    groups = np.arange(first // 8, (first + count + 7) // 8, dtype=_U)
    pairs = np.stack(philox_words.four_words(groups, seed), axis=1)
    words = np.stack([pairs & _U(0xFFFF), pairs >> _U(16)], axis=2).reshape(-1)[first % 8 : first % 8 + count]
    return (words << _U(16) | _U(0x8000)).astype(np.uint32)


# -------------------------------------------------------------------------------------------------------------- values


def decode_array(codes: Array, form: Format) -> Array:
    """The values of valid codes, in float64."""
    flat = codes.reshape(-1)
    values = _table(form)[flat] if form.bits <= 16 else _decode(flat.astype(_U), form)
    return values.reshape(codes.shape)


@lru_cache(maxsize=32)
def _table(form: Format) -> Array:
    """The value of every code."""
    values = _decode(np.arange(form.codes, dtype=_U), form)
    values.flags.writeable = False
    return values


def _decode(codes: Array, form: Format) -> Array:
    negative, magnitude = (codes & _U(form.sign_bit)) != 0, codes & _U(form.codes - 1 - form.sign_bit)
    if form.kind == "integer":
        return codes.astype(np.float64) - negative * float(form.codes)
    field, units = (magnitude >> _U(form.mantissa)).astype(np.int64), magnitude & _U((1 << form.mantissa) - 1)
    if form.kind == "scale":
        values = np.ldexp(1.0, field + form.emin)
    elif form.name == "fp64":
        values = magnitude.copy().view(np.float64)
    else:
        significand = (units + ((field > 0).astype(_U) << _U(form.mantissa))).astype(np.float64)
        with np.errstate(over="ignore"):  # infinities and NaNs are replaced below
            values = np.ldexp(significand, np.maximum(field, 1) - 1 + form.emin - form.mantissa)
    patterns = values.view(_U)
    special = magnitude > _U(form.largest_code)
    patterns[special] = 0x7FF8 << 48
    if form.kind == "ieee":
        patterns[special] |= units[special] << _U(52 - form.mantissa)
        patterns[magnitude == _U(form.infinity_code or 0)] = 0x7FF << 52
    patterns |= negative.astype(_U) << _U(63)
    if form.kind == "fnuz":
        patterns[codes == _U(form.sign_bit)] = 0x7FF8 << 48
    return values
