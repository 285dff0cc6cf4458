"""Softmax and log-softmax, forward and backward, in fp64, and how far fp32 results may deviate.

Written from the definition, it shares no code with the package, and knows the rules for -inf, Inf and NaN.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from implementations import twin
from tolerances import ROUNDOFF, SOFTMAX_DEPTH, SOFTMAX_EXACT_DEPTH, SOFTMAX_EXACT_UNITS, SOFTMAX_FLUSHED, SOFTMAX_UNITS

import halfstep

INF = math.inf
UNIT = 2.0**-24


@dataclass
class Case:
    x: torch.Tensor
    dim: int = -1
    scale: float = 1.0
    mask: torch.Tensor | None = None
    causal: bool = False
    dtype: torch.dtype | None = None
    log: bool = False
    precision: str = "exact"

    @property
    def out(self) -> torch.dtype:
        return self.dtype or self.x.dtype

    def run(self, device: torch.device, x: torch.Tensor | None = None) -> torch.Tensor:
        function = halfstep.log_softmax if self.log else halfstep.softmax
        mask = None if self.mask is None else twin(self.mask, device)
        x = twin(self.x, device) if x is None else x
        options = {"scale": self.scale, "causal": self.causal, "dtype": self.dtype, "precision": self.precision}
        return function(x, self.dim, mask=mask, **options)


def kept_by(case: Case) -> np.ndarray:
    """What neither the boolean mask nor `causal` drops."""
    kept = np.ones(case.x.shape, dtype=bool)
    if case.mask is not None and case.mask.dtype == torch.bool:
        kept &= np.broadcast_to(case.mask.numpy(), case.x.shape)
    if case.causal:
        kept &= np.tril(np.ones(case.x.shape[-2:], dtype=bool))
    return kept


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The result in fp64, and how far from it fp32 arithmetic may end, before the last rounding.

    An error of k units in an exponent is a relative error of k units in the exponential; `exponent` counts the
    roundings of z = scale * x + mask and of z - max(z), relative to their sizes.
    """
    with np.errstate(all="ignore"):
        scaled = case.x.double().numpy() * float(np.float32(case.scale))
        z = scaled.copy()
        rounded = case.scale != 1.0
        if case.mask is not None and case.mask.dtype != torch.bool:
            z = z + case.mask.double().numpy()
            rounded = True
        z = np.where(kept_by(case), z, -INF)
        top = z.max(axis=case.dim, keepdims=True)
        nothing = top == -INF
        below = z - np.where(nothing, 0.0, top)
        e = np.exp(below)
        s = e.sum(axis=case.dim, keepdims=True)
        sizes = np.where(np.isfinite(z) & np.isfinite(scaled), np.abs(scaled) + np.abs(z), 0.0)
        exponent = (SOFTMAX_DEPTH if case.precision == "fast" else SOFTMAX_EXACT_DEPTH) * np.where(
            np.isfinite(below), np.abs(below), 0.0
        )
        if rounded:
            exponent = exponent + 4.0 * sizes.max(axis=case.dim, keepdims=True)
        units = ((SOFTMAX_UNITS if case.precision == "fast" else SOFTMAX_EXACT_UNITS) + exponent) * UNIT
        if case.log:
            y = np.where(nothing, -INF, below - np.log(s))
            bound = units + np.where(np.isfinite(y), np.abs(y), 0.0) * UNIT
        else:
            y = np.where(nothing, 0.0, e / s)
            bound = np.where(np.isfinite(y), np.abs(y), 0.0) * units + SOFTMAX_FLUSHED
    return y, bound


def backward_oracle(case: Case, y: torch.Tensor, dy: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """dx in fp64 from the rounded result, and the bound on its error before the last rounding."""
    p, g, scale = y.double().numpy(), dy.double().numpy(), float(np.float32(case.scale))
    causal = np.ones(case.x.shape, dtype=bool) if not case.causal else kept_by(Case(case.x, causal=True))
    with np.errstate(all="ignore"):
        if case.log:
            counts = causal & (p != -INF)
            g, e = np.where(counts, g, 0.0), np.where(counts, np.exp(p), 0.0)
            dx = np.where(counts, scale * (g - e * g.sum(axis=case.dim, keepdims=True)), 0.0)
            finite = np.where(np.isfinite(p), np.abs(p), 0.0)
            grown = e * np.abs(g).sum(axis=case.dim, keepdims=True) * (SOFTMAX_UNITS + 2.0 * finite)
            bound = abs(scale) * (np.abs(g) * 4.0 + grown) * UNIT
        else:
            g, p = np.where(causal, g, 0.0), np.where(causal, p, 0.0)
            dx = np.where(causal, scale * p * (g - (g * p).sum(axis=case.dim, keepdims=True)), 0.0)
            grown = np.abs(g) + np.abs(g * p).sum(axis=case.dim, keepdims=True)
            bound = abs(scale) * np.abs(p) * grown * SOFTMAX_UNITS * UNIT
    return dx, bound + 2.0 * SOFTMAX_FLUSHED


def assert_within(actual: torch.Tensor, exact: np.ndarray, bound: np.ndarray, what: object) -> None:
    """Equal where the exact value, rounded to the dtype, is not finite; within the bound and half an ulp elsewhere."""
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {exact.shape}"
    got = actual.detach().cpu().double().numpy()
    expected = torch.from_numpy(np.ascontiguousarray(exact)).to(actual.dtype).double().numpy()
    special = ~np.isfinite(expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    smallest = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    with np.errstate(all="ignore"):
        allowed = (bound + np.abs(exact)) * ROUNDOFF[actual.dtype] + bound + smallest
        fine = same | (~special & (np.abs(got - exact) <= allowed))
    if not fine.all():
        index = tuple(int(i) for i in np.argwhere(~fine)[0])
        raise AssertionError(
            f"{what}: {int((~fine).sum())} of {fine.size} wrong, first at {index}: {got[index]!r}, exact "
            f"{exact[index]!r}, allowed error {allowed[index]!r}"
        )
