"""What the scaler lets one know and do without waiting: skipped steps, clipping inside the step, unscaled gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import halfstep
from halfstep.integrations.scheduler import SkipAwareScheduler

INF, NAN = float("inf"), float("nan")


def training(values: list[float], scale: float = 8.0, **options: Any) -> tuple[Any, Any, list[torch.nn.Parameter]]:
    """A scaler, an optimizer, and fp32 parameters of one element whose gradients are `values` times the scale."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in values]
    optimizer = halfstep.AdamW(parameters, lr=0.1)
    scaler = halfstep.GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.zeros(()))
    give(parameters, values, scale)
    return scaler, optimizer, parameters


def give(parameters: list[torch.nn.Parameter], values: list[float], scale: float) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.full((1,), value * scale)


# ------------------------------------------------------------------------------------------------------ skipped steps


def test_skipped_steps_are_known_on_the_device_and_on_the_host() -> None:
    scaler, optimizer, parameters = training([1.0])
    assert scaler.step_skipped.item() == 0 and scaler.last_step_skipped() is None and scaler.skips_known() == 0
    history = []
    for value in (1.0, INF, 2.0, NAN, -INF, 1.0):
        give(parameters, [value], 1.0)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.step_skipped.item(), scaler.last_step_skipped(), scaler.skips_known()))
    assert history == [(0, False, 0), (1, True, 1), (0, False, 1), (1, True, 2), (1, True, 3), (0, False, 3)]


def test_any_optimizer_that_skips_counts_and_a_disabled_scaler_knows_of_none() -> None:
    scaler, first, _ = training([1.0])
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.full((1,), INF)
    scaler.step(first)
    scaler.step(torch.optim.SGD([other], lr=0.1))
    scaler.update()
    assert scaler.last_step_skipped() is True and scaler.get_scale() == 4.0
    disabled = halfstep.GradScaler("cpu", enabled=False)
    assert (disabled.step_skipped.item(), disabled.last_step_skipped(), disabled.skips_known()) == (0, None, 0)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_with_scale_and_tolerance(copier: Any) -> None:
    scaler, optimizer, parameters = training([INF], hysteresis=2)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    twin = copier(scaler)
    twin.scale(torch.zeros(()))
    give(parameters, [INF], 1.0)
    twin.step(optimizer)
    twin.update()
    assert twin.get_scale() == 4.0, "the second overflow backs off"


# ---------------------------------------------------------------------------------------------------- overflow report


def test_the_report_names_parameters_counts_and_steps() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = halfstep.AdamW([("a", parameters[0]), ("b", parameters[1]), ("c", parameters[2])])
    scaler = halfstep.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    assert str(scaler.overflow_report()) == "0 of 0 steps skipped"
    for values in ([1, 1, 1], [INF, 1, 1], [NAN, 1, INF], [1, 1, 1], [-INF, 1, 1]):
        give_all(parameters, values)
        scaler.step(optimizer)
        scaler.update()
    report = scaler.overflow_report()
    assert (report.steps, report.skipped, report.last_skipped) == (5, 3, 5)
    assert [tuple(vars(one).values()) for one in report.parameters] == [("a", 2, 1, 2, 5), ("c", 1, 0, 3, 3)]
    assert str(report) == (
        "3 of 5 steps skipped, the last one step 5\n"
        "  a  Inf 2, NaN 1  first at step 2, last at 5\n"
        "  c  Inf 1       first at step 3, last at 3"
    )
    assert report.as_dict()["parameters"][1]["name"] == "c"
    renamed = scaler.overflow_report([("weight", parameters[0])])
    assert [one.name for one in renamed.parameters] == ["weight", "c"]


def give_all(parameters: list[torch.nn.Parameter], values: list[Any]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = None if value is None else torch.tensor([1.0, value])


def test_a_parameter_keeps_its_place_while_others_have_no_gradient() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = halfstep.AdamW(parameters)
    scaler = halfstep.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    for values in ([None, INF, None], [None, None, NAN], [INF, 1, 1], [1, None, INF]):
        give_all(parameters, values)
        scaler.step(optimizer)
        scaler.update()
    late = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [late]})
    give_all([*parameters, late], [1, 1, 1, NAN])
    scaler.step(optimizer)
    scaler.update()
    found = {one.name: tuple(vars(one).values())[1:] for one in scaler.overflow_report().parameters}
    assert found == {
        "optimizer 0, group 0, parameter 0": (1, 0, 3, 3),
        "optimizer 0, group 0, parameter 1": (1, 0, 1, 1),
        "optimizer 0, group 0, parameter 2": (1, 1, 2, 4),
        "optimizer 0, group 1, parameter 0": (0, 1, 5, 5),
    }


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_report_covers_torchs_optimizers(unscale: bool, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = halfstep.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    for parameter, value in zip(parameters, (1.0, NAN), strict=True):
        parameter.grad = torch.tensor([1.0, value], dtype=dtype)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    names = list(zip(("first", "second"), parameters, strict=True))
    assert [tuple(vars(one).values()) for one in scaler.overflow_report(names).parameters] == [("second", 0, 1, 1, 1)]


def test_an_optimizer_that_is_gone_is_not_reported() -> None:
    scaler, optimizer, _ = training([INF])
    scaler.step(optimizer)
    scaler.update()
    assert len(scaler.overflow_report().parameters) == 1
    del optimizer
    assert scaler.overflow_report().parameters == []


# ---------------------------------------------------------------------------------------------------------- schedules


def test_news_that_arrive_late_hold_the_schedule_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, optimizer, _ = training([1.0])
    schedule = SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), scaler)
    advanced = []
    for known in (0, 0, 2, 2, 2, 2):  # two skips, both heard of at the third step
        monkeypatch.setattr(scaler, "skips_known", lambda known=known: known)
        before = schedule.last_epoch
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        advanced.append(schedule.last_epoch - before)
    assert advanced == [1, 1, 0, 0, 1, 1]


