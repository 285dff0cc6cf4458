"""The reference: a rule applied to a batch of tensors, in plain torch on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfstep.kernels import block_codes
from halfstep.kernels.block_codes import LARGEST_POSITIVE
from halfstep.kernels.multi_tensor import ADDRESSES, has_memory, own_operations
from halfstep.kernels.optimizer import layout as layouts
from halfstep.kernels.optimizer.layout import ROWS, Batch, Control, KernelLayout
from halfstep.kernels.philox import reference_words
from halfstep.kernels.rounding import FORMATS, STOCHASTIC, join_master, reference_round, split_master

if TYPE_CHECKING:
    from halfstep.kernels.optimizer.launch import Family

Tensors = Sequence[torch.Tensor | None]  # of one parameter, by operand


def sqrt_fp64(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp64 square root; numpy's on the CPU, where torch's promises less."""
    if x.device.type != "cpu" or not has_memory(x):
        return x.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


def _count(step: torch.Tensor) -> torch.Tensor:
    """A step count as a number that powers and random bits can use: not 0, as it is if the first step was skipped."""
    return step.clamp(1.0, 2.0**30).long()


def _prepare(family: Family, batch: Batch, groups: torch.Tensor, control: Control) -> None:
    device = batch.hyper.device
    skip = torch.zeros((), dtype=torch.float32, device=device)
    if control.found_inf is not None:
        skip = (control.found_inf.reshape(()) != 0).float()
    steps = torch.stack([step.reshape(()) for step in batch.lists[ROWS.STEP]]) + (1 - skip)
    for step, value in zip(batch.lists[ROWS.STEP], steps, strict=True):
        step.copy_(value.reshape(step.shape))
    group = family.group(*groups[batch.groups].T)
    scale = torch.ones((), dtype=torch.float64, device=device)
    if control.grad_scale is not None:
        scale = 1.0 / control.grad_scale.reshape(()).double()
    if control.sum_of_squares is not None:
        norm = sqrt_fp64(control.sum_of_squares.reshape(()))
        scale = scale * torch.clamp(group.max_norm / (norm + 1e-6), max=1.0)
    gscale = torch.where(group.maximize != 0, -scale, scale)
    for column, number in enumerate((skip, *family.numbers(group, _count(steps), gscale))):
        batch.hyper[:, column] = number


def _random_words(batch: Batch, tensor: int) -> list[torch.Tensor | None]:
    """The random words of a tensor's elements, by draw; None if nothing is rounded stochastically."""
    if not batch.layout.stochastic:
        return [None] * 3
    assert batch.table is not None
    column = batch.table.rows[ADDRESSES:, tensor]
    local = torch.arange(batch.lists[ROWS.PARAM][tensor].numel(), dtype=torch.int64, device=column.device)
    row = local // column[ROWS.INNER]
    index = column[ROWS.BASE] + row * column[ROWS.INNER_WHOLE] + (local - row * column[ROWS.INNER])
    step = _count(batch.lists[ROWS.STEP][tensor].reshape(()))
    return [reference_words(index, column[ROWS.SEED], step, column[ROWS.STREAM], draw) for draw in range(3)]


def _rounded(x: torch.Tensor, dtype: torch.dtype, words: torch.Tensor | None) -> torch.Tensor:
    if words is None or dtype not in FORMATS:
        return x.to(dtype)
    return reference_round(x, dtype, STOCHASTIC, words=words)


def _load_moment(stored: dict[int, torch.Tensor], operand: int) -> torch.Tensor:
    if layouts.SCALES_OF[operand] not in stored:
        return stored[operand].float()
    return block_codes.decode(stored[operand], stored[layouts.SCALES_OF[operand]], signed=operand == ROWS.M)


def _store_moment(
    x: torch.Tensor, operand: int, before: Tensors, words: torch.Tensor | None
) -> dict[int, torch.Tensor]:
    """A moment as it is stored: one operand, or codes and scales. A maximum is never rounded down."""
    moment, scales = before[operand], before[layouts.SCALES_OF[operand]]
    assert moment is not None
    if scales is None:
        return {operand: _rounded(x, moment.dtype, None if operand == ROWS.TOP else words)}
    noise = block_codes.UP if operand == ROWS.TOP else block_codes.noise_of(words)
    codes, new_scales = block_codes.encode(x, len(scales), operand == ROWS.M, noise, moment.dtype == torch.int8)
    return {operand: codes, layouts.SCALES_OF[operand]: new_scales}


