"""The explorer's scripts against the lookup in Python: numbers and names read, texts, reasons, comparisons."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from browser import run_script

from halfstep.cli.formats import number_text
from halfstep.cli.formats.compare import pair_words
from halfstep.cli.formats.properties import figures
from halfstep.cli.formats.rules import chances, rule
from halfstep.cli.formats.sentences import words
from halfstep.cli.formats.shared_values import binade_values, shared_values
from halfstep.cli.formats.text import distance, outcome, ulps
from halfstep.cli.formats.values import Stored, encoded, finite, number_dict, special_text
from halfstep.cli.pages.explorer.page import script_of_formats
from halfstep.cli.terminal import Terminal
from halfstep.numerics.formats.exact import (
    NANS,
    Number,
    decode_exact,
    encode_exact,
    neighbours,
    parse_number,
)
from halfstep.numerics.formats.table import Format, custom, formats

FORMS = [*formats.values(), *(formats[name] for name in ("e5m7", "e4m3ieee", "e3m2fnuz", "e4m0finite", "e2m1fn-nan"))]
SHOWN = """
const texts = (x) => x.type === "finite"
  ? `${x.negative ? "-" : ""}${reduced(x).n.toString(16)}/${reduced(x).d.toString(16)}`
  : (x.negative ? "-" : "") + x.type;
const attempt = (make) => { try { return make(); } catch (error) { return error.message; } };
"""


def run(body: str, given: Any, folder: Path, engine: str = "node") -> Any:
    return run_script(engine, script_of_formats() + SHOWN, body, given, folder)


def shown(number: Number) -> str:
    """As `texts` of the script: a fraction in hexadecimal digits, or the kind of another number, with its sign."""
    if isinstance(number, Fraction) and number:
        return f"{number.numerator:x}/{number.denominator:x}"
    sign = "-" if str(float(number)).startswith("-") or (number != number and _signed_nan(float(number))) else ""
    return sign + ("nan" if number != number else "zero" if number == 0 else "inf")


def _signed_nan(number: float) -> bool:
    return math.copysign(1.0, number) < 0


def parsed(text: str) -> str:
    try:
        return shown(parse_number(text))
    except ValueError as error:
        return str(error)


_NUMBERS = """\
0.1|1e-40|1E5|.5|5.|1_000_000|1__0|_1|1_|0x1.8p-3|0X1.8P+3|0x.8|0x8.|0x1p|0x|0x1_0|1/3|-1/3|1/-3|1/0|0/1|-0|+0
--0|-0/1|0*-1|-0+-0|-0-0|-0+0|0-0|2^-24|2**-24|2^1/2|2^(1/2)|0^0|0^-1|-1^2|(-1)^3|(-1)^-2|0**3|2^65536|2^65537
2^-65536|2^-65537|1e19000|1e19001|1e-19728|1e99999999999|0e99999999999|1e+0000000000000000005|0x1p65536
0x1p-65537|0x0p99999|1e19000*1e19000|(1/3)^9000|3^50000/7^100|3^90000|-(1 + 2^-11)|1+2*3|(1+2)*3|((1))|(1|1)|()
1 2|1,5|2.5x|e5|1e|1e5.5|inf|-inf|INF|Infinity|+infinity|infinit|nan|NaN|-nan|nan0|inf+1|nan*2|2^inf|inf^2|1/inf
(inf)|-(inf)|- - 1|\u22121|2\u00d73|\u221e| 1 |\u30001\u00a0|\ufeff1|\x851|\x1c1||  |-|+|.|..|1.2.3|'|"'|\\|\n
a\tb|\u00e9|\U0001f600|\u0661|1\u2028x|Infinity\u0130|2.5 fp16|0x1.8p-3p|1//2|*2|^2|2^|2^^3|2^3^2|2^-3^2|2^--3
2^+3|1e-5e|0b101|0o7|1j|1f|1e5_0|1_0.5|1.5_0|True|None"""
NUMBERS = _NUMBERS.replace("\n", "|").split("|")


def random_texts(count: int) -> list[str]:
    """Texts of the grammar's pieces, most of them wrong somewhere."""
    draw = random.Random(3)
    pieces = ["1", "2.5", ".5", "3.", "1e-3", "0x1.8p-3", "0", "inf", "nan", *"()+-*/^ ", "**"]
    made = ["".join(draw.choices(pieces, k=draw.randint(1, 7))) for _ in range(count)]
    atoms = ["1/3", "-0", "2^-24", "0x.8p4", "12_5", "1e-30", "(1+2^-11)", "7", "-3"]
    operators = ["+", "-", "*", "/", " * ", "-(", "^"]
    for _ in range(count):
        text = "".join(
            f"{draw.choice(atoms)}{draw.choice(operators)}" for _ in range(draw.randint(1, 3))
        ) + draw.choice(atoms)
        made.append(text + ")" * text.count("-("))
    return made


