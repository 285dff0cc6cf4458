"""Checks of what our PTX assumes of NVIDIA's arithmetic, on the GPU itself.

`kernels.rounding` takes a NaN that arithmetic gave to be 0x7FFFFFFF. `kernels.block_instructions.update_assembly`
computes root and quotient from approximations and corrections that have the bits of ``sqrt.rn`` and ``div.rn``.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch

from halfstep.kernels.backend import jit, tl
from halfstep.kernels.block_instructions import update_assembly, update_constraints

NAN = 0x7FFFFFFF  # the NaN that arithmetic gives
# Zeros, subnormal and normal numbers, infinities, and quiet and signaling NaNs, of both signs.
_MAGNITUDES = (0, 1, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FA00000, 0x7FC00000, 0x7FFFFFFF)
PATTERNS = tuple(sign | magnitude for magnitude in _MAGNITUDES for sign in (0, 0x80000000))
OPERATIONS = {"add": 2, "sub": 2, "mul": 2, "fma": 3}  # and the number of their operands
FIRST, COUNT = 0x3F800000, 1 << 24  # all mantissas with two exponents, from 1.0 to below 4.0
BLOCK = 1024


def _assembly(name: str, paired: bool) -> str:
    operands = OPERATIONS[name]
    if not paired:
        return f"{name}.rn.f32 {', '.join(f'${index}' for index in range(operands + 1))};"
    registers = [f"%x{index}" for index in range(operands)]
    lines = [f"mov.b64 {x}, {{${2 + 2 * index}, ${3 + 2 * index}}};" for index, x in enumerate(registers)]
    lines += [f"{name}.rn.f32x2 %x0, {', '.join(registers)};", "mov.b64 {$0, $1}, %x0;"]
    return "{\n.reg .b64 %x0, %x1, %x2;\n" + "\n".join(lines) + "\n}"


@jit
def _operation_kernel(
    operands, results, COUNT: tl.constexpr, ASSEMBLY: tl.constexpr, OF_THREE: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c = tl.load(operands + at), tl.load(operands + COUNT + at), tl.load(operands + 2 * COUNT + at)
    PACK: tl.constexpr = 2 if PAIRED else 1
    if OF_THREE:
        OF_3: tl.constexpr = "=r,=r,r,r,r,r,r,r" if PAIRED else "=r,r,r,r"
        result = tl.inline_asm_elementwise(ASSEMBLY, OF_3, [a, b, c], tl.int32, is_pure=True, pack=PACK)
    else:
        OF_2: tl.constexpr = "=r,=r,r,r,r,r" if PAIRED else "=r,r,r"
        result = tl.inline_asm_elementwise(ASSEMBLY, OF_2, [a, b], tl.int32, is_pure=True, pack=PACK)
    tl.store(results + at, result)


def _expected(name: str, a: Any, b: Any, c: Any) -> Any:
    """In fp64, where products are exact; sums are compared by whether they are NaN."""
    with np.errstate(all="ignore"):
        return {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[name]


def nan_patterns(device: torch.device, paired: bool) -> dict[str, Any]:
    """The number of NaNs by operation, after checking that each is expected and is `NAN`.

    With `paired` by the instructions for two numbers, which GPUs have from sm_100 on.
    """
    triples = np.array(list(product(PATTERNS, repeat=3)), np.uint32)
    triples = np.concatenate([triples, np.zeros((-len(triples) % BLOCK, 3), np.uint32)]).T.copy()
    operands = torch.from_numpy(triples.view(np.int32)).to(device)
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        numbers = triples.view(np.float32).astype(np.float64)
    seen = {}
    for name, count in OPERATIONS.items():
        results = torch.empty(operands.shape[1], dtype=torch.int32, device=device)
        _operation_kernel[(len(results) // BLOCK,)](
            operands, results, len(results), _assembly(name, paired), count == 3, paired, BLOCK
        )
        bits = results.cpu().numpy().view(np.uint32)
        is_nan, expected = (bits & 0x7FFFFFFF) > 0x7F800000, np.isnan(_expected(name, *numbers))
        for wrong, what in ((is_nan != expected, "NaN or not"), (is_nan & (bits != NAN), "pattern of NaN")):
            if wrong.any():
                first = int(wrong.argmax())
                operand = ", ".join(f"{pattern:#010x}" for pattern in triples[:count, first])
                raise AssertionError(f"{what}: {name} of {operand} is {int(bits[first]):#010x}; {wrong.sum()} such")
        seen[name] = int(is_nan.sum())
    return seen


@jit
def _update_kernel(
    moments, counts, wrong, first_wrong, first, least, ASSEMBLY: tl.constexpr, OPERANDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pattern = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = pattern.to(tl.float32, bitcast=True)
    root = tl.sqrt_rn(v)
    zero = tl.zeros((BLOCK,), tl.float32)
    one, bound = zero + 1.0, zero + least
    number, where = 0, 0x7FFFFFFF
    for index in range(counts):
        m = zero + tl.load(moments + index)
        # w - (step_size * quotient + decay * w) with w = 0, decay = 0 and step_size = -1
        found = tl.inline_asm_elementwise(
            ASSEMBLY, OPERANDS, [m, v, zero, zero, one, zero, -one, bound, pattern], tl.float32, is_pure=True, pack=8
        )
        other = found.to(tl.int32, bitcast=True) != tl.div_rn(m, root).to(tl.int32, bitcast=True)
        number += tl.sum(other.to(tl.int32), axis=0)
        where = tl.minimum(where, tl.min(tl.where(other, pattern, 0x7FFFFFFF), axis=0))
    tl.store(wrong + tl.program_id(0), number)
    tl.store(first_wrong + tl.program_id(0), where)


def root_and_quotient(
    device: torch.device,
    paired: bool,  # as in `nan_patterns`
    first: int = FIRST,  # the pattern of the first v
    count: int = COUNT,  # of v
    moments: int = 256,  # the number of m for each v
    least: float = 2**-49,  # the least quotient that is computed the quick way
) -> dict[str, Any]:
    """Check that m / sqrt(v) of `update_assembly` has the bits of ``sqrt.rn`` and ``div.rn``.

    By default v has all mantissas with both parities of the exponent; the roots then have all mantissas too.
    """
    mantissas = np.random.default_rng(0).integers(0, 1 << 23, moments, dtype=np.uint32)
    mantissas[:3] = (0, 1, (1 << 23) - 1)[:moments]
    signs = np.arange(moments, dtype=np.uint32) << 31
    m = torch.from_numpy((FIRST | mantissas | signs).view(np.float32)).to(device)
    wrong, first_wrong = torch.empty(2, count // BLOCK, dtype=torch.int32, device=device)
    assembly, operands = update_assembly(0, False, paired), update_constraints(0, False)
    _update_kernel[(count // BLOCK,)](
        m, moments, wrong, first_wrong, first, least, assembly, operands, BLOCK, enable_fp_fusion=False
    )
    if total := int(wrong.sum()):
        where = int(first_wrong.min())
        raise AssertionError(f"{total} of {count * moments} quotients have other bits, the first of the v {where:#x}")
    return {"pairs": count * moments}