def _load_weight(layout: KernelLayout, tensors: Tensors) -> torch.Tensor:
    param, extra = tensors[ROWS.PARAM], tensors[ROWS.EXTRA]
    assert param is not None
    if extra is None or layout.master in (layouts.NO_MASTER, layouts.RESULT):
        return param.float()
    return join_master(param, extra) if layout.master in layouts.REMAINDERS else extra


def _store_weight(w: torch.Tensor, layout: KernelLayout, words: torch.Tensor | None) -> dict[int, torch.Tensor]:
    if layout.master in layouts.REMAINDERS:
        param, remainder = split_master(w, layouts.REMAINDERS[layout.master], words)
        return {ROWS.PARAM: param, ROWS.EXTRA: remainder}
    if layout.master == layouts.FULL_MASTER:
        return {ROWS.EXTRA: w, ROWS.PARAM: w.to(layout.param)}
    return {ROWS.PARAM: _rounded(w, layout.param, None if layout.master == layouts.RESULT else words)}


def _update(family: Family, layout: KernelLayout, tensors: Tensors, row: torch.Tensor, words: list[Any]) -> None:
    """One tensor's step; `row` is that of its hyper numbers, `words` are its random bits by draw."""
    grad, largest = tensors[ROWS.GRAD], LARGEST_POSITIVE if layout.coded else layouts.MAX
    assert grad is not None

    def stored(v: torch.Tensor) -> torch.Tensor:
        exact = not (layout.coded or layout.stochastic)  # a maximum is then that of fp32 numbers, rounded itself
        return v if exact else _load_moment(_store_moment(v, ROWS.V, tensors, words[2]), ROWS.V)

    skip, *numbers = row.unbind()
    operands = range(ROWS.M, ROWS.M + layout.moments)
    before = {operand: tensor for operand, tensor in enumerate(tensors) if tensor is not None}
    moments = [_load_moment(before, operand) for operand in operands]
    weight, hyper = _load_weight(layout, tensors), family.hyper(*numbers)
    w, *moments = family.rule(layout, weight, grad.float(), moments, hyper, largest, stored)
    after = _store_weight(w, layout, words[0])
    for operand, x in zip(operands, moments, strict=True):
        after |= _store_moment(x, operand, tensors, words[min(operand - ROWS.M + 1, 2)])
    for operand, value in after.items():
        before[operand].copy_(torch.where(skip != 0, before[operand], value))


def step(family: Family, batch: Batch, groups: torch.Tensor, control: Control) -> None:
    if family.prepares:
        _prepare(family, batch, groups, control)
    for index, row in enumerate(batch.hyper):
        tensors = [tensors[index] if tensors else None for tensors in batch.lists]
        tensors += [None] * (len(ROWS) - len(tensors))
        if batch.table is not None:  # elements in the order of memory, whatever the strides
            tensors[: ROWS.STEP] = [t if t is None else t.as_strided((t.numel(),), (1,)) for t in tensors[: ROWS.STEP]]
        if not (batch.layout.coded and batch.lists[ROWS.PARAM][index].numel() == 0):
            _update(family, batch.layout, tensors, row, _random_words(batch, index))


def own_operations_step(family: Family, batch: Batch, groups: torch.Tensor, control: Control) -> None:
    """`step` on tensors without memory. If some are fake, all must be: real ones among them are wrapped."""
    with own_operations([tensor for tensors in batch.lists for tensor in tensors]) as mode:

        def as_fake(tensor: Any) -> Any:
            real = not (mode is None or tensor is None or hasattr(tensor, "fake_mode"))
            return mode.from_tensor(tensor) if real else tensor

        lists = [list(map(as_fake, tensors)) for tensors in batch.lists]
        copy = Batch(batch.layout, None, lists, as_fake(batch.groups), as_fake(batch.hyper))
        step(family, copy, as_fake(groups), Control(*map(as_fake, control)))
