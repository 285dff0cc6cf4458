"""Rounding that every kernel family shares: fp32 to 16 bits and back, and the split master weight.

**Nearest-even** is what the hardware does; Triton's interpreter truncates to bf16, and goes through integers here.

**Toward zero and stochastic**, and conversions to FP8 but for those of cast.py to nearest, go through integers
everywhere (`round_float32`). With m mantissa bits in the format, let t be |x| in units, a unit being the distance of
the format's numbers at x, and D = 23 - m. Inside the normal range, t is a multiple of 2^-D; below it the unit is fixed.
The result is

    toward zero   floor(t)
    stochastic    floor(T + n / 2^D), with a random n of D bits

where T is t rounded to a multiple of 2^-D, to nearest even, which changes subnormals only. So the result is one of the
two neighbours, and a value of the format never moves. `n` is the upper D bits of a word of philox.py, which holds 16
random bits, a one and zeros. Up to D = 16 (fp16, bf16), the probability of rounding away from zero is exactly the part
of T behind the point. In FP8 (D = 20 and 21) it is the nearest multiple of 2^-16; from bf16 and fp16, whose normal
numbers leave at most 8 of those bits, that is exact too.

In integers, T * 2^D inside the normal range is the pattern of |x| less the difference of the exponent biases. Below it,
that of |x| * 2^(bias - 127), an fp32 subnormal: on GPUs one multiplication covers both. The reference and C++ stay
among normal numbers, because CPUs are slow with subnormal ones and may be told to flush them to zero.

Beyond the largest finite number lies one more value of the grid, which stands for what overflow gives: infinity, NaN in
E4M3, or with saturation the largest finite number, infinities included. Toward zero, finite numbers stop at the largest
finite one.

**Split master.** An fp32 value `w` is stored as the bf16 weight the model sees and a 16-bit remainder:

    hi = (bits(w) + 0x8000) >> 16          the bf16 code: `w` rounded to nearest, ties away from zero
    lo = bits(w) - (hi << 16)              in [-0x8000, 0x7fff], an int16
    bits(w) = (hi << 16) + lo              all modulo 2^32

Every one of the 2^32 patterns comes back, save that a NaN comes back as a quiet NaN: its `hi` is forced to a NaN code
(0x7f800001 would otherwise round to infinity, 0x7fffffff wrap to -0.0) and its `lo` to 0. Rounding is half *away*,
not half to even, because 65,537 values round to one even code and 16 bits name 65,536.

Somebody may overwrite the weight (`zero_`, a pruning mask) and leave the remainder as it was. The join is then off by
at most half a unit in the last place of the new weight, save where the sum leaves the numbers: a zero with a negative
remainder, an infinity with a positive one. No split makes these pairs, and joined they would be NaN, so there the
weight stands alone.

**Split master of 24 bits.** The value is first rounded to the upper 24 bits of its pattern (sign, exponent and 15 bits
of mantissa), to nearest even or stochastically, with the upper 8 bits of a word of philox.py. Its remainder is then a
multiple of 256, of which an int8 holds the upper byte. A split of what was joined changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from halfstep.kernels.backend import INTERPRET, constant, constexpr_function, cuda_capability_geq, jit, tl
from halfstep.kernels.formats import ELEMENTS, TABLE, Format

ROUNDINGS = ("nearest", "toward_zero", "stochastic")
NEAREST, TOWARD_ZERO, STOCHASTIC = range(3)  # their numbers in kernels
FORMATS = {form.dtype: form for form in TABLE if form.name != "fp32"}

# --------------------------------------------------------------------------------------------------------- reference


def reference_round(
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: int = NEAREST,
    saturate: bool = False,
    words: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round fp32 values to another format, in plain torch on any device.

    Args:
        x: any shape, fp32.
        dtype: a key of `FORMATS`.
        rounding: `NEAREST` (ties to even), `TOWARD_ZERO` or `STOCHASTIC`.
        saturate: overflow and infinities become the largest finite number.
        words: int64, shape of `x`, random values from 0 to 2^32 - 1; needed for `STOCHASTIC`.

    Returns:
        A tensor of the shape of `x` and dtype `dtype`.
    """
    code = reference_codes(x, FORMATS[dtype], rounding, saturate, words)
    return code.to(torch.int16 if FORMATS[dtype].bits == 16 else torch.uint8).view(dtype)


