"""The Triton kernels of SGD: `rule.sgd` between the loads and stores of kernels/optimizer."""

from __future__ import annotations

from functools import partial

from halfstep.kernels import block_codes
from halfstep.kernels.backend import cuda_capability_geq, jit, tl
from halfstep.kernels.optimizer import blocks as tensor_blocks
from halfstep.kernels.optimizer import tiles
from halfstep.kernels.rounding import join_float32, to_float32
from halfstep.kernels.sgd.rule import Hyper

GROUP = range(4, 6)  # columns of the group table, behind those of every optimizer: momentum, dampening
GROUP_COLUMNS = GROUP.stop

if tl is not None:  # what stands above, as kernels read it
    _MOMENTUM, _DAMPENING, _COLUMNS, _HALF = map(tl.constexpr, (*GROUP, GROUP_COLUMNS, block_codes.HALF))


@jit
def _numbers(group, mask, lr, decay, count, gscale):
    """`rule.numbers`."""
    momentum = tl.load(group + _MOMENTUM, mask=mask, other=0.0)
    add = 1.0 - tl.load(group + _DAMPENING, mask=mask, other=0.0)
    return Hyper(gscale, decay, lr, momentum, tl.where(count > 1, momentum, 0.0), tl.where(count > 1, add, 1.0))


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(
    rows, tensors, tensor_group, groups, hyper, grad_scale, found_inf, sum_of_squares,
    FLAGS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Advance the step counts and fill `hyper`; see `tiles.prepare`."""
    scalars = grad_scale, found_inf, sum_of_squares
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _COLUMNS, _numbers)


@jit
def _load_hyper(at):
    return Hyper(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5))


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
    tiles.walk(rows, chunk_tensor, tensors, hyper, FORM, _load_hyper, _update)


@partial(jit, do_not_specialize=["tensors"])
def coded_sgd_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    """The kernel for momentum in 8 bits; see `blocks.walk_blocks`."""
    tensor_blocks.walk_blocks(rows, chunk_tensor, tensors, hyper, FORM, _load_hyper, _update_blocks)
