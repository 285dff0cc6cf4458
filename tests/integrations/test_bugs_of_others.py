"""Bugs of other optimizers and scalers, each shown where it is, and that ours does not have it; see docs/comparison.md.

A bug must show in the version that it was found in. In another version its absence skips the test, with a note that the
table has to be corrected; ours is tested either way.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import halfstep

BF16 = torch.bfloat16
FOUND_IN = {"torch": "2.13", "torch-optimi": "0.3.3", "torchao": "0.18.0"}


def must_fail(fails: bool, peer: str, what: str) -> None:
    """Their bug, after ours has been tested: required in the version it was found in."""
    installed = importlib.metadata.version(peer)
    if not fails and not installed.startswith(FOUND_IN[peer]):
        pytest.skip(f"{peer} {installed} no longer has this bug ({what}): correct docs/comparison.md")
    assert fails, f"{peer} {installed} was found to have this bug and does not show it: {what}"


def peer(module: str) -> Any:
    return pytest.importorskip(module, exc_type=ImportError)


def parameter(value: float = 1.0, dtype: torch.dtype = torch.float32, size: int = 4) -> Any:
    return torch.nn.Parameter(torch.full((size,), value, dtype=dtype))


# ----------------------------------------------------------------------------------------------------- found_inf, scale


def test_a_found_inf_of_two_devices_is_an_overflow() -> None:
    """A scaler that sums the flags of two devices says 2; torch's kernel skips at 1 only."""
    results = []
    for cls, options in ((halfstep.AdamW, {}), (torch.optim.AdamW, {"fused": True})):
        p = parameter()
        optimizer: Any = cls([p], **options)
        p.grad = torch.full_like(p, float("inf"))
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(2.0)
        optimizer.step()
        results.append((p.detach().clone(), float(optimizer.state[p]["step"])))
    (ours, our_step), (theirs, their_step) = results
    assert torch.equal(ours, torch.ones(4)) and our_step == 0
    must_fail(bool(theirs.isnan().all()) and their_step == -1, "torch", "NaN parameters and step -1 at found_inf=2")


def test_fp16_gradients_are_unscaled() -> None:
    def unscaled(scaler: Any, make: Any) -> torch.Tensor:
        p = parameter(dtype=torch.float16)
        optimizer = make([p])
        scaler.scale(p.float().sum()).backward()
        scaler.unscale_(optimizer)
        return p.grad

    assert torch.equal(unscaled(halfstep.GradScaler("cpu", init_scale=8.0), halfstep.AdamW), torch.ones(4).half())
    try:
        unscaled(torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.AdamW)
        refused = False
    except ValueError as error:
        refused = "Attempting to unscale FP16 gradients" in str(error)
    must_fail(refused, "torch", "unscale_ refuses fp16 gradients")


