"""Train a small byte-level GPT with halfstep's optimizer and loss scaler, in one process or several, and report.

python examples/train_gpt.py --precision compare
torchrun --nproc-per-node 2 examples/train_gpt.py --strategy fsdp --precision bf16

All precisions and strategies use the same initial weights and batches; a step that the scaler skips counts as a step.
The host reads losses and scales once every few steps (on a CPU, in every step). See docs/training.md.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any, NamedTuple

if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:
    # Set before torch loads OpenMP, whose threads then spin less. On busy cores, a step took 86 ms instead of 254 ms.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import report
import torch
import torch.distributed as dist
from corpus import Corpus, read_corpus
from gpt import GPT, INITS, RATES, SIZES, Precision, add_adapters, merged
from ranks import World, connect, restarts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import halfstep
from halfstep.bench.run_report import environment
from halfstep.cli import command_line
from halfstep.cli.command_line import Parser, UsageError, a_path, above_zero, complain, number, whole
from halfstep.cli.terminal import Progress, say
from halfstep.integrations import checkpoint, zero
from halfstep.integrations.checkpoint import CheckpointError
from halfstep.integrations.monitor import AmpMonitor
from halfstep.numerics.planning import card
from halfstep.numerics.planning.work import training_flops
from halfstep.numerics.scaling.stand_ins import gradient_of

Weights = dict[str, torch.Tensor]

FORMAT = "train_gpt 1"
STRATEGIES = ("single", "ddp", "fsdp", "zero1")
STATE_DTYPES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
VALIDATION_ROWS = 128
FINAL_SHARE = 0.05  # the final training loss is the mean over this fraction of the steps, since batches are noisy
BETAS = (0.9, 0.95)  # usual for GPTs
NON_FINITE = 5  # consecutive steps with a non-finite loss after which a run is aborted
GRADIENT_STEPS = 20  # maximum number of steps whose gradients are counted; at most every tenth step is
# The options that do not determine the bits of a run, and those that its plan has in another form.
NOT_SETTINGS = {"strategy", "accumulate", "checkpointing", "out", "save_every", "resume", "precision", "data"}


class Run(NamedTuple):
    """One row of the report: a precision and an optimizer."""

    name: str
    precision: str
    optimizer: str = "halfstep.AdamW"

    folder = property(lambda self: self.name.replace(" ", "-"))  # the name of its checkpoint folder


RUNS = {name: [Run(name, name)] for name in ("fp32", "bf16", "fp16")}
RUNS["compare"] = [Run("fp32", "fp32", "torch.optim.AdamW"), *RUNS["bf16"], *RUNS["fp16"]]
RUNS["compare"].append(Run("bf16 without master", "bf16", "torch.optim.AdamW"))


def wrap(model: torch.nn.Module, world: World, strategy: str) -> torch.nn.Module:
    """The model wrapped for the strategy, without casts. FSDP2 shards each block, and the root."""
    if strategy in ("ddp", "zero1"):
        return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    if strategy == "fsdp":
        mesh = init_device_mesh(world.device.type, (world.size,))
        for module in (*model.get_submodule("blocks").children(), model):
            fully_shard(module, mesh=mesh)
    return model


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors in this process, counting local shards only."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def synchronize_gradients(model: torch.nn.Module, last: bool) -> None:
    """Enable the reduction of gradients only for the `last` micro-batch of a step."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


# ------------------------------------------------------------------------------------------------------------ training


