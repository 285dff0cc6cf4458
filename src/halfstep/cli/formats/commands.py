"""``halfstep format, encode, decode, why, compare, ladder, explore``: what a format holds, what a number becomes in it.

Each command is a function above its entry in `_LOOKUPS`. What it returns is printed as JSON or drawn on the screen.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.text import Text

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError, whole
from halfstep.cli.figures import INSTALL
from halfstep.cli.formats import block, compare, values
from halfstep.cli.formats.values import Encoded, Stored
from halfstep.cli.terminal import Table, joined, say, text, width
from halfstep.kernels.formats import BLOCKS
from halfstep.numerics.formats import exact
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, OVERFLOWS, Number, parse_number
from halfstep.numerics.formats.table import AMBIGUOUS, BlockFormat, Format, formats

_WIDTHS = sorted({format.bits for format in formats.values()})
_FEW = 4  # formats, up to which encode has room for a line with all digits of each
_COLOURS = {
    "exact": "good", "exact subnormal": "good", "subnormal": "note", "saturated": "note", "zero": "faint",
    **dict.fromkeys(("underflow", "overflow", "no NaN", "no sign", "infinity", "nan"), "bad"),
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- arguments


class Typed(str):
    """The text of a number, and the number."""

    number: Number

    @classmethod
    def parse(cls, text: str) -> Typed:
        typed = cls(text.strip())
        typed.number = parse_number(typed)
        return typed

    def as_dict(self) -> dict[str, str | None]:
        return {"text": self, **values.number_dict(self.number)}

    @property
    def notations(self) -> str:
        """The number in every notation that adds information."""
        exact = [words for words in values.number_dict(self.number).values() if words and len(words) <= 40]
        if isinstance(self.number, float):
            exact = exact[:1]
        return " = ".join(dict.fromkeys((self, *(exact or [values.fitting(self.number, 0, 17)])))).replace("= ≈", "≈ ")


class Code(str):
    """The text of a code, the code, and the width in bits that its digits give it."""

    code: int
    width: int


def _family(name: str, find: Callable[[str], Any] = formats.element) -> list[Any]:
    """An argparse type: a format by name, alias or fields; all formats of a name that several share, such as fp8."""
    try:
        return [find(member) for member in AMBIGUOUS.get(name.strip().lower(), (name.strip(),))]
    except ValueError as error:
        remedy = "; numbers come before -f" if re.match(r"[-\d.]", name) else ""
        raise argparse.ArgumentTypeError(f"{error}{remedy}") from error


_any_family = functools.partial(_family, find=formats.__getitem__)  # formats of blocks included


def number(hint: str) -> Callable[[str], Typed]:
    """An argparse type: a number, exactly. `hint` says what to do with the name of a format."""

    def parse(text: str) -> Typed:
        try:
            return Typed.parse(text)
        except ValueError as error:
            remedy = f"; {text.strip()} is a format, and {hint}" if text in formats else ""
            raise argparse.ArgumentTypeError(f"{error}{remedy}") from error

    return parse


def _number_or_family(name: str) -> Any:
    try:
        return Typed.parse(name)
    except ValueError:
        return _any_family(name)


def _code(text: str) -> Code:
    """An argparse type: a code in hexadecimal, binary or decimal.

    The digits give the width: the first that has room for all of them. Decimals say nothing of leading zeros, and have
    the first of the common widths that holds the number. Five hexadecimal digits are TF32, if its 19 bits suffice.
    """
    typed = Code(text.strip())
    digits = typed.lower().replace("_", "")
    base, bits = {"0x": (16, 4), "0b": (2, 1)}.get(digits[:2], (10, 0))
    digits = digits[2:] if bits else digits
    if not re.fullmatch({16: "[0-9a-f]{1,99}", 2: "[01]{1,99}", 10: "[0-9]{1,99}"}[base], digits):
        raise argparse.ArgumentTypeError(
            "expected a hexadecimal (0x4100), binary (0b0100000100000000) or decimal (16640) code without a sign, but "
            f"got {str(typed)!r}: formats go after -f, and numbers to halfstep encode"
        )
    typed.code, shown = int(digits, base), bits * len(digits)
    widths = [size for size in _WIDTHS if size >= (19 if shown == 20 else shown)] if bits else [8, 16, 32, 64]
    for typed.width in widths:
        if typed.code < 1 << typed.width:
            return typed
    had = max(shown, typed.code.bit_length())
    raise argparse.ArgumentTypeError(f"expected up to {_WIDTHS[-1]} bits, but got {typed}, which has {had}")


Option = tuple[tuple[str, ...], dict[str, Any]]  # the arguments of add_argument


def _option(*names: str, **settings: Any) -> Option:
    return names, settings


def formats_option(help: str, parse: Callable[[str], Any] = _family) -> Option:
    """The option -f, which takes several names and may be repeated."""
    settings: dict[str, Any] = {"action": "extend", "nargs": "+", "type": parse, "metavar": "FORMAT", "default": []}
    return _option("-f", "--format", dest="formats", help=help, **settings)


def rounding_option(modes: Sequence[str]) -> Option:
    listed = f"{', '.join(modes)} (default: nearest, ties to even)"
    return _option("--rounding", choices=modes, default="nearest", metavar="MODE", help=listed)


_BEYOND = "result of an overflow: inf (NaN in a format without), saturate (the largest number) or nan (default: inf)"
OVERFLOW = _option("--overflow", choices=OVERFLOWS, default="inf", metavar="MODE", help=_BEYOND)


def named(nargs: str, help: str, metavar: str = "FORMAT", parse: Callable[[str], Any] = _family) -> Option:
    return _option("named", nargs=nargs, type=parse, metavar=metavar, help=help)


def _distinct(families: Iterable[Iterable[Any]]) -> list[Any]:
    """The formats of all names without repetitions; all formats if there are none."""
    return list({format.name: format for family in families for format in family}.values()) or [*formats.values()]


# ------------------------------------------------------------------------------------------------------------ commands


# The formats that a command answers for, and its results: dicts with --json, otherwise what the screen shows. Or the
# exit status of a command that has shown them.
Answer = tuple[list[Any], list[Any]] | int
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
    parser = command_line.Parser(command, description, epilog)
    for names, settings in options:
        parser.add_argument(*names, **settings)

    def carry_out(options: argparse.Namespace) -> int:
        answer = lookup(options)
        if isinstance(answer, int):
            return answer
        chosen, results = answer
        about = {name: value for name, value in vars(options).items() if name not in ("named", "json")}
        about["formats"] = _names(chosen)
        content = {"command": command, "input": about, "results": results}
        command_line.answer(options, lambda: content, lambda: results)
        return 0

    return command_line.run(parser, argv, carry_out)


def _names(chosen: Iterable[Format | BlockFormat]) -> list[str]:
    return [format.name for format in chosen]


def _apart(blocks: Iterable[Iterable[Any]], *between: str) -> list[Any]:
    """The lines of blocks, with empty ones between two of them."""
    return [line for index, block in enumerate(blocks) for line in (*(between if index else ()), *block)]


def _elsewhere(results: Iterable[Encoded]) -> list[Table]:
    rows = [(text(f"{row.format.name} elsewhere", "faint"), row.elsewhere) for row in results if row.elsewhere]
    return [Table((), rows, wraps=1)] if rows else []


def _bits(stored: Stored) -> Text:
    return joined(*(text(digits, name) for name, digits in stored.fields.items()), by=" ")


def _coloured(words: str) -> Text:
    return text(words, _COLOURS.get(words, ""))


def _fitting(*tables: Table) -> Table:
    """The first table that fits the screen; the last one if none does."""
    return next((table for table in tables if table.width <= width()), tables[-1])


@_command(
    "format",
    "Show range, spacing, digits and special values of number formats. One name shows all of its properties.",
    f"Formats: {', '.join(formats)}, by any usual name, and custom ones by their fields, such as e5m7 or e4m3fnuz; "
    "example: halfstep format fp16",
    named("*", "formats (default: all), also of blocks, such as mxfp8", "NAME", _any_family),
)
def _format(options: argparse.Namespace) -> Answer:
    chosen = _distinct(options.named)
    of_blocks = [form for form in chosen if isinstance(form, BlockFormat)]
    if options.json:
        return chosen, [form.as_dict() if form in of_blocks else compare.format_dict(form) for form in chosen]
    if len(chosen) > 1:
        single = [form for form in chosen if form not in of_blocks]
        rows = [[form.name, *(value for _, value in block.figures(form)[:3])] for form in of_blocks]
        tables = [[_limits(single)], [Table(("format", "elements", "bits", "scale"), rows)]]
        return chosen, _apart([table for table, some in zip(tables, (single, rows), strict=True) if some], "")
    (format,) = chosen
    properties = block.figures(format) if of_blocks else [*compare.names(format), *compare.figures(format)]
    shown = [(text(f"  {name}", "faint"), value) for name, value in properties]
    return chosen, [joined(text(format.name, "strong"), f": {format.title}"), Table((), shown, wraps=1)]


def _limits(chosen: Sequence[Format]) -> Table:
    header, rows = ("format", "s/e/m", "largest", "min normal", "least", "eps", "digits", "has", "torch"), []
    for format in chosen:
        figures = map(values.short, (format.max, format.min_normal, format.min_subnormal, format.eps))
        digits, dtype = f"{format.digits10}-{format.max_digits10}", format.torch or "-"
        rows.append((format.name, compare.fields(format), *figures, digits, compare.specials(format), dtype))
    return _fitting(Table(header, rows, range(2, 7)), Table(header[:-1], [row[:-1] for row in rows], range(2, 7)))


@_command(
    "encode",
    "Round numbers to every format, and show the code, its fields, the stored value and the error in ulps.",
    "Numbers are read exactly, not as floats: 2.5, 1e-7, 1/3, 2^-24, 0x1.8p-3, -(1 + 2^-11), inf, nan; "
    "example: halfstep encode 2.5 -f fp16 bf16",
    _option("numbers", nargs="+", type=number("formats come after -f"), metavar="NUMBER"),
    formats_option("formats to use; several names, or several times (default: all)"),
    rounding_option(ENCODE_ROUNDINGS),
    OVERFLOW,
    _option("--seed", type=whole(0), metavar="N", help="seed of --rounding stochastic"),
)
def _encode(options: argparse.Namespace) -> Answer:
    rounding, overflow, seed = options.rounding, options.overflow, options.seed
    if seed is not None and rounding != "stochastic":
        raise UsageError(
            f"--seed {seed} draws nothing with --rounding {rounding}; leave it out, or pass --rounding stochastic"
        )
    chosen = _distinct(options.formats)

    def result(number: Number, format: Format) -> Encoded:
        word = exact.random_word(0, seed) if rounding == "stochastic" else 0
        return values.encoded(number, format, rounding, overflow, word)

    rows = [(typed, [result(typed.number, format) for format in chosen]) for typed in options.numbers]
    if options.json:
        pairs = [(typed.as_dict(), result) for typed, row in rows for result in row]
        return chosen, [{"input": typed, **result.as_dict(), "elsewhere": result.elsewhere} for typed, result in pairs]
    blocks = []
    for typed, row in rows:
        table = _fitting(*(_encodings(row, *columns) for columns in ((24, 64, True), (16, 64), (16, 16), (24,))))
        digits = [line for result in row for line in _all_digits(result)] if len(chosen) <= _FEW else []
        blocks.append([text(typed.notations, "strong"), table, *digits, *_elsewhere(row)])
    return chosen, _apart(blocks, "")


def _encodings(row: Sequence[Encoded], digits: int, bits: int = 0, hexadecimal: bool = False) -> Table:
    """A row for each format, with the bits of those that have no more than `bits`."""
    shown = [True, True, bits > 0, True, hexadecimal, True, True]
    rows = []
    for result in row:
        cells: list[str | Text] = [result.format.name, "-", "", "", ""]
        if stored := result.stored:
            fields = _bits(stored) if stored.format.bits <= bits else ""
            cells[1:] = [stored.hex, fields, stored.text(digits), values.number_dict(stored.value)["hex"] or ""]
        rows.append([*itertools.compress([*cells, result.ulps_text, _coloured(result.outcome_text)], shown)])
    header = ("format", "code", "bits", "stored", "hex float", "ulps", "outcome")
    return Table([*itertools.compress(header, shown)], rows, {sum(shown) - 2})


def _all_digits(result: Encoded) -> list[str]:
    """A line with all digits of a number that is not exact."""
    if result.stored is None or not result.error:
        return []
    exact = values.number_dict(result.stored.value)
    value = " = ".join(digits for digits in (exact["decimal"], exact["hex"]) if digits and len(digits) <= 60)
    relative = "" if result.relative is None else f", {values.rounded(result.relative * 100, 3)} %"
    error = values.fitting(result.error, 30, 6)
    return [f"{result.format.name}: {value}, shortest {result.stored.shortest}; error {error}{relative}"]


@_command(
    "decode",
    "Show the value of a code in every format of its width.",
    "The number of digits gives the width: 0x41 has 8 bits, 0x0041 16, 0b000001 6. A decimal has the smallest "
    "sufficient width of 8, 16, 32 or 64 bits. --width and --format override it; example: halfstep decode 0x4100",
    _option("codes", nargs="+", type=_code, metavar="CODE", help="bits as 0x4100, 0b… or a decimal number"),
    formats_option("formats to use; several names, or several times (default: all of the width)"),
    _option("-w", "--width", type=int, choices=_WIDTHS, metavar="BITS", help=f"bits: {', '.join(map(str, _WIDTHS))}"),
)
def _decode(options: argparse.Namespace) -> Answer:
    rows = [(typed, _read_in(typed, options)) for typed in options.codes]
    chosen = list({stored.format.name: stored.format for _, row in rows for stored in row}.values())
    if options.json:
        return chosen, [{"input": {"text": typed}, **stored.as_dict()} for typed, row in rows for stored in row]
    blocks = []
    for typed, row in rows:
        widths = {stored.format.bits for stored in row}
        title = f"{typed}, {widths.pop()} bits" if len(widths) == 1 else typed
        blocks.append([text(title, "strong"), _fitting(*(_decodings(row, digits) for digits in (44, 24, 16)))])
    return chosen, _apart(blocks, "")


def _decodings(row: Sequence[Stored], digits: int) -> Table:
    cells = []
    for stored in row:
        value = stored.text(digits), values.number_dict(stored.value)["hex"] or ""
        cells.append((stored.format.name, _bits(stored), *value, _coloured(stored.category)))
    return Table(("format", "bits", "value", "hex float", "class"), cells)


def _read_in(typed: Code, options: argparse.Namespace) -> list[Stored]:
    """A code in the chosen formats. Raises `UsageError` if it is not a code of one of them."""
    chosen, bits = _distinct(options.formats) if options.formats else [], options.width
    for format in chosen:
        if bits not in (None, format.bits):
            raise UsageError(f"--width {bits} is not the {format.bits} bits of --format {format.name}; leave one out")
    chosen = chosen or [format for format in formats.values() if format.bits == (bits or typed.width)]
    for format in chosen:
        if typed.code >= format.codes:
            raise UsageError(
                f"argument CODE: expected a code of {format.name} from 0x0 to {format.codes - 1:#x}, but got "
                f"{typed}; a wider one is chosen with --width or --format"
            )
    return [Stored(typed.code, format) for format in chosen]


@_command(
    "why",
    "Explain how a number is rounded: its neighbors, their midpoint, and the rule that applies.",
    "Several numbers are a block: halfstep why 0.1 3 -100 mxfp8; example: halfstep why 1.0001 fp16",
    _option("number", type=number("the number comes first"), metavar="NUMBER"),
    named("*", "more numbers of a block; formats (default: all)", parse=_number_or_family),
    formats_option("the same, as in halfstep encode", _any_family),
    rounding_option(ENCODE_ROUNDINGS[:-1]),
    OVERFLOW,
)
def _why(options: argparse.Namespace) -> Answer:
    more = [item for item in options.named if isinstance(item, Typed)]
    families = [*(item for item in options.named if not isinstance(item, Typed)), *options.formats]
    chosen = _distinct(families or [[formats[row.name] for row in BLOCKS]] * bool(more))
    typed, modes = options.number, (options.rounding, options.overflow)
    if more or any(isinstance(form, BlockFormat) for form in chosen):
        return chosen, _why_blocks([typed, *more], chosen, modes, options.json)
    rows = [values.encoded(typed.number, format, *modes) for format in chosen]
    if options.json:
        return chosen, [_why_dict(typed, result, *modes) for result in rows]
    return chosen, _apart((_explanation(typed, result, *modes) for result in rows), "", "")


def _why_blocks(numbers: list[Typed], chosen: list[Any], modes: tuple[str, str], json: bool) -> list[Any]:
    for form in chosen:
        if not isinstance(form, BlockFormat):
            raise UsageError(
                "argument FORMAT: expected a format of blocks, such as mxfp8, which several numbers or another format "
                f"ask for, but got {form.name}; ask for it alone, with one number"
            )
        if len(numbers) > form.size:
            raise UsageError(
                f"argument NUMBER: expected up to {form.size} numbers, a block of {form.name}, but got {len(numbers)}"
            )
    coded = [block.coded([typed.number for typed in numbers], form, *modes) for form in chosen]
    if json:
        return [each.as_dict(numbers) for each in coded]
    return _apart((block.explanation(numbers, each, *modes) for each in coded), "", "")


def _why_dict(typed: Typed, result: Encoded, rounding: str, overflow: str) -> dict[str, Any]:
    number, format = result.number, result.format

    def code(result: Encoded) -> str | None:
        return None if result.stored is None else result.stored.hex

    twice = values.double_roundings(number, format) if rounding == "nearest" else []
    ends = values.roundings(number, format, lambda number, mode: values.encoded(number, format, mode, overflow))
    return {
        "input": typed.as_dict(),
        **result.as_dict(),
        "rule": result.rule,
        "explanation": values.reasons(result, rounding),
        **_neighbours(number, format),
        "roundings": {mode: code(end) for end, mode, chance in ends if chance is None},
        "stochastic": [
            {"code": code(end), "probability": str(chance)} for end, _, chance in ends if chance is not None
        ],
        "rounded_twice": [{"via": _names(via), **result.as_dict()} for via, result in twice],
        "elsewhere": result.elsewhere,
    }


def _neighbours(number: Number, format: Format) -> dict[str, Any]:
    """The format's numbers around a finite one, their middle and the distance between them."""
    if not values.finite(number):
        return dict.fromkeys(("below", "above", "midpoint", "ulp"))
    around = exact.neighbours(number, format)
    sides = {"below": around.code_below, "above": around.code_above}
    shown = {name: None if code is None else Stored(code, format).as_dict() for name, code in sides.items()}
    midpoint = None if around.midpoint is None else values.number_dict(around.midpoint)
    return {**shown, "midpoint": midpoint, "ulp": values.number_dict(around.ulp)}


