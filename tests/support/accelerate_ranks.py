"""A rank that trains with halfstep's `Accelerator`, for tests/integrations/trainers/test_accelerate.py."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_tools as tools
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from states import same_bits

import halfstep
from halfstep.integrations.trainers.accelerate import Accelerator


class Tracker(GeneralTracker):
    """Keeps what is logged."""

    name, requires_logging_directory = "kept", False

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.kept

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.kept.append(values)


def reset() -> None:
    if dist.is_initialized():
        PartialState().distributed_type = DistributedType.MULTI_CPU
    AcceleratorState._reset_state()
    GradientState._reset_state()


def accelerator_of(strategy: str, kind: str, **options: Any) -> Any:
    if AcceleratorState._shared_state:
        reset()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, scaler=tools.scaler_for(kind), **options)
    if strategy == "FSDP2":
        # Accelerate shards on accelerators only. This is what its state does there.
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False, reshard_after_forward=True
        )
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
    return accelerator


def prepared(accelerator: Any, kind: str, seed: int = 0) -> tuple[Any, Any, Any]:
    model = tools.network(seed).to(tools.DTYPES[kind])
    optimizer = halfstep.AdamW(model.parameters(), lr=tools.LR)
    # Accelerate steps a schedule once for each process.
    gamma = 0.5 ** (1 / accelerator.num_processes)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=gamma)
    ready: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, schedule)
    return ready


def steps(
    accelerator: Any, model: Any, optimizer: Any, schedule: Any, kind: str, numbers: range, broken: int | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "rates": [], "unwritten": []}
    monitor = halfstep.AmpMonitor(model, accelerator.scaler, every=1).attach(optimizer)
    for step in numbers:
        for part in range(2):
            with accelerator.accumulate(model):
                inputs, targets = tools.batch(2 * step + part, accelerator.process_index)
                loss = tools.error(model(inputs.to(tools.DTYPES[kind])), targets)
                with tools.broken_backward(model, step == broken):
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    before = tools.gradients(model.parameters())
                    found["norms"].append(accelerator.clip_grad_norm_(model.parameters(), tools.MAX_NORM).item())
                optimizer.step()
                if accelerator.sync_gradients:
                    found["unwritten"].append(same_bits(before, tools.gradients(model.parameters())))
                    found["skipped"].append(bool(accelerator.optimizer_step_was_skipped))
                schedule.step()
                optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["rates"].append(optimizer.param_groups[0]["lr"])
        accelerator.log({"loss": loss.item(), **monitor.scalars()}, step=step)
    return found


def whole(strategy: str, kind: str, folder: str) -> dict[str, Any]:
    """A run that is saved on the way, and one that resumes it from another initialization."""
    place = str(Path(folder) / f"{strategy}-{kind}".replace(" ", ""))
    broken = tools.BROKEN if kind == "fp16" else None
    tracker = Tracker()
    accelerator = accelerator_of(strategy, kind, log_with=tracker)
    accelerator.init_trackers("run")
    model, optimizer, schedule = prepared(accelerator, kind)
    found = steps(accelerator, model, optimizer, schedule, kind, range(tools.SAVED), broken)
    accelerator.save_state(place)
    rest = steps(accelerator, model, optimizer, schedule, kind, range(tools.SAVED, tools.STEPS), None)
    found = {key: value + rest[key] for key, value in found.items()}
    found |= {**tools.seen(model.parameters(), optimizer.optimizer), "log": tools.logged(tracker.kept)}
    scaler = tools.scaler_state(accelerator.scaler)
    exported = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.save_model(model, place + "-export")
    accelerator.wait_for_everyone()
    saved = load_file(Path(place + "-export") / "model.safetensors")
    held = {name.removeprefix("module."): tools.full(one) for name, one in model.state_dict().items()}
    found["exported"] = same_bits(saved, held) and (not exported or same_bits(exported, held))
    found["fit"] = tools.fit_of(held)

    accelerator = accelerator_of(strategy, kind)
    model, optimizer, schedule = prepared(accelerator, kind, seed=1)
    accelerator.load_state(place)
    again = steps(accelerator, model, optimizer, schedule, kind, range(tools.SAVED, tools.STEPS), None)
    found["resumed"] = {
        "state": same_bits(tools.state_of(optimizer.optimizer), found["state"]),
        "rest": again == rest,
        "scaler": scaler == tools.scaler_state(accelerator.scaler),
    }
    return found


def upcast() -> dict[str, Any]:
    """What FSDP2 with mixed precision makes of bf16 weights, and without it."""
    found = {}
    for precision in ("bf16", "no"):
        accelerator = accelerator_of("FSDP2", "bf16", mixed_precision=precision)
        model, optimizer, _ = prepared(accelerator, "bf16")
        accelerator.backward(tools.error(model(tools.batch(0)[0].bfloat16()), tools.batch(0)[1]))
        optimizer.step()
        found[precision] = [
            sorted({str(one.dtype) for one in model.parameters()}),
            tools.masters_of(optimizer.optimizer),
        ]
    return found


@tools.quietly()
def run(rank: int, folder: str) -> dict[str, Any]:
    strategies = ("DDP", "FSDP2") if dist.is_initialized() else ("one process",)
    found: dict[str, Any] = {f"{one} {kind}": whole(one, kind, folder) for one in strategies for kind in tools.DTYPES}
    return {**found, "upcast": upcast()} if "FSDP2" in strategies else found
