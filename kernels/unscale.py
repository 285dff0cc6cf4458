"""Unscale gradients, find non-finite ones, sum their squares: one pass over a list of tensors.

    y = x * inv_scale                      fp32, rounded once to x's dtype when written back; inv_scale may be given as
                                           its reciprocal, the loss scale, and is then 1 / scale rounded once
    flag_t = 1 if tensor t holds an Inf, + 2 if it holds a NaN
    found_inf = 1.0 if any flag is set, else 0.0
    sum_of_squares = sum over all y of y^2

Bytes per element: checking reads the element and writes nothing (2 or 4 B); unscaling in place also writes it (4 or
8 B).

The check looks at `y`, not `x`: with a scale below 1 a finite gradient can overflow when unscaled. It compares
integers, since a floating-point maximum drops NaN, and the norm alone would raise false alarms.

**Sum of squares, the same bits everywhere.** Each tensor is cut into chunks of 4096. A chunk is scaled by a power of
two that brings its largest magnitude into [1, 4) (exactly: no square overflows, and those that underflow are too small
to count), squared in fp32 and summed in a fixed tree: element i with element i + 2048, then i with i + 1024, and so on.
The chunk's sum goes back to its scale in fp64, whose range holds every square of an fp32. The chunks' sums are added in
fp64: 1024 lanes, lane j taking chunks j, j + 1024, ... in order, then the same tree over the lanes. Zeros pad a short
chunk and change no bit. So 1e30 sums to 1e60 where fp32 has infinity, and 1e-30 to 1e-60 where it has 0.

A call is one launch per dtype and one that gathers: chunks into the sum, flags into the answer. What lies between, one
fp64 per chunk and one int32 per tensor, is kept per thread and stream and used again; answers are new tensors, or those
given as `out`. The gathering launch leaves the flags zero, as the next call needs them.

`CheckInParts` makes the same check bit by bit, as gradients become ready during a backward: its sums and flags have
places of their own, and the launch that gathers takes them in the order in which one call would have made them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import TRITON_NAMES, jit, on_device, resolve, tl, triton_dtype
from halfstep.kernels.multi_tensor import (
    ADDRESSES,
    DTYPE_CODES,
    TableCache,
    TensorTable,
    address,
    all_flattened,
    check_addresses,
    check_tensor_list,
    own_operations,
)
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.streams import Handover, capturing, current_stream, upload
from halfstep.kernels.variant import Variant

CHUNK = 4096
LANES = 1024
UNROLLED = 8  # loads of all lanes under way at a time while gathering
CHECK_WARPS = 8  # with 4, the bf16 check spills 3 registers on sm_100
FINISH_WARPS = 8

HAS_INF, HAS_NAN = 1, 2


class Check(NamedTuple):
    """What `foreach_check` finds.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any element is non-finite, else 0.0.
        sum_of_squares: 0-dim fp64, over all elements.
        flags: int32, one per tensor: 0 finite, 1 holds an Inf, 2 holds a NaN, 3 both.
    """

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor
    flags: torch.Tensor

    def first_bad(self) -> torch.Tensor:
        """0-dim int64: the index of the first tensor that holds a non-finite element; -1 if none does."""
        bad = self.flags != 0
        # A leading entry that is true only if no other is, at index -1.
        return torch.cat([~bad.any().reshape(1), bad]).int().argmax() - 1


class Tally(NamedTuple):
    """Where checks of the same tensors, step after step, note which of them were bad.

    Attributes:
        counts: int32 (tensors, 4): steps with an Inf, steps with a NaN, the first bad step, the last one, from 1.
        step: int64, one element: how many steps there were before this one.
    """

    counts: torch.Tensor
    step: torch.Tensor


class Unscaled(NamedTuple):
    """What `foreach_unscale_` returns.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any unscaled element is non-finite, else 0.0.
        norm: 0-dim fp32, the 2-norm of all unscaled elements together.
    """

    found_inf: torch.Tensor
    norm: torch.Tensor


# --------------------------------------------------------------------------------------------------------- reference


def _tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, a power of two long, by adding its second half to its first until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _reference_chunks(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per chunk of a flat fp32 tensor: (sum of squares in fp64, flags)."""
    rows = torch.nn.functional.pad(y, (0, -y.numel() % CHUNK)).view(-1, CHUNK)
    magnitude = rows.view(torch.int32) & 0x7FFFFFFF
    biggest = magnitude.amax(1)
    flags = (magnitude == 0x7F800000).any(1) * HAS_INF + (biggest > 0x7F800000) * HAS_NAN
    exponent = (254 - (biggest >> 23)).clamp(1, 254)  # biased exponent of the power of two to scale by
    scaled = rows * (exponent << 23).view(torch.float32)[:, None]
    back = ((1023 + 2 * (127 - exponent.long())) << 52).view(torch.float64)
    return _tree_sum(scaled * scaled).double() * back, flags.int()


