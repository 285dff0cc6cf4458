"""PTX that rounds to FP8, for ``tl.inline_asm_elementwise`` in cast.py. NVIDIA's GPUs only."""

from __future__ import annotations

from halfstep.kernels.backend import constexpr_function
from halfstep.kernels.formats import Format


@constexpr_function
def nearest_assembly(form: Format, saturate: bool) -> str:
    """PTX that converts four fp32 numbers ($1 to $4) to four FP8 codes ($0), to nearest even.

    The instruction turns overflow and infinities into the largest finite number; without saturation, they have the next
    code. It also drops the sign of a NaN, so that all signs are taken from the numbers.
    """
    name = f"e{form.exponent}m{form.mantissa}"
    # Halfway between the largest finite number and the next, which overflows if the code of the former is odd.
    tie = (2 * form.largest + 1 << 22 - form.mantissa) + (127 - form.bias << 23)
    beyond = "ge" if form.largest % 2 else "gt"
    lines = [
        ".reg .pred %over;",
        ".reg .b16 %lower, %upper;",
        ".reg .b32 %codes, %size, %signs;",
        f"cvt.rn.satfinite.{name}x2.f32 %lower, $2, $1;",
        f"cvt.rn.satfinite.{name}x2.f32 %upper, $4, $3;",
        "mov.b32 %codes, {%lower, %upper};",
    ]
    for lane in () if saturate else range(4):
        lines += [
            f"abs.f32 %size, ${lane + 1};",
            f"setp.{beyond}.f32 %over, %size, 0f{tie:08x};",
            f"@%over add.u32 %codes, %codes, {1 << 8 * lane};",
        ]
    lines += [
        "prmt.b32 %size, $1, $2, 0x0073;",  # the upper bytes of the first two numbers
        "prmt.b32 %signs, $3, $4, 0x0073;",
        "prmt.b32 %signs, %size, %signs, 0x5410;",
        "and.b32 %signs, %signs, 0x80808080;",
        "or.b32 $0, %codes, %signs;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def stochastic_assembly(form: Format, saturate: bool) -> str:
    """PTX that makes a sum ($0), whose upper byte is the code of an FP8 number, of an fp32 number ($1) and noise ($2).

    The noise is a word of philox.py moved down by a byte. The code lies 24 bits up, below the sign; what overflows is
    cut off before the noise is added, which cannot carry into another code then.
    """
    dropped = 23 - form.mantissa
    last = form.largest if saturate else form.overflow
    lines = [
        ".reg .b32 %part;",
        "abs.f32 %part, $1;",
        f"mul.rn.f32 %part, %part, 0f{form.bias << 23:08x};",
        f"min.u32 %part, %part, {last << dropped};",
        f"mad.lo.u32 $0, %part, {1 << 24 - dropped}, $2;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def packed_assembly(bits: int) -> str:
    """PTX that makes four FP8 codes ($0) of the upper bytes of four sums ($1 to $4) and the signs of four numbers.

    The numbers have 16 bits ($5 and $6) or 32 ($5 to $8).
    """
    lines = [
        ".reg .b32 %codes, %more, %signs;",
        "prmt.b32 %codes, $1, $2, 0x0073;",
        "prmt.b32 %more, $3, $4, 0x0073;",
        "prmt.b32 %codes, %codes, %more, 0x5410;",
    ]
    if bits == 16:
        lines += ["prmt.b32 %signs, $5, $6, 0x7531;"]
    else:
        lines += ["prmt.b32 %signs, $5, $6, 0x0073;", "prmt.b32 %more, $7, $8, 0x0073;"]
        lines += ["prmt.b32 %signs, %signs, %more, 0x5410;"]
    lines += ["and.b32 %signs, %signs, 0x80808080;", "or.b32 $0, %codes, %signs;"]
    return "{\n" + "\n".join(lines) + "\n}"
