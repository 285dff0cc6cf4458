"""SkipAwareScheduler is a learning-rate scheduler to whoever asks, and stands still for skipped steps."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import halfstep
from halfstep.integrations.scheduler import SkipAwareScheduler

INF = float("inf")
SPOILED = (1, 3, 4)  # the steps that overflow, of eight


class Training:
    """One parameter, its optimizer and a scaler, to be stepped with or without an overflow."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.optimizer = halfstep.AdamW([self.parameter], lr=0.5)
        self.scaler = halfstep.GradScaler("cpu", init_scale=8.0)
        self.scaler.scale(torch.zeros(()))

    def step(self, overflow: bool = False) -> None:
        self.parameter.grad = torch.full((2,), INF if overflow else 8.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_are_those_of_the_steps_that_were_taken(name: str) -> None:
    one, other = Training(), Training()
    schedule = SkipAwareScheduler(SCHEDULES[name](one.optimizer), one.scaler)
    control = SCHEDULES[name](other.optimizer)
    assert isinstance(schedule, LRScheduler)
    for step in range(8):
        one.step(step in SPOILED)
        schedule.step()
        if step not in SPOILED:
            other.step()
            control.step()
        assert schedule.get_last_lr() == control.get_last_lr()
        assert [group["lr"] for group in one.optimizer.param_groups] == control.get_last_lr()
    assert schedule.state_dict().keys() == control.state_dict().keys()
    assert schedule.optimizer is one.optimizer
    for attribute in ("last_epoch", "base_lrs", "_step_count", "_last_lr", "total_steps", "_schedulers"):
        assert hasattr(schedule, attribute) == hasattr(control, attribute)
        if hasattr(control, attribute) and attribute != "_schedulers":
            assert getattr(schedule, attribute) == getattr(control, attribute)


@pytest.mark.parametrize("combine", ["SequentialLR", "ChainedScheduler"])
def test_it_may_stand_inside_of_other_schedulers(combine: str) -> None:
    def combined(training: Training, wrap: Any) -> LRScheduler:
        o = training.optimizer
        parts = [wrap(lr_scheduler.ConstantLR(o, 0.5, 3)), wrap(lr_scheduler.ExponentialLR(o, 0.9))]
        return (
            lr_scheduler.SequentialLR(o, parts, [2])
            if combine == "SequentialLR"
            else lr_scheduler.ChainedScheduler(parts)
        )

    one, other = Training(), Training()
    schedule = combined(one, lambda part: SkipAwareScheduler(part, one.scaler))
    control = combined(other, lambda part: part)
    for _ in range(5):
        for training, its in ((one, schedule), (other, control)):
            training.step()
            its.step()
        assert schedule.get_last_lr() == control.get_last_lr()


def test_a_plateau_is_told_every_metric_unless_nothing_was_trained() -> None:
    """Stepped once per epoch, it must not lose an epoch to one skipped step."""
    training = Training()
    plateau = lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=0, factor=0.5)
    schedule = SkipAwareScheduler(plateau, training.scaler)
    rates = []
    for metric, overflows in ((1.0, [False, True]), (2.0, [True, False]), (3.0, [True, True]), (4.0, [False])):
        for overflow in overflows:
            training.step(overflow)
        schedule.step(metric)
        rates.append(schedule.get_last_lr()[0])
    assert rates == [0.5, 0.25, 0.25, 0.125] and plateau.last_epoch == 3


def test_calls_before_the_next_update_do_as_the_first() -> None:
    """Accelerate steps a schedule once per process after each step."""
    training = Training()
    schedule = SkipAwareScheduler(lr_scheduler.StepLR(training.optimizer, 1), training.scaler)
    epochs = []
    for overflow in (False, True, False):
        training.step(overflow)
        for _ in range(2):
            schedule.step()
        epochs.append(schedule.last_epoch)
    assert epochs == [2, 2, 4]


def test_a_disabled_scaler_skips_nothing() -> None:
    training = Training()
    training.scaler = halfstep.GradScaler("cpu", enabled=False)
    schedule = SkipAwareScheduler(lr_scheduler.StepLR(training.optimizer, 1), training.scaler)
    for _ in range(3):
        training.step()
        schedule.step()
    assert schedule.last_epoch == 3


