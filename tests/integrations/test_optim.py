"""AdamW and Adam as a user of torch.optim meets them."""

from __future__ import annotations

import collections
import copy
import gc
import inspect
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from states import through_a_file
from tolerances import ADAM_AGAINST_TORCH

import halfstep
from halfstep.kernels.rounding import round_to_24_bits

PAIRS = [(halfstep.AdamW, torch.optim.AdamW), (halfstep.Adam, torch.optim.Adam)]
LAYOUTS = {
    "fp32": (torch.float32, "auto"),
    "bf16 split": (torch.bfloat16, "split"),
    "bf16 split24": (torch.bfloat16, "split24"),
    "bf16 full": (torch.bfloat16, "full"),
    "fp16 full": (torch.float16, "full"),
}
EXACT = {name: layout for name, layout in LAYOUTS.items() if name != "bf16 split24"}


def parameters_of(
    dtype: torch.dtype, seed: int = 0, shapes: Any = ((3, 5), (64,), (1,), (33, 17), (0,), ())
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    # The start values are bf16 numbers with 8 significant bits, so that every dtype starts from the same.
    return [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16().to(dtype)) for s in shapes]


def give_gradients(parameters: list[Any], step: int, scale: float = 1.0) -> None:
    """The same gradients for every dtype: 8 significant bits."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator).bfloat16().float() * scale).to(p.dtype)


def train(optimizer: Any, parameters: list[Any], steps: Any) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def masters(optimizer: Any, parameters: list[Any]) -> list[torch.Tensor]:
    state = optimizer.canonical_state_dict()["state"]
    return [state[i].get("master", p.detach()).float().clone() for i, p in enumerate(parameters)]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype
    as_integers = {4: torch.int32, 2: torch.int16, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.contiguous().view(as_integers), right.contiguous().view(as_integers))


def assert_same_state(left: Any, right: Any) -> None:
    a, b = left.canonical_state_dict()["state"], right.canonical_state_dict()["state"]
    assert a.keys() == b.keys()
    for index in a:
        assert a[index].keys() == b[index].keys()
        for key in a[index]:
            assert same_bits(a[index][key], b[index][key]), (index, key)


# ------------------------------------------------------------------------------------------------------ torch's cases


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


def test_small_updates_reach_the_master_and_are_lost_without_one() -> None:
    kept = torch.nn.Parameter(torch.ones(100).bfloat16())
    lost = torch.nn.Parameter(torch.ones(100).bfloat16())
    torchs = torch.nn.Parameter(torch.ones(100).bfloat16())
    optimizers = [
        halfstep.AdamW([kept], lr=1e-4, weight_decay=0),
        halfstep.AdamW([lost], lr=1e-4, weight_decay=0, master_weights=None),
        torch.optim.AdamW([torchs], lr=1e-4, weight_decay=0),
    ]
    for _ in range(300):
        for p, optimizer in zip((kept, lost, torchs), optimizers, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert (lost == 1).all()
    assert (torchs == 1).all()
    assert ((kept.float() - 0.97).abs() < 0.004).all()  # one bf16 ulp at 1


def test_fp16_bf16_and_fp32_parameters_in_one_optimizer_with_groups_of_their_own_options() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    options = [
        {"lr": 1e-2},
        {"lr": 1e-3, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"amsgrad": True, "maximize": True},
    ]
    together = [parameters_of(dtype, seed) for seed, dtype in enumerate(dtypes)]
    joint = halfstep.AdamW([{"params": ps, **o} for ps, o in zip(together, options, strict=True)])
    alone = [parameters_of(dtype, seed) for seed, dtype in enumerate(dtypes)]
    single = [halfstep.AdamW(ps, **o) for ps, o in zip(alone, options, strict=True)]
    for step in range(10):
        for ps, qs, optimizer in zip(together, alone, single, strict=True):
            give_gradients(ps, step)
            give_gradients(qs, step)
            optimizer.step()
        joint.step()
    for ps, qs in zip(together, alone, strict=True):
        for p, q in zip(ps, qs, strict=True):
            assert same_bits(p.detach(), q.detach())


@pytest.mark.parametrize(
    "kind", ["transposed", "channels_last", "gaps", "misaligned", "gradient in another order", "expanded gradient"]
)
def test_any_strides_give_the_bits_of_contiguous_ones(kind: str) -> None:
    value = torch.randn(2, 6, 4, 10)
    make = {
        "transposed": lambda v: v.transpose(0, 3).contiguous().transpose(0, 3),
        "channels_last": lambda v: v.to(memory_format=torch.channels_last),
        "gaps": lambda v: torch.cat([v, v], dim=3)[..., :10],
        "misaligned": lambda v: torch.cat([v.flatten()[:1], v.flatten()])[1:].view(v.shape),
    }.get(kind, lambda v: v.clone())
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.nn.Parameter(value.to(dtype).clone())
        other = torch.nn.Parameter(make(value.to(dtype)))
        assert torch.equal(plain, other)
        optimizers = [halfstep.AdamW([p], lr=1e-2) for p in (plain, other)]
        for step in range(4):
            grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            if kind == "expanded gradient":
                grad = grad[..., :1].expand(value.shape)
            plain.grad = grad.contiguous()
            other.grad = grad.contiguous(memory_format=torch.channels_last) if kind.startswith("gradient") else grad
            for optimizer in optimizers:
                optimizer.step()
        assert same_bits(plain.detach(), other.detach().contiguous()), dtype
        assert_same_state(*optimizers)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_another_dtype_than_the_parameter(name: str, grad_dtype: torch.dtype) -> None:
    """The masters have the bits of fp32 parameters with the same gradients in fp32, amsgrad included."""
    results = []
    for dtype, master, of in ((*LAYOUTS[name], grad_dtype), (torch.float32, "auto", torch.float32)):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, amsgrad=True, master_weights=master)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in parameters:
                p.grad_dtype = None
                p.grad = torch.randn(p.shape, generator=generator).to(grad_dtype).to(of)
            optimizer.step()
        results.append(masters(optimizer, parameters))
    assert all(map(same_bits, *results))


# ------------------------------------------------------------------------------------------------------- as in a loop


@pytest.mark.parametrize("value", [0.05, torch.tensor(0.05), torch.tensor([0.05], dtype=torch.float64)])
def test_lr_may_be_a_tensor_and_change_in_place(value: Any) -> None:
    p, q = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    mine = halfstep.AdamW([p], lr=value)
    plain = halfstep.AdamW([q], lr=float(value))
    for factor in (1.0, 0.5):
        if isinstance(value, torch.Tensor):
            mine.param_groups[0]["lr"].mul_(factor)
        else:
            mine.param_groups[0]["lr"] *= factor
        plain.param_groups[0]["lr"] *= factor
        p.grad, q.grad = torch.ones(5), torch.ones(5)
        mine.step()
        plain.step()
    torch.testing.assert_close(p, q, rtol=0, atol=2**-24)


def test_a_step_changes_the_version_so_that_autograd_notices() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = halfstep.AdamW([p])
    output = (p * p).sum()
    p.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("how", ["cleared", "replaced", "one removed"])
def test_a_state_that_was_cleared_starts_anew(how: str) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, master_weights="full")
    train(optimizer, parameters, range(3))
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    if how == "cleared":
        optimizer.state.clear()
    elif how == "replaced":
        optimizer.state = collections.defaultdict(dict)
    else:
        del optimizer.state[parameters[1]]
    other = halfstep.AdamW(fresh, lr=1e-2, master_weights="full")
    train(optimizer, parameters, range(3, 5))
    train(other, fresh, range(3, 5))
    for index in range(len(parameters)) if how != "one removed" else [1]:
        mine, theirs = optimizer.canonical_state_dict()["state"][index], other.canonical_state_dict()["state"][index]
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[key], theirs[key]) for key in mine)


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
    assert_same_state(mine, other)


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("after", [torch.float32, torch.bfloat16, torch.float16])
def test_model_converted_to_another_dtype_between_steps(before: torch.dtype, after: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.ones(100, dtype=before))
    optimizer = halfstep.AdamW([p], lr=1e-2)
    for dtype in (before, after):
        p.data = p.data.to(dtype)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        state = optimizer.canonical_state_dict()["state"][0]
        assert ("master" in state) == (dtype != torch.float32)
        assert torch.equal(state.get("master", p.detach()).to(p.dtype), p.detach())
    assert float(state["step"]) == 6


def test_clipping_inside_the_step_is_torchs_clipping_before_it() -> None:
    for norm in (0.5, 1e6):
        ours, theirs = parameters_of(torch.float32), parameters_of(torch.float32)
        mine, torchs = halfstep.AdamW(ours, max_grad_norm=norm), torch.optim.AdamW(theirs)
        assert mine.grad_norm is None
        for step in range(5):
            give_gradients(ours, step)
            give_gradients(theirs, step)
            kept = [p.grad.clone() for p in ours]
            expected = torch.nn.utils.clip_grad_norm_(theirs, norm)
            mine.step()
            torchs.step()
            torch.testing.assert_close(mine.grad_norm, expected, rtol=2**-20, atol=0)
            assert all(torch.equal(p.grad, g) for p, g in zip(ours, kept, strict=True))
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, **ADAM_AGAINST_TORCH)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_every_backend_gives_the_bits_of_the_default(backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        states = []
        for name in ("auto", backend):
            parameters = parameters_of(dtype)
            with halfstep.backend(name):
                optimizer = halfstep.AdamW(parameters, lr=1e-2, max_grad_norm=1.0)
                train(optimizer, parameters, range(3))
            states.append(optimizer)
        assert_same_state(*states)


# -------------------------------------------------------------------------------------------------------- checkpoints


def save_load_continue(source: str, target: str, form: str) -> None:
    """Checkpoints with a master: the continued run has the masters of the uninterrupted one."""
    dtype, master = LAYOUTS[source]
    parameters = parameters_of(dtype)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, amsgrad=True, master_weights=master)
    train(optimizer, parameters, range(10))
    saved = through_a_file(getattr(optimizer, form)())
    weights = [p.detach().clone() for p in parameters]
    train(optimizer, parameters, range(10, 20))
    dtype, master = LAYOUTS[target]
    fresh = parameters_of(dtype, seed=99)
    other = halfstep.AdamW(fresh, lr=5.0, amsgrad=True, master_weights=master)
    for p, weight in zip(fresh, weights, strict=True) if form == "state_dict" else ():
        p.data.copy_(weight)
    other.load_state_dict(saved)
    train(other, fresh, range(10, 20))
    for left, right in zip(masters(optimizer, parameters), masters(other, fresh), strict=True):
        assert same_bits(left, right)
    for mine, theirs in zip(
        optimizer.canonical_state_dict()["state"].values(), other.canonical_state_dict()["state"].values(), strict=True
    ):
        for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            assert same_bits(mine[key], theirs[key])


@pytest.mark.parametrize(("source", "target"), list(itertools.product([n for n in EXACT if n != "fp32"], EXACT)))
def test_save_load_continue_keeps_every_bit_in_any_layout(source: str, target: str) -> None:
    save_load_continue(source, target, "canonical_state_dict")


@pytest.mark.parametrize("other", ["bf16 split", "bf16 split24", "bf16 full"])
def test_a_master_of_24_bits_is_saved_and_loaded_as_it_is(other: str) -> None:
    """Into an exact master and back. From an exact master it is the nearest of 24 bits."""
    parameters = parameters_of(torch.bfloat16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, master_weights="split24", rounding="stochastic")
    train(optimizer, parameters, range(10))
    saved = through_a_file(optimizer.canonical_state_dict())
    assert all((one["master"].view(torch.int32) & 0xFF == 0).all() for one in saved["state"].values())
    dtype, master = LAYOUTS[other]
    between = parameters_of(dtype, seed=98)
    there = halfstep.AdamW(between, master_weights=master)
    there.load_state_dict(saved)
    assert all(map(same_bits, masters(optimizer, parameters), masters(there, between)))
    back = parameters_of(torch.bfloat16, seed=99)
    again = halfstep.AdamW(back, master_weights="split24", rounding="stochastic")
    again.load_state_dict(through_a_file(there.canonical_state_dict()))
    for run, ps in ((optimizer, parameters), (again, back)):
        train(run, ps, range(10, 20))
    assert all(map(same_bits, masters(optimizer, parameters), masters(again, back)))
    train(there, between, range(10, 12))
    again.load_state_dict(through_a_file(there.canonical_state_dict()))
    for near, exact in zip(masters(again, back), masters(there, between), strict=True):
        assert torch.equal(near, round_to_24_bits(exact))


def test_a_master_of_24_bits_follows_where_bf16_stands_still() -> None:
    """500 steps of 2^-20 of the weight: a unit of 24 bits is 2^-15, one of bf16 2^-7."""
    weight = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = halfstep.AdamW(
        [weight], lr=2.0**-20, eps=0.0, weight_decay=0.0, master_weights="split24", rounding="stochastic"
    )
    for _ in range(500):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    moved = 1.0 - optimizer.masters()[weight].double()
    # Each step rounds, down with probability 1/16, by a unit of 2^-16 below 1 (2^-15 from 1 on).
    deviation = (500 * 2.0**-16 * 2.0**-20) ** 0.5
    assert abs(moved.mean().item() - 500 * 2.0**-20) < 5 * deviation / 20_000**0.5
    assert moved.std().item() < 1.5 * deviation


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_torchs_checkpoints_load_here_and_ours_there(ours: Any, theirs: Any, fused: bool) -> None:
    parameters = parameters_of(torch.float32)
    optimizer = theirs(parameters, lr=1e-2, amsgrad=True, fused=fused)
    train(optimizer, parameters, range(5))
    here = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    mine = ours(here, amsgrad=True)
    mine.load_state_dict(through_a_file(optimizer.state_dict()))
    assert mine.param_groups[0]["lr"] == 1e-2
    there = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    back = theirs(there, amsgrad=True)
    back.load_state_dict(through_a_file(mine.state_dict()))
    for run, ps in ((optimizer, parameters), (mine, here), (back, there)):
        train(run, ps, range(5, 10))
    for p, q, r in zip(parameters, here, there, strict=True):
        torch.testing.assert_close(q, p, **ADAM_AGAINST_TORCH)
        torch.testing.assert_close(r, p, **ADAM_AGAINST_TORCH)


def test_fp32_checkpoint_of_torch_continues_under_bf16_parameters_with_fp32_moments() -> None:
    parameters = parameters_of(torch.float32)
    optimizer = torch.optim.AdamW(parameters)
    train(optimizer, parameters, range(3))
    low = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters]
    mine = halfstep.AdamW(low)
    mine.load_state_dict(optimizer.state_dict())
    for p, q in zip(parameters, low, strict=True):
        assert same_bits(optimizer.state[p]["exp_avg_sq"], mine.state[q]["exp_avg_sq"])
    train(mine, low, range(3, 5))


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
def test_loading_what_does_not_fit_says_so_and_changes_nothing(spoil: Any, message: str) -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2)
    train(optimizer, parameters, range(3))
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
        ({"state_dtype": torch.float16}, ValueError, "Expected state_dtype to be one of torch.float32,"),
        ({"rounding": "up"}, ValueError, "Expected rounding to be one of 'auto', 'nearest', 'stochastic', but got"),
        ({"seed": -1}, ValueError, "Expected seed to be from 0 to 2^63 - 1, but got -1"),
        ({"seed": 2**63}, ValueError, "Expected seed to be from 0 to 2^63 - 1, but got 9223372036854775808"),
        ({"seed": 1.0}, TypeError, "Expected seed to be an integer from 0 to 2^63 - 1, but got 1.0, a float"),
        ({"max_grad_norm": 0.0}, ValueError, "Invalid max_grad_norm value: 0.0"),
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
def test_bad_parameters_are_refused_when_the_optimizer_is_made(
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


@pytest.mark.parametrize("spoil", ["sparse", "lr", "state on another device"])
def test_errors_in_a_step_come_before_any_weight_is_touched(spoil: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))]
    optimizer = halfstep.AdamW(parameters, lr=0.1)
    train(optimizer, parameters, range(1))
    weights = [p.detach().clone() for p in parameters]
    give_gradients(parameters, 1)
    if spoil == "sparse":
        parameters[1].grad = torch.ones(4).to_sparse()
        expected, message = (
            RuntimeError,
            "to have a dense gradient, but got layout torch.sparse_coo: use torch.optim.SparseAdam",
        )
    elif spoil == "lr":
        optimizer.param_groups[0]["lr"] = float("nan")
        expected, message = ValueError, "Invalid learning rate: nan"
    else:
        optimizer.state[parameters[1]]["exp_avg"] = torch.ones(4, device="meta")
        expected, message = ValueError, "state 'exp_avg' of parameter 1"
    with pytest.raises(expected, match=re.escape(message)):
        optimizer.step()
    assert all(torch.equal(p.detach(), w) for p, w in zip(parameters, weights, strict=True))
    assert float(optimizer.state[parameters[0]]["step"]) == 1


# ------------------------------------------------------------------------------------------- what a step leaves behind


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradients_are_let_go_after_a_step(max_grad_norm: Any) -> None:
    """What still held them would keep their memory through the next forward pass."""
    parameters = parameters_of(torch.bfloat16)
    optimizer = halfstep.AdamW(parameters, max_grad_norm=max_grad_norm)
    give_gradients(parameters, 0)
    grads = [weakref.ref(p.grad) for p in parameters]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert not any(grad() is not None for grad in grads)


@pytest.mark.parametrize("name", ["betas", "lr"])
def test_an_option_made_wrong_between_steps_is_refused(name: str) -> None:
    parameters = parameters_of(torch.float32)
    betas = [0.9, 0.999]
    optimizer = halfstep.AdamW(parameters, betas=betas, lr=torch.tensor(0.1))  # type: ignore[arg-type]
    train(optimizer, parameters, [0, 1])
    if name == "betas":
        betas[0] = 1.5
    else:
        optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(ValueError, match="Invalid"):
        train(optimizer, parameters, [2])
