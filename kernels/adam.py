"""Adam and AdamW over lists of tensors, with unscaling, clipping and skipping inside: one launch per dtype combination.

Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled weight decay regularization" (2019);
Reddi et al., "On the convergence of Adam and beyond" (2018) for ``amsgrad``. Per element, every operation a separate
IEEE fp32 operation in this order (w is the fp32 weight: the parameter or its master):

    g  = g * gscale                                   sign, 1/scale and clip factor in one number
    g  = g + decay * w                                only with L2 decay
    m  = m + (1 - beta1) * (g - m)                    for beta1 <= 0.5: g - beta1 * (g - m)
    q  = min(g * g, MAX)                              MAX = largest fp32: the square of a huge g must not stick at inf
    v  = v + (1 - beta2) * (q - v)                    likewise for beta2 <= 0.5
    a  = max(a, v)                                    only with amsgrad; then a stands for v below
    d  = step_size * (m / (sqrt(v) * root + eps))
    d  = d + decay * w                                only with decoupled decay; 0 where w is infinite
    w  = w - d

Moving averages take the incremental form because 1 - beta is small and exact where beta rounded to fp32 is not: with
beta2 = 0.999 the two-product form converges to a second moment 1.3e-5 too large. Decay and update are subtracted
together, so a weight is rounded once per step.

Per tensor and step, in fp64, t the step count after this step, rounded to fp32 once:

    step_size = lr / (1 - beta1^t)        root = 1 / sqrt(1 - beta2^t)        decay = weight_decay, or lr * weight_decay
    gscale = +-clip / scale               clip = min(1, max_norm / (sqrt(sum of squares) + 1e-6))

and beta^t by repeated squaring, which needs no pow and so has the same bits everywhere. If found_inf != 0 nothing
is written, the step count included.

Stochastic rounding. Values stored in fewer than 32 bits (bf16 moments, an fp16 or bf16 parameter without a master, a
master of 24 bits) are rounded up or down at random, so that their expectation is exact and steps below half a unit in
the last place are not lost. A parameter that has a master is the master rounded to nearest. With bf16 state,
``a = max(a, v)`` takes the stored v: the larger of two bf16 numbers needs no rounding, and rounding it stochastically
would push the maximum up step by step.

Moments in 8 bits have the codes of block_codes.py: m signed ones, v and a positive ones. The codes of a moment have the
order of the parameter, and its scales lie in a second tensor, of shape (rows, blocks per row). MAX is then the largest
number that a code stands for. ``a = max(a, v)`` always takes the stored v, and is rounded up where its block
has wider steps than that of v, so that it is never below v. Encoding it again changes nothing.

The random bits are named by (seed, stream, step, index), as philox.py says, where stream is the parameter's number in
the optimizer, step its t, and index the element's place, row by row, in the whole parameter. Hence the same bits
whatever the launch shape, the batch, the number of ranks and the sharding. The parameter takes draw 0, m draw 1 and v
draw 2, so that their roundings are independent.

A shard is a part of its parameter: element i of it is element

    base + i // inner * inner_whole + i % inner

of the whole, which describes a range of rows (inner = numel), a range of any other dimension, or both.

Bytes per element with a 16-bit gradient, read + written (state fp32): split master 14 + 12 = 26, full master
14 + 14 = 28, no master 12 + 10 = 22; fp32 parameter and gradient 16 + 12 = 28. bf16 state saves 8, amsgrad adds 8 (4 in
bf16), a remainder of 8 bits saves 2: split 18, split of 24 bits 16, no master 14. 8-bit state saves 12, less 6 bytes
per 32 elements (10 with amsgrad) for scales: split 14.19, split of 24 bits 12.19. Random bits are computed, not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch

from halfstep.kernels import block_codes, native
from halfstep.kernels.backend import (
    EXACT,
    MOST_THREADS,
    cuda_capability_geq,
    jit,
    launch_kernel,
    most_warps,
    resolve,
    tl,
    triton_dtype,
    triton_version,
)
from halfstep.kernels.block_codes import (
    LARGEST_POSITIVE,
    SPAN,
    blocks_per_row,
    decode_positive_block,
    decode_positive_packed,
    decode_signed_block,
    decode_signed_packed,
    encode_positive_block,
    encode_positive_packed,
    encode_signed_block,
    encode_signed_packed,
    extremes_packed,
    power_of_exponents,
    rows_and_columns,
    widened_packed,
)
from halfstep.kernels.block_instructions import WEIGHTS, averages_assembly, constraints, update_assembly
from halfstep.kernels.formats import CODED
from halfstep.kernels.multi_tensor import (
    ADDRESSES,
    DTYPE_CODES,
    TensorTable,
    address,
    alignments,
    checked_addresses,
    has_memory,
    own_operations,
)
from halfstep.kernels.philox import reference_words, words_of, words_of_groups, words_of_runs
from halfstep.kernels.rounding import (
    FORMATS,
    STOCHASTIC,
    exact_sqrt,
    from_float32,
    join_float32,
    join_master,
    reference_round,
    split24_float32,
    split_float32,
    split_master,
    stochastic_float32,
    to_float32,
)
from halfstep.kernels.threads import threads

CHUNK = 2048  # elements per program
LONG_CHUNK = 16384  # the same with moments in 8 bits or random bits: what all elements need is more there
BLOCK = 1024  # elements per trip of its loop: eight per thread, in few enough registers that nothing is spilled
LANES = 256  # tensors per program of the prepare kernel
MAX = torch.finfo(torch.float32).max
STATE_CODES = {**DTYPE_CODES, torch.uint8: CODED}  # the dtypes of moments in C++

# How the fp32 weight is kept.
NO_MASTER, FULL_MASTER, SPLIT_MASTER, SPLIT24_MASTER = range(4)
REMAINDERS = {SPLIT_MASTER: torch.int16, SPLIT24_MASTER: torch.int8}

# Operands of a tensor table, in the order of its address rows. `extra` is the master or the remainder, `top` amsgrad's.
GRAD, PARAM, EXTRA, M, V, TOP, STEP = range(7)
OPERANDS = 7
# With stochastic rounding, five more rows: the parameter's number, where its shard lies in it, and the seed.
STREAM, BASE, INNER, INNER_WHOLE, SEED = range(OPERANDS, OPERANDS + 5)
STOCHASTIC_OPERANDS = OPERANDS + 5
# With moments in 8 bits, four more: their scales, and the elements in a row of the (local) tensor.
M_SCALES, V_SCALES, TOP_SCALES, COLUMNS = range(STOCHASTIC_OPERANDS, STOCHASTIC_OPERANDS + 4)
CODED_OPERANDS = STOCHASTIC_OPERANDS + 4
SCALES_OF = {M: M_SCALES, V: V_SCALES, TOP: TOP_SCALES}

# Columns of the fp64 hyper-parameters that the host writes per parameter group ...
LR, BETA1, BETA2, EPS, DECAY, MAXIMIZE, DECOUPLED, MAX_NORM = range(8)
GROUP_COLUMNS = 8
# ... and of the fp32 numbers that every tensor's elements need.
GSCALE, DECAY_FACTOR, W1, W2, ROOT, EPS_, STEP_SIZE, SKIP, BETA1_, BETA2_ = range(10)
HYPER_COLUMNS = 10


@dataclass(frozen=True)
class Layout:
    """What a kernel is compiled for: the dtype combination and the options that change the arithmetic.

    Attributes:
        param: fp32, fp16 or bf16.
        grad: fp32, fp16 or bf16.
        state: of the moments, fp32, bf16, or uint8 for codes in 8 bits.
        master: `NO_MASTER`, `FULL_MASTER` (fp32 copy), `SPLIT_MASTER` or `SPLIT24_MASTER` (bf16 parameter with a
            remainder of 16 bits, or of 8 bits, which makes a master of 24 bits).
        amsgrad: keep the maximum of the second moment.
        l2: add ``weight_decay * w`` to the gradient (Adam) instead of decaying the weight (AdamW).
        stochastic: round what `rounds_stochastically` names stochastically.
    """

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: int
    amsgrad: bool
    l2: bool
    stochastic: bool = False

    @property
    def coded(self) -> bool:
        """Whether the moments are codes in 8 bits."""
        return self.state == torch.uint8

    @property
    def operands(self) -> int:
        """The rows of addresses and numbers in the tables of this layout."""
        return CODED_OPERANDS if self.coded else STOCHASTIC_OPERANDS if self.stochastic else OPERANDS

    @property
    def chunk(self) -> int:
        """Elements per program."""
        return LONG_CHUNK if self.coded or self.stochastic else CHUNK

    def sizes(self, shapes: Sequence[torch.Size | tuple[int, ...]]) -> list[int]:
        """The sizes that the table of tensors of these shapes is built for: with codes, those of whole blocks."""
        if not self.coded:
            return list(map(prod, shapes))
        matrices = map(rows_and_columns, shapes)
        return [rows * blocks_per_row(columns) * SPAN for rows, columns in matrices]


def rounds_stochastically(param: torch.dtype, state: torch.dtype, master: int) -> bool:
    """Whether there is anything that stochastic rounding applies to: moments or weights of fewer than 32 bits."""
    return state != torch.float32 or (param != torch.float32 and master in (NO_MASTER, SPLIT24_MASTER))


@dataclass
class Batch:
    """The tensors of one layout on one device. `lists[k]` are the tensors of operand k, empty if it is not used.

    Attributes:
        layout: what they have in common.
        table: their addresses, and with stochastic rounding what names their random bits; the launcher's caller keeps
            it fresh. None for tensors without memory of their own (wrapper subclasses, fake and meta tensors), which
            the reference steps through their own operations, whatever the backend; they cannot round stochastically.
        lists: the tensors themselves, for the reference.
        groups: int64, one per tensor: its row in the group table.
        hyper: fp32, shape ``(tensors, HYPER_COLUMNS)``, scratch that the step fills.
    """

    layout: Layout
    table: TensorTable | None
    lists: list[list[torch.Tensor]]
    groups: torch.Tensor
    hyper: torch.Tensor

    @cached_property
    def codes(self) -> tuple[int, ...]:
        """What C++ needs to know of the layout."""
        of = self.layout
        dtypes = DTYPE_CODES[of.param], DTYPE_CODES[of.grad], STATE_CODES[of.state]
        return *dtypes, of.master, of.amsgrad, of.l2, of.stochastic

    @cached_property
    def constants(self) -> dict[str, Any]:
        """What Triton compiles the kernel for."""
        return _constants(self.layout, self.hyper.device)


@dataclass
class Control:
    """Device scalars that steer a step, each fp32 (`sum_of_squares`: fp64) with one element, or None if not used.

    Attributes:
        grad_scale: what the gradients were multiplied by.
        found_inf: the step is skipped if it is not 0.
        sum_of_squares: of the unscaled gradients, which are then clipped to the 2-norm in their group's row.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    sum_of_squares: torch.Tensor | None = None


