"""The named tensors in an argument (a module, a dict, a list), and their values in a form that kernels can count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from halfstep.kernels.multi_tensor import DTYPE_CODES
from halfstep.numerics.formats.table import Format
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import gradient_of

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def _pairs(given: Any, argument: str) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a tensor, module, nested dict or list."""
    if isinstance(given, torch.Tensor):
        yield "tensor", given
    elif isinstance(given, torch.nn.Module):
        yield from given.named_parameters()
    elif isinstance(given, Mapping):
        for name, value in given.items():
            if isinstance(value, Mapping):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in _pairs(value, argument))
            else:
                yield str(name), value
    elif isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        for index, value in enumerate(given):
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
                yield value
            else:
                yield str(index), value
    else:
        raise TypeError(
            f"Expected {argument} to be a tensor, a module, a dict, or a list of tensors or of (name, tensor) pairs, "
            f"but got a {type(given).__name__}"
        )


def named_tensors(given: Any, argument: str = "tensors", of: str = "parameters") -> dict[str, torch.Tensor]:
    """The tensors in `given` by name or, with ``of="gradients"``, the gradients of those that have one.

    Raises:
        TypeError: an element is not a tensor.
        ValueError: two tensors have the same name, or `of` is neither ``"parameters"`` nor ``"gradients"``.
    """
    if of not in ("parameters", "gradients"):
        raise ValueError(f"Expected of to be 'parameters' (the tensors themselves) or 'gradients', but got {of!r}")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _pairs(given, argument):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Expected {argument}[{name!r}] to be a tensor, but got a {type(tensor).__name__}")
        if name in found:
            raise ValueError(f"Expected the names in {argument} to be distinct, but got {name!r} twice")
        if of == "gradients":
            grad = gradient_of(tensor)
            if grad is None:
                continue
            tensor = grad
        found[name] = tensor
    return found


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """Convert fp64 to fp32 with rounding to odd, so that rounding again gives the result of a single rounding.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    nearest = x.float()
    inexact = (nearest.double() != x) & x.isfinite()
    away = inexact & (nearest.double().abs() > x.abs())
    bits = nearest.view(torch.int32) - away.int()  # toward zero
    return torch.where(inexact, bits | 1, bits).view(torch.float32)


def scaled_to_odd(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """fp64 numbers times `scale` as fp32, such that the counts are those of the exact products.

    Products beyond the range of fp64 stay finite, and products below its smallest number do not become zero.
    """
    y = x * scale
    y = torch.where((y == 0) & (x != 0), 5e-324, y)
    return _to_odd(torch.where(y.isinf() & x.isfinite(), torch.finfo(torch.float64).max, y))


def countable(name: str, tensor: torch.Tensor, format: Format) -> torch.Tensor:
    """The values of a tensor to count, as a dense fp64, fp32, fp16 or bf16 tensor.

    Raises:
        TypeError: the tensor has no values, or its dtype or layout is not supported.
    """
    values = local(tensor.detach())
    if values.layout == torch.sparse_coo:
        values = values.coalesce()._values()
    if values.layout != torch.strided:
        raise TypeError(f"Expected {name} to be a dense or COO tensor, but got layout {values.layout}: use .to_dense()")
    if values.is_meta or getattr(values, "fake_mode", None) is not None:
        kind = "on the meta device" if values.is_meta else "a fake tensor"
        raise TypeError(f"{name} is {kind} and has no values; load it first")
    if values.dtype == torch.float64:
        if format.mantissa > 21:
            raise TypeError(
                f"Expected a format of up to 21 mantissa bits for {name} of dtype torch.float64, but got "
                f"{format.name}: convert the tensor with .float()"
            )
        return values
    if values.dtype in _FP8:
        return values.float()
    if values.dtype not in DTYPE_CODES:
        raise TypeError(
            f"Expected {name} to have dtype float64, float32, float16, bfloat16 or float8, but got {values.dtype}: "
            "leave it out"
        )
    return values
