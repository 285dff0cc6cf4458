"""The arithmetic of exact.py and blocks.py in numpy, for arrays of fp32 and fp64: the same codes, many at a time.

A number is s * 2^e with an integer s below 2^53. In units of the target format it is an integer and a fraction that
float64 both holds exactly. s and e come from the bits, and no operand or result below is a float64 subnormal, so
`torch.set_flush_denormal` changes nothing here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from halfstep.numerics.formats import exact
from halfstep.numerics.formats.table import BlockFormat, Format, formats

Array = np.ndarray[Any, Any]
BLOCK_ELEMENTS = 32768  # ten arrays of so many numbers fit the L2 cache
_U = np.uint64
_FP32 = formats.element("fp32")


def code_dtype(form: Format) -> type:
    """The smallest unsigned integer type that holds a code."""
    return np.dtype(f"uint{max(8, 1 << (form.bits - 1).bit_length())}").type


def encode_array(
    values: Array, form: Format, rounding: str, overflow: str, nan: str, subnormals: bool, words: Array | None,
    shift: Any = 0,
) -> Array:  # fmt: skip
    """The codes of values over 2^shift."""
    M, bias, unsigned = (23, 127, np.uint32) if values.dtype == np.float32 else (52, 1023, np.uint64)
    patterns = values.view(unsigned)
    field = (patterns >> M).astype(np.int64)
    negative, field = field > 2 * bias + 1, field & (2 * bias + 1)
    s = ((patterns & ((1 << M) - 1)) | ((field > 0).astype(unsigned) << M)).astype(np.float64)
    e = np.maximum(field, 1) - (bias + M) - shift
    unit = np.zeros_like(e)
    if form.kind != "integer":
        unit = np.where(s == 0, form.emin, np.maximum(e + np.frexp(s)[1] - 1, form.emin)) - form.mantissa
    # All that is below 2^-100 units rounds alike, and all integers above 2^60 overflow.
    s = np.minimum(np.ldexp(s, (e - unit).clip(-153, 60)), 2.0**60)
    code = (np.rint(s) if rounding == "nearest" else s).astype(np.int64)
    if rounding != "nearest":
        part = s - code
        code += (part > 0) & exact.moves_away(code, part, rounding, negative, words, form)
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


def round32(values: Array) -> Array:
    """float64 values rounded to fp32, in float64. Quotients of numbers of fp32 are rounded once, in spite of float64:
    Figueroa, "When is double rounding innocuous?", 1995."""
    return decode_array(encode_array(values, _FP32, "nearest", "inf", "canonical", True, None), _FP32)


def _beyond(values: Array, form: Format, rounding: str, overflow: str, nan: str) -> Array:
    """The codes of numbers that overflow, infinities and NaNs, and of negative numbers in a format without sign."""
    codes, negative, infinite = np.empty(values.size, _U), np.signbit(values), np.isinf(values)
    for sign in (False, True):
        ended = "saturate" if exact.stops_at_the_end(rounding, sign, form) else overflow
        codes[negative == sign] = exact.beyond_code(sign, form, ended)
        codes[(negative == sign) & infinite] = exact.beyond_code(sign, form, overflow)
    is_nan = np.isnan(values)
    if is_nan.any():
        with np.errstate(invalid="ignore"):  # numpy warns of signalling NaNs
            codes[is_nan] = exact.nan_code(values[is_nan].astype(np.float64).view(_U), form, nan)
    return codes


def random_words(first: int, count: int, seed: int) -> Array:
    """The random words of elements `first` to ``first + count - 1``, as uint32."""
    groups = np.arange(first // 8, (first + count + 7) // 8, dtype=_U)
    pairs = np.stack(exact.philox(groups, seed), axis=1)
    words = np.stack([pairs & _U(0xFFFF), pairs >> _U(16)], axis=2).reshape(-1)[first % 8 : first % 8 + count]
    return (words << _U(16) | _U(0x8000)).astype(np.uint32)


def decode_array(codes: Array, form: Format) -> Array:
    """The values of valid codes, in float64."""
    flat = codes.reshape(-1)
    values = _table(form)[flat] if form.bits <= 16 else _decode(flat.astype(_U), form)
    return values.reshape(codes.shape)


@lru_cache(maxsize=32)
def _table(form: Format) -> Array:
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


# -------------------------------------------------------------------------------------------------------------- blocks


def in_blocks(array: Array, axes: tuple[int, ...], size: int) -> Array:
    """The array with blocked dimensions last, and then one for the elements of a block; zeros fill the last blocks."""
    last = range(-len(axes), 0)
    moved = np.moveaxis(array, axes, last)
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - len(axes)) + [(0, -moved.shape[at] % size) for at in last])
    split = padded.reshape(*padded.shape[: -len(axes)], *(n for at in last for n in (padded.shape[at] // size, size)))
    split = split.swapaxes(-3, -2) if len(axes) == 2 else split
    return split.reshape(*split.shape[: -len(axes)], size ** len(axes))


def in_order(split: Array, axes: tuple[int, ...], size: int, shape: tuple[int, ...]) -> Array:
    """The reverse of `in_blocks`, contiguous."""
    last = range(-len(axes), 0)
    split = split.reshape(*split.shape[:-1], *[size] * len(axes))
    split = split.swapaxes(-3, -2) if len(axes) == 2 else split
    counts = split.shape[split.ndim - 2 * len(axes) :: 2]
    padded = split.reshape(*split.shape[: -2 * len(axes)], *(n * size for n in counts))
    return np.ascontiguousarray(np.moveaxis(padded, last, axes)[tuple(map(slice, shape))])


def encode_blocks(
    rows: Array, form: BlockFormat, rounding: str, overflow: str, subnormals: bool, words: Array | None, g: float = 1.0
) -> tuple[Array, Array]:
    """`blocks.encode_block` of each row: uint8 codes in the shape ``(blocks, elements)`` of `rows`, and scales.

    Rows are fp32 or fp64; of formats with the global scale `g`, fp64 with numbers of fp32.
    """
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.uint8)
    step = max(BLOCK_ELEMENTS // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        row, noise = rows[part], None if words is None else words[part]
        scales[part] = _scale_codes(np.abs(row).max(-1), form, overflow, g)
        scale, shift = decode_array(scales[part, None], form.scale), np.int64(0)
        if form.has_global_scale:
            reciprocal = round32(round32(np.array([1 / g])) / np.where(scale > 0, scale, 1.0))
            row = np.where(scale > 0, round32(row * reciprocal), np.copysign(0.0, row))
        else:
            shift = np.int64(form.scale.emin) + scales[part, None]
        row = np.where(np.isnan(scale), row.dtype.type(0), row)
        codes[part] = encode_array(row, form.element, rounding, "saturate", "canonical", subnormals, noise, shift)
    return codes, scales


def _scale_codes(largest: Array, form: BlockFormat, overflow: str, g: Any) -> Array:
    """`blocks.scale_code` of the largest magnitudes of blocks, in fp32 or fp64."""
    if form.has_global_scale:
        quotients = round32(round32(largest / form.element.max) / np.float64(g))
        return encode_array(quotients, form.scale, "nearest", overflow, "canonical", True, None)
    M, bias, unsigned = (23, 127, np.uint32) if largest.dtype == np.float32 else (52, 1023, np.uint64)
    element, below = form.element, (1 << M) - 1
    # What is added to the mantissa so that it is carried to the exponent where the rule says one more.
    mantissa = int((element.max / 2**element.emax - 1) * (1 << M))
    carry = {"floor": 0, "ceil": below, "even": 1 << (M - 1 - element.mantissa), "rceil": below - mantissa}[form.rule]
    codes = ((largest.view(unsigned) + unsigned(carry)) >> unsigned(M)).astype(np.int64) - bias - element.emax
    codes = np.maximum(codes - form.scale.emin, 0)
    codes[(codes > form.scale.largest_code) | np.isinf(largest)] = exact.beyond_code(False, form.scale, overflow)
    codes[np.isnan(largest)] = form.scale.nan_code
    return codes.astype(np.uint8)
