"""The Triton kernels of Adam: `rule.adam` between the loads and stores of kernels/optimizer.

Moments in 8 bits have a shorter way on NVIDIA GPUs, PTX for eight elements at a time: block_instructions.py.
"""

from __future__ import annotations

from functools import partial

from halfstep.kernels import block_codes
from halfstep.kernels.adam.rule import Group, Hyper
from halfstep.kernels.backend import constant, cuda_capability_geq, jit, tl
from halfstep.kernels.block_instructions import averages_assembly, constraints, update_assembly, update_constraints
from halfstep.kernels.optimizer import blocks as tensor_blocks
from halfstep.kernels.optimizer import tiles
from halfstep.kernels.optimizer.layout import MAX
from halfstep.kernels.optimizer.tiles import store
from halfstep.kernels.rounding import to_float32

# What stands above, as kernels read it.
_GROUP, _HYPER = constant(Group), constant(Hyper)
_MAX, _LARGEST_POSITIVE, _SPAN = map(constant, (MAX, block_codes.LARGEST_POSITIVE, block_codes.SPAN))


@jit
def _power(base, exponent):
    result = tl.full(base.shape, 1.0, tl.float64)
    for bit in tl.static_range(31):
        result = tl.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result


@jit
def factor(beta):
    weight = (1.0 - beta).to(tl.float32)
    # A product by -1 negates: `-beta` is 0 - beta, which is the other zero for a beta of 0.
    return tl.where(weight < 0.5, weight, beta.to(tl.float32) * -1.0)


@jit
def _numbers(group, count, gscale):
    lr, decay = group.lr, group.weight_decay
    decay = tl.where(group.decoupled_weight_decay != 0, lr * decay, decay)
    root = tl.full(lr.shape, 1.0, tl.float64) / tl.sqrt(1.0 - _power(group.beta2, count))
    step_size = lr / (1.0 - _power(group.beta1, count))
    return Hyper(gscale, decay, factor(group.beta1), factor(group.beta2), root, group.eps, step_size)


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS: tl.constexpr, LANES: tl.constexpr):
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _GROUP, _numbers)


@jit
def average(before, new, factor):
    # One choice per element: the sign of the factor says which form of the average applies.
    return tl.where(factor > 0.0, before, new) + factor * (new - before)


@jit
def _moments(w, g, m, v, hyper, FORM: tl.constexpr):
    g = g * hyper.gscale
    if FORM.OPTIONS.L2:
        g = g + hyper.decay * w
    if FORM.STATE == "uint8":
        square = tl.minimum(g * g, _LARGEST_POSITIVE, propagate_nan=tl.PropagateNan.ALL)
    else:
        square = g * g
        square = tl.where(square > _MAX, _MAX, square)
        v = tl.where(v > _MAX, _MAX, v)
    return average(m, g, hyper.factor_m), average(v, square, hyper.factor_v)


@jit
def _weight(w, g, m, v, hyper, FORM: tl.constexpr):
    d = hyper.step_size * tl.div_rn(m, tl.sqrt_rn(v) * hyper.root + hyper.eps)
    if not FORM.OPTIONS.L2:
        d = d + tl.where(tl.abs(w) == float("inf"), 0.0, hyper.decay * w)
    return w - d


# ------------------------------------------------------------------------------------------------- moments in 8 bits


@jit
def _update_packed(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """The rule on NVIDIA GPUs, with wide accesses; `words` are moved down, as block_codes.py says."""
    L2: tl.constexpr = FORM.OPTIONS.L2
    mask = blocks.mask
    PAIRED: tl.constexpr = cuda_capability_geq(10, 0)
    w = 0.0
    if L2 or not FORM.REMAINDER:
        w = tiles.weight_of(loaded.weight, loaded.extra, FORM)
    gscale = hyper.gscale
    if SHORT:
        # So that elements beyond the end of a short block have m = 0, and do not change its scale. (In a NaN block they
        # are NaN, as the others are.)
        gscale = tl.where(mask, gscale, 0.0)
    g = block_codes.widened_packed(loaded.grad, gscale) if FORM.GRAD == "bf16" else to_float32(loaded.grad) * gscale
    if L2:
        g = g + (tl.where(mask, hyper.decay * w, 0.0) if SHORT else hyper.decay * w)
    m = block_codes.decode_signed_packed(loaded.m, block_codes.power_of_exponents(loaded.m_scales)[:, None])
    v = block_codes.decode_positive_packed(loaded.v, loaded.v_scales[:, None])
    averaged = [g, m, v, hyper.factor_m, hyper.factor_v]
    AVERAGE: tl.constexpr = averages_assembly(PAIRED)
    m, v = tl.inline_asm_elementwise(AVERAGE, constraints(16, 40, "f"), averaged, (tl.float32, tl.float32), True, 8)
    EACH: tl.constexpr = HINT // 2
    exists = tl.arange(0, _SPAN // EACH)[None, :] * EACH < blocks.size[:, None]
    largest, smallest = block_codes.extremes_packed(m, v, exists, EACH, SHORT)
    codes_m, scales_m = block_codes.encode_signed_packed(m, largest, words[1], FORM.STOCHASTIC)
    codes_v, scales_v = block_codes.encode_positive_packed(v, largest, smallest, words[2], FORM.STOCHASTIC)
    tensor_blocks.store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, FORM, HINT)
    if FORM.OPTIONS.AMSGRAD:
        v = tensor_blocks.store_largest(at, scales, blocks, codes_v, scales_v, True, HINT)
    # Beyond these bounds the shorter way to root and quotient could round wrongly.
    usual = (hyper.root >= 1.0) & (hyper.root < 2.0**60) & (hyper.eps >= 0.0) & (hyper.eps < 2.0**60)
    quotient = tl.where(usual, 2.0**-49, float("inf"))  # the smallest one
    if SHORT:  # elements that do not exist would make their warp take the longer way
        quotient = tl.where(mask, quotient, -1.0)
    # 0 times a weight, added to the update, changes no bit of the new weight: it has the weight's sign.
    rate = hyper.decay * 0.0 if L2 else hyper.decay
    NOISY: tl.constexpr = FORM.STOCHASTIC and FORM.REMAINDER == 8
    ASSEMBLY: tl.constexpr = update_assembly(FORM.REMAINDER, NOISY, PAIRED)
    OPERANDS: tl.constexpr = update_constraints(FORM.REMAINDER, NOISY)
    numbers = rate, hyper.root, hyper.eps, hyper.step_size, quotient, smallest
    if FORM.REMAINDER:
        weights = (loaded.weight, loaded.extra, words[0]) if NOISY else (loaded.weight, loaded.extra)
        inputs = (m, v) + weights + numbers  # noqa: RUF005 (Triton knows no stars)
        weight, extra = tl.inline_asm_elementwise(
            ASSEMBLY, OPERANDS, inputs, (tl.bfloat16, tl.int16 if FORM.REMAINDER == 16 else tl.int8), True, 8
        )
        store(at.param, blocks, weight, tl.constexpr(FORM.PARAM), HINT)
        store(at.extra, blocks, extra, tl.constexpr(FORM.EXTRA), HINT)
    else:
        w = tl.inline_asm_elementwise(ASSEMBLY, OPERANDS, (m, v, w) + numbers, tl.float32, True, 8)  # noqa: RUF005
        tiles.store_weight(at, blocks, w, words[0] << 8, FORM, HINT)


@partial(jit, do_not_specialize=["tensors"])
def adam_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    tensor_blocks.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _moments, _weight, _update_packed)
