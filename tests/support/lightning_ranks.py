"""A rank that trains with halfstep's classes for Lightning and Fabric, for test_lightning.py and test_fabric.py."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed.checkpoint as dcp
import trainer_tools as tools
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import MixedPrecision as TheirMixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from states import same_bits
from torch.distributed.fsdp import FSDPModule, fully_shard

import halfstep
from halfstep.integrations.trainers.fabric import Fabric
from halfstep.integrations.trainers.lightning import HalfPrecision, MixedPrecision, ScalerMonitor

KINDS = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")
WEIGHTS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def scaler_for(kind: str) -> halfstep.GradScaler | None:
    return halfstep.GradScaler("cpu", init_scale=tools.SCALE) if kind.startswith("16") else None


class Kept(Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Regression(lightning.LightningModule):
    """One step of two batches per epoch."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        self.kind, self.network = kind, tools.network(seed)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.skipped: list[bool] = []
        self.unwritten: list[bool] = []

    def training_step(self, number: Any, index: int) -> Any:
        inputs, targets = tools.batch(2 * self.current_epoch + index, tools.rank())
        loss = tools.error(self.network(inputs.to(self.network[0].weight.dtype)), targets)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True)
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with tools.broken_backward(self, self.current_epoch == tools.BROKEN and self.kind.startswith("16")):
            super().backward(loss, *args, **kwargs)
        self.before = tools.gradients(self.parameters())

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        # An optimizer of halfstep is called for a skipped step too.
        self.unwritten.append(same_bits(self.before, tools.gradients(self.parameters())))
        scaler = self.trainer.precision_plugin.scaler
        self.skipped.append(isinstance(scaler, halfstep.GradScaler) and bool(scaler.last_step_skipped()))

    def configure_optimizers(self) -> Any:
        optimizer = halfstep.AdamW(self.parameters(), lr=tools.LR)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sharded(Regression):
    """Under FSDP2, which Lightning leaves to the module."""

    def configure_model(self) -> None:
        if not isinstance(self.network, FSDPModule):
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


