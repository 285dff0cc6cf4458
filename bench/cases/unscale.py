"""Checks of gradients before a step: non-finite values and the norm, read-only or with unscaling in place.

Bytes: ``check`` reads each gradient once, ``unscale`` also writes it; torch needs a second pass for the norm. The error
is the relative error of the sum of squares or the norm. It is infinite if an Inf or a NaN is missed, if a check writes,
or if an unscaled gradient is not the exact product. The bounds allow for a norm in bf16, and for torch's fp32 sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.cast import normal_tensors
from halfstep.bench.cases.installed import compiled
from halfstep.bench.harness import DTYPES, Case, Prepared

BOUNDS = {"bf16": 2.0**-7, "fp32": 2.0**-12}
SCALE = 2.0**10

Grads = list[torch.Tensor]
Summary = tuple[torch.Tensor, torch.Tensor]  # the flag, and the sum of squares or the norm, with one element each
Function = Callable[[Grads, torch.Tensor], Summary]  # takes the gradients and the inverse scale, which checks ignore
Answer = tuple[tuple[bool, bool, bool], float, Grads]  # flags (finite, Inf, NaN), sum or norm, gradients afterwards


def _prepared(function: Function, grads: Grads) -> Prepared:
    working = [grad.clone() for grad in grads]
    inverse = torch.tensor(1 / SCALE, dtype=torch.float32, device=grads[0].device)

    def flag_of(planted: float) -> bool:
        """The flag for gradients with a non-finite last element in the middle tensor."""
        copies = [grad.clone() for grad in grads]
        copies[len(copies) // 2][-1] = planted
        return bool(function(copies, inverse)[0])

    def values() -> Answer:
        flag, size = function(working, inverse)
        answer = (bool(flag), flag_of(math.inf), flag_of(math.nan)), float(size), [grad.clone() for grad in working]
        inverse.fill_(1.0)  # so that timed calls do not shrink the gradients further
        return answer

    return Prepared(lambda: function(working, inverse), values)


def _compiled(function: Function, sizes: Sizes, grads: Grads) -> Prepared:
    return _prepared(compiled(function, sizes, len(grads)), grads)


def _error(scale: float, power: float, grads: Grads, answer: Answer) -> float:
    """The relative error of the sum of squares raised to `power`: 1, or 0.5 for the norm."""
    flags, size, after = answer
    want = float(torch.cat(grads).double().div(scale).square().sum()) ** power
    exact = torch.equal(torch.cat(after), torch.cat(grads) / scale)
    return abs(size - want) / want if exact and flags == (False, True, True) else math.inf


# ---------------------------------------------------------------------------------------------------------- providers


def _halfstep_check(grads: Grads, inverse: torch.Tensor) -> Summary:
    answer = halfstep.foreach_check(grads)
    return answer.found_inf, answer.sum_of_squares


def _foreach_check(grads: Grads, inverse: torch.Tensor) -> Summary:
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
    return (~torch.isfinite(norms)).any(), norms.square().sum()


def _halfstep_unscale(grads: Grads, inverse: torch.Tensor) -> Summary:
    answer = halfstep.foreach_unscale_(grads, inverse)
    return answer.found_inf, answer.norm


def _amp_unscale(grads: Grads, inverse: torch.Tensor) -> Summary:
    flag = torch.zeros(1, dtype=torch.float32, device=inverse.device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
    return flag, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def cases(sizes: Sizes) -> Iterator[Case]:
    """Both jobs in each dtype, with each number of tensors."""
    checks: dict[str, Function] = {"halfstep": _halfstep_check, "torch foreach": _foreach_check}
    unscales: dict[str, Function] = {"halfstep": _halfstep_unscale, "torch amp + foreach norm": _amp_unscale}
    compiled_check = {"torch.compile": partial(_compiled, _foreach_check, sizes)}
    jobs: tuple[tuple[str, dict[str, Function], dict[str, Any], Callable[..., float], int], ...] = (
        ("check", checks, compiled_check, partial(_error, 1.0, 1.0), 1),
        ("unscale", unscales, {}, partial(_error, SCALE, 0.5), 2),
    )
    for operation, functions, compiled_ones, error, passes in jobs:
        for dtype_name, dtype in DTYPES.items():
            for tensors in sizes.tensors:
                numel = sizes.elements // tensors
                yield Case(
                    group="unscale",
                    operation=operation,
                    dtype=dtype_name,
                    size={"tensors": tensors, "elements": tensors * numel},
                    axis="tensors",
                    bytes_moved=passes * tensors * numel * dtype.itemsize,
                    bound=BOUNDS[dtype_name],
                    error_unit="relative to the answer",
                    prepare=partial(normal_tensors, tensors=tensors, elements=tensors * numel, dtype=dtype),
                    providers={name: partial(_prepared, function) for name, function in functions.items()}
                    | compiled_ones,
                    error=error,
                )
