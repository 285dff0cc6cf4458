"""Checks of gradients before a step: non-finite numbers and the norm, read-only or with unscaling in place.

``check`` finds Inf and NaN, and the tensors that contain them, and returns the sum of squares. Bytes: each gradient is
read once. ``unscale`` multiplies the gradients by 1 / scale in place, and returns the flag and the norm of the result.
Bytes: each gradient is read and written once. torch needs a second pass for the norm.

The error is the relative error of the sum of squares or the norm. It is infinite if an Inf or a NaN in a gradient is
missed, or if an unscaled gradient is not the exact product (the scale is a power of two). The bounds allow for a norm
in bf16, and for torch's fp32 sum on the CPU, which has an error of 2^-15 at 2^20 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.cast import normal_tensors
from halfstep.bench.cases.installed import compiled, loops, needs, needs_gpu
from halfstep.bench.harness import Case, Prepared

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BOUNDS = {"bf16": 2.0**-7, "fp32": 2.0**-12}
SCALE = 2.0**10

# Returns the flag and the sum of squares, both 0-dim or one-element tensors.
Check = Callable[[list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
# Unscales gradients in place by the inverse scale. Returns the flag and the norm.
Unscale = Callable[[list[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class CheckAnswer(NamedTuple):
    """The results of a provider.

    Attributes:
        found: the flags for finite gradients, for gradients with an Inf, and for gradients with a NaN.
        size: the sum of squares, or the norm.
        gradients: the unscaled gradients; empty after a check.
    """

    found: tuple[bool, bool, bool]
    size: float
    gradients: list[torch.Tensor]


def _with(gradients: list[torch.Tensor], planted: float) -> list[torch.Tensor]:
    """A copy of the gradients with one non-finite number, the last element of the tensor in the middle."""
    copies = [gradient.clone() for gradient in gradients]
    copies[len(copies) // 2][-1] = planted
    return copies


def _check_job(check: Check, gradients: list[torch.Tensor]) -> Prepared:
    def values() -> CheckAnswer:
        found, squares = check(gradients)
        bad = [bool(check(_with(gradients, planted))[0]) for planted in (math.inf, math.nan)]
        return CheckAnswer((bool(found), bad[0], bad[1]), float(squares), [])

    return Prepared(lambda: check(gradients), values)


def _unscale_job(unscale: Unscale, gradients: list[torch.Tensor]) -> Prepared:
    own = [gradient.clone() for gradient in gradients]
    inverse = torch.tensor(1 / SCALE, dtype=torch.float32, device=own[0].device)

    def values() -> CheckAnswer:
        found, norm = unscale(own, inverse)
        unscaled = [gradient.clone() for gradient in own]
        bad = [bool(unscale(_with(gradients, planted), inverse)[0]) for planted in (math.inf, math.nan)]
        inverse.fill_(1.0)  # so that timed calls do not shrink the gradients further
        return CheckAnswer((bool(found), bad[0], bad[1]), float(norm), unscaled)

    return Prepared(lambda: unscale(own, inverse), values)


# ---------------------------------------------------------------------------------------------------------- providers


def _halfstep_check(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    answer = halfstep.foreach_check(gradients)
    return answer.found_inf, answer.sum_of_squares


def _foreach_check(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    return (~torch.isfinite(norms)).any(), norms.square().sum()


def _naive_check(sizes: Sizes, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loops(sizes, len(gradients))
    squares = torch.stack([gradient.float().square().sum() for gradient in gradients])
    return (~torch.isfinite(squares)).any(), squares.sum()


def _apex_check(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    needs_gpu(gradients[0].device)
    amp, flag = needs("amp_C"), torch.zeros(1, dtype=torch.int32, device=gradients[0].device)
    norm, _ = amp.multi_tensor_l2norm(65536, flag, [gradients], True)
    return ~torch.isfinite(norm).all(), norm.square().sum()


def _halfstep_unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    answer = halfstep.foreach_unscale_(gradients, inverse)
    return answer.found_inf, answer.norm


def _amp_unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.zeros(1, dtype=torch.float32, device=inverse.device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    return found, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _naive_unscale(
    sizes: Sizes, gradients: list[torch.Tensor], inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    loops(sizes, len(gradients))
    for gradient in gradients:
        gradient.mul_(inverse)
    return _naive_check(sizes, gradients)[0], _naive_check(sizes, gradients)[1].sqrt()


def _apex_unscale(gradients: list[torch.Tensor], inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    needs_gpu(inverse.device)
    amp, flag = needs("amp_C"), torch.zeros(1, dtype=torch.int32, device=inverse.device)
    amp.multi_tensor_scale(65536, flag, [gradients, gradients], float(inverse))
    norm, _ = amp.multi_tensor_l2norm(65536, flag, [gradients], False)
    return flag, norm


def _compiled(make: Callable[[Any, list[torch.Tensor]], Prepared], function: Any, sizes: Sizes, grads: Any) -> Prepared:
    return make(compiled(function, sizes, len(grads)), grads)


# -------------------------------------------------------------------------------------------------------------- errors


def _flags_right(answer: CheckAnswer) -> bool:
    return answer.found == (False, True, True)


def _squares(gradients: list[torch.Tensor]) -> float:
    return float(torch.cat(gradients).double().square().sum())


def _check_error(gradients: list[torch.Tensor], answer: CheckAnswer) -> float:
    want = _squares(gradients)
    return abs(answer.size - want) / want if _flags_right(answer) else math.inf


def _unscale_error(gradients: list[torch.Tensor], answer: CheckAnswer) -> float:
    exact = torch.equal(torch.cat(answer.gradients), torch.cat(gradients) / SCALE)
    want = math.sqrt(_squares(gradients)) / SCALE
    return abs(answer.size - want) / want if exact and _flags_right(answer) else math.inf


def cases(sizes: Sizes) -> Iterator[Case]:
    """Both jobs in each dtype, with each number of tensors."""
    jobs: dict[str, tuple[dict[str, Callable[[Any], Prepared]], Callable[[Any, Any], float], int]] = {
        "check": (
            {
                "halfstep": partial(_check_job, _halfstep_check),
                "torch foreach": partial(_check_job, _foreach_check),
                "torch.compile": partial(_compiled, _check_job, _foreach_check, sizes),
                "torch naive": partial(_check_job, partial(_naive_check, sizes)),
                "apex": partial(_check_job, _apex_check),
            },
            _check_error,
            1,
        ),
        "unscale": (
            {
                "halfstep": partial(_unscale_job, _halfstep_unscale),
                "torch amp + foreach norm": partial(_unscale_job, _amp_unscale),
                "torch naive": partial(_unscale_job, partial(_naive_unscale, sizes)),
                "apex": partial(_unscale_job, _apex_unscale),
            },
            _unscale_error,
            2,
        ),
    }
    for operation, (providers, error, passes) in jobs.items():
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
                    prepare=partial(normal_tensors, tensors=tensors, numel=numel, dtype=dtype),
                    providers=providers,
                    error=error,
                )
