"""exp and the natural logarithm of fp32 from IEEE operations alone: the same bits in torch, the interpreter and GPUs.

Operations round to nearest even and keep subnormal numbers. They are fused multiply-adds only where `fma` stands.

**exp** of d <= 0, NaN included; 0 where 2^n would be below the smallest normal number, from about 2^-126.5 down:

    u = fma(d, log2(e), 3 * 2^22 + 127)    n = u - (3 * 2^22 + 127), the integer nearest to d * log2(e)
    f = fma(d, log2(e), -n)                exp(d) = 2^n * (1 + f * (c1 + f * (c2 + ...))), by Horner's rule with fma

The last bits of u are n + 127: shifted to its exponent, they are 2^n. For 16-bit results the polynomial has degree 5:
the error is up to 2.0 + 0.224 |d| ulp. `precise`, for fp32 results, takes degree 6 and adds what log2(e) loses in fp32
to f, by fma: up to 1.01 ulp.

**log** of s >= 2^-126, up to 0.86 ulp off:

    s = 2^e * (1 + r) with 1 + r from sqrt(1/2) to sqrt(2)
    log(s) = fma(e, log(2), r + fma(-1/2, r * r, fma(r * r * r, l3 + r * (l4 + ...), e * rest of log(2))))

The coefficients minimize the largest relative error. Bounds are of all inputs (`test_exponential.py`, exhaustive). Log
is monotonic; exp of 1 in 32,000 neighbours is in the wrong order, by one ulp.
"""

from __future__ import annotations

import torch

from halfstep.kernels.backend import INTERPRET, constant, jit, tl

# Coefficients in the order of Horner's rule: the last one first.
_SHORT = "0x1.5bda58p-10 0x1.3ce8aep-7 0x1.c6b6d8p-5 0x1.ebf9c2p-3 0x1.62e42ap-1 1.0"
_LONG = "0x1.416b52p-13 0x1.5f082ep-10 0x1.3b2de0p-7 0x1.c6af7cp-5 0x1.ebfbdcp-3 0x1.62e430p-1 1.0"
_LOG = (
    "-0x1.38c9dep-4 0x1.055ec6p-3 -0x1.0d8242p-3 0x1.22d92ep-3 "
    "-0x1.54728ap-3 0x1.99a01cp-3 -0x1.000226p-2 0x1.555554p-2"
)
SHORT, LONG, SERIES = (tuple(map(float.fromhex, numbers.split())) for numbers in (_SHORT, _LONG, _LOG))
LOG2_E, LOG2_E_REST = float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0cp-26")
LOG_2, LOG_2_REST = float.fromhex("0x1.62e43p-1"), float.fromhex("-0x1.05c61p-29")
SHIFT = float(3 * 2**22 + 127)
LOWEST = float.fromhex("-0x1.601e68p+6")  # -88.0297: times log2(e) it rounds to -127, for which 2^n is 0
ROOT_OF_HALF = 0x3F3504F3  # bits of sqrt(1/2)

# ---------------------------------------------------------------------------------------------------------- reference


def reference_fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """``a * b + c`` of fp32 with one rounding.

    The product is exact in fp64. The sum is rounded to odd there, so that rounding again gives the result of a single
    rounding (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd", 2008).
    """
    b, c = (number.double() if isinstance(number, torch.Tensor) else number for number in (b, c))
    product = a.double() * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # Knuth's two-sum: total + error is exact
    bits = total.view(torch.int64)
    to_odd = (error != 0) & ((bits & 1) == 0) & total.isfinite()
    odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return torch.where(to_odd, odd, bits).view(torch.float64).float()


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    p = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        p = reference_fma(p, x, coefficient)
    return p


def reference_exp(d: torch.Tensor, precise: bool) -> torch.Tensor:
    """exp of fp32 numbers that are 0 or less; NaN stays NaN."""
    d = d.clamp(min=LOWEST)
    u = reference_fma(d, LOG2_E, SHIFT)
    f = reference_fma(d, LOG2_E, SHIFT - u)
    if precise:
        f = reference_fma(d, LOG2_E_REST, f)
    return _polynomial(f, LONG if precise else SHORT) * (u.view(torch.int32) << 23).view(torch.float32)


def reference_log(s: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of normal fp32 numbers above 0; NaN stays NaN."""
    bits = s.view(torch.int32)
    e = (bits - ROOT_OF_HALF) >> 23
    r = (bits - (e << 23)).view(torch.float32) - 1.0
    e, square = e.float(), r * r
    rest = reference_fma(r * square, _polynomial(r, SERIES), e * LOG_2_REST)
    y = reference_fma(square, -0.5, rest)
    return torch.where(s.isnan(), s, reference_fma(e, LOG_2, r + y))


# ------------------------------------------------------------------------------------------------------------ kernels

_DEGREE_5, _DEGREE_6, _SERIES = map(constant, (SHORT, LONG, SERIES))
_LOG2_E, _LOG2_E_REST, _LOG_2, _LOG_2_REST = map(constant, (LOG2_E, LOG2_E_REST, LOG_2, LOG_2_REST))
_SHIFT, _LOWEST, _ROOT_OF_HALF, _INTERPRETED = map(constant, (SHIFT, LOWEST, ROOT_OF_HALF, INTERPRET))


@jit
def fma(a, b, c):
    """`reference_fma` of blocks; b and c may be numbers. The interpreter rounds the product of ``tl.fma``."""
    if _INTERPRETED:
        product = a.to(tl.float64) * b
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        bits = total.to(tl.int64, bitcast=True)
        to_odd = (error != 0) & ((bits & 1) == 0) & (total - total == 0)
        odd = tl.where((error > 0) == (total > 0), bits + 1, bits - 1)
        return tl.where(to_odd, odd, bits).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@jit
def _horner(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    p = tl.full(x.shape, COEFFICIENTS[0], tl.float32)
    for i in tl.static_range(1, COUNT):
        p = fma(p, x, COEFFICIENTS[i])
    return p


@jit
def exp(d, PRECISE: tl.constexpr):
    """`reference_exp` of a block."""
    d = tl.maximum(d, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    u = fma(d, _LOG2_E, _SHIFT)
    f = fma(d, _LOG2_E, _SHIFT - u)
    if PRECISE:
        f = fma(d, _LOG2_E_REST, f)
    p = _horner(f, _DEGREE_6, 7) if PRECISE else _horner(f, _DEGREE_5, 6)
    return p * (u.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@jit
def log(s):
    """`reference_log` of a block."""
    bits = s.to(tl.int32, bitcast=True)
    e = (bits - _ROOT_OF_HALF) >> 23
    r = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    e = e.to(tl.float32)
    square = r * r
    y = fma(square, -0.5, fma(r * square, _horner(r, _SERIES, 8), e * _LOG_2_REST))
    return tl.where(s == s, fma(e, _LOG_2, r + y), s)