def check_texts(engine: str, count: int, folder: Path) -> int:
    given = [*NUMBERS, "1" * 4000, "1" * 4001, "(" * 50 + "1" + ")" * 50, "(" * 51 + "1" + ")" * 51, "-" * 3000 + "1"]
    given += random_texts(count)
    answers = run("answer(input.map((text) => attempt(() => texts(parseNumber(text)))));", given, folder, engine)
    for text, ours in zip(given, answers, strict=True):
        assert ours == parsed(text), text
    return sum(" is not a number: " in answer for answer in answers)


def test_numbers_are_read_as_in_python(tmp_path: Path) -> None:
    assert 1500 < check_texts("node", 1500, tmp_path) < 2800  # refusals, of 3,100


def named(text: str) -> list[Any]:
    try:
        form = formats[text.strip()]
    except (KeyError, ValueError) as error:
        return [str(error)]
    return [form.name, form.title, form.exponent, form.mantissa, str(form.bias), form.kind, form.bits]


def names_of_formats() -> list[str]:
    made = [*formats, *(alias for form in formats.values() for alias in form.aliases)]
    made += [name.upper() for name in made] + [f"torch.{name}" for name in made] + [f"np.{name}" for name in made]
    made += "fp61 fp8 float8 FP6 float6 e5 m3 e4m3fnu fp_16 tf23 flaot16 int7 i8 uint8 half1 '".split()
    made += ["", " ", "b f 1 6"]
    made += "e12m3 e0m3 e5m53 e1m3 e1m3fn e3m0fn e1m0finite e11m53 e\u0665m7 float13_e5m7".split()
    made += "e5m2fnnan e2m1fn-nan e2m1nan e2m3ieee e2m1ieee e4m3ieee-nan".split()
    made += [f"e{e}m{m}{b}{k}" for e, m, b, k in
             product((1, 2, 3, 4, 5, 8, 11), (0, 1, 2, 3, 7, 10, 52), ("", "b0", "b7", "b15", "b1022", "b1100"),
                     ("", "ieee", "fn", "fnuz", "finite"))]  # fmt: skip
    return made


def test_names_of_formats_are_read_as_in_python(tmp_path: Path) -> None:
    body = """
    const fields = (f) => [f.name, f.title, f.exponent, f.mantissa, `${f.bias}`, f.kind, Number(f.bits)];
    const named = (text) => { try { return fields(formatNamed(text)); } catch (error) { return [error.message]; } };
    answer(input.map(named));
    """
    given = names_of_formats()
    for text, ours in zip(given, run(body, given, tmp_path), strict=True):
        assert ours == named(text), text


def cases(per_format: int) -> list[tuple[str, Format]]:
    """Numbers of each format, its ties and edges, numbers between them, and numbers everywhere."""
    draw, made = random.Random(5), []
    everywhere = "0.1 -0.1 1/3 0 -0 inf -inf nan -nan 1e-400 -1e400 2^-65000 464 65520".split()
    for form in FORMS:
        largest, least = Fraction(form.max), Fraction(form.min_subnormal)
        step = Fraction(neighbours(largest, form).ulp)
        edges = [largest, largest + step / 2, largest + step / 4, largest + step, largest * 9, least / 2, least / 3]
        edges += [least * 3 / 2, Fraction(form.min_normal) * 3 / 4, Fraction(form.lowest) - step / 2]
        numbers = [*edges, *(-edge for edge in edges)]
        for _ in range(per_format):
            value = decode_exact(draw.randrange(form.codes), form)
            if not finite(value):
                continue
            near = Fraction(neighbours(value, form).ulp)
            share = draw.choice(
                [Fraction(0), Fraction(1, 2), Fraction(draw.randrange(1, 2**20), 2**20), Fraction(1, 3)]
            )
            numbers.append(Fraction(value) + share * near)
        made += [(text, form) for text in [*everywhere, *map(str, numbers)]]
    return made


