"""The Triton kernels of Adam: `rule.adam` between the loads and stores of kernels/optimizer.

Moments in 8 bits have a shorter way on NVIDIA GPUs, PTX for eight elements at a time: block_instructions.py.
"""

from __future__ import annotations

from functools import partial

from halfstep.kernels import block_codes
from halfstep.kernels.adam.rule import Group, Hyper
from halfstep.kernels.backend import cuda_capability_geq, jit, tl
from halfstep.kernels.block_instructions import AVERAGES, UPDATES, UPDATES_OPERANDS, constraints, entry
from halfstep.kernels.optimizer import blocks as tensor_blocks
from halfstep.kernels.optimizer import tiles
from halfstep.kernels.optimizer.layout import MAX
from halfstep.kernels.optimizer.tiles import load, store
from halfstep.kernels.rounding import from_float32, join_float32, to_float32

if tl is not None:  # what stands above, as kernels read it
    _GROUP, _HYPER = tl.constexpr(Group), tl.constexpr(Hyper)
    _MAX, _LARGEST_POSITIVE, _SPAN = map(tl.constexpr, (MAX, block_codes.LARGEST_POSITIVE, block_codes.SPAN))
    _HALF, _UP = map(tl.constexpr, (block_codes.HALF, block_codes.UP))


@jit
def _power(base, exponent):
    result = tl.full(base.shape, 1.0, tl.float64)
    for bit in tl.static_range(31):
        result = tl.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result


@jit
def _factor(beta):
    weight = (1.0 - beta).to(tl.float32)
    # A product by -1 negates: `-beta` is 0 - beta, which is the other zero for a beta of 0.
    return tl.where(weight < 0.5, weight, beta.to(tl.float32) * -1.0)


@jit
def _numbers(group, count, gscale):
    """`rule.numbers`."""
    lr, decay = group.lr, group.weight_decay
    decay = tl.where(group.decoupled_weight_decay != 0, lr * decay, decay)
    root = tl.full(lr.shape, 1.0, tl.float64) / tl.sqrt(1.0 - _power(group.beta2, count))
    step_size = lr / (1.0 - _power(group.beta1, count))
    return Hyper(gscale, decay, _factor(group.beta1), _factor(group.beta2), root, group.eps, step_size)


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(
    rows, tensors, tensor_group, groups, hyper, grad_scale, found_inf, sum_of_squares,
    FLAGS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Advance the step counts and fill `hyper`; see `tiles.prepare`."""
    scalars = grad_scale, found_inf, sum_of_squares
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _GROUP, _numbers)


@jit
def _average(before, new, factor):
    # One choice per element: the sign of the factor says which form of the average applies.
    return tl.where(factor > 0.0, before, new) + factor * (new - before)


@jit
def _larger(v, top):
    return tl.where((v > top) | (v != v), v, top)


@jit
def _new_weight(w, m, v, hyper, L2: tl.constexpr):
    d = hyper.step_size * tl.div_rn(m, tl.sqrt_rn(v) * hyper.root + hyper.eps)
    if not L2:
        d = d + tl.where(tl.abs(w) == float("inf"), 0.0, hyper.decay * w)
    return w - d


@jit
def _update(at, tile, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr):
    """A tile of any layout but those with moments in 8 bits."""
    w = tiles.load_weight(at, tile, FORM, HINT)
    g = to_float32(load(at.grad, tile, tl.constexpr(FORM.GRAD), HINT)) * hyper.gscale
    if FORM.OPTIONS.L2:
        g = g + hyper.decay * w
    m = to_float32(load(at.m, tile, tl.constexpr(FORM.STATE), HINT))
    v = to_float32(load(at.v, tile, tl.constexpr(FORM.STATE), HINT))
    square = g * g
    square = tl.where(square > _MAX, _MAX, square)
    v = tl.where(v > _MAX, _MAX, v)
    m = _average(m, g, hyper.factor_m)
    v = _average(v, square, hyper.factor_v)
    store(
        at.m,
        tile,
        tiles.rounded(m, words[1], tl.constexpr(FORM.STATE), FORM.STOCHASTIC),
        tl.constexpr(FORM.STATE),
        HINT,
    )
    stored = tiles.rounded(v, words[2], tl.constexpr(FORM.STATE), FORM.STOCHASTIC)
    store(at.v, tile, stored, tl.constexpr(FORM.STATE), HINT)
    if FORM.OPTIONS.AMSGRAD:
        if FORM.STOCHASTIC:
            v = to_float32(stored)
        v = _larger(v, to_float32(load(at.top, tile, tl.constexpr(FORM.STATE), HINT)))
        store(at.top, tile, from_float32(v, tiles.named(tl.constexpr(FORM.STATE))), tl.constexpr(FORM.STATE), HINT)
    tiles.store_weight(at, tile, _new_weight(w, m, v, hyper, FORM.OPTIONS.L2), words[0], FORM, HINT)


@partial(jit, do_not_specialize=["tensors"])
def adam_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    """The kernel for moments in fp32 and bf16; see `tiles.walk`."""
    tiles.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _update)


# ------------------------------------------------------------------------------------------------- moments in 8 bits


@jit
def _weight_of(loaded, FORM: tl.constexpr):
    if FORM.FULL:
        return loaded.extra
    elif FORM.REMAINDER:
        return join_float32(loaded.weight, loaded.extra)
    else:
        return to_float32(loaded.weight)


@jit
def _store_largest(at, scales, blocks, codes_v, scales_v, PACKED: tl.constexpr, HINT: tl.constexpr):
    """Update and store amsgrad's maximum, which is returned."""
    codes = load(at.top, blocks, "uint8", HINT, 0)
    largest_scales = tensor_blocks.load_scales(scales.top, blocks, "int16")
    if PACKED:
        v = block_codes.decode_positive_packed(codes_v, scales_v[:, None])
        top = block_codes.decode_positive_packed(codes, largest_scales[:, None])
    else:
        v = block_codes.decode_positive_block(codes_v, scales_v[:, None])
        top = block_codes.decode_positive_block(codes, largest_scales[:, None])
    top = _larger(v, top)
    codes, largest_scales = block_codes.encode_positive_block(top, _UP, blocks.mask)
    store(at.top, blocks, codes, "uint8", HINT)
    tensor_blocks.store_scales(scales.top, blocks, largest_scales, "int16", HINT)
    return top


@jit
def _update_blocks(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """Blocks of codes, in the operations of the rule."""
    mask = blocks.mask
    w = _weight_of(loaded, FORM)
    g = to_float32(loaded.grad) * hyper.gscale
    if FORM.OPTIONS.L2:
        g = g + (tl.where(mask, hyper.decay * w, 0.0) if SHORT else hyper.decay * w)
    m = block_codes.decode_signed_block(loaded.m, block_codes.power_of_exponents(loaded.m_scales)[:, None])
    v = block_codes.decode_positive_block(loaded.v, loaded.v_scales[:, None])
    square = tl.minimum(g * g, _LARGEST_POSITIVE, propagate_nan=tl.PropagateNan.ALL)
    m = _average(m, g, hyper.factor_m)
    v = _average(v, square, hyper.factor_v)
    if SHORT:
        m = tl.where(mask, m, 0.0)
    noise_m, noise_v = _HALF, _HALF
    if FORM.STOCHASTIC:
        noise_m, noise_v = words[1] >> 8, words[2] >> 8
    codes_m, scales_m = block_codes.encode_signed_block(m, noise_m)
    codes_v, scales_v = block_codes.encode_positive_block(v, noise_v, mask)
    _store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, HINT)
    if FORM.OPTIONS.AMSGRAD:
        v = _store_largest(at, scales, blocks, codes_v, scales_v, False, HINT)
    tiles.store_weight(at, blocks, _new_weight(w, m, v, hyper, FORM.OPTIONS.L2), words[0], FORM, HINT)


@jit
def _store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, HINT: tl.constexpr):
    store(at.m, blocks, codes_m, "uint8", HINT)
    store(at.v, blocks, codes_v, "uint8", HINT)
    tensor_blocks.store_scales(scales.m, blocks, scales_m, "uint8", HINT)
    tensor_blocks.store_scales(scales.v, blocks, scales_v, "int16", HINT)


