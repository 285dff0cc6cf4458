"""torch's test cases for its scaler, rewritten: scaled training has the bits of training without a scaler.

Scales are powers of two and nothing here leaves fp32's normal range, so scaling and unscaling lose nothing; where the
control run leaves out the step that overflowed, weights must be equal, not close.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import mse_loss

import halfstep

SKIPPED = 2  # the step whose gradient is spoiled
CLIP = 0.2  # below the norms that occur, so that every step is clipped

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "halfstep.AdamW": lambda p: halfstep.AdamW(p, lr=0.1),
    "halfstep.Adam L2": lambda p: halfstep.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "torch.AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "torch.AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "torch.AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "torch.Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
    "torch.Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "torch.SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
OPTIMIZERS_OF_OURS = [name for name in OPTIMIZERS if name.startswith("halfstep")]


class Setting(NamedTuple):
    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    data: list[tuple[torch.Tensor, torch.Tensor]]

    def steps(self, sums: int) -> int:
        return 6 if sums == 1 else 4

    def spoil(self, step: int) -> None:
        """At the step to be skipped, an infinity somewhere in the last parameter's gradient of the first model."""
        if self.scaler.is_enabled() and step == SKIPPED:
            *_, last = self.models[0].parameters()
            assert last.grad is not None
            last.grad.view(-1)[-1] = float("inf")

    def step(self, step: int, index: int = 0) -> None:
        """The optimizer's step through the scaler; the control run leaves out the one that overflows."""
        if self.scaler.is_enabled() or step != SKIPPED or index != 0:
            self.scaler.step(self.optimizers[index])


def setting(make: Callable[[Any], torch.optim.Optimizer], count: int, scaler: torch.amp.GradScaler) -> Setting:
    generator = torch.Generator().manual_seed(0)
    models: list[torch.nn.Module] = []
    for _ in range(count):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for parameter in model.parameters():
            parameter.data.uniform_(-0.5, 0.5, generator=generator)
        models.append(model)
    data = [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(6)]
    return Setting(models, [make(model.parameters()) for model in models], scaler, data)


def train(case: Setting, sums: int = 1, unscale: bool = False, clip: str = "", penalty: bool = False) -> None:
    """A loop over the data.

    Args:
        case: models, optimizers, scaler and data.
        sums: backward passes that are summed for each step.
        unscale: whether gradients are unscaled by hand before each step.
        clip: whether they are then clipped by their ``"norm"``, or by ``"value"`` while they are scaled.
        penalty: whether a gradient of the scaled loss, unscaled by hand, is part of the loss.
    """
    for step in range(case.steps(sums)):
        for model, optimizer in zip(case.models, case.optimizers, strict=True):
            optimizer.zero_grad()
            for x, target in case.data[step : step + sums]:
                loss = mse_loss(model(x), target) / sums
                if penalty:
                    grads = torch.autograd.grad(case.scaler.scale(loss), list(model.parameters()), create_graph=True)
                    loss = loss + sum(((g / case.scaler.get_scale()) ** 2).sum() for g in grads).sqrt()
                case.scaler.scale(loss).backward()
            if clip == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), CLIP * case.scaler.get_scale())
        case.spoil(step)
        for model, optimizer in zip(case.models, case.optimizers, strict=True):
            if unscale:
                case.scaler.unscale_(optimizer)
            if clip == "norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, error_if_nonfinite=False)
        for index in reversed(range(len(case.optimizers))):
            case.step(step, index)
        case.scaler.update()


def several(case: Setting) -> None:
    """Two models, two optimizers, two losses through both. One optimizer overflows, the other one steps."""
    first, second = case.models
    for step, (x, target) in enumerate(case.data):
        for optimizer in case.optimizers:
            optimizer.zero_grad()
        one, two = first(x), second(x)
        case.scaler.scale(mse_loss(0.3 * one + 0.7 * two, target)).backward(retain_graph=True)
        case.scaler.scale(mse_loss(0.6 * one - 0.4 * two, target)).backward()
        case.spoil(step)
        case.scaler.unscale_(case.optimizers[0])  # one unscaled by hand, the other by its step
        case.step(step, 0)
        case.step(step, 1)
        case.scaler.update()


# By name: the loop, the number of models, and the backward passes for each step.
CASES: dict[str, tuple[Callable[[Setting], None], int, int]] = {
    "plain": (train, 1, 1),
    "unscale by hand": (partial(train, unscale=True), 1, 1),
    "unscale, then clip": (partial(train, unscale=True, clip="norm"), 1, 1),
    "accumulate, then clip": (partial(train, sums=2, unscale=True, clip="norm"), 1, 2),
    "several, clipped": (partial(train, unscale=True, clip="norm"), 2, 1),
    "clip scaled": (partial(train, clip="value"), 1, 1),
    "gradient penalty": (partial(train, penalty=True), 1, 1),
    "accumulation": (partial(train, sums=2), 1, 2),
    "several": (several, 2, 1),
}