def expected_text(text: str, form: Format, overflow: str) -> list[Any]:
    number = parse_number(text)
    found = encoded(number, form, overflow=overflow)
    around = neighbours(number, form) if finite(number) else None
    decided = rule(found, around)
    stored = found.stored
    screen = Terminal()
    said = [text, form.name, decided, words(found, around, decided, screen), found.outcome, outcome(found, screen)]
    said += [ulps(found), None if stored is None else stored.hex, None if stored is None else stored.text(20)]
    parts = [
        [str(share), "none" if one.stored is None else one.stored.hex] for share, one in chances(number, form, overflow)
    ]
    return [*said, parts]


def check_words(engine: str, per_format: int, folder: Path) -> int:
    body = """
    const codeOrNull = (one) => (one.code === null ? null : codeText(one.code, one.f));
    answer(input.map(([text, name, overflow]) => {
      const [number, f] = [parseNumber(text), formatNamed(name)];
      const found = encoded(number, f, "nearest", { overflow });
      const around = isFinite(number) ? neighbours(number, f) : null;
      const decided = ruleOf(number, f, around);
      const part = ([share, one]) => [ratioText(share), codeOrNull(one) ?? "none"];
      const parts = chances(number, f, { overflow }).map(part);
      return [text, f.name, decided, words(found, around, decided), found.outcome, outcomeText(found), ulpsText(found),
        codeOrNull(found), found.code === null ? null : valueText(found.code, f, 20), parts];
    }));
    """
    given = [
        (text, form.name, overflow)
        for text, form in cases(per_format)
        for overflow in ("inf", "saturate", "nan")
        if overflow != "nan" or form.has_nan
    ]
    for (text, name, overflow), ours in zip(given, run(body, given, folder, engine), strict=True):
        assert ours == expected_text(text, formats[name], overflow), (text, name, overflow)
    return len(given)


def test_reasons_are_those_of_halfstep_why(tmp_path: Path) -> None:
    assert check_words("node", 12, tmp_path) > 2000


@pytest.mark.exhaustive
def test_reasons_are_those_of_halfstep_why_in_chromium(tmp_path: Path) -> None:
    assert check_words("chromium", 1000, tmp_path) > 50_000


@pytest.mark.exhaustive
def test_numbers_are_read_as_in_python_in_chromium(tmp_path: Path) -> None:
    assert check_texts("chromium", 20_000, tmp_path) > 20_000


def test_numbers_are_written_as_in_python(tmp_path: Path) -> None:
    body = """
    answer(input.map((text) => {
      const x = parseNumber(text);
      return [decimal(x), hexFloat(x), ratioText(x), x.type === "zero" ? "0" : rounded(x, 3), x.type === "zero" ? "0"
        : rounded(x, 17), distance(x)];
    }));
    """
    given = [text for text, _ in cases(6) if finite(parse_number(text))]
    given += "999.5 9.995 1e16 1e17 123456789012345678 1e-4 1e-5 0.5000001 1/2 1e2000 2^-5000".split()
    for text, ours in zip(given, run(body, given, tmp_path), strict=True):
        number = parse_number(text)
        exact = Fraction(number)
        forms = number_dict(number)
        decimal = "0" if number == 0 else forms["decimal"]
        rounded = [number_text.rounded(exact, digits) for digits in (3, 17)]
        assert ours == [decimal, forms["hex"], forms["fraction"], *rounded, distance(exact)], text


