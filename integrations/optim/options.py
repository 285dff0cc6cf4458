"""The options of a parameter group: validation, and those of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES, has_memory
from halfstep.kernels.philox import check_seed
from halfstep.numerics.state_layout import MASTERS

# Options that define the layout of the state, and what is allowed. Loading a checkpoint does not change them.
LAYOUT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "master_weights": ("auto", *(master for master in MASTERS if master is not None), None),
    "state_dtype": (torch.float32, torch.bfloat16, "8bit"),
    "rounding": ("auto", "nearest", "stochastic"),
}
# Options of a group that apex, TransformerEngine and flashoptim have in addition to torch's.
FOREIGN_OPTIONS = ("step", "bias_correction", "master_bytewidth")
Group = dict[str, Any]


def option_values(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options of groups, to be compared with later ones. Tensors count by identity and version and are not read."""

    def comparable(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return id(value), value._version
        return list(map(comparable, value)) if isinstance(value, (tuple, list)) else value

    return [{name: comparable(value) for name, value in group.items() if name != "params"} for group in groups]


def plain_number(value: Any) -> Any:
    """Numbers of numpy as numbers of Python, so that checkpoints contain no numpy objects; other values unchanged."""
    if isinstance(value, (tuple, list)) and any(isinstance(item, (np.ndarray, np.generic)) for item in value):
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


def check_tensor_option(group: Group, name: str, value: Any) -> None:
    """Raise unless a hyperparameter, if it is a tensor, is one that torch's optimizers take too."""
    if not isinstance(value, torch.Tensor):
        return
    if group["foreach"] and not group.get("capturable"):
        raise ValueError(
            f"{name} as a Tensor is not supported for capturable=False and foreach=True; leave foreach out"
        )
    if value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element; its shape is {tuple(value.shape)}")


def check_options(group: Group) -> None:
    """Validate the options that all optimizers have. Messages start like torch's, which other code may match."""
    check_tensor_option(group, "lr", group["lr"])
    for name, text in (("lr", "learning rate"), ("weight_decay", "weight_decay value")):
        check_number(group[name], f"Invalid {text}", "a finite number of at least 0", lambda x: x >= 0)
    if group["foreach"] and group["fused"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; neither changes what is computed here")
    if group["differentiable"]:
        if group["fused"]:
            raise RuntimeError("`fused` does not support `differentiable`; use torch.optim for a differentiable step")
        raise ValueError("Expected differentiable to be False, but got True: use torch.optim for a differentiable step")
    for name, allowed in LAYOUT_OPTIONS.items():
        if group[name] not in allowed:
            raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, allowed))}, but got {group[name]!r}")
    check_seed(group["seed"])


def check_format(form: Any, name: str = "state_dict_format") -> None:
    """Raise unless the argument `name` is a format of `state_dict`."""
    if form not in ("held", "canonical"):
        raise ValueError(f"Expected {name} to be 'held' or 'canonical', but got {form!r}")


def check_parameter(parameter: torch.Tensor, where: str, master_weights: str | None) -> None:
    """Raise unless the kernels can update a parameter, which messages call `where`."""
    if parameter.layout != torch.strided:
        raise TypeError(f"Expected {where} to be dense, but got layout {parameter.layout}")
    if parameter.dtype not in DTYPE_CODES:
        raise TypeError(
            f"Expected {where} to have dtype float32, float16 or bfloat16, but got {parameter.dtype}: use torch.optim"
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


def matched_groups(
    groups: list[Group], state_dict: dict[str, Any], kept: Iterable[str]
) -> tuple[list[Group], dict[Any, tuple[torch.Tensor, Group, Group]]]:
    """The groups after a load that leaves the options of the layout and those `kept`; for each saved index its
    parameter, that parameter's group, and the saved group."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state_dict lacks {key!r}, and has {list(state_dict)}: it is not an optimizer's state_dict"
            )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: expected {len(groups)}, but got "
            f"{len(saved_groups)}"
        )
    result, owners = [], {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if "params" not in saved:
            raise ValueError(f"group {number} of the checkpoint has {', '.join(map(repr, saved))}; it lacks 'params'")
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there, {len(group['params'])} here"
            )
        if not saved.get("bias_correction", True):
            raise ValueError(
                f"Expected bias_correction to be True in group {number} of the checkpoint, but got "
                f"{saved['bias_correction']}: continue with the optimizer that saved it"
            )
        names, present = saved.get("param_names"), group.get("param_names")
        if names and present and names != present and sorted(names) == sorted(present):
            first = next(index for index, pair in enumerate(zip(names, present, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"Expected the parameters of group {number} in the order of the checkpoint, but parameter {first} is "
                f"{names[first]!r} there and {present[first]!r} here: create the optimizer with them in that order"
            )
        unread = {"params", *FOREIGN_OPTIONS, *LAYOUT_OPTIONS, *kept}
        merged = {**group, **{name: value for name, value in saved.items() if name not in unread}}
        if isinstance(merged["lr"], torch.Tensor):
            merged["lr"] = merged["lr"].clone()
        result.append(merged)
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            owners[index] = parameter, merged, saved
    return result, owners
