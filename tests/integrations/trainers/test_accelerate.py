"""`halfstep.integrations.trainers.accelerate` with the real library, in one process and on two ranks with gloo."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trainer_tools as tools
from states import same_bits

import halfstep

pytestmark = tools.skip_without("accelerate")
accelerate = tools.imported("accelerate")
accelerate_ranks = tools.imported("accelerate_ranks")
ours = tools.imported("halfstep.integrations.trainers.accelerate")


def test_fsdp2_with_mixed_precision_upcasts_weights(found: dict[str, list[Any]]) -> None:
    """What docs/trainers/accelerate.md says of it, and of the way round."""
    for rank in found["upcast"]:
        assert rank == {"bf16": [["torch.float32"], []], "no": [["torch.bfloat16"], ["torch.int16"]]}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    accelerate_ranks.reset()
    yield
    accelerate_ranks.reset()


def ready(scaler: Any, *models: torch.nn.Module, optimizer: Any = halfstep.AdamW) -> tuple[Any, list[Any]]:
    """An accelerator, and a prepared optimizer for each model, with scaled gradients."""
    accelerator = ours.Accelerator(cpu=True, scaler=scaler)
    optimizers = [accelerator.prepare(optimizer(model.parameters(), lr=tools.LR)) for model in models]
    for model in models:
        accelerator.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    return accelerator, optimizers


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_other_calls_clip_in_place_as_accelerate_does(kind: str) -> None:
    """Some of the parameters, another norm, and another optimizer than ours."""
    scale = tools.SCALE if kind == "fp16" else 1
    for case in ("some", "norm", "other"):
        model = tools.network()
        make = torch.optim.AdamW if case == "other" else halfstep.AdamW
        accelerator, (optimizer,) = ready(tools.scaler_for(kind), model, optimizer=make)
        parameters = list(model.parameters())[: 2 if case == "some" else None]
        order = 1 if case == "norm" else 2
        grads = [one.grad / scale for one in parameters]
        expected = torch.nn.utils.get_total_norm(grads, order)
        norm = accelerator.clip_grad_norm_(parameters, tools.MAX_NORM, order)
        torch.testing.assert_close(norm, expected)
        clipped = torch.nn.utils.get_total_norm([one.grad for one in parameters], order)
        torch.testing.assert_close(clipped, torch.tensor(tools.MAX_NORM))
        optimizer.step()
        assert not optimizer.step_was_skipped


def test_a_limit_holds_for_one_step() -> None:
    """Also where the step that it was meant for is left out."""
    model, twin = tools.network(), tools.network()
    accelerator, (optimizer,) = ready(None, model)
    accelerator.clip_grad_norm_(model.parameters(), tools.MAX_NORM)
    accelerator.clip_grad_norm_(model.parameters(), tools.MAX_NORM)
    own = halfstep.AdamW(twin.parameters(), lr=tools.LR, max_grad_norm=tools.MAX_NORM)
    for step in range(2):
        optimizer.step()
        tools.error(twin(tools.batch(step)[0]), tools.batch(step)[1]).backward()
        own.step()
        own.zero_grad()
        own.max_grad_norm = None
        optimizer.zero_grad()
        accelerator.backward(tools.error(model(tools.batch(step + 1)[0]), tools.batch(step + 1)[1]))
    assert same_bits(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("folded", [True, False])
def test_two_optimizers_that_clip_before_both_steps(folded: bool) -> None:
    """Accelerate updates the scale after the first step, which forgets that the second's gradients are unscaled."""
    models, twins = [tools.network(0), tools.network(1)], [tools.network(0), tools.network(1)]
    accelerator, optimizers = ready(halfstep.GradScaler("cpu", init_scale=tools.SCALE), *models)
    for model in models:
        accelerator.clip_grad_norm_(model.parameters(), tools.MAX_NORM, 2 if folded else 1)
    for optimizer in optimizers:
        optimizer.step()
    assert accelerator.scaler._updates == 1
    for twin in twins:
        own = halfstep.AdamW(twin.parameters(), lr=tools.LR)
        tools.error(twin(tools.batch(0)[0]), tools.batch(0)[1]).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), tools.MAX_NORM, 2 if folded else 1)
        own.step()
    for model, twin in zip(models, twins, strict=True):
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_clipping_in_place_unscales_only_what_it_clips() -> None:
    models = [tools.network(0), tools.network(1)]
    accelerator, optimizers = ready(halfstep.GradScaler("cpu", init_scale=tools.SCALE), *models)
    before = tools.gradients(models[1].parameters())
    accelerator.clip_grad_norm_(models[0].parameters(), tools.MAX_NORM, 1)
    optimizers[0].step()
    assert accelerator.scaler._updates == 1
    assert same_bits(before, tools.gradients(models[1].parameters()))