def test_the_shortest_decimals_of_small_formats(tmp_path: Path) -> None:
    """Of every code: 0.2 and 0.3 both round to 0.25 of e2m3fn, and are as near to it."""
    body = """
    const codes = (f) => Array.from({ length: Number(1n << f.bits) }, (_, code) => shortest(BigInt(code), f));
    answer(input.map((name) => codes(formatNamed(name))));
    """
    names = ["e2m3fn", "e3m2fn", "e2m1fn", "e3m2fnuz", "e1m4finite", "e8m0fnu"]
    for name, ours in zip(names, run(body, names, tmp_path), strict=True):
        assert ours == [Stored(code, formats[name]).shortest for code in range(formats[name].codes)], name


def test_the_greatest_common_divisor(tmp_path: Path) -> None:
    """Of numbers of few and of many bits, with and without a large divisor, and of those that are nearly equal."""
    draw = random.Random(7)
    pairs = [(1, 1), (2**64, 2**64), (2**64 - 1, 2**64), (3**4000, 7**2000), (2**4000, 2**3999 + 1)]
    for bits in (1, 8, 60, 64, 65, 70, 128, 200, 1000, 3000):
        for common in (0, 1, 50, 900):
            pairs += [(draw.getrandbits(bits) + 1 << 0, draw.getrandbits(bits) + 1) for _ in range(4)]
            pairs += [tuple(x * (draw.getrandbits(common) | 1) for x in pairs[-1])]
            big = draw.getrandbits(common) | 1 << common
            pairs += [((draw.getrandbits(bits) | 1) * big, (draw.getrandbits(bits) | 1) * big) for _ in range(4)]
    pairs += [(x, x + 1) for x, _ in pairs] + [(x, 2 * x) for x, _ in pairs]
    body = "answer(input.map(([a, b]) => divisor(BigInt(a), BigInt(b)).toString(16)));"
    answers = run(body, [[hex(one), hex(other)] for one, other in pairs], tmp_path)
    assert answers == [f"{math.gcd(*pair):x}" for pair in pairs]


def test_nans_keep_what_python_keeps(tmp_path: Path) -> None:
    """Codes of NaN encoded again, with every choice of `nan`."""
    body = """
    answer(input.map(([from, code, to, nan]) => attempt(() =>
      encode(decode(BigInt(code), formats[from]), formats[to], "nearest", { nan }).toString())));
    """
    sources = [("fp16", 0x7C01), ("fp16", 0xFE55), ("bf16", 0xFFC3), ("e4m3fn", 0xFF), ("e5m2fnuz", 0x80)]
    sources += [("fp64", 0x7FF0_0000_0000_0001), ("fp64", 0xFFFD_5555_5555_5555), ("e8m0fnu", 0xFF), ("e5m2", 0x7D)]
    given = [(name, str(code), to, nan) for name, code in sources for to in formats for nan in NANS]
    for (name, code, to, nan), ours in zip(given, run(body, given, tmp_path), strict=True):
        try:
            expected = str(encode_exact(decode_exact(int(code), name), to, nan=nan))
        except ValueError as error:
            expected = str(error)
        assert ours == expected, (name, code, to, nan)


def test_overflow_to_nan_is_refused_where_there_is_none(tmp_path: Path) -> None:
    body = """
    const encoded0 = (f) => `${encode(zero(), f, "nearest", { overflow: "nan" })}`;
    answer(Object.values(formats).map((f) => attempt(() => encoded0(f))));
    """
    for form, ours in zip(formats.values(), run(body, None, tmp_path), strict=True):
        try:
            expected = str(encode_exact(0, form, overflow="nan"))
        except ValueError as error:
            expected = str(error)
        assert ours == expected


def test_comparisons_are_those_of_halfstep_compare(tmp_path: Path) -> None:
    body = """
    answer(input.map(([one, other]) => {
      const [a, b] = [formatNamed(one), formatNamed(other)];
      const sum = (i) => binades(a, b).reduce((all, { from, to, counts }) => all + (to - from + 1n) * counts[i], 0n);
      return [figures(a), figures(b), pairWords(a, b), `${sharedValues(a, b)}`, [0, 1].map((i) => `${sum(i)}`)];
    }));
    """
    pairs = [(one.name, other.name) for one, other in combinations(FORMS, 2)]
    for (one, other), ours in zip(pairs, run(body, pairs, tmp_path), strict=True):
        a, b = formats[one], formats[other]
        positive = [str(a.values - 1 >> 1) if a.signed and a.kind == "ieee" else None for a in (a, b)]
        assert ours[:4] == [[list(row) for row in figures(a)], [list(row) for row in figures(b)], pair_words(a, b),
                            str(shared_values(a, b))]  # fmt: skip
        for form, count, infinities in zip((a, b), ours[4], positive, strict=True):
            assert infinities is None or int(count) == int(infinities) - 1, form.name  # without the infinity


