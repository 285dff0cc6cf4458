"""Adam's kernels: one variant per layout, and the kernel that prepares a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels import adam
from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, SPLIT24_MASTER, SPLIT_MASTER, Layout
from halfstep.kernels.backend import TRITON_NAMES
from halfstep.kernels.multi_tensor import FLOATS, TensorTable
from halfstep.kernels.optimizer.launch import Family
from halfstep.numerics.state_layout import ADAM, MASTERS, StateLayout


def name(layout: Any) -> str:
    """The name of any optimizer's layout in the audit."""
    state = "8-bit" if layout.coded else TRITON_NAMES[layout.state]
    master = list(MASTERS)[layout.master] or "no"
    dtypes = f"{TRITON_NAMES[layout.param]} param, {TRITON_NAMES[layout.grad]} grad, {state} state, {master} master"
    flags = {**layout.options._asdict(), "STOCHASTIC": layout.stochastic}
    return ", ".join([dtypes, *(flag.lower() for flag, present in flags.items() if present)])


def variant(kernels: Any, layout: Any, names: tuple[str, ...]) -> Variant:
    """A step of one tensor by an optimizer's kernels, with the bytes that its layout moves, except those of scales."""
    state = "8bit" if layout.coded else TRITON_NAMES[layout.state]
    master, moments = list(MASTERS)[layout.master], names[: layout.moments]
    read, written = StateLayout(TRITON_NAMES[layout.param], master, state, moments, layout.stochastic).moved()
    return step_variant(kernels.FAMILY, layout, name(layout), read + layout.grad.itemsize, written)


def step_variant(family: Family, layout: Any, title: str, read: float, written: float) -> Variant:
    # Paths with codes: two tiles per iteration (one on AMD GPUs) for rows of full blocks, one for multiples of 16.
    copies, on = (3, {"gfx942": 2}) if layout.coded else (1, {})
    return Variant(family.kernel, title, partial(_step, family, layout), read, written, copies=copies, copies_on=on)


def _step(family: Family, layout: Any) -> None:
    """Launch a step; the compiled kernel depends only on the layout."""
    table = TensorTable(layout.sizes([(1, 128)]), layout.operands, layout.chunk, torch.device("cpu"))
    hyper = torch.empty(1, family.hyper_columns, dtype=torch.float32, device="cpu")
    groups = torch.empty(1, family.group_columns, dtype=torch.float64, device="cpu")
    of_group = torch.zeros(1, dtype=torch.int64, device="cpu")
    family.step(adam.Batch(layout, table, [], of_group, hyper), groups, adam.Control())


def amp_step(max_grad_norm: float | None = None, **scaling: Any) -> None:
    """A step of AdamW with a loss scaler, created with the options `scaling`."""
    parameter = torch.nn.Parameter(torch.zeros(64, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    scaler = halfstep.GradScaler("cpu", **scaling)
    scaler.scale(torch.zeros((), device="cpu"))
    scaler.step(halfstep.AdamW([parameter], max_grad_norm=max_grad_norm))
    scaler.update()


def _layouts() -> list[Layout]:
    f32, f16, bf16 = FLOATS
    layouts = [Layout(f32, f32, f32, NO_MASTER, amsgrad, l2) for amsgrad, l2 in product((False, True), repeat=2)]
    layouts += [Layout(f16, grad, f32, FULL_MASTER, False, False) for grad in (f16, f32)]
    layouts += [Layout(bf16, grad, f32, master, False, False) for grad in (bf16, f32) for master in (0, 1, 2)]
    layouts += [Layout(bf16, bf16, bf16, master, False, False) for master in (0, 2)]
    layouts += [Layout(bf16, bf16, f32, SPLIT_MASTER, True, False)]
    layouts += [Layout(param, param, f32, NO_MASTER, False, False, stochastic=True) for param in (f16, bf16)]
    layouts += [Layout(bf16, bf16, bf16, master, False, False, stochastic=True) for master in (NO_MASTER, SPLIT_MASTER)]
    layouts += [Layout(bf16, bf16, bf16, NO_MASTER, True, False, stochastic=True)]
    layouts += [Layout(bf16, bf16, state, SPLIT24_MASTER, False, False, stochastic=True) for state in (f32, bf16)]
    layouts += [Layout(bf16, bf16, torch.uint8, SPLIT_MASTER, amsgrad, False) for amsgrad in (False, True)]
    layouts += [Layout(bf16, bf16, torch.uint8, master, False, False, stochastic=True) for master in (0, 2, 3)]
    layouts += [Layout(f32, f32, torch.uint8, NO_MASTER, False, False)]
    return layouts


def variants() -> Iterator[Variant]:
    """Each layout once, and the kernel that prepares a step, without and with clipping."""
    for layout in _layouts():
        yield variant(adam, layout, (*ADAM, "max_exp_avg_sq"))
    yield Variant(adam.FAMILY.prepare_kernel, "prepare", amp_step)
    yield Variant(adam.FAMILY.prepare_kernel, "prepare, clip", partial(amp_step, 1.0))
