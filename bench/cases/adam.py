"""AdamW over many tensors and over one large tensor, for three jobs.

========================  ====================================================  ================
job                       weights, masters and moments                          bytes per weight
========================  ====================================================  ================
fp32                      fp32 weights, gradients and moments                   28
bf16, fp32 master         bf16 weights with exact fp32 masters, fp32 moments    26
bf16, small moments       the same, with at most 16 bits per moment             18
========================  ====================================================  ================

Bytes are those of halfstep's layout, the fewest that the job allows. In the third job, peers with 8-bit moments or
24-bit masters move fewer. torch does the second and third job with fp32 masters, and copies between them and the bf16
weights and gradients.

The error is that of the exact weights (masters) after three steps with different gradients, against float64: the 2-norm
of the error over the 2-norm of the update, of the worst tensor. eps is as large as the gradients, since Adam otherwise
hides errors in the scale of the gradients. Bounds: 16-bit moments lose 2^-9 each, 8-bit moments several percent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

import halfstep
from halfstep.bench.cases.installed import compiled, loops, needs, needs_gpu
from halfstep.bench.cases.sizes import Sizes
from halfstep.bench.harness import Case, Prepared

BETAS, DECAY = (0.9, 0.999), 0.1
LEARNING_RATE = 1e-3
TYPICAL = 1e-2  # root mean square of weights and gradients
EPS = 1e-2
FACTORS = (1.0, -0.5, 2.0)  # factors of the gradients in the checked steps; powers of two, which do not round
HYPER: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
EXACT, ROUNDED = 1e-4, 0.1


@dataclass
class AdamInputs:
    """Weights and gradients of all tensors, one per row."""

    weights: torch.Tensor
    grads: torch.Tensor

    def exact(self, factors: Sequence[float]) -> torch.Tensor:
        """The weights in float64 after an AdamW step with each multiple of the gradients."""
        weights, grads = self.weights.double(), self.grads.double()
        m, v = torch.zeros_like(grads), torch.zeros_like(grads)
        for step, factor in enumerate(factors, 1):
            g = grads * factor
            m.mul_(BETAS[0]).add_(g, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            root = (v / (1 - BETAS[1] ** step)).sqrt_().add_(EPS)
            weights.mul_(1 - LEARNING_RATE * DECAY)
            weights.addcdiv_(m, root, value=-LEARNING_RATE / (1 - BETAS[0] ** step))
        return weights

    @cached_property
    def truth(self) -> torch.Tensor:
        """The exact weights after the checked steps."""
        return self.exact(FACTORS)

    def parameters(self, dtype: torch.dtype | None = None) -> list[torch.nn.Parameter]:
        """A separate parameter for each row, with a separate gradient."""
        result = []
        for weight, grad in zip(self.weights, self.grads, strict=True):
            parameter = torch.nn.Parameter(weight.clone() if dtype is None else weight.to(dtype, copy=True))
            parameter.grad = grad.clone() if dtype is None else grad.to(dtype, copy=True)
            result.append(parameter)
        return result

    def load(self, grads: list[torch.Tensor], factor: float) -> None:
        """Write a multiple of the gradients into `grads`."""
        torch._foreach_copy_(grads, list((self.grads * factor).unbind()))


def prepare(device: torch.device, tensors: int, numel: int, dtype: torch.dtype) -> AdamInputs:
    """Normally distributed weights and gradients with the standard deviation `TYPICAL`."""
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> torch.Tensor:
        return (TYPICAL * torch.randn(tensors, numel, generator=generator, dtype=torch.float32, device=device)).to(
            dtype
        )

    return AdamInputs(normal(), normal())


def error(start: torch.Tensor, got: list[torch.Tensor], truth: torch.Tensor) -> float:
    """The error of the worst tensor: the 2-norm of the difference from `truth` over that of the exact update."""
    found = torch.stack([one.detach().double() for one in got])
    moved = (truth - start.double()).norm(dim=1)
    return float(((found - truth).norm(dim=1) / moved).max())


def _error(inputs: AdamInputs, got: list[torch.Tensor]) -> float:
    return error(inputs.weights, got, inputs.truth)


def _job(
    inputs: AdamInputs, grads: list[torch.Tensor], step: Callable[[], Any], weights: Callable[[], list[torch.Tensor]]
) -> Prepared:
    def values() -> list[torch.Tensor]:
        for factor in FACTORS:
            inputs.load(grads, factor)
            step()
        return weights()

    return Prepared(step, values)


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Masters:
    """fp32 masters of bf16 weights and gradients, and the copies between them, for torch's optimizers."""

    def __init__(self, inputs: AdamInputs) -> None:
        self.parameters = inputs.parameters(torch.float32)
        self.wide = gradients_of(self.parameters)
        self.low = list(inputs.grads.clone().unbind())
        self.visible = [weight.clone() for weight in inputs.weights]
        self._masters = [parameter.detach() for parameter in self.parameters]

    def widen(self) -> None:
        """Copy the bf16 gradients to the fp32 gradients."""
        torch._foreach_copy_(self.wide, self.low)

    def narrow(self) -> None:
        """Copy the fp32 masters to the bf16 weights."""
        torch._foreach_copy_(self.visible, self._masters)


