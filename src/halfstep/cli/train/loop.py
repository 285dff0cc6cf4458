"""One training run. Initial weights and batches are the same for all precisions and strategies.

The host does not wait for the device: losses and scales stay on it and are read together every few steps (on a CPU in
every step). A step that the scaler skips counts as a step: it uses its batch and its step of the learning rate
schedule, so that all runs see the same data at the same learning rate.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import halfstep
from halfstep.cli.train import adapters
from halfstep.cli.train.data import Corpus
from halfstep.cli.train.model import GPT, SIZES
from halfstep.cli.train.precision import Precision
from halfstep.cli.train.strategies import (
    backward_of,
    compress_gradients,
    counts_here,
    gather_optimizer,
    load_optimizer,
    local_state,
    make_optimizer,
    reshard,
    wrap,
)
from halfstep.cli.train.throughput import Peak, peak, step_flops
from halfstep.cli.train.world import ThisRank
from halfstep.integrations import checkpoint
from halfstep.integrations.doctor import Diagnosis
from halfstep.integrations.monitor import AmpMonitor
from halfstep.kernels.streams import to_device
from halfstep.numerics.planning.work import utilisation
from halfstep.numerics.scaling.overflow import Overflow, OverflowReport
from halfstep.numerics.scaling.stand_ins import gradient_of

FORMAT = "halfstep train 3"
# The entries of a checkpoint other than its format; see `Trainer.state`.
CONTENT = (
    *("plan", "step", "model", "optimizer", "scaler", "gradients", "overflowed", "rng", "cuda_rng", "history"),
    *("gradient_bytes",),
)
VALIDATION_ROWS = 128
FINAL_SHARE = 0.05  # the final training loss is the mean over this share of the steps, since single batches are noisy
BETAS = (0.9, 0.95)  # as usual for GPTs
PATIENCE = 5  # consecutive steps with a non-finite loss after which a run is given up
GRADIENT_STEPS = 20  # largest number of steps in which gradients are counted, and at most every tenth step
WORST = 5  # number of parameters in the report
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
MASTERS = ("auto", "full", "split", "split24")
HISTORIES = ("train_loss", "scale", "skipped", "step_ms", "optimizer_ms")


@dataclass(frozen=True)
class Run:
    """One row of the report: a precision and an optimizer.

    Args:
        name: name in the report and of the folder of its checkpoints.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        optimizer: ``"halfstep.AdamW"`` (with its default masters) or ``"torch.optim.AdamW"`` (without masters).
    """

    name: str
    precision: str
    optimizer: str = "halfstep.AdamW"

    @property
    def scaled(self) -> bool:
        return self.precision == "fp16"


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of a command share."""

    size: str
    steps: int
    batch: int
    seed: int
    lr: float
    weight_decay: float
    warmup: int
    init_scale: float
    growth_interval: int
    state_dtype: str = "fp32"
    master_weights: str = "auto"
    init: str = "scaled"
    base: str = ""  # the SHA-256 of the weights with which it begins; empty if they are drawn
    lora: int = 0  # rank of adapters; 0 for none
    lora_alpha: float = 0.0
    validate_every: int = 0  # steps; 0 for a tenth of all
    patience: int = 0  # validations without a better loss after which training ends; 0 for never

    @property
    def context(self) -> int:
        return SIZES[self.size].context

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0: linear warm-up, then half a cosine to zero."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class History:
    """The course of a run: one number per step, and (step, loss) for each validation."""

    train_loss: list[float] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def skipped_steps(self) -> list[int]:
        """Numbers of the skipped steps, from 1."""
        return [step for step, flag in enumerate(self.skipped, 1) if flag]

    def best(self) -> tuple[int, float]:
        """The step and the loss of the best validation."""
        return min(self.validation, key=lambda point: point[1])

    def stale(self) -> int:
        """The number of validations since the best one."""
        return len(self.validation) - 1 - self.validation.index(self.best())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            name: torch.tensor(getattr(self, name), dtype=torch.float64, device="cpu") for name in HISTORIES
        }
        return {**state, "validation": [list(point) for point in self.validation]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        points = [(int(step), float(loss)) for step, loss in state["validation"]]
        return cls(**{name: state[name].tolist() for name in HISTORIES}, validation=points)


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    `trouble` says why it was given up, and `stopped` is the signal that ended it early. `overflow` is None without a
    loss scale, and `gradients` for fp32. `diagnosis` is that of `halfstep.doctor` after the last step. `early` says
    whether training ended because the validation loss no longer fell.
    """

    run: Run
    world: ThisRank
    steps: int
    history: History
    parameters: int
    trained: int
    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    tokens_per_step: int
    flops_per_step: int
    peak: Peak
    overflow: OverflowReport | None
    gradients: dict[str, Any] | None
    diagnosis: Diagnosis
    trouble: str | None = None
    stopped: int | None = None
    early: bool = False

    def row(self) -> dict[str, Any]:
        """The run's entry in report.json."""
        history = self.history
        tail = history.train_loss[-max(1, round(len(history.train_loss) * FINAL_SHARE)) :]
        fine = self.trouble is None
        step_ms = median(history.step_ms)
        return {
            "name": self.run.name,
            "precision": self.run.precision,
            "strategy": self.world.strategy,
            "world_size": self.world.size,
            "optimizer": self.run.optimizer,
            "steps": self.steps,
            "final_train_loss": math.fsum(tail) / len(tail) if fine else None,
            "final_val_loss": history.validation[-1][1] if fine else None,
            "best_val_loss": history.best()[1] if fine else None,
            "best_step": history.best()[0] if fine else None,
            "stopped_early": self.early,
            "skipped_steps": len(history.skipped_steps()),
            "final_scale": history.scale[-1] if self.run.scaled else None,
            "param_bytes_per_param": self.param_bytes / self.parameters,
            "gradient_bytes_per_param": self.gradient_bytes / self.parameters,
            "optimizer_bytes_per_param": self.optimizer_bytes / self.parameters,
            "step_ms_p50": step_ms,
            "optimizer_ms_p50": median(history.optimizer_ms),
            "tokens_per_s": self.tokens_per_step / step_ms * 1000,
            "flops_per_s": self.flops_per_step / step_ms * 1000,
            "mfu": utilisation(self.flops_per_step / self.world.size, step_ms / 1000, self.peak.flops),
            "peak": self.peak._asdict(),
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "findings": self.diagnosis.as_dict()["findings"],
            "trouble": self.trouble,
            "train_loss": [loss if math.isfinite(loss) else None for loss in history.train_loss],
            "validation": [point for point in history.validation if math.isfinite(point[1])],
            "scale": history.scale if self.run.scaled else None,
            "skipped": history.skipped_steps(),
            "overflow": None if self.overflow is None else self.overflow.as_dict(),
            "gradients": self.gradients,
        }


class _Clock:
    """Times each step and its optimizer part: by the wall clock on CPUs, by events, which do not wait, on GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._marks: list[list[Any]] = []

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._marks.append([self._now()])

    def mark(self) -> None:
        self._marks[-1].append(self._now())

    def take(self) -> list[tuple[float, float]]:
        """The milliseconds of each step since the last call, and of its optimizer part. Waits for the device."""
        marks, self._marks = self._marks, []
        if self._events:
            torch.cuda.synchronize()
            return [(begin.elapsed_time(end), before.elapsed_time(end)) for begin, before, end in marks]
        return [((end - begin) * 1e3, (end - before) * 1e3) for begin, before, end in marks]


class Interrupt:
    """Stops a run after its present step on Ctrl-C or SIGTERM. A second Ctrl-C stops it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def plan(run: Run, settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """Everything that the bits of a run depend on, except machine and strategy. It is stored in checkpoints."""
    return {"precision": run.precision, "optimizer": run.optimizer, **asdict(settings), "data": corpus.sha256}


def read_checkpoint(path: Path, run: Run, settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """Load a checkpoint, and refuse it if it belongs to another run.

    Raises:
        checkpoint.CheckpointError: the checkpoint is damaged, or was made with other settings, which the message names.
    """
    state = checkpoint.load(path)
    if state.get("format") != FORMAT:
        raise checkpoint.CheckpointError(
            f"Expected {path} to have format {FORMAT!r}, but got {state.get('format')!r}: pass a checkpoint that "
            "halfstep train wrote"
        )
    made, wanted, step = state.get("plan"), plan(run, settings, corpus), state.get("step")
    if isinstance(made, dict):  # settings that are newer than the checkpoint
        made = {**{one.name: one.default for one in fields(Settings) if one.default is not MISSING}, **made}
    missing = [name for name in CONTENT if name not in state]
    if missing or not isinstance(made, dict) or type(step) is not int or not 0 <= step:
        raise checkpoint.CheckpointError(
            f"{path} is not as halfstep train wrote it: {', '.join(missing) or 'its plan or step'} is "
            f"{'missing' if missing else 'something else'}; continue from another checkpoint, or start a new run"
        )
    differing = [name for name in wanted if made.get(name) != wanted[name]]
    if differing:
        given = ", ".join(f"{name} is {_shown(wanted[name])} and was {_shown(made.get(name))}" for name in differing)
        options = " ".join(_option(name, made.get(name)) for name in differing)
        raise checkpoint.CheckpointError(
            f"cannot resume from {path}: {given}; pass {options}, or start a new run with another --out"
        )
    return state


def _option(name: str, value: Any) -> str:
    """The option that sets `name` to `value`."""
    if name == "data":
        return "--data with the same content"
    if name == "base":
        return "the --base with which it began" if value else "no --base"
    if name == "optimizer":  # torch's optimizer is used in comparisons only
        return f"--precision {'compare' if value == 'torch.optim.AdamW' else 'fp32'}"
    return f"--{name.replace('_', '-')} {value}"


def _shown(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else repr(value)  # a SHA-256, shortened


class Trainer:
    """The model, optimizer and scaler of a run, and the steps taken."""

    def __init__(
        self, run: Run, settings: Settings, corpus: Corpus, world: ThisRank, base: adapters.Base | None = None
    ) -> None:
        self.run, self.settings, self.corpus, self.world = run, settings, corpus, world
        torch.manual_seed(settings.seed)
        precision = Precision.on(run.precision, world.device)
        self._product_dtype = torch.float32 if precision.emulated else precision.dtype
        recompute = world.layout.activation_checkpointing
        self.plain = GPT(SIZES[settings.size], precision, settings.seed, recompute, settings.init)
        if base is not None:
            adapters.load_base(self.plain, base)
        if settings.lora:
            adapters.add(self.plain, settings.lora, settings.lora_alpha, settings.seed)
        self.plain.to(world.device, precision.dtype)
        self.parameters = sum(p.numel() for p in self.plain.parameters())
        self.trained = sum(p.numel() for p in self.plain.parameters() if p.requires_grad)
        self.model = wrap(self.plain, world)
        self.optimizer = self._optimizer()
        self.scaler = (
            halfstep.GradScaler(
                world.device.type, init_scale=settings.init_scale, growth_interval=settings.growth_interval
            )
            if run.scaled
            else None
        )
        compress_gradients(self.model, world)
        self.monitor = self._monitor()
        self.history = History()
        self.step = 0
        self._resumed_at = 0  # the step from which the scaler counts
        self._overflowed_before: list[Overflow] = []
        self.gradient_bytes = 0  # set in the first step
        self._clock = _Clock(world.device)
        self._losses: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []

    def _groups(self) -> list[dict[str, Any]]:
        # As usual, matrices have weight decay, and the parameters of norms have none.
        trained = [p for p in self.plain.parameters() if p.requires_grad]
        matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": self.settings.weight_decay}]
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        return groups

    def _optimizer(self) -> torch.optim.Optimizer:
        kind: Any = {"halfstep.AdamW": halfstep.AdamW, "torch.optim.AdamW": torch.optim.AdamW}[self.run.optimizer]
        return make_optimizer(kind, self._groups(), self.world, lr=self.settings.lr, betas=BETAS, **self._layout())

    def _layout(self) -> dict[str, Any]:
        """The options of halfstep.AdamW that --state-dtype and --master-weights set, with the rounding they need."""
        chosen: dict[str, Any] = {}
        if self.settings.state_dtype != "fp32":
            chosen = {"state_dtype": STATE_DTYPES[self.settings.state_dtype], "rounding": "stochastic"}
        if self.settings.master_weights != "auto":
            chosen |= {"master_weights": self.settings.master_weights, "rounding": "stochastic"}
        return chosen

    def _monitor(self) -> AmpMonitor | None:
        """The monitor that counts 16-bit gradients; None for fp32."""
        if self.run.precision == "fp32":
            return None
        every = max(10, self.settings.steps // GRADIENT_STEPS)
        return AmpMonitor(self.plain, self.scaler, every, self.run.precision)

    def advance(self) -> None:
        """One step: forward, backward, optimizer."""
        settings, device = self.settings, self.world.device
        rows = self.world.rows(settings.batch)
        inputs, targets = self.corpus.batch(settings.seed, self.step, rows, settings.context)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        self._clock.start()
        loss = torch.zeros((), dtype=torch.float32, device=device)
        parts = self._parts(to_device(inputs, device), to_device(targets, device))
        for number, part in enumerate(parts, 1):
            with backward_of(self.model, last=number == len(parts)):
                share = self.model(*part)
                if len(parts) > 1:
                    share = share / len(parts)
                (share if self.scaler is None else self.scaler.scale(share)).backward()
            loss = loss + share.detach()
        if self.monitor is not None:
            self.monitor.step(self.optimizer)
        self._clock.mark()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self._scales.append(self._scale())
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self._clock.mark()
        if not self.gradient_bytes:
            self.gradient_bytes = sum(
                _bytes(grad) for p in self.plain.parameters() if (grad := gradient_of(p)) is not None
            )
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss)
        self.step += 1

    def _parts(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The micro-batches of a batch."""
        count = self.world.layout.accumulate
        return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))

    def _scale(self) -> torch.Tensor:
        """A copy of the loss scale on the device."""
        assert self.scaler is not None
        scale = self.scaler._get_scale_async()  # get_scale() would wait for the device
        assert scale is not None  # it is made by the first scale()
        return scale.detach().clone()

    def flush(self, *extra: float) -> list[float]:
        """Move losses and scales from the device to the history. Returns the mean of each extra number over ranks."""
        losses = [loss.float() for loss in self._losses]
        packed = torch.stack(
            [*losses, *(torch.tensor(x, dtype=torch.float32, device=self.world.device) for x in extra)]
        )
        values = self.world.mean(packed).tolist()
        count = len(losses)
        self.history.train_loss += values[:count]
        self._losses = []
        if self.scaler is None:
            self.history.scale += [1.0] * count
            self.history.skipped += [0.0] * count
        else:
            scales = torch.stack([*self._scales, self._scale()]).tolist()
            self._scales = []
            self.history.scale += scales[:-1]
            # The scale falls exactly when a step was skipped.
            self.history.skipped += [float(after < before) for before, after in pairwise(scales)]
        for step_ms, optimizer_ms in self._clock.take():
            self.history.step_ms.append(step_ms)
            self.history.optimizer_ms.append(optimizer_ms)
        return values[count:]

    @torch.no_grad()
    def validate(self, rows: int | None = None) -> float:
        """The mean loss on so many fixed validation windows (default: VALIDATION_ROWS), in the precision of the run.

        Collective.
        """
        batch, context = self.settings.batch, self.settings.context
        count = -(-(rows or VALIDATION_ROWS) // batch)
        mine = self.world.rows(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number in range(count):
            own = range(mine.start + number * batch, mine.stop + number * batch)
            inputs, targets = self.corpus.validation(own, count * batch, context)
            parts = self._parts(inputs.to(self.world.device), targets.to(self.world.device))
            for part in parts:
                total += self.model(*part).double() / len(parts)
        reshard(self.model)
        loss = float(self.world.mean(total / count))
        if not self.history.validation or self.history.validation[-1][0] != self.step:
            self.history.validation.append((self.step, loss))
        return loss

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint. Collective under FSDP, which gathers the shards."""
        cuda = (
            torch.cuda.get_rng_state(self.world.device)
            if self.world.device.type == "cuda"
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        return {
            "format": FORMAT,
            "plan": plan(self.run, self.settings, self.corpus),
            "step": self.step,
            "model": checkpoint.gather(self.plain.state_dict()),
            "optimizer": gather_optimizer(self.optimizer),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "gradients": self._counted(),
            "overflowed": self.world.objects([asdict(one) for one in self._overflowed()]),
            "rng": self.world.objects(torch.get_rng_state()),
            "cuda_rng": self.world.objects(cuda),
            "history": self.history.state(),
            "gradient_bytes": {"world_size": self.world.size, "bytes": self.gradient_bytes},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint that `read_checkpoint` has approved.

        Raises:
            checkpoint.CheckpointError: its content does not fit.
        """
        try:
            self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, checkpoint.CheckpointError):
                raise
            raise checkpoint.CheckpointError(
                f"the checkpoint of step {state['step']} of {self.run.name} is not as halfstep train wrote it "
                f"({type(error).__name__}: {str(error)[:200]}); continue from another one, or start a new run"
            ) from error

    def _restore(self, state: dict[str, Any]) -> None:
        checkpoint.load_model(self.plain, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) == self.world.size:  # otherwise there is no random state for each rank
            torch.set_rng_state(state["rng"][self.world.rank])
            if self.world.device.type == "cuda" and state["cuda_rng"][self.world.rank].numel():
                torch.cuda.set_rng_state(state["cuda_rng"][self.world.rank], self.world.device)
        if self.monitor is not None and state.get("gradients") is not None:
            counted = state["gradients"]
            if self.world.rank:  # the counts are sums over all ranks
                counted = {**counted, "counts": torch.zeros_like(counted["counts"])}
            self.monitor.load_state_dict(counted)
        self.history = History.from_state(state["history"])
        self.step = self._resumed_at = state["step"]
        ranks = [[Overflow(**one) for one in rank] for rank in state["overflowed"]]
        self._overflowed_before = ranks[self.world.rank] if len(ranks) == self.world.size else _over_ranks(ranks)
        if state["gradient_bytes"]["world_size"] == self.world.size:
            self.gradient_bytes = state["gradient_bytes"]["bytes"]

    def _overflowed(self) -> list[Overflow]:
        """The parameters that overflowed on this rank, by name, in the run's own steps. Waits for the device."""
        if self.scaler is None:
            return []
        found = {one.name: one for one in self._overflowed_before}
        for one in self.scaler.overflow_report(self.plain.named_parameters()).parameters:
            before = found.get(one.name, Overflow(one.name, 0, 0, one.first_step + self._resumed_at, 0))
            found[one.name] = replace(
                before,
                inf_steps=before.inf_steps + one.inf_steps,
                nan_steps=before.nan_steps + one.nan_steps,
                last_step=one.last_step + self._resumed_at,
            )
        return sorted(found.values(), key=lambda one: one.name)

    def overflow(self) -> OverflowReport | None:
        """The overflows since the run's first step; None without a scaler. Collective; waits for the device."""
        if self.scaler is None:
            return None
        everywhere = _over_ranks(self.world.objects(self._overflowed()))
        found = sorted(everywhere, key=lambda one: (-one.inf_steps - one.nan_steps, one.first_step, one.name))
        skipped = self.history.skipped_steps()
        return OverflowReport(self.step, len(skipped), skipped[-1] if skipped else 0, found)

    def _counted(self) -> dict[str, Any] | None:
        """The counts of gradients, summed over shards, with copies counted once. Collective; waits for the device."""
        if self.monitor is None:
            return None
        state = self.monitor.state_dict()
        mine = [counts_here(one, self.world) for one in self.plain.parameters() if one.requires_grad]
        ranks = self.world.objects(state["counts"] * torch.tensor(mine, dtype=torch.bool, device="cpu").unsqueeze(1))
        return {**state, "counts": torch.stack(ranks).sum(0)}

    def gradients(self) -> dict[str, Any] | None:
        """The entry on gradients in report.json, at the last scale. Collective; waits for the device."""
        counted = self._counted()
        if counted is None:
            return None
        together = AmpMonitor(self.plain, self.scaler, format=self.run.precision)
        together.load_state_dict(counted)
        known = together.report()
        worst = [row.as_dict() for row in known.statistics.worst(WORST)]
        for row in worst:
            del row["exponents"]
        return {
            "format": known.statistics.format.name,
            "scale": known.statistics.scale,
            "steps": known.collected,
            "total": known.statistics.total.as_dict(),
            "worst": worst,
            "advice": None if known.advice is None else {**known.advice.as_dict(), "text": str(known.advice)},
        }

    def result(self, trouble: str | None = None, stopped: int | None = None, early: bool = False) -> RunResult:
        settings = self.settings
        return RunResult(
            run=self.run,
            world=self.world,
            steps=self.step,
            history=self.history,
            parameters=self.parameters,
            trained=self.trained,
            param_bytes=sum(_bytes(p) for p in self.plain.parameters()),
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=sum(_bytes(v) for entry in local_state(self.optimizer).values() for v in _tensors(entry)),
            tokens_per_step=settings.batch * settings.context,
            flops_per_step=step_flops(SIZES[settings.size], settings.batch, settings.lora),
            peak=peak(self.world.device, self._product_dtype, torch.get_num_threads()),
            overflow=self.overflow(),
            gradients=self.gradients(),
            diagnosis=halfstep.doctor(self.model, self.optimizer, self.scaler),
            trouble=trouble,
            stopped=stopped,
            early=early,
        )


def _over_ranks(ranks: list[list[Overflow]]) -> list[Overflow]:
    """One entry per parameter, with the largest counts of all ranks, which may hold different shards of it."""
    found: dict[str, Overflow] = {}
    for one in (one for rank in ranks for one in rank):
        other = found.get(one.name, one)
        found[one.name] = Overflow(
            one.name,
            max(one.inf_steps, other.inf_steps),
            max(one.nan_steps, other.nan_steps),
            min(one.first_step, other.first_step),
            max(one.last_step, other.last_step),
        )
    return list(found.values())


def _tensors(entry: Any) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's entry, except the step count."""
    for value in entry.values():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            yield value


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, or of this rank's shard of it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _non_finite(losses: list[float]) -> bool:
    return len(losses) >= PATIENCE and not any(map(math.isfinite, losses[-PATIENCE:]))


def train(
    run: Run,
    settings: Settings,
    corpus: Corpus,
    world: ThisRank,
    *,
    folder: Path | None,
    save_every: int,
    resumed: dict[str, Any] | None,
    interrupt: Interrupt,
    watch: Callable[[Trainer], None],
    note: Callable[[str], None],
    base: adapters.Base | None = None,
) -> RunResult:
    """Train one run to its last step, or until it is interrupted or its loss stays non-finite.

    Args:
        run: precision and optimizer.
        settings: settings of all runs.
        corpus: the text.
        world: this rank.
        folder: folder of the checkpoints; needed if `save_every` > 0.
        save_every: steps between checkpoints; 0 for none.
        resumed: content of the checkpoint to continue from, or None.
        interrupt: says whether to stop.
        watch: called when the history has new entries.
        note: called with a text when a checkpoint was written, or training ends early.
        base: the weights to begin with, or None.
    """
    trainer = Trainer(run, settings, corpus, world, base)
    if resumed is not None:
        trainer.restore(resumed)
    # Waiting for a GPU or for other ranks in every step would take longer than the step.
    every = 1 if world.size == 1 and world.device.type == "cpu" else 10
    validate_every = settings.validate_every or max(1, settings.steps // 10)

    def keep() -> None:
        state = trainer.state()
        if world.rank == 0 and folder is not None:
            note(f"{run.name}: saved {checkpoint.save(folder, trainer.step, state)}")

    while trainer.step < settings.steps:
        trainer.advance()
        last = trainer.step == settings.steps
        save_now = bool(save_every) and (trainer.step % save_every == 0 or last)
        validate_now = trainer.step % validate_every == 0 or last
        if not (save_now or validate_now or trainer.step % every == 0):
            continue
        # A signal reaches the ranks in different steps. Here they agree on one.
        (stop,) = trainer.flush(float(interrupt.signal or 0))
        if _non_finite(trainer.history.train_loss):
            trouble = (
                f"the loss was not finite for {PATIENCE} steps in a row, the last of them step {trainer.step}; "
                f"use a smaller --lr than {settings.lr:g}, or --precision fp32 to see whether precision is the cause"
            )
            return trainer.result(trouble=trouble)
        if validate_now:
            trainer.validate()
        watch(trainer)
        if save_now or (stop and save_every):
            keep()
        if stop and not last:
            return trainer.result(stopped=interrupt.signal or int(signal.SIGTERM))
        if validate_now and not last and 0 < settings.patience <= trainer.history.stale():
            step, loss = trainer.history.best()
            best = f"the best validation loss is {loss:.4f}, at step {step}"
            note(f"{run.name}: ended early at step {trainer.step}; {best}")
            return trainer.result(early=True)
    if not trainer.history.validation:
        trainer.validate()
    return trainer.result()
