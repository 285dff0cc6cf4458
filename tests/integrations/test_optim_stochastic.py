"""AdamW with stochastic rounding: the same bits for any grouping, sharding, order and restart."""

import copy
import itertools
from functools import partial
from typing import Any

import layouts
import pytest
import states
import torch
from oracles import bits
from states import copies_of, held, same, train

import halfstep

pytestmark = pytest.mark.sample(3)

BF16 = torch.bfloat16
LEAST = {"master_weights": None, "state_dtype": BF16, "rounding": "stochastic"}
LAYOUTS = {name: layout for name, layout in layouts.LAYOUTS.items() if "rounding" in layout[1]}
SHAPES = ((3, 5), (64,), (1,), (33, 17), (0,), (), (30, 140))

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


parameters_of = partial(states.parameters_of, shapes=SHAPES)


@pytest.mark.filterwarnings("ignore:group 0 rounds moments of 8 bits to nearest")
@every_layout
def test_the_option_changes_the_bits_and_the_seed_does(layout: str) -> None:
    dtype, options = LAYOUTS[layout]
    results = []
    for more in ({}, {"seed": 0}, {"seed": 1}, {"seed": 2**62}, {"rounding": "nearest"}):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, **{**options, **more})
        train(optimizer, range(3), parameters)
        results.append(held(optimizer, parameters))
    assert same(results[0], results[1])
    for left, right in itertools.combinations(results[1:], 2):
        assert not same(left, right)


@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, "auto"), (BF16, "split"), (BF16, "full"), (torch.float16, "full")]
)
def test_without_anything_to_round_stochastic_equals_nearest(dtype: torch.dtype, master: Any) -> None:
    results = []
    for rounding in ("nearest", "stochastic"):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, master_weights=master, rounding=rounding)
        train(optimizer, range(3), parameters)
        results.append(held(optimizer, parameters))
    assert same(*results)


def test_groups_do_not_change_the_bits() -> None:
    """One group, groups in the same order, groups of other options in between: the number of a parameter counts."""
    results = []
    for cuts in ((), (2,), (1, 4, 6)):
        parameters = parameters_of(BF16)
        ends = (0, *cuts, len(parameters))
        groups = [{"params": parameters[a:b]} for a, b in itertools.pairwise(ends)]
        optimizer = halfstep.AdamW(groups, lr=1e-2, **LEAST)
        train(optimizer, range(3), parameters)
        results.append(held(optimizer, parameters))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_neighbours_of_another_dtype_or_without_gradients_do_not_change_the_bits() -> None:
    plain = parameters_of(BF16)
    optimizer = halfstep.AdamW(plain, lr=1e-2, **LEAST)
    train(optimizer, range(3), plain)
    other = parameters_of(BF16)
    other[1] = torch.nn.Parameter(other[1].detach().float())
    mixed = halfstep.AdamW(other, lr=1e-2, **LEAST)
    train(mixed, range(3), other, without=(3,))
    for index in (0, 2, 4, 5, 6):
        assert (bits(plain[index].detach()) == bits(other[index].detach())).all()
    train(mixed, range(3), other)  # parameter 3 takes its first steps now
    assert (bits(plain[3].detach()) == bits(other[3].detach())).all()


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"rounding": "stochastic"}, {"master_weights": "split"}, {"master_weights": "split24"}]
)
def test_a_group_may_have_options_of_its_own_and_change_them(change: dict[str, Any]) -> None:
    """What a step after the change does is what an optimizer does that was made with it and given the same state."""
    options = {"lr": 1e-2, "seed": 5, **LEAST, "rounding": "stochastic" if "seed" in change else "nearest"}
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], **options)
    train(optimizer, range(2), parameters)
    others = copies_of(parameters)
    groups = [{"params": others[:3], **change}, {"params": others[3:]}]
    fresh = halfstep.AdamW(groups, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update({key: value for key, value in change.items() if key == "seed"})
    fresh.load_state_dict(saved)
    optimizer.param_groups[0].update(change)
    train(optimizer, range(2, 4), parameters)
    train(fresh, range(2, 4), others)
    assert same(held(optimizer, parameters), held(fresh, others))


def test_a_checkpoint_of_torch_leaves_the_seed_alone() -> None:
    parameters = parameters_of(torch.float32)
    torchs = torch.optim.AdamW(parameters)
    train(torchs, range(1), parameters)
    mine = halfstep.AdamW(parameters, seed=9, state_dtype=BF16, rounding="stochastic")
    mine.load_state_dict(torchs.state_dict())
    assert mine.param_groups[0]["seed"] == 9
