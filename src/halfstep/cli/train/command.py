"""``halfstep train``: its options, their checks, and the command."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from halfstep.cli.command_line import Parser, UsageError, a_path, make_folder, run
from halfstep.cli.figures import MISSING
from halfstep.cli.numbers import number, whole
from halfstep.cli.terminal import Progress, say, terminal
from halfstep.cli.train import adapters, data, loop, report, world
from halfstep.cli.train.model import INITS, SIZES
from halfstep.integrations import checkpoint
from halfstep.numerics.messages import printable

RUNS = {
    "fp32": [loop.Run("fp32", "fp32")],
    "bf16": [loop.Run("bf16", "bf16")],
    "fp16": [loop.Run("fp16", "fp16")],
    "compare": [
        loop.Run("fp32", "fp32", "torch.optim.AdamW"),
        loop.Run("bf16", "bf16"),
        loop.Run("fp16", "fp16"),
        loop.Run("bf16 without master", "bf16", "torch.optim.AdamW"),
    ],
}


_DECAY = number(float, lambda x: x >= 0, "a finite number of at least 0, such as 0.1")
_RATE = number(float, lambda x: x > 0, "a finite number above 0, such as 1e-3")
_SCALE = number(
    float, lambda x: 0 < x <= 2.0**127 and math.frexp(x)[0] == 0.5, "a power of two up to 2^127, such as 65536"
)


def _parser() -> Parser:
    parser = Parser(
        "train",
        description="Train a small byte-level GPT with halfstep's optimizer and loss scaler, and write a report. "
        "'compare' trains the same model on the same batches four times: fp32 with torch.optim.AdamW, bf16 with split "
        "masters, fp16 with the loss scaler, and bf16 with torch.optim.AdamW and no master.",
        epilog="Several processes: torchrun --nproc-per-node 2 -m halfstep train --strategy ddp … "
        "With --save-every and torchrun's --max-restarts 3, a run continues automatically if its processes die.",
    )
    what = parser.add_argument_group("model and data")
    what.add_argument("--precision", choices=list(RUNS), default="bf16", help="precision, or a comparison of all")
    what.add_argument(
        "--strategy",
        choices=world.STRATEGIES,
        default="single",
        help="one process, DDP, FSDP2, FSDP2 with replicas (HSDP), DDP with sharded optimizer state (ZeRO-1), or "
        "tensor parallelism",
    )
    what.add_argument("--size", choices=list(SIZES), default="tiny", help="size of the model")
    what.add_argument(
        "--data", type=a_path, metavar="PATH", help="file or folder to read (default: this Python's standard library)"
    )
    what.add_argument("--init", choices=list(INITS), default="scaled", help="how the matrices of the blocks are drawn")
    what.add_argument(
        "--base",
        type=a_path,
        metavar="PATH",
        help="begin with the weights of a run: a checkpoint, or its --out",
    )
    what.add_argument(
        "--lora", type=whole(1), metavar="R", help="train adapters of rank R beside the frozen weights of --base"
    )
    what.add_argument("--lora-alpha", type=_RATE, metavar="X", help="adapters count X / R times (default: 2 R)")
    what.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto chooses a GPU if there is one"
    )
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=whole(1), default=600, metavar="N", help="steps to train")
    how.add_argument("--batch", type=whole(1), default=16, metavar="N", help="windows per step, over all processes")
    how.add_argument("--lr", type=_RATE, metavar="X", help="peak learning rate (default: depends on --size)")
    how.add_argument("--warmup", type=whole(0), metavar="N", help="warm-up steps (default: a tenth of --steps)")
    how.add_argument("--weight-decay", type=_DECAY, default=0.1, metavar="X", help="weight decay of the matrices")
    how.add_argument("--init-scale", type=_SCALE, default=2.0**16, metavar="X", help="initial loss scale for fp16")
    how.add_argument(
        "--growth-interval", type=whole(1), default=60, metavar="N", help="finite steps after which the scale doubles"
    )
    how.add_argument(
        "--validate-every", type=whole(1), metavar="N", help="steps between validations (default: a tenth of --steps)"
    )
    how.add_argument(
        "--patience", type=whole(1), metavar="N", help="end after N validations without a better loss (default: never)"
    )
    how.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of the weights and the batches")
    laid = parser.add_argument_group("memory and communication")
    laid.add_argument(
        "--accumulate", type=whole(1), default=1, metavar="N", help="micro-batches per step, out of the same --batch"
    )
    laid.add_argument(
        "--activation-checkpointing", action="store_true", help="save only the inputs of blocks, and recompute blocks"
    )
    laid.add_argument(
        "--state-dtype", choices=list(loop.STATE_DTYPES), default="fp32", help="format of the optimizer's moments"
    )
    laid.add_argument("--master-weights", choices=loop.MASTERS, default="auto", help="kind of the fp32 masters")
    laid.add_argument("--cpu-offload", action="store_true", help="weights and optimizer on the CPU (fsdp, hsdp)")
    laid.add_argument(
        "--shard-size", type=whole(1), default=0, metavar="N", help="ranks per replica (hsdp; default: those of a node)"
    )
    laid.add_argument(
        "--compress", choices=world.COMPRESSIONS, default="none", help="dtype in which gradients are sent (ddp, zero1)"
    )
    left = parser.add_argument_group("output and checkpoints")
    left.add_argument(
        "--out", type=a_path, metavar="DIR", default="out/train", help="folder of the report and the checkpoints"
    )
    left.add_argument("--save-every", type=whole(0), default=0, metavar="N", help="steps between checkpoints; 0: none")
    left.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue from the newest checkpoint in --out, or from PATH: a checkpoint, or a folder with checkpoints "
        "(default: start a new run)",
    )
    return parser


def _folder(out: Path, run: loop.Run) -> Path:
    return out / "checkpoints" / run.name.replace(" ", "-")


def _named(path: Path, run: loop.Run) -> Path:
    """The checkpoint of --resume PATH: this one, or the newest in a folder of checkpoints or in a folder of --out."""
    if not path.is_dir() or (path / "manifest.json").is_file():
        return path
    found = next(
        (there for there in map(checkpoint.checkpoints, (path, path / run.name, _folder(path, run))) if there), []
    )
    if not found:
        raise UsageError(
            f"--resume {path} is a folder without a checkpoint of halfstep train for precision {run.name!r}; pass "
            "a checkpoint, the folder of some, or the --out of a run"
        )
    return found[-1][1]


def _resumed(
    options: argparse.Namespace, runs: Sequence[loop.Run], settings: loop.Settings, corpus: data.Corpus
) -> dict[str, dict[str, Any]]:
    """The checkpoint from which each run continues, read and checked before any run starts."""
    out = options.out
    found = {run.name: checkpoint.checkpoints(_folder(out, run)) for run in runs}
    if world.restarts() and options.save_every and (any(found.values()) or options.resume is None):
        return {
            run.name: loop.read_checkpoint(found[run.name][-1][1], run, settings, corpus)
            for run in runs
            if found[run.name]
        }
    if options.resume is None:
        taken = [(run, found[run.name]) for run in runs if found[run.name]]
        if options.save_every and taken:
            run, files = taken[0]
            raise UsageError(
                f"{_folder(out, run)} already holds checkpoints, up to step {files[-1][0]}, which this run would "
                "replace; pass --resume to continue from there, or another --out, or delete them"
            )
        return {}
    if options.resume:
        if len(runs) > 1:
            raise UsageError(
                "--resume PATH is for one precision; with --precision compare pass --resume without a path"
            )
        return {runs[0].name: loop.read_checkpoint(_named(Path(options.resume), runs[0]), runs[0], settings, corpus)}
    if not any(found.values()):
        raise UsageError(
            f"--resume, but there is no checkpoint below {out / 'checkpoints'} for precision {options.precision!r}; "
            "drop --resume to start again (with --save-every N to write some), or pass the --out they are in"
        )
    return {
        run.name: loop.read_checkpoint(found[run.name][-1][1], run, settings, corpus) for run in runs if found[run.name]
    }


class _Display:
    """The output during training: a progress line on a terminal, otherwise a line after every tenth of the steps.

    Only the first rank prints.
    """

    def __init__(self, steps: int, quiet: bool) -> None:
        self._steps, self._quiet = steps, quiet
        self._progress = Progress(steps, stream=sys.stdout) if sys.stdout.isatty() and not quiet else None
        self._next = 0.0

    @contextmanager
    def run(self) -> Iterator[None]:
        self._next = 0.0
        if self._progress is not None:
            self._progress = Progress(self._steps, stream=sys.stdout)
        with self._progress or nullcontext():
            yield

    def watch(self, trainer: loop.Trainer) -> None:
        history = trainer.history
        recent = history.step_ms[-20:]
        loss = sum(history.train_loss[-20:]) / len(history.train_loss[-20:])
        speed = trainer.settings.batch * trainer.settings.context / median(recent) * 1000 if recent else math.nan
        line = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        if trainer.scaler is not None:
            line += f"  scale {history.scale[-1]:,.0f}  skipped {sum(history.skipped):.0f}"
        if self._progress is not None:
            self._progress.show(trainer.step, f"{trainer.run.name}  {trainer.step}/{self._steps}  {line}")
        elif trainer.step >= self._next or trainer.step == self._steps:
            self._next = (trainer.step * 10 // self._steps + 1) * self._steps / 10
            self.note(f"{trainer.run.name}: step {trainer.step}/{self._steps}  {line}")

    def note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.clear()
        if not self._quiet:
            for line in text.splitlines():
                say(line)


def _command(argv: Sequence[str]) -> str:
    """The command line that continues this run."""
    words = [word for word in argv if word != "--resume"]
    return shlex.join(["halfstep", "train", *words, "--resume"])


def _check_layout(options: argparse.Namespace) -> None:
    """Raise where the optimizers of the runs do not have the masters and moments that were chosen."""
    if options.precision == "compare" and (options.state_dtype, options.master_weights) != ("fp32", "auto"):
        raise UsageError(
            f"--state-dtype {options.state_dtype} --master-weights {options.master_weights} with --precision compare, "
            "where torch's optimizer has neither; pass --precision bf16, fp32 or fp16"
        )
    if options.master_weights.startswith("split") and options.precision != "bf16":
        raise UsageError(
            f"expected --precision bf16 with --master-weights {options.master_weights}, but got {options.precision}"
        )


def _check_adapters(options: argparse.Namespace) -> None:
    """Raise where adapters cannot be trained."""
    if options.lora is None and options.lora_alpha is not None:
        raise UsageError(f"--lora-alpha {options.lora_alpha:g} without --lora; pass --lora R too, or neither")
    if options.lora is not None and options.base is None:
        raise UsageError(
            f"--lora {options.lora} without --base, whose frozen weights it adapts; pass --base with a checkpoint that "
            "halfstep train --save-every N wrote"
        )
    if options.lora is not None and options.strategy == "tp":
        raise UsageError(
            f"--lora {options.lora} with --strategy tp, which shards the matrices; pass --strategy single, ddp, fsdp, "
            "hsdp or zero1"
        )
    if options.base is not None and options.init != "scaled":
        raise UsageError(f"--init {options.init} with --base, whose weights replace those drawn; pass one of them")


def _train(options: argparse.Namespace, argv: Sequence[str]) -> int:
    out, runs = options.out, RUNS[options.precision]
    _check_adapters(options)
    base = None if options.base is None else adapters.read_base(options.base, options.size)
    settings = loop.Settings(
        size=options.size,
        steps=options.steps,
        batch=options.batch,
        seed=options.seed,
        lr=SIZES[options.size].lr if options.lr is None else options.lr,
        weight_decay=options.weight_decay,
        warmup=options.steps // 10 if options.warmup is None else options.warmup,
        init_scale=options.init_scale,
        growth_interval=options.growth_interval,
        state_dtype=options.state_dtype,
        master_weights=options.master_weights,
        init=options.init,
        base="" if base is None else base.digest,
        lora=options.lora or 0,
        lora_alpha=0.0 if options.lora is None else options.lora_alpha or 2.0 * options.lora,
        validate_every=options.validate_every or 0,
        patience=options.patience or 0,
    )
    _check_layout(options)
    if settings.warmup >= settings.steps:
        raise UsageError(
            f"expected --warmup to be from 0 to {settings.steps - 1}, below --steps, but got {settings.warmup}"
        )
    layout = world.ExecutionOptions(
        shard_size=options.shard_size,
        accumulate=options.accumulate,
        activation_checkpointing=options.activation_checkpointing,
        cpu_offload=options.cpu_offload,
        compress=options.compress,
    )
    world.check(options.strategy, options.device, options.batch, SIZES[options.size].heads, layout)
    corpus = data.read_corpus(options.data, settings.context)
    make_folder(out)
    resumed = _resumed(options, runs, settings, corpus)
    results: list[loop.RunResult] = []
    with world.world(options.strategy, options.device, layout) as place, loop.Interrupt().listening() as interrupt:
        display = _Display(settings.steps, quiet=place.rank != 0)
        display.note(
            f"{corpus.name}: {corpus.size:,} bytes in {corpus.files:,} file{'s' * (corpus.files > 1)}; "
            f"on {place.device}, {place.size} process{'es' * (place.size > 1)}"
        )
        if world.restarts():
            what = "continuing" if resumed else "no checkpoint to continue from, starting from the beginning"
            display.note(f"processes restarted by torchrun, restart {world.restarts()}: {what}")
        for run in runs:
            with display.run():
                if run.name in resumed:
                    display.note(f"{run.name}: continuing after step {resumed[run.name]['step']}")
                result = loop.train(
                    run,
                    settings,
                    corpus,
                    place,
                    folder=_folder(out, run),
                    save_every=options.save_every,
                    resumed=resumed.get(run.name),
                    interrupt=interrupt,
                    watch=display.watch,
                    note=display.note,
                    base=base,
                )
            if result.stopped is not None:
                saved = (
                    f"; continue with: {_command(argv)}"
                    if options.save_every
                    else "; nothing saved without --save-every"
                )
                display.note(
                    f"{run.name}: stopped by {signal.Signals(result.stopped).name} after step {result.steps}{saved}"
                )
                return 128 + result.stopped
            if result.trouble is not None:
                display.note(f"{run.name}: given up: {result.trouble}")
            results.append(result)
        if place.rank == 0:
            content = report.report(results, settings, corpus)
            screen = terminal()
            screen.show(report.table(content, screen), sys.stdout)
            for name, known in report.overflows(content).items():
                display.note(f"{name}: {known}")
            for note in content["notes"]:
                display.note(note)
            written = report.write(out, content)
            if not any(path.suffix == ".png" for path in written):
                display.note(f"no report.png: {MISSING}")
            display.note("report: " + ", ".join(printable(str(path)) for path in written))
    return 1 if any(result.trouble for result in results) else 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep train`` with the arguments `argv`. Returns the exit status (see ``halfstep.__main__``)."""
    return run(
        _parser(),
        argv,
        lambda options: _train(options, argv),
        (data.DataError, world.LaunchError, checkpoint.CheckpointError),
        speaks=os.environ.get("RANK", "0") == "0",
    )