def test_a_skip_is_reported_once() -> None:
    model = tools.network()
    accelerator, (optimizer,) = ready(halfstep.GradScaler("cpu", init_scale=tools.SCALE), model)
    schedules = [accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)) for _ in range(2)]
    model[0].weight.grad[0, 0] = math.nan
    optimizer.step()
    for schedule in schedules:
        schedule.step()
    assert optimizer.step_was_skipped and optimizer.param_groups[0]["lr"] == tools.LR
    optimizer.zero_grad()
    accelerator.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    optimizer.step()
    schedules[0].step()
    assert not optimizer.step_was_skipped and optimizer.param_groups[0]["lr"] == tools.LR / 2


def test_a_skip_of_one_of_two_optimizers_is_reported() -> None:
    """Each step updates the scale, so that one of two updates is a skip."""
    models = [tools.network(0), tools.network(1)]
    accelerator, optimizers = ready(halfstep.GradScaler("cpu", init_scale=tools.SCALE), *models)
    models[0][0].weight.grad[0, 0] = math.nan
    for skipped in (True, False):
        for optimizer in optimizers:
            optimizer.step()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [skipped, skipped]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            accelerator.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))


def test_the_options_of_accelerate_reach_our_scaler() -> None:
    """Accelerate makes a scaler on accelerators only, so this one is put there by hand."""
    theirs = accelerate.Accelerator(cpu=True, kwargs_handlers=[accelerate.GradScalerKwargs(growth_interval=7)])
    theirs.scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    accelerator = ours.Accelerator.adopt(theirs)
    assert accelerator is theirs and type(accelerator) is ours.Accelerator
    assert type(accelerator.scaler) is halfstep.GradScaler and accelerator.scaler.get_growth_interval() == 7
    assert ours.Accelerator.adopt(accelerator).scaler is accelerator.scaler


def test_errors_name_the_argument_and_the_remedy() -> None:
    scaler = halfstep.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep.GradScaler, but got a GradScaler"):
        ours.Accelerator(cpu=True, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"but got both: pass the options to halfstep.GradScaler"):
        ours.Accelerator(cpu=True, scaler=scaler, kwargs_handlers=[accelerate.GradScalerKwargs()])

    class Other(accelerate.Accelerator):
        pass

    with pytest.raises(TypeError, match=r"but got a .*Other: derive that class from .*accelerate\.Accelerator"):
        ours.Accelerator.adopt(Other(cpu=True))
    theirs = accelerate.Accelerator(cpu=True)
    theirs.prepare(halfstep.AdamW(tools.network().parameters()))
    with pytest.raises(RuntimeError, match="but got one with 1: call adopt before prepare"):
        ours.Accelerator.adopt(theirs)


def test_a_scaler_set_by_hand() -> None:
    accelerator, (optimizer,) = ready(None, tools.network())
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"got a GradScaler of torch\.amp\.grad_scaler: use halfstep\.GradScaler"):
        accelerator.prepare(halfstep.AdamW(tools.network().parameters()))
    accelerator.scaler = halfstep.GradScaler("cpu", init_scale=tools.SCALE)
    model = tools.network()
    with pytest.raises(RuntimeError, match=r"but got another: pass scaler= to Accelerator, or set it before prepare"):
        accelerator.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    accelerator.scaler = None
    accelerator.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    optimizer.step()
    early = ours.Accelerator(cpu=True)
    early.scaler = halfstep.GradScaler("cpu", init_scale=tools.SCALE)
    prepared = early.prepare(halfstep.AdamW(model.parameters()))
    early.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    prepared.step()
    assert prepared.scaler is early.scaler and not prepared.step_was_skipped


def test_the_lines_of_the_page_run() -> None:
    names = tools.page_names()
    before = copy.deepcopy(list(names["model"].parameters()))
    exec(tools.page_block("Accelerate"), names)
    assert type(names["accelerator"]) is ours.Accelerator and names["norm"] > 0
    assert not same_bits(before, list(names["model"].parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_prepared_optimizer_counts_again(copied: Any) -> None:
    model = tools.network()
    _, (optimizer,) = ready(halfstep.GradScaler("cpu", init_scale=tools.SCALE), model)
    model[0].weight.grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.step_was_skipped
    again = copied(optimizer)
    again.param_groups[0]["params"][0].grad = torch.ones(16, 8)
    again.scaler.scale(torch.ones(()))
    again.step()
    assert not again.step_was_skipped
    again.scaler.scale(torch.ones(()))
    again.param_groups[0]["params"][0].grad = torch.full((16, 8), math.inf)
    again.step()
    assert again.step_was_skipped
