"""Convert a model to 16-bit weights for an optimizer that keeps their masters."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=torch.nn.Module)


def cast_parameters(model: M, dtype: torch.dtype = torch.bfloat16) -> M:
    """Convert a model's floating-point parameters to `dtype` in place, without converting its buffers.

    ``model.to(torch.bfloat16)`` converts buffers too: running statistics of BatchNorm, and the frequencies of rotary
    embeddings, whose angles are then wrong beyond a few hundred positions. The parameters remain the same objects, so
    tied parameters stay tied; their gradients are set to None. Call this before the model is passed to an optimizer,
    DDP or ``fully_shard``.

    Args:
        model: a module.
        dtype: ``torch.bfloat16``, ``torch.float16``, or ``torch.float32`` to convert back.

    Returns:
        `model`.

    Raises:
        ValueError: `dtype` is not one of these, or FSDP or tensor parallelism has sharded a parameter.

    Examples:
        >>> model = halfstep.cast_parameters(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        >>> model[0].weight.dtype, model[1].running_var.dtype
        (torch.bfloat16, torch.float32)
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"Expected dtype to be torch.bfloat16, torch.float16 or torch.float32, but got {dtype}")
    floating = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    for name, parameter in floating:
        if isinstance(parameter, DTensor | FlatParameter):
            raise ValueError(f"Expected unsharded parameters, but {name} is sharded: call cast_parameters first")
    for _, parameter in floating:
        parameter.grad = None
        parameter.data = parameter.data.to(dtype)
    return model
