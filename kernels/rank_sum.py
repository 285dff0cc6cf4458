"""The sum of what several ranks sent, in fp32 and in the order of the ranks: one launch. `reference` is the
specification.

Bytes per element of the result, from N ranks that sent 16 bits: 2 N + 4. `sum_and_check` also checks the result, by
the rules and with the bits of kernels/unscale.py, which would read 4 more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise, repeat

import torch

from halfstep.kernels.backend import EXACT, by_address, chosen, constant, jit, launch_kernel, most_warps, resolve, tl
from halfstep.kernels.multi_tensor import ADDRESSES, TensorTable, alignments, locate
from halfstep.kernels.rounding import to_float32
from halfstep.kernels.unscale import (
    CHUNK,
    Factor,
    PartialCheck,
    check_block,
    check_part,
    factor_block,
    scaled_block,
)

BLOCK = 1024  # elements of a program of 256 threads: four per thread, which are 16 bytes of the result
CHECK_WARPS = 8  # with 4, which check alone in fewer instructions, a thread would need more than 190 registers


def reference(parts: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """``out = (parts[0] + parts[1] + ...) / divisor``, every operation rounded to fp32, in plain torch.

    Args:
        parts: fp16, bf16 or fp32, shape ``(ranks, elements)``.
        out: fp32, shape ``(elements,)``.
        divisor: an fp32 number.
    """
    out.copy_(parts[0])
    for part in parts[1:]:
        out += part
    out /= divisor


@functools.partial(jit, do_not_specialize=["ranks"])
def rank_sum_kernel(parts, out, elements, ranks, divisor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    part = parts + at
    total = to_float32(tl.load(part, mask=mask))
    for _ in range(1, ranks):
        part += elements
        total += to_float32(tl.load(part, mask=mask))
    tl.store(out + at, tl.div_rn(total, divisor), mask=mask)


_START_ROW, _SIZE_ROW = constant(ADDRESSES), constant(ADDRESSES + 1)


@functools.partial(jit, do_not_specialize=["tensors", "ranks", "flags", "sums"])
def rank_sum_check_kernel(
    rows, chunk_tensor, tensors,  # of `Ranges.table`
    parts, out, elements, ranks, divisor,
    inv_scale, flags, sums,  # as of `unscale.check_kernel`, with one flag per range
    SCALED: tl.constexpr, CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether 16 divides the addresses and `elements`
):  # fmt: skip
    column, start, left = locate(rows, chunk_tensor, tensors, CHUNK)
    first = tl.load(column + _START_ROW * tensors) + start
    offsets = tl.arange(0, CHUNK)
    part, result = parts + first, out + first
    HINT: tl.constexpr = parts.dtype.element_ty.primitive_bitwidth // 2  # four elements, as of the result
    if ALIGNED & (first % 16 == 0) & (left == CHUNK):
        total = to_float32(tl.load(tl.multiple_of(part, HINT) + offsets))
        for _ in range(1, ranks):
            part += elements
            total += to_float32(tl.load(tl.multiple_of(part, HINT) + offsets))
        total = tl.div_rn(total, divisor)
        tl.store(tl.multiple_of(result, 16) + offsets, total)
    else:
        total = to_float32(tl.load(part + offsets, mask=offsets < left))
        for _ in range(1, ranks):
            part += elements
            total += to_float32(tl.load(part + offsets, mask=offsets < left))
        total = tl.div_rn(total, divisor)
        tl.store(result + offsets, total, mask=offsets < left)
    y, _ = scaled_block(total, factor_block(inv_scale, SCALED), SCALED, False)
    y = tl.where(offsets < tl.load(column + _SIZE_ROW * tensors) - start, y, 0.0)
    check_block(y, flags + tl.load(chunk_tensor + tl.program_id(0)), sums + tl.program_id(0), CHUNK)


def sum_of_ranks(parts: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """`reference`, on GPUs by a kernel."""
    ranks, elements = parts.shape
    on_gpu = parts.is_cuda or chosen() == "triton"
    if elements and on_gpu and resolve(parts.device, "rank_sum") == "triton":
        operands = by_address(parts), by_address(out), elements, ranks, float(divisor)
        constants = {"BLOCK": BLOCK, "num_warps": most_warps(parts.device) // 4, **EXACT}
        form = parts.dtype, alignments((parts, out)), elements % 16 == 0, elements == 1, elements < 2**31
        launch_kernel(rank_sum_kernel, parts.device, -(-elements // BLOCK), operands, constants, *form)
        torch.autograd.graph.increment_version(out)
    else:
        reference(parts, out, divisor)


class Ranges:
    """Ranges of a buffer, (start, elements) in order, of which the first starts at 0. Each may be followed by padding.

    Attributes:
        padded: the elements of each range with its padding.
        table: the `TensorTable` of the padded ranges with rows of starts and elements, once a GPU needs it.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], elements: int) -> None:
        self.ranges = ranges
        self.padded = [end - start for start, end in pairwise([*(start for start, _ in ranges), elements])]
        self.table: TensorTable | None = None


def sum_and_check(
    parts: torch.Tensor, out: torch.Tensor, divisor: float, ranges: Ranges, factor: Factor | None
) -> list[PartialCheck]:
    """`sum_of_ranks`, and `check_part` of ranges that with their padding are all of `out`; on GPUs in one launch."""
    device, (ranks, elements) = parts.device, parts.shape
    assert sum(ranges.padded) == elements
    on_gpu = parts.is_cuda or chosen() == "triton"
    if not (elements and on_gpu and resolve(device, "rank_sum") == "triton"):
        reference(parts, out, divisor)
        return check_part([out[start : start + size] for start, size in ranges.ranges], factor)
    table = ranges.table
    if table is None:
        contents = list(map(list, zip(*ranges.ranges, strict=True)))
        table = ranges.table = TensorTable(ranges.padded, 2, CHUNK, device, contents)
    sums = torch.empty(table.chunks, dtype=torch.float64, device=device)
    flags = torch.zeros(table.tensors, dtype=torch.int32, device=device)
    value, scaled = (1.0, 0) if factor is None else (factor.value, 3 if factor.inverted else 1)
    operands = *table.operands, by_address(parts), by_address(out), elements, ranks, float(divisor), value, flags, sums
    misaligned = alignments((parts, out, *([value] if isinstance(value, torch.Tensor) else [])))
    aligned = not any(misaligned[:2]) and elements % 16 == 0
    constants = {"SCALED": scaled, "CHUNK": CHUNK, "ALIGNED": aligned, "num_warps": CHECK_WARPS, **EXACT}
    form = parts.dtype, misaligned, elements % 16 == 0, elements == 1, elements < 2**31
    launch_kernel(rank_sum_check_kernel, device, table.chunks, operands, constants, *form)
    torch.autograd.graph.increment_version(out)
    chunks = zip(sums.split([-(-size // CHUNK) for size in ranges.padded]), ranges.ranges, strict=True)
    chunks_of = [of_range[: -(-size // CHUNK)] for of_range, (_, size) in chunks]  # the last may be of padding alone
    return list(map(PartialCheck, repeat(torch.float32), chunks_of, flags.split(1), repeat(True)))
