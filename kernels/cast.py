"""Cast between fp32, fp16, bf16, float8_e4m3fn and float8_e5m2: one tensor, or a list of tensors in one launch.

`reference` is the specification. `rounding.py` has the arithmetic, `philox.py` the random words. FP8 never goes through
torch's own conversion, which saturates to E4M3 in some versions and not in others: NVIDIA's GPUs from sm_89 on have an
instruction for rounding to nearest, and all else goes through integers.

Bytes per element: the source is read once, the target written once: 6 B between fp32 and a 16-bit format, 5 B between
fp32 and FP8, 3 B between 16 bits and FP8.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, overload

import torch

from halfstep.kernels import multi_tensor, native
from halfstep.kernels.backend import (
    EXACT,
    chosen,
    constant,
    constexpr_function,
    cuda_capability_geq,
    jit,
    launch_kernel,
    resolve,
    tl,
)
from halfstep.kernels.block_cast import cast_blocks
from halfstep.kernels.cast_instructions import nearest_assembly, packed_assembly, stochastic_assembly
from halfstep.kernels.formats import BLOCKS, TABLE, BlockRow, Blocks, block_row, format_of
from halfstep.kernels.multi_tensor import ADDRESSES, TableCache, address, flattened, is_flat, locate, own_operations
from halfstep.kernels.op import Op, batch_first
from halfstep.kernels.philox import check_seed, plain, reference_words, unspecialized, words_of, words_of_groups
from halfstep.kernels.rounding import (
    NEAREST,
    ROUNDINGS,
    STOCHASTIC,
    form_of,
    from_float32,
    reference_round,
    round_float32,
    stochastic_float32,
    to_float32,
)

CHUNK = 4096
SLOW_BLOCK = 512  # elements per block if the alignment is unknown: few registers, scalar accesses

DTYPES = tuple(form.dtype for form in TABLE)
FP8 = tuple(form.dtype for form in TABLE if form.bits == 8)
LARGEST_OFFSET = 2**60 - 1


def _mode(source: torch.dtype, target: torch.dtype, rounding: str) -> int:
    """How kernels round: not at all (`NEAREST`) where the target holds every value of the source."""
    exact = source == target or target == torch.float32 or (source in FP8 and target not in FP8)
    return NEAREST if exact else ROUNDINGS.index(rounding)


# --------------------------------------------------------------------------------------------------------- reference


def reference(
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: int = NEAREST,
    saturate: bool = False,
    words: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cast a tensor, rounding once: fp32 holds every value of every format here.

    IEEE 754-2019 §4.3 (roundTiesToEven, roundTowardZero) and stochastic rounding. A value that the target holds never
    moves, NaN stays NaN (its payload is not kept), subnormals are kept. Overflow becomes infinity, in E4M3, which has
    none, NaN; toward zero, finite numbers stop at the largest finite one. With `saturate` the result holds no infinity:
    overflow and infinities become the largest finite number of their sign.

    Args:
        x: any shape, of one of `DTYPES`.
        dtype: one of `DTYPES`.
        rounding: `NEAREST`, `TOWARD_ZERO` or `STOCHASTIC`.
        saturate: as above.
        words: int64, shape of `x`, for `STOCHASTIC`: `philox.reference_words` of the elements.

    Returns:
        A tensor of the shape of `x` and dtype `dtype`; `x` itself if nothing changes.
    """
    if dtype == torch.float32 and saturate:
        largest = torch.finfo(torch.float32).max
        return x.float().clamp(-largest, largest)
    if not saturate and (dtype in (x.dtype, torch.float32) or (rounding == NEAREST and dtype not in FP8)):
        return x.to(dtype)  # torch's own conversion to 16 bits rounds to nearest even on every device
    return reference_round(x.float(), dtype, rounding, saturate, words)


# ----------------------------------------------------------------------------------------------------------- kernels


