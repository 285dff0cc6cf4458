"""What frameworks and users of torch's optimizers count on beyond the arithmetic."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import ADAM_AGAINST_TORCH
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import halfstep

PAIRS = [(halfstep.AdamW, torch.optim.AdamW), (halfstep.Adam, torch.optim.Adam)]
# By name: the parameters' dtype and how the weight is kept.
LAYOUTS = {
    "fp32": (torch.float32, "auto"),
    "split": (torch.bfloat16, "split"),
    "full bf16": (torch.bfloat16, "full"),
    "full fp16": (torch.float16, "full"),
    "none": (torch.bfloat16, None),
}


def training(layout: str, steps: int = 3, **options: Any) -> tuple[torch.nn.Module, Any]:
    dtype, master = LAYOUTS[layout]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(5, 3, dtype=dtype))
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, master_weights=master, **options)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---------------------------------------------------------------------------------------------------- torch's classes


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_frameworks_that_ask_for_torchs_class_find_it(ours: Any, theirs: Any) -> None:
    optimizer = ours([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(optimizer, theirs) and isinstance(optimizer, torch.optim.Adam)
    assert isinstance(optimizer, halfstep.Adam)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_no_method_of_torchs_class_is_inherited(ours: Any, theirs: Any) -> None:
    """Its ``__init__``, ``__setstate__`` and ``step`` do other things."""
    for cls in (torch.optim.Adam, torch.optim.AdamW):
        for name in set(vars(cls)) & {"__init__", "__setstate__", "step", "state_dict", "load_state_dict"}:
            assert getattr(ours, name) is not getattr(cls, name), name


@pytest.mark.parametrize("saved_by", [halfstep.Adam, torch.optim.Adam])
def test_whatever_is_loaded_into_adamw_decays_as_adamw_does(saved_by: Any) -> None:
    """As in torch; and Adam takes the option from the checkpoint."""
    source = saved_by([torch.nn.Parameter(torch.ones(3))], weight_decay=0.1)
    for cls, decoupled in ((halfstep.AdamW, True), (torch.optim.AdamW, True), (halfstep.Adam, False)):
        target = cls([torch.nn.Parameter(torch.ones(3))])
        target.load_state_dict(source.state_dict())
        assert target.param_groups[0]["decoupled_weight_decay"] is decoupled
        assert target.param_groups[0]["weight_decay"] == 0.1


# ------------------------------------------------------------------------------------------------ frozen parameters


FROZEN = {
    "uint8": lambda: torch.zeros(4, dtype=torch.uint8),
    "int8": lambda: torch.zeros(4, dtype=torch.int8),
    "fp8": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn),
    "fp64": lambda: torch.zeros(4, dtype=torch.float64),
    "complex": lambda: torch.zeros(4, dtype=torch.complex64),
    "expanded": lambda: torch.zeros(1).expand(4),
    "sparse": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_of_any_kind_stand_beside_trained_ones(kind: str) -> None:
    """Quantized bases under adapters."""
    frozen = torch.nn.Parameter(FROZEN[kind](), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = halfstep.AdamW([frozen, trained])
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"].keys() == {1}
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.step()
    assert optimizer.state[trained]["step"] == 2


def test_a_frozen_parameter_is_checked_when_it_is_stepped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
    optimizer = halfstep.AdamW([parameter])
    parameter.requires_grad_(True)
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError, match=r"to have a gradient of dtype|to have dtype float32, float16 or bfloat16,"):
        optimizer.step()
    with pytest.raises(TypeError, match="Expected parameter 0 of group 0 to have dtype float32, float16 or"):
        halfstep.AdamW([parameter])


# ------------------------------------------------------------------------------------------ tensors without memory


def trained_wrapped(cls: Any, wrap: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(wrap(torch.randn(shape, generator=generator).to(dtype))) for shape in ((5, 3), (4,))
    ]
    plain = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = cls([*parameters, plain], lr=0.1, **options)
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = wrap(torch.randn(parameter.shape, generator=generator).to(dtype))
        plain.grad = torch.ones_like(plain)
        optimizer.step()
    return parameters, optimizer


def both(values: torch.Tensor) -> TwoTensor:
    return TwoTensor(values, values.clone())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_wrapper_subclasses_are_stepped_through_their_own_operations(layout: str, amsgrad: bool) -> None:
    """Their address is 0: the kernels would write to it."""
    dtype, master = LAYOUTS[layout]
    wrapped, one = trained_wrapped(halfstep.AdamW, both, dtype, master_weights=master, amsgrad=amsgrad)
    plain, other = trained_wrapped(halfstep.AdamW, lambda values: values, dtype, master_weights=master, amsgrad=amsgrad)
    for mine, theirs in zip(wrapped, plain, strict=True):
        assert isinstance(mine, TwoTensor) and torch.equal(mine.a, theirs) and torch.equal(mine.b, theirs)
    saved, expected = one.canonical_state_dict()["state"], other.canonical_state_dict()["state"]
    for index in expected:
        for key, value in expected[index].items():
            assert torch.equal(getattr(saved[index][key], "a", saved[index][key]), value), (index, key)


def test_wrapper_subclasses_give_torchs_weights() -> None:
    mine, _ = trained_wrapped(halfstep.AdamW, both, torch.float32)
    theirs, _ = trained_wrapped(torch.optim.AdamW, both, torch.float32)
    for ours, torchs in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.a, torchs.a, **ADAM_AGAINST_TORCH)


def test_stochastic_rounding_of_a_wrapper_subclass_is_refused_before_anything_changes() -> None:
    parameter = torch.nn.Parameter(both(torch.ones(3, dtype=torch.bfloat16)))
    optimizer = halfstep.AdamW([parameter], master_weights=None, rounding="stochastic")
    parameter.grad = both(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"Expected rounding to be 'nearest' for .*, a TwoTensor without memory of"):
        optimizer.step()
    assert torch.equal(parameter.a, torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_under_fake_tensors_makes_fake_state(layout: str) -> None:
    """Who plans memory runs the whole training so."""
    with FakeTensorMode():
        model, optimizer = training(layout)
        assert all(
            isinstance(value, torch._subclasses.FakeTensor) for value in optimizer.state[model[0].weight].values()
        )
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        step(model, optimizer, 1)
    optimizer.step()  # outside of the mode too
    optimizer.load_state_dict(optimizer.state_dict())
    shapes = [value.shape[:2] for value in state["state"][0].values()]
    assert shapes.count(torch.Size([5, 7])) == (2 if layout in ("fp32", "none") else 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_the_meta_device(layout: str) -> None:
    dtype, master = LAYOUTS[layout]
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=dtype, device="meta"))
    optimizer = halfstep.AdamW([parameter], master_weights=master)
    for lr in (0.1, 0.2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    state = optimizer.state[parameter]
    assert all(value.is_meta for value in state.values()) and state["exp_avg"].shape == (3, 4)
    optimizer.load_state_dict(optimizer.state_dict())


def test_lazy_modules_may_be_given_before_their_first_forward() -> None:
    model = torch.nn.LazyLinear(3)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    assert optimizer.canonical_state_dict()["state"] == {}
    model(torch.ones(2, 4)).sum().backward()
    before = weights(model)
    optimizer.step()
    assert not any(map(torch.equal, weights(model), before)) and len(optimizer.state) == 2


# ---------------------------------------------------------------------------------------------------------- numbers


def test_numpy_arrays_of_one_number_are_numbers() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    betas: Any = (np.float32(0.5), np.array(0.75))
    optimizer = halfstep.AdamW([parameter], lr=np.array(1e-2), betas=betas, eps=np.float64(1e-6))  # type: ignore[arg-type]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (1e-2, (0.5, 0.75), 1e-6)
    assert {type(value) for value in (group["lr"], *group["betas"], group["eps"])} == {float}
    group["lr"] = np.array(2e-2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    group["lr"] *= 2  # in place
    expected = parameter.detach().clone()
    optimizer.step()
    torch.testing.assert_close(expected - parameter, torch.full((3,), 4e-2 * (1 + 1e-2)), rtol=1e-2, atol=0)
    with pytest.raises(ValueError, match="Invalid learning rate: nan; expected a finite number of at least 0"):
        halfstep.AdamW([parameter], lr=np.array(float("nan")))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [5, 5.0, np.int64(5), torch.tensor(5), torch.tensor([5], dtype=torch.int64)])
def test_a_step_count_may_be_any_number(count: Any) -> None:
    model, optimizer = training("split", 1)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = count
    optimizer.load_state_dict(state)
    assert all(entry["step"].dtype == torch.float32 and entry["step"] == 5 for entry in optimizer.state.values())
    for entry in optimizer.state.values():
        entry["step"] = count  # put there by hand
    step(model, optimizer, 1)
    assert all(entry["step"].dtype == torch.float32 and entry["step"] == 6 for entry in optimizer.state.values())


WHOLE = "to be an integer of at least 0, but got"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (float("nan"), f"{WHOLE} nan"),
        (torch.tensor(float("inf")), f"{WHOLE} inf"),
        (-5, f"{WHOLE} -5"),
        (2.5, "to be an integer that fp32 represents, such as all up to 16,777,216, but got 2.5"),
        (1 + 0j, rf"{WHOLE} \(1\+0j\)"),
        (torch.tensor(1 + 0j), rf"{WHOLE} \(1\+0j\)"),
        (True, f"{WHOLE} True"),
        ("5", f"{WHOLE} '5'"),
        (2**25 + 1, "to be an integer that fp32 represents, .* but got 33554433"),
        (torch.ones(2), r"to be one number, but got shape \(2,\)"),
    ],
)
def test_a_step_count_that_is_none_is_refused(count: Any, message: str) -> None:
    _, optimizer = training("split", 1)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["step"] = count
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"Expected 'step' in the state of parameter 1 {message}"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in entry.items())


def test_tensors_of_others_in_the_state_move_to_the_parameters_device() -> None:
    """As torch's do; the dtype stays."""
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = halfstep.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0] |= {"own": torch.ones(2), "nested": {"list": [torch.ones(1, dtype=torch.float64), 5]}}
    optimizer.load_state_dict(state)
    held = optimizer.state[parameter]
    assert held["own"].is_meta and held["nested"]["list"][0].is_meta and held["nested"]["list"][1] == 5
    assert held["nested"]["list"][0].dtype == torch.float64


