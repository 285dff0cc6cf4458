"""AdamW and Adam through the interface of torch.optim."""

import collections
import copy
import gc
import inspect
import itertools
import re
import weakref
from typing import Any

import layouts
import pytest
import torch
from oracles import BF16, FP16, FP32
from states import (
    STRIDES,
    copies_of,
    give_gradients,
    held,
    masters,
    parameters_of,
    same,
    same_bits,
    same_runs,
    through_a_file,
    train,
)
from tolerances import ADAM_AGAINST_TORCH

import halfstep
from halfstep.kernels.rounding import round_to_24_bits

PAIRS = [(halfstep.AdamW, torch.optim.AdamW), (halfstep.Adam, torch.optim.Adam)]
LAYOUTS = {
    "fp32": (FP32, "auto"),
    "bf16 split": (BF16, "split"),
    "bf16 full": (BF16, "full"),
    "fp16 full": (FP16, "full"),
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_signature_has_torchs_arguments_with_the_same_defaults(ours: Any, theirs: Any) -> None:
    mine, torchs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    for name, parameter in torchs.items():
        assert mine[name].default == parameter.default, name
        assert mine[name].kind == parameter.kind, name
    assert [name for name in mine if name in torchs] == list(torchs)
    added = [parameter for name, parameter in mine.items() if name not in torchs]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in added)


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("kind", [*STRIDES, "gradient in another order", "expanded gradient"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (FP32, {}),
        (BF16, {}),
        (BF16, {"state_dtype": "8bit"}),  # blocks lie along rows, whatever the order in memory
        (BF16, {"master_weights": None, "state_dtype": BF16, "rounding": "stochastic"}),
    ],
)
def test_any_strides_give_the_bits_of_contiguous_ones(kind: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    value = torch.randn(24, 6, 4, 10).to(dtype)
    make = STRIDES.get(kind, torch.clone)
    plain, other = torch.nn.Parameter(value.clone()), torch.nn.Parameter(make(value))
    optimizers = [halfstep.AdamW([p], lr=1e-2, **options) for p in (plain, other)]
    for step in range(4):
        grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        if kind == "expanded gradient":
            grad = grad[..., :1].expand(value.shape)
        plain.grad = grad.contiguous()
        other.grad = STRIDES["channels_last"](grad) if kind == "gradient in another order" else grad
        for optimizer in optimizers:
            optimizer.step()
    assert same(held(optimizers[0], [plain]), held(optimizers[1], [other])) and same_runs(*optimizers)


@pytest.mark.parametrize("grad_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_another_dtype_than_the_parameter(name: str, grad_dtype: torch.dtype) -> None:
    """The masters have the bits of fp32 parameters with the same gradients in fp32, amsgrad included."""
    results = []
    for (dtype, master), of in ((LAYOUTS[name], grad_dtype), (LAYOUTS["fp32"], FP32)):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, amsgrad=True, master_weights=master)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in parameters:
                p.grad_dtype = None
                p.grad = torch.randn(p.shape, generator=generator).to(grad_dtype).to(of)
            optimizer.step()
        results.append(masters(optimizer))
    assert same_bits(*results)


# ------------------------------------------------------------------------------------------------------- as in a loop


@pytest.mark.parametrize("how", ["cleared", "replaced", "one removed"])
def test_a_state_that_was_cleared_starts_anew(how: str) -> None:
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, master_weights="full")
    train(optimizer, range(3))
    other = halfstep.AdamW(copies_of(parameters), lr=1e-2, master_weights="full")
    if how == "cleared":
        optimizer.state.clear()
    elif how == "replaced":
        optimizer.state = collections.defaultdict(dict)
    else:
        del optimizer.state[parameters[1]]
    for one in (optimizer, other):
        train(one, range(3, 5))
    mine, theirs = (one.canonical_state_dict()["state"] for one in (optimizer, other))
    assert same_bits(mine[1], theirs[1]) and (how == "one removed") != same_bits(mine, theirs)


