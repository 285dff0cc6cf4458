"""AdamW over many tensors and over one large tensor, for five jobs.

=========================  ====================================================  ================
job                        weights, masters and moments                          bytes per weight
=========================  ====================================================  ================
fp32                       fp32 weights, gradients and moments                   28
bf16, fp32 master          bf16 weights with exact fp32 masters, fp32 moments    26
bf16, bf16 moments         the same, with bf16 moments                           18
bf16, 8-bit moments        the same, with 8-bit moments                          14.19
bf16, 8-bit, no master     bf16 weights, 8-bit moments                           10.19
=========================  ====================================================  ================

Bytes are those of halfstep's layout in `halfstep.numerics.planning`, or of the provider's if that differs. torch has
fp32 masters and moments, with copies between masters and bf16 tensors, or bf16 moments in the job without masters. The
error is that of the exact weights (masters) after three steps against float64: the 2-norm of the error over that of the
update, of the worst tensor. eps is as large as the gradients, because Adam otherwise hides errors in their scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.bench.cases import Sizes
from halfstep.bench.cases.installed import compiled, loops, needs, needs_gpu
from halfstep.bench.harness import Case, Prepared, normal
from halfstep.numerics.planning import layout

TYPICAL = 1e-2  # root mean square of weights and gradients
FACTORS = (1.0, -0.5, 2.0)  # multiples of the gradients in the checked steps; powers of two, which do not round
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-2, "weight_decay": 0.1}
EXACT, ROUNDED = 1e-4, 0.1
OF_FULL = "halfstep full master"
CODED_FROM = 4096  # number of elements from which all providers keep moments in 8 bits
RULE = partial(torch.optim.AdamW, **HYPER)

Parameters = list[torch.nn.Parameter]
Optimizer = Callable[[Parameters], Any]  # creates an optimizer


@dataclass
class OptimizerInputs:
    """Weights and gradients of all tensors, of shape (tensors, rows, columns), and torch's optimizer as reference."""

    weights: torch.Tensor
    grads: torch.Tensor
    rule: Optimizer

    def exact(self, factors: Sequence[float]) -> torch.Tensor:
        """The weights after steps in float64, one with each multiple of the gradients."""
        weights: Parameters = [torch.nn.Parameter(weight.double()) for weight in self.weights]
        optimizer = self.rule(weights)
        for factor in factors:
            for weight, grad in zip(weights, self.scaled(self.grads.double(), factor), strict=True):
                weight.grad = grad
            optimizer.step()
        return torch.stack([weight.detach() for weight in weights])

    @cached_property
    def truth(self) -> torch.Tensor:
        """The exact weights after the checked steps."""
        return self.exact(FACTORS)

    @property
    def low(self) -> bool:
        return self.weights.dtype != torch.float32

    def parameters(self, dtype: torch.dtype) -> Parameters:
        result = [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in self.weights]
        for parameter, grad in zip(result, self.grads, strict=True):
            parameter.grad = grad.to(dtype, copy=True)
        return result

    def scaled(self, grads: torch.Tensor, factor: float) -> torch.Tensor:
        return grads * factor

    def load(self, grads: list[torch.Tensor], factor: float) -> None:
        """Write the gradients of a step into `grads`."""
        torch._foreach_copy_(grads, list(self.scaled(self.grads, factor).unbind()))


def rows_and_columns(numel: int) -> tuple[int, int]:
    """The shape of a matrix of at most `numel` elements, like a layer's, because 8-bit moments need rows."""
    columns = 1024 if numel >= CODED_FROM else 32
    return numel // columns, columns


def prepare(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rule: Optimizer,
    inputs: type[OptimizerInputs] = OptimizerInputs,
) -> OptimizerInputs:
    """Normally distributed weights and gradients with the standard deviation `TYPICAL`."""
    weights, grads = (TYPICAL * normal(device, 2, *shape)).to(dtype)
    return inputs(weights, grads, rule)


def update_error(inputs: OptimizerInputs, got: list[torch.Tensor]) -> float:
    """The 2-norm of the error after the checked steps over that of the exact update, of the worst tensor."""
    weights = torch.stack([weight.detach().double() for weight in got])
    update = (inputs.truth - inputs.weights.double()).flatten(1).norm(dim=1)
    return float(((weights - inputs.truth).flatten(1).norm(dim=1) / update).max())