# ----------------------------------------------------------------------------------------------------------- masters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_are_the_weights_in_fp32(layout: str) -> None:
    model, optimizer = training(layout)
    masters = optimizer.masters()
    assert list(masters) == list(model.parameters()) and len(masters) == 4
    saved = optimizer.canonical_state_dict()["state"]
    for number, (parameter, master) in enumerate(masters.items()):
        assert master.dtype == torch.float32 and not master.requires_grad
        assert torch.equal(master, saved[number].get("master", parameter.detach().float()))
        if layout == "fp32":
            assert master.data_ptr() == parameter.data_ptr()
        if layout.startswith("full"):
            assert master is optimizer.state[parameter]["master"]
    with pytest.raises(KeyError, match="not a parameter of this optimizer"):
        masters[torch.ones(1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_before_the_first_step_are_the_weights(layout: str) -> None:
    _, optimizer = training(layout, 0)
    assert all(torch.equal(master, parameter.float()) for parameter, master in optimizer.masters().items())
    assert not optimizer.state


def test_an_average_of_masters_moves_where_one_of_bf16_weights_stands_still() -> None:
    distances = []
    for source in ("weights", "masters"):
        model, optimizer = training("split", 0)

        def values(source: str = source, model: Any = model, optimizer: Any = optimizer) -> dict[Any, torch.Tensor]:
            if source == "masters":
                return dict(optimizer.masters())
            return {parameter: parameter.detach() for parameter in model.parameters()}

        start = {parameter: value.clone() for parameter, value in values().items()}
        average = {parameter: value.clone() for parameter, value in values().items()}
        for number in range(50):
            step(model, optimizer, number)
            for parameter, value in values().items():
                average[parameter].lerp_(value, 1 - 0.999)
        distances.append(sum(float((average[p].float() - start[p].float()).abs().sum()) for p in average))
    assert distances[1] > 2 * distances[0]


@pytest.mark.parametrize("layout", ["split", "full bf16", "full fp16"])
def test_weights_swapped_in_for_a_while_cost_the_masters_no_bits(layout: str) -> None:
    """An average is evaluated and saved, and training goes on from where it was."""
    model, optimizer = training(layout)
    twin, other = training(layout)
    kept = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5 + 0.125)
    swapped = optimizer.canonical_state_dict()
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(swapped["state"][number]["master"].to(parameter.dtype), parameter.detach())
    copied = copy.deepcopy(optimizer)
    assert all(map(torch.equal, dict(copied.masters()).values(), dict(optimizer.masters()).values()))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), kept, strict=True):
            parameter.copy_(weight)
    for pair in ((model, optimizer), (twin, other)):
        step(*pair, 7)
    assert all(map(torch.equal, weights(model), weights(twin)))
    for mine, theirs in zip(optimizer.masters().values(), other.masters().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("before", "after"), [("full", "split"), ("split", "full")])
def test_a_master_kept_in_another_way_from_now_on_keeps_its_bits(before: str, after: str) -> None:
    model, optimizer = training("split" if before == "split" else "full bf16")
    twin, other = training("split" if before == "split" else "full bf16")
    optimizer.param_groups[0]["master_weights"] = after
    for pair in ((model, optimizer), (twin, other)):
        step(*pair, 7)
    assert optimizer.state[model[0].weight]["master"].dtype == (torch.int16 if after == "split" else torch.float32)
    for mine, theirs in zip(optimizer.masters().values(), other.masters().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_no_warning_where_an_optimizer_has_nothing_to_do() -> None:
    optimizer = halfstep.AdamW([torch.nn.Parameter(torch.ones(3))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