def _reference_pass(
    tensors: Sequence[torch.Tensor], inv_scale: torch.Tensor | None, write: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of all chunks, flags per tensor) of one list."""
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


def _reference_finish(sums: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(found_inf, sum of squares) from all chunks and tensors."""
    lanes = torch.zeros(LANES, dtype=torch.float64, device=sums.device)
    for row in torch.nn.functional.pad(sums, (0, -sums.numel() % LANES)).view(-1, LANES):
        lanes = lanes + row
    return flags.ne(0).any().float(), _tree_sum(lanes)


# ----------------------------------------------------------------------------------------------------------- kernels


@jit
def _tree_sum_block(values, LENGTH: tl.constexpr):
    """Sum a block in the reference's order. A reduction over two elements has only one order."""
    for level in tl.static_range(1, 16):  # LENGTH is at most 2^15
        if LENGTH >> level:
            values = tl.sum(tl.reshape(values, (2, LENGTH >> level)), axis=0)
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
    rows,  # int64 (4 or 5, tensors): see multi_tensor.py; operands are the address, the tensor's place in `flags`, and
    # with APART how far from the chunk's number its place in `sums` is
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    inv_scale,  # fp32 scalar's address, or the number itself, as SCALED says
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,); with APART longer
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,  # 0: not, 1: by what lies at `inv_scale`, 2: by `inv_scale`, 3: by one over what lies there
    WRITE: tl.constexpr,
    APART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    if APART:
        sums += tl.load(rows + 4 * tensors + tensor)
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
        # Through fp64, where division is exact enough on every compiler: older ones flush subnormals in fp32's.
        factor = (1.0 / tl.load(inv_scale).to(tl.float64)).to(tl.float32)
    if (address % 16 == 0) & (left == CHUNK):
        # A full, aligned chunk: the hint must come after the cast to survive, and no mask may hide it.
        at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start + offsets
        y = to_float32(tl.load(at))
        if SCALED != 0:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored)
            y = to_float32(stored)
        _check_block(y, flag, sums + chunk, CHUNK)
    else:
        # One element per thread and access, side by side. Vectors for the first part of a short chunk were tried: the
        # kernel then holds up to 40 registers more, for at most one chunk per tensor.
        at = address.to(tl.pointer_type(DTYPE)) + start + offsets
        y = to_float32(tl.load(at, mask=offsets < left, other=0.0))
        if SCALED != 0:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored, mask=offsets < left)
            y = to_float32(stored)
        # A lane beyond the end holds 0 * factor, which is NaN for an infinite factor.
        y = tl.where(offsets < left, y, 0.0)
        _check_block(y, flag, sums + chunk, CHUNK)


