"""Cast between fp32, fp16 and bf16, rounding to nearest even: one tensor, or a list of tensors in one launch.

IEEE 754-2019 §4.3.1 (roundTiesToEven). Overflow becomes infinity, subnormals are kept, NaN stays NaN (its payload is
not kept). 16-bit to 16-bit goes through fp32, which holds every value of both exactly, so it rounds once.

Bytes per element: the source is read once, the target written once: 6 B between fp32 and a 16-bit format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import TRITON_NAMES, jit, on_device, resolve, tl, triton_dtype
from halfstep.kernels.multi_tensor import DTYPE_CODES, TableCache, TensorTable, check_tensor, check_tensor_list, is_flat
from halfstep.kernels.rounding import from_float32, to_float32
from halfstep.kernels.variant import Variant

CHUNK = 4096
ROUNDINGS = ("nearest",)

# --------------------------------------------------------------------------------------------------------- reference


def _reference(source: torch.Tensor, target: torch.Tensor) -> None:
    """torch's own conversion rounds to nearest even on every device."""
    target.copy_(source)


# ----------------------------------------------------------------------------------------------------------- kernels


@jit
def cast_kernel(source, target, numel, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    """One tensor; numel is an int64."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    x = to_float32(tl.load(source + offsets, mask=mask))
    tl.store(target + offsets, from_float32(x, TARGET), mask=mask)


@jit
def multi_cast_kernel(
    rows,  # int64 (4, tensors): see multi_tensor.py; operands are source and target
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    start = (chunk - tl.load(rows + tensors + tensor)) * CHUNK
    source = tl.load(rows + 2 * tensors + tensor)
    target = tl.load(rows + 3 * tensors + tensor)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    offsets = tl.arange(0, CHUNK)
    if ((source | target) % 16 == 0) & (left == CHUNK):
        # 16-bit operands are told 8 bytes of alignment so that a thread reads the elements it writes.
        read = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), 16 if SOURCE == tl.float32 else 8)
        write = tl.multiple_of(target.to(tl.pointer_type(TARGET)), 16 if TARGET == tl.float32 else 8)
        tl.store(write + start + offsets, from_float32(to_float32(tl.load(read + start + offsets)), TARGET))
    else:
        mask = offsets < left
        x = to_float32(tl.load(source.to(tl.pointer_type(SOURCE)) + start + offsets, mask=mask))
        tl.store(target.to(tl.pointer_type(TARGET)) + start + offsets, from_float32(x, TARGET), mask=mask)


# ---------------------------------------------------------------------------------------------------------- launchers

_tables = {pair: TableCache(operands=2, chunk=CHUNK) for pair in ((s, t) for s in DTYPE_CODES for t in DTYPE_CODES)}


def _triton_one(source: torch.Tensor, target: torch.Tensor) -> None:
    cast_kernel[((source.numel() + CHUNK - 1) // CHUNK,)](
        source, target, source.numel(), TARGET=triton_dtype(target.dtype), BLOCK=CHUNK, num_warps=4
    )


def _triton_list(table: TensorTable, source: torch.dtype, target: torch.dtype) -> None:
    multi_cast_kernel[(table.chunks,)](
        table.rows,
        table.chunk_tensor,
        table.tensors,
        SOURCE=triton_dtype(source),
        TARGET=triton_dtype(target),
        CHUNK=CHUNK,
        num_warps=4,
    )


def _native_list(table: TensorTable, source: torch.dtype, target: torch.dtype) -> None:
    library = native.library("cast")
    assert library is not None
    library.halfstep_cast(
        ctypes.c_void_p(table.rows.data_ptr()),
        ctypes.c_void_p(table.chunk_tensor.data_ptr()),
        ctypes.c_int64(table.tensors),
        ctypes.c_int64(table.chunks),
        ctypes.c_int32(DTYPE_CODES[source]),
        ctypes.c_int32(DTYPE_CODES[target]),
        ctypes.c_int32(torch.get_num_threads()),
    )


def _cast_lists(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Cast each source into its target: flat tensors on one device, equal strides, one dtype each side."""
    implementation = resolve(sources[0].device, "cast")
    if implementation == "reference":
        for source, target in zip(sources, targets, strict=True):
            _reference(source, target)
        return
    pair = sources[0].dtype, targets[0].dtype
    table = _tables[pair].table(sources, targets)
    if table.chunks:
        with on_device(table.device):
            (_triton_list if implementation == "triton" else _native_list)(table, *pair)


def _cast_one(source: torch.Tensor, target: torch.Tensor) -> None:
    """Cast one flat tensor into another of the same strides."""
    if resolve(source.device, "cast") == "triton" and source.numel():
        with on_device(source.device):
            _triton_one(source, target)
    else:
        _reference(source, target)  # on a CPU torch's conversion is already at the speed of memory


# ------------------------------------------------------------------------------------------- registration and autograd

_library = torch.library.Library("halfstep", "FRAGMENT")
_library.define("cast(Tensor x, ScalarType dtype) -> Tensor")


def _cast_op(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    source = x if is_flat(x) else x.contiguous()
    target = torch.empty_like(source, dtype=dtype)
    _cast_one(source, target)
    return target


def _cast_fake(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if is_flat(x):
        return torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


_library.impl("cast", _cast_op, "CompositeExplicitAutograd")
torch.library.register_fake("halfstep::cast", _cast_fake, lib=_library)


def _cast_setup(ctx: Any, inputs: tuple[torch.Tensor, torch.dtype], output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _cast_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.halfstep.cast(grad, ctx.dtype), None


torch.library.register_autograd("halfstep::cast", _cast_backward, setup_context=_cast_setup, lib=_library)

# ------------------------------------------------------------------------------------------------------------- public


def _check_options(dtype: object, rounding: object) -> None:
    if dtype not in DTYPE_CODES:
        raise TypeError(f"dtype is {dtype!r}; allowed are torch.float32, torch.float16 and torch.bfloat16")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}; allowed is {', '.join(map(repr, ROUNDINGS))}")


def cast(
    x: torch.Tensor, dtype: torch.dtype, *, rounding: str = "nearest", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Cast a tensor, rounding to nearest even. Differentiable: the gradient is cast back to ``x.dtype``.

    Args:
        x: any shape and strides; fp32, fp16 or bf16.
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
        rounding: ``"nearest"``.
        out: where to write; shape of `x`, dtype `dtype`, same device. Not differentiable.

    Returns:
        A new tensor (a copy even if the dtype is already right) with the strides of `x` if those are dense, or `out`.

    Raises:
        TypeError: `x` or `dtype` is not fp32, fp16 or bf16.
        ValueError: unknown `rounding`, or `out` does not fit.
    """
    _check_options(dtype, rounding)
    check_tensor(x, "x")
    if out is None:
        result: torch.Tensor = torch.ops.halfstep.cast(x, dtype)
        return result
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}; allowed is {tuple(x.shape)} {dtype} on {x.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out is given and a gradient is required; leave out= away, or cast under torch.no_grad()")
    with torch.no_grad():
        foreach_cast([x], dtype, rounding=rounding, out=[out])
    return out


@torch.no_grad()
def foreach_cast(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    rounding: str = "nearest",
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Cast a list of tensors in one launch per source dtype. Not differentiable.

    Args:
        tensors: fp32, fp16 and bf16 tensors of any shapes on one device; may be empty.
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
        rounding: ``"nearest"``.
        out: where to write, one tensor per input with its shape and dtype `dtype`, any strides; must not overlap.

    Returns:
        The new tensors, or those of `out`, in order.

    Raises:
        TypeError: an element of `tensors`, or `dtype`, is not fp32, fp16 or bf16.
        ValueError: unknown `rounding`, tensors on different devices, or `out` does not fit.
    """
    _check_options(dtype, rounding)
    sources = check_tensor_list(tensors, "tensors")
    if not sources:
        return []
    flat = [source if is_flat(source) else source.contiguous() for source in sources]
    if out is None:
        results = [torch.empty_like(source, dtype=dtype) for source in flat]
        targets = results
    else:
        results = check_tensor_list(out, "out")
        if len(results) != len(sources):
            raise ValueError(f"out has {len(results)} tensors; allowed is one per input, {len(sources)}")
        for index, (source, result) in enumerate(zip(sources, results, strict=True)):
            if result.shape != source.shape or result.dtype != dtype or result.device != source.device:
                raise ValueError(
                    f"out[{index}] is {tuple(result.shape)} {result.dtype} on {result.device}; "
                    f"allowed is {tuple(source.shape)} {dtype} on {source.device}"
                )
        # A target whose elements lie in another order is filled by way of a copy.
        targets = [
            result if result.stride() == source.stride() and is_flat(result) else torch.empty_like(source, dtype=dtype)
            for source, result in zip(flat, results, strict=True)
        ]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, source in enumerate(flat):
        by_dtype.setdefault(source.dtype, []).append(index)
    for indices in by_dtype.values():
        _cast_lists([flat[index] for index in indices], [targets[index] for index in indices])
    for target, result in zip(targets, results, strict=True):
        if target is not result:
            result.copy_(target)
    if out is not None:
        torch.autograd.graph.increment_version(results)
    return results


def variants() -> Iterator[Variant]:
    """Every compiled form of the kernels, for the compile audit."""
    for source, target in _tables:
        if source == target:
            continue
        yield Variant(
            kernel=cast_kernel,
            name=f"{TRITON_NAMES[source]} to {TRITON_NAMES[target]}",
            signature={"source": f"*{TRITON_NAMES[source]}", "target": f"*{TRITON_NAMES[target]}", "numel": "i64"},
            constexprs={"TARGET": triton_dtype(target), "BLOCK": CHUNK},
            divisible_by_16=("source", "target", "numel"),
            bytes_read=source.itemsize,
            bytes_written=target.itemsize,
        )
        yield Variant(
            kernel=multi_cast_kernel,
            name=f"list, {TRITON_NAMES[source]} to {TRITON_NAMES[target]}",
            signature={"rows": "*i64", "chunk_tensor": "*i32", "tensors": "i32"},
            constexprs={"SOURCE": triton_dtype(source), "TARGET": triton_dtype(target), "CHUNK": CHUNK},
            divisible_by_16=("rows", "chunk_tensor"),
            bytes_read=source.itemsize,
            bytes_written=target.itemsize,
        )
