"""AdamW over many tensors and over one large tensor, for five jobs.

=========================  ====================================================  ================
job                        weights, masters and moments                          bytes per weight
=========================  ====================================================  ================
fp32                       fp32 weights, gradients and moments                   28
bf16, fp32 master          bf16 weights with exact fp32 masters, fp32 moments    26
bf16, bf16 moments         the same, with bf16 moments                           18
bf16, 8-bit moments        the same, with moments in 8 bits                      14.19
bf16, 8-bit, no master     bf16 weights, moments in 8 bits                       10.19
=========================  ====================================================  ================

Bytes are those of halfstep's layout in `halfstep.numerics.planning`. Providers with another layout (masters of 24 bits,
coarser scales) are measured by the bytes of their own. torch does the jobs with fp32 masters and moments, and copies
between the masters and the bf16 weights and gradients; it is measured by the bytes of the job. Without masters, its
moments are in bf16.

The error is that of the exact weights (masters) after three steps with different gradients, against float64: the 2-norm
of the error over the 2-norm of the update, of the worst tensor. eps is as large as the gradients, since Adam otherwise
hides errors in the scale of the gradients. Bounds: 16-bit moments lose 2^-9 each, 8-bit moments several percent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import compiled, loops, needs, needs_gpu
from halfstep.bench.harness import Case, Prepared
from halfstep.numerics.planning import layout

BETAS, DECAY = (0.9, 0.999), 0.1
LEARNING_RATE = 1e-3
TYPICAL = 1e-2  # root mean square of weights and gradients
EPS = 1e-2
FACTORS = (1.0, -0.5, 2.0)  # factors of the gradients in the checked steps; powers of two, which do not round
HYPER: dict[str, Any] = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
EXACT, ROUNDED = 1e-4, 0.1
CODED_FROM = 4096  # elements of the smallest tensor whose moments all providers keep in 8 bits


@dataclass
class AdamInputs:
    """Weights and gradients of all tensors, of shape (tensors, rows, columns)."""

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


def rows_and_columns(numel: int) -> tuple[int, int]:
    """The shape of a matrix of at most `numel` elements, as layers have: moments in 8 bits need rows."""
    columns = 1024 if numel >= CODED_FROM else 32
    return numel // columns, columns


def prepare(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> AdamInputs:
    """Normally distributed weights and gradients with the standard deviation `TYPICAL`."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, shape, generator=generator, dtype=torch.float32, device=device)
    return AdamInputs((TYPICAL * draw()).to(dtype), (TYPICAL * draw()).to(dtype))


def error(start: torch.Tensor, got: list[torch.Tensor], truth: torch.Tensor) -> float:
    """The error of the worst tensor: the 2-norm of the difference from `truth` over that of the exact update."""
    weights = torch.stack([weight.detach().double() for weight in got])
    update = (truth - start.double()).flatten(1).norm(dim=1)
    return float(((weights - truth).flatten(1).norm(dim=1) / update).max())


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


