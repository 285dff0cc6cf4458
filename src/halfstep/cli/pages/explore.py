"""``halfstep explore``: the explorer of formats, served to the browser of this machine or written to a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats import commands as lookup
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import say
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "explore",
        "Explore number formats in the browser: bits to click, every format and rounding mode side by side, why, and "
        "two formats compared. The page is served to this machine only, until Ctrl-C.",
        "example: halfstep explore 0.1 bf16 fp16",
    )
    add, number = parser.add_argument, lookup.number("the number comes first")
    add("begin", nargs="?", type=number, metavar="NUMBER", help="the number to begin with, as in halfstep encode: 0.1")
    first = "the format to begin with (default: bf16), and the one to compare it with (default: fp16)"
    for names, settings in (
        lookup.named("*", first),
        lookup.formats_option("the same, as in halfstep encode"),
        lookup.rounding_option(ENCODE_ROUNDINGS[:-1]),
        lookup.OVERFLOW,
    ):
        add(*names, **settings)
    add("--number", type=number, metavar="NUMBER", help="the number to begin with, too")
    add("--port", type=whole(0, 65535), default=0, metavar="N", help="port (default: any free one)")
    add("--no-open", action="store_true", help="do not open the page in the browser")
    add("--out", type=command_line.output_file, metavar="FILE", help="write one answer to a file, and serve no page")
    return parser


def _state(options: argparse.Namespace) -> dict[str, str]:
    """What the page begins with, by the keys of its address."""
    names = [family[0].name for family in (*options.named, *options.formats)]  # to a page, fp8 is its first format
    if len(names) > 2:
        raise UsageError(
            f"argument FORMAT: expected at most two formats, the second to compare with, but got {', '.join(names)}; "
            f"leave out {len(names) - 2}"
        )
    if options.begin and options.number:
        raise UsageError(
            f"--number {options.number.text} is a second number beside {options.begin.text}; leave one out"
        )
    first = names[0] if names else "bf16"
    second = names[1] if len(names) > 1 else "bf16" if first == "fp16" else "fp16"
    number = options.begin or options.number
    state = {"f": first, "g": second, "r": options.rounding, "o": options.overflow}
    return state if number is None else {"x": number.text, **state}


def _explore(options: argparse.Namespace) -> int:
    from halfstep.cli.pages.server import serve, write

    state = _state(options)
    if options.out is None:
        return serve("explorer", state, options.port, not options.no_open)
    say(write(options.out, "explorer", state))
    return 0


def main(argv: Sequence[str]) -> int:
    return command_line.run(_parser(), argv, _explore)
