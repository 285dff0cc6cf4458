"""Expected results, computed differently from the kernels: with fractions, sorted tables, numpy and ml_dtypes.

Nothing here imports halfstep. numpy's fp32 and fp64 scalars and arrays do one IEEE operation at a time (its square root
included, which torch's on the CPU is not), so an oracle written in them has the bits that the kernels must have.
"""

import math
from dataclasses import dataclass, field
from functools import cache

import block_oracle
import ml_dtypes
import numpy as np
import roundings
import torch
from noise import Noise, stochastic, to_24_bits
from roundings import grid

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (FP32, FP16, BF16)
FP8 = (E4M3, E5M2)
NUMPY = {FP32: np.dtype(np.float32), **roundings.NUMPY}
_UNKNOWN_TO_NUMPY = {BF16: torch.int16, E4M3: torch.uint8, E5M2: torch.uint8}  # and what carries their codes
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# --------------------------------------------------------------------------------------------- torch, numpy and bits


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The elements in logical order, as a numpy array of the same format."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        return tensor.view(_UNKNOWN_TO_NUMPY[tensor.dtype]).numpy().view(NUMPY[tensor.dtype])
    return tensor.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The reverse of `to_numpy`; a copy."""
    for dtype, carrier in _UNKNOWN_TO_NUMPY.items():
        if array.dtype == NUMPY[dtype]:
            codes = np.ascontiguousarray(array).view(np.int16 if carrier == torch.int16 else np.uint8).copy()
            return torch.from_numpy(codes).view(dtype)
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    """The bit patterns, as unsigned integers of the same size."""
    array = to_numpy(values) if isinstance(values, torch.Tensor) else np.ascontiguousarray(values)
    return array.view(UNSIGNED[array.dtype.itemsize])


def assert_same_bits(actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray, what: object = "") -> None:
    """Check that the bits are equal. -0.0 is not 0.0; a NaN equals any NaN."""
    a, e = (to_numpy(v) if isinstance(v, torch.Tensor) else np.asarray(v) for v in (actual, expected))
    assert a.shape == e.shape, f"{what}: shape {a.shape}, expected {e.shape}"
    assert a.dtype == e.dtype, f"{what}: dtype {a.dtype}, expected {e.dtype}"
    a, e = np.atleast_1d(a), np.atleast_1d(e)
    different = bits(a) != bits(e)
    if a.dtype.kind not in "iub":
        with np.errstate(invalid="ignore"):  # ml_dtypes raises the flag on signalling NaNs
            different &= ~(np.isnan(a) & np.isnan(e))
    if different.any():
        index = tuple(int(i) for i in np.argwhere(different)[0])
        width = 2 * a.dtype.itemsize
        raise AssertionError(
            f"{what}: {int(different.sum())} of {a.size} differ, first at {index}: {a[index]!r} "
            f"(0x{int(bits(a)[index]):0{width}x}), expected {e[index]!r} (0x{int(bits(e)[index]):0{width}x})"
        )


# ------------------------------------------------------------------------------------------------- rounding to 16 bits


def round_to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp32 values rounded to nearest even by numpy (fp16) or ml_dtypes (bf16)."""
    with np.errstate(all="ignore"):
        return values.astype(NUMPY[dtype])


@cache
def thresholds(dtype: torch.dtype) -> np.ndarray:
    """The thresholds of rounding fp32 to a 16-bit format, with the neighboring fp32 values.

    A monotone rounding is right everywhere if it is right at these: every code, every midpoint between neighbours, each
    with the fp32 values next to it, both signs, and every special.
    """
    values = np.array(grid(dtype), dtype=np.float64)  # with the number that would have the code of infinity
    exact, middles = values[:-1], (values[:-1] + values[1:]) / 2  # in fp64, exactly
    points = np.concatenate([exact, middles]).astype(np.float32)
    assert (points.astype(np.float64) == np.concatenate([exact, middles])).all()
    patterns = points.view(np.uint32).astype(np.int64)
    near = np.unique(np.concatenate([patterns + offset for offset in (-1, 0, 1)]).clip(0, 0x7F800000))
    near = np.unique(np.concatenate([near, specials().view(np.uint32) & 0x7FFFFFFF]))
    return np.concatenate([near, near | 0x80000000]).astype(np.uint32).view(np.float32)


