"""Weight updates that a format loses: those below half a unit in the last place of their weight.

A weight w in a format without an fp32 master does not change if |update| < ulp(w) / 2, where ulp(w) is the distance to
the next larger number of the format. (From a power of two toward zero, the distance is half as large, so that half of
the update would suffice. These updates are counted as lost too.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.kernels import block_codes
from halfstep.numerics.formats.table import Format
from halfstep.numerics.scaling.overflow import names_of
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.state_layout import MOMENTS


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


@torch.no_grad()
def lost_updates(
    weights: Mapping[str, torch.Tensor], updates: Mapping[str, torch.Tensor], format: Format
) -> list[UpdateLoss]:
    """The number of lost updates by parameter, the worst first. Waits for the device, once per device.

    Args:
        weights: the weights by name.
        updates: the values that are subtracted from the weights, including the learning rate, by the same names.
            Weights without an update are ignored.
        format: the format of the weights.

    Raises:
        ValueError: an update has no weight, or another shape than its weight.
    """
    pending: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, update in updates.items():
        if name not in weights:
            raise ValueError(
                f"Expected updates and parameters to have the same names, but got {name!r} in updates only"
            )
        weight, change = local(weights[name].detach()), local(update.detach())
        if weight.shape != change.shape:
            raise ValueError(
                f"Expected updates[{name!r}] to have the shape of its weight, {tuple(weight.shape)}, but got "
                f"{tuple(change.shape)}"
            )
        counts = count_lost(weight, change.to(weight.device), format)
        pending.setdefault(weight.device, {})[name] = counts
    losses = [
        UpdateLoss(name, total, lost)
        for counts in pending.values()
        for name, (total, lost) in zip(counts, torch.stack([*counts.values()]).tolist(), strict=True)
    ]
    return sorted(losses, key=lambda loss: -loss.share)


@torch.no_grad()
def _moment(state: dict[str, Any], key: str) -> torch.Tensor:
    """The local values of a moment in fp32."""
    values = local(state[key])
    if values.dtype == torch.uint8:
        return block_codes.decode(values, local(state[f"{key}_scale"]), signed=MOMENTS[key])
    return values.float()


def last_updates(
    optimizer: torch.optim.Optimizer, named_parameters: Any = ()
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights, updates) by name, from the optimizer's state: approximately the updates of the next step.

    The update is lr * m / (sqrt(v) + eps) with bias-corrected moments for Adam and similar optimizers, and lr * buffer
    for SGD with momentum, without weight decay.

    Raises:
        ValueError: the optimizer has taken no step yet.
        TypeError: its state has neither moments nor a momentum buffer.
    """
    weights: dict[str, torch.Tensor] = {}
    updates: dict[str, torch.Tensor] = {}
    names = iter(names_of(optimizer, 0, list(named_parameters)))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = next(names)
            state = optimizer.state.get(parameter, {})
            if not state:
                continue
            lr = float(group["lr"])
            if "exp_avg" in state and "exp_avg_sq" in state:
                first, second = (1 - float(beta) ** float(state["step"]) for beta in group["betas"])
                if first == 0 or second == 0:
                    continue
                m, v = (_moment(state, key) for key in ("exp_avg", "exp_avg_sq"))
                updates[name] = lr * (m / first) / ((v / second).sqrt() + group["eps"])
            elif state.get("momentum_buffer") is not None:
                updates[name] = lr * _moment(state, "momentum_buffer")
            else:
                raise TypeError(
                    f"optimizer is a {type(optimizer).__name__}, whose state for {name} holds neither exp_avg and "
                    "exp_avg_sq nor momentum_buffer; give updates= instead"
                )
            weights[name] = local(parameter.detach())
    if not updates:
        raise ValueError(
            "Expected an optimizer that has taken a step, but got one without: call advise_scale after a step"
        )
    return weights, updates