# --------------------------------------------------------------------------------------------------------- reference


def _exact_sqrt_fp64(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded fp64 square root; numpy's on the CPU, where torch's promises less."""
    if x.device.type != "cpu" or not has_memory(x):
        return x.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))


def _power(base: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """base ** exponent in fp64 by repeated squaring, lowest bit first; exponent an int64 below 2^31."""
    result = torch.ones_like(base)
    for bit in range(31):
        result = torch.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result


def _reference_prepare(batch: Batch, groups: torch.Tensor, control: Control) -> None:
    """Advance the step counts and fill `batch.hyper`."""
    hyper = batch.hyper
    device = hyper.device
    skip = torch.zeros((), dtype=torch.float32, device=device)
    if control.found_inf is not None:
        skip = (control.found_inf.reshape(()) != 0).float()
    steps = torch.stack([step.reshape(()) for step in batch.lists[STEP]]) + (1 - skip)
    for step, value in zip(batch.lists[STEP], steps, strict=True):
        step.copy_(value.reshape(step.shape))
    # A step count of 0 (its first step skipped) would divide by zero; nothing is done with the result.
    count = steps.clamp(1.0, 2.0**30).long()
    lr, beta1, beta2, eps, decay, maximize, decoupled, max_norm = groups[batch.groups].T
    scale = torch.ones((), dtype=torch.float64, device=device)
    if control.grad_scale is not None:
        scale = 1.0 / control.grad_scale.reshape(()).double()
    if control.sum_of_squares is not None:
        norm = _exact_sqrt_fp64(control.sum_of_squares.reshape(()))
        scale = scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    hyper[:, GSCALE] = torch.where(maximize != 0, -scale, scale).float()
    hyper[:, DECAY_FACTOR] = torch.where(decoupled != 0, lr * decay, decay).float()
    hyper[:, W1] = (1.0 - beta1).float()
    hyper[:, W2] = (1.0 - beta2).float()
    hyper[:, ROOT] = (1.0 / _exact_sqrt_fp64(1.0 - _power(beta2, count))).float()
    hyper[:, EPS_] = eps.float()
    hyper[:, STEP_SIZE] = (lr / (1.0 - _power(beta1, count))).float()
    hyper[:, SKIP] = skip
    hyper[:, BETA1_] = beta1.float()
    hyper[:, BETA2_] = beta2.float()


def _average(old: torch.Tensor, new: torch.Tensor, weight: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The moving average, from whichever end is nearer."""
    return torch.where(weight < 0.5, old + weight * (new - old), new - beta * (new - old))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def _reference_noise(batch: Batch, tensor: int) -> list[torch.Tensor] | None:
    """The random words of a tensor's elements, three draws, or None if nothing is rounded stochastically."""
    if not batch.layout.stochastic:
        return None
    assert batch.table is not None
    column = batch.table.rows[ADDRESSES:, tensor]
    local = torch.arange(batch.lists[PARAM][tensor].numel(), dtype=torch.int64, device=column.device)
    row = local // column[INNER]
    index = column[BASE] + row * column[INNER_WHOLE] + (local - row * column[INNER])
    step = batch.lists[STEP][tensor].reshape(()).clamp(1.0, 2.0**30).long()
    return [reference_words(index, column[SEED], step, column[STREAM], draw) for draw in range(3)]


def _reference_rounded(x: torch.Tensor, dtype: torch.dtype, words: torch.Tensor | None) -> torch.Tensor:
    if words is None or dtype not in FORMATS:
        return x.to(dtype)
    return reference_round(x, dtype, STOCHASTIC, words=words)


def _loaded(layout: Layout, tensors: Sequence[torch.Tensor | None], moment: int) -> torch.Tensor:
    """A moment in fp32."""
    held, scales = tensors[moment], tensors[SCALES_OF[moment]]
    assert held is not None
    if not layout.coded:
        return held.float()
    assert scales is not None
    return block_codes.decode(held, scales, signed=moment == M)


def _stored(
    layout: Layout,
    tensors: Sequence[torch.Tensor | None],
    moment: int,
    x: torch.Tensor,
    words: torch.Tensor | None,
) -> dict[int, torch.Tensor]:
    """What is stored for a moment, by operand."""
    held, scales = tensors[moment], tensors[SCALES_OF[moment]]
    assert held is not None
    if not layout.coded:
        return {moment: _reference_rounded(x, held.dtype, None if moment == TOP else words)}
    assert scales is not None
    noise = block_codes.UP if moment == TOP else block_codes.noise_of(words)
    codes, found = block_codes.encode(x, len(scales), moment == M, noise)
    return {moment: codes, SCALES_OF[moment]: found}


def _reference_update(
    layout: Layout, tensors: Sequence[torch.Tensor | None], hyper: torch.Tensor, words: list[torch.Tensor] | None
) -> None:
    """One tensor's step; `tensors` by operand, `hyper` its row, `words` its random bits by draw. All but scales have
    one shape."""
    gscale, decay, w1, w2, root, eps, step_size, skip, beta1, beta2 = hyper.unbind()
    grad, param, extra = tensors[GRAD], tensors[PARAM], tensors[EXTRA]
    assert grad is not None and param is not None
    draws = [None] * 3 if words is None else words
    most = LARGEST_POSITIVE if layout.coded else MAX
    if layout.master in REMAINDERS:
        assert extra is not None
        w = join_master(param, extra)
    else:
        w = extra if layout.master == FULL_MASTER and extra is not None else param.float()
    g = grad.float() * gscale
    if layout.l2:
        g = g + decay * w
    m = _average(_loaded(layout, tensors, M), g, w1, beta1)
    square = g * g
    square = torch.where(square > most, most, square)
    v = _loaded(layout, tensors, V)
    v = _average(torch.where(v > most, most, v), square, w2, beta2)
    new = {**_stored(layout, tensors, M, m, draws[1]), **_stored(layout, tensors, V, v, draws[2])}
    used = v
    if layout.amsgrad:
        if layout.coded or layout.stochastic:
            v = _loaded(layout, [new.get(operand) for operand in range(CODED_OPERANDS)], V)
        used = _loaded(layout, tensors, TOP)
        used = torch.where((v > used) | v.isnan(), v, used)
        new.update(_stored(layout, tensors, TOP, used, None))
    d = step_size * (m / (exact_sqrt(used) * root + eps))
    if not layout.l2:
        d = d + torch.where(w.isinf(), 0.0, decay * w)
    w = w - d
    if layout.master in REMAINDERS:
        assert extra is not None
        new[PARAM], new[EXTRA] = split_master(w, extra.dtype, draws[0])
    else:
        if layout.master == FULL_MASTER:
            new[EXTRA] = w
        new[PARAM] = _reference_rounded(w, param.dtype, draws[0] if layout.master == NO_MASTER else None)
    for operand, value in new.items():
        target = tensors[operand]
        assert target is not None
        target.copy_(torch.where(skip != 0, target, value))


def _reference_step(batch: Batch, groups: torch.Tensor, control: Control) -> None:
    _reference_prepare(batch, groups, control)
    for index, row in enumerate(batch.hyper):
        tensors = [operand[index] if operand else None for operand in batch.lists]
        tensors += [None] * (CODED_OPERANDS - len(tensors))
        if batch.table is not None:  # elements in the order of memory, whatever the strides
            tensors[:STEP] = [None if tensor is None else _flat(tensor) for tensor in tensors[:STEP]]
        if batch.layout.coded and batch.lists[PARAM][index].numel() == 0:
            continue
        _reference_update(batch.layout, tensors, row, _reference_noise(batch, index))


def _own_operations_step(batch: Batch, groups: torch.Tensor, control: Control) -> None:
    """The reference on tensors without memory. Beside fake ones every tensor must be fake, those of ours too."""
    with own_operations([tensor for operand in batch.lists for tensor in operand]) as mode:

        def beside(tensor: Any) -> Any:
            return (
                tensor if mode is None or tensor is None or hasattr(tensor, "fake_mode") else mode.from_tensor(tensor)
            )

        lists = [list(map(beside, operand)) for operand in batch.lists]
        copy = Batch(batch.layout, None, lists, beside(batch.groups), beside(batch.hyper))
        steered = map(beside, (control.grad_scale, control.found_inf, control.sum_of_squares))
        _reference_step(copy, beside(groups), Control(*steered))


# ----------------------------------------------------------------------------------------------------------- kernels


if tl is not None:  # what stands above, as kernels read it
    _LR, _BETA1, _BETA2, _EPS, _DECAY, _MAXIMIZE, _DECOUPLED, _MAX_NORM = map(
        tl.constexpr, (LR, BETA1, BETA2, EPS, DECAY, MAXIMIZE, DECOUPLED, MAX_NORM)
    )
    _GSCALE, _DECAY_FACTOR, _W1, _W2, _ROOT, _EPS_, _STEP_SIZE, _SKIP, _BETA1_, _BETA2_ = map(
        tl.constexpr, (GSCALE, DECAY_FACTOR, W1, W2, ROOT, EPS_, STEP_SIZE, SKIP, BETA1_, BETA2_)
    )
    _GROUP_COLUMNS, _HYPER_COLUMNS = tl.constexpr(GROUP_COLUMNS), tl.constexpr(HYPER_COLUMNS)
    _ADDRESSES, _GRAD, _PARAM, _EXTRA, _M, _V, _TOP, _STEP = map(
        tl.constexpr, (ADDRESSES, GRAD, PARAM, EXTRA, M, V, TOP, STEP)
    )
    _STREAM, _BASE, _INNER, _INNER_WHOLE, _SEED = map(tl.constexpr, (STREAM, BASE, INNER, INNER_WHOLE, SEED))
    _NO_MASTER, _FULL_MASTER, _SPLIT_MASTER, _SPLIT24_MASTER = map(
        tl.constexpr, (NO_MASTER, FULL_MASTER, SPLIT_MASTER, SPLIT24_MASTER)
    )
    _M_SCALES, _V_SCALES, _TOP_SCALES, _COLUMNS = map(tl.constexpr, (M_SCALES, V_SCALES, TOP_SCALES, COLUMNS))
    _REMAINDERS = ((0, False), (8, False), (16, False), (8, True))  # bits, and whether they are rounded at random
    _UPDATE_0, _UPDATE_8, _UPDATE_16, _UPDATE_8_WORDS = (
        tl.constexpr(update_assembly(*of, paired=False)[0]) for of in _REMAINDERS
    )
    _PAIRED_0, _PAIRED_8, _PAIRED_16, _PAIRED_8_WORDS = (
        tl.constexpr(update_assembly(*of, paired=True, threes=triton_version() >= (3, 7))[0]) for of in _REMAINDERS
    )
    _AVERAGES, _AVERAGES_PAIRED = (
        tl.constexpr(averages_assembly(LARGEST_POSITIVE, paired)) for paired in (False, True)
    )
    _AVERAGED = tl.constexpr(constraints(2 * WEIGHTS, 5 * WEIGHTS, "f"))
    _OPERANDS_0, _OPERANDS_8, _OPERANDS_16, _OPERANDS_8_WORDS = (
        tl.constexpr(constraints(*update_assembly(*of)[1:])) for of in _REMAINDERS
    )
    _MAX, _LARGEST_POSITIVE, _SPAN = map(tl.constexpr, (MAX, LARGEST_POSITIVE, SPAN))
    _HALF, _UP = map(tl.constexpr, (block_codes.HALF, block_codes.UP))


@jit
def _power_block(base, exponent):
    result = tl.full(base.shape, 1.0, tl.float64)
    for bit in tl.static_range(31):
        result = tl.where((exponent >> bit) & 1 == 1, result * base, result)
        base = base * base
    return result


@partial(jit, do_not_specialize=["tensors"])
def prepare_kernel(
    rows,  # int64 (2 + operands, tensors): see multi_tensor.py
    tensors,  # number of tensors
    tensor_group,  # int64 (tensors,): row of `groups`
    groups,  # fp64 (groups, GROUP_COLUMNS): what the host sets
    hyper,  # fp32 (tensors, HYPER_COLUMNS): what the elements need
    grad_scale,  # fp32 scalar, read if HAS_SCALE
    found_inf,  # fp32 scalar, read if HAS_FOUND
    sum_of_squares,  # fp64 scalar, read if CLIP
    HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    CLIP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Advance the step counts and fill `hyper`; one lane per tensor."""
    tensor = tl.program_id(0) * LANES + tl.arange(0, LANES)
    here = tensor < tensors
    skip = 0.0
    if HAS_FOUND:
        skip = (tl.load(found_inf) != 0).to(tl.float32)
    step_at = tl.load(rows + (_ADDRESSES + _STEP) * tensors + tensor, mask=here, other=0).to(
        tl.pointer_type(tl.float32)
    )
    step = tl.load(step_at, mask=here, other=1.0) + (1.0 - skip)
    tl.store(step_at, step, mask=here)
    count = tl.minimum(tl.maximum(step, 1.0), 1073741824.0).to(tl.int64)
    group = groups + tl.load(tensor_group + tensor, mask=here, other=0) * _GROUP_COLUMNS
    lr = tl.load(group + _LR, mask=here, other=0.0)
    beta1 = tl.load(group + _BETA1, mask=here, other=0.0)
    beta2 = tl.load(group + _BETA2, mask=here, other=0.0)
    eps = tl.load(group + _EPS, mask=here, other=0.0)
    decay = tl.load(group + _DECAY, mask=here, other=0.0)
    maximize = tl.load(group + _MAXIMIZE, mask=here, other=0.0)
    decoupled = tl.load(group + _DECOUPLED, mask=here, other=0.0)
    one = tl.full((LANES,), 1.0, tl.float64)
    scale = one
    if HAS_SCALE:
        scale = one / tl.load(grad_scale).to(tl.float64)
    if CLIP:
        norm = tl.sqrt(one * tl.load(sum_of_squares))
        clip = tl.load(group + _MAX_NORM, mask=here, other=0.0) / (norm + 1e-6)
        # Written as a choice so that a NaN norm stays NaN.
        scale = scale * tl.where(clip > 1.0, 1.0, clip)
    out = hyper + tensor * _HYPER_COLUMNS
    tl.store(out + _GSCALE, tl.where(maximize != 0, -scale, scale).to(tl.float32), mask=here)
    tl.store(out + _DECAY_FACTOR, tl.where(decoupled != 0, lr * decay, decay).to(tl.float32), mask=here)
    tl.store(out + _W1, (1.0 - beta1).to(tl.float32), mask=here)
    tl.store(out + _W2, (1.0 - beta2).to(tl.float32), mask=here)
    tl.store(out + _ROOT, (one / tl.sqrt(1.0 - _power_block(beta2, count))).to(tl.float32), mask=here)
    tl.store(out + _EPS_, eps.to(tl.float32), mask=here)
    tl.store(out + _STEP_SIZE, (lr / (1.0 - _power_block(beta1, count))).to(tl.float32), mask=here)
    tl.store(out + _SKIP, tl.zeros((LANES,), tl.float32) + skip, mask=here)
    tl.store(out + _BETA1_, beta1.to(tl.float32), mask=here)
    tl.store(out + _BETA2_, beta2.to(tl.float32), mask=here)


@jit
def _pointer(address, dtype: tl.constexpr, HINT: tl.constexpr):
    """A pointer, with the alignment that the compiler may rely on; the hint must come after the cast to survive.

    HINT is the alignment of 16-bit operands in bytes; 0 if nothing is known. If any operand is fp32 it is 8, so that
    each thread holds the same four elements of every operand and no value has to move between threads; if none is, 16.
    8-bit operands have half of it, for the same number of elements.
    """
    pointer = address.to(tl.pointer_type(dtype))
    if HINT:
        BYTE: tl.constexpr = dtype == tl.int8 or dtype == tl.uint8
        pointer = tl.multiple_of(pointer, 16 if dtype == tl.float32 else HINT // 2 if BYTE else HINT)
    return pointer


@jit
def _rounded(x, word, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and dtype != tl.float32:
        return stochastic_float32(x, word, dtype, True)
    else:
        return from_float32(x, dtype)


@jit
def _numbers(hyper):
    """The numbers that every element of a tensor needs. Loaded once, before any store: the compiler must suppose that a
    store may change them."""
    w1, w2 = tl.load(hyper + _W1), tl.load(hyper + _W2)
    # The factor of a moving average is 1 - beta, which is positive, or -beta. A product by -1 negates: `-beta1` is
    # 0 - beta1, which is the other zero for a beta1 of 0.
    return (
        tl.load(hyper + _GSCALE),
        tl.load(hyper + _DECAY_FACTOR),
        tl.where(w1 < 0.5, w1, tl.load(hyper + _BETA1_) * -1.0),
        tl.where(w2 < 0.5, w2, tl.load(hyper + _BETA2_) * -1.0),
        tl.load(hyper + _ROOT),
        tl.load(hyper + _EPS_),
        tl.load(hyper + _STEP_SIZE),
    )


@jit
def _weight(at_param, at_extra, mask, MASTER: tl.constexpr):
    """The fp32 weights of a block."""
    if MASTER == _SPLIT_MASTER or MASTER == _SPLIT24_MASTER:
        weight = tl.load(at_param, mask=mask)
        w = join_float32(weight, tl.load(at_extra, mask=mask))
    elif MASTER == _FULL_MASTER:
        w = tl.load(at_extra, mask=mask)
    else:
        w = to_float32(tl.load(at_param, mask=mask))
    return w


@jit
def _new_weight(w, m, v, decay, root, eps, step_size, L2: tl.constexpr):
    d = step_size * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)
    if not L2:
        d = d + tl.where(tl.abs(w) == float("inf"), 0.0, decay * w)
    return w - d


@jit
def _store_weight(
    at_param, at_extra, w, word, mask, PARAM_T: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr
):
    if MASTER == _SPLIT_MASTER:
        weight, remainder = split_float32(w, True)
        tl.store(at_param, weight, mask=mask)
        tl.store(at_extra, remainder, mask=mask)
    elif MASTER == _SPLIT24_MASTER:
        weight, remainder = split24_float32(w, word, STOCHASTIC)
        tl.store(at_param, weight, mask=mask)
        tl.store(at_extra, remainder, mask=mask)
    else:
        if MASTER == _FULL_MASTER:
            tl.store(at_extra, w, mask=mask)
        tl.store(at_param, _rounded(w, word, PARAM_T, STOCHASTIC and MASTER == _NO_MASTER), mask=mask)


@jit
def _adam_block(
    grad,  # int64 addresses of the operands, and what follows
    param,
    extra,
    first,
    second,
    top,
    start,  # of the chunk, in elements
    offsets,  # from there
    mask,
    word,  # random uint32 words of the parameter and of both moments, looked at if STOCHASTIC
    word_m,
    word_v,
    hyper,  # what `_numbers` gives for the tensor
    PARAM_T: tl.constexpr,
    GRAD_T: tl.constexpr,
    STATE_T: tl.constexpr,
    EXTRA_T: tl.constexpr,
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HINT: tl.constexpr,
):
    """One block: load, update, store."""
    at_grad = _pointer(grad, GRAD_T, HINT) + start + offsets
    at_param = _pointer(param, PARAM_T, HINT) + start + offsets
    at_extra = _pointer(extra, EXTRA_T, HINT) + start + offsets
    at_first = _pointer(first, STATE_T, HINT) + start + offsets
    at_second = _pointer(second, STATE_T, HINT) + start + offsets
    at_top = _pointer(top, STATE_T, HINT) + start + offsets
    gscale, decay, f1, f2, root, eps, step_size = hyper
    w = _weight(at_param, at_extra, mask, MASTER)
    g = to_float32(tl.load(at_grad, mask=mask)) * gscale
    if L2:
        g = g + decay * w
    m = to_float32(tl.load(at_first, mask=mask))
    v = to_float32(tl.load(at_second, mask=mask))
    square = g * g
    square = tl.where(square > _MAX, _MAX, square)
    v = tl.where(v > _MAX, _MAX, v)
    # One choice per element: the sign of a factor, which `_numbers` has made, says which form of the average applies.
    m = tl.where(f1 > 0.0, m, g) + f1 * (g - m)
    v = tl.where(f2 > 0.0, v, square) + f2 * (square - v)
    tl.store(at_first, _rounded(m, word_m, STATE_T, STOCHASTIC), mask=mask)
    stored = _rounded(v, word_v, STATE_T, STOCHASTIC)
    tl.store(at_second, stored, mask=mask)
    if AMSGRAD:
        if STOCHASTIC:
            v = to_float32(stored)
        top = to_float32(tl.load(at_top, mask=mask))
        v = tl.where((v > top) | (v != v), v, top)
        tl.store(at_top, from_float32(v, STATE_T), mask=mask)
    w = _new_weight(w, m, v, decay, root, eps, step_size, L2)
    _store_weight(at_param, at_extra, w, word, mask, PARAM_T, MASTER, STOCHASTIC)


@jit
def _updated(
    m,
    v,
    weight,
    rest,
    word,
    decay,
    root,
    eps,
    step_size,
    least,
    smallest,  # of v, as in extremes_packed
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """New weights and remainders, or fp32 weights if REMAINDER is 0, as update_assembly says."""
    PAIRED: tl.constexpr = cuda_capability_geq(10, 0)
    if REMAINDER == 16:
        ASM_16: tl.constexpr = _PAIRED_16 if PAIRED else _UPDATE_16
        return tl.inline_asm_elementwise(
            ASM_16, _OPERANDS_16, [m, v, weight, rest, decay, root, eps, step_size, least, smallest],
            (tl.bfloat16, tl.int16), is_pure=True, pack=8,
        )  # fmt: skip
    elif REMAINDER == 8 and STOCHASTIC:
        ASM_8_WORDS: tl.constexpr = _PAIRED_8_WORDS if PAIRED else _UPDATE_8_WORDS
        return tl.inline_asm_elementwise(
            ASM_8_WORDS, _OPERANDS_8_WORDS, [m, v, weight, rest, word, decay, root, eps, step_size, least, smallest],
            (tl.bfloat16, tl.int8), is_pure=True, pack=8,
        )  # fmt: skip
    elif REMAINDER == 8:
        ASM_8: tl.constexpr = _PAIRED_8 if PAIRED else _UPDATE_8
        return tl.inline_asm_elementwise(
            ASM_8, _OPERANDS_8, [m, v, weight, rest, decay, root, eps, step_size, least, smallest],
            (tl.bfloat16, tl.int8), is_pure=True, pack=8,
        )  # fmt: skip
    else:
        ASM_0: tl.constexpr = _PAIRED_0 if PAIRED else _UPDATE_0
        return tl.inline_asm_elementwise(
            ASM_0, _OPERANDS_0, [m, v, weight, decay, root, eps, step_size, least, smallest],
            tl.float32, is_pure=True, pack=8,
        )  # fmt: skip


@jit
def _store_scales(at, scales, here, HINT: tl.constexpr):
    """Store the scales of some blocks, where `here` says that they exist."""
    if HINT:
        # The threads that share a block, of which the first one stores. In this shape, and with addresses that differ
        # along it and are not known to follow each other across it, the compiler leaves the scales in the registers
        # where they are.
        THREADS: tl.constexpr = _SPAN // (HINT // 2)
        thread = tl.arange(0, THREADS)[None, :]
        places = tl.max_contiguous(at[:, None] + thread, (1, THREADS))
        tl.store(places, scales[:, None], mask=here[:, None] & (thread == 0))
    else:
        tl.store(at, scales, mask=here)


@jit
def _existing(size, HINT: tl.constexpr):
    """Which elements of blocks of `size` elements exist, of shape (blocks, SPAN).

    Of the elements that a thread holds side by side, either all exist or none; comparing the first one's number for all
    of them takes one comparison per thread.
    """
    SIDE: tl.constexpr = HINT // 2 if HINT != 0 and cuda_capability_geq(8, 0) else 1
    return (tl.arange(0, _SPAN) // SIDE * SIDE)[None, :] < size[:, None]


@jit
def _load_codes(
    arrays,  # int64 addresses: gradient, parameter, master or remainder, codes of m, of v, and of amsgrad's maximum
    scales,  # the same of the scales of the first block of m, v and the maximum
    start,  # of the first block, in elements
    offsets,  # from there, of shape (blocks, SPAN)
    mask,
    block,  # (blocks,): their numbers behind the first one
    here,  # (blocks,): whether they exist
    PARAM_T: tl.constexpr,
    GRAD_T: tl.constexpr,
    EXTRA_T: tl.constexpr,
    MASTER: tl.constexpr,
    HINT: tl.constexpr,
):
    """What `_coded_block` needs of some blocks."""
    # Addresses have 64 bits, and the upper half of a number without a sign is 0.
    offsets, block = offsets.to(tl.uint32), block.to(tl.uint32)
    weight, rest = 0.0, 0.0
    if MASTER != _FULL_MASTER:
        weight = tl.load(_pointer(arrays[1], PARAM_T, HINT) + start + offsets, mask=mask)
    if MASTER != _NO_MASTER:
        rest = tl.load(_pointer(arrays[2], EXTRA_T, HINT) + start + offsets, mask=mask)
    g = tl.load(_pointer(arrays[0], GRAD_T, HINT) + start + offsets, mask=mask, other=0)
    codes_m = tl.load(_pointer(arrays[3], tl.uint8, HINT) + start + offsets, mask=mask, other=0)
    codes_v = tl.load(_pointer(arrays[4], tl.uint8, HINT) + start + offsets, mask=mask, other=0)
    scales_m = tl.load(scales[0].to(tl.pointer_type(tl.uint8)) + block, mask=here, other=0)
    scales_v = tl.load(scales[1].to(tl.pointer_type(tl.int16)) + block, mask=here, other=0)
    return weight, rest, g, codes_m, codes_v, scales_m, scales_v


@jit
def _coded_block(
    loaded,  # what `_load_codes` returned for the seven arguments below except `size`
    arrays,
    scales,
    start,
    offsets,
    mask,
    size,  # (blocks,): how many of their elements exist, looked at if SHORT
    block,
    here,
    words,  # random uint32 words of the parameter, m and v, of the shape of `offsets`, looked at if STOCHASTIC
    hyper,  # what `_numbers` gives for the tensor
    PARAM_T: tl.constexpr,
    GRAD_T: tl.constexpr,
    EXTRA_T: tl.constexpr,
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HINT: tl.constexpr,
    SHORT: tl.constexpr,  # whether a block may be short
):
    """Some blocks of 8-bit codes, which were loaded: update, store."""
    offsets, block = offsets.to(tl.uint32), block.to(tl.uint32)
    at_param = _pointer(arrays[1], PARAM_T, HINT) + start + offsets
    at_extra = _pointer(arrays[2], EXTRA_T, HINT) + start + offsets
    at_first = _pointer(arrays[3], tl.uint8, HINT) + start + offsets
    at_second = _pointer(arrays[4], tl.uint8, HINT) + start + offsets
    at_top = _pointer(arrays[5], tl.uint8, HINT) + start + offsets
    of_first = scales[0].to(tl.pointer_type(tl.uint8)) + block
    of_second = scales[1].to(tl.pointer_type(tl.int16)) + block
    of_top = scales[2].to(tl.pointer_type(tl.int16)) + block
    word, word_m, word_v = words
    weight, rest, g, codes_m, codes_v, scales_m, scales_v = loaded
    gscale, decay, f1, f2, root, eps, step_size = hyper
    PACKED: tl.constexpr = HINT != 0 and cuda_capability_geq(8, 0)
    REMAINDER: tl.constexpr = 16 if MASTER == _SPLIT_MASTER else 8 if MASTER == _SPLIT24_MASTER else 0
    if MASTER == _FULL_MASTER:
        w = rest
    elif MASTER == _NO_MASTER:
        w = to_float32(weight)
    elif L2 or not PACKED:
        w = join_float32(weight, rest)
    else:
        w = 0.0
    if PACKED and SHORT:
        # So that elements beyond the end of a short block have m = 0, and do not change its scale. (In a NaN block they
        # are NaN, as the others are.)
        gscale = tl.where(mask, gscale, 0.0)
    g = widened_packed(g, gscale) if PACKED and GRAD_T == tl.bfloat16 else to_float32(g) * gscale
    if L2:
        g = g + (tl.where(mask, decay * w, 0.0) if SHORT else decay * w)
    power_m = power_of_exponents(scales_m)[:, None]
    if PACKED:
        m = decode_signed_packed(codes_m, power_m)
        v = decode_positive_packed(codes_v, scales_v[:, None])
    else:
        m = decode_signed_block(codes_m, power_m)
        v = decode_positive_block(codes_v, scales_v[:, None])
    if PACKED:
        AVERAGES: tl.constexpr = _AVERAGES_PAIRED if cuda_capability_geq(10, 0) else _AVERAGES
        m, v = tl.inline_asm_elementwise(
            AVERAGES, _AVERAGED, [g, m, v, f1, f2], (tl.float32, tl.float32), is_pure=True, pack=8
        )
    else:
        square = tl.minimum(g * g, _LARGEST_POSITIVE, propagate_nan=tl.PropagateNan.ALL)
        m = tl.where(f1 > 0.0, m, g) + f1 * (g - m)  # as in `_adam_block`
        v = tl.where(f2 > 0.0, v, square) + f2 * (square - v)
    if PACKED:
        EACH: tl.constexpr = HINT // 2
        exists = tl.arange(0, _SPAN // EACH)[None, :] * EACH < size[:, None]
        most, smallest = extremes_packed(m, v, exists, EACH, SHORT)
        codes_m, scales_m = encode_signed_packed(m, most, word_m, STOCHASTIC)
        codes_v, scales_v = encode_positive_packed(v, most, smallest, word_v, STOCHASTIC)
    else:
        if SHORT:
            m = tl.where(mask, m, 0.0)
        noise_m, noise_v = _HALF, _HALF
        if STOCHASTIC:
            noise_m, noise_v = word_m >> 8, word_v >> 8
        codes_m, scales_m = encode_signed_block(m, noise_m)
        codes_v, scales_v = encode_positive_block(v, noise_v, mask)
    tl.store(at_first, codes_m, mask=mask)
    tl.store(at_second, codes_v, mask=mask)
    _store_scales(of_first, scales_m, here, HINT)
    _store_scales(of_second, scales_v, here, HINT)
    if AMSGRAD:
        top, scales_top = tl.load(at_top, mask=mask, other=0), tl.load(of_top, mask=here, other=0)
        if PACKED:
            v = decode_positive_packed(codes_v, scales_v[:, None])
            top = decode_positive_packed(top, scales_top[:, None])
        else:
            v = decode_positive_block(codes_v, scales_v[:, None])
            top = decode_positive_block(top, scales_top[:, None])
        v = tl.where((v > top) | (v != v), v, top)
        codes_top, scales_top = encode_positive_block(v, _UP, mask)
        tl.store(at_top, codes_top, mask=mask)
        _store_scales(of_top, scales_top, here, HINT)
    if PACKED:
        # Beyond these bounds the shorter way to root and quotient could round wrongly.
        usual = (root >= 1.0) & (root < 2.0**60) & (eps >= 0.0) & (eps < 2.0**60)
        least = tl.where(usual, 2.0**-49, float("inf"))
        if SHORT:  # elements that do not exist would make their warp take the longer way
            least = tl.where(mask, least, -1.0)
        # 0 times a weight, added to the update, changes no bit of the new weight: it has the weight's sign.
        rate = decay * 0.0 if L2 else decay
        if REMAINDER:
            weight, rest = _updated(
                m, v, weight, rest, word, rate, root, eps, step_size, least, smallest, REMAINDER, STOCHASTIC
            )
            tl.store(at_param, weight, mask=mask)
            tl.store(at_extra, rest, mask=mask)
        else:
            w = _updated(m, v, w, 0, 0, rate, root, eps, step_size, least, smallest, REMAINDER, False)
            _store_weight(at_param, at_extra, w, word << 8, mask, PARAM_T, MASTER, STOCHASTIC)
    else:
        w = _new_weight(w, m, v, decay, root, eps, step_size, L2)
        _store_weight(at_param, at_extra, w, word, mask, PARAM_T, MASTER, STOCHASTIC)


@jit
def _places(index, offsets, left, to_end, run, jump):
    """The indices in the whole parameter of elements that lie `offsets` behind a chunk's first one in the shard."""
    if to_end >= left:  # the chunk lies within one run, as nearly every one does: a division is many instructions
        places = index + offsets
    else:
        ends = tl.where(offsets < to_end, 0, (offsets - to_end) // run + 1)
        places = index + (offsets + ends.to(tl.int64) * jump)
    return places


@partial(jit, do_not_specialize=["tensors"])
def adam_kernel(
    rows,  # int64 (2 + operands, tensors): see multi_tensor.py
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    hyper,  # fp32 (tensors, HYPER_COLUMNS), from prepare_kernel
    PARAM_T: tl.constexpr,
    GRAD_T: tl.constexpr,
    STATE_T: tl.constexpr,
    EXTRA_T: tl.constexpr,  # fp32 master, int16 or int8 remainder, or anything if there is neither
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HINT: tl.constexpr,  # see _pointer
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    numel = tl.load(rows + tensor)
    start = (chunk - tl.load(rows + tensors + tensor)) * CHUNK
    table = rows + _ADDRESSES * tensors + tensor
    grad = tl.load(table + _GRAD * tensors)
    param = tl.load(table + _PARAM * tensors)
    first = tl.load(table + _M * tensors)
    second = tl.load(table + _V * tensors)
    extra, top = first, first
    if MASTER != _NO_MASTER:
        extra = tl.load(table + _EXTRA * tensors)
    if AMSGRAD:
        top = tl.load(table + _TOP * tensors)
    hyper += tensor * _HYPER_COLUMNS
    if tl.load(hyper + _SKIP) == 0:
        left = tl.minimum(numel - start, CHUNK).to(tl.int32)
        every = grad | param | extra | first | second | top
        wide = every % 16 == 0
        EACH: tl.constexpr = HINT // 2  # elements that a thread holds side by side
        if STOCHASTIC:
            step = tl.load(tl.load(table + _STEP * tensors).to(tl.pointer_type(tl.float32)))
            step = tl.minimum(tl.maximum(step, 1.0), 1073741824.0).to(tl.int64)
            stream = tl.load(table + _STREAM * tensors)
            inner = tl.load(table + _INNER * tensors)
            inner_whole = tl.load(table + _INNER_WHOLE * tensors)
            seed = tl.load(table + _SEED * tensors)
            row = start * 0
            if start >= inner:  # a 64-bit division costs more than the branch around it
                row = start // inner
            column = start - row * inner
            index = tl.load(table + _BASE * tensors) + row * inner_whole + column
            jump = inner_whole - inner
            # Within a chunk all that lies beyond it is equally far, so 32 bits say where runs end.
            to_end = tl.minimum(inner - column, 2 * CHUNK).to(tl.int32)
            run = tl.minimum(inner, 2 * CHUNK).to(tl.int32)
            # What a thread holds side by side can then share one call of Philox.
            wide = wide & (index % EACH == 0) & ((to_end >= left) | ((to_end | run | jump) % EACH == 0))
        DRAWS: tl.constexpr = 1 if STATE_T == tl.float32 else 3
        numbers = _numbers(hyper)
        if wide:
            # The mask's bound is a multiple of 16, or it would undo the hint.
            bulk = (left // 16) * 16
            for begin in range(0, bulk, BLOCK):
                offsets = begin + tl.arange(0, BLOCK)
                word, word_m, word_v = 0, 0, 0
                if STOCHASTIC:
                    firsts = _places(index, begin + tl.arange(0, BLOCK // EACH) * EACH, left, to_end, run, jump)
                    word, word_m, word_v = words_of_runs(firsts, seed, step, stream, DRAWS, EACH, BLOCK)
                _adam_block(
                    grad, param, extra, first, second, top, start, offsets, offsets < bulk, word, word_m, word_v,
                    numbers, PARAM_T, GRAD_T, STATE_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, HINT,
                )  # fmt: skip
            if bulk < left:
                tail = bulk + tl.arange(0, 16)
                few, few_m, few_v = 0, 0, 0
                if STOCHASTIC:
                    places = _places(index, tail, left, to_end, run, jump)
                    few, few_m, few_v = words_of(places, seed, step, stream, DRAWS)
                _adam_block(
                    grad, param, extra, first, second, top, start, tail, tail < left, few, few_m, few_v,
                    numbers, PARAM_T, GRAD_T, STATE_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, 0,
                )  # fmt: skip
        else:
            for begin in range(0, left, 512):
                offsets = begin + tl.arange(0, 512)
                some, some_m, some_v = 0, 0, 0
                if STOCHASTIC:
                    places = _places(index, offsets, left, to_end, run, jump)
                    some, some_m, some_v = words_of(places, seed, step, stream, DRAWS)
                _adam_block(
                    grad, param, extra, first, second, top, start, offsets, offsets < left, some, some_m, some_v,
                    numbers, PARAM_T, GRAD_T, STATE_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, 0,
                )  # fmt: skip


@jit
def _rows_of(block, blocks):
    """The rows of blocks and their numbers there, with `blocks` blocks per row."""
    row = block // blocks
    return row, block - row * blocks


@jit
def _later_rows_of(row, in_row, by_rows, by_blocks, blocks):
    """`_rows_of` for blocks that are `by_rows` rows and `by_blocks` blocks further, without a division."""
    in_row += by_blocks
    beyond = in_row >= blocks
    return row + by_rows + beyond.to(tl.int32), tl.where(beyond, in_row - blocks, in_row)


@jit
def _extent(row, in_row, here, place, columns, ALIGNED: tl.constexpr):
    """Where blocks of a chunk begin, in elements from its first one, and how many elements they have.

    They are blocks `in_row` of rows that are `row` rows behind that of the chunk's first block, whose number there is
    `place`. `here` says which exist. ALIGNED: `columns` is a multiple of 16.
    """
    # Where a second row begins, 32 bits hold the product of rows and columns.
    at = row * columns + (in_row - place) * _SPAN
    size = tl.where(here, tl.minimum(columns - in_row * _SPAN, _SPAN), 0)
    if ALIGNED:  # the hint must stand beside what computes the number, or it is lost
        at, size = tl.multiple_of(at, 16), tl.multiple_of(size, 16)
    return at, size


@jit
def _words_of_blocks(
    runs,
    index,
    left,
    to_end,
    run,
    jump,
    seed,
    step,
    stream,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    DOWN: tl.constexpr,
    DOWN_FIRST: tl.constexpr,
):
    """The random words of all three draws for whole blocks: of the EACH elements from `runs` times EACH on.

    The arguments before `seed` are those of `_places`. `index` must be a multiple of EACH; `to_end`, `run` and `jump`
    too, unless the chunk lies within one run.
    """
    runs = _places(index // EACH, runs, left // EACH, to_end // EACH, run // EACH, jump // EACH)
    group = runs >> (8 // EACH - 1)
    word, word_m, word_v = words_of_groups(group, runs * EACH, seed, step, stream, 3, EACH, BLOCK, DOWN, DOWN_FIRST)
    return (
        tl.reshape(word, (BLOCK // _SPAN, _SPAN)),
        tl.reshape(word_m, (BLOCK // _SPAN, _SPAN)),
        tl.reshape(word_v, (BLOCK // _SPAN, _SPAN)),
    )


@partial(jit, do_not_specialize=["tensors"])
def coded_adam_kernel(
    rows,  # int64 (2 + operands, tensors): see multi_tensor.py. The number of elements is that of whole blocks.
    chunk_tensor,  # int32 (chunks,)
    tensors,  # number of tensors
    hyper,  # fp32 (tensors, HYPER_COLUMNS), from prepare_kernel
    PARAM_T: tl.constexpr,
    GRAD_T: tl.constexpr,
    EXTRA_T: tl.constexpr,  # fp32 master, int16 or int8 remainder, or anything if there is neither
    MASTER: tl.constexpr,
    AMSGRAD: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HINT: tl.constexpr,  # see _pointer
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The kernel for moments in 8 bits.

    A GPU has many programs at work, each of which reads eight arrays. If each went through a chunk of its own, they
    would be in so many pages of memory that they wait for addresses. So of a tensor whose rows are whole blocks, a
    program takes every n-th trip, where n programs share the tensor: together they go through memory in its order. Of
    other tensors it takes a chunk of CHUNK elements.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    part = chunk - tl.load(rows + tensors + tensor)  # of the tensor
    total = tl.load(rows + tensor) // _SPAN  # its blocks
    table = rows + _ADDRESSES * tensors + tensor
    grad = tl.load(table + _GRAD * tensors)
    param = tl.load(table + _PARAM * tensors)
    first = tl.load(table + _M * tensors)
    second = tl.load(table + _V * tensors)
    first_scales = tl.load(table + _M_SCALES * tensors)
    second_scales = tl.load(table + _V_SCALES * tensors)
    extra, top, top_scales = first, first, second_scales
    if MASTER != _NO_MASTER:
        extra = tl.load(table + _EXTRA * tensors)
    if AMSGRAD:
        top = tl.load(table + _TOP * tensors)
        top_scales = tl.load(table + _TOP_SCALES * tensors)
    columns = tl.load(table + _COLUMNS * tensors)
    hyper += tensor * _HYPER_COLUMNS
    if tl.load(hyper + _SKIP) == 0:
        arrays = grad, param, extra, first, second, top
        wide = (columns % 16 == 0) & ((grad | param | extra | first | second | top) % 16 == 0)
        full = columns % _SPAN == 0
        in_order = wide & full
        EACH: tl.constexpr = HINT // 2  # elements that a thread holds side by side
        TILE: tl.constexpr = BLOCK // _SPAN
        PACKED: tl.constexpr = cuda_capability_geq(8, 0)
        DOWN: tl.constexpr = 8 if PACKED else 0
        DOWN_FIRST: tl.constexpr = 24 if PACKED and MASTER == _SPLIT24_MASTER else DOWN
        # The addresses of a second tile are those of the first one with a constant, which accesses add themselves.
        TRIP: tl.constexpr = 2 * TILE if PACKED else TILE
        if STOCHASTIC:
            step = tl.load(tl.load(table + _STEP * tensors).to(tl.pointer_type(tl.float32)))
            step = tl.minimum(tl.maximum(step, 1.0), 1073741824.0).to(tl.uint32)
            stream = tl.load(table + _STREAM * tensors).to(tl.uint32)
            base = tl.load(table + _BASE * tensors)
            inner = tl.load(table + _INNER * tensors)
            inner_whole = tl.load(table + _INNER_WHOLE * tensors)
            in_order = in_order & (inner >= total * _SPAN) & (base % EACH == 0)
        number = part * (CHUNK // _SPAN)  # of the first block that is left to the tiles with masks
        count = tl.minimum(total - number, CHUNK // _SPAN).to(tl.int32)
        if in_order:
            parts = ((total + (CHUNK // _SPAN - 1)) // (CHUNK // _SPAN)).to(tl.int32)
            trips = (total // TRIP).to(tl.int32)
            number = trips.to(tl.int64) * TRIP
            count = tl.where(part == parts - 1, total - number, 0).to(tl.int32)
            if PACKED:
                numbers = _numbers(hyper)
                seed = tl.load(table + _SEED * tensors) if STOCHASTIC else 0
            every = tl.full((TILE, _SPAN), True, tl.int1)
            every_block = tl.full((TILE,), True, tl.int1)
            for trip in range(part.to(tl.int32), trips, parts):
                begin = trip * tl.full((), TRIP, tl.int64)
                scales = first_scales + begin, second_scales + begin * 2, top_scales + begin * 2
                block = tl.arange(0, TILE)
                offsets = block[:, None] * _SPAN + tl.arange(0, _SPAN)[None, :]
                loaded = _load_codes(
                    arrays, scales, begin * _SPAN, offsets, every, block, every_block,
                    PARAM_T, GRAD_T, EXTRA_T, MASTER, HINT,
                )  # fmt: skip
                later = loaded
                if PACKED:  # both tiles are on their way before the first one is stored, which the compiler cannot do
                    later = _load_codes(
                        arrays, scales, begin * _SPAN, offsets + TILE * _SPAN, every, block + TILE, every_block,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, HINT,
                    )  # fmt: skip
                for tile in tl.static_range(0, TRIP, TILE):
                    if not PACKED:  # again and again: AMD's scalar registers do not suffice to keep them
                        numbers = _numbers(hyper)
                        seed = tl.load(table + _SEED * tensors) if STOCHASTIC else 0
                    words = 0, 0, 0
                    if STOCHASTIC:
                        runs = tile * (_SPAN // EACH) + tl.arange(0, BLOCK // EACH)
                        words = _words_of_blocks(
                            runs, base + begin * _SPAN, 0, 0, 1, 0, seed, step, stream, EACH, BLOCK, DOWN, DOWN_FIRST
                        )
                    _coded_block(
                        loaded if tile == 0 else later, arrays, scales,
                        begin * _SPAN, offsets + tile * _SPAN, every, block, block + tile, every_block, words, numbers,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, HINT, False,
                    )  # fmt: skip
        if count > 0:  # once per program, what the others need is many instructions
            scales = first_scales + number, second_scales + number * 2, top_scales + number * 2
            start = number * _SPAN
            place = count * 0  # of the first block in its row
            blocks = (columns + (_SPAN - 1)) // _SPAN  # per row
            if not full:
                row = number // blocks
                place = (number - row * blocks).to(tl.int32)
                start = row * columns + place * _SPAN
            if STOCHASTIC:
                # As in adam_kernel. Where blocks are short, there are fewer elements than `left`.
                left = count * _SPAN
                run_number = start * 0
                if start >= inner:
                    run_number = start // inner
                column = start - run_number * inner
                index = base + run_number * inner_whole + column
                jump = inner_whole - inner
                to_end = tl.minimum(inner - column, 2 * CHUNK).to(tl.int32)
                run = tl.minimum(inner, 2 * CHUNK).to(tl.int32)
                wide = wide & (index % EACH == 0) & ((to_end >= left) | ((to_end | run | jump) % EACH == 0))
            # Within whole blocks, only whether a row ends before the chunk does matters; so its size fits 32 bits.
            width = tl.where(full, tl.minimum(columns, 1 << 30), columns).to(tl.int32)
            per_row = blocks.to(tl.int32)
            if wide:
                # Blocks may be short, but all begin and end at multiples of 16 elements.
                if PACKED:
                    numbers = _numbers(hyper)
                    seed = tl.load(table + _SEED * tensors) if STOCHASTIC else 0
                of_row, in_row = _rows_of(place + tl.arange(0, TILE), per_row)
                by_rows, by_blocks = _rows_of(TILE, per_row)
                for begin in range(0, count, TILE):
                    block = begin + tl.arange(0, TILE)
                    at, size = _extent(of_row, in_row, block < count, place, width, True)
                    of_row, in_row = _later_rows_of(of_row, in_row, by_rows, by_blocks, per_row)
                    offsets, mask = at[:, None] + tl.arange(0, _SPAN)[None, :], _existing(size, HINT)
                    loaded = _load_codes(
                        arrays, scales, (start // 16) * 16, offsets, mask, block, block < count,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, HINT,
                    )  # fmt: skip
                    if not PACKED:
                        numbers = _numbers(hyper)
                        seed = tl.load(table + _SEED * tensors) if STOCHASTIC else 0
                    words = 0, 0, 0
                    if STOCHASTIC:
                        runs = (at // EACH)[:, None] + tl.arange(0, _SPAN // EACH)[None, :]
                        runs = tl.reshape(runs, (BLOCK // EACH,))
                        words = _words_of_blocks(
                            runs, index, left, to_end, run, jump, seed, step, stream, EACH, BLOCK, DOWN, DOWN_FIRST
                        )
                    _coded_block(
                        loaded, arrays, scales,
                        (start // 16) * 16, offsets, mask, size, block, block < count, words, numbers,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, HINT, True,
                    )  # fmt: skip
            else:
                FEW: tl.constexpr = 256 // _SPAN
                row_few, in_few = _rows_of(place + tl.arange(0, FEW), per_row)
                few_rows, few_blocks = _rows_of(FEW, per_row)
                for begin in range(0, count, FEW):
                    block = begin + tl.arange(0, FEW)
                    at, size = _extent(row_few, in_few, block < count, place, width, False)
                    row_few, in_few = _later_rows_of(row_few, in_few, few_rows, few_blocks, per_row)
                    offsets, mask = at[:, None] + tl.arange(0, _SPAN)[None, :], _existing(size, 0)
                    loaded = _load_codes(
                        arrays, scales, start, offsets, mask, block, block < count,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, 0,
                    )  # fmt: skip
                    numbers = _numbers(hyper)
                    seed = tl.load(table + _SEED * tensors) if STOCHASTIC else 0
                    words = 0, 0, 0
                    if STOCHASTIC:
                        places = _places(index, offsets, left, to_end, run, jump)
                        words = words_of(places, seed, step, stream, 3)
                    _coded_block(
                        loaded, arrays, scales,
                        start, offsets, mask, size, block, block < count, words, numbers,
                        PARAM_T, GRAD_T, EXTRA_T, MASTER, AMSGRAD, L2, STOCHASTIC, 0, True,
                    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- launchers


def _threads(layout: Layout, lanes: int) -> int:
    """The threads of a program. Each holds eight elements of a block, and four where eight would spill registers.

    That is so with a third fp32 moment, and on GPUs with warps of 64 threads (AMD).
    """
    three_moments = layout.amsgrad and layout.state == torch.float32
    return BLOCK // (4 if three_moments or lanes == 64 else 8)


def _constants(layout: Layout, device: torch.device) -> dict[str, Any]:
    """What the kernel is compiled for."""
    lanes = MOST_THREADS // most_warps(device)
    threads = _threads(layout, lanes)
    beside_fp32 = torch.float32 in (layout.param, layout.grad, layout.state) or layout.master == FULL_MASTER
    state = {} if layout.coded else {"STATE_T": triton_dtype(layout.state)}
    return {
        "PARAM_T": triton_dtype(layout.param),
        "GRAD_T": triton_dtype(layout.grad),
        **state,
        "EXTRA_T": {SPLIT_MASTER: tl.int16, SPLIT24_MASTER: tl.int8}.get(layout.master, tl.float32),
        "MASTER": layout.master,
        "AMSGRAD": layout.amsgrad,
        "L2": layout.l2,
        "STOCHASTIC": layout.stochastic,
        "HINT": 8 if beside_fp32 or BLOCK // threads < 8 else 16,
        "CHUNK": layout.chunk,
        "BLOCK": BLOCK,
        "num_warps": threads // lanes,
        "num_stages": 1,
        **EXACT,
    }


def _triton_step(batch: Batch, groups: torch.Tensor, control: Control) -> None:
    table, hyper, device = batch.table, batch.hyper, batch.hyper.device
    assert table is not None
    numbers = control.grad_scale, control.found_inf, control.sum_of_squares
    has_scale, has_found, clip = (number is not None for number in numbers)
    tensors = [batch.groups, groups, hyper, *(hyper if number is None else number for number in numbers)]
    beyond = alignments(tensors)
    programs, operands = (table.tensors + LANES - 1) // LANES, (table.rows, table.tensors, *tensors)
    constants = {"HAS_SCALE": has_scale, "HAS_FOUND": has_found, "CLIP": clip, "LANES": LANES, **EXACT}
    launch_kernel(prepare_kernel, device, programs, operands, constants, beyond)
    if table.chunks:
        kernel = coded_adam_kernel if batch.layout.coded else adam_kernel
        operands = (table.rows, table.chunk_tensor, table.tensors, hyper)
        launch_kernel(kernel, device, table.chunks, operands, batch.constants, beyond[2])


def _native_launch(batch: Batch, groups: torch.Tensor, control: Control) -> partial[None]:
    assert batch.table is not None
    table, function = batch.table, native.functions("adam").halfstep_adam
    numbers = control.grad_scale, control.found_inf, control.sum_of_squares
    places = *checked_addresses((batch.groups, groups, batch.hyper)), *[n if n is None else address(n) for n in numbers]
    return partial(function, *table.places, table.tensors, table.chunks, *places, *batch.codes, threads())


def launch(batch: Batch, groups: torch.Tensor, control: Control) -> partial[None]:
    """One optimizer step over the tensors of a batch, in place, ready to be called.

    On the CPU what is returned runs no Python, so no exception can be raised in the middle. It holds addresses: the
    arguments must live until it was called.

    Args:
        batch: tensors of one layout on one device; parameters, moments, masters, remainders and step counts change.
        groups: fp64, shape ``(groups, GROUP_COLUMNS)``, on the same device.
        control: device scalars on the same device.
    """
    if batch.table is None:
        return partial(_own_operations_step, batch, groups, control)
    implementation = resolve(batch.hyper.device, "adam")
    if implementation == "native":
        return _native_launch(batch, groups, control)
    return partial(_reference_step if implementation == "reference" else _triton_step, batch, groups, control)


def step(batch: Batch, groups: torch.Tensor, control: Control) -> None:
    """`launch`, and call what it returns."""
    launch(batch, groups, control)()
