"""Encode values in a format and decode codes: numpy arrays, torch tensors, lists, single numbers and texts.

`exact.py` specifies the rounding of one number; the end of this file has the same arithmetic in numpy, for fp32 and
fp64. Values that these cannot represent (texts, fractions, integers beyond 2^53, long doubles) are rounded by
`exact.py`, so that every value is rounded once.

This module does not import torch. Tensors are converted to numpy arrays on the CPU, and results to tensors on the
device of the input.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from halfstep.numerics.formats import exact, philox_words
from halfstep.numerics.formats.exact import Number, parse_number
from halfstep.numerics.formats.table import Format, formats

__all__ = ["Neighbours", "decode", "encode", "neighbours", "next_down", "next_up", "parse_number", "round_to", "ulp"]

Array = np.ndarray[Any, Any]
BLOCK_ELEMENTS = 32768  # ten arrays of so many numbers fit the L2 cache
_LARGEST_EXACT = 2**53  # float64 represents all integers up to here
_U = np.uint64


def encode(
    values: Any,
    format: Any,
    rounding: str = "nearest",
    *,
    overflow: str = "inf",
    nan: str = "canonical",
    subnormals: bool = True,
    seed: int | None = None,
    offset: int = 0,
) -> Any:
    """Encode values in a format. Each value is rounded once.

    Args:
        values: a number, a text (see `parse_number`), a Fraction or a Decimal; a list or an array of these; a numpy
            array of floats or integers, an ml_dtypes array, or a torch tensor, of any shape.
        format: a key of `formats`, such as ``"fp16"``, ``"E4M3"``, ``(5, 10)`` or a dtype.
        rounding: ``"nearest"`` (ties to even), ``"nearest_away"``, ``"toward_zero"``, ``"up"``, ``"down"``, ``"odd"``
            or ``"stochastic"``; `halfstep.numerics.formats.exact` defines them.
        overflow: what numbers that round to more than the largest number, and infinities, become: ``"inf"`` (infinity,
            or NaN in a format without infinity, or the largest number in a format without both), ``"saturate"`` (the
            largest number) or ``"nan"``. Toward zero and to odd no finite number overflows; up only positive ones do,
            and down only negative ones.
        nan: what NaN becomes: ``"canonical"`` (`Format.nan_code`, whatever the sign), ``"payload"`` (a quiet NaN with
            the same sign and upper bits), ``"zero"``, or ``"raise"`` for an error. In a format without NaN, all but
            ``"zero"`` raise.
        subnormals: whether to keep subnormal results. Otherwise they become zeros of the same sign.
        seed: seed of ``"stochastic"``, 0 to 2^63 - 1. By default it is drawn from Python's `random`, or for tensors
            from torch's generator on the CPU. The random bits of an element depend only on the seed and its index in
            row-major order. fp32 values get the same codes as from `halfstep.cast`.
        offset: index of the first element, if `values` is a part of a larger array.

    Returns:
        The codes in the smallest of uint8, uint16, uint32 and uint64 that represents them, in the shape of `values`: an
        array, a numpy scalar for a single value, or a tensor for a tensor.

    Raises:
        TypeError, ValueError: `values` are not real numbers, an option is unknown, or there is no code for a NaN.
        UnknownFormat: there is no such format.

    Examples:
        >>> halfstep.encode([0.1, "1/3", 1e6], "bf16")
        array([15821, 16043, 18804], dtype=uint16)
        >>> hex(halfstep.encode(65520, "fp16"))  # infinity
        '0x7c00'
        >>> hex(halfstep.encode(65520, "fp16", overflow="saturate"))
        '0x7bff'
    """
    form = formats[format]
    exact.check_options(form, rounding, overflow, nan, subnormals, seed, offset)
    options: dict[str, Any] = {"overflow": overflow, "nan": nan, "subnormals": subnormals, "offset": offset}
    if rounding == "stochastic" and seed is None:
        seed = random.getrandbits(63)
        if _is_tensor(values):
            torch = sys.modules["torch"]
            seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    if _is_tensor(values):
        return _as_tensor(encode(_array_of(values), form, rounding, **options, seed=seed), values)
    array = _prepared(values)
    flat = np.ascontiguousarray(array).reshape(-1)
    codes: Array = np.empty(flat.size, code_dtype(form))
    if flat.dtype == object:
        del options["offset"]
        elements = enumerate(flat.tolist(), offset)
        codes[:] = [exact.encode_exact(value, form, rounding, **options, seed=seed, offset=i) for i, value in elements]
    else:
        for start in range(0, flat.size, BLOCK_ELEMENTS):
            block = flat[start : start + BLOCK_ELEMENTS]
            words = random_words(offset + start, block.size, seed or 0) if rounding == "stochastic" else None
            codes[start : start + BLOCK_ELEMENTS] = _encode(block, form, rounding, overflow, nan, subnormals, words)
    codes = codes.reshape(array.shape)
    return codes if isinstance(values, np.ndarray) else codes[()]


def decode(codes: Any, format: Any) -> Any:
    """Decode the codes of a format. The values are exact.

    Args:
        codes: integers of any shape: a number, a list, an array, or a tensor. A signed type with as many bits as the
            format is read as bit patterns.
        format: a key of `formats`.

    Returns:
        The values in float64, in the same shape: an array, a numpy scalar or a tensor. NaNs are quiet and keep their
        sign and payload.

    Raises:
        TypeError: `codes` are not integers.
        ValueError: a number is not a code of the format.

    Examples:
        >>> halfstep.decode([0x3C00, 0x3C01, 0x7C00], "fp16").tolist()
        [1.0, 1.0009765625, inf]
    """
    form = formats[format]
    if _is_tensor(codes):
        return _as_tensor(decode(_array_of(codes, codes=True), form), codes)
    array = np.asarray(codes)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iu":
        raise TypeError(f"Expected codes to be integers from 0 to {form.codes - 1:#x}, but got type {array.dtype}")
    if array.dtype.kind == "i" and array.dtype.itemsize * 8 == form.bits:
        array = array.view(array.dtype.str.replace("i", "u"))
    if array.size and (array.min() < 0 or array.max() >= form.codes):
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise ValueError(f"Expected codes of {form.name} to be from 0 to {form.codes - 1:#x}, but got {wrong:#x}")
    values = decode_array(array, form)
    return values if isinstance(codes, np.ndarray) else values[()]


def round_to(
    values: Any,
    format: Any,
    rounding: str = "nearest",
    *,
    overflow: str = "inf",
    nan: str = "canonical",
    subnormals: bool = True,
    seed: int | None = None,
    offset: int = 0,
) -> Any:
    """Round values to a format: ``decode(encode(...))``. The arguments are those of `encode`.

    Returns:
        float64 numbers of the same shape. For a tensor, the result has the tensor's own dtype if that represents every
        value of `format`, as fp32 does for fp16, and otherwise float64.

    Examples:
        >>> float(halfstep.round_to(0.1, "bf16"))
        0.10009765625
        >>> halfstep.round_to(torch.tensor([0.1]), "fp16")
        tensor([0.1000])
    """
    options: dict[str, Any] = {"overflow": overflow, "nan": nan, "subnormals": subnormals}
    result = decode(encode(values, format, rounding, **options, seed=seed, offset=offset), format)
    if _is_tensor(values) and values.dtype.is_floating_point and _holds(formats[values.dtype], formats[format]):
        return result.to(values.dtype)
    return result


def ulp(values: Any, format: Any) -> Any:
    """The distance between the format's numbers around each value (`Format.ulp`), in float64 and the shape of `values`.

    Examples:
        >>> from halfstep.numerics.formats.codec import ulp
        >>> ulp([1.0, 1000.0], "bf16").tolist()
        [0.0078125, 4.0]
    """
    return _each(values, lambda number: exact.ulp_exact(number, format))


def next_up(values: Any, format: Any) -> Any:
    """The least number of the format greater than each value, which may be any number: nextUp of IEEE 754.

    It is that of `exact.next_exact`, in float64 and the shape of `values`.

    Examples:
        >>> from halfstep.numerics.formats.codec import next_up
        >>> next_up([1.0, 65504.0], "fp16").tolist()
        [1.0009765625, inf]
    """
    return _each(values, lambda number: exact.next_exact(number, format, up=True))


def next_down(values: Any, format: Any) -> Any:
    """The greatest number of the format less than each value: nextDown of IEEE 754. See `next_up`.

    Examples:
        >>> from halfstep.numerics.formats.codec import next_down
        >>> float(next_down(1.0, "bf16"))
        0.99609375
    """
    return _each(values, lambda number: exact.next_exact(number, format, up=False))


@dataclass(frozen=True)
class Neighbours:
    """The numbers of a format around a number.

    Attributes:
        value: the number.
        exact: whether `value` is a number of the format. `below` and `above` are then `value` itself.
        below, above: the numbers of the format on both sides of `value`. Beyond the largest number this is infinity, or
            NaN in a format without infinity, or None in a format without both.
        midpoint: the middle between `below` and `above`, the threshold of rounding to nearest. Beyond the largest
            number it is the middle between that and the next number if there were one. None if `exact`, or if there is
            no number on the other side.
        nearest: the number that ``"nearest"`` chooses, with ties to even.
        code_below, code_above, code_nearest: the codes of these numbers.
        ulp: the distance between the format's numbers around `value`.
        previous, next: the numbers strictly below and above `value`: `next_down` and `next_up`.
    """

    value: Number
    exact: bool
    below: Number | None
    above: Number | None
    midpoint: Fraction | None
    nearest: Number
    code_below: int | None
    code_above: int | None
    code_nearest: int
    ulp: Number
    previous: Number
    next: Number

    @property
    def error(self) -> Fraction | None:
        """`nearest` minus `value`; None if `nearest` is not finite."""
        if isinstance(self.nearest, float) and self.nearest != 0:
            return None
        return Fraction(self.nearest) - Fraction(self.value)


def neighbours(value: Any, format: Any) -> Neighbours:
    """The numbers of a format around a number.

    Args:
        value: a finite number, of a type that `exact` accepts.
        format: a key of `formats`.

    Raises:
        ValueError: `value` is NaN or an infinity.

    Examples:
        >>> from halfstep.numerics.formats.codec import neighbours
        >>> around = neighbours("1/3", "fp16")
        >>> float(around.below), float(around.above)
        (0.333251953125, 0.33349609375)
    """
    form, number = formats[format], exact.exact(value)
    if isinstance(number, float) and number != 0:
        raise ValueError(f"Expected value to be a finite number, which has neighbours, but got {value!r}")
    code = exact.code_of(number, form)
    nearest, step = exact.decode_exact(code, form), Fraction(2) ** exact.unit_exponent(Fraction(number), form)
    previous, following = (exact.next_exact(number, form, up=up) for up in (False, True))
    if nearest == number:
        return Neighbours(number, True, number, number, None, nearest, code, code, code, step, previous, following)
    open_ended = form.has_infinity or form.has_nan
    below = previous if open_ended or number > form.lowest else None
    above = following if open_ended or number < form.max else None
    midpoint = None
    if form.lowest < number < form.max:
        midpoint = (Fraction(previous) + Fraction(following)) / 2
    elif number > form.max:
        midpoint = Fraction(form.max) + Fraction(form.ulp(form.max)) / 2
    elif form.signed:
        midpoint = Fraction(form.lowest) - Fraction(form.ulp(form.lowest)) / 2
    first, second = (None if side is None else exact.code_of(side, form) for side in (below, above))
    return Neighbours(number, False, below, above, midpoint, nearest, first, second, code, step, previous, following)


def _each(values: Any, function: Callable[[Any], Any]) -> Any:
    """A function of one number, in exact arithmetic, of all values."""
    if _is_tensor(values):
        return _as_tensor(_each(_array_of(values), function), values)
    array = _prepared(values)
    if array.dtype == np.float32:  # by its code: astype reads subnormals as zeros after set_flush_denormal(True)
        array = decode_array(array.view(np.uint32), formats["fp32"])
    numbers = [_float(function(value)) for value in array.reshape(-1).tolist()]
    result = np.array(numbers, dtype=np.float64).reshape(array.shape)
    return result if isinstance(values, np.ndarray) else result[()]


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # the ulp of a number beyond float64
        return float("inf")


# ------------------------------------------------------------------------------------------------------------- sources


def _prepared(values: Any) -> Array:
    """The values as an array of fp32 or fp64, or of objects that `exact` accepts, without rounding."""
    if isinstance(values, (np.ndarray, np.generic)):
        array = np.asarray(values)
    else:
        array = np.array(values, dtype=object)
        types = {type(value) for value in array.reshape(-1).tolist()}
        if types <= {float}:
            array = array.astype(np.float64)
        elif types <= {int, bool}:
            plain = np.asarray(values)
            array = plain if plain.dtype.kind in "iub" else array  # integers beyond 64 bits stay objects
    dtype_kind, size = array.dtype.kind, array.dtype.itemsize
    if dtype_kind == "S":
        array = np.char.decode(array, "ascii")
    if dtype_kind in "SUTO":
        return array.astype(object)
    if array.dtype.type.__module__.partition(".")[0] == "ml_dtypes" or (dtype_kind == "f" and size == 2):
        return array.astype(np.float32)  # which represents every value of every one of these types
    if dtype_kind not in "fiub":
        raise TypeError(
            "Expected values to be real numbers (floats, integers, Fraction, Decimal or strings), but got type "
            f"{array.dtype}"
        )
    if dtype_kind == "f" and size <= 8:
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype_kind == "f" or (array.size and (int(array.max()) > _LARGEST_EXACT or int(array.min()) < -_LARGEST_EXACT)):
        objects = np.empty(array.shape, dtype=object)  # astype(object) would round long doubles to Python's floats
        objects.reshape(-1)[:] = list(array.reshape(-1))
        return objects
    return array.astype(np.float64)


def _holds(outer: Format, inner: Format) -> bool:
    """Whether every value of `inner` is a value of `outer`, a dtype of torch, all of which have NaN."""
    return (
        outer.kind not in ("integer", "scale")
        and outer.precision >= inner.precision
        and outer.min_subnormal <= inner.min_subnormal
        and outer.max >= inner.max
        and outer.emin - outer.mantissa <= inner.emin - inner.mantissa
        and outer.has_infinity >= inner.has_infinity
        and outer.has_negative_zero >= inner.has_negative_zero
    )


# ------------------------------------------------------------------------------------------------------------- tensors


def _is_tensor(values: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _array_of(tensor: Any, codes: bool = False) -> Array:
    """A tensor as an array. Floats of dtypes unknown to numpy are converted to fp32, except for `codes`."""
    torch = sys.modules["torch"]
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"Expected a dense tensor of real numbers, but got {tensor.dtype}, {tensor.layout}")
    tensor = tensor.detach().resolve_neg().cpu().contiguous()
    if codes or not tensor.dtype.is_floating_point or tensor.dtype in (torch.float16, torch.float32, torch.float64):
        array: Array = tensor.numpy()
        return array
    form = formats[tensor.dtype]
    if form.bits not in (8, 16):
        raise TypeError(f"Expected a dtype with one number per element, but got {tensor.dtype}")
    patterns = tensor.view(torch.int16 if form.bits == 16 else torch.uint8).numpy()
    if form.name == "bf16":  # shifted, which keeps the payload of a NaN
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    return decode_array(patterns, form).astype(np.float32)


def _as_tensor(array: Array, like: Any) -> Any:
    """The array as a tensor with the shape and device of `like`."""
    torch = sys.modules["torch"]
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(like.shape).to(like.device)


# -------------------------------------------------------------------------------------------- arrays of fp32 and fp64


def code_dtype(form: Format) -> type:
    """The smallest unsigned integer type that holds a code."""
    return next(
        t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if form.bits <= bits
    )


# A number is s * 2^e with an integer s below 2^53. In units of the target format it is an integer and a fraction that
# float64 both holds exactly. s and e come from the bits, and no operand or result below is a float64 subnormal, so
# `torch.set_flush_denormal` changes nothing here.


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
    pairs = np.stack(philox_words.four_words(groups, seed), axis=1)
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
