"""The Triton kernels of Muon: `rule.momentum` and `rule.weight` between the loads and stores of kernels/optimizer."""

from __future__ import annotations

from functools import partial

from halfstep.kernels.adam.kernels import average, factor
from halfstep.kernels.backend import jit, tl
from halfstep.kernels.muon.rule import Group, Hyper
from halfstep.kernels.optimizer import blocks, tiles

if tl is not None:
    _GROUP, _HYPER = tl.constexpr(Group), tl.constexpr(Hyper)


@jit
def _numbers(group, count, gscale):
    return Hyper(gscale, factor(group.momentum), group.lr * group.ratio, group.lr * group.weight_decay)


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS: tl.constexpr, LANES: tl.constexpr):
    tiles.prepare(rows, tensors, tensor_group, groups, hyper, scalars, FLAGS, LANES, _GROUP, _numbers)


@jit
def _buffer(w, g, m, v, hyper, FORM: tl.constexpr):
    return average(m, g * hyper.gscale, hyper.factor), v


@jit
def _direction(w, g, m, v, hyper, FORM: tl.constexpr):
    if FORM.OPTIONS.NESTEROV:
        m = average(m, g * hyper.gscale, hyper.factor)
    return m


@partial(jit, do_not_specialize=["tensors"])
def muon_momentum_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    blocks.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _buffer, _direction)


@jit
def _no_moments(w, g, m, v, hyper, FORM: tl.constexpr):
    return m, v


@jit
def _weight(w, g, m, v, hyper, FORM: tl.constexpr):
    return w - (hyper.rate * g + hyper.decay * w)


@partial(jit, do_not_specialize=["tensors"])
def muon_weight_kernel(rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr):
    tiles.walk(rows, chunk_tensor, tensors, hyper, FORM, _HYPER, _no_moments, _weight)
