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
from halfstep.cli.command_line import complain, with_output
from halfstep.cli.terminal import Table, show
from halfstep.numerics.messages import instead


class Command(NamedTuple):
    name: str
    module: str
    help: str


_LOOKUP = "halfstep.cli.formats.commands"  # whose main takes the command's name too
GROUPS = {
    "Training": (
        Command("plan", "halfstep.cli.plan", "memory, communication and FLOPs per GPU; whether the model fits"),
        Command("doctor", "halfstep.cli.doctor", "find problems of a checkpoint, or of this machine"),
    ),
    "Numbers": (
        Command("why", _LOOKUP, "explain how a number is rounded, and the rule that applies"),
        Command("encode", _LOOKUP, "round numbers to every format, and show their codes"),
        Command("decode", _LOOKUP, "show the value of a code in every format of its width"),
        Command("format", _LOOKUP, "show range, spacing and digits of number formats"),
        Command("compare", _LOOKUP, "compare formats, and count the values that they share"),
        Command("ladder", _LOOKUP, "draw range and codes of formats"),
        Command("explore", _LOOKUP, "open a page to click bits, type numbers and compare formats"),
    ),
    "Checkpoints": (
        Command("inspect", "halfstep.cli.inspect", "count the values of a checkpoint by their class in a format"),
        Command("convert", "halfstep.cli.convert", "convert an earlier checkpoint, or export a model"),
    ),
    "Kernels": (
        Command("bench run", "halfstep.bench.run", "measure every kernel, the AMP step and installed peers"),
        Command("bench gpu", "halfstep.bench.gpu", "check and measure kernels and steps on a GPU"),
        Command("bench audit", "halfstep.bench.audit.command", "compile and check every kernel for four GPUs"),
    ),
}
COMMANDS = tuple(command for group in GROUPS.values() for command in group)


def _listed(commands: Sequence[Command]) -> list[tuple[str, str]]:
    return [(f"  halfstep {command.name}", command.help) for command in commands]


def _show_usage() -> None:
    rows = [row for title, group in GROUPS.items() for row in (("", ""), (title, ""), *_listed(group))]
    show(
        "usage: halfstep COMMAND [OPTIONS]",
        "",
        "Half-precision training for PyTorch with less memory and less memory traffic.",
        Table((), rows, wraps=1),
        "",
        "halfstep help COMMAND shows a command's options, as does --help after it; halfstep --version prints the "
        "version.",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 for success, 1 for failure, 2 for wrong input, 130 if interrupted by Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed by 2>&-; print would write to standard output instead
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # refused now, not after hours of computing a result that cannot be printed
        complain("halfstep", "standard output is closed; send it to a file, or to /dev/null")
        return 1
    try:
        return with_output(" ".join(["halfstep", *arguments[:1]]), lambda: _run(arguments))
    except KeyboardInterrupt:
        print("halfstep: interrupted", file=sys.stderr, flush=True)
        return 130


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
        words = command.name.split()
        if arguments[: len(words)] == words:
            module, options = importlib.import_module(command.module), arguments[len(words) :]
            return int(module.main(options, command.name) if command.module == _LOOKUP else module.main(options))
    family = [command for command in COMMANDS if " " in command.name and command.name.split()[0] == arguments[0]]
    if family and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        show(Table((), _listed(family), wraps=1))
        return 0 if len(arguments) > 1 else 2
    unknown = [word for word in arguments[: 2 if family else 1] if word != "--help"]
    names = {" ".join(command.name.split()[: len(unknown)]) for command in COMMANDS}
    name = " ".join(unknown)
    complain("halfstep", f"unknown command {name!r}; {instead(name, sorted(names))}; see halfstep --help")
    return 2


if __name__ == "__main__":
    sys.exit(main())