def _visible_weights(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return list(parameters)


Make = Callable[[list[torch.nn.Parameter]], Any]  # creates an optimizer


def _direct(make: Make, inputs: AdamInputs, weights: Callable[..., list[torch.Tensor]] = _visible_weights) -> Prepared:
    """The job with an optimizer of the parameters themselves, which keeps masters if it needs any."""
    parameters = inputs.parameters()
    optimizer = make(parameters)
    return _job(inputs, gradients_of(parameters), optimizer.step, lambda: weights(optimizer, parameters))


def _with_masters(make: Make, inputs: AdamInputs, wrap: Callable[..., Any] = lambda step: step) -> Prepared:
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


def _halfstep(inputs: AdamInputs, **options: Any) -> Prepared:
    return _direct(partial(halfstep.AdamW, **HYPER, **options), inputs, exact_weights)


def torch_adamw(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.AdamW:
    """torch's AdamW; on a GPU, with its step counts there."""
    capturable = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, **HYPER, capturable=capturable, **options)


def _compiled(sizes: Sizes, inputs: AdamInputs) -> Prepared:
    count = len(inputs.weights)
    return _with_masters(partial(torch_adamw, foreach=True), inputs, lambda step: compiled(step, sizes, count))


def _loop(sizes: Sizes, inputs: AdamInputs) -> Prepared:
    loops(sizes, len(inputs.weights))
    return _with_masters(partial(torch_adamw, foreach=False, fused=False), inputs)


def _optimi(inputs: AdamInputs) -> Prepared:
    optimi, on_gpu = needs("optimi"), inputs.weights.device.type == "cuda"
    low = inputs.weights.dtype != torch.float32

    def weights(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        lost = [optimizer.state[parameter]["kahan_comp"] if low else 0.0 for parameter in parameters]
        return [parameter.float() + part for parameter, part in zip(parameters, lost, strict=True)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimi deprecates foreach in favor of Triton, which does not run on CPUs
        make = partial(optimi.AdamW, **HYPER, kahan_sum=low, triton=on_gpu, foreach=not on_gpu)
        return _direct(make, inputs, weights)


def _flashoptim(inputs: AdamInputs, **options: Any) -> Prepared:
    needs_gpu(inputs.weights.device)
    flashoptim = needs("flashoptim")
    if inputs.weights.dtype == torch.float32:
        return _direct(partial(flashoptim.FlashAdamW, **HYPER, quantize=False, master_weight_bits=None), inputs)

    def weights(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        return [
            flashoptim.reconstruct_fp32_param(parameter.detach(), optimizer.state[parameter]["error_bits"])
            for parameter in parameters
        ]

    return _direct(partial(flashoptim.FlashAdamW, **HYPER, **options), inputs, weights)


def _torchao(sizes: Sizes, name: str, inputs: AdamInputs, masters: bool = True, **options: Any) -> Prepared:
    loops(sizes, len(inputs.weights))
    compiled(len, sizes, len(inputs.weights))  # torchao compiles its step; this checks whether that takes too long
    optimizer = getattr(needs("torchao.optim"), name)
    return (_with_masters if masters else _direct)(partial(optimizer, **HYPER, **options), inputs)


def _bitsandbytes(sizes: Sizes, inputs: AdamInputs, masters: bool = True) -> Prepared:
    if inputs.weights.device.type == "cpu":  # on a GPU it launches one kernel per tensor
        loops(sizes, len(inputs.weights))
    optimizer = needs("bitsandbytes.optim").AdamW8bit
    return (_with_masters if masters else _direct)(partial(optimizer, **HYPER), inputs)


def _fused_adam(module: str, inputs: AdamInputs) -> Prepared:
    """apex or transformer-engine, which have the same interface and create masters of 16-bit parameters."""
    needs_gpu(inputs.weights.device)
    optimizer_class = needs(module).FusedAdam
    low = inputs.weights.dtype != torch.float32

    def weights(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        if not low:
            return list(parameters)
        groups = getattr(optimizer, "param_groups_master", None)
        if groups is not None:
            return [master for group in groups for master in group["params"]]
        return [optimizer.state[parameter]["master_param"] for parameter in parameters]

    # Both support master weights only together with capturable.
    options = {"capturable": True, "master_weights": True} if low else {}
    return _direct(partial(optimizer_class, **HYPER, adam_w_mode=True, **options), inputs, weights)


class Job(NamedTuple):
    """A job: the layout of `halfstep.numerics.planning` whose bytes count, and the layouts of other providers."""

    name: str
    dtype: torch.dtype
    layout: str
    bound: float
    providers: dict[str, Callable[[Any], Prepared]]
    other_layouts: dict[str, str]
    least: int = 1  # elements of the smallest tensor

    def bytes_moved(self, layout_name: str, elements: int) -> int:
        """The bytes that a step of a layout reads and writes."""
        precision = "fp32" if self.dtype == torch.float32 else "bf16"
        return int(layout(layout_name, precision).moved_per_step() * elements)


def _jobs(sizes: Sizes) -> Iterator[Job]:
    fused = partial(_with_masters, partial(torch_adamw, fused=True))
    of_torch = {
        "torch fused": fused,
        "torch foreach": partial(_with_masters, partial(torch_adamw, foreach=True)),
        "torch.compile": partial(_compiled, sizes),
        "torch naive": partial(_loop, sizes),
    }
    fused_adams = {
        "apex": partial(_fused_adam, "apex.optimizers"),
        "transformer-engine": partial(_fused_adam, "transformer_engine.pytorch.optimizers"),
    }
    bf16: dict[str, Any] = {"state_dtype": torch.bfloat16}
    coded: dict[str, Any] = {"state_dtype": "8bit"}
    yield Job(
        *("fp32", torch.float32, "halfstep", EXACT),
        {
            "halfstep": _halfstep,
            **of_torch,
            "torch-optimi": _optimi,
            "flashoptim": _flashoptim,
            "torchao": partial(_torchao, sizes, "_AdamW"),
            **fused_adams,
        },
        {},
    )
    yield Job(
        *("bf16, fp32 master", torch.bfloat16, "halfstep-split", EXACT),
        {
            "halfstep": _halfstep,
            "halfstep full master": partial(_halfstep, master_weights="full"),
            **of_torch,
            **fused_adams,
        },
        {"halfstep full master": "halfstep-full"},
    )
    yield Job(
        *("bf16, bf16 moments", torch.bfloat16, "halfstep-split-bf16", ROUNDED),
        {
            "halfstep": partial(_halfstep, **bf16),
            "halfstep split24": partial(_halfstep, master_weights="split24", **bf16),
            "torch fused": fused,
            "torch-optimi": _optimi,
            "flashoptim": partial(_flashoptim, quantize=False, master_weight_bits=24),
        },
        # flashoptim's, too, has a byte of remainder and bf16 moments.
        dict.fromkeys(("halfstep split24", "flashoptim"), "halfstep-split24-bf16"),
    )
    yield Job(
        *("bf16, 8-bit moments", torch.bfloat16, "halfstep-split-8bit", ROUNDED),
        {
            "halfstep": partial(_halfstep, **coded),
            "halfstep split24": partial(_halfstep, master_weights="split24", **coded),
            "torch fused": fused,
            "flashoptim": partial(_flashoptim, master_weight_bits=24),
            "torchao": partial(_torchao, sizes, "AdamW8bit"),
            "bitsandbytes": partial(_bitsandbytes, sizes),
        },
        {"halfstep split24": "halfstep-split24-8bit", "flashoptim": "flashoptim-24"},
        CODED_FROM,
    )
    yield Job(
        *("bf16, 8-bit, no master", torch.bfloat16, "halfstep-stochastic-8bit", ROUNDED),
        {
            "halfstep": partial(_halfstep, master_weights=None, **coded),
            "torch fused": partial(_direct, partial(torch_adamw, fused=True)),
            "torchao": partial(_torchao, sizes, "AdamW8bit", masters=False, bf16_stochastic_round=True),
            "bitsandbytes": partial(_bitsandbytes, sizes, masters=False),
        },
        {"torch fused": "torch-fused", "torchao": "torchao-8bit", "bitsandbytes": "bitsandbytes-8bit"},
        CODED_FROM,
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every job with each number of tensors, then with the large tensor."""
    for job in _jobs(sizes):
        numbers = [(tensors, sizes.elements // tensors) for tensors in sizes.tensors]
        for tensors, numel in [*numbers, *[(1, sizes.large)] * bool(sizes.large)]:
            if numel < job.least:
                continue
            large = numel == sizes.large
            shape = (tensors, *rows_and_columns(numel))
            elements = math.prod(shape)
            yield Case(
                group="adam",
                operation="adamw of one large tensor" if large else "adamw",
                dtype=job.name,
                size={"tensors": tensors, "elements": elements},
                axis="elements" if large else "tensors",
                bytes_moved=job.bytes_moved(job.layout, elements),
                layout_bytes={name: job.bytes_moved(other, elements) for name, other in job.other_layouts.items()},
                bound=job.bound,
                error_unit="as a share of the update",
                prepare=partial(prepare, shape=shape, dtype=job.dtype),
                providers=job.providers,
                error=_error,
            )