@functools.partial(jit, do_not_specialize=["chunks", "tensors"])
def finish_kernel(
    sums,  # fp64 (chunks,)
    chunks,
    flags,  # int32 (tensors,); zero on return
    tensors,
    found_inf,  # fp32 scalar, and what follows is written
    sum_of_squares,  # fp64 scalar
    norm,  # fp32 scalar
    flags_out,  # int32 (tensors,)
    tally,  # int32 (tensors, 4), and what follows, if TALLY: see `Tally`
    step,  # int64 scalar
    order,  # int32 (chunks,): where each chunk's sum is, and what follows, if APART
    sources,  # int32 (tensors,): where each tensor's flag is, -1 for 0
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
    TALLY: tl.constexpr,
    APART: tl.constexpr,
):
    """Add the chunks and gather the flags, in one program."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), dtype=tl.float64)
    for start in range(0, chunks, LANES * UNROLLED):
        for row in tl.static_range(UNROLLED):
            at = start + row * LANES + lane
            source = at
            if APART:
                source = tl.load(order + at, mask=at < chunks, other=0)
            total += tl.load(sums + source, mask=at < chunks, other=0.0)
    result = _tree_sum_block(total, LANES)
    tl.store(sum_of_squares, result)
    tl.store(norm, tl.sqrt(result).to(tl.float32))
    any_flag = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, tensors, LANES):
        at = start + lane
        source = at
        there = at < tensors
        if APART:
            source = tl.load(sources + at, mask=at < tensors, other=-1)
            there = source >= 0
        flag = tl.load(flags + source, mask=there, other=0)
        any_flag |= flag
        tl.store(flags_out + at, flag, mask=at < tensors)
        tl.store(flags + source, tl.zeros_like(flag), mask=there)
        if TALLY:
            bad = (at < tensors) & (flag != 0)  # of the others nothing is read or written
            row = tally + at * 4
            now = (tl.load(step) + 1).to(tl.int32)
            tl.store(row, tl.load(row, mask=bad, other=0) + (flag & 1), mask=bad)
            tl.store(row + 1, tl.load(row + 1, mask=bad, other=0) + (flag >> 1), mask=bad)
            tl.store(row + 2, now, mask=bad & (tl.load(row + 2, mask=bad, other=0) == 0))
            tl.store(row + 3, tl.zeros_like(flag) + now, mask=bad)
    tl.store(found_inf, (tl.max(any_flag, axis=0) != 0).to(tl.float32))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables: dict[torch.dtype, TableCache] = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in DTYPE_CODES}


class _Answer(NamedTuple):
    """Where a call writes: `Check`, the norm in fp32 and the `Tally` if they are asked for."""

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor
    flags: torch.Tensor
    norm: torch.Tensor | None
    tally: Tally | None = None
    places: Sequence[int] | None = None  # of the tensors in `flags`; None: as they come


class _Factor(NamedTuple):
    """What gradients are multiplied by: a number, what lies at a tensor, or one over that."""

    value: torch.Tensor | float
    inverted: bool = False

    def for_reference(self, device: torch.device) -> torch.Tensor:
        """As a 0-dim fp32 tensor. A quotient of fp32 numbers rounded to fp64 and then to fp32 is rounded right."""
        if isinstance(self.value, float):
            return torch.full((), self.value, dtype=torch.float32, device=device)
        return self.value.double().reciprocal().float() if self.inverted else self.value


class _Scratch:
    """What lies between the launches of a call.

    Attributes:
        sums: fp64, of each chunk.
        flags: int32, of each tensor; 0 between calls.
        norm: fp32 scalar, for calls whose answer has none.
    """

    def __init__(self, device: torch.device, chunks: int, tensors: int) -> None:
        self.sums = torch.empty(chunks, dtype=torch.float64, device=device)
        self.flags = torch.zeros(tensors, dtype=torch.int32, device=device)
        self.norm = torch.empty((), dtype=torch.float32, device=device)


class _Scratches(threading.local):
    """One `_Scratch` per thread and stream, used again."""

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
            # Half as much again, so that a list that grows one by one is not a new allocation every time.
            room = max(chunks, kept.sums.numel() * 3 // 2), max(tensors, kept.flags.numel() * 3 // 2)
            kept = self._kept[key] = _Scratch(device, *room)
        return kept

    def drop(self) -> None:
        """Forget everything: a call that failed half-way leaves flags behind."""
        self._kept.clear()


_scratches = _Scratches()


@functools.cache
def _entries(library: ctypes.CDLL) -> tuple[Any, Any]:
    """The two C++ functions, told the types of their arguments."""
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    check, finish = library.halfstep_check, library.halfstep_check_finish
    check.argtypes = [pointer, pointer, long, long, pointer, *[integer] * 4, pointer, pointer, integer]
    finish.argtypes = [pointer, long, pointer, long, *[pointer] * 8]
    check.restype = finish.restype = None
    return check, finish


def _launch_triton(
    table: TensorTable,
    dtype: torch.dtype,
    factor: _Factor | None,
    write: bool,
    scratch: _Scratch | CheckInParts,
    first: int,
) -> None:
    """Check tensors of one dtype, `first` chunks being those of others."""
    mode = 0
    if factor is not None:
        if isinstance(factor.value, torch.Tensor):
            check_addresses(factor.value)
        mode = 2 if isinstance(factor.value, float) else 3 if factor.inverted else 1
    check_kernel[(table.chunks,)](
        table.rows,
        table.chunk_tensor,
        table.tensors,
        1.0 if factor is None else factor.value,
        scratch.flags,
        scratch.sums[first:] if first else scratch.sums,
        DTYPE=triton_dtype(dtype),
        SCALED=mode,
        WRITE=write,
        APART=isinstance(scratch, CheckInParts),
        CHUNK=CHUNK,
        num_warps=CHECK_WARPS,
        enable_fp_fusion=False,
    )


def _launch_native(
    table: TensorTable,
    dtype: torch.dtype,
    factor: _Factor | None,
    write: bool,
    scratch: _Scratch | CheckInParts,
    first: int,
) -> None:
    """Check tensors of one dtype, `first` chunks being those of others."""
    number = ctypes.c_float(factor.value) if factor is not None and isinstance(factor.value, float) else None
    by = None if number is None else ctypes.addressof(number)
    if factor is not None and isinstance(factor.value, torch.Tensor):
        by = address(factor.value)
    library = native.library("unscale")
    assert library is not None
    _entries(library)[0](
        *table.places,
        table.tensors,
        table.chunks,
        by,
        factor is not None and factor.inverted,
        write,
        isinstance(scratch, CheckInParts),
        DTYPE_CODES[dtype],
        address(scratch.flags),
        address(scratch.sums) + 8 * first,
        native.threads(None if isinstance(scratch, _Scratch) else scratch.threads),
    )


def _run_reference(
    tensors: list[torch.Tensor],
    by_dtype: dict[torch.dtype, list[int]],
    factor: _Factor | None,
    write: bool,
    answer: _Answer,
) -> None:
    inv_scale = None if factor is None else factor.for_reference(tensors[0].device)
    answer.flags.zero_()
    sums: list[torch.Tensor] = []
    for indices in by_dtype.values():
        group_sums, group_flags = _reference_pass([tensors[index] for index in indices], inv_scale, write)
        sums.append(group_sums)
        answer.flags[_placed(indices, answer)] = group_flags
    found_inf, sum_of_squares = _reference_finish(torch.cat(sums), answer.flags)
    answer.found_inf.copy_(found_inf)
    answer.sum_of_squares.copy_(sum_of_squares)
    if answer.norm is not None:
        answer.norm.copy_(sum_of_squares.sqrt())
    if answer.tally is not None:
        note(answer.flags, answer.tally)


def _run_by_operations(
    tensors: list[torch.Tensor], factor: _Factor | None, write: bool, answer: _Answer, places: Sequence[int]
) -> None:
    """One pass over tensors some of which have no memory, by what each says that its operations do."""
    inv_scale = None if factor is None else factor.for_reference(answer.flags.device)
    answer.flags.zero_()
    answer.sum_of_squares.zero_()
    for tensor, place in zip(tensors, places, strict=True):
        _check_by_operations(tensor, inv_scale, write, answer.flags[place], answer.sum_of_squares)
    answer.found_inf.copy_(answer.flags.any())
    if answer.norm is not None:
        answer.norm.copy_(answer.sum_of_squares.sqrt())
    if answer.tally is not None:
        note(answer.flags, answer.tally)


def _check_by_operations(
    tensor: torch.Tensor, inv_scale: torch.Tensor | None, write: bool, flag: torch.Tensor, total: torch.Tensor
) -> None:
    """Add to a flag and to a sum of squares, in place: of a subclass that holds several tensors, each adds its own."""
    y = tensor.float() if inv_scale is None else tensor.float() * inv_scale
    if write:
        tensor.copy_(y)
        y = tensor.float()
    flag.bitwise_or_(y.isinf().any().int() * HAS_INF)
    flag.bitwise_or_(y.isnan().any().int() * HAS_NAN)
    total.add_(y.double().square().sum())


def _by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Positions of the tensors of each dtype."""
    dtypes = list(map(attrgetter("dtype"), tensors))
    if len(set(dtypes)) == 1:
        return {dtypes[0]: list(range(len(tensors)))}
    found: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        found.setdefault(dtype, []).append(index)
    return found


