"""Unscale gradients, find non-finite elements and sum the squares, in one pass over a list of tensors.

    y = x * inv_scale                      in fp32, rounded once to x's dtype if it is written back. Callers may pass
                                           the loss scale instead: inv_scale is then `loss_scale.inverse` of it
    flag_t = 1 if y of tensor t holds an Inf, + 2 if it holds a NaN
    found_inf = 1.0 if any flag is set, else 0.0
    sum_of_squares = sum over all y of y^2

Bytes per element: a check reads each element and writes nothing (2 or 4 B); unscaling in place also writes it (4 or
8 B).

The check examines `y` and not `x`, because with a loss scale below 1 a finite gradient can overflow when it is
unscaled. It compares bits as integers, since a floating-point maximum may lose a NaN, and since the norm of finite
gradients can overflow.

**The sum of squares has the same bits in every implementation.** Each tensor is divided into chunks of 4096 elements. A
chunk is multiplied by a power of two that brings its largest magnitude into [1, 4). This is exact: no square overflows,
and squares that underflow are too small to change the sum. The elements are squared in fp32 and summed in a fixed tree:
element i and element i + 2048, then i and i + 1024, then neighbours 2i and 2i + 1 until one sum is left. A thread of a
GPU holds neighbours from each quarter, and so adds most of the tree in its registers; a CPU adds the quarters as
vectors. The sum of the chunk is scaled back in fp64, whose range contains the square of every fp32 number. The sums of
the chunks are added in fp64 by 1024 lanes: lane j adds chunks j, j + 1024, ... in order, and the lanes are added in the
same tree. A short chunk is padded with zeros, which change no bit. The square of 1e30 is therefore 1e60, which fp32
cannot hold, and that of 1e-30 is 1e-60.

A call needs one launch per dtype, and one that combines the sums of the chunks and the flags of the tensors. These
intermediate results, one fp64 number per chunk and one int32 per tensor, are stored in buffers that each thread and
stream reuses. The last launch sets the flags to zero for the next call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import EXACT, jit, launch_kernel, most_warps, resolve, tl, triton_dtype
from halfstep.kernels.loss_scale import inverse, inverse_block
from halfstep.kernels.multi_tensor import (
    DTYPE_CODES,
    TableCache,
    TensorTable,
    address,
    alignments,
    all_flattened,
    all_have_memory,
    by_dtype,
    check_tensor_list,
    checked_addresses,
    own_operations,
)
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.streams import capturing, current_stream, to_device, upload
from halfstep.kernels.threads import threads

CHUNK = 4096
LANES = 1024
UNROLLED = 8  # chunks per lane and turn of the last launch, of whose loads ptxas has three to five under way at a time
# Checks take 8.9 instructions per bf16 element with 2 warps, 10.8 with 4, 18.9 with 8. With 2 warps, unscaling, which
# also stores, would need almost all registers of a thread.
CHECK_WARPS, UNSCALE_WARPS = 2, 4

_CPU = torch.device("cpu")

HAS_INF, HAS_NAN = 1, 2  # bits of a tensor's flag


class Verdict(NamedTuple):
    """The result of a check of gradients, on their device.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any element is non-finite, otherwise 0.0.
        sum_of_squares: 0-dim fp64, over all elements.
        flags: int32, one per tensor: 0 if it is finite, 1 if it holds an Inf, 2 if it holds a NaN, 3 if both. Empty in
            a verdict that combines those of several devices or ranks.
    """

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor
    flags: torch.Tensor

    def first_bad(self) -> torch.Tensor:
        """0-dim int64: the index of the first tensor that holds a non-finite element; -1 if none does."""
        bad = self.flags != 0
        # Entry 0 is set if no tensor is bad; the others are moved up by one.
        return torch.cat([~bad.any().reshape(1), bad]).int().argmax() - 1

    @classmethod
    def empty(cls, tensors: int, device: torch.device) -> Verdict:
        """An uninitialized verdict on `tensors` tensors."""
        return cls(
            torch.empty((), dtype=torch.float32, device=device),
            torch.empty((), dtype=torch.float64, device=device),
            torch.empty(tensors, dtype=torch.int32, device=device),
        )


class Tally(NamedTuple):
    """How often each of the same tensors was non-finite in the checks of successive steps.

    Attributes:
        counts: int32 of shape (tensors, 4): steps with an Inf, steps with a NaN, and the first and the last step with
            either. Steps are numbered from 1; 0 stands for none.
        step: int64, one element: the number of steps before this one.
    """

    counts: torch.Tensor
    step: torch.Tensor


class PartialCheck(NamedTuple):
    """An unfinished check: what `finish_parts` needs of each of its tensors.

    Attributes:
        dtypes: of the tensors.
        sums: fp64, the sum of each chunk of each tensor. Without access to memory, one sum per tensor.
        flags: int32 with one element, of each tensor.
        in_memory: whether kernels read the tensors.
    """

    dtypes: list[torch.dtype]
    sums: Sequence[torch.Tensor]
    flags: Sequence[torch.Tensor]
    in_memory: bool


class Unscaled(NamedTuple):
    """What `foreach_unscale_` returns.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any unscaled element is non-finite, otherwise 0.0.
        norm: 0-dim fp32, the 2-norm of all unscaled elements together.
    """

    found_inf: torch.Tensor
    norm: torch.Tensor


# --------------------------------------------------------------------------------------------------------- reference


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, whose size is a power of two of at least 4, in the tree of the module's docstring."""
    for _ in range(2):
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _reference_chunks(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each chunk of a flat fp32 tensor, the sum of squares in fp64 and the flag."""
    rows = torch.nn.functional.pad(y, (0, -y.numel() % CHUNK)).view(-1, CHUNK)
    magnitude = rows.view(torch.int32) & 0x7FFFFFFF
    biggest = magnitude.amax(1)
    flags = (magnitude == 0x7F800000).any(1) * HAS_INF + (biggest > 0x7F800000) * HAS_NAN
    exponent = (254 - (biggest >> 23)).clamp(1, 254)  # biased exponent of the power of two
    scaled = rows * (exponent << 23).view(torch.float32)[:, None]
    back = ((1023 + 2 * (127 - exponent.long())) << 52).view(torch.float64)
    return _tree_sum(scaled * scaled).double() * back, flags.int()


def _reference_pass(
    tensors: Sequence[torch.Tensor], inv_scale: torch.Tensor | None, write: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of all chunks and the flag of each tensor."""
    sums, flags = [], []
    for tensor in tensors:
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        y = flat.float() if inv_scale is None else flat.float() * inv_scale
        if write:
            flat.copy_(y)
            y = flat.float()
        chunk_sums, chunk_flags = _reference_chunks(y)
        sums.append(chunk_sums)
        flag = torch.zeros((), dtype=torch.int32, device=tensor.device)
        for bit in (HAS_INF, HAS_NAN):
            flag = flag + bit * (chunk_flags & bit).ne(0).any().int()
        flags.append(flag)
    return torch.cat(sums), torch.stack(flags)


def note(flags: torch.Tensor, tally: Tally) -> None:
    """Note in `tally` the tensors whose flags (int32, one per row) are set."""
    bad, counts, step = flags != 0, tally.counts, (tally.step.reshape(()) + 1).int()
    counts[:, 0] += flags & HAS_INF
    counts[:, 1] += (flags & HAS_NAN) // HAS_NAN
    counts[:, 2] = torch.where(bad & (counts[:, 2] == 0), step, counts[:, 2])
    counts[:, 3] = torch.where(bad, step, counts[:, 3])


def _reference_sum(sums: torch.Tensor) -> torch.Tensor:
    """The sum over all chunks."""
    lanes = torch.zeros(LANES, dtype=torch.float64, device=sums.device)
    for row in torch.nn.functional.pad(sums, (0, -sums.numel() % LANES)).view(-1, LANES):
        lanes = lanes + row
    return _tree_sum(lanes)


# ----------------------------------------------------------------------------------------------------------- kernels


@jit
def _tree_sum_block(values, LENGTH: tl.constexpr):
    """Sum a block in the reference's order. A reduction over two elements has only one order."""
    values = tl.sum(tl.reshape(values, (2, LENGTH // 2)), axis=0)
    values = tl.sum(tl.reshape(values, (2, LENGTH // 4)), axis=0)
    for level in tl.static_range(3, 16):  # LENGTH is at most 2^15
        if LENGTH >> level:
            values = tl.sum(tl.reshape(values, (LENGTH >> level, 2)), axis=1)
    return tl.sum(values, axis=0)  # one is left


@jit
def _check_block(y, flag_ptr, sum_ptr, CHUNK: tl.constexpr):
    """Record the flags and the sum of squares of one chunk."""
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    biggest = tl.max(magnitude, axis=0)
    if biggest >= 0x7F800000:
        has_inf = tl.max((magnitude == 0x7F800000).to(tl.int32), axis=0)
        tl.atomic_or(flag_ptr, has_inf + 2 * (biggest > 0x7F800000).to(tl.int32))
    exponent = tl.minimum(tl.maximum(254 - (biggest >> 23), 1), 254)
    scaled = y * (exponent << 23).to(tl.float32, bitcast=True)
    back = ((1023 + 2 * (127 - exponent.to(tl.int64))) << 52).to(tl.float64, bitcast=True)
    tl.store(sum_ptr, _tree_sum_block(scaled * scaled, CHUNK).to(tl.float64) * back)


@functools.partial(jit, do_not_specialize=["tensors", "flags", "sums"])
def check_kernel(
    rows,  # int64 (4, tensors): see multi_tensor.py; operands are the address and the tensor's place in `flags`
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    inv_scale,  # a number, or the address of an fp32 number: see SCALED
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,)
    DTYPE: tl.constexpr,
    # The factor is 0: none, 1: the number at the address `inv_scale`, 2: the number `inv_scale`, 3: the inverse of the
    # number at the address `inv_scale`.
    SCALED: tl.constexpr,
    WRITE: tl.constexpr,  # whether to store the products
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    start = (chunk - tl.load(rows + tensors + tensor)) * CHUNK
    address = tl.load(rows + 2 * tensors + tensor)
    flag = flags + tl.load(rows + 3 * tensors + tensor)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    offsets = tl.arange(0, CHUNK)
    factor = 1.0
    if SCALED == 1:
        factor = tl.load(inv_scale)
    elif SCALED == 2:
        factor = (tl.full((), 1.0, tl.float32) * inv_scale).to(tl.float32)
    elif SCALED == 3:
        factor = inverse_block(tl.load(inv_scale))
    if (address % 16 == 0) & (left == CHUNK):
        # A full, aligned chunk is read 16 bytes at a time. Triton keeps the hint only if it follows the cast of the
        # pointer, and uses it only in accesses without a mask.
        at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start + offsets
        y = to_float32(tl.load(at))
        if SCALED != 0:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored)
            y = to_float32(stored)
    else:
        # Other chunks are read one element per thread, neighbouring threads reading neighbouring elements. Reading most
        # of a short chunk in vectors was tried: it takes up to 40 more registers, for at most one chunk per tensor.
        at = address.to(tl.pointer_type(DTYPE)) + start + offsets
        y = to_float32(tl.load(at, mask=offsets < left, other=0.0))
        if SCALED != 0:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored, mask=offsets < left)
            y = to_float32(stored)
        # Lanes beyond the end hold 0 * factor, which is NaN if the factor is infinite.
        y = tl.where(offsets < left, y, 0.0)
    _check_block(y, flag, sums + chunk, CHUNK)


@functools.partial(jit, do_not_specialize=["chunks", "tensors"])
def finish_kernel(
    sums,  # fp64 (chunks,)
    chunks,  # number of chunks
    flags,  # int32 (tensors,); set to zero
    tensors,  # number of flags
    found_inf,  # output, fp32, one element
    sum_of_squares,  # output, fp64, one element
    norm,  # output, fp32, one element
    flags_out,  # output, int32 (tensors,)
    tally,  # `Tally.counts`, int32 (tensors, 4), updated if TALLY
    step,  # `Tally.step`, int64, one element, read if TALLY
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
    TALLY: tl.constexpr,
):
    """Add the sums of the chunks and combine the flags. Runs as a single program."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), dtype=tl.float64)
    for start in range(0, chunks, LANES * UNROLLED):
        for row in tl.static_range(UNROLLED):
            at = start + row * LANES + lane
            total += tl.load(sums + at, mask=at < chunks, other=0.0)
    result = _tree_sum_block(total, LANES)
    tl.store(sum_of_squares, result)
    tl.store(norm, tl.sqrt(result).to(tl.float32))
    any_flag = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, tensors, LANES):
        at = start + lane
        there = at < tensors
        flag = tl.load(flags + at, mask=there, other=0)
        any_flag |= flag
        tl.store(flags_out + at, flag, mask=there)
        tl.store(flags + at, tl.zeros_like(flag), mask=there)
        if TALLY:
            bad = there & (flag != 0)  # rows of finite tensors are neither read nor written
            row = tally + at * 4
            now = (tl.load(step) + 1).to(tl.int32)
            tl.store(row, tl.load(row, mask=bad, other=0) + (flag & 1), mask=bad)
            tl.store(row + 1, tl.load(row + 1, mask=bad, other=0) + (flag >> 1), mask=bad)
            tl.store(row + 2, now, mask=bad & (tl.load(row + 2, mask=bad, other=0) == 0))
            tl.store(row + 3, tl.zeros_like(flag) + now, mask=bad)
    tl.store(found_inf, (tl.max(any_flag, axis=0) != 0).to(tl.float32))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables: dict[torch.dtype, TableCache] = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in DTYPE_CODES}


class Factor(NamedTuple):
    """What gradients are multiplied by.

    Attributes:
        value: the factor, as a number or as a 0-dim fp32 tensor.
        inverted: whether the factor is `loss_scale.inverse` of the tensor instead.
    """

    value: torch.Tensor | float
    inverted: bool = False


def _for_reference(factor: Factor | None, device: torch.device) -> torch.Tensor | None:
    """The factor as a 0-dim fp32 tensor."""
    if factor is None:
        return None
    if isinstance(factor.value, float):
        return torch.full((), factor.value, dtype=torch.float32, device=device)
    return inverse(factor.value) if factor.inverted else factor.value


class _Outputs(NamedTuple):
    """What a check writes to: `check` describes them."""

    verdict: Verdict
    norm: torch.Tensor | None
    tally: Tally | None


class _Scratch:
    """Buffers between the launches of a call.

    Attributes:
        sums: fp64, the sum of each chunk.
        flags: int32, the flag of each tensor; 0 between calls.
        norm: fp32, one element, for calls that do not return the norm.
    """

    def __init__(self, device: torch.device, chunks: int, tensors: int) -> None:
        self.sums = torch.empty(chunks, dtype=torch.float64, device=device)
        self.flags = torch.zeros(tensors, dtype=torch.int32, device=device)
        self.norm = torch.empty((), dtype=torch.float32, device=device)


class _Scratches(threading.local):
    """One `_Scratch` per thread and stream, which is reused."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.device, int], _Scratch] = {}

    def take(self, device: torch.device, chunks: int, tensors: int) -> _Scratch:
        """At least so long; a graph's own while one is captured."""
        if capturing(device):
            return _Scratch(device, chunks, tensors)
        key = (device, current_stream(device))
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Scratch(device, chunks, tensors)
        elif kept.sums.numel() < chunks or kept.flags.numel() < tensors:
            # Half as much again, so that lists that grow by one tensor do not allocate every time.
            room = max(chunks, kept.sums.numel() * 3 // 2), max(tensors, kept.flags.numel() * 3 // 2)
            kept = self._kept[key] = _Scratch(device, *room)
        return kept

    def drop(self) -> None:
        """Discard all buffers, because a call that failed may have left flags in them."""
        self._kept.clear()


_scratches = _Scratches()
_Tables = list[tuple[TensorTable, torch.dtype]]  # one for each dtype


def _launch_triton(
    table: TensorTable, dtype: torch.dtype, factor: Factor | None, write: bool, scratch: _Scratch, first: int
) -> None:
    """Check tensors of one dtype. `first` is the index of their first chunk in `scratch.sums`."""
    number = 1.0 if factor is None else factor.value
    mode = 0 if factor is None else 2 if isinstance(number, float) else 3 if factor.inverted else 1
    beyond = address(number) % 16 if isinstance(number, torch.Tensor) else 0
    sums = scratch.sums[first:] if first else scratch.sums
    operands = table.rows, table.chunk_tensor, table.tensors, number, scratch.flags, sums
    constants = {"DTYPE": triton_dtype(dtype), "SCALED": mode, "WRITE": write, "CHUNK": CHUNK}
    constants |= {"num_warps": UNSCALE_WARPS if write else CHECK_WARPS, **EXACT}
    launch_kernel(check_kernel, sums.device, table.chunks, operands, constants, beyond)


def _launch_native(
    table: TensorTable, dtype: torch.dtype, factor: Factor | None, write: bool, scratch: _Scratch, first: int
) -> None:
    """Check tensors of one dtype. `first` is the index of their first chunk in `scratch.sums`."""
    number = ctypes.c_float(factor.value) if factor is not None and isinstance(factor.value, float) else None
    by = None if number is None else ctypes.addressof(number)
    if factor is not None and isinstance(factor.value, torch.Tensor):
        by = address(factor.value)
    flags, sums = checked_addresses((scratch.flags, scratch.sums))
    code, inverted = DTYPE_CODES[dtype], factor is not None and factor.inverted
    native.functions("unscale").halfstep_check(
        *(*table.places, table.tensors, table.chunks, by, inverted, write, code, flags, sums + 8 * first, threads())
    )


def _gather(implementation: str, scratch: _Scratch, chunks: int, outputs: _Outputs) -> None:
    out, norm, tally = outputs
    results = (out.found_inf, out.sum_of_squares, scratch.norm if norm is None else norm, out.flags)
    slots, device = out.flags.numel(), out.flags.device
    if implementation == "triton":
        tensors = (*results, *((scratch.flags, scratch.flags) if tally is None else tally))
        operands = scratch.sums, chunks, scratch.flags, slots, *tensors
        constants = {"LANES": LANES, "UNROLLED": UNROLLED, "TALLY": tally is not None, **EXACT}
        constants["num_warps"] = most_warps(device)  # a thread for each of the lanes, which load at the same time
        beyond = alignments((scratch.sums, scratch.flags, *tensors))
        launch_kernel(finish_kernel, device, 1, operands, constants, chunks < 2**31, beyond)
        return
    sums, flags, *rest = checked_addresses((scratch.sums, scratch.flags, *results, *(tally or ())))
    native.functions("unscale").halfstep_check_finish(
        sums, chunks, flags, slots, *rest, *(() if tally else (None, None))
    )


def _finish_in_torch(outputs: _Outputs) -> None:
    """Write what the last launch writes in addition to the flags and the sum."""
    out, norm, tally = outputs
    out.found_inf.copy_(out.flags.any())
    if norm is not None:
        norm.copy_(out.sum_of_squares.sqrt())
    if tally is not None:
        note(out.flags, tally)


def _by_operations(
    tensor: torch.Tensor, inv_scale: torch.Tensor | None, write: bool, flag: torch.Tensor, total: torch.Tensor
) -> None:
    """Update a flag and a sum of squares in place by operations of torch.

    In-place updates let a subclass that holds several tensors add the part of each.
    """
    y = tensor.float() if tensor.dtype in DTYPE_CODES else tensor
    if inv_scale is not None:
        y = y * inv_scale
    if write:
        y = tensor.copy_(y).float() if tensor.dtype in DTYPE_CODES else tensor.copy_(y)
    flag.bitwise_or_(y.isinf().any().int() * HAS_INF)
    flag.bitwise_or_(y.isnan().any().int() * HAS_NAN)
    total.add_(y.abs().double().square().sum())


def check(
    tensors: list[torch.Tensor],
    factor: Factor | None = None,
    *,
    write: bool = False,
    out: Verdict | None = None,
    norm: torch.Tensor | None = None,
    tally: Tally | None = None,
    places: Sequence[int] | None = None,
    in_memory: bool | None = None,
) -> Verdict:
    """Check, and with `write` unscale, a list of tensors that were validated before.

    Args:
        tensors: at least one dense fp32, fp16 or bf16 tensor, all on one device.
        factor: what to multiply by; None for 1.
        write: whether to store the products in the tensors.
        out: the verdict to write to, which may have more flags than there are tensors; None for a new one.
        norm: 0-dim fp32, set to the square root of the sum of squares.
        tally: where non-finite tensors are counted; it has one row per flag.
        places: for each tensor the index of its flag, all different. Other flags become 0. None for the order of
            `tensors`.
        in_memory: whether kernels may read the tensors at their addresses; None to find out. Otherwise operations of
            torch are used, which support other dtypes too.
    """
    device = tensors[0].device
    if in_memory is None:
        in_memory = all_have_memory(tensors)
    places = range(len(tensors)) if places is None else places
    if not in_memory:
        with torch.no_grad(), own_operations(tensors):
            out = Verdict.empty(len(tensors), device) if out is None else out
            inv_scale = _for_reference(factor, device)
            out.flags.zero_()
            out.sum_of_squares.zero_()
            for tensor, place in zip(tensors, places, strict=True):
                _by_operations(tensor, inv_scale, write, out.flags[place], out.sum_of_squares)
            _finish_in_torch(_Outputs(out, norm, tally))
        return out
    out = Verdict.empty(len(tensors), device) if out is None else out
    outputs = _Outputs(out, norm, tally)
    flat = all_flattened(tensors)
    implementation = resolve(device, "unscale")
    if implementation == "reference":
        with torch.no_grad():
            _run_reference(flat, factor, write, outputs, places)
    else:
        _run_kernels(implementation, _tables_of(flat, by_dtype(flat), places), factor, write, outputs)
    if write:
        if flat is not tensors:
            with torch.no_grad():
                for tensor, copy in zip(tensors, flat, strict=True):
                    if copy is not tensor:
                        tensor.copy_(copy)
        torch.autograd.graph.increment_version(tensors)
    return out


def _run_reference(
    tensors: list[torch.Tensor], factor: Factor | None, write: bool, outputs: _Outputs, places: Sequence[int]
) -> None:
    out = outputs.verdict
    inv_scale = _for_reference(factor, tensors[0].device)
    out.flags.zero_()
    sums: list[torch.Tensor] = []
    for indices in by_dtype(tensors).values():
        group_sums, group_flags = _reference_pass([tensors[index] for index in indices], inv_scale, write)
        sums.append(group_sums)
        out.flags[[places[index] for index in indices]] = group_flags
    out.sum_of_squares.copy_(_reference_sum(torch.cat(sums)))
    _finish_in_torch(outputs)


def _tables_of(tensors: list[torch.Tensor], groups: dict[torch.dtype, Sequence[int]], places: Sequence[int]) -> _Tables:
    """A table for each dtype."""
    if len(groups) == 1:
        return [(_tables[dtype].table(tensors, numbers=[list(places)]), dtype) for dtype in groups]
    tables: _Tables = []
    for dtype, indices in groups.items():
        own = [places[index] for index in indices]
        tables.append((_tables[dtype].table([tensors[index] for index in indices], numbers=[own]), dtype))
    return tables


def _launch_each(implementation: str, tables: _Tables, factor: Factor | None, write: bool, scratch: _Scratch) -> None:
    """Check the tensors of each table. Their chunks follow each other in `scratch.sums`."""
    launch = _launch_triton if implementation == "triton" else _launch_native
    chunks = 0
    for table, dtype in tables:
        if table.chunks:
            launch(table, dtype, factor, write, scratch, chunks)
            chunks += table.chunks


def _run_kernels(implementation: str, tables: _Tables, factor: Factor | None, write: bool, outputs: _Outputs) -> None:
    """Check by one launch per dtype and one that combines their results."""
    flags = outputs.verdict.flags
    chunks = sum([table.chunks for table, _ in tables])
    scratch = _scratches.take(flags.device, chunks, flags.numel())
    try:
        _launch_each(implementation, tables, factor, write, scratch)
        _gather(implementation, scratch, chunks, outputs)
    except BaseException:
        _scratches.drop()
        raise


def check_part(tensors: list[torch.Tensor], factor: Factor | None = None, *, in_memory: bool = True) -> PartialCheck:
    """Begin a check of some of its tensors, which `finish_parts` ends. The tensors are not needed any more.

    Args:
        tensors: at least one dense tensor, all on one device; fp32, fp16 or bf16 if `in_memory`.
        factor: what to multiply by; None for 1.
        in_memory: as for `check`.
    """
    device, dtypes = tensors[0].device, [tensor.dtype for tensor in tensors]
    with torch.no_grad():
        if not in_memory:
            inv_scale = _for_reference(factor, device)
            totals = torch.zeros(len(tensors), dtype=torch.float64, device=device).unbind()
            marks = torch.zeros(len(tensors), dtype=torch.int32, device=device).unbind()
            with own_operations(tensors):
                for tensor, total, mark in zip(tensors, totals, marks, strict=True):
                    _by_operations(tensor, inv_scale, False, mark, total)
            return PartialCheck(dtypes, totals, marks, False)
        flat = all_flattened(tensors)
        groups = by_dtype(flat)
        in_order = [index for indices in groups.values() for index in indices]
        sizes = [-(-flat[index].numel() // CHUNK) for index in in_order]
        implementation = resolve(device, "unscale")
        if implementation == "reference":
            inv_scale = _for_reference(factor, device)
            sums, flags = _reference_pass([flat[index] for index in in_order], inv_scale, False)
        else:
            place = {index: place for place, index in enumerate(in_order)}
            scratch = _Scratch(device, sum(sizes), len(flat))
            tables = _tables_of(flat, groups, [place[index] for index in range(len(flat))])
            _launch_each(implementation, tables, factor, False, scratch)
            sums, flags = scratch.sums, scratch.flags
        by_index = sorted(zip(in_order, sums.split(sizes), flags.split(1), strict=True), key=itemgetter(0))
        return PartialCheck(dtypes, [one for _, one, _ in by_index], [one for _, _, one in by_index], True)


def finish_parts(part: PartialCheck, places: Sequence[int], out: Verdict, tally: Tally | None = None) -> Verdict:
    """End a check that `check_part` began, with the bits of one `check` of all tensors.

    Args:
        part: the entries of all tensors, in the order in which `check` would be given them.
        places: as for `check`.
        out: the verdict to write to.
        tally: as for `check`.
    """
    device, outputs = out.flags.device, _Outputs(out, None, tally)
    with torch.no_grad():
        flags = torch.zeros_like(out.flags)
        where = upload(torch.tensor(places, dtype=torch.int64, device="cpu"), device)
        flags[where] = torch.stack([flag.reshape(()) for flag in part.flags])
        if not part.in_memory:
            out.flags.copy_(flags)
            out.sum_of_squares.copy_(functools.reduce(torch.add, [one.sum() for one in part.sums]))
            _finish_in_torch(outputs)
            return out
        pairs = list(zip(part.dtypes, part.sums, strict=True))
        in_order = [of_tensor for kind in dict.fromkeys(part.dtypes) for dtype, of_tensor in pairs if dtype == kind]
        sums = torch.cat(in_order)
        implementation = resolve(device, "unscale")
        if implementation == "reference":
            out.flags.copy_(flags)
            out.sum_of_squares.copy_(_reference_sum(sums))
            _finish_in_torch(outputs)
            return out
        scratch = _Scratch(device, 0, 0)
        scratch.sums, scratch.flags = sums, flags
        _gather(implementation, scratch, sums.numel(), outputs)
    return out


# ------------------------------------------------------------------------------------------------------------- public


def _checked_factor(value: torch.Tensor | float | None, device: torch.device) -> Factor | None:
    """The factor as a 0-dim fp32 tensor on `device`, or as a number rounded to fp32."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return Factor(ctypes.c_float(float(value)).value)
    if type(value) is torch.Tensor and value.dtype == torch.float32 and value.ndim == 0 and value.device == device:
        return Factor(value.resolve_neg())
    if value.numel() != 1:
        raise ValueError(
            f"Expected inv_scale to be one number, a float or a one-element tensor, but got shape {tuple(value.shape)}"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"Expected inv_scale to have a real dtype, but got {value.dtype}")
    if value.dtype == torch.float32 and value.device == device:
        return Factor(value.detach().resolve_neg().reshape(()))
    return Factor(to_device(value.detach().reshape(()), device, torch.float32))


def foreach_check(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float | None = None) -> Verdict:
    """Find non-finite elements and sum the squares of a list of tensors in one read-only pass.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        inv_scale: a float or a one-element tensor on any device. If given, ``grad * inv_scale`` in fp32 is checked and
            summed; the gradients are not written.

    Returns:
        `Verdict`: ``(found_inf, sum_of_squares, flags)`` on the device. The call does not wait for the device, except
        for an `inv_scale` on a GPU that gradients on the CPU are multiplied by.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, or `inv_scale` is not one number.

    Examples:
        >>> found = halfstep.foreach_check([torch.tensor([3.0]), torch.tensor([4.0])])
        >>> found.found_inf, found.sum_of_squares
        (tensor(0.), tensor(25., dtype=torch.float64))
        >>> halfstep.foreach_check([torch.ones(2), torch.tensor([float("inf")])]).flags
        tensor([0, 1], dtype=torch.int32)
    """
    tensors, in_memory = check_tensor_list(grads, "grads")
    if not tensors:
        return Verdict(*map(torch.zeros_like, Verdict.empty(0, _CPU)))
    return check(tensors, _checked_factor(inv_scale, tensors[0].device), in_memory=in_memory)


def foreach_unscale_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float) -> Unscaled:
    """Multiply a list of tensors by `inv_scale` in place and check the result, in one pass.

    The product is computed in fp32 and rounded once to the dtype of the tensor; the check and the norm use the stored
    values.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes on one device; may be empty.
        inv_scale: a float or a one-element tensor on any device.

    Returns:
        `Unscaled`: ``(found_inf, norm)``, 0-dim tensors on the device. The call does not wait for the device, except
        for an `inv_scale` on a GPU that gradients on the CPU are multiplied by.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, or `inv_scale` is not one number.

    Examples:
        >>> gradients = [torch.tensor([6.0, 8.0])]
        >>> found_inf, norm = halfstep.foreach_unscale_(gradients, 0.5)
        >>> gradients, norm
        ([tensor([3., 4.])], tensor(5.))
    """
    tensors, in_memory = check_tensor_list(grads, "grads")
    if not tensors:
        return Unscaled(*(torch.zeros((), dtype=torch.float32, device="cpu") for _ in Unscaled._fields))
    device = tensors[0].device
    factor = _checked_factor(inv_scale, device)
    if not in_memory:
        result = check(tensors, factor, write=True, in_memory=False)
        return Unscaled(result.found_inf, result.sum_of_squares.sqrt().float())
    norm = torch.empty((), dtype=torch.float32, device=device)
    return Unscaled(check(tensors, factor, write=True, norm=norm, in_memory=True).found_inf, norm)
