"""Loading checkpoints of other optimizers in the formats that they save, and halfstep's into theirs."""

import copy
import itertools
from typing import Any

import pytest
import torch
from layouts import some
from oracles import BF16, FP32
from states import copies_of, masters, same_bits, same_runs, train
from tolerances import ADAM_AGAINST_TORCH

import halfstep
from halfstep.integrations.checkpoint import with_masters

LAYOUTS = some("split", "full", "fp16", "fp32")
layouts = pytest.mark.parametrize("name", LAYOUTS)


def model_of(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(BF16).to(dtype)


def trained(name: str, steps: int = 5) -> tuple[Any, Any]:
    """Two groups, of which each counts its steps; learning rates that are fp32 numbers."""
    dtype, layout = LAYOUTS[name]
    model = model_of(dtype)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 2**-9, "weight_decay": 0.1}]
    optimizer = halfstep.AdamW(groups, lr=2**-7, **layout)
    train(optimizer, range(steps))
    return model, optimizer


def as_apex(optimizer: Any, capturable: bool = False) -> dict[str, Any]:
    """What apex.optimizers.FusedAdam.state_dict gives: the count in the group, no masters."""
    saved = optimizer.state_dict()
    groups = []
    for group in saved["param_groups"]:
        step = int(saved["state"][group["params"][0]]["step"])
        lr = torch.tensor(group["lr"]) if capturable else group["lr"]
        known = {name: group[name] for name in ("betas", "eps", "weight_decay", "params")}
        groups.append(
            {
                **known,
                "lr": lr,
                "bias_correction": True,
                "step": torch.tensor([step], dtype=torch.int32) if capturable else step,
            }
        )
    moments = ("exp_avg", "exp_avg_sq")
    state = {index: {key: entry[key].clone() for key in moments} for index, entry in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def as_transformer_engine(optimizer: Any, remainders: bool = False, capturable: bool = False) -> dict[str, Any]:
    """What transformer_engine's FusedAdam(master_weights=True).state_dict gives, optionally store_param_remainders."""
    saved = as_apex(optimizer, capturable)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for (index, entry), p in zip(optimizer.canonical_state_dict()["state"].items(), parameters, strict=True):
        if "master" not in entry:
            master = torch.full_like(p, 123.0)  # beside fp32 parameters: made at the start and never updated
        elif remainders:
            # The lower 16 bits of the fp32 number; what is below one half rounds the upper ones up.
            master = torch.from_numpy(entry["master"].numpy().view("int16")[..., ::2].copy())
        else:
            master = entry["master"].clone()
        saved["state"][index]["master_param"] = master
    return saved


@pytest.mark.parametrize(
    ("name", "by"),
    [*itertools.product(LAYOUTS, ["apex", "TE"]), ("split", "TE, remainders"), ("full", "TE, remainders")],
)
@pytest.mark.parametrize("capturable", [False, True])
def test_checkpoints_with_masters_continue_with_every_bit(name: str, by: str, capturable: bool) -> None:
    model, optimizer = trained(name)
    fresh, other = trained(name, steps=0)
    if by == "apex":
        saved = as_apex(optimizer, capturable)
        kept = copy.deepcopy(saved)
        other.load_state_dict(with_masters(saved, iter(masters(optimizer))))
        assert same_bits(saved, kept), "what was given is not changed"
    else:
        saved = as_transformer_engine(optimizer, "remainders" in by, capturable)
        if "remainders" in by:
            assert {entry["master_param"].dtype for entry in saved["state"].values()} == {torch.int16}
        fresh.load_state_dict(model.state_dict())
        other.load_state_dict(saved)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)
    assert same_runs(optimizer, other)
    for o in (optimizer, other):
        train(o, range(5, 10))
    assert same_runs(optimizer, other)
    assert [float(group["lr"]) for group in other.param_groups] == [2**-7, 2**-9]
    for group in other.state_dict()["param_groups"]:
        assert "step" not in group and "bias_correction" not in group


