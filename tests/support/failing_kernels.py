"""Kernels that the audit must reject, each for the reason in the name of its variant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.backend import jit, tl


@jit
def multiply_add_kernel(x, y, BLOCK: tl.constexpr):
    """``x * x + y``: two roundings, or one if the compiler contracts them."""
    offsets = tl.arange(0, BLOCK)
    a = tl.load(x + offsets)
    tl.store(y + offsets, a * a + tl.load(y + offsets))


@jit
def explicit_fma_kernel(x, y, BLOCK: tl.constexpr):
    """The same with an explicit fused multiply-add."""
    offsets = tl.arange(0, BLOCK)
    a = tl.load(x + offsets)
    tl.store(y + offsets, tl.fma(a, a, tl.load(y + offsets)))


@jit
def approximate_kernel(x, y, BLOCK: tl.constexpr):
    """Triton's plain ``/`` of fp32 is not correctly rounded on NVIDIA."""
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets) / tl.load(y + offsets))


@jit
def mistyped_kernel(x, y, BLOCK: tl.constexpr):
    """Does not compile: two tiles of different sizes."""
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, 2 * BLOCK)))


@jit
def crowded_kernel(x, y, BLOCK: tl.constexpr):
    """Needs more registers per thread than it is allowed."""
    offsets = tl.arange(0, BLOCK)
    a = tl.load(x + offsets)
    b = tl.load(y + offsets)
    tl.debug_barrier()
    tl.store(x + offsets, tl.div_rn(b, a))
    tl.store(y + offsets, tl.div_rn(a, b))


@jit
def copy_kernel(x, y, BLOCK: tl.constexpr):
    """A correct kernel that is launched with too many threads."""
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets))


@jit
def transpose_kernel(x, y, BLOCK: tl.constexpr):
    """Transposes a tile through shared memory, with 4 bytes per element."""
    rows, columns = tl.arange(0, 128), tl.arange(0, BLOCK // 128)
    tile = tl.load(x + rows[:, None] * (BLOCK // 128) + columns[None, :])
    tl.store(y + columns[:, None] * 128 + rows[None, :], tl.trans(tile))


def _variant(kernel: Any, name: str, block: int = 1024, **options: Any) -> Variant:
    x, y = (torch.empty(16, dtype=torch.float32, device="cpu") for _ in range(2))
    return Variant(kernel, name, partial(kernel[(1,)], x, y, BLOCK=block, **{"enable_fp_fusion": False, **options}))


def variants() -> Iterator[Variant]:
    """The variants that the audit must reject. "too many of 64 lanes" and "shared" pass on sm_90, "approximate" and
    "spills" on gfx942."""
    yield _variant(multiply_add_kernel, "contracted", enable_fp_fusion=True)
    yield _variant(explicit_fma_kernel, "fused by hand")
    yield _variant(approximate_kernel, "approximate")
    yield _variant(mistyped_kernel, "mistyped")
    yield _variant(crowded_kernel, "spills", block=16384, maxnreg=64)
    yield _variant(copy_kernel, "too many of 64 lanes", block=16384, num_warps=32)
    yield _variant(transpose_kernel, "shared", block=32768, num_warps=16)