def _placed(indices: list[int], answer: _Answer) -> list[int]:
    """The places in the answer's flags of the tensors at `indices`."""
    return indices if answer.places is None else [answer.places[index] for index in indices]


def _run(
    tensors: list[torch.Tensor], factor: _Factor | None, write: bool, answer: _Answer, in_memory: bool = True
) -> None:
    """One pass over flat tensors on one device: a launch per dtype, and one to gather."""
    if not in_memory:
        places = range(len(tensors)) if answer.places is None else answer.places
        _run_by_operations(tensors, factor, write, answer, places)
        return
    device = tensors[0].device
    by_dtype = _by_dtype(tensors)
    implementation = resolve(device, "unscale")
    if implementation == "reference":
        _run_reference(tensors, by_dtype, factor, write, answer)
        return
    with on_device(device):
        tables = []
        for dtype, indices in by_dtype.items():
            group = tensors if len(by_dtype) == 1 else [tensors[index] for index in indices]
            tables.append((_tables[dtype].table(group, numbers=[_placed(indices, answer)]), dtype))
        slots = answer.flags.numel()
        scratch = _scratches.take(device, sum(table.chunks for table, _ in tables), slots)
        launch = _launch_triton if implementation == "triton" else _launch_native
        chunks = 0
        try:
            for table, dtype in tables:
                if table.chunks:
                    launch(table, dtype, factor, write, scratch, chunks)
                    chunks += table.chunks
            _gather(implementation, scratch, chunks, slots, answer)
        except BaseException:
            _scratches.drop()
            raise


def _gather(
    implementation: str,
    scratch: _Scratch | CheckInParts,
    chunks: int,
    tensors: int,
    answer: _Answer,
    gathering: _Gathering | None = None,
) -> None:
    norm = scratch.norm if answer.norm is None else answer.norm
    unused: tuple[None, None] = (None, None)
    tally = unused if answer.tally is None else answer.tally
    apart = unused if gathering is None else (gathering.order, gathering.sources)
    places = answer.found_inf, answer.sum_of_squares, norm, answer.flags, *tally, *apart
    addresses = [None if place is None else address(place) for place in places]
    if implementation == "triton":
        finish_kernel[(1,)](
            scratch.sums,
            chunks,
            scratch.flags,
            tensors,
            *(scratch.flags if place is None else place for place in places),
            LANES=LANES,
            UNROLLED=UNROLLED,
            TALLY=answer.tally is not None,
            APART=gathering is not None,
            num_warps=FINISH_WARPS,
            enable_fp_fusion=False,
        )
        return
    library = native.library("unscale")
    assert library is not None
    _entries(library)[1](address(scratch.sums), chunks, address(scratch.flags), tensors, *addresses)


# ------------------------------------------------------------------------------------------------------------- public


def _checked_factor(value: torch.Tensor | float, device: torch.device, name: str = "inv_scale") -> torch.Tensor | float:
    """A 0-dim fp32 tensor on `device`, or a number that fp32 holds, which needs no launch."""
    if not isinstance(value, torch.Tensor):
        return ctypes.c_float(float(value)).value
    if value.numel() != 1:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; allowed is one number: a float or a one-element tensor"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {value.dtype}; allowed are real dtypes")
    if value.dtype == torch.float32 and value.device == device:
        return value.detach().resolve_neg().reshape(())
    return value.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)