@layouts
def test_apex_checkpoint_without_masters_starts_from_the_weights(name: str) -> None:
    model, optimizer = trained(name)
    fresh, other = trained(name, steps=0)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(as_apex(optimizer))
    for p, entry in zip(fresh.parameters(), other.canonical_state_dict()["state"].values(), strict=True):
        assert torch.equal(entry.get("master", p.detach()), p.detach().float())
        assert float(entry["step"]) == 5
    train(other, [5])


def test_parameters_without_state_keep_the_masters_given() -> None:
    optimizer = trained("split")[1]
    saved = as_apex(optimizer)
    exact = torch.randn(3)
    del saved["state"][3]
    fresh, other = trained("split", steps=0)
    other.load_state_dict(with_masters(saved, [*masters(optimizer)[:3], exact]))
    entry = other.canonical_state_dict()["state"][3]
    assert torch.equal(entry["master"], exact) and float(entry["step"]) == 0 and not entry["exp_avg"].any()
    assert torch.equal(fresh[1].bias.detach(), halfstep.cast(exact, BF16))


@layouts
def test_unknown_entries_are_kept(name: str) -> None:
    """As torch does, which lets others keep numbers of their own in the state."""
    optimizer = trained(name)[1]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["whole run"] = {"master": "Ada"}
    saved["state"][99] = {"master": torch.ones(2)}
    saved["state"][0]["mine"] = torch.ones(3)
    other = trained(name, steps=0)[1]
    other.load_state_dict(saved)
    again = other.canonical_state_dict()["state"]
    assert again["whole run"] == {"master": "Ada"} and torch.equal(again[99]["master"], torch.ones(2))
    assert torch.equal(again[0]["mine"], torch.ones(3))


def test_transformer_engine_leaves_none_where_it_keeps_nothing() -> None:
    model, optimizer = trained("split")
    saved = as_apex(optimizer)
    for entry in saved["state"].values():
        entry["master_param"] = None
    fresh, other = trained("split", steps=0)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    assert torch.equal(other.canonical_state_dict()["state"][0]["master"], model[0].weight.detach().float())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}, {}])
