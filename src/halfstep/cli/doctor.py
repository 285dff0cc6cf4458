"""``halfstep doctor``: examine this machine, or a checkpoint.

Exit status: 0 if nothing was found, 1 if something was, 2 for wrong arguments and files that cannot be read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from halfstep.cli.command_line import Parser, a_path, answer, run
from halfstep.cli.terminal import Progress, Table, joined, text


def _labelled(rows: Iterable[tuple[str, str]]) -> Table:
    return Table((), [(f"  {label}", words) for label, words in rows], wraps=1)


def _run(options: argparse.Namespace) -> int:
    from halfstep.integrations.doctor.rules import examine_checkpoint, examine_environment, facts
    from halfstep.integrations.tensor_files import read_all

    checkpoint = read_all(options.files)
    if options.files:
        with Progress(1.0, patience=2.0) as progress:
            diagnosis = examine_checkpoint(checkpoint, lambda done: progress.show(done, "reading"))
    else:
        diagnosis = examine_environment()
    lines = checkpoint.lines()
    parts: list[Any] = [*lines, *[""] * bool(lines), text(diagnosis.headline, "strong"), ""]
    for finding in diagnosis.findings:
        severity = text(finding.severity, "bad" if finding.severity == "error" else "note")
        fields = ((name, getattr(finding, name)) for name in ("where", "what", "stake", "remedy"))
        parts += [joined(severity, f": {finding.name}"), _labelled(fields), ""]
    parts += [] if options.files else [_labelled(facts().items())]
    content = {"facts": facts(), "diagnoses": [diagnosis.as_dict()]}
    answer(options, lambda: checkpoint.as_dict() | content, lambda: parts)
    return int(not diagnosis.ok)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "doctor",
        "Examine a checkpoint or, without PATH, what halfstep needs of this machine; python -m torch.utils.collect_env "
        "prints the rest. Each finding says what is wrong, what it costs and what to do. In a training script, "
        "halfstep.doctor(model, optimizer, scaler) examines the training itself.",
        "examples: halfstep doctor; halfstep doctor run/step-00000120",
    )
    parser.add_argument("files", metavar="PATH", nargs="*", type=a_path, help="a checkpoint, or all parts of one")
    return run(parser, argv, _run, (ValueError,))
