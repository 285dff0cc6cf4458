"""``halfstep format, encode, decode, why, compare, ladder``: what a format can hold, what a number becomes in it.

Each command has a function that answers it, and a row of `_LOOKUPS` with its command line.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rich.text import Text

from halfstep.cli import command_line, numbers
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats import arguments, compare, implementations, number_text, properties, rules, sentences
from halfstep.cli.formats.arguments import Code, Given
from halfstep.cli.formats.screen import bits, coloured_outcome, number_line
from halfstep.cli.formats.text import notations, ulps
from halfstep.cli.formats.values import Encoded, Stored, code_text, encoded, finite, number_dict, overflows
from halfstep.cli.terminal import Table, joined, show, text, width
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, Neighbours, encode_exact, neighbours
from halfstep.numerics.formats.parse import parse_number
from halfstep.numerics.formats.table import Format, formats

_FEW = 4  # formats, up to which encode has room for a line with all digits of each


class Answer(NamedTuple):
    """The answer of a command: its parsed input, and functions for the results in JSON and what the screen shows."""

    input: dict[str, Any]
    results: Callable[[], list[dict[str, Any]]]
    screen: Callable[[], Iterable[Any]]


def _names(chosen: Iterable[Format]) -> list[str]:
    return [format.name for format in chosen]


def _fitting(*tables: Table) -> Table:
    """The first table that fits the screen; the last one if none does."""
    return next((table for table in tables if table.width <= width()), tables[-1])


def _elsewhere(rows: Iterable[Encoded]) -> list[Any]:
    """The implementations that store another value."""
    cells = [
        (one.format.name if not place else "", conversion.text, conversion.who)
        for one in rows
        for place, conversion in enumerate(implementations.conversions(one.number, one.format))
    ]
    return [text("elsewhere, from the nearest float64", "faint"), Table((), cells)] if cells else []


def _elsewhere_dicts(one: Encoded) -> list[dict[str, Any]]:
    return [conversion.as_dict() for conversion in implementations.conversions(one.number, one.format)]


# ------------------------------------------------------------------------------------------------------------- format


def _format(options: argparse.Namespace) -> Answer:
    chosen = arguments.distinct(options.named)
    shown = _properties if len(chosen) == 1 else _limits
    return Answer({"formats": _names(chosen)}, lambda: list(map(properties.format_dict, chosen)), lambda: shown(chosen))


def _properties(chosen: Sequence[Format]) -> list[Any]:
    """All properties of one format."""
    rows = [*properties.names(chosen[0]), *properties.figures(chosen[0])]
    cells = [(text(f"  {name}", "faint"), value) for name, value in rows]
    return [joined(text(chosen[0].name, "strong"), f": {chosen[0].title}"), Table((), cells, wraps=1)]


def _limits(chosen: Sequence[Format]) -> list[Any]:
    """One row per format; with overflow, integers and the name in torch if they fit."""
    header = ("format", "s/e/m", "largest", "min normal", "least", "eps", "digits", "has")
    rows, wide = [], []
    for one in chosen:
        limits = (one.max, one.min_normal, one.min_subnormal, one.eps)
        digits = f"{one.digits10}-{one.max_digits10}"
        row = [one.name, properties.fields(one), *map(properties.short, limits), digits, properties.special(one)]
        rows.append(row)
        wide.append([*row, properties.overflow(one), properties.integers(one), one.torch or "-"])
    right = {2, 3, 4, 5, 6, 9}
    return [_fitting(Table((*header, "overflow", "integers to", "torch"), wide, right), Table(header, rows, right))]


# ------------------------------------------------------------------------------------------------------------- encode


def _encode(options: argparse.Namespace) -> Answer:
    if options.seed is not None and options.rounding != "stochastic":
        raise UsageError(
            f"--seed {options.seed} draws nothing with --rounding {options.rounding}; leave it out, or pass --rounding "
            "stochastic"
        )
    chosen = arguments.distinct(options.formats)
    modes = options.rounding, options.overflow, options.seed
    rows = [(given, [encoded(given.number, format, *modes) for format in chosen]) for given in options.numbers]
    usual = modes[:2] == ("nearest", "inf")

    def results() -> list[dict[str, Any]]:
        return [
            {"input": given.as_dict(), **one.as_dict(), "elsewhere": _elsewhere_dicts(one) if usual else []}
            for given, row in rows
            for one in row
        ]

    def screen() -> list[Any]:
        parts: list[Any] = []
        for given, row in rows:
            parts += [*([""] if parts else []), text(notations(given), "strong"), *_encoded(row)]
            parts += [line for one in row if (line := _digits(one))] if len(chosen) <= _FEW else []
            parts += _elsewhere(row) if usual else []
        return parts

    about = {"numbers": [given.text for given in options.numbers], "formats": _names(chosen)}
    return Answer(about | dict(zip(("rounding", "overflow", "seed"), modes, strict=True)), results, screen)


def _encoded(row: Sequence[Encoded]) -> list[Any]:
    """A table; on a narrow screen without hexadecimal floats, and with wide codes below it."""

    def cells(one: Encoded, narrow: bool) -> list[Any]:
        stored, spread = one.stored, narrow and one.format.bits > 16  # whose codes are below
        code: list[Any] = ["-", "", ""]
        if stored is not None:
            code = [*(("", "") if spread else (stored.hex, bits(stored))), stored.text(16 if narrow else 24)]
        hexadecimal = "" if stored is None else number_dict(stored.value)["hex"] or ""
        return [one.format.name, *code, *([] if narrow else [hexadecimal]), ulps(one), coloured_outcome(one)]

    header = ("format", "code", "bits", "stored", "hex float", "ulps", "outcome")
    wide = Table(header, [cells(one, False) for one in row], {5})
    if wide.width <= width():
        return [wide]
    below = [(one.format.name, one.stored.hex, bits(one.stored)) for one in row if one.stored and one.format.bits > 16]
    parts = [Table((*header[:4], *header[5:]), [cells(one, True) for one in row], {4})]
    return [*parts, Table((), below, wraps=2)] if below else parts


def _digits(one: Encoded) -> str:
    """A line with all digits of a number; empty if it is exact."""
    if one.stored is None or not one.error:
        return ""
    whole, exact = number_text.decimal(one.error), number_dict(one.stored.value)
    value = " = ".join(digits for digits in (exact["decimal"], exact["hex"]) if digits and len(digits) <= 60)
    error = whole if whole is not None and len(whole) <= 30 else f"≈{number_text.rounded(one.error, 6)}"
    relative = "" if one.relative is None else f", {number_text.rounded(one.relative * 100, 3)} %"
    return f"{one.format.name}: {value}, shortest {one.stored.shortest}; error {error}{relative}"


# ------------------------------------------------------------------------------------------------------------- decode


def _read_in(given: Code, options: argparse.Namespace) -> list[Stored]:
    """A code in the chosen formats.

    Raises:
        UsageError: it is not a code of one of them.
    """
    bits = None if options.width is None else int(options.width)
    chosen = arguments.distinct(options.formats) if options.formats else []
    for format in chosen:
        if bits not in (None, format.bits):
            raise UsageError(f"--width {bits} is not the {format.bits} bits of --format {format.name}; leave one out")
    if not chosen:
        bits = bits or given.width
        chosen = [format for format in formats.values() if format.bits == bits]
    for format in chosen:
        if given.code >= format.codes:
            raise UsageError(
                f"argument CODE: expected a code of {format.name} from 0x0 to {format.codes - 1:#x}, but got "
                f"{given.text}" + ("; a wider one is chosen with --width or --format" if given.code < 1 << 64 else "")
            )
    return [Stored(given.code, format) for format in chosen]


def _decode(options: argparse.Namespace) -> Answer:
    rows = [(given, _read_in(given, options)) for given in options.codes]

    def results() -> list[dict[str, Any]]:
        return [{"input": {"text": given.text}, **stored.as_dict()} for given, row in rows for stored in row]

    def screen() -> list[Any]:
        parts: list[Any] = []
        for given, row in rows:
            widths = {stored.format.bits for stored in row}
            title = f"{given.text}, {widths.pop()} bits" if len(widths) == 1 else given.text
            parts += [*([""] if parts else []), text(title, "strong")]
            parts.append(_fitting(*(_decoded(row, digits) for digits in (44, 24, 16))))
        return parts

    about = {
        "codes": [given.text for given in options.codes],
        "formats": list(dict.fromkeys(stored.format.name for _, row in rows for stored in row)),
        "width": options.width and int(options.width),
    }
    return Answer(about, results, screen)


def _decoded(row: Sequence[Stored], digits: int) -> Table:
    styles = {"subnormal": "note", "zero": "faint", "infinity": "bad", "nan": "bad"}
    cells = [
        (
            *(stored.format.name, bits(stored), stored.text(digits), number_dict(stored.value)["hex"] or ""),
            text(stored.sort, styles.get(stored.sort, "")),
        )
        for stored in row
    ]
    return Table(("format", "bits", "value", "hex float", "class"), cells)


# ---------------------------------------------------------------------------------------------------------------- why


def _why(options: argparse.Namespace) -> Answer:
    if not options.named + options.formats:
        raise UsageError("argument FORMAT: none is named; name one or more, as in: halfstep why 1.0001 fp16")
    chosen, given = arguments.distinct(options.named + options.formats), options.number
    modes = options.rounding, options.overflow
    rows = [encoded(given.number, format, *modes) for format in chosen]

    def screen() -> list[Any]:
        parts: list[Any] = []
        for one in rows:
            parts += [*(["", ""] if parts else []), *_explained(given, one, *modes)]
        return parts

    about = {"number": given.text, "formats": _names(chosen), "rounding": modes[0], "overflow": modes[1]}
    return Answer(about, lambda: [_why_dict(given, one, *modes) for one in rows], screen)


def _explained(given: Given, one: Encoded, rounding: str, overflow: str) -> list[Any]:
    around = neighbours(one.number, one.format) if finite(one.number) else None
    decided, stored = rules.rule(one, around), one.stored
    title = joined(text(given.text, "strong"), f" in {one.format.name} is ")
    if stored is None:
        title.append("nothing")
    else:
        title = joined(title, f"{sentences.text(stored.value, one.format)}, {stored.hex} = ", bits(stored))
    parts: list[Any] = [joined(title, ": ", coloured_outcome(one), f", {ulps(one)} ulp" if one.error else ""), ""]
    picture = [] if around is None else _between(one, around, given)
    parts += [*picture, ""] if picture else []
    parts += sentences.reasons(one, rounding)
    if around is not None and not around.exact and decided not in ("sign", "least"):
        parts += ["", _roundings(one, overflow)]
    for twice in rules.double_roundings(one.number, one.format) if rounding == "nearest" else []:
        parts += ["", joined(text("note", "note"), f" {sentences.double_rounding_words(twice, one)}")]
    others = _elsewhere([one]) if (rounding, overflow) == ("nearest", "inf") else []
    return [*parts, *([""] if others else []), *others]


def _between(one: Encoded, around: Neighbours, given: Given) -> list[Text]:
    """The number line, if the number is between two numbers of the format or beyond the largest one."""
    format, exact = one.format, Fraction(one.number)
    low, high = rules.ends_around(one, around)
    if around.exact or (format.kind == "scale" and exact < 0) or overflows(low if exact > 0 else high, format):
        return []

    def end(value: Fraction) -> tuple[str, str]:
        if overflows(value, format) or (value == 0 and not format.has_zero):
            return sentences.text(value, format), f"not in {format.name}"
        code = encode_exact(value if value or exact > 0 else -0.0, format)
        return sentences.text(value, format), code_text(code, format)

    value = None if one.stored is None else one.stored.value
    stored = int(value == high) if value in (low, high) else None
    number = given.text if len(given.text) <= 24 else sentences.text(one.number, format)
    middle, position = sentences.text((low + high) / 2, format), (exact - low) / (high - low)
    return number_line(width(), (end(low), end(high)), middle, number, position, stored)


def _roundings(one: Encoded, overflow: str) -> Table:
    """The value that each rounding mode stores."""
    rows: list[tuple[str | Text, ...]] = []
    for rounding in ENCODE_ROUNDINGS[:-1]:
        other = encoded(one.number, one.format, rounding, overflow)
        if other.stored is not None:
            value = sentences.text(other.stored.value, one.format)
            rows.append((rounding, other.stored.hex, value, ulps(other), coloured_outcome(other)))
    for place, (share, end) in enumerate(rules.chances(one.number, one.format, overflow)):
        stored = end.stored
        code, value = ("", "no NaN") if stored is None else (stored.hex, sentences.text(stored.value, one.format))
        error, chance = ulps(Encoded(one.number, one.format, stored)), number_text.rounded(share * 100, 6)
        rows.append(("" if place else "stochastic", code, value, error, f"with {chance} %"))
    return Table(("rounding", "code", "stored", "ulps", "outcome"), rows, {3})


def _code_of(one: Encoded) -> str | None:
    return None if one.stored is None else one.stored.hex


def _why_dict(given: Given, one: Encoded, rounding: str, overflow: str) -> dict[str, Any]:
    around = neighbours(one.number, one.format) if finite(one.number) else None
    sides: dict[str, Any] = dict.fromkeys(("below", "above", "midpoint", "ulp"))
    if around is not None:
        for name, code in (("below", around.code_below), ("above", around.code_above)):
            sides[name] = None if code is None else Stored(code, one.format).as_dict()
        sides["midpoint"] = None if around.midpoint is None else number_dict(around.midpoint)
        sides["ulp"] = number_dict(around.ulp)
    return {
        "input": given.as_dict(),
        **one.as_dict(),
        "rule": rules.rule(one, around),
        "explanation": sentences.reasons(one, rounding),
        **sides,
        "roundings": {
            mode: _code_of(encoded(one.number, one.format, mode, overflow)) for mode in ENCODE_ROUNDINGS[:-1]
        },
        "stochastic": [
            {"code": _code_of(end), "probability": str(share)}
            for share, end in rules.chances(one.number, one.format, overflow)
        ],
        "rounded_twice": [
            {"via": _names(twice.via), **twice.found.as_dict()}
            for twice in (rules.double_roundings(one.number, one.format) if rounding == "nearest" else [])
        ],
        "elsewhere": _elsewhere_dicts(one) if (rounding, overflow) == ("nearest", "inf") else [],
    }


# ------------------------------------------------------------------------------------------------- compare and ladder


def _compare(options: argparse.Namespace) -> Answer:
    chosen = arguments.distinct(options.named)
    if len(chosen) < 2:
        raise UsageError(
            f"argument FORMAT: {chosen[0].name} alone cannot be compared; name two or more, as in: halfstep compare "
            "fp16 bf16"
        )
    pairs = list(itertools.combinations(chosen, 2))
    numbers = [Given(number, parse_number(number)) for number in compare.examples(chosen)]

    def results() -> dict[str, Any]:
        examples = [(given, encoded(given.number, format)) for given in numbers for format in chosen]
        return {
            "formats": [properties.format_dict(format) for format in chosen],
            "pairs": [compare.pair_dict(*pair) for pair in pairs],
            "examples": [{"input": given.as_dict(), **one.as_dict()} for given, one in examples],
        }

    def screen() -> list[Any]:
        rows = [
            [text(name, "faint"), *(text(value, "strong" if len(set(values)) > 1 else "") for value in values)]
            for name, *values in _side_by_side(chosen)
        ]
        words = [
            joined(text(f"{one.name}, {other.name}", "strong"), f": {' '.join(compare.pair_words(one, other))}")
            for one, other in pairs
        ]
        examples = [(given.text, *(_example(given, format) for format in chosen)) for given in numbers]
        tables = Table(("", *_names(chosen)), rows), Table(("number", *_names(chosen)), examples)
        return [tables[0], "", *words, "", tables[1]]

    return Answer({"formats": _names(chosen)}, lambda: [results()], screen)


def _side_by_side(chosen: Sequence[Format]) -> list[tuple[str, ...]]:
    columns = [properties.figures(format) for format in chosen]
    rows = [(row[0][0], *(value for _, value in row)) for row in zip(*columns, strict=True)]
    return [row for row in rows if row[0] != "codes"]


def _example(given: Given, format: Format) -> Text:
    one = encoded(given.number, format)
    return joined("-" if one.stored is None else one.stored.text(15), " ", coloured_outcome(one))


def _ladder(options: argparse.Namespace) -> Answer:
    from halfstep.cli.formats import pictures

    kinds = list(pictures.PICTURES) if options.kind == "all" else [options.kind]
    chosen, codes, out = arguments.distinct(options.named + options.formats), options.codes, str(options.out)
    pictures.draw(kinds, chosen, codes, options.out)
    about = {"out": out, "kind": options.kind, "formats": _names(chosen), "codes": codes.name}
    results = [
        {"file": out, "kind": kind, "formats": [codes.name] if kind == "codes" else _names(chosen)} for kind in kinds
    ]
    return Answer(about, lambda: results, lambda: [f"{out}: {', '.join(kinds)}"])


# ------------------------------------------------------------------------------------------------------- command lines


class _Lookup(NamedTuple):
    answer: Callable[[argparse.Namespace], Answer]
    description: str
    epilog: str
    options: Sequence[tuple[tuple[str, ...], dict[str, Any]]]


def _option(*names: str, **how: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, how


def _named(nargs: str, help: str, metavar: str = "FORMAT") -> tuple[tuple[str, ...], dict[str, Any]]:
    return _option("named", nargs=nargs, type=arguments.format_named, metavar=metavar, help=help)


_WIDTHS = list(map(str, arguments.WIDTHS))
_KINDS = ("range", "density", "codes", "all")
_LOOKUPS = {
    "format": _Lookup(
        _format,
        "Show range, spacing, digits and special values of number formats. One name shows all of its properties.",
        f"Formats: {', '.join(formats)},\nby any usual name, and your own by their fields, such as e5m7 or e4m3fnuz.\n"
        "example: halfstep format fp16",
        [_named("*", "formats (default: all)", "NAME")],
    ),
    "encode": _Lookup(
        _encode,
        "Round numbers to every format, and show the code, its fields, the stored value and the error in ulps.",
        "Numbers are read exactly, not as floats: 2.5, 1e-7, 1/3, 2^-24, 0x1.8p-3, -(1 + 2^-11), inf, nan.\n"
        "example: halfstep encode 2.5 -f fp16 bf16",
        [
            _option("numbers", nargs="+", type=arguments.number("formats come after -f"), metavar="NUMBER"),
            arguments.formats_option("formats to use; several names, or several times (default: all)"),
            arguments.rounding_option(ENCODE_ROUNDINGS),
            arguments.OVERFLOW,
            _option(
                "--seed", type=numbers.whole(0), metavar="N", help="of --rounding stochastic, to draw the same again"
            ),
        ],
    ),
    "decode": _Lookup(
        _decode,
        "Show the value of a code in every format of its width.",
        "The number of digits gives the width: 0x41 has 8 bits, 0x0041 16, 0b000001 6. A decimal has the smallest of "
        "8, 16, 32 or 64 bits that holds it. --width and --format override the width.\nexample: halfstep decode 0x4100",
        [
            _option("codes", nargs="+", type=arguments.code, metavar="CODE", help="bits: 0x4100, 0b… or a decimal"),
            arguments.formats_option("formats to use; several names, or several times (default: all of the width)"),
            _option("-w", "--width", choices=_WIDTHS, metavar="BITS", help=f"bits of the code: {', '.join(_WIDTHS)}"),
        ],
    ),
    "why": _Lookup(
        _why,
        "Explain how a number is rounded: its neighbours, the point halfway between them, and the rule that decides.",
        "example: halfstep why 1.0001 fp16",
        [
            _option("number", type=arguments.number("the number comes first"), metavar="NUMBER"),
            _named("*", "one or more formats"),
            arguments.formats_option("the same, as in halfstep encode"),
            arguments.rounding_option(ENCODE_ROUNDINGS[:-1]),
            arguments.OVERFLOW,
        ],
    ),
    "compare": _Lookup(
        _compare,
        "Compare the properties of formats, count the values that they share, and show numbers that differ.",
        "example: halfstep compare fp16 bf16",
        [_named("+", "two or more")],
    ),
    "ladder": _Lookup(
        _ladder,
        "Draw the range of formats, the number of values between powers of two, and every code of a small format.",
        "Needs matplotlib: pip install 'halfstep[plots]'.\nexample: halfstep ladder --out formats.png",
        [
            _option("--out", required=True, type=command_line.picture, metavar="FILE", help="a .png, .svg or .pdf"),
            _named("*", "formats of range and density (default: all)"),
            _option("--kind", choices=_KINDS, default="all", metavar="KIND", help=", ".join(_KINDS)),
            arguments.formats_option("the same, as in halfstep encode"),
            _option("--codes", type=arguments.small_format, default="e4m3fn", metavar="FORMAT", help="up to 8 bits"),
        ],
    ),
}


def main(argv: Sequence[str], command: str) -> int:
    """Run ``halfstep COMMAND`` with these arguments. Returns the exit status."""
    lookup = _LOOKUPS[command]
    parser = arguments.LookupParser(command, lookup.description, lookup.epilog)
    for names, how in lookup.options:
        parser.add_argument(*names, **how)

    def carry_out(options: argparse.Namespace) -> None:
        answer = lookup.answer(options)
        if options.json:
            import json  # what only some need is not what all wait for

            content = {"command": command, "input": answer.input, "results": answer.results()}
            print(json.dumps(content, indent=2, allow_nan=False), flush=True)
        else:
            show(*answer.screen())

    return command_line.run(parser, argv, carry_out)
