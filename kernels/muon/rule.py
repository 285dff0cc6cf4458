"""The specification of Muon: one step of a matrix, in plain torch. What is per element has the same bits everywhere.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is scalable for LLM
training" (2025) for `ratio`; Amsel et al., "The Polar Express" (2025) for coefficients that differ between steps.

A step has three parts: `momentum` of all elements, whose result is rounded to bf16; `orthogonalized`, whose matrix
products have other bits on other types of devices; and `weight` of all elements.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import torch

from halfstep.kernels.adam.rule import average, factor

Group = namedtuple("Group", "lr weight_decay maximize max_norm momentum ratio")
# The numbers of a tensor and step, fp32. gscale is +-clip / scale, factor that of the moving average: 1 - momentum if
# that is below 0.5, else -momentum. rate is lr * ratio, decay is lr * weight_decay.
Hyper = namedtuple("Hyper", "gscale factor rate decay")
Triple = tuple[float, float, float]
ADJUSTMENTS = ("original", "match_rms_adamw")
CHUNK = 1024  # elements of a sum whose order is the same for all numbers of threads


class Products(NamedTuple):
    """How matrices are orthogonalized, and which: each parameter is `blocks` of them, side by side in its rows."""

    coefficients: tuple[Triple, ...]  # of each step; the last ones are those of all further steps
    steps: int
    eps: float  # the least norm that a matrix is divided by
    blocks: int


def momentum(
    layout: Any,  # says whether it is Nesterov's
    w: Any,  # not used: there is no weight
    grad: torch.Tensor,  # fp32, any shape
    moments: list[torch.Tensor],  # fp32, shape of grad: the momentum buffer
    hyper: Hyper,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """What is orthogonalized, and the new buffer. Each operation is a separate IEEE fp32 operation, in this order:

    g    = grad * gscale
    buf  = buf + (1 - momentum) * (g - buf)         for momentum <= 0.5: g - momentum * (g - buf)
    x    = buf + (1 - momentum) * (g - buf)         only with Nesterov's, from the new buffer; else x = buf
    """
    g = grad * hyper.gscale
    buf = average(moments[0], g, hyper.factor)
    return average(buf, g, hyper.factor) if layout.nesterov else buf, buf


def weight(
    layout: Any,
    w: torch.Tensor,  # fp32, any shape: the weight, or its master
    grad: torch.Tensor,  # fp32, shape of w: the orthogonalized matrix
    moments: Any,  # none
    hyper: Hyper,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """The new w. Decay and update are subtracted together, so a weight is rounded once per step."""
    return (w - (hyper.rate * grad + hyper.decay * w),)


def numbers(group: Any, count: torch.Tensor, gscale: torch.Tensor) -> Hyper:
    """The numbers of each tensor, in fp64 and then rounded to fp32 once."""
    rate, decay = group.lr * group.ratio, group.lr * group.weight_decay
    return Hyper(gscale.float(), factor(group.momentum), rate.float(), decay.float())


def matrices(shape: torch.Size | tuple[int, ...], blocks: int = 1) -> tuple[int, int, int]:
    """The number, rows and columns of the matrices of a parameter: those of a batch for three dimensions, of the first
    dimension by all others for two, four and more, each cut into `blocks` by rows.

    Raises:
        ValueError: the shape has less than two dimensions, or rows that are no multiple of `blocks`.
    """
    if len(shape) < 2:
        raise ValueError(f"Expected a parameter of at least two dimensions, but got shape {tuple(shape)}")
    count, rows = (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])
    if rows % blocks:
        raise ValueError(f"Expected blocks to divide the {rows} rows of shape {tuple(shape)}, but got {blocks}")
    return count * blocks, rows // blocks, shape[2] if len(shape) == 3 else math.prod(shape[1:])


def ratio(adjust_lr_fn: str, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by: ``"original"``: the root of rows / columns, at least 1;
    ``"match_rms_adamw"``: 0.2 times the root of the longer side, with which updates are about as large as AdamW's.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """The 2-norm of contiguous numbers, in fp64. Its bits depend on no number of threads: torch divides rows among
    them, and the numbers of a sum only from 2^15 on.
    """
    norms = x.flatten()
    while len(norms) >= 2**15:
        padding = -len(norms) % CHUNK
        rows = (torch.nn.functional.pad(norms, (0, padding)) if padding else norms).view(-1, CHUNK)
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return torch.linalg.vector_norm(norms, dtype=torch.float64)


def orthogonalized(x: torch.Tensor, products: Products) -> torch.Tensor:
    """The bf16 matrix of shape ``(rows, columns)`` with singular values near 1, by a quintic Newton-Schulz iteration.

    The products are those of `torch.optim.Muon`, always of the short side first, of new contiguous memory and of one
    matrix, since each of these changes bits. The norm is an fp32 number, where torch's is rounded to bf16.
    """
    tall = x.shape[0] > x.shape[1]
    norm = _norm(x).float().clamp(min=products.eps).view(1, 1)  # of two dimensions, so that it is not rounded to bf16
    x = x.mT if tall else x
    y, result = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    torch.div(x, norm, out=y)
    gram, polynomial = (y.new_empty(len(y), len(y)) for _ in range(2))
    for step in range(products.steps):
        a, b, c = products.coefficients[min(step, len(products.coefficients) - 1)]
        torch.mm(y, y.mT, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(y, polynomial, y, beta=a, out=result)
        y, result = result, y
    return y.mT if tall else y
