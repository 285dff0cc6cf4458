"""What the Triton kernels compute on one block in fp32, whichever way its elements lie."""

from __future__ import annotations

from typing import Any

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.rounding import to_float32


def constant(value: float) -> Any:
    """A global that kernels may read; plain where Triton is not installed."""
    return value if tl is None else tl.constexpr(value)


LOWEST = constant(-3.4028234663852886e38)  # where a maximum starts: from -inf, -inf - -inf would make NaN
PLAIN, BOOLEAN, ADDITIVE = constant(0), constant(1), constant(2)  # kinds of mask


@jit
def logits(x, mask, inside, mask_inside, kept, scale, MASK: tl.constexpr, POLICY: tl.constexpr):
    """A block of z in fp32. `x` and `mask` point at the elements, the insides say which to load, `kept` which count."""
    z = to_float32(tl.load(x, mask=inside, other=0.0, eviction_policy=POLICY)) * scale
    if MASK == BOOLEAN:
        kept = kept & (tl.load(mask, mask=mask_inside, other=0) != 0)
    elif MASK == ADDITIVE:
        z += to_float32(tl.load(mask, mask=mask_inside, other=0.0))
    return tl.where(kept, z, float("-inf"))


@jit
def gradient(dy, p, total, scale, kept, LOG: tl.constexpr):
    """dx of a block; `total` is sum(dy) or sum(dy * y)."""
    if LOG:
        return tl.where(kept & (p != float("-inf")), (dy - tl.exp(p) * total) * scale, 0.0)
    else:
        return tl.where(kept, p * (dy - total) * scale, 0.0)


@jit
def summand(dy, p, kept, LOG: tl.constexpr):
    """What a block adds to `total`."""
    if LOG:
        return tl.where(kept & (p != float("-inf")), dy, 0.0)
    else:
        return tl.where(kept, dy * p, 0.0)
