"""Update of the loss scale after a step: one launch, and the host reads nothing. `reference` is the specification.

With a hysteresis of 1 this is `torch.amp.GradScaler`, but with bounds. Megatron-LM and, by default, DeepSpeed refill
the hysteresis only when the scale grows; apex, and DeepSpeed with ``consecutive_hysteresis``, on every clean step.
"""

from __future__ import annotations

import functools
import struct
from contextlib import nullcontext
from typing import NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import EXACT, constant, jit, launch_kernel, resolve, tl
from halfstep.kernels.multi_tensor import alignments, all_have_memory, checked_addresses, own_operations

DECIDED, SKIPPED, LAST_SKIPPED = range(3)  # indices of `State.counts`


class Rules(NamedTuple):
    growth_factor: float  # what the scale is multiplied by when it grows
    backoff_factor: float  # the same after an overflow
    growth_interval: int  # consecutive steps without overflow after which the scale grows
    hysteresis: int  # overflows after which the scale is lowered, at least 1
    refill_on_clean: bool  # whether every step without overflow restores the hysteresis, not only growth
    least: float  # bounds of the scale, positive and finite in fp32
    most: float


class State(NamedTuple):
    """The state of a scaler on the device. All tensors but `counts` have one element."""

    scale: torch.Tensor  # fp32, S of `reference`
    clean_steps: torch.Tensor  # int32, t of `reference`
    tolerance: torch.Tensor  # int32, h of `reference`
    skipped: torch.Tensor  # fp32, 1 if the last step was skipped, otherwise 0
    counts: torch.Tensor  # int64 (3,): steps decided, steps skipped, the number from 1 of the last skipped one or 0


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale as every kernel computes it: the quotient rounded to fp32.

    The division is done in fp64. Rounding a quotient of two fp32 numbers to fp64 and then to fp32 gives the correctly
    rounded fp32 quotient.
    """
    return scale.double().reciprocal().float()


def reference(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    """Update a scaler in place, in plain torch.

    The algorithm is that of Micikevicius et al., "Mixed precision training" (2018), section 3.2, with the hysteresis of
    Megatron-LM and DeepSpeed. S is the scale, t the number of consecutive steps without overflow and h the number of
    overflows that are still tolerated. f is nonzero if the step overflowed:

        f:        h = max(h - 1, 0)    t = 0    S = S * backoff        (S as it was while h > 0)
        not f:    t = t + 1            h = hysteresis                  (only with refill on every clean step)
                  t == interval:       S = S * growth   t = 0   h = hysteresis
        S = min(max(S, least), most)

    Products are computed in fp64 and rounded once to fp32, as in torch, because factors such as 1.1 and 0.9 are not
    fp32 numbers. The steps that were decided and skipped are counted, and the number of the last skipped one is stored.
    """
    overflow = found_inf.reshape(()) != 0
    scale, clean, tolerance = (x.reshape(()) for x in state[:3])
    refilled = rules.hysteresis if rules.refill_on_clean else tolerance
    tolerance = torch.where(overflow, (tolerance - 1).clamp(min=0), refilled)
    clean = torch.where(overflow, 0, clean + 1)
    grows = clean == rules.growth_interval
    scale = torch.where(overflow & (tolerance == 0), (scale.double() * rules.backoff_factor).float(), scale)
    scale = torch.where(grows, (scale.double() * rules.growth_factor).float(), scale).clamp(rules.least, rules.most)
    clean, tolerance = torch.where(grows, 0, clean), torch.where(grows, rules.hysteresis, tolerance)
    for tensor, value in zip(state, (scale, clean, tolerance, overflow), strict=False):
        tensor.copy_(value.reshape(tensor.shape))
    state.counts[DECIDED] += 1
    state.counts[SKIPPED] += overflow
    state.counts[LAST_SKIPPED] = torch.where(overflow, state.counts[DECIDED], state.counts[LAST_SKIPPED])


_DECIDED, _SKIPPED, _LAST_SKIPPED = map(constant, (DECIDED, SKIPPED, LAST_SKIPPED))


@jit
def inverse_block(scale):
    """`inverse` of a number in a kernel. Older versions of Triton flush subnormal quotients of fp32 to zero."""
    return (1.0 / scale.to(tl.float64)).to(tl.float32)


@jit
def _times(value, bits):
    """An fp32 number times the fp64 number with these bits, rounded to fp32."""
    return (value.to(tl.float64) * bits.to(tl.float64, bitcast=True)).to(tl.float32)


# Scalers differ in these numbers, so Triton must not compile a variant for values that are 1 or divisible by 16.
@functools.partial(jit, do_not_specialize=["growth_bits", "backoff_bits", "growth_interval", "hysteresis"])
def loss_scale_kernel(
    scale, clean_steps, tolerance, skipped, counts,  # a `State`, which is updated
    found_inf,  # fp32, one element; nonzero if the step overflowed
    growth_bits, backoff_bits, growth_interval, hysteresis, least, most,  # `Rules`; factors as `_bits`
    REFILL_ON_CLEAN: tl.constexpr,
):  # fmt: skip
    overflow = tl.load(found_inf) != 0
    left = tl.load(tolerance)
    clean = tl.where(overflow, 0, tl.load(clean_steps) + 1)
    refilled = hysteresis if REFILL_ON_CLEAN else left
    left = tl.where(overflow, tl.maximum(left - 1, 0), refilled)
    grows = clean == growth_interval
    value = tl.load(scale)
    value = tl.where(overflow & (left == 0), _times(value, backoff_bits), value)
    value = tl.where(grows, _times(value, growth_bits), value)
    tl.store(scale, tl.minimum(tl.maximum(value, least), most))
    tl.store(clean_steps, tl.where(grows, 0, clean))
    tl.store(tolerance, tl.where(grows, hysteresis, left))
    tl.store(skipped, overflow.to(tl.float32))
    decided = tl.load(counts + _DECIDED) + 1
    tl.store(counts + _DECIDED, decided)
    tl.store(counts + _SKIPPED, tl.load(counts + _SKIPPED) + overflow.to(tl.int64))
    tl.store(counts + _LAST_SKIPPED, tl.where(overflow, decided, tl.load(counts + _LAST_SKIPPED)))


@functools.lru_cache
def _bits(factor: float) -> int:
    """The bits of an fp64 number. They are passed as an integer because Triton passes floats as fp32.

    Factors below 2^-300 are replaced by it: times any fp32 number, both give 0 in fp32.
    """
    return struct.unpack("<q", struct.pack("<d", max(factor, 2.0**-300)))[0]


def update(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    """Update the state of a scaler in place after one step.

    `found_inf` is fp32, one element, on the device of the state; nonzero if the step overflowed and was skipped.
    """
    in_memory = all_have_memory([state.scale, found_inf])
    implementation = resolve(state.scale.device, "loss_scale") if in_memory else "reference"
    if implementation == "native":
        native.library("loss_scale").halfstep_loss_scale(*checked_addresses((*state, found_inf)), *rules)
    elif implementation == "triton":
        tensors, bits = (*state, found_inf), (_bits(rules.growth_factor), _bits(rules.backoff_factor))
        operands = *tensors, *bits, rules.growth_interval, rules.hysteresis, float(rules.least), float(rules.most)
        constants = {"REFILL_ON_CLEAN": rules.refill_on_clean, "num_warps": 1, **EXACT}
        form = rules.hysteresis >= 2**31, alignments(tensors)
        launch_kernel(loss_scale_kernel, state.scale.device, 1, operands, constants, *form)
    else:
        with torch.no_grad(), nullcontext() if in_memory else own_operations([state.scale, found_inf]):
            reference(state, found_inf, rules)
        return
    torch.autograd.graph.increment_version(state[:4])  # autograd does not notice what is written to addresses
