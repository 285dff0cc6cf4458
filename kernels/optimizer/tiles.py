"""Triton: what every optimizer's kernel does around its rule. Load and store of weights and moments, random words, the
walk of a program through its chunk, and the kernel that prepares a step."""

from __future__ import annotations

from typing import Any, NamedTuple

from halfstep.kernels.backend import constant, constexpr_function, jit, tl
from halfstep.kernels.multi_tensor import ADDRESSES
from halfstep.kernels.optimizer.layout import ROWS
from halfstep.kernels.philox import words_of, words_of_groups
from halfstep.kernels.rounding import (
    from_float32,
    join_float32,
    split24_float32,
    split_float32,
    stochastic_float32,
    to_float32,
)

# What kernels read of the above.
_ADDRESSES, ROW = constant(ADDRESSES), constant(ROWS)


class Operands(NamedTuple):
    """The int64 addresses of a tensor's operands. Those that a form does not have are any others."""

    grad: Any
    param: Any
    extra: Any
    m: Any
    v: Any
    top: Any


class Tile(NamedTuple):
    start: Any  # the chunk's first element, int64
    offsets: Any  # from there
    mask: Any  # which exist


class Shard(NamedTuple):
    """The numbers of a tensor that name its random bits, and where it lies in its parameter."""

    step: Any
    stream: Any
    base: Any
    inner: Any
    inner_whole: Any


class Position(NamedTuple):
    """Where a chunk of a shard lies in the whole parameter."""

    index: Any  # of its first element in the whole
    left: Any  # its elements
    to_end: Any  # elements until the run of consecutive elements ends, in which it begins
    run: Any  # elements of every other run
    jump: Any  # elements of the whole between two runs


# ------------------------------------------------------------------------------------------------ tables and operands


@jit
def load_row(at, TYPE: tl.constexpr, mask=None):
    """Consecutive numbers as a named tuple of TYPE. Where `mask` is False, they are 0."""
    numbers = ()
    for column in tl.static_range(len(TYPE.value._fields)):
        numbers += (tl.load(at + column, mask=mask, other=None if mask is None else 0.0),)  # type: ignore[assignment]
    return TYPE.value(*numbers)


@jit
def load_operands(table, tensors, FORM: tl.constexpr):
    grad = tl.load(table + ROW.value.GRAD * tensors)
    param = tl.load(table + ROW.value.PARAM * tensors)
    m = param
    if FORM.MOMENTS > 0:
        m = tl.load(table + ROW.value.M * tensors)
    v = m
    if FORM.MOMENTS > 1:
        v = tl.load(table + ROW.value.V * tensors)
    extra, top = m, m
    if FORM.FULL or FORM.REMAINDER:
        extra = tl.load(table + ROW.value.EXTRA * tensors)
    if FORM.MOMENTS > 2:
        top = tl.load(table + ROW.value.TOP * tensors)
    return Operands(grad, param, extra, m, v, top)


@jit
def are_aligned(at):
    return (at.grad | at.param | at.extra | at.m | at.v | at.top) % 16 == 0


@constexpr_function
def named(name):
    """The type of a name. Forms hold names, because Triton's hooks write all constants as JSON."""
    return tl.dtype(name)