def _explanation(typed: Typed, result: Encoded, rounding: str, overflow: str) -> list[Any]:
    """The screen of `halfstep why` for one format."""
    format, stored = result.format, result.stored
    title = joined(text(typed, "strong"), f" in {format.name} is ")
    if stored is None:
        title.append("nothing")
    else:
        title = joined(title, f"{values.among(stored.value, format)}, {stored.hex} = ", _bits(stored))
    error = f", {result.ulps_text} ulp" if result.error else ""
    parts: list[Any] = [joined(title, ": ", _coloured(result.outcome_text), error), ""]
    parts += values.reasons(result, rounding)
    if result.rule not in ("special", "exact", "sign", "least"):
        parts += ["", _roundings(result, overflow)]
    for via, twice in values.double_roundings(result.number, format) if rounding == "nearest" else []:
        parts += ["", joined(text("note", "note"), f" {values.double_rounding_words(via, twice, result)}")]
    return parts + ["", *_elsewhere([result])] * bool(result.elsewhere)


def _roundings(result: Encoded, overflow: str) -> Table:
    format, rows = result.format, []
    ends = values.roundings(result.number, format, lambda number, mode: values.encoded(number, format, mode, overflow))
    for (end, mode, chance), (_, before, _) in zip(ends, [ends[-1], *ends], strict=False):
        shown = ("", "") if end.stored is None else (end.stored.hex, values.among(end.stored.value, format))
        outcome = _coloured(end.outcome_text) if chance is None else f"with {values.rounded(chance * 100, 6)} %"
        rows.append(("" if mode == before and chance else mode, *shown, end.ulps_text, outcome))
    return Table(("rounding", "code", "stored", "ulps", "outcome"), rows, {3})