def now(device: torch.device) -> Any:
    """The time in seconds; on a GPU an event, which does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    """The time between two results of `now`. The device must have reached the second."""
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collects SIGINT (Ctrl-C) and SIGTERM, which only request a stop. A second Ctrl-C stops immediately."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    with ExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, note))
        yield received


class Trainer:
    """The model, optimizer and scaler of a run, and its history."""

    def __init__(
        self, run: Run, options: argparse.Namespace, corpus: Corpus, world: World, base: Weights | None = None
    ) -> None:
        self.run, self.options, self.corpus, self.world = run, options, corpus, world
        torch.manual_seed(options.seed)
        self.precision = Precision.on(run.precision, world.device)
        size = SIZES[options.size]
        self.plain = GPT(size, self.precision, options.seed, options.checkpointing, options.init)
        if base is not None:
            checkpoint.load_model(self.plain, {name: weight.float() for name, weight in base.items()})
        if options.lora:
            add_adapters(self.plain, options.lora, options.seed)
        self.plain.to(world.device, self.precision.dtype)
        self.parameters = sum(p.numel() for p in self.plain.parameters())
        self.trained_parameters = sum(p.numel() for p in self.plain.parameters() if p.requires_grad)
        self.model = wrap(self.plain, world, options.strategy)
        self.zero = options.strategy == "zero1"
        self.optimizer = self._optimizer()
        self.scheduler = LambdaLR(self.optimizer, self.rate)
        self.scaler = self.monitor = None
        if run.precision == "fp16":
            scale = {"init_scale": options.init_scale, "growth_interval": options.growth_interval}
            self.scaler = halfstep.GradScaler(world.device.type, **scale)
        if run.precision != "fp32":
            self.monitor = AmpMonitor(self.plain, self.scaler, max(10, options.steps // GRADIENT_STEPS), run.precision)
        self.step = 0
        self.memory: list[list[int]] = []  # [step, bytes of weights, gradients, states] whenever these change
        names = ("train_loss", "scale", "skipped", "step_ms", "optimizer_ms", "validation")
        self.history: dict[str, list[Any]] = {name: [] for name in names}  # per step; validation: [step, loss]
        self._times: list[tuple[Any, Any, Any]] = []  # per step: its start, the start of the optimizer, the end
        self._losses: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []
        self._measure()

    def _measure(self) -> None:
        """Record the memory of this process at the current step if it has changed."""
        states = getattr(self.optimizer, "optim", self.optimizer).state  # with ZeRO-1, that of the local optimizer
        state = [v for entry in states.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.dim()]
        grads = [grad for grad in map(gradient_of, self.plain.parameters()) if grad is not None]
        sizes = list(map(local_bytes, (self.plain.parameters(), grads, state)))
        if not self.memory or self.memory[-1][1:] != sizes:
            self.memory.append([self.step, *sizes])

    def _optimizer(self) -> torch.optim.Optimizer:
        """Create the optimizer for the wrapped model. As usual, only matrices have weight decay."""
        options = self.options
        chosen: dict[str, Any] = {"lr": options.lr, "betas": BETAS}
        if (options.state_dtype, options.master_weights) != ("fp32", "auto"):
            chosen |= {"state_dtype": STATE_DTYPES[options.state_dtype], "rounding": "stochastic"}
            chosen["master_weights"] = options.master_weights
        adamw: Any = halfstep.AdamW if self.run.optimizer == "halfstep.AdamW" else torch.optim.AdamW
        trained = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": options.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []  # adapters are matrices
        if self.zero:
            return ZeroRedundancyOptimizer(groups, optimizer_class=adamw, **chosen)
        return adamw(groups, **chosen)

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 0) as a fraction of the peak: linear warm-up, then cosine decay to 0."""
        warmup, steps = self.options.warmup, self.options.steps
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    def _parts(self, windows: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        device = self.world.device
        inputs, targets = (x.to(device, non_blocking=True) for x in windows)
        count = self.options.accumulate
        return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))

    def advance(self) -> None:
        options = self.options
        rows = self.world.rows(options.batch)
        batch = self.corpus.batch(options.seed, self.step, rows, SIZES[options.size].seq)
        begin = now(self.world.device)
        loss = torch.zeros((), dtype=torch.float32, device=self.world.device)
        parts = self._parts(batch)
        for index, part in enumerate(parts):
            synchronize_gradients(self.model, last=index == len(parts) - 1)
            share = self.model(*part) / len(parts)
            (share if self.scaler is None else self.scaler.scale(share)).backward()
            loss = loss + share.detach()
        if self.monitor is not None:
            self.monitor.step(self.optimizer)
        middle = now(self.world.device)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self._scales.append(self._scale())
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._times.append((begin, middle, now(self.world.device)))
        self.scheduler.step()
        self._losses.append(loss)
        self.step += 1
        self._measure()
        self.optimizer.zero_grad(set_to_none=True)

    def _scale(self) -> torch.Tensor:
        """A copy of the loss scale on the device; get_scale() would wait."""
        assert self.scaler is not None
        return self.scaler._get_scale_async().detach().clone()

    def flush(self, *extra: float) -> list[float]:
        """Move losses and scales from the device to the history. Returns the mean over the ranks of each of `extra`."""
        count, history = len(self._losses), self.history
        numbers = torch.tensor(extra, dtype=torch.float32, device=self.world.device)
        values = self.world.mean(torch.cat([torch.stack(self._losses), numbers])).tolist()
        history["train_loss"] += values[:count]
        scales = [1.0] * (count + 1)
        if self.scaler is not None:
            scales = torch.stack([*self._scales, self._scale()]).tolist()
        history["scale"] += scales[:-1]
        # The scale decreases exactly when a step was skipped.
        history["skipped"] += [float(after < before) for before, after in pairwise(scales)]
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        history["step_ms"] += [milliseconds(begin, end) for begin, _, end in self._times]
        history["optimizer_ms"] += [milliseconds(middle, end) for _, middle, end in self._times]
        self._losses, self._scales, self._times = [], [], []
        return values[count:]

    @torch.no_grad()
    def validate(self) -> None:
        """Add the mean validation loss, in the precision of the run, to the history. Collective."""
        batch, rows = self.options.batch, self.world.rows(self.options.batch)
        count = -(-VALIDATION_ROWS // batch)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for start in range(0, count * batch, batch):
            ranks_rows = range(rows.start + start, rows.stop + start)
            parts = self._parts(self.corpus.validation(ranks_rows, count * batch, SIZES[self.options.size].seq))
            for part in parts:
                total += self.model(*part).double() / len(parts)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward without a backward, FSDP2 keeps parameters gathered
        self.history["validation"].append([self.step, float(self.world.mean(total / count))])

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint, independent of the strategy. Collective: it gathers shards."""
        optimizer = self.optimizer
        whole = zero.state_dict(optimizer) if self.zero else checkpoint.gather(optimizer.state_dict())
        return {
            "format": FORMAT,
            "plan": plan(self.run, self.options, self.corpus),
            "step": self.step,
            "model": checkpoint.gather(self.plain.state_dict()),
            "optimizer": whole,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "gradients": self._counted(),
            "history": {name: torch.tensor(points, dtype=torch.float64) for name, points in self.history.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        checkpoint.load_model(self.plain, state["model"])
        (zero.load_state_dict if self.zero else checkpoint.load_optimizer)(self.optimizer, state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.monitor is not None:
            counted = state["gradients"]  # sums over all ranks, which the first rank continues
            self.monitor.load_state_dict({**counted, "counts": counted["counts"] * (self.world.rank == 0)})
        self.history = {name: state["history"][name].tolist() for name in self.history}
        self.step = self.scheduler.last_epoch = state["step"]
        self.memory = []
        self._measure()

    def _overflow(self) -> dict[str, Any] | None:
        """The overflows since the process started, on any rank, since ranks have different shards. Collective."""
        if self.scaler is None:
            return None
        overflows = self.scaler.overflow_report(self.plain.named_parameters())
        ranks = self.world.objects(overflows.parameters)
        ordered = sorted(chain.from_iterable(ranks), key=lambda entry: entry.inf_steps + entry.nan_steps)
        most = {entry.name: entry for entry in ordered}  # for each parameter, the entry of the rank with the most
        overflows = replace(overflows, parameters=[*most.values()][::-1])
        return {**overflows.as_dict(), "text": str(overflows)}

    def _counted(self) -> dict[str, Any] | None:
        """The counts of gradients, summed over shards, with replicas counted once. Collective; waits for the device."""
        if self.monitor is None:
            return None
        state = self.monitor.state_dict()
        trained = (parameter for parameter in self.plain.parameters() if parameter.requires_grad)
        mine = [self.world.rank == 0 or isinstance(parameter, DTensor) for parameter in trained]
        ranks = self.world.objects(state["counts"] * torch.tensor(mine).unsqueeze(1))
        return {**state, "counts": torch.stack(ranks).sum(0)}

    def _gradients(self) -> dict[str, Any] | None:
        """The gradient statistics for report.json, at the last scale. Collective; waits for the device."""
        counted = self._counted()
        if counted is None:
            return None
        together = AmpMonitor(self.plain, self.scaler, format=self.run.precision)
        together.load_state_dict(counted)
        counts = together.report()
        return {**counts.as_dict(), "text": str(counts)}

    def best(self) -> tuple[int, float, int]:
        """The step and loss of the best validation, and the number of validations since."""
        losses = [loss if math.isfinite(loss) else math.inf for _, loss in self.history["validation"]]
        at = losses.index(min(losses))
        return self.history["validation"][at][0], losses[at], len(losses) - 1 - at

    def row(self, trouble: str | None = None, early: bool = False) -> dict[str, Any]:
        """The run's entry in report.json. Collective; waits for the device."""
        options, history, world = self.options, self.history, self.world
        skipped = [step for step, flag in enumerate(history["skipped"], 1) if flag]
        size, step_ms = SIZES[options.size], median(history["step_ms"])
        validated = bool(self.history["validation"]) and trouble is None
        best_step, best_loss, _ = self.best() if validated else (None, math.nan, 0)
        flops = training_flops(size, options.batch, size.seq, options.lora)
        peak = None
        if world.device.type == "cuda" and self.run.precision != "fp32":
            with suppress(ValueError):  # the planner does not know this GPU
                peak = card(torch.cuda.get_device_name(world.device)).flops
        # After resuming a run that was complete, there are no gradients to measure.
        trained = local_bytes(parameter for parameter in self.plain.parameters() if parameter.requires_grad)
        sizes = dict(zip(report.PARTS, self.memory[-1][1:], strict=True)) | {"gradient": trained}
        scales = history["scale"] if self.scaler is not None else None
        tail = max(1, round(self.step * FINAL_SHARE))
        final = {
            "final_train_loss": math.nan if trouble else fmean(history["train_loss"][-tail:]),
            "final_val_loss": history["validation"][-1][1] if validated else math.nan,
            "best_val_loss": best_loss,
        }
        return {
            "name": self.run.name,
            "precision": self.run.precision,
            "emulated": self.precision.emulated,
            "optimizer": self.run.optimizer,
            "steps": self.step,
            **{name: loss if math.isfinite(loss) else None for name, loss in final.items()},
            "best_step": best_step,
            "stopped_early": early,
            "skipped_steps": len(skipped),
            "final_scale": scales and scales[-1],
            **{f"{part}_bytes_per_param": bytes_of / self.parameters for part, bytes_of in sizes.items()},
            "memory": self.memory,
            "step_ms_p50": step_ms,
            "optimizer_ms_p50": median(history["optimizer_ms"]),
            "tokens_per_s": options.batch * size.seq / step_ms * 1000,
            "flops_per_s": flops / step_ms * 1000,
            "mfu": None if peak is None else flops / world.size / (step_ms / 1000) / peak,
            "peak_flops": peak,
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
            "findings": halfstep.doctor(self.model, self.optimizer, self.scaler).as_dict()["findings"],
            "trouble": trouble,
            "train_loss": [loss if math.isfinite(loss) else None for loss in history["train_loss"]],
            "validation": [point for point in history["validation"] if math.isfinite(point[1])],
            "scale": scales,
            "skipped": skipped,
            "overflow": self._overflow(),
            "gradients": self._gradients(),
        }


def plan(run: Run, options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Everything that determines the bits of a run, except machine and strategy. It is stored in checkpoints."""
    settings = {name: value for name, value in vars(options).items() if name not in NOT_SETTINGS}
    return {"precision": run.precision, "optimizer": run.optimizer, **settings, "data": corpus.sha256}


def read_checkpoint(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint. Raises a CheckpointError if it is damaged, or if its plan differs from `expected`."""
    state = checkpoint.load(path)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by train_gpt.py; pass a checkpoint that was, or start a new run")
    pairs = [(name, new, state["plan"].get(name)) for name, new in expected.items()]
    changed = (f"{name} is {str(new)[:12]} and was {str(old)[:12]}" for name, new, old in pairs if new != old)
    differing = ", ".join(changed)  # hashes are truncated
    if differing:
        raise CheckpointError(f"{path} is of another run: {differing}; pass its settings, or start a new run")
    return state


def checkpoints_in(path: Path, folder: str = "*") -> list[Path]:
    """`path` if it is a checkpoint, or the newest checkpoint of each run in an ``--out`` of train_gpt.py."""
    if (path / "manifest.json").is_file():
        return [path]
    return [newest for run in path.glob(f"checkpoints/{folder}") if (newest := checkpoint.newest(run))]


def read_base(path: Path, size: str) -> Weights:
    """The weights of a model of `size`, with adapters merged, from a checkpoint or the ``--out`` of a run. Raises a
    CheckpointError if there is none, or if it is damaged or has another size.
    """
    files = checkpoints_in(path)
    if len(files) != 1:
        raise CheckpointError(f"--base {path} holds checkpoints of {len(files)} runs; pass one checkpoint")
    return merged(read_checkpoint(files[0], {"size": size})["model"])


# ------------------------------------------------------------------------------------------------------------- command


class Display:
    """The output of the first rank: a progress bar in a terminal, otherwise a line after each validation."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self.quiet, self.progress = quiet, Progress(steps, stream=sys.stdout)

    def watch(self, trainer: Trainer, validated: bool) -> None:
        history, options, step = trainer.history, trainer.options, trainer.step
        speed = options.batch * SIZES[options.size].seq / median(history["step_ms"][-20:]) * 1000
        line = f"{trainer.run.name}: step {step}/{options.steps}  loss {fmean(history['train_loss'][-20:]):.4f}"
        line += f"  validation {history['validation'][-1][1]:.4f}" if history["validation"] else ""
        line += f"  {speed:,.0f} tokens/s"
        if trainer.scaler is not None:
            line += f"  scale {history['scale'][-1]:,.0f}  skipped {sum(history['skipped']):.0f}"
        if sys.stdout.isatty() and not self.quiet:
            self.progress.show(step, line)
        elif validated:
            self.note(line)

    def note(self, text: str) -> None:
        self.progress.clear()
        if not self.quiet:
            say(text)


def train(trainer: Trainer, display: Display, received: list[int]) -> dict[str, Any] | None:
    """Train to the last step, or until the loss stays non-finite or, with ``--patience``, stops improving. Returns the
    run's entry in report.json, or None if it was interrupted.
    """
    run, options, world = trainer.run, trainer.options, trainer.world
    # Waiting for a GPU or other ranks in every step would take longer than the step.
    interval = 1 if world.size == 1 and world.device.type == "cpu" else 10
    folder = options.out / "checkpoints" / run.folder
    while trainer.step < options.steps:
        trainer.advance()
        last = trainer.step == options.steps
        save_now = bool(options.save_every) and (trainer.step % options.save_every == 0 or last)
        validate_now = trainer.step % options.validate_every == 0 or last
        if not (save_now or validate_now or trainer.step % interval == 0):
            continue
        # A signal reaches the ranks in different steps. Here they agree on one step.
        (stop,) = trainer.flush(float(bool(received)))
        losses = trainer.history["train_loss"]
        if len(losses) >= NON_FINITE and not any(map(math.isfinite, losses[-NON_FINITE:])):
            trouble = (
                f"the loss was not finite for {NON_FINITE} steps in a row, the last of them step {trainer.step}; use a "
                f"smaller --lr than {options.lr:g}, or --precision fp32 to see whether precision is the cause"
            )
            display.note(f"{run.name}: given up: {trouble}")
            return trainer.row(trouble=trouble)
        if validate_now:
            trainer.validate()
        display.watch(trainer, validate_now)
        if save_now or (stop and options.save_every):
            state = trainer.state()
            if world.rank == 0:
                display.note(f"{run.name}: saved {checkpoint.save(folder, trainer.step, state)}")
        if stop and not last:
            received.append(signal.SIGTERM)  # if another rank received it
            saved = "continue with --resume" if options.save_every else "nothing saved without --save-every"
            name = signal.Signals(received[0]).name
            display.note(f"{run.name}: stopped by {name} after step {trainer.step}; {saved}")
            return None
        if validate_now and not last and options.patience:
            step, loss, since = trainer.best()
            if since >= options.patience:
                best = f"the best validation loss is {loss:.4f}, at step {step}"
                display.note(f"{run.name}: ended early at step {trainer.step}; {best}")
                return trainer.row(early=True)
    if not trainer.history["validation"]:
        trainer.validate()
    display.progress.clear()
    return trainer.row()


def resumed_from(run: Run, options: argparse.Namespace) -> Path | None:
    """The checkpoint to continue a run from. Raises a UsageError if it is missing, or exists without ``--resume``."""
    newest, path = checkpoints_in(options.out, run.folder), Path(options.resume or options.out)
    if restarts() and options.save_every and (newest or options.resume is None):
        return newest[0] if newest else None
    if options.resume is None:
        if options.save_every and newest:
            raise UsageError(f"{newest[0]} already exists; pass --resume to continue, or another --out")
        return None
    files = checkpoints_in(path, run.folder)
    if options.resume and not files:
        raise UsageError(f"--resume {path} has no checkpoint of {run.name!r}; pass a checkpoint, or the --out of a run")
    return files[0] if files else None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options, and fill in defaults that depend on other options."""
    decay = number(float, lambda x: x >= 0, "a finite number of at least 0, such as 0.1")
    scale = number(float, lambda x: 0 < x <= 2.0**127 and math.frexp(x)[0] == 0.5, "a power of two up to 2^127")
    parser = Parser(
        "train_gpt.py",
        (__doc__ or "").partition("\n")[0],
        usage="%(prog)s [OPTIONS]",
        json=False,  # --out has report.json
        epilog="'compare' trains the same model on the same batches four times: in fp32 with torch.optim.AdamW, in "
        "bf16 with split masters, in fp16 with the loss scaler, and in bf16 with torch.optim.AdamW and no master.",
    )
    parser.prog = "train_gpt.py"
    add = parser.add_argument_group("model and data").add_argument
    add("--precision", choices=list(RUNS), default="bf16", help="precision, or a comparison of all")
    add("--strategy", choices=STRATEGIES, default="single", help="one process, DDP, FSDP2, or ZeRO-1 with DDP")
    add("--size", choices=list(SIZES), default="tiny", help="size of the model")
    add("--data", type=a_path, metavar="PATH", help="file or folder to read (default: Python's standard library)")
    add("--init", choices=list(INITS), help="initialization of the matrices of the blocks (default: scaled)")
    add("--base", type=a_path, metavar="PATH", help="start with the weights of a run: a checkpoint, or its --out")
    add("--lora", type=whole(1), default=0, metavar="R", help="train adapters of rank R for the frozen --base")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=whole(1), default=600, metavar="N", help="steps to train")
    add("--batch", type=whole(1), default=16, metavar="N", help="windows per step, over all processes")
    add("--lr", type=above_zero, metavar="X", help="peak learning rate (default: depends on --size)")
    add("--warmup", type=whole(0), metavar="N", help="warm-up steps (default: a tenth of --steps)")
    add("--weight-decay", type=decay, default=0.1, metavar="X", help="weight decay of the matrices")
    add("--init-scale", type=scale, default=2.0**16, metavar="X", help="initial loss scale for fp16")
    add("--growth-interval", type=whole(1), default=60, metavar="N", help="finite steps until the scale doubles")
    add("--validate-every", type=whole(1), metavar="N", help="steps between validations (default: a tenth of --steps)")
    add("--patience", type=whole(1), default=0, metavar="N", help="stop after N validations without a better loss")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the weights and the batches")
    add = parser.add_argument_group("memory").add_argument
    add("--accumulate", type=whole(1), default=1, metavar="N", help="micro-batches per step, from the same --batch")
    add("--checkpointing", action="store_true", help="save only the inputs of blocks, and recompute the rest")
    add("--state-dtype", choices=list(STATE_DTYPES), default="fp32", help="format of the moments")
    add("--master-weights", choices=("auto", "full", "split", "split24"), default="auto", help="kind of fp32 masters")
    add = parser.add_argument_group("output and checkpoints").add_argument
    add("--out", type=a_path, metavar="DIR", default="out/train", help="folder for the report and the checkpoints")
    add("--save-every", type=whole(0), default=0, metavar="N", help="steps between checkpoints; 0: none")
    resume = "continue from the newest checkpoint in --out, or from PATH: a checkpoint, or the --out of a run"
    add("--resume", nargs="?", const="", metavar="PATH", help=resume)
    options = parser.parse(argv)
    check(options)
    options.init = options.init or "scaled"
    options.lr = options.lr or RATES[options.size]
    options.warmup = options.steps // 10 if options.warmup is None else options.warmup
    options.validate_every = options.validate_every or max(1, options.steps // 10)
    return options


def check(options: argparse.Namespace) -> None:
    """Raise a UsageError for options that cannot be combined, or do not match how the process was started."""
    strategy, precision, masters = options.strategy, options.precision, options.master_weights
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parts, launched = size * options.accumulate, {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    command = f"torchrun --nproc-per-node 2 examples/train_gpt.py --strategy {strategy}"
    of_parts = f"a multiple of {parts} ({size} processes times --accumulate {options.accumulate})"
    layout = f"--state-dtype {options.state_dtype} --master-weights {masters}"
    for wrong, message in (
        (strategy != "single" and not launched, f"--strategy {strategy} needs several processes; type: {command} ..."),
        (strategy == "single" and size > 1, f"{size} processes with --strategy single; pass ddp, fsdp or zero1"),
        (options.batch % parts, f"expected --batch, the global batch, to be {of_parts}, but got {options.batch}"),
        ((options.warmup or 0) >= options.steps, f"--warmup {options.warmup} is not below --steps {options.steps}"),
        (
            precision == "compare" and layout != "--state-dtype fp32 --master-weights auto",
            f"{layout} with --precision compare, where torch's optimizer has neither; pass --precision bf16",
        ),
        (
            masters.startswith("split") and precision != "bf16",
            f"expected --precision bf16 with --master-weights {masters}, but got {precision}",
        ),
        (options.lora and not options.base, f"--lora {options.lora} without --base, whose frozen weights it adapts"),
        (options.init and options.base, "--init with --base, whose weights replace those drawn; pass one of them"),
        (options.resume and precision == "compare", "--resume PATH with --precision compare; pass --resume alone"),
    ):
        if wrong:
            raise UsageError(message)


def command(options: argparse.Namespace) -> int:
    """Train all runs, and report. Returns the exit status."""
    runs = RUNS[options.precision]
    base = None if options.base is None else read_base(options.base, options.size)
    options.base = str(options.base or "")
    corpus = read_corpus(options.data, SIZES[options.size].seq)
    command_line.make_folder(options.out)
    files = {run: file for run in runs if (file := resumed_from(run, options))}
    if options.resume == "" and not files:
        raise UsageError(
            f"--resume, but there is no checkpoint below {options.out / 'checkpoints'} for precision "
            f"{options.precision!r}; drop --resume to start again, or pass the --out they are in"
        )
    resumed = {run: read_checkpoint(file, plan(run, options, corpus)) for run, file in files.items()}
    world, rows = connect(alone=options.strategy == "single"), []
    display = Display(options.steps, quiet=world.rank != 0)
    size = len(corpus.train) + len(corpus.val)
    display.note(f"{corpus.name}: {size:,} bytes; on {world.device}, processes: {world.size}")
    if restarts():
        begun = "continuing" if resumed else "no checkpoint to continue from, starting from the beginning"
        display.note(f"processes restarted by torchrun, restart {restarts()}: {begun}")
    with signals() as received:
        for run in runs:
            trainer = Trainer(run, options, corpus, world, base)
            if run in resumed:
                trainer.restore(resumed[run])
                display.note(f"{run.name}: continuing after step {trainer.step}")
            row = train(trainer, display, received)
            del trainer  # the next run needs its memory
            if row is None:
                break
            rows.append(row)
    if world.rank == 0 and len(rows) == len(runs):
        content = {
            "machine": {**environment(world.device), "cores": os.cpu_count()},
            "options": {name: value for name, value in vars(options).items() if name not in ("out", "resume")},
            "processes": world.size,
            "restarts": restarts(),
            "data": {"name": corpus.name, "files": corpus.files, "bytes": size, "sha256": corpus.sha256},
            "unigram_entropy": corpus.unigram_entropy,
            "runs": rows,
        }
        report.show_table(content)
        display.note("report: " + ", ".join(map(str, report.write(options.out, content))))
    if world.size > 1:
        dist.barrier()  # a rank that exits early closes connections, which are errors on the others
    if len(rows) < len(runs):
        return 128 + received[0]
    return 1 if any(row["trouble"] for row in rows) else 0


def main(argv: Sequence[str]) -> int:
    """Train. Returns the exit status: 0, 1 if a run was aborted, 2 for wrong input, 128 + signal if interrupted."""

    def run() -> int:
        try:
            return command(parse(argv))
        except (UsageError, CheckpointError) as error:
            if os.environ.get("RANK", "0") == "0":  # all processes have the same error; one prints it
                complain("train_gpt.py", str(error))
            return 2

    return command_line.with_output("train_gpt.py", run)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
        print("train_gpt.py: interrupted", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(status)  # Gloo's threads can block the destruction of their group, and abort Python at shutdown
    sys.exit(status)