class Watching(Regression):
    """Looks at gradients between the backward and the step, which are then unscaled."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [
            *getattr(self, "seen", []),
            torch.nn.utils.get_total_norm(tools.gradients(self.parameters())).item(),
        ]


def plugin_for(kind: str) -> Any:
    if kind.endswith("true"):
        return HalfPrecision(kind, scaler=scaler_for(kind))
    return MixedPrecision(kind, "cpu", scaler=scaler_for(kind))


def trainer_of(folder: Path, plugin: Any, epochs: int = tools.STEPS, monitor: Any = None, **options: Any) -> Any:
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=tools.SAVED, save_top_k=-1)
    given = {
        "accelerator": "cpu",
        "devices": tools.world(),
        "strategy": "auto" if tools.world() == 1 else "ddp",
        "max_epochs": epochs,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": tools.MAX_NORM,
        "logger": Kept(),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [ScalerMonitor(monitor), checkpoint],
        "plugins": [plugin],
    }
    return lightning.Trainer(**{**given, **options})


def loader() -> Any:
    return torch.utils.data.DataLoader(range(2 * tools.world()), batch_size=1)


def strategy_for(cls: type) -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(tools.world(), 1)} if cls is Sharded else {}


def whole(folder: Path, kind: str, cls: type = Regression) -> dict[str, Any]:
    model = cls(kind)
    monitor = halfstep.AmpMonitor(model, every=1)
    trainer = trainer_of(folder, plugin_for(kind), monitor=monitor, **strategy_for(cls))
    trainer.fit(model, loader())
    place = folder / f"epoch={tools.SAVED - 1}.ckpt"
    trainer.save_checkpoint(folder / "last.ckpt")
    held = {name: tools.full(one) for name, one in model.state_dict().items()}
    again, resumed = trainer_of(folder / "again", plugin_for(kind), **strategy_for(cls)), cls(kind, seed=1)
    again.fit(resumed, loader(), ckpt_path=str(place), weights_only=False)
    rows = [one for one in trainer.logger.kept if "loss" in one or "halfstep/underflow" in one]
    merged = [
        {key: value for one in rows if one["epoch"] == epoch for key, value in one.items()}
        for epoch in range(tools.STEPS)
    ]
    return {
        "fit": tools.fit_of(held),
        **tools.seen(model.parameters(), trainer.optimizers[0]),
        "rates": model.rates,
        "skipped": model.skipped,
        "unwritten": model.unwritten,
        "log": tools.logged(merged),
        "exported": same_bits(weights_in(folder / "last.ckpt", "state_dict", held), held),
        "resumed": {
            "state": same_bits(tools.state_of(again.optimizers[0]), tools.state_of(trainer.optimizers[0])),
            "rest": resumed.losses == model.losses[2 * tools.SAVED :] and resumed.rates == model.rates[tools.SAVED :],
            "scaler": tools.scaler_state(again.precision_plugin.scaler)
            == tools.scaler_state(trainer.precision_plugin.scaler),
            "steps": again.global_step == trainer.global_step == tools.STEPS,
        },
    }


def checkpoints_of_lightning(folder: Path) -> dict[str, Any]:
    """Checkpoints of Lightning's plugin with torch's scaler load into ours, and ours into it."""

    def theirs() -> Any:
        return TheirMixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=tools.SCALE / 4))

    found = {}
    for name, first, second in (("theirs in ours", theirs, plugin_for), ("ours in theirs", plugin_for, theirs)):
        made = [one("16-mixed") if one is plugin_for else one() for one in (first, second)]
        old = trainer_of(folder / name, made[0], epochs=tools.SAVED)
        old.fit(Regression("none"), loader())
        new = trainer_of(folder / f"{name}-again", made[1])
        new.fit(
            Regression("none", seed=1),
            loader(),
            ckpt_path=str(folder / name / f"epoch={tools.SAVED - 1}.ckpt"),
            weights_only=False,
        )
        found[name] = [made[0].scaler.get_scale(), made[1].scaler.get_scale(), new.global_step]
    return found


def hooks_see_unscaled(folder: Path) -> dict[str, Any]:
    found = {}
    for kind in ("16-mixed", "bf16-mixed"):
        for cls in (Watching, Regression):
            trainer, model = trainer_of(folder / f"{kind}{cls.__name__}", plugin_for(kind), epochs=1), cls(kind)
            trainer.fit(model, loader())
            found[f"{kind} {cls.__name__}"] = [
                getattr(model, "seen", []),
                tools.state_of(trainer.optimizers[0]),
                model.unwritten,
            ]
    return found


def by_value(folder: Path) -> dict[str, Any]:
    """Clipping by value unscales and writes, as Lightning does."""
    found = {}
    for kind in ("16-mixed", "bf16-mixed"):
        trainer = trainer_of(
            folder / f"value{kind}", plugin_for(kind), epochs=1, gradient_clip_algorithm="value", gradient_clip_val=1e-3
        )
        model = Regression(kind)
        trainer.fit(model, loader())
        # The first moment is a tenth of the gradient that the step saw.
        found[kind] = 10 * max(state["exp_avg"].abs().max().item() for state in trainer.optimizers[0].state.values())
    return found


def sharded_over(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def weights_in(path: Path, key: str, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, a file or a folder, with the names and shapes of `like`."""
    if path.is_file():
        return dict(torch.load(path, weights_only=True)[key])
    saved = {name: torch.zeros_like(one) for name, one in like.items()}
    dcp.load({key: saved}, checkpoint_id=str(path), no_dist=True)
    return saved