@_command(
    "compare",
    "Compare the properties of formats, count the values that they share, and show numbers that differ.",
    "With --numbers or --file, their errors are compared: halfstep compare mxfp8 nvfp4 --file weights.npy; example: "
    "halfstep compare fp16 bf16",
    named("+", "two or more", parse=_any_family),
    _option("--numbers", nargs="+", type=number("formats come first"), metavar="NUMBER", help="in these"),
    _option("--file", metavar="FILE", help="in the numbers of a .npy file, blocks along the last axis"),
)
def _compare(options: argparse.Namespace) -> Answer:
    chosen = _distinct(options.named)
    if options.numbers or options.file:
        rows, table = block.errors(chosen, _measured(options))
        return chosen, rows if options.json else [table]
    for form in chosen:
        if isinstance(form, BlockFormat):
            raise UsageError(
                f"argument FORMAT: {form.name}, a format of blocks, is compared by its errors: pass --numbers 0.1 -100 "
                "or --file weights.npy"
            )
    if len(chosen) < 2:
        raise UsageError(
            f"argument FORMAT: {chosen[0].name} alone cannot be compared; name two or more, as in: halfstep compare "
            "fp16 bf16"
        )
    pairs = list(itertools.combinations(chosen, 2))
    inputs = map(Typed.parse, compare.examples(chosen))
    examples = [(typed, [values.encoded(typed.number, format) for format in chosen]) for typed in inputs]

    if options.json:
        rows = [{"input": typed.as_dict(), **result.as_dict()} for typed, row in examples for result in row]
        properties, paired = map(compare.format_dict, chosen), itertools.starmap(compare.pair_dict, pairs)
        return chosen, [{"formats": list(properties), "pairs": list(paired), "examples": rows}]
    figures = []
    for (name, value), *following in zip(*map(compare.figures, chosen), strict=True):
        texts = [value, *(value for _, value in following)]
        if name != "codes":
            style = "strong" if len(set(texts)) > 1 else ""
            figures.append([text(name, "faint"), *(text(value, style) for value in texts)])
    compared = [(", ".join(_names(pair)), " ".join(compare.pair_words(*pair))) for pair in pairs]
    words = [joined(text(names, "strong"), f": {sentences}") for names, sentences in compared]
    cells = []
    for typed, row in examples:
        stored = (result.stored.text(15) if result.stored else "-" for result in row)
        outcomes = (_coloured(result.outcome_text) for result in row)
        cells.append([typed, *(joined(*pair, by=" ") for pair in zip(stored, outcomes, strict=True))])
    names = _names(chosen)
    return chosen, [Table(("", *names), figures), "", *words, "", Table(("number", *names), cells)]


