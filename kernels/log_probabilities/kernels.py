"""Triton kernels of rule.py, their launches, and those of kernels/softmax.cpp on a CPU.

`chunk_kernel` reads the logits: a program takes up to four chunks of 1,024 columns of a row, two per warp, so that few
long rows fill a GPU too. `row_kernel`, a warp for each row, puts the chunks together. `gradient_kernel` reads the
logits again, element by element.

The chunks of a program are blocks of shape (CHUNKS, 32, VECTOR), one after the other along the row: a lane has 16 bytes
of each, eight or four neighbouring columns. So most of a sum is within the thread, and the rest within the warp. Whole
vectors are loaded where all rows begin and end at multiples of 16 bytes (ALIGNED).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels import exponential, native
from halfstep.kernels.backend import EXACT, MOST_THREADS, by_address, constant, jit, launch_kernel, most_warps, tl
from halfstep.kernels.log_probabilities.rule import CHUNK, Options, Row
from halfstep.kernels.multi_tensor import DTYPE_CODES, address
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.softmax import arithmetic

LONGEST = 2**31 - 2**20  # columns, rows and chunks, which are counted in 32 bits
MOST_CHUNKS = 4  # of a program
_CHUNK, _LOWEST = constant(CHUNK), arithmetic.LOWEST


class Form(NamedTuple):
    VECTOR: int  # neighbouring columns of a thread, 8, or 4 in fp32
    ALIGNED: bool  # rows are whole vectors
    SCALED: bool  # by a temperature other than 1
    ENTROPY: bool
    MEAN: bool
    EXACT: bool


@jit
def _exp(d, form: tl.constexpr):
    if form.EXACT:
        return exponential.exp(d, False)
    else:
        return arithmetic.exponential(d)


@jit
def _neighbours(terms, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    even, odd = tl.split(tl.reshape(terms, (CHUNKS, 32, SIZE // 2, 2)))
    return even + odd


@jit
def _chunk_sum(terms, CHUNKS: tl.constexpr, VECTOR: tl.constexpr):
    """`rule.chunk_sum` of the blocks of chunks, of shape (CHUNKS, 1, 1).

    Halving from the top, as softmax's `folded`, would leave the neighbours of a thread until last: threads would
    exchange eight numbers instead of one, and the forward would take 12.5 instructions per logit instead of 10.2.
    """
    if VECTOR == 8:
        total = (terms[0] + terms[1]) + (terms[2] + terms[3])  # bits 8 and 9 of the column
        total = _neighbours(_neighbours(total, CHUNKS, 8), CHUNKS, 4)
        even, odd = tl.split(total)
        total = tl.sum(tl.reshape(even + odd, (CHUNKS, 2, 16)), axis=1)  # bit 7
    else:
        total = (terms[0] + terms[2]) + (terms[4] + terms[6])
        above = (terms[1] + terms[3]) + (terms[5] + terms[7])  # the same with bit 7
        even, odd = tl.split(_neighbours(total, CHUNKS, 4))
        total = tl.sum(tl.reshape(even + odd, (CHUNKS, 16, 2)), axis=2)  # bit 2
        even, odd = tl.split(_neighbours(above, CHUNKS, 4))
        total += tl.sum(tl.reshape(even + odd, (CHUNKS, 16, 2)), axis=2)
    for bit in tl.static_range(4):  # bits 6 to 3, of the lane
        total = tl.sum(tl.reshape(total, (CHUNKS, 2, 8 >> bit)), axis=1)
    return tl.reshape(total, (CHUNKS, 1, 1))


@jit
def _row_offset(row, inner, stride_a, stride_b):
    """Where a row begins, in elements: rows are numbered over two dimensions, of which the inner has so many."""
    return (row // inner).to(tl.int64) * stride_a + (row % inner).to(tl.int64) * stride_b


@jit
def _first_chunk(columns, CHUNKS: tl.constexpr):
    """The row of a program and the first of its chunks."""
    programs = tl.cdiv(tl.cdiv(columns, _CHUNK), CHUNKS)
    return tl.program_id(0) // programs, tl.program_id(0) % programs * CHUNKS


@jit
def _lanes(PART: tl.constexpr, VECTOR: tl.constexpr):
    return (PART * 32 + tl.arange(0, 32)[None, :, None]) * VECTOR


@jit
def _columns(PART: tl.constexpr, VECTOR: tl.constexpr):
    return _lanes(PART, VECTOR) + tl.arange(0, VECTOR)[None, None, :]


@jit
def _at(base, begin, PART: tl.constexpr, form: tl.constexpr):
    """Pointers to a block of chunks that begin at `begin` elements from `base`."""
    bytes: tl.constexpr = (form.VECTOR if form.ALIGNED else 1) * (base.dtype.element_ty.primitive_bitwidth // 8)
    vectors = tl.multiple_of(base + (begin + _lanes(PART, form.VECTOR)), [bytes, bytes, bytes])
    return vectors + tl.arange(0, form.VECTOR)[None, None, :]


@jit
def _inside(columns, PART: tl.constexpr, form: tl.constexpr):
    """Which elements of a block exist: asked once for a vector, where all of its elements do or none."""
    if form.ALIGNED:
        return _lanes(PART, form.VECTOR) < columns
    else:
        return _columns(PART, form.VECTOR) < columns


@jit
def _scaled(x, scale, form: tl.constexpr):
    return to_float32(x) * scale if form.SCALED else to_float32(x)


@functools.partial(
    jit,
    do_not_specialize=["logits", "targets", "planes", "rows", "columns", "inner", "x_a", "x_b", "ignore_index"],
)
def chunk_kernel(
    logits, targets, planes, rows, columns, inner, x_a, x_b, scale, ignore_index,
    form: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The maximum and the sums of chunks, each of shape (rows, chunks) in `planes`, one after the other."""
    row, first = _first_chunk(columns, CHUNKS)
    begin = first * _CHUNK
    chunk = tl.arange(0, CHUNKS)[:, None, None]
    size = tl.where(tl.load(targets + row) != ignore_index, columns - begin, 0) - chunk * _CHUNK
    logits += _row_offset(row, inner, x_a, x_b) + begin
    PARTS: tl.constexpr = 32 // form.VECTOR
    zs = ()
    for part in tl.static_range(PARTS):
        x = tl.load(_at(logits, chunk * _CHUNK, part, form), mask=_inside(size, part, form), other=float("-inf"))
        zs += (_scaled(x, scale, form),)  # type: ignore[assignment]
    tops = zs[0]  # type: ignore[misc]
    for part in tl.static_range(1, PARTS):
        tops = tl.maximum(tops, zs[part])
    top = tl.max(tl.max(tops, axis=2, keep_dims=True), axis=1, keep_dims=True)
    top = tl.maximum(top, _LOWEST)
    es, moments, means = (), (), ()
    for part in tl.static_range(PARTS):
        d = zs[part] - top
        e = _exp(d, form)
        es += (e,)  # type: ignore[assignment]
        if form.ENTROPY:
            moments += (e * tl.maximum(d, _LOWEST),)  # type: ignore[assignment]
        if form.MEAN:
            means += (tl.where(_inside(size, part, form), d, 0.0),)  # type: ignore[assignment]
    chunks = tl.cdiv(columns, _CHUNK)
    plane = rows.to(tl.int64) * chunks
    exists = first + chunk < chunks
    planes += row.to(tl.int64) * chunks + first + chunk
    tl.store(planes, top, mask=exists)
    tl.store(planes + plane, _chunk_sum(es, CHUNKS, form.VECTOR), mask=exists)
    if form.ENTROPY:
        tl.store(planes + 2 * plane, _chunk_sum(moments, CHUNKS, form.VECTOR), mask=exists)
    if form.MEAN:
        tl.store(planes + 3 * plane, _chunk_sum(means, CHUNKS, form.VECTOR), mask=exists)


