"""Rounding that every kernel family shares: fp32 to 16 bits and back, and the split master weight.

**Nearest-even** is what the hardware does. Under Triton's interpreter fp32 -> bf16 truncates and bf16 arithmetic works
on raw bits, so there both directions go through integers; compiled kernels use the conversion instructions.

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
"""

from __future__ import annotations

import torch

from halfstep.kernels.backend import INTERPRET, jit, tl

# --------------------------------------------------------------------------------------------------------- reference


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 values into the bf16 weight and the int16 remainder.

    Args:
        master: any shape, fp32.

    Returns:
        ``(weight, remainder)``, bf16 and int16, same shape.
    """
    bits = master.view(torch.int32)
    # int32 addition wraps where it must: only NaN patterns do, and those are replaced.
    high = (bits + 0x8000) >> 16
    nan = master.isnan()
    quiet = (bits >> 16) | 0x7FC0
    high = torch.where(nan, quiet, high)
    low = torch.where(nan, 0, bits - (high << 16))
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split_master` split; NaN only where `weight` is NaN.

    Args:
        weight: any shape, bf16.
        remainder: same shape, int16.
    """
    high = weight.view(torch.int16).to(torch.int32) << 16
    bits = high + remainder.to(torch.int32)
    return torch.where((bits & 0x7FFFFFFF) > 0x7F800000, high, bits).view(torch.float32)


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded square root of fp32 values on any device.

    torch's own fp32 square root on CPU is one ulp off for a fifth of all inputs. fp64 carries more than twice the
    24 bits, so rounding its root to fp32 rounds once (Figueroa, "When is double rounding innocuous?", 1995).
    """
    return x.double().sqrt().float()


# ----------------------------------------------------------------------------------------------------------- kernels

if tl is not None:
    INTERPRETED = tl.constexpr(INTERPRET)


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


@jit
def split_float32(x):
    """A block of fp32 as (bf16 weight, int16 remainder); see the module's docstring."""
    bits = x.to(tl.uint32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    high = tl.where(nan, (bits >> 16) | 0x7FC0, (bits + 0x8000) >> 16)
    low = tl.where(nan, 0, bits - (high << 16))
    return high.to(tl.uint16).to(tl.bfloat16, bitcast=True), low.to(tl.uint16).to(tl.int16, bitcast=True)


@jit
def join_float32(weight, remainder):
    """The block of fp32 that `split_float32` split; NaN only where `weight` is NaN."""
    high = weight.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    bits = high + remainder.to(tl.int32).to(tl.uint32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, high, bits).to(tl.float32, bitcast=True)
