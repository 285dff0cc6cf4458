"""What is needed to compile a kernel ahead of time, for any target and with no GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One kernel with everything fixed that the compiler specialises on.

    Each kernel family lists its own in a function ``variants()``; the compile audit builds every one of them for every
    target.

    Attributes:
        kernel: the ``@triton.jit`` function.
        name: what tells it from its siblings, e.g. ``"bf16->fp32"``.
        signature: argument name to Triton type, constexpr arguments left out, e.g. ``{"table": "*i64", "n": "i64"}``.
        constexprs: the remaining arguments and their values.
        divisible_by_16: arguments that the launcher guarantees to be multiples of 16 (pointers: 16-byte aligned).
        num_warps: as at launch, where warps have 32 lanes.
        num_warps_of_64: as at launch where they have 64, as on AMD's data center chips; 0, the default: as many.
        exact: whether the kernel promises the reference's bits and so must contain no fused multiply-add.
        bytes_read: per element, at least (the floor in the family's docstring).
        bytes_written: per element, at least.
        options: further compiler options, as at launch, e.g. ``{"num_stages": 1}``.
        elements: how many the bulk path handles per program, or per trip of its loop. 0, the default, stands for the
            largest tile that the kernel loads or stores, which is wrong only where a tile is moved in parts.
    """

    kernel: Any
    name: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_warps_of_64: int = 0
    exact: bool = True
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    elements: int = 0

    def warps(self, lanes: int) -> int:
        """How many, of so many lanes."""
        return self.num_warps_of_64 if lanes == 64 and self.num_warps_of_64 else self.num_warps
