"""The Triton kernels of SGD: `rule.sgd` between the loads and stores of kernels/optimizer."""

from __future__ import annotations

from functools import partial

from halfstep.kernels import block_codes
from halfstep.kernels.backend import cuda_capability_geq, jit, tl
from halfstep.kernels.optimizer import blocks as tensor_blocks
from halfstep.kernels.optimizer import tiles
from halfstep.kernels.rounding import join_float32, to_float32
from halfstep.kernels.sgd.rule import Group, Hyper

if tl is not None:  # what stands above, as kernels read it
    _GROUP, _HYPER, _HALF = map(tl.constexpr, (Group, Hyper, block_codes.HALF))


@jit
def _numbers(group, count, gscale):
    """`rule.numbers`."""
    keep, add = tl.where(count > 1, group.momentum, 0.0), tl.where(count > 1, 1.0 - group.dampening, 1.0)
    return Hyper(gscale, group.weight_decay, group.lr, group.momentum, keep, add)


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(
    rows, tensors, tensor_group, groups, hyper, grad_scale, found_inf, sum_of_squares,
    FLAGS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Advance the step counts and fill `hyper`; see `tiles.prepare`."""
    scalars = grad_scale, found_inf, sum_of_squares
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _GROUP, _numbers)


@jit
def _gradient(grad, w, hyper, FORM: tl.constexpr):
    g = to_float32(grad) * hyper.gscale
    if FORM.OPTIONS.DECAYS:
        g = g + hyper.decay * w
    return g


@jit
def _new_weight(w, g, buf, hyper, FORM: tl.constexpr):
    d = buf
    if FORM.OPTIONS.NESTEROV:
        d = g + hyper.momentum * buf
    return w - hyper.lr * d


@jit
def _update(at, tile, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr):
    w = tiles.load_weight(at, tile, FORM, HINT)
    g = _gradient(tiles.load(at.grad, tile, tl.constexpr(FORM.GRAD), HINT), w, hyper, FORM)
    buf = g
    if FORM.MOMENTS:
        buf = hyper.keep * to_float32(tiles.load(at.m, tile, tl.constexpr(FORM.STATE), HINT)) + hyper.add * g
        tiles.store(
            at.m,
            tile,
            tiles.rounded(buf, words[1], tl.constexpr(FORM.STATE), FORM.STOCHASTIC),
            tl.constexpr(FORM.STATE),
            HINT,
        )
    tiles.store_weight(at, tile, _new_weight(w, g, buf, hyper, FORM), words[0], FORM, HINT)


@jit
def _update_blocks(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """Blocks of codes. Elements beyond the end of a short block are 0, which changes no scale."""
    if FORM.FULL:
        w = loaded.extra
    elif FORM.REMAINDER:
        w = join_float32(loaded.weight, loaded.extra)
    else:
        w = to_float32(loaded.weight)
    g = _gradient(loaded.grad, w, hyper, FORM)
    buf = block_codes.decode_signed_block(loaded.m, block_codes.power_of_exponents(loaded.m_scales)[:, None])
    buf = hyper.keep * buf + hyper.add * g
    if SHORT:
        buf = tl.where(blocks.mask, buf, 0.0)
    noise, word = _HALF, words[0]
    if FORM.STOCHASTIC:
        if HINT != 0 and cuda_capability_geq(8, 0):  # words have been moved down: blocks.py
            noise, word = words[1], words[0] << (24 if FORM.REMAINDER == 8 else 8)
        else:
            noise = words[1] >> 8
    codes, new_scales = block_codes.encode_signed_block(buf, noise)
    tiles.store(at.m, blocks, codes, "uint8", HINT)
    tensor_blocks.store_scales(scales.m, blocks, new_scales, "uint8", HINT)
    tiles.store_weight(at, blocks, _new_weight(w, g, buf, hyper, FORM), word, FORM, HINT)


@partial(jit, do_not_specialize=["tensors"])
def sgd_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    """The kernel for momentum in fp32 and bf16, and for none; see `tiles.walk`."""
    tiles.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _update)


@partial(jit, do_not_specialize=["tensors"])
def coded_sgd_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    """The kernel for momentum in 8 bits; see `blocks.walk_blocks`."""
    tensor_blocks.walk_blocks(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _update_blocks)
