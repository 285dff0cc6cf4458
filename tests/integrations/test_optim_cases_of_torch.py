"""PyTorch's tests of its optimizers applied to halfstep's, with its list of arguments, in each layout.

Every case runs over the arguments that `torch.testing._internal.common_optimizers` lists for Adam and AdamW on any
device, as for-loop, foreach and fused by turns. What torch computes on fp32 parameters is what our masters must hold.
Weights without a master, rounded stochastically, have no such reference: their moments do where no L2 decay reads the
weights.
"""

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from states import SHAPES, copies_of, give_gradients, parameters_of, same_bits, train
from tolerances import ADAM_AGAINST_TORCH
from torch.optim import lr_scheduler, swa_utils

import halfstep

pytestmark = pytest.mark.sample(12)

common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)

INFOS = {info.optim_cls.__name__: info for info in common.optim_db if info.optim_cls.__name__ in ("Adam", "AdamW")}
THEIRS: dict[Any, Any] = {halfstep.Adam: torch.optim.Adam, halfstep.AdamW: torch.optim.AdamW}
FLAGS = ({"foreach": False, "fused": False}, {"foreach": True}, {"fused": True})
# By name: the parameters' dtype and further options.
LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "split": (torch.bfloat16, {}),
    "full": (torch.float16, {}),
    "stochastic": (torch.bfloat16, {"master_weights": None, "rounding": "stochastic", "seed": 3}),
}
SCHEDULERS: dict[str, Any] = {
    **{f"torch's list, {number}": made for number, made in enumerate(INFOS["Adam"].scheduler_inputs)},
    "lambda": [lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))],
    "multiplicative": [lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.8)],
    "milestones": [lambda opt: lr_scheduler.MultiStepLR(opt, [2, 5], gamma=0.3)],
    "cosine": [lambda opt: lr_scheduler.CosineAnnealingLR(opt, 8)],
    "restarts": [lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3)],
    # These two move the first beta with the learning rate.
    "cyclic": [lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, step_size_up=3, cycle_momentum=True)],
    "one cycle": [lambda opt: lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=12)],
    "sequential": [
        lambda opt: lr_scheduler.SequentialLR(
            opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], [3]
        )
    ],
    "chained": [
        lambda opt: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(opt, 0.5, total_iters=2), lr_scheduler.StepLR(opt, 2, gamma=0.9)]
        )
    ],
    "averaging": [lambda opt: swa_utils.SWALR(opt, swa_lr=1e-4, anneal_epochs=4)],
}

every_class = pytest.mark.parametrize("ours", THEIRS, ids=lambda cls: cls.__name__)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def every(test: Any) -> Any:
    """Parametrize with both classes and all layouts."""
    return every_class(every_layout(test))


def listed(cls: Any) -> list[dict[str, Any]]:
    """torch's arguments for all devices, with new tensors in them each time."""
    inputs = INFOS[cls.__name__].optim_inputs_func
    return [one.kwargs for one in [*inputs(device="cuda"), *inputs(device="mps")[-1:]]]


def arguments(cls: Any, layout: str, **more: Any) -> Iterator[dict[str, Any]]:
    """torch's arguments, in its implementations by turns, those left out that every Adam refuses."""
    for turn, flags in enumerate(FLAGS):
        for place, options in enumerate(listed(cls)):
            tensors = any(isinstance(value, torch.Tensor) for value in options.values())
            refused = flags.get("foreach") and tensors and not options.get("capturable")
            if not refused and place % len(FLAGS) == turn:
                yield {**options, **flags, **LAYOUTS[layout][1], **more}