class Weights:
    """The parameters that a provider steps, and their gradients.

    With `masters`, the parameters are fp32 copies of bf16 weights, for optimizers that keep no masters.
    """

    def __init__(self, inputs: OptimizerInputs, masters: bool = False) -> None:
        self._copied = masters and inputs.low
        self.parameters = inputs.parameters(torch.float32 if self._copied else inputs.weights.dtype)
        self._wide = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.grads = list(inputs.grads.clone().unbind()) if self._copied else self._wide
        self._visible = [weight.clone() for weight in inputs.weights] if self._copied else []

    def around(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """`step`, preceded by copies of the gradients to the masters, and followed by copies back to the weights."""
        if not self._copied:
            return step
        masters = [parameter.detach() for parameter in self.parameters]

        @torch.no_grad()
        def copying() -> None:
            torch._foreach_copy_(self._wide, self.grads)
            step()
            torch._foreach_copy_(self._visible, masters)

        return copying


# ---------------------------------------------------------------------------------------------------------- providers

Providers = Mapping[str, Callable[[OptimizerInputs], Prepared]]


def exact_weights(optimizer: Any, parameters: Parameters) -> list[torch.Tensor]:
    """The weights at the full precision that an optimizer keeps: in masters, remainders, or the parameters alone."""
    if hasattr(optimizer, "masters"):  # halfstep
        masters = optimizer.masters()
        return [masters[parameter] for parameter in parameters]
    return [_exact(parameter, optimizer.state[parameter]) for parameter in parameters]


def _exact(parameter: torch.nn.Parameter, state: Mapping[str, Any]) -> torch.Tensor:
    if "error_bits" in state:  # flashoptim
        exact: torch.Tensor = needs("flashoptim").reconstruct_fp32_param(parameter.detach(), state["error_bits"])
        return exact
    if state.get("kahan_comp") is not None:  # optimi
        return parameter.float() + state["kahan_comp"]
    return parameter


def stepping(
    make: Optimizer, inputs: OptimizerInputs, masters: bool = False, wrap: Callable[..., Any] = lambda step: step
) -> Prepared:
    """The job of an optimizer that `make` creates, with external masters if requested."""
    weights = Weights(inputs, masters)
    optimizer = make(weights.parameters)
    step = wrap(weights.around(optimizer.step))

    def values() -> list[torch.Tensor]:
        for factor in FACTORS:
            inputs.load(weights.grads, factor)
            step()
        return exact_weights(optimizer, weights.parameters)

    return Prepared(step, values)


def _halfstep(inputs: OptimizerInputs, **options: Any) -> Prepared:
    return stepping(partial(halfstep.AdamW, **HYPER, **options), inputs)


def torch_adamw(parameters: Parameters, **options: Any) -> torch.optim.AdamW:
    """torch's AdamW; on a GPU, with step counts on the device."""
    capturable = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(parameters, **HYPER, capturable=capturable, **options)


def _torch(inputs: OptimizerInputs, masters: bool = True, **options: Any) -> Prepared:
    return stepping(partial(torch_adamw, **options), inputs, masters)


def _compiled(sizes: Sizes, inputs: OptimizerInputs) -> Prepared:
    wrap = partial(compiled, sizes=sizes, tensors=len(inputs.weights))
    return stepping(partial(torch_adamw, foreach=True), inputs, masters=True, wrap=wrap)


def _peer(
    module: str, name: str, inputs: OptimizerInputs, masters: bool = False, gpu: bool = False, **options: Any
) -> Prepared:
    """The AdamW of another library, by module, name and options."""
    if gpu:
        needs_gpu(inputs.weights.device)
    return stepping(partial(getattr(needs(module), name), **HYPER, **options), inputs, masters)


def _optimi(inputs: OptimizerInputs) -> Prepared:
    on_gpu = inputs.weights.device.type == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optimi deprecates foreach for Triton, which does not run on CPUs
        return _peer("optimi", "AdamW", inputs, kahan_sum=inputs.low, triton=on_gpu, foreach=not on_gpu)


def _torchao(sizes: Sizes, name: str, inputs: OptimizerInputs, masters: bool = True, **options: Any) -> Prepared:
    compiled(len, sizes, len(inputs.weights))  # torchao compiles its step; raise if that would take too long
    return _peer("torchao.optim", name, inputs, masters, **options)


def _bitsandbytes(sizes: Sizes, inputs: OptimizerInputs, masters: bool = True) -> Prepared:
    if inputs.weights.device.type == "cpu":  # on a GPU it launches one kernel per tensor
        loops(sizes, len(inputs.weights))
    return _peer("bitsandbytes.optim", "AdamW8bit", inputs, masters)


# --------------------------------------------------------------------------------------------------------------- jobs


class Job(NamedTuple):
    """A job of an optimizer: the bytes that a step moves per element, and those of providers with other layouts."""

    name: str
    dtype: torch.dtype
    moved: Fraction | int
    bound: float
    providers: Providers
    other_layouts: Mapping[str, Fraction | int] = {}
    smallest: int = 1  # minimum elements per tensor


def _moved(name: str, precision: str = "bf16") -> Fraction:
    """The bytes per element that a step reads and writes with a layout of `halfstep.numerics.planning`."""
    return Fraction(layout(name, precision).moved_per_step())


def _jobs(sizes: Sizes) -> tuple[Job, ...]:
    fp32, bf16 = torch.float32, torch.bfloat16
    fused = {"torch fused": partial(_torch, fused=True)}
    flashoptim = partial(_peer, "flashoptim", "FlashAdamW", gpu=True)
    eager = {**fused, "torch foreach": partial(_torch, foreach=True)}
    of_torch: Providers = {**eager, "torch.compile": partial(_compiled, sizes)}

    def ours(state_dtype: Any) -> Providers:
        halfstep = partial(_halfstep, state_dtype=state_dtype)
        return {"halfstep": halfstep, "halfstep split24": partial(halfstep, master_weights="split24")}

    of_fp32: Providers = {
        "halfstep": _halfstep,
        **of_torch,
        "torch-optimi": _optimi,
        "flashoptim": partial(flashoptim, quantize=False, master_weight_bits=None),
        "torchao": partial(_torchao, sizes, "_AdamW"),
    }
    full = {OF_FULL: partial(_halfstep, master_weights="full")}
    of_bf16: Providers = {
        **ours(bf16),
        **fused,
        "torch-optimi": _optimi,
        "flashoptim": partial(flashoptim, quantize=False, master_weight_bits=24),
    }
    of_8_bits: Providers = {
        **ours("8bit"),
        **fused,
        "flashoptim": partial(flashoptim, master_weight_bits=24),
        "torchao": partial(_torchao, sizes, "AdamW8bit"),
        "bitsandbytes": partial(_bitsandbytes, sizes),
    }
    of_no_master: Providers = {
        "halfstep": partial(_halfstep, master_weights=None, state_dtype="8bit"),
        "torch fused": partial(_torch, masters=False, fused=True),
        "torchao": partial(_torchao, sizes, "AdamW8bit", masters=False, bf16_stochastic_round=True),
        "bitsandbytes": partial(_bitsandbytes, sizes, masters=False),
    }
    # flashoptim's layout also has a one-byte remainder and bf16 moments.
    of_24 = dict.fromkeys(("halfstep split24", "flashoptim"), _moved("halfstep-split24-bf16"))
    of_24_coded = {"halfstep split24": _moved("halfstep-split24-8bit"), "flashoptim": _moved("flashoptim-24")}
    rows = {"torch fused": "torch-fused", "torchao": "torchao-8bit", "bitsandbytes": "bitsandbytes-8bit"}
    bare = {name: _moved(row) for name, row in rows.items()}
    split: Providers = {"halfstep": _halfstep, **full, **of_torch}
    coded = _moved("halfstep-split-8bit"), _moved("halfstep-stochastic-8bit")
    return (
        Job("fp32", fp32, _moved("halfstep", "fp32"), EXACT, of_fp32),
        Job("bf16, fp32 master", bf16, _moved("halfstep-split"), EXACT, split, {OF_FULL: _moved("halfstep-full")}),
        Job("bf16, bf16 moments", bf16, _moved("halfstep-split-bf16"), ROUNDED, of_bf16, of_24),
        Job("bf16, 8-bit moments", bf16, coded[0], ROUNDED, of_8_bits, of_24_coded, CODED_FROM),
        Job("bf16, 8-bit, no master", bf16, coded[1], ROUNDED, of_no_master, bare, CODED_FROM),
    )


def optimizer_cases(
    group: str,
    operation: str,
    jobs: Iterable[Job],
    rule: Optimizer,
    sizes: Sizes,
    sides: Callable[[int], tuple[int, int]] = rows_and_columns,
    inputs: type[OptimizerInputs] = OptimizerInputs,
    error: Callable[[Any, Any], float] = update_error,
) -> Iterator[Case]:
    """Each job with every number of tensors, then with the large tensor."""
    for job in jobs:
        numbers = [(tensors, sizes.elements // tensors) for tensors in sizes.tensors]
        for tensors, numel in [*numbers, *[(1, sizes.large)] * bool(sizes.large)]:
            if numel < job.smallest:
                continue
            large = numel == sizes.large
            shape = (tensors, *sides(numel))
            elements = math.prod(shape)
            yield Case(
                group=group,
                operation=f"{operation} of one large tensor" if large else operation,
                dtype=job.name,
                size={"tensors": tensors, "elements": elements},
                axis="elements" if large else "tensors",
                bytes_moved=int(job.moved * elements),
                layout_bytes={name: int(moved * elements) for name, moved in job.other_layouts.items()},
                bound=job.bound,
                error_unit="as a share of the update",
                prepare=partial(prepare, shape=shape, dtype=job.dtype, rule=rule, inputs=inputs),
                providers=job.providers,
                error=error,
            )


def cases(sizes: Sizes) -> Iterator[Case]:
    return optimizer_cases("adam", "adamw", _jobs(sizes), RULE, sizes)
