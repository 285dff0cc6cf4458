"""Shared by all commands: parsing the command line, refusing wrong input, and handling output that cannot be written.

Wrong input is reported in one line on standard error, with the argument, its value, and the allowed values or a
suggestion, and gives exit status 2. This module imports no third-party library, so that lookups start quickly.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import itertools
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

from halfstep.cli.figures import MISSING
from halfstep.cli.terminal import show
from halfstep.numerics.messages import instead, printable

_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NEGATIVE = re.compile(r"-\s*(?:[\d.(∞]|inf|nan)", re.IGNORECASE)  # the start of a number; no option starts so


class UsageError(ValueError):
    """The command line asks for something that cannot be done."""


class _Help(argparse.HelpFormatter):
    """argparse's formatter, with the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        described, default = action.help or "", action.default
        shown = action.option_strings and type(default) in (int, float, str) and default not in ("", argparse.SUPPRESS)
        return f"{described} (default: %(default)s)" if shown and "default" not in described else described


class Parser(argparse.ArgumentParser):
    """argparse's parser with an option --json, and with four changes.

    Words such as -2.5 and -inf are numbers, a typo is answered with the nearest option, options cannot be abbreviated,
    and errors are raised as `UsageError`.
    """

    def __init__(
        self, command: str, description: str, epilog: str = "", usage: str | None = None, json: bool = True
    ) -> None:
        how: dict[str, Any] = {"usage": usage, "description": description, "epilog": epilog, "allow_abbrev": False}
        super().__init__(prog=f"halfstep {command}", formatter_class=_Help, **how)
        self._negative_number_matcher = _NEGATIVE
        if json:
            self.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"ignored explicit argument (.*)", r"takes no value, and was given \1", message)
        remedy = "" if ";" in message or "hoose from" in message else f"; see {self.prog} --help"
        raise UsageError(message + remedy)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and arguments of a command line, in any order. Raises `UsageError` for what is not allowed."""
        # Unknown options are refused first; argparse would complain about the word after one instead.
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.split("=")[0] if word.startswith("--") else word[:2]
            is_fine = option in self._option_string_actions or word == "-" or _NEGATIVE.match(word)
            if word.startswith("-") and not is_fine:
                near = instead(word.split("=")[0], self._option_string_actions, listed=False)
                raise UsageError(f"unknown option {word}; {near}leave it out, or see {self.prog} --help for the others")
        options, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}; {self.prog} takes options only: see {self.prog} --help")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value != [] and value not in action.choices:
            name = max(action.option_strings, key=len).lstrip("-") if action.option_strings else str(action.metavar)
            remedy = instead(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"unknown {name.lower().replace('-', ' ')} {value!r}; {remedy}")


def number(convert: Callable[[str], float], fine: Callable[[float], bool], allowed: str) -> Callable[[str], Any]:
    """An argparse type: a finite number that `convert` returns and `fine` accepts; `allowed` describes these."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
            if math.isfinite(value) and fine(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"expected {allowed}, but got {text.strip()!r}")

    return parse


def whole(low: int, high: int = 2**63 - 1, note: str = "") -> Callable[[str], Any]:
    """An argparse type: an integer from `low` to `high`. The error ends with `note`."""
    span = f"of at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
    return number(int, lambda value: low <= value <= high, f"an integer {span}{note}")


above_zero = number(float, lambda value: value > 0, "a number above 0")


def _count(text: str) -> int:
    """A positive integer, such as 7e9, 7B, 1.5B or 7_000_000. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]+)?)([kmbgt]?)", text.strip().lower())
    value = Fraction(match[1].replace("_", "")) * _SUFFIXES.get(match[2], 1) if match else Fraction(0)
    if value < 1 or value.denominator != 1:
        raise ValueError(text)
    return int(value)


def count(example: str = "") -> Callable[[str], int]:
    """An argparse type: an integer of at least 1, also written as 7e9, 7B or 350M. The error ends with `example`."""
    return number(_count, lambda value: True, "an integer of at least 1" + example)


def a_path(text: str) -> Path:
    """An argparse type: any path. An empty one would be the current folder, which nobody means by it."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, but got ''")
    return Path(text)


def picture(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"expected a file name ending in .png, .svg, .pdf, but got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(MISSING)
    return output_file(text)


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written, in an existing folder."""
    path, code = a_path(text), 0
    if not path.parent.is_dir():
        code = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
    elif path.is_dir() or not os.access(path.parent, os.W_OK):
        code = errno.EISDIR if path.is_dir() else errno.EACCES
    if code:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: {os.strerror(code)}; pass a file in a folder that can be"
        )
    return path


def make_folder(path: Path) -> Path:
    """Create a folder and check that files can be written to it, before time is spent on computing them."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written to: {error.strerror}; pass a folder that can") from error
    return path


def run(
    parser: Parser, argv: Sequence[str], command: Callable[[argparse.Namespace], int | None],
    refused: tuple[type[Exception], ...] = (),
) -> int:  # fmt: skip
    """Carry out a command with the parsed options. Returns its exit status: 0 for None, 2 after a refusal.

    The texts of `UsageError` and of the `refused` exceptions are error messages for the user.
    """
    refusals: tuple[type[Exception], ...] = (UsageError, *refused)
    try:
        return command(parser.parse(argv)) or 0
    except refusals as error:
        complain(parser.prog, str(error))
        return 2


def answer(
    options: argparse.Namespace, content: Callable[[], Any], parts: Callable[[], Iterable[Any]], **how: Any
) -> None:
    """Print `content` as one JSON object if ``--json`` was given, and `parts` otherwise, as `terminal.show` does."""
    if options.json:
        import json  # what only some need is not what all wait for

        print(json.dumps(content(), indent=2, allow_nan=False, default=str), flush=True)
    else:
        show(*parts(), **how)


def typed_command(command: str, options: Iterable[tuple[str, str]]) -> str:
    """A command line that a page shows: options by their names without ``--``, an empty text for one without a value.

    The texts come from the address of the page, that is from whoever wrote the link. Characters that cannot be printed
    are left out, since they could end a paste into a terminal. A value that begins with "-" stays the value of its
    option.
    """
    words = [command]
    for name, text in options:
        value = "".join(filter(str.isprintable, text))
        if value.startswith("-"):
            words.append(shlex.quote(f"--{name}={value}"))
        else:
            words.append(f"--{name} {shlex.quote(value)}" if value else f"--{name}")
    return " ".join(words)


def with_output(prog: str, command: Callable[[], int]) -> int:
    """Run `command` and flush standard output, so that an error of the output is reported here and not at exit.

    Returns what `command` returned; 0 if the reader of a pipe closed it early, 1 if standard output cannot be written,
    and 2 if another file cannot be used.
    """
    status = 0
    try:
        try:
            return command()
        finally:  # argparse ends the process after printing help, with output that may still be buffered
            sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        if error.filename is not None:
            complain(prog, f"{error.filename} cannot be used: {error.strerror}")
            return 2
        complain(prog, f"standard output cannot be written: {error.strerror or error}")
        status = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would fail to write the rest at exit
    return status


def complain(prog: str, text: str) -> None:
    print(printable(f"{prog}: error: {text}"), file=sys.stderr)
