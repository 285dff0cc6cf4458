"""Unscale gradients, find non-finite elements and sum the squares, in one pass over a list of tensors.

`reference` and `reference_sum` are the specification. Bytes per element: a check reads each element and writes nothing
(2 or 4 B); unscaling in place also writes it (4 or 8 B).

A call needs one launch per dtype, and one that combines the sums of the chunks and the flags of the tensors. These
intermediate results, one fp64 number per chunk and one int32 per tensor, are stored in buffers that calls with the
same table reuse. The last launch sets the flags to zero for the next call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import NamedTuple

import torch

from halfstep.kernels import multi_tensor, native
from halfstep.kernels.backend import EXACT, constant, is_hip, jit, launch_kernel, most_warps, resolve, tl
from halfstep.kernels.formats import format_of
from halfstep.kernels.loss_scale import inverse, inverse_block
from halfstep.kernels.multi_tensor import (
    ADDRESSES,
    FLOATS,
    TableCache,
    TensorTable,
    address,
    all_contiguous,
    locate,
    own_operations,
)
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.streams import to_device, upload

CHUNK = 4096
LANES = 1024
UNROLLED = 8  # chunks per lane and turn of the last launch, of whose loads ptxas has three to five under way at a time
# Checks take 8.9 instructions per bf16 element with 2 warps, 10.8 with 4, 18.9 with 8. With 2 warps, unscaling, which
# also stores, would need almost all registers of a thread.
CHECK_WARPS, UNSCALE_WARPS = 2, 4

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
    """How often each of the same tensors was non-finite in the checks of successive steps."""

    # int32 (tensors, 4): steps with an Inf, with a NaN, the first and the last with either, from 1; 0 stands for none.
    counts: torch.Tensor
    step: torch.Tensor  # int64, one element: the number of steps before this one


class PartialCheck(NamedTuple):
    """The unfinished check of one tensor."""

    dtype: torch.dtype
    sums: torch.Tensor  # fp64, that of each chunk; of a tensor without memory, one
    flag: torch.Tensor  # int32, one element
    in_memory: bool  # whether kernels have read the tensor


class Unscaled(NamedTuple):
    """What `foreach_unscale_` returns.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any unscaled element is non-finite, otherwise 0.0.
        norm: 0-dim fp32, the 2-norm of all unscaled elements together.
    """

    found_inf: torch.Tensor
    norm: torch.Tensor


class Factor(NamedTuple):
    """What gradients are multiplied by."""

    value: torch.Tensor | float  # a tensor is 0-dim fp32
    inverted: bool = False  # whether the factor is `loss_scale.inverse` of the tensor instead


# --------------------------------------------------------------------------------------------------------- reference


def reference(
    tensors: Sequence[torch.Tensor], inv_scale: torch.Tensor | None = None, write: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of squares of each chunk and the flag of each tensor.

        y = x * inv_scale               in fp32; with `write`, rounded once to x's dtype and stored
        p = 2^(127 - e), kept normal    e is the biased exponent of the chunk's largest |y|, so that p |y| < 4
        sum = tree((p y)^2) / p^2       squares and tree in fp32, the division in fp64

    `y` is examined and not `x`, because with a loss scale below 1 a finite gradient can overflow when it is unscaled.
    Bits are compared as integers, since a floating-point maximum may lose a NaN, and since the norm of finite gradients
    can overflow.

    **The sum has the same bits in every implementation.** A chunk has 4096 elements; a short one is padded with zeros,
    which change no bit. The product with p is exact, and squares that underflow are too small to change the sum. The
    squares are added in a fixed tree: i and i + 2048, i and i + 1024, then neighbours 2i and 2i + 1 until one sum is
    left. A thread of a GPU holds neighbours from each quarter, and so adds most of the tree in its registers; a CPU
    adds the quarters as vectors. fp64 holds the square of every fp32 number: that of 1e30 is 1e60.

    Args:
        tensors: flat fp32, fp16 or bf16 tensors of any sizes.
        inv_scale: 0-dim fp32; None for 1.
        write: whether to store the products in the tensors.

    Returns:
        The sums of all chunks in order, fp64 of shape (chunks,), and the flags, int32 of shape (tensors,).
    """
    sums, flags = [], []
    for tensor in tensors:
        x = torch.as_strided(tensor, (tensor.numel(),), (1,))
        y = x.float() if inv_scale is None else x.float() * inv_scale
        y = x.copy_(y).float() if write else y
        rows = torch.nn.functional.pad(y, (0, -y.numel() % CHUNK)).view(-1, CHUNK)
        magnitude = rows.view(torch.int32) & 0x7FFFFFFF
        flags.append((magnitude == 0x7F800000).any() * HAS_INF + (magnitude > 0x7F800000).any() * HAS_NAN)
        exponent = (254 - (magnitude.amax(1) >> 23)).clamp(1, 254)  # biased exponent of p
        scaled = rows * (exponent << 23).view(torch.float32)[:, None]
        back = ((1023 + 2 * (127 - exponent.long())) << 52).view(torch.float64)
        sums.append(_tree_sum(scaled * scaled).double() * back)
    return torch.cat(sums), torch.stack(flags).int()


