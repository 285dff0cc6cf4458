"""What is specific to Muon: matrices, blocks, AdamW groups, exchange between ranks. test_rules.py has the rest."""

from __future__ import annotations

import copy
import math
import weakref
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from rule_ranks import LAYOUTS, OPTIONS, assert_same, loss_of, net, optimizer_of, plain_steps, train
from stream_model import Model

import halfstep
from halfstep.numerics import owners
from halfstep.numerics.owners import Ownership, cut, cuts_matrices, owners_of


def test_a_step_under_autocast_has_the_bits_of_one_outside() -> None:
    outside, inside = net(), net()
    plain_steps(outside, optimizer_of("Muon", outside), range(2))
    optimizer = optimizer_of("Muon", inside)
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
    assert memory.nbytes == 2 * 2 * 2432 < 5 * 2 * 40 * 60


def test_streams_have_scratch_memory_of_their_own_and_gradients_are_let_go() -> None:
    """Two matrices that are stepped on two streams of the model of a GPU, in random order."""

    def normal(seed: int, device: torch.device) -> torch.Tensor:
        return torch.randn(24, 40, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)

    def stepped(device: torch.device, streams: list[Any]) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(normal(part, device)) for part in range(2)]
        optimizer = halfstep.Muon(weights)
        for step in range(20):
            for part, weight in enumerate(weights):
                weight.grad = normal(2 + 2 * step + part, device)
            grads = [weakref.ref(weight.grad) for weight in weights]
            if streams:
                streams[1].wait_stream(streams[0])
            for part, weight in enumerate(weights):
                with torch.cuda.stream(streams[part]) if streams else nullcontext():
                    optimizer.step_part(part, [weight])
            if streams:
                streams[0].wait_stream(streams[1])
            assert [grad() for grad in grads] == [None] * 2
        return [weight.detach().cpu() for weight in weights]

    expected = stepped(torch.device("cpu"), [])
    with Model("random", seed=2) as model:
        assert all(map(torch.equal, expected, stepped(model.device, [torch.cuda.current_stream(), model.stream()])))


def test_adamw_groups_have_the_bits_of_adamw() -> None:
    model, other = net(), net()
    optimizer = halfstep.Muon(halfstep.muon_groups(model, weight_decay=0.0), **OPTIONS["Muon"])
    groups = halfstep.muon_groups(other)
    adamw = halfstep.AdamW(groups[1]["params"], lr=OPTIONS["Muon"]["lr"], weight_decay=0.0)
    matrices = halfstep.Muon(groups[0]["params"], adjust_lr_fn="match_rms_adamw", **OPTIONS["Muon"])
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


@pytest.mark.parametrize(("outputs", "algorithm"), [(9, "adamw"), (8, "muon")])
def test_a_head_of_any_name_goes_to_adamw(outputs: int, algorithm: str) -> None:
    layers = {
        "tokens": torch.nn.Embedding(9, 4),
        "attention": torch.nn.Linear(4, 9),
        "output": torch.nn.Linear(4, outputs),
    }
    groups = halfstep.muon_groups(torch.nn.ModuleDict({**layers, "positions": torch.nn.Embedding(4, 4)}))
    of_name = {name: group.get("algorithm", "muon") for group in groups for name, _ in group["params"]}
    assert (of_name["attention.weight"], of_name["output.weight"]) == ("muon", algorithm)


def test_groups_of_a_model() -> None:
    groups = halfstep.muon_groups(net(), lr=1e-3)
    assert [name for name, _ in groups[0]["params"]] == ["experts", "up.weight", "down.weight", "last.weight"]
    assert [name for name, _ in groups[1]["params"]] == [
        "embedding.weight",
        "up.bias",
        "convolution.weight",
        "convolution.bias",
    ]
    assert groups[1]["algorithm"] == "adamw"
    assert groups[1]["lr"] == 1e-3