_ROUND_NEAREST, _ROUND_STOCHASTIC = constant(NEAREST), constant(STOCHASTIC)
_SLOW_BLOCK = constant(SLOW_BLOCK)
_SOURCE_ROW, _TARGET_ROW, _STREAM_ROW, _OFFSET_ROW = (constant(ADDRESSES + operand) for operand in range(4))
_FP16_OF_E4M3 = constant(
    "{\n.reg .b16 %lower, %upper;\nmov.b32 {%lower, %upper}, $2;\n"
    "cvt.rn.f16x2.e4m3x2 $0, %lower;\ncvt.rn.f16x2.e4m3x2 $1, %upper;\n}"
)


@jit
def _widened(x, SOURCE: tl.constexpr):
    if SOURCE == tl.float8e5:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)  # the upper half of an fp16
    elif SOURCE == tl.float8e4nv and cuda_capability_geq(8, 9):
        ASM: tl.constexpr = _FP16_OF_E4M3
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4).to(tl.float32)
    elif SOURCE == tl.float8e4nv:
        # As an fp16 of the same fields it is too small by the difference of the biases, subnormals included.
        code = x.to(tl.uint16)
        magnitude = code & 0x7F
        half = ((code & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7).to(tl.uint16)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return to_float32(x)


@jit
def _nearest_fp8(x, TARGET: tl.constexpr, SATURATE: tl.constexpr):
    """A block of fp32 as FP8 codes, to nearest even, by an instruction that NVIDIA's GPUs have from sm_89 on."""
    ASM: tl.constexpr = nearest_assembly(form_of(TARGET), SATURATE)
    bits = x.to(tl.uint32, bitcast=True)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [bits], tl.uint8, is_pure=True, pack=4)


@jit
def _stochastic_fp8(x, noise, SOURCE: tl.constexpr, TARGET: tl.constexpr, SATURATE: tl.constexpr):
    """`round_float32` of a block of fp32, fp16 or bf16 to FP8 codes; `noise` is a word moved down by a byte."""
    SUM: tl.constexpr = stochastic_assembly(form_of(TARGET), SATURATE)
    PACK: tl.constexpr = packed_assembly(SOURCE.primitive_bitwidth)
    INTEGERS: tl.constexpr = tl.uint32 if SOURCE == tl.float32 else tl.uint16
    REGISTERS: tl.constexpr = "=r,r,r,r,r,r,r,r,r" if SOURCE == tl.float32 else "=r,r,r,r,r,r,r"
    value = _widened(x, SOURCE)
    sums = tl.inline_asm_elementwise(SUM, "=r,r,r", [value, noise], tl.uint32, is_pure=True, pack=1)
    if TARGET == tl.float8e5 or SATURATE:  # otherwise overflow gives NaN already
        sums = tl.where(value == value, sums, 0x7F000000)
    bits = x.to(INTEGERS, bitcast=True)
    return tl.inline_asm_elementwise(PACK, REGISTERS, [sums, bits], tl.uint8, is_pure=True, pack=4)


@jit
def _converted(x, word, SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr):
    if SOURCE == TARGET and not SATURATE:
        return x
    elif TARGET.primitive_bitwidth == 8:
        if ROUNDING == _ROUND_NEAREST and cuda_capability_geq(8, 9):
            code = _nearest_fp8(_widened(x, SOURCE), TARGET, SATURATE)
        elif ROUNDING == _ROUND_STOCHASTIC and SOURCE.primitive_bitwidth > 8 and cuda_capability_geq(8, 0):
            code = _stochastic_fp8(x, word, SOURCE, TARGET, SATURATE)
        else:
            code = round_float32(_widened(x, SOURCE), word, TARGET, ROUNDING, SATURATE).to(tl.uint8)
        # NVIDIA's conversion of fp16 to fp32 drops the sign of a NaN. Both FP8 formats have the same sign bit.
        return code | (x & 0x80) if SOURCE.primitive_bitwidth == 8 else code
    elif ROUNDING == _ROUND_NEAREST:
        y = from_float32(_widened(x, SOURCE), TARGET)
        if SATURATE:  # the largest finite number has the code before that of infinity
            FORM: tl.constexpr = form_of(TARGET)
            INTEGERS: tl.constexpr = tl.uint32 if TARGET == tl.float32 else tl.uint16
            bits = y.to(INTEGERS, bitcast=True)
            infinite = (bits & ((1 << FORM.bits - 1) - 1)) == FORM.overflow
            y = tl.where(infinite, bits - 1, bits).to(INTEGERS).to(TARGET, bitcast=True)
        return y
    elif TARGET == tl.bfloat16 and ROUNDING == _ROUND_STOCHASTIC and not SATURATE:
        return stochastic_float32(_widened(x, SOURCE), word, tl.bfloat16, False)
    else:
        code = round_float32(_widened(x, SOURCE), word, TARGET, ROUNDING, SATURATE)
        return code.to(tl.uint16).to(TARGET, bitcast=True)