def reference_sum(sums: torch.Tensor) -> torch.Tensor:
    """The sum over all chunks, in fp64: lane j of 1024 adds chunks j, j + 1024, ..., then the tree adds the lanes."""
    lanes = torch.zeros(LANES, dtype=torch.float64, device=sums.device)
    for row in torch.nn.functional.pad(sums, (0, -sums.numel() % LANES)).view(-1, LANES):
        lanes = lanes + row
    return _tree_sum(lanes)


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, whose size is a power of two of at least 4, in the tree of `reference`."""
    for _ in range(2):
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def note(flags: torch.Tensor, tally: Tally) -> None:
    """Note in `tally` the tensors whose flags (int32, one per row) are set."""
    bad, counts, step = flags != 0, tally.counts, (tally.step.reshape(()) + 1).int()
    counts[:, 0] += flags & HAS_INF
    counts[:, 1] += (flags & HAS_NAN) // HAS_NAN
    counts[:, 2] = torch.where(bad & (counts[:, 2] == 0), step, counts[:, 2])
    counts[:, 3] = torch.where(bad, step, counts[:, 3])


def _factor_in_torch(factor: Factor | None, device: torch.device) -> torch.Tensor | None:
    if factor is None:
        return None
    if isinstance(factor.value, float):
        return torch.full((), factor.value, dtype=torch.float32, device=device)
    return inverse(factor.value) if factor.inverted else factor.value


def _by_operations(
    tensor: torch.Tensor, inv_scale: torch.Tensor | None, write: bool, flag: torch.Tensor, total: torch.Tensor
) -> None:
    """Update a flag and a sum of squares by operations of torch, on tensors that kernels cannot read: in place, so that
    a subclass that holds several tensors can add the sum of each."""
    y = tensor.float() if tensor.dtype in FLOATS else tensor
    if inv_scale is not None:
        y = y * inv_scale
    if write:
        y = tensor.copy_(y).float() if tensor.dtype in FLOATS else tensor.copy_(y)
    flag.bitwise_or_(y.isinf().any().int() * HAS_INF)
    flag.bitwise_or_(y.isnan().any().int() * HAS_NAN)
    total.add_(y.abs().double().square().sum())


def _finish_by_operations(
    total: torch.Tensor, out: Verdict, norm: torch.Tensor | None = None, tally: Tally | None = None
) -> None:
    out.sum_of_squares.copy_(total)
    out.found_inf.copy_(out.flags.any())
    if norm is not None:
        norm.copy_(total.sqrt())
    if tally is not None:
        note(out.flags, tally)


# ----------------------------------------------------------------------------------------------------------- kernels

GRAD_ROW, FLAG_ROW = constant(ADDRESSES), constant(ADDRESSES + 1)


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
def check_block(y, flag_ptr, sum_ptr, CHUNK: tl.constexpr):
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    biggest = tl.max(magnitude, axis=0)
    if biggest >= 0x7F800000:
        has_inf = tl.max((magnitude == 0x7F800000).to(tl.int32), axis=0)
        tl.atomic_or(flag_ptr, has_inf + 2 * (biggest > 0x7F800000).to(tl.int32))
    exponent = tl.minimum(tl.maximum(254 - (biggest >> 23), 1), 254)
    scaled = y * (exponent << 23).to(tl.float32, bitcast=True)
    back = ((1023 + 2 * (127 - exponent.to(tl.int64))) << 52).to(tl.float64, bitcast=True)
    tl.store(sum_ptr, _tree_sum_block(scaled * scaled, CHUNK).to(tl.float64) * back)


@jit
def scaled_block(x, factor, SCALED: tl.constexpr, WRITE: tl.constexpr):
    """The products of a block in fp32, and as they are stored; with WRITE both have been rounded."""
    stored = x
    y = to_float32(x)
    if SCALED != 0:
        y = y * factor
    if WRITE:
        stored = from_float32(y, x.dtype)
        if is_hip() and x.dtype == tl.float16:  # LLVM converts a product by v_fma_mixlo_f16, which adds 0.0 to -0.0
            sign = (y.to(tl.uint32, bitcast=True) >> 16) & 0x8000
            stored = (stored.to(tl.uint16, bitcast=True) | sign.to(tl.uint16)).to(tl.float16, bitcast=True)
        y = to_float32(stored)
    return y, stored


@jit
def factor_block(inv_scale, SCALED: tl.constexpr):
    factor = 1.0
    if SCALED == 1:
        factor = tl.load(inv_scale)
    elif SCALED == 2:
        factor = (tl.full((), 1.0, tl.float32) * inv_scale).to(tl.float32)
    elif SCALED == 3:
        factor = inverse_block(tl.load(inv_scale))
    return factor


@functools.partial(jit, do_not_specialize=["tensors", "flags", "sums"])
def check_kernel(
    rows, chunk_tensor, tensors,  # of a table whose operands are the address and the tensor's place in `flags`
    inv_scale,  # a number, or the address of an fp32 number: see SCALED
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,)
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,  # the factor is 0: none, 1: the number at `inv_scale`, 2: `inv_scale`, 3: the inverse of 1
    WRITE: tl.constexpr,  # whether to store the products
    CHUNK: tl.constexpr,
):  # fmt: skip
    column, start, left = locate(rows, chunk_tensor, tensors, CHUNK)
    address = tl.load(column + GRAD_ROW * tensors)
    offsets = tl.arange(0, CHUNK)
    factor = factor_block(inv_scale, SCALED)
    if (address % 16 == 0) & (left == CHUNK):
        # A full, aligned chunk is read 16 bytes at a time. Triton keeps the hint only if it follows the cast of the
        # pointer, and uses it only in accesses without a mask.
        at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start + offsets
        y, stored = scaled_block(tl.load(at), factor, SCALED, WRITE)
        if WRITE:
            tl.store(at, stored)
    else:
        # Other chunks are read one element per thread, neighbouring threads reading neighbouring elements. Reading most
        # of a short chunk in vectors was tried: it takes up to 40 more registers, for at most one chunk per tensor.
        at = address.to(tl.pointer_type(DTYPE)) + start + offsets
        y, stored = scaled_block(tl.load(at, mask=offsets < left, other=0.0), factor, SCALED, WRITE)
        if WRITE:
            tl.store(at, stored, mask=offsets < left)
        # Lanes beyond the end hold 0 * factor, which is NaN if the factor is infinite.
        y = tl.where(offsets < left, y, 0.0)
    check_block(y, flags + tl.load(column + FLAG_ROW * tensors), sums + tl.program_id(0), CHUNK)


@functools.partial(jit, do_not_specialize=["chunks", "tensors"])
def finish_kernel(
    sums, chunks, flags, tensors,  # of `_Scratch`, and how many; flags are set to zero
    found_inf, sum_of_squares, norm, flags_out,  # outputs, as of `Verdict`; norm is fp32
    tally, step,  # a `Tally`, which is read and updated if TALLY
    LANES: tl.constexpr, UNROLLED: tl.constexpr, TALLY: tl.constexpr,
):  # fmt: skip
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
        valid = at < tensors
        flag = tl.load(flags + at, mask=valid, other=0)
        any_flag |= flag
        tl.store(flags_out + at, flag, mask=valid)
        tl.store(flags + at, tl.zeros_like(flag), mask=valid)
        if TALLY:
            bad = valid & (flag != 0)  # rows of finite tensors are neither read nor written
            row = tally + at * 4
            number = (tl.load(step) + 1).to(tl.int32)
            tl.store(row, tl.load(row, mask=bad, other=0) + (flag & 1), mask=bad)
            tl.store(row + 1, tl.load(row + 1, mask=bad, other=0) + (flag >> 1), mask=bad)
            tl.store(row + 2, number, mask=bad & (tl.load(row + 2, mask=bad, other=0) == 0))
            tl.store(row + 3, tl.zeros_like(flag) + number, mask=bad)
    tl.store(found_inf, (tl.max(any_flag, axis=0) != 0).to(tl.float32))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in FLOATS}


class _Scratch:
    """Buffers between the launches of a call: the sum of each chunk, and the flag of each tensor, 0 between calls."""

    def __init__(self, sums: torch.Tensor, tensors: int) -> None:
        self.sums = sums
        self.flags = torch.zeros(tensors, dtype=torch.int32, device=sums.device)
        self.norm = torch.empty((), dtype=torch.float32, device=sums.device)  # for calls that do not return it
        self.addresses = multi_tensor.checked_addresses((sums, self.flags))

    @classmethod
    def of_size(cls, chunks: int, tensors: int, device: torch.device) -> _Scratch:
        return cls(torch.empty(chunks, dtype=torch.float64, device=device), tensors)


class _Group(NamedTuple):
    """Tensors of one dtype, the index of the flag of each, and their table."""

    dtype: torch.dtype
    tensors: list[torch.Tensor]
    slots: list[int]
    table: TensorTable


def _grouped(tensors: list[torch.Tensor], slots: Sequence[int]) -> list[_Group]:
    # Not `by_dtype`, whose calls each step would pay for.
    groups, dtypes = [], list(map(attrgetter("dtype"), tensors))
    for dtype in (distinct := dict.fromkeys(dtypes)):
        listed, slots_of = tensors, list(slots)
        if len(distinct) > 1:
            members = list(map(is_, dtypes, repeat(dtype)))
            listed, slots_of = list(compress(tensors, members)), list(compress(slots, members))
        groups.append(_Group(dtype, listed, slots_of, _tables[dtype].table(listed, numbers=[slots_of])))
    return groups


def _check_groups(
    implementation: str, groups: list[_Group], factor: Factor | None, write: bool, scratch: _Scratch
) -> None:
    """Check the tensors of each group. Their chunks follow each other in `scratch.sums`."""
    first = 0
    value = 1.0 if factor is None else factor.value
    inverted = factor is not None and factor.inverted
    for dtype, tensors, slots, table in groups:
        if not table.chunks:
            continue
        if implementation == "reference":
            with torch.no_grad():
                sums, flags = reference(tensors, _factor_in_torch(factor, table.device), write)
                scratch.sums[first : first + table.chunks] = sums
                scratch.flags[slots] = flags
        elif implementation == "triton":
            mode = 0 if factor is None else 2 if isinstance(value, float) else 3 if inverted else 1
            misaligned = address(value) % 16 if isinstance(value, torch.Tensor) else 0
            sums = scratch.sums[first:] if first else scratch.sums
            constants = {"DTYPE": format_of(dtype).triton_type, "SCALED": mode, "WRITE": write, "CHUNK": CHUNK}
            constants |= {"num_warps": UNSCALE_WARPS if write else CHECK_WARPS, **EXACT}
            operands = *table.operands, value, scratch.flags, sums
            launch_kernel(check_kernel, table.device, table.chunks, operands, constants, misaligned)
        else:
            number = ctypes.c_float(value) if isinstance(value, float) else value  # lives as long as the call
            at = address(number) if isinstance(number, torch.Tensor) else ctypes.addressof(number)
            to_sums, to_flags = scratch.addresses
            native.library("unscale").halfstep_check(
                *(*table.addresses, None if factor is None else at, inverted, write, format_of(dtype).code),
                *(to_flags, to_sums + 8 * first, native.threads()),
            )
        first += table.chunks


def _combine(
    implementation: str,
    scratch: _Scratch,
    chunks: int,
    out: Verdict,
    norm: torch.Tensor | None = None,
    tally: Tally | None = None,
) -> None:
    """Add the sums of all chunks, and hand over the flags."""
    slots, device = out.flags.numel(), out.flags.device
    if implementation == "reference":
        out.flags.copy_(scratch.flags[:slots])
        scratch.flags.zero_()
        _finish_by_operations(reference_sum(scratch.sums[:chunks]), out, norm, tally)
        return
    results = (out.found_inf, out.sum_of_squares, scratch.norm if norm is None else norm, out.flags)
    if implementation == "triton":
        tensors = (*results, *((scratch.flags, scratch.flags) if tally is None else tally))
        operands = scratch.sums, chunks, scratch.flags, slots, *tensors
        constants = {"LANES": LANES, "UNROLLED": UNROLLED, "TALLY": tally is not None, **EXACT}
        constants["num_warps"] = most_warps(device)  # a thread for each of the lanes, which load at the same time
        misaligned = multi_tensor.alignments((scratch.sums, scratch.flags, *tensors))
        launch_kernel(finish_kernel, device, 1, operands, constants, chunks < 2**31, misaligned)
        return
    (to_sums, to_flags), addresses = scratch.addresses, multi_tensor.checked_addresses((*results, *(tally or ())))
    native.library("unscale").halfstep_check_finish(
        to_sums, chunks, to_flags, slots, *addresses, *(() if tally else (None, None))
    )


def check(
    tensors: list[torch.Tensor],
    factor: Factor | None = None,
    *,
    write: bool = False,
    out: Verdict | None = None,
    norm: torch.Tensor | None = None,
    tally: Tally | None = None,
    slots: Sequence[int] | None = None,
    in_memory: bool = True,
    parts: Sequence[PartialCheck | None] = (),
) -> Verdict:
    """Check, and with `write` unscale, a list of tensors that were validated before.

    Args:
        tensors: at least one dense fp32, fp16 or bf16 tensor, all on one device.
        factor: what to multiply by; None for 1.
        out: the verdict to write to, which may have more flags than there are tensors; None for a new one.
        norm: 0-dim fp32, set to the square root of the sum of squares.
        tally: where non-finite tensors are counted; it has one row per flag.
        slots: for each tensor the index of its flag, all different. Other flags become 0. None for the order of
            `tensors`.
        in_memory: whether kernels may read the tensors at their addresses. Otherwise operations of torch are used,
            which support other dtypes too.
        parts: of all tensors, those that `check_part` would return and None for tensors to be read; empty to read all.
    """
    device = tensors[0].device
    slots = range(len(tensors)) if slots is None else slots
    if not in_memory:
        with torch.no_grad(), own_operations(tensors):
            out = Verdict.empty(len(tensors), device) if out is None else out
            inv_scale, total = _factor_in_torch(factor, device), out.sum_of_squares.zero_()
            out.flags.zero_()
            for tensor, slot in zip(tensors, slots, strict=True):
                _by_operations(tensor, inv_scale, write, out.flags[slot], total)
            _finish_by_operations(total, out, norm, tally)
        return out
    out = Verdict.empty(len(tensors), device) if out is None else out
    if any(parts):
        rest = [tensor for tensor, part in zip(tensors, parts, strict=True) if part is None]
        read = iter(check_part(rest, factor) if rest else [])
        return finish_parts([next(read) if part is None else part for part in parts], slots, out, tally)
    flat = tensors if all_contiguous(tensors) else list(map(multi_tensor.flattened, tensors))
    implementation = resolve(device, "unscale")
    groups = _grouped(flat, slots)
    chunks, first = sum(map(attrgetter("table.chunks"), groups)), groups[0].table
    scratch = first.scratch
    if scratch is None or scratch.sums.numel() < chunks or scratch.flags.numel() < out.flags.numel():
        scratch = first.scratch = _Scratch.of_size(chunks, out.flags.numel(), device)
    try:
        _check_groups(implementation, groups, factor, write, scratch)
        _combine(implementation, scratch, chunks, out, norm, tally)
    except BaseException:
        first.scratch = None  # which may hold flags
        raise
    if write and flat is not tensors:
        with torch.no_grad():
            for tensor, copy in zip(tensors, flat, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)
    if write:
        torch.autograd.graph.increment_version(tensors)
    return out


@torch.no_grad()
def check_part(
    tensors: list[torch.Tensor], factor: Factor | None = None, *, in_memory: bool = True
) -> list[PartialCheck]:
    """Begin a check of some of its tensors, which `finish_parts` ends; arguments as for `check`. The tensors are not
    needed any more."""
    device, dtypes = tensors[0].device, [tensor.dtype for tensor in tensors]
    if not in_memory:
        inv_scale = _factor_in_torch(factor, device)
        sums = torch.zeros(len(tensors), dtype=torch.float64, device=device).unbind()
        flags = torch.zeros(len(tensors), dtype=torch.int32, device=device).unbind()
        with own_operations(tensors):
            for tensor, total, flag in zip(tensors, sums, flags, strict=True):
                _by_operations(tensor, inv_scale, False, flag, total)
    else:
        groups = _grouped(multi_tensor.all_flattened(tensors), range(len(tensors)))
        sizes = [-(-tensor.numel() // CHUNK) for _, listed, *_ in groups for tensor in listed]
        scratch = _Scratch.of_size(sum(sizes), len(tensors), device)
        _check_groups(resolve(device, "unscale"), groups, factor, False, scratch)
        order = [slot for _, _, slots, _ in groups for slot in slots]
        by_slot = dict(zip(order, scratch.sums.split(sizes), strict=True))
        sums, flags = tuple(map(by_slot.__getitem__, range(len(tensors)))), scratch.flags.split(1)
    return list(map(PartialCheck, dtypes, sums, flags, repeat(in_memory)))


@torch.no_grad()
def finish_parts(
    parts: Sequence[PartialCheck], slots: Sequence[int], out: Verdict, tally: Tally | None = None
) -> Verdict:
    """End a check that `check_part` began, with the bits of one `check` of all tensors.

    `parts` are those of all tensors, in the order in which `check` would be given them; the others are as there.
    """
    device = out.flags.device
    index = upload(torch.tensor(slots, dtype=torch.int64, device="cpu"), device)
    flags = torch.stack([part.flag.reshape(()) for part in parts])
    if not all(part.in_memory for part in parts):
        out.flags.zero_()[index] = flags
        _finish_by_operations(functools.reduce(torch.add, [part.sums for part in parts]), out, None, tally)
        return out
    dtypes = dict.fromkeys(part.dtype for part in parts)  # in the order in which `check` groups them
    sums = [part.sums for dtype in dtypes for part in parts if part.dtype == dtype]
    scratch = _Scratch(torch.cat(sums), out.flags.numel())
    scratch.flags[index] = flags
    _combine(resolve(device, "unscale"), scratch, scratch.sums.numel(), out, None, tally)
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
    tensors, in_memory = multi_tensor.check_tensor_list(grads, "grads")
    if not tensors:
        return Verdict(*map(torch.zeros_like, Verdict.empty(0, torch.device("cpu"))))
    return check(tensors, _checked_factor(inv_scale, tensors[0].device), in_memory=in_memory)


def foreach_unscale_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float) -> Unscaled:
    """Multiply a list of tensors by `inv_scale` in place and check the result, in one pass.

    The product is computed in fp32 and rounded once to the dtype of the tensor; the check and the norm use the stored
    values. Arguments and errors are those of `foreach_check`, except that `inv_scale` is required.

    Returns:
        `Unscaled`: ``(found_inf, norm)``, 0-dim tensors on the device. The call does not wait for the device, except
        for an `inv_scale` on a GPU that gradients on the CPU are multiplied by.

    Examples:
        >>> gradients = [torch.tensor([6.0, 8.0])]
        >>> found_inf, norm = halfstep.foreach_unscale_(gradients, 0.5)
        >>> gradients, norm
        ([tensor([3., 4.])], tensor(5.))
    """
    tensors, in_memory = multi_tensor.check_tensor_list(grads, "grads")
    if not tensors:
        return Unscaled(*(torch.zeros((), dtype=torch.float32, device="cpu") for _ in Unscaled._fields))
    device = tensors[0].device
    factor = _checked_factor(inv_scale, device)
    if not in_memory:
        result = check(tensors, factor, write=True, in_memory=False)
        return Unscaled(result.found_inf, result.sum_of_squares.sqrt().float())
    norm = torch.empty((), dtype=torch.float32, device=device)
    return Unscaled(check(tensors, factor, write=True, norm=norm, in_memory=True).found_inf, norm)
