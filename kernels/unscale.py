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
chunk and change no bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import TRITON_NAMES, jit, on_device, resolve, tl, triton_dtype
from halfstep.kernels.multi_tensor import DTYPE_CODES, TableCache, TensorTable, check_tensor_list, is_flat
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.variant import Variant

CHUNK = 4096
LANES = 1024
CHECK_WARPS = 8  # with 4, the bf16 check spills 3 registers on sm_100

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
    inv_scale,  # fp32 scalar, read if SCALED
    flags,  # int32, zero on entry
    sums,  # fp64 (chunks,)
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    WRITE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    within = chunk - tl.load(rows + tensors + tensor)
    address = tl.load(rows + 2 * tensors + tensor)
    flag = flags + tl.load(rows + 3 * tensors + tensor)
    start = within * CHUNK
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    offsets = tl.arange(0, CHUNK)
    factor = tl.load(inv_scale) if SCALED else 1.0
    if (address % 16 == 0) & (left == CHUNK):
        # A full, aligned chunk: the hint must come after the cast to survive, and no mask may hide it.
        at = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16) + start + offsets
        y = to_float32(tl.load(at))
        if SCALED:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored)
            y = to_float32(stored)
        _check_block(y, flag, sums + chunk, CHUNK)
    else:
        at = address.to(tl.pointer_type(DTYPE)) + start + offsets
        y = to_float32(tl.load(at, mask=offsets < left, other=0.0))
        if SCALED:
            y = y * factor
        if WRITE:
            stored = from_float32(y, DTYPE)
            tl.store(at, stored, mask=offsets < left)
            y = to_float32(stored)
        # A lane beyond the end holds 0 * factor, which is NaN for an infinite factor.
        y = tl.where(offsets < left, y, 0.0)
        _check_block(y, flag, sums + chunk, CHUNK)