def specials() -> np.ndarray:
    """One fp32 of every kind: zeros, subnormals, edges of the formats, infinities, quiet and signalling NaNs."""
    positive = np.array(
        [
            *(0x00000000, 0x00000001, 0x00000002, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000),
            *(0x007FFFFF, 0x00800000, 0x00800001),  # the largest subnormal, the smallest normal
            *(0x32FFFFFF, 0x33000000, 0x33000001),  # 2^-25: half of fp16's smallest
            *(0x33800000, 0x387FC000, 0x387FDFFF, 0x387FE000, 0x387FE001, 0x38800000),  # fp16 subnormal to normal
            *(0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000),
            *(0x3F801000, 0x3F803000),  # fp16 ties
            *(0x477FDFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000),  # 65504, 65520: fp16 overflow
            *(0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF),  # bf16 overflow, largest fp32
            *(0x7F800000,),
            *(0x7F800001, 0x7F807FFF, 0x7F808000, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001),
            *(0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF),
        ],
        dtype=np.uint32,
    )
    return np.concatenate([positive, positive | 0x80000000]).astype(np.uint32).view(np.float32)


# -------------------------------------------------------------------------------------------------------- split master


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp32 values as (bf16 code, int16 remainder), from sign and magnitude; a NaN is (any NaN code of its sign, 0).

    fp32 values are equally spaced between two neighboring codes, so the lower bits determine the nearer one.
    """
    patterns = np.ascontiguousarray(values).view(np.uint32)
    magnitude, sign = patterns & np.uint32(0x7FFFFFFF), patterns >> np.uint32(31)
    lower, rest = magnitude // 65536, (magnitude % 65536).astype(np.int64)
    up = rest >= 32768  # a tie goes away from zero
    code = (lower + up).astype(np.uint32) + sign * np.uint32(32768)
    remainder = np.where(up, rest - 65536, rest)
    nan = magnitude > 0x7F800000
    return (
        np.where(nan, sign * np.uint32(32768) + np.uint32(0x7FC0), code).astype(np.uint16),
        np.where(nan, 0, remainder).astype(np.int16),
    )


def split24(values: np.ndarray, random: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """fp32 values, rounded to 24 bits, as (bf16 code, int8 remainder)."""
    code, remainder = split(to_24_bits(values, random))
    assert (remainder % 256 == 0).all()
    return code, (remainder // 256).astype(np.int8)


def join(code: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """The fp32 values of (bf16 code, int16 or int8 remainder) pairs that `split` or `split24` made."""
    unit = 256 if remainder.dtype == np.int8 else 1
    whole = code.astype(np.int64) * 65536 + remainder.astype(np.int64) * unit
    return (whole % 2**32).astype(np.uint32).view(np.float32)


# ------------------------------------------------------------------------------------------------------ sum of squares


def sum_of_squares(values: np.ndarray) -> float:
    """The sum of squares, correctly rounded to fp64: squares of fp32 values are exact in fp64, and fsum rounds once."""
    wide = np.asarray(values).astype(np.float64).reshape(-1)
    return math.fsum((wide * wide).tolist())


# ---------------------------------------------------------------------------------------------------------------- Adam


@dataclass
class AdamOptions:
    """Hyper-parameters of a parameter group."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0
    maximize: bool = False
    decoupled: bool = True


