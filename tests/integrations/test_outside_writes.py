"""Weights that other code writes between steps: masters follow them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import some
from oracles import BF16, FP16, bits
from states import masters, same_bits, train
from tolerances import ROUNDOFF
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep.kernels.rounding import split_master

pytestmark = pytest.mark.sample(3)

LAYOUTS = some("split", "split24", "full", "fp16")
layouts = pytest.mark.parametrize("name", LAYOUTS)


def trained(name: str, steps: int = 5, **options: Any) -> tuple[Any, Any]:
    dtype, layout = LAYOUTS[name]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 7)).to(dtype)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-3, **layout, **options)
    train(optimizer, range(steps))
    return model, optimizer


def weights_of(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def other_weights(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(77)
    return {
        key: torch.randn(value.shape, generator=generator).to(value.dtype) for key, value in model.state_dict().items()
    }


def rounded(master: torch.Tensor, name: str) -> torch.Tensor:
    """The weight of a master. A split rounds ties away from zero; with 8 bits of remainder they are common."""
    return split_master(master)[0] if name.startswith("split") else master.to(LAYOUTS[name][0])


def copy_in(model: Any, new: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(new[key])


def load_in(model: Any, new: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(new)


def data_replaced(model: Any, new: dict[str, torch.Tensor]) -> None:
    for key, p in model.named_parameters():
        p.data = new[key].clone()


def through_detach(model: Any, new: dict[str, torch.Tensor]) -> None:
    for key, p in model.named_parameters():
        p.detach().copy_(new[key])


def as_vector(model: Any, new: dict[str, torch.Tensor]) -> None:
    vector = torch.cat([new[key].flatten() for key, _ in model.named_parameters()])
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


WRITERS = [copy_in, load_in, data_replaced, through_detach, as_vector]


# ----------------------------------------------------------------------------------------------------- written weights


@layouts
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("between", ["nothing", "frozen", "group added"])
def test_training_continues_from_written_weights(name: str, write: Callable[[Any, Any], None], between: str) -> None:
    """Whatever else happens before the next step, which an lr of 0 leaves without effect on weights and masters."""
    model, optimizer = trained(name)
    new = other_weights(model)
    write(model, new)
    assert rounded(masters(optimizer)[0], name).equal(new["0.weight"]), "the state is saved as written"
    write(model, new)
    if between == "frozen":
        model[0].weight.requires_grad_(False)
    if between == "group added":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for index, p in enumerate(model.parameters()):
        p.grad = None if index == 0 and between == "frozen" else torch.ones_like(p)
    optimizer.step()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    for p, written, master in zip(model.parameters(), new.values(), masters(optimizer), strict=False):
        assert torch.equal(p, written)
        assert torch.equal(rounded(master, name), written)
        if name.startswith("split"):
            assert (master - written.float()).abs().le(written.float().abs() * ROUNDOFF[BF16]).all()
        else:
            assert torch.equal(master, written.float())


@layouts
@pytest.mark.parametrize("write", WRITERS)
def test_the_same_weights_written_again_keep_every_bit_of_the_master(
    name: str, write: Callable[[Any, Any], None]
) -> None:
    """A broadcast, a weight swap that is undone, loading the model after the optimizer."""
    model, optimizer = trained(name)
    before = masters(optimizer)
    assert not all(torch.equal(m, p.float()) for m, p in zip(before, model.parameters(), strict=True))
    kept = copy.deepcopy(model.state_dict())
    write(model, other_weights(model))
    write(model, kept)
    assert same_bits(masters(optimizer), before)
    _, other = trained(name)
    for o in (optimizer, other):
        train(o, range(5, 8))
    assert same_bits(masters(optimizer), masters(other))


@layouts
def test_masters_are_kept_where_a_mask_leaves_weights_unchanged(name: str) -> None:
    """Pruning writes after every step. What it keeps is trained as if nothing had been written."""
    dtype, layout = LAYOUTS[name]
    ends = []
    for masked in (True, False):
        p = torch.nn.Parameter(torch.ones(100).to(dtype))
        optimizer = halfstep.AdamW([p], lr=1e-5, weight_decay=0.0, **layout)
        mask = torch.arange(100) < 50
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
            if masked:
                with torch.no_grad():
                    p.mul_(mask)
        ends.append((p.detach().clone(), masters(optimizer)[0]))
    (pruned, with_mask), (_, without) = ends
    assert (bits(with_mask[:50]) == bits(without[:50])).all()
    assert (with_mask[:50] < 1 - 50e-5).all()
    assert not pruned[50:].any() and (with_mask[50:].abs() < 2.0**-120).all()


@layouts
def test_detecting_written_weights_does_not_wait_for_the_device(name: str) -> None:
    """Nothing asks for a number on the host: neither the step, nor masters, nor refresh_master."""
    model, optimizer = trained(name)
    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    copy_in(model, other_weights(model))
    with Watch():
        train(optimizer, [5])
        copy_in(model, other_weights(model))
        dict(optimizer.masters())
        optimizer.refresh_master()
    waiting = {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero}
    assert asked and not waiting & set(asked)


@pytest.mark.parametrize(("name", "dtype"), [("full", FP16), ("fp16", BF16), ("full", BF16)])
def test_a_model_converted_to_another_dtype_keeps_the_masters(name: str, dtype: torch.dtype) -> None:
    """Conversion writes nothing new: the master still knows more than either."""
    model, optimizer = trained(name)
    before = masters(optimizer)
    model.to(dtype)
    assert same_bits(masters(optimizer), before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, [5])
    assert same_bits(masters(optimizer), before)
    assert all(torch.equal(p, m.to(dtype)) for p, m in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------------------------------------------ refresh_master


@layouts
@pytest.mark.parametrize("write", [*WRITERS, "data.copy_"])
def test_refresh_master_makes_masters_exactly_what_was_written(name: str, write: Any) -> None:
    model, optimizer = trained(name)
    new = other_weights(model)
    if write == "data.copy_":  # this write does not increment the version
        for key, p in model.named_parameters():
            p.data.copy_(new[key])
    else:
        write(model, new)
    optimizer.refresh_master()
    assert same_bits(masters(optimizer), [value.float() for value in new.values()])
    assert same_bits(weights_of(model), list(new.values()))
    # The continued run is that of an optimizer whose masters never knew more.
    fresh = copy.deepcopy(model)
    other = halfstep.AdamW(fresh.parameters(), lr=1e-3, **LAYOUTS[name][1])
    saved = optimizer.canonical_state_dict()
    for state in saved["state"].values():
        del state["master"]
    other.load_state_dict(saved)
    for o in (optimizer, other):
        train(o, range(5, 8))
    assert same_bits(masters(optimizer), masters(other))


@layouts
def test_refresh_master_of_some_parameters_leaves_the_others(name: str) -> None:
    model, optimizer = trained(name)
    before, visible = masters(optimizer), weights_of(model)
    optimizer.refresh_master(model[0].weight)
    optimizer.refresh_master(iter([model[1].bias]))
    after = masters(optimizer)
    for index in (0, 3):
        assert torch.equal(after[index], visible[index].float()) and not torch.equal(after[index], before[index])
    assert same_bits(after[1:3], before[1:3])


def test_refresh_master_without_state_or_master_does_nothing() -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3).bfloat16())
    optimizer = halfstep.AdamW([p, q])
    optimizer.refresh_master()
    assert not optimizer.state
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.refresh_master([p, q])
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}


def test_refresh_master_refuses_tensors_that_are_not_its_own() -> None:
    model, optimizer = trained("split")
    before = masters(optimizer)
    stranger = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(
        ValueError,
        match=r"Expected parameters\[1\] to be a parameter of this optimizer, but got another of shape \(2, 3\)",
    ):
        optimizer.refresh_master([model[0].weight, stranger])
    assert same_bits(masters(optimizer), before)
