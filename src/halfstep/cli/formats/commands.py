"""``halfstep format, encode, decode, why, compare, ladder``: what a format can hold, what a number becomes in it.

Each command is a function, below its command line. What it returns is printed as JSON or drawn on the screen.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rich.text import Text

from halfstep.cli import command_line, numbers
from halfstep.cli.command_line import UsageError
from halfstep.cli.figures import INSTALL
from halfstep.cli.formats import compare
from halfstep.cli.formats.values import (
    Encoded,
    Line,
    Stored,
    among,
    chances,
    conversions,
    double_rounding_words,
    double_roundings,
    encoded,
    finite,
    fitting,
    line_between,
    number_dict,
    reasons,
    rounded,
    short,
)
from halfstep.cli.terminal import Table, joined, text, width
from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, OVERFLOWS, Number, neighbours, parse_number
from halfstep.numerics.formats.table import AMBIGUOUS, Format, formats

_WIDTHS = sorted({format.bits for format in formats.values()})
_FEW = 4  # formats, up to which encode has room for a line with all digits of each
_OUTCOMES = {
    "exact": "good", "exact subnormal": "good", "subnormal": "note", "saturated": "note",
    "underflow": "bad", "overflow": "bad", "no NaN": "bad", "no sign": "bad",
}  # fmt: skip
_CATEGORIES = {"subnormal": "note", "zero": "faint", "infinity": "bad", "nan": "bad"}

# ----------------------------------------------------------------------------------------------------------- arguments


class Typed(NamedTuple):
    """A number, and the text it was parsed from."""

    text: str
    number: Number

    def as_dict(self) -> dict[str, str | None]:
        return {"text": self.text, **number_dict(self.number)}

    @property
    def notations(self) -> str:
        """The number in every notation that adds information."""
        exact = [words for words in number_dict(self.number).values() if words and len(words) <= 40]
        if isinstance(self.number, float):
            exact = exact[:1]
        return " = ".join(dict.fromkeys((self.text, *(exact or [fitting(self.number, 0, 17)])))).replace("= ≈", "≈ ")


class Code(NamedTuple):
    """A code, its text, and the number of bits that the text shows; 0 for decimal numbers, which show none."""

    text: str
    code: int
    shown: int

    @property
    def width(self) -> int:
        """The width a code is meant in: the first that has room for all its digits, of decimals for the number itself.

        A decimal says nothing of leading zeros, so it is taken for one of the common widths, from 8 bits up.

        Raises:
            UsageError: no format is as wide.
        """
        wide = [width for width in _WIDTHS if width >= self.shown] if self.shown else [8, 16, 32, 64]
        if self.shown == 20:  # five hexadecimal digits: TF32, if its 19 bits suffice
            wide.insert(0, 19)
        for bits in wide:
            if self.code < 1 << bits:
                return bits
        raise UsageError(
            f"argument CODE: expected up to {_WIDTHS[-1]} bits, but got {self.text}, which has "
            f"{max(self.shown, self.code.bit_length())}"
        )


class _Parser(command_line.Parser):
    """The shared parser with an option -f that takes several names."""

    def prepared(self, words: Sequence[str]) -> list[str]:
        """The words, with -f repeated before each name of a format that follows it."""
        options = {name for action in self._actions if action.dest == "formats" for name in action.option_strings}
        repeated: list[str] = []
        naming = False  # after -f and a name; not after --, where no word starts with "-"
        for word in super().prepared(words):
            if word.startswith("-"):
                naming = word in options
            elif command_line.is_number(word.strip()):
                naming = False
            elif naming and repeated[-1] not in options:
                repeated.append("-f")
            repeated.append(word)
        return repeated


def _family(name: str) -> list[Format]:
    """An argparse type: a format by name, alias or fields; all formats of a name that several share, such as fp8."""
    try:
        return [formats[member] for member in AMBIGUOUS.get(name.strip().lower(), (name.strip(),))]
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def format_named(name: str) -> Format:
    """An argparse type: as `_family`, but only the first."""
    return _family(name)[0]


def _small_format(name: str) -> Format:
    """An argparse type: a format whose codes fit a picture."""
    format = format_named(name)
    if format.bits > 8:
        raise argparse.ArgumentTypeError(
            f"expected a format of up to 8 bits, but got {format.name}, which has {format.codes:,} codes"
        )
    return format


def number(hint: str) -> Callable[[str], Typed]:
    """An argparse type: a number, exactly. `hint` says what to do with the name of a format."""

    def parse(typed: str) -> Typed:
        typed = typed.strip()
        try:
            return Typed(typed, parse_number(typed))
        except ValueError as error:
            remedy = f"; {typed} is a format, and {hint}" if typed in formats else ""
            raise argparse.ArgumentTypeError(f"{error}{remedy}") from error

    return parse


def _code(typed: str) -> Code:
    """An argparse type: a code in hexadecimal, binary or decimal."""
    digits = typed.strip().lower().replace("_", "")
    base, bits = {"0x": (16, 4), "0b": (2, 1)}.get(digits[:2], (10, 0))
    digits = digits[2:] if bits else digits
    if not re.fullmatch({16: "[0-9a-f]{1,99}", 2: "[01]{1,99}", 10: "[0-9]{1,99}"}[base], digits):
        raise argparse.ArgumentTypeError(
            "expected a hexadecimal (0x4100), binary (0b0100000100000000) or decimal (16640) code without a sign, but "
            f"got {typed.strip()!r}: for numbers use halfstep encode"
        )
    return Code(typed.strip(), int(digits, base), bits * len(digits))


Option = tuple[tuple[str, ...], dict[str, Any]]


def _option(*names: str, **settings: Any) -> Option:
    """The arguments of add_argument."""
    return names, settings


def formats_option(help: str) -> Option:
    """The option -f, which takes several names and may be repeated."""
    settings = {"action": "extend", "type": _family, "metavar": "FORMAT", "default": [], "help": help}
    return _option("-f", "--format", dest="formats", **settings)


def rounding_option(modes: Sequence[str]) -> Option:
    """The option --rounding."""
    listed = f"{', '.join(modes)} (default: nearest, ties to even)"
    return _option("--rounding", choices=modes, default="nearest", metavar="MODE", help=listed)


_BEYOND = "inf (NaN in a format without), saturate (the largest number) or nan (default: inf)"
OVERFLOW = _option(
    "--overflow", choices=OVERFLOWS, default="inf", metavar="MODE", help=f"what overflow becomes: {_BEYOND}"
)


def _named(nargs: str, help: str, metavar: str = "FORMAT") -> Option:
    return _option("named", nargs=nargs, type=_family, metavar=metavar, help=help)


def _distinct(families: Iterable[Iterable[Format]], chosen: Iterable[Format] = ()) -> list[Format]:
    """The formats of all names and of -f without repetitions; all formats if there are none."""
    return list({format.name: format for group in (*families, chosen) for format in group}.values()) or [
        *formats.values()
    ]


# ------------------------------------------------------------------------------------------------------------ commands


class Answer(NamedTuple):
    """The answer of a command: its parsed input, and functions for the results in JSON and what the screen shows."""

    input: dict[str, Any]
    results: Callable[[], list[dict[str, Any]]]
    screen: Callable[[], Iterable[Any]]


_LOOKUPS: dict[str, tuple[Callable[[argparse.Namespace], Answer], str, str, Sequence[Option]]] = {}


def _command(name: str, description: str, epilog: str, *options: Option) -> Callable[..., Any]:
    """Register the function below as the answer of a command."""

    def register(answer: Callable[[argparse.Namespace], Answer]) -> Callable[[argparse.Namespace], Answer]:
        _LOOKUPS[name] = (answer, description, epilog, options)
        return answer

    return register


def main(argv: Sequence[str], command: str) -> int:
    """Run ``halfstep COMMAND`` with these arguments. Returns the exit status."""
    lookup, description, epilog, options = _LOOKUPS[command]
    parser = _Parser(command, description, epilog)
    for names, settings in options:
        parser.add_argument(*names, **settings)

    def carry_out(options: argparse.Namespace) -> None:
        about, results, screen = lookup(options)
        command_line.answer(options, lambda: {"command": command, "input": about, "results": results()}, screen)

    return command_line.run(parser, argv, carry_out)


def _names(chosen: Iterable[Format]) -> list[str]:
    return [format.name for format in chosen]


def _apart(blocks: Iterable[Iterable[Any]], *between: str) -> list[Any]:
    """The lines of blocks, with empty ones between two of them."""
    return [line for index, block in enumerate(blocks) for line in (*(between if index else ()), *block)]


def _elsewhere(result: Encoded) -> list[dict[str, Any]]:
    return [conversion.as_dict() for conversion in conversions(result.number, result.format)]


def _elsewhere_shown(results: Iterable[Encoded]) -> list[Any]:
    """The implementations that store another value."""
    cells = [
        ("" if index else result.format.name, conversion.text, conversion.who)
        for result in results
        for index, conversion in enumerate(conversions(result.number, result.format))
    ]
    return [text("elsewhere, from the nearest float64", "faint"), Table((), cells)] if cells else []


def _bits(stored: Stored) -> Text:
    """The bits of the fields, coloured and separated by spaces."""
    return joined(*(text(digits, name) for name, digits in stored.fields.items()), by=" ")


def _outcome(result: Encoded) -> Text:
    """The outcome in its colour."""
    return text(result.outcome_text, _OUTCOMES.get(result.outcome_text, ""))


def _fitting(*tables: Table) -> Table:
    """The first table that fits the screen; the last one if none does."""
    return next((table for table in tables if table.width <= width()), tables[-1])


@_command(
    "format",
    "Show range, spacing, digits and special values of number formats. One name shows all of its properties.",
    f"Formats: {', '.join(formats)},\nby any usual name, and your own by their fields, such as e5m7 or e4m3fnuz.\n"
    "example: halfstep format fp16",
    _named("*", "formats (default: all)", "NAME"),
)
def _format(options: argparse.Namespace) -> Answer:
    chosen = _distinct(options.named)
    shown = _all_properties if len(chosen) == 1 else _limits
    return Answer({"formats": _names(chosen)}, lambda: list(map(compare.format_dict, chosen)), lambda: shown(chosen))


def _all_properties(chosen: Sequence[Format]) -> list[Any]:
    """All properties of one format."""
    (format,) = chosen
    rows = [*compare.names(format), *compare.figures(format)]
    cells = [(text(f"  {name}", "faint"), value) for name, value in rows]
    return [joined(text(format.name, "strong"), f": {format.title}"), Table((), cells, wraps=1)]


def _limits(chosen: Sequence[Format]) -> list[Any]:
    """One row per format; with overflow, integers and the name in torch if they fit."""
    header = ("format", "s/e/m", "largest", "min normal", "least", "eps", "digits", "has")
    rows, wide = [], []
    for format in chosen:
        figures = map(short, (format.max, format.min_normal, format.min_subnormal, format.eps))
        digits = f"{format.digits10}-{format.max_digits10}"
        rows.append([format.name, compare.fields(format), *figures, digits, compare.specials(format)])
        wide.append(
            [*rows[-1], compare.overflow(format), compare.count_text(format.integer_range), format.torch or "-"]
        )
    right = {2, 3, 4, 5, 6, 9}
    return [_fitting(Table((*header, "overflow", "integers to", "torch"), wide, right), Table(header, rows, right))]


@_command(
    "encode",
    "Round numbers to every format, and show the code, its fields, the stored value and the error in ulps.",
    "Numbers are read exactly, not as floats: 2.5, 1e-7, 1/3, 2^-24, 0x1.8p-3, -(1 + 2^-11), inf, nan.\n"
    "example: halfstep encode 2.5 -f fp16 bf16",
    _option("numbers", nargs="+", type=number("formats come after -f"), metavar="NUMBER"),
    formats_option("formats to use; several names, or several times (default: all)"),
    rounding_option(ENCODE_ROUNDINGS),
    OVERFLOW,
    _option("--seed", type=numbers.whole(0), metavar="N", help="of --rounding stochastic, to draw the same again"),
)
def _encode(options: argparse.Namespace) -> Answer:
    rounding, overflow, seed = options.rounding, options.overflow, options.seed
    if seed is not None and rounding != "stochastic":
        raise UsageError(
            f"--seed {seed} draws nothing with --rounding {rounding}; leave it out, or pass --rounding stochastic"
        )
    chosen = _distinct([options.formats])

    def result(number: Number, format: Format) -> Encoded:
        noise = (
            philox_words.word(0, random.getrandbits(63) if seed is None else seed) if rounding == "stochastic" else 0
        )
        return encoded(number, format, rounding, overflow, noise)

    rows = [(typed, [result(typed.number, format) for format in chosen]) for typed in options.numbers]
    usual = (rounding, overflow) == ("nearest", "inf")

    def results() -> list[dict[str, Any]]:
        return [
            {"input": typed.as_dict(), **result.as_dict(), "elsewhere": _elsewhere(result) if usual else []}
            for typed, row in rows
            for result in row
        ]

    def shown(typed: Typed, row: Sequence[Encoded]) -> list[Any]:
        digits = [line for result in row for line in _all_digits(result)] if len(chosen) <= _FEW else []
        elsewhere = _elsewhere_shown(row) if usual else []
        return [text(typed.notations, "strong"), *_encodings(row), *digits, *elsewhere]

    about = {"numbers": [typed.text for typed in options.numbers], "formats": _names(chosen)}
    about |= {"rounding": rounding, "overflow": overflow, "seed": seed}
    return Answer(about, results, lambda: _apart(itertools.starmap(shown, rows), ""))


def _encodings(row: Sequence[Encoded]) -> list[Any]:
    """A table; on a narrow screen without hexadecimal floats, and with wide codes below it."""

    def cells(result: Encoded, narrow: bool) -> list[str | Text]:
        code: list[str | Text] = ["-", "", "", *([] if narrow else [""])]
        if stored := result.stored:
            code = ["", ""] if narrow and result.format.bits > 16 else [stored.hex, _bits(stored)]
            code += [stored.text(16)] if narrow else [stored.text(24), number_dict(stored.value)["hex"] or ""]
        return [result.format.name, *code, result.ulps_text, _outcome(result)]

    header = ("format", "code", "bits", "stored", "hex float", "ulps", "outcome")
    wide = Table(header, [cells(result, False) for result in row], {5})
    if wide.width <= width():
        return [wide]
    codes = [result.stored for result in row if result.stored and result.format.bits > 16]
    below = [(stored.format.name, stored.hex, _bits(stored)) for stored in codes]
    narrow = Table((*header[:4], *header[5:]), [cells(result, True) for result in row], {4})
    return [narrow, Table((), below, wraps=2)] if below else [narrow]


def _all_digits(result: Encoded) -> list[str]:
    """A line with all digits of a number that is not exact."""
    if result.stored is None or not result.error:
        return []
    exact = number_dict(result.stored.value)
    value = " = ".join(digits for digits in (exact["decimal"], exact["hex"]) if digits and len(digits) <= 60)
    relative = "" if result.relative is None else f", {rounded(result.relative * 100, 3)} %"
    error = fitting(result.error, 30, 6)
    return [f"{result.format.name}: {value}, shortest {result.stored.shortest}; error {error}{relative}"]


@_command(
    "decode",
    "Show the value of a code in every format of its width.",
    "The number of digits gives the width: 0x41 has 8 bits, 0x0041 16, 0b000001 6. A decimal has the smallest of 8, "
    "16, 32 or 64 bits that holds it. --width and --format override the width.\nexample: halfstep decode 0x4100",
    _option("codes", nargs="+", type=_code, metavar="CODE", help="bits: 0x4100, 0b… or a decimal"),
    formats_option("formats to use; several names, or several times (default: all of the width)"),
    _option(
        *("-w", "--width"),
        choices=list(map(str, _WIDTHS)),
        metavar="BITS",
        help=f"bits of the code: {', '.join(map(str, _WIDTHS))}",
    ),
)
def _decode(options: argparse.Namespace) -> Answer:
    rows = [(typed, _read_in(typed, options)) for typed in options.codes]

    def results() -> list[dict[str, Any]]:
        return [{"input": {"text": typed.text}, **stored.as_dict()} for typed, row in rows for stored in row]

    def table(row: Sequence[Stored], digits: int) -> Table:
        cells = []
        for stored in row:
            value, category = (stored.text(digits), number_dict(stored.value)["hex"] or ""), stored.category
            shown = text(category, _CATEGORIES.get(category, ""))
            cells.append((stored.format.name, _bits(stored), *value, shown))
        return Table(("format", "bits", "value", "hex float", "class"), cells)

    def shown(typed: Code, row: Sequence[Stored]) -> list[Any]:
        widths = {stored.format.bits for stored in row}
        title = f"{typed.text}, {widths.pop()} bits" if len(widths) == 1 else typed.text
        return [text(title, "strong"), _fitting(*(table(row, digits) for digits in (44, 24, 16)))]

    about = {
        "codes": [typed.text for typed in options.codes],
        "formats": list(dict.fromkeys(stored.format.name for _, row in rows for stored in row)),
        "width": options.width and int(options.width),
    }
    return Answer(about, results, lambda: _apart(itertools.starmap(shown, rows), ""))


def _read_in(typed: Code, options: argparse.Namespace) -> list[Stored]:
    """A code in the chosen formats.

    Raises:
        UsageError: it is not a code of one of them.
    """
    bits = None if options.width is None else int(options.width)
    chosen = _distinct([options.formats]) if options.formats else []
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


@_command(
    "why",
    "Explain how a number is rounded: its neighbours, the point halfway between them, and the rule that decides.",
    "example: halfstep why 1.0001 fp16",
    _option("number", type=number("the number comes first"), metavar="NUMBER"),
    _named("*", "formats (default: all)"),
    formats_option("the same, as in halfstep encode"),
    rounding_option(ENCODE_ROUNDINGS[:-1]),
    OVERFLOW,
)
def _why(options: argparse.Namespace) -> Answer:
    chosen, typed = _distinct(options.named, options.formats), options.number
    modes = options.rounding, options.overflow
    rows = [encoded(typed.number, format, *modes) for format in chosen]
    about = {"number": typed.text, "formats": _names(chosen), "rounding": modes[0], "overflow": modes[1]}
    return Answer(
        about,
        lambda: [_why_dict(typed, result, *modes) for result in rows],
        lambda: _apart((_explanation(typed, result, *modes) for result in rows), "", ""),
    )


def _why_dict(typed: Typed, result: Encoded, rounding: str, overflow: str) -> dict[str, Any]:
    number, format = result.number, result.format

    def code(result: Encoded) -> str | None:
        return None if result.stored is None else result.stored.hex

    sides: dict[str, Any] = dict.fromkeys(("below", "above", "midpoint", "ulp"))
    if finite(number):
        around = neighbours(number, format)
        for name, side in (("below", around.code_below), ("above", around.code_above)):
            sides[name] = None if side is None else Stored(side, format).as_dict()
        sides["midpoint"] = None if around.midpoint is None else number_dict(around.midpoint)
        sides["ulp"] = number_dict(around.ulp)
    twice = double_roundings(number, format) if rounding == "nearest" else []
    return {
        "input": typed.as_dict(),
        **result.as_dict(),
        "rule": result.rule,
        "explanation": reasons(result, rounding),
        **sides,
        "roundings": {mode: code(encoded(number, format, mode, overflow)) for mode in ENCODE_ROUNDINGS[:-1]},
        "stochastic": [
            {"code": code(end), "probability": str(share)} for share, end in chances(number, format, overflow)
        ],
        "rounded_twice": [{"via": _names(via), **result.as_dict()} for via, result in twice],
        "elsewhere": _elsewhere(result) if (rounding, overflow) == ("nearest", "inf") else [],
    }


def _explanation(typed: Typed, result: Encoded, rounding: str, overflow: str) -> list[Any]:
    """The screen of `halfstep why` for one format."""
    format, stored = result.format, result.stored
    title = joined(text(typed.text, "strong"), f" in {format.name} is ")
    if stored is None:
        title.append("nothing")
    else:
        title = joined(title, f"{among(stored.value, format)}, {stored.hex} = ", _bits(stored))
    parts = [joined(title, ": ", _outcome(result), f", {result.ulps_text} ulp" if result.error else ""), ""]
    if line := line_between(result):
        label = typed.text if len(typed.text) <= 24 else among(result.number, format)
        parts += [*_number_line(width(), line, label), ""]
    parts += reasons(result, rounding)
    if result.rule not in ("special", "exact", "sign", "least"):
        parts += ["", _roundings(result, overflow)]
    for twice in double_roundings(result.number, format) if rounding == "nearest" else []:
        parts += ["", joined(text("note", "note"), f" {double_rounding_words(twice, result)}")]
    elsewhere = _elsewhere_shown([result]) if (rounding, overflow) == ("nearest", "inf") else []
    return [*parts, *([""] if elsewhere else []), *elsewhere]


def _roundings(result: Encoded, overflow: str) -> Table:
    """The value that each rounding mode stores."""
    number, format = result.number, result.format
    rows: list[tuple[str | Text, ...]] = []
    for rounding in ENCODE_ROUNDINGS[:-1]:
        end = encoded(number, format, rounding, overflow)
        if end.stored is not None:
            value = among(end.stored.value, format)
            rows.append((rounding, end.stored.hex, value, end.ulps_text, _outcome(end)))
    for index, (share, end) in enumerate(chances(number, format, overflow)):
        code = ("", "no NaN") if end.stored is None else (end.stored.hex, among(end.stored.value, format))
        error, chance = Encoded(number, format, end.stored).ulps_text, rounded(share * 100, 6)
        rows.append(("" if index else "stochastic", *code, error, f"with {chance} %"))
    return Table(("rounding", "code", "stored", "ulps", "outcome"), rows, {3})


def _label_row(width: int, labels: Sequence[tuple[int, Text]]) -> Text:
    """Labels centred on columns, moved inward from the ends; one that would touch the label before it is left out."""
    line = Text("  ")
    for column, label in labels:
        start = 2 + min(max(column - label.cell_len // 2, 0), width - label.cell_len)
        if start >= line.cell_len + 2 or line.cell_len == 2:
            line.pad_right(start - line.cell_len)
            line.append_text(label)
    return line


def column_of(position: Fraction, width: int) -> int:
    """The column of a position between 0 and 1. Only 0, 1/2 and 1 are in the first, middle and last column."""
    middle = (width - 1) // 2
    for exact, column in ((0, 0), (1, width - 1), (Fraction(1, 2), middle)):
        if position == exact:
            return column
    start, end = (1, middle - 1) if 2 * position < 1 else (middle + 1, width - 2)
    return min(max(round(position * (width - 1)), start), end)


def _number_line(width: int, line: Line, number: str) -> list[Text]:
    """The picture of a number between its neighbours on so many columns; `number` is as it was written."""
    width = min(width, 80) - 4
    width -= 1 - width % 2  # an odd number of columns has a middle one
    half, last, column = width // 2, width - 1, column_of(line.position, width)
    styles = ["good" if line.stored == end else "" for end in (0, 1)]
    low, high = (text(value, style) for (value, _), style in zip(line.ends, styles, strict=True))
    first, second = (text(code, "faint") for _, code in line.ends)
    marks = [text("●" if style else glyph, style) for glyph, style in zip("├┤", styles, strict=True)]
    return [
        _label_row(width, [(0, low), (last, high)]),
        _label_row(width, [(0, first), (half, text(f"halfway {line.middle}", "faint")), (last, second)]),
        joined("  ", marks[0], "─" * (half - 1) + "┼" + "─" * (last - half - 1), marks[1]),
        joined("  " + " " * column, text("▲", "strong")),
        _label_row(width, [(column, text(number, "strong"))]),
    ]


@_command(
    "compare",
    "Compare the properties of formats, count the values that they share, and show numbers that differ.",
    "example: halfstep compare fp16 bf16",
    _named("+", "two or more"),
)
def _compare(options: argparse.Namespace) -> Answer:
    chosen = _distinct(options.named)
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
        shown = list(map(compare.format_dict, chosen))
        return [{"formats": shown, "pairs": list(itertools.starmap(compare.pair_dict, pairs)), "examples": rows}]

    def shown() -> list[Any]:
        figures = []
        for (name, value), *following in zip(*map(compare.figures, chosen), strict=True):
            values = [value, *(value for _, value in following)]
            if name != "codes":
                style = "strong" if len(set(values)) > 1 else ""
                figures.append([text(name, "faint"), *(text(value, style) for value in values)])
        words = [
            joined(text(f"{first.name}, {second.name}", "strong"), f": {' '.join(compare.pair_words(first, second))}")
            for first, second in pairs
        ]
        rows = [(typed.text, *map(_example, row)) for typed, row in examples]
        return [Table(("", *_names(chosen)), figures), "", *words, "", Table(("number", *_names(chosen)), rows)]

    return Answer({"formats": _names(chosen)}, results, shown)


def _example(result: Encoded) -> Text:
    """A stored value and its outcome."""
    return joined("-" if result.stored is None else result.stored.text(15), " ", _outcome(result))


_PANELS = ("range", "density", "codes", "all")


@_command(
    "ladder",
    "Draw the range of formats, the number of values between powers of two, and every code of a small format.",
    f"Needs matplotlib: {INSTALL}\nexample: halfstep ladder --out formats.png",
    _option("--out", required=True, type=command_line.picture, metavar="FILE", help="draw them: .png, .svg or .pdf"),
    _named("*", "formats of range and density (default: all)"),
    _option("--kind", choices=_PANELS, default="all", metavar="KIND", help=", ".join(_PANELS)),
    formats_option("the same, as in halfstep encode"),
    _option("--codes", type=_small_format, default="e4m3fn", metavar="FORMAT", help="up to 8 bits"),
)
def _ladder(options: argparse.Namespace) -> Answer:
    from halfstep.cli.formats import pictures

    panels = _PANELS[:-1] if options.kind == "all" else (options.kind,)
    chosen, codes, out = _distinct(options.named, options.formats), options.codes, str(options.out)
    pictures.draw(panels, chosen, codes, options.out)
    about = {"out": out, "kind": options.kind, "formats": _names(chosen), "codes": codes.name}
    results = [
        {"file": out, "kind": panel, "formats": [codes.name] if panel == "codes" else _names(chosen)}
        for panel in panels
    ]
    return Answer(about, lambda: results, lambda: [f"{out}: {', '.join(panels)}"])