def test_states_of_keller_jordans_optimizer_load() -> None:
    """`MuonWithAuxAdam` of github.com/KellerJordan/Muon: groups say `use_muon`, and no option that it does not have."""
    matrix, vector = torch.nn.Parameter(torch.randn(40, 60)), torch.nn.Parameter(torch.randn(8))
    optimizer = halfstep.Muon(
        [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}], adjust_lr_fn="original"
    )
    buffer, moments = torch.randn(40, 60), {"exp_avg": torch.randn(8), "exp_avg_sq": torch.rand(8)}
    groups = [
        {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "params": [0]},
        {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "params": [1]},
    ]
    optimizer.load_state_dict(
        {"state": {0: {"momentum_buffer": buffer}, 1: {**moments, "step": 3}}, "param_groups": groups}
    )
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], buffer)
    assert all(torch.equal(optimizer.state[vector][name], value) for name, value in moments.items())
    assert float(optimizer.state[vector]["step"]) == 3.0
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    assert optimizer.param_groups[1]["eps"] == 1e-10 and optimizer.param_groups[0]["adjust_lr_fn"] == "original"


@pytest.mark.parametrize(("shape", "dim", "blocks", "cuts"), [
    ((4, 16), 0, 1, True), ((4, 16), 1, 1, True), ((4, 16), 0, 2, False), ((4, 16), 0, 4, False), ((6, 16), 0, 3, True),
    ((4, 8, 16), 0, 1, False), ((4, 8, 16), 1, 1, True),
])  # fmt: skip
def test_shards_that_cut_matrices_are_recognized(shape: tuple[int, ...], dim: int, blocks: int, cuts: bool) -> None:
    assert cuts_matrices(shape, dim, cut(shape[dim], 2), blocks) == cuts


def test_owners_share_the_work() -> None:
    shapes = [torch.Size(shape) for shape in [(64, 64), (64, 256), (256, 64), (64, 64), (8, 8)] * 8]
    for ranks in (1, 2, 4, 8):
        owner_of = owners_of(shapes, ranks)
        loads = [0] * ranks
        for shape, owner in zip(shapes, owner_of, strict=True):
            loads[owner] += min(shape) * shape.numel()
        assert max(loads) <= 1.06 * sum(loads) / ranks


def test_rounds_hold_all_parts_and_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank sends to another one in a round is what that one receives, and an owner's round has few matrices."""
    monkeypatch.setattr(owners, "ROUND", 5000)
    shapes = [(64, 64), (10, 256), (256, 64), (64, 63), (7, 8), (90, 3)] * 3
    for ranks in (2, 3, 4):
        cuts = [(0, cut(shape[0], ranks)) for shape in shapes]
        of_ranks = [Ownership(shapes, cuts, rank) for rank in range(ranks)]
        assert len({(len(ownership.rounds), *ownership.order) for ownership in of_ranks}) == 1
        assert len(of_ranks[0].rounds) > 2
        for together in zip(*(ownership.rounds for ownership in of_ranks), strict=True):
            for sender, receiver in product(range(ranks), repeat=2):
                assert together[sender].sent[receiver] == together[receiver].received[sender]
            for each in together:
                elements = [math.prod(shapes[index]) for index in each.owned]
                assert sum(elements) - (elements or [0])[-1] < 5000
        owned = [index for ownership in of_ranks for each in ownership.rounds for index in each.owned]
        assert sorted(owned) == list(range(len(shapes)))


def test_states_take_the_bytes_of_the_layout_and_load_into_others() -> None:
    model = net()
    optimizer = optimizer_of("Muon", model, **LAYOUTS["split24, 8 bits"])
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
    fp32 = optimizer_of("Muon", exact)
    fp32.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = optimizer.canonical_state_dict()["state"][0]
    assert torch.equal(fp32.state[exact.experts]["momentum_buffer"], expected["momentum_buffer"])
    assert torch.equal(fp32.masters()[exact.experts], expected["master"])


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm='adamw'"):
        halfstep.Muon(net().parameters())


def test_matrices_without_memory_are_refused_and_other_parameters_step() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(size, device="meta")) for size in ((8, 8), (8,)))
    optimizer = halfstep.Muon([{"params": [vector], "algorithm": "adamw"}, {"params": [matrix]}])
    vector.grad = torch.ones_like(vector)
    optimizer.step()
    matrix.grad = torch.ones_like(matrix)
    with pytest.raises(TypeError, match=r"parameter 1 with a gradient \(group 1\) to have memory of its own for Muon"):
        optimizer.step()
