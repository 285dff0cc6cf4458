"""Flat optimizer states, as torchtitan saves them, from each wrapping into each; and models sharded too late.

For test_cases_on_ranks.py.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import some
from states import same_bits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import halfstep

WORLD = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WRAPPINGS = ("single", "ddp", "fsdp1", "fsdp2")
LAYOUTS = some("split", "fp16", "split24, 8 bits", "split, bf16")


def wrappings_of(layout: str) -> tuple[str, ...]:
    """The wrappings in which a layout can be stepped: not FSDP1's flat parameters with codes in rows."""
    return tuple(one for one in WRAPPINGS if not ("8 bits" in layout and one == "fsdp1"))


def loaders(layout: str, saver: str) -> tuple[str, ...]:
    """The wrappings of two ranks that load: for the first layout all, and for others the one after that which saves."""
    names = wrappings_of(layout)
    after = names[names.index(saver) + 1 :] or names[1:]
    return names[1:] if layout == next(iter(LAYOUTS)) else after[:1]


def _inputs(layout: str) -> int:
    """Columns of the first matrix, which has 7 rows: of more than 4,096 elements, with a short block, for codes."""
    return 600 if "8 bits" in layout else 5


def made(wrapping: str, layout: str) -> tuple[torch.nn.Module, Any]:
    """A wrapped model with uneven shards, and its optimizer with two groups."""
    dtype, options = LAYOUTS[layout]
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(_inputs(layout), 7, dtype=dtype), torch.nn.Linear(7, 3, dtype=dtype)
    )
    if wrapping == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif wrapping == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif wrapping == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "lr": 0.1}, {"params": biases, "lr": 0.2}]
    return model, halfstep.AdamW(groups, state_dict_format="canonical", **options)


def train(model: torch.nn.Module, optimizer: Any, columns: int = 5, steps: int = 2) -> None:
    """Train with the same inputs on every rank, so that all wrappings give the same bits."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(4, columns, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def whole(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The canonical optimizer state by name, unsharded. Collective."""
    options = StateDictOptions(full_state_dict=True)
    _, state = get_state_dict(model, optimizer, options=options)
    found = {}
    for name, entry in state["state"].items():
        for key, value in entry.items():
            tensor = torch.as_tensor(value)
            found[f"{name}.{key}"] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found


def save(folder: Path, wrapping: str, layout: str, no_dist: bool = False) -> dict[str, torch.Tensor]:
    """Train and save. Returns the saved state."""
    model, optimizer = made(wrapping, layout)
    train(model, optimizer, _inputs(layout))
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=no_dist)
    return whole(model, optimizer)


def load(folder: Path, wrapping: str, layout: str, no_dist: bool = False) -> dict[str, torch.Tensor]:
    """What was loaded."""
    model, optimizer = made(wrapping, layout)
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder, no_dist=no_dist)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=FLAT)
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert lrs == [0.1, 0.2], lrs
    return whole(model, optimizer)


def an_optimizer_made_before_the_model_was_sharded_says_so_once() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    (said,) = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert said.startswith("none of the 2 parameters of this optimizer has a gradient, while DTensors of the same")
    assert said.endswith("it trains nothing; make the optimizer after fully_shard")
    other = halfstep.AdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.step()
        other.zero_grad()
        other.step()


def every_wrapping_loads_every_flat_state_with_every_bit(layout: str, saver: str) -> None:
    """In one process, the first rank saves and loads alone."""
    first = dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        shared: list[Any] = [Path(folder), None]
        dist.broadcast_object_list(shared)
        path = shared[0]
        if first or saver != "single":
            shared[1] = save(path, saver, layout, no_dist=saver == "single")
        dist.broadcast_object_list(shared)
        for loader in loaders(layout, saver):
            assert same_bits(load(path, loader, layout), shared[1]), loader
        if first:
            assert same_bits(load(path, "single", layout, no_dist=True), shared[1])
            assert "0.weight.master" in shared[1]
        dist.barrier()


CASES: dict[str, Callable[[], None]] = {
    **{
        f"flat state, {layout}, {saver}": partial(every_wrapping_loads_every_flat_state_with_every_bit, layout, saver)
        for layout in LAYOUTS
        for saver in wrappings_of(layout)
    },
    "sharded later": an_optimizer_made_before_the_model_was_sharded_says_so_once,
}
