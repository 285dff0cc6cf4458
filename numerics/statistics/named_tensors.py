"""The named tensors in an argument (a module, a dict, a list), and their values in a form that kernels can count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from halfstep.kernels.cells import Grid
from halfstep.kernels.multi_tensor import DTYPE_CODES
from halfstep.kernels.statistics import foreach_count_
from halfstep.numerics.formats.table import Format
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import gradient_of

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


def _pairs(tensors: Any, argument: str) -> Iterator[tuple[str, Any]]:
    """The (name, tensor) pairs of a tensor, module, nested dict or list."""
    if isinstance(tensors, torch.Tensor):
        yield "tensor", tensors
    elif isinstance(tensors, torch.nn.Module):
        yield from tensors.named_parameters()
    elif isinstance(tensors, Mapping):
        for name, value in tensors.items():
            if isinstance(value, Mapping):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in _pairs(value, argument))
            else:
                yield str(name), value
    elif isinstance(tensors, Iterable) and not isinstance(tensors, (str, bytes)):
        for index, value in enumerate(tensors):
            named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
            yield value if named else (str(index), value)
    else:
        raise TypeError(
            f"Expected {argument} to be a tensor, a module, a dict, or a list of tensors or of (name, tensor) pairs, "
            f"but got a {type(tensors).__name__}"
        )


def named_tensors(tensors: Any, argument: str = "tensors", of: str = "parameters") -> dict[str, torch.Tensor]:
    """The tensors in `tensors` by name or, with ``of="gradients"``, the gradients of those that have one."""
    if of not in ("parameters", "gradients"):
        raise ValueError(f"Expected of to be 'parameters' (the tensors themselves) or 'gradients', but got {of!r}")
    named: dict[str, torch.Tensor | None] = {}
    for name, tensor in _pairs(tensors, argument):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"Expected {argument}[{name!r}] to be a tensor, but got a {type(tensor).__name__}")
        if name in named:
            raise ValueError(f"Expected the names in {argument} to be distinct, but got {name!r} twice")
        named[name] = gradient_of(tensor) if of == "gradients" else tensor
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _scaled_to_odd(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """fp64 numbers times `scale` as fp32, such that the counts are those of the exact products.

    They are rounded to odd, so that rounding again gives the result of a single rounding (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008). Products beyond the
    range of fp64 stay finite, and products below its smallest number do not become zero.
    """
    y = x * scale
    y = torch.where((y == 0) & (x != 0), 5e-324, y)
    y = torch.where(y.isinf() & x.isfinite(), torch.finfo(torch.float64).max, y)
    nearest = y.float()
    inexact = (nearest.double() != y) & y.isfinite()
    away = inexact & (nearest.double().abs() > y.abs())
    bits = nearest.view(torch.int32) - away.int()  # toward zero
    return torch.where(inexact, bits | 1, bits).view(torch.float32)


def count_(
    counts: torch.Tensor, tensors: Mapping[int, torch.Tensor], grid: Grid, scale: Any = None, inverted: bool = False
) -> None:
    """`foreach_count_` of tensors by row, also of fp64 tensors, which are scaled before they become fp32."""
    factor = 1.0 if scale is None else scale.double().reciprocal() if inverted else scale.double()
    wide = {row: _scaled_to_odd(x, factor) for row, x in tensors.items() if x.dtype == torch.float64}
    for part, number in ({row: x for row, x in tensors.items() if row not in wide}, scale), (wide, None):
        foreach_count_(list(part.values()), counts, grid, scale=number, inverted=inverted, rows=list(part))


def countable(name: str, tensor: torch.Tensor, format: Format) -> torch.Tensor:
    """The values of a tensor to count, as a dense fp64, fp32, fp16 or bf16 tensor. Raises a TypeError for others."""
    values = local(tensor.detach())
    if values.layout == torch.sparse_coo:
        values = values.coalesce()._values()
    if values.layout != torch.strided:
        raise TypeError(f"Expected {name} to be a dense or COO tensor, but got layout {values.layout}: use .to_dense()")
    if values.is_meta or getattr(values, "fake_mode", None) is not None:
        where = "on the meta device" if values.is_meta else "a fake tensor"
        raise TypeError(f"{name} is {where} and has no values; load it first")
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
