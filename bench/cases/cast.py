"""Casts of one tensor to a new one, of a list of tensors to existing ones, and of a tensor to MXFP8.

Bytes: the source is read once and the target written once. Errors are relative to each value, or for smaller values to
the smallest normal number, in units of the target's eps. Only rounding to nearest has errors of at most 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import compiled, needs
from halfstep.bench.harness import Case, Prepared, in_eps, normal
from halfstep.kernels.block_cast.rule import reference
from halfstep.kernels.formats import BLOCKS, block_row

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8 e4m3": torch.float8_e4m3fn}
PAIRS = (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("fp32", "fp8 e4m3"))
NEAREST = 0.5
MX = "mxfp8_rceil"  # of which no element saturates


def normal_tensors(device: torch.device, elements: int, dtype: torch.dtype, tensors: int = 1) -> list[torch.Tensor]:
    """`tensors` tensors of together `elements` normally distributed values, rounded to `dtype`."""
    return [row.clone() for row in normal(device, tensors, elements // tensors).to(dtype)]


def _new(function: Callable[[torch.Tensor], torch.Tensor], sources: list[torch.Tensor]) -> Prepared:
    (source,) = sources
    return Prepared(lambda: [function(source)])


def _to(target: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(target)


def _compiled(function: Callable[[torch.Tensor], torch.Tensor], sizes: Sizes, sources: list[torch.Tensor]) -> Prepared:
    return _new(compiled(function, sizes), sources)


def _into(function: Callable[..., Any], dtype: torch.dtype, sources: list[torch.Tensor]) -> Prepared:
    targets = [torch.empty_like(source, dtype=dtype) for source in sources]

    def call() -> list[torch.Tensor]:
        function(targets, sources)
        return targets

    return Prepared(call)


def _foreach_cast(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    halfstep.foreach_cast(sources, targets[0].dtype, out=targets)


def _error(sources: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    want, result = (torch.cat([tensor.double() for tensor in tensors]) for tensors in (sources, got))
    return in_eps(result, want, want.abs(), got[0].dtype)


def _blocks(sources: list[torch.Tensor]) -> Prepared:
    (source,) = sources
    return Prepared(lambda: list(halfstep.cast(source, MX)[:2]))


def _eager_blocks(sources: list[torch.Tensor]) -> Prepared:
    row, rule = block_row(MX) or (BLOCKS[0], "")
    return Prepared(lambda: list(reference(sources[0], row, rule, (-1,))[:2]))


def _torchao_blocks(sources: list[torch.Tensor]) -> Prepared:
    mx, config = needs("torchao.prototype.mx_formats.mx_tensor"), needs("torchao.prototype.mx_formats.config")
    mode, (source,) = config.ScaleCalculationMode.RCEIL, sources
    return Prepared(lambda: list(mx.to_mx(source, torch.float8_e4m3fn, BLOCKS[0].size, mode)[1::-1]))


def _error_of_blocks(sources: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """That of the elements over their scales."""
    codes, scales = got[0].view(torch.float8_e4m3fn), got[1].view(torch.float8_e8m0fnu).double()
    over = sources[0].double().unflatten(-1, (-1, BLOCKS[0].size)) / scales.unsqueeze(-1)
    return _error([over.flatten()], [codes])


def _case(
    operation: str,
    source: str,
    target: str,
    size: dict[str, Any],
    moved: float,  # bytes per element
    providers: Mapping[str, Callable[[Any], Prepared]],
    error: Callable[[Any, Any], float] = _error,
) -> Case:
    return Case(
        group="cast",
        operation=operation,
        dtype=f"{source} to {target}",
        size=size,
        axis=next(iter(size)),
        bytes_moved=int(size["elements"] * moved),
        bound=NEAREST,
        error_unit="in eps",
        prepare=partial(normal_tensors, **size, dtype=DTYPES[source]),
        providers=providers,
        error=error,
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every pair of dtypes with each number of elements, and a list with each number of tensors."""
    for source, target in PAIRS:
        to = partial(_to, DTYPES[target])
        providers: dict[str, Callable[[Any], Prepared]] = {
            "halfstep": partial(_new, partial(halfstep.cast, dtype=DTYPES[target])),
            "torch eager": partial(_new, to),
            "torch.compile": partial(_compiled, to, sizes),
        }
        moved = DTYPES[source].itemsize + DTYPES[target].itemsize
        for elements in sizes.cast_elements:
            yield _case("cast", source, target, {"elements": elements}, moved, providers)
    of_blocks = {"halfstep": _blocks, "torch eager": _eager_blocks, "torchao": _torchao_blocks}
    for elements in sizes.cast_elements:
        size = {"elements": elements // BLOCKS[0].size * BLOCKS[0].size}
        yield _case("cast to blocks", "bf16", MX, size, 3 + 1 / BLOCKS[0].size, of_blocks, _error_of_blocks)
    functions: dict[str, Callable[..., Any]] = {"halfstep": _foreach_cast, "torch foreach": torch._foreach_copy_}
    providers = {name: partial(_into, function, torch.bfloat16) for name, function in functions.items()}
    for tensors in sizes.tensors:
        size = {"tensors": tensors, "elements": sizes.elements // tensors * tensors}
        yield _case("cast of a list", "fp32", "bf16", size, 6, providers)
