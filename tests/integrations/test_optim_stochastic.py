"""Stochastic rounding as a user of AdamW meets it: the same bits for any grouping, sharding, order and restart."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import rank_processes
import sharded_noise
import torch
import torch.multiprocessing
from oracles import bits
from sharded_noise import gradient
from states import held, same

import halfstep

pytestmark = pytest.mark.sample(3)

BF16 = torch.bfloat16
LEAST = {"master_weights": None, "state_dtype": BF16, "rounding": "stochastic"}
LAYOUTS = {
    "bf16, fp32 state": (BF16, {"master_weights": None, "rounding": "stochastic"}),
    "bf16, bf16 state": (BF16, LEAST),
    "bf16 split, bf16 state": (BF16, {"state_dtype": BF16, "rounding": "stochastic"}),
    "bf16 split24": (BF16, {"master_weights": "split24", "rounding": "stochastic"}),
    "bf16 split24, bf16 state": (
        BF16,
        {"master_weights": "split24", "state_dtype": BF16, "rounding": "stochastic"},
    ),
    "bf16 split, 8-bit state": (BF16, {"state_dtype": "8bit", "rounding": "stochastic"}),
    "bf16 split24, 8-bit state": (
        BF16,
        {"master_weights": "split24", "state_dtype": "8bit", "rounding": "stochastic"},
    ),
    "bf16 full, bf16 state": (BF16, {"master_weights": "full", "state_dtype": BF16, "rounding": "stochastic"}),
    "fp16": (torch.float16, {"master_weights": None, "rounding": "stochastic"}),
    "fp32, bf16 state": (torch.float32, {"state_dtype": BF16, "rounding": "stochastic"}),
}
SHAPES = ((3, 5), (64,), (1,), (33, 17), (0,), (), (30, 140))

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def parameters_of(dtype: torch.dtype, shapes: Any = SHAPES) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: Any, parameters: list[Any], steps: Any, without: tuple[int, ...] = ()) -> None:
    for step in steps:
        for index, p in enumerate(parameters):
            p.grad = None if index in without else gradient(index, step, p.shape, p.dtype)
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------- the option


@pytest.mark.filterwarnings("ignore:group 0 rounds moments of 8 bits to nearest")
@layouts
def test_the_option_changes_the_bits_and_the_seed_does(layout: str) -> None:
    dtype, options = LAYOUTS[layout]
    results = []
    for more in ({}, {"seed": 0}, {"seed": 1}, {"seed": 2**62}, {"rounding": "nearest"}):
        parameters = parameters_of(dtype)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, **{**options, **more})
        train(optimizer, parameters, range(3))
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
        train(optimizer, parameters, range(3))
        results.append(held(optimizer, parameters))
    assert same(*results)


def test_exact_weights_never_move_and_small_steps_arrive() -> None:
    still, moved, lost = (torch.nn.Parameter(torch.ones(4096, dtype=BF16)) for _ in range(3))
    optimizers = [
        halfstep.AdamW([still], lr=0.0, weight_decay=0.0, **LEAST),
        halfstep.AdamW([moved], lr=1e-4, weight_decay=0.0, **{**LEAST, "state_dtype": torch.float32}),
        halfstep.AdamW([lost], lr=1e-4, weight_decay=0.0, **{**LEAST, "rounding": "nearest"}),
    ]
    for _ in range(100):
        for p, optimizer in zip((still, moved, lost), optimizers, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert (still == 1).all()
    assert (lost == 1).all()
    values = moved.detach().double()
    assert abs(values.mean().item() - 0.99) <= 5 * values.std().item() / 64


# ------------------------------------------------------------------------------------------------------------ grouping


def test_groups_do_not_change_the_bits() -> None:
    """One group, groups in the same order, groups of other options in between: the number of a parameter counts."""
    results = []
    for cuts in ((), (2,), (1, 4, 6)):
        parameters = parameters_of(BF16)
        ends = (0, *cuts, len(parameters))
        groups = [{"params": parameters[a:b]} for a, b in itertools.pairwise(ends)]
        optimizer = halfstep.AdamW(groups, lr=1e-2, **LEAST)
        train(optimizer, parameters, range(3))
        results.append(held(optimizer, parameters))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_each_parameter_draws_bits_of_its_own() -> None:
    one, other = (torch.nn.Parameter(torch.linspace(-1, 1, 500, dtype=BF16)) for _ in range(2))
    optimizer = halfstep.AdamW([one, other], lr=1e-3, **LEAST)
    one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    optimizer.step()
    assert not torch.equal(one, other)


def test_neighbours_of_another_dtype_or_without_gradients_do_not_change_the_bits() -> None:
    plain = parameters_of(BF16)
    optimizer = halfstep.AdamW(plain, lr=1e-2, **LEAST)
    train(optimizer, plain, range(3))
    other = parameters_of(BF16)
    other[1] = torch.nn.Parameter(other[1].detach().float())
    mixed = halfstep.AdamW(other, lr=1e-2, **LEAST)
    train(mixed, other, range(3), without=(3,))
    for index in (0, 2, 4, 5, 6):
        assert (bits(plain[index].detach()) == bits(other[index].detach())).all()
    train(mixed, other, range(3))  # parameter 3 takes its first steps now
    assert (bits(plain[3].detach()) == bits(other[3].detach())).all()


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"rounding": "stochastic"}, {"master_weights": "split"}, {"master_weights": "split24"}]
)
def test_a_group_may_have_options_of_its_own_and_change_them(change: dict[str, Any]) -> None:
    """What a step after the change does is what an optimizer does that was made with it and given the same state."""
    options = {"lr": 1e-2, "seed": 5, **LEAST, "rounding": "stochastic" if "seed" in change else "nearest"}
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], **options)
    train(optimizer, parameters, range(2))
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    groups = [{"params": others[:3], **change}, {"params": others[3:]}]
    fresh = halfstep.AdamW(groups, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update({key: value for key, value in change.items() if key == "seed"})
    fresh.load_state_dict(saved)
    optimizer.param_groups[0].update(change)
    train(optimizer, parameters, range(2, 4))
    train(fresh, others, range(2, 4))
    assert same(held(optimizer, parameters), held(fresh, others))


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "gaps", "misaligned", "gradient in another order"])
def test_any_strides_give_the_bits_of_contiguous_ones(kind: str) -> None:
    value = torch.randn(2, 6, 4, 10).to(BF16)
    make = {
        "transposed": lambda v: v.transpose(0, 3).contiguous().transpose(0, 3),
        "channels_last": lambda v: v.to(memory_format=torch.channels_last),
        "gaps": lambda v: torch.cat([v, v], dim=3)[..., :10],
        "misaligned": lambda v: torch.cat([v.flatten()[:1], v.flatten()])[1:].view(v.shape),
    }.get(kind, lambda v: v.clone())
    plain, other = torch.nn.Parameter(value.clone()), torch.nn.Parameter(make(value))
    optimizers = [halfstep.AdamW([p], lr=1e-2, **LEAST) for p in (plain, other)]
    for step in range(4):
        grad = gradient(0, step, value.shape, BF16)
        plain.grad = grad
        other.grad = grad.contiguous(memory_format=torch.channels_last) if kind.startswith("gradient") else make(grad)
        for optimizer in optimizers:
            optimizer.step()
    assert same(held(optimizers[0], [plain]), held(optimizers[1], [other]))


# --------------------------------------------------------------------------------------------------------- checkpoints


@layouts
def test_a_resumed_run_draws_what_an_uninterrupted_one_would(layout: str) -> None:
    """The seed comes with the checkpoint, whatever the new optimizer was made with."""
    dtype, options = LAYOUTS[layout]
    parameters = parameters_of(dtype)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, seed=77, **options)
    train(optimizer, parameters, range(4))
    file = io.BytesIO()
    torch.save([[p.detach().clone() for p in parameters], optimizer.state_dict()], file)
    train(optimizer, parameters, range(4, 8))
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    assert saved["param_groups"][0]["seed"] == 77
    fresh = [torch.nn.Parameter(value) for value in weights]
    other = halfstep.AdamW(fresh, lr=5.0, seed=1, **options)
    other.load_state_dict(saved)
    train(other, fresh, range(4, 8))
    assert same(held(optimizer, parameters), held(other, fresh))


def test_a_checkpoint_of_torch_leaves_the_seed_alone() -> None:
    parameters = parameters_of(torch.float32)
    torchs = torch.optim.AdamW(parameters)
    train(torchs, parameters, range(1))
    mine = halfstep.AdamW(parameters, seed=9, state_dtype=BF16, rounding="stochastic")
    mine.load_state_dict(torchs.state_dict())
    assert mine.param_groups[0]["seed"] == 9


# ------------------------------------------------------------------------------------------------------------ sharding


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    return rank_processes.run(sharded_noise.run, sharded_noise.WORLD, join=False)


@pytest.mark.parametrize(("cut", "shape"), sharded_noise.CASES)
def test_shards_of_every_kind_have_the_bits_of_the_whole(
    ranks: list[dict[str, Any]], cut: str, shape: tuple[int, ...]
) -> None:
    whole = sharded_noise.train(shape, lambda value: value)
    for rank, result in enumerate(ranks):
        shard = result["steps"][f"{cut} of {shape}"]
        assert shard.keys() == whole.keys() == {"parameter", "step", "exp_avg", "exp_avg_sq"}
        for name, tensor in whole.items():
            expected = tensor if name == "step" else sharded_noise.piece(tensor, rank, cut)
            assert shard[name].shape == expected.shape
            assert (bits(shard[name]) == bits(expected)).all(), (rank, name)


def test_rows_cut_in_the_order_of_fsdp_over_tensor_parallelism(ranks: list[dict[str, Any]]) -> None:
    whole = sharded_noise.train(sharded_noise.INTERLEAVED, lambda value: value)
    for rank, result in enumerate(ranks):
        shard = result["steps"]["interleaved"]
        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            expected = sharded_noise.interleaved_piece(whole[name], rank)
            assert (bits(shard[name]) == bits(expected)).all(), (rank, name)


@pytest.mark.parametrize(("cut", "shape"), sharded_noise.CODED_CASES)
def test_shards_of_moments_in_8_bits_have_the_bits_of_the_whole(
    ranks: list[dict[str, Any]], cut: str, shape: tuple[int, ...]
) -> None:
    """Codes, exponents and weights; exponents are sharded like the rows or the blocks that they belong to."""
    whole = sharded_noise.train(shape, lambda value: value, **sharded_noise.CODED)
    assert whole["exp_avg"].dtype == torch.uint8 and len(whole) == 9
    for rank, result in enumerate(ranks):
        shard = result["coded"][f"{cut} of {shape}"]
        assert shard.keys() == whole.keys()
        for name, tensor in whole.items():
            expected = tensor if name == "step" else sharded_noise.piece(tensor, rank, cut)
            assert shard[name].shape == expected.shape, (rank, name)
            assert (bits(shard[name]) == bits(expected)).all(), (rank, name)


def test_codes_of_rows_cut_in_the_order_of_fsdp_over_tensor_parallelism(ranks: list[dict[str, Any]]) -> None:
    whole = sharded_noise.train((32, 9, 40), lambda value: value, **sharded_noise.CODED)
    for rank, result in enumerate(ranks):
        for name, tensor in result["coded"]["interleaved"].items():
            expected = whole[name] if name == "step" else sharded_noise.interleaved_piece(whole[name], rank)
            assert (bits(tensor) == bits(expected)).all(), (rank, name)


def test_shards_that_would_cut_blocks_of_codes_are_refused(ranks: list[dict[str, Any]]) -> None:
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


def test_parts_that_lie_in_no_range_are_refused(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        first, second = result["refused"]
        assert "placements (Shard(dim=1), Shard(dim=2)) on a mesh of shape (2, 2)" in first
        for message in (first, second):
            assert message.startswith("Expected parameter 0 with a gradient (group 0) to be sharded by a range of rows")
            assert message.endswith("on a mesh of shape (2, 2): shard evenly, or use rounding='nearest'")


# ------------------------------------------------------------------------------------------------------------ clipping


def test_a_changed_limit_is_followed() -> None:
    p, q = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(8))
    always, changed = halfstep.AdamW([p], max_grad_norm=2.0), halfstep.AdamW([q], max_grad_norm=1.0)
    for parameter, optimizer in ((p, always), (q, changed)):
        parameter.grad = torch.zeros(8)
        optimizer.step()
        optimizer.max_grad_norm = 2.0
        parameter.grad = torch.full((8,), 100.0)
        optimizer.step()
    assert (bits(always.state[p]["exp_avg"]) == bits(changed.state[q]["exp_avg"])).all()
