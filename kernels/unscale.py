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
to count), squared in fp32 and summed in a fixed tree: element i with element i + 2048, then i with i + 1024, then
neighbours, 2i with 2i + 1, until one is left. So a thread of a GPU, which holds neighbours from each quarter, does most
of the tree in its registers, and a CPU adds the quarters as vectors. The chunk's sum goes back to its scale in fp64,
whose range holds every square of an fp32. The chunks' sums are added in fp64: 1024 lanes, lane j taking chunks j,
j + 1024, ... in order, then the same tree over the lanes. Zeros pad a short chunk and change no bit. So 1e30 sums to
1e60 where fp32 has infinity, and 1e-30 to 1e-60 where it has 0.

A call is one launch per dtype and one that gathers: chunks into the sum, flags into the answer. What lies between, one
fp64 per chunk and one int32 per tensor, is kept per thread and stream and used again. The gathering launch leaves the
flags zero, as the next call needs them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import jit, on_device, resolve, tl, triton_dtype
from halfstep.kernels.multi_tensor import (
    DTYPE_CODES,
    TableCache,
    TensorTable,
    address,
    all_flattened,
    all_have_memory,
    check_addresses,
    check_tensor_list,
    checked_addresses,
    own_operations,
)
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.streams import capturing, current_stream

CHUNK = 4096
LANES = 1024
UNROLLED = 8  # loads of all lanes under way at a time while gathering
CHECK_WARPS = 4  # with 8, 18.9 instead of 10.8 instructions per bf16 element
FINISH_WARPS = 8

HAS_INF, HAS_NAN = 1, 2


class Verdict(NamedTuple):
    """What a check of gradients finds, on their device.

    Attributes:
        found_inf: 0-dim fp32, 1.0 if any element is non-finite, else 0.0.
        sum_of_squares: 0-dim fp64, over all elements.
        flags: int32, one per tensor: 0 finite, 1 holds an Inf, 2 holds a NaN, 3 both. Empty where the verdict combines
            those of several devices or ranks.
    """

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor
    flags: torch.Tensor

    def first_bad(self) -> torch.Tensor:
        """0-dim int64: the index of the first tensor that holds a non-finite element; -1 if none does."""
        bad = self.flags != 0
        # A leading entry that is true only if no other is, at index -1.
        return torch.cat([~bad.any().reshape(1), bad]).int().argmax() - 1

    @classmethod
    def empty(cls, tensors: int, device: torch.device) -> Verdict:
        """Memory for a verdict on so many tensors."""
        return cls(
            torch.empty((), dtype=torch.float32, device=device),
            torch.empty((), dtype=torch.float64, device=device),
            torch.empty(tensors, dtype=torch.int32, device=device),
        )


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
    """Sum the last dimension, a power of two from 4: halves, halves of these, then neighbours until one is left."""
    for _ in range(2):
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
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
    inv_scale,  # fp32 scalar's address, or the number itself, as SCALED says
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,)
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,  # 0: not, 1: by what lies at `inv_scale`, 2: by `inv_scale`, 3: by one over what lies there
    WRITE: tl.constexpr,
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
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
    TALLY: tl.constexpr,
):
    """Add the chunks and gather the flags, in one program."""
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
            bad = there & (flag != 0)  # of the others nothing is read or written
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
    """What gradients are multiplied by: a number, what lies at a tensor (0-dim fp32), or one over that."""

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


def _launch_triton(
    table: TensorTable, dtype: torch.dtype, factor: Factor | None, write: bool, scratch: _Scratch, first: int
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
        CHUNK=CHUNK,
        num_warps=CHECK_WARPS,
        enable_fp_fusion=False,
    )


def _launch_native(
    table: TensorTable, dtype: torch.dtype, factor: Factor | None, write: bool, scratch: _Scratch, first: int
) -> None:
    """Check tensors of one dtype, `first` chunks being those of others."""
    number = ctypes.c_float(factor.value) if factor is not None and isinstance(factor.value, float) else None
    by = None if number is None else ctypes.addressof(number)
    if factor is not None and isinstance(factor.value, torch.Tensor):
        by = address(factor.value)
    flags, sums = checked_addresses((scratch.flags, scratch.sums))
    native.functions("unscale").halfstep_check(
        *table.places,
        table.tensors,
        table.chunks,
        by,
        factor is not None and factor.inverted,
        write,
        DTYPE_CODES[dtype],
        flags,
        sums + 8 * first,
        native.threads(),
    )