def _scaler(kind: type[torch.amp.GradScaler], enabled: bool = True) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1, enabled=enabled)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, halfstep.GradScaler) for name in OPTIMIZERS),
        *((name, torch.amp.GradScaler) for name in OPTIMIZERS_OF_OURS),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_scaled_training_has_the_bits_of_training_without_a_scaler(
    case: str, name: str, kind: type[torch.amp.GradScaler]
) -> None:
    run, count, sums = CASES[case]
    scaled = setting(OPTIMIZERS[name], count, _scaler(kind))
    control = setting(OPTIMIZERS[name], count, _scaler(kind, enabled=False))
    before = copy.deepcopy(control.models)
    run(scaled)
    run(control)
    for left, right in zip(scaled.models, control.models, strict=True):
        for a, b in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(a, b)
    assert not any(
        torch.equal(a, b) for a, b in zip(before[0].parameters(), control.models[0].parameters(), strict=True)
    )
    assert scaled.scaler.get_scale() == 128.0 * 2.0 ** (scaled.steps(sums) - 1) * 0.5
    assert control.scaler.get_scale() == 1.0


def test_gradients_taken_away_between_unscaling_and_the_step() -> None:
    """Parameters replaced in between are stepped as they are then: nothing of before is held on to."""
    for make in (OPTIMIZERS["halfstep.AdamW"], OPTIMIZERS["torch.AdamW fused"]):
        module = torch.nn.Linear(3, 3)
        optimizer = make(module.parameters())
        scaler = halfstep.GradScaler("cpu", init_scale=2.0)
        scaler.scale(module(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        replaced = torch.nn.Parameter(torch.zeros(3, 3))
        replaced.grad = torch.ones(3, 3)
        optimizer.param_groups[0]["params"][0] = replaced
        scaler.step(optimizer)
        scaler.update()
        assert bool((replaced < 0).all()), type(optimizer)


def test_the_scale_does_not_grow_to_infinity() -> None:
    """As torch's, it stays where it is when the next larger one would be infinite."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = halfstep.AdamW([parameter], lr=1.0, weight_decay=0.0)
    scaler = halfstep.GradScaler("cpu", growth_interval=1, growth_factor=2.0**4, init_scale=1e38)
    first = torch.tensor(1e38).item()
    for _ in range(3):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((3,), 1e38)  # the gradient 1, scaled
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == first
    assert torch.allclose(parameter.detach(), torch.full((3,), -3.0), rtol=1e-5)
    parameter.grad = torch.full((3,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == first / 2


@pytest.mark.parametrize("enabled", [False, True])
def test_scaling_keeps_the_structure_of_what_is_scaled(enabled: bool) -> None:
    scaler = halfstep.GradScaler("cpu", init_scale=2.0, enabled=enabled)
    factor = 2.0 if enabled else 1.0
    one = torch.ones(2)
    pair = scaler.scale((one, [one, (one,)]))
    assert isinstance(pair, tuple) and isinstance(pair[1], list) and isinstance(pair[1][1], tuple)
    assert torch.equal(pair[1][1][0], one * factor)
    if enabled:
        for dtype in (torch.float16, torch.bfloat16):  # scaled in fp32
            assert halfstep.GradScaler("cpu").scale(torch.full((1,), 2.0, dtype=dtype)).item() == 131072.0
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale(1.0)


KINDS = [halfstep.GradScaler, torch.amp.GradScaler]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value", [8.0, float("inf"), float("nan"), "sum"])
def test_sparse_gradients_with_bad_values_are_found(value: Any, dtype: torch.dtype) -> None:
    """Also two duplicates whose sum alone is too large; torch unscales fp16 ones under ShardedGradScaler only."""
    parameter = torch.nn.Parameter(torch.zeros(5, 2, dtype=dtype))
    values = torch.full((3, 2), 8.0, dtype=dtype)
    values[1:] = torch.finfo(dtype).max if value == "sum" else 8.0
    if value != "sum":
        values[1, 1] = value
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([[0, 3, 3]]), values, (5, 2), check_invariants=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    if value == 8.0:
        assert parameter[:, 0].tolist() == [-1.0, 0.0, 0.0, -2.0, 0.0]
    assert bool((parameter == 0).all()) == (value != 8.0)
    assert scaler.get_scale() == (8.0 if value == 8.0 else 4.0)


@pytest.mark.parametrize("kind", KINDS, ids=["ours", "torchs"])
@pytest.mark.parametrize("make", ["halfstep.AdamW", "torch.AdamW", "torch.AdamW fused"])
def test_a_scaler_is_pickled_between_iterations_only(make: str, kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = OPTIMIZERS[make]([parameter]), kind("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.ones(2)
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
    scaler.update()
    restored = pickle.loads(pickle.dumps(scaler))
    assert restored.get_scale() == 8.0 and restored.state_dict() == scaler.state_dict()
    restored.scale(torch.ones(()))
    restored.step(optimizer)
    restored.update()
    assert restored.get_scale() == 16.0


@pytest.mark.parametrize("kind", KINDS, ids=["ours", "torchs"])
def test_what_step_is_given_and_returns_goes_through(kind: Any) -> None:
    class Says(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = Says([parameter], lr=1.0), kind("cpu")
    for value, said in ((1.0, ((1, 2), {"extra": 3})), (float("inf"), None)):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((2,), value)
        assert scaler.step(optimizer, 1, 2, extra=3) == said
        scaler.update()


@pytest.mark.parametrize("kind", KINDS, ids=["ours", "torchs"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_disabled_scaler_does_nothing(name: str, kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = OPTIMIZERS[name]([parameter]), kind("cpu", enabled=False)
    parameter.grad = torch.full((3,), 2.0)
    outputs = [torch.ones(2), (torch.ones(1),)]
    assert scaler.scale(outputs) is outputs
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(4.0)
    scaler.load_state_dict({})
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    assert scaler._get_growth_tracker() == 0 and bool((parameter < 1).all()) and bool((parameter.grad == 2).all())
