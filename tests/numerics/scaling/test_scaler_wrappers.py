"""Optimizers inside trainers' wrappers: whichever object is passed to the scaler, it unscales and clips once.

The wrappers have the shapes of Accelerate's and Fabric's; the real ones are in tests/integrations/trainers.
"""

import re
from typing import Any

import pytest
import torch

import halfstep

INF = float("inf")
LIMIT = 0.5


class LikeAccelerates(torch.optim.Optimizer):
    """Holds the optimizer as ``optimizer``, and passes on what is looked up by properties."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.commits = True  # torchft's may decide not to step

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure) if self.commits else None


class LikeFabrics:
    """Takes on the class of what it holds, and passes on every attribute that it lacks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class OwnGroups:
    """Groups of its own that hold the same parameters."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.param_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]

    def step(self) -> None:
        self.optimizer.step()


class Hidden:
    """A wrapper without an attribute for the optimizer that it wraps."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.inner.step()


WRAPPERS: dict[str, Any] = {
    "Accelerate's": LikeAccelerates,
    "Fabric's": LikeFabrics,
    "groups of its own": OwnGroups,
    "two": lambda optimizer: LikeAccelerates(LikeAccelerates(optimizer)),
}
MAKERS: dict[str, Any] = {
    "halfstep.AdamW": lambda p: halfstep.AdamW(p, lr=0.1),
    "torch.SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "torch.AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def setting(make: Any) -> tuple[Any, Any, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    return scaler, make(parameters), parameters


def give(parameters: list[torch.nn.Parameter], value: float = 8.0) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 8.0)
    parameters[0].grad[0] = value  # type: ignore[index]


def weights(first: Any, last: Any, make: Any, clip: str, value: float = 8.0) -> tuple[torch.Tensor, float]:
    """Two steps, clipped or unscaled with what `first` makes of the optimizer, stepped with what `last` does."""
    scaler, optimizer, parameters = setting(make)
    given, stepped = first(optimizer), last(optimizer)
    for step in range(2):
        give(parameters, value if step == 0 else 8.0)
        if clip == "by the scaler":
            scaler.clip_grad_norm_(given, LIMIT)
        elif clip == "by torch":
            scaler.unscale_(given)
            torch.nn.utils.clip_grad_norm_(parameters, LIMIT)
        scaler.step(stepped)
        scaler.update()
    return torch.cat([p.detach() for p in parameters]), scaler.get_scale()


def itself(optimizer: Any) -> Any:
    return optimizer


@pytest.mark.parametrize("value", [8.0, INF])
@pytest.mark.parametrize("clip", ["by the scaler", "by torch", "not"])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_scaler_treats_wrapper_and_optimizer_as_one(wrapper: str, make: str, clip: str, value: float) -> None:
    wrap = WRAPPERS[wrapper]
    expected, scale = weights(itself, itself, MAKERS[make], clip, value)
    for first, last in ((wrap, itself), (wrap, wrap), (itself, wrap)):
        found, its_scale = weights(first, last, MAKERS[make], clip, value)
        assert its_scale == scale
        # In place the factor of clipping is rounded into the gradient, in the step it is not.
        torch.testing.assert_close(found, expected, rtol=2**-20, atol=0)


def test_a_wrapper_is_not_called_for_a_step_that_is_skipped() -> None:
    """It may do more than step: count, average weights, tell others."""
    scaler, optimizer, parameters = setting(MAKERS["halfstep.AdamW"])
    wrapper = LikeAccelerates(optimizer)
    called: list[int] = []
    wrapper.step = lambda closure=None: called.append(1)  # type: ignore[method-assign, assignment]
    for value in (8.0, INF, 8.0):
        give(parameters, value)
        scaler.step(wrapper)
        scaler.update()
    assert len(called) == 2 and scaler.get_scale() == 4.0


def test_a_wrapper_that_refuses_to_step_changes_nothing() -> None:
    scaler, optimizer, parameters = setting(MAKERS["halfstep.AdamW"])
    wrapper = LikeAccelerates(optimizer)
    wrapper.commits = False
    give(parameters)
    scaler.clip_grad_norm_(wrapper, LIMIT)
    scaler.step(wrapper)
    scaler.update()
    assert all((p == 1).all() for p in parameters)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_"])
def test_what_a_hidden_wrapper_was_unscaled_for_is_not_unscaled_again(call: str, make: str) -> None:
    scaler, optimizer, parameters = setting(MAKERS[make])
    hidden = Hidden(optimizer)
    give(parameters)
    getattr(scaler, call)(hidden, *((LIMIT,) if call == "clip_grad_norm_" else ()))
    before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"after a Hidden with the same parameters since the last update\(\):"):
        scaler.step(optimizer)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters, before, strict=True))  # type: ignore[arg-type]
    assert all((p == 1).all() for p in parameters)


def test_a_limit_that_no_step_has_used_is_an_error() -> None:
    scaler, optimizer, parameters = setting(MAKERS["halfstep.AdamW"])
    give(parameters)
    scaler.clip_grad_norm_(optimizer, LIMIT)
    with pytest.raises(RuntimeError, match=re.escape("Expected scaler.step(optimizer) between clip_grad_norm_ and")):
        scaler.update()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("clip", [False, True])
def test_a_step_left_out_after_an_overflow_backs_off_as_with_torchs_scaler(clip: bool) -> None:
    """Many loops call `step` only if the norm is finite."""
    scaler, optimizer, parameters = setting(MAKERS["halfstep.AdamW"])
    give(parameters, INF)
    if clip:
        assert not scaler.clip_grad_norm_(optimizer, LIMIT).isfinite()
    else:
        scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_the_monitor_knows_that_a_wrapped_optimizer_was_unscaled() -> None:
    from halfstep.integrations.monitor import AmpMonitor

    scaler, optimizer, parameters = setting(MAKERS["halfstep.AdamW"])
    wrapper = LikeAccelerates(optimizer)
    monitor = AmpMonitor([("a", parameters[0])], scaler, every=1)
    give(parameters)
    scaler.unscale_(wrapper)
    monitor.step(wrapper)
    assert monitor.statistics().total.exponents == {0: 3}
    monitor.step(optimizer)
    assert monitor.statistics().total.exponents == {0: 6}
