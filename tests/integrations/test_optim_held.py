"""The optimizer state in the held format: its bytes, and loading it into every layout."""

import re
from itertools import product
from typing import Any

import layouts
import pytest
import torch
from oracles import BF16, FP32, bits
from states import parameters_of, train
from stream_model import Model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.optim.state import shards_blocks

pytestmark = pytest.mark.sample(6)

SHAPES = ((40, 130), (16, 9, 32), (5,), (9, 7), (4096, 1), ())
LAYOUTS = {name: layout for name, layout in layouts.LAYOUTS.items() if "fp16, none" not in name}
# The saved layout, the one that loads, of the same weights, and whether there is a third moment. In one value, of which
# a sample can be taken.
CASES = [case for case in product(LAYOUTS, LAYOUTS, (False, True)) if LAYOUTS[case[0]][0] == LAYOUTS[case[1]][0]]

Run = tuple[list[torch.Tensor], halfstep.AdamW]


def _run(layout: str, steps: int = 0, lr: float = 1e-2, **more: Any) -> Run:
    dtype, options = LAYOUTS[layout]
    parameters = parameters_of(dtype, SHAPES)
    optimizer = halfstep.AdamW(parameters, lr=lr, **options, **more)
    train(optimizer, range(steps))
    return parameters, optimizer


def _continued(source: Run, layout: str, state: dict[str, Any], **more: Any) -> Run:
    """A new run with the weights of `source` that has loaded `state`."""
    parameters, optimizer = _run(layout, lr=5.0, **more)
    for p, of in zip(parameters, source[0], strict=True):
        p.data.copy_(of.data)
    optimizer.load_state_dict(state)
    return parameters, optimizer


def _memory(run: Run) -> list[Any]:
    """The bits of weights and state in memory, with dtypes and names."""
    parameters, optimizer = run
    return [[bits(p.detach()).tobytes(), _bytes(optimizer.state[p])] for p in parameters]


def _canonical(run: Run) -> list[Any]:
    """The bits of weights and of the state in fp32."""
    parameters, optimizer = run
    states = optimizer.canonical_state_dict()["state"].values()
    return [[bits(p.detach()).tobytes() for p in parameters], *map(_bytes, states)]


def _bytes(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: (value.dtype, bits(value).tobytes()) for key, value in state.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} -> {case[1]}{', amsgrad' * case[2]}")
def test_held_state_loads_into_every_layout_with_the_bits_of_the_canonical_state(case: tuple[str, str, bool]) -> None:
    """The same layout has the same codes, and so the same memory. The seed of the noise comes with the state."""
    layout, other, amsgrad = case
    source = _run(layout, steps=3, amsgrad=amsgrad, seed=77)
    loaded = _continued(source, other, source[1].state_dict(), amsgrad=amsgrad)
    expected = _continued(source, other, source[1].canonical_state_dict(), amsgrad=amsgrad)
    if layout == other:
        assert _memory(loaded) == _memory(source)
        assert _canonical(loaded) == _canonical(expected)
        expected = source
    for step in (3, 4):
        for run in (loaded, expected):
            train(run[1], [step])
        assert _canonical(loaded) == _canonical(expected)


def test_transposed_parameters_continue_with_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        parameter: Any = torch.nn.Parameter(torch.linspace(-1, 1, 130 * 40).view(130, 40).to(BF16).t())
        runs.append(([parameter], halfstep.AdamW([parameter], state_dtype="8bit")))
    source, loaded = runs
    train(source[1], range(2))
    loaded[0][0].data.copy_(source[0][0].data)
    loaded[1].load_state_dict(source[1].state_dict())
    assert _memory(loaded) == _memory(source)
    for run in runs:
        train(run[1], range(2, 4))
    assert _memory(loaded) == _memory(source)


