"""``halfstep format, encode, decode, why, compare, ladder``: what a format can hold, what a number becomes in it.

Each command is a function, below its command line.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from halfstep.cli import command_line, numbers
from halfstep.cli.command_line import UsageError
from halfstep.cli.figures import INSTALL
from halfstep.cli.formats import arguments, compare, implementations, properties, screen, sentences
from halfstep.cli.formats.arguments import OVERFLOW, Code, Typed, formats_option, option, rounding_option
from halfstep.cli.formats.number_text import number_dict
from halfstep.cli.formats.values import Encoded, Stored, chances, double_roundings, encoded, finite
from halfstep.cli.terminal import Table, joined, text
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, neighbours, parse_number
from halfstep.numerics.formats.table import Format, formats

_FEW = 4  # formats, up to which encode has room for a line with all digits of each


class Answer(NamedTuple):
    """The answer of a command: its parsed input, and functions for the results in JSON and what the screen shows."""

    input: dict[str, Any]
    results: Callable[[], list[dict[str, Any]]]
    screen: Callable[[], Iterable[Any]]


class _Lookup(NamedTuple):
    answer: Callable[[argparse.Namespace], Answer]
    description: str
    epilog: str
    options: Sequence[arguments.Option]


_LOOKUPS: dict[str, _Lookup] = {}


def _command(name: str, description: str, epilog: str, *options: arguments.Option) -> Callable[..., Any]:
    """Register the function below as the answer of a command."""

    def register(answer: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
        _LOOKUPS[name] = _Lookup(answer, description, epilog, options)
        return answer

    return register


def main(argv: Sequence[str], command: str) -> int:
    """Run ``halfstep COMMAND`` with these arguments. Returns the exit status."""
    lookup = _LOOKUPS[command]
    parser = arguments.LookupParser(command, lookup.description, lookup.epilog)
    for names, settings in lookup.options:
        parser.add_argument(*names, **settings)

    def carry_out(options: argparse.Namespace) -> None:
        about, results, screen = lookup.answer(options)
        command_line.answer(options, lambda: {"command": command, "input": about, "results": results()}, screen)

    return command_line.run(parser, argv, carry_out)


def _named(nargs: str, help: str, metavar: str = "FORMAT") -> arguments.Option:
    return option("named", nargs=nargs, type=arguments.family, metavar=metavar, help=help)


def _names(chosen: Iterable[Format]) -> list[str]:
    return [format.name for format in chosen]


def _apart(blocks: Iterable[Iterable[Any]], *between: str) -> list[Any]:
    """The lines of blocks, with empty ones between two of them."""
    return [line for index, block in enumerate(blocks) for line in (*(between if index else ()), *block)]


def _elsewhere(result: Encoded) -> list[dict[str, Any]]:
    return [conversion.as_dict() for conversion in implementations.conversions(result.number, result.format)]


@_command(
    "format",
    "Show range, spacing, digits and special values of number formats. One name shows all of its properties.",
    f"Formats: {', '.join(formats)},\nby any usual name, and your own by their fields, such as e5m7 or e4m3fnuz.\n"
    "example: halfstep format fp16",
    _named("*", "formats (default: all)", "NAME"),
)
def _format(options: argparse.Namespace) -> Answer:
    chosen = arguments.distinct(options.named)
    shown = screen.all_properties if len(chosen) == 1 else screen.limits
    return Answer({"formats": _names(chosen)}, lambda: list(map(properties.format_dict, chosen)), lambda: shown(chosen))


@_command(
    "encode",
    "Round numbers to every format, and show the code, its fields, the stored value and the error in ulps.",
    "Numbers are read exactly, not as floats: 2.5, 1e-7, 1/3, 2^-24, 0x1.8p-3, -(1 + 2^-11), inf, nan.\n"
    "example: halfstep encode 2.5 -f fp16 bf16",
    option("numbers", nargs="+", type=arguments.number("formats come after -f"), metavar="NUMBER"),
    formats_option("formats to use; several names, or several times (default: all)"),
    rounding_option(ENCODE_ROUNDINGS),
    OVERFLOW,
    option("--seed", type=numbers.whole(0), metavar="N", help="of --rounding stochastic, to draw the same again"),
)
def _encode(options: argparse.Namespace) -> Answer:
    if options.seed is not None and options.rounding != "stochastic":
        raise UsageError(
            f"--seed {options.seed} draws nothing with --rounding {options.rounding}; leave it out, or pass --rounding "
            "stochastic"
        )
    chosen = arguments.distinct([options.formats])
    modes = options.rounding, options.overflow, options.seed
    rows = [(typed, [encoded(typed.number, format, *modes) for format in chosen]) for typed in options.numbers]
    usual = modes[:2] == ("nearest", "inf")

    def results() -> list[dict[str, Any]]:
        return [
            {"input": typed.as_dict(), **result.as_dict(), "elsewhere": _elsewhere(result) if usual else []}
            for typed, row in rows
            for result in row
        ]

    def shown(typed: Typed, row: Sequence[Encoded]) -> list[Any]:
        digits = [line for result in row for line in screen.all_digits(result)] if len(chosen) <= _FEW else []
        others = screen.elsewhere(row) if usual else []
        return [text(typed.notations, "strong"), *screen.encodings(row), *digits, *others]

    about = {"numbers": [typed.text for typed in options.numbers], "formats": _names(chosen)}
    about |= dict(zip(("rounding", "overflow", "seed"), modes, strict=True))
    return Answer(about, results, lambda: _apart(itertools.starmap(shown, rows), ""))


def _read_in(typed: Code, options: argparse.Namespace) -> list[Stored]:
    """A code in the chosen formats.

    Raises:
        UsageError: it is not a code of one of them.
    """
    bits = None if options.width is None else int(options.width)
    chosen = arguments.distinct([options.formats]) if options.formats else []
    for format in chosen:
        if bits not in (None, format.bits):
            raise UsageError(f"--width {bits} is not the {format.bits} bits of --format {format.name}; leave one out")
    if not chosen:
        bits = bits or typed.width
        chosen = [format for format in formats.values() if format.bits == bits]
    for format in chosen:
        if typed.code >= format.codes:
            raise UsageError(
                f"argument CODE: expected a code of {format.name} from 0x0 to {format.codes - 1:#x}, but got "
                f"{typed.text}" + ("; a wider one is chosen with --width or --format" if typed.code < 1 << 64 else "")
            )
    return [Stored(typed.code, format) for format in chosen]


_WIDTHS = list(map(str, arguments.WIDTHS))


@_command(
    "decode",
    "Show the value of a code in every format of its width.",
    "The number of digits gives the width: 0x41 has 8 bits, 0x0041 16, 0b000001 6. A decimal has the smallest of 8, "
    "16, 32 or 64 bits that holds it. --width and --format override the width.\nexample: halfstep decode 0x4100",
    option("codes", nargs="+", type=arguments.code, metavar="CODE", help="bits: 0x4100, 0b… or a decimal"),
    formats_option("formats to use; several names, or several times (default: all of the width)"),
    option("-w", "--width", choices=_WIDTHS, metavar="BITS", help=f"bits of the code: {', '.join(_WIDTHS)}"),
)
def _decode(options: argparse.Namespace) -> Answer:
    rows = [(typed, _read_in(typed, options)) for typed in options.codes]

    def results() -> list[dict[str, Any]]:
        return [{"input": {"text": typed.text}, **stored.as_dict()} for typed, row in rows for stored in row]

    def shown(typed: Code, row: Sequence[Stored]) -> list[Any]:
        widths = {stored.format.bits for stored in row}
        title = f"{typed.text}, {widths.pop()} bits" if len(widths) == 1 else typed.text
        return [text(title, "strong"), screen.decodings(row)]

    about = {
        "codes": [typed.text for typed in options.codes],
        "formats": list(dict.fromkeys(stored.format.name for _, row in rows for stored in row)),
        "width": options.width and int(options.width),
    }
    return Answer(about, results, lambda: _apart(itertools.starmap(shown, rows), ""))


@_command(
    "why",
    "Explain how a number is rounded: its neighbours, the point halfway between them, and the rule that decides.",
    "example: halfstep why 1.0001 fp16",
    option("number", type=arguments.number("the number comes first"), metavar="NUMBER"),
    _named("*", "formats (default: all)"),
    formats_option("the same, as in halfstep encode"),
    rounding_option(ENCODE_ROUNDINGS[:-1]),
    OVERFLOW,
)
def _why(options: argparse.Namespace) -> Answer:
    chosen, typed = arguments.distinct(options.named, options.formats), options.number
    modes = options.rounding, options.overflow
    rows = [encoded(typed.number, format, *modes) for format in chosen]
    about = {"number": typed.text, "formats": _names(chosen), "rounding": modes[0], "overflow": modes[1]}
    return Answer(
        about,
        lambda: [_why_dict(typed, result, *modes) for result in rows],
        lambda: _apart((screen.explanation(typed, result, *modes) for result in rows), "", ""),
    )


def _why_dict(typed: Typed, result: Encoded, rounding: str, overflow: str) -> dict[str, Any]:
    def code(other: Encoded) -> str | None:
        return None if other.stored is None else other.stored.hex

    sides: dict[str, Any] = dict.fromkeys(("below", "above", "midpoint", "ulp"))
    if finite(result.number):
        around = neighbours(result.number, result.format)
        for name, side in (("below", around.code_below), ("above", around.code_above)):
            sides[name] = None if side is None else Stored(side, result.format).as_dict()
        sides["midpoint"] = None if around.midpoint is None else number_dict(around.midpoint)
        sides["ulp"] = number_dict(around.ulp)
    modes = {mode: encoded(result.number, result.format, mode, overflow) for mode in ENCODE_ROUNDINGS[:-1]}
    drawn = chances(result.number, result.format, overflow)
    twice = double_roundings(result.number, result.format) if rounding == "nearest" else []
    return {
        "input": typed.as_dict(),
        **result.as_dict(),
        "rule": result.rule,
        "explanation": sentences.reasons(result, rounding),
        **sides,
        "roundings": {mode: code(other) for mode, other in modes.items()},
        "stochastic": [{"code": code(end), "probability": str(share)} for share, end in drawn],
        "rounded_twice": [{"via": _names(via), **result.as_dict()} for via, result in twice],
        "elsewhere": _elsewhere(result) if (rounding, overflow) == ("nearest", "inf") else [],
    }


@_command(
    "compare",
    "Compare the properties of formats, count the values that they share, and show numbers that differ.",
    "example: halfstep compare fp16 bf16",
    _named("+", "two or more"),
)
def _compare(options: argparse.Namespace) -> Answer:
    chosen = arguments.distinct(options.named)
    if len(chosen) < 2:
        raise UsageError(
            f"argument FORMAT: {chosen[0].name} alone cannot be compared; name two or more, as in: halfstep compare "
            "fp16 bf16"
        )
    pairs = list(itertools.combinations(chosen, 2))
    examples = [
        (Typed(number, parse_number(number)), [encoded(parse_number(number), format) for format in chosen])
        for number in compare.examples(chosen)
    ]

    def results() -> list[dict[str, Any]]:
        rows = [{"input": typed.as_dict(), **result.as_dict()} for typed, row in examples for result in row]
        shown = list(map(properties.format_dict, chosen))
        return [{"formats": shown, "pairs": list(itertools.starmap(compare.pair_dict, pairs)), "examples": rows}]

    def shown() -> list[Any]:
        words = [
            joined(text(f"{result.name}, {other.name}", "strong"), f": {' '.join(compare.pair_words(result, other))}")
            for result, other in pairs
        ]
        rows = [(typed.text, *map(screen.example, row)) for typed, row in examples]
        return [screen.comparison(chosen), "", *words, "", Table(("number", *_names(chosen)), rows)]

    return Answer({"formats": _names(chosen)}, results, shown)


_KINDS = ("range", "density", "codes", "all")


@_command(
    "ladder",
    "Draw the range of formats, the number of values between powers of two, and every code of a small format.",
    f"Needs matplotlib: {INSTALL}\nexample: halfstep ladder --out formats.png",
    option("--out", required=True, type=command_line.picture, metavar="FILE", help="draw them: .png, .svg or .pdf"),
    _named("*", "formats of range and density (default: all)"),
    option("--kind", choices=_KINDS, default="all", metavar="KIND", help=", ".join(_KINDS)),
    formats_option("the same, as in halfstep encode"),
    option("--codes", type=arguments.small_format, default="e4m3fn", metavar="FORMAT", help="up to 8 bits"),
)
def _ladder(options: argparse.Namespace) -> Answer:
    from halfstep.cli.formats import pictures

    kinds = _KINDS[:-1] if options.kind == "all" else (options.kind,)
    chosen, codes, out = arguments.distinct(options.named, options.formats), options.codes, str(options.out)
    pictures.draw(kinds, chosen, codes, options.out)
    about = {"out": out, "kind": options.kind, "formats": _names(chosen), "codes": codes.name}
    results = [
        {"file": out, "kind": kind, "formats": [codes.name] if kind == "codes" else _names(chosen)} for kind in kinds
    ]
    return Answer(about, lambda: results, lambda: [f"{out}: {', '.join(kinds)}"])
