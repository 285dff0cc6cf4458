"""The whole step of mixed-precision training: check, norm, clip, update, weights written, scale updated.

From gradients of a scaled loss to new weights and a new scale. Bytes: each gradient is read twice, because no weight
may change before the last one was looked at, and the rest is AdamW's: with bf16 weights and fp32 masters 2 + 26, with
fp32 weights 4 + 28. torch's parts are `torch.amp.GradScaler` (``unscale_``, ``step``, ``update``),
`torch.nn.utils.clip_grad_norm_` and its AdamW, with copies to and from the masters.

Errors are those of the Adam cases after four steps: two are clipped, one is not, and in one a gradient is infinite, so
that nothing may change but the scale, which must halve; else the error is infinite. The bound leaves room for torch's
norm, whose fp32 sum on the CPU is 2^-13 off at 2^22 elements and which clips by as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases.adam import (
    HYPER,
    TYPICAL,
    AdamInputs,
    Masters,
    error,
    exact_weights,
    gradients_of,
    prepare,
    torch_adamw,
)
from halfstep.bench.cases.sizes import Sizes
from halfstep.bench.harness import Case, Prepared

SCALE = 2.0**10
FACTORS = (1.0, math.inf, -0.5, 2.0)
CLIPPED_AT = 0.7  # of the norm of all gradients
BOUND = 1e-3
NEVER = 2**30  # steps until the scale grows: timed steps must stay alike


@dataclass
class StepInputs(AdamInputs):
    """As for Adam, and the norm to clip to."""

    @cached_property
    def norm(self) -> float:
        """Of all gradients together."""
        return float(self.grads.double().norm())

    @property
    def max_norm(self) -> float:
        """What every provider is told; the same at every size, as far as single gradients go."""
        return CLIPPED_AT * TYPICAL * math.sqrt(self.grads.numel())

    @cached_property
    def truth(self) -> torch.Tensor:
        """After `FACTORS`, clipped, without the step that is skipped."""
        taken = [factor for factor in FACTORS if math.isfinite(factor)]
        clips = [min(1.0, self.max_norm / (abs(factor) * self.norm + 1e-6)) for factor in taken]
        return self.exact([factor * clip for factor, clip in zip(taken, clips, strict=True)])


@dataclass
class StepAnswer:
    """The exact weights after `FACTORS`, and the scale."""

    weights: list[torch.Tensor]
    scale: float


def _prepare(device: torch.device, tensors: int, numel: int, dtype: torch.dtype) -> StepInputs:
    made = prepare(device, tensors, numel, dtype)
    return StepInputs(made.weights, made.grads)


def _job(
    inputs: StepInputs,
    grads: list[torch.Tensor],
    scaler: torch.amp.GradScaler,
    step: Callable[[], Any],
    weights: Callable[[], list[torch.Tensor]],
) -> Prepared:
    scaler.scale(torch.zeros((), dtype=torch.float32, device=grads[0].device))  # makes the scale

    def values() -> StepAnswer:
        for factor in FACTORS:
            inputs.load(grads, (factor if math.isfinite(factor) else 1.0) * scaler.get_scale())
            if not math.isfinite(factor):
                grads[len(grads) // 2][-1] = factor
            step()
        answer = StepAnswer([weight.detach().clone() for weight in weights()], scaler.get_scale())
        # Parts that unscale in place would shrink the same gradients at every timed call.
        scaler.update(1.0)
        inputs.load(grads, 1.0)
        return answer

    return Prepared(step, values)


def _error(inputs: StepInputs, answer: StepAnswer) -> float:
    if answer.scale != SCALE / 2:
        return math.inf
    return error(inputs.weights, answer.weights, inputs.truth)


def _halfstep(inputs: StepInputs, **options: Any) -> Prepared:
    parameters = inputs.parameters()
    optimizer = halfstep.AdamW(parameters, **HYPER, max_grad_norm=inputs.max_norm, **options)
    scaler = halfstep.GradScaler(inputs.weights.device.type, init_scale=SCALE, growth_interval=NEVER)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return _job(inputs, gradients_of(parameters), scaler, step, lambda: list(exact_weights(optimizer, parameters)))


def _torch(inputs: StepInputs, **options: Any) -> Prepared:
    scaler = torch.amp.GradScaler(inputs.weights.device.type, init_scale=SCALE, growth_interval=NEVER)
    masters = None if inputs.weights.dtype == torch.float32 else Masters(inputs)
    parameters = inputs.parameters() if masters is None else masters.parameters
    optimizer = torch_adamw(parameters, **options)

    @torch.no_grad()
    def step() -> None:
        if masters is not None:
            masters.widen()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, inputs.max_norm)
        scaler.step(optimizer)
        scaler.update()
        if masters is not None:
            masters.narrow()

    grads = gradients_of(parameters) if masters is None else masters.low
    return _job(inputs, grads, scaler, step, lambda: list(parameters))


def cases(sizes: Sizes) -> Iterator[Case]:
    """bf16 weights with fp32 masters, and fp32 weights, over the number of tensors."""
    of_torch: dict[str, Callable[[Any], Prepared]] = {
        "torch fused": partial(_torch, fused=True),
        "torch foreach": partial(_torch, foreach=True),
    }
    full: dict[str, Callable[[Any], Prepared]] = {"halfstep full master": partial(_halfstep, master_weights="full")}
    jobs: tuple[tuple[str, torch.dtype, int, dict[str, Callable[[Any], Prepared]]], ...] = (
        ("bf16, fp32 master", torch.bfloat16, 28, {"halfstep": _halfstep, **full, **of_torch}),
        ("fp32", torch.float32, 32, {"halfstep": _halfstep, **of_torch}),
    )
    for job, dtype, bytes_each, providers in jobs:
        for tensors in sizes.tensors:
            numel = sizes.elements // tensors
            yield Case(
                group="step",
                operation="AMP step",
                dtype=job,
                size={"tensors": tensors, "elements": tensors * numel},
                axis="tensors",
                bytes_moved=tensors * numel * bytes_each,
                bound=BOUND,
                error_unit="as a share of the update",
                prepare=partial(_prepare, tensors=tensors, numel=numel, dtype=dtype),
                providers=providers,
                error=_error,
            )