def test_clipping_inside_the_step_is_torchs_clipping_before_it() -> None:
    for norm in (0.5, 1e6):
        ours, theirs = parameters_of(FP32), parameters_of(FP32)
        mine, torchs = halfstep.AdamW(ours, max_grad_norm=norm), torch.optim.AdamW(theirs)
        assert mine.grad_norm is None
        for step in range(5):
            give_gradients(step, ours, theirs)
            before = [p.grad.clone() for p in ours]
            expected = torch.nn.utils.clip_grad_norm_(theirs, norm)
            mine.step()
            torchs.step()
            torch.testing.assert_close(mine.grad_norm, expected, rtol=2**-20, atol=0)
            assert same_bits([p.grad for p in ours], before)
        torch.testing.assert_close(ours, theirs, **ADAM_AGAINST_TORCH)


def test_a_step_changes_the_version_so_that_autograd_notices() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = halfstep.AdamW([p])
    output = (p * p).sum()
    p.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_parameter_moved_to_other_memory_and_state_replaced() -> None:
    p, q = torch.nn.Parameter(torch.ones(100).bfloat16()), torch.nn.Parameter(torch.ones(100).bfloat16())
    mine, other = halfstep.AdamW([p], lr=1e-2), halfstep.AdamW([q], lr=1e-2)
    for step in range(6):
        if step == 2:
            p.data = p.data.clone()
        if step == 3:
            for key, value in mine.state[p].items():
                mine.state[p][key] = value.clone()
        if step == 4:
            mine.state[p]["exp_avg"].data = mine.state[p]["exp_avg"].data.clone()
        p.grad, q.grad = torch.ones_like(p) * step, torch.ones_like(p) * step
        mine.step()
        other.step()
    assert same_runs(mine, other)


