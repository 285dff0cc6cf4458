"""GradScaler against torch's, and cases that torch's gets wrong."""

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

import halfstep

INF, NAN = float("inf"), float("nan")
TORCH_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def scaler(**options: Any) -> halfstep.GradScaler:
    made = halfstep.GradScaler("cpu", **options)
    made.scale(torch.ones(()))  # the scale tensor is made at first use
    return made


def model_and_optimizer(make: Any, **options: Any) -> Any:
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5000)]
    return parameters, make(parameters, lr=1e-2, **options)


def train(scaler: Any, parameters: Any, optimizer: Any, spoil: dict[int, float], steps: int) -> list[tuple[float, int]]:
    """Steps with known gradients, some spoiled; the scale and growth tracker after each."""
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((p.float() * (step + 1)).sum() for p in parameters)
        scaler.scale(loss).backward()
        if step in spoil:
            parameters[1].grad[-1] = spoil[step]
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return history


def test_signature_is_torchs_and_additions_are_keyword_only() -> None:
    mine = inspect.signature(halfstep.GradScaler).parameters
    torchs = inspect.signature(torch.amp.GradScaler).parameters
    assert list(mine)[: len(torchs)] == list(torchs)
    assert all(mine[name].default == torchs[name].default for name in torchs)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for name, p in mine.items() if name not in torchs)
    assert issubclass(halfstep.GradScaler, torch.amp.GradScaler)


def test_fp16_gradients_that_would_underflow_unscaled_reach_the_weights_in_a_folded_step() -> None:
    p = torch.nn.Parameter(torch.zeros(4).half())
    optimizer = halfstep.AdamW([p], lr=1.0, eps=1e-20, weight_decay=0)
    s = scaler(init_scale=2.0**16)
    p.grad = torch.full_like(p, 2.0**-14)  # 2^-30 unscaled: below fp16's least subnormal, 2^-24
    s.step(optimizer)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((4,), 2.0**-30 * 0.1))
    torch.testing.assert_close(p.detach().float(), torch.full((4,), -1.0))


def test_min_and_max_scale_bound_the_dynamics() -> None:
    parameters, optimizer = model_and_optimizer(halfstep.AdamW)
    s = scaler(init_scale=4.0, min_scale=2.0, max_scale=16.0, growth_interval=1)
    assert [scale for scale, _ in train(s, parameters, optimizer, {0: INF, 1: INF}, 6)] == [2, 2, 4, 8, 16, 16]
    for value, bounded in ((99.0, 16.0), (1.0, 2.0)):
        s.update(torch.tensor(value))
        assert s.get_scale() == bounded


def test_torchs_scaler_calls_no_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, optimizer = model_and_optimizer(halfstep.AdamW, fused=True)
    assert optimizer._step_supports_amp_scaling is False
    called = []
    monkeypatch.setattr(optimizer, "step", lambda step=optimizer.step: (called.append(1), step())[1])
    train(torch.amp.GradScaler("cpu", init_scale=64.0), parameters, optimizer, {1: INF}, 3)
    assert len(called) == 2
    assert torch.equal(parameters[0].grad, torch.full((3,), 3.0)), "unscaled in place, so that others may clip"