@layouts
def test_state_loads_into_torchs_adamw_and_back(name: str, options: dict[str, Any]) -> None:
    """torch's then trains fp32 parameters from the masters; going back, ours has torch's moments and weights."""
    dtype, layout = LAYOUTS[name]
    amsgrad = options.get("amsgrad", False)
    model = model_of(dtype)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, **layout, amsgrad=amsgrad)
    train(optimizer, range(5))
    saved = copy.deepcopy(optimizer.canonical_state_dict())
    theirs = model_of(FP32)
    with torch.no_grad():
        for p, entry, own in zip(theirs.parameters(), saved["state"].values(), model.parameters(), strict=True):
            p.copy_(entry.get("master", own))
    torchs = torch.optim.AdamW(theirs.parameters(), lr=5.0, **options)
    torchs.load_state_dict(saved)
    assert torchs.param_groups[0]["lr"] == 1e-2
    for entry, p in zip(saved["state"].values(), theirs.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
            assert torch.equal(torchs.state[p][key], entry[key])
    for o in (optimizer, torchs):
        train(o, range(5, 10))
    ends = optimizer.canonical_state_dict()["state"]
    for p, own, entry in zip(theirs.parameters(), model.parameters(), ends.values(), strict=True):
        torch.testing.assert_close(entry.get("master", own.detach()), p.detach(), **ADAM_AGAINST_TORCH)
    # And back: torch keeps the masters that it does not know, as they were, so they have to go.
    returned = torchs.state_dict()
    for entry in returned["state"].values():
        entry.pop("master", None)
    again = model_of(FP32)
    again.load_state_dict(theirs.state_dict())
    back = halfstep.AdamW(again.parameters(), amsgrad=amsgrad)
    back.load_state_dict(returned)
    for p, q in zip(theirs.parameters(), again.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(torchs.state[p][key], back.state[q][key])
        assert float(torchs.state[p]["step"]) == float(back.state[q]["step"])


# --------------------------------------------------------------------------------------------------------------- errors


def unchanged_by(load: Any, model: Any, optimizer: Any) -> str:
    before, weights = copy.deepcopy(optimizer.state_dict()), copies_of(model.parameters())
    with pytest.raises(ValueError) as error:
        load()
    assert same_bits(optimizer.state_dict(), before) and same_bits(list(model.parameters()), weights)
    return str(error.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s["param_groups"][1].pop("step"), "state of parameter 2 lacks 'step'; it has 'exp_avg',"),
        (lambda s: s["param_groups"][0].update(bias_correction=False), "Expected bias_correction to be True in group"),
        (
            lambda s: s["state"][1].update(master_param=torch.zeros(4, dtype=torch.int16)),
            "Expected 'master_remainder' in the state of parameter 1 to have shape (5,) and dtype torch.int16 or "
            "torch.int8, but got (4,) torch.int16: the checkpoint is of another model, or its parameters are in "
            "another order",
        ),
        (
            lambda s: s["state"][1].update(master_param=torch.zeros(5, dtype=torch.int32)),
            "Expected 'master' in the state of parameter 1 to have a floating-point dtype, but got torch.int32",
        ),
        (lambda s: s["state"][0].pop("exp_avg_sq"), "state of parameter 0 lacks 'exp_avg_sq'"),
        (lambda s: s["param_groups"][1].pop("params"), "'step'; it lacks 'params'"),
        (
            lambda s: s["param_groups"][0].update(params=[2, 3]) or s["param_groups"][1].update(params=[0, 1]),
            "to have shape",
        ),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(spoil: Any, message: str) -> None:
    model, optimizer = trained("split")
    saved = as_transformer_engine(optimizer, remainders=True)
    spoil(saved)
    assert message in unchanged_by(lambda: optimizer.load_state_dict(saved), model, optimizer)


def test_remainders_for_fp16_weights_are_refused() -> None:
    saved = as_transformer_engine(trained("split")[1], remainders=True)
    model, optimizer = trained("fp16")
    message = unchanged_by(lambda: optimizer.load_state_dict(saved), model, optimizer)
    assert (
        "Expected a parameter with numbers of bfloat16 for 'master_remainder' in the state of parameter 0, which "
        "completes these, but got others in torch.float16: load the model first, in bfloat16 or float32, and convert "
        "it afterwards; or save canonical_state_dict()"
    ) in message


def test_parameters_of_the_same_names_in_another_order_are_refused() -> None:
    """Both have the same shapes, so that nothing but the names tells."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "abc"})
    named = dict(model.named_parameters())
    optimizer = halfstep.AdamW(named.items())
    train(optimizer, range(2))
    other = halfstep.AdamW([(name, named[name]) for name in ("a.weight", "c.weight", "b.weight")])
    message = unchanged_by(lambda: other.load_state_dict(optimizer.state_dict()), model, other)
    assert "parameter 1 is 'b.weight' there and 'c.weight' here: create the optimizer" in message
    # Other names are no other order: a wrapper puts its own before them.
    wrapped = halfstep.AdamW([(f"module.{name}", p) for name, p in named.items()])
    wrapped.load_state_dict(optimizer.state_dict())
    assert same_runs(wrapped, optimizer)


@pytest.mark.parametrize(
    ("masters", "message"),
    [
        ([torch.ones(5, 7)], "Expected masters to have 4 tensors, one for each parameter in the checkpoint"),
        ([torch.ones(5, 7), 3, None, None], "Expected masters[1] to be a floating-point tensor, but got int"),
        ([torch.ones(5, 7).int()] * 4, "Expected masters[0] to be a floating-point tensor, but got torch.int32"),
    ],
)
def test_invalid_masters_are_refused(masters: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        with_masters(as_apex(trained("split")[1]), masters)
    assert message in str(error.value)
