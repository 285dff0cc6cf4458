"""`log_probabilities` and `cross_entropy`: what their arguments may be."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from halfstep.kernels.log_probabilities.dispatch import statistics
from halfstep.kernels.multi_tensor import PLAIN_TYPES, check_tensor
from halfstep.kernels.op import is_watched
from halfstep.kernels.softmax import log_softmax
from halfstep.kernels.softmax.public import FLOATS

_LEAST_TEMPERATURE = 1 / torch.finfo(torch.float32).max


class LogProbabilities(NamedTuple):
    """What `log_probabilities` returns, each of the shape of the targets: fp32, or fp64 for fp64 logits."""

    log_probabilities: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor | None


def _check_range(targets: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Only on a CPU, where looking at targets waits for nothing; kernels give NaN for targets out of range."""
    if is_watched() or torch._C._are_functorch_transforms_active() or type(targets) not in PLAIN_TYPES:
        return
    if targets.is_cpu:
        wrong = targets[((targets < 0) | (targets >= classes)) & (targets != ignore_index)]
        if len(wrong):
            raise IndexError(
                f"Expected targets to be from 0 to {classes - 1} or ignore_index={ignore_index}, "
                f"but got {int(wrong[0])}"
            )


def check_arguments(logits: Any, targets: Any, temperature: float, inplace: bool, is_leaf: bool) -> None:
    """Raise if logits with the classes last, their targets or the options are not supported, or do not fit."""
    check_tensor(logits, "logits", FLOATS)
    check_tensor(targets, "targets", (torch.int32, torch.int64))
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            "Expected targets to have the shape of logits without the classes, but got targets of shape "
            f"{tuple(targets.shape)} and {tuple(logits.shape)} with the classes last: index or reshape them alike"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"Expected targets to be on the device of logits, {logits.device}, but got {targets.device}: use "
            "targets.to(logits.device)"
        )
    if isinstance(temperature, torch.Tensor) or not isinstance(temperature, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"Expected temperature to be a number, but got a {type(temperature).__name__}: divide the logits by a "
            "tensor yourself"
        )
    if not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            "Expected temperature to be a finite number above 0, whose inverse is finite in fp32, but got "
            f"{temperature}: for 0, take the argmax"
        )
    if inplace and logits.requires_grad and not torch.compiler.is_compiling():
        if is_leaf or 0 in logits.stride():
            raise ValueError(
                "Expected logits that an operation computed and that do not overlap in memory with "
                "inplace_backward=True, which writes their gradient over them, but got "
                f"{'a leaf' if is_leaf else f'strides {logits.stride()}'}: use inplace_backward=False"
            )


def _check_weight(weight: Any, logits: Any) -> None:
    check_tensor(weight, "weight", FLOATS)
    if isinstance(logits, torch.Tensor) and logits.ndim:
        classes = logits.shape[min(1, logits.ndim - 1)]
        if weight.shape != (classes,) or weight.device != logits.device:
            raise ValueError(
                f"Expected weight to have a number for each of {classes} classes, on {logits.device}, but got shape "
                f"{tuple(weight.shape)} on {weight.device}: index it as the classes are, or use .to(logits.device)"
            )


def _statistics(
    logits: Any,
    targets: Any,
    temperature: float,
    ignore_index: int,
    entropy: bool,
    mean: bool,
    exact: bool,
    inplace: bool,
) -> torch.Tensor:
    """The results of rule.py for checked arguments, the classes in the last dimension."""
    if hasattr(logits, "device_mesh"):
        raise TypeError(
            "Expected logits to be a plain tensor, but got a DTensor: for a sharded vocabulary use "
            "halfstep.integrations.vocabulary.log_probabilities, else pass logits.to_local() with their targets"
        )
    check_arguments(logits, targets, temperature, inplace, getattr(logits, "is_leaf", False))
    if logits.shape[-1] == 0:
        raise ValueError(f"Expected logits of at least 1 class, but got shape {tuple(logits.shape)}")
    _check_range(targets, logits.shape[-1], ignore_index)
    return statistics(logits, targets, float(temperature), ignore_index, entropy, mean, exact, inplace)