@pytest.mark.parametrize("layout", ["split24, 8 bits", "full"])
def test_a_file_loads_into_parameters_on_a_gpu(layout: str) -> None:
    """On the model of a GPU: codes, scales and remainders come from the CPU."""
    parameters, optimizer = source = _run("split24, 8 bits", steps=2)
    saved = optimizer.state_dict()
    expected = _canonical(_continued(source, layout, saved))
    with Model("late") as model:
        there: list[torch.Tensor] = [torch.nn.Parameter(p.detach().to(model.device)) for p in parameters]
        loaded = halfstep.AdamW(there, **LAYOUTS[layout][1])
        loaded.load_state_dict(saved)
        assert {value.device for state in loaded.state.values() for value in state.values()} == {there[0].device}
        torch.cuda.synchronize()
        state = checkpoint.gather(loaded.canonical_state_dict()["state"]).values()
        weights = [bits(p.detach().cpu()).tobytes() for p in there]
    assert [weights, *map(_bytes, state)] == expected


def test_a_remainder_without_its_bf16_weight_is_left_out() -> None:
    parameters, optimizer = _run("split", steps=1)
    parameters[0].data = parameters[0].data.float()
    assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


# By what is damaged: its key, what is there, and what is expected and found by the message.
DAMAGED: dict[str, tuple[str, Any, str, str]] = {
    "shape of codes": (
        "exp_avg_codes",
        torch.zeros(3, 4).byte(),
        "(40, 130) and dtype torch.uint8",
        "(3, 4) torch.uint8",
    ),
    "dtype of codes": (
        "exp_avg_codes",
        torch.zeros(40, 130),
        "(40, 130) and dtype torch.uint8",
        "(40, 130) torch.float32",
    ),
    "no scales": ("exp_avg_sq_scale", None, "(40, 5) and dtype torch.int16", "NoneType"),
    "shape of scales": (
        "exp_avg_scale",
        torch.zeros(40, 4).byte(),
        "(40, 5) and dtype torch.uint8",
        "(40, 4) torch.uint8",
    ),
    "dtype of the remainder": (
        *("master_remainder", torch.zeros(40, 130)),
        *("(40, 130) and dtype torch.int16 or torch.int8", "(40, 130) torch.float32"),
    ),
}


@pytest.mark.parametrize("loading", ["split24, 8 bits", "split"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_codes_scales_and_remainders_that_do_not_fit_are_refused(damage: str, loading: str) -> None:
    key, value, expected, found = DAMAGED[damage]
    message = (
        f"Expected '{key}' in the state of parameter 0 to have shape {expected}, but got {found}: the checkpoint is of "
        "another model, or its parameters are in another order"
    )
    source, target = _run("split24, 8 bits", steps=2), _run(loading, steps=1)
    saved = source[1].state_dict()
    saved["state"][0] = {**saved["state"][0], key: value}
    before = _memory(target)
    with pytest.raises(ValueError, match=re.escape(message)):
        target[1].load_state_dict(saved)
    assert _memory(target) == before


def test_a_remainder_needs_a_bf16_parameter() -> None:
    saved = _run("split", steps=1)[1].state_dict()
    message = "Expected a parameter with numbers of bfloat16 for 'master_remainder' in the state of parameter 0, which"
    with pytest.raises(ValueError, match=re.escape(message)):
        _run("fp16")[1].load_state_dict(saved)


def test_codes_without_those_of_amsgrad_are_refused_if_it_is_on() -> None:
    source = _run("split24, 8 bits", steps=1)
    saved = source[1].state_dict()
    saved["param_groups"][0]["amsgrad"] = True
    message = "state of parameter 0 lacks 'max_exp_avg_sq'; it has 'step', 'exp_avg', 'exp_avg_scale', 'exp_avg_sq',"
    with pytest.raises(ValueError, match=re.escape(message)):
        source[1].load_state_dict(saved)


@pytest.fixture
def _four_ranks() -> Any:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_four_ranks")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
@pytest.mark.parametrize("state_dtype", [FP32, "8bit"])
def test_whole_codes_load_into_shards_even_if_these_cut_blocks(placement: Shard, state_dtype: Any) -> None:
    """As a file of gathered state has them: four ranks cut 96 columns at 24, which only moments in fp32 allow."""
    mesh = init_device_mesh("cpu", (4,))
    whole: Any = torch.nn.Parameter(torch.randn(64, 128 if state_dtype == "8bit" else 96).to(BF16))
    source = halfstep.AdamW([whole], state_dtype="8bit")
    train(source, range(2))
    found = []
    for state in (source.state_dict(), source.canonical_state_dict()):
        shard: Any = torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None))
        optimizer = halfstep.AdamW([shard], state_dtype=state_dtype)
        checkpoint.load_optimizer(optimizer, checkpoint.gather(state))
        entry = optimizer.canonical_state_dict()["state"][0]
        assert entry["exp_avg"].placements == (placement,)
        found.append([bits(entry[key].to_local()).tobytes() for key in ("exp_avg", "exp_avg_sq", "master")])
    assert found[0] == found[1]


