"""The loss scale after a step, decided on the device: one launch, nothing read by the host.

Micikevicius et al., "Mixed precision training" (2018), §3.2, with the hysteresis of Megatron-LM and DeepSpeed. S is the
scale, t the clean steps in a row, h the overflows that are still tolerated, all updated in place; f is non-zero if the
step overflowed:

    f:        h = max(h - 1, 0)    t = 0    S = S * backoff        (S as it was while h > 0)
    not f:    t = t + 1            h = hysteresis                  (only with refill on every clean step)
              t == interval:       S = S * growth   t = 0   h = hysteresis
    S = min(max(S, least), most)

Products are formed in fp64 and rounded to fp32 once, as torch's are: 1.1 and 0.9 are no fp32 numbers.

With a hysteresis of 1 this is `torch.amp.GradScaler`, which never bounds S. Refilling at growth only is Megatron-LM's
and DeepSpeed's default; on every clean step is apex's and DeepSpeed's ``consecutive_hysteresis``.

Beside them three numbers are kept: how many steps were decided, how many were skipped, and which was skipped last.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import jit, on_device, resolve, tl
from halfstep.kernels.multi_tensor import all_have_memory, check_addresses, checked_addresses, own_operations

DECIDED, SKIPPED, LAST_SKIPPED = range(3)  # places in `counts`


@dataclass(frozen=True)
class Rules:
    """How a scale moves.

    Attributes:
        growth_factor, backoff_factor: what it is multiplied by.
        growth_interval: clean steps in a row before it grows.
        hysteresis: overflows before it backs off, from 1.
        refill_on_clean: any clean step restores the hysteresis, not only growth.
        least, most: bounds, positive and finite in fp32.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    refill_on_clean: bool
    least: float
    most: float


@dataclass(frozen=True)
class State:
    """What a scaler keeps on the device, one element each but for `counts`.

    Attributes:
        scale: fp32.
        clean_steps, tolerance: int32, t and h above.
        skipped: fp32, 1 if the last step decided was skipped, else 0.
        counts: int64 (3,): steps decided, steps skipped, number of the last skipped one from 1 (0: none).
    """

    scale: torch.Tensor
    clean_steps: torch.Tensor
    tolerance: torch.Tensor
    skipped: torch.Tensor
    counts: torch.Tensor


# --------------------------------------------------------------------------------------------------------- reference


def _reference(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    overflow = found_inf.reshape(()) != 0
    scale, clean, left = (x.reshape(()) for x in (state.scale, state.clean_steps, state.tolerance))
    left = torch.where(overflow, (left - 1).clamp(min=0), rules.hysteresis if rules.refill_on_clean else left)
    clean = torch.where(overflow, 0, clean + 1)
    grows = clean == rules.growth_interval
    scale = torch.where(overflow & (left == 0), (scale.double() * rules.backoff_factor).float(), scale)
    scale = torch.where(grows, (scale.double() * rules.growth_factor).float(), scale).clamp(rules.least, rules.most)
    state.scale.copy_(scale.reshape(state.scale.shape))
    state.clean_steps.copy_(torch.where(grows, 0, clean).reshape(state.clean_steps.shape))
    state.tolerance.copy_(torch.where(grows, rules.hysteresis, left).reshape(state.tolerance.shape))
    state.skipped.copy_(overflow.reshape(state.skipped.shape))
    state.counts[DECIDED] += 1
    state.counts[SKIPPED] += overflow
    state.counts[LAST_SKIPPED] = torch.where(overflow, state.counts[DECIDED], state.counts[LAST_SKIPPED])


# ------------------------------------------------------------------------------------------------------------ kernel


if tl is not None:
    _DECIDED, _SKIPPED, _LAST_SKIPPED = map(tl.constexpr, (DECIDED, SKIPPED, LAST_SKIPPED))


@jit
def _times(value, bits):
    """An fp32 number times the fp64 number that the bits are, rounded to fp32."""
    return (value.to(tl.float64) * bits.to(tl.float64, bitcast=True)).to(tl.float32)


# Each scaler has numbers of its own: nothing is compiled for those that are 1 or that 16 divides.
@functools.partial(jit, do_not_specialize=["growth_bits", "backoff_bits", "growth_interval", "hysteresis"])
def loss_scale_kernel(
    scale,
    clean_steps,
    tolerance,
    skipped,
    counts,
    found_inf,
    growth_bits,
    backoff_bits,
    growth_interval,
    hysteresis,
    least,
    most,
    REFILL_ON_CLEAN: tl.constexpr,
):
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


# ---------------------------------------------------------------------------------------------------------- launchers


def _bits(factor: float) -> int:
    """Of an fp64 number: Triton passes floats as fp32. Any less than 2^-300 makes 0 of an fp32 number, as that does."""
    bits: int = struct.unpack("<q", struct.pack("<d", max(factor, 2.0**-300)))[0]
    return bits


def _triton(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    check_addresses(state.scale, state.clean_steps, state.tolerance, state.skipped, state.counts, found_inf)
    loss_scale_kernel[(1,)](
        state.scale,
        state.clean_steps,
        state.tolerance,
        state.skipped,
        state.counts,
        found_inf,
        _bits(rules.growth_factor),
        _bits(rules.backoff_factor),
        rules.growth_interval,
        rules.hysteresis,
        rules.least,
        rules.most,
        REFILL_ON_CLEAN=rules.refill_on_clean,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _native(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    native.functions("loss_scale").halfstep_loss_scale(
        *checked_addresses((state.scale, state.clean_steps, state.tolerance, state.skipped, state.counts, found_inf)),
        rules.growth_factor,
        rules.backoff_factor,
        rules.growth_interval,
        rules.hysteresis,
        rules.refill_on_clean,
        rules.least,
        rules.most,
    )


def update(state: State, found_inf: torch.Tensor, rules: Rules) -> None:
    """Move the scale after one step, in place.

    Args:
        state: what is moved, on one device.
        found_inf: fp32, one element, same device; not 0 if the step overflowed and was skipped.
        rules: how.

    Raises:
        TypeError: a tensor has neither memory nor, as fake and meta ones have, operations of its own.
    """
    if not all_have_memory([state.scale, found_inf]):
        with torch.no_grad(), own_operations([state.scale, found_inf]):
            _reference(state, found_inf, rules)
        return
    implementation = resolve(state.scale.device, "loss_scale")
    if implementation == "native":
        _native(state, found_inf, rules)
    else:
        with torch.no_grad(), on_device(state.scale.device):
            (_triton if implementation == "triton" else _reference)(state, found_inf, rules)
    # The kernels write through addresses, which autograd cannot see.
    torch.autograd.graph.increment_version([state.scale, state.clean_steps, state.tolerance, state.skipped])
