"""State dicts of unsharded tensors, for checkpoints without a model and for state from other sources.

`gather` turns sharded tensors (DTensors of FSDP2) into full tensors on the CPU, and `scatter` shards them over the mesh
of the run that loads them. The checks compare saved state with the objects that load it, and `restoring` undoes a
failed load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from halfstep.integrations.checkpoint.atomic import CheckpointError, explained
from halfstep.integrations.optim.foreign_codes import decode
from halfstep.numerics.scaling.sharding import Sharding
from halfstep.numerics.state_layout import CODE_KEYS, SCALE_KEYS


def gather(state: Any) -> Any:
    """A copy of nested dicts and lists with all tensors unsharded and on the CPU.

    Collective if there are DTensors: every rank must call it with the same structure.
    """
    if isinstance(state, Mapping):
        return {key: gather(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather(value) for value in state)
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return whole.detach().to("cpu", copy=True)
    return state


def scatter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` on the device of `like`, and sharded over its mesh if `like` is a DTensor. The dtype is unchanged."""
    return Sharding(like).distributed(tensor.to(like.device))


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy gathered parameters and buffers into `model`, sharded or not.

    Raises:
        CheckpointError: a name, shape or dtype differs. Nothing is copied.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> saved, model = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> checkpoint.load_model(model, checkpoint.gather(saved.state_dict()))
        >>> torch.equal(model.weight, saved.weight)
        True
    """
    present = model.state_dict()
    check_model(state, present)
    with torch.no_grad():
        for name, value in present.items():
            value.copy_(scatter(state[name], value))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a gathered ``optimizer.state_dict()``. Tensors with the shape of their parameter are sharded like it.

    Unsharded state of the 8-bit optimizers of bitsandbytes, torchao and flashoptim is decoded first.

    Raises:
        CheckpointError: the state belongs to another optimizer, or is damaged. The optimizer is unchanged.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> saved, optimizer = halfstep.AdamW([weight], lr=0.1), halfstep.AdamW([weight], lr=0.2)
        >>> checkpoint.load_optimizer(optimizer, checkpoint.gather(saved.state_dict()))
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    check_optimizer_state(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(numbers)} parameters, this one {len(parameters)}: use the same model"
        )
    by_number = dict(zip(numbers, parameters, strict=True))

    def sharded(number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        parameter, sharded = by_number[number], decode(dict(entry), f"state of parameter {number}")
        for key, value in sharded.items():
            # Codes must be decoded with their scales before sharding. Remainders may be stored as pairs of bytes.
            coded = key in CODE_KEYS or key in SCALE_KEYS
            shapes = parameter.shape, (*parameter.shape, 2)
            if isinstance(value, torch.Tensor) and value.shape in shapes and not coded:
                sharded[key] = scatter(value, parameter)
        return sharded

    with unchanged_on_error(optimizer):
        entries = {number: sharded(number, entry) for number, entry in state["state"].items() if number in by_number}
        optimizer.load_state_dict({**state, "state": entries})


def check_model(saved: Any, present: Mapping[str, Any]) -> None:
    """Raise unless the saved state dict of a model has the names, shapes and dtypes of the `present` one."""
    if not isinstance(saved, Mapping) or saved.keys() != present.keys():
        names = saved.keys() if isinstance(saved, Mapping) else set()
        differing = ", ".join(sorted(map(str, names ^ present.keys()))[:5])
        raise CheckpointError(f"checkpoint and model do not have the same tensors: {differing}: use the same model")
    for name, value in present.items():
        if _described(saved[name]) != _described(value):
            raise CheckpointError(
                f"{name} is {_described(saved[name])} in the checkpoint and {_described(value)} in the model: load it "
                "into a model of the same size and precision, and convert afterwards"
            )


def _described(value: Any) -> str:
    dense = isinstance(value, ShardedTensor) or (isinstance(value, torch.Tensor) and value.layout is torch.strided)
    return f"{tuple(value.size())} {value.dtype}" if dense else "not a dense tensor"


def check_groups(saved: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    """Raise unless the groups of two optimizers have the same parameters by name, in any order."""
    names, present_names = ([list(group["params"]) for group in groups] for groups in (saved, present))
    if not all(type(name) is str for group in names for name in group):
        raise CheckpointError("its optimizer's groups are not lists of parameters")
    if sorted(map(sorted, names)) == sorted(map(sorted, present_names)):
        return
    differing = sorted(set(chain(*names)) ^ set(chain(*present_names)))
    problem = f"{', '.join(differing[:5])} in only one of them"
    if not differing:
        problem = f"{list(map(len, names))} parameters there, {list(map(len, present_names))} here, or in other groups"
    raise CheckpointError(f"checkpoint and optimizer do not have the same groups: {problem}: use the saved groups")


def check_optimizer_state(state: Any) -> None:
    """Raise unless `state` has the structure of an ``optimizer.state_dict()``."""
    entries, groups = (state.get(key) if isinstance(state, Mapping) else None for key in ("state", "param_groups"))
    if not (
        isinstance(entries, Mapping)
        and all(isinstance(entry, Mapping) for entry in entries.values())
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and all(type(name) in (int, str) for group in groups for name in group["params"])
    ):
        raise CheckpointError(
            "the checkpoint's optimizer is not a state_dict with 'state' and 'param_groups': save its state_dict()"
        )


def with_masters(state_dict: Mapping[str, Any], masters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Add fp32 masters to an optimizer's `state_dict`, for `halfstep.AdamW.load_state_dict`.

    apex does not save its masters there: they are ``list(amp.master_params(optimizer))`` with opt_level O2, and
    ``optimizer.master_params`` of a ``FusedAdam(use_master=True)``. Parameters without state get moments of zeros.

    Args:
        state_dict: a dict with ``state`` and ``param_groups``. It is not modified; a copy is returned.
        masters: floating-point tensors, one per parameter in the order of the groups.

    Raises:
        ValueError: the number of masters differs from that of the parameters, or one is not a floating-point tensor.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = halfstep.AdamW([weight])
        >>> state = checkpoint.with_masters(optimizer.state_dict(), [torch.tensor([1.0001, 1.0002])])
        >>> optimizer.load_state_dict(state)
        >>> optimizer.masters()[weight]
        tensor([1.0001, 1.0002])
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    masters = list(masters)
    if len(masters) != len(indices):
        raise ValueError(
            f"Expected masters to have {len(indices)} tensors, one for each parameter in the checkpoint, in the order "
            f"of its groups, but got {len(masters)}"
        )
    state = dict(state_dict["state"])
    for position, (index, master) in enumerate(zip(indices, masters, strict=True)):
        if not isinstance(master, torch.Tensor) or not master.is_floating_point():
            actual = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
            raise ValueError(f"Expected masters[{position}] to be a floating-point tensor, but got {actual}")
        master = master.detach().float()
        zeros = torch.zeros_like(master)
        entry = state.get(index) or {"step": 0.0, "exp_avg": zeros, "exp_avg_sq": zeros}
        state[index] = {**entry, "master": master}
    return {**state_dict, "state": state}


# ------------------------------------------------------------------------------------------------------------ rollback


def restoring(undo: ExitStack, value: Any, depth: int = 4, numbers: bool = True) -> None:
    """Make `undo` restore `depth` levels of dicts and lists, and the values of tensors with one element.

    For the ``vars`` of an optimizer, these are its state and options. Loading replaces the tensors of the state instead
    of writing to them, so keeping references to them is enough.
    """
    if isinstance(value, dict | list) and depth:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        undo.callback(_refill, value, items)
        for key, item in items.items():
            restoring(undo, item, depth - 1, numbers and key != "state")
    elif isinstance(value, torch.Tensor) and depth and numbers and value.numel() == 1:
        undo.callback(value.detach().copy_, value.detach().clone())


def _refill(container: Any, items: dict[Any, Any]) -> None:
    container.clear()
    container.update(items) if isinstance(container, dict) else container.extend(items.values())


@contextmanager
def unchanged_on_error(optimizer: Any) -> Iterator[None]:
    """Restore an optimizer if the block fails, and raise its error as a CheckpointError."""
    with explained("the checkpoint's optimizer does not fit this one", errors=Exception), ExitStack() as undo:
        restoring(undo, vars(optimizer))
        yield
        undo.pop_all()
