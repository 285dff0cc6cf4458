"""Triton: the walk of a program through tensors whose moments are blocks of 8-bit codes; see block_codes.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from halfstep.kernels import block_codes
from halfstep.kernels.backend import constant, cuda_capability_geq, jit, tl
from halfstep.kernels.block_codes import SPAN
from halfstep.kernels.multi_tensor import ADDRESSES
from halfstep.kernels.optimizer import tiles
from halfstep.kernels.optimizer.tiles import ROW, Position, indices, named
from halfstep.kernels.philox import words_of, words_of_groups
from halfstep.kernels.rounding import to_float32

# What kernels read of the above.
_ADDRESSES, _SPAN, _HALF, _UP = map(constant, (ADDRESSES, SPAN, block_codes.HALF, block_codes.UP))


class Scales(NamedTuple):
    """The int64 addresses of the scales of a moment's first block, by moment."""

    m: Any
    v: Any
    top: Any


class Blocks(NamedTuple):
    """Blocks that are updated together: a `Tile` of shape (blocks, SPAN), and in the shape (blocks,) the rest."""

    start: Any  # the first element, int64
    offsets: Any  # from there, uint32
    mask: Any
    number: Any  # of each block, behind the one whose scales `Scales` has, uint32
    exist: Any
    size: Any  # how many of their elements exist; anything if all do


class Loaded(NamedTuple):
    weight: Any
    extra: Any  # master or remainder
    grad: Any
    m: Any  # codes
    v: Any
    m_scales: Any
    v_scales: Any


class Source(NamedTuple):
    table: Any
    tensors: Any
    hyper: Any


class Chunk(NamedTuple):
    """Blocks of rows of a matrix, in order."""

    start: Any  # the first element, int64
    count: Any  # of blocks
    in_row: Any  # the number of the first block in its row
    per_row: Any  # blocks of a row
    width: Any  # elements of a row


@jit
def load_scales(address, blocks, TYPE: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(named(TYPE))) + blocks.number, mask=blocks.exist, other=0)


@jit
def store_scales(address, blocks, scales, TYPE: tl.constexpr, HINT: tl.constexpr):
    at = address.to(tl.pointer_type(named(TYPE))) + blocks.number
    if HINT:
        # The threads that share a block, of which the first one stores. In this shape, and with addresses that differ
        # along it and are not known to follow each other across it, the compiler leaves the scales in the registers
        # where they are.
        THREADS: tl.constexpr = _SPAN // (HINT // 2)
        thread = tl.arange(0, THREADS)[None, :]
        at = tl.max_contiguous(at[:, None] + thread, (1, THREADS))
        tl.store(at, scales[:, None], mask=blocks.exist[:, None] & (thread == 0))
    else:
        tl.store(at, scales, mask=blocks.exist)


@jit
def _load(at, scales, blocks, FORM: tl.constexpr, HINT: tl.constexpr):
    weight, extra = tiles.load_weight(at, blocks, FORM, HINT)
    grad = tiles.load(at.grad, blocks, tl.constexpr(FORM.GRAD), HINT, 0)
    m = tiles.load(at.m, blocks, tl.constexpr(FORM.STATE), HINT, 0)
    v = m
    if FORM.MOMENTS > 1:
        v = tiles.load(at.v, blocks, "uint8", HINT, 0)
    m_scales = load_scales(scales.m, blocks, "uint8")
    v_scales = m_scales
    if FORM.MOMENTS > 1:
        v_scales = load_scales(scales.v, blocks, "int16")
    return Loaded(weight, extra, grad, m, v, m_scales, v_scales)


@jit
def store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, FORM: tl.constexpr, HINT: tl.constexpr):
    tiles.store(at.m, blocks, codes_m, tl.constexpr(FORM.STATE), HINT)
    if FORM.MOMENTS > 1:
        tiles.store(at.v, blocks, codes_v, "uint8", HINT)
    store_scales(scales.m, blocks, scales_m, "uint8", HINT)
    if FORM.MOMENTS > 1:
        store_scales(scales.v, blocks, scales_v, "int16", HINT)


@jit
def store_largest(at, scales, blocks, codes_v, scales_v, PACKED: tl.constexpr, HINT: tl.constexpr):
    """Update and store the running maximum of the second moment, which is returned."""
    codes = tiles.load(at.top, blocks, "uint8", HINT, 0)
    largest_scales = load_scales(scales.top, blocks, "int16")
    if PACKED:
        v = block_codes.decode_positive_packed(codes_v, scales_v[:, None])
        top = block_codes.decode_positive_packed(codes, largest_scales[:, None])
    else:
        v = block_codes.decode_positive_block(codes_v, scales_v[:, None])
        top = block_codes.decode_positive_block(codes, largest_scales[:, None])
    top = tiles.larger(v, top)
    codes, largest_scales = block_codes.encode_positive_block(top, _UP, blocks.mask)
    tiles.store(at.top, blocks, codes, "uint8", HINT)
    store_scales(scales.top, blocks, largest_scales, "int16", HINT)
    return top


