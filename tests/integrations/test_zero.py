"""The state of a `ZeroRedundancyOptimizer`, gathered and loaded on one rank; test_strategies.py has two ranks."""

import re
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from train_runs import differences

import halfstep
from halfstep.integrations import zero
from halfstep.integrations.checkpoint import CheckpointError

pytestmark = pytest.mark.usefixtures("one_rank")

SMALL = ((3,), (5,), (2,))
CODED = ((40, 130), (5,), (8, 512))
LAYOUTS = [
    pytest.param(SMALL, {}, id="split"),
    pytest.param(CODED, {"state_dtype": "8bit", "master_weights": "split24"}, id="8 bits"),
]
layouts = pytest.mark.parametrize(("shapes", "options"), LAYOUTS)


def _groups(shapes: tuple[tuple[int, ...], ...] = SMALL) -> list[dict[str, object]]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]
    return [{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "lr": 0.2, "weight_decay": 0.3}]


def _step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def _divided(shapes: Any = SMALL, weights: Any = None, **options: Any) -> ZeroRedundancyOptimizer:
    """With the weights of another optimizer, if they are given."""
    groups = _groups(shapes)
    if weights is not None:
        for parameter, weight in zip((p for g in groups for p in g["params"]), weights, strict=True):  # type: ignore[attr-defined]
            parameter.data.copy_(weight)
    return ZeroRedundancyOptimizer(groups, optimizer_class=halfstep.AdamW, **options)


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]


def test_the_learning_rate_is_that_of_a_schedule() -> None:
    divided = _divided()
    schedule = torch.optim.lr_scheduler.ExponentialLR(divided, 0.5)
    _step(divided, 1)
    schedule.step()
    assert [group["lr"] for group in zero.state_dict(divided)["param_groups"]] == [0.05, 0.1]


@layouts
def test_the_gathered_state_is_that_of_one_process(shapes: Any, options: Any) -> None:
    plain = halfstep.AdamW(_groups(shapes), **options)
    divided = _divided(shapes, **options)
    for optimizer in (plain, divided):
        _step(optimizer, 1)
    assert differences(plain.state_dict(), zero.state_dict(divided)) == []
    whole = plain.canonical_state_dict()
    assert differences(whole, zero.state_dict(divided, optimizer_state="canonical")) == []


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Expected optimizer_state to be 'held' or 'canonical', but got")):
        zero.state_dict(_divided(), optimizer_state="compact")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["canonical", "held"])
@layouts
def test_what_is_loaded_goes_through_the_optimizers_own_loading(shapes: Any, options: Any, form: str) -> None:
    """What torch puts in is taken over at the next step only; ours goes through `load_state_dict`, with its checks."""
    plain = halfstep.AdamW(_groups(shapes), **options)
    _step(plain, 1)
    state, weights = plain.state_dict() if form == "held" else plain.canonical_state_dict(), _weights(plain)
    divided = _divided(shapes, weights, **options)
    zero.load_state_dict(divided, state)
    remainder = torch.int8 if options else torch.int16
    assert all(entry["master"].dtype == remainder for entry in divided.optim.state.values())
    first = next(iter(divided.optim.state.values()))
    assert first["exp_avg"].dtype == (torch.uint8 if options else torch.float32)
    assert [group["lr"] for group in divided.param_groups] == [0.1, 0.2]
    for optimizer in (plain, divided):
        _step(optimizer, 2)
    assert all(map(torch.equal, _weights(plain), _weights(divided)))
    assert differences(plain.state_dict(), zero.state_dict(divided)) == []


@pytest.mark.parametrize(
    ("shapes", "options"), [*LAYOUTS, pytest.param(SMALL, {"state_dtype": torch.bfloat16}, id="bf16 moments")]
)
def test_canonical_state_that_torch_loads_goes_on_alike(shapes: Any, options: Any) -> None:
    """`ZeroRedundancyOptimizer.load_state_dict` assigns entries past the optimizer, whose next step takes them over."""
    divided = _divided(shapes, **options)
    _step(divided, 1)
    divided.consolidate_state_dict()
    state = {**divided.state_dict(), "state": zero.state_dict(divided, optimizer_state="canonical")["state"]}
    resumed = _divided(shapes, _weights(divided), **options)
    resumed.load_state_dict(state)
    for optimizer in (divided, resumed):
        _step(optimizer, 2)
    assert all(map(torch.equal, _weights(divided), _weights(resumed)))
    assert differences(zero.state_dict(divided), zero.state_dict(resumed)) == []


def test_a_step_count_returns_to_the_device_of_its_parameter() -> None:
    """`ZeroRedundancyOptimizer.load_state_dict` moves it to the CPU."""
    weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = halfstep.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(2.0), "exp_avg": torch.empty_like(weight)}
    state = optimizer._complete_state(weight, optimizer.param_groups[0])
    assert state["step"].device == weight.device


def test_another_model_is_refused_and_nothing_touched() -> None:
    divided = _divided()
    _step(divided, 1)
    before = zero.state_dict(divided)
    groups = _groups()
    other = halfstep.AdamW(groups[:1]).state_dict()
    with pytest.raises(CheckpointError, match="has 2 parameters in 1 groups, this one 3 in 2: use the same model"):
        zero.load_state_dict(divided, other)
    assert differences(before, zero.state_dict(divided)) == []


class FailsLate(torch.optim.AdamW):
    """An optimizer that raises after it has taken the state over."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("exp_avg fits nowhere")


@pytest.mark.parametrize("kind", [halfstep.AdamW, FailsLate])
def test_state_that_does_not_fit_is_refused_and_nothing_touched(kind: type[torch.optim.Optimizer]) -> None:
    divided = ZeroRedundancyOptimizer(_groups(), optimizer_class=kind)
    _step(divided, 1)
    before = zero.state_dict(divided)
    state = zero.state_dict(divided)
    state["state"][1] = {**state["state"][1], "exp_avg": torch.zeros(7)}
    state["param_groups"][0]["lr"] = 5.0
    with pytest.raises(CheckpointError, match=r"the checkpoint's optimizer does not fit this one: .*exp_avg"):
        zero.load_state_dict(divided, state)
    assert differences(before, zero.state_dict(divided)) == []
    assert [group["lr"] for group in divided.optim.param_groups] == [0.1, 0.2]
