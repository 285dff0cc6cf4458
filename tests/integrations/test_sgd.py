"""SGD where users meet it: torch's list of arguments, scaler, clipping, release, offload, checkpoints, schedulers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import sgd_ranks
import torch
from sgd_ranks import LAYOUTS, OPTIONS, loss_of, net, train_scaled

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.offload import OffloadedSGD
from halfstep.integrations.release import step_in_backward

common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def train(model: torch.nn.Sequential, optimizer: Any, steps: range = range(4)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def assert_same(first: torch.nn.Module, *models: torch.nn.Module) -> None:
    for model in models:
        assert all(map(torch.equal, first.parameters(), model.parameters()))


@pytest.mark.parametrize("listed", [listed.kwargs for listed in common.optim_inputs_func_sgd("cpu")], ids=str)
def test_masters_and_state_are_those_of_torch_on_fp32(listed: dict[str, Any]) -> None:
    theirs, fp32, half = net().float(), net().float(), net()
    pairs = [(theirs, torch.optim.SGD), (fp32, halfstep.SGD), (half, halfstep.SGD)]
    optimizers = [cls(model.parameters(), **copy.deepcopy(listed)) for model, cls in pairs]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for parameters in zip(*(model.parameters() for model, _ in pairs), strict=True):
            grad = torch.randn(parameters[0].shape, generator=generator).bfloat16()
            for parameter in parameters:
                parameter.grad = grad.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    torchs, ours, ours_half = optimizers
    for expected, single, split in zip(*(model.parameters() for model, _ in pairs), strict=True):
        torch.testing.assert_close(single, expected, rtol=2.0**-18, atol=2.0**-20)
        assert torch.equal(ours_half.masters()[split], single)
        buffer = torchs.state[expected].get("momentum_buffer")
        assert (buffer is None) == ("momentum_buffer" not in ours.state[single])
        if buffer is not None:
            torch.testing.assert_close(ours.state[single]["momentum_buffer"], buffer, rtol=2.0**-18, atol=2.0**-20)


@layouts
def test_scaler_release_and_offload_have_the_bits_of_plain_steps(layout: str) -> None:
    models = [net() for _ in range(4)]
    plain, scaled, released, offloaded = models
    train(plain, halfstep.SGD(plain.parameters(), **OPTIONS, **LAYOUTS[layout]))
    train_scaled(scaled, halfstep.SGD(scaled.parameters(), **OPTIONS, **LAYOUTS[layout]), 1024.0)
    optimizer = halfstep.SGD(released.parameters(), **OPTIONS, **LAYOUTS[layout])
    step_in_backward(released, optimizer)
    train(released, optimizer)
    train(offloaded, OffloadedSGD(offloaded.parameters(), **OPTIONS, **LAYOUTS[layout]))
    assert_same(*models)


@layouts
def test_clipping_in_the_step_and_in_the_backward_agree(layout: str) -> None:
    clipped, released, unclipped = net(), net(), net()
    train(clipped, halfstep.SGD(clipped.parameters(), max_grad_norm=0.05, **OPTIONS, **LAYOUTS[layout]))
    optimizer = halfstep.SGD(released.parameters(), max_grad_norm=0.05, **OPTIONS, **LAYOUTS[layout])
    handle = step_in_backward(released, optimizer, clipping="exact")
    for step in range(4):
        with handle.check():
            loss = loss_of(released, step)
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    train(unclipped, halfstep.SGD(unclipped.parameters(), **OPTIONS, **LAYOUTS[layout]))
    assert_same(clipped, released)
    assert not torch.equal(clipped[0].weight, unclipped[0].weight)


def test_fsdp2_has_the_bits_of_one_process() -> None:
    for results in rank_processes.run(sgd_ranks.of_shards, 2):
        assert results == {name: [True] * 8 for name in LAYOUTS}


def test_a_skipped_first_step_leaves_the_next_one_without_dampening() -> None:
    model, skipped = net(), net()
    train(model, halfstep.SGD(model.parameters(), **OPTIONS), range(1, 3))
    optimizer = halfstep.SGD(skipped.parameters(), **OPTIONS)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(skipped, step)).backward()
        if step == 0:
            skipped[0].weight.grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
    assert_same(model, skipped)


@layouts
def test_states_and_checkpoints_continue_with_the_same_bits(layout: str, tmp_path: Path) -> None:
    model = net()
    optimizer = halfstep.SGD(model.parameters(), **OPTIONS, **LAYOUTS[layout])
    train(model, optimizer)
    by_state, by_file, by_copy = net(1), net(2), copy.deepcopy((model, optimizer))
    optimizers = [halfstep.SGD(other.parameters(), **OPTIONS, **LAYOUTS[layout]) for other in (by_state, by_file)]
    by_state.load_state_dict(model.state_dict())
    optimizers[0].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    checkpoint.load(
        checkpoint.save(tmp_path, 4, model=model, optimizer=optimizer), model=by_file, optimizer=optimizers[1]
    )
    for other in ((model, optimizer), (by_state, optimizers[0]), (by_file, optimizers[1]), by_copy):
        train(*other, range(4, 6))
    assert_same(model, by_state, by_file, by_copy[0])


def test_states_of_torch_load_and_canonical_ones_load_into_torch() -> None:
    theirs, ours = net().float(), net(1).float()
    torchs, optimizer = torch.optim.SGD(theirs.parameters(), **OPTIONS), halfstep.SGD(ours.parameters(), **OPTIONS)
    train(theirs, torchs)
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(torchs.state_dict())
    train(theirs, torchs, range(4, 6))
    train(ours, optimizer, range(4, 6))
    for expected, result in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(result, expected, rtol=2.0**-18, atol=2.0**-20)
    torchs.load_state_dict(optimizer.canonical_state_dict())
    for expected, result in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(torchs.state[expected]["momentum_buffer"], optimizer.state[result]["momentum_buffer"])


def test_a_scheduler_moves_momentum_as_with_torch() -> None:
    theirs, ours = net().float(), net().float()
    for model, cls in ((theirs, torch.optim.SGD), (ours, halfstep.SGD)):
        optimizer = cls(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for step in range(5):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    for expected, result in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(result, expected, rtol=2.0**-16, atol=2.0**-18)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ({"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ({"lr": -1e-2}, "Invalid learning rate: -0.01"),
        ({"master_weights": "half"}, "Expected master_weights to be one of"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        halfstep.SGD(net().parameters(), **options)