def test_what_is_no_scheduler_and_no_scaler_of_ours_is_refused() -> None:
    _, optimizer, _ = training([1.0])
    with pytest.raises(TypeError, match=r"Expected scheduler to be an object with a method step\(\), but got a"):
        SkipAwareScheduler(object(), halfstep.GradScaler("cpu"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep\.GradScaler, but got a GradScaler"):
        SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_by_the_scaler_is_clipping_after_unscaling(max_norm: float) -> None:
    values = [3.0, -4.0]
    scaler, optimizer, parameters = training(values)
    held = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
    norm = scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == 5.0 and optimizer.max_grad_norm is None
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, held, strict=True)), "gradients were written"
    expected_scaler, expected, others = training(values)
    expected_scaler.unscale_(expected)
    torch.nn.utils.clip_grad_norm_(others, max_norm)
    expected_scaler.step(expected)
    for mine, theirs in zip(
        optimizer.canonical_state_dict()["state"].values(), expected.state_dict()["state"].values(), strict=True
    ):
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=1e-6, atol=0.0)


def test_the_smaller_of_two_limits_counts() -> None:
    scaler, optimizer, _ = training([3.0, 4.0])
    optimizer.max_grad_norm = 1.0
    scaler.clip_grad_norm_(optimizer, 2.5)
    scaler.step(optimizer)
    assert optimizer.max_grad_norm == 1.0
    first = optimizer.canonical_state_dict()["state"][0]["exp_avg"].item()
    assert first == pytest.approx(0.1 * 3.0 / 5.0, rel=1e-5)


def test_clipping_once_does_not_clip_the_next_step() -> None:
    scaler, optimizer, parameters = training([3.0, 4.0])
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    before = optimizer.canonical_state_dict()["state"][0]["exp_avg"].item()
    give(parameters, [3.0, 4.0], 8.0)
    scaler.step(optimizer)
    assert optimizer.canonical_state_dict()["state"][0]["exp_avg"].item() == pytest.approx(0.9 * before + 0.1 * 3.0)


def test_an_overflow_is_seen_in_the_norm_and_skips() -> None:
    scaler, optimizer, parameters = training([3.0, INF])
    assert not scaler.clip_grad_norm_(optimizer, 1.0).isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert [parameter.item() for parameter in parameters] == [1.0, 1.0] and scaler.last_step_skipped()


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_for_torchs_optimizers_unscales_and_clips_in_place(fused: bool) -> None:
    scaler, _, parameters = training([3.0, 4.0])
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad is not None and parameters[0].grad.item() == pytest.approx(0.6, rel=1e-5)
    scaler.step(optimizer)
    scaler.update()


def test_clipping_after_unscaling_and_without_a_scaler() -> None:
    scaler, optimizer, parameters = training([3.0, 4.0])
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0
    scaler.step(optimizer)
    assert optimizer.canonical_state_dict()["state"][0]["exp_avg"].item() == pytest.approx(0.1 * 0.6, rel=1e-5)
    disabled = halfstep.GradScaler("cpu", enabled=False)
    give(parameters, [3.0, 4.0], 1.0)
    assert disabled.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.item() == pytest.approx(0.6, rel=1e-5)  # type: ignore[union-attr]


def test_bad_limits_and_clipping_after_the_step_are_refused() -> None:
    scaler, optimizer, _ = training([1.0])
    for max_norm in (0.0, -1.0, INF, NAN, True):
        with pytest.raises(ValueError, match="Expected max_norm to be a finite number above 0, but got"):
            scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) is being called after step"):
        scaler.clip_grad_norm_(optimizer, 1.0)


# ---------------------------------------------------------------------------------------------- what grad holds after


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_after_a_step_are_scaled_unless_asked_for(write_back: bool, clip: bool) -> None:
    scaler, optimizer, parameters = training([3.0], write_back=write_back)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert parameters[0].grad is not None and parameters[0].grad.item() == (3.0 if write_back else 24.0)
    give(parameters, [3.0], 8.0)
    twin_scaler, twin, others = training([3.0], write_back=not write_back)
    if clip:
        twin_scaler.clip_grad_norm_(twin, 1.0)
    twin_scaler.step(twin)
    assert torch.equal(others[0], parameters[0])


@pytest.mark.parametrize(("refill", "scale"), [("growth", 4.0), ("clean_step", 8.0)])
def test_when_the_tolerance_is_refilled(refill: str, scale: float) -> None:
    scaler, optimizer, parameters = training([1.0], hysteresis=2, hysteresis_refill=refill)
    for value in (INF, 1.0, INF):
        give(parameters, [value], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == scale
    with pytest.raises(ValueError) as caught:
        halfstep.GradScaler("cpu", hysteresis_refill="never")
    assert str(caught.value) == "Expected hysteresis_refill to be 'growth' or 'clean_step', but got 'never'"