@constexpr_function
def _pointer(dtype: Any) -> Any:
    """The type of pointers to the stored form of a format: FP8 is read and written as uint8, which every GPU can."""
    return tl.pointer_type(tl.uint8 if dtype.primitive_bitwidth == 8 else dtype)


@jit
def _cast_some(
    source, target, at, left, index, seed, stream,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """The elements `at` (int32, one after the other) of a chunk that need not be aligned; see `_cast_chunk`."""
    # A cast of its own: a hint about a pointer holds for all that is made of it. The words come before the elements,
    # which would take registers while the words are computed.
    word = words_of(index + at, seed, 0, stream, 1)[0] >> DOWN if ROUNDING == _ROUND_STOCHASTIC else 0
    x = tl.load(source.to(_pointer(SOURCE)) + at, mask=at < left)
    y = _converted(x, word, SOURCE, TARGET, ROUNDING, SATURATE)
    tl.store(target.to(_pointer(TARGET)) + at, y, mask=at < left)


@jit
def _cast_chunk(
    source, target, left, index, seed, stream,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of `left` elements (int32). Of the first: `source`, `target`, its addresses, and `index`, its index in
    the whole tensor (int64)."""
    IN: tl.constexpr = SOURCE.primitive_bitwidth // 8
    OUT: tl.constexpr = TARGET.primitive_bitwidth // 8
    RANDOM: tl.constexpr = ROUNDING == _ROUND_STOCHASTIC
    # Consecutive elements of a thread: 128 bits in the wider format. Neighboring threads then access neighboring bytes
    # on both sides, each request uses whole sectors, and no values are exchanged between threads.
    EACH: tl.constexpr = 16 // (IN if IN > OUT else OUT)
    # The number of them that share a call of Philox, at most eight.
    RUN: tl.constexpr = EACH if EACH < 8 else 8
    # Words of `_stochastic_fp8` are moved down by a byte.
    DOWN: tl.constexpr = 8 if OUT == 1 and IN > 1 and cuda_capability_geq(8, 0) else 0
    wide = (source | target) % 16 == 0
    if RANDOM:
        wide = wide & (index % 8 == 0)
    if wide:
        # The mask's bound is a multiple of 16, or it would undo the hints.
        bulk = (left // 16) * 16
        offsets = tl.arange(0, CHUNK)
        word = 0
        if RANDOM:
            first = tl.arange(0, CHUNK // RUN) * RUN
            groups = (index >> 3) + (first >> 3)
            word = words_of_groups(groups, first, seed, 0, stream, 1, RUN, CHUNK, DOWN, DOWN)[0]
        x = tl.load(tl.multiple_of(source.to(_pointer(SOURCE)), EACH * IN) + offsets, mask=offsets < bulk)
        y = _converted(x, word, SOURCE, TARGET, ROUNDING, SATURATE)
        tl.store(tl.multiple_of(target.to(_pointer(TARGET)), EACH * OUT) + offsets, y, mask=offsets < bulk)
        if bulk < left:
            tail = bulk + tl.arange(0, 16)
            _cast_some(source, target, tail, left, index, seed, stream, SOURCE, TARGET, ROUNDING, SATURATE, DOWN)
    else:
        for start in range(0, left, _SLOW_BLOCK):
            at = start + tl.arange(0, _SLOW_BLOCK)
            _cast_some(source, target, at, left, index, seed, stream, SOURCE, TARGET, ROUNDING, SATURATE, DOWN)


@functools.partial(jit, do_not_specialize=["source", "target", "numel"])
def cast_kernel(
    source, target, numel, seed_low, seed_high, offset,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One tensor: int64 addresses; the halves of the seed, and the offset, are `unspecialized`."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    read = source + start * (SOURCE.primitive_bitwidth // 8)
    write = target + start * (TARGET.primitive_bitwidth // 8)
    left = tl.minimum(numel - start, CHUNK).to(tl.int32)
    seed = (plain(seed_high) << 32) | plain(seed_low)
    _cast_chunk(read, write, left, plain(offset) + start, seed, 0, SOURCE, TARGET, ROUNDING, SATURATE, CHUNK)


@functools.partial(jit, do_not_specialize=["tensors"])
def multi_cast_kernel(
    rows, chunk_tensor, tensors, seed_low, seed_high,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A list of tensors. The operands of the table (`TensorTable.operands`): source, target, stream and offset."""
    column, start, left = locate(rows, chunk_tensor, tensors, CHUNK)
    index, stream = start, start
    if ROUNDING == _ROUND_STOCHASTIC:
        stream = tl.load(column + _STREAM_ROW * tensors)
        index = start + tl.load(column + _OFFSET_ROW * tensors)
    read = tl.load(column + _SOURCE_ROW * tensors) + start * (SOURCE.primitive_bitwidth // 8)
    write = tl.load(column + _TARGET_ROW * tensors) + start * (TARGET.primitive_bitwidth // 8)
    seed = (plain(seed_high) << 32) | plain(seed_low)
    _cast_chunk(read, write, left, index, seed, stream, SOURCE, TARGET, ROUNDING, SATURATE, CHUNK)


# ---------------------------------------------------------------------------------------------------------- launchers


_tables = {(source, target): TableCache(operands=4, chunk=CHUNK) for source in DTYPES for target in DTYPES}
_SingleTensor = ctypes.c_int64 * (ADDRESSES + 4)  # one tensor as a table: rows as in multi_tensor.py

# Between fp32 and 16 bits torch's conversion has the same bits and takes less of the host than a launch or a call of
# C++; between the 16-bit formats it is slower on CPUs. Lists keep their one launch. From 16 bits to fp32, torch's
# kernel takes 1.5 (H100) and 1.9 times (H200) as long as the bytes do, which soon costs more than the launch.
_PAIRS_OF_TORCH = {pair for pair in _tables if not {*FP8} & {*pair} and (torch.float32 in pair or pair[0] == pair[1])}
_WIDENED_BY_US = 2**22  # elements from which a GPU's single tensor is widened by our kernel


def _torch_converts(source: torch.Tensor, dtype: torch.dtype, mode: int, saturate: bool) -> bool:
    usual = mode == NEAREST and not saturate and (source.dtype, dtype) in _PAIRS_OF_TORCH
    widens = source.is_cuda and source.itemsize < dtype.itemsize and source.numel() >= _WIDENED_BY_US
    return usual and not widens and chosen() == "auto" and (source.is_cuda or source.is_cpu)


@functools.cache
def _options(source: torch.dtype, target: torch.dtype, mode: int, saturate: bool) -> dict[str, Any]:
    return {
        "SOURCE": format_of(source).triton_type,
        "TARGET": format_of(target).triton_type,
        "ROUNDING": mode,
        "SATURATE": saturate,
        "CHUNK": CHUNK,
        # What a thread does once serves more elements in fewer warps, if its registers suffice.
        "num_warps": 2 if mode == STOCHASTIC and source.itemsize == 2 else 4,
        **EXACT,
    }


def _cast_into(
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    mode: int,
    saturate: bool,
    noise: tuple[int, list[int], list[int]],
    in_memory: bool = True,
) -> None:
    """Cast each source into its target: flat tensors on one device, equal strides, one dtype each side.

    For `STOCHASTIC` all are row-major; `noise` is the seed, and for each tensor its stream and first element's index.
    """
    (source, *_), (target, *_) = sources, targets
    seed, streams, offsets = noise
    device, pair = source.device, (source.dtype, target.dtype)
    single = in_memory and len(sources) == 1 and not (mode == STOCHASTIC and streams[0])
    if single and _torch_converts(source, target.dtype, mode, saturate):
        multi_tensor.check_addresses(source, target)
        target.copy_(source)
        return
    implementation = resolve(device, "cast") if in_memory else "reference"
    if implementation == "reference":
        with nullcontext() if in_memory else own_operations([*sources, *targets]):
            for source, target, stream, offset in zip(sources, targets, streams, offsets, strict=True):
                words = None
                if mode == STOCHASTIC:
                    index = torch.arange(offset, offset + source.numel(), dtype=torch.int64, device=device)
                    words = reference_words(index, seed, 0, stream).view(source.shape)
                target.copy_(reference(source, target.dtype, mode, saturate, words))
        return
    if single:
        numel = source.numel()
        chunks = -(-numel // CHUNK)
        both = (address(source), address(target)) if numel else (0, 0)
        column = _SingleTensor(numel, 0, *both, 0, offsets[0])
        rows: tuple[int | None, ...] = ctypes.addressof(column), None, 1, chunks
    else:
        table = _tables[pair].table(sources, targets, numbers=(streams, offsets) if mode == STOCHASTIC else ())
        chunks, rows = table.chunks, table.addresses
    if not chunks:
        return
    if implementation == "native":
        codes = format_of(pair[0]).code, format_of(pair[1]).code
        native.library("cast").halfstep_cast(*rows, *codes, mode, saturate, seed, native.threads())
        return
    options, seeds = _options(*pair, mode, saturate), (unspecialized(seed & 0xFFFFFFFF), unspecialized(seed >> 32))
    if single:
        operands = *both, numel, *seeds, unspecialized(offsets[0])
        launch_kernel(cast_kernel, device, chunks, operands, options, numel < 2**31)
    else:
        launch_kernel(multi_cast_kernel, device, chunks, (*table.operands, *seeds), options)


# ----------------------------------------------------------------------------------------------------------- operator


def _computed(
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    mode, source = _mode(x.dtype, dtype, rounding), flattened(x)
    if _torch_converts(source, dtype, mode, saturate):
        multi_tensor.check_addresses(source)
        return source.to(dtype, copy=True)
    target = torch.empty_like(source, dtype=dtype)
    if mode != STOCHASTIC:
        _cast_into([source], [target], mode, saturate, (0, [0], [0]))
        return target
    if seed is None or seed.device.type != "cpu":
        raise ValueError(
            "Expected seed to be a tensor on the CPU for stochastic rounding, but got none: use halfstep.cast"
        )
    # The noise goes by rows, whatever the order in memory.
    in_order = source.contiguous()
    rows = target if in_order is source else torch.empty_like(in_order, dtype=dtype)
    _cast_into([in_order], [rows], mode, saturate, (int(seed), [0], [offset]))
    return target if rows is target else target.copy_(rows)


def _fake(x: torch.Tensor, dtype: torch.dtype, *of_rounding: object, **options: object) -> torch.Tensor:
    order = torch.preserve_format if is_flat(x) else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=order)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.source, ctx.target = inputs[0].dtype, output.dtype


def _batch(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: str,
    saturate: bool,
    seed: torch.Tensor | None,
    offset: int,
) -> tuple[torch.Tensor, int]:
    x = batch_first(x, in_dims[0], info.batch_size)
    if seed is None or not info.batch_size:
        return _cast(x, dtype, rounding, saturate, seed, offset), 0
    # Each sample is a separate tensor, whose random bits depend on its own indices.
    seeds = [seed] * info.batch_size if in_dims[4] is None else seed.unbind(in_dims[4])
    samples = [_cast(sample, dtype, rounding, saturate, drawn, offset) for sample, drawn in zip(x, seeds, strict=True)]
    return torch.stack(samples), 0


# The seed is a tensor on the CPU. A drawn seed is then a separate operation in a traced graph, which is neither merged
# with another draw nor repeated in the backward.
_cast: Op = Op(
    "cast(Tensor x, ScalarType dtype, str rounding='nearest', bool saturate=False, Tensor? seed=None, "
    "SymInt offset=0) -> Tensor",
    operands=1,
    compute=_computed,
    fake=_fake,
    save=_save,
    differentiate=lambda ctx, grad: (_cast(grad, ctx.source, "nearest", False, None, 0), *[None] * 5),
    tangent=lambda ctx, tangent, *_: _cast(tangent, ctx.target, "nearest", False, None, 0),
    batch=_batch,
)

# ------------------------------------------------------------------------------------------------------------- public


def _block_of(dtype: object) -> tuple[BlockRow, str] | None:
    """The row and the rule of the name of a format of blocks; None for what is no name."""
    if not isinstance(dtype, str):
        return None
    if (found := block_row(dtype)) is None:
        names = ", ".join(repr(row.name) for row in BLOCKS)
        raise ValueError(f"Expected dtype to be a dtype or a format of blocks, such as {names}, but got {dtype!r}")
    return found


def _check_blocked(block: object, dtype: object, out: object, of_blocks: object) -> None:
    """Validate what formats of blocks do not take, and what they alone do."""
    if block and out is not None:
        raise ValueError("Expected out to be None for a format of blocks, but got a tensor: leave it out")
    if not block and of_blocks is not None:
        raise ValueError(
            f"Expected axis and global_scale to be None for {dtype}, which has no blocks: leave them out, or name a "
            "format of blocks"
        )


def _check_options(dtype: object, rounding: object, seed: object) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"Expected dtype to be one of {', '.join(map(str, DTYPES))}, but got {dtype!r}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"Expected rounding to be one of {', '.join(map(repr, ROUNDINGS))}, but got {rounding!r}")
    if seed is not None:
        if rounding != "stochastic":
            raise ValueError(
                f"Expected seed to be None with rounding={rounding!r}, which uses no random numbers, but got {seed!r}: "
                "leave it out, or pass rounding='stochastic'"
            )
        check_seed(seed)


def _check_offset(offset: object, name: str) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(
            f"Expected {name} to be an integer, a number of elements, but got {offset!r}, a {type(offset).__name__}"
        )
    if not 0 <= offset <= LARGEST_OFFSET:
        raise ValueError(
            f"Expected {name} to be the index of an element in its tensor, from 0 to 2^60 - 1, but got {offset}"
        )
    return offset


def _check_out(out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        raise ValueError(
            f"Expected {name} to be {tuple(x.shape)} {dtype} on {x.device}, "
            f"but got {tuple(out.shape)} {out.dtype} on {out.device}"
        )


def _drawn() -> torch.Tensor:
    """A fresh seed from torch's default generator on the CPU."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


@overload
def cast(
    x: torch.Tensor, dtype: torch.dtype, *, rounding: str = ..., saturate: bool = ..., seed: int | None = ...,
    out: torch.Tensor | None = ..., offset: int = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def cast(
    x: torch.Tensor, dtype: str, *, rounding: str = ..., saturate: bool = ..., seed: int | None = ...,
    offset: int = ..., axis: int | tuple[int, int] | None = ..., global_scale: torch.Tensor | float | None = ...,
) -> Blocks: ...  # fmt: skip
def cast(
    x: torch.Tensor,
    dtype: torch.dtype | str,
    *,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: int | None = None,
    out: torch.Tensor | None = None,
    offset: int = 0,
    axis: int | tuple[int, int] | None = None,
    global_scale: torch.Tensor | float | None = None,
) -> torch.Tensor | Blocks:
    """Cast a tensor to another format, rounding once. The bits are the same on every device.

    Differentiable: the gradient is cast back to ``x.dtype``, to nearest and without saturation, whatever the rounding
    of the forward pass. As with ``x.to``, autograd gives an FP8 tensor an FP8 gradient, which should be scaled to fit.

    Args:
        x: any shape and strides; fp32, fp16, bf16, float8_e4m3fn or float8_e5m2.
        dtype: one of the same dtypes, or the name of a format of blocks, such as ``"mxfp8_e4m3"`` or ``"nvfp4"``, for
            which `x` is fp32, fp16 or bf16.
        rounding: ``"nearest"`` (ties to even), ``"toward_zero"``, or ``"stochastic"`` (up or down at random, with
            probabilities that make the expectation `x`, also for subnormal numbers; values that `dtype` represents
            never change).
        saturate: if True, overflow and infinities become the largest finite number. Otherwise overflow becomes
            infinity, or NaN in float8_e4m3fn, which has no infinity. NaN stays NaN in both cases. In a format of blocks
            it says what becomes of a scale that overflows, and of infinities; elements always saturate.
        seed: seed of stochastic rounding, 0 to 2^63 - 1. Default: drawn from torch's CPU generator, so that
            ``torch.manual_seed`` controls it. The noise of an element depends only on the seed and on its row-major
            index, not on strides, device or launch.
        out: output tensor with the shape of `x` and dtype `dtype` on the same device, not overlapping `x`. Not
            differentiable.
        offset: index of the first element of `x` in the tensor that it is part of, up to 2^60 - 1. With the same seed,
            ``cast(x[a:b], offset=a)`` equals ``cast(x)[a:b]`` for a flat `x`.
        axis: of a format of blocks, the dimension in which elements are consecutive (default: the last one), or two for
            square blocks. The last block may be short.
        global_scale: of NVFP4, a number, or a tensor of one, from 2^-117 to 2^118, which is not checked. Default: the
            largest finite magnitude over 2688.

    Returns:
        A new tensor, even if `x` already has `dtype`, with the strides of `x` if those are dense; or `out`. For a
        format of blocks, `halfstep.kernels.formats.Blocks` of contiguous tensors, not differentiable;
        `halfstep.decode` decodes them.

    Raises:
        TypeError: `x`, `dtype`, `seed` or `offset` is not of the types above.
        ValueError: `rounding` or the name of a format is unknown, `axis`, `global_scale` or `out` does not fit, `seed`
            is out of range or given without stochastic rounding, or `offset` is out of range.

    Examples:
        >>> halfstep.cast(torch.tensor([1.0, 65519.0, 65520.0]), torch.float16)
        tensor([1.0000e+00, 6.5504e+04,        inf], dtype=torch.float16)
        >>> halfstep.cast(torch.tensor([500.0]), torch.float8_e4m3fn, saturate=True)
        tensor([448.], dtype=torch.float8_e4m3fn)
        >>> halfstep.cast(torch.tensor([0.1, 3.0, -100.0, 500.0]), "mxfp8_rceil").scales
        tensor([2.], dtype=torch.float8_e8m0fnu)
        >>> x = torch.full((10_000,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bf16 number
        >>> halfstep.cast(x, torch.bfloat16, rounding="stochastic", seed=0).float().mean()
        tensor(1.0020)
    """
    block = _block_of(dtype)
    _check_options(DTYPES[0] if block else dtype, rounding, seed)
    _check_offset(offset, "offset")
    multi_tensor.check_tensor(x, "x", multi_tensor.FLOATS if block else DTYPES)
    _check_blocked(block, dtype, out, axis if global_scale is None else global_scale)
    if block:
        number = seed or (int(_drawn()) if rounding == "stochastic" and seed is None else 0)
        return cast_blocks([x], *block, axis, ROUNDINGS.index(rounding), saturate, number, [offset], global_scale)[0]
    assert isinstance(dtype, torch.dtype)
    if out is None:
        token = None
        if rounding == "stochastic":
            with nullcontext() if type(x) in multi_tensor.PLAIN_TYPES else own_operations([x]):
                token = _drawn() if seed is None else torch.tensor(seed, dtype=torch.int64, device="cpu")
        return _cast(x, dtype, rounding, saturate, token, offset)
    _check_out(out, x, dtype, "out")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            "Expected no gradient to be required with out=, but one is: leave out= out, or cast under torch.no_grad()"
        )
    foreach_cast([x], dtype, rounding=rounding, saturate=saturate, seed=seed, out=[out], offsets=[offset])
    return out


@overload
def foreach_cast(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, *, rounding: str = ..., saturate: bool = ...,
    seed: int | None = ..., out: Sequence[torch.Tensor] | None = ..., offsets: Sequence[int] | None = ...,
) -> list[torch.Tensor]: ...  # fmt: skip
@overload
def foreach_cast(
    tensors: Sequence[torch.Tensor], dtype: str, *, rounding: str = ..., saturate: bool = ..., seed: int | None = ...,
    offsets: Sequence[int] | None = ..., axis: int | tuple[int, int] | None = ...,
) -> list[Blocks]: ...  # fmt: skip
@torch.no_grad()
def foreach_cast(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | str,
    *,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: int | None = None,
    out: Sequence[torch.Tensor] | None = None,
    offsets: Sequence[int] | None = None,
    axis: int | tuple[int, int] | None = None,
) -> list[torch.Tensor] | list[Blocks]:
    """Cast a list of tensors in one launch per source dtype. Not differentiable.

    Args:
        tensors: tensors of any shapes and dtypes that `cast` takes, on one device; may be empty.
        dtype, rounding, saturate, seed, axis: as in `cast`. Each tensor has its own noise, which depends on its
            position in the list and not on the other tensors. A list of one tensor gets the noise of `cast`.
        out: output tensors, one per input, with the shape of the input, dtype `dtype` and any strides. They must not
            overlap.
        offsets: for each tensor the `offset` of `cast`. Default: all 0.

    Returns:
        The new tensors, or those of `out`, in order; for a format of blocks, a `Blocks` for each tensor.

    Raises:
        TypeError, ValueError: as in `cast`, also if tensors are on different devices or numbers of arguments differ.

    Examples:
        >>> weights = [torch.ones(2), torch.zeros(3)]
        >>> halfstep.foreach_cast(weights, torch.bfloat16)
        [tensor([1., 1.], dtype=torch.bfloat16), tensor([0., 0., 0.], dtype=torch.bfloat16)]
    """
    block = _block_of(dtype)
    _check_options(DTYPES[0] if block else dtype, rounding, seed)
    sources, in_memory = multi_tensor.check_tensor_list(tensors, "tensors", multi_tensor.FLOATS if block else DTYPES)
    _check_blocked(block, dtype, out, axis)
    starts = [0] * len(sources)
    if offsets is not None:
        starts = [_check_offset(offset, f"offsets[{index}]") for index, offset in enumerate(offsets)]
        if len(starts) != len(sources):
            raise ValueError(f"Expected offsets to have one number per tensor, {len(sources)}, but got {len(starts)}")
    if out is not None and len(out) != len(sources):
        raise ValueError(f"Expected out to have one tensor per input, {len(sources)}, but got {len(out)}")
    if not sources:
        return []
    if block:
        number = seed or (int(_drawn()) if rounding == "stochastic" and seed is None else 0)
        return cast_blocks(sources, *block, axis, ROUNDINGS.index(rounding), saturate, number, starts)
    assert isinstance(dtype, torch.dtype)
    flat = multi_tensor.all_flattened(sources)
    if out is None:
        results = [torch.empty_like(source, dtype=dtype) for source in flat]
    else:
        results, out_in_memory = multi_tensor.check_tensor_list(out, "out", DTYPES)
        in_memory = in_memory and out_in_memory
        if (
            results[0].device != sources[0].device
            or set(map(attrgetter("dtype"), results)) != {dtype}
            or list(map(torch.Tensor.size, results)) != list(map(torch.Tensor.size, sources))
        ):
            for index, (result, source) in enumerate(zip(results, sources, strict=True)):
                _check_out(result, source, dtype, f"out[{index}]")
    random = rounding == "stochastic"
    if random:  # random bits follow the row-major order, whatever the order in memory
        flat = [source.contiguous() for source in flat]
    as_sources = out is None and not random  # new tensors in the order of theirs
    if as_sources or (all(map(torch.Tensor.is_contiguous, flat)) and multi_tensor.all_flattened(results) is results):
        targets = results  # with the same shapes, both row-major
    else:  # a target with another order of elements is filled by a copy
        targets = [
            result if result.stride() == source.stride() and is_flat(result) else torch.empty_like(source, dtype=dtype)
            for source, result in zip(flat, results, strict=True)
        ]
    number = seed or 0
    if random and seed is None:
        drawn = _drawn()
        number = int(drawn) if type(drawn) is torch.Tensor else 0  # FakeTensorMode draws nothing
    for source_dtype, listed, into, streams, firsts in multi_tensor.by_dtype(flat, targets, range(len(flat)), starts):
        mode = _mode(source_dtype, dtype, rounding)
        _cast_into(listed, into, mode, saturate, (number, streams, firsts), in_memory)
    for target, result in zip(targets, results, strict=True) if targets is not results else ():
        if target is not result:
            result.copy_(target)
    if out is not None:
        torch.autograd.graph.increment_version(results)
    return results
