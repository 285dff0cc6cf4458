"""Weight updates that a format loses: those below half a unit in the last place of their weight.

A weight w in a format without an fp32 master does not change if |update| < ulp(w) / 2, where ulp(w) is the distance to
the next larger number of the format. (From a power of two toward zero, the distance is half as large, so that half of
the update would suffice. These updates are counted as lost too.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfstep.numerics.formats.table import Format


@dataclass(frozen=True)
class UpdateLoss:
    """The number of updates of one parameter that a format loses."""

    name: str
    updates: int  # nonzero ones
    lost: int  # of these, those below half a unit in the last place of the weight

    @property
    def share(self) -> float:
        return self.lost / self.updates if self.updates else 0.0


def count_lost(weight: torch.Tensor, update: torch.Tensor, format: Format) -> torch.Tensor:
    """The numbers of nonzero updates and of lost ones, as an int64 tensor on the device."""
    w, u = weight.double(), update.double().abs()
    # 2^exponent <= |w| < 2^(exponent + 1). The exponent of 0 is replaced by that of the smallest normal number.
    exponent = torch.frexp(w)[1] - 1
    exponent = torch.where(w == 0, format.emin, exponent).clamp(min=format.emin)
    half = torch.ldexp(torch.ones_like(w), exponent - format.mantissa - 1)
    moves = u != 0
    return torch.stack([moves.sum(), (moves & (u < half)).sum()])