# ---------------------------------------------------------------------------------------------------------- providers


def exact_weights(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The exact weights of a halfstep optimizer: the masters, or the parameters if there are none."""
    masters = optimizer.masters()
    return [masters[parameter] for parameter in parameters]


def _halfstep(inputs: AdamInputs, **options: Any) -> Prepared:
    parameters = inputs.parameters()
    optimizer = halfstep.AdamW(parameters, **HYPER, **options)
    return _job(inputs, gradients_of(parameters), optimizer.step, lambda: list(exact_weights(optimizer, parameters)))


def torch_adamw(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.AdamW:
    """torch's AdamW; on a GPU, with its step counts there."""
    capturable = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, **HYPER, capturable=capturable, **options)


def _with_masters(
    make: Callable[[list[torch.nn.Parameter]], Any], inputs: AdamInputs, wrap: Callable[..., Any] = lambda step: step
) -> Prepared:
    """The job with an optimizer of fp32 parameters. For bf16 weights, it steps masters, with copies around the step."""
    if inputs.weights.dtype == torch.float32:
        parameters = inputs.parameters()
        return _job(inputs, gradients_of(parameters), wrap(make(parameters).step), lambda: list(parameters))
    masters = Masters(inputs)
    optimizer = make(masters.parameters)

    @torch.no_grad()
    def step() -> None:
        masters.widen()
        optimizer.step()
        masters.narrow()

    return _job(inputs, masters.low, wrap(step), lambda: list(masters.parameters))


def _compiled(sizes: Sizes, inputs: AdamInputs) -> Prepared:
    count = len(inputs.weights)
    return _with_masters(partial(torch_adamw, foreach=True), inputs, lambda step: compiled(step, sizes, count))


def _loop(sizes: Sizes, inputs: AdamInputs) -> Prepared:
    loops(sizes, len(inputs.weights))
    return _with_masters(partial(torch_adamw, foreach=False, fused=False), inputs)


def _optimi(inputs: AdamInputs) -> Prepared:
    optimi = needs("torch-optimi")
    parameters, on_gpu = inputs.parameters(), inputs.weights.device.type == "cuda"
    low = inputs.weights.dtype != torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimi deprecates foreach in favor of Triton, which does not run on CPUs
        optimizer = optimi.AdamW(parameters, **HYPER, kahan_sum=low, triton=on_gpu, foreach=not on_gpu)

    def weights() -> list[torch.Tensor]:
        if not low:
            return list(parameters)
        return [parameter.float() + optimizer.state[parameter]["kahan_comp"].float() for parameter in parameters]

    return _job(inputs, gradients_of(parameters), optimizer.step, weights)


def _flashoptim(inputs: AdamInputs, **options: Any) -> Prepared:
    needs_gpu(inputs.weights.device)
    flashoptim = needs("flashoptim")
    parameters = inputs.parameters()
    low = inputs.weights.dtype != torch.float32
    optimizer = flashoptim.FlashAdamW(parameters, **HYPER, **(options if low else {"quantize": False}))

    def weights() -> list[torch.Tensor]:
        if not low:
            return list(parameters)
        return [
            flashoptim.reconstruct_fp32_param(parameter.detach(), optimizer.state[parameter]["error_bits"])
            for parameter in parameters
        ]

    return _job(inputs, gradients_of(parameters), optimizer.step, weights)


