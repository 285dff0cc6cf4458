"""Saving an optimizer's state takes no device memory: peak bytes of `state_dict()` beyond the state itself."""

import copy
from typing import Any

import pytest
import torch
from counted_bytes import Peak, storage_bytes
from layouts import some
from oracles import BF16, FP32
from stream_model import Model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import halfstep
from halfstep.integrations.optim import state

ALLOWED = 0.01  # of what weights and state take
SIZE = 64  # rows and columns of a matrix, which are enough for codes
LAYOUTS = some(
    "split",
    "split, bf16",
    "split, 8 bits",
    "split24, 8 bits",
    "fp16",
    "full, 8 bits",
    "none, bf16",
    "fp32",
    "fp32, 8 bits",
)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def _model(dtype: torch.dtype, layers: int = 8) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(layers))).to(dtype)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, SIZE, dtype=next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _peak(call: Any, held: Any) -> float:
    """The peak while calling, as a part of the bytes of `held`."""
    with Peak() as counted:
        result = call()
    assert result is not None
    return counted.peak / storage_bytes(held)


def _held(model: torch.nn.Module, optimizer: Any) -> list[Any]:
    return [list(model.parameters()), *getattr(optimizer, "optim", optimizer).state.values()]


@layouts
def test_state_dict_allocates_nothing(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after other code has written the same weights, with which full masters are compared in pieces."""
    monkeypatch.setattr(state, "PIECE", SIZE)
    dtype, options = LAYOUTS[layout]
    model = _model(dtype)
    optimizer = halfstep.AdamW(model.parameters(), **options)
    _train(model, optimizer)
    held = _held(model, optimizer)
    assert _peak(optimizer.state_dict, held) <= ALLOWED
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    assert _peak(optimizer.state_dict, held) <= ALLOWED
    assert _peak(lambda: get_optimizer_state_dict(model, optimizer), held) <= ALLOWED


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapping", ["DDP", "FSDP1", "FSDP2", "ZeRO-1"])
@pytest.mark.parametrize("layout", ["split", "fp16", "split24, 8 bits"])
def test_state_dicts_of_wrappers_and_torchs_helpers_allocate_nothing(layout: str, wrapping: str) -> None:
    dtype, options = LAYOUTS[layout]
    model = _model(dtype)
    make: Any = halfstep.AdamW
    if wrapping == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif wrapping == "FSDP1":
        if "8 bits" in layout:
            pytest.skip("blocks of flat parameters are refused")
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif wrapping == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if wrapping == "ZeRO-1":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=halfstep.AdamW, **options)
    else:
        optimizer = make(model.parameters(), **options)
    _train(model, optimizer)
    local = getattr(optimizer, "optim", optimizer)
    held = _held(model, optimizer)
    if wrapping == "FSDP1" and layout == "split":
        # Its optim_state_dict takes one dtype per parameter: masters and moments in fp32, which are on the CPU.
        assert all(value.dtype == FP32 for state in local.state_dict()["state"].values() for value in state.values())
        return
    assert _peak(local.state_dict, held) <= ALLOWED
    if wrapping in ("DDP", "FSDP2"):
        assert _peak(lambda: get_optimizer_state_dict(model, optimizer), held) <= ALLOWED


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("canonical", layout) for layout in LAYOUTS),
        *(("flattened by FSDP1", layout) for layout in ("split", "fp16")),
        *(("blocks cut by the sharding", layout) for layout in ("split24, 8 bits", "fp32, 8 bits")),
    ],
)
def test_on_a_gpu_a_state_for_the_host_takes_no_memory(case: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the model of a GPU: what is converted to fp32 grows on the host, and on the device there are few pieces at a
    time. At its size outside of tests, `PIECE`, they are 8 MiB."""
    piece = 8 * SIZE
    monkeypatch.setattr(state, "PIECE", piece)
    dtype, options = LAYOUTS[layout]
    with Model("late") as gpu:
        model = _model(dtype, layers=2).to(gpu.device)
        optimizer = halfstep.AdamW(model.parameters(), **options)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        there = next(model.parameters()).device
        expected = optimizer.canonical_state_dict()["state"]
        if case == "flattened by FSDP1":
            for parameter in model.parameters():
                parameter._fsdp_flattened = True
        elif case == "blocks cut by the sharding":
            monkeypatch.setattr(state, "shards_blocks", lambda parameter: False)
        used = gpu.memory.peak = gpu.memory.used
        saved = (optimizer.canonical_state_dict if case == "canonical" else optimizer.state_dict)()["state"]
        assert gpu.memory.peak - used <= 8 * 4 * piece
        for index, entry in saved.items():
            if case == "blocks cut by the sharding":
                moments = [key for key in entry if key.startswith("exp_avg")]
                assert moments == ["exp_avg", "exp_avg_sq"]
                coded = [parameter.dim() > 1 and "8 bits" in layout for parameter in model.parameters()][index]
                assert {entry[key].device.type for key in moments} == {"cpu" if coded else there.type}
            else:
                moments = list(entry)
                assert {value.device.type for value in entry.values()} == {"cpu"}
            assert all(torch.equal(entry[key].cpu().float(), expected[index][key]) for key in moments)


def test_copies_save_in_the_format_of_the_original() -> None:
    model = _model(BF16)
    optimizer = halfstep.AdamW(model.parameters(), state_dict_format="canonical")
    _train(model, optimizer)
    assert "master" in copy.deepcopy(optimizer).state_dict()["state"][0]
    optimizer.state_dict_format = "held"
    assert "master_remainder" in copy.deepcopy(optimizer).state_dict()["state"][0]
    optimizer.state_dict_format = "compact"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Expected state_dict_format to be 'held' or 'canonical', but got 'compact'"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="Expected state_dict_format to be 'held' or 'canonical', but got None"):
        halfstep.AdamW(model.parameters(), state_dict_format=None)  # type: ignore[arg-type]
