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
        ("train",), "halfstep.cli.train.command", "train a small GPT on text in fp32, bf16, fp16, or compare them"
    ),
    _Command(
        ("bench", "audit"),
        "halfstep.bench.audit.command",
        "compile every kernel for four GPU architectures, and check it",
    ),
    _Command(("bench", "gpu"), "halfstep.bench.gpu", "check kernels and steps on a GPU, and measure them"),
    _Command(("bench", "run"), "halfstep.bench.run", "measure every kernel and the AMP step, and installed peers"),
)


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


def _shorten_openmp_spinning() -> None:
    """Make OpenMP's threads sleep sooner between two operations. Must run before torch loads and reads the setting.

    By default the threads spin for milliseconds. A step of a small model is hundreds of short operations, so on a
    machine with other work the threads mostly wait for one another's time slices: on two cores shared with two busy
    processes, a step took 254 ms, and 86 ms with this setting. A setting that the user made is kept.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


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
            if command.words == ("train",):
                _shorten_openmp_spinning()
            module = importlib.import_module(command.module)
            raise_again()
            return int(module.main(arguments[length:], *(command.words if command.module == _LOOKUP else ())))
    family = [command for command in COMMANDS if len(command.words) > 1 and command.words[0] == arguments[0]]
    if family and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        show(_listed(family))
        return 0 if len(arguments) > 1 else 2
    complain("halfstep", _unknown([word for word in arguments[: 2 if family else 1] if word != "--help"]))
    return 2


def program() -> int:
    """The program ``halfstep``: `main`, which ends the process where torchrun started it.

    Gloo's threads live on where torch keeps the process group after `destroy_process_group`: default arguments of
    torch.distributed.nn and the caches of DTensor refer to it. A thread that still frees the tensors of the last
    message while Python shuts down aborts the process ("terminate called without an active exception"), and torchrun
    reports a failed run.
    """
    end_at_once()
    status = main()
    end_at_once()
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(program())
