"""Gradients without memory of their own (wrapper subclasses, fake and meta tensors), as with torch's scaler.

`TwoTensor` keeps two tensors and applies each operation to both; its address is 0.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep

two_tensor = pytest.importorskip("torch.testing._internal.two_tensor", exc_type=ImportError)
INF = float("inf")
SCALERS = {"ours": halfstep.GradScaler, "torch's": torch.amp.GradScaler}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def pair(first: torch.Tensor, second: torch.Tensor) -> Any:
    return two_tensor.TwoTensor(first, second)


def parts(tensor: Any) -> list[torch.Tensor]:
    return [tensor.a, tensor.b] if isinstance(tensor, two_tensor.TwoTensor) else [tensor]


def trained(scaler: Any, make: Any, way: str, dtype: torch.dtype, mixed: bool) -> list[Any]:
    """Weights and scales after four steps: an Inf in the second part of a gradient, then a NaN in the first."""
    parameters = [torch.nn.Parameter(pair(torch.ones(4, dtype=dtype), 2 * torch.ones(4, dtype=dtype)))]
    if mixed:
        parameters.append(torch.nn.Parameter(torch.ones(3, dtype=dtype)))
    optimizer, history = make(parameters), []
    for step in range(4):
        scaler.scale(torch.zeros(()))
        first, second = torch.full((4,), 8.0, dtype=dtype), torch.full((4,), 16.0, dtype=dtype)
        if step == 1:
            second[2] = INF
        if step == 2:
            first[0] = float("nan")
        parameters[0].grad = pair(first, second)
        for parameter in parameters[1:]:
            parameter.grad = torch.full_like(parameter, 8.0)
        if way != "in step":
            scaler.unscale_(optimizer)
        if way == "clipped":
            if isinstance(scaler, halfstep.GradScaler):
                scaler.clip_grad_norm_(optimizer, 0.5)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    return [history, *(part for p in parameters for part in parts(p.detach()))]


# Not clipped beside a plain tensor: torch stacks the norms of both, which the subclass refuses.
@pytest.mark.parametrize(
    ("way", "mixed"),
    [("in step", False), ("unscaled", False), ("clipped", False), ("in step", True), ("unscaled", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrapper_subclasses_are_stepped_and_skipped_as_by_torch(
    name: str, way: str, dtype: torch.dtype, mixed: bool
) -> None:
    mine, torchs = (
        trained(make("cpu", init_scale=8.0), OPTIMIZERS[name], way, dtype, mixed) for make in SCALERS.values()
    )
    assert mine[0] == torchs[0] == [8.0, 4.0, 2.0, 2.0]
    assert all(map(torch.equal, mine[1:3], torchs[1:3])) and bool((mine[1] < 1).all())
    if mixed and name in ("SGD", "AdamW"):
        # An operation on lists is called once per part with the whole list: torch's scaler unscales the plain gradient
        # twice, and foreach and fused optimizers step it twice.
        assert torch.equal(mine[3], mine[1][:3])


@pytest.mark.parametrize("scaler", SCALERS)
def test_our_optimizer_steps_each_part_of_a_wrapper_as_a_tensor_of_its_own(scaler: str) -> None:
    def run(parameters: list[Any], give: Any) -> float:
        optimizer, s = halfstep.AdamW(parameters, lr=0.1), SCALERS[scaler]("cpu", init_scale=8.0)
        for value in (8.0, INF, 4.0):
            s.scale(torch.zeros(()))
            give(value)
            s.step(optimizer)
            s.update()
        return float(s.get_scale())

    wrapped = torch.nn.Parameter(pair(torch.ones(4), 2 * torch.ones(4)))
    plain = [torch.nn.Parameter(value * torch.ones(4)) for value in (1, 2)]

    def give_wrapped(value: float) -> None:
        wrapped.grad = pair(torch.full((4,), 8.0), torch.full((4,), value))

    def give_plain(value: float) -> None:
        plain[0].grad, plain[1].grad = torch.full((4,), 8.0), torch.full((4,), value)

    assert run([wrapped], give_wrapped) == run(plain, give_plain) == 4.0
    assert all(map(torch.equal, parts(wrapped.detach()), plain))


def answers(make: Any, optimizer_of: Any) -> dict[str, str]:
    """What each call says on tensors without numbers: nothing, or which error."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = optimizer_of([parameter]), make("cpu")
    calls: dict[str, Any] = {
        "scale": lambda: scaler.scale(parameter.sum()).backward(),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
        "second scale": lambda: scaler.scale(parameter.sum()).backward(),
        "step that unscales": lambda: scaler.step(optimizer),
        "second update": scaler.update,
        "update to a scale": lambda: scaler.update(4.0),
        "get_scale": scaler.get_scale,
        "state_dict": scaler.state_dict,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("where", ["fake", "meta"])
def test_fake_and_meta_tensors_behave_as_with_torchs_scaler(where: str, name: str) -> None:
    with FakeTensorMode() if where == "fake" else torch.device("meta"):
        mine, torchs = (answers(make, OPTIMIZERS[name]) for make in SCALERS.values())
    assert mine == torchs
    assert mine["unscale_"] == mine["update"] == ""
