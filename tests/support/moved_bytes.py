"""Bytes that an eager step of Muon reads and writes per element, except in matrix products.

python tests/support/moved_bytes.py

Ours are those of its two kernels, and of what torch does between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.kernels import muon
from halfstep.kernels.muon import rule

SIDE = 1024
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
KERNELS = {"fp32": 22.0, "bf16": 18.0, "8 bits": 16 + 2 / 32}  # see kernels/muon


class Count(TorchDispatchMode):
    """Adds the bytes of arguments, which are read, and of results, which are written."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = torch.Tag.inplace_view in func.tags or any(argument.alias_info for argument in func._schema.arguments)
        name = func._schema.name.split("::")[1].rstrip("_")
        is_view = not func._schema.is_mutable and views
        if name not in (*PRODUCTS, "empty", "empty_like", "new_empty", "empty_strided") and not is_view:
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "out"}
            tree = args[1:] if name == "copy" else args, kwargs, result
            tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def counted(call: Any) -> float:
    """The bytes per element of a matrix that a call moves."""
    with Count() as count:
        call()
    return count.bytes / SIDE**2


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(SIDE, SIDE, dtype=dtype))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.Muon([weight], lr=1e-3)
        optimizer.step()
        print(f"torch.optim.Muon, {dtype}: {counted(optimizer.step):.2f}")
    products = rule.Products(((3.4445, -4.775, 2.0315),), 5, 1e-7, 1)
    matrix = torch.randn(1, SIDE, SIDE, dtype=torch.bfloat16)
    between = counted(lambda: muon.orthogonalize([matrix], products))
    for momentum, kernels in KERNELS.items():
        print(f"halfstep.Muon, {momentum} momentum: {kernels + between:.2f} = {kernels:.2f} + {between:.2f}")


if __name__ == "__main__":
    main()
