"""``halfstep decode``: the same bits, read in every format of their width."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from halfstep.cli.formats import arguments
from halfstep.cli.formats.arguments import Answer, UsageError
from halfstep.cli.formats.text import bits
from halfstep.cli.formats.values import Stored, number_dict
from halfstep.cli.terminal import Terminal, table, visible
from halfstep.numerics.formats.table import Format, formats

_CODE = re.compile(r"0x(?P<hexadecimal>[0-9a-f_]+)|0b(?P<binary>[01_]+)|(?P<decimal>[0-9][0-9_]*)", re.IGNORECASE)
_STYLES = {"normal": "", "subnormal": "note", "zero": "faint", "infinity": "bad", "nan": "bad"}


class Code(NamedTuple):
    """A code, its text, and the number of bits that the text shows; 0 for decimal numbers, which show none."""

    text: str
    code: int
    shown: int


def code(text: str) -> Code:
    """An argparse type: a code in hexadecimal, binary or decimal."""
    text = text.strip()
    found = _CODE.fullmatch(text) if len(text) <= 100 else None
    if found is None:
        raise argparse.ArgumentTypeError(
            "expected a hexadecimal (0x4100), binary (0b0100000100000000) or decimal (16640) code without a sign, but "
            f"got {text!r}: for numbers use halfstep encode"
        )
    kind = found.lastgroup or ""
    digits = found[kind].replace("_", "")
    if not digits:
        raise argparse.ArgumentTypeError(f"expected a code such as 0x4100, but got {text!r}, which has no digits")
    base, each = {"hexadecimal": (16, 4), "binary": (2, 1), "decimal": (10, 0)}[kind]
    return Code(text, int(digits, base), each * len(digits))


def widths() -> list[int]:
    """The widths of all formats in bits, ascending."""
    return sorted({format.bits for format in formats.values()})


def width_of(given: Code) -> int:
    """The width a code is meant in: the first that has room for all its digits, of decimals for the number itself.

    A decimal says nothing of leading zeros, so it is taken for one of the common widths, from 8 bits up.

    Raises:
        UsageError: no format is as wide.
    """
    if given.shown:
        fitting = [width for width in widths() if width >= given.shown]
        # 0x4000 fills 16 bits, but five hexadecimal digits can be more than TF32's 19 bits, of which the first are 0.
        fitting += [width for width in widths() if given.code < 1 << width and width > given.shown - 4 and not fitting]
        if given.shown == 20 and given.code < 1 << 19:
            fitting.insert(0, 19)
    else:
        fitting = [width for width in widths() if width in (8, 16, 32, 64) and given.code < 1 << width]
    if not fitting:
        raise UsageError(
            f"argument CODE: expected up to {widths()[-1]} bits, but got {given.text}, which has "
            f"{max(given.shown, given.code.bit_length())}"
        )
    return fitting[0]


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "decode",
        "Show the value of a code in every format of its width.",
        "The number of digits gives the width: 0x41 has 8 bits, 0x0041 16, 0b000001 6. A decimal has the smallest of "
        "8, 16, 32 or 64 bits that holds it. --width and --format override the width.\n"
        "example: halfstep decode 0x4100",
    )
    parser.add_argument("codes", nargs="+", type=code, metavar="CODE", help="bits, as 0x4100, 0b… or a decimal")
    arguments.add_formats(parser, "formats to use; several names, or several times (default: all of the width)")
    parser.add_argument(
        "-w",
        "--width",
        choices=[str(width) for width in widths()],
        metavar="BITS",
        help=f"bits of the code: {', '.join(map(str, widths()))} (default: from the number of digits)",
    )
    return parser


def _chosen(given: Code, options: argparse.Namespace) -> list[Format]:
    """The formats in which a code is decoded.

    Raises:
        UsageError: it is not a code of a chosen format.
    """
    if options.formats:
        chosen = arguments.distinct(options.formats)
        other = [format for format in chosen if options.width is not None and format.bits != int(options.width)]
        if other:
            raise UsageError(
                f"--width {options.width} is not the {other[0].bits} bits of --format {other[0].name}; leave one out"
            )
    else:
        width = width_of(given) if options.width is None else int(options.width)
        chosen = [format for format in formats.values() if format.bits == width]
    for format in chosen:
        if given.code >= format.codes:
            raise UsageError(
                f"argument CODE: expected a code of {format.name} from 0x0 to {format.codes - 1:#x}, but got "
                f"{given.text}" + ("; a wider one is chosen with --width or --format" if given.code < 1 << 64 else "")
            )
    return chosen


def _row(stored: Stored, screen: Terminal, digits: int) -> list[str]:
    style = _STYLES[stored.sort]
    return [
        stored.format.name,
        bits(stored, screen),
        stored.text(digits),
        number_dict(stored.value)["hex"] or "",
        screen.paint(stored.sort, style) if style else stored.sort,
    ]


def _lines(given: Code, found: Sequence[Stored], screen: Terminal) -> list[str]:
    """The table, with as many digits as fit. Bits that are too wide are on a line of their own."""
    header, left = ["format", "bits", "value", "hex float", "class"], [False] * 5
    for digits in (44, 24, 16):
        lines = table(header, [_row(stored, screen, digits) for stored in found], left)
        if max(map(visible, lines)) <= screen.width:
            break
    else:
        lines = ["format"]
        for name, fields, *rest in (_row(stored, screen, 24) for stored in found):
            lines += [f"{name:8}  {fields}", f"{'':8}  {'  '.join(rest)}"]
    same = len({stored.format.bits for stored in found}) == 1
    title = f"{given.text}, {found[0].format.bits} bits" if same else given.text
    return [screen.paint(title, "strong"), screen.paint(lines[0], "faint"), *lines[1:]]


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    found = [[Stored(given.code, format) for format in _chosen(given, options)] for given in options.codes]

    def lines() -> list[str]:
        made: list[str] = []
        for given, row in zip(options.codes, found, strict=True):
            made += [*([""] if made else []), *_lines(given, row, screen)]
        return made

    def results() -> list[dict[str, Any]]:
        return [
            {"input": {"text": given.text}, **stored.as_dict()}
            for given, row in zip(options.codes, found, strict=True)
            for stored in row
        ]

    about = {
        "codes": [given.text for given in options.codes],
        "formats": list(dict.fromkeys(stored.format.name for row in found for stored in row)),
        "width": None if options.width is None else int(options.width),
    }
    return Answer(about, results, lines)


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep decode`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