def reference_codes(
    x: torch.Tensor, form: Format, rounding: int, saturate: bool, words: torch.Tensor | None = None
) -> torch.Tensor:
    """The codes of `reference_round` in int32, also of formats without a dtype, in which numbers must `saturate`."""
    dropped = 23 - form.mantissa
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    if rounding == STOCHASTIC:
        assert words is not None
        noise = (words >> (32 - dropped)).to(torch.int32)
    elif rounding == TOWARD_ZERO:
        noise = torch.zeros_like(bits)
    else:
        noise = (1 << (dropped - 1)) - 1 + ((magnitude >> dropped) & 1)
    # A carry out of the mantissa into the exponent is what it should be.
    code = (magnitude - ((127 - form.bias) << 23) + noise) >> dropped
    if form.bias != 127:  # bf16 and fp32 end at the same exponent, so there the normal way serves subnormals too
        units = magnitude.view(torch.float32) * 2.0 ** (form.mantissa + form.bias - 1)
        units = torch.where(units < 2.0**form.mantissa, units, 0.0)  # not used beyond, and must fit an integer
        if rounding == STOCHASTIC:
            tiny = ((units * 2.0**dropped).round().to(torch.int32) + noise) >> dropped
        else:
            tiny = (units.round() if rounding == NEAREST else units).to(torch.int32)
        code = torch.where(magnitude < (128 - form.bias) << 23, tiny, code)
    over = code > form.largest
    finite_stops = saturate or rounding == TOWARD_ZERO
    code = torch.where(over, form.largest if finite_stops else form.overflow, code)
    if rounding == TOWARD_ZERO and not saturate:
        code = torch.where(magnitude == 0x7F800000, form.overflow, code)
    code = torch.where(magnitude > 0x7F800000, form.nan, code)
    return code | ((bits >> (32 - form.bits)) & (1 << (form.bits - 1)))


