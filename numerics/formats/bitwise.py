"""Codes of fp32 and fp64 arrays: the arithmetic of `exact.py` in numpy's integers, a block at a time.

A number is s * 2^(e - M) with 2^M <= s < 2^(M + 1), where M is 23, or 52 for fp64 and for formats that need it. A unit
of the target format is 2^d of the last bits of s, so rounding moves d bits out. No float is added or multiplied:
`torch.set_flush_denormal` changes nothing here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.exact import beyond_code, nan_code, stops_at_the_end, subnormal_steps
from halfstep.numerics.formats.table import Format

Array = np.ndarray[Any, Any]

BLOCK_ELEMENTS = 32768  # ten arrays of so many integers fit the L2 cache
_U = np.uint64


def code_dtype(format: Format) -> type:
    """The smallest unsigned integer type that holds a code."""
    return next(
        t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if format.bits <= bits
    )


def encode_array(
    values: Array, format: Format, rounding: str, overflow: str, nan: str, subnormals: bool, seed: int, offset: int
) -> Array:
    """The codes of a flat array of fp32 or fp64. The options are those of `codec.encode`, which checks them."""
    codes: Array = np.empty(values.size, code_dtype(format))
    for start in range(0, values.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        part = values[block]
        words = random_words(offset + start, part.size, seed) if rounding == "stochastic" else None
        codes[block] = _encode(part, format, rounding, overflow, nan, subnormals, words)
    return codes


def _encode(
    values: Array, format: Format, rounding: str, overflow: str, nan: str, subnormals: bool, words: Array | None
) -> Array:
    wide = values.dtype == np.float64 or format.mantissa > 23 or format.bits > 32
    negative, exponent, s, special = _parts(values, wide)
    code = _rounded(s, exponent, negative, format, rounding, words)
    if not subnormals and format.has_subnormals:
        code[code < 1 << format.mantissa] = 0
    rare = code > format.largest_code + (negative if format.kind == "integer" else 0)
    rare |= special
    if not format.signed:
        rare |= negative & (s != 0)
    codes = code.view(s.dtype)
    if format.kind == "integer":
        codes = np.where(negative, format.codes - codes, codes)
    elif format.signed:
        codes |= (negative & (format.has_negative_zero or code != 0)) * s.dtype.type(format.sign_bit)
    codes = codes.astype(code_dtype(format))
    if rare.any():
        codes[rare] = _beyond(values[rare], format, rounding, overflow, nan)
    return codes


def _parts(values: Array, wide: bool) -> tuple[Array, Array, Array, Array]:
    """The signs of numbers, their e and s (in 64 bits if `wide`, otherwise in 32), and whether they are not finite."""
    M, bias, unsigned, signed = 52, 1023, np.uint64, np.int64
    if values.dtype == np.float32:
        M, bias, unsigned, signed = 23, 127, np.uint32, np.int32
    patterns = values.view(unsigned)
    negative = values.view(signed) < 0
    field = (patterns >> M).astype(signed) & (2 * bias + 1)
    fraction = patterns & ((1 << M) - 1)
    exponent, s, special = field - bias, fraction | (1 << M), field == 2 * bias + 1
    tiny = np.flatnonzero(field == 0)  # zeros and subnormals: the highest bit of s becomes bit M
    if tiny.size:
        missing = M + 1 - np.frexp(fraction[tiny].astype(np.float64))[1]
        # Zero is below the numbers of every format.
        exponent[tiny] = np.where(fraction[tiny] == 0, -1075, 1 - bias - missing)
        s[tiny] = fraction[tiny] << missing.astype(unsigned)
    if wide and M == 23:
        return negative, exponent.astype(np.int64), s.astype(_U) << 29, special
    return negative, exponent, s, special


def _rounded(s: Array, exponent: Array, negative: Array, format: Format, rounding: str, words: Array | None) -> Array:
    """The codes of magnitudes, as if the exponent had no upper limit, in signed integers of the width of `s`."""
    M, width = (23, 32) if s.dtype == np.uint32 else (52, 64)
    if format.kind == "integer":
        dropped, above = np.maximum(M - exponent, 0), 0
    else:
        dropped = np.maximum(format.emin - exponent, 0) + (M - format.mantissa)
        above = np.maximum(exponent - format.emin, 0) << format.mantissa
    deep = np.flatnonzero(dropped >= width)
    if deep.size:  # far below a unit: what counts of s are its upper bits, and whether anything follows
        s[deep] = (s[deep] >> np.minimum(dropped[deep] - (width - 1), width - 1).astype(s.dtype)) | (s[deep] != 0)
        dropped[deep] = width - 1
    d = dropped.astype(s.dtype)
    ones = (1 << d) - 1
    if rounding == "nearest":
        units = _to_even(s, d, ones)
    elif rounding == "nearest_away":
        units = (s + ((ones + 1) >> 1)) >> d
    elif rounding == "odd":
        units = (s >> d) | ((s & ones) != 0)
    elif rounding in ("up", "down"):
        units = (s + ones * (negative == (rounding == "down"))) >> d
    elif rounding == "stochastic":
        assert words is not None
        noise = words.astype(s.dtype)
        units = (s + ((noise << (width - 32)) >> (width - d))) >> d
        steps, small = subnormal_steps(format), np.flatnonzero(exponent < format.emin)
        if steps is not None and small.size:
            fewer = d[small] - steps
            parts = _to_even(s[small], fewer, (1 << fewer) - 1)
            units[small] = (parts + (noise[small] >> (32 - steps))) >> steps
    else:
        units = s >> d
    code = units.view(exponent.dtype) + above
    return np.maximum(code - 1, 0) if format.kind == "scale" else code


def _to_even(s: Array, d: Array, ones: Array) -> Array:
    """`s` without `d` bits, which are as many as `ones` has, to nearest, in ties to even."""
    last = (s >> d) & ones & 1
    return (s + (ones >> 1) + last) >> d


def _beyond(values: Array, format: Format, rounding: str, overflow: str, nan: str) -> Array:
    """The codes of numbers that overflow, infinities and NaNs, and of negative numbers in a format without sign."""
    codes, negative, infinite = np.empty(values.size, _U), np.signbit(values), np.isinf(values)
    for sign in (False, True):
        ended = "saturate" if stops_at_the_end(rounding, sign, format) else overflow
        codes[negative == sign] = beyond_code(sign, format, ended)
        codes[(negative == sign) & infinite] = beyond_code(sign, format, overflow)
    is_nan = np.isnan(values)
    if is_nan.any():
        with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs
            codes[is_nan] = nan_code(values[is_nan].astype(np.float64).view(_U), format, nan)
    return codes


def random_words(first: int, count: int, seed: int) -> Array:
    """The random words of elements `first` to ``first + count - 1``, as uint32."""
    groups = np.arange(first // 8, (first + count + 7) // 8, dtype=_U)
    draws = np.empty((groups.size, 8), np.uint32)
    for pair, both in enumerate(philox_words.four_words(groups, seed)):
        draws[:, 2 * pair], draws[:, 2 * pair + 1] = both & 0xFFFF, both >> _U(16)
    words = draws.reshape(-1)[first % 8 : first % 8 + count]
    words <<= np.uint32(16)
    words |= np.uint32(0x8000)
    return words
