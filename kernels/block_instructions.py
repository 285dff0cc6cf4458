"""PTX for blocks of 8-bit codes, for ``tl.inline_asm_elementwise`` in block_codes.py and adam.py. NVIDIA's GPUs only.

Four codes stand in a register of 32 bits. What the compiler makes of separate bytes moves each one apart and together
again; here four are decoded and encoded together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from halfstep.kernels.backend import constexpr_function, tl, triton_version

# Begins assembly that has the bits of separate operations although it fuses or approximates some, for the audit.
EXACT = "// exact: the bits of separate operations"

# A function of three bits, by the values that it has for 0xF0, 0xCC and 0xAA. Written as separate operations with two
# constants, it compiles to two instructions.
_CHOICE = 0xF0 & 0xAA | 0xCC & 0x55  # the third one chooses between the others


def _hex(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _body(lines: list[str]) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


def constraints(outputs: int, inputs: int, kind: str = "r") -> str:
    """The constraints of assembly whose operands are registers of 32 bits; `kind` f: that are fp32 numbers."""
    return ",".join([f"={kind}"] * outputs + [kind] * inputs)


def widen_assembly(paired: bool = False) -> str:
    """PTX that makes two fp32 numbers ($0, $1) of two bf16 numbers ($2), times two factors ($3, $4).

    With one bit operation each; the compiler takes two for the upper half of a register.
    """
    lines = [".reg .b32 %a, %b;", "shl.b32 %a, $2, 16;", "and.b32 %b, $2, 0xFFFF0000;"]
    if paired:
        lines += [
            ".reg .b64 %ab, %factors;",
            "mov.b64 %ab, {%a, %b};",
            "mov.b64 %factors, {$3, $4};",
            "mul.rn.f32x2 %ab, %ab, %factors;",
            "mov.b64 {$0, $1}, %ab;",
        ]
    else:
        lines += ["mul.rn.f32 $0, %a, $3;", "mul.rn.f32 $1, %b, $4;"]
    return _body(lines)


def decode_signed_assembly(paired: bool = False) -> str:
    """PTX that makes four fp32 numbers ($0 to $3) of signed codes ($4) and the powers of their blocks ($5 to $8).

    `paired`: with the instructions for two numbers that GPUs have from sm_100 on, here and below.
    """
    lines = [".reg .b16 %even, %odd;", ".reg .b32 %pair, %a, %b;"]
    if paired:
        lines += [".reg .b64 %ab, %powers;"]
    for pair, selector in enumerate(("0x9180", "0xB3A2")):  # bytes, and their signs above them
        first, second = 2 * pair, 2 * pair + 1
        lines += [
            f"prmt.b32 %pair, $4, 0, {selector};",
            "shl.b32 %pair, %pair, 7;",
            # Two fp16 numbers. The sign was in both upper bits of each, of which the second must go.
            "and.b32 %pair, %pair, 0xBF80BF80;",
            "mov.b32 {%even, %odd}, %pair;",
            "cvt.f32.f16 %a, %even;",
            "cvt.f32.f16 %b, %odd;",
        ]
        if paired:
            lines += [
                "mov.b64 %ab, {%a, %b};",
                f"mov.b64 %powers, {{${5 + first}, ${5 + second}}};",
                "mul.rn.f32x2 %ab, %ab, %powers;",
                f"mov.b64 {{${first}, ${second}}}, %ab;",
            ]
        else:
            lines += [f"mul.rn.f32 ${first}, %a, ${5 + first};", f"mul.rn.f32 ${second}, %b, ${5 + second};"]
    return _body(lines)


def decode_positive_assembly() -> str:
    """PTX that makes four fp32 numbers ($0 to $3) of positive codes ($4).

    The other operands, four each: the distances of the codes of their blocks, powers of two, and the bases.
    """
    lines = [".reg .b32 %code;"]
    for place in range(4):
        lines += [
            f"prmt.b32 %code, $4, 0, 0x444{place};",
            f"mad.lo.u32 ${place}, %code, ${5 + place}, ${9 + place};",
        ]
    return _body(lines)


def encode_signed_assembly(stochastic: bool, paired: bool = False) -> str:
    """PTX that makes signed codes ($0) of four fp32 numbers ($1 to $4).

    The other operands, four each: factors of their blocks, negative, or 0 where all codes are 0; and, if `stochastic`,
    random words moved down by a byte.
    """
    lines = [".reg .b32 %s0, %s1, %s2, %s3, %c0, %c1, %c2, %c3, %upper;"]
    # A zero keeps its sign because the product of its negative and the factor is added to a zero that is negative with
    # the factor. Without a factor, the sum is 0, or NaN, whose pattern 0x7FFFFFFF overflows to 0 below with any noise.
    if paired:
        lines += [".reg .b64 %xx, %factors, %zeros, %small;", f"mov.b32 %upper, {_hex(2.0**-113)};"]
        lines += ["mov.b64 %small, {%upper, %upper};"]
        for first in (0, 2):
            lines += [
                f"mul.rn.f32 %upper, ${5 + first}, {_hex(0.0)};",
                "mov.b64 %zeros, {%upper, %upper};",
                f"neg.f32 %s{first}, ${5 + first};",
                f"mov.b64 %factors, {{%s{first}, %s{first}}};",
                f"mov.b64 %xx, {{${1 + first}, ${2 + first}}};",
                "fma.rn.f32x2 %xx, %xx, %factors, %zeros;",
                "mul.rn.f32x2 %xx, %xx, %small;",
                f"mov.b64 {{%c{first}, %c{first + 1}}}, %xx;",
            ]
    else:
        for place in range(4):
            lines += [
                f"mul.rn.f32 %upper, ${5 + place}, {_hex(0.0)};",
                f"neg.f32 %c{place}, ${1 + place};",
                f"fma.rn.f32 %c{place}, %c{place}, ${5 + place}, %upper;",
                f"mul.rn.f32 %c{place}, %c{place}, {_hex(2.0**-113)};",
            ]
    for place in range(4):
        noise = f"${9 + place}" if stochastic else str(1 << 23)
        lines += [
            f"shl.b32 %s{place}, %c{place}, 4;",
            f"add.u32 %s{place}, %s{place}, {noise};",
            f"lop3.b32 %s{place}, %s{place}, %c{place}, 0x7FFFFFFF, {_CHOICE};",
        ]
    return _body([EXACT, *lines, *_upper_bytes()])


def encode_positive_assembly(stochastic: bool) -> str:
    """PTX that makes positive codes ($0) of four positive fp32 numbers ($1 to $4).

    The other operands, four each: the negative bases of their blocks; powers of two that move codes to the upper byte,
    or 0 where all codes are 0; and, if `stochastic`, random words moved down by a byte.
    """
    lines = [".reg .b32 %s0, %s1, %s2, %s3;"]
    for place in range(4):
        noise = f"${13 + place}" if stochastic else str(1 << 23)
        lines += [
            f"add.s32 %s{place}, ${1 + place}, ${5 + place};",
            f"max.s32 %s{place}, %s{place}, 0;",
            f"mad.lo.u32 %s{place}, %s{place}, ${9 + place}, {noise};",
        ]
    lines += _upper_bytes()
    return _body(lines)


def _upper_bytes() -> list[str]:
    """The upper bytes of four registers in one."""
    return [
        "prmt.b32 %s0, %s0, %s1, 0x0073;",
        "prmt.b32 %s2, %s2, %s3, 0x0073;",
        "prmt.b32 $0, %s0, %s2, 0x5410;",
    ]


def _single_update(m: str, v: str, new: str, decay: str, root: str, eps: str, step_size: str) -> list[str]:
    """The new weight of one element, whose weight is in %w; its quotient is in %q and the number of `new`."""
    quotient = f"%q{new[2:]}"
    return [
        f"rsqrt.approx.ftz.f32 %r, {v};",
        f"mul.rn.f32 %s, {v}, %r;",
        f"mul.rn.f32 %h, %r, {_hex(0.5)};",
        "neg.f32 %t, %s;",
        f"fma.rn.f32 %t, %t, %s, {v};",
        "fma.rn.f32 %s, %t, %h, %s;",
        f"mul.rn.f32 %s, %s, {root};",
        f"add.rn.f32 %s, %s, {eps};",
        "rcp.approx.ftz.f32 %r, %s;",
        "neg.f32 %s, %s;",
        f"fma.rn.f32 %t, %s, %r, {_hex(1.0)};",
        "fma.rn.f32 %r, %r, %t, %r;",
        f"mul.rn.f32 %q, %r, {m};",
        f"fma.rn.f32 %t, %s, %q, {m};",
        f"fma.rn.f32 {quotient}, %r, %t, %q;",
        f"mul.rn.f32 %t, {decay}, %w;",
        f"mul.rn.f32 %s, {step_size}, {quotient};",
        "add.rn.f32 %s, %s, %t;",
        f"sub.rn.f32 {new}, %w, %s;",
    ]


def _paired_update(
    place: int, joined: Callable[[int], list[str]], m: list[str], v: list[str], names: list[str]
) -> list[str]:
    """As `_single_update`, of two elements, with the instructions for two numbers that GPUs have from sm_100 on.

    These negate nothing, so that signs are chosen where they cost least: all are exact.
    """
    after = place + 1
    return [
        *joined(place),
        "mov.b32 %u, %w;",
        *joined(after),
        "mov.b64 %ww, {%u, %w};",
        f"mov.b64 %vv, {{{v[place]}, {v[after]}}};",
        f"neg.f32 %r, {v[place]};",
        f"neg.f32 %t, {v[after]};",
        "mov.b64 %uu, {%r, %t};",
        f"mov.b64 %mm, {{{m[place]}, {m[after]}}};",
        f"rsqrt.approx.ftz.f32 %r, {v[place]};",
        f"rsqrt.approx.ftz.f32 %t, {v[after]};",
        "mov.b64 %rr, {%r, %t};",
        "mul.rn.f32x2 %ss, %vv, %rr;",
        "mul.rn.f32x2 %hh, %rr, %halves;",
        "fma.rn.f32x2 %tt, %ss, %ss, %uu;",
        "fma.rn.f32x2 %ss, %tt, %hh, %ss;",
        "mul.rn.f32x2 %ss, %ss, %roots;",
        "add.rn.f32x2 %bb, %ss, %epss;",
        "mov.b64 {%r, %t}, %bb;",
        "neg.f32 %r, %r;",
        "neg.f32 %t, %t;",
        "rcp.approx.ftz.f32 %r, %r;",
        "rcp.approx.ftz.f32 %t, %t;",
        "mov.b64 %rr, {%r, %t};",
        "fma.rn.f32x2 %tt, %bb, %rr, %ones;",
        "fma.rn.f32x2 %rr, %rr, %tt, %rr;",
        "mul.rn.f32x2 %qq, %rr, %mm;",
        "fma.rn.f32x2 %tt, %bb, %qq, %mm;",
        "fma.rn.f32x2 %qq, %rr, %tt, %qq;",
        f"mov.b64 {{%q{place}, %q{after}}}, %qq;",
        "mul.rn.f32x2 %tt, %decays, %ww;",
        "mul.rn.f32x2 %qq, %steps, %qq;",
        "add.rn.f32x2 %qq, %qq, %tt;",
        "sub.rn.f32x2 %qq, %ww, %qq;",
        f"mov.b64 {{{names[place]}, {names[after]}}}, %qq;",
    ]


def _extreme(instruction: str, of: list[str]) -> list[str]:
    """Leave the extreme of some registers in the first one; `instruction` takes up to three."""
    return [f"{instruction} {of[0]}, {', '.join([of[0], *of[at : at + 2]])};" for at in range(1, len(of), 2)]


WEIGHTS = 8  # elements that the functions below take at a time
_LEAST_SQUARE = 127 - 101 << 23  # the pattern of 2^-101


LARGEST_POSITIVE = 1.875 * 2.0**127  # the largest number of a code of block_codes.py


def averages_assembly(paired: bool = False) -> str:
    """PTX that makes the new moments of eight elements ($0 to $7, $8 to $15) by moving averages.

    The operands, eight each: gradients, first moments, second moments, and the factors of both averages, whose signs
    say which form applies, as in adam.py. They are the same for all elements, so that one branch stands for two choices
    per element. The square of a gradient is at most `LARGEST_POSITIVE`.
    """
    n = WEIGHTS
    g, m, v, f1, f2 = ([f"${place}" for place in range(2 * n + part * n, 3 * n + part * n)] for part in range(5))
    lines = [".reg .pred %first, %second;", ".reg .b32 %d, %q, %old;"]
    if paired:
        lines += [".reg .b64 %gg, %mm, %qq, %dd, %f1, %f2;"]
        lines += [f"mov.b64 %f1, {{{f1[0]}, {f1[0]}}};", f"mov.b64 %f2, {{{f2[0]}, {f2[0]}}};"]
    lines += [
        f"setp.gt.f32 %first, {f1[0]}, {_hex(0.0)};",
        f"setp.gt.f32 %second, {f2[0]}, {_hex(0.0)};",
        "and.pred %first, %first, %second;",
        "@!%first bra OTHER_${:uid};",
    ]
    if paired:
        for a in range(0, n, 2):
            b = a + 1
            lines += [
                f"mov.b64 %gg, {{{g[a]}, {g[b]}}};",
                f"mov.b64 %mm, {{{m[a]}, {m[b]}}};",
                "sub.rn.f32x2 %dd, %gg, %mm;",
                "mul.rn.f32x2 %dd, %f1, %dd;",
                "add.rn.f32x2 %mm, %mm, %dd;",
                f"mov.b64 {{${a}, ${b}}}, %mm;",
                "mul.rn.f32x2 %qq, %gg, %gg;",
                "mov.b64 {%q, %d}, %qq;",
                f"min.NaN.f32 %q, %q, {_hex(LARGEST_POSITIVE)};",
                f"min.NaN.f32 %d, %d, {_hex(LARGEST_POSITIVE)};",
                "mov.b64 %qq, {%q, %d};",
                f"mov.b64 %mm, {{{v[a]}, {v[b]}}};",
                "sub.rn.f32x2 %dd, %qq, %mm;",
                "mul.rn.f32x2 %dd, %f2, %dd;",
                "add.rn.f32x2 %mm, %mm, %dd;",
                f"mov.b64 {{${n + a}, ${n + b}}}, %mm;",
            ]
    else:
        for place in range(n):
            lines += _average(g[place], m[place], f1[0], f"${place}", None)
            lines += [f"mul.rn.f32 %q, {g[place]}, {g[place]};", f"min.NaN.f32 %q, %q, {_hex(LARGEST_POSITIVE)};"]
            lines += _average("%q", v[place], f2[0], f"${n + place}", None)
    lines += ["bra AVERAGED_${:uid};", "OTHER_${:uid}:", f"setp.gt.f32 %first, {f1[0]}, {_hex(0.0)};"]
    for place in range(n):
        lines += _average(g[place], m[place], f1[0], f"${place}", "%first")
        lines += [f"mul.rn.f32 %q, {g[place]}, {g[place]};", f"min.NaN.f32 %q, %q, {_hex(LARGEST_POSITIVE)};"]
        lines += _average("%q", v[place], f2[0], f"${n + place}", "%second")
    return _body([EXACT, *lines, "AVERAGED_${:uid}:"])


def _average(new: str, old: str, factor: str, result: str, near: str | None) -> list[str]:
    """A moving average; `near` is the predicate that the factor is positive, None if it is known to be."""
    lines = [f"sub.rn.f32 %d, {new}, {old};", f"mul.rn.f32 %d, {factor}, %d;"]
    if near is None:
        return [*lines, f"add.rn.f32 {result}, {old}, %d;"]
    return [*lines, f"selp.f32 %old, {old}, {new}, {near};", f"add.rn.f32 {result}, %old, %d;"]


def update_assembly(remainder: int, stochastic: bool, paired: bool = False, threes: bool = False) -> tuple[str, str]:
    """PTX that makes the new weights of eight elements: w - (step_size * (m / (sqrt(v) * root + eps)) + decay * w).

    The operands are moments, v, then what holds the weights: fp32 numbers if `remainder` is 0, else bf16 numbers and
    remainders of as many bits, of which the new ones are given; then noise if `stochastic`, 8 random bits and 0x8000;
    and, each of them as often as there are elements: decay, root, eps, step_size, the least quotient, and the pattern
    of a number that no v is below. The last two may differ between the first four elements and the others, which may be
    of another block.

    Root and quotient are the sequences that ptxas makes of sqrt.rn and div.rn for numbers that are not too large or
    small. The compiler checks and branches twice per element; here all of a thread are checked and branch together: to
    where everything is computed again with those instructions, and with what else is rare, weights that are infinite or
    NaN. The bounds: from a v of 2^-101 on, the remainder of the root is exact; with a sum of root and epsilon from
    2^-51 to 2^125 and a quotient of 2^-49, no part of the quotient is subnormal or overflows. `paired`: with the
    instructions for two numbers that GPUs have from sm_100 on. `threes`: with their minima of three numbers (PTX 8.8).

    Returns:
        The assembly and its constraints.
    """
    n = WEIGHTS
    of_weights = n if remainder == 0 else n // 2
    of_rests = n * remainder // 32
    outputs = of_weights + of_rests
    at = iter(range(outputs, 1000))

    def take(count: int) -> list[str]:
        return [f"${next(at)}" for _ in range(count)]

    m, v, weights, rests = take(n), take(n), take(of_weights), take(of_rests)
    words = take(n if stochastic else 0)
    decay, root, eps, step_size = (take(n)[0] for _ in range(4))
    least, smallest = take(n), take(n)
    inputs = next(at) - outputs

    def joined(place: int) -> list[str]:
        """The weight in %w, its bf16 part in %high."""
        if remainder == 0:
            return [f"mov.b32 %w, {weights[place]};"]
        pair = weights[place // 2]
        high = f"and.b32 %high, {pair}, 0xFFFF0000;" if place % 2 else f"shl.b32 %high, {pair}, 16;"
        if remainder == 16:
            rest = rests[place // 2]
            low = f"shr.s32 %low, {rest}, 16;" if place % 2 else f"prmt.b32 %low, {rest}, 0, 0x9910;"
        else:
            byte = place % 4
            # The byte one place up, and its sign above.
            low = f"prmt.b32 %low, {rests[place // 4]}, 0, 0x{8 | byte:X}{8 | byte:X}{byte}4;"
        return [high, low, "add.u32 %w, %high, %low;"]

    names = [f"%n{place}" for place in range(n)]
    lines = [
        ".reg .pred %bad, %here;",
        f".reg .b32 %w, %high, %low, %r, %s, %h, %q, %t, %u, {', '.join(names)};",
        f".reg .b32 {', '.join(f'%{kind}{place}' for kind in 'qa' for place in range(n))};",
    ]
    if paired:
        lines += [".reg .b64 %rr, %ss, %hh, %vv, %uu, %mm, %bb, %qq, %tt, %ww, %ones, %halves, %minus;"]
        lines += [".reg .b64 %roots, %epss, %decays, %steps;"]
        for name, number in (("ones", 1.0), ("halves", -0.5), ("minus", -1.0)):
            lines += [f"mov.b32 %t, {_hex(number)};", f"mov.b64 %{name}, {{%t, %t}};"]
        for name, value in (("roots", root), ("epss", eps)):
            lines += [f"neg.f32 %t, {value};", f"mov.b64 %{name}, {{%t, %t}};"]
        for name, value in (("decays", decay), ("steps", step_size)):
            lines += [f"mov.b64 %{name}, {{{value}, {value}}};"]
    if paired:
        for place in range(0, n, 2):
            lines += _paired_update(place, joined, m, v, names)
    else:
        for place, new in enumerate(names):
            lines += joined(place) + _single_update(m[place], v[place], new, decay, root, eps, step_size)
    lines += [f"setp.lt.s32 %bad, {smallest[0]}, {_LEAST_SQUARE:#x};"]
    lines += [f"setp.lt.s32 %here, {smallest[4]}, {_LEAST_SQUARE:#x};", "or.pred %bad, %bad, %here;"]
    quotients, sizes = ([f"%{kind}{place}" for place in range(n)] for kind in "qa")
    if threes:
        lines += [f"abs.f32 {of}, {of};" for of in quotients]
        lines += [f"abs.f32 {size}, {new};" for size, new in zip(sizes, names, strict=True)]
        lines += _extreme("min.f32", quotients[:4]) + _extreme("min.f32", quotients[4:])
        lines += _extreme("max.NaN.f32", sizes)  # a NaN is in the new weight, however it came about
        quotients, sizes, bounds = quotients[::4], sizes[:1], least[::4]
    else:
        sizes, bounds = names, [least[place // 4 * 4] for place in range(n)]
    for of, bound in zip(quotients, bounds, strict=True):
        lines += [f"abs.f32 %u, {of};", f"setp.ltu.f32 %here, %u, {bound};", "or.pred %bad, %bad, %here;"]
    for of in sizes:
        lines += [f"abs.f32 %u, {of};", f"setp.geu.f32 %here, %u, {_hex(float('inf'))};", "or.pred %bad, %bad, %here;"]
    lines += ["@!%bad bra USUAL_${:uid};"]
    for place, new in enumerate(names):
        lines += joined(place)
        if remainder:
            lines += ["setp.neu.f32 %here, %w, %w;", "@%here mov.b32 %w, %high;"]
        lines += [
            f"sqrt.rn.f32 %s, {v[place]};",
            f"mul.rn.f32 %s, %s, {root};",
            f"add.rn.f32 %s, %s, {eps};",
            f"div.rn.f32 %q, {m[place]}, %s;",
            f"mul.rn.f32 %q, {step_size}, %q;",
            f"mul.rn.f32 %t, {decay}, %w;",
            "abs.f32 %s, %w;",
            f"setp.eq.f32 %here, %s, {_hex(float('inf'))};",
            f"selp.f32 %t, {_hex(0.0)}, %t, %here;",
            "add.rn.f32 %q, %q, %t;",
            f"sub.rn.f32 {new}, %w, %q;",
        ]
        if remainder:
            lines += [f"min.s32 {new}, {new}, 0x7FC00000;"]
    lines += ["USUAL_${:uid}:"]
    if remainder == 0:
        lines += [f"mov.b32 ${place}, {new};" for place, new in enumerate(names)]
    if remainder == 16:
        for pair in range(n // 2):
            lines += [f"prmt.b32 ${of_weights + pair}, {names[2 * pair]}, {names[2 * pair + 1]}, 0x5410;"]
        lines += [f"add.u32 {new}, {new}, 0x8000;" for new in names]
    if remainder == 8:
        # What rounds to 24 bits and what rounds these to 16, 0x8000, in one sum. The latter only inverts the upper bit
        # of the remainder.
        for place, new in enumerate(names):
            if stochastic:
                lines += [f"add.u32 {new}, {new}, {words[place]};"]
            else:
                lines += [f"shr.u32 %t, {new}, 8;", "and.b32 %t, %t, 1;", f"add.u32 {new}, {new}, %t;",
                          f"add.u32 {new}, {new}, 0x807F;"]  # fmt: skip
        for four in range(n // 4):
            a, b, c, d = names[4 * four : 4 * four + 4]
            lines += [
                f"prmt.b32 %s, {a}, {b}, 0x0051;",
                f"prmt.b32 %t, {c}, {d}, 0x0051;",
                "prmt.b32 %s, %s, %t, 0x5410;",
                f"xor.b32 ${of_weights + four}, %s, 0x80808080;",
            ]
    if remainder:
        lines += [f"prmt.b32 ${pair}, {names[2 * pair]}, {names[2 * pair + 1]}, 0x7632;" for pair in range(n // 2)]
    return _body([EXACT, *lines]), constraints(outputs, inputs)


AVERAGES: Any = None
AVERAGES_OPERANDS = UPDATES = UPDATES_OPERANDS = AVERAGES
if tl is not None:
    AVERAGES = tl.constexpr({(paired,): averages_assembly(paired) for paired in (False, True)})
    AVERAGES_OPERANDS = tl.constexpr(constraints(2 * WEIGHTS, 5 * WEIGHTS, "f"))
    # By the bits of the remainder, whether these are rounded at random, and `paired`.
    _FORMS = ((0, False), (8, False), (8, True), (16, False))
    _THREES = triton_version() >= (3, 7)
    _SINGLE = {(*form, False): update_assembly(*form)[0] for form in _FORMS}
    UPDATES = tl.constexpr({**_SINGLE, **{(*form, True): update_assembly(*form, True, _THREES)[0] for form in _FORMS}})
    UPDATES_OPERANDS = tl.constexpr({form: update_assembly(*form)[1] for form in _FORMS})


@constexpr_function
def entry(table: dict[tuple[Any, ...], str], *key: Any) -> str:
    """In kernels: the entry of one of these tables."""
    return table[key]
