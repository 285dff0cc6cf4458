"""The ways in which an optimizer holds weights and moments. Needs only torch."""

from typing import Any

import torch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Layouts = dict[str, tuple[torch.dtype, dict[str, Any]]]

_MASTERS: Layouts = {
    "fp32": (FP32, {}),
    "split": (BF16, {}),
    "split24": (BF16, {"master_weights": "split24"}),
    "full": (BF16, {"master_weights": "full"}),
    "fp16": (FP16, {}),
    "none": (BF16, {"master_weights": None}),
    "fp16, none": (FP16, {"master_weights": None}),
}
_MOMENTS: dict[str, dict[str, Any]] = {"": {}, ", bf16": {"state_dtype": BF16}, ", 8 bits": {"state_dtype": "8bit"}}

# By name, the dtype of the parameters and the options of the optimizer: every kind of master with every kind of
# moments, which are in fp32 if the name says nothing. What is rounded is rounded stochastically.
LAYOUTS: Layouts = {
    master + moments: (dtype, {**options, **more, **({"rounding": "stochastic"} if rounds else {})})
    for master, (dtype, options) in _MASTERS.items()
    for moments, more in _MOMENTS.items()
    for rounds in (bool(moments) or "none" in master or master == "split24",)
}


def some(*names: str) -> Layouts:
    return {name: LAYOUTS[name] for name in names}