def test_attributes_are_written_where_they_are_read() -> None:
    training = Training()
    inner = lr_scheduler.StepLR(training.optimizer, 1)
    schedule = SkipAwareScheduler(inner, training.scaler)
    schedule._step_count += 1
    schedule.base_lrs = [3.0]
    assert (inner._step_count, inner.base_lrs) == (2, [3.0])
    assert set(vars(schedule)) == {"scheduler", "scaler", "_skips_counted", "_updates_seen", "_holds"}


def test_every_method_of_torchs_base_class_is_the_wrapped_schedulers() -> None:
    """One that is not overridden would run on an object without the attributes that it needs."""
    inherited = {name for name, value in vars(LRScheduler).items() if inspect.isfunction(value)} - {"__init__"}
    assert inherited <= set(vars(SkipAwareScheduler)), "torch has a method that SkipAwareScheduler does not pass on"


@pytest.mark.parametrize("saved_by", ["wrapper", "scheduler"])
def test_states_with_and_without_the_wrapper_are_the_same(saved_by: str) -> None:
    training = Training()
    inner = lr_scheduler.StepLR(training.optimizer, 2)
    schedule = SkipAwareScheduler(inner, training.scaler)
    for step in range(3):
        training.step(step == 1)
        schedule.step()
    state = (schedule if saved_by == "wrapper" else inner).state_dict()
    fresh = Training()
    resumed = lr_scheduler.StepLR(fresh.optimizer, 2)
    loaded = resumed if saved_by == "wrapper" else SkipAwareScheduler(resumed, fresh.scaler)
    loaded.load_state_dict(state)
    assert resumed.last_epoch == 2 and loaded.state_dict() == state


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_count_on_from_where_they_are(how: Any) -> None:
    training = Training()
    schedule = SkipAwareScheduler(lr_scheduler.StepLR(training.optimizer, 1), training.scaler)
    for overflow in (True, True, False):
        training.step(overflow)
        schedule.step()
    copied = how(schedule)
    twin = Training()
    twin.parameter, twin.optimizer, twin.scaler = (
        copied.optimizer.param_groups[0]["params"][0],
        copied.optimizer,
        copied.scaler,
    )
    twin.scaler.scale(torch.zeros(()))
    epochs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a copied optimizer's step
        for overflow in (True, False, True, False):
            twin.step(overflow)
            copied.step()
            epochs.append(copied.last_epoch)
    assert epochs == [1, 2, 2, 3] and schedule.last_epoch == 1


# ------------------------------------------------------------------------------------------------------- in trainers


def test_accelerate_prepares_it_and_advances_it_as_any_other() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    training = Training()
    accelerator.scaler = training.scaler
    inner = lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
    optimizer, schedule = accelerator.prepare(training.optimizer, SkipAwareScheduler(inner, training.scaler))
    assert type(schedule).__name__ == "AcceleratedScheduler"
    rates = []
    for overflow in (False, True, False):
        training.parameter.grad = torch.full((2,), INF if overflow else 8.0)
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [0.25, 0.25, 0.125]


@pytest.mark.parametrize("ours", [False, True], ids=["torchs scaler", "our scaler"])
def test_lightning_takes_it_as_a_scheduler_and_clips(ours: bool, tmp_path: Any) -> None:
    """It refuses to clip for optimizers that say that they unscale by themselves."""
    lightning = pytest.importorskip("lightning.pytorch")
    precision = pytest.importorskip("lightning.pytorch.plugins.precision")
    scaler: Any = (halfstep.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.rates: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).sum() * (INF if index == 1 else 1.0)

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates.append(self.lr_schedulers().get_last_lr()[0])

        def configure_optimizers(self) -> Any:
            optimizer = halfstep.AdamW(self.parameters(), lr=0.5)
            schedule: Any = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            schedule = SkipAwareScheduler(schedule, scaler) if ours else schedule
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=1)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        plugins=[precision.MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    assert module.rates == ([0.25, 0.25, 0.125, 0.0625] if ours else [0.25, 0.125, 0.0625, 0.03125])
    assert scaler.get_scale() == 4.0
