"""The entire step of mixed-precision training: check, norm, clipping, update of weights and of the loss scale.

Bytes: each gradient is read twice, because no weight may change before all gradients are checked; the other bytes are
those of AdamW: 2 + 26 with bf16 weights and fp32 masters, 4 + 28 with fp32 weights. torch's step consists of
`torch.amp.GradScaler`, `torch.nn.utils.clip_grad_norm_` and AdamW, with copies to and from the masters.

Errors are those of the Adam cases, after four steps. Two are clipped, one is not, and one has an infinite gradient: it
must halve the scale and change nothing else, or the error is infinite. The bound allows for the error of torch's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases import Sizes, adam
from halfstep.bench.cases.adam import Job, OptimizerInputs, Weights, optimizer_cases
from halfstep.bench.harness import Case, Prepared

SCALE = 2.0**10
FACTORS = (1.0, math.inf, -0.5, 2.0)
CLIPPED_AT = 0.7  # fraction of the norm of all gradients
BOUND = 1e-3
NEVER = 2**30  # a growth interval that keeps the scale the same in all timed steps


@dataclass
class StepInputs(OptimizerInputs):
    """The inputs of the Adam cases, and the norm to clip to."""

    @cached_property
    def norm(self) -> float:
        return float(self.grads.double().norm())

    @property
    def max_norm(self) -> float:
        """The norm to which all providers clip, proportional to the expected norm of the gradients."""
        return CLIPPED_AT * adam.TYPICAL * math.sqrt(self.grads.numel())

    @cached_property
    def truth(self) -> torch.Tensor:
        """The exact weights after the checked steps, with clipping and without the skipped step."""
        finite = [factor for factor in FACTORS if math.isfinite(factor)]
        clips = [min(1.0, self.max_norm / (abs(factor) * self.norm + 1e-6)) for factor in finite]
        return self.exact([factor * clip for factor, clip in zip(finite, clips, strict=True)])


def _stepping(
    inputs: StepInputs, weights: Weights, optimizer: Any, scaler: torch.amp.GradScaler, step: Callable[[], Any]
) -> Prepared:
    scaler.scale(torch.zeros((), dtype=torch.float32, device=inputs.weights.device))  # creates the tensor of the scale
    grads = weights.grads

    def values() -> tuple[list[torch.Tensor], float]:
        for factor in FACTORS:
            inputs.load(grads, (factor if math.isfinite(factor) else 1.0) * scaler.get_scale())
            if not math.isfinite(factor):
                grads[len(grads) // 2].view(-1)[-1] = factor
            step()
        exact = adam.exact_weights(optimizer, weights.parameters)
        answer = [weight.detach().clone() for weight in exact], scaler.get_scale()
        # With another scale, unscaling in place would shrink the gradients further in every timed call.
        scaler.update(1.0)
        inputs.load(grads, 1.0)
        return answer

    return Prepared(step, values)


def _error(inputs: StepInputs, answer: tuple[list[torch.Tensor], float]) -> float:
    weights, scale = answer
    return adam.update_error(inputs, weights) if scale == SCALE / 2 else math.inf


def _halfstep(inputs: StepInputs, **options: Any) -> Prepared:
    weights = Weights(inputs)
    optimizer = halfstep.AdamW(weights.parameters, **adam.HYPER, max_grad_norm=inputs.max_norm, **options)
    scaler = halfstep.GradScaler(inputs.weights.device.type, init_scale=SCALE, growth_interval=NEVER)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return _stepping(inputs, weights, optimizer, scaler, step)


def _torch(inputs: StepInputs, **options: Any) -> Prepared:
    weights = Weights(inputs, masters=True)
    optimizer = adam.torch_adamw(weights.parameters, **options)
    scaler = torch.amp.GradScaler(inputs.weights.device.type, init_scale=SCALE, growth_interval=NEVER)

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights.parameters, inputs.max_norm)
        scaler.step(optimizer)
        scaler.update()

    return _stepping(inputs, weights, optimizer, scaler, weights.around(step))


def cases(sizes: Sizes) -> Iterator[Case]:
    """bf16 weights with fp32 masters, and fp32 weights, with each number of tensors."""
    torchs = {"torch fused": partial(_torch, fused=True), "torch foreach": partial(_torch, foreach=True)}
    fp32: Any = {"halfstep": _halfstep, **torchs}
    split: Any = {"halfstep": _halfstep, "halfstep full master": partial(_halfstep, master_weights="full"), **torchs}
    jobs = (
        Job("bf16, fp32 master", torch.bfloat16, 28, BOUND, split),
        Job("fp32", torch.float32, 32, BOUND, fp32),
    )
    sizes = replace(sizes, large=0)
    return optimizer_cases("step", "AMP step", jobs, adam.RULE, sizes, inputs=StepInputs, error=_error)
