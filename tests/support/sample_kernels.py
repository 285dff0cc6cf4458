"""Kernels for the tests of the compile audit whose machine code is known: bytes, widths, no contraction."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.variant import Variant


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
    """Sum down a column, through an inlined helper: ptxas unrolls this loop, which must not count twice."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in tl.range(0, n, num_stages=1):
        total += _load(x + row * BLOCK + offsets)
    tl.store(y + offsets, total)


def variants() -> Iterator[Variant]:
    """What the audit compiles."""
    for dtype, name in ((tl.bfloat16, "bf16"), (tl.float16, "fp16")):
        yield Variant(
            kernel=table_kernel,
            name=name,
            signature={"table": "*i64", "sizes": "*i64", "scale": "*fp32"},
            constexprs={"DTYPE": dtype, "BLOCK": 2048},
            divisible_by_16=("table", "sizes"),
            bytes_read=6,
            bytes_written=4,
        )
    yield Variant(
        kernel=loop_kernel,
        name="fp32",
        signature={"x": "*fp32", "y": "*fp32", "n": "i32"},
        constexprs={"BLOCK": 1024},
        divisible_by_16=("x", "y"),
        bytes_read=4,
        bytes_written=4,
    )
