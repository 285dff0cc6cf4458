"""Checkpoints of offloaded optimizers by parameter name, with torch.distributed.checkpoint and with halfstep."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import some
from states import same_bits
from stream_model import Model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.offload import OffloadedAdamW, OffloadedMuon

BF16 = torch.bfloat16
LAYOUTS = some("fp32", "fp16", "split", "split24, 8 bits")
CLASSES: dict[str, Any] = {
    "device": halfstep.AdamW,
    "host": OffloadedAdamW,
    "host, step": partial(OffloadedAdamW, in_backward="step", bucket_bytes=256),
    "Muon on the device": halfstep.Muon,
    "Muon on the host": OffloadedMuon,
}
MUON = [("Muon on the host", "Muon on the device"), ("Muon on the device", "Muon on the host")]
PAIRS = [("host", "device"), ("device", "host"), ("host", "host")]
pairs = pytest.mark.parametrize(("saved", "loaded"), PAIRS)


class Net(torch.nn.Module):
    """An embedding used twice, of the size from which moments are coded in 8 bits, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 72)
        self.head = torch.nn.Linear(72, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = torch.nn.Linear(72, 72)
        self.inner.bias.requires_grad_(False)
        self.norm = torch.nn.LayerNorm(72)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.embedding(tokens))))  # type: ignore[no-any-return]


class Run(NamedTuple):
    net: Net
    optimizer: Any

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def backward(self, number: int) -> None:
        tokens = torch.randint(0, 64, (3, 5), generator=torch.Generator().manual_seed(number))
        self.net(tokens).float().square().mean().backward()


def _run(where: str, layout: str, lr: float = 0.01, steps: int = 0, seed: int = 0) -> Run:
    dtype, options = LAYOUTS[layout]
    torch.manual_seed(seed)
    net = Net().to(dtype)
    groups: list[dict[str, Any]] = [
        {"params": [net.embedding.weight, *net.inner.parameters()]},
        {"params": list(net.norm.parameters()), "weight_decay": 0.0, "lr": 3 * lr},
    ]
    if "Muon" in where:
        groups[0] |= {"params": [net.embedding.weight, net.inner.bias], "algorithm": "adamw"}
        groups[1] |= {"algorithm": "adamw"}
        groups.append({"params": [net.inner.weight]})
    run = Run(net, CLASSES[where](groups, lr=lr, **options))
    for number in range(steps):
        run.step(number)
    return run


def _same(one: Run, other: Run) -> bool:
    """Whether weights and optimizer states have the same bits."""
    states = [run.optimizer.canonical_state_dict() for run in (one, other)]
    for group in (group for state in states for group in state["param_groups"]):
        group["betas"] = tuple(group["betas"])  # torch makes lists of tuples with full_state_dict
    return same_bits(*states) and same_bits(*(list(run.net.parameters()) for run in (one, other)))


def _check_that_both_go_on_alike(one: Run, other: Run) -> None:
    assert _same(one, other)
    for number in (3, 4):
        one.step(number)
        other.step(number)
    assert _same(one, other)


