"""SkipAwareScheduler behaves like any learning rate scheduler, and does not advance on skipped steps."""

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
def test_rates_follow_the_steps_that_were_taken(name: str) -> None:
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
    assert schedule.state_dict().keys() == control.state_dict().keys() and schedule.optimizer is one.optimizer
    assert getattr(schedule, "last_epoch", None) == getattr(control, "last_epoch", None)


@pytest.mark.parametrize(
    "combine",
    [lambda o, parts: lr_scheduler.SequentialLR(o, parts, [2]), lambda o, parts: lr_scheduler.ChainedScheduler(parts)],
)
def test_it_works_inside_other_schedulers(combine: Any) -> None:
    def combined(training: Training, wrap: Any) -> LRScheduler:
        o = training.optimizer
        return combine(o, [wrap(lr_scheduler.ConstantLR(o, 0.5, 3)), wrap(lr_scheduler.ExponentialLR(o, 0.9))])

    one, other = Training(), Training()
    schedule = combined(one, lambda part: SkipAwareScheduler(part, one.scaler))
    control = combined(other, lambda part: part)
    for _ in range(5):
        for training, its in ((one, schedule), (other, control)):
            training.step()
            its.step()
        assert schedule.get_last_lr() == control.get_last_lr()


def test_a_plateau_scheduler_gets_every_metric_unless_all_steps_were_skipped() -> None:
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


def test_attributes_are_written_where_they_are_read() -> None:
    training = Training()
    inner = lr_scheduler.StepLR(training.optimizer, 1)
    schedule = SkipAwareScheduler(inner, training.scaler)
    schedule._step_count += 1
    schedule.base_lrs = [3.0]
    assert (inner._step_count, inner.base_lrs) == (2, [3.0])


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
def test_copies_continue_counting(how: Any) -> None:
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