def fabric_run(folder: Path, kind: str, sharded: bool = False) -> dict[str, Any]:
    """The same training in a loop with Fabric, with `sharded` under FSDP2."""
    found: dict[str, Any] = {name: [] for name in ("norms", "rates", "skipped", "unwritten", "log")}

    def made(seed: int) -> tuple[Any, ...]:
        strategy: Any = "auto" if tools.world() == 1 else "ddp"
        if sharded:
            strategy = FabricModelParallelStrategy(sharded_over, tools.world(), 1)
        fabric = Fabric(
            accelerator="cpu", devices=tools.world(), strategy=strategy, precision=kind, scaler=scaler_for(kind)
        )
        fabric.launch()
        model = tools.network(seed).to(WEIGHTS.get(kind, torch.float32))
        if sharded:
            model = fabric.setup_module(model)  # its parameters are others after that
        optimizer = halfstep.AdamW(model.parameters(), lr=tools.LR)
        schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if fabric.scaler is not None:
            schedule = halfstep.SkipAwareScheduler(schedule, fabric.scaler)
        if sharded:
            optimizer = fabric.setup_optimizers(optimizer)
        else:
            model, optimizer = fabric.setup(model, optimizer)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if fabric.scaler is not None:
            state["scaler"] = fabric.scaler
        return fabric, model, optimizer, schedule, state

    def train(fabric: Any, model: Any, optimizer: Any, schedule: Any, numbers: range, broken: int | None) -> None:
        for step in numbers:
            for part in range(2):
                inputs, targets = tools.batch(2 * step + part, tools.rank())
                with fabric.no_backward_sync(model, enabled=part == 0):
                    loss = tools.error(model(inputs), targets) / 2
                    with tools.broken_backward(model, step == broken and kind.startswith("16")):
                        fabric.backward(loss)
            before = tools.gradients(model.parameters())
            found["norms"].append(fabric.clip_gradients(model, optimizer, max_norm=tools.MAX_NORM).item())
            optimizer.step()
            found["unwritten"].append(same_bits(before, tools.gradients(model.parameters())))
            schedule.step()
            optimizer.zero_grad()
            found["rates"].append(optimizer.param_groups[0]["lr"])
            found["skipped"].append(fabric.scaler is not None and bool(fabric.scaler.last_step_skipped()))
            found["log"].append(fabric.scaler_metrics())

    fabric, model, optimizer, schedule, state = made(0)
    train(fabric, model, optimizer, schedule, range(tools.SAVED), tools.BROKEN)
    fabric.save(folder / "fabric.ckpt", state)
    train(fabric, model, optimizer, schedule, range(tools.SAVED, tools.STEPS), None)
    inner = optimizer.optimizer
    held = {name: tools.full(one) for name, one in model.state_dict().items()}
    found |= {**tools.seen(model.parameters(), inner), "fit": tools.fit_of(held)}
    fabric.save(folder / "fabric-last.ckpt", state)
    found["exported"] = same_bits(weights_in(folder / "fabric-last.ckpt", "model", held), held)
    norms, rates = found["norms"][tools.SAVED :], found["rates"][tools.SAVED :]
    scale = fabric.scaler_metrics().get("halfstep/scale")
    fabric, model, optimizer, schedule, state = made(1)
    objects = dict(state)
    fabric.load(folder / "fabric.ckpt", state)
    same_objects = all(state[name] is one for name, one in objects.items())
    kept = {name: list(value) for name, value in found.items() if isinstance(value, list)}
    train(fabric, model, optimizer, schedule, range(tools.SAVED, tools.STEPS), None)
    found["resumed"] = {
        "state": same_bits(tools.state_of(optimizer.optimizer), found["state"]),
        "rest": found["norms"][tools.STEPS :] == norms and found["rates"][tools.STEPS :] == rates,
        "scaler": fabric.scaler_metrics().get("halfstep/scale") == scale,
        "objects": same_objects,
    }
    return {**found, **kept}


@tools.quietly()
def run(number: int, folder: str, library: str) -> dict[str, Any]:
    place = Path(folder) / f"of{tools.world()}"
    train, strategy = whole if library == "lightning" else fabric_run, "DDP" if tools.world() > 1 else "one process"
    found: dict[str, Any] = {f"{strategy} {kind}": train(place / kind, kind) for kind in KINDS}
    if tools.world() > 1:
        shard = partial(whole, cls=Sharded) if library == "lightning" else partial(fabric_run, sharded=True)
        found |= {f"FSDP2 {kind}": shard(place / f"fsdp2-{kind}", kind) for kind in KINDS}
    elif library == "lightning":
        found["checkpoints"] = checkpoints_of_lightning(place)
        found["hooks"] = hooks_see_unscaled(place)
        found["by value"] = by_value(place)
    return found