def log_probabilities(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    ignore_index: int = -100,
    exact: bool = False,
    inplace_backward: bool = False,
) -> LogProbabilities:
    """``log_softmax(logits / temperature)`` at the targets, its logsumexp and entropy, in one read of the logits.

    A row gives the same bits alone, in any batch, padding, memory layout and launch, and as its fp32 copy, so that
    rollout and training agree where their logits do. Whether they do is up to the matrix product before it.

    Everything is computed in fp32, without a copy of the logits. Differentiable, at each order; second derivatives, and
    the gradients that `torch.func` takes, are plain operations of torch. The backward reads the logits once.

    Args:
        logits: fp32, fp16 or bf16 of shape (..., V), any strides. fp64 is computed in fp64 by the plain torch
            reference. -inf is a probability of 0: as a target it gives -inf, with no gradient. A row of -inf alone
            has entropy 0 and no gradient. NaN and +inf make their row NaN.
        targets: int32 or int64 of shape (...), from 0 to V - 1. A GPU, which is not waited for, gives NaN for others.
        temperature: a finite number above 0. Logits are multiplied by 1 / temperature in fp32, as torch does on a
            GPU where they are divided by a number.
        entropy: whether to compute the entropy of each row, in nats.
        ignore_index: rows with this target are not read: all results are 0, and the gradient too.
        exact: compute exponentials from IEEE operations: the same bits on all devices and in the reference. Otherwise
            each kind of device has its own bits; those of the C++ code on a CPU are always the exact ones. On a GPU, by
            counts, arithmetic then takes 1.9 times as long in the forward: of bf16 logits 0.97 of the time of memory on
            an H100, and 1.24 on a B200; in the backward 0.52 and 0.67.
        inplace_backward: write the gradient over the logits, which then must not be needed again. Only one backward is
            possible. `torch.compile` decides about memory itself.

    Returns:
        A named tuple `log_probabilities`, `logsumexp`, `entropy` (None unless asked for), fp32 of the shape of
        `targets`.

    Raises:
        TypeError: logits or targets are no tensors of these dtypes, or DTensors, or `temperature` is no number.
        ValueError: shapes or devices do not fit, `temperature` is not finite and above 0, or a leaf, or a tensor that
            overlaps itself, cannot be written over.
        IndexError: a target on a CPU is out of range.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [1.0, -torch.inf]])
        >>> halfstep.log_probabilities(logits, torch.tensor([1, 0]), entropy=True).entropy
        tensor([0.6931, 0.0000])
    """
    row = _statistics(
        logits, targets, temperature, ignore_index, bool(entropy), False, bool(exact), bool(inplace_backward)
    ).unbind(0)
    return LogProbabilities(row[0], row[1], row[4] if entropy else None)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    exact: bool = False,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of class indices by the kernels of `log_probabilities`, and like these.

    Args:
        logits: fp32, fp16, bf16 or fp64 of shape (V), (N, V) or (N, V, ...). With dimensions after the classes they are
            copied, in their dtype: pass ``logits.flatten(0, -2)`` for (..., V).
        targets: int32 or int64 of shape (), (N) or (N, ...).
        weight: a floating-point tensor of shape (V): rows count by that of their target. With
            `label_smoothing`, `log_softmax` is taken in fp32, and neither `exact` nor `inplace_backward` can be.
        ignore_index: rows with this target do not count.
        reduction: ``"mean"`` over the rows that count, by weight, ``"sum"`` or ``"none"``.
        label_smoothing: from 0 to 1, this share of the target is spread evenly over all classes.
        z_loss: the loss has ``z_loss * logsumexp ** 2`` added, which is not weighted.
        exact, inplace_backward: as for `log_probabilities`.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), where torch's has the dtype of the logits.

    Raises:
        TypeError, ValueError, IndexError: as for `log_probabilities`; other options are out of range, or exclude each
            other.

    Examples:
        >>> halfstep.cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
        tensor(1.3863)
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Expected reduction to be 'mean', 'sum' or 'none', but got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"Expected label_smoothing to be from 0 to 1, but got {label_smoothing}")
    if isinstance(targets, torch.Tensor) and targets.is_floating_point():
        raise TypeError(
            f"Expected targets to be indices of classes, int32 or int64, but got {targets.dtype}: for probabilities "
            "use torch.nn.functional.cross_entropy"
        )
    if weight is not None:
        _check_weight(weight, logits)
    smooth_by_weight = weight is not None and label_smoothing > 0.0
    if smooth_by_weight and (exact or inplace_backward):
        raise ValueError(
            "Expected exact=False and inplace_backward=False with both weight and label_smoothing, which are computed "
            "from log_softmax"
        )
    if isinstance(logits, torch.Tensor) and logits.ndim > 2:
        logits = logits.movedim(1, -1)
    smoothed = label_smoothing > 0.0 and not smooth_by_weight
    row = _statistics(logits, targets, 1.0, ignore_index, False, smoothed, bool(exact), bool(inplace_backward))
    counts, selected, mean = targets != ignore_index, row[0], row[5]
    weights: torch.Tensor = counts
    if weight is not None:
        weight = weight.to(row.dtype)
        weights = torch.where(counts, weight[torch.where(counts, targets, 0)], 0.0)
        selected = weights * selected
    if weight is not None and smooth_by_weight:
        mean = (log_softmax(logits, dtype=row.dtype, precision="fast") * weight).sum(-1) / logits.shape[-1]
        mean = torch.where(counts, mean, 0.0)
    loss = -selected if label_smoothing == 0.0 else (label_smoothing - 1.0) * selected - label_smoothing * mean
    square = z_loss * row[1].square() if z_loss != 0.0 else torch.zeros_like(loss)
    if reduction == "none":
        return loss + square
    if reduction == "sum":
        return loss.sum() + square.sum()
    return loss.sum() / weights.sum() + (square.sum() / counts.sum() if z_loss != 0.0 else 0.0)