@pytest.mark.parametrize(
    ("one", "other"), [("fp16", "bf16"), ("e4m3fn", "e5m2"), ("int8", "e8m0fnu"), ("fp32", "e2m1fn")]
)
def test_numbers_per_binade_are_those_of_python(one: str, other: str, tmp_path: Path) -> None:
    body = """
    const runs = binades(formats[input[0]], formats[input[1]]);
    answer(runs.map(({ from, to, counts }) => [Number(from), Number(to), ...counts.map((count) => `${count}`)]));
    """
    at = -200
    for first, last, *counts in run(body, (one, other), tmp_path):
        assert first >= at
        at = last + 1
        for exponent in range(first, last + 1):
            assert counts[:2] == [str(binade_values(formats[name], exponent)) for name in (one, other)]


def test_values_around_a_number(tmp_path: Path) -> None:
    body = """
    answer(input.map(([text, one, other]) => {
      const [a, b] = [formatNamed(one), formatNamed(other)];
      return valuesAround(parseNumber(text), a, b).map(({ value, codes }) =>
        [texts(value), ...codes.map((code) => (code === null ? null : `${code}`))]);
    }));
    """
    pairs = (("fp16", "bf16"), ("e4m3fn", "e5m2"), ("e8m0fnu", "int8"), ("e5m7", "e2m1fn"))
    given = [(text, *pair) for text in ("0.1", "-3", "0", "1e9", "-1e-9", "465") for pair in pairs]
    for (text, *names), rows in zip(given, run(body, given, tmp_path), strict=True):
        values = [Fraction(*(int(part, 16) for part in value.split("/"))) if "/" in value else Fraction(0)
                  for value, *_ in rows]  # fmt: skip
        assert values == sorted(set(values))
        for value, row in zip(values, rows, strict=True):
            for name, code in zip(names, row[1:], strict=True):
                held = encoded(value, formats[name])
                assert code == (str(held.stored.code) if held.stored and held.outcome == "exact" else None), (text, row)
        for name in names:
            around = neighbours(text, name)
            for value in (around.below, around.above):
                assert value is None or not finite(value) or Fraction(value) in values, (text, name)


# What is said of the modes that `halfstep why` does not explain. The lists are sentences; the last one decides.
MODES = {
    ("0.1", "bf16", "toward_zero"): "Rounding toward zero takes the one nearer to zero: 0.099609375.",
    ("-0.1", "bf16", "up"): "Rounding up takes the upper one: -0.099609375.",
    ("-0.1", "bf16", "down"): "Rounding down takes the lower one: -0.10009765625.",
    ("0.1", "bf16", "odd"): "Rounding to odd takes the one whose last bit is 1, 0 01111011 1001101: 0.10009765625.",
    ("0.1", "bf16", "nearest_away"): "The nearer one is taken: 0.10009765625.",
    ("2.5", "int8", "nearest_away"): "Ties go away from zero: 3.",
    ("464", "e4m3fn", "nearest_away"): "e4m3fn has no infinity: NaN is stored: 0x7f.",
    ("464", "e4m3fn", "up"): "e4m3fn has no infinity: NaN is stored: 0x7f.",
    ("464", "e4m3fn", "down"): "Rounding down takes the lower one: 448.",
    ("481", "e4m3fn", "down"): "Rounding down does not overflow here: 448 is stored, 0x7e.",
    ("500", "e4m3fn", "odd"): "Rounding to odd does not overflow here: 448 is stored, 0x7e.",
    ("-500", "e4m3fn", "up"): "Rounding up does not overflow here: -448 is stored, 0xfe.",
    ("-500", "e4m3fn", "down"): "e4m3fn has no infinity: NaN is stored: 0x7f.",
    ("65519", "fp16", "up"): "Infinity is stored: 0x7c00.",
    ("3", "e8m0fnu", "odd"): "With one significant bit, rounding to odd is rounding toward zero: 2.",
    ("1", "fp16", "up"): "The next ones are 0.99951171875 below and 1.0009765625 above.",
    ("inf", "int8", "down"): "int8 has neither infinity nor NaN: the largest number is stored: 127, 0x7f.",
}


