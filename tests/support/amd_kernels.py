"""A kernel whose expansion on AMD consists of several instructions that are correct only together."""

from __future__ import annotations

from halfstep.kernels.backend import jit, tl


@jit
def quotient_and_root_kernel(a, b, quotient, root, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + offsets)
    tl.store(quotient + offsets, tl.div_rn(x, tl.load(b + offsets)))
    tl.store(root + offsets, tl.sqrt_rn(x))
