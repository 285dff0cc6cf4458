"""Muon where users meet it: torch's arguments, groups, scaler, clipping, release, shards, checkpoints, schedulers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import muon_ranks
import pytest
import rank_processes
import torch
from muon_ranks import LAYOUTS, OPTIONS, loss_of, muon, net, train
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.release import step_in_backward
from halfstep.kernels.muon import rule
from halfstep.numerics.owners import owners_of

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def assert_same(first: torch.nn.Module, *models: torch.nn.Module) -> None:
    for model in models:
        assert all(map(torch.equal, first.parameters(), model.parameters()))


def plain_steps(model: torch.nn.Module, optimizer: Any, steps: range = range(4)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_masters_and_momentum_are_those_of_torch_on_fp32(nesterov: bool, adjust: Any) -> None:
    options = {**OPTIONS, "nesterov": nesterov, "adjust_lr_fn": adjust}
    shapes = [(33, 64), (96, 20), (48, 48)]
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for shape in shapes]
    theirs, fp32 = ([torch.nn.Parameter(weight.float()) for weight in weights] for _ in range(2))
    half = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizers = [torch.optim.Muon(theirs, **options), halfstep.Muon(fp32, **options), halfstep.Muon(half, **options)]
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
        buffer = torchs.state[expected]["momentum_buffer"]
        torch.testing.assert_close(ours.state[single]["momentum_buffer"], buffer, rtol=2.0**-18, atol=2.0**-20)
        moved = (single - expected).norm() / (5 * OPTIONS["lr"] * rule.ratio(adjust or "original", *single.shape))
        # Products in bf16 of matrices that differ by an ulp: torch's norm is a bf16 number, ours an fp32 one.
        assert moved < 2.0**-6 * min(single.shape) ** 0.5
        assert torch.equal(ours_half.masters()[split], single)


@layouts
def test_scaler_release_and_ddp_have_the_bits_of_plain_steps(layout: str) -> None:
    plain, scaled, released = net(), net(), net()
    plain_steps(plain, muon(plain, **LAYOUTS[layout]), range(2))
    train(scaled, muon(scaled, **LAYOUTS[layout]), range(2))
    optimizer = muon(released, **LAYOUTS[layout])
    step_in_backward(released, optimizer)
    plain_steps(released, optimizer, range(2))
    assert_same(plain, scaled, released)


def test_torchs_scaler_clipping_and_zeroing_have_the_bits_of_plain_steps() -> None:
    plain, scaled = net(), net()
    plain_steps(plain, muon(plain, state_dtype="8bit"))
    optimizer, scaler = muon(scaled, state_dtype="8bit"), torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        scaled.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(scaled.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    assert_same(plain, scaled)


def test_a_step_under_autocast_has_the_bits_of_one_outside() -> None:
    outside, inside = net(), net()
    plain_steps(outside, muon(outside), range(2))
    optimizer = muon(inside)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(inside, step).backward()
        with torch.autocast("cpu", dtype=torch.float16):
            optimizer.step()
    assert_same(outside, inside)


def test_transposed_weights_and_gradients_have_the_bits_of_contiguous_ones() -> None:
    weight, grad = torch.randn(48, 80).bfloat16(), torch.randn(48, 80).bfloat16()
    rows, columns = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.t().contiguous().t())
    optimizers = halfstep.Muon([rows]), halfstep.Muon([columns])
    for _ in range(2):
        rows.grad, columns.grad = grad.clone(), grad.t().contiguous().t()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(rows, columns)


def test_blocks_and_batches_are_matrices_of_their_own() -> None:
    parts = [torch.randn(24, 40).bfloat16() for _ in range(3)]
    grads = [torch.randn(24, 40).bfloat16() for _ in range(3)]
    apart = [torch.nn.Parameter(part.clone()) for part in parts]
    fused, batch = torch.nn.Parameter(torch.cat(parts)), torch.nn.Parameter(torch.stack(parts))
    optimizers = [halfstep.Muon(apart), halfstep.Muon([{"params": [fused], "blocks": 3}]), halfstep.Muon([batch])]
    for _ in range(2):
        for parameter, grad in zip(apart, grads, strict=True):
            parameter.grad = grad.clone()
        fused.grad, batch.grad = torch.cat(grads), torch.stack(grads)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(list(apart)), fused)
    assert torch.equal(torch.stack(list(apart)), batch)


def test_many_matrices_are_orthogonalized_in_parts_that_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = ([torch.nn.Parameter(torch.randn(40, 60).bfloat16()) for _ in range(5)] for _ in range(2))
    for parameter, other in zip(whole, parts, strict=True):
        other.data.copy_(parameter)
    optimizers = halfstep.Muon(whole), halfstep.Muon(parts)
    monkeypatch.setattr(optimizers[1], "_rule", optimizers[1]._rule._replace(most=2 * 40 * 60))
    for _ in range(2):
        for parameter, other in zip(whole, parts, strict=True):
            parameter.grad = torch.randn(40, 60).bfloat16()
            other.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, whole, parts))
    (memory,) = optimizers[1]._plans.scratch.values()
    assert memory.nbytes <= 2 * 2 * 2432 < 5 * 2 * 40 * 60


def test_adamw_groups_have_the_bits_of_adamw() -> None:
    model, other = net(), net()
    optimizer = muon(model)
    groups = halfstep.muon_groups(other)
    adamw = halfstep.AdamW(groups[1]["params"], lr=OPTIONS["lr"], weight_decay=0.0)
    matrices = halfstep.Muon(groups[0]["params"], adjust_lr_fn="match_rms_adamw", **OPTIONS)
    for step in range(3):
        for of, optimizers in ((model, [optimizer]), (other, [adamw, matrices])):
            of.zero_grad()
            loss_of(of, step).backward()
            for stepped in optimizers:
                stepped.step()
    assert_same(model, other)
    assert [group["adjust_lr_fn"] for group in optimizer.param_groups] == ["match_rms_adamw"] * 2
    assert [group["eps"] for group in optimizer.param_groups] == [1e-7, 1e-8]


def test_words_of_names_go_to_adamw() -> None:
    names = ("multihead", "lm_head", "patch_embed", "embedder")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names})
    matrices, others = halfstep.muon_groups(model)
    assert [name for name, _ in matrices["params"]] == ["multihead.weight", "embedder.weight"]
    assert [name for name, _ in others["params"]] == ["lm_head.weight", "patch_embed.weight"]


def test_groups_of_a_model() -> None:
    groups = halfstep.muon_groups(net(), lr=1e-3)
    assert [name for name, _ in groups[0]["params"]] == ["experts", "up.weight", "down.weight"]
    assert [name for name, _ in groups[1]["params"]] == [
        "embedding.weight",
        "up.bias",
        "convolution.weight",
        "convolution.bias",
    ]
    assert groups[1]["algorithm"] == "adamw"
    assert groups[1]["lr"] == 1e-3


@pytest.mark.parametrize(("ranks", "cut"), [(2, "rows"), (4, "rows"), (4, "hsdp"), (2, "columns")])
def test_shards_have_the_bits_of_one_process(ranks: int, cut: str) -> None:
    names = list(LAYOUTS) if ranks == 2 and cut == "rows" else ["split24, 8 bits", "split"]
    if cut == "columns":
        names = ["split"]
    for results in rank_processes.run(muon_ranks.of_shards, ranks, ranks, cut, names):
        assert {name: all(same) for name, same in results.items()} == dict.fromkeys(names, True)


def test_checkpoints_continue_on_other_ranks(tmp_path: Path) -> None:
    model = net()
    optimizer = muon(model, **LAYOUTS["split24, 8 bits"])
    train(model, optimizer)
    path, _ = rank_processes.run(muon_ranks.saved_by_shards, 2, 2, tmp_path)
    restored = net(1)
    other = muon(restored, **LAYOUTS["split24, 8 bits"])
    checkpoint.load(path, model=restored, optimizer=other)
    train(model, optimizer, range(4, 6))
    train(restored, other, range(4, 6))
    assert_same(model, restored)
    for weights in rank_processes.run(muon_ranks.continued_by_shards, 4, 4, path):
        assert all(map(torch.equal, weights, model.parameters()))


def test_what_shards_cannot_do_is_refused() -> None:
    for text in rank_processes.run(muon_ranks.refused, 2):
        assert "Expected parameters that are whole on each rank" in text
    for text in rank_processes.run(muon_ranks.cut_by_both, 4):
        assert "one dimension of the mesh shards" in text


def test_owners_share_the_work() -> None:
    shapes = [torch.Size(shape) for shape in [(64, 64), (64, 256), (256, 64), (64, 64), (8, 8)] * 8]
    for ranks in (1, 2, 4, 8):
        owners = owners_of(shapes, ranks)
        loads = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            loads[owner] += min(shape) * shape.numel()
        assert max(loads) <= 1.06 * sum(loads) / ranks


@layouts
def test_states_and_checkpoints_continue_with_the_same_bits(layout: str, tmp_path: Path) -> None:
    model = net()
    optimizer = muon(model, **LAYOUTS[layout])
    train(model, optimizer)
    by_state, by_file, by_canonical = net(1), net(2), net(3)
    others = [muon(other, **LAYOUTS[layout]) for other in (by_state, by_file, by_canonical)]
    by_state.load_state_dict(model.state_dict())
    others[0].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    by_canonical.load_state_dict(model.state_dict())
    others[2].load_state_dict(copy.deepcopy(optimizer.canonical_state_dict()))
    checkpoint.load(checkpoint.save(tmp_path, 4, model=model, optimizer=optimizer), model=by_file, optimizer=others[1])
    copied = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), *zip((by_state, by_file, by_canonical), others, strict=True), copied):
        train(*pair, range(4, 6))
    assert_same(model, by_state, by_file, by_canonical, copied[0])


def test_states_take_the_bytes_of_the_layout_and_load_into_others() -> None:
    model = net()
    optimizer = muon(model, **LAYOUTS["split24, 8 bits"])
    train(model, optimizer)
    weight, held = model.experts, optimizer.state_dict()["state"]
    entries = held[0]
    assert {key: (value.dtype, value.numel()) for key, value in entries.items() if key != "step"} == {
        "momentum_buffer_codes": (torch.int8, weight.numel()),
        "momentum_buffer_scale": (torch.uint8, weight.numel() // 32),
        "master_remainder": (torch.int8, weight.numel()),
    }
    exact = net()
    exact.load_state_dict(model.state_dict())
    fp32 = muon(exact)
    fp32.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = optimizer.canonical_state_dict()["state"][0]
    assert torch.equal(fp32.state[exact.experts]["momentum_buffer"], expected["momentum_buffer"])
    assert torch.equal(fp32.masters()[exact.experts], expected["master"])


def test_states_of_torch_load_and_canonical_ones_load_into_torch() -> None:
    weight = torch.randn(40, 60)
    theirs, ours = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    torchs, optimizer = torch.optim.Muon([theirs], **OPTIONS), halfstep.Muon([ours], **OPTIONS)
    theirs.grad = torch.randn(40, 60)
    torchs.step()
    optimizer.load_state_dict(torchs.state_dict())
    assert torch.equal(optimizer.state[ours]["momentum_buffer"], torchs.state[theirs]["momentum_buffer"])
    ours.grad = torch.randn(40, 60)
    optimizer.step()
    torchs.load_state_dict(optimizer.canonical_state_dict())
    assert torch.equal(torchs.state[theirs]["momentum_buffer"], optimizer.state[ours]["momentum_buffer"])


def test_ddp_steps_alike(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped, plain = DistributedDataParallel(net()), net()
        train(wrapped, muon(wrapped))
        train(plain, muon(plain))
        assert_same(plain, wrapped.module)
    finally:
        torch.distributed.destroy_process_group()


def test_a_scheduler_moves_the_learning_rate_of_both_algorithms() -> None:
    model = net()
    optimizer = muon(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plain_steps(model, optimizer, range(2))
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 1.0}, "Invalid momentum value: 1.0"),
        ({"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
        ({"ns_steps": -1}, "Expected ns_steps to be an integer of at least 0"),
        ({"ns_coefficients": (1.0, 2.0)}, "Expected ns_coefficients to be three numbers"),
        ({"adjust_lr_fn": "half"}, "Expected adjust_lr_fn to be one of"),
        ({"algorithm": "sgd"}, "Expected algorithm to be 'muon' or 'adamw'"),
        ({"blocks": 5}, "Expected blocks to divide the 96 rows"),
        ({"master_weights": "half"}, "Expected master_weights to be one of"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        halfstep.Muon([torch.nn.Parameter(torch.ones(96, 64))], **options)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm='adamw'"):
        halfstep.Muon(net().parameters())
