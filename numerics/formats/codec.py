"""Encode values in a format and decode codes: numpy arrays, torch tensors, lists, single numbers and texts.

`exact.py` specifies the rounding of one number, `blocks.py` that of a block; `arrays.py` has the same arithmetic in
numpy, for fp32 and fp64. Values that these cannot represent (texts, fractions, integers beyond 2^53, long doubles) are
rounded by `exact.py` and `blocks.py`, so that every value is rounded once.

This module does not import torch. Tensors are converted to numpy arrays on the CPU, and results to tensors on the
device of the input.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from halfstep.kernels.formats import Blocks, block_axes
from halfstep.numerics.formats import arrays, blocks, exact
from halfstep.numerics.formats.arrays import BLOCK_ELEMENTS, Array, decode_array
from halfstep.numerics.formats.exact import Neighbours, neighbours, parse_number
from halfstep.numerics.formats.table import BlockFormat, Format, formats

__all__ = [
    "Blocks", "Neighbours", "decode", "encode", "neighbours", "next_down", "next_up", "parse_number", "round_to", "ulp",
]  # fmt: skip

_LARGEST_EXACT = 2**53  # float64 represents all integers up to here
Axes = int | tuple[int, int]


def encode(
    values: Any, format: Any, rounding: str = "nearest", *, overflow: str = "inf", nan: str = "canonical",
    subnormals: bool = True, seed: int | None = None, offset: int = 0, axis: Axes | None = None,
    global_scale: float | None = None,
) -> Any:  # fmt: skip
    """Encode values in a format. Each value is rounded once.

    In a format of blocks, such as ``"mxfp8"``, consecutive values share a scale; `halfstep.numerics.formats.blocks` has
    the rules, and those for NaN, infinities and zeros.

    Args:
        values: a number, a text (see `parse_number`), a Fraction or a Decimal; a list or an array of these; a numpy
            array of floats or integers, an ml_dtypes array, or a torch tensor, of any shape.
        format: a key of `formats`, such as ``"fp16"``, ``"E4M3"``, ``(5, 10)`` or a dtype; of blocks, ``"mxfp8_e4m3"``
            or, by another rule for the scale, ``"mxfp8_e4m3_rceil"``.
        rounding: ``"nearest"`` (ties to even), ``"nearest_away"``, ``"toward_zero"``, ``"up"``, ``"down"``, ``"odd"``
            or ``"stochastic"``; `halfstep.numerics.formats.exact` defines them.
        overflow: what numbers that round to more than the largest number, and infinities, become: ``"inf"`` (infinity,
            or NaN in a format without infinity, or the largest number in a format without both), ``"saturate"`` (the
            largest number) or ``"nan"``. Toward zero and to odd no finite number overflows; up only positive ones do,
            and down only negative ones. In a format of blocks it says what becomes of scales: a block whose scale
            overflows, or that has an infinity, becomes NaN, or gets the largest scale; elements always saturate.
        nan: what NaN becomes: ``"canonical"`` (`Format.nan_code`, whatever the sign), ``"payload"`` (a quiet NaN with
            the same sign and upper bits), ``"zero"``, or ``"raise"`` for an error. In a format without NaN, all but
            ``"zero"`` raise.
        subnormals: whether to keep subnormal results. Otherwise they become zeros of the same sign.
        seed: seed of ``"stochastic"``, 0 to 2^63 - 1. By default it is drawn from Python's `random`, or for tensors
            from torch's generator on the CPU. The random bits of an element depend only on the seed and its index in
            row-major order. fp32 values get the same codes as from `halfstep.cast`.
        offset: index of the first element, if `values` is a part of a larger array.
        axis: of a format of blocks, the dimension in which values are consecutive (default: the last one), or two for
            square blocks. The last block may be short.
        global_scale: of NVFP4, a number from 2^-117 to 2^118, which is rounded to fp32. Default: the largest finite
            magnitude over 2688.

    Returns:
        The codes in the smallest of uint8, uint16, uint32 and uint64 that represents them, in the shape of `values`: an
        array, a numpy scalar for a single value, or a tensor for a tensor. For a format of blocks, `Blocks`.

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
        >>> halfstep.encode([0.1, 3, -100], "mxfp4")
        Blocks(codes=array([ 0,  0, 15], dtype=uint8), scales=array([131], dtype=uint8), global_scale=None)
    """
    form = formats[format]
    of_blocks = isinstance(form, BlockFormat)
    exact.check_options(form.scale if of_blocks else form, rounding, overflow, nan, subnormals, seed, offset)
    check_block_options(form, axis, global_scale)
    options: dict[str, Any] = {"overflow": overflow, "nan": nan, "subnormals": subnormals}
    if rounding == "stochastic" and seed is None:
        seed = random.getrandbits(63)
        if _is_tensor(values):
            torch = sys.modules["torch"]
            seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    if _is_tensor(values):
        options |= {"seed": seed, "offset": offset, "axis": axis, "global_scale": global_scale}
        return _as_tensor(encode(_array_of(values), form, rounding, **options), values)
    array = _prepared(values)

    def words(start: int, part: Array) -> Array | None:
        if rounding != "stochastic":
            return None
        return arrays.random_words(offset + start, part.size, seed or 0).reshape(part.shape)

    if of_blocks:
        axes = block_axes(axis, array.ndim)
        return _encode_blocks(array, form, axes, rounding, **options, words=words(0, array), g=global_scale)
    flat = np.ascontiguousarray(array).reshape(-1)
    codes: Array = np.empty(flat.size, arrays.code_dtype(form))
    if flat.dtype == object:
        elements = enumerate(flat.tolist(), offset)
        codes[:] = [exact.encode_exact(value, form, rounding, **options, seed=seed, offset=i) for i, value in elements]
    else:
        for start in range(0, flat.size, BLOCK_ELEMENTS):
            block = flat[start : start + BLOCK_ELEMENTS]
            coded = arrays.encode_array(block, form, rounding, **options, words=words(start, block))
            codes[start : start + BLOCK_ELEMENTS] = coded
    codes = codes.reshape(array.shape)
    return codes if isinstance(values, np.ndarray) else codes[()]


def decode(codes: Any, format: Any, *, axis: Axes | None = None) -> Any:
    """Decode the codes of a format. The values are exact.

    Args:
        codes: integers of any shape: a number, a list, an array, or a tensor. A signed type with as many bits as the
            format is read as bit patterns. For a format of blocks, `Blocks` or another sequence of the same three; a
            global scale of None is 1.
        format: a key of `formats`.
        axis: of a format of blocks, as in `encode`.

    Returns:
        The values in float64, in the same shape: an array, a numpy scalar or a tensor. NaNs are quiet and keep their
        sign and payload.

    Raises:
        TypeError: `codes` are not integers.
        ValueError: a number is not a code of the format.

    Examples:
        >>> halfstep.decode([0x3C00, 0x3C01, 0x7C00], "fp16").tolist()
        [1.0, 1.0009765625, inf]
        >>> halfstep.decode(halfstep.encode([0.1, 3, -100], "mxfp8"), "mxfp8").tolist()
        [0.1015625, 3.0, -96.0]
    """
    form = formats[format]
    check_block_options(form, axis, None)
    if isinstance(form, BlockFormat):
        return _decode_blocks(Blocks(*codes), form, axis)
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
    values: Any, format: Any, rounding: str = "nearest", *, overflow: str = "inf", nan: str = "canonical",
    subnormals: bool = True, seed: int | None = None, offset: int = 0, axis: Axes | None = None,
    global_scale: float | None = None,
) -> Any:  # fmt: skip
    """Round values to a format: ``decode(encode(...))``. The arguments are those of `encode`.

    Returns:
        float64 numbers of the same shape. For a tensor, the result has the tensor's own dtype if that represents every
        value of `format`, as fp32 does for fp16, and otherwise, and in formats of blocks, float64.

    Examples:
        >>> float(halfstep.round_to(0.1, "bf16"))
        0.10009765625
        >>> halfstep.round_to(torch.tensor([0.1]), "fp16")
        tensor([0.1000])
    """
    form = formats[format]
    options: dict[str, Any] = {"overflow": overflow, "nan": nan, "subnormals": subnormals, "axis": axis}
    codes = encode(values, form, rounding, **options, seed=seed, offset=offset, global_scale=global_scale)
    result = decode(codes, form, axis=axis)
    if not _is_tensor(values) or not values.dtype.is_floating_point or isinstance(form, BlockFormat):
        return result
    return result.to(values.dtype) if _holds(formats[values.dtype], form) else result


class RoundingErrors(NamedTuple):
    """What numbers lose in a format. Numbers that are not finite, or become so, count for `not_finite` only."""

    rms: float  # the root mean square of the errors
    relative: float  # `rms` over that of the numbers; -20 times its decimal logarithm: the signal-to-noise ratio in dB
    largest: float  # the largest magnitude of an error
    zeros: int  # how many numbers that were not 0 became 0
    not_finite: int  # how many results are not finite


def rounding_errors(values: Any, format: Any, **options: Any) -> RoundingErrors:
    """The errors of ``round_to(values, format, **options)``, in float64.

    Examples:
        >>> from halfstep.numerics.formats.codec import rounding_errors
        >>> x = [0.1, 3.0, -100.0, 500.0]
        >>> [round(rounding_errors(x, name).relative, 3) for name in ("mxfp8", "mxfp8_rceil", "mxfp4")]
        [0.102, 0.025, 0.228]
    """
    if _is_tensor(values):
        values = _array_of(values)
    before, after = (np.asarray(part) for part in (round_to(values, "fp64"), round_to(values, format, **options)))
    finite = np.isfinite(before) & np.isfinite(after)
    error = np.abs(np.subtract(after, before, where=finite, out=np.zeros_like(before)))
    size = max(int(finite.sum()), 1)
    rms, norm = (float(np.sqrt((part**2).sum() / size)) for part in (error, np.where(finite, before, 0)))
    zeros = int(((after == 0) & (before != 0)).sum())
    return RoundingErrors(rms, rms / norm if norm else 0.0, float(error.max(initial=0)), zeros, int((~finite).sum()))


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


def _each(values: Any, function: Callable[[Any], Any]) -> Any:
    """A function of one number, in exact arithmetic, of all values."""
    if _is_tensor(values):
        return _as_tensor(_each(_array_of(values), function), values)
    array = _prepared(values)
    if array.dtype == np.float32:  # by its code: astype reads subnormals as zeros after set_flush_denormal(True)
        array = decode_array(array.view(np.uint32), formats["fp32"])
    results = map(function, array.reshape(-1).tolist())
    numbers = [np.inf if number >= 2**1024 else float(number) for number in results]  # as may be the ulp of a Fraction
    result = np.array(numbers, dtype=np.float64).reshape(array.shape)
    return result if isinstance(values, np.ndarray) else result[()]


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
        allowed = "real numbers (floats, integers, Fraction, Decimal or strings)"
        raise TypeError(f"Expected values to be {allowed}, but got type {array.dtype}")
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
        outer.kind != "scale"
        and outer.precision >= inner.precision
        and outer.min_subnormal <= inner.min_subnormal
        and outer.max >= inner.max
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
        return tensor.numpy()
    form = formats[tensor.dtype]
    if form.bits not in (8, 16):
        raise TypeError(f"Expected a dtype with one number per element, but got {tensor.dtype}")
    patterns = tensor.view(torch.int16 if form.bits == 16 else torch.uint8).numpy()
    if form.name == "bf16":  # shifted, which keeps the payload of a NaN
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    return decode_array(patterns, form).astype(np.float32)


def _as_tensor(array: Array, like: Any) -> Any:
    """The array, or each one of `Blocks`, as a tensor on the device of `like`."""
    torch = sys.modules["torch"]
    if isinstance(array, Blocks):
        return Blocks(*(None if part is None else _as_tensor(part, like) for part in array))
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(np.shape(array)).to(like.device)


# -------------------------------------------------------------------------------------------------------------- blocks


def check_block_options(form: Any, axis: Any, global_scale: Any) -> None:
    """Raise ValueError for options that the format does not have, and for a global scale out of range."""
    if axis is not None and not isinstance(form, BlockFormat):
        raise ValueError(f"Expected axis to be None for {form.name}, which has no blocks, but got {axis}: leave it out")
    if global_scale is None:
        return
    if not getattr(form, "has_global_scale", False):
        raise ValueError(f"Expected global_scale to be None for {form.name}, but got {global_scale}: leave it out")
    if not blocks.LEAST_GLOBAL <= float(global_scale) <= blocks.LARGEST_GLOBAL:
        raise ValueError(
            f"Expected global_scale to be from 2^-117 to 2^118, but got {global_scale}: scale values, or leave it out"
        )


def _encode_blocks(
    array: Array, form: BlockFormat, axes: tuple[int, ...], rounding: str, overflow: str, nan: str, subnormals: bool,
    words: Array | None, g: float | None,
) -> Blocks:  # fmt: skip
    if array.dtype == object:  # texts too, which may be NaN
        array = np.array([exact.exact(value) for value in array.reshape(-1)], object).reshape(array.shape)
    if nan in ("zero", "raise") and (is_nan := array != array).any():
        exact.nan_code(0, form.scale, nan)
        array = np.where(is_nan, array.dtype.type(0), array)
    if form.has_global_scale:
        fp32 = formats.element("fp32")
        array = decode_array(np.asarray(encode(array, fp32)), fp32)
        largest = np.abs(array[np.isfinite(array)]).max(initial=0.0)
        g = np.float32(float(blocks.global_scale(Fraction(largest), form)) if g is None else g)
    split = arrays.in_blocks(array, axes, form.size)
    rows = np.ascontiguousarray(split.reshape(-1, form.size ** len(axes)))
    noise = None if words is None else arrays.in_blocks(words, axes, form.size).reshape(rows.shape)
    if array.dtype == object:
        each = [None] * len(rows) if noise is None else noise.tolist()
        options: dict[str, Any] = {"overflow": overflow, "subnormals": subnormals}
        pairs = zip(rows, each, strict=True)
        coded = [blocks.encode_block(row, form, rounding, words=word, **options) for row, word in pairs]
        codes, scales = (np.array([pair[at] for pair in coded], np.uint8) for at in (0, 1))
    else:
        codes, scales = arrays.encode_blocks(rows, form, rounding, overflow, subnormals, noise, float(g or 1.0))
    scales = np.moveaxis(scales.reshape(split.shape[:-1]), range(-len(axes), 0), axes)
    codes = arrays.in_order(codes.reshape(split.shape), axes, form.size, array.shape)
    return Blocks(codes, np.ascontiguousarray(scales), g)


def _coded_array(part: Any, axis: Axes | None) -> Any:
    """Codes, scales or the global scale as an array, of the dtypes of `halfstep.cast` too, which packs FP4 codes."""
    if not _is_tensor(part):
        return part
    torch, pairs = sys.modules["torch"], str(part.dtype) == "torch.float4_e2m1fn_x2"
    array = _array_of(part.view(torch.uint8) if part.element_size() == 1 else part, codes=True)
    if not pairs:
        return array
    along = (-1 if axis is None else axis[-1] if isinstance(axis, tuple) else axis) % array.ndim
    both = np.stack([array & 15, array >> 4], along + 1)
    return both.reshape(*(n * (1 + (each == along)) for each, n in enumerate(array.shape)))


def _decode_blocks(coded: Blocks, form: BlockFormat, axis: Axes | None) -> Any:
    if _is_tensor(coded.codes):
        parts = Blocks(*(_coded_array(part, axis) for part in coded))
        return _as_tensor(_decode_blocks(parts, form, axis), coded.codes)
    values, scales = np.asarray(decode(coded.codes, form.element)), np.asarray(decode(coded.scales, form.scale))
    axes, g = block_axes(axis, values.ndim), 1.0 if coded.global_scale is None else float(coded.global_scale)
    split, last = arrays.in_blocks(values, axes, form.size), range(-len(axes), 0)
    shape = np.moveaxis(split[..., 0], last, axes).shape
    if scales.shape != shape:
        raise ValueError(
            f"Expected scales of shape {shape} for codes of shape {values.shape} and blocks of {form.size} along axis "
            f"{axis}, but got {scales.shape}"
        )
    with np.errstate(invalid="ignore"):
        products = split * np.moveaxis(scales * g, axes, last)[..., None]
    return arrays.in_order(products, axes, form.size, values.shape)
