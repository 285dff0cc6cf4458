"""The sum of what several ranks sent, in fp32 and in the order of the ranks: one launch. `reference` is the
specification.

Bytes per element of the result, from N ranks that sent 16 bits: 2 N + 4.
"""

from __future__ import annotations

import functools

import torch

from halfstep.kernels.backend import EXACT, by_address, chosen, jit, launch_kernel, most_warps, resolve, tl
from halfstep.kernels.multi_tensor import alignments
from halfstep.kernels.rounding import to_float32

BLOCK = 1024  # elements of a program of 256 threads: four per thread, which are 16 bytes of the result


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
