"""AmpMonitor: its counts are those of the unscaled gradients, whatever the loss scale does."""

import json
from typing import Any

import pytest
import torch

import halfstep
from halfstep.integrations.monitor import AmpMonitor
from halfstep.numerics.statistics.counts import statistics


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Tanh(), torch.nn.Linear(20, 4)).to(dtype)


def backward(model: torch.nn.Module, scaler: torch.amp.GradScaler | None, factor: float = 1.0) -> None:
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
    loss = model(x).square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


SCALERS = {
    "none": lambda: None,
    "halfstep": lambda: halfstep.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
    "disabled": lambda: halfstep.GradScaler("cpu", enabled=False),
}


@pytest.mark.parametrize("make", [halfstep.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("scaler_name", SCALERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_gradients_are_counted_without_the_scale(scaler_name: str, make: Any, unscale: bool) -> None:
    model, scaler = model_of(), SCALERS[scaler_name]() or halfstep.GradScaler("cpu", enabled=False)
    optimizer = make(model.parameters(), lr=1e-3)
    monitor = AmpMonitor(model, None if scaler_name == "none" else scaler, every=3).attach(optimizer)
    expected, scales = None, set()
    for step in range(7):
        optimizer.zero_grad()
        backward(model, scaler, 2.0**-10)
        scales.add(scale := scaler.get_scale())
        if step % 3 == 0:
            counted = statistics({name: g / scale for name, g in gradients(model).items()}, "fp16", errors=False)
            expected = counted if expected is None else expected + counted
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert len(scales) > 1 or not scaler.is_enabled(), "the scale must have moved for the test to say much"
    counts, report = monitor.statistics(), monitor.report()
    assert counts.names == expected.names and (counts.counts == expected.counts).all()
    assert (report.steps, report.collected, report.scale) == (7, 3, scaler.get_scale())
    assert report.statistics.scale == report.scale
    assert report.advice.scale == halfstep.advise_scale(counts).scale


def test_stepping_by_hand_and_detaching() -> None:
    model = model_of(torch.bfloat16)
    monitor = AmpMonitor(model.named_parameters(), every=2, format="bf16")
    early = monitor.statistics()
    for _ in range(5):
        backward(model, None)
        monitor.step()
        early = monitor.statistics() if monitor.report().steps == 1 else early
        model.zero_grad()
    assert (monitor.report().steps, monitor.report().collected) == (5, 3)
    assert early.total.elements == sum(parameter.numel() for parameter in model.parameters()), "it is a copy"
    assert monitor.statistics().total.elements == 3 * early.total.elements
    monitor.reset()
    empty = monitor.report()
    assert (empty.steps, empty.collected, empty.advice) == (0, 0, None)
    assert empty.statistics.total.elements == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor.attach(optimizer)
    monitor.detach()
    backward(model, None)
    optimizer.step()
    assert monitor.report().steps == 0


def test_counts_continue_from_a_checkpoint() -> None:
    model = model_of()
    first = AmpMonitor(model, every=2)
    for _ in range(3):
        backward(model, None)
        first.step()
    second = AmpMonitor(model, every=2)
    state = first.state_dict()
    second.load_state_dict(state)
    for monitor in (first, second):
        monitor.step()
        monitor.step()
    assert (second.report().steps, second.report().collected) == (5, 3)
    assert (second.statistics().counts == first.statistics().counts).all()
    assert state["counts"].sum() < second.state_dict()["counts"].sum(), "the state is a copy"
    with pytest.raises(ValueError, match="Expected format in state_dict to be that of this monitor, 'bf16', but got"):
        AmpMonitor(model, format="bf16").load_state_dict(state)
    with pytest.raises(ValueError, match=r"Expected format in state_dict .*, 'fp16', but got None"):
        AmpMonitor(model).load_state_dict({})
    with pytest.raises(ValueError, match=r"Expected names in state_dict to be that of this monitor, \['weight',"):
        AmpMonitor(model[0]).load_state_dict(state)


@pytest.mark.parametrize("make", [halfstep.AdamW, torch.optim.AdamW])
def test_scalars_are_those_of_the_step(make: Any) -> None:
    """Of six steps, the third overflows and is skipped, and many gradients of the fifth are below fp16's range."""
    model, scaler = model_of(), halfstep.GradScaler("cpu", init_scale=2.0**10)
    monitor, rows, norms, shares = AmpMonitor(model, every=1), [], [], []
    model.load_state_dict(model_of().state_dict(), assign=True)  # other parameters, as after sharding
    optimizer, ours = make(model.parameters(), lr=1e-3), make is halfstep.AdamW
    monitor.attach(optimizer, scaler)
    assert monitor.scalars() == {"halfstep/scale": 2.0**10, "halfstep/skipped": 0}
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):  # accumulated
            backward(model, scaler, {2: float("inf"), 4: 1e-8}.get(step, 1.0) / (part + 1))
        unscaled = {name: grad / scaler.get_scale() for name, grad in gradients(model).items()}
        norms.append(torch.nn.utils.get_total_norm(unscaled.values()).item())
        shares.append(statistics(unscaled, "fp16", 2.0 ** (10 - (step >= 2)), errors=False).total.share("flushed"))
        if ours:
            scaler.clip_grad_norm_(optimizer, 0.01)
        scaler.step(optimizer)
        scaler.update()
        rows.append(monitor.scalars())
    assert [row["halfstep/skipped"] for row in rows] == [0, 0, 1, 1, 1, 1]
    assert [row["halfstep/scale"] for row in rows] == [1024, 1024, 512, 512, 512, 512]
    if ours:
        assert [row["halfstep/grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-6, nan_ok=True)
    taken = [step for step in range(6) if step != 2 or ours]  # of torch's optimizer, the scaler does not call step
    assert [rows[step]["halfstep/underflow"] for step in taken] == [shares[step] for step in taken]
    assert shares[4] > 0.1 and shares[5] == 0
    named = "halfstep/underflow/0.weight"
    assert [named in row for row in rows] == [False] * 4 + [True] * 2 and rows[4][named] > 0 == rows[5][named]
    assert all(type(value) is float for row in rows for value in row.values())


def test_scalars_without_a_halfstep_scaler() -> None:
    model = model_of()
    optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=0.1)
    monitor = AmpMonitor(model, torch.amp.GradScaler("cpu", init_scale=2.0, enabled=False)).attach(optimizer)
    assert monitor.scalars() == {}
    backward(model, None)
    optimizer.step()
    assert monitor.scalars() == {
        "halfstep/grad_norm": pytest.approx(optimizer.grad_norm.item()),
        "halfstep/underflow": 0,
    }
    optimizer.max_grad_norm = None
    monitor.attach(optimizer, torch.amp.GradScaler("cpu", init_scale=2.0))
    optimizer.step()
    assert monitor.scalars() == {"halfstep/scale": 2.0, "halfstep/underflow": 0}


def test_overflowing_and_missing_gradients() -> None:
    model, scaler = model_of(), SCALERS["halfstep"]()
    optimizer = halfstep.AdamW(model.parameters())
    monitor = AmpMonitor(model, scaler, every=1).attach(optimizer)
    backward(model, scaler)
    model[0].weight.grad[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    model[0].bias.grad = None
    model[2].bias.requires_grad_(False)
    scaler.step(optimizer)
    scaler.update()
    report = monitor.report()
    row = report.statistics["0.weight"]
    assert (row.infinite, row.nan, row.zero) == (1, 1, 1)
    assert report.statistics["0.bias"].elements == 0
    assert "are left out" in str(report)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["collected"] == 1
    frozen = AmpMonitor(model)
    assert "2.bias" not in frozen.statistics().names


def test_fp64_and_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    linear = torch.nn.Linear(4, 1).double()
    model = torch.nn.ModuleDict({"embedding": embedding, "linear": linear})
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**100)
    monitor = AmpMonitor(model, scaler, every=1)
    scaler.scale(linear(embedding(torch.tensor([1, 1, 3])).double()).sum() * 2.0**-120).backward()
    monitor.step()
    found = monitor.statistics()
    assert found["embedding.weight"].elements == 8, "of two rows, one of them twice"
    assert found["linear.bias"].exponents == {-119: 1}
    assert found["linear.bias"].flushed == 1


def test_a_scale_that_is_no_power_of_two() -> None:
    model = model_of()
    scaler = halfstep.GradScaler("cpu", init_scale=1000.0)
    monitor = AmpMonitor(model, scaler, every=1)
    backward(model, scaler)
    monitor.step()
    assert monitor.report().statistics.scale == 512.0
    unscaled = statistics(gradients(model), "fp16", float(torch.tensor(1000.0).reciprocal()), errors=False)
    assert (monitor.statistics().counts == unscaled.counts).all()


def test_errors_name_the_argument() -> None:
    for every in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"Expected every to be an integer of at least 1, but got"):
            AmpMonitor(model_of(), every=every)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected model_or_named_parameters\['a'\] to be a tensor, but got a int"):
        AmpMonitor([("a", 3)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"Expected format to be a floating-point format .* but got 'int8'"):
        AmpMonitor(model_of(), format="int8")
    model = torch.nn.Linear(2, 2).to(torch.complex64)
    model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    with pytest.raises(TypeError, match=r"Expected the gradient of weight to have dtype .* but got torch.complex64"):
        AmpMonitor(model).step()
