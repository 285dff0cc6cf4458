"""Command lines of the lookup: numbers with a minus in front, names of formats, and what is said about typos."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from halfstep.bench.lookup.terminal import Terminal, terminal
from halfstep.bench.lookup.view import number_dict
from halfstep.numerics.exact import OVERFLOWS, Number, parse_number
from halfstep.numerics.formats import Format, formats

# How a number begins; no option begins like a negative one.
_NUMBER = re.compile(r"[-+]?\s*(?:[\d.(∞]|inf|nan)", re.IGNORECASE)


class UsageError(ValueError):
    """The command line asks for something that cannot be done."""


class Answer(NamedTuple):
    """What a command has found: the words it understood; on demand, results for JSON and lines for the screen."""

    input: dict[str, Any]
    results: Callable[[], list[dict[str, Any]]]
    lines: Callable[[], list[str]]


class Given(NamedTuple):
    """A number and how it was written."""

    text: str
    number: Number

    def as_dict(self) -> dict[str, str | None]:
        return {"text": self.text, **number_dict(self.number)}


def _help(prog: str) -> argparse.HelpFormatter:
    """argparse's, told the width: it would import shutil to ask for it, for every option there is."""
    return argparse.RawDescriptionHelpFormatter(prog, width=min(terminal().width, 100))


class Parser(argparse.ArgumentParser):
    """argparse, but -2.5 and -inf are numbers, -f takes several names, a typo is answered with what was probably
    meant, and nothing is guessed from a prefix."""

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"halfstep {command}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_help,
        )
        self.add_argument("--json", action="store_true", help="print JSON; its shape is in docs/lookup.md")

    def error(self, message: str) -> NoReturn:
        remedy = f"; see {self.prog} --help" if "required" in message or "expected" in message else ""
        raise UsageError(message + remedy)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and arguments of a command line, in any order.

        Raises:
            UsageError: something is not allowed; the text says what is.
        """
        found, unknown = self.parse_known_intermixed_args(self._separated(words))
        if unknown:
            raise UsageError(f"unknown option {unknown[0]}; {self._hint(unknown[0])}")
        return found

    def _hint(self, option: str) -> str:
        options = [name for action in self._actions for name in action.option_strings]
        near = did_you_mean(option.split("=")[0], options)
        return f"{near}see {self.prog} --help for those there are"

    def _separated(self, words: Sequence[str]) -> list[str]:
        """The words with -f before each of its names, and a space, which keeps argparse from taking it for an option,
        before each negative number."""
        many = {name for action in self._actions if action.dest == "formats" for name in action.option_strings}
        made: list[str] = []
        naming = plain = False  # after -f and a name; after --
        for word in words:
            if word == "--" and not plain:
                naming, plain = False, True
            elif plain or _NUMBER.match(word):
                naming = False
                made.append(f" {word}" if word.startswith("-") else word)
            elif word.startswith("-"):
                naming = word in many
                made.append(word)
            elif naming and made[-1] not in many:
                made += ["-f", word]
            else:
                made.append(word)
        return made


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """A question about the nearest of the words allowed, with a space after it; empty if none is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


def choice(what: str, allowed: Sequence[str]) -> Callable[[str], str]:
    """An argparse type: one of some words."""

    def parse(text: str) -> str:
        if text not in allowed:
            hint = did_you_mean(text, allowed)
            listed = f"{'A' if hint else 'a'}llowed are {', '.join(allowed)}"
            raise argparse.ArgumentTypeError(f"unknown {what} {text!r}; {hint}{listed}")
        return text

    return parse


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


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer in a range."""

    def parse(text: str) -> int:
        if re.fullmatch(r"\s*\d{1,30}\s*", text) and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is not allowed; allowed are integers from {low} to {high}")

    return parse


def add_formats(parser: Parser, help: str) -> None:
    """The option -f, once with several names or several times."""
    parser.add_argument(
        "-f", "--format", dest="formats", action="append", type=format_named, metavar="FORMAT", default=[], help=help
    )


def add_overflow(parser: Parser) -> None:
    """The option --overflow."""
    parser.add_argument(
        "--overflow",
        type=choice("overflow", OVERFLOWS),
        default="inf",
        metavar="MODE",
        help="what numbers beyond the largest become: inf (NaN in a format without), saturate (the largest number) or "
        "nan (default: inf)",
    )


def distinct(chosen: Iterable[Format]) -> list[Format]:
    """The formats as named, each once; all there are if none was named."""
    return list({format.name: format for format in chosen}.values()) or list(formats.values())


def main(parser: Parser, argv: Sequence[str] | None, answer: Callable[[argparse.Namespace, Terminal], Answer]) -> int:
    """Parse, answer, print. Returns the exit status: 0, 2 for what is not allowed, 1 if the output is not taken.

    Args:
        parser: of the command.
        argv: its words; those of the process if None.
        answer: gives what to print. It raises `UsageError` for what cannot be done.
    """
    command = parser.prog.split()[-1]
    try:
        options = parser.parse(sys.argv[2:] if argv is None else argv)
        screen = terminal()
        found = answer(options, screen)
        if options.json:
            import json  # what only some need is not what all wait for

            content = {"command": command, "input": found.input, "results": found.results()}
            print(json.dumps(content, indent=2, allow_nan=False), flush=True)
        else:
            screen.show(found.lines(), sys.stdout)
    except UsageError as error:
        print(f"halfstep {command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is left must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"halfstep {command}: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