@pytest.mark.parametrize("before", [FP32, BF16, FP16])
@pytest.mark.parametrize("after", [FP32, BF16, FP16])
def test_model_converted_to_another_dtype_between_steps(before: torch.dtype, after: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.ones(100, dtype=before))
    optimizer = halfstep.AdamW([p], lr=1e-2)
    for dtype in (before, after):
        p.data = p.data.to(dtype)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        state = optimizer.canonical_state_dict()["state"][0]
        assert ("master" in state) == (dtype != FP32)
        assert torch.equal(state.get("master", p.detach()).to(p.dtype), p.detach())
    assert float(state["step"]) == 6


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("source", "target"), list(itertools.product([n for n in LAYOUTS if n != "fp32"], LAYOUTS)))
def test_save_load_continue_keeps_every_bit_in_any_layout(source: str, target: str) -> None:
    """With the canonical state, which has the masters, the continued run is the uninterrupted one."""
    runs = []
    for name, seed in ((source, 0), (target, 99)):
        dtype, master = LAYOUTS[name]
        runs.append(halfstep.AdamW(parameters_of(dtype, seed=seed), lr=1e-2, amsgrad=True, master_weights=master))
    train(runs[0], range(10))
    runs[1].load_state_dict(through_a_file(runs[0].canonical_state_dict()))
    for optimizer in runs:
        train(optimizer, range(10, 20))
    assert same_bits(*map(masters, runs))
    states = [optimizer.canonical_state_dict()["state"].values() for optimizer in runs]
    for mine, theirs in zip(*states, strict=True):
        assert all(same_bits(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


def test_masters_of_24_bits_are_saved_as_they_are_and_loaded_rounded_to_nearest() -> None:
    """test_optim_held.py goes on with them in every layout."""
    source, exact, again = (
        halfstep.AdamW(parameters_of(BF16), lr=1e-2, rounding="stochastic", master_weights=master)
        for master in ("split24", "full", "split24")
    )
    train(source, range(10))
    saved = through_a_file(source.canonical_state_dict())
    assert all((one["master"].view(torch.int32) & 0xFF == 0).all() for one in saved["state"].values())
    exact.load_state_dict(saved)
    assert same_bits(masters(source), masters(exact))
    train(exact, range(10, 12))
    again.load_state_dict(through_a_file(exact.canonical_state_dict()))
    for near, master in zip(masters(again), masters(exact), strict=True):
        assert torch.equal(near, round_to_24_bits(master))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s["state"][1].pop("exp_avg"), "state of parameter 1 lacks 'exp_avg'"),
        (lambda s: s["state"][1].update(exp_avg=torch.ones(7)), "Expected 'exp_avg' in the state of parameter 1 to"),
        (lambda s: s["state"][3].update(master=torch.ones(2, 2)), "Expected 'master' in the state of parameter 3 to"),
        (
            lambda s: s["state"][0].update(exp_avg=torch.ones(3, 5, dtype=torch.int32)),
            "to have a floating-point dtype, but got torch.int32",
        ),
        (lambda s: s["state"][0].update(step=torch.ones(2)), "Expected 'step' in the state of parameter 0 to be one"),
        (lambda s: s["param_groups"].append({}), "different number of parameter groups: expected 1, but got 2"),
        (lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size of optimizer's group: group 0 has 5"),
        (lambda s: s.pop("state"), "lacks 'state'"),
        (lambda s: s["param_groups"][0].update(lr=float("nan")), "Invalid learning rate: nan"),
    ],
)
def test_loading_a_state_that_does_not_fit_raises_and_changes_nothing(spoil: Any, message: str) -> None:
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2)
    train(optimizer, range(3))
    before, weights = copy.deepcopy(optimizer.canonical_state_dict()), [p.detach().clone() for p in parameters]
    spoiled = copy.deepcopy(optimizer.canonical_state_dict())
    for state in spoiled["state"].values():
        state["master"] += 1
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(spoiled)
    after = optimizer.canonical_state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index in before["state"]:
        assert all(same_bits(before["state"][index][key], after["state"][index][key]) for key in before["state"][index])
    assert all(same_bits(p.detach(), w) for p, w in zip(parameters, weights, strict=True))


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan; expected a finite number of at least 0"),
        ({"lr": float("inf")}, ValueError, "Invalid learning rate: inf"),
        ({"lr": "fast"}, ValueError, "Invalid learning rate: 'fast'"),
        ({"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
        ({"betas": (0.9, 1.5)}, ValueError, "Invalid beta parameter at index 1: 1.5"),
        ({"betas": 0.9}, ValueError, "Expected betas to be a pair of numbers from 0 to below 1, but got 0.9"),
        ({"weight_decay": float("inf")}, ValueError, "Invalid weight_decay value: inf"),
        ({"differentiable": True}, ValueError, "Expected differentiable to be False, but got True: use torch.optim"),
        ({"master_weights": "half"}, ValueError, "Expected master_weights to be one of 'auto', 'full', 'split',"),
        ({"state_dtype": FP16}, ValueError, "Expected state_dtype to be one of torch.float32,"),
        ({"rounding": "up"}, ValueError, "Expected rounding to be one of 'auto', 'nearest', 'stochastic', but got"),
        ({"seed": -1}, ValueError, "Expected seed to be from 0 to 2^63 - 1, but got -1"),
        ({"seed": 2**63}, ValueError, "Expected seed to be from 0 to 2^63 - 1, but got 9223372036854775808"),
        ({"seed": 1.0}, TypeError, "Expected seed to be an integer from 0 to 2^63 - 1, but got 1.0, a float"),
        ({"max_grad_norm": 0.0}, ValueError, "Expected max_grad_norm to be a finite number above 0, but got 0.0"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        halfstep.AdamW([torch.nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    ("parameter", "options", "error", "message"),
    [
        (torch.ones(2, dtype=torch.float64), {}, TypeError, "Expected parameter 0 of group 0 to have dtype float32,"),
        (torch.ones(2, dtype=torch.complex64), {}, TypeError, "but got torch.complex64"),
        (torch.ones(2).half(), {"master_weights": "split"}, ValueError, "Expected master_weights to be 'full', 'auto'"),
        (torch.ones(2).to_sparse(), {}, TypeError, "to be dense, but got layout torch.sparse_coo"),
        (torch.ones(1).expand(3), {}, ValueError, "each element of parameter 0 of group 0 to have memory of its own,"),
    ],
)
def test_bad_parameters_are_refused_when_the_optimizer_is_created(
    parameter: Any, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        halfstep.AdamW([torch.nn.Parameter(parameter)], **options)


def test_a_bad_group_added_later_leaves_the_optimizer_as_it_was() -> None:
    optimizer = halfstep.AdamW([torch.nn.Parameter(torch.ones(2))])
    for group in (
        {"params": [torch.nn.Parameter(torch.ones(2).double())]},
        {"params": [torch.nn.Parameter(torch.ones(2))], "lr": -1.0},
    ):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda o, p: setattr(p, "grad", torch.ones(4).to_sparse()), "use torch.optim.SparseAdam"),
        (lambda o, p: o.param_groups[0].update(lr=float("nan")), "Invalid learning rate: nan"),
        (lambda o, p: o.param_groups[0]["weight_decay"].fill_(-1.0), "Invalid weight_decay value: -1.0"),
        (lambda o, p: o.param_groups[0]["betas"].__setitem__(0, 1.5), "Invalid beta parameter at index 0: 1.5"),
        (lambda o, p: o.state[p].update(exp_avg=torch.ones(4, device="meta")), "state 'exp_avg' of parameter 1"),
    ],
)
def test_errors_in_a_step_come_before_any_weight_is_touched(spoil: Any, message: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))]
    options: Any = {"betas": [0.9, 0.999], "weight_decay": torch.tensor(0.1)}
    optimizer = halfstep.AdamW(parameters, lr=0.1, **options)
    train(optimizer, range(1))
    before = copies_of(parameters)
    give_gradients(1, parameters)
    spoil(optimizer, parameters[1])
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        optimizer.step()
    assert same_bits(before, parameters) and optimizer.state[parameters[0]]["step"] == 1


