"""PTX for blocks of 8-bit codes, for ``tl.inline_asm_elementwise`` in block_codes.py and adam. NVIDIA's GPUs only.

Four codes stand in a register of 32 bits. What the compiler makes of separate bytes moves each one apart and together
again; here four are decoded and encoded together. `paired`: with the instructions for two numbers that GPUs have from
sm_100 on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from halfstep.kernels.backend import constexpr_function, triton_version

# Begins assembly that has the bits of separate operations although it fuses or approximates some, for the audit.
EXACT = "// exact: the bits of separate operations"
LARGEST_POSITIVE = 1.875 * 2.0**127  # the largest number of a code of block_codes.py
WEIGHTS = 8  # elements that averages_assembly and update_assembly take at a time

# A function of three bits, by the values that it has for 0xF0, 0xCC and 0xAA. Written as separate operations with two
# constants, it compiles to two instructions.
_CHOICE = 0xF0 & 0xAA | 0xCC & 0x55  # the third one chooses between the others
_LEAST_SQUARE = 127 - 101 << 23  # the pattern of 2^-101
_HAS_MINIMA_OF_THREE = triton_version() >= (3, 7)  # PTX 8.8


@constexpr_function
def fp32(x: float) -> str:
    """A number as PTX writes it."""
    return f"0f{np.float32(x).view(np.uint32):08X}"


@constexpr_function
def body(lines: list[str]) -> str:
    """Assembly with registers of its own."""
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def constraints(outputs: int, inputs: int, letter: str = "r") -> str:
    """The constraints of assembly whose operands are registers of 32 bits; `letter` f: that are fp32 numbers."""
    return ",".join([f"={letter}"] * outputs + [letter] * inputs)


@constexpr_function
def widen_assembly(paired: bool = False) -> str:
    """PTX that makes two fp32 numbers ($0, $1) of two bf16 numbers ($2), times two factors ($3, $4), with one bit
    operation each; the compiler takes two for the upper half of a register."""
    lines = [".reg .b32 %a, %b;", "shl.b32 %a, $2, 16; and.b32 %b, $2, 0xFFFF0000;"]
    if paired:
        lines += [".reg .b64 %ab, %factors;", "mov.b64 %ab, {%a, %b}; mov.b64 %factors, {$3, $4};"]
        lines += ["mul.rn.f32x2 %ab, %ab, %factors; mov.b64 {$0, $1}, %ab;"]
    else:
        lines += ["mul.rn.f32 $0, %a, $3; mul.rn.f32 $1, %b, $4;"]
    return body(lines)


@constexpr_function
def decode_signed_assembly(paired: bool = False) -> str:
    """PTX that makes four fp32 numbers ($0 to $3) of signed codes ($4) and the powers of their blocks ($5 to $8)."""
    lines = [".reg .b16 %even, %odd;", ".reg .b32 %pair, %a, %b;"]
    if paired:
        lines += [".reg .b64 %ab, %powers;"]
    for i, selector in ((0, "0x9180"), (2, "0xB3A2")):  # bytes, and their signs above them
        # Two fp16 numbers. The sign was in both upper bits of each, of which the second must go.
        lines += [f"prmt.b32 %pair, $4, 0, {selector}; shl.b32 %pair, %pair, 7; and.b32 %pair, %pair, 0xBF80BF80;"]
        lines += ["mov.b32 {%even, %odd}, %pair; cvt.f32.f16 %a, %even; cvt.f32.f16 %b, %odd;"]
        if paired:
            lines += [f"mov.b64 %ab, {{%a, %b}}; mov.b64 %powers, {{${5 + i}, ${6 + i}}};"]
            lines += [f"mul.rn.f32x2 %ab, %ab, %powers; mov.b64 {{${i}, ${i + 1}}}, %ab;"]
        else:
            lines += [f"mul.rn.f32 ${i}, %a, ${5 + i}; mul.rn.f32 ${i + 1}, %b, ${6 + i};"]
    return body(lines)


@constexpr_function
def decode_positive_assembly() -> str:
    """PTX that makes four fp32 numbers ($0 to $3) of positive codes ($4).

    The other operands, four each: the distances of the codes of their blocks, powers of two, and the bases.
    """
    fours = (f"prmt.b32 %code, $4, 0, 0x444{i}; mad.lo.u32 ${i}, %code, ${5 + i}, ${9 + i};" for i in range(4))
    return body([".reg .b32 %code;", *fours])


@constexpr_function
def encode_signed_assembly(stochastic: bool, paired: bool = False) -> str:
    """PTX that makes signed codes ($0) of four fp32 numbers ($1 to $4).

    The other operands, four each: factors of their blocks, negative, or 0 where all codes are 0; and, if `stochastic`,
    random words moved down by a byte.
    """
    zero, small = fp32(0.0), fp32(2.0**-113)
    lines = [".reg .b32 %s0, %s1, %s2, %s3, %c0, %c1, %c2, %c3, %upper;"]
    # A zero keeps its sign because the product of its negative and the factor is added to a zero that is negative with
    # the factor. Without a factor, the sum is 0, or NaN, whose pattern 0x7FFFFFFF overflows to 0 below with any noise.
    if paired:
        lines += [".reg .b64 %xx, %factors, %zeros, %small;"]
        lines += [f"mov.b32 %upper, {small}; mov.b64 %small, {{%upper, %upper}};"]
        for i in (0, 2):
            lines += [
                f"mul.rn.f32 %upper, ${5 + i}, {zero}; mov.b64 %zeros, {{%upper, %upper}};",
                f"neg.f32 %s{i}, ${5 + i}; mov.b64 %factors, {{%s{i}, %s{i}}}; mov.b64 %xx, {{${1 + i}, ${2 + i}}};",
                "fma.rn.f32x2 %xx, %xx, %factors, %zeros; mul.rn.f32x2 %xx, %xx, %small;",
                f"mov.b64 {{%c{i}, %c{i + 1}}}, %xx;",
            ]
    else:
        for i in range(4):
            lines += [
                f"mul.rn.f32 %upper, ${5 + i}, {zero}; neg.f32 %c{i}, ${1 + i};",
                f"fma.rn.f32 %c{i}, %c{i}, ${5 + i}, %upper; mul.rn.f32 %c{i}, %c{i}, {small};",
            ]
    for i in range(4):
        noise = f"${9 + i}" if stochastic else str(1 << 23)
        lines += [f"shl.b32 %s{i}, %c{i}, 4; add.u32 %s{i}, %s{i}, {noise};"]
        lines += [f"lop3.b32 %s{i}, %s{i}, %c{i}, 0x7FFFFFFF, {_CHOICE};"]
    return body([EXACT, *lines, *_UPPER_BYTES])


@constexpr_function
def encode_positive_assembly(stochastic: bool) -> str:
    """PTX that makes positive codes ($0) of four positive fp32 numbers ($1 to $4).

    The other operands, four each: the negative bases of their blocks; powers of two that move codes to the upper byte,
    or 0 where all codes are 0; and, if `stochastic`, random words moved down by a byte.
    """
    lines = [".reg .b32 %s0, %s1, %s2, %s3;"]
    for i in range(4):
        noise = f"${13 + i}" if stochastic else str(1 << 23)
        lines += [f"add.s32 %s{i}, ${1 + i}, ${5 + i}; max.s32 %s{i}, %s{i}, 0;"]
        lines += [f"mad.lo.u32 %s{i}, %s{i}, ${9 + i}, {noise};"]
    return body([*lines, *_UPPER_BYTES])


@constexpr_function
def encode_linear_assembly(stochastic: bool) -> str:
    """PTX that makes linear codes ($0) of four fp32 numbers ($1 to $4).

    The other operands, four each: 2^24 / units, or 0 where all codes are 0; and, if `stochastic`, random words moved
    down by a byte. The integer of a NaN is 0.
    """
    lines = [".reg .b32 %s0, %s1, %s2, %s3;"]
    for i in range(4):
        noise = f"${9 + i}" if stochastic else str(1 << 23)
        lines += [f"mul.rn.f32 %s{i}, ${1 + i}, ${5 + i}; cvt.rmi.s32.f32 %s{i}, %s{i}; add.s32 %s{i}, %s{i}, {noise};"]
    return body([*lines, *_UPPER_BYTES])


# The upper bytes of four registers in one.
_UPPER_BYTES = [
    "prmt.b32 %s0, %s0, %s1, 0x0073; prmt.b32 %s2, %s2, %s3, 0x0073;",
    "prmt.b32 $0, %s0, %s2, 0x5410;",
]


@constexpr_function
def _average(new: str, before: str, factor: str, result: str, near: str | None) -> list[str]:
    """A moving average; `near` is the predicate that the factor is positive, None if it is known to be."""
    lines = [f"sub.rn.f32 %d, {new}, {before}; mul.rn.f32 %d, {factor}, %d;"]
    if near is not None:
        lines += [f"selp.f32 %old, {before}, {new}, {near};"]
        before = "%old"
    return [*lines, f"add.rn.f32 {result}, {before}, %d;"]


@constexpr_function
def averages_assembly(paired: bool = False) -> str:
    """PTX that makes the new moments of eight elements ($0 to $7, $8 to $15) by moving averages.

    The operands, eight each: gradients, first moments, second moments, and the factors of both averages, whose signs
    say which form applies, as in adam/rule.py. They are the same for all elements, so that one branch stands for two
    choices per element. The square of a gradient is at most `LARGEST_POSITIVE`.
    """
    n, cap = WEIGHTS, fp32(LARGEST_POSITIVE)
    g, m, v, f1, f2 = ([f"${i}" for i in range(2 * n + part * n, 3 * n + part * n)] for part in range(5))
    square = "mul.rn.f32 %q, {g}, {g}; min.NaN.f32 %q, %q, {cap};"

    def average(i: int, near: tuple[str, str] | tuple[None, None]) -> list[str]:
        first = _average(g[i], m[i], f1[0], f"${i}", near[0])
        return [*first, square.format(g=g[i], cap=cap), *_average("%q", v[i], f2[0], f"${n + i}", near[1])]

    def average_pair(a: int) -> list[str]:
        b = a + 1
        return [
            f"mov.b64 %gg, {{{g[a]}, {g[b]}}}; mov.b64 %mm, {{{m[a]}, {m[b]}}};",
            "sub.rn.f32x2 %dd, %gg, %mm; mul.rn.f32x2 %dd, %f1, %dd; add.rn.f32x2 %mm, %mm, %dd;",
            f"mov.b64 {{${a}, ${b}}}, %mm;",
            "mul.rn.f32x2 %qq, %gg, %gg; mov.b64 {%q, %d}, %qq;",
            f"min.NaN.f32 %q, %q, {cap}; min.NaN.f32 %d, %d, {cap};",
            f"mov.b64 %qq, {{%q, %d}}; mov.b64 %mm, {{{v[a]}, {v[b]}}};",
            "sub.rn.f32x2 %dd, %qq, %mm; mul.rn.f32x2 %dd, %f2, %dd; add.rn.f32x2 %mm, %mm, %dd;",
            f"mov.b64 {{${n + a}, ${n + b}}}, %mm;",
        ]

    lines = [".reg .pred %first, %second;", ".reg .b32 %d, %q, %old;"]
    if paired:
        lines += [".reg .b64 %gg, %mm, %qq, %dd, %f1, %f2;"]
        lines += [f"mov.b64 %f1, {{{f1[0]}, {f1[0]}}}; mov.b64 %f2, {{{f2[0]}, {f2[0]}}};"]
    lines += [f"setp.gt.f32 %first, {f1[0]}, {fp32(0.0)}; setp.gt.f32 %second, {f2[0]}, {fp32(0.0)};"]
    lines += ["and.pred %first, %first, %second; @!%first bra OTHER_${:uid};"]
    for i in range(0, n, 2):
        lines += average_pair(i) if paired else average(i, (None, None)) + average(i + 1, (None, None))
    lines += ["bra AVERAGED_${:uid};", "OTHER_${:uid}:", f"setp.gt.f32 %first, {f1[0]}, {fp32(0.0)};"]
    for i in range(n):
        lines += average(i, ("%first", "%second"))
    return body([EXACT, *lines, "AVERAGED_${:uid}:"])


@constexpr_function
def _single_update(m: str, v: str, new: str, decay: str, root: str, eps: str, step_size: str) -> list[str]:
    """The new weight of one element, whose weight is in %w; its quotient is in %q and the number of `new`."""
    quotient = f"%q{new[2:]}"
    return [
        f"rsqrt.approx.ftz.f32 %r, {v}; mul.rn.f32 %s, {v}, %r; mul.rn.f32 %h, %r, {fp32(0.5)};",
        f"neg.f32 %t, %s; fma.rn.f32 %t, %t, %s, {v}; fma.rn.f32 %s, %t, %h, %s;",
        f"mul.rn.f32 %s, %s, {root}; add.rn.f32 %s, %s, {eps};",
        f"rcp.approx.ftz.f32 %r, %s; neg.f32 %s, %s; fma.rn.f32 %t, %s, %r, {fp32(1.0)}; fma.rn.f32 %r, %r, %t, %r;",
        f"mul.rn.f32 %q, %r, {m}; fma.rn.f32 %t, %s, %q, {m}; fma.rn.f32 {quotient}, %r, %t, %q;",
        f"mul.rn.f32 %t, {decay}, %w; mul.rn.f32 %s, {step_size}, {quotient};",
        f"add.rn.f32 %s, %s, %t; sub.rn.f32 {new}, %w, %s;",
    ]


@constexpr_function
def _paired_update(
    i: int, joined: Callable[[int], list[str]], m: list[str], v: list[str], names: list[str]
) -> list[str]:
    """As `_single_update`, of two elements. These instructions negate nothing, so that signs are chosen where they cost
    least: all are exact."""
    j = i + 1
    return [
        *joined(i), "mov.b32 %u, %w;", *joined(j), "mov.b64 %ww, {%u, %w};",
        f"mov.b64 %vv, {{{v[i]}, {v[j]}}}; neg.f32 %r, {v[i]}; neg.f32 %t, {v[j]}; mov.b64 %uu, {{%r, %t}};",
        f"mov.b64 %mm, {{{m[i]}, {m[j]}}};",
        f"rsqrt.approx.ftz.f32 %r, {v[i]}; rsqrt.approx.ftz.f32 %t, {v[j]}; mov.b64 %rr, {{%r, %t}};",
        "mul.rn.f32x2 %ss, %vv, %rr; mul.rn.f32x2 %hh, %rr, %halves;",
        "fma.rn.f32x2 %tt, %ss, %ss, %uu; fma.rn.f32x2 %ss, %tt, %hh, %ss;",
        "mul.rn.f32x2 %ss, %ss, %roots; add.rn.f32x2 %bb, %ss, %epss;",
        "mov.b64 {%r, %t}, %bb; neg.f32 %r, %r; neg.f32 %t, %t;",
        "rcp.approx.ftz.f32 %r, %r; rcp.approx.ftz.f32 %t, %t; mov.b64 %rr, {%r, %t};",
        "fma.rn.f32x2 %tt, %bb, %rr, %ones; fma.rn.f32x2 %rr, %rr, %tt, %rr;",
        "mul.rn.f32x2 %qq, %rr, %mm; fma.rn.f32x2 %tt, %bb, %qq, %mm; fma.rn.f32x2 %qq, %rr, %tt, %qq;",
        f"mov.b64 {{%q{i}, %q{j}}}, %qq;",
        "mul.rn.f32x2 %tt, %decays, %ww; mul.rn.f32x2 %qq, %steps, %qq;",
        "add.rn.f32x2 %qq, %qq, %tt; sub.rn.f32x2 %qq, %ww, %qq;",
        f"mov.b64 {{{names[i]}, {names[j]}}}, %qq;",
    ]  # fmt: skip


@constexpr_function
def _extreme(instruction: str, registers: list[str]) -> list[str]:
    """Leave the extreme of some registers in the first one; `instruction` takes up to three."""
    first = registers[0]
    return [f"{instruction} {first}, {', '.join([first, *registers[i : i + 2]])};" for i in range(1, len(registers), 2)]


@constexpr_function
def update_assembly(remainder: int, stochastic: bool, paired: bool = False) -> str:
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
    2^-51 to 2^125 and a quotient of 2^-49, no part of the quotient is subnormal or overflows.
    """
    n = WEIGHTS
    of_weights, of_remainders = n if remainder == 0 else n // 2, n * remainder // 32
    outputs = of_weights + of_remainders
    numbers = iter(range(outputs, 1000))

    def take(count: int) -> list[str]:
        return [f"${next(numbers)}" for _ in range(count)]

    m, v, weights, remainders = take(n), take(n), take(of_weights), take(of_remainders)
    words = take(n if stochastic else 0)
    decay, root, eps, step_size = (take(n)[0] for _ in range(4))
    quotient_bounds, smallest = take(n), take(n)

    def joined(i: int) -> list[str]:
        """The weight in %w, its bf16 part in %high."""
        if remainder == 0:
            return [f"mov.b32 %w, {weights[i]};"]
        pair = weights[i // 2]
        high = f"and.b32 %high, {pair}, 0xFFFF0000;" if i % 2 else f"shl.b32 %high, {pair}, 16;"
        if remainder == 16:
            low = remainders[i // 2]
            low = f"shr.s32 %low, {low}, 16;" if i % 2 else f"prmt.b32 %low, {low}, 0, 0x9910;"
        else:
            byte = i % 4
            # The byte one place up, and its sign above.
            low = f"prmt.b32 %low, {remainders[i // 4]}, 0, 0x{8 | byte:X}{8 | byte:X}{byte}4;"
        return [high, low, "add.u32 %w, %high, %low;"]

    names, quotients, sizes = ([f"%{letter}{i}" for i in range(n)] for letter in "nqa")
    lines = [
        ".reg .pred %bad, %here;",
        f".reg .b32 %w, %high, %low, %r, %s, %h, %q, %t, %u, {', '.join(names)};",
        f".reg .b32 {', '.join(quotients + sizes)};",
    ]
    if paired:
        lines += [".reg .b64 %rr, %ss, %hh, %vv, %uu, %mm, %bb, %qq, %tt, %ww, %ones, %halves, %minus;"]
        lines += [".reg .b64 %roots, %epss, %decays, %steps;"]
        for name, number in (("ones", 1.0), ("halves", -0.5), ("minus", -1.0)):
            lines += [f"mov.b32 %t, {fp32(number)}; mov.b64 %{name}, {{%t, %t}};"]
        for name, value in (("roots", root), ("epss", eps)):
            lines += [f"neg.f32 %t, {value}; mov.b64 %{name}, {{%t, %t}};"]
        for name, value in (("decays", decay), ("steps", step_size)):
            lines += [f"mov.b64 %{name}, {{{value}, {value}}};"]
        for i in range(0, n, 2):
            lines += _paired_update(i, joined, m, v, names)
    else:
        for i, new in enumerate(names):
            lines += joined(i) + _single_update(m[i], v[i], new, decay, root, eps, step_size)
    lines += [f"setp.lt.s32 %bad, {smallest[0]}, {_LEAST_SQUARE:#x};"]
    lines += [f"setp.lt.s32 %here, {smallest[4]}, {_LEAST_SQUARE:#x}; or.pred %bad, %bad, %here;"]
    if paired and _HAS_MINIMA_OF_THREE:
        lines += [f"abs.f32 {quotient}, {quotient};" for quotient in quotients]
        lines += [f"abs.f32 {size}, {new};" for size, new in zip(sizes, names, strict=True)]
        lines += _extreme("min.f32", quotients[:4]) + _extreme("min.f32", quotients[4:])
        lines += _extreme("max.NaN.f32", sizes)  # a NaN is in the new weight, however it came about
        quotients, sizes, bounds = quotients[::4], sizes[:1], quotient_bounds[::4]
    else:
        sizes, bounds = names, [quotient_bounds[i // 4 * 4] for i in range(n)]
    for quotient, bound in zip(quotients, bounds, strict=True):
        lines += [f"abs.f32 %u, {quotient}; setp.ltu.f32 %here, %u, {bound}; or.pred %bad, %bad, %here;"]
    for size in sizes:
        lines += [f"abs.f32 %u, {size}; setp.geu.f32 %here, %u, {fp32(float('inf'))}; or.pred %bad, %bad, %here;"]
    lines += ["@!%bad bra USUAL_${:uid};"]
    for i, new in enumerate(names):
        lines += joined(i)
        if remainder:
            lines += ["setp.neu.f32 %here, %w, %w; @%here mov.b32 %w, %high;"]
        lines += [
            f"sqrt.rn.f32 %s, {v[i]}; mul.rn.f32 %s, %s, {root}; add.rn.f32 %s, %s, {eps};",
            f"div.rn.f32 %q, {m[i]}, %s; mul.rn.f32 %q, {step_size}, %q;",
            f"mul.rn.f32 %t, {decay}, %w; abs.f32 %s, %w; setp.eq.f32 %here, %s, {fp32(float('inf'))};",
            f"selp.f32 %t, {fp32(0.0)}, %t, %here; add.rn.f32 %q, %q, %t; sub.rn.f32 {new}, %w, %q;",
        ]
        if remainder:
            lines += [f"min.s32 {new}, {new}, 0x7FC00000;"]
    lines += ["USUAL_${:uid}:"]
    if remainder == 0:
        lines += [f"mov.b32 ${i}, {new};" for i, new in enumerate(names)]
    if remainder == 16:
        for i in range(n // 2):
            lines += [f"prmt.b32 ${of_weights + i}, {names[2 * i]}, {names[2 * i + 1]}, 0x5410;"]
        lines += [f"add.u32 {new}, {new}, 0x8000;" for new in names]
    if remainder == 8:
        # What rounds to 24 bits and what rounds these to 16, 0x8000, in one sum. The latter only inverts the upper bit
        # of the remainder.
        for i, new in enumerate(names):
            if stochastic:
                lines += [f"add.u32 {new}, {new}, {words[i]};"]
            else:
                lines += [f"shr.u32 %t, {new}, 8; and.b32 %t, %t, 1; add.u32 {new}, {new}, %t;"]
                lines += [f"add.u32 {new}, {new}, 0x807F;"]
        for i in range(n // 4):
            a, b, c, d = names[4 * i : 4 * i + 4]
            lines += [f"prmt.b32 %s, {a}, {b}, 0x0051; prmt.b32 %t, {c}, {d}, 0x0051;"]
            lines += [f"prmt.b32 %s, %s, %t, 0x5410; xor.b32 ${of_weights + i}, %s, 0x80808080;"]
    if remainder:
        lines += [f"prmt.b32 ${i}, {names[2 * i]}, {names[2 * i + 1]}, 0x7632;" for i in range(n // 2)]
    return body([EXACT, *lines])


@constexpr_function
def update_constraints(remainder: int, stochastic: bool) -> str:
    """Those of `update_assembly`."""
    weights = WEIGHTS if remainder == 0 else WEIGHTS // 2 + WEIGHTS * remainder // 32
    return constraints(weights, weights + (9 if stochastic else 8) * WEIGHTS)
