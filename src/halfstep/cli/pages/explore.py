"""``halfstep explore``: the explorer of formats, served to the browser of this machine or written to a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats import arguments
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import say
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "explore",
        "Explore number formats in the browser: bits to click, every format and rounding mode side by side, why, and "
        "two formats compared. The page is served to this machine only, until Ctrl-C.",
        "example: halfstep explore --number 0.1 --format bf16 --format fp16",
    )
    parser.add_argument(
        "--number",
        type=arguments.number("formats come after -f"),
        metavar="NUMBER",
        help="the number to begin with, as in halfstep encode (default: 0.1)",
    )
    first = "the format to begin with (default: bf16); given again, the one to compare it with (default: fp16)"
    for names, settings in (
        arguments.formats_option(first), arguments.rounding_option(ENCODE_ROUNDINGS[:-1]), arguments.OVERFLOW,
    ):  # fmt: skip
        parser.add_argument(*names, **settings)
    parser.add_argument("--port", type=whole(0, 65535), default=0, metavar="N", help="port (default: any free one)")
    parser.add_argument("--no-open", action="store_true", help="do not open the page in the browser")
    parser.add_argument(
        "--out",
        type=command_line.output_file,
        metavar="FILE",
        help="write one answer to a file, instead of serving the page",
    )
    return parser


def _state(options: argparse.Namespace) -> dict[str, str]:
    """What the page begins with, by the keys of its address."""
    if len(options.formats) > 2:
        raise UsageError(
            f"argument -f/--format: expected at most two formats, the second to compare with, but got "
            f"{', '.join(format.name for format in options.formats)}; leave out {len(options.formats) - 2}"
        )
    first = options.formats[0].name if options.formats else "bf16"
    other = options.formats[1].name if len(options.formats) > 1 else "bf16" if first == "fp16" else "fp16"
    state = {"f": first, "g": other, "r": options.rounding, "o": options.overflow}
    return state if options.number is None else {"x": options.number.text, **state}


def _explore(options: argparse.Namespace) -> int:
    from halfstep.cli.pages.server import serve, write

    state = _state(options)
    if options.out is None:
        return serve("explorer", state, options.port, not options.no_open)
    say(write(Path(options.out), "explorer", state, not options.no_open))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep explore`` with these arguments. Returns the exit status."""
    return command_line.run(_parser(), argv, _explore)
