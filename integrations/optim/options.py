"""The options of a parameter group: validation, and the layout of one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from halfstep.kernels import adam
from halfstep.kernels.multi_tensor import DTYPE_CODES, has_memory
from halfstep.kernels.philox import check_seed

MASTERS = ("auto", "full", "split", "split24", None)
STATE_DTYPES = (torch.float32, torch.bfloat16, "8bit")
LEAST_CODED = 4096  # elements of the smallest parameter whose moments state_dtype="8bit" keeps in 8 bits
STEP_ROUNDINGS = ("auto", "nearest", "stochastic")
# Options that define the layout of the state. Loading a checkpoint does not change them.
LAYOUT_OPTIONS = ("master_weights", "state_dtype", "rounding")

_MASTER_CODES = {
    None: adam.NO_MASTER,
    "full": adam.FULL_MASTER,
    "split": adam.SPLIT_MASTER,
    "split24": adam.SPLIT24_MASTER,
}
# The dtype of the state tensor "master" of each kind: the master itself, or what completes the bf16 weight to it.
MASTER_DTYPES = {
    kind: adam.REMAINDERS.get(code, torch.float32) for kind, code in _MASTER_CODES.items() if code != adam.NO_MASTER
}
# All options of a group.
OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    *("decoupled_weight_decay", "master_weights", "state_dtype", "rounding", "seed"),
)
options_of = itemgetter(*OPTIONS)


def option_values(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The options of groups, to be compared with later ones. Tensors count by identity and version and are not read."""

    def comparable(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return id(value), value._version
        return list(map(comparable, value)) if isinstance(value, (tuple, list)) else value

    return [comparable(options_of(group)) for group in groups]


def plain_number(value: Any) -> Any:
    """Numbers of numpy as numbers of Python, so that checkpoints contain no numpy objects; other values unchanged."""
    if isinstance(value, (tuple, list)) and any(isinstance(one, (np.ndarray, np.generic)) for one in value):
        return type(value)(map(plain_number, value))
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value


def check_number(value: Any, message: str, allowed: str, fits: Callable[[float], bool]) -> None:
    """Raise unless a hyperparameter is a finite number in its range. Device and fake tensors are not read."""
    value = plain_number(value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not has_memory(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{message}: {value!r}; expected {allowed}")
    if not math.isfinite(value) or not fits(float(value)):
        raise ValueError(f"{message}: {value}; expected {allowed}")


def check_options(group: dict[str, Any]) -> None:
    """Validate the options of a parameter group. Messages start like torch's, which other code may match."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"Expected betas to be a pair of numbers from 0 to below 1, but got {betas!r}")
    if isinstance(betas[0], torch.Tensor) != isinstance(betas[1], torch.Tensor):
        raise ValueError("betas must be either both floats or both Tensors")
    for name, value in (("lr", group["lr"]), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if not isinstance(value, torch.Tensor):
            continue
        if group["foreach"] and not group["capturable"]:
            raise ValueError(
                f"{name} as a Tensor is not supported for capturable=False and foreach=True; leave foreach out, which "
                "has no effect here"
            )
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element; its shape is {tuple(value.shape)}")
    for index, beta in enumerate(betas):
        check_number(
            beta, f"Invalid beta parameter at index {index}", "a number from 0 to below 1", lambda x: 0.0 <= x < 1.0
        )
    for name, text in (("lr", "learning rate"), ("eps", "epsilon value"), ("weight_decay", "weight_decay value")):
        check_number(group[name], f"Invalid {text}", "a finite number of at least 0", lambda x: x >= 0)
    if group["foreach"] and group["fused"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; neither changes what is computed here")
    if group["differentiable"]:
        if group["fused"]:
            raise RuntimeError("`fused` does not support `differentiable`; use torch.optim for a differentiable step")
        raise ValueError("Expected differentiable to be False, but got True: use torch.optim for a differentiable step")
    for name, allowed in (("master_weights", MASTERS), ("state_dtype", STATE_DTYPES), ("rounding", STEP_ROUNDINGS)):
        if group[name] not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {group[name]!r}")
    check_seed(group["seed"])


def check_parameter(parameter: torch.Tensor, where: str, master_weights: str | None) -> None:
    """Raise unless the kernels can update a parameter, which messages call `where`."""
    if parameter.layout != torch.strided:
        raise TypeError(f"Expected {where} to be dense, but got layout {parameter.layout}")
    if parameter.dtype not in DTYPE_CODES:
        raise TypeError(
            f"Expected {where} to have dtype float32, float16 or bfloat16, but got {parameter.dtype}: use torch.optim "
            "for other dtypes"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"Expected each element of {where} to have memory of its own, but got shape {tuple(parameter.shape)} and "
            f"strides {parameter.stride()}: use .contiguous()"
        )
    if master_weights in ("split", "split24") and parameter.dtype == torch.float16:
        raise ValueError(
            f"Expected master_weights to be 'full', 'auto' or None for float16, but got {master_weights!r} for {where}"
        )


def master_of(parameter: torch.Tensor, master_weights: str | None) -> str | None:
    """The kind of master of a parameter: a key of `MASTER_DTYPES`, or None. fp32 parameters have none."""
    if parameter.dtype == torch.float32:
        return None
    if master_weights == "auto":
        return "split" if parameter.dtype == torch.bfloat16 else "full"
    return master_weights


def state_dtype_of(parameter: torch.Tensor, state_dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of the moments of a parameter; uint8 stands for codes in 8 bits.

    Moments of vectors and of small parameters stay in fp32: they take next to no memory, and norms and biases, whose
    blocks would mix unrelated elements, are among them.
    """
    if isinstance(state_dtype, torch.dtype):
        return state_dtype
    return torch.uint8 if parameter.dim() > 1 and parameter.numel() >= LEAST_CODED else torch.float32


def is_stochastic(group: dict[str, Any]) -> bool:
    """Whether the steps of a group round stochastically.

    By default they do with moments in 8 bits: to nearest, a second moment with 3 bits of mantissa stops changing.
    """
    if group["rounding"] == "auto":
        return bool(group["state_dtype"] == "8bit")
    return bool(group["rounding"] == "stochastic")


def layout_of(parameter: torch.Tensor, grad: torch.dtype, group: dict[str, Any]) -> adam.Layout:
    """The layout of a parameter, for which its kernel is compiled."""
    master = _MASTER_CODES[master_of(parameter, group["master_weights"])]
    state = state_dtype_of(parameter, group["state_dtype"])
    return adam.Layout(
        parameter.dtype,
        grad,
        state,
        master,
        bool(group["amsgrad"]),
        not group["decoupled_weight_decay"] and bool(group["weight_decay"] != 0),
        is_stochastic(group) and adam.rounds_stochastically(parameter.dtype, state, master),
    )


def is_zero(lr: torch.Tensor | float) -> bool:
    """Whether a learning rate is known to be 0. Tensors on other devices than the CPU are not read."""
    return bool(lr == 0) if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu" else False