def _checked_out(out: Check, tensors: int, device: torch.device) -> None:
    for name, tensor, dtype, shape in (
        ("found_inf", out.found_inf, torch.float32, ()),
        ("sum_of_squares", out.sum_of_squares, torch.float64, ()),
        ("flags", out.flags, torch.int32, (tensors,)),
    ):
        if (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, shape, device) or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; allowed is contiguous {shape} "
                f"{dtype} on {device}"
            )


def _checked_places(places: Sequence[int], tensors: int, out: Check | None) -> int:
    """How many flags there are."""
    slots = 0 if out is None else out.flags.numel()
    if (
        len(places) != tensors
        or len(set(places)) != tensors
        or (tensors and not 0 <= min(places) <= max(places) < slots)
    ):
        raise ValueError(
            f"places are {len(places)} for {tensors} tensors and {slots} flags in out; allowed is another one for each "
            "tensor, from 0 to below the number of flags"
        )
    return slots


def _checked_tally(tally: Tally, tensors: int, device: torch.device) -> None:
    for name, tensor, dtype, numel in (
        ("counts", tally.counts, torch.int32, 4 * tensors),
        ("step", tally.step, torch.int64, 1),
    ):
        if (tensor.dtype, tensor.numel(), tensor.device) != (dtype, numel, device) or not tensor.is_contiguous():
            raise ValueError(
                f"tally.{name} has {tensor.numel()} elements of {tensor.dtype} on {tensor.device}; allowed are {numel} "
                f"contiguous ones of {dtype} on {device}"
            )


def _answer(tensors: int, device: torch.device, norm: bool) -> _Answer:
    return _Answer(
        torch.empty((), dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.float64, device=device),
        torch.empty(tensors, dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.float32, device=device) if norm else None,
    )


_NOTHING = nullcontext()
CHECK_OF_NOTHING = Check(
    torch.zeros((), dtype=torch.float32, device="cpu"),
    torch.zeros((), dtype=torch.float64, device="cpu"),
    torch.zeros(0, dtype=torch.int32, device="cpu"),
)


@torch.no_grad()
def foreach_check(
    grads: Sequence[torch.Tensor],
    *,
    inv_scale: torch.Tensor | float | None = None,
    scale: torch.Tensor | None = None,
    out: Check | None = None,
    tally: Tally | None = None,
    places: Sequence[int] | None = None,
) -> Check:
    """Find non-finite elements and sum the squares of a list of tensors in one read-only pass.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        inv_scale: if given, what is checked and summed is ``grad * inv_scale`` in fp32, still without writing.
        scale: a one-element tensor; the same with its reciprocal, which costs no launch of its own.
        out: an answer of an earlier call for as many tensors, to be written again: the call then allocates nothing.
        tally: where to note which tensors were bad, a row per flag; on the tensors' device.
        places: for each tensor its place in ``out.flags``, which may then be longer; the others are set to 0.

    Returns:
        `Check`: ``(found_inf, sum_of_squares, flags)`` on the device, new tensors that no later call changes, or `out`;
        nothing waits for it.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, `inv_scale` or `scale` is not one number, both are given, or
            `out` or `tally` does not fit.
    """
    if inv_scale is not None and scale is not None:
        raise ValueError("inv_scale and scale are both given; allowed is one of them: they are each other's reciprocal")
    tensors, in_memory = check_tensor_list(grads, "grads")
    if not tensors:
        return Check(*(part.clone() for part in CHECK_OF_NOTHING))
    device = tensors[0].device
    factor = None
    if inv_scale is not None:
        factor = _Factor(_checked_factor(inv_scale, device))
    elif scale is not None:
        factor = _Factor(_checked_factor(scale, device, "scale"), inverted=True)
    slots = len(tensors)
    if places is not None:
        slots = _checked_places(places, len(tensors), out)
    if out is not None:
        _checked_out(out, slots, device)
    if tally is not None:
        _checked_tally(tally, slots, device)
    with _NOTHING if in_memory else own_operations(tensors):
        answer = _answer(slots, device, norm=False) if out is None else _Answer(*out, None)
        _run(all_flattened(tensors), factor, False, answer._replace(tally=tally, places=places), in_memory)
    if out is not None:
        torch.autograd.graph.increment_version(list(out))
        return out
    return Check(*answer[:3])


