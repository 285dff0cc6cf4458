"""``halfstep bench clipping``: what the norm of the last step does to a training, beside exact clipping.

Each run trains the GPT of ``halfstep train`` in bf16 with steps in the backward. In every so many steps, the loss is
multiplied by a factor, so that the gradients of this step are that many times as large. The table has the validation
loss at the end, with and without such spikes. Exact clipping has the bits of clipping after the backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import halfstep
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.cli.terminal import Progress
from halfstep.cli.train.data import Corpus, DataError, read_corpus
from halfstep.cli.train.model import GPT, SIZES
from halfstep.cli.train.precision import Precision
from halfstep.integrations.release import step_in_backward

ROWS, VALIDATED = 16, 64  # windows of a batch and of the validation set
MODES: dict[str, Any] = {"no clipping": None, "exact": "exact", "previous": "previous"}


def final_loss(
    mode: str, corpus: Corpus, size: str, steps: int, seed: int, every: int | None, factor: float, limit: float = 1.0
) -> float:
    """The validation loss in nats per byte after a training.

    Args:
        mode: a name of `MODES`.
        corpus: the text.
        size: a name of `SIZES`.
        steps: number of steps.
        seed: of the weights and the batches.
        every: the loss is multiplied by `factor` in each step whose number is a multiple of this; None for never.
        factor: see `every`.
        limit: the norm to which gradients are clipped.
    """
    device, shape = torch.device("cpu"), SIZES[size]
    model = GPT(shape, Precision.on("bf16", device), seed).to(torch.bfloat16)
    clipping = MODES[mode]
    optimizer = halfstep.AdamW(model.parameters(), lr=shape.lr, max_grad_norm=None if clipping is None else limit)
    handle = step_in_backward(model, optimizer, clipping=clipping)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = shape.lr * min(1.0, step / 20, 1.1 - step / steps)
        inputs, targets = corpus.batch(seed, step, range(ROWS), shape.context)
        loss = model(inputs, targets)
        if every is not None and step % every == 0:
            loss = loss * factor
        if clipping == "exact":
            with handle.check():
                loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found: torch.Tensor = model(*corpus.validation(range(VALIDATED), VALIDATED, shape.context))
    return found.item()


def _parser() -> Parser:
    parser = Parser("bench clipping", "Compare clipping by the norm of the last step with exact clipping.")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="size of the model (default: tiny)")
    parser.add_argument("--steps", type=whole(1), default=300, metavar="N", help="steps (default: 300)")
    parser.add_argument("--seeds", type=whole(1), default=3, metavar="N", help="seeds, from 0 (default: 3)")
    parser.add_argument("--every", type=whole(1), default=50, metavar="N", help="steps between spikes (default: 50)")
    parser.add_argument("--factor", type=whole(1), default=1000, metavar="N", help="size of a spike (default: 1,000)")
    parser.add_argument("--data", metavar="PATH", help="a file or folder (default: the Python standard library)")
    return parser


def _run(options: argparse.Namespace) -> int:
    """Print a Markdown table."""
    corpus = read_corpus(options.data, SIZES[options.size].context)
    kinds = {"no spikes": None, f"{options.factor:,} times the loss in one of {options.every:,} steps": options.every}
    print("| validation loss | " + " | ".join(f"seed {seed}" for seed in range(options.seeds)) + " |")
    print("|---|" + "---|" * options.seeds)
    progress = Progress(len(kinds) * len(MODES) * options.seeds)
    done = 0
    for kind, every in kinds.items():
        for mode in MODES:
            losses = []
            for seed in range(options.seeds):
                progress.show(done, f"{mode}, {kind}")
                losses.append(final_loss(mode, corpus, options.size, options.steps, seed, every, float(options.factor)))
                done += 1
            progress.clear()
            print(f"| {mode}, {kind} | " + " | ".join(f"{one:.4f}" for one in losses) + " |", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench clipping`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run, (DataError,))