@pytest.mark.usefixtures("_four_ranks")
def test_which_shards_have_whole_blocks() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for shape, placements, whole in (
        ((5, 64), (Shard(0), Replicate()), True),
        ((5, 64), (Shard(0), Shard(1)), True),
        ((5, 128), (Shard(1), Shard(1)), True),
        ((5, 96), (Replicate(), Shard(1)), False),  # 48 columns
        ((5, 127), (Replicate(), Shard(1)), False),  # 64 and 63: two blocks each, but not of equal length
        ((4, 5, 64), (Shard(1), Replicate()), False),  # 6 and 4 blocks, of which torch would give 5 to each rank
        ((4, 6, 64), (Shard(1), Replicate()), True),
        ((4, 6, 64), (Shard(2), Replicate()), False),
    ):
        sharded = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
        assert shards_blocks(sharded) is whole, (shape, placements)
    assert shards_blocks(torch.zeros(3, 3))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("other", ["split", "split, 8 bits", "split24", "full", "none"])
@pytest.mark.parametrize("layout", ["split", "split24, 8 bits", "full", "none"])
def test_model_and_optimizer_load_in_either_order(layout: str, other: str, first: str) -> None:
    """A remainder is joined with its weight in the first step, into whatever layout. One order is refused to nobody."""
    if layout == "full" and "split" in other and first == "optimizer":
        pytest.skip("weights halfway between two bf16 numbers differ, as load_state_dict says")
    source = _run(layout, steps=3)
    weights = [p.detach().clone() for p in source[0]]
    saved = source[1].state_dict()
    expected = _continued(source, other, source[1].canonical_state_dict())
    parameters, optimizer = loaded = _run(other, lr=5.0)
    if first == "optimizer":
        with torch.no_grad():
            for p in parameters:
                p.add_(1)  # other weights than the saved ones
        optimizer.load_state_dict(saved)
    with torch.no_grad():
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
    if first == "model":
        optimizer.load_state_dict(saved)
    for step in (3, 4):
        for run in (loaded, expected):
            train(run[1], [step])
        assert _canonical(loaded) == _canonical(expected)


def test_remainders_missing_from_flat_states_raise() -> None:
    """Code that loads flat states looks entries up by their names in memory."""
    model = torch.nn.Linear(64, 64).bfloat16()
    optimizer = halfstep.AdamW(model.parameters())
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for form, loads in (("held", False), ("canonical", True)):
        optimizer.state_dict_format = form  # type: ignore[assignment]
        saved = get_optimizer_state_dict(model, optimizer, options=flat)
        if loads:
            set_optimizer_state_dict(model, optimizer, saved, options=flat)
            continue
        with pytest.raises(ValueError, match=re.escape("set optimizer.state_dict_format = 'canonical' before saving")):
            set_optimizer_state_dict(model, optimizer, saved, options=flat)


@pytest.mark.parametrize("layout", ["split", "split, bf16", "split, 8 bits", "split24, 8 bits", "full", "none, 8 bits"])
def test_a_saved_state_that_other_code_assigns_is_loaded(layout: str) -> None:
    """As ZeroRedundancyOptimizer.load_state_dict does, which calls no method of the local optimizer."""
    source = _run(layout, steps=2)
    parameters, optimizer = loaded = _run(layout, lr=1e-2)
    for p, of in zip(parameters, source[0], strict=True):
        p.data.copy_(of.data)
    for index, entry in source[1].state_dict()["state"].items():
        optimizer.state[parameters[index]] = {key: value.clone() for key, value in entry.items()}
    for run in (source, loaded):
        train(run[1], [2])
    assert _memory(loaded) == _memory(source)
