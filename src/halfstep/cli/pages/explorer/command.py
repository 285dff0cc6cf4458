"""``halfstep explore``: the explorer of formats, written to a file and opened in the browser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats import arguments
from halfstep.cli.pages.explorer.page import explorer_page
from halfstep.cli.pages.html import write
from halfstep.cli.terminal import say
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS

# In the working directory, since browsers that are installed as a snap or flatpak read neither /tmp nor hidden folders.
_FILE = "halfstep_explorer.html"


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "explore",
        "Write the explorer of number formats, one HTML file that needs no server and no network, and open it in the "
        "browser: bits to click, every format and rounding mode side by side, why, and two formats compared.",
        "example: halfstep explore --number 0.1 --format bf16 --format fp16",
    )
    parser.add_argument(
        "--out", type=command_line.output_file, default=_FILE, metavar="FILE", help="where to write the page"
    )
    parser.add_argument(
        "--number",
        type=arguments.number("formats come after -f"),
        metavar="NUMBER",
        help="the number to begin with, as in halfstep encode (default: 0.1)",
    )
    parser.add_argument(
        *("-f", "--format"),
        dest="formats",
        action="append",
        type=arguments.format_named,
        metavar="FORMAT",
        default=[],
        help="the format to begin with (default: bf16); given again, the one to compare it with (default: fp16)",
    )
    parser.add_argument(
        "--rounding",
        choices=ENCODE_ROUNDINGS[:-1],
        default="nearest",
        metavar="MODE",
        help=f"{', '.join(ENCODE_ROUNDINGS[:-1])} (default: nearest, ties to even)",
    )
    arguments.add_overflow(parser)
    parser.add_argument("--no-open", action="store_true", help="write the page, and do not open it")
    return parser


def _start(options: argparse.Namespace) -> dict[str, str]:
    """What the page begins with, by the keys of its address."""
    if len(options.formats) > 2:
        raise UsageError(
            f"argument -f/--format: expected at most two formats, the second to compare with, but got "
            f"{', '.join(format.name for format in options.formats)}; leave out {len(options.formats) - 2}"
        )
    first = options.formats[0].name if options.formats else "bf16"
    other = options.formats[1].name if len(options.formats) > 1 else "bf16" if first == "fp16" else "fp16"
    start = {"f": first, "g": other, "r": options.rounding, "o": options.overflow}
    return start if options.number is None else {"x": options.number.text, **start}


def _explore(options: argparse.Namespace) -> int:
    say(write(Path(options.out), explorer_page(_start(options)), opens=not options.no_open))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep explore`` with these arguments. Returns the exit status."""
    return command_line.run(_parser(), argv, _explore)