@jit
def _update_packed(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """The same on NVIDIA GPUs, with wide accesses; `words` are moved down, as block_codes.py says."""
    L2: tl.constexpr = FORM.OPTIONS.L2
    mask = blocks.mask
    PAIRED: tl.constexpr = cuda_capability_geq(10, 0)
    w = 0.0
    if L2 or not FORM.REMAINDER:
        w = _weight_of(loaded, FORM)
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
    AVERAGE: tl.constexpr = entry(AVERAGES, PAIRED)
    m, v = tl.inline_asm_elementwise(AVERAGE, constraints(16, 40, "f"), averaged, (tl.float32, tl.float32), True, 8)
    EACH: tl.constexpr = HINT // 2
    exists = tl.arange(0, _SPAN // EACH)[None, :] * EACH < blocks.size[:, None]
    largest, smallest = block_codes.extremes_packed(m, v, exists, EACH, SHORT)
    codes_m, scales_m = block_codes.encode_signed_packed(m, largest, words[1], FORM.STOCHASTIC)
    codes_v, scales_v = block_codes.encode_positive_packed(v, largest, smallest, words[2], FORM.STOCHASTIC)
    _store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, HINT)
    if FORM.OPTIONS.AMSGRAD:
        v = _store_largest(at, scales, blocks, codes_v, scales_v, True, HINT)
    # Beyond these bounds the shorter way to root and quotient could round wrongly.
    usual = (hyper.root >= 1.0) & (hyper.root < 2.0**60) & (hyper.eps >= 0.0) & (hyper.eps < 2.0**60)
    quotient = tl.where(usual, 2.0**-49, float("inf"))  # the smallest one
    if SHORT:  # elements that do not exist would make their warp take the longer way
        quotient = tl.where(mask, quotient, -1.0)
    # 0 times a weight, added to the update, changes no bit of the new weight: it has the weight's sign.
    rate = hyper.decay * 0.0 if L2 else hyper.decay
    NOISY: tl.constexpr = FORM.STOCHASTIC and FORM.REMAINDER == 8
    ASSEMBLY: tl.constexpr = entry(UPDATES, FORM.REMAINDER, NOISY, PAIRED)
    OPERANDS: tl.constexpr = entry(UPDATES_OPERANDS, FORM.REMAINDER, NOISY)
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


@jit
def _update_coded(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    if HINT != 0 and cuda_capability_geq(8, 0):
        _update_packed(loaded, at, scales, blocks, words, hyper, FORM, HINT, SHORT)
    else:
        _update_blocks(loaded, at, scales, blocks, words, hyper, FORM, HINT, SHORT)


@partial(jit, do_not_specialize=["tensors"])
def coded_adam_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    """The kernel for moments in 8 bits; see `blocks.walk_blocks`."""
    tensor_blocks.walk_blocks(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _update_coded)