@jit
def _update(
    loaded, at, scales, blocks, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, SHORT: tl.constexpr,
    AVERAGE: tl.constexpr, WEIGHT: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Apply a rule to blocks of codes. Elements beyond the end of a short block change no scale."""
    MOVED: tl.constexpr = HINT != 0 and cuda_capability_geq(8, 0)  # whether words were moved down
    if NVIDIA is not None and MOVED:
        NVIDIA(loaded, at, scales, blocks, words, hyper, FORM, HINT, SHORT)
    else:
        DOWN: tl.constexpr = 0 if MOVED else 8
        w, g, v = tiles.weight_of(loaded.weight, loaded.extra, FORM), to_float32(loaded.grad), 0.0
        power = block_codes.power_of_exponents(loaded.m_scales)[:, None]
        if FORM.STATE == "int8":
            m = block_codes.decode_linear_block(loaded.m, power)
        else:
            m = block_codes.decode_signed_block(loaded.m, power)
        if FORM.MOMENTS > 1:
            v = block_codes.decode_positive_block(loaded.v, loaded.v_scales[:, None])
        m, v = AVERAGE(w, g, m, v, hyper, FORM)
        if SHORT:
            m = tl.where(blocks.mask, m, 0.0)
        noise = words[1] >> DOWN if FORM.STOCHASTIC else _HALF
        if FORM.STATE == "int8" and MOVED:
            codes_m, scales_m = block_codes.encode_linear_packed(m, noise, FORM.STOCHASTIC)
        elif FORM.STATE == "int8":
            codes_m, scales_m = block_codes.encode_linear_block(m, noise)
        else:
            codes_m, scales_m = block_codes.encode_signed_block(m, noise)
        codes_v, scales_v = codes_m, scales_m
        if FORM.MOMENTS > 1:
            noise = words[2] >> DOWN if FORM.STOCHASTIC else _HALF
            codes_v, scales_v = block_codes.encode_positive_block(v, noise, blocks.mask)
        store_codes(at, scales, blocks, codes_m, scales_m, codes_v, scales_v, FORM, HINT)
        if FORM.MOMENTS > 2:
            v = store_largest(at, scales, blocks, codes_v, scales_v, False, HINT)
        word = words[0]
        if FORM.STOCHASTIC and MOVED:
            word = word << (24 if FORM.REMAINDER == 8 else 8)
        tiles.store_weight(at, blocks, WEIGHT(w, g, m, v, hyper, FORM), word, FORM, HINT)


@jit
def _existing(size, HINT: tl.constexpr):
    """Which elements of blocks of `size` elements exist, of shape (blocks, SPAN). Of those that a thread holds side by
    side, either all exist or none, so that one comparison per thread is enough.
    """
    SIDE: tl.constexpr = HINT // 2 if HINT != 0 and cuda_capability_geq(8, 0) else 1
    return (tl.arange(0, _SPAN) // SIDE * SIDE)[None, :] < size[:, None]


@jit
def _row_and_block(number, per_row):
    row = number // per_row
    return row, number - row * per_row


@jit
def _words_of_blocks(runs, position, seed, shard, FORM: tl.constexpr):
    """The random words of all three draws for whole blocks: of EACH elements from `runs` times EACH on.

    Only where `tiles.shares_words`. On NVIDIA GPUs they are moved down, as block_codes.py takes them.
    """
    EACH: tl.constexpr = FORM.HINT // 2
    DOWN: tl.constexpr = 8 if cuda_capability_geq(8, 0) else 0
    DOWN_FIRST: tl.constexpr = 24 if DOWN != 0 and FORM.REMAINDER == 8 else DOWN
    index, left, to_end, run, jump = position
    runs = indices(Position(index // EACH, left // EACH, to_end // EACH, run // EACH, jump // EACH), runs)
    group = runs >> (8 // EACH - 1)
    words = words_of_groups(
        group, runs * EACH, seed, shard.step, shard.stream, 3, EACH, FORM.BLOCK, DOWN, DOWN_FIRST
    )  # fmt: skip
    SHAPE: tl.constexpr = (FORM.BLOCK // _SPAN, _SPAN)
    return tl.reshape(words[0], SHAPE), tl.reshape(words[1], SHAPE), tl.reshape(words[2], SHAPE)


@jit
def _walk_rows(
    at, scales, source, shard, position, chunk, FORM: tl.constexpr, TILE: tl.constexpr, HINT: tl.constexpr,
    HYPER: tl.constexpr, AVERAGE: tl.constexpr, WEIGHT: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Apply a rule to blocks of which some may be short, with masks, TILE blocks per trip. With a HINT, all begin and
    end at multiples of 16 elements."""
    KEPT: tl.constexpr = HINT != 0 and cuda_capability_geq(8, 0)
    start = chunk.start
    if HINT:
        start = (start // 16) * 16
    if KEPT:
        numbers = tiles.load_row(source.hyper, HYPER)
        seed = tl.load(source.table + ROW.value.SEED * source.tensors) if FORM.STOCHASTIC else 0
    row, in_row = _row_and_block(chunk.in_row + tl.arange(0, TILE), chunk.per_row)
    by_rows, by_blocks = _row_and_block(TILE, chunk.per_row)
    for begin in range(0, chunk.count, TILE):
        number = begin + tl.arange(0, TILE)
        exist = number < chunk.count
        # Where a second row begins, 32 bits hold the product of rows and columns.
        first = row * chunk.width + (in_row - chunk.in_row) * _SPAN
        size = tl.where(exist, tl.minimum(chunk.width - in_row * _SPAN, _SPAN), 0)
        if HINT:  # the hint must stand beside what computes the number, or it is lost
            first, size = tl.multiple_of(first, 16), tl.multiple_of(size, 16)
        # The rows and blocks of the next trip, without a division.
        in_row += by_blocks
        beyond = in_row >= chunk.per_row
        row, in_row = row + by_rows + beyond.to(tl.int32), tl.where(beyond, in_row - chunk.per_row, in_row)
        offsets = first[:, None] + tl.arange(0, _SPAN)[None, :]
        # Addresses have 64 bits, and the upper half of a number without a sign is 0.
        blocks = Blocks(start, offsets.to(tl.uint32), _existing(size, HINT), number.to(tl.uint32), exist, size)
        loaded = _load(at, scales, blocks, FORM, HINT)
        if not KEPT:  # again and again: AMD's scalar registers do not suffice to keep them
            numbers = tiles.load_row(source.hyper, HYPER)
            seed = tl.load(source.table + ROW.value.SEED * source.tensors) if FORM.STOCHASTIC else 0
        words = 0, 0, 0
        if FORM.STOCHASTIC:
            if HINT:
                EACH: tl.constexpr = HINT // 2
                runs = (first // EACH)[:, None] + tl.arange(0, _SPAN // EACH)[None, :]
                runs = tl.reshape(runs, (FORM.BLOCK // EACH,))
                words = _words_of_blocks(runs, position, seed, shard, FORM)
            else:
                words = words_of(indices(position, offsets), seed, shard.step, shard.stream, 3)
        _update(loaded, at, scales, blocks, words, numbers, FORM, HINT, True, AVERAGE, WEIGHT, NVIDIA)


@jit
def walk(
    rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr,
    HYPER: tl.constexpr, AVERAGE: tl.constexpr, WEIGHT: tl.constexpr, NVIDIA: tl.constexpr = None,
):  # fmt: skip
    """`tiles.walk`, or `_walk_blocks` with moments in 8 bits."""
    if FORM.STATE == "uint8" or FORM.STATE == "int8":
        _walk_blocks(rows, chunk_tensor, tensors, hyper, FORM, HYPER, AVERAGE, WEIGHT, NVIDIA)
    else:
        tiles.walk(rows, chunk_tensor, tensors, hyper, FORM, HYPER, AVERAGE, WEIGHT)


@jit
def _walk_blocks(
    rows, chunk_tensor, tensors, hyper, FORM: tl.constexpr,
    HYPER: tl.constexpr, AVERAGE: tl.constexpr, WEIGHT: tl.constexpr, NVIDIA: tl.constexpr,
):  # fmt: skip
    """Apply a rule to blocks. Arguments as for `tiles.walk`, but numbers of elements are those of whole blocks. NVIDIA
    is None, or a faster way there, `_update` itself for words that were moved down.

    If each program went through a chunk of its own, all together would be in so many pages of memory that they wait for
    addresses. So of a tensor whose rows are whole blocks, a program takes every n-th trip, where n programs share the
    tensor. Of other tensors it takes a chunk of CHUNK elements.
    """
    CHUNK: tl.constexpr = FORM.CHUNK // _SPAN  # in blocks, as all that follows
    TILE: tl.constexpr = FORM.BLOCK // _SPAN
    EACH: tl.constexpr = FORM.HINT // 2  # elements that a thread holds side by side
    PACKED: tl.constexpr = cuda_capability_geq(8, 0)
    # The addresses of a second tile are those of the first one with a constant, which accesses add themselves.
    TRIP: tl.constexpr = 2 * TILE if PACKED else TILE
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensor + program)
    part = program - tl.load(rows + tensors + tensor)  # of the tensor
    total = tl.load(rows + tensor) // _SPAN
    table = rows + _ADDRESSES * tensors + tensor
    at = tiles.load_operands(table, tensors, FORM)
    m_scales = tl.load(table + ROW.value.M_SCALES * tensors)
    v_scales = m_scales
    if FORM.MOMENTS > 1:
        v_scales = tl.load(table + ROW.value.V_SCALES * tensors)
    top_scales = v_scales
    if FORM.MOMENTS > 2:
        top_scales = tl.load(table + ROW.value.TOP_SCALES * tensors)
    columns = tl.load(table + ROW.value.COLUMNS * tensors)
    hyper += tensor * FORM.COLUMNS
    if tl.load(hyper) == 0:
        source = Source(table, tensors, hyper + 1)
        shard = tiles.load_shard(table, tensors, FORM)
        wide = (columns % 16 == 0) & tiles.are_aligned(at)
        full = columns % _SPAN == 0
        in_order = wide & full
        if FORM.STOCHASTIC:
            in_order = in_order & (shard.inner >= total * _SPAN) & (shard.base % EACH == 0)
        number = part * CHUNK  # of the first block that is left to the tiles with masks
        count = tl.minimum(total - number, CHUNK).to(tl.int32)
        if in_order:
            parts = ((total + (CHUNK - 1)) // CHUNK).to(tl.int32)
            trips = (total // TRIP).to(tl.int32)
            number = trips.to(tl.int64) * TRIP
            count = tl.where(part == parts - 1, total - number, 0).to(tl.int32)
            if PACKED:
                numbers = tiles.load_row(source.hyper, HYPER)
                seed = tl.load(table + ROW.value.SEED * tensors) if FORM.STOCHASTIC else 0
            mask = tl.full((TILE, _SPAN), True, tl.int1)
            exist = tl.full((TILE,), True, tl.int1)
            for trip in range(part.to(tl.int32), trips, parts):
                begin = trip * tl.full((), TRIP, tl.int64)
                scales = Scales(m_scales + begin, v_scales + begin * 2, top_scales + begin * 2)
                block = tl.arange(0, TILE)
                offsets = block[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
                first = Blocks(begin * _SPAN, offsets.to(tl.uint32), mask, block.to(tl.uint32), exist, block)
                offsets, behind = (offsets + TILE * _SPAN).to(tl.uint32), (block + TILE).to(tl.uint32)
                second = Blocks(begin * _SPAN, offsets, mask, behind, exist, block)
                loaded = _load(at, scales, first, FORM, FORM.HINT)
                later = loaded
                if PACKED:  # both tiles are on their way before the first one is stored, which the compiler cannot do
                    later = _load(at, scales, second, FORM, FORM.HINT)
                for tile in tl.static_range(0, TRIP, TILE):
                    if not PACKED:  # again and again: AMD's scalar registers do not suffice to keep them
                        numbers = tiles.load_row(source.hyper, HYPER)
                        seed = tl.load(table + ROW.value.SEED * tensors) if FORM.STOCHASTIC else 0
                    words = 0, 0, 0
                    if FORM.STOCHASTIC:
                        runs = tile * (_SPAN // EACH) + tl.arange(0, FORM.BLOCK // EACH)
                        position = Position(shard.base + begin * _SPAN, 0, 0, 1, 0)
                        words = _words_of_blocks(runs, position, seed, shard, FORM)
                    _update(
                        loaded if tile == 0 else later, at, scales, first if tile == 0 else second,
                        words, numbers, FORM, FORM.HINT, False, AVERAGE, WEIGHT, NVIDIA,
                    )  # fmt: skip
        if count > 0:  # once per program, what the others need is many instructions
            scales = Scales(m_scales + number, v_scales + number * 2, top_scales + number * 2)
            start = number * _SPAN
            in_row = count * 0
            per_row = (columns + (_SPAN - 1)) // _SPAN
            if not full:
                row = number // per_row
                in_row = (number - row * per_row).to(tl.int32)
                start = row * columns + in_row * _SPAN
            # Where blocks are short, there are fewer elements than this.
            position = tiles.position_of(shard, start, count * _SPAN, FORM)
            # Within whole blocks, only whether a row ends before the chunk does matters; so its size fits 32 bits.
            width = tl.where(full, tl.minimum(columns, 1 << 30), columns).to(tl.int32)
            chunk = Chunk(start, count, in_row, per_row.to(tl.int32), width)
            if wide & tiles.shares_words(position, FORM):
                _walk_rows(
                    at, scales, source, shard, position, chunk, FORM, TILE, FORM.HINT, HYPER, AVERAGE, WEIGHT, NVIDIA
                )
            else:
                _walk_rows(
                    at, scales, source, shard, position, chunk, FORM, 256 // _SPAN, 0, HYPER, AVERAGE, WEIGHT, NVIDIA
                )
