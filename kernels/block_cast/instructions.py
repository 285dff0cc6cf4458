"""PTX that rounds fp32 numbers to the elements of blocks, for ``tl.inline_asm_elementwise``. NVIDIA's GPUs only.

Four numbers, or four pairs of numbers whose codes share a byte, become a register of four bytes.
"""

from __future__ import annotations

import struct
from itertools import product

from halfstep.kernels.backend import constant
from halfstep.kernels.block_instructions import EXACT
from halfstep.kernels.formats import BLOCKS, ELEMENTS, Format

_ELEMENTS = sorted({row.element for row in BLOCKS})


def _float(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _nearest(form: Format, x: str, to: str) -> str:
    """`kernels._rounded`, with the code in the lowest byte: a product and a sum that are rounded once, as the product
    is exact. The factor by which a power of two becomes the large one has the exponent of the code in its lowest bits.
    """
    dropped, least = 23 - form.mantissa, 128 - form.bias
    factor = (127 + dropped << 23) - (least << form.mantissa)
    return (
        f"abs.f32 %a, {x}; min.f32 %a, %a, {_float(form.most)}; and.b32 %b, %a, 0x7F800000;"
        f"max.s32 %b, %b, {least << 23}; shr.u32 %c, %b, {dropped}; add.u32 %c, %c, {factor};"
        f"fma.rn.f32 {to}, %b, %c, %a;"
    )


def _bytes(to: str, registers: list[str], byte: int) -> str:
    """The same byte of four registers."""
    a, b, c, d = registers
    pick = f"0x00{4 + byte}{byte}"
    return f"prmt.b32 {to}, {a}, {b}, {pick}; prmt.b32 %c, {c}, {d}, {pick}; prmt.b32 {to}, {to}, %c, 0x5410;"


def element_assembly(name: str, stochastic: bool, converts: bool) -> str:
    """PTX that makes four bytes ($0) of codes. `converts`: with the conversion to FP6 and FP4 that sm_100 has.

    The other operands, four each: numbers; if two codes share a byte, those of the upper halves; all ones, or 0 where
    codes are to be 0; if `stochastic`, random words moved down by a byte, as the numbers.
    """
    form = ELEMENTS[name]
    shared = form.bits == 4
    numbers = [[f"${4 * half + lane + 1}" for lane in range(4)] for half in range(1 + shared)]
    keep, noise = 4 * len(numbers) + 1, 4 * len(numbers) + 5
    lines = [".reg .b32 %a, %b, %c, %codes, %signs, %more, %keep;"]
    lines += [_bytes("%keep", [f"${keep + lane}" for lane in range(4)], 0)]
    if not stochastic and (form.bits == 8 or converts):
        pairs = zip(*reversed(numbers), strict=True) if shared else (("$2", "$1"), ("$4", "$3"))
        parts = [f"%part{lane}" for lane in range(4 if shared else 2)]
        lines += [f".reg .b{8 if shared else 16} {', '.join(parts)};"]
        for part, (upper, lower) in zip(parts, pairs, strict=True):
            lines += [f"cvt.rn.satfinite.e{form.exponent}m{form.mantissa}x2.f32 {part}, {upper}, {lower};"]
        lines += [f"mov.b32 %codes, {{{', '.join(parts)}}}; and.b32 $0, %codes, %keep;"]
        return "{\n" + "\n".join(lines) + "\n}"
    dropped, power = 23 - form.mantissa, _float(2.0 ** (form.bias - 127))
    lines += [".reg .b32 %s0, %s1, %s2, %s3;"]
    for half, four in enumerate(numbers):
        for lane, x in enumerate(four):
            if stochastic:  # as stochastic_assembly of fp8_instructions.py, with the code in the upper byte
                lines += [f"abs.f32 %a, {x}; mul.rn.f32 %a, %a, {power}; min.u32 %a, %a, {form.largest << dropped};"]
                lines += [f"mad.lo.u32 %s{lane}, %a, {1 << 24 - dropped}, ${noise + 4 * half + lane};"]
            else:
                lines += [_nearest(form, x, f"%s{lane}")]
        lines += [_bytes("%more" if half else "%codes", [f"%s{lane}" for lane in range(4)], 3 if stochastic else 0)]
    lines += ["mad.lo.u32 %codes, %more, 16, %codes;"] if shared else []
    for half, four in enumerate(numbers):
        lines += [_bytes("%signs", four, 3)]
        sign = form.bits - 1 + 4 * half  # its bit in a byte
        lines += [f"shr.u32 %signs, %signs, {7 - sign};"] if sign < 7 else []
        lines += [f"and.b32 %signs, %signs, {0x01010101 << sign}; or.b32 %codes, %codes, %signs;"]
    return "{\n" + "\n".join([EXACT, *lines, "and.b32 $0, %codes, %keep;"]) + "\n}"


# By the arguments of `element_assembly`.
ASSEMBLY = constant({key: element_assembly(*key) for key in product(_ELEMENTS, (False, True), (False, True))})