def _unscale(
    grads: Sequence[torch.Tensor],
    inv_scale: torch.Tensor | float | None,
    norm: bool,
    out: Check | None = None,
    tally: Tally | None = None,
    places: Sequence[int] | None = None,
) -> _Answer | None:
    """Unscale in place and check; None if there is nothing to do it to."""
    tensors, in_memory = check_tensor_list(grads, "grads")
    if not tensors:
        return None
    device = tensors[0].device
    factor = None if inv_scale is None else _Factor(_checked_factor(inv_scale, device))
    with _NOTHING if in_memory else own_operations(tensors):
        flat = all_flattened(tensors)
        answer = _answer(len(tensors), device, norm) if out is None else _Answer(*out, None)
        answer = answer._replace(tally=tally, places=places)
        _run(flat, factor, factor is not None, answer, in_memory)
    if factor is not None:
        for tensor, copy in zip(tensors, flat, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        torch.autograd.graph.increment_version(tensors)
    if out is not None:
        torch.autograd.graph.increment_version(list(out))
    return answer


@torch.no_grad()
def foreach_unscale_and_check_(
    grads: Sequence[torch.Tensor],
    inv_scale: torch.Tensor | float | None,
    *,
    out: Check | None = None,
    tally: Tally | None = None,
    places: Sequence[int] | None = None,
) -> Check:
    """`foreach_unscale_` with the answer of `foreach_check`: found_inf, sum of squares and flags of the result.

    With `inv_scale` None nothing is written. `out`, `tally` and `places` are as in `foreach_check`, and must fit.
    """
    answer = _unscale(grads, inv_scale, False, out, tally, places)
    return Check(*(part.clone() for part in CHECK_OF_NOTHING)) if answer is None else Check(*answer[:3])


@torch.no_grad()
def foreach_unscale_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float) -> Unscaled:
    """Multiply a list of tensors by `inv_scale` in place, and check the result, in the same pass.

    The product is formed in fp32 and rounded once to each tensor's dtype; the check and the norm see what was stored.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes on one device; may be empty.
        inv_scale: a float or a one-element tensor on any device.

    Returns:
        `Unscaled`: ``(found_inf, norm)``, 0-dim tensors on the device; nothing waits for it.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, or `inv_scale` is not one number.
    """
    answer = _unscale(grads, inv_scale, norm=True)
    if answer is None or answer.norm is None:
        return Unscaled(*(torch.zeros((), dtype=torch.float32, device="cpu") for _ in Unscaled._fields))
    return Unscaled(answer.found_inf, answer.norm)


class _Gathering(NamedTuple):
    """Where one call of `CheckInParts.finish` finds what one `foreach_check` would have made, in its order.

    Attributes:
        order: int32, for each chunk the place of its sum.
        sources: int32, for each tensor the place of its flag, or -1.
    """

    order: torch.Tensor
    sources: torch.Tensor


