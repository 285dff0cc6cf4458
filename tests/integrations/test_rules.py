"""SGD and Muon with scaler, clipping, release, offload, shards, checkpoints and schedulers, against torch's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_ranks import LAYOUTS, OPTIONS, PAIRS, assert_same, loss_of, net, optimizer_of, plain_steps, train
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.offload import OffloadedMuon, OffloadedSGD
from halfstep.integrations.release import step_in_backward
from halfstep.kernels.muon import rule

try:
    from torch.testing._internal.common_optimizers import optim_inputs_func_sgd as inputs_of_sgd
except ImportError:  # another torch
    inputs_of_sgd = lambda device: []  # noqa: E731

names = pytest.mark.parametrize("name", OPTIONS)
cases = pytest.mark.parametrize(("name", "layout"), PAIRS)
CLOSE = {"rtol": 2.0**-18, "atol": 2.0**-20}


def scaled_steps(model: torch.nn.Module, optimizer: Any, steps: range = range(4)) -> None:
    """By torch's scaler, which unscales in place, and clips to a norm that no gradient has."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in steps:
        model.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()


# --------------------------------------------------------------------------------------------------------------- torch

OF_TORCH = [("SGD", listed.kwargs) for listed in inputs_of_sgd("cpu")]
OF_TORCH += [
    ("Muon", {**OPTIONS["Muon"], "nesterov": nesterov, "adjust_lr_fn": adjust})
    for nesterov in (True, False)
    for adjust in (None, "match_rms_adamw")
]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
def test_masters_and_momentum_are_those_of_torch_on_fp32(name: str, options: dict[str, Any]) -> None:
    shapes = [(33, 64), (96, 20), (48, 48)]
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in shapes]
    theirs, fp32 = ([torch.nn.Parameter(weight.float()) for weight in weights] for _ in range(2))
    half = [torch.nn.Parameter(weight.clone()) for weight in weights]
    pairs = [(theirs, getattr(torch.optim, name)), (fp32, getattr(halfstep, name)), (half, getattr(halfstep, name))]
    optimizers = [cls(parameters, **copy.deepcopy(options)) for parameters, cls in pairs]
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for parameters in zip(theirs, fp32, half, strict=True):
            grad = torch.randn(parameters[0].shape, generator=generator).bfloat16()
            for parameter in parameters:
                parameter.grad = grad.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
    torchs, ours, ours_half = optimizers
    for expected, single, split in zip(theirs, fp32, half, strict=True):
        buffer = torchs.state[expected].get("momentum_buffer")
        assert (buffer is None) == ("momentum_buffer" not in ours.state[single])
        if buffer is not None:
            torch.testing.assert_close(ours.state[single]["momentum_buffer"], buffer, **CLOSE)
        assert torch.equal(ours_half.masters()[split], single)
        if name == "SGD":
            torch.testing.assert_close(single, expected, **CLOSE)
            continue
        ratio = rule.ratio(options["adjust_lr_fn"] or "original", *single.shape)
        moved = (single - expected).norm() / (5 * options["lr"] * ratio)
        # Products in bf16 of matrices that differ by an ulp: torch's norm is a bf16 number, ours an fp32 one.
        assert moved < 2.0**-6 * min(single.shape) ** 0.5


@names
def test_states_of_torch_load_and_canonical_ones_load_into_torch(name: str) -> None:
    weight = torch.randn(40, 60)
    theirs, ours = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    torchs = getattr(torch.optim, name)([theirs], **OPTIONS[name])
    optimizer = getattr(halfstep, name)([ours], **OPTIONS[name])
    for step in range(2):
        theirs.grad = ours.grad = torch.randn(40, 60)
        torchs.step()
        if step:
            optimizer.step()
        else:
            ours.data.copy_(theirs.data)
            optimizer.load_state_dict(torchs.state_dict())
        assert optimizer.state[ours]["step"] == step + 1
        buffer = torchs.state[theirs]["momentum_buffer"]
        torch.testing.assert_close(optimizer.state[ours]["momentum_buffer"], buffer, **CLOSE)
    torchs.load_state_dict(optimizer.canonical_state_dict())
    assert torch.equal(torchs.state[theirs]["momentum_buffer"], optimizer.state[ours]["momentum_buffer"])


