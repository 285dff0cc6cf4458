"""``halfstep doctor``: examine this machine, or a checkpoint.

Exit status: 0 if nothing was found, 1 if something was, 2 for wrong arguments and files that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from halfstep.cli.command_line import Parser, a_path, run
from halfstep.cli.terminal import Progress, Terminal, terminal
from halfstep.integrations.doctor.environment import DEBUGGING, Machine, examine_environment
from halfstep.integrations.doctor.findings import Diagnosis
from halfstep.integrations.doctor.stored import examine_checkpoint
from halfstep.integrations.tensor_files import TensorFileError

PATIENCE = 2.0  # seconds before progress is shown


def _parser() -> Parser:
    parser = Parser(
        "doctor",
        "Examine a checkpoint, or without one this machine: versions, GPUs, compiler, and what torchrun or SLURM has "
        "set. Names what is wrong, what it costs and what to do. halfstep.doctor(model, optimizer, scaler) in a "
        "training script examines the training itself.",
        "examples: halfstep doctor    halfstep doctor checkpoint.pt    torchrun ... $(which halfstep) doctor",
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=a_path, help="a checkpoint, or all parts of one")
    parser.add_argument("--env", action="store_true", help="examine the machine too, if files are given")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _labelled(label: str, text: str, width: int, screen: Terminal) -> list[str]:
    """A paragraph beside its label, in a column that begins at `width`."""
    first, *more = screen._replace(width=max(20, screen.width - width)).wrap(text)
    return [f"{label:{width}}{first}", *(" " * width + line for line in more)]


def _lines_of(diagnosis: Diagnosis, screen: Terminal) -> list[str]:
    lines = screen.title(diagnosis.headline)
    for finding in diagnosis.findings:
        severity = screen.paint(finding.severity, "bad" if finding.severity == "error" else "note")
        lines.append(f"{severity}: {finding.name}")
        for name in ("where", "what", "stake", "remedy"):
            lines += _labelled(f"  {name}", getattr(finding, name), 10, screen)
        lines.append("")
    return lines


def _run(options: argparse.Namespace) -> int:
    screen, machine = terminal(), Machine.here()
    on_machine = options.env or not options.files
    found: list[Diagnosis] = []
    if options.files:
        with Progress(1.0, patience=PATIENCE) as progress:
            found.append(examine_checkpoint(options.files, lambda done: progress.show(done, "reading")))
    if on_machine:
        found.append(examine_environment(machine))
    if options.json:
        print(json.dumps({"facts": dict(machine.facts()), "diagnoses": [one.as_dict() for one in found]}, indent=2))
    else:
        lines = [line for one in found for line in _lines_of(one, screen)]
        if on_machine:
            lines += [line for name, value in machine.facts() for line in _labelled(f"  {name}", value, 14, screen)]
            lines += ["", *screen.title("Variables for debugging, and what they do")]
            width = max(len(name) for name, _ in DEBUGGING) + 4
            for name, what in DEBUGGING:
                lines += _labelled(f"  {name}", what, width, screen)
        screen.show(lines, sys.stdout)
    return int(not all(one.ok for one in found))


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep doctor`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run, (TensorFileError,))
