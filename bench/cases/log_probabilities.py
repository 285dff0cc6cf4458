"""Cross-entropy of each row, which is the negative log-probability of its target: forward, backward, and training.

Bytes: the forward reads the logits; the backward reads them and writes the gradient. Training is both, one after the
other, for the mean, and the gradient may take the place of the logits. The error of the forward is in units of fp32's
eps of ``|loss| + logsumexp``, or of the dtype where a peer rounds the loss to it; that of a gradient as of a
probability's, of the dtype of the gradient, relative to ``|g| * (p + 1 at the target)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.nn.functional import cross_entropy

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import needs, needs_gpu
from halfstep.bench.harness import DTYPES, Case, Prepared, Unavailable, in_eps, normal

# In bf16, torch's backward takes the exponential of logarithms that were rounded to bf16.
BOUNDS = {
    **dict.fromkeys([("forward", "bf16"), ("forward", "fp32"), ("backward", "fp32"), ("training", "fp32")], 64.0),
    **dict.fromkeys([("backward", "bf16"), ("training", "bf16")], 16.0),
}
Loss = Callable[..., torch.Tensor]  # of logits, targets, reduction, and whether to write the gradient over the logits


@dataclass
class LogitInputs:
    """Logits, targets, the gradient of each loss, and the exact probabilities."""

    logits: torch.Tensor
    targets: torch.Tensor
    grad: torch.Tensor

    @cached_property
    def exact(self) -> torch.Tensor:
        return torch.log_softmax(self.logits.detach().double(), -1)


def _prepare(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> LogitInputs:
    logits, grad = (3 * normal(device, 1, rows, columns)[0]).to(dtype), normal(device, 1, rows)[0]
    targets = torch.arange(rows, device=device, dtype=torch.int64) * 7919 % columns
    return LogitInputs(logits.requires_grad_(), targets, grad)


def _halfstep(logits: torch.Tensor, targets: torch.Tensor, reduction: str, inplace: bool, exact: bool) -> torch.Tensor:
    return halfstep.cross_entropy(logits, targets, reduction=reduction, inplace_backward=inplace, exact=exact)


def _torch(logits: torch.Tensor, targets: torch.Tensor, reduction: str, inplace: bool) -> torch.Tensor:
    return cross_entropy(logits, targets, reduction=reduction)


def _liger(logits: torch.Tensor, targets: torch.Tensor, reduction: str, inplace: bool) -> torch.Tensor:
    needs_gpu(logits.device)
    if logits.requires_grad and not inplace:
        raise Unavailable("writes the gradient in the forward")
    loss: torch.Tensor = needs("liger_kernel.transformers.functional").liger_cross_entropy(
        logits, targets, reduction=reduction
    )
    return loss


def _quack(logits: torch.Tensor, targets: torch.Tensor, reduction: str, inplace: bool) -> torch.Tensor:
    needs_gpu(logits.device)
    loss: torch.Tensor = needs("quack.cross_entropy").cross_entropy(
        logits, targets, reduction=reduction, inplace_backward=inplace
    )
    return loss


def _forward(function: Loss, inputs: LogitInputs) -> Prepared:
    logits = inputs.logits.detach()
    return Prepared(lambda: function(logits, inputs.targets, "none", False))


def _backward(function: Loss, inputs: LogitInputs) -> Prepared:
    loss = function(inputs.logits, inputs.targets, "none", False)
    grad = inputs.grad.to(loss.dtype)
    return Prepared(lambda: torch.autograd.grad(loss, inputs.logits, grad, retain_graph=True)[0])


def _training(function: Loss, inputs: LogitInputs) -> Prepared:
    memory = inputs.logits.detach().clone()  # of the logits and then, call after call, of their gradient

    def call() -> torch.Tensor:
        leaf = memory.detach().requires_grad_()
        logits = leaf.view_as(leaf)  # which may be written over, as what an operation computed
        return torch.autograd.grad(function(logits, inputs.targets, "mean", True), logits)[0]

    return Prepared(call)


def _forward_error(inputs: LogitInputs, got: torch.Tensor) -> float:
    want = -inputs.exact.gather(1, inputs.targets.unsqueeze(1)).squeeze(1)
    size = want + torch.logsumexp(inputs.logits.detach().double(), -1).abs()
    return in_eps(got, want, size, got.dtype)


def _gradient_error(grad: torch.Tensor, inputs: LogitInputs, got: torch.Tensor) -> float:
    p, grad = inputs.exact.exp(), grad.double().unsqueeze(1)
    hit = torch.nn.functional.one_hot(inputs.targets, p.shape[1]).double()
    return in_eps(got, grad * (p - hit), grad.abs() * (p + hit), got.dtype)


def _backward_error(inputs: LogitInputs, got: torch.Tensor) -> float:
    return _gradient_error(inputs.grad, inputs, got)


def _training_error(inputs: LogitInputs, got: torch.Tensor) -> float:
    return _gradient_error(torch.full_like(inputs.grad, 1 / len(inputs.grad)), inputs, got)


def cases(sizes: Sizes) -> Iterator[Case]:
    losses: dict[str, Loss] = {
        "halfstep": partial(_halfstep, exact=False),
        "halfstep exact": partial(_halfstep, exact=True),
        "torch eager": _torch,
        "liger-kernel": _liger,
        "quack": _quack,
    }
    for direction, prepare, error, passes in (
        ("forward", _forward, _forward_error, 1),
        ("backward", _backward, _backward_error, 2),
        ("training", _training, _training_error, 3),
    ):
        for dtype_name, dtype in DTYPES.items():
            for columns in sizes.columns:
                rows = max(1, sizes.elements // columns)
                yield Case(
                    group="log_probabilities",
                    operation=f"cross-entropy {direction}",
                    dtype=dtype_name,
                    size={"columns": columns, "rows": rows},
                    axis="columns",
                    bytes_moved=passes * rows * columns * dtype.itemsize,
                    bound=BOUNDS[direction, dtype_name],
                    error_unit="in eps",
                    prepare=partial(_prepare, rows=rows, columns=columns, dtype=dtype),
                    providers={name: partial(prepare, loss) for name, loss in losses.items()},
                    error=error,
                    memory=True,
                )