@names
def test_a_scheduler_moves_the_rates_and_momentum_of_all_groups(name: str) -> None:
    model = net()
    optimizer = optimizer_of(name, model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain_steps(model, optimizer, range(2))
    assert all(map(torch.equal, before, model.parameters()))
    if name == "SGD":
        pair = torch.nn.Parameter(torch.ones(9)), torch.nn.Parameter(torch.ones(9))
        for parameter, cls in zip(pair, (torch.optim.SGD, halfstep.SGD), strict=True):
            optimizer = cls([parameter], lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
            for step in range(5):
                parameter.grad = torch.linspace(-1, 1, 9) * (step + 1)
                optimizer.step()
                scheduler.step()
        torch.testing.assert_close(*pair, **CLOSE)


# --------------------------------------------------------------------------------------------- the bits of plain steps


@cases
def test_scalers_release_and_offload_have_the_bits_of_plain_steps(name: str, layout: str) -> None:
    models = [net() for _ in range(5)]
    plain, scaled, released, offloaded, by_torch = models
    plain_steps(plain, optimizer_of(name, plain, **LAYOUTS[layout]), range(2))
    train(scaled, optimizer_of(name, scaled, **LAYOUTS[layout]), range(2))
    optimizer = optimizer_of(name, released, **LAYOUTS[layout])
    step_in_backward(released, optimizer)
    plain_steps(released, optimizer, range(2))
    on_host = {"SGD": OffloadedSGD, "Muon": OffloadedMuon}[name]
    plain_steps(offloaded, optimizer_of(name, offloaded, on_host, **LAYOUTS[layout]), range(2))
    scaled_steps(
        by_torch, optimizer_of(name, by_torch, on_host if name == "Muon" else None, **LAYOUTS[layout]), range(2)
    )
    assert_same(*models)


@pytest.mark.parametrize("layout", [layout for name, layout in PAIRS if name == "SGD"])
def test_clipping_in_the_step_and_in_the_backward_agree(layout: str) -> None:
    clipped, released, unclipped = net(), net(), net()
    plain_steps(clipped, optimizer_of("SGD", clipped, max_grad_norm=0.05, **LAYOUTS[layout]))
    optimizer = optimizer_of("SGD", released, max_grad_norm=0.05, **LAYOUTS[layout])
    handle = step_in_backward(released, optimizer, clipping="exact")
    for step in range(4):
        with handle.check():
            loss = loss_of(released, step)
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    plain_steps(unclipped, optimizer_of("SGD", unclipped, **LAYOUTS[layout]))
    assert_same(clipped, released)
    assert not torch.equal(clipped.up.weight, unclipped.up.weight)


def test_a_skipped_first_step_leaves_the_next_one_without_dampening() -> None:
    model, skipped = net(), net()
    plain_steps(model, optimizer_of("SGD", model), range(3, 5))
    train(skipped, optimizer_of("SGD", skipped), range(2, 5))
    assert_same(model, skipped)


@pytest.mark.usefixtures("one_rank")
def test_ddp_steps_alike() -> None:
    wrapped, plain = DistributedDataParallel(net()), net()
    train(wrapped, optimizer_of("Muon", wrapped))
    train(plain, optimizer_of("Muon", plain))
    assert_same(plain, wrapped.module)


@cases
def test_states_and_checkpoints_continue_with_the_same_bits(name: str, layout: str, tmp_path: Path) -> None:
    models = [net(seed) for seed in range(4)]
    model, by_state, by_canonical, by_file = models
    optimizer, *others = [optimizer_of(name, model, **LAYOUTS[layout]) for model in models]
    train(model, optimizer)
    for other in (by_state, by_canonical):
        other.load_state_dict(model.state_dict())
    others[0].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others[1].load_state_dict(copy.deepcopy(optimizer.canonical_state_dict()))
    checkpoint.load(checkpoint.save(tmp_path, 4, model=model, optimizer=optimizer), model=by_file, optimizer=others[2])
    copied = copy.deepcopy((model, optimizer))
    for pair in (*zip(models, (optimizer, *others), strict=True), copied):
        train(*pair, range(4, 6))
    assert_same(*models, copied[0])


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("SGD", {"momentum": -0.5}, "Invalid momentum value: -0.5"),
        ("SGD", {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ("SGD", {"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ("SGD", {"lr": -1e-2}, "Invalid learning rate: -0.01"),
        ("SGD", {"master_weights": "half"}, "Expected master_weights to be one of"),
        ("Muon", {"momentum": 1.0}, "Invalid momentum value: 1.0"),
        ("Muon", {"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ("Muon", {"ns_steps": -1}, "Expected ns_steps to be an integer of at least 0"),
        ("Muon", {"ns_coefficients": (1.0, 2.0)}, "Expected ns_coefficients to be three numbers"),
        ("Muon", {"adjust_lr_fn": "half"}, "Expected adjust_lr_fn to be one of"),
        ("Muon", {"algorithm": "sgd"}, "Expected algorithm to be 'muon' or 'adamw'"),
        ("Muon", {"blocks": 5}, "Expected blocks to divide the 96 rows"),
        ("Muon", {"master_weights": "half"}, "Expected master_weights to be one of"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        getattr(halfstep, name)([torch.nn.Parameter(torch.ones(96, 64))], **options)
