"""What each precision means: which type the weights have, how a product is formed, where the loss is computed.

* fp32: everything in fp32.
* bf16: weights, activations and gradients in bf16; products on the machine's own bf16 units, which sum in fp32.
* fp16: the same with fp16, plus a loss scale. A GPU multiplies natively. torch's fp16 product on CPUs runs at about
  1/40 of fp32, so there each product is **emulated**: both operands are fp16 numbers, they are multiplied and summed in
  fp32, and the result is rounded to fp16 once, in the forward and in the backward pass. That is what a tensor core
  computes (but for the order of the sum), so small gradients underflow and large ones overflow as they would there.

The loss is computed in fp32 in every case: at a scale of 65536 an fp16 loss of 1 would already be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import halfstep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp16 × fp16, multiplied and summed in fp32, rounded to fp16. `a` and `b` are already widened."""
    return halfstep.cast(torch.matmul(a, b), torch.float16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return halfstep.cast(x, torch.float32)


class _EmulatedMatmul(torch.autograd.Function):
    """c = a·b; da = dc·bᵀ, db = aᵀ·dc."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)  # the fp16 operands: the fp32 copies would double the activations
        return _product(_wide(a), _wide(b))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        wide = _wide(grad)
        return _product(wide, _wide(b).mT), _product(_wide(a).mT, wide)


class _EmulatedLinear(torch.autograd.Function):
    """y = x·wᵀ; dx = dy·w, dw = dyᵀ·x, with x as a matrix of tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_wide(x), _wide(weight).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        wide = _wide(grad)
        tokens = wide.flatten(0, -2)
        return _product(wide, _wide(weight)), _product(tokens.t(), _wide(x).flatten(0, -2))


class _Embedding(torch.autograd.Function):
    """Rows of a table. The backward pass sums in fp32 and rounds once, on CPUs too.

    torch's CPU kernel sums in the table's own type: in bf16 the gradient of a byte that occurs 300 times in a batch
    stops growing after some 256 equal terms, which would blame the format for a detail of one kernel.
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
        dtype: type of weights, activations and gradients.
        emulated: products are formed as described at the top of this file.
    """

    name: str
    dtype: torch.dtype
    emulated: bool

    @classmethod
    def on(cls, name: str, device: torch.device) -> Precision:
        """The precision called `name`, as `device` computes it."""
        if name not in DTYPES:
            raise ValueError(f"Expected precision to be one of {', '.join(map(repr, DTYPES))}, but got {name!r}")
        return cls(name, DTYPES[name], emulated=name == "fp16" and device.type == "cpu")

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _EmulatedLinear.apply(x, weight) if self.emulated else F.linear(x, weight)

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _EmulatedMatmul.apply(a, b) if self.emulated else torch.matmul(a, b)

    def embedding(self, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return _Embedding.apply(table, index)

    def for_loss(self, logits: torch.Tensor) -> torch.Tensor:
        # the gradient comes back rounded to the logits' type: here fp16 first underflows
        return logits if logits.dtype == torch.float32 else halfstep.cast(logits, torch.float32)
