"""Unscale gradients, find non-finite ones, sum their squares: one pass over a list of tensors.

    y = x * inv_scale                      fp32, rounded once to x's dtype when written back
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
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import TRITON_NAMES, jit, on_device, resolve, tl, triton_dtype
from halfstep.kernels.multi_tensor import DTYPE_CODES, TableCache, capturing, check_tensor_list, flattened
from halfstep.kernels.rounding import from_float32, to_float32
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
    values = tl.sum(tl.reshape(values, (2, LENGTH // 2)), axis=0)
    if LENGTH > 2:
        return _tree_sum_block(values, LENGTH // 2)
    else:
        return tl.sum(values, axis=0)


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


@jit
def check_kernel(
    rows,  # int64 (4, tensors): see multi_tensor.py; operands are the address and the tensor's place in `flags`
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    inv_scale,  # fp32 scalar's address, or the number itself, as SCALED says
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,)
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,  # 0: not, 1: by what lies at `inv_scale`, 2: by `inv_scale`
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


@jit
def finish_kernel(
    sums,  # fp64 (chunks,)
    chunks,
    flags,  # int32 (tensors,); zero on return
    tensors,
    found_inf,  # fp32 scalar, and what follows is written
    sum_of_squares,  # fp64 scalar
    norm,  # fp32 scalar
    flags_out,  # int32 (tensors,)
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
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
        flag = tl.load(flags + at, mask=at < tensors, other=0)
        any_flag |= flag
        tl.store(flags_out + at, flag, mask=at < tensors)
        tl.store(flags + at, tl.zeros_like(flag), mask=at < tensors)
    tl.store(found_inf, (tl.max(any_flag, axis=0) != 0).to(tl.float32))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables: dict[torch.dtype, TableCache] = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in DTYPE_CODES}


class _Answer(NamedTuple):
    """Where a call writes: `Check`, and the norm in fp32 if it is asked for."""

    found_inf: torch.Tensor
    sum_of_squares: torch.Tensor
    flags: torch.Tensor
    norm: torch.Tensor | None


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
        """At least so long.

        What a graph captures stays in the graph's own memory, or a replay would write where another call does.
        """
        stream = 0
        if capturing(device):
            return _Scratch(device, chunks, tensors)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
        key = (device, stream)
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
    check.argtypes = [pointer, pointer, long, long, pointer, integer, integer, pointer, pointer, integer]
    finish.argtypes = [pointer, long, pointer, long, pointer, pointer, pointer, pointer]
    check.restype = finish.restype = None
    return check, finish


def _launch_triton(
    group: list[torch.Tensor],
    indices: list[int],
    inv_scale: torch.Tensor | float | None,
    write: bool,
    scratch: _Scratch,
    first: int,
) -> int:
    """Check tensors of one dtype, `first` chunks being those of others; returns how many chunks they make."""
    table = _tables[group[0].dtype].table(group, numbers=(indices,))
    if table.chunks:
        check_kernel[(table.chunks,)](
            table.rows,
            table.chunk_tensor,
            table.tensors,
            1.0 if inv_scale is None else inv_scale,
            scratch.flags,
            scratch.sums[first:] if first else scratch.sums,
            DTYPE=triton_dtype(group[0].dtype),
            SCALED=0 if inv_scale is None else 1 if isinstance(inv_scale, torch.Tensor) else 2,
            WRITE=write,
            CHUNK=CHUNK,
            num_warps=CHECK_WARPS,
            enable_fp_fusion=False,
        )
    return table.chunks


def _launch_native(
    group: list[torch.Tensor],
    indices: list[int],
    inv_scale: torch.Tensor | float | None,
    write: bool,
    scratch: _Scratch,
    first: int,
) -> int:
    """Check tensors of one dtype, `first` chunks being those of others; returns how many chunks they make."""
    table = _tables[group[0].dtype].table(group, numbers=(indices,))
    number = ctypes.c_float(inv_scale) if isinstance(inv_scale, float) else None
    factor = None if number is None else ctypes.addressof(number)
    if isinstance(inv_scale, torch.Tensor):
        factor = inv_scale.data_ptr()
    library = native.library("unscale")
    assert library is not None
    _entries(library)[0](
        table.rows.data_ptr(),
        table.chunk_tensor.data_ptr(),
        table.tensors,
        table.chunks,
        factor,
        write,
        DTYPE_CODES[group[0].dtype],
        scratch.flags.data_ptr(),
        scratch.sums.data_ptr() + 8 * first,
        torch.get_num_threads(),
    )
    return table.chunks


def _run_reference(
    tensors: list[torch.Tensor],
    by_dtype: dict[torch.dtype, list[int]],
    inv_scale: torch.Tensor | float | None,
    write: bool,
    answer: _Answer,
) -> None:
    if isinstance(inv_scale, float):
        inv_scale = torch.full((), inv_scale, dtype=torch.float32, device=tensors[0].device)
    sums: list[torch.Tensor] = []
    for indices in by_dtype.values():
        group_sums, group_flags = _reference_pass([tensors[index] for index in indices], inv_scale, write)
        sums.append(group_sums)
        answer.flags[indices] = group_flags
    found_inf, sum_of_squares = _reference_finish(torch.cat(sums), answer.flags)
    answer.found_inf.copy_(found_inf)
    answer.sum_of_squares.copy_(sum_of_squares)
    if answer.norm is not None:
        answer.norm.copy_(sum_of_squares.sqrt())


def _run(tensors: list[torch.Tensor], inv_scale: torch.Tensor | float | None, write: bool, answer: _Answer) -> None:
    """One pass over flat tensors on one device: a launch per dtype, and one to gather."""
    device = tensors[0].device
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    implementation = resolve(device, "unscale")
    if implementation == "reference":
        _run_reference(tensors, by_dtype, inv_scale, write, answer)
        return
    count = len(tensors)
    most = sum((tensor.numel() + CHUNK - 1) // CHUNK for tensor in tensors)
    with on_device(device):
        scratch = _scratches.take(device, most, count)
        launch = _launch_triton if implementation == "triton" else _launch_native
        chunks = 0
        try:
            for indices in by_dtype.values():
                group = tensors if len(by_dtype) == 1 else [tensors[index] for index in indices]
                chunks += launch(group, indices, inv_scale, write, scratch, chunks)
            _gather(implementation, scratch, chunks, count, answer)
        except BaseException:
            _scratches.drop()
            raise


def _gather(implementation: str, scratch: _Scratch, chunks: int, tensors: int, answer: _Answer) -> None:
    norm = scratch.norm if answer.norm is None else answer.norm
    places = answer.found_inf, answer.sum_of_squares, norm, answer.flags
    if implementation == "triton":
        finish_kernel[(1,)](
            scratch.sums,
            chunks,
            scratch.flags,
            tensors,
            *places,
            LANES=LANES,
            UNROLLED=UNROLLED,
            num_warps=FINISH_WARPS,
            enable_fp_fusion=False,
        )
        return
    library = native.library("unscale")
    assert library is not None
    addresses = [place.data_ptr() for place in places]
    _entries(library)[1](scratch.sums.data_ptr(), chunks, scratch.flags.data_ptr(), tensors, *addresses)


# ------------------------------------------------------------------------------------------------------------- public


def _checked_inv_scale(inv_scale: torch.Tensor | float, device: torch.device) -> torch.Tensor | float:
    """A 0-dim fp32 tensor on `device`, or a number that fp32 holds, which needs no launch."""
    if not isinstance(inv_scale, torch.Tensor):
        return ctypes.c_float(float(inv_scale)).value
    if inv_scale.numel() != 1:
        raise ValueError(
            f"inv_scale has shape {tuple(inv_scale.shape)}; allowed is one number: a float or a one-element tensor"
        )
    if inv_scale.is_complex() or inv_scale.dtype == torch.bool:
        raise TypeError(f"inv_scale has dtype {inv_scale.dtype}; allowed are real dtypes")
    if inv_scale.dtype == torch.float32 and inv_scale.device == device:
        return inv_scale.detach().resolve_neg().reshape(())
    return inv_scale.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)


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


def _answer(tensors: int, device: torch.device, norm: bool) -> _Answer:
    return _Answer(
        torch.empty((), dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.float64, device=device),
        torch.empty(tensors, dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.float32, device=device) if norm else None,
    )


CHECK_OF_NOTHING = Check(torch.zeros(()), torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.int32))


@torch.no_grad()
def foreach_check(
    grads: Sequence[torch.Tensor], *, inv_scale: torch.Tensor | float | None = None, out: Check | None = None
) -> Check:
    """Find non-finite elements and sum the squares of a list of tensors in one read-only pass.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes and strides on one device; may be empty.
        inv_scale: if given, what is checked and summed is ``grad * inv_scale`` in fp32, still without writing.
        out: an answer of an earlier call for as many tensors, to be written again: the call then allocates nothing.

    Returns:
        `Check`: ``(found_inf, sum_of_squares, flags)`` on the device, new tensors that no later call changes, or `out`;
        nothing waits for it.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, `inv_scale` is not one number, or `out` does not fit.
    """
    tensors = check_tensor_list(grads, "grads")
    if not tensors:
        return Check(*(part.clone() for part in CHECK_OF_NOTHING))
    device = tensors[0].device
    factor = None if inv_scale is None else _checked_inv_scale(inv_scale, device)
    if out is not None:
        _checked_out(out, len(tensors), device)
    answer = _answer(len(tensors), device, norm=False) if out is None else _Answer(*out, None)
    _run([flattened(tensor) for tensor in tensors], factor, False, answer)
    if out is not None:
        torch.autograd.graph.increment_version(list(out))
        return out
    return Check(*answer[:3])


def _unscale(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float | None, norm: bool) -> _Answer | None:
    """Unscale in place and check; None if there is nothing to do it to."""
    tensors = check_tensor_list(grads, "grads")
    if not tensors:
        return None
    device = tensors[0].device
    factor = None if inv_scale is None else _checked_inv_scale(inv_scale, device)
    flat = [flattened(tensor) for tensor in tensors]
    answer = _answer(len(tensors), device, norm)
    _run(flat, factor, factor is not None, answer)
    if factor is not None:
        for tensor, copy in zip(tensors, flat, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        torch.autograd.graph.increment_version(tensors)
    return answer


@torch.no_grad()
def foreach_unscale_and_check_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float | None) -> Check:
    """`foreach_unscale_` with the answer of `foreach_check`: found_inf, sum of squares and flags of the result.

    With `inv_scale` None nothing is written.
    """
    answer = _unscale(grads, inv_scale, norm=False)
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
        return Unscaled(torch.zeros(()), torch.zeros(()))
    return Unscaled(answer.found_inf, answer.norm)


def variants() -> Iterator[Variant]:
    """Every compiled form of the kernels, for the compile audit."""
    for dtype, name in TRITON_NAMES.items():
        for write in (False, True):
            yield Variant(
                kernel=check_kernel,
                name=f"{name} {'unscale' if write else 'check'}",
                signature={
                    "rows": "*i64",
                    "chunk_tensor": "*i32",
                    "tensors": "i32",
                    "inv_scale": "*fp32",
                    "flags": "*i32",
                    "sums": "*fp64",
                },
                constexprs={"DTYPE": triton_dtype(dtype), "SCALED": 1, "WRITE": write, "CHUNK": CHUNK},
                divisible_by_16=("rows", "chunk_tensor", "sums"),
                num_warps=CHECK_WARPS,
                bytes_read=dtype.itemsize,
                bytes_written=dtype.itemsize * write,
            )
    yield Variant(
        kernel=finish_kernel,
        name="finish",
        signature={
            "sums": "*fp64",
            "chunks": "i32",
            "flags": "*i32",
            "tensors": "i32",
            "found_inf": "*fp32",
            "sum_of_squares": "*fp64",
            "norm": "*fp32",
            "flags_out": "*i32",
        },
        constexprs={"LANES": LANES, "UNROLLED": UNROLLED},
        divisible_by_16=("sums", "flags", "flags_out"),
        num_warps=FINISH_WARPS,
    )
