"""Command lines of the lookup: names of formats, exact numbers, and JSON instead of the screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from halfstep.cli import command_line
from halfstep.cli.command_line import UsageError
from halfstep.cli.formats.values import number_dict
from halfstep.cli.terminal import Terminal, terminal
from halfstep.numerics.formats.exact import OVERFLOWS, Number, parse_number
from halfstep.numerics.formats.table import Format, formats

__all__ = ["Answer", "Given", "LookupParser", "UsageError"]


class Answer(NamedTuple):
    """The answer of a command: its parsed input, and functions for the results in JSON and the lines on the screen."""

    input: dict[str, Any]
    results: Callable[[], list[dict[str, Any]]]
    lines: Callable[[], list[str]]


class Given(NamedTuple):
    """A number, and the text it was parsed from."""

    text: str
    number: Number

    def as_dict(self) -> dict[str, str | None]:
        return {"text": self.text, **number_dict(self.number)}


class LookupParser(command_line.Parser):
    """The shared parser with an option --json, and with an option -f that takes several names."""

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(command, description, epilog)
        self.add_argument("--json", action="store_true", help="print JSON; its shape is in docs/lookup.md")

    def prepared(self, words: Sequence[str]) -> list[str]:
        """The words, with -f repeated before each name of a format that follows it."""
        many = {name for action in self._actions if action.dest == "formats" for name in action.option_strings}
        made: list[str] = []
        naming = plain = False  # after -f and a name; after --
        for word in super().prepared(words):
            if word == "--" and not plain:
                naming, plain = False, True
            elif not plain and word.startswith("-"):
                naming = word in many
            elif plain or command_line.is_number(word.strip()):
                naming = False
            elif naming and made[-1] not in many:
                made.append("-f")
            made.append(word)
        return made


def format_named(text: str) -> Format:
    """An argparse type: a format by name, alias or fields."""
    try:
        return formats[text.strip()]
    except (KeyError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def number(hint: str) -> Callable[[str], Given]:
    """An argparse type: a number, exactly. `hint` says what to do with the name of a format."""

    def parse(text: str) -> Given:
        text = text.strip()
        try:
            return Given(text, parse_number(text))
        except ValueError as error:
            known = f"; {text} is a format, and {hint}" if text in formats else ""
            raise argparse.ArgumentTypeError(f"{error}{known}") from error

    return parse


def add_formats(parser: LookupParser, help: str) -> None:
    """Add the option -f, which takes several names and may be repeated."""
    parser.add_argument(
        "-f", "--format", dest="formats", action="append", type=format_named, metavar="FORMAT", default=[], help=help
    )


def add_overflow(parser: command_line.Parser) -> None:
    """Add the option --overflow."""
    parser.add_argument(
        "--overflow",
        choices=OVERFLOWS,
        default="inf",
        metavar="MODE",
        help="what numbers beyond the largest become: inf (NaN in a format without), saturate (the largest number) or "
        "nan (default: inf)",
    )


def distinct(chosen: Iterable[Format]) -> list[Format]:
    """The named formats without repetitions; all formats if none was named."""
    return list({format.name: format for format in chosen}.values()) or list(formats.values())


def main(parser: LookupParser, argv: Sequence[str], answer: Callable[[argparse.Namespace, Terminal], Answer]) -> int:
    """Parse, answer, print. Returns the exit status, see `command_line.run`.

    Args:
        parser: of the command.
        argv: its words.
        answer: gives what to print. It raises `UsageError` for what cannot be done.
    """

    def show(options: argparse.Namespace) -> None:
        screen = terminal()
        found = answer(options, screen)
        if options.json:
            import json  # what only some need is not what all wait for

            content = {"command": parser.prog.split()[-1], "input": found.input, "results": found.results()}
            print(json.dumps(content, indent=2, allow_nan=False), flush=True)
        else:
            screen.show(found.lines(), sys.stdout)

    return command_line.run(parser, argv, show)
