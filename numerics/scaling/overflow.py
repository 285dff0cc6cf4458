"""Which parameters overflowed, how often and since when: the counts of a loss scaler, read on demand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfstep.numerics.messages import shown


@dataclass(frozen=True)
class Overflow:
    """One parameter whose gradient was not finite."""

    name: str
    inf_steps: int  # steps in which its gradient held an Inf
    nan_steps: int  # and a NaN; a step may count in both
    first_step: int  # the first and the last of these steps, as `GradScaler.update` counts them from 1
    last_step: int


@dataclass(frozen=True)
class OverflowReport:
    """The overflows that a scaler has counted."""

    steps: int  # so far
    skipped: int  # of these
    last_skipped: int  # the number of the last skipped step; 0 if none was skipped
    parameters: list[Overflow]  # those that overflowed, those with the most steps first

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return shown("overflow_text", self)


def names_of(
    optimizer: torch.optim.Optimizer, number: int, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """A name for every parameter of an optimizer: one of `named_parameters`, the optimizer's own, or its position."""
    name_of = {id(parameter): name for name, parameter in named_parameters}
    names = []
    for row, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            saved = group["param_names"][index] if group.get("param_names") else None
            names.append(name_of.get(id(parameter)) or saved or f"optimizer {number}, group {row}, parameter {index}")
    return names


def overflows(counts: torch.Tensor, names: list[str]) -> list[Overflow]:
    """The parameters that overflowed, from `kernels.unscale.Tally.counts`. Waits for the device."""
    return [Overflow(name, *row) for name, row in zip(names, counts.tolist(), strict=False) if row[3]]