@functools.partial(
    jit,
    do_not_specialize=["logits", "targets", "planes", "out", "rows", "columns", "inner", "x_a", "x_b", "ignore_index"],
)
def row_kernel(logits, targets, planes, out, rows, columns, inner, x_a, x_b, scale, ignore_index, form: tl.constexpr):
    """The results of a row from those of its chunks, into `out` of shape (6, rows)."""
    row = tl.program_id(0)
    chunks = tl.cdiv(columns, _CHUNK)
    plane = rows.to(tl.int64) * chunks
    chunk = planes + row.to(tl.int64) * chunks
    tops = tl.full((1, 32, 4), _LOWEST, tl.float32)
    for first in range(0, chunks, 128):
        at = first + _columns(0, 4)
        tops = tl.maximum(tops, tl.load(chunk + at, mask=at < chunks, other=_LOWEST))
    top = tl.max(tl.max(tops, axis=2, keep_dims=True), axis=1, keep_dims=True)
    total = tl.full((1, 1, 1), 0.0, tl.float32)
    moment = tl.zeros_like(total)
    mean = tl.zeros_like(total)
    for first in range(0, chunks, _CHUNK):
        sums, moments, means = (), (), ()
        for part in tl.static_range(8):
            at = first + _columns(part, 4)
            exists = at < chunks
            offset = tl.load(chunk + at, mask=exists, other=top) - top  # 0 where there is no chunk, as its sums are
            s = tl.load(chunk + plane + at, mask=exists, other=0.0)
            w = _exp(offset, form)
            sums += (w * s,)  # type: ignore[assignment]
            if form.ENTROPY:
                t = tl.load(chunk + 2 * plane + at, mask=exists, other=0.0)
                moments += (tl.where(w == 0.0, 0.0, w * (t + offset * s)),)  # type: ignore[assignment]
            if form.MEAN:
                u = tl.load(chunk + 3 * plane + at, mask=exists, other=0.0)
                size = tl.maximum(tl.minimum(columns - at * _CHUNK, _CHUNK), 0).to(tl.float32)
                means += (u + size * offset,)  # type: ignore[assignment]
        total += _chunk_sum(sums, 1, 4)
        if form.ENTROPY:
            moment += _chunk_sum(moments, 1, 4)
        if form.MEAN:
            mean += _chunk_sum(means, 1, 4)
    nothing = total == 0.0
    top = tl.where(total == total, top, total)
    total = tl.where(nothing, 1.0, total)
    log_sum = exponential.log(total)
    target = tl.load(targets + row).to(tl.int64)
    counts = target != ignore_index
    valid = (target >= 0) & (target < columns)
    x = tl.load(logits + (_row_offset(row, inner, x_a, x_b) + target), mask=valid & counts, other=0.0)
    selected = tl.where(valid, (_scaled(x, scale, form) - top) - log_sum, float("nan"))
    entropy = tl.zeros_like(total)
    average = tl.zeros_like(total)
    if form.ENTROPY:
        entropy = log_sum - tl.div_rn(moment, total)
    if form.MEAN:
        average = tl.div_rn(mean, columns.to(tl.float32)) - log_sum
    logsumexp = tl.where(nothing, float("-inf"), top + log_sum)
    results = (selected, logsumexp, top, log_sum, entropy, average)
    at = out + row + tl.arange(0, 1)[None, None, :]
    for index in tl.static_range(6):
        tl.store(at + index * rows.to(tl.int64), tl.where(counts, results[index], 0.0))


