"""Stochastic rounding as a user of AdamW meets it: the same bits for any grouping, sharding, order and restart."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import layouts
import pytest
import rank_processes
import sharded_noise
import states
import torch
from oracles import bits
from states import copies_of, held, same, same_bits, train

import halfstep

pytestmark = pytest.mark.sample(3)

BF16 = torch.bfloat16
LEAST = {"master_weights": None, "state_dtype": BF16, "rounding": "stochastic"}
LAYOUTS = {name: layout for name, layout in layouts.LAYOUTS.items() if "rounding" in layout[1]}
SHAPES = ((3, 5), (64,), (1,), (33, 17), (0,), (), (30, 140))

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


parameters_of = partial(states.parameters_of, shapes=SHAPES)


# ---------------------------------------------------------------------------------------------------------- the option


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
def test_where_there_is_nothing_to_round_by_chance_it_is_nearest(dtype: torch.dtype, master: Any) -> None:
    results = []
    for rounding in ("nearest", "stochastic"):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, master_weights=master, rounding=rounding)
        train(optimizer, range(3), parameters)
        results.append(held(optimizer, parameters))
    assert same(*results)


# ------------------------------------------------------------------------------------------------------------ grouping


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


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_of_torch_leaves_the_seed_alone() -> None:
    parameters = parameters_of(torch.float32)
    torchs = torch.optim.AdamW(parameters)
    train(torchs, range(1), parameters)
    mine = halfstep.AdamW(parameters, seed=9, state_dtype=BF16, rounding="stochastic")
    mine.load_state_dict(torchs.state_dict())
    assert mine.param_groups[0]["seed"] == 9


# ------------------------------------------------------------------------------------------------------------ sharding


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    return rank_processes.run(sharded_noise.run, sharded_noise.WORLD, join=False)


def check_shards(shards: list[Any], whole: dict[str, torch.Tensor], piece: Any) -> None:
    """Shards of every rank have the bits of the pieces of the whole."""
    for rank, shard in enumerate(shards):
        expected = {name: value if name == "step" else piece(value, rank) for name, value in whole.items()}
        assert same_bits(shard, expected), rank


CASES = [
    *(("steps", cut, shape) for cut, shape in sharded_noise.CASES),
    *(("coded", cut, shape) for cut, shape in sharded_noise.CODED_CASES),
]


@pytest.mark.parametrize(("what", "cut", "shape"), CASES)
def test_shards_of_every_kind_have_the_bits_of_the_whole(
    ranks: list[dict[str, Any]], what: str, cut: str, shape: tuple[int, ...]
) -> None:
    """Weights, moments, and codes with their exponents, which are sharded like their rows or blocks."""
    whole = sharded_noise.train(shape, lambda value: value, **(sharded_noise.CODED if what == "coded" else {}))
    assert len(whole) == (9 if what == "coded" else 4)
    shards = [result[what][f"{cut} of {shape}"] for result in ranks]
    check_shards(shards, whole, lambda value, rank: sharded_noise.piece(value, rank, cut))


@pytest.mark.parametrize("what", ["steps", "coded"])
def test_rows_cut_in_the_order_of_fsdp_over_tensor_parallelism(ranks: list[dict[str, Any]], what: str) -> None:
    shape, options = ((32, 9, 40), sharded_noise.CODED) if what == "coded" else (sharded_noise.INTERLEAVED, {})
    whole = sharded_noise.train(shape, lambda value: value, **options)
    check_shards([result[what]["interleaved"] for result in ranks], whole, sharded_noise.interleaved_piece)


def test_parts_that_cut_blocks_or_lie_in_no_range_are_refused(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for (_, shape), message in zip(sharded_noise.UNFIT, result["refused codes"], strict=True):
            assert message.startswith(
                "Expected parameter 0 with a gradient (group 0) to be sharded by rows, or in dimension 1 at multiples "
                f"of 32 elements of a row, with state_dtype='8bit', but got shape {shape} and placements "
            )
            assert message.endswith(
                "use fully_shard, which shards by rows, or state_dtype=torch.bfloat16 or torch.float32 in a parameter "
                "group of its own"
            )
        first, second = result["refused"]
        assert "placements (Shard(dim=1), Shard(dim=2)) on a mesh of shape (2, 2)" in first
        for message in (first, second):
            assert message.startswith("Expected parameter 0 with a gradient (group 0) to be sharded by a range of rows")
            assert message.endswith("on a mesh of shape (2, 2): shard evenly, or use rounding='nearest'")