# ------------------------------------------------------------------------------------------- what a step leaves behind


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_keeps_no_reference_to_gradients(max_grad_norm: Any) -> None:
    """What still held them would keep their memory through the next forward pass."""
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW(parameters, max_grad_norm=max_grad_norm)
    give_gradients(0, parameters)
    grads = [weakref.ref(p.grad) for p in parameters]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert not any(grad() is not None for grad in grads)


# ------------------------------------------------- steps that must change nothing, or nothing but the moments


@pytest.mark.parametrize("name", layouts.LAYOUTS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_no_weight_and_no_master_moves_at_an_lr_of_zero(name: str, decoupled: bool) -> None:
    dtype, options = layouts.LAYOUTS[name]
    parameters = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in (100, 1, 0, (40, 110))]
    optimizer = halfstep.Adam(parameters, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=decoupled, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.0
            before = held(optimizer, parameters, ["master"])
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    assert same(held(optimizer, parameters, ["master"]), before)
    # As in torch, the moments go on, and the step is counted.
    assert all(float(state["step"]) == 6 for state in optimizer.state.values())


@pytest.mark.parametrize("gradient", [1.0, 2.0**-149, -(2.0**-149), 1e-30, float("nan")])
@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_a_first_step_of_warm_up_with_gradients_is_torchs(gradient: float, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    states = []
    for cls in (halfstep.AdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(2))]
        optimizer = cls(parameters, lr=0.0)
        parameters[0].grad, parameters[1].grad = torch.zeros(5), torch.zeros(2)
        parameters[0].grad[3] = gradient
        with halfstep.backend(backend):
            optimizer.step()
        states.append([optimizer.state[p] for p in parameters])
    for ours, theirs in zip(*states, strict=True):
        assert float(ours["step"]) == float(theirs["step"]) == 1
        # At -2^-149 (1 - beta1) of it rounds to 0, whose sign may differ.
        assert torch.equal(ours["exp_avg"].isnan(), theirs["exp_avg"].isnan())
        assert torch.equal(ours["exp_avg"].nan_to_num(), theirs["exp_avg"].nan_to_num())


def test_an_overflow_found_by_a_scaler_still_skips_that_first_step() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = halfstep.AdamW([p], lr=0.0)
    p.grad = torch.ones(3)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(1)
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 0


def test_later_steps_with_gradients_of_zero_are_steps() -> None:
    for lr, steps in ((0.0, 2), (0.1, 3)):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = halfstep.AdamW([p], lr=lr)
        for _ in range(3):
            p.grad = torch.zeros(3)
            optimizer.step()
        assert float(optimizer.state[p]["step"]) == steps