def _measured(options: argparse.Namespace) -> Any:
    if options.numbers and options.file:
        raise UsageError("--numbers and --file are both the numbers to compare by; leave one out")
    if options.numbers:
        return [typed.number for typed in options.numbers]
    import numpy as np

    try:
        array = np.load(options.file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"argument --file: expected a .npy file of numbers, but {options.file} is none: {error}"
        ) from error
    return np.atleast_1d(array)


_PANELS = ("range", "codes", "all")


@_command(
    "ladder",
    "Draw the range of formats, and every code of a small format.",
    f"Needs matplotlib: {INSTALL}; example: halfstep ladder --out formats.png",
    _option("--out", required=True, type=command_line.picture, metavar="FILE", help="the file: .png, .svg or .pdf"),
    named("*", "formats of the range (default: all)"),
    _option("--kind", choices=_PANELS, default="all", metavar="KIND", help=", ".join(_PANELS)),
    formats_option("the same, as in halfstep encode"),
    _option(
        "--codes", type=lambda name: _family(name)[0].name, default="e4m3fn", metavar="FORMAT", help="of up to 8 bits"
    ),
)
def _ladder(options: argparse.Namespace) -> Answer:
    from halfstep.cli.formats import pictures

    panels = _PANELS[:-1] if options.kind == "all" else (options.kind,)
    chosen, codes, out = _distinct([*options.named, *options.formats]), formats[options.codes], str(options.out)
    if codes.bits > 8:
        raise UsageError(f"argument --codes: expected a format of up to 8 bits, but got {codes.name}, which has more")
    pictures.draw(panels, chosen, codes, options.out)
    if not options.json:
        return chosen, [f"{out}: {', '.join(panels)}"]
    drawn = ((panel, [codes] if panel == "codes" else chosen) for panel in panels)
    return chosen, [{"file": out, "kind": panel, "formats": _names(shown)} for panel, shown in drawn]