def for_torch(options: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for torch's for-loop, which takes no capturable on a CPU."""
    not_theirs = ("capturable", "foreach", "fused", *LAYOUTS["stochastic"][1])
    return {name: copy.deepcopy(value) for name, value in options.items() if name not in not_theirs}


def weights_of(layout: str, shapes: Any = SHAPES, seed: int = 0) -> list[Any]:
    return parameters_of(LAYOUTS[layout][0], shapes, seed)


def assert_torchs(optimizer: Any, torchs: Any, layout: str, options: Any) -> None:
    """Masters and state are torch's."""
    mine, theirs = optimizer.canonical_state_dict()["state"], torchs.state_dict()["state"]
    assert mine.keys() == theirs.keys(), options
    group = optimizer.param_groups[0]
    l2 = not group["decoupled_weight_decay"] and group["weight_decay"] != 0
    for index, state in theirs.items():
        assert state.keys() <= mine[index].keys(), options
        for key, value in state.items():
            if key == "step" or layout != "stochastic" or not l2:
                torch.testing.assert_close(mine[index][key], value, **ADAM_AGAINST_TORCH, msg=lambda m: f"{options}{m}")
    if layout != "stochastic":
        weights = [parameter for group in torchs.param_groups for parameter in group["params"]]
        for master, weight in zip(optimizer.masters().values(), weights, strict=True):
            torch.testing.assert_close(master, weight.detach(), **ADAM_AGAINST_TORCH, msg=lambda m: f"{options} {m}")


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


class Fit:
    """Two parameters, one input, and a loss that their squares fall or rise with."""

    def __init__(self, layout: str) -> None:
        self.parameters = weights_of(layout, ((10, 5), (10,)))
        self.input = torch.randn(5, generator=torch.Generator().manual_seed(0))

    def loss(self) -> torch.Tensor:
        """With its gradients."""
        weight, bias = self.parameters
        weight.grad = bias.grad = None
        loss = (weight.float().mv(self.input) + bias.float()).square().sum()
        loss.backward()
        return loss


# -------------------------------------------------------------------------------------------- steps and their direction


@every
def test_a_run_with_missing_gradients_equals_torchs(ours: Any, layout: str) -> None:
    """One step has no gradient at all, two lack one parameter's; some parameters have no or one element."""
    for options in arguments(ours, layout):
        mine, theirs = weights_of(layout), weights_of("fp32")
        optimizer, torchs = ours(mine, **options), THEIRS[ours](theirs, **for_torch(options))
        for step in range(7):
            give_gradients(step, mine, theirs, without={2: range(len(mine)), 3: (1,), 4: (1,)}.get(step, ()))
            optimizer.step()
            torchs.step()
        assert_torchs(optimizer, torchs, layout, options)
        for parameter in mine:
            assert optimizer.state[parameter]["step"].dtype == torch.float32


@every
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_schedulers_drive_ours_as_torchs(ours: Any, layout: str, schedule: str) -> None:
    for rate in (0.01, torch.tensor(0.01)):
        if isinstance(rate, torch.Tensor) and schedule in ("cyclic", "one cycle"):
            continue  # torch refuses to move a learning rate that is a tensor so
        optimizers: list[Any] = []
        lists = (weights_of(layout), weights_of("fp32"))
        for cls, parameters in zip((ours, THEIRS[ours]), lists, strict=True):
            own = LAYOUTS[layout][1] if cls is ours else {}
            groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": copy.deepcopy(rate) * 2}]
            optimizers.append(cls(groups, lr=copy.deepcopy(rate), **own))
        schedulers = [[make(optimizer) for make in SCHEDULERS[schedule]] for optimizer in optimizers]
        for step in range(10):
            give_gradients(step, *lists)
            for optimizer, own in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                for scheduler in own:
                    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
            left, right = ([(g["lr"], g["betas"]) for g in one.param_groups] for one in optimizers)
            assert same_bits(left, right), step
        assert_torchs(*optimizers, layout, schedule)


@every_class
def test_dtypes_mix_with_one_another_and_with_frozen_integers(ours: Any) -> None:
    for options in arguments(ours, "fp32"):
        kinds = ("fp32", "full", "split", "fp32", "split")
        mine = [weights_of(kind, [(2, 3)], seed)[0] for seed, kind in enumerate(kinds)]
        theirs = [weights_of("fp32", [(2, 3)], seed)[0] for seed in range(len(kinds))]
        frozen = torch.randint(1024, (2, 3))
        before = frozen.clone()
        optimizer, torchs = ours([*mine, frozen], **options), THEIRS[ours]([*theirs, frozen], **for_torch(options))
        for step in range(7):
            give_gradients(step, mine, theirs)
            optimizer.step()
            torchs.step()
        assert torch.equal(frozen, before) and frozen not in optimizer.state
        state = torchs.state_dict()["state"]
        for index, entry in optimizer.canonical_state_dict()["state"].items():
            for key, value in state[index].items():
                torch.testing.assert_close(entry[key], value, **ADAM_AGAINST_TORCH)
        for parameter, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(optimizer.masters()[parameter], other.detach(), **ADAM_AGAINST_TORCH)


# ------------------------------------------------------------------------------------------------ steps that do nothing


@every
def test_nothing_happens_without_gradients(ours: Any, layout: str) -> None:
    for frozen in (True, False):
        for options in arguments(ours, layout):
            parameters = weights_of(layout)
            for parameter in parameters:
                parameter.requires_grad_(not frozen)
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer = ours(parameters, **options)
            loss = torch.ones(1)
            assert optimizer.step(lambda loss=loss: loss) is loss
            assert same_bits(before, [p.detach() for p in parameters]) and not optimizer.state, options


# ---------------------------------------------------------------------------------------------------------- state dicts


@every
@pytest.mark.parametrize("named", [(True, True), (True, False), (False, True), (False, False)])
def test_a_loaded_state_goes_on_with_the_same_bits(ours: Any, layout: str, named: tuple[bool, bool]) -> None:
    """Parameters with and without names; equal parameters give equal dicts, and loading changes none of them."""
    names = [f"name {place}" for place in range(len(SHAPES))]
    for options in arguments(ours, layout):
        parameters = weights_of(layout)
        optimizer = ours(
            list(zip(names, parameters, strict=True)) if named[0] else parameters, **copy.deepcopy(options)
        )
        train(optimizer, range(3), parameters)
        others = copies_of(parameters)
        target = ours(list(zip(names, others, strict=True)) if named[1] else others, **copy.deepcopy(options))
        saved = copy.deepcopy(optimizer.state_dict())
        before = copy.deepcopy(saved)
        target.load_state_dict(saved)
        assert same_bits(saved, before), options
        known = target.state_dict()["param_groups"][0].get("param_names")
        assert known == (names if any(named) else None)
        for one in (optimizer, target):
            train(one, range(3, 6))
        left, right = without_names(optimizer.state_dict()), without_names(target.state_dict())
        assert same_bits(parameters, others) and same_bits(left, right), options
        target.param_groups.extend(target.param_groups)  # a parameter that comes again is written the same way
        again = without_names(target.state_dict())
        assert same_bits(again["param_groups"][-1], left["param_groups"][-1])
        assert same_bits(again["state"], left["state"])


def without_later_options(ours: Any, state: dict[str, Any]) -> None:
    """Those that torch added later, and all of ours."""
    later = {*INFOS[ours.__name__].not_og_supported_flags, "amsgrad", "decoupled_weight_decay"}
    for group in state["param_groups"]:
        for name in later | {"master_weights", "state_dtype", "rounding", "seed"}:
            group.pop(name, None)


def with_numbers_as_steps(ours: Any, state: dict[str, Any]) -> None:
    for place, entry in state["state"].items():
        entry["step"] = int(entry["step"]) if place % 2 else entry["step"].item()


def of_other_implementations(ours: Any, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group.update(fused=True, foreach=None, capturable=True)


@every
@pytest.mark.parametrize("change", [without_later_options, with_numbers_as_steps, of_other_implementations])
def test_states_of_other_versions_and_implementations_load(ours: Any, layout: str, change: Any) -> None:
    for options in arguments(ours, layout):
        lists = weights_of(layout), weights_of(layout)
        optimizer, twin = (ours(parameters, **copy.deepcopy(options)) for parameters in lists)
        for one in (optimizer, twin):
            train(one, range(2))
        state, expected = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
        change(ours, state)
        optimizer.load_state_dict(state)
        assert same_bits(optimizer.state_dict()["state"], expected), options
        for one in (optimizer, twin):
            train(one, [2])
        assert same_bits(*lists), options


@every
def test_a_loaded_state_shares_no_memory(ours: Any, layout: str) -> None:
    for options in arguments(ours, layout):
        lists = [weights_of(layout) for _ in range(3)]
        source, first, second = (ours(own, **copy.deepcopy(options)) for own in lists)
        give_gradients(0, *lists)
        source.step()
        saved = source.state_dict()
        first.load_state_dict(saved)
        second.load_state_dict(saved)
        kept = copy.deepcopy(source.state_dict()), copy.deepcopy(second.state_dict())
        weights = [parameter.detach().clone() for parameter in (*lists[0], *lists[2])]
        first.step()
        rate = first.param_groups[0]["lr"]
        rate.fill_(0.5) if isinstance(rate, torch.Tensor) else None
        assert same_bits((source.state_dict(), second.state_dict()), kept), options
        assert same_bits(weights, [parameter.detach() for parameter in (*lists[0], *lists[2])]), options


# ---------------------------------------------------------------------------------------------------------------- hooks


@every
def test_hooks_of_state_dict_and_load_state_dict(ours: Any, layout: str) -> None:
    """In torch's order: what the first ones return or change is what the next ones see."""

    def set_rate(optimizer: Any, state: dict[str, Any]) -> None:
        state["param_groups"][0]["lr"] *= 2

    def replace(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] + 1} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimizer = ours(weights_of(layout), lr=0.5, **LAYOUTS[layout][1])
    train(optimizer, [0])
    optimizer.register_state_dict_pre_hook(lambda its: its.state.update(mark=1))
    handle = optimizer.register_state_dict_post_hook(lambda its, state: {**state, "seen": state["state"].pop("mark")})
    saved = optimizer.state_dict()
    assert saved.pop("seen") == 1 and "mark" not in saved["state"]
    handle.remove()
    assert optimizer.state_dict().keys() == {"state", "param_groups"}
    optimizer.register_load_state_dict_pre_hook(set_rate)
    optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda its: its.state.update(rate=its.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert optimizer.state["rate"] == 3.0 == optimizer.canonical_state_dict()["state"]["rate"]
    train(optimizer, [1])
    assert all(optimizer.state[parameter]["step"] == 2 for parameter in optimizer.param_groups[0]["params"])


# ------------------------------------------------------------------------------------------- copies, names and printing


@every
def test_copies_keep_every_public_attribute_and_continue_alike(ours: Any, layout: str) -> None:
    for options in arguments(ours, layout, max_grad_norm=2.0):
        for copier in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            parameters = weights_of(layout, SHAPES[:3])
            optimizer = ours(parameters, **copy.deepcopy(options))
            give_gradients(0, parameters)
            for steps in (0, 2):
                for _ in range(steps):
                    optimizer.step()
                twin = copier(optimizer)
                public = [{name for name in vars(one) if not name.startswith("_")} for one in (optimizer, twin)]
                assert public[0] == public[1] and twin.max_grad_norm == 2.0
                assert same_bits(optimizer.state_dict(), twin.state_dict()), options
            twins = twin.param_groups[0]["params"]
            give_gradients(1, parameters, twins)
            optimizer.step()
            twin.step()
            assert same_bits([p.detach() for p in parameters], [p.detach() for p in twins]), options


# -------------------------------------------------------------------------------------------------- closures, gradients


@every
def test_a_closure_is_called_once_with_gradients_on(ours: Any, layout: str) -> None:
    for options in arguments(ours, layout):
        fit, other = Fit(layout), Fit(layout)
        optimizer = ours(fit.parameters, **copy.deepcopy(options))
        plain = ours(other.parameters, **copy.deepcopy(options))
        calls: list[bool] = []

        def closure(fit: Fit = fit, calls: list[bool] = calls) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return fit.loss()

        for _ in range(3):
            with torch.no_grad():
                loss = optimizer.step(closure)
            assert loss is not None and torch.equal(loss, other.loss())
            plain.step()
        assert calls == [True] * 3 and same_bits(fit.parameters, other.parameters), options


@every
def test_what_a_closure_returns_is_returned_and_what_it_raises_changes_nothing(ours: Any, layout: str) -> None:
    parameters = weights_of(layout)
    optimizer = ours(parameters, **LAYOUTS[layout][1])
    for value in (None, 1.5, "text"):
        assert optimizer.step(lambda value=value: value) is value
    give_gradients(0, parameters)
    before = copies_of(parameters)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert same_bits(before, parameters) and not optimizer.state


# ------------------------------------------------------------------------------------------------------ what is refused


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torchs_errors_are_raised_for_every_dtype(ours: Any, dtype: torch.dtype) -> None:
    cases = [
        (one.optimizer_error_input, one.error_type, one.error_regex)
        for one in INFOS[ours.__name__].optim_error_inputs_func(device="cpu", dtype=dtype)
    ]
    # Two that torch lists for GPUs only.
    for kwargs in ({"foreach": True, "fused": True}, {"fused": True, "differentiable": True}):
        message = "`fused` (and `foreach` cannot be `True` together|does not support `differentiable`)"
        cases.append((common.OptimizerInput(params=None, kwargs=kwargs), RuntimeError, message))
    assert len(cases) >= 14
    for given, error, message in cases:
        params = [torch.nn.Parameter(torch.ones(2, dtype=dtype))] if given.params is None else given.params
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one of torch's cases is a warning
            with pytest.raises(error, match=message):
                ours(params, **given.kwargs)


@every
def test_groups_that_torch_refuses_are_refused_with_its_error(ours: Any, layout: str) -> None:
    known, new = weights_of(layout, [(2,)]), weights_of(layout, [(2,)], seed=1)[0]
    groups: list[Any] = [
        {"params": known},
        {"params": {new}},
        {"params": [new, 1.0]},
        {"params": [new * 2]},
        {"params": [("name", new)]},
        [new],
        {"params": [new, known[0]]},
    ]
    for group in groups:
        said = []
        for cls in (ours, THEIRS[ours]):
            optimizer = cls(known)
            with pytest.raises((TypeError, ValueError)) as caught:
                optimizer.add_param_group(group)
            said.append((caught.type, str(caught.value)))
            assert len(optimizer.param_groups) == 1
        assert said[0] == said[1], group
    for nothing in ([], iter(())):
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            ours(nothing)
