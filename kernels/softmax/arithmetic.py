"""The arithmetic of a row on one block of fp32 numbers, for kernels of every layout."""

from __future__ import annotations

from halfstep.kernels.backend import constant, cuda_capability_geq, jit, tl
from halfstep.kernels.rounding import to_float32

LOWEST = constant(-3.4028234663852886e38)  # Maxima start from it: from -inf, -inf - -inf would make NaN.
PLAIN, BOOLEAN, ADDITIVE = constant(0), constant(1), constant(2)  # kinds of mask


@jit
def logits(x, mask, scale, MASK: tl.constexpr):
    """z of a block in fp32, from blocks of x and of a mask of the kind MASK."""
    z = to_float32(x) * scale
    if MASK == BOOLEAN:
        z = tl.where(mask != 0, z, float("-inf"))
    elif MASK == ADDITIVE:
        z += to_float32(mask)
    return z


@jit
def exponential(z):
    """exp of a block of z, 0 below 2^-126.

    On NVIDIA GPUs, `tl.exp` takes two multiplications and a comparison besides, for results below 2^-126.
    """
    if cuda_capability_geq(8, 0):
        powers = z * 1.4426950408889634  # log2(e)
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [powers], tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(z)


@jit
def normalizer(total, LOG: tl.constexpr):
    """What `normalized` takes, from the sum of a row: its logarithm, or 1 / sum."""
    total = tl.where(total == 0.0, 1.0, total)  # asking total > 0 instead would hide a NaN
    return tl.log(total) if LOG else 1.0 / total


@jit
def normalized(z, e, norm, LOG: tl.constexpr):
    return z - norm if LOG else e * norm


@jit
def summand(dy, y, LOG: tl.constexpr):
    """What a block adds to the sum of the backward."""
    if LOG:
        return tl.where(y != float("-inf"), dy, 0.0)
    else:
        return dy * y


@jit
def gradient(dy, y, total, scale, LOG: tl.constexpr):
    """dx of a block; `total` is sum(dy) or sum(dy * y)."""
    if LOG:
        return tl.where(y != float("-inf"), (dy - tl.exp(y) * total) * scale, 0.0)
    else:
        return y * (dy - total) * scale


@jit
def from_neighbour(tile, AXIS: tl.constexpr):
    """The fp32 numbers at the other one of two places along an axis. Between lanes of a warp, this is one shuffle."""
    bits = tile.to(tl.int32, bitcast=True)
    return (tl.xor_sum(bits, axis=AXIS, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