def round_to_24_bits(x: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
    """Round fp32 values to the upper 24 bits of their patterns; what overflows becomes infinity.

    `words` are int64 from 0 to 2^32 - 1, one per value, for stochastic rounding; None for nearest even.
    """
    bits = x.view(torch.int32)
    noise = 0x7F + ((bits >> 8) & 1) if words is None else (words >> 24).to(torch.int32)
    rounded = ((bits + noise) & ~0xFF).view(torch.float32)  # the sign stays: only a NaN could carry into it
    return torch.where(x.isnan(), x, rounded)


def split_master(
    master: torch.Tensor, remainder: torch.dtype = torch.int16, words: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 values into the bf16 weight and the remainder, of any shape.

    Args:
        master: fp32.
        remainder: int16 (exact), or int8 (rounded to 24 bits first, as by `round_to_24_bits` with `words`).
    """
    if remainder == torch.int8:
        master = round_to_24_bits(master, words)
    bits = master.view(torch.int32)
    # int32 addition wraps where it must: only NaN patterns do, and those are replaced.
    high = (bits + 0x8000) >> 16
    nan = master.isnan()
    quiet = (bits >> 16) | 0x7FC0
    high = torch.where(nan, quiet, high)
    # Not torch.where, which would need a tensor of 0: beside fake tensors that would be a real one.
    low = (bits - (high << 16)).masked_fill(nan, 0)
    low = low >> 8 if remainder == torch.int8 else low
    return high.to(torch.int16).view(torch.bfloat16), low.to(remainder)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split_master` split; NaN only where `weight` is NaN."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    low = remainder.to(torch.int32)
    bits = high + (low << 8 if remainder.dtype == torch.int8 else low)
    return torch.where((bits & 0x7FFFFFFF) > 0x7F800000, high, bits).view(torch.float32)


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root of fp32 values on any device, by fp64 (Figueroa, "When is double rounding
    innocuous?", 1995). torch's own on CPU is one ulp off for a fifth of all inputs.
    """
    return x.double().sqrt().float()


# ----------------------------------------------------------------------------------------------------------- kernels

INTERPRETED = constant(INTERPRET)
_NEAREST, _TOWARD_ZERO, _STOCHASTIC = constant(NEAREST), constant(TOWARD_ZERO), constant(STOCHASTIC)


@jit
def to_float32(x):
    """A block of fp32, fp16 or bf16 as fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def from_float32(x, dtype: tl.constexpr):
    """A block of fp32 rounded to nearest-even as fp32, fp16 or bf16; NaN stays NaN, overflow becomes infinity."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = ((bits >> 16) & 0x8000) | 0x7FC0
        code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@constexpr_function
def form_of(dtype: Any) -> Format:
    """The row of a type of Triton, or of the name of a format of blocks' elements, which may have no type."""
    return ELEMENTS[dtype] if isinstance(dtype, str) else next(form for form in TABLE if form.triton_type == dtype)


@jit
def round_float32(x, word, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr):
    """A block of fp32 as codes of a format, in uint32. Only stochastic rounding uses `word` (random)."""
    FORM: tl.constexpr = form_of(TARGET)
    MANTISSA: tl.constexpr = FORM.mantissa
    BIAS: tl.constexpr = FORM.bias
    OVERFLOW: tl.constexpr = FORM.overflow
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if ROUNDING == _STOCHASTIC:
        if BIAS == 127:
            scaled = magnitude
        else:
            scaled = (tl.abs(x) * 2.0 ** (BIAS - 127)).to(tl.uint32, bitcast=True)
        code = (scaled + (word >> (32 - DROPPED))) >> DROPPED
    else:
        rounded = magnitude - ((127 - BIAS) << 23)
        if ROUNDING == _NEAREST:
            rounded += (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
        code = rounded >> DROPPED
        if BIAS != 127:
            small = magnitude < ((128 - BIAS) << 23)
            value = tl.where(small, magnitude, 0).to(tl.float32, bitcast=True)
            if ROUNDING == _NEAREST:
                # The unit of the sum is the smallest subnormal, so that the addition itself rounds to nearest even.
                MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
                MAGIC_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
                tiny = (value + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
            else:
                tiny = (value * 2.0 ** (MANTISSA + BIAS - 1)).to(tl.int32).to(tl.uint32)
            code = tl.where(small, tiny, code)
    code = tl.minimum(code, FORM.largest if SATURATE or ROUNDING == _TOWARD_ZERO else OVERFLOW)
    if ROUNDING == _TOWARD_ZERO and not SATURATE:
        code = tl.where(magnitude == 0x7F800000, OVERFLOW, code)
    if OVERFLOW != FORM.nan or SATURATE or ROUNDING == _TOWARD_ZERO:  # otherwise overflow gives NaN already
        code = tl.where(magnitude > 0x7F800000, FORM.nan, code)
    return code | ((bits >> (32 - FORM.bits)) & (1 << (FORM.bits - 1)))


@jit
def _quiet_bits(x):
    """The bits of a block of fp32 that arithmetic on an NVIDIA GPU gave, with 0x7FC00000 for NaN.

    Arithmetic there gives 0x7FFFFFFF for every NaN, which as an integer is above all other numbers.
    """
    return tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.uint32, bitcast=True)


@jit
def stochastic_float32(x, word, dtype: tl.constexpr, COMPUTED: tl.constexpr):
    """A block of fp32 rounded stochastically to fp16 or bf16. A NaN's sign may be lost.

    COMPUTED: `x` is what an arithmetic operation gave.
    """
    if dtype == tl.bfloat16:
        # The sign bit need not be separated: only the magnitude of a NaN could carry into it.
        if COMPUTED and cuda_capability_geq(8, 0):
            bits = _quiet_bits(x)
        else:
            bits = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)
        code = (bits + (word >> 16)) >> 16
    else:
        code = round_float32(x, word, tl.float16, _STOCHASTIC, False)
    return code.to(tl.uint16).to(dtype, bitcast=True)


@jit
def split_float32(x, COMPUTED: tl.constexpr):
    """A block of fp32 as (bf16 weight, int16 remainder); see the module's docstring. COMPUTED as above."""
    if COMPUTED and cuda_capability_geq(8, 0):
        bits = _quiet_bits(x)
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x7FC0, (bits + 0x8000) >> 16)
        low = tl.where(nan, 0, bits - (high << 16))
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True), low.to(tl.uint16).to(tl.int16, bitcast=True)


@jit
def split24_float32(x, word, STOCHASTIC: tl.constexpr):
    """A block of fp32, rounded to 24 bits, as (bf16 weight, int8 remainder). `word` holds random uint32 if STOCHASTIC.

    `x` must be the result of arithmetic, whose NaNs are quiet.
    """
    if cuda_capability_geq(8, 0):
        bits = _quiet_bits(x)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        # The quiet NaN without a payload is less than all others, and a carry cannot leave it. A choice instead of the
        # minimum would hold a mask per element, for which AMD's scalar registers do not suffice.
        bits = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000) | (bits & 0x80000000)
    if STOCHASTIC:
        rounded = (bits + (word >> 24)) >> 8
    else:
        rounded = (bits + (0x7F + ((bits >> 8) & 1))) >> 8
    high = (rounded + 0x80) >> 8
    low = rounded - (high << 8)
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True), low.to(tl.uint8).to(tl.int8, bitcast=True)


@jit
def join_float32(weight, remainder):
    """The block of fp32 that was split, with an int16 or int8 remainder; NaN only where `weight` is NaN."""
    high = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    low = remainder.to(tl.int32).to(tl.uint32, bitcast=True)
    if remainder.dtype == tl.int8:
        low = low << 8
    joined = (high + low).to(tl.float32, bitcast=True)
    return tl.where(joined == joined, joined, high.to(tl.float32, bitcast=True))