def test_a_scale_that_overflowed_200_times_is_still_one() -> None:
    """After 166 overflows torch's scale is 0; the next finite gradient is then multiplied by 1/0 after the check."""

    def train(scaler: Any, optimizer: Any, p: Any) -> torch.Tensor:
        for step in range(201):
            optimizer.zero_grad()
            scaler.scale(p.sum() * (float("inf") if step < 200 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return p.detach()

    p, q = parameter(), parameter()
    scaler = halfstep.GradScaler("cpu")
    ours = train(scaler, halfstep.AdamW([p], lr=0.1), p)
    assert scaler.get_scale() > 0
    assert ours.isfinite().all() and (ours < 1).all()
    theirs = train(torch.amp.GradScaler("cpu"), torch.optim.AdamW([q], lr=0.1), q)
    must_fail(bool(theirs.isnan().all()), "torch", "NaN parameters once the scale is 0")


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_loading_keeps_fp32_state_under_bf16_parameters() -> None:
    exact = torch.tensor([1.00012, -3.14159, 1e-30, 7.0])
    saved = {"step": torch.tensor(3.0), "exp_avg": exact, "exp_avg_sq": exact.abs(), "master": exact}
    loaded = []
    for cls in (halfstep.AdamW, torch.optim.AdamW):
        optimizer = cls([parameter(dtype=BF16)])
        optimizer.load_state_dict({"state": {0: dict(saved)}, "param_groups": optimizer.state_dict()["param_groups"]})
        ours = isinstance(optimizer, halfstep.AdamW)
        loaded.append((optimizer.canonical_state_dict() if ours else optimizer.state_dict())["state"][0])
    ours, theirs = loaded
    assert all(value.dtype == torch.float32 and torch.equal(value, saved[key]) for key, value in ours.items())
    lost = [key for key in ("exp_avg", "exp_avg_sq", "master") if theirs[key].dtype == BF16]
    must_fail(len(lost) == 3, "torch", "Optimizer.load_state_dict casts the state to the parameter's dtype")


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": False}, {"eps": 0.0}])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)])
def test_asking_for_the_state_of_a_fresh_optimizer_takes_no_step(options: dict[str, Any], lr: Any) -> None:
    """torch.distributed.checkpoint takes a step with lr = 0 and gradients of 0 to find out what state there is."""

    def after_asking(cls: Any, **options: Any) -> tuple[Any, Any, Any]:
        model = torch.nn.Linear(3, 3)
        optimizer = cls(model.parameters(), lr=lr, **options)
        before = model.weight.detach().clone()
        asked: Any = get_optimizer_state_dict(model, optimizer)
        return asked["state"]["weight"], before, model.weight.detach()

    for dtype in (torch.float32, BF16, torch.float16):
        model = torch.nn.Linear(3, 3).to(dtype)
        before = model.weight.detach().clone()
        optimizer = halfstep.Adam(model.parameters(), lr=lr, **{"decoupled_weight_decay": True, **options})
        asked: Any = get_optimizer_state_dict(model, optimizer)
        state = asked["state"]["weight"]
        assert torch.equal(model.weight, before)
        assert float(state["step"]) == 0
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
        assert torch.equal(state.get("master", before.float()), before.float())
        # And the first real step is a first step.
        fresh = torch.nn.Linear(3, 3).to(dtype)
        fresh.load_state_dict(model.state_dict())
        other = halfstep.Adam(fresh.parameters(), lr=lr, **{"decoupled_weight_decay": True, **options})
        for m, o in ((model, optimizer), (fresh, other)):
            m.weight.grad = torch.ones_like(m.weight)
            o.step()
        assert torch.equal(model.weight, fresh.weight)
        assert float(optimizer.state[model.weight]["step"]) == 1
    theirs, before, now = after_asking(torch.optim.AdamW)
    must_fail(float(theirs["step"]) == 1, "torch", "a fresh optimizer is saved with step 1")
    if options.get("eps") == 0.0:
        _, _, now = after_asking(torch.optim.AdamW, **options)
        must_fail(bool(now.isnan().all()), "torch", "NaN parameters with eps 0 when the state is asked for")


def test_a_state_of_ours_is_never_half_there() -> None:
    """State that begins with a master alone makes torch believe that the rest is there too."""
    model = torch.nn.Linear(3, 3).to(BF16)
    theirs: Any = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        theirs.state[p]["master"] = p.detach().float()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = halfstep.AdamW(model.parameters())
    # The same beginning, as a loader of somebody else's may leave it.
    for p in model.parameters():
        optimizer.state[p]["master"] = p.detach().float()
    optimizer.step()
    for state in optimizer.canonical_state_dict()["state"].values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master"}
    try:
        theirs.step()
        missing = False
    except KeyError as error:
        missing = error.args[0] in ("exp_avg", "step")
    must_fail(missing, "torch", "KeyError at a state that holds a master only")


# -------------------------------------------------------------------------------------------------------------- numbers


def test_bf16_weight_decay_decays() -> None:
    def decayed(make: Any) -> torch.Tensor:
        p = parameter(2.0, BF16, 100)
        optimizer = make([p])
        for _ in range(500):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        return p.detach().float() / 2

    ours = decayed(lambda ps: halfstep.AdamW(ps, lr=1e-2, weight_decay=0.1))
    # 500 steps of 1 - 1e-3, and bf16's half ulp.
    assert (ours / 0.999**500 - 1).abs().max() < 2**-8
    optimi = peer("optimi")
    theirs = decayed(lambda ps: optimi.AdamW(ps, lr=1e-2, weight_decay=0.1, kahan_sum=True, triton=False))
    must_fail(bool((theirs == 1).all()), "torch-optimi", "weight decay of bf16 weights with Kahan sums does nothing")


def test_stochastic_rounding_keeps_nan() -> None:
    # The NaN that NVIDIA GPUs make, and one with the other sign.
    nans = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).repeat(128).view(torch.float32)
    assert halfstep.cast(nans, BF16, rounding="stochastic", seed=0).isnan().all()
    p = torch.nn.Parameter(torch.ones(256).to(BF16))
    optimizer = halfstep.AdamW([p], master_weights=None, state_dtype=BF16, rounding="stochastic")
    p.grad = nans.to(BF16)
    optimizer.step()
    assert p.isnan().all() and optimizer.state[p]["exp_avg"].isnan().all()
    utilities = peer("torchao.optim.quant_utils")
    torch.manual_seed(0)
    theirs = utilities._fp32_to_bf16_sr(nans[::2].contiguous())
    must_fail(bool((theirs == 0).all()), "torchao", "stochastic rounding turns NaN into -0")
