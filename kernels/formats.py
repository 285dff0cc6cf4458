"""The number formats of the kernels: one table, of which the dtype tables of all other modules are views.

It imports neither torch nor Triton, so that the look-up of formats starts at once. Sources: IEEE 754-2019 (binary32,
binary16); bfloat16; the OCP "8-bit floating point specification (OFP8)", 2023; the OCP "Microscaling formats (MX)
specification" 1.0, 2023; NVIDIA's NVFP4.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple


class Format(NamedTuple):
    """A binary format with a sign bit. Codes are without that bit."""

    name: str  # in `halfstep.formats`
    exponent: int  # stored bits
    mantissa: int
    largest: int  # code of the largest finite number
    overflow: int  # code of larger numbers: infinity, or NaN if the format has no infinity
    nan: int  # code of the quiet NaN that torch writes
    code: int  # the number of the format in C++ (`Dtype` of native.h)
    torch: str  # names of its types in `torch` and `triton.language`
    triton: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def kind(self) -> str:
        """A key of `numerics.formats.table.FORMAT_KINDS`."""
        return "fn" if self.overflow == self.nan else "ieee"

    @property
    def most(self) -> float:
        """The largest finite number."""
        fraction = 1 + self.largest % (1 << self.mantissa) / (1 << self.mantissa)
        return math.ldexp(fraction, (self.largest >> self.mantissa) - self.bias)

    @property
    def dtype(self) -> Any:
        import torch

        return getattr(torch, self.torch)

    @property
    def triton_type(self) -> Any:
        import triton.language as tl

        return getattr(tl, self.triton)


TABLE = (
    Format("fp32", 8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0, "float32", "float32"),
    Format("fp16", 5, 10, 0x7BFF, 0x7C00, 0x7E00, 1, "float16", "float16"),
    Format("bf16", 8, 7, 0x7F7F, 0x7F80, 0x7FC0, 2, "bfloat16", "bfloat16"),
    Format("e4m3fn", 4, 3, 0x7E, 0x7F, 0x7F, 3, "float8_e4m3fn", "float8e4nv"),
    Format("e5m2", 5, 2, 0x7B, 0x7C, 0x7F, 4, "float8_e5m2", "float8e5"),
)
BY_NAME = {form.name: form for form in TABLE}
# The numbers in C++ of codes whose scales are apart (block_codes.py): uint8, and linear ones, int8.
CODED, LINEAR = 5, 6


@functools.cache
def format_of(dtype: Any) -> Format:
    """The row of a torch dtype; a KeyError if the kernels do not compute in it."""
    return {form.dtype: form for form in TABLE}[dtype]


# Formats of blocks' elements. Those of less than 8 bits have no types of their own here, no NaN and no infinity.
ELEMENTS = {
    **BY_NAME,
    "e2m3fn": Format("e2m3fn", 2, 3, 0x1F, 0x1F, 0, -1, "uint8", "uint8"),
    "e3m2fn": Format("e3m2fn", 3, 2, 0x1F, 0x1F, 0, -1, "uint8", "uint8"),
    "e2m1fn": Format("e2m1fn", 2, 1, 0x7, 0x7, 0, -1, "float4_e2m1fn_x2", "uint8"),
}


class Blocks(NamedTuple):
    """Numbers in a format of blocks: what `halfstep.encode` and `halfstep.cast` return, and `halfstep.decode` takes.

    Attributes:
        codes: of the elements, in the shape of the numbers: uint8, or from `cast` the dtype of the elements. In
            float4_e2m1fn_x2 two share a byte, the first in its lower half.
        scales: codes of the scales: uint8, or from `cast` float8_e8m0fnu or float8_e4m3fn. Along each blocked
            dimension, of n elements, there are ceil(n / size).
        global_scale: the number that multiplies all scales: a number or tensor of fp32; None if the format has none.
    """

    codes: Any
    scales: Any
    global_scale: Any = None


class BlockRow(NamedTuple):
    """A format of blocks whose elements share a scale."""

    name: str  # in `halfstep.formats`
    title: str
    element: str  # names of formats of single numbers
    scale: str
    size: int  # elements of a block
    aliases: tuple[str, ...] = ()

    @property
    def has_global_scale(self) -> bool:
        """Whether a number of fp32 multiplies all scales, as those need that lack the range of E8M0."""
        return self.scale == "e4m3fn"


# How a scale, a power of two, is chosen: as torchao's `ScaleCalculationMode` calls it. numerics/formats/blocks.py has
# the definitions.
SCALE_RULES = ("floor", "ceil", "even", "rceil")
BLOCKS = (
    BlockRow("mxfp8_e4m3", "OCP MXFP8, elements of E4M3", "e4m3fn", "e8m0fnu", 32, ("mxfp8", "mxfp8_e4m3fn")),
    BlockRow("mxfp8_e5m2", "OCP MXFP8, elements of E5M2", "e5m2", "e8m0fnu", 32),
    BlockRow("mxfp6_e2m3", "OCP MXFP6, elements of E2M3", "e2m3fn", "e8m0fnu", 32, ("mxfp6_e2m3fn",)),
    BlockRow("mxfp6_e3m2", "OCP MXFP6, elements of E3M2", "e3m2fn", "e8m0fnu", 32, ("mxfp6_e3m2fn",)),
    BlockRow("mxfp4", "OCP MXFP4, elements of E2M1", "e2m1fn", "e8m0fnu", 32, ("mxfp4_e2m1", "mxfp4_e2m1fn")),
    BlockRow("nvfp4", "NVIDIA NVFP4, elements of E2M1", "e2m1fn", "e4m3fn", 16, ("nvfp4_e2m1",)),
)
_BLOCK_NAMES = {name.replace("_", ""): row for row in BLOCKS for name in (row.name, *row.aliases)}


def block_row(name: str) -> tuple[BlockRow, str] | None:
    """The row and the scale rule of a name such as ``"mxfp8"`` or ``"mxfp8_e4m3_rceil"``; None if there is none."""
    plain = re.sub(r"[\s_-]", "", name.lower())
    for rule in SCALE_RULES:
        stem = plain.removesuffix(rule)
        if stem in _BLOCK_NAMES and (stem == plain or not _BLOCK_NAMES[stem].has_global_scale):
            return _BLOCK_NAMES[stem], SCALE_RULES[0] if stem == plain else rule
    return None


def block_axes(axis: int | tuple[int, int] | None, dimensions: int) -> tuple[int, ...]:
    """The blocked dimensions of a tensor with so many; None is the last one."""
    axes = (-1,) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    inside = len(axes) in (1, 2) and all(-dimensions <= each < dimensions for each in axes)
    if not inside or len({each % dimensions for each in axes}) < len(axes):
        raise ValueError(
            f"Expected axis to be a dimension, or a pair of them, of the {dimensions} of the numbers, but got {axis}: "
            "pass a list, an array or a tensor, and a dimension of it"
        )
    return axes