@functools.partial(
    jit,
    do_not_specialize=[
        *("grads", "logits", "targets", "results", "dx", "rows", "columns", "inner"),
        *("x_a", "x_b", "dx_a", "dx_b", "ignore_index"),
    ],
)
def gradient_kernel(
    grads, logits, targets, results, dx, rows, columns, inner, x_a, x_b, dx_a, dx_b, scale, ignore_index,
    form: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`rule.backward`; `dx` may be `logits`."""
    row, first = _first_chunk(columns, CHUNKS)
    begin = first * _CHUNK
    chunk = tl.arange(0, CHUNKS)[:, None, None] * _CHUNK
    target = tl.load(targets + row)
    counts = target != ignore_index
    logits += _row_offset(row, inner, x_a, x_b) + begin
    dx += _row_offset(row, inner, dx_a, dx_b) + begin
    results += row
    grads += row
    count = rows.to(tl.int64)
    selected = tl.load(results)
    logsumexp = tl.load(results + count)
    top = tl.load(results + 2 * count)
    log_sum = tl.load(results + 3 * count)
    a = tl.where(selected == float("-inf"), 0.0, tl.load(grads))
    a = tl.where(counts, tl.where(selected == selected, a, selected), 0.0)
    b = tl.where(counts & (logsumexp != float("-inf")), tl.load(grads + count), 0.0)
    if form.SCALED:
        a *= scale
        b *= scale
    factor = b - a
    if form.ENTROPY:
        entropy = tl.load(results + 4 * count)
        c = tl.where(counts & (logsumexp != float("-inf")), tl.load(grads + 4 * count), 0.0)
        c = c * scale if form.SCALED else c
    if form.MEAN:
        q = tl.where(counts & (tl.load(results + 5 * count) != float("-inf")), tl.load(grads + 5 * count), 0.0)
        q = q * scale if form.SCALED else q
        factor -= q
        share = tl.div_rn(q, columns.to(tl.float32))
    size = columns - begin - chunk
    read = tl.where(counts, size, 0)
    target = (target - begin).to(tl.int32)  # where that loses bits, a is NaN or 0
    xs = ()  # all are read before the first is written, which may be over them
    for part in tl.static_range(32 // form.VECTOR):
        x = tl.load(_at(logits, chunk, part, form), mask=_inside(read, part, form), other=float("-inf"))
        xs += (x,)  # type: ignore[assignment]
    here = (target >= 0) & (target < CHUNKS * _CHUNK)
    for part in tl.static_range(32 // form.VECTOR):
        y = (_scaled(xs[part], scale, form) - top) - log_sum
        if form.ENTROPY:
            result = tl.where(y == float("-inf"), 0.0, _exp(y, form) * (factor - c * (y + entropy)))
        else:
            result = _exp(y, form) * factor
        if here:
            hit = tl.arange(0, form.VECTOR)[None, None, :] == target - chunk - _lanes(part, form.VECTOR)
            result = tl.where(hit, result + a, result)
        if form.MEAN:
            result += share
        result = from_float32(result, dx.dtype.element_ty)
        tl.store(_at(dx, chunk, part, form), result, mask=_inside(size, part, form))


# ------------------------------------------------------------------------------------------------------------- launches


class Rows(NamedTuple):
    """Rows of logits, numbered over two dimensions."""

    tensor: torch.Tensor
    inner: int
    stride_a: int
    stride_b: int

    def is_aligned(self) -> bool:
        size = self.tensor.element_size()
        numbers = address(self.tensor) // size, self.tensor.shape[-1], *self[2:]
        return all(number * size % 16 == 0 for number in numbers)


def _as_rows(logits: torch.Tensor) -> Rows:
    """Rows of logits of any strides; a copy only where columns are apart, or rows have more than two strides."""
    columns = logits.shape[-1]
    if not logits.is_neg() and (logits.stride(-1) == 1 or columns == 1):
        for outer in (1, logits.shape[0] if logits.ndim > 1 else 1):
            try:
                view = logits.view(outer, -1, columns)
            except RuntimeError:
                continue
            return Rows(logits, *view.shape[1:2], *view.stride()[:2])
    return _as_rows(logits.resolve_neg().contiguous())


def _launch(
    kernel: Any, chunks: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int], options: Options, form: Form
) -> None:
    """Launch a kernel for rows of so many chunks. `numbers` begin with the number of rows."""
    device, of_program = tensors[0].device, min(MOST_CHUNKS, 1 << (chunks - 1).bit_length())
    warps = of_program // 2  # with more, what threads have in common counts
    constants: dict[str, Any] = {"form": form} | ({} if kernel is row_kernel else {"CHUNKS": of_program})
    constants |= {"num_warps": max(1, warps * 32 * most_warps(device) // MOST_THREADS), **EXACT}
    wide = tuple(abs(number) >= 2**31 for number in (*numbers, options.ignore_index))
    operands = (*map(by_address, tensors), *numbers, 1.0 / options.temperature, options.ignore_index)
    programs = numbers[0] * -(-chunks // of_program)
    launch_kernel(kernel, device, programs, operands, constants, wide, *(tensor.dtype for tensor in tensors))


def _form(logits: torch.Tensor, options: Options, *rows: Rows) -> Form:
    aligned = all(layout.is_aligned() for layout in rows)
    return Form(16 // logits.element_size(), aligned, options.temperature != 1.0, *options[2:])


def _call(name: str, tensors: Sequence[torch.Tensor], rows: int, x: Rows, dx: Rows, options: Options) -> None:
    """Run the C++ code, which computes the exact form, also where it is not asked for."""
    strides = x.inner, x.stride_a, x.stride_b, dx.stride_a, dx.stride_b
    flags = options.entropy, options.mean, DTYPE_CODES[x.tensor.dtype], native.threads()
    statistics = rows, x.tensor.shape[-1], *strides, options.ignore_index, *flags
    function = getattr(native.library("softmax"), f"halfstep_log_probabilities{name}")
    function(*map(address, tensors), (ctypes.c_int64 * len(statistics))(*statistics), 1.0 / options.temperature)


def forward(logits: torch.Tensor, targets: torch.Tensor, options: Options, on_cpu: bool) -> torch.Tensor:
    """`rule.forward`."""
    x, targets, rows, columns = _as_rows(logits), targets.contiguous(), targets.numel(), logits.shape[-1]
    chunks, device = -(-columns // CHUNK), logits.device
    results = torch.empty(len(Row._fields), *targets.shape, dtype=torch.float32, device=device)
    if on_cpu:
        _call("", (x.tensor, targets.long(), results), rows, x, x, options)
    elif rows:
        planes = 4 if options.mean else 3 if options.entropy else 2
        sums = torch.empty(planes, rows, chunks, dtype=torch.float32, device=device)
        tensors, numbers, form = (x.tensor, targets, sums), (rows, columns, *x[1:]), _form(logits, options, x)
        _launch(chunk_kernel, chunks, tensors, numbers, options, form)
        _launch(row_kernel, 1, (*tensors, results), numbers, options, form)
    return results


def backward(
    grads: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    results: torch.Tensor,
    options: Options,
    out: torch.Tensor,
    on_cpu: bool,
) -> None:
    """`rule.backward`. `out` is `logits` or contiguous."""
    x, rows, columns = _as_rows(logits), targets.numel(), logits.shape[-1]
    dx = x if out is logits else Rows(out, x.inner, x.inner * columns, columns)
    tensors = grads.contiguous(), x.tensor, targets.contiguous(), results.contiguous(), dx.tensor
    if on_cpu:
        _call("_backward", (*tensors[:2], tensors[2].long(), *tensors[3:]), rows, x, dx, options)
    elif rows:
        numbers, form = (rows, columns, *x[1:], *dx[2:]), _form(logits, options, x, dx)
        _launch(gradient_kernel, -(-columns // CHUNK), tensors, numbers, options, form)
    if dx.tensor is not out:
        out.copy_(dx.tensor)
