"""``halfstep convert``: a checkpoint of an earlier version as one of this version, or a model for other programs.

Exit status: 0; 2 for wrong arguments and checkpoints that cannot be read or written.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halfstep.cli.command_line import Parser, UsageError, a_path, answer, run
from halfstep.cli.terminal import UNBROKEN


def _run(options: argparse.Namespace) -> None:
    from halfstep.integrations import checkpoint

    try:
        new = (checkpoint.export if options.model else checkpoint.convert)(options.old, options.new)
    except checkpoint.CheckpointError as error:
        raise UsageError(str(error)) from error
    size = sum(file.stat().st_size for file in (new, *new.rglob("*")) if file.is_file())
    content = {"read": str(options.old), "written": str(new), "bytes": size}
    answer(options, lambda: content, lambda: [str(new)], columns=UNBROKEN)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "convert",
        "Convert a checkpoint of an earlier version (step-….pt, or a folder with .distcp files) or of "
        "torch.distributed.checkpoint to this version. With --model, write the model of a checkpoint as one file, "
        "model.safetensors, which safetensors and transformers can read.",
        "examples: halfstep convert step-00000120.pt run/step-00000120; halfstep convert --model run/step-00000120 .",
    )
    parser.add_argument("old", metavar="OLD", type=a_path, help="a checkpoint; it is not changed")
    parser.add_argument("new", metavar="NEW", type=a_path, help="the folder to write; with --model, for the file")
    parser.add_argument("--model", action="store_true", help="write only the model, for other programs")
    return run(parser, argv, _run, (OSError,))
