"""Kernels with known machine code (bytes, widths, no contraction) for the tests of the audit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from halfstep.bench.audit.launches import Variant
from halfstep.kernels.backend import by_address, jit, tl


@jit
def table_kernel(table, sizes, scale, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Read one 16-bit tensor and one fp32 tensor from a device table, write the fp32 one: 6 bytes in, 4 out."""
    tensor = tl.program_id(0).to(tl.int64)
    x_address = tl.load(table + 2 * tensor)
    y_address = tl.load(table + 2 * tensor + 1)
    left = tl.load(sizes + tensor).to(tl.int32)
    factor = tl.load(scale)
    if (x_address % 16 == 0) & (y_address % 16 == 0):
        x_at = tl.multiple_of(x_address.to(tl.pointer_type(DTYPE)), 8)
        y_at = tl.multiple_of(y_address.to(tl.pointer_type(tl.float32)), 16)
        offsets = tl.arange(0, BLOCK)
        bulk = left // 16 * 16
        x = tl.load(x_at + offsets, mask=offsets < bulk, other=0.0).to(tl.float32)
        y = tl.load(y_at + offsets, mask=offsets < bulk, other=0.0)
        y = tl.div_rn(x * factor + y, tl.sqrt_rn(y))
        tl.store(y_at + offsets, y, mask=offsets < bulk)
    else:
        x_at = x_address.to(tl.pointer_type(DTYPE))
        y_at = y_address.to(tl.pointer_type(tl.float32))
        for start in range(0, left, 512):
            offsets = start + tl.arange(0, 512)
            x = tl.load(x_at + offsets, mask=offsets < left, other=0.0).to(tl.float32)
            y = tl.load(y_at + offsets, mask=offsets < left, other=0.0)
            tl.store(y_at + offsets, tl.div_rn(x * factor + y, tl.sqrt_rn(y)), mask=offsets < left)


@jit
def _load(at):
    return tl.load(at).to(tl.float32)


@jit
def loop_kernel(x, y, n, BLOCK: tl.constexpr):
    """Sum a column with an inlined helper. ptxas unrolls this loop, which must not count several times."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(0, n, num_stages=1):
        total += _load(x + row * BLOCK + offsets)
    tl.store(y + offsets, total)


@jit
def two_pass_kernel(x, y, n, BLOCK: tl.constexpr):
    """Read all of `x` for its sum, then again to subtract it: 8 bytes in, 4 out."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(0, n, num_stages=1):
        total += tl.load(x + row * BLOCK + offsets)
    mean = tl.sum(total, axis=0)
    for row in tl.range(0, n, num_stages=1):
        tl.store(y + row * BLOCK + offsets, tl.load(x + row * BLOCK + offsets) - mean)


@jit
def tail_kernel(x, y, n, BLOCK: tl.constexpr):
    """Copy fp32: the bulk in groups of 16, then up to 15 elements that do not count."""
    start = tl.program_id(0) * BLOCK
    left = tl.minimum(n - start, BLOCK)
    bulk = left // 16 * 16
    offsets = tl.arange(0, BLOCK)
    tl.store(y + start + offsets, tl.load(x + start + offsets, mask=offsets < bulk), mask=offsets < bulk)
    rest = bulk + tl.arange(0, 16)
    tl.store(y + start + rest, tl.load(x + start + rest, mask=rest < left), mask=rest < left)


@jit
def masked_kernel(x, mask, y, BLOCK: tl.constexpr):
    """Keep the fp32 values whose byte is set: 5 bytes in, 4 out. 4 values are 128 bits wide, 4 bytes are 32."""
    start, offsets = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    keep = tl.load(tl.multiple_of(mask + start, 4) + offsets) != 0
    tl.store(y + start + offsets, tl.where(keep, tl.load(x + start + offsets), 0.0))


@jit
def convert_kernel(x, y, BLOCK: tl.constexpr):
    """fp16 to fp32 in accesses of 128 bits, with an exchange through shared memory and an explicit barrier."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets)
    tl.debug_barrier()
    tl.store(y + offsets, values.to(tl.float32))


@jit
def strided_kernel(x, y, stride, BLOCK: tl.constexpr):
    """Add a column to an aligned vector. The values of the column are loaded singly and are not in the bulk path."""
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(y + offsets) + tl.load(x + offsets * stride))


def _empty(dtype: torch.dtype = torch.float32, misaligned: bool = False) -> torch.Tensor:
    return torch.empty(2049, dtype=dtype, device="cpu")[int(misaligned) :]


def _variant(kernel: Any, name: str, read: float, written: float, *arguments: Any, **constants: Any) -> Variant:
    launch = partial(kernel[(1,)], *arguments, **constants, BLOCK=2048, enable_fp_fusion=False)
    return Variant(kernel, name, launch, read, written)


def _masked(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> None:
    masked_kernel[(1,)](x, by_address(mask), y, BLOCK=2048, enable_fp_fusion=False)


def variants() -> Iterator[Variant]:
    """The variants for the audit."""
    table, size, x, y = _empty(torch.int64), _empty(torch.int64), _empty(), _empty()
    some = 7  # of which the compiler learns nothing
    for dtype, name in ((tl.bfloat16, "bf16"), (tl.float16, "fp16")):
        yield _variant(table_kernel, name, 6, 4, table, size, x, DTYPE=dtype)
    yield _variant(loop_kernel, "loop", 4, 4, x, y, some)
    yield _variant(two_pass_kernel, "two passes", 8, 4, x, y, some)
    yield _variant(tail_kernel, "tail", 4, 4, x, y, some)
    yield Variant(masked_kernel, "masked", partial(_masked, x, _empty(torch.uint8, misaligned=True), y), 5, 4)
    yield _variant(convert_kernel, "converted", 2, 4, _empty(torch.float16), y)
    yield _variant(strided_kernel, "strided", 8, 4, x, y, some)