def _gather(
    implementation: str,
    scratch: _Scratch,
    chunks: int,
    out: Verdict,
    norm: torch.Tensor | None,
    tally: Tally | None,
) -> None:
    results = (out.found_inf, out.sum_of_squares, scratch.norm if norm is None else norm, out.flags)
    slots = out.flags.numel()
    addresses = checked_addresses((scratch.sums, scratch.flags, *results, *(tally or ())))
    if implementation == "triton":
        finish_kernel[(1,)](
            scratch.sums,
            chunks,
            scratch.flags,
            slots,
            *results,
            *((scratch.flags, scratch.flags) if tally is None else tally),
            LANES=LANES,
            UNROLLED=UNROLLED,
            TALLY=tally is not None,
            num_warps=FINISH_WARPS,
            enable_fp_fusion=False,
        )
        return
    sums, flags, *rest = addresses
    native.functions("unscale").halfstep_check_finish(
        sums, chunks, flags, slots, *rest, *(() if tally else (None, None))
    )


def _finish_in_torch(out: Verdict, norm: torch.Tensor | None, tally: Tally | None) -> None:
    """What the gathering launch writes beside the flags and the sum."""
    out.found_inf.copy_(out.flags.any())
    if norm is not None:
        norm.copy_(out.sum_of_squares.sqrt())
    if tally is not None:
        note(out.flags, tally)


def _by_operations(
    tensor: torch.Tensor, inv_scale: torch.Tensor | None, write: bool, flag: torch.Tensor, total: torch.Tensor
) -> None:
    """Add to a flag and to a sum of squares, in place: of a subclass that holds several tensors, each adds its own."""
    y = tensor.float() if tensor.dtype in DTYPE_CODES else tensor
    if inv_scale is not None:
        y = y * inv_scale
    if write:
        y = tensor.copy_(y).float() if tensor.dtype in DTYPE_CODES else tensor.copy_(y)
    flag.bitwise_or_(y.isinf().any().int() * HAS_INF)
    flag.bitwise_or_(y.isnan().any().int() * HAS_NAN)
    total.add_(y.abs().double().square().sum())


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, Sequence[int]]:
    """Positions of the tensors of each dtype."""
    dtypes = list(map(attrgetter("dtype"), tensors))
    if len(set(dtypes)) == 1:
        return {dtypes[0]: range(len(tensors))}
    found: dict[torch.dtype, list[int]] = {}
    for index, dtype in enumerate(dtypes):
        found.setdefault(dtype, []).append(index)
    return {dtype: indices for dtype, indices in found.items()}


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
    """One pass over tensors that were validated: what `foreach_check` and `foreach_unscale_` do.

    Args:
        tensors: fp32, fp16 and bf16, dense, on one device, at least one.
        factor: what to multiply by; None for 1.
        write: store the products.
        out: where to write, with as many flags as `places` are numbered for; None for new tensors.
        norm: 0-dim fp32, to be set to the root of the sum.
        tally: where to note which tensors were bad, a row per flag.
        places: for each tensor its place among the flags, all different; the other flags become 0. None: in order.
        in_memory: whether kernels may read the tensors at their addresses. If not, torch's operations are used, which
            know other dtypes too. None to find out.
    """
    if in_memory is None:
        in_memory = all_have_memory(tensors)
    device = tensors[0].device
    places = range(len(tensors)) if places is None else places
    if not in_memory:
        with torch.no_grad(), own_operations(tensors):
            out = Verdict.empty(len(tensors), device) if out is None else out
            inv_scale = None if factor is None else factor.for_reference(device)
            out.flags.zero_()
            out.sum_of_squares.zero_()
            for tensor, place in zip(tensors, places, strict=True):
                _by_operations(tensor, inv_scale, write, out.flags[place], out.sum_of_squares)
            _finish_in_torch(out, norm, tally)
        return out
    out = Verdict.empty(len(tensors), device) if out is None else out
    flat = all_flattened(tensors)
    by_dtype = _by_dtype(flat)
    implementation = resolve(device, "unscale")
    if implementation == "reference":
        with torch.no_grad():
            _run_reference(flat, by_dtype, factor, write, out, norm, tally, places)
    else:
        _run_kernels(implementation, flat, by_dtype, factor, write, out, norm, tally, places)
    if write:
        if flat is not tensors:
            with torch.no_grad():
                for tensor, copy in zip(tensors, flat, strict=True):
                    if copy is not tensor:
                        tensor.copy_(copy)
        torch.autograd.graph.increment_version(tensors)
    return out


