"""Cast between fp32, fp16, bf16, float8_e4m3fn and float8_e5m2: one tensor, or a list of tensors in one launch.

IEEE 754-2019 §4.3 (roundTiesToEven, roundTowardZero) and stochastic rounding, all from one fp32 value, which holds
every value of every format here: whatever the pair, a cast rounds once. `rounding.py` has the arithmetic, `philox.py`
the random words. A value that the target holds never moves, NaN stays NaN (its payload is not kept), subnormals are
kept.

Overflow becomes infinity, in E4M3, which has none, NaN; toward zero, finite numbers stop at the largest finite one.
With `saturate` the result holds no infinity: overflow and infinities become the largest finite number of their sign.
FP8 never goes through torch's own conversion, which saturates to E4M3 in some versions and not in others: NVIDIA's GPUs
from sm_89 on have an instruction for rounding to nearest, and all else goes through integers.

Bytes per element: the source is read once, the target written once: 6 B between fp32 and a 16-bit format, 5 B between
fp32 and FP8, 3 B between 16 bits and FP8.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from halfstep.kernels import native
from halfstep.kernels.backend import (
    EXACT,
    TRITON_NAMES,
    chosen,
    cuda_capability_geq,
    jit,
    launch_kernel,
    resolve,
    tl,
    triton_dtype,
)
from halfstep.kernels.fp8_instructions import fp8_assembly, packed_assembly, stochastic_assembly
from halfstep.kernels.multi_tensor import (
    ADDRESSES,
    DTYPE_CODES,
    PLAIN_TYPES,
    TableCache,
    address,
    all_flattened,
    by_dtype,
    check_addresses,
    check_tensor,
    check_tensor_list,
    flattened,
    is_flat,
    own_operations,
)
from halfstep.kernels.op import Op, batch_first
from halfstep.kernels.philox import check_seed, reference_words, words_of, words_of_groups
from halfstep.kernels.rounding import (
    FORMATS,
    NEAREST,
    ROUNDINGS,
    STOCHASTIC,
    from_float32,
    reference_round,
    round_float32,
    stochastic_float32,
    to_float32,
)
from halfstep.kernels.threads import threads

CHUNK = 4096
SLOW_BLOCK = 512  # elements per block if the alignment is unknown: few registers, scalar accesses

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CODES = {**DTYPE_CODES, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4}  # those of cast.cpp
DTYPES = tuple(CODES)
NAMES = {**TRITON_NAMES, torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LARGEST_OFFSET = 2**60 - 1
_FP32_MAX = torch.finfo(torch.float32).max


class Conversion(NamedTuple):
    """How kernels round.

    Attributes:
        mode: `NEAREST`, `TOWARD_ZERO` or `STOCHASTIC`.
        saturate: whether overflow and infinities become the largest finite number.
        seed: of stochastic rounding.
    """

    mode: int = NEAREST
    saturate: bool = False
    seed: int = 0


def _conversion(source: torch.dtype, target: torch.dtype, rounding: str, saturate: bool, seed: int = 0) -> Conversion:
    """What kernels have to do: they need not round where the target holds every value of the source."""
    exact = source == target or target == torch.float32 or (source in FP8 and target not in FP8)
    return Conversion(NEAREST if exact else ROUNDINGS.index(rounding), saturate, seed)


# --------------------------------------------------------------------------------------------------------- reference


def _reference(source: torch.Tensor, target: torch.Tensor, how: Conversion, stream: int, offset: int) -> None:
    """Cast one flat tensor into another of the same strides; for `STOCHASTIC` both are row-major."""
    x, y = (torch.as_strided(tensor, (tensor.numel(),), (1,)) for tensor in (source, target))
    if x.dtype == y.dtype and not how.saturate:
        y.copy_(x)
    elif y.dtype == torch.float32:
        y.copy_(x.float().clamp(-_FP32_MAX, _FP32_MAX) if how.saturate else x)
    elif how.mode == NEAREST and y.dtype not in FP8 and not how.saturate:
        y.copy_(x)  # torch's own conversion to 16 bits rounds to nearest even on every device
    else:
        words = None
        if how.mode == STOCHASTIC:
            index = torch.arange(offset, offset + x.numel(), dtype=torch.int64, device=x.device)
            words = reference_words(index, how.seed, 0, stream)
        y.copy_(reference_round(x.float(), y.dtype, how.mode, how.saturate, words))


# ----------------------------------------------------------------------------------------------------------- kernels


if tl is not None:
    _ROUND_NEAREST, _ROUND_STOCHASTIC = tl.constexpr(NEAREST), tl.constexpr(STOCHASTIC)
    _SLOW_BLOCK = tl.constexpr(SLOW_BLOCK)
    _SOURCE_ROW, _TARGET_ROW, _STREAM_ROW, _OFFSET_ROW = (tl.constexpr(ADDRESSES + operand) for operand in range(4))
    _E4M3, _E4M3_SATURATED = (tl.constexpr(fp8_assembly("e4m3", 464.0, saturate)) for saturate in (False, True))
    _E5M2, _E5M2_SATURATED = (tl.constexpr(fp8_assembly("e5m2", 61440.0, saturate)) for saturate in (False, True))
    _E4M3_SUM, _E4M3_SATURATED_SUM, _E5M2_SUM, _E5M2_SATURATED_SUM = (
        tl.constexpr(stochastic_assembly(FORMATS[dtype], saturate)) for dtype in FP8 for saturate in (False, True)
    )
    _PACKED_16, _PACKED_32 = (tl.constexpr(packed_assembly(bits)) for bits in (16, 32))
    _FP16_OF_E4M3 = tl.constexpr(
        "{\n.reg .b16 %lower, %upper;\nmov.b32 {%lower, %upper}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, %lower;\ncvt.rn.f16x2.e4m3x2 $1, %upper;\n}"
    )


@jit
def _widened(x, SOURCE: tl.constexpr):
    """Convert a block from its stored form (FP8 as uint8 codes) to fp32, exactly."""
    if SOURCE == tl.float8e5:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)  # the upper half of an fp16
    elif SOURCE == tl.float8e4nv and cuda_capability_geq(8, 9):
        ASM: tl.constexpr = _FP16_OF_E4M3
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4).to(tl.float32)
    elif SOURCE == tl.float8e4nv:
        # As an fp16 of the same fields it is too small by the difference of the biases, subnormals included.
        code = x.to(tl.uint16)
        rest = code & 0x7F
        half = ((code & 0x80) << 8) | tl.where(rest == 0x7F, 0x7E00, rest << 7).to(tl.uint16)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return to_float32(x)


@jit
def _fp8_by_instructions(x, TARGET: tl.constexpr, SATURATE: tl.constexpr):
    """A block of fp32 as FP8 codes, to nearest even, by an instruction that NVIDIA's GPUs have from sm_89 on.

    The instruction turns overflow and infinities into the largest finite number; without saturation, they have the next
    code. It also drops the sign of a NaN, so that all signs are taken from x.
    """
    E4M3: tl.constexpr = _E4M3_SATURATED if SATURATE else _E4M3
    E5M2: tl.constexpr = _E5M2_SATURATED if SATURATE else _E5M2
    ASM: tl.constexpr = E4M3 if TARGET == tl.float8e4nv else E5M2
    bits = x.to(tl.uint32, bitcast=True)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [bits], tl.uint8, is_pure=True, pack=4)


@jit
def _stochastic_fp8(x, noise, SOURCE: tl.constexpr, TARGET: tl.constexpr, SATURATE: tl.constexpr):
    """`round_float32` of a block of fp32, fp16 or bf16 to FP8 codes; `noise` is a word moved down by a byte."""
    E4M3: tl.constexpr = _E4M3_SATURATED_SUM if SATURATE else _E4M3_SUM
    E5M2: tl.constexpr = _E5M2_SATURATED_SUM if SATURATE else _E5M2_SUM
    SUM: tl.constexpr = E4M3 if TARGET == tl.float8e4nv else E5M2
    value = _widened(x, SOURCE)
    sums = tl.inline_asm_elementwise(SUM, "=r,r,r", [value, noise], tl.uint32, is_pure=True, pack=1)
    if TARGET == tl.float8e5 or SATURATE:  # otherwise overflow gives NaN already
        sums = tl.where(value == value, sums, 0x7F000000)
    if SOURCE == tl.float32:
        ALL: tl.constexpr = _PACKED_32
        bits = x.to(tl.uint32, bitcast=True)
        return tl.inline_asm_elementwise(ALL, "=r,r,r,r,r,r,r,r,r", [sums, bits], tl.uint8, is_pure=True, pack=4)
    else:
        HALF: tl.constexpr = _PACKED_16
        bits = x.to(tl.uint16, bitcast=True)
        return tl.inline_asm_elementwise(HALF, "=r,r,r,r,r,r,r", [sums, bits], tl.uint8, is_pure=True, pack=4)


@jit
def _converted(x, word, SOURCE: tl.constexpr, TARGET: tl.constexpr, ROUNDING: tl.constexpr, SATURATE: tl.constexpr):
    """Convert a block from the stored form of one format to that of another. `word` as in `round_float32`."""
    if SOURCE == TARGET and not SATURATE:
        return x
    elif TARGET == tl.float8e4nv or TARGET == tl.float8e5:
        if ROUNDING == _ROUND_NEAREST and cuda_capability_geq(8, 9):
            code = _fp8_by_instructions(_widened(x, SOURCE), TARGET, SATURATE)
        elif ROUNDING == _ROUND_STOCHASTIC and SOURCE.primitive_bitwidth > 8 and cuda_capability_geq(8, 0):
            code = _stochastic_fp8(x, word, SOURCE, TARGET, SATURATE)
        else:
            code = round_float32(_widened(x, SOURCE), word, TARGET, ROUNDING, SATURATE).to(tl.uint8)
        # NVIDIA's conversion of fp16 to fp32 drops the sign of a NaN. Both FP8 formats have the same sign bit.
        return code | (x & 0x80) if SOURCE == tl.float8e4nv or SOURCE == tl.float8e5 else code
    elif ROUNDING == _ROUND_NEAREST:
        y = from_float32(_widened(x, SOURCE), TARGET)
        if SATURATE:
            # The largest finite number has the code before that of infinity.
            if TARGET == tl.float32:
                bits = y.to(tl.uint32, bitcast=True)
                bits = tl.where((bits & 0x7FFFFFFF) == 0x7F800000, bits - 1, bits)
            else:
                infinity: tl.constexpr = 0x7C00 if TARGET == tl.float16 else 0x7F80
                bits = y.to(tl.uint16, bitcast=True)
                bits = tl.where((bits & 0x7FFF) == infinity, bits - 1, bits).to(tl.uint16)
            y = bits.to(TARGET, bitcast=True)
        return y
    elif TARGET == tl.float16:
        code = round_float32(_widened(x, SOURCE), word, TARGET, ROUNDING, SATURATE)
        return code.to(tl.uint16).to(tl.float16, bitcast=True)
    elif ROUNDING == _ROUND_STOCHASTIC and not SATURATE:
        return stochastic_float32(_widened(x, SOURCE), word, tl.bfloat16, False)
    else:
        code = round_float32(_widened(x, SOURCE), word, TARGET, ROUNDING, SATURATE)
        return code.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def _cast_block(
    read,
    write,
    mask,
    word,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROUNDING: tl.constexpr,
    SATURATE: tl.constexpr,
):
    """One block: load, convert, store."""
    x = tl.load(read, mask=mask)
    tl.store(write, _converted(x, word, SOURCE, TARGET, ROUNDING, SATURATE), mask=mask)


@jit
def _cast_chunk(
    source,  # int64: address of the chunk's first element
    target,
    left,  # int32: elements in the chunk
    index,  # int64: the first one's index in the whole tensor
    seed,
    stream,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROUNDING: tl.constexpr,
    SATURATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk. FP8 is read and written as uint8 codes, which every GPU can."""
    READ: tl.constexpr = tl.uint8 if SOURCE == tl.float8e4nv or SOURCE == tl.float8e5 else SOURCE
    WRITE: tl.constexpr = tl.uint8 if TARGET == tl.float8e4nv or TARGET == tl.float8e5 else TARGET
    RANDOM: tl.constexpr = ROUNDING == _ROUND_STOCHASTIC
    IN: tl.constexpr = SOURCE.primitive_bitwidth // 8
    OUT: tl.constexpr = TARGET.primitive_bitwidth // 8
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
        read = tl.multiple_of(source.to(tl.pointer_type(READ)), EACH * IN)
        write = tl.multiple_of(target.to(tl.pointer_type(WRITE)), EACH * OUT)
        # The mask's bound is a multiple of 16, or it would undo the hints.
        bulk = (left // 16) * 16
        offsets = tl.arange(0, CHUNK)
        first_of_run = tl.arange(0, CHUNK // RUN) * RUN
        _cast_block(
            read + offsets,
            write + offsets,
            offsets < bulk,
            words_of_groups(
                (index >> 3) + (first_of_run >> 3), first_of_run, seed, 0, stream, 1, RUN, CHUNK, DOWN, DOWN
            )[0]
            if RANDOM
            else 0,
            SOURCE,
            TARGET,
            ROUNDING,
            SATURATE,
        )
        if bulk < left:
            tail = bulk + tl.arange(0, 16)
            _cast_block(
                source.to(tl.pointer_type(READ)) + tail,
                target.to(tl.pointer_type(WRITE)) + tail,
                tail < left,
                words_of(index + tail, seed, 0, stream, 1)[0] >> DOWN if RANDOM else 0,
                SOURCE,
                TARGET,
                ROUNDING,
                SATURATE,
            )
    else:
        for start in range(0, left, _SLOW_BLOCK):
            at = start + tl.arange(0, _SLOW_BLOCK)
            _cast_block(
                source.to(tl.pointer_type(READ)) + at,
                target.to(tl.pointer_type(WRITE)) + at,
                at < left,
                words_of(index + at, seed, 0, stream, 1)[0] >> DOWN if RANDOM else 0,
                SOURCE,
                TARGET,
                ROUNDING,
                SATURATE,
            )


@jit
def _plain(value):
    """The inverse of `_unspecialized`."""
    return (value + 4611686018427387904) >> 1


@functools.partial(jit, do_not_specialize=["source", "target", "numel"])
def cast_kernel(
    source,  # int64 address, and so is target
    target,
    numel,
    seed_low,  # as `_unspecialized` makes them, and so are seed_high and offset
    seed_high,
    offset,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROUNDING: tl.constexpr,
    SATURATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One tensor."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    _cast_chunk(
        source + start * (SOURCE.primitive_bitwidth // 8),
        target + start * (TARGET.primitive_bitwidth // 8),
        tl.minimum(numel - start, CHUNK).to(tl.int32),
        _plain(offset) + start,
        (_plain(seed_high) << 32) | _plain(seed_low),
        0,
        SOURCE,
        TARGET,
        ROUNDING,
        SATURATE,
        CHUNK,
    )


@functools.partial(jit, do_not_specialize=["tensors"])
def multi_cast_kernel(
    rows,  # int64 (6, tensors): see multi_tensor.py; operands are source, target, stream and offset
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    seed_low,  # as `_unspecialized` makes them
    seed_high,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ROUNDING: tl.constexpr,
    SATURATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A list of tensors."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    start = (chunk - tl.load(rows + tensors + tensor)) * CHUNK
    index, stream = start, start
    if ROUNDING == _ROUND_STOCHASTIC:
        stream = tl.load(rows + _STREAM_ROW * tensors + tensor)
        index = start + tl.load(rows + _OFFSET_ROW * tensors + tensor)
    _cast_chunk(
        tl.load(rows + _SOURCE_ROW * tensors + tensor) + start * (SOURCE.primitive_bitwidth // 8),
        tl.load(rows + _TARGET_ROW * tensors + tensor) + start * (TARGET.primitive_bitwidth // 8),
        tl.minimum(numel - start, CHUNK).to(tl.int32),
        index,
        (_plain(seed_high) << 32) | _plain(seed_low),
        stream,
        SOURCE,
        TARGET,
        ROUNDING,
        SATURATE,
        CHUNK,
    )


# ---------------------------------------------------------------------------------------------------------- launchers


def _unspecialized(value: int) -> int:
    """Maps a number below 2^60 to an odd negative 64-bit integer.

    Triton compiles separate kernels for 32-bit integers, for 1 and for multiples of 16. This value is none of these.
    """
    return 2 * value + 1 - 2**62


_tables = {pair: TableCache(operands=4, chunk=CHUNK) for pair in ((s, t) for s in DTYPES for t in DTYPES)}


def _format(dtype: torch.dtype) -> Any:
    """The Triton type of a dtype."""
    if dtype in FP8:
        return tl.float8e4nv if dtype == torch.float8_e4m3fn else tl.float8e5
    return triton_dtype(dtype)


def _seed_operands(seed: int) -> tuple[int, int]:
    return _unspecialized(seed & 0xFFFFFFFF), _unspecialized(seed >> 32)


@functools.cache
def _options(source: torch.dtype, target: torch.dtype, mode: int, saturate: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {
        "SOURCE": _format(source),
        "TARGET": _format(target),
        "ROUNDING": mode,
        "SATURATE": saturate,
        "CHUNK": CHUNK,
        # What a thread does once serves more elements in fewer warps, if its registers suffice.
        "num_warps": 2 if mode == STOCHASTIC and source.itemsize == 2 else 4,
        **EXACT,
    }


# One tensor as a table: rows as in multi_tensor.py.
_OneTensor = ctypes.c_int64 * (ADDRESSES + 4)


def _native(table: tuple[int, int | None, int, int], source: torch.dtype, target: torch.dtype, how: Conversion) -> None:
    """Cast the tensors of a table: the addresses of its rows and chunks, and how many tensors and chunks it has."""
    codes, (mode, saturate, seed) = (CODES[source], CODES[target]), how
    native.functions("cast").halfstep_cast(*table, *codes, mode, saturate, seed, threads())


def _cast_lists(
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    how: Conversion,
    streams: list[int],
    offsets: list[int],
    in_memory: bool = True,
) -> None:
    """Cast each source into its target: flat tensors on one device, equal strides, one dtype each side."""
    random = how.mode == STOCHASTIC
    if in_memory and len(sources) == 1 and not (random and streams[0]):
        if _is_torchs(sources[0], targets[0].dtype, how):
            check_addresses(sources[0], targets[0])
            targets[0].copy_(sources[0])
        else:
            _cast_one(sources[0], targets[0], how, offsets[0])
        return
    implementation = resolve(sources[0].device, "cast") if in_memory else "reference"
    if implementation == "reference":
        with nullcontext() if in_memory else own_operations([*sources, *targets]):
            for source, target, stream, offset in zip(sources, targets, streams, offsets, strict=True):
                _reference(source, target, how, stream, offset)
        return
    pair = sources[0].dtype, targets[0].dtype
    table = _tables[pair].table(sources, targets, numbers=(streams, offsets) if random else ())
    if not table.chunks:
        return
    if implementation == "native":
        _native((*table.places, table.tensors, table.chunks), *pair, how)
        return
    operands = table.rows, table.chunk_tensor, table.tensors, *_seed_operands(how.seed)
    launch_kernel(multi_cast_kernel, table.device, table.chunks, operands, _options(*pair, how.mode, how.saturate))


# Between fp32 and 16 bits torch's conversion has the same bits and takes less of the host: less than a launch of ours
# on a GPU, and than a call of C++ on a CPU. Between the 16-bit formats torch's is slower on CPUs. Lists keep their one
# launch: torch's `_foreach_copy_` makes one for every 64 tensors or fewer.
_PAIRS_OF_TORCH = {pair for pair in _tables if not {*FP8} & {*pair} and (torch.float32 in pair or pair[0] == pair[1])}


def _is_torchs(source: torch.Tensor, dtype: torch.dtype, how: Conversion) -> bool:
    """Whether torch converts a single tensor."""
    usual = how.mode == NEAREST and not how.saturate and (source.dtype, dtype) in _PAIRS_OF_TORCH
    return usual and chosen() == "auto" and (source.is_cuda or source.is_cpu)


def _cast_one(source: torch.Tensor, target: torch.Tensor, how: Conversion, offset: int) -> None:
    """Cast one flat tensor into another of the same strides."""
    numel = source.numel()
    if not numel:
        return
    implementation = resolve(source.device, "cast")
    if implementation != "reference":
        check_addresses(source, target)
    pair = source.dtype, target.dtype
    chunks = (numel + CHUNK - 1) // CHUNK
    if implementation == "reference":
        _reference(source, target, how, 0, offset)
    elif implementation == "triton":
        operands = address(source), address(target), numel, *_seed_operands(how.seed), _unspecialized(offset)
        options = _options(*pair, how.mode, how.saturate)
        launch_kernel(cast_kernel, source.device, chunks, operands, options, numel < 2**31)
    else:
        rows = _OneTensor(numel, 0, address(source), address(target), 0, offset)
        _native((ctypes.addressof(rows), None, 1, chunks), *pair, how)


# ----------------------------------------------------------------------------------------------------------- operator


def _computed(
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    how = _conversion(x.dtype, dtype, rounding, saturate)
    source = flattened(x)
    if _is_torchs(source, dtype, how):
        check_addresses(source)
        return source.to(dtype, copy=True)
    target = torch.empty_like(source, dtype=dtype)
    if how.mode != STOCHASTIC:
        _cast_one(source, target, how, 0)
        return target
    if seed is None or seed.device.type != "cpu":
        raise ValueError(
            "Expected seed to be a tensor on the CPU for stochastic rounding, but got none: use halfstep.cast"
        )
    how = how._replace(seed=int(seed))
    if source.is_contiguous():
        _cast_one(source, target, how, offset)
    else:  # the noise goes by rows, whatever the order in memory
        rows = torch.empty_like(source, dtype=dtype, memory_format=torch.contiguous_format)
        _cast_one(source.contiguous(), rows, how, offset)
        target.copy_(rows)
    return target


def _fake(
    x: torch.Tensor,
    dtype: torch.dtype,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    if is_flat(x):
        return torch.empty_like(x, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.source, ctx.target = inputs[0].dtype, output.dtype


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _cast(grad, ctx.source, "nearest", False, None, 0), None, None, None, None, None


def _tangent(ctx: Any, tangent: torch.Tensor, *rest: None) -> torch.Tensor:
    return _cast(tangent, ctx.target, "nearest", False, None, 0)


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
    samples = [_cast(one, dtype, rounding, saturate, of, offset) for one, of in zip(x, seeds, strict=True)]
    return torch.stack(samples), 0


# The seed is a tensor on the CPU. A drawn seed is then a separate operation in a traced graph, which is neither merged
# with another draw nor repeated in the backward.
_cast = Op(
    "cast(Tensor x, ScalarType dtype, str rounding='nearest', bool saturate=False, Tensor? seed=None, "
    "SymInt offset=0) -> Tensor",
    operands=1,
    compute=_computed,
    fake=_fake,
    save=_save,
    differentiate=_differentiate,
    tangent=_tangent,
    batch=_batch,
)

# ------------------------------------------------------------------------------------------------------------- public

_ALLOWED = ", ".join(map(str, DTYPES))


def _check_options(dtype: object, rounding: object, seed: object) -> None:
    if dtype not in CODES:
        raise TypeError(f"Expected dtype to be one of {_ALLOWED}, but got {dtype!r}")
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


def _drawn() -> torch.Tensor:
    """A fresh seed from torch's default generator on the CPU."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def cast(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: int | None = None,
    out: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Cast a tensor to another format, rounding once. The bits are the same on every device.

    Differentiable: the gradient is cast back to ``x.dtype``, to nearest and without saturation, whatever the rounding
    of the forward pass. As with ``x.to``, autograd gives an FP8 tensor an FP8 gradient, which should be scaled to fit.

    Args:
        x: any shape and strides; fp32, fp16, bf16, float8_e4m3fn or float8_e5m2.
        dtype: one of the same dtypes.
        rounding: ``"nearest"`` (ties to even), ``"toward_zero"``, or ``"stochastic"`` (up or down at random, with
            probabilities that make the expectation `x`, also for subnormal numbers; values that `dtype` represents
            never change).
        saturate: if True, overflow and infinities become the largest finite number. Otherwise overflow becomes
            infinity, or NaN in float8_e4m3fn, which has no infinity. NaN stays NaN in both cases.
        seed: seed of stochastic rounding, 0 to 2^63 - 1. Default: drawn from torch's CPU generator, so that
            ``torch.manual_seed`` controls it. The noise of an element depends only on the seed and on its row-major
            index, not on strides, device or launch.
        out: output tensor with the shape of `x` and dtype `dtype` on the same device, not overlapping `x`. Not
            differentiable.
        offset: index of the first element of `x` in the tensor that it is part of, up to 2^60 - 1. With the same seed,
            ``cast(x[a:b], offset=a)`` equals ``cast(x)[a:b]`` for a flat `x`.

    Returns:
        A new tensor, even if `x` already has `dtype`, with the strides of `x` if those are dense; or `out`.

    Raises:
        TypeError: `x`, `dtype`, `seed` or `offset` is not of the types above.
        ValueError: `rounding` is unknown, `seed` is out of range or given without stochastic rounding, `offset` is out
            of range, or `out` has another shape, dtype or device.

    Examples:
        >>> halfstep.cast(torch.tensor([1.0, 65519.0, 65520.0]), torch.float16)
        tensor([1.0000e+00, 6.5504e+04,        inf], dtype=torch.float16)
        >>> halfstep.cast(torch.tensor([500.0]), torch.float8_e4m3fn, saturate=True)
        tensor([448.], dtype=torch.float8_e4m3fn)
        >>> x = torch.full((10_000,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bf16 number
        >>> halfstep.cast(x, torch.bfloat16, rounding="stochastic", seed=0).float().mean()
        tensor(1.0020)
    """
    _check_options(dtype, rounding, seed)
    _check_offset(offset, "offset")
    check_tensor(x, "x", DTYPES)
    if out is None:
        token = None
        if rounding == "stochastic":
            with nullcontext() if type(x) in PLAIN_TYPES else own_operations([x]):
                token = _drawn() if seed is None else torch.tensor(seed, dtype=torch.int64, device="cpu")
        return _cast(x, dtype, rounding, saturate, token, offset)
    if out.shape != x.shape or out.dtype != dtype or out.device != x.device:
        raise ValueError(
            f"Expected out to be {tuple(x.shape)} {dtype} on {x.device}, "
            f"but got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            "Expected no gradient to be required with out=, but one is: leave out= out, or cast under torch.no_grad()"
        )
    foreach_cast([x], dtype, rounding=rounding, saturate=saturate, seed=seed, out=[out], offsets=[offset])
    return out


def _check_out(sources: list[torch.Tensor], results: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Validate the outputs of `foreach_cast`, each list being on one device."""
    if len(results) != len(sources):
        raise ValueError(f"Expected out to have one tensor per input, {len(sources)}, but got {len(results)}")
    if (
        results[0].device == sources[0].device
        and set(map(attrgetter("dtype"), results)) == {dtype}
        and list(map(torch.Tensor.size, results)) == list(map(torch.Tensor.size, sources))
    ):
        return
    for index, (source, result) in enumerate(zip(sources, results, strict=True)):
        if result.shape != source.shape or result.dtype != dtype or result.device != source.device:
            raise ValueError(
                f"Expected out[{index}] to be {tuple(source.shape)} {dtype} on {source.device}, "
                f"but got {tuple(result.shape)} {result.dtype} on {result.device}"
            )


def foreach_cast(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    rounding: str = "nearest",
    saturate: bool = False,
    seed: int | None = None,
    out: Sequence[torch.Tensor] | None = None,
    offsets: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Cast a list of tensors in one launch per source dtype. Not differentiable.

    Args:
        tensors: fp32, fp16, bf16, float8_e4m3fn and float8_e5m2 tensors of any shapes on one device; may be empty.
        dtype: one of the same dtypes.
        rounding, saturate: as in `cast`.
        seed: as in `cast`. Each tensor has its own noise, which depends on its position in the list and not on the
            other tensors. A list of one tensor gets the noise of `cast`.
        out: output tensors, one per input, with the shape of the input, dtype `dtype` and any strides. They must not
            overlap.
        offsets: for each tensor the `offset` of `cast`. Default: all 0.

    Returns:
        The new tensors, or those of `out`, in order.

    Raises:
        TypeError: an element of `tensors`, `dtype`, `seed` or an offset is not of the types above.
        ValueError: unknown `rounding`, tensors on different devices, `out` does not fit, `seed` or `offsets` as in
            `cast`.

    Examples:
        >>> weights = [torch.ones(2), torch.zeros(3)]
        >>> halfstep.foreach_cast(weights, torch.bfloat16)
        [tensor([1., 1.], dtype=torch.bfloat16), tensor([0., 0., 0.], dtype=torch.bfloat16)]
    """
    _check_options(dtype, rounding, seed)
    with torch.no_grad():
        return _foreach_cast(tensors, dtype, rounding, saturate, seed, out, offsets)


def _foreach_cast(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    rounding: str,
    saturate: bool,
    seed: int | None,
    out: Sequence[torch.Tensor] | None,
    offsets: Sequence[int] | None,
) -> list[torch.Tensor]:
    """`foreach_cast` of lists that are not the usual case."""
    # Functions in C check the properties of all tensors. Loops in Python take longer than the kernels for thousands of
    # tensors, and are only used to report errors and for unusual tensors.
    sources, in_memory = check_tensor_list(tensors, "tensors", DTYPES)
    places = [0] * len(sources)
    if offsets is not None:
        places = [_check_offset(place, f"offsets[{index}]") for index, place in enumerate(offsets)]
        if len(places) != len(sources):
            raise ValueError(f"Expected offsets to have one number per tensor, {len(sources)}, but got {len(places)}")
    if not sources:
        return []
    flat = all_flattened(sources)
    if out is None:
        results = [torch.empty_like(source, dtype=dtype) for source in flat]
    else:
        results, out_in_memory = check_tensor_list(out, "out", DTYPES)
        in_memory = in_memory and out_in_memory
        _check_out(sources, results, dtype)
    random = rounding == "stochastic"
    if random:  # random bits follow the row-major order, whatever the order in memory
        flat = [source.contiguous() for source in flat]
    as_sources = out is None and not random  # new tensors in the order of theirs
    if as_sources or (all(map(torch.Tensor.is_contiguous, flat)) and all_flattened(results) is results):
        targets = results  # with the same shapes, both row-major
    else:  # a target with another order of elements is filled by a copy
        targets = [
            result if result.stride() == one.stride() and is_flat(result) else torch.empty_like(one, dtype=dtype)
            for one, result in zip(flat, results, strict=True)
        ]
    number = seed or 0
    if random and seed is None:
        drawn = _drawn()
        number = int(drawn) if type(drawn) is torch.Tensor else 0  # FakeTensorMode draws nothing
    for source_dtype, indices in by_dtype(flat).items():
        every = len(indices) == len(flat)
        _cast_lists(
            flat if every else [flat[index] for index in indices],
            targets if every else [targets[index] for index in indices],
            _conversion(source_dtype, dtype, rounding, saturate, number),
            list(indices),
            places if every else [places[index] for index in indices],
            in_memory,
        )
    for target, result in zip(targets, results, strict=True) if targets is not results else ():
        if target is not result:
            result.copy_(target)
    if out is not None:
        torch.autograd.graph.increment_version(results)
    return results
