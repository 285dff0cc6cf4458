"""SGD, a drop-in for torch's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from halfstep.integrations.optim.classes import LayoutOptimizer, Rule
from halfstep.integrations.optim.options import Group, check_number, check_options
from halfstep.kernels import sgd


def _check(group: Group) -> None:
    check_number(group["momentum"], "Invalid momentum value", "a finite number of at least 0", lambda x: x >= 0)
    check_number(group["dampening"], "Invalid dampening value", "a finite number", lambda x: True)
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    check_options(group)


def _variant(group: Group) -> dict[str, bool]:
    decays = bool(group["weight_decay"] != 0)
    return {"momentum": group["momentum"] != 0, "nesterov": bool(group["nesterov"]), "decays": decays}


def translated(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    # torch counts no steps, and has no buffer before the first step, to which dampening does not apply.
    return {"step": float("momentum_buffer" in state or "momentum_buffer_codes" in state), **state}


class SGD(LayoutOptimizer, torch.optim.SGD):
    """SGD with momentum (Sutskever et al., 2013) and exact fp32 master weights, a drop-in for `torch.optim.SGD`.

    Args:
        momentum: decay of the momentum buffer, a finite number of at least 0. With 0 there is no buffer.
        dampening: the fraction of each gradient that is not added to the buffer, after the first step.
        weight_decay: L2 penalty: ``weight_decay`` times the weight is added to the gradient.
        nesterov: step along the gradient plus ``momentum`` times the buffer; requires momentum and no dampening.
        state_dtype: dtype of the buffer. The other arguments and the errors are those of `halfstep.AdamW`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = halfstep.SGD([weight], lr=1e-4, momentum=0.9)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()  # too small a step for bf16
        >>> weight.data, optimizer.masters()[weight]
        (tensor([1., 1., 1.], dtype=torch.bfloat16), tensor([0.9999, 0.9999, 0.9999]))
    """

    _rule = Rule(sgd, ("momentum_buffer",), _check, _variant, translated=translated)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        LayoutOptimizer.__init__(self, locals())
