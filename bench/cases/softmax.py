"""Softmax over the last dimension, forward and backward.

Bytes: the forward reads x and writes y; the backward reads y and the gradient and writes the gradient of x. Errors are
in units of the output dtype's eps: relative to each value in the forward, in the backward to
``y_i * (|g_i| + sum_j y_j |g_j|)``, since the difference may be 0. The bound for fp32 allows for long sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch._functorch.config

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import compiled, needs, needs_gpu
from halfstep.bench.harness import DTYPES, Case, Prepared, in_eps, normal

BOUNDS = {"bf16": 2.0, "fp32": 128.0}


@dataclass
class SoftmaxInputs:
    """A matrix, a gradient of its softmax, and the exact softmax."""

    x: torch.Tensor
    grad: torch.Tensor

    @cached_property
    def exact(self) -> torch.Tensor:
        return torch.softmax(self.x.detach().double(), -1)


def _prepare(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> SoftmaxInputs:
    x, grad = normal(device, 2, rows, columns)
    return SoftmaxInputs((2 * x).to(dtype).requires_grad_(), grad.to(dtype))


_torch = partial(torch.softmax, dim=-1)


def _liger(x: torch.Tensor) -> torch.Tensor:
    needs_gpu(x.device)
    result: torch.Tensor = needs("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply(x)
    return result


def _forward(function: Callable[[torch.Tensor], torch.Tensor], inputs: SoftmaxInputs) -> Prepared:
    x = inputs.x.detach()
    return Prepared(lambda: function(x))


def _backward(function: Callable[[torch.Tensor], torch.Tensor], inputs: SoftmaxInputs) -> Prepared:
    y = function(inputs.x)

    def call() -> torch.Tensor:
        return torch.autograd.grad(y, inputs.x, inputs.grad, retain_graph=True)[0]

    return Prepared(call)


def _compiled(prepare: Callable[..., Prepared], sizes: Sizes, inputs: SoftmaxInputs) -> Prepared:
    # Without this, the compiled backward frees or reuses its saved tensors, and cannot be called again.
    with torch._functorch.config.patch(donated_buffer=False):
        return prepare(compiled(_torch, sizes), inputs)


def _backward_error(inputs: SoftmaxInputs, got: torch.Tensor) -> float:
    y, grad = inputs.exact, inputs.grad.double()
    want = y * (grad - (y * grad).sum(-1, keepdim=True))
    return in_eps(got, want, y * (grad.abs() + (y * grad.abs()).sum(-1, keepdim=True)), got.dtype)


def cases(sizes: Sizes) -> Iterator[Case]:
    directions: dict[str, tuple[Callable[..., Prepared], Callable[[Any, Any], float], int]] = {
        "forward": (_forward, lambda inputs, got: in_eps(got, inputs.exact, inputs.exact, got.dtype), 2),
        "backward": (_backward, _backward_error, 3),
    }
    for direction, (prepare, error, passes) in directions.items():
        for dtype_name, dtype in DTYPES.items():
            for columns in sizes.columns:
                rows = max(1, sizes.elements // columns)
                yield Case(
                    group="softmax",
                    operation=f"softmax {direction}",
                    dtype=dtype_name,
                    size={"columns": columns, "rows": rows},
                    axis="columns",
                    bytes_moved=passes * rows * columns * dtype.itemsize,
                    bound=BOUNDS[dtype_name],
                    error_unit="in eps",
                    prepare=partial(_prepare, rows=rows, columns=columns, dtype=dtype),
                    providers={
                        "halfstep": partial(prepare, halfstep.softmax),
                        "halfstep fast": partial(prepare, partial(halfstep.softmax, precision="fast")),
                        "torch eager": partial(prepare, _torch),
                        "torch.compile": partial(_compiled, prepare, sizes),
                        "liger-kernel": partial(prepare, _liger),
                    },
                    error=error,
                )