def test_reasons_of_every_rounding_mode(tmp_path: Path) -> None:
    """Those above, and for many numbers that the text names the value that is stored."""
    body = """
    const said = (text, name, mode) => reasons(encoded(parseNumber(text), formatNamed(name), mode));
    const held = (text, name, mode) => encoded(parseNumber(text), formatNamed(name), mode);
    answer([input.fixed.map((words) => said(...words).at(-1)), input.many.map((words) => {
      const one = held(...words);
      return [said(...words), one.code === null ? "" : shown(one.value, one.f), `${one.code}`];
    })]);
    """
    modes = ("nearest_away", "toward_zero", "up", "down", "odd")
    many = [(text, form.name, mode) for text, form in cases(2) for mode in modes]
    fixed, free = run(body, {"fixed": list(MODES), "many": many}, tmp_path)
    assert fixed == list(MODES.values())
    for (text, name, mode), (sentences, value, code) in zip(many, free, strict=True):
        number, form = parse_number(text), formats[name]
        if number != number and not form.has_nan:
            assert code == "null"
            continue
        assert code == str(encode_exact(number, form, mode)), (text, name, mode)
        stored = Stored(int(code), form)
        last = " ".join(sentences[-2:])
        if stored.sort in ("nan", "infinity") or not finite(number):
            assert "is stored" in last or special_text(stored.value) in last, (text, name, mode, sentences)
        elif not (sentences[0].startswith("It is a number") or "has no zero" in last):
            assert value in last or "becomes zero" in last, (text, name, mode, sentences)


def test_why_a_number_is_not_one_of_the_format(tmp_path: Path) -> None:
    """The first sentence, where it is about the number itself."""
    expected = {
        ("0.1", "bf16"): "The number is 1/10 in lowest terms, and 10 is not a power of two: no binary format has it "
        "exactly.",
        ("-1/3", "e4m3fn"): "The number is -1/3 in lowest terms, and 3 is not a power of two: no binary format has it "
        "exactly.",
        ("0.1234567890123", "fp32"): "In lowest terms its denominator is not a power of two: no binary format has it "
        "exactly.",
        ("1.00390625", "bf16"): "The number has 9 significant bits, and bf16 has 8.",
        ("-4097", "fp16"): "The number has 13 significant bits, and fp16 has 11.",
        ("2.5", "int8"): "The number is not an integer, and int8 has integers only.",
        ("1", "bf16"): "It is a number of bf16: nothing is rounded.",
        ("3", "e8m0fnu"): "The numbers of e8m0fnu are powers of two.",
        ("2^-30", "fp16"): "Below 2^-14 the numbers of fp16 are subnormal, all 2^-24 = 5.9604644775390625e-8 apart: "
        "1 ulp. This one is smaller than the least of them.",
    }  # fmt: skip
    body = "answer(input.map(([text, name]) => reasons(encoded(parseNumber(text), formats[name]))[0]));"
    assert run(body, list(expected), tmp_path) == list(expected.values())


def test_flushed_subnormals_are_named(tmp_path: Path) -> None:
    body = """
    const found = encoded(parseNumber("1e-40"), formats.bf16, "nearest", { subnormals: false });
    answer(reasons(found).at(-1));
    """
    assert run(body, None, tmp_path) == "Subnormal results are flushed to zero: 0x0000 is stored."


def test_the_usual_bias_and_names_hold_for_all_fields() -> None:
    """The grid of `names_of_formats` has formats that can be made, and some that cannot."""
    answers = [named(text) for text in names_of_formats()]
    assert sum(len(answer) > 1 for answer in answers) > 500 < sum(len(answer) == 1 for answer in answers) * 2
    assert custom(5, 7).name == "e5m7"
