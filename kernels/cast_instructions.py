"""PTX that rounds to FP8 and to the elements of blocks, for ``tl.inline_asm_elementwise``. NVIDIA's GPUs only."""

from __future__ import annotations

from halfstep.kernels.backend import constexpr_function
from halfstep.kernels.block_instructions import EXACT, body, fp32
from halfstep.kernels.formats import ELEMENTS, Format


@constexpr_function
def _bytes(to: str, registers: list[str], byte: int) -> str:
    """The same byte of four registers."""
    a, b, c, d = registers
    pick = f"0x00{4 + byte}{byte}"
    return f"prmt.b32 {to}, {a}, {b}, {pick}; prmt.b32 %c, {c}, {d}, {pick}; prmt.b32 {to}, {to}, %c, 0x5410;"


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
        ".reg .b32 %codes, %size, %signs, %c;",
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
        _bytes("%signs", ["$1", "$2", "$3", "$4"], 3),
        "and.b32 %signs, %signs, 0x80808080;",
        "or.b32 $0, %codes, %signs;",
    ]
    return body(lines)


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
    return body(lines)


@constexpr_function
def packed_assembly(bits: int) -> str:
    """PTX that makes four FP8 codes ($0) of the upper bytes of four sums ($1 to $4) and the signs of four numbers.

    The numbers have 16 bits ($5 and $6) or 32 ($5 to $8).
    """
    lines = [".reg .b32 %codes, %c, %signs;", _bytes("%codes", ["$1", "$2", "$3", "$4"], 3)]
    lines += ["prmt.b32 %signs, $5, $6, 0x7531;" if bits == 16 else _bytes("%signs", ["$5", "$6", "$7", "$8"], 3)]
    lines += ["and.b32 %signs, %signs, 0x80808080;", "or.b32 $0, %codes, %signs;"]
    return body(lines)


@constexpr_function
def _nearest(form: Format, x: str, to: str) -> str:
    """`_rounded` of block_cast, with the code in the lowest byte: an exact product and a sum, rounded once.
    The factor by which a power of two becomes the large one has the exponent of the code in its lowest bits.
    """
    dropped, least = 23 - form.mantissa, 128 - form.bias
    factor = (127 + dropped << 23) - (least << form.mantissa)
    return (
        f"abs.f32 %a, {x}; min.f32 %a, %a, {fp32(form.most)}; and.b32 %b, %a, 0x7F800000;"
        f"max.s32 %b, %b, {least << 23}; shr.u32 %c, %b, {dropped}; add.u32 %c, %c, {factor};"
        f"fma.rn.f32 {to}, %b, %c, %a;"
    )


@constexpr_function
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
        for part, pair in zip(parts, pairs, strict=True):
            lines += [f"cvt.rn.satfinite.e{form.exponent}m{form.mantissa}x2.f32 {part}, {', '.join(pair)};"]
        lines += [f"mov.b32 %codes, {{{', '.join(parts)}}}; and.b32 $0, %codes, %keep;"]
        return body(lines)
    dropped, power = 23 - form.mantissa, fp32(2.0 ** (form.bias - 127))
    lines += [".reg .b32 %s0, %s1, %s2, %s3;"]
    for half, four in enumerate(numbers):
        for lane, x in enumerate(four):
            if stochastic:  # as `stochastic_assembly`, with the code in the upper byte
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
    return body([EXACT, *lines, "and.b32 $0, %codes, %keep;"])