@jit
def finish_kernel(sums, chunks, flags, tensors, found_inf, sum_of_squares, LANES: tl.constexpr):
    """Add the chunks and gather the flags, in one program."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), dtype=tl.float64)
    for start in range(0, chunks, LANES):
        total += tl.load(sums + start + lane, mask=start + lane < chunks, other=0.0)
    tl.store(sum_of_squares, _tree_sum_block(total, LANES))
    any_flag = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(0, tensors, LANES):
        any_flag |= tl.load(flags + start + lane, mask=start + lane < tensors, other=0)
    tl.store(found_inf, (tl.max(any_flag, axis=0) != 0).to(tl.float32))


# ---------------------------------------------------------------------------------------------------------- launchers

_tables: dict[torch.dtype, TableCache] = {dtype: TableCache(operands=2, chunk=CHUNK) for dtype in DTYPE_CODES}


def _triton_pass(
    table: TensorTable,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None,
    write: bool,
    flags: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    check_kernel[(table.chunks,)](
        table.rows,
        table.chunk_tensor,
        table.tensors,
        flags if inv_scale is None else inv_scale,
        flags,
        sums,
        DTYPE=triton_dtype(dtype),
        SCALED=inv_scale is not None,
        WRITE=write,
        CHUNK=CHUNK,
        num_warps=CHECK_WARPS,
        enable_fp_fusion=False,
    )


def _native_pass(
    table: TensorTable,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None,
    write: bool,
    flags: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    library = native.library("unscale")
    assert library is not None
    library.halfstep_check(
        ctypes.c_void_p(table.rows.data_ptr()),
        ctypes.c_void_p(table.chunk_tensor.data_ptr()),
        ctypes.c_int64(table.tensors),
        ctypes.c_int64(table.chunks),
        ctypes.c_void_p(None if inv_scale is None else inv_scale.data_ptr()),
        ctypes.c_int32(write),
        ctypes.c_int32(DTYPE_CODES[dtype]),
        ctypes.c_void_p(flags.data_ptr()),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_int32(torch.get_num_threads()),
    )


def _run(tensors: list[torch.Tensor], inv_scale: torch.Tensor | None, write: bool) -> Check:
    """One pass over tensors on one device: a launch per dtype, and one to gather."""
    device = tensors[0].device
    implementation = resolve(device, "unscale")
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    flags = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    all_sums: list[torch.Tensor] = []
    for dtype, indices in by_dtype.items():
        group = [tensors[index] for index in indices]
        if implementation == "reference":
            sums, group_flags = _reference_pass(group, inv_scale, write)
            flags[indices] = group_flags
        else:
            table = _tables[dtype].table(group)
            table.refresh(1, indices)
            sums = torch.empty(table.chunks, dtype=torch.float64, device=device)
            if table.chunks:
                launch = _triton_pass if implementation == "triton" else _native_pass
                with on_device(device):
                    launch(table, dtype, inv_scale, write, flags, sums)
        all_sums.append(sums)
    sums = all_sums[0] if len(all_sums) == 1 else torch.cat(all_sums)
    if implementation == "triton":
        found_inf = torch.empty((), dtype=torch.float32, device=device)
        sum_of_squares = torch.empty((), dtype=torch.float64, device=device)
        with on_device(device):
            finish_kernel[(1,)](
                sums, sums.numel(), flags, flags.numel(), found_inf, sum_of_squares, LANES=LANES, enable_fp_fusion=False
            )
    else:
        found_inf, sum_of_squares = _reference_finish(sums, flags)
    return Check(found_inf, sum_of_squares, flags)


# ------------------------------------------------------------------------------------------------------------- public


def _checked_inv_scale(inv_scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(inv_scale, torch.Tensor):
        return torch.full((), float(inv_scale), dtype=torch.float32, device=device)
    if inv_scale.numel() != 1:
        raise ValueError(
            f"inv_scale has shape {tuple(inv_scale.shape)}; allowed is one number: a float or a one-element tensor"
        )
    if inv_scale.is_complex() or inv_scale.dtype == torch.bool:
        raise TypeError(f"inv_scale has dtype {inv_scale.dtype}; allowed are real dtypes")
    if inv_scale.dtype == torch.float32 and inv_scale.device == device:
        return inv_scale.detach().reshape(())
    return inv_scale.detach().reshape(()).to(device=device, dtype=torch.float32, non_blocking=True)


CHECK_OF_NOTHING = Check(torch.zeros(()), torch.zeros((), dtype=torch.float64), torch.zeros(0, dtype=torch.int32))


@torch.no_grad()
def foreach_check(grads: Sequence[torch.Tensor], *, inv_scale: torch.Tensor | float | None = None) -> Check:
    """Find non-finite elements and sum the squares of a list of tensors in one read-only pass.

    Args:
        grads: fp32, fp16 and bf16 tensors of any shapes on one device; may be empty.
        inv_scale: if given, what is checked and summed is ``grad * inv_scale`` in fp32, still without writing.

    Returns:
        `Check`: ``(found_inf, sum_of_squares, flags)`` on the device; nothing waits for it.

    Raises:
        TypeError: an element of `grads` is not a dense fp32, fp16 or bf16 tensor.
        ValueError: the tensors are on different devices, or `inv_scale` is not one number.
    """
    tensors = check_tensor_list(grads, "grads")
    if not tensors:
        return Check(*(part.clone() for part in CHECK_OF_NOTHING))
    factor = None if inv_scale is None else _checked_inv_scale(inv_scale, tensors[0].device)
    return _run([t if is_flat(t) else t.contiguous() for t in tensors], factor, write=False)


@torch.no_grad()
def foreach_unscale_and_check_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor | float | None) -> Check:
    """`foreach_unscale_` with the answer of `foreach_check`: found_inf, sum of squares and flags of the result."""
    tensors = check_tensor_list(grads, "grads")
    if not tensors:
        return Check(*(part.clone() for part in CHECK_OF_NOTHING))
    factor = _checked_inv_scale(1.0 if inv_scale is None else inv_scale, tensors[0].device)
    flat = [t if is_flat(t) else t.contiguous() for t in tensors]
    check = _run(flat, factor, write=True)
    for tensor, copy in zip(tensors, flat, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
    torch.autograd.graph.increment_version(tensors)
    return check


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
    check = foreach_unscale_and_check_(grads, inv_scale)
    return Unscaled(check.found_inf, check.sum_of_squares.sqrt().float())


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
                constexprs={"DTYPE": triton_dtype(dtype), "SCALED": True, "WRITE": write, "CHUNK": CHUNK},
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
        },
        constexprs={"LANES": LANES},
        divisible_by_16=("sums",),
    )
