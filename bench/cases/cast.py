"""Casts of one tensor to a new one, and of a list of tensors to given tensors.

Bytes: the source is read once and the target written once. Errors are relative to each value, or to the smallest normal
number for smaller values, in units of the target's eps. Only rounding to nearest has errors of at most 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import compiled, loops
from halfstep.bench.harness import Case, Prepared

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8 e4m3": torch.float8_e4m3fn,
}
PAIRS = (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("fp32", "fp8 e4m3"))
NEAREST = 0.5


def normal_tensors(device: torch.device, tensors: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Normally distributed numbers in `tensors` tensors of `numel` elements, rounded to `dtype`."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(numel, generator=generator, dtype=torch.float32, device=device).to(dtype) for _ in range(tensors)
    ]


def _one(function: Callable[[torch.Tensor], torch.Tensor], sources: list[torch.Tensor]) -> Prepared:
    (source,) = sources
    return Prepared(lambda: [function(source)])


def _to(target: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(target)


def _cast(target: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return halfstep.cast(x, target)


def _compiled(target: torch.dtype, sizes: Sizes, sources: list[torch.Tensor]) -> Prepared:
    return _one(compiled(partial(_to, target), sizes), sources)


def _list(function: Callable[..., Any], target: torch.dtype, sources: list[torch.Tensor]) -> Prepared:
    targets = [torch.empty_like(source, dtype=target) for source in sources]

    def values() -> list[torch.Tensor]:
        function(targets, sources)
        return targets

    return Prepared(lambda: function(targets, sources), values)


def _halfstep_list(target: torch.dtype, sources: list[torch.Tensor]) -> Prepared:
    targets = [torch.empty_like(source, dtype=target) for source in sources]
    return Prepared(lambda: halfstep.foreach_cast(sources, target, out=targets))


def _copy_each(sizes: Sizes, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    loops(sizes, len(sources))
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _error(sources: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    limits = torch.finfo(got[0].dtype)
    want = torch.cat([source.double() for source in sources])
    found = torch.cat([one.double() for one in got])
    error = (found - want).abs_().div_(want.abs().clamp_(min=limits.smallest_normal))
    return float(error.max()) / limits.eps


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every pair of dtypes with each number of elements, and a list of gradients with each number of tensors."""
    for source, target in PAIRS:
        for elements in sizes.cast_elements:
            yield Case(
                group="cast",
                operation="cast",
                dtype=f"{source} to {target}",
                size={"elements": elements},
                axis="elements",
                bytes_moved=elements * (DTYPES[source].itemsize + DTYPES[target].itemsize),
                bound=NEAREST,
                error_unit="in eps",
                prepare=partial(normal_tensors, tensors=1, numel=elements, dtype=DTYPES[source]),
                providers={
                    "halfstep": partial(_one, partial(_cast, DTYPES[target])),
                    "torch eager": partial(_one, partial(_to, DTYPES[target])),
                    "torch.compile": partial(_compiled, DTYPES[target], sizes),
                },
                error=_error,
            )
    source, target = "fp32", "bf16"
    for tensors in sizes.tensors:
        numel = sizes.elements // tensors
        yield Case(
            group="cast",
            operation="cast of a list",
            dtype=f"{source} to {target}",
            size={"tensors": tensors, "elements": tensors * numel},
            axis="tensors",
            bytes_moved=tensors * numel * (DTYPES[source].itemsize + DTYPES[target].itemsize),
            bound=NEAREST,
            error_unit="in eps",
            prepare=partial(normal_tensors, tensors=tensors, numel=numel, dtype=DTYPES[source]),
            providers={
                "halfstep": partial(_halfstep_list, DTYPES[target]),
                "torch foreach": partial(_list, torch._foreach_copy_, DTYPES[target]),
                "torch naive": partial(_list, partial(_copy_each, sizes), DTYPES[target]),
            },
            error=_error,
        )
