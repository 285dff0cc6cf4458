"""The Triton kernels of SGD: `rule.sgd` between the loads and stores of kernels/optimizer."""

from __future__ import annotations

from functools import partial

from halfstep.kernels.backend import constant, jit, tl
from halfstep.kernels.optimizer import blocks, tiles
from halfstep.kernels.sgd.rule import Group, Hyper

_GROUP, _HYPER = constant(Group), constant(Hyper)


@jit
def _numbers(group, count, gscale):
    keep, add = tl.where(count > 1, group.momentum, 0.0), tl.where(count > 1, 1.0 - group.dampening, 1.0)
    return Hyper(gscale, group.weight_decay, group.lr, group.momentum, keep, add)


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS: tl.constexpr, LANES: tl.constexpr):
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _GROUP, _numbers)


@jit
def _gradient(w, g, hyper, FORM: tl.constexpr):
    g = g * hyper.gscale
    if FORM.OPTIONS.DECAYS:
        g = g + hyper.decay * w
    return g


@jit
def _buffer(w, g, m, v, hyper, FORM: tl.constexpr):
    buf = _gradient(w, g, hyper, FORM)
    if FORM.OPTIONS.MOMENTUM:
        buf = hyper.keep * m + hyper.add * buf
    return buf, v


@jit
def _weight(w, g, m, v, hyper, FORM: tl.constexpr):
    d = _gradient(w, g, hyper, FORM) + hyper.momentum * m if FORM.OPTIONS.NESTEROV else m
    return w - hyper.lr * d


@partial(jit, do_not_specialize=["tensors"])
def sgd_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    blocks.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _buffer, _weight)
