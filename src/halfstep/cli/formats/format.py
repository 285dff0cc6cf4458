"""``halfstep format``: what formats hold."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.cli.formats import arguments
from halfstep.cli.formats.arguments import Answer
from halfstep.cli.formats.properties import fields, figures, format_dict, integers, names, overflow, short, special
from halfstep.cli.terminal import Terminal, fitted, table, visible
from halfstep.numerics.formats.table import Format, formats


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "format",
        "Show range, spacing, digits and special values of number formats. One name shows all of its properties.",
        "Formats: "
        + ", ".join(formats)
        + ",\nby any usual name, and your own by their fields, such as e5m7 or e4m3fnuz.\n"
        "example: halfstep format fp16",
    )
    parser.add_argument("named", nargs="*", type=arguments.format_named, metavar="NAME", help="formats (default: all)")
    return parser


def _card(format: Format, screen: Terminal) -> list[str]:
    """All properties of one format."""
    rows = [*names(format), *figures(format)]
    width = max(len(name) for name, _ in rows)
    lines = [screen.paint(format.name, "strong") + f": {format.title}"]
    for name, value in rows:
        indent = " " * (width + 4)
        first, *rest = Terminal(max(screen.width - len(indent), 12)).wrap(value)
        lines += [f"  {screen.paint(name.ljust(width), 'faint')}  {first}", *(indent + line for line in rest)]
    return lines


def _table(chosen: Sequence[Format], screen: Terminal) -> list[str]:
    """One row per format; with overflow, integers and the name in torch if they fit."""
    header = ["format", "s/e/m", "largest", "min normal", "least", "eps", "digits", "has"]
    rows = [
        [
            format.name,
            fields(format),
            short(format.max),
            short(format.min_normal),
            short(format.min_subnormal),
            short(format.eps),
            f"{format.digits10}-{format.max_digits10}",
            special(format),
        ]
        for format in chosen
    ]
    right = [False, False, True, True, True, True, True, False]
    more = [[overflow(one), integers(one), one.torch or "-"] for one in chosen]
    wide = table(
        [*header, "overflow", "integers to", "torch"],
        [[*row, *extra] for row, extra in zip(rows, more, strict=True)],
        [*right, False, True, False],
    )
    lines = wide if max(map(visible, wide)) <= screen.width else fitted(header, rows, right, screen.width)
    return [screen.paint(lines[0], "faint"), *lines[1:]]


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    chosen = arguments.distinct(options.named)
    about = {"formats": [format.name for format in chosen]}

    def lines() -> list[str]:
        return _card(chosen[0], screen) if len(chosen) == 1 else _table(chosen, screen)

    return Answer(about, lambda: [format_dict(format) for format in chosen], lines)


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep format`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