@_command(
    "explore",
    "Explore number formats in the browser: click bits, see every format and rounding mode side by side with "
    "explanations, and compare two formats. The page is served to this machine only, until Ctrl-C.",
    "example: halfstep explore 0.1 bf16 fp16",
    _option(
        *("begin",), nargs="?", type=number("the number comes first"), metavar="NUMBER",
        help="the number to start with, as in halfstep encode",
    ),
    named("*", "the format to start with (default: bf16), and the one to compare it with (default: fp16)"),
    formats_option("the same, as in halfstep encode"),
    rounding_option(ENCODE_ROUNDINGS[:-1]),
    OVERFLOW,
    _option(
        "--number", type=number("the number comes first"), metavar="NUMBER", help="the number to start with"
    ),
    _option("--port", type=whole(0, 65535), default=0, metavar="N", help="port (default: any free one)"),
    _option("--no-open", action="store_true", help="do not open the page in the browser"),
    _option(
        "--out", type=command_line.output_file, metavar="FILE", help="write one answer to FILE, and serve no page"
    ),
)  # fmt: skip
def _explore(options: argparse.Namespace) -> int:
    from halfstep.cli.pages.server import serve, write

    names = [family[0].name for family in (*options.named, *options.formats)]  # to a page, fp8 is its first format
    if len(names) > 2:
        raise UsageError(
            f"argument FORMAT: expected at most two formats, the second to compare with, but got {', '.join(names)}; "
            f"leave out {len(names) - 2}"
        )
    if options.begin and options.number:
        raise UsageError(f"--number {options.number} is a second number beside {options.begin}; leave one out")
    first, *second = names or ["bf16"]
    state = {"f": first, "g": second[0] if second else "bf16" if first == "fp16" else "fp16"}
    state |= {"r": options.rounding, "o": options.overflow}
    if typed := options.begin or options.number:
        state = {"x": typed, **state}
    if options.out is None:
        return serve("explorer", state, options.port, not options.no_open)
    say(write(options.out, "explorer", state))
    return 0
