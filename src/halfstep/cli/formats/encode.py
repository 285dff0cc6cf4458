"""``halfstep encode``: what numbers become in every format, on one screen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halfstep.cli import numbers
from halfstep.cli.formats import arguments, implementations, number_text
from halfstep.cli.formats.arguments import Answer, UsageError
from halfstep.cli.formats.text import bits, implementation_lines, number_lines, outcome, ulps
from halfstep.cli.formats.values import Encoded, encoded, number_dict
from halfstep.cli.terminal import Terminal, fitted, table, visible
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS

_CLOSER = 4  # formats, up to which there is room for a second line with all digits


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "encode",
        "Round numbers to every format, and show the code, its fields, the stored value and the error in ulps.",
        "Numbers are read exactly, not as floats: 2.5, 1e-7, 1/3, 2^-24, 0x1.8p-3, -(1 + 2^-11), inf, nan.\n"
        "example: halfstep encode 2.5 -f fp16 bf16",
    )
    parser.add_argument(
        "numbers", nargs="+", type=arguments.number("formats come after -f"), metavar="NUMBER", help="the numbers"
    )
    arguments.add_formats(parser, "formats to use; several names, or several times (default: all)")
    parser.add_argument(
        "--rounding",
        choices=ENCODE_ROUNDINGS,
        default="nearest",
        metavar="MODE",
        help=f"{', '.join(ENCODE_ROUNDINGS)} (default: nearest, ties to even)",
    )
    arguments.add_overflow(parser)
    parser.add_argument(
        "--seed",
        type=numbers.whole(0),
        metavar="N",
        help="of --rounding stochastic, to draw the same again (default: another each time)",
    )
    return parser


def _rows(found: Sequence[Encoded], screen: Terminal, hexadecimal: bool, digits: int) -> list[list[str]]:
    rows = []
    for one in found:
        stored = one.stored
        row = [one.format.name]
        row += ["-", "", ""] if stored is None else [stored.hex, bits(stored, screen), stored.text(digits)]
        if hexadecimal:
            row.append("" if stored is None else number_dict(stored.value)["hex"] or "")
        rows.append([*row, ulps(one), outcome(one, screen)])
    return rows


def screen_lines(found: Sequence[Encoded], screen: Terminal) -> list[str]:
    """The table in the widest form that fits: with hexadecimal floats, without, or with wide bits on a second line."""
    header = ["format", "code", "bits", "stored", "hex float", "ulps", "outcome"]
    right = [False, False, False, False, False, True, False]
    lines = table(header, _rows(found, screen, True, 24), right)
    if max(map(visible, lines)) > screen.width:
        del header[4], right[4]
        rows = _rows(found, screen, False, 16)
        widest = max((len(row[1]) for row in rows), default=0)
        header[2] = header[2].ljust(widest - len("code") - 2)  # the codes of wide formats reach over both columns
        # Formats wider than 16 bits get a line of their own for the bits, beneath, and their code may be wider too.
        wide = [one.stored is not None and one.format.bits > 16 for one in found]
        narrow = [["", "", "", *row[3:]] if spread else row for row, spread in zip(rows, wide, strict=True)]
        body = table(header, narrow, right)
        lines, start = [body[0]], body[0].index("code")
        for row, line, spread in zip(rows, body[1:], wide, strict=True):
            if spread:
                head = f"{row[0]:{start}}{row[1]}"
                lines += [head + line[len(head) :], " " * start + row[2]]
            else:
                lines.append(line)
        if max(map(visible, lines)) > screen.width:
            lines = fitted(header, rows, right, screen.width)
    return [screen.paint(lines[0], "faint"), *lines[1:]]


def _closer(found: Encoded) -> str:
    """A line with all digits of a number."""
    stored = found.stored
    if stored is None or found.error is None or found.error == 0:
        return ""
    whole, exact = number_text.decimal(found.error), number_dict(stored.value)
    value = " = ".join(text for text in (exact["decimal"], exact["hex"]) if text and len(text) <= 60)
    error = whole if whole is not None and len(whole) <= 30 else f"≈{number_text.rounded(found.error, 6)}"
    relative = "" if found.relative is None else f", {number_text.rounded(found.relative * 100, 3)} %"
    return f"{found.format.name}: {value}, shortest {stored.shortest}; error {error}{relative}"


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    if options.seed is not None and options.rounding != "stochastic":
        raise UsageError(
            f"--seed {options.seed} draws nothing with --rounding {options.rounding}; leave it out, or pass --rounding "
            "stochastic"
        )
    chosen = arguments.distinct(options.formats)
    found = [
        [encoded(given.number, format, options.rounding, options.overflow, options.seed) for format in chosen]
        for given in options.numbers
    ]
    usual = options.rounding == "nearest" and options.overflow == "inf"

    def lines() -> list[str]:
        made: list[str] = []
        for given, row in zip(options.numbers, found, strict=True):
            made += [*([""] if made else []), *number_lines(given, screen), *screen_lines(row, screen)]
            if len(chosen) <= _CLOSER:
                for one in row:
                    if _closer(one):
                        made += screen.wrap(_closer(one), "  ")
            if usual:
                made += implementation_lines(given, row, screen)
        return made

    def results() -> list[dict[str, Any]]:
        made = []
        for given, row in zip(options.numbers, found, strict=True):
            for one in row:
                others = implementations.conversions(given.number, one.format) if usual else []
                elsewhere_dicts = [conversion.as_dict() for conversion in others]
                made.append({"input": given.as_dict(), **one.as_dict(), "elsewhere": elsewhere_dicts})
        return made

    about = {
        "numbers": [given.text for given in options.numbers],
        "formats": [format.name for format in chosen],
        "rounding": options.rounding,
        "overflow": options.overflow,
        "seed": options.seed,
    }
    return Answer(about, results, lines)


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep encode`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