@jit
def pointer(address, TYPE: tl.constexpr, HINT: tl.constexpr):
    """A pointer, with the alignment that the compiler may rely on; the hint must come after the cast to survive.

    HINT is the alignment of 16-bit operands in bytes, 0 if nothing is known: 8 if any operand is fp32, so that each
    thread holds the same four elements of every operand, else 16. 8-bit operands have half of it.
    """
    at = address.to(tl.pointer_type(named(TYPE)))
    if HINT:
        BYTE: tl.constexpr = TYPE == "int8" or TYPE == "uint8"
        at = tl.multiple_of(at, 16 if TYPE == "fp32" else HINT // 2 if BYTE else HINT)
    return at


@jit
def load(address, tile, TYPE: tl.constexpr, HINT: tl.constexpr, OTHER: tl.constexpr = None):
    """The elements of an operand in a tile, OTHER where none exist."""
    at = pointer(address, TYPE, HINT) + tile.start + tile.offsets
    # A line for each size of elements, by which the audit knows what an access moves.
    if TYPE == "fp32":
        x = tl.load(at, mask=tile.mask, other=OTHER)
    elif TYPE == "int8" or TYPE == "uint8":
        x = tl.load(at, mask=tile.mask, other=OTHER)
    else:
        x = tl.load(at, mask=tile.mask, other=OTHER)
    return x


@jit
def store(address, tile, x, TYPE: tl.constexpr, HINT: tl.constexpr):
    at = pointer(address, TYPE, HINT) + tile.start + tile.offsets
    if TYPE == "fp32":
        tl.store(at, x, mask=tile.mask)
    elif TYPE == "int8" or TYPE == "uint8":
        tl.store(at, x, mask=tile.mask)
    else:
        tl.store(at, x, mask=tile.mask)


@jit
def rounded(x, word, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and TYPE != "fp32":
        return stochastic_float32(x, word, named(TYPE), True)
    else:
        return from_float32(x, named(TYPE))


@jit
def larger(v, top):
    return tl.where((v > top) | (v != v), v, top)


@jit
def load_weight(at, tile, FORM: tl.constexpr, HINT: tl.constexpr):
    """What the weights of a tile are made of: the parameter, and its master or remainder. See `weight_of`."""
    weight, extra = 0.0, 0.0
    if not (FORM.FULL or FORM.RESULT):
        weight = load(at.param, tile, tl.constexpr(FORM.PARAM), HINT)
    if FORM.FULL or FORM.REMAINDER:
        extra = load(at.extra, tile, tl.constexpr(FORM.EXTRA), HINT)
    return weight, extra


@jit
def weight_of(weight, extra, FORM: tl.constexpr):
    """The weights in fp32; 0 if there are none."""
    if FORM.RESULT:
        return 0.0
    elif FORM.FULL:
        return extra
    elif FORM.REMAINDER:
        return join_float32(weight, extra)
    else:
        return to_float32(weight)


@jit
def store_weight(at, tile, w, word, FORM: tl.constexpr, HINT: tl.constexpr):
    """Round and store the fp32 weights of a tile; `word` are the random words of draw 0."""
    if FORM.REMAINDER:
        if FORM.REMAINDER == 16:
            weight, remainder = split_float32(w, True)
        else:
            weight, remainder = split24_float32(w, word, FORM.STOCHASTIC)
        store(at.param, tile, weight, tl.constexpr(FORM.PARAM), HINT)
        store(at.extra, tile, remainder, tl.constexpr(FORM.EXTRA), HINT)
    else:
        if FORM.FULL:
            store(at.extra, tile, w, tl.constexpr(FORM.EXTRA), HINT)
        NOISY: tl.constexpr = FORM.STOCHASTIC and not (FORM.FULL or FORM.RESULT)
        store(
            at.param, tile, rounded(w, word, tl.constexpr(FORM.PARAM), NOISY), tl.constexpr(FORM.PARAM), HINT
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- random words


@jit
def load_shard(table, tensors, FORM: tl.constexpr):
    """The `Shard` of a tensor, whose seed is loaded later, or zeros if nothing is rounded stochastically."""
    if FORM.STOCHASTIC:
        step = tl.load(tl.load(table + ROW.value.STEP * tensors).to(tl.pointer_type(tl.float32)))
        return Shard(
            tl.minimum(tl.maximum(step, 1.0), 1073741824.0).to(tl.uint32),
            tl.load(table + ROW.value.STREAM * tensors).to(tl.uint32),
            tl.load(table + ROW.value.BASE * tensors),
            tl.load(table + ROW.value.INNER * tensors),
            tl.load(table + ROW.value.INNER_WHOLE * tensors),
        )
    else:
        return Shard(0, 0, 0, 0, 0)


@jit
def position_of(shard, start, left, FORM: tl.constexpr):
    """The `Position` of a chunk that begins at element `start` of a shard and has `left` elements."""
    if FORM.STOCHASTIC:
        row = start * 0
        if start >= shard.inner:  # a 64-bit division costs more than the branch around it
            row = start // shard.inner
        column = start - row * shard.inner
        index = shard.base + row * shard.inner_whole + column
        # Within a chunk all that lies beyond it is equally far, so 32 bits say where runs end.
        to_end = tl.minimum(shard.inner - column, 2 * FORM.CHUNK).to(tl.int32)
        run = tl.minimum(shard.inner, 2 * FORM.CHUNK).to(tl.int32)
        return Position(index, left, to_end, run, shard.inner_whole - shard.inner)
    else:
        return Position(0, 0, 0, 0, 0)


@jit
def shares_words(position, FORM: tl.constexpr):
    """Whether what a thread holds side by side can share one call of Philox."""
    if FORM.STOCHASTIC:
        EACH: tl.constexpr = FORM.HINT // 2
        within = (position.to_end | position.run | position.jump) % EACH == 0
        return (position.index % EACH == 0) & ((position.to_end >= position.left) | within)
    else:
        return True


@jit
def indices(position, offsets):
    """The indices in the whole parameter of elements that lie `offsets` behind the first one of a chunk."""
    if position.to_end >= position.left:  # one run, as in nearly every chunk: a division is many instructions
        index = position.index + offsets
    else:
        ends = tl.where(offsets < position.to_end, 0, (offsets - position.to_end) // position.run + 1)
        index = position.index + (offsets + ends.to(tl.int64) * position.jump)
    return index


# --------------------------------------------------------------------------------------------------------------- walks


@jit
def _update(
    at, tile, words, hyper, FORM: tl.constexpr, HINT: tl.constexpr, AVERAGE: tl.constexpr, WEIGHT: tl.constexpr
):  # fmt: skip
    """Apply a rule to a tile, whose moments are not in 8 bits."""
    STATE: tl.constexpr = FORM.STATE
    weight, extra = load_weight(at, tile, FORM, HINT)
    w = weight_of(weight, extra, FORM)
    g = to_float32(load(at.grad, tile, tl.constexpr(FORM.GRAD), HINT))
    m, v = 0.0, 0.0
    if FORM.MOMENTS > 0:
        m = to_float32(load(at.m, tile, STATE, HINT))
    if FORM.MOMENTS > 1:
        v = to_float32(load(at.v, tile, STATE, HINT))
    m, v = AVERAGE(w, g, m, v, hyper, FORM)
    if FORM.MOMENTS > 0:
        store(at.m, tile, rounded(m, words[1], STATE, FORM.STOCHASTIC), STATE, HINT)
    if FORM.MOMENTS > 1:
        stored = rounded(v, words[2], STATE, FORM.STOCHASTIC)
        store(at.v, tile, stored, STATE, HINT)
        if FORM.MOMENTS > 2:
            if FORM.STOCHASTIC:
                v = to_float32(stored)
            v = larger(v, to_float32(load(at.top, tile, STATE, HINT)))
            store(at.top, tile, from_float32(v, named(STATE)), STATE, HINT)
    store_weight(at, tile, WEIGHT(w, g, m, v, hyper, FORM), words[0], FORM, HINT)


@jit
def _apply(
    at, start, begin, end, seed, shard, position, hyper,
    FORM: tl.constexpr, SIZE: tl.constexpr, HINT: tl.constexpr, AVERAGE: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Apply a rule to the elements of a chunk from `begin` on: at most SIZE, and none from `end` on.

    The chunk begins at `start`, from which `begin` and `end` are counted.
    """
    offsets = begin + tl.arange(0, SIZE)
    words = 0, 0, 0
    if FORM.STOCHASTIC:
        DRAWS: tl.constexpr = 1 if FORM.STATE == "fp32" else 3
        if HINT:
            EACH: tl.constexpr = HINT // 2  # elements that a thread holds side by side
            firsts = indices(position, begin + tl.arange(0, SIZE // EACH) * EACH)
            words = words_of_groups(firsts >> 3, firsts, seed, shard.step, shard.stream, DRAWS, EACH, SIZE)
        else:
            words = words_of(indices(position, offsets), seed, shard.step, shard.stream, DRAWS)
    _update(at, Tile(start, offsets, offsets < end), words, hyper, FORM, HINT, AVERAGE, WEIGHT)


@jit
def walk(
    rows, chunk_tensor, tensors,  # `TensorTable.operands`
    hyper,  # fp32 (tensors, COLUMNS), from the prepare kernel
    FORM: tl.constexpr,
    HYPER: tl.constexpr,  # the type of the numbers of a tensor
    AVERAGE: tl.constexpr,  # AVERAGE(weight, gradient, first and second moment, numbers, FORM): the new moments
    WEIGHT: tl.constexpr,  # WEIGHT with the same arguments, the moments after AVERAGE: the new weight
):  # fmt: skip
    """Apply a rule to a chunk: whole blocks with wide accesses, and what is left or not aligned with narrow ones."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    start = (chunk - tl.load(rows + tensors + tensor)) * FORM.CHUNK
    table = rows + _ADDRESSES * tensors + tensor
    at = load_operands(table, tensors, FORM)
    hyper += tensor * FORM.COLUMNS
    if tl.load(hyper) == 0:
        left = tl.minimum(numel - start, FORM.CHUNK).to(tl.int32)
        shard = load_shard(table, tensors, FORM)
        seed = tl.load(table + ROW.value.SEED * tensors) if FORM.STOCHASTIC else 0
        position = position_of(shard, start, left, FORM)
        # Loaded once, before any store: the compiler must suppose that a store may change them.
        numbers = load_row(hyper + 1, HYPER)
        if are_aligned(at) & shares_words(position, FORM):
            # The mask's bound is a multiple of 16, or it would undo the hint.
            bulk = (left // 16) * 16
            HINT: tl.constexpr = FORM.HINT
            for begin in range(0, bulk, FORM.BLOCK):
                _apply(at, start, begin, bulk, seed, shard, position, numbers, FORM, FORM.BLOCK, HINT, AVERAGE, WEIGHT)
            if bulk < left:
                _apply(at, start, bulk, left, seed, shard, position, numbers, FORM, 16, 0, AVERAGE, WEIGHT)
        else:
            for begin in range(0, left, 512):
                _apply(at, start, begin, left, seed, shard, position, numbers, FORM, 512, 0, AVERAGE, WEIGHT)


# ------------------------------------------------------------------------------------------------------------- prepare


@jit
def prepare(
    rows, tensors,  # of a `TensorTable`
    tensor_group,  # int64 (tensors,): row of `groups`
    groups,  # fp64 (groups, group columns): what the host sets
    hyper,  # fp32 (tensors, 1 + hyper numbers): skip, and what the elements need
    scalars,  # fp32 grad_scale and found_inf, fp64 sum_of_squares, each read if the flag below says so
    FLAGS: tl.constexpr,  # whether there is a grad_scale, a found_inf, a sum_of_squares
    LANES: tl.constexpr,
    GROUP: tl.constexpr,  # the type of a row of `groups`
    NUMBERS: tl.constexpr,  # NUMBERS(group, count, gscale): the hyper numbers
):  # fmt: skip
    """Advance the step counts and fill `hyper`; one lane per tensor."""
    tensor = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = tensor < tensors
    skip = 0.0
    if FLAGS[1]:
        skip = (tl.load(scalars[1]) != 0).to(tl.float32)
    step_at = tl.load(rows + (_ADDRESSES + ROW.value.STEP) * tensors + tensor, mask=mask, other=0)
    step_at = step_at.to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=mask, other=1.0) + (1.0 - skip)
    tl.store(step_at, step, mask=mask)
    count = tl.minimum(tl.maximum(step, 1.0), 1073741824.0).to(tl.int64)
    row = tl.load(tensor_group + tensor, mask=mask, other=0)
    group = load_row(groups + row * len(GROUP.value._fields), GROUP, mask)
    scale = tl.full((LANES,), 1.0, tl.float64)
    if FLAGS[0]:
        scale = scale / tl.load(scalars[0]).to(tl.float64)
    if FLAGS[2]:
        norm = tl.sqrt(tl.full((LANES,), 1.0, tl.float64) * tl.load(scalars[2]))
        clip = group.max_norm / (norm + 1e-6)
        # Written as a choice so that a NaN norm stays NaN.
        scale = scale * tl.where(clip > 1.0, 1.0, clip)
    numbers = NUMBERS(group, count, tl.where(group.maximize != 0, -scale, scale))
    out = hyper + tensor * (1 + len(numbers))
    tl.store(out, tl.zeros((LANES,), tl.float32) + skip, mask=mask)
    for column in tl.static_range(len(numbers)):
        tl.store(out + 1 + column, numbers[column].to(tl.float32), mask=mask)