def _run_reference(
    tensors: list[torch.Tensor],
    by_dtype: dict[torch.dtype, Sequence[int]],
    factor: Factor | None,
    write: bool,
    out: Verdict,
    norm: torch.Tensor | None,
    tally: Tally | None,
    places: Sequence[int],
) -> None:
    inv_scale = None if factor is None else factor.for_reference(tensors[0].device)
    out.flags.zero_()
    sums: list[torch.Tensor] = []
    for indices in by_dtype.values():
        group_sums, group_flags = _reference_pass([tensors[index] for index in indices], inv_scale, write)
        sums.append(group_sums)
        out.flags[[places[index] for index in indices]] = group_flags
    out.sum_of_squares.copy_(_reference_sum(torch.cat(sums)))
    _finish_in_torch(out, norm, tally)


def _run_kernels(
    implementation: str,
    tensors: list[torch.Tensor],
    by_dtype: dict[torch.dtype, Sequence[int]],
    factor: Factor | None,
    write: bool,
    out: Verdict,
    norm: torch.Tensor | None,
    tally: Tally | None,
    places: Sequence[int],
) -> None:
    """A launch per dtype, and one to gather."""
    device = tensors[0].device
    with on_device(device):
        tables = []
        for dtype, indices in by_dtype.items():
            if len(by_dtype) == 1:
                tables.append((_tables[dtype].table(tensors, numbers=[list(places)]), dtype))
            else:
                own = [places[index] for index in indices]
                tables.append((_tables[dtype].table([tensors[index] for index in indices], numbers=[own]), dtype))
        chunks = sum([table.chunks for table, _ in tables])
        scratch = _scratches.take(device, chunks, out.flags.numel())
        launch = _launch_triton if implementation == "triton" else _launch_native
        chunks = 0
        try:
            for table, dtype in tables:
                if table.chunks:
                    launch(table, dtype, factor, write, scratch, chunks)
                    chunks += table.chunks
            _gather(implementation, scratch, chunks, out, norm, tally)
        except BaseException:
            _scratches.drop()
            raise


# ------------------------------------------------------------------------------------------------------------- public


def _checked_factor(value: torch.Tensor | float | None, device: torch.device) -> Factor | None:
    """A 0-dim fp32 tensor on `device`, or a number that fp32 holds, which needs no launch."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return Factor(ctypes.c_float(float(value)).value)
    if value.numel() != 1:
        raise ValueError(
            f"Expected inv_scale to be one number, a float or a one-element tensor, but got shape {tuple(value.shape)}"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"Expected inv_scale to have a real dtype, but got {value.dtype}")
    if value.dtype == torch.float32 and value.device == device:
        return Factor(value.detach().resolve_neg().reshape(()))
    return Factor(value.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True))


def foreach_check(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float | None = None) -> Verdict:
    """Find non-finite elements and sum the squares of a list of tensors in one read-only pass.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        inv_scale: a float or a one-element tensor on any device. If given, ``grad * inv_scale`` in fp32 is checked and
            summed; the gradients are not written.

    Returns:
        `Verdict`: ``(found_inf, sum_of_squares, flags)`` on the device. The call does not wait for the device.

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
        return Verdict(*map(torch.zeros_like, Verdict.empty(0, torch.device("cpu"))))
    return check(tensors, _checked_factor(inv_scale, tensors[0].device), in_memory=in_memory)


def foreach_unscale_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float) -> Unscaled:
    """Multiply a list of tensors by `inv_scale` in place and check the result, in one pass.

    The product is computed in fp32 and rounded once to the dtype of the tensor; the check and the norm use the stored
    values.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes on one device; may be empty.
        inv_scale: a float or a one-element tensor on any device.

    Returns:
        `Unscaled`: ``(found_inf, norm)``, 0-dim tensors on the device. The call does not wait for the device.

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
        found = check(tensors, factor, write=True, in_memory=False)
        return Unscaled(found.found_inf, found.sum_of_squares.sqrt().float())
    norm = torch.empty((), dtype=torch.float32, device=device)
    return Unscaled(check(tensors, factor, write=True, norm=norm, in_memory=True).found_inf, norm)
