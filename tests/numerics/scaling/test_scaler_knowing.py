"""What the scaler reports and does without waiting: skipped steps, clipping inside the step, unscaled gradients."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import halfstep
from halfstep.integrations.scheduler import SkipAwareScheduler

INF, NAN = float("inf"), float("nan")


class Training:
    """A scaler, an optimizer, and fp32 parameters whose gradients are `values` times the scale."""

    def __init__(self, values: list[float], scale: float = 8.0, make: Any = halfstep.AdamW, **options: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(1)) for _ in values]
        self.optimizer = make(self.parameters, lr=0.1)
        self.scaler = halfstep.GradScaler("cpu", init_scale=scale, **options)
        self.scaler.scale(torch.zeros(()))
        self.give(values, scale)

    def give(self, values: list[float | None], scale: float) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = None if value is None else torch.full((1,), value * scale)

    def step(self, values: list[float | None] | None = None) -> None:
        """A step, with other gradients as they are if some are given."""
        if values is not None:
            self.give(values, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def grads(self) -> list[float | None]:
        return [None if p.grad is None else p.grad.item() for p in self.parameters]

    @property
    def moments(self) -> list[float]:
        return [entry["exp_avg"].item() for entry in self.optimizer.canonical_state_dict()["state"].values()]


# ------------------------------------------------------------------------------------------------------ skipped steps


def test_skipped_steps_are_known_on_the_device_and_on_the_host() -> None:
    t = Training([1.0])
    scaler, history = t.scaler, []
    assert scaler.step_skipped.item() == 0 and scaler.last_step_skipped() is None and scaler.skips_known() == 0
    for value in (1.0, INF, 2.0, NAN, -INF, 1.0):
        t.step([value])
        history.append((scaler.step_skipped.item(), scaler.last_step_skipped(), scaler.skips_known()))
    assert history == [(0, False, 0), (1, True, 1), (0, False, 1), (1, True, 2), (1, True, 3), (0, False, 3)]
    t.give([1.0], 1.0)
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.full((1,), INF)
    scaler.step(torch.optim.SGD([other], lr=0.1))
    t.step()
    assert scaler.last_step_skipped() is True, "any optimizer that skips counts"
    disabled = halfstep.GradScaler("cpu", enabled=False)
    assert (disabled.step_skipped.item(), disabled.last_step_skipped(), disabled.skips_known()) == (0, None, 0)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_copies_go_on_with_scale_and_tolerance(copier: Any) -> None:
    t = Training([INF], hysteresis=2)
    t.step()
    assert t.scaler.get_scale() == 8.0
    t.scaler = copier(t.scaler)
    t.scaler.scale(torch.zeros(()))
    t.step([INF])
    assert t.scaler.get_scale() == 4.0, "the second overflow backs off"


# ---------------------------------------------------------------------------------------------------- overflow report


def test_the_report_names_parameters_counts_and_steps() -> None:
    t = Training([1.0] * 3, scale=1.0, make=lambda ps, lr: halfstep.AdamW(list(zip("abc", ps, strict=True)), lr=lr))
    assert str(t.scaler.overflow_report()) == "0 of 0 steps skipped"
    for values in ([1, 1, 1], [INF, 1, 1], [NAN, 1, INF], [1, 1, 1], [-INF, 1, 1]):
        t.step(values)  # type: ignore[arg-type]
    report = t.scaler.overflow_report()
    assert (report.steps, report.skipped, report.last_skipped) == (5, 3, 5)
    assert [tuple(vars(one).values()) for one in report.parameters] == [("a", 2, 1, 2, 5), ("c", 1, 0, 3, 3)]
    assert str(report) == (
        "3 of 5 steps skipped, the last one step 5\n"
        "  a  Inf 2, NaN 1  first at step 2, last at 5\n"
        "  c  Inf 1       first at step 3, last at 3"
    )
    assert report.as_dict()["parameters"][1]["name"] == "c"
    renamed = t.scaler.overflow_report([("weight", t.parameters[0])])
    assert [one.name for one in renamed.parameters] == ["weight", "c"]
    t.optimizer = None
    assert t.scaler.overflow_report().parameters == [], "an optimizer that is gone is not reported"


def test_a_parameter_keeps_its_place_while_others_have_no_gradient() -> None:
    t = Training([1.0] * 3, scale=1.0)
    for values in ([None, INF, None], [None, None, NAN], [INF, 1, 1], [1, None, INF]):
        t.step(values)  # type: ignore[arg-type]
    t.parameters.append(torch.nn.Parameter(torch.ones(1)))
    t.optimizer.add_param_group({"params": t.parameters[3:]})
    t.step([1, 1, 1, NAN])
    found = {one.name: tuple(vars(one).values())[1:] for one in t.scaler.overflow_report().parameters}
    assert found == {
        "optimizer 0, group 0, parameter 0": (1, 0, 3, 3),
        "optimizer 0, group 0, parameter 1": (1, 0, 1, 1),
        "optimizer 0, group 0, parameter 2": (1, 1, 2, 4),
        "optimizer 0, group 1, parameter 0": (0, 1, 5, 5),
    }


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_report_covers_torchs_optimizers(unscale: bool, dtype: torch.dtype) -> None:
    t = Training([1.0, NAN], make=torch.optim.SGD)
    for parameter in t.parameters:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad.to(dtype), None
        parameter.data = parameter.data.to(dtype)
        parameter.grad = grad
    if unscale:
        t.scaler.unscale_(t.optimizer)
    t.step()
    report = t.scaler.overflow_report(list(zip(("first", "second"), t.parameters, strict=True)))
    assert [tuple(vars(one).values()) for one in report.parameters] == [("second", 0, 1, 1, 1)]


# ---------------------------------------------------------------------------------------------------------- schedules


def test_skips_that_are_known_late_hold_the_schedule_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    t = Training([1.0])
    schedule = SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(t.optimizer, 1, gamma=0.5), t.scaler)
    advanced = []
    for known in (0, 0, 2, 2, 2, 2):  # two skips, both heard of at the third step
        monkeypatch.setattr(t.scaler, "skips_known", lambda known=known: known)
        before = schedule.last_epoch
        t.step()
        schedule.step()
        advanced.append(schedule.last_epoch - before)
    assert advanced == [1, 1, 0, 0, 1, 1]
    with pytest.raises(TypeError, match=r"Expected scheduler to be an object with a method step\(\), but got a"):
        SkipAwareScheduler(object(), t.scaler)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep\.GradScaler, but got a GradScaler"):
        SkipAwareScheduler(torch.optim.lr_scheduler.StepLR(t.optimizer, 1), torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_by_the_scaler_is_clipping_after_unscaling(max_norm: float) -> None:
    t, expected = Training([3.0, -4.0]), Training([3.0, -4.0])
    before = t.grads
    norm = t.scaler.clip_grad_norm_(t.optimizer, max_norm)
    t.step()
    assert norm.item() == 5.0 and t.optimizer.max_grad_norm is None
    assert t.grads == before, "gradients were written"
    expected.scaler.unscale_(expected.optimizer)
    torch.nn.utils.clip_grad_norm_(expected.parameters, max_norm)
    expected.step()
    assert t.moments == pytest.approx(expected.moments, rel=1e-6)


def test_the_smaller_of_two_limits_counts_and_only_once() -> None:
    t = Training([3.0, 4.0])
    t.optimizer.max_grad_norm = 1.0
    t.scaler.clip_grad_norm_(t.optimizer, 2.5)
    t.step()
    assert t.optimizer.max_grad_norm == 1.0
    assert t.moments[0] == pytest.approx(0.1 * 3.0 / 5.0, rel=1e-5)
    t = Training([3.0, 4.0])
    t.scaler.clip_grad_norm_(t.optimizer, 1.0)
    t.step()
    before = t.moments[0]
    t.give([3.0, 4.0], 8.0)
    t.step()
    assert t.moments[0] == pytest.approx(0.9 * before + 0.1 * 3.0), "the next step is not clipped"


def test_an_overflow_is_seen_in_the_norm_and_skips() -> None:
    t = Training([3.0, INF])
    assert not t.scaler.clip_grad_norm_(t.optimizer, 1.0).isfinite()
    t.step()
    assert [parameter.item() for parameter in t.parameters] == [1.0, 1.0] and t.scaler.last_step_skipped()


@pytest.mark.parametrize("fused", [False, True])
def test_clipping_for_torchs_optimizers_unscales_and_clips_in_place(fused: bool) -> None:
    t = Training([3.0, 4.0], make=partial(torch.optim.AdamW, fused=fused))
    assert t.scaler.clip_grad_norm_(t.optimizer, 1.0).item() == pytest.approx(5.0)
    assert t.grads == pytest.approx([0.6, 0.8], rel=1e-5)
    t.step()


def test_clipping_after_unscaling_and_without_a_scaler() -> None:
    t = Training([3.0, 4.0])
    t.scaler.unscale_(t.optimizer)
    assert t.scaler.clip_grad_norm_(t.optimizer, 1.0).item() == 5.0
    t.step()
    assert t.moments[0] == pytest.approx(0.1 * 0.6, rel=1e-5)
    disabled = halfstep.GradScaler("cpu", enabled=False)
    t.give([3.0, 4.0], 1.0)
    assert disabled.clip_grad_norm_(t.optimizer, 1.0).item() == pytest.approx(5.0)
    assert t.grads == pytest.approx([0.6, 0.8], rel=1e-5)


def test_bad_limits_and_clipping_after_the_step_are_refused() -> None:
    t = Training([1.0])
    for max_norm in (0.0, -1.0, INF, NAN, True):
        with pytest.raises(ValueError, match="Expected max_norm to be a finite number above 0, but got"):
            t.scaler.clip_grad_norm_(t.optimizer, max_norm)
    t.scaler.step(t.optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) is being called after step"):
        t.scaler.clip_grad_norm_(t.optimizer, 1.0)


# ---------------------------------------------------------------------------------------------- what grad holds after


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_after_a_step_are_scaled_unless_asked_for(clip: bool) -> None:
    weights = []
    for write_back in (False, True):
        t = Training([3.0], write_back=write_back)
        if clip:
            t.scaler.clip_grad_norm_(t.optimizer, 1.0)
        t.step()
        assert t.grads == [3.0 if write_back else 24.0]
        weights.append(t.parameters[0].item())
    assert weights[0] == weights[1]


@pytest.mark.parametrize(("refill", "scale"), [("growth", 4.0), ("clean_step", 8.0)])
def test_when_the_tolerance_is_refilled(refill: str, scale: float) -> None:
    t = Training([1.0], hysteresis=2, hysteresis_refill=refill)
    for value in (INF, 1.0, INF):
        t.step([value])
    assert t.scaler.get_scale() == scale
    with pytest.raises(ValueError) as caught:
        halfstep.GradScaler("cpu", hysteresis_refill="never")
    assert str(caught.value) == "Expected hysteresis_refill to be 'growth' or 'clean_step', but got 'never'"