def _torchao(sizes: Sizes, name: str, inputs: AdamInputs) -> Prepared:
    loops(sizes, len(inputs.weights))
    compiled(len, sizes, len(inputs.weights))  # torchao compiles its step; this checks whether that takes too long
    optimizer = getattr(needs("torchao", "torchao.optim"), name)
    return _with_masters(partial(optimizer, **HYPER), inputs)


def _apex(inputs: AdamInputs) -> Prepared:
    needs_gpu(inputs.weights.device)
    return _fused_adam(needs("apex", "apex.optimizers").FusedAdam, inputs)


def _transformer_engine(inputs: AdamInputs) -> Prepared:
    needs_gpu(inputs.weights.device)
    return _fused_adam(needs("transformer-engine", "transformer_engine.pytorch.optimizers").FusedAdam, inputs)


def _fused_adam(optimizer_class: Any, inputs: AdamInputs) -> Prepared:
    """apex or transformer-engine, which have the same interface and create masters of 16-bit parameters."""
    parameters = inputs.parameters()
    low = inputs.weights.dtype != torch.float32
    # Both support master weights only together with capturable.
    options = {"capturable": True, "master_weights": True} if low else {}
    optimizer = optimizer_class(parameters, **HYPER, adam_w_mode=True, **options)

    def weights() -> list[torch.Tensor]:
        if not low:
            return list(parameters)
        kept = getattr(optimizer, "param_groups_master", None)
        if kept is not None:
            return [master for group in kept for master in group["params"]]
        return [optimizer.state[parameter]["master_param"] for parameter in parameters]

    return _job(inputs, gradients_of(parameters), optimizer.step, weights)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every job with each number of tensors, then with the large tensor."""
    fused = partial(_with_masters, partial(torch_adamw, fused=True))
    foreach = partial(_with_masters, partial(torch_adamw, foreach=True))
    of_torch: dict[str, Callable[[Any], Prepared]] = {
        "torch fused": fused,
        "torch foreach": foreach,
        "torch.compile": partial(_compiled, sizes),
        "torch naive": partial(_loop, sizes),
    }
    # The job, its dtype, bytes per weight, bound, and providers.
    jobs: tuple[tuple[str, torch.dtype, int, float, dict[str, Callable[[Any], Prepared]]], ...] = (
        (
            "fp32",
            torch.float32,
            28,
            EXACT,
            {
                "halfstep": _halfstep,
                **of_torch,
                "torch-optimi": _optimi,
                "flashoptim": _flashoptim,
                "torchao": partial(_torchao, sizes, "_AdamW"),
                "apex": _apex,
                "transformer-engine": _transformer_engine,
            },
        ),
        (
            "bf16, fp32 master",
            torch.bfloat16,
            26,
            EXACT,
            {
                "halfstep": _halfstep,
                "halfstep full master": partial(_halfstep, master_weights="full"),
                **of_torch,
                "flashoptim": partial(_flashoptim, quantize=False, master_weight_bits=32),
                "apex": _apex,
                "transformer-engine": _transformer_engine,
            },
        ),
        (
            "bf16, small moments",
            torch.bfloat16,
            18,
            ROUNDED,
            {
                "halfstep": partial(_halfstep, state_dtype=torch.bfloat16),
                "torch fused": fused,
                "torch-optimi": _optimi,
                "flashoptim": _flashoptim,
                "torchao 8 bit": partial(_torchao, sizes, "AdamW8bit"),
            },
        ),
    )
    for job, dtype, bytes_each, bound, providers in jobs:
        shapes = [(tensors, sizes.elements // tensors) for tensors in sizes.tensors]
        for tensors, numel in [*shapes, *([(1, sizes.large)] if sizes.large else [])]:
            large = numel == sizes.large
            yield Case(
                group="adam",
                operation="adamw of one large tensor" if large else "adamw",
                dtype=job,
                size={"tensors": tensors, "elements": tensors * numel},
                axis="elements" if large else "tensors",
                bytes_moved=tensors * numel * bytes_each,
                bound=bound,
                error_unit="as a share of the update",
                prepare=partial(prepare, tensors=tensors, numel=numel, dtype=dtype),
                providers=providers,
                error=_error,
            )