class CheckInParts:
    """`foreach_check` of tensors that do not come all at once, in any order and any division, with the same bits.

    Each tensor has a slot. `add` checks some tensors, in one launch per dtype, and remembers what it found at their
    slots; added again, the new replaces the old. `finish` gathers slots into the answer that `foreach_check` would have
    given for their tensors, in one launch that reads one number per 4096 elements. Once the divisions and the order
    have been seen, neither allocates anything, and neither ever waits. Parts may be added on any streams, which wait
    for what an earlier `finish` or `add` of theirs must have done; the caller's streams are left as they are. Not while
    a CUDA graph is recorded.

    Args:
        numels: how many elements the tensor of each slot has.
        device: of all tensors.
        threads: of the CPU to check with. Default: as many as torch uses. One is best where parts are checked beside
            other work.

    Attributes:
        numels, device, threads: as given.
        sums: fp64, of each chunk, slot after slot.
        flags: int32, of each slot.
    """

    def __init__(self, numels: Sequence[int], device: torch.device, threads: int | None = None) -> None:
        self.numels = list(numels)
        self.device = device
        self.threads = threads
        counts = [-(-numel // CHUNK) for numel in self.numels]
        self._ends = torch.tensor([0, *counts], dtype=torch.int64, device="cpu").cumsum(0).tolist()
        if self._ends[-1] >= 2**31:
            raise ValueError(
                f"{self._ends[-1]} chunks of {CHUNK} elements; at most 2^31 - 1 fit one check: make several"
            )
        self.sums = torch.empty(self._ends[-1], dtype=torch.float64, device=device)
        self.flags = torch.zeros(len(self.numels), dtype=torch.int32, device=device)
        self.norm = torch.empty((), dtype=torch.float32, device=device)
        self._dtypes: list[torch.dtype | None] = [None] * len(self.numels)
        self._waiting: set[int] = set()  # added and not gathered: their flags may be set
        self._tables: dict[tuple[int, torch.dtype, tuple[int, ...]], TensorTable] = {}
        self._tabled = 0
        self._gatherings: OrderedDict[tuple[Any, ...], _Gathering] = OrderedDict()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._zeroed = Handover(device)  # of the flags
        self._zeroed.put()
        self._adding = threading.Lock()  # parts may come from several threads, and share the flags and the tables

    @torch.no_grad()
    def add(self, slots: Sequence[int], tensors: Sequence[torch.Tensor], *, scale: torch.Tensor | None = None) -> None:
        """Check the tensors of some slots.

        Args:
            slots: of each tensor, all different.
            tensors: fp32, fp16 and bf16; not read later.
            scale: a one-element tensor; what is checked and summed is ``tensor / scale``, as in `foreach_check`.

        Raises:
            TypeError: an element of `tensors` is not a dense fp32, fp16 or bf16 tensor.
            ValueError: a tensor has another size than its slot or another device, or `slots` do not fit.
            RuntimeError: a CUDA graph is being recorded.
        """
        (listed, in_memory), slots = check_tensor_list(tensors, "tensors"), list(slots)
        self._check_slots(slots, listed)
        if not listed:
            return
        self._refuse_capture()
        factor = None if scale is None else _Factor(_checked_factor(scale, self.device, "scale"), inverted=True)
        flat = all_flattened(listed)
        with self._adding, on_device(self.device):
            self._zeroed.take()
            again = not self._waiting.isdisjoint(slots)
            if again:
                self._wait_for_parts()
            self._waiting.update(slots)
            for dtype, indices in _by_dtype(flat).items():
                own = slots if len(indices) == len(slots) else [slots[index] for index in indices]
                for slot in own:
                    self._dtypes[slot] = dtype
                self._launch(dtype, own, [flat[index] for index in indices], factor, in_memory, again)
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                self._streams[stream.cuda_stream] = stream

    def _refuse_capture(self) -> None:
        if capturing(self.device):
            raise RuntimeError(
                f"a CUDA graph is being recorded on {self.device}; allowed is CheckInParts outside of graphs: in one, "
                "use foreach_check"
            )

    def _wait_for_parts(self) -> None:
        """Have the current stream wait for those on which parts were checked."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._streams.clear()

    def _check_slots(self, slots: list[int], tensors: list[torch.Tensor]) -> None:
        count = len(self.numels)
        if (
            len(slots) != len(tensors)
            or len(set(slots)) != len(slots)
            or (slots and not 0 <= min(slots) <= max(slots) < count)
        ):
            raise ValueError(
                f"slots are {len(slots)} for {len(tensors)} tensors; allowed is another one for each tensor, from 0 to "
                f"below {count}"
            )
        expected, numels = [self.numels[slot] for slot in slots], list(map(torch.Tensor.numel, tensors))
        if numels != expected:
            wrong = next(index for index, pair in enumerate(zip(numels, expected, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"the tensor of slot {slots[wrong]} has {numels[wrong]} elements; allowed are {expected[wrong]}"
            )
        if tensors and tensors[0].device != self.device:
            raise ValueError(f"tensors are on {tensors[0].device}; allowed is {self.device}")

    def _launch(
        self,
        dtype: torch.dtype,
        slots: list[int],
        tensors: list[torch.Tensor],
        factor: _Factor | None,
        in_memory: bool,
        again: bool,
    ) -> None:
        """Check tensors of one dtype; `again`: some flags may be set from before."""
        if not in_memory:
            inverse = None if factor is None else factor.for_reference(self.device)
            with own_operations(tensors):
                for slot, tensor in zip(slots, tensors, strict=True):
                    self.flags[slot].zero_()
                    first, end = self._ends[slot], self._ends[slot + 1]
                    self.sums[first:end] = 0
                    total = self.sums[first:end].sum() if first == end else self.sums[first]
                    _check_by_operations(tensor, inverse, False, self.flags[slot], total)
            return
        implementation = resolve(self.device, "unscale")
        if implementation == "reference":
            inverse = None if factor is None else factor.for_reference(self.device)
            sums, flags = _reference_pass(tensors, inverse, write=False)
            where = [
                torch.arange(self._ends[slot], self._ends[slot + 1], dtype=torch.int64, device=self.device)
                for slot in slots
            ]
            self.sums[torch.cat(where)] = sums
            self.flags[slots] = flags
            return
        table = self._table(dtype, slots)
        table.point(0, tensors)
        if again:  # by an index that is on the device: a list would be copied there, and waited for
            self.flags.index_fill_(0, table.rows[ADDRESSES + 1], 0)
        if table.chunks:
            launch = _launch_triton if implementation == "triton" else _launch_native
            launch(table, dtype, factor, False, self, 0)

    def _table(self, dtype: torch.dtype, slots: list[int]) -> TensorTable:
        """The table of these slots on this stream, told where their flags and sums go."""
        key = (current_stream(self.device), dtype, tuple(slots))
        table = self._tables.get(key)
        if table is None:
            self._tabled += len(slots)
            if self._tabled > 4 * len(self.numels):  # divisions that change and change: forget the old ones
                self._tables.clear()
                self._tabled = len(slots)
            counts = [self._ends[slot + 1] - self._ends[slot] for slot in slots]
            firsts = torch.tensor([0, *counts], dtype=torch.int64, device="cpu").cumsum(0).tolist()
            ahead = [self._ends[slot] - first for slot, first in zip(slots, firsts, strict=False)]
            numels = [self.numels[slot] for slot in slots]
            # In one statement, so that an interrupt leaves a whole table or none.
            table = self._tables[key] = TensorTable(numels, 3, CHUNK, self.device, [None, slots, ahead])
        return table

    @torch.no_grad()
    def finish(self, slots: Sequence[int], *, out: Check | None = None, tally: Tally | None = None) -> Check:
        """Gather slots, each added before, into one answer; they must be added again before the next.

        Args:
            slots: in the order in which `foreach_check` would be given their tensors; a negative number stands for a
                tensor that is not there, whose flag is 0.
            out, tally: as in `foreach_check`, with a flag and a row per entry of `slots`.

        Raises:
            ValueError: a slot was not added since it was last gathered or is given twice, or `out` or `tally` does not
                fit.
            RuntimeError: a CUDA graph is being recorded.
        """
        self._refuse_capture()
        slots = list(slots)
        there = [slot for slot in slots if slot >= 0]
        if len(set(there)) != len(there) or not self._waiting.issuperset(there):
            known = set(there) & self._waiting
            raise ValueError(
                f"slots are {len(there)}, of which {len(known)} different ones were added since they were last "
                "gathered; allowed are added ones, once each"
            )
        if out is not None:
            _checked_out(out, len(slots), self.device)
        if tally is not None:
            _checked_tally(tally, len(slots), self.device)
        answer = (_answer(len(slots), self.device, norm=False) if out is None else _Answer(*out, None))._replace(
            tally=tally
        )
        with on_device(self.device):
            self._zeroed.take()
            self._wait_for_parts()
            gathering = self._gathering(slots, there)
            implementation = resolve(self.device, "unscale")
            if implementation == "reference":
                self._finish_in_torch(gathering, answer)
            else:
                _gather(implementation, self, gathering.order.numel(), len(slots), answer, gathering)
            self._zeroed.put()
        self._waiting.difference_update(there)
        if out is not None:
            torch.autograd.graph.increment_version(list(out))
            return out
        return Check(*answer[:3])

    def _gathering(self, slots: list[int], there: list[int]) -> _Gathering:
        """What `finish` needs for these slots on this stream; kept for the last few different ones."""
        dtypes = [self._dtypes[slot] for slot in there]
        key = (current_stream(self.device), tuple(slots), tuple(dtypes) if len(set(dtypes)) > 1 else None)
        found = self._gatherings.pop(key, None)
        if found is None:
            # As `foreach_check` has it: one dtype after the other, as they first come.
            first = {dtype: number for number, dtype in reversed(list(enumerate(dtypes)))}
            by_dtype = sorted(range(len(there)), key=lambda index: first[dtypes[index]])
            spans = [(self._ends[there[index]], self._ends[there[index] + 1]) for index in by_dtype]
            order = [torch.arange(*span, dtype=torch.int32, device="cpu") for span in spans]
            nothing = torch.zeros(0, dtype=torch.int32, device="cpu")
            sources = torch.tensor(slots, dtype=torch.int32, device="cpu").clamp(min=-1)
            ordered = torch.cat([nothing, *order])
            found = _Gathering(upload(ordered, self.device), upload(sources, self.device))
        self._gatherings[key] = found
        while len(self._gatherings) > 8:
            self._gatherings.popitem(last=False)
        return found

    def _finish_in_torch(self, gathering: _Gathering, answer: _Answer) -> None:
        there = gathering.sources >= 0
        places = gathering.sources[there].long()
        answer.flags.zero_()
        answer.flags[there] = self.flags[places]
        self.flags[places] = 0
        found_inf, sum_of_squares = _reference_finish(self.sums[gathering.order.long()], answer.flags)
        answer.found_inf.copy_(found_inf)
        answer.sum_of_squares.copy_(sum_of_squares)
        if answer.tally is not None:
            note(answer.flags, answer.tally)


def variants() -> Iterator[Variant]:
    """Every compiled form of the kernels, for the compile audit."""
    for dtype, name in TRITON_NAMES.items():
        for kind in ("check", "unscale", "check in parts"):
            write, apart = kind == "unscale", kind == "check in parts"
            yield Variant(
                kernel=check_kernel,
                name=f"{name} {kind}",
                signature={
                    "rows": "*i64",
                    "chunk_tensor": "*i32",
                    "tensors": "i32",
                    "inv_scale": "*fp32",
                    "flags": "*i32",
                    "sums": "*fp64",
                },
                constexprs={
                    "DTYPE": triton_dtype(dtype),
                    "SCALED": 1 if write else 3,
                    "WRITE": write,
                    "APART": apart,
                    "CHUNK": CHUNK,
                },
                divisible_by_16=("rows", "chunk_tensor"),
                num_warps=CHECK_WARPS,
                bytes_read=dtype.itemsize,
                bytes_written=dtype.itemsize * write,
            )
    for apart in (False, True):
        yield Variant(
            kernel=finish_kernel,
            name="finish parts" if apart else "finish",
            signature={
                "sums": "*fp64",
                "chunks": "i32",
                "flags": "*i32",
                "tensors": "i32",
                "found_inf": "*fp32",
                "sum_of_squares": "*fp64",
                "norm": "*fp32",
                "flags_out": "*i32",
                "tally": "*i32",
                "step": "*i64",
                "order": "*i32",
                "sources": "*i32",
            },
            constexprs={"LANES": LANES, "UNROLLED": UNROLLED, "TALLY": True, "APART": apart},
            divisible_by_16=("sums", "flags", "flags_out", "tally", *(("order", "sources") if apart else ())),
            num_warps=FINISH_WARPS,
        )
