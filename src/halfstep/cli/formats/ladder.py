"""``halfstep ladder``: pictures of what formats can hold."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.cli.command_line import PICTURES, picture
from halfstep.cli.formats import arguments
from halfstep.cli.formats.arguments import Answer
from halfstep.cli.terminal import Terminal
from halfstep.numerics.formats.table import Format

CHOICES = ("range", "density", "codes", "all")


def _small(text: str) -> Format:
    """An argparse type: a format whose codes fit a picture."""
    format = arguments.format_named(text)
    if format.bits > 8:
        raise argparse.ArgumentTypeError(
            f"expected a format of up to 8 bits, but got {format.name}, which has {format.codes:,} codes"
        )
    return format


def _parser() -> arguments.LookupParser:
    parser = arguments.LookupParser(
        "ladder",
        "Draw the range of formats, the number of values between powers of two, and every code of a small format.",
        "Needs matplotlib: pip install 'halfstep[plots]'.\nexample: halfstep ladder --out formats.png",
    )
    parser.add_argument("--out", required=True, type=picture, metavar="FILE", help=f"one of {', '.join(PICTURES)}")
    parser.add_argument(
        *("named",),
        nargs="*",
        type=arguments.format_named,
        metavar="FORMAT",
        help="formats of range and density (default: all)",
    )
    parser.add_argument(
        "--kind",
        choices=CHOICES,
        default="all",
        metavar="KIND",
        help=f"{', '.join(CHOICES)} (default: all, one below the other)",
    )
    arguments.add_formats(parser, "the same, as in halfstep encode")
    parser.add_argument(
        "--codes", type=_small, default="e4m3fn", metavar="FORMAT", help="whose codes; up to 8 bits (default: e4m3fn)"
    )
    return parser


def _answer(options: argparse.Namespace, screen: Terminal) -> Answer:
    from halfstep.cli.formats import pictures

    kinds = list(pictures.PICTURES) if options.kind == "all" else [options.kind]
    chosen = arguments.distinct(options.named + options.formats)
    pictures.draw(kinds, chosen, options.codes, options.out)
    shown = [format.name for format in chosen]
    about = {"out": str(options.out), "kind": options.kind, "formats": shown, "codes": options.codes.name}
    found = [
        {"file": str(options.out), "kind": kind, "formats": [options.codes.name] if kind == "codes" else shown}
        for kind in kinds
    ]
    return Answer(about, lambda: found, lambda: [f"{options.out}: {', '.join(kinds)}"])


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep ladder`` with these arguments. Returns the exit status."""
    return arguments.main(_parser(), argv, _answer)