@dataclass
class AdamTensor:
    """One parameter and its state, as numpy arrays; `extra` is an fp32 master or an int16 remainder.

    Moments of dtype uint8 are codes, whose scales have shape ``(rows, blocks)``. With `noise`, moments of less than
    32 bits and a 16-bit parameter that stands alone are rounded stochastically.
    """

    param: np.ndarray
    m: np.ndarray
    v: np.ndarray
    step: np.float32
    extra: np.ndarray | None = None
    top: np.ndarray | None = None
    options: AdamOptions = field(default_factory=AdamOptions)
    noise: Noise | None = None
    m_scales: np.ndarray | None = None
    v_scales: np.ndarray | None = None
    top_scales: np.ndarray | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that a step may change, by name."""
        names = ("param", "extra", "m", "v", "top", "m_scales", "v_scales", "top_scales")
        everything = {name: getattr(self, name) for name in names}
        return {
            **{name: array for name, array in everything.items() if array is not None},
            "step": np.asarray(self.step, dtype=np.float32),
        }


def _whole_power(base: np.float64, exponent: int) -> np.float64:
    """base^exponent as the product of base^(2^k) for each set bit k, from the lowest."""
    result = np.float64(1.0)
    while exponent:
        if exponent % 2:
            result = result * base
        exponent //= 2
        base = base * base
    return result


def adam_step(
    tensor: AdamTensor,
    grad: np.ndarray,
    *,
    grad_scale: float | None = None,
    found_inf: float = 0.0,
    sum_of_squares: float | None = None,
    max_norm: float | None = None,
) -> AdamTensor:
    """One step as specified in kernels/adam/rule.py, in separate operations. Returns the new state."""
    if found_inf != 0:
        return tensor
    one, o, f32 = np.float64(1.0), tensor.options, np.float32
    with np.errstate(all="ignore"):
        # Once per tensor, in fp64, rounded to fp32 at the end.
        t = f32(tensor.step + f32(1))
        count = int(min(max(float(t), 1.0), 2.0**30))
        step_size = f32(np.float64(o.lr) / (one - _whole_power(np.float64(o.beta1), count)))
        root = f32(one / np.sqrt(one - _whole_power(np.float64(o.beta2), count)))
        decay = f32(np.float64(o.lr) * np.float64(o.decay) if o.decoupled else o.decay)
        scale = one if grad_scale is None else one / np.float64(f32(grad_scale))
        if sum_of_squares is not None and max_norm is not None:
            clip = np.float64(max_norm) / (np.sqrt(np.float64(sum_of_squares)) + np.float64(1e-6))
            scale = scale * (one if clip > 1 else clip)
        gscale = f32(-scale if o.maximize else scale)
        beta1, beta2, eps = f32(o.beta1), f32(o.beta2), f32(o.eps)
        w1, w2 = f32(one - np.float64(o.beta1)), f32(one - np.float64(o.beta2))

        # Once per element, in fp32.
        split_master = tensor.extra is not None and tensor.extra.dtype in (np.int16, np.int8)
        if split_master:
            w = join(tensor.param.view(np.uint16), tensor.extra)
        else:
            w = (tensor.param if tensor.extra is None else tensor.extra).astype(f32)
        g = grad.astype(f32) * gscale
        if not o.decoupled:
            g = g + decay * w
        m, v = _moment(tensor.m, tensor.m_scales, True), _moment(tensor.v, tensor.v_scales, False)
        biggest = np.finfo(f32).max if tensor.v_scales is None else f32(float.fromhex("0x1.ep127"))
        m = m + w1 * (g - m) if w1 < 0.5 else g - beta1 * (g - m)
        q = g * g
        q[q > biggest] = biggest
        v[v > biggest] = biggest
        v = v + w2 * (q - v) if w2 < 0.5 else q - beta2 * (q - v)
        words = [None if tensor.noise is None else tensor.noise.words(grad.size, count, draw) for draw in range(3)]

        def stored(x: np.ndarray, like: np.ndarray, word: np.ndarray | None) -> np.ndarray:
            if word is None or like.dtype == f32:
                return x.astype(like.dtype)
            return stochastic(x, FP16 if like.dtype == np.float16 else BF16, word)

        m_scales = v_scales = top_scales = None
        if tensor.m_scales is None or tensor.v_scales is None:
            new_m, new_v = stored(m, tensor.m, words[1]), stored(v, tensor.v, words[2])
        else:
            new_m, m_scales = _coded(m, tensor.m_scales, words[1], True)
            new_v, v_scales = _coded(v, tensor.v_scales, words[2], False)
        a, top = v, None
        if tensor.top is not None:
            v = v if tensor.noise is None and v_scales is None else _moment(new_v, v_scales, False)
            top = _moment(tensor.top, tensor.top_scales, False)
            a = np.where(np.isnan(v), v, np.where(v > top, v, top))
        d = step_size * (m / (np.sqrt(a) * root + eps))
        if o.decoupled:
            d = d + np.where(np.isinf(w), f32(0), decay * w)
        w = w - d
        assert w.dtype == f32 and m.dtype == f32 and a.dtype == f32

        extra = None
        if split_master:
            code, extra = split(w) if tensor.extra.dtype == np.int16 else split24(w, words[0])
            param = code.view(ml_dtypes.bfloat16)
        else:
            param = stored(w, tensor.param, words[0]) if tensor.extra is None else w.astype(tensor.param.dtype)
            extra = None if tensor.extra is None else w
        if tensor.top is None:
            new_top = None
        elif tensor.top_scales is None:
            new_top = a.astype(tensor.top.dtype)
        else:
            new_top, top_scales = _coded(a, tensor.top_scales, np.full(a.size, block_oracle.UP), False)
        return AdamTensor(*(param, new_m, new_v, t, extra, new_top, o, tensor.noise), *(m_scales, v_scales, top_scales))


def _moment(held: np.ndarray, scales: np.ndarray | None, signed: bool) -> np.ndarray:
    """A moment in fp32; a copy."""
    if scales is None:
        return held.astype(np.float32)
    return block_oracle.decoded(held.reshape(_matrix(held, scales)), scales, signed).reshape(-1)


def _coded(x: np.ndarray, scales: np.ndarray, random: np.ndarray | None, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a moment with the rows that `scales` has."""
    shape = _matrix(x, scales)
    codes, found = block_oracle.encoded(x.reshape(shape), None if random is None else random.reshape(shape), signed)
    return codes.reshape(-1), found.reshape(scales.shape)


def _matrix(x: np.ndarray, scales: np.ndarray) -> tuple[int, int]:
    """Rows and columns of elements with these scales."""
    return len(scales), x.size // max(len(scales), 1)
