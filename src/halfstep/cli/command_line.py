"""What all commands share: how a command line is read, how it is refused, and what happens where output cannot go.

Whatever is refused gets one line on standard error: what, its value, what is allowed or was probably meant; the exit
status is 2.
Nothing here loads a library, since a command that only looks something up must answer at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from halfstep.cli.terminal import Terminal, terminal
from halfstep.numerics.messages import instead, printable

PICTURES = (".png", ".svg", ".pdf")
# How a number begins; no option begins like a negative one.
_NUMBER = re.compile(r"[-+]?\s*(?:[\d.(∞]|inf|nan)", re.IGNORECASE)


def is_number(word: str) -> bool:
    """Whether a word begins like a number."""
    return _NUMBER.match(word) is not None


class UsageError(ValueError):
    """The command line asks for something that cannot be done."""


class _Help(argparse.HelpFormatter):
    """argparse's, told the width: it would import shutil to ask for it, for every option there is. Line breaks in
    descriptions are kept, and defaults are named."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=max(20, min(terminal().width, 100)))

    def _format_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None) -> str:
        if usage is None:
            return super()._format_usage(usage, actions, groups, prefix)
        return "\n".join(Terminal(self._width).wrap(f"usage: {usage}", " " * 7)) + "\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(super(_Help, self)._fill_text(line, width, indent) for line in text.split("\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        shown = action.option_strings and isinstance(action.default, (int, float, str)) and action.default != ""
        if shown and not isinstance(action.default, bool) and action.default is not argparse.SUPPRESS:
            return said if "default" in said else f"{said} (default: %(default)s)"
        return said


class Parser(argparse.ArgumentParser):
    """argparse, but -2.5 and -inf are numbers, a typo is answered with what was probably meant, nothing is guessed from
    a prefix, and what is wrong is raised as `UsageError`."""

    def __init__(self, command: str, description: str, epilog: str = "", usage: str | None = None) -> None:
        super().__init__(
            prog=f"halfstep {command}",
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Help,
        )

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"ignored explicit argument (.*)", r"takes no value, and was given \1", message)
        remedy = f"; see {self.prog} --help" if "required" in message or "expected" in message else ""
        raise UsageError(message + remedy)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options and arguments of a command line, in any order.

        Raises:
            UsageError: something is not allowed; the text says what is.
        """
        prepared = self.prepared(words)
        end = prepared.index("--") if "--" in prepared else len(prepared)
        for word in prepared[:end]:  # before argparse takes its value for an argument
            known = word.split("=")[0] if word.startswith("--") else word[:2]
            if word.startswith("-") and word != "-" and known not in self._option_string_actions:
                raise UsageError(self._unknown(word))
        found, unknown = self.parse_known_intermixed_args(prepared)
        if unknown:
            raise UsageError(self._unknown(unknown[0].strip()))
        return found

    def prepared(self, words: Sequence[str]) -> list[str]:
        """The words with a space, which keeps argparse from taking it for an option, before each negative number, and
        before every word with a minus after ``--``."""
        end = list(words).index("--") if "--" in words else len(words)
        return [
            f" {word}" if word.startswith("-") and (place > end or is_number(word)) else word
            for place, word in enumerate(words)
        ]

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return super()._get_value(action, arg_string[1:] if arg_string.startswith(" -") else arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value != [] and value not in action.choices:
            what = max(action.option_strings, key=len).lstrip("-") if action.option_strings else str(action.metavar)
            raise argparse.ArgumentError(
                action, f"unknown {what.lower().replace('-', ' ')} {value!r}; {instead(str(value), action.choices)}"
            )

    def _unknown(self, word: str) -> str:
        """What to say of a word that nothing takes."""
        if word.startswith("-"):
            options = [name for action in self._actions for name in action.option_strings]
            near = instead(word.split("=")[0], options, listed=False)
            return f"unknown option {word}; {near}see {self.prog} --help for those there are"
        takers = [action.option_strings[-1] for action in self._actions if action.choices and word in action.choices]
        hint = f"did you mean {takers[0]} {word}? " if takers and takers[0] else ""
        return f"unexpected argument {word!r}; {hint}{self.prog} takes options only: see {self.prog} --help"


# -------------------------------------------------------------------------------------------------------------- files


def picture(text: str) -> Path:
    """An argparse type: the file that a picture goes to."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a file name ending in {', '.join(PICTURES)}, but got {text!r}")
    return output_file(text)


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written, in a folder that is there."""
    path = Path(text)
    for wrong, code in (
        (not path.parent.exists(), errno.ENOENT),
        (path.parent.exists() and not path.parent.is_dir(), errno.ENOTDIR),
        (path.is_dir(), errno.EISDIR),
        (path.parent.is_dir() and not os.access(path.parent, os.W_OK), errno.EACCES),
    ):
        if wrong:
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot be written: {os.strerror(code)}; pass a file in a folder that can be"
            )
    return path


def input_file(text: str) -> Path:
    """An argparse type: a file that can be read."""
    path = Path(text)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise argparse.ArgumentTypeError(f"{text!r} {what}; pass a file that can be read")
    return path


def make_folder(path: Path, option: str = "--out") -> Path:
    """Make a folder, and prove that it can be written to before time is spent on what goes there.

    Raises:
        UsageError: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise UsageError(f"{option} {path} cannot be written to: {why}; pass a folder that can") from error
    return path


# ------------------------------------------------------------------------------------------------------------ running


def run(
    parser: Parser,
    argv: Sequence[str],
    command: Callable[[argparse.Namespace], int | None],
    refused: tuple[type[Exception], ...] = (),
    speaks: bool = True,
) -> int:
    """Parse and carry out. Returns the exit status: the command's; 2 for what is not allowed; 1 if output is not taken.

    Args:
        parser: of the command.
        argv: its words.
        command: gets the options.
        refused: what it raises, beside `UsageError`, with a text for the user.
        speaks: whether to say what is wrong; of several processes with the same complaint, one does.
    """
    refusals: tuple[type[Exception], ...] = (UsageError, *refused)
    try:
        status = command(parser.parse(argv))
        sys.stdout.flush()
        return status or 0
    except refusals as error:
        if speaks:
            complain(parser.prog, str(error))
        return 2
    except BrokenPipeError:
        discard_output()  # whoever read it has seen enough
        return 0
    except OSError as error:
        if error.filename is not None:
            complain(parser.prog, f"{error.filename} cannot be used: {error.strerror}")
            return 2
        complain(parser.prog, f"standard output cannot be written: {error.strerror or error}")
        discard_output()
        return 1


def complain(prog: str, text: str) -> None:
    """The one line on standard error."""
    print(f"{prog}: error: {printable(text)}", file=sys.stderr)


def discard_output() -> None:
    """What is left must not be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
