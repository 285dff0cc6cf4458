"""The command ``halfstep``: its first word or two choose a subcommand, and only the module of that one is imported.

``halfstep --help`` and ``halfstep --version`` therefore do not import torch and answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from halfstep._version import __version__
from halfstep.cli._interrupt import end_at_once, interrupted, raise_again
from halfstep.cli.command_line import complain, with_output
from halfstep.cli.terminal import Table, show
from halfstep.numerics.messages import instead


class _Command(NamedTuple):
    words: tuple[str, ...]
    module: str
    help: str


_LOOKUP = "halfstep.cli.formats.commands"  # whose main takes the command's name too
COMMANDS = (
    _Command(("format",), _LOOKUP, "show range, spacing and digits of number formats"),
    _Command(("encode",), _LOOKUP, "round numbers to every format and show the codes"),
    _Command(("decode",), _LOOKUP, "show the value of a code in every format of its width"),
    _Command(("why",), _LOOKUP, "explain how a number is rounded"),
    _Command(("compare",), _LOOKUP, "compare formats, and count the values that they share"),
    _Command(("ladder",), _LOOKUP, "draw range, density and codes of formats"),
    _Command(
        ("explore",),
        "halfstep.cli.pages.explore",
        "open a page on which to click bits, type numbers and compare formats",
    ),
    _Command(("plan",), "halfstep.cli.plan", "plan a training: bytes by part, messages and FLOPs of each GPU"),
    _Command(("inspect",), "halfstep.cli.inspect", "count the values of a checkpoint by their class in a format"),
    _Command(("convert",), "halfstep.cli.convert", "convert a checkpoint of an earlier version, or export its model"),
    _Command(("doctor",), "halfstep.cli.doctor", "find what is wrong with a checkpoint, or with this machine"),
    _Command(
        ("bench", "audit"),
        "halfstep.bench.audit.command",
        "compile every kernel for four GPU architectures, and check it",
    ),
    _Command(("bench", "gpu"), "halfstep.bench.gpu", "check kernels and steps on a GPU, and measure them"),
    _Command(("bench", "run"), "halfstep.bench.run", "measure every kernel and the AMP step, and installed peers"),
)

# Commands of earlier versions, and where they went.
LEFT = {"train": "halfstep train is now a script of the repository: python examples/train_gpt.py, see docs/training.md"}


def _listed(commands: Sequence[_Command]) -> Table:
    return Table((), [(f"  halfstep {' '.join(command.words)}", command.help) for command in commands], wraps=1)


def _show_usage() -> None:
    show(
        "usage: halfstep COMMAND [OPTIONS]",
        "",
        "Half-precision training for PyTorch with less memory and less memory traffic.",
        "",
        _listed(COMMANDS),
        "",
        "halfstep help COMMAND shows a command's options, as does --help after it; halfstep --version prints the "
        "version.",
    )


def _unknown(words: Sequence[str]) -> str:
    """The error message for words that are not a command, with the nearest one that is."""
    starts = {" ".join(command.words[: len(words)]) for command in COMMANDS}
    given = " ".join(words)
    return f"unknown command {given!r}; {instead(given, sorted(starts))}; see halfstep --help"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 for success, 1 for failure, 2 for wrong input, 128 + signal if interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed by 2>&-; print would write to standard output instead
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # refused now, not after hours of computing a result that cannot be printed
        complain("halfstep", "standard output is closed; send it to a file, or to /dev/null")
        return 1
    try:
        return with_output("halfstep", lambda: _run(arguments))
    except KeyboardInterrupt:
        return interrupted()


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        _show_usage()
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        print(f"halfstep {__version__}")
        return 0
    for command in COMMANDS:
        length = len(command.words)
        if tuple(arguments[:length]) == command.words:
            module = importlib.import_module(command.module)
            raise_again()
            return int(module.main(arguments[length:], *(command.words if command.module == _LOOKUP else ())))
    if arguments[0] in LEFT:
        complain("halfstep", LEFT[arguments[0]])
        return 2
    family = [command for command in COMMANDS if len(command.words) > 1 and command.words[0] == arguments[0]]
    if family and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        show(_listed(family))
        return 0 if len(arguments) > 1 else 2
    complain("halfstep", _unknown([word for word in arguments[: 2 if family else 1] if word != "--help"]))
    return 2


def program() -> int:
    """The program ``halfstep``: `main`, before and after which Ctrl-C ends the process at once."""
    end_at_once()
    status = main()
    end_at_once()
    return status


if __name__ == "__main__":
    sys.exit(program())
