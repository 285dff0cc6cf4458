"""Adam and AdamW, drop-ins for torch's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from halfstep.integrations.optim.classes import LayoutOptimizer, Rule
from halfstep.integrations.optim.options import Group, check_number, check_options, check_tensor_option
from halfstep.kernels import adam

_ARGUMENTS = """

    Args:
        params: iterable of parameters, of ``(name, parameter)`` pairs, or of group dicts; fp32, fp16 and bf16 may be
            mixed. As in torch, a parameter that occurs twice in a group raises a warning; it is stepped once.
        lr: learning rate; a float, or a one-element tensor that is read on the device.
        betas: decay rates of the two moments, each from 0 to below 1.
        eps: added to the square root of the second moment.
        weight_decay: {decay}.
        amsgrad: divide by the root of the largest second moment so far (Reddi et al., 2018).
        maximize: maximize the objective instead of minimizing it.
        foreach, capturable, fused: accepted for compatibility; every step is fused and capturable.
        differentiable: must be False.
{extra}        master_weights: ``"split"`` (bf16 weight + 16-bit remainder = exact fp32 master, 2 B per parameter),
            ``"full"`` (fp32 copy, 4 B), ``"split24"`` (bf16 weight + 8-bit remainder = master of 24 bits, 1 B; use
            ``rounding="stochastic"`` with it), ``None`` (round the weight every step), or ``"auto"``: split for bf16,
            full for fp16. fp32 parameters need none.
        state_dtype: dtype of the moments, fp32 or bf16, or ``"8bit"``: a byte per element, and one or two bytes for
            each 32 elements of a row; moments of vectors and of parameters with fewer than 4,096 elements stay in fp32.
            Rounded to nearest, a second moment in bf16 or 8 bits with beta2 near 1 stops changing once its updates are
            below half an ulp: use ``rounding="stochastic"`` with bf16. It is the default with 8 bits.
        rounding: ``"nearest"``, ``"stochastic"``, or ``"auto"``: stochastic with ``state_dtype="8bit"``, otherwise
            nearest. Stochastic rounding is unbiased. It applies to bf16 and 8-bit moments, 16-bit parameters without a
            master, and 24-bit masters; fp32 values and exact masters are not rounded. The random bits depend on the
            seed, the parameter's position in the optimizer, its step and the element's index in the full parameter
            (with FSDP1, whose flat shards do not record their positions, in the shard).
        seed: seed of stochastic rounding, 0 to 2^63 - 1; saved and loaded with the options of the groups.
        max_grad_norm: clip the total 2-norm of all gradients to this value inside the step, without writing gradients.
        state_dict_format: what `state_dict` returns to any caller. ``"held"``: the state as it is in memory, without
            allocating anything. ``"canonical"``: `canonical_state_dict`, for code that looks up the names of torch's
            optimizers. It is also an attribute, which can be changed.

    Raises:
        ValueError, RuntimeError: a hyperparameter is out of range or not supported.
        TypeError: a parameter that requires a gradient is not a dense fp32, fp16 or bf16 tensor, or `seed` is not an
            integer. Frozen parameters may be of any kind.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = halfstep.{name}([weight], lr=1e-4)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> weight.data  # the step is too small for bf16
        tensor([1., 1., 1.], dtype=torch.bfloat16)
        >>> optimizer.masters()[weight]  # but not for the fp32 master
        tensor([0.9999, 0.9999, 0.9999])
"""


def _check(group: Group) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Expected betas to be a pair of numbers from 0 to below 1, but got {betas!r}")
    if isinstance(betas[0], torch.Tensor) != isinstance(betas[1], torch.Tensor):
        raise ValueError("betas must be either both floats or both Tensors")
    for index, beta in enumerate(betas):
        check_tensor_option(group, f"betas[{index}]", beta)
        message = f"Invalid beta parameter at index {index}"
        check_number(beta, message, "a number from 0 to below 1", lambda x: 0.0 <= x < 1.0)
    check_number(group["eps"], "Invalid epsilon value", "a finite number of at least 0", lambda x: x >= 0)
    check_options(group)


def _variant(group: Group) -> dict[str, bool]:
    l2 = not group["decoupled_weight_decay"] and bool(group["weight_decay"] != 0)
    return {"amsgrad": bool(group["amsgrad"]), "l2": l2}


def _numbers(group: Group, shape: Any) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {**group, "beta1": beta1, "beta2": beta2}


_RULE = Rule(adam, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _check, _variant, _numbers)


class Adam(LayoutOptimizer, torch.optim.Adam):
    __doc__ = (
        "Adam (Kingma and Ba, 2015) with exact fp32 master weights, a drop-in for `torch.optim.Adam`."
        + _ARGUMENTS.format(
            decay="L2 penalty: ``weight_decay`` times the weight is added to the gradient",
            extra="        decoupled_weight_decay: decay the weight as AdamW does.\n",
            name="Adam",
        )
    )

    # Adam and AdamW inherit from torch's classes for frameworks that use `isinstance`, but use none of their methods:
    # what they do not define is called on `torch.optim.Optimizer` by name.

    _rule = _RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        LayoutOptimizer.__init__(self, locals())


class AdamW(Adam, torch.optim.AdamW):
    __doc__ = (
        "AdamW (Loshchilov and Hutter, 2019) with exact fp32 master weights, a drop-in for `torch.optim.AdamW`."
        + _ARGUMENTS.format(
            decay="decoupled decay: the weight shrinks by ``lr * weight_decay`` of itself per step",
            extra="",
            name="AdamW",
        )
    )

    # As in torch, state dicts loaded into an AdamW do not change its decoupled decay.
    _rule = _RULE._replace(fixed_options=("decoupled_weight_decay",))

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: Literal["auto", "full", "split", "split24"] | None = "auto",
        state_dtype: torch.dtype | Literal["8bit"] = torch.float32,
        rounding: Literal["auto", "nearest", "stochastic"] = "auto",
        max_grad_norm: float | None = None,
        seed: int = 0,
        state_dict_format: Literal["held", "canonical"] = "held",
    ) -> None:
        LayoutOptimizer.__init__(self, {**locals(), "decoupled_weight_decay": True})
