"""Which implementation runs, the operators ``halfstep::log_probabilities`` and its backward, and the derivative."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.kernels.backend import resolve
from halfstep.kernels.log_probabilities import kernels, rule
from halfstep.kernels.log_probabilities.rule import Options
from halfstep.kernels.multi_tensor import check_addresses
from halfstep.kernels.op import Op, batch_first, define, is_watched, no_forward_mode
from halfstep.kernels.softmax.rule import math_dtype


def _implementation(logits: torch.Tensor) -> str:
    """``"reference"``, ``"native"`` or ``"triton"``."""
    rows = logits.numel() // logits.shape[-1]
    counts = logits.shape[-1], rows, rows * -(-logits.shape[-1] // rule.CHUNK)
    is_beyond = logits.dtype == torch.float64 or max(counts) > kernels.LONGEST
    return "reference" if is_beyond else resolve(logits.device, "softmax")


def forward(logits: torch.Tensor, targets: torch.Tensor, *options: Any) -> torch.Tensor:
    check_addresses(logits, targets)
    implementation = _implementation(logits)
    if implementation == "reference":
        return rule.forward(logits, targets, Options(*options[:-1]))
    return kernels.forward(logits, targets, Options(*options[:-1]), implementation == "native")


def backward(
    grads: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, results: torch.Tensor, *options: Any
) -> torch.Tensor:
    """The gradient of the logits; over their memory if the last of the options says so."""
    check_addresses(grads, logits, targets, results)
    inplace = options[-1]
    out = logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    arguments = grads, logits, targets, results, Options(*options[:-1]), out
    implementation = _implementation(logits)
    if implementation == "reference":
        rule.backward(*arguments)
    else:
        kernels.backward(*arguments, implementation == "native")
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return out


def check_differentiable(inplace: bool) -> None:
    if inplace:
        raise RuntimeError(
            "Expected inplace_backward=False for a gradient that is differentiated (create_graph=True, torch.func), "
            "but got True: the gradient would be written over the logits"
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, targets, *ctx.options = inputs
    ctx.written = False
    ctx.save_for_backward(logits, targets, output)


def _differentiate(ctx: Any, grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *options, inplace = ctx.options
    if ctx.written:
        raise RuntimeError(
            "Expected one backward with inplace_backward=True, but got a second: the first wrote the gradient over the "
            "logits; use inplace_backward=False"
        )
    logits, targets, results = ctx.saved_tensors
    if torch.is_grad_enabled():
        check_differentiable(inplace)
        dx = rule.differentiable_backward(grads, logits, targets, Options(*options))
    elif is_watched():
        dx = _backward(grads, logits, targets, results, *options)
    else:
        dx = backward(grads, logits.detach() if inplace else logits, targets, results, *options, inplace)
        ctx.written = inplace
    return dx, None, *[None] * len(ctx.options)


def _batch(info: Any, in_dims: Any, logits: Any, targets: Any, *options: Any) -> tuple[torch.Tensor, int]:
    logits, targets = (batch_first(t, d, info.batch_size) for t, d in zip((logits, targets), in_dims, strict=False))
    return statistics(logits, targets, *options), 1


def _fake(logits: torch.Tensor, targets: torch.Tensor, *options: Any) -> torch.Tensor:
    return torch.empty((6, *targets.shape), dtype=math_dtype(logits.dtype), device=logits.device)


_OPTIONS = "float temperature, int ignore_index, bool entropy, bool mean, bool exact"
statistics = Op(
    f"log_probabilities(Tensor logits, Tensor targets, {_OPTIONS}, bool inplace) -> Tensor",
    operands=2,
    compute=forward,
    fake=_fake,
    save=_save,
    differentiate=_differentiate,
    tangent=no_forward_mode("halfstep.log_probabilities and cross_entropy", "torch.log_softmax"),
    batch=_batch,
)
_backward = define(
    f"log_probabilities_backward(Tensor grads, Tensor logits, Tensor targets, Tensor results, {_OPTIONS}) -> Tensor",
    compute=lambda *args: backward(*args, False),
    fake=lambda grads, logits, *args: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
