"""The precisions: dtypes of weights, activations and gradients, and the arithmetic of matrix products and of the loss.

* fp32: everything in fp32.
* bf16: weights, activations and gradients in bf16. Matrix products use the bf16 units of the machine, which accumulate
  in fp32.
* fp16: the same in fp16, with a loss scale.

On CPUs, torch's fp16 matrix product has about 1/40 of the speed of fp32, and without AVX-512 the bf16 product of the
backward, dy·w, has too. There they are **emulated**: 16-bit operands are multiplied and accumulated in fp32, and the
result is rounded once, in the forward and in the backward. A tensor core computes the same, except for the order of the
sum, so gradients underflow and overflow as on a GPU.

The loss is always computed in fp32, since an fp16 loss of 1 would be infinite with a loss scale of 65536.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import halfstep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of two matrices of `dtype` that were converted to fp32, rounded to `dtype`."""
    return halfstep.cast(torch.matmul(a, b), dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return halfstep.cast(x, torch.float32)


class _EmulatedMatmul(torch.autograd.Function):
    """c = a·b; da = dc·bᵀ, db = aᵀ·dc."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)  # in 16 bits, since fp32 copies would double the activations
        return _product(_wide(a), _wide(b), a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        wide = _wide(grad)
        return _product(wide, _wide(b).mT, a.dtype), _product(_wide(a).mT, wide, b.dtype)


class _EmulatedLinear(torch.autograd.Function):
    """y = x·wᵀ; dx = dy·w, dw = dyᵀ·x, where the rows of x are tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_wide(x), _wide(weight).t(), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        wide = _wide(grad)
        tokens = wide.flatten(0, -2)
        to_input = _product(wide, _wide(weight), x.dtype)
        return to_input, _product(tokens.t(), _wide(x).flatten(0, -2), weight.dtype)


class _Embedding(torch.autograd.Function):
    """An embedding whose backward accumulates in fp32 and rounds once, on CPUs too.

    torch's CPU kernel accumulates in the dtype of the table. In bf16 the gradient of a byte that occurs 300 times in a
    batch would stop growing after some 256 equal terms, which is a property of the kernel and not of the format.
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = table.shape[0], table.dtype
        return F.embedding(index, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = grad if grad.dtype == torch.float32 else halfstep.cast(grad, torch.float32)
        table = torch.ops.aten.embedding_dense_backward(wide, index, ctx.rows, -1, False)
        return (table if ctx.dtype == torch.float32 else halfstep.cast(table, ctx.dtype)), None


@dataclass(frozen=True)
class Precision:
    """The arithmetic of one run.

    Args:
        name: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        dtype: dtype of weights, activations and gradients.
        emulated: whether matrix products are emulated; see the docstring of this module.
    """

    name: str
    dtype: torch.dtype
    emulated: bool

    @classmethod
    def on(cls, name: str, device: torch.device) -> Precision:
        """The precision `name` on `device`."""
        if name not in DTYPES:
            raise ValueError(f"Expected precision to be one of {', '.join(map(repr, DTYPES))}, but got {name!r}")
        slow = ("bf16", "fp16") if torch.backends.cpu.get_cpu_capability() == "AVX2" else ("fp16",)
        return cls(name, DTYPES[name], emulated=device.type == "cpu" and name in slow)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _EmulatedLinear.apply(x, weight) if self.emulated else F.linear(x, weight)

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _EmulatedMatmul.apply(a, b) if self.emulated else torch.matmul(a, b)

    def embedding(self, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return _Embedding.apply(table, index)

    def for_loss(self, logits: torch.Tensor) -> torch.Tensor:
        # The gradient is rounded to the dtype of the logits: the first place where fp16 may underflow.
        return logits if logits.dtype == torch.float32 else halfstep.cast(logits, torch.float32)
