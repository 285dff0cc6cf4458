"""Which implementation casts to a format of blocks, and the launches: one per dtype of a list."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import EXACT, TRITON_NAMES, launch_kernel, resolve
from halfstep.kernels.block_cast import kernels
from halfstep.kernels.block_cast.kernels import COLUMNS, ROWS, SQUARE, TABLE_ROWS, Form
from halfstep.kernels.block_cast.rule import carry_and_emax, default_global_scale, reference
from halfstep.kernels.formats import ELEMENTS, BlockRow, Blocks, block_axes
from halfstep.kernels.multi_tensor import DTYPE_CODES, TableCache, TensorTable, address, has_memory, own_operations
from halfstep.kernels.philox import reference_words, unspecialized
from halfstep.kernels.rounding import STOCHASTIC

ELEMENTS_OF_PROGRAM = 4096
_CPP_ELEMENTS = ("e4m3fn", "e5m2", "e2m3fn", "e3m2fn", "e2m1fn")  # as in block_cast.cpp
_LEAST = 127 - 117 << 23  # the pattern of LEAST_GLOBAL, which no elements have
_MOST_SCALES = 2**31 - ELEMENTS_OF_PROGRAM  # of a tensor: kernels count them in 32 bits
_tables = {scales: TableCache(operands=len(TABLE_ROWS), chunk=scales) for scales in (1, 32, 64, 128, 256)}


class _Job(NamedTuple):
    """A tensor to cast, contiguous, and what it is cast to."""

    source: torch.Tensor
    codes: torch.Tensor  # uint8
    scales: torch.Tensor  # uint8
    shape: tuple[int, int, int, int]  # as kernels.py has it
    blocks: int
    pairs: int
    position: int  # in the list, which names its random words
    offset: int


def _scales_shape(x: torch.Tensor, axes: tuple[int, ...], row: BlockRow) -> list[int]:
    blocked = [axis % x.ndim for axis in axes]
    return [-(-size // row.size) if axis in blocked else size for axis, size in enumerate(x.shape)]


def _job(x: torch.Tensor, axes: tuple[int, ...], row: BlockRow, position: int, offset: int) -> _Job:
    sizes, packed, (*others, last) = x.shape, row.element == "e2m1fn", sorted(axis % x.ndim for axis in axes)
    codes, scales = list(sizes), _scales_shape(x, axes, row)
    codes[axes[-1]] //= 2 if packed else 1
    inner, first, middle = prod(sizes[last + 1 :]), 1, 1
    blocks = ROWS if inner == 1 else COLUMNS
    if others:
        blocks, first, middle = SQUARE, sizes[others[0]], prod(sizes[others[0] + 1 : last])
    pairs = -1 if not packed else blocks if not others else int(axes[-1] % x.ndim == last)
    to, scales_to = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in (codes, scales))
    shape, rows = (first, middle, sizes[last], inner), x.resolve_neg().contiguous()
    return _Job(rows, to, scales_to, shape, blocks, pairs, position, offset)


def _by_rule(
    x: torch.Tensor, axes: tuple[int, ...], row: BlockRow, rule: str, rounding: int, saturate: bool,
    words: torch.Tensor | None, scale: torch.Tensor | None,
) -> Blocks:  # fmt: skip
    """`rule.reference` with codes that share bytes, in uint8."""
    codes, scales, scale = reference(x, row, rule, axes, rounding, saturate, words, scale)
    if row.element == "e2m1fn":
        pairs = codes.movedim(axes[-1], -1).unflatten(-1, (-1, 2))
        codes = (pairs[..., 0] | pairs[..., 1] << 4).movedim(-1, axes[-1]).contiguous()
    return Blocks(codes, scales, scale)


def _native(
    jobs: list[_Job], form: Form, row: BlockRow, scale: torch.Tensor | None, seed: int
) -> Sequence[torch.Tensor | None]:
    """Cast tensors of one dtype and one `form` on the CPU. Returns the global scale of each."""
    whole, at = None, None
    if form.FRACTION:
        whole = torch.stack([default_global_scale(job.source, row) if scale is None else scale for job in jobs])
        at = address(whole)
    numbers = DTYPE_CODES[jobs[0].source.dtype], _CPP_ELEMENTS.index(form.ELEMENT), *map(int, form[2:])
    options = (ctypes.c_int32 * len(numbers))(*numbers)
    table = _table(jobs, form)
    function = native.library("block_cast").halfstep_block_cast
    function(*table.addresses, ctypes.addressof(options), at, seed, native.threads())
    return [None] * len(jobs) if whole is None else whole.unbind()


def _table(jobs: list[_Job], form: Form) -> TensorTable:
    numbers = [[job.source.numel() for job in jobs], *map(list, zip(*(job.shape for job in jobs), strict=True))]
    numbers += [[job.position for job in jobs], [job.offset for job in jobs]]
    tensors = ([getattr(job, name) for job in jobs] for name in ("scales", "source", "codes"))
    return _tables[form.SCALES].table(*tensors, numbers=numbers)


def _launch(
    jobs: list[_Job], form: Form, row: BlockRow, scale: torch.Tensor | None, seed: int
) -> Sequence[torch.Tensor | None]:
    """As `_native`, by Triton's kernels."""
    device = jobs[0].source.device
    seeds = unspecialized(seed & 0xFFFFFFFF), unspecialized(seed >> 32)
    constants = {"FORM": form, "num_warps": 4 if form.BLOCKS == ROWS else 1, **EXACT}
    finding: dict[str, Any] = {"SOURCE": form.SOURCE, "num_warps": 4, **EXACT}
    whole = jobs[0].scales if scale is None else scale  # or any address
    if not form.GIVEN:
        whole = torch.full((len(jobs), 2), _LEAST, dtype=torch.int64, device=device)
    total = sum(job.scales.numel() for job in jobs)
    if total and len(jobs) == 1 and not jobs[0].position:
        (job,) = jobs
        source, codes, scales, at = map(address, (job.source, job.codes, job.scales, whole))
        if not form.GIVEN:
            numel, finding = job.source.numel(), {"BLOCK": ELEMENTS_OF_PROGRAM, **finding}
            programs = -(-numel // ELEMENTS_OF_PROGRAM)
            launch_kernel(kernels.largest_kernel, device, programs, (source, at, numel), finding, numel < 2**31)
        operands = source, codes, scales, at, total, *job.shape, unspecialized(job.offset), *seeds
        wide = tuple(size < 2**31 for size in job.shape)
        launch_kernel(kernels.block_cast_kernel, device, -(-total // form.SCALES), operands, constants, wide)
    elif total:
        table = _table(jobs, form)
        listed = *table.operands, address(whole)
        if not form.GIVEN:
            each = form.SIZE**2 if form.BLOCKS == SQUARE else form.SIZE
            finding = {"SCALES": form.SCALES, "EACH": each, **finding}
            launch_kernel(kernels.multi_largest_kernel, device, table.chunks, listed, finding)
        launch_kernel(kernels.multi_block_cast_kernel, device, table.chunks, (*listed, *seeds), constants)
    return [scale] * len(jobs) if form.GIVEN else whole.view(torch.float32)[:, 2].unbind()


@torch.no_grad()
def cast_blocks(
    tensors: Sequence[torch.Tensor],
    row: BlockRow,
    rule: str,
    axis: int | tuple[int, int] | None,
    rounding: int,
    saturate: bool,
    seed: int,
    offsets: Sequence[int],
    global_scale: torch.Tensor | float | None = None,
) -> list[Blocks]:
    """`reference` of each tensor in the dtypes of `halfstep.cast`, which documents the arguments."""
    every = [block_axes(axis, x.ndim) for x in tensors]
    scale: torch.Tensor | None = None
    if global_scale is not None:
        scale = torch.as_tensor(global_scale, dtype=torch.float32, device=tensors[0].device)
        if not row.has_global_scale or scale.numel() != 1:
            raise ValueError(
                f"Expected global_scale to be {'one number' if row.has_global_scale else 'None'} for {row.name}, but "
                f"got shape {tuple(scale.shape)}: leave it out for the default"
            )
        scale = scale.reshape(())
    for x, axes in zip(tensors, every, strict=True):
        if row.element == "e2m1fn" and x.shape[axes[-1]] % 2:
            raise ValueError(
                f"Expected an even number of elements along axis {axes[-1]} for {row.name}, two of which share a byte, "
                f"but got {x.shape[axes[-1]]}: pad x"
            )
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    in_memory = not traced and all(map(has_memory, tensors))
    most = max(prod(_scales_shape(x, axes, row)) for x, axes in zip(tensors, every, strict=True))
    implementation = resolve(tensors[0].device, "block_cast") if in_memory and most <= _MOST_SCALES else "reference"
    results: dict[int, Blocks] = {}
    if implementation == "reference":
        with nullcontext() if traced or in_memory else own_operations(list(tensors)):
            for position, (x, axes, offset) in enumerate(zip(tensors, every, offsets, strict=True)):
                words = None
                if rounding == STOCHASTIC:
                    index = torch.arange(offset, offset + x.numel(), dtype=torch.int64, device=x.device)
                    words = reference_words(index, seed, 0, position).view(x.shape)
                results[position] = _by_rule(x, axes, row, rule, rounding, saturate, words, scale)
    else:
        run = _native if implementation == "native" else _launch
        groups: dict[tuple[str, int, int], list[_Job]] = {}
        for position, (x, axes, offset) in enumerate(zip(tensors, every, offsets, strict=True)):
            job = _job(x, axes, row, position, offset)
            groups.setdefault((TRITON_NAMES[x.dtype], job.blocks, job.pairs), []).append(job)
        for (source, blocks, pairs), jobs in groups.items():
            # Random words take registers, and in lists, sizes of 64 bits do.
            few = 2 if rounding == STOCHASTIC and (blocks == COLUMNS or len(jobs) > 1) else 1
            scales = {ROWS: ELEMENTS_OF_PROGRAM // row.size // few, COLUMNS: 64 // few, SQUARE: 1}[blocks]
            carry, emax = (0, 0) if row.has_global_scale else carry_and_emax(row, rule)
            fraction, given = row.has_global_scale, scale is not None or not row.has_global_scale
            shape = source, row.element, row.size, blocks, pairs, scales
            form = Form(*shape, fraction, given, carry, emax, rounding, saturate)
            for job, g in zip(jobs, run(jobs, form, row, scale, seed), strict=True):
                results[job.position] = Blocks(job.codes, job.scales, g)
    dtype = torch.float8_e4m3fn if row.has_global_scale else torch.float8_e8m0fnu
    in_order = (results[position] for position in range(len(tensors)))
    return [Blocks(codes.view(ELEMENTS[row.element].dtype), scales.view(dtype), g) for codes, scales, g in in_order]
