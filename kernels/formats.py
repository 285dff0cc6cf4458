"""The number formats of the kernels: one table, of which the dtype tables of all other modules are views.

It imports neither torch nor Triton, so that the look-up of formats starts at once. Sources: IEEE 754-2019 (binary32,
binary16); bfloat16; the OCP "8-bit floating point specification (OFP8)", 2023.
"""

from __future__ import annotations

import functools
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
