"""PTX that rounds to FP8, for ``tl.inline_asm_elementwise`` in cast.py. NVIDIA's GPUs only."""

from __future__ import annotations

import struct

from halfstep.kernels.formats import Format


def fp8_assembly(name: str, tie: float, saturate: bool) -> str:
    """PTX that converts four fp32 numbers ($1 to $4) to four FP8 codes ($0).

    `tie` is the number halfway between the largest finite one and the next, which to nearest even overflows in E5M2
    but not in E4M3.
    """
    beyond = "gt" if name == "e4m3" else "ge"
    lines = [
        ".reg .pred %over;",
        ".reg .b16 %lower, %upper;",
        ".reg .b32 %codes, %size, %signs;",
        f"cvt.rn.satfinite.{name}x2.f32 %lower, $2, $1;",
        f"cvt.rn.satfinite.{name}x2.f32 %upper, $4, $3;",
        "mov.b32 %codes, {%lower, %upper};",
    ]
    for place in () if saturate else range(4):
        lines += [
            f"abs.f32 %size, ${place + 1};",
            f"setp.{beyond}.f32 %over, %size, 0f{struct.pack('>f', tie).hex()};",
            f"@%over add.u32 %codes, %codes, {1 << 8 * place};",
        ]
    lines += [
        "prmt.b32 %size, $1, $2, 0x0073;",  # the upper bytes of the first two numbers
        "prmt.b32 %signs, $3, $4, 0x0073;",
        "prmt.b32 %signs, %size, %signs, 0x5410;",
        "and.b32 %signs, %signs, 0x80808080;",
        "or.b32 $0, %codes, %signs;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


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
        f"mul.rn.f32 %part, %part, 0f{struct.pack('>f', 2.0 ** (form.bias - 127)).hex()};",
        f"min.u32 %part, %part, {last << dropped};",
        f"mad.lo.u32 $0, %part, {1 << 24 - dropped}, $2;",
    ]
    return "{\n" + "\n".join(lines) + "\n}"


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