def _through_torch(source: Run, target: Run, folder: Path) -> None:
    model, state = get_state_dict(source.net, source.optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    assert {"embedding.weight", "inner.weight", "norm.weight", "norm.bias"} == set(state["state"])
    assert state["param_groups"][0]["params"] == ["embedding.weight", "inner.weight", "inner.bias"]
    model, state = get_state_dict(target.net, target.optimizer)
    read = {"model": model, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(target.net, target.optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])


def _through_ours(source: Run, target: Run, folder: Path) -> None:
    path = checkpoint.save(folder, 3, model=source.net, optimizer=source.optimizer)
    checkpoint.load(path, model=target.net, optimizer=target.optimizer)


@pytest.mark.parametrize(
    ("layout", "saved", "loaded", "through"),
    [
        (layout, *pair, (_through_torch, _through_ours)[(number + place) % 2])
        for number, layout in enumerate(LAYOUTS)
        for place, pair in enumerate(PAIRS)
    ]
    + [(layout, *pair, _through_ours) for layout in LAYOUTS for pair in MUON],
)
def test_a_checkpoint_continues_with_the_same_bits(
    layout: str, saved: str, loaded: str, through: Any, tmp_path: Path
) -> None:
    source, target = _run(saved, layout, steps=3), _run(loaded, layout, lr=0.5, steps=1, seed=1)
    through(source, target, tmp_path)
    _check_that_both_go_on_alike(source, target)


@pairs
@pytest.mark.parametrize("option", ["flatten_optimizer_state_dict", "full_state_dict", "cpu_offload"])
def test_the_options_of_torch(saved: str, loaded: str, option: str) -> None:
    options = StateDictOptions(**{option: True})
    source, target = _run(saved, "split", steps=3), _run(loaded, "split", lr=0.5)
    if option == "flatten_optimizer_state_dict":
        source.optimizer.state_dict_format = target.optimizer.state_dict_format = "canonical"
    target.net.load_state_dict(source.net.state_dict())
    state = get_optimizer_state_dict(source.net, source.optimizer, options=options)
    set_optimizer_state_dict(target.net, target.optimizer, state, options=options)
    assert _same(source, target)


def _refused_load(source: Run, target: Run, folder: Path) -> None:
    """A load that fails late: the scaler is loaded last, and refuses what was saved."""
    scaler: Any = halfstep.GradScaler("cpu")
    path = checkpoint.save(folder, 3, model=source.net, optimizer=source.optimizer, scaler=scaler)

    def refuse(state: Any) -> None:
        raise ValueError("refused")

    scaler.load_state_dict = refuse
    with pytest.raises(checkpoint.CheckpointError, match="refused"):
        checkpoint.load(path, model=target.net, optimizer=target.optimizer, scaler=scaler)


@pytest.mark.parametrize("mode", ["copy", "step", None])
def test_before_the_first_step_nothing_but_zeros_is_added(mode: Any) -> None:
    """torch then takes a step with lr 0 and gradients of 0. It changes no weight, and counts no step."""
    dtype, options = LAYOUTS["split"]
    torch.manual_seed(0)
    net = Net().to(dtype)
    run = Run(net, OffloadedAdamW(net.parameters(), lr=torch.tensor(0.01), in_backward=mode, **options))
    reference = Run(other := Net().to(dtype), halfstep.AdamW(other.parameters(), lr=torch.tensor(0.01)))
    other.load_state_dict(net.state_dict())
    for one in (run, reference):
        state = get_optimizer_state_dict(one.net, one.optimizer)
        assert [entry["step"].item() for entry in state["state"].values()] == [0.0] * 4
        assert state["param_groups"][0]["lr"] == one.optimizer.param_groups[0]["lr"] == torch.tensor(0.01)
        assert all(parameter.grad is None for parameter in one.net.parameters())
    assert _same(run, reference)
    for one in (run, reference):
        one.step(0)
    assert _same(run, reference)


@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_before_the_first_step_are_kept(backwards: int) -> None:
    """torch takes no step then. Those that are on the host return to where torch looks for them, and are stepped."""
    results = []
    for where in ("device", "host"):
        run = _run(where, "split")
        for number in range(backwards):
            run.backward(number)
        assert get_optimizer_state_dict(run.net, run.optimizer)["state"] == {}
        run.backward(9)
        run.optimizer.step()
        results.append(run)
    assert _same(*results)


def _later(call: Callable[[], None]) -> None:
    time.sleep(0.05)
    call()


def _stepped_slowly(layout: str, lr: float = 0.01, steps: int = 0, seed: int = 0) -> Run:
    """A run whose next backward steps buckets in the background, while other code reads the optimizer."""
    run = _run("host, step", layout, lr, steps, seed)
    submit = run.optimizer._submit
    run.optimizer._submit = lambda call: submit(partial(_later, call))
    return run


@pytest.mark.parametrize(
    ("layout", "reader"), [("split", "torch"), ("split", "ours"), ("split24, 8 bits", "torch"), ("fp32", "ours")]
)
def test_steps_that_a_first_backward_has_begun_are_in_its_checkpoint(layout: str, reader: str, tmp_path: Path) -> None:
    """torch takes a step with gradients of 0 if it finds no state; it must wait for the one that is being created."""
    expected, run = _run("device", layout, steps=1), _stepped_slowly(layout)
    run.backward(0)
    if reader == "ours":
        checkpoint.save(tmp_path, 1, model=run.net, optimizer=run.optimizer)
    state = get_optimizer_state_dict(run.net, run.optimizer)["state"]
    assert [entry["step"].item() for entry in state.values()] == [1.0] * 4
    run.optimizer.step()
    assert _same(run, expected)


@pytest.mark.parametrize("method", ["state_dict", "zero_grad", "add_param_group"])
def test_what_a_hook_calls_in_the_backward_waits_for_the_steps_that_have_begun(method: str) -> None:
    expected, run = _run("device", "split", steps=1), _stepped_slowly("split")
    counts: list[float] = []

    more = [{"params": torch.nn.Parameter(torch.ones(2))}] if method == "add_param_group" else []

    def hook(grad: torch.Tensor) -> None:
        getattr(run.optimizer, method)(*more)
        counts.extend(state["step"].item() for state in run.optimizer.state.values())

    run.net.embedding.weight.register_hook(hook)  # whose gradient is the last
    run.backward(0)
    assert counts == [1.0] * 3
    assert same_bits(list(run.net.parameters()), list(expected.net.parameters()))


@pytest.mark.parametrize("reader", ["torch", "ours"])
def test_a_checkpoint_loads_while_a_first_backward_is_stepped(reader: str, tmp_path: Path) -> None:
    source, target = _run("device", "split", steps=3), _stepped_slowly("split", lr=0.5, seed=1)
    target.backward(7)
    if reader == "torch":
        state = get_optimizer_state_dict(source.net, source.optimizer)
        target.optimizer.masters()  # waits, before other code writes the weights
        target.net.load_state_dict(source.net.state_dict())
        set_optimizer_state_dict(target.net, target.optimizer, state)
    else:
        _through_ours(source, target, tmp_path)
    _check_that_both_go_on_alike(source, target)


@pytest.mark.parametrize("layout", [*LAYOUTS, "split, during a first backward"])
def test_a_load_that_fails_late_restores_the_host_too(layout: str, tmp_path: Path) -> None:
    if begun := layout not in LAYOUTS:
        source, (target, untouched) = _run("device", "split", steps=3), (_stepped_slowly("split", seed=1) for _ in "ab")
        for run in (target, untouched):
            run.backward(7)
    else:
        source = _run("device", layout, steps=3)
        target, untouched = (_run("host", layout, steps=2, seed=1) for _ in "ab")
    _refused_load(source, target, tmp_path)
    assert _same(target, untouched)
    if not begun:
        for run in (target, untouched):
            run.step(2)
        assert _same(target, untouched)


def test_gradients_stay_on_the_host_when_the_state_is_asked_for() -> None:
    with Model("late") as model:
        parameters = torch.nn.ParameterList([torch.ones(5, device=model.device) for _ in range(3)])
        optimizer = OffloadedAdamW(parameters.parameters(), bucket_bytes=20)
        for start in (9.0, 0.0):
            optimizer.zero_grad()  # the first ones; the next ones arrive in the same memory
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full((5,), start + number, device=model.device)
                optimizer._take(parameter)
        assert get_optimizer_state_dict(parameters, optimizer)["state"] == {}
        for number, parameter in enumerate(parameters):
            assert parameter.grad is not None and not model.is_here(parameter.grad)
            assert parameter.grad.tolist() == [float(number)] * 5


def test_groups_and_state_are_of_the_parameters_on_the_device() -> None:
    run = _run("host", "split", steps=1)
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert set(map(id, parameters)) == set(map(id, run.net.parameters()))
    assert set(map(id, run.optimizer.state)) == {id(one) for one in parameters if one.requires_grad}
    moments = {parameter: state["exp_avg"].clone() for parameter, state in run.optimizer.state.items()}
    for parameter in run.optimizer.state:  # as Lightning moves a state
        run.optimizer.state[parameter] = {k: v.clone() for k, v in run.optimizer.state[parameter].items()}
    run.optimizer.state[run.net.inner.weight]["exp_avg"].zero_()
    assert moments.pop(run.net.inner.weight).any() and not run.optimizer.state[run.net.inner.weight]["exp_avg"].any()
    assert all(torch.equal(run.optimizer.state[parameter]["exp_avg"], value) for parameter, value in moments.items())
    run.optimizer.state = {}
    assert run.optimizer.state == {} and run.optimizer.state_dict()["state"] == {}


def test_a_load_takes_memory_of_the_device_for_one_weight(tmp_path: Path) -> None:
    with Model("late") as model:
        parameters = torch.nn.ParameterList([torch.ones(64, 64, device=model.device) for _ in range(3)])
        optimizer = OffloadedAdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        path = checkpoint.save(tmp_path, 1, model=parameters, optimizer=optimizer)
        model.memory.peak = before = model.memory.used
        checkpoint.load(path, model=parameters, optimizer=optimizer)
        assert model.memory.peak - before <= parameters[0].nbytes