def test_an_instance_may_still_take_scale_and_flag_from_torchs_scaler() -> None:
    """torch's protocol for fused optimizers: attributes `grad_scale` and `found_inf`."""
    results = []
    for supports in (False, True):
        parameters, optimizer = model_and_optimizer(halfstep.AdamW)
        if supports:
            optimizer._step_supports_amp_scaling = True
        history = train(torch.amp.GradScaler("cpu", init_scale=64.0), parameters, optimizer, {1: INF}, 4)
        results.append((history, [p.detach() for p in parameters]))
        assert bool((parameters[0].grad == 4.0 * (64 / 2 if supports else 1)).all()), "read, and not written"
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_state_goes_to_torchs_scaler_and_back() -> None:
    parameters, optimizer = model_and_optimizer(halfstep.AdamW)
    mine = scaler(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    train(mine, parameters, optimizer, {1: INF}, 4)
    state = mine.state_dict()
    assert set(state) == TORCH_KEYS
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(state)
    back = halfstep.GradScaler("cpu")
    back.load_state_dict(torchs.state_dict())
    assert back.state_dict() == state
    assert state["scale"] == 16.0
    patient = scaler(hysteresis=3)
    patient.load_state_dict(state)
    assert patient.state_dict() == {**state, "_hysteresis_tracker": 3}
    train(patient, parameters, optimizer, {0: INF}, 1)
    assert patient.state_dict()["_hysteresis_tracker"] == 2
    patient.load_state_dict(state)  # also after the tensor of the tracker exists
    assert patient.state_dict()["_hysteresis_tracker"] == 3
    torchs.load_state_dict(patient.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": 0.0}, "but got 0.0"),
        ({"init_scale": INF}, "Expected init_scale to be a number from 1.1754943508222875e-38"),
        ({"init_scale": "big"}, "but got 'big'"),
        ({"growth_factor": 1.0}, "Expected growth_factor to be a finite number above 1, but got 1.0"),
        ({"backoff_factor": 1.0}, "Expected backoff_factor to be a number between 0 and 1, both excluded, but got 1.0"),
        ({"growth_interval": 0}, "Expected growth_interval to be an integer of at least 1, but got 0"),
        ({"hysteresis": 0}, "Expected hysteresis to be an integer of at least 1, but got 0"),
        ({"min_scale": -1.0}, "Expected min_scale to be a number from"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "Expected init_scale to be a number from min_scale 2.0 to max_scale"),
        ({"max_scale": NAN}, "but got nan"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        halfstep.GradScaler("cpu", **options)


@pytest.mark.parametrize(
    "arguments", [(2.0**-126, 1.0000001, 1e-30, 1), (3.4028234663852886e38, 1e30, 0.999999, 10**12)]
)
def test_every_state_of_torchs_scaler_loads(arguments: tuple[float, float, float, int]) -> None:
    torchs = torch.amp.GradScaler("cpu", *arguments)
    torchs._init_growth_tracker = 2**31 - 1
    for _ in range(2):
        s = scaler()
        s.load_state_dict(torchs.state_dict())
        assert s.state_dict() == torchs.state_dict()
        torchs.scale(torch.ones(()))  # then the state is in tensors


def test_a_new_scale_and_what_is_refused_when_it_is_set() -> None:
    for value in (8, 8.0, torch.tensor(8.0)):
        s = scaler()
        s.update(value)
        assert s.get_scale() == 8.0
    for bad in (0.0, -2.0, INF, NAN):
        with pytest.raises(ValueError, match="Expected new_scale to be a number from min_scale"):
            s.update(bad)
    for name, bad in (("growth_factor", 1), ("backoff_factor", 1.5), ("growth_interval", 1.5)):
        with pytest.raises(ValueError, match=re.escape(f"Expected {name} to be ")):
            getattr(s, f"set_{name}")(bad)
        assert getattr(s, f"get_{name}")() == getattr(halfstep.GradScaler("cpu"), f"get_{name}")()
    assert s.get_scale() == 8.0
    s.load_state_dict({key: np.asarray(value)[()] for key, value in s.state_dict().items()})
    assert {type(value) for value in s.state_dict().values()} == {float, int}, "numbers of numpy become Python's"


def test_misuse_raises_as_in_torch() -> None:
    parameters, optimizer = model_and_optimizer(halfstep.AdamW)
    with pytest.raises(AssertionError, match="_scale is None"):
        halfstep.GradScaler("cpu").step(optimizer)
    s = scaler()
    with pytest.raises(AssertionError, match="none of its parameters has a gradient"):
        s.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        s.update()
    for p in parameters:
        p.grad = torch.ones_like(p)
    for call in (lambda: s.step(optimizer, lambda: 1.0), lambda: s.step(optimizer, closure=lambda: 1.0)):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            call()
    s.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        s.unscale_(optimizer)
    s.step(optimizer)
    with pytest.raises(RuntimeError, match=re.escape("step() has already been called since the last update()")):
        s.step(optimizer)
    with pytest.raises(RuntimeError, match="being called after step"):
        s.unscale_(optimizer)
    s.update()


BAD_NUMBERS: dict[str, tuple[str, list[Any]]] = {
    "scale": ("a number from", [NAN, INF, 0.0, -8.0, 1e300, True, None, "8", [8.0], 8j]),
    "growth_factor": ("a finite number above 1", [NAN, INF, 1.0, 0.5, -2.0, True, None, "2", torch.tensor(2.0)]),
    "backoff_factor": ("a number between 0 and 1, both excluded", [NAN, 0.0, 1.0, -0.5, False, None, "0.5"]),
    "growth_interval": ("an integer of at least 1", [0, -1, 1.5, NAN, INF, True, None, "2000"]),
    "_growth_tracker": ("an integer from 0 to 2147483647", [-1, 1.5, NAN, INF, 2**31, True, None, "0"]),
    "_hysteresis_tracker": ("an integer from 0 to 2147483647", [-1, 0.5, NAN, 2**31, None]),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, (_, values) in BAD_NUMBERS.items() for value in values]
)
def test_a_state_with_a_bad_number_is_refused_by_key_and_value(key: str, value: Any) -> None:
    s = scaler(init_scale=64.0, hysteresis=2)
    before = s.state_dict()
    other = scaler(init_scale=2.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=9, hysteresis=2).state_dict()
    with pytest.raises(ValueError) as raised:
        s.load_state_dict({**other, key: value})
    message = str(raised.value)
    assert message.startswith(f"Expected {key} to be {BAD_NUMBERS[key][0]}") and message.endswith(
        f", but got {value!r}"
    )
    assert s.state_dict() == before


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda s: s.clear(), RuntimeError, "empty"),
        (lambda s: s.pop("growth_interval"), KeyError, "but got one without growth_interval"),
        (lambda s: s.update(scale=0.0), ValueError, "fresh scaler instead.*, but got 0.0"),
        (lambda s: s.update(scale=NAN), ValueError, "fresh scaler instead.*, but got nan"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(spoil: Any, error: Any, message: str) -> None:
    s = scaler()
    state = s.state_dict()
    spoil(state)
    with pytest.raises(error, match=message):
        s.load_state_dict(state)
    assert s.state_dict()["scale"] == 65536.0
