"""What frameworks and users of torch's optimizers rely on beyond the arithmetic."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from layouts import some
from oracles import BF16, FP32
from states import copies_of, give_gradients, masters, parameters_of, same_bits, train
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.testing._internal.two_tensor import TwoTensor

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore:group 0 rounds moments of 8 bits to nearest")

PAIRS = [(halfstep.AdamW, torch.optim.AdamW), (halfstep.Adam, torch.optim.Adam)]
LAYOUTS = {
    **some("fp32", "split", "full", "fp16"),
    # Wrapper subclasses cannot round stochastically.
    "none": (BF16, {"master_weights": None}),
    "8 bits": (BF16, {"state_dtype": "8bit", "rounding": "nearest"}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def training(layout: str, steps: int = 3) -> tuple[torch.nn.Module, Any]:
    dtype, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(5, 3, dtype=dtype))
    optimizer = halfstep.AdamW(model.parameters(), lr=0.01, **options)
    train(optimizer, range(steps))
    return model, optimizer


# ---------------------------------------------------------------------------------------------------- torch's classes


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_optimizers_are_instances_of_torchs_classes(ours: Any, theirs: Any) -> None:
    optimizer = ours([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(optimizer, theirs) and isinstance(optimizer, torch.optim.Adam)
    assert isinstance(optimizer, halfstep.Adam)


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


def wrapped_training(layout: str, wrap: Any, amsgrad: bool) -> Any:
    dtype, options = LAYOUTS[layout]
    parameters = [torch.nn.Parameter(wrap(p.detach())) for p in parameters_of(dtype, ((40, 130), (4,)))]
    optimizer = halfstep.AdamW(
        [*parameters, torch.nn.Parameter(torch.ones(3, dtype=dtype))], amsgrad=amsgrad, **options
    )
    for step in range(4):
        twins = copies_of(getattr(p, "a", p) for p in parameters)
        give_gradients(step, twins)
        for parameter, twin in zip(parameters, twins, strict=True):
            parameter.grad = wrap(twin.grad)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


@pytest.mark.parametrize(("layout", "amsgrad"), [(name, number % 2 == 1) for number, name in enumerate(LAYOUTS)])
def test_wrapper_subclasses_are_stepped_through_their_own_operations(layout: str, amsgrad: bool) -> None:
    """Their address is 0: the kernels would write to it."""
    optimizer = wrapped_training(layout, lambda values: TwoTensor(values.clone(), values.clone()), amsgrad)
    other = wrapped_training(layout, torch.clone, amsgrad)
    pairs = zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        assert (
            isinstance(mine, TwoTensor) == (number < 2) and optimizer.state[mine].keys() == other.state[theirs].keys()
        )
        for value, expected in zip(
            (mine.detach(), *optimizer.state[mine].values()), (theirs, *other.state[theirs].values()), strict=True
        ):
            assert all(
                same_bits(part.data, expected.data) for part in (getattr(value, "a", value), getattr(value, "b", value))
            )


@pytest.mark.parametrize("options", [{"master_weights": None, "rounding": "stochastic"}, {"state_dtype": "8bit"}])
def test_stochastic_rounding_of_a_wrapper_subclass_is_refused_before_anything_changes(options: Any) -> None:
    value = torch.ones(64, 64, dtype=BF16)
    parameter = torch.nn.Parameter(TwoTensor(value, value.clone()))
    optimizer = halfstep.AdamW([parameter], **options)
    parameter.grad = TwoTensor(value, value.clone())
    with pytest.raises(TypeError, match=r"Expected rounding to be 'nearest' for .*, a TwoTensor without memory of"):
        optimizer.step()
    assert (parameter.a == 1).all()


@pytest.mark.parametrize(("kind", "layout"), [*(("meta", layout) for layout in LAYOUTS), ("fake", "8 bits")])
def test_meta_and_fake_parameters_get_state_like_real_ones(kind: str, layout: str) -> None:
    """Who plans memory runs the whole training so."""
    mode = FakeTensorMode()
    make = (lambda p: p.to("meta")) if kind == "meta" else mode.from_tensor
    dtype, options = LAYOUTS[layout]
    real = parameters_of(dtype, ((40, 130), (4,), ()))
    optimizers = [
        halfstep.AdamW(parameters, amsgrad=True, **options)
        for parameters in (real, [torch.nn.Parameter(make(p.detach())) for p in real])
    ]
    kinds = []
    for optimizer in optimizers:
        parameters = optimizer.param_groups[0]["params"]
        for lr in (0.1, 0.2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        states = [optimizer.state[parameter] for parameter in parameters]
        kinds.append([{key: (value.shape, value.dtype) for key, value in state.items()} for state in states])
        canonical = optimizer.canonical_state_dict()["state"]
        assert all(value.dtype == FP32 for state in canonical.values() for value in state.values())
    assert kinds[0] == kinds[1]
    assert all(state["exp_avg"].is_meta or isinstance(state["exp_avg"], FakeTensor) for state in states)


def test_lazy_modules_may_be_given_before_their_first_forward() -> None:
    model = torch.nn.LazyLinear(3)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    assert optimizer.canonical_state_dict()["state"] == {}
    model(torch.ones(2, 4)).sum().backward()
    before = copies_of(model.parameters())
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before)) and len(optimizer.state) == 2


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
    _, optimizer = training("split", 1)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = count
    optimizer.load_state_dict(state)
    assert all(entry["step"].dtype == torch.float32 and entry["step"] == 5 for entry in optimizer.state.values())
    for entry in optimizer.state.values():
        entry["step"] = count  # put there by hand
    train(optimizer, [1])
    assert all(entry["step"].dtype == torch.float32 and entry["step"] == 6 for entry in optimizer.state.values())


WHOLE = "to be an integer of at least 0 that fp32 represents, such as all up to 16,777,216, but got"


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (float("nan"), f"{WHOLE} nan"),
        (torch.tensor(float("inf")), f"{WHOLE} inf"),
        (-5, f"{WHOLE} -5"),
        (2.5, f"{WHOLE} 2.5"),
        (1 + 0j, rf"{WHOLE} \(1\+0j\)"),
        (torch.tensor(1 + 0j), rf"{WHOLE} \(1\+0j\)"),
        (True, f"{WHOLE} True"),
        ("5", f"{WHOLE} '5'"),
        (2**25 + 1, f"{WHOLE} 33554433"),
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


def test_loaded_tensors_move_to_the_device_of_their_parameter() -> None:
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


@layouts
def test_masters_are_the_weights_in_fp32(layout: str) -> None:
    for steps in (0, 3):
        model, optimizer = training(layout, steps)
        found, saved = optimizer.masters(), optimizer.canonical_state_dict()["state"]
        assert list(found) == list(model.parameters()) and len(found) == 4 and bool(optimizer.state) == bool(steps)
        for number, (parameter, master) in enumerate(found.items()):
            assert master.dtype == FP32 and not master.requires_grad
            assert torch.equal(master, saved.get(number, {}).get("master", parameter.detach().float()))
            if layout == "fp32":
                assert master.data_ptr() == parameter.data_ptr()
            if layout in ("full", "fp16") and steps:
                assert master is optimizer.state[parameter]["master"]
    with pytest.raises(KeyError, match="not a parameter of this optimizer"):
        found[torch.ones(1)]


@pytest.mark.parametrize(("before", "after"), [("full", "split"), ("split", "full")])
def test_a_master_kept_in_another_way_from_now_on_keeps_its_bits(before: str, after: str) -> None:
    model, optimizer = training(before)
    _, other = training(before)
    optimizer.param_groups[0]["master_weights"] = after
    for one in (optimizer, other):
        train(one, [7])
    assert optimizer.state[model[0].weight]["master"].dtype == (torch.int16 if after == "split" else torch.float32)
    assert same_bits(masters(optimizer), masters(other))


# --------------------------------------------------------------------------------------- what goes wrong in others


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": False}, {"eps": 0.0}])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_state_dict_of_a_new_optimizer_takes_no_step(options: dict[str, Any], dtype: torch.dtype) -> None:
    """torch.distributed.checkpoint takes a step with lr = 0 and gradients of 0 to find out what state there is."""
    model = torch.nn.Linear(3, 3).to(dtype)
    fresh = copy.deepcopy(model)
    options = {"decoupled_weight_decay": True, **options}
    optimizer, other = (halfstep.Adam(each.parameters(), **options) for each in (model, fresh))
    asked: Any = get_optimizer_state_dict(model, optimizer)
    state = asked["state"]["weight"]
    assert torch.equal(model.weight, fresh.weight)
    assert float(state["step"]) == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    for parameters, each in ((model.weight, optimizer), (fresh.weight, other)):  # the first real step is a first step
        parameters.grad = torch.ones_like(parameters)
        each.step()
    assert torch.equal(model.weight, fresh.weight)
    assert float(optimizer.state[model.weight]["step"]) == 1


def test_a_state_that_holds_a_master_only_is_completed() -> None:
    """As another library's loader may leave it."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = halfstep.AdamW([parameter])
    optimizer.state[parameter]["master"] = parameter.detach().float()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert set(optimizer.canonical_state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master"}
