"""State dicts of whole tensors, for checkpoints without a model and for state from elsewhere.

`gather` collects sharded tensors (DTensors of FSDP2) as complete tensors on the CPU, and `scatter` shards them for the
mesh of the run that loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from halfstep.integrations.checkpoint.folder import CheckpointError
from halfstep.integrations.checkpoint.rollback import Rollback
from halfstep.integrations.optim.foreign_codes import decode
from halfstep.numerics.state_layout import CODE_KEYS, SCALE_KEYS


def gather(state: Any) -> Any:
    """A copy of nested dicts and lists with all tensors complete and on the CPU.

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
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    # Every rank has read the same file, so each takes its shard and nothing is sent.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy gathered parameters and buffers into `model`, sharded or not.

    Raises:
        CheckpointError: a name, shape or dtype differs. Nothing was copied.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> saved, model = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> checkpoint.load_model(model, checkpoint.gather(saved.state_dict()))
        >>> torch.equal(model.weight, saved.weight)
        True
    """
    own = model.state_dict()
    if not isinstance(state, Mapping) or own.keys() != state.keys():
        keys = state.keys() if isinstance(state, Mapping) else set()
        differing = ", ".join(sorted(map(str, own.keys() ^ keys))[:5])
        raise CheckpointError(
            f"checkpoint and model do not have the same tensors: {differing}; load it into its own model"
        )
    for name, value in own.items():
        if not isinstance(state[name], torch.Tensor) or state[name].layout is not torch.strided:
            raise CheckpointError(f"{name} is not a dense tensor in the checkpoint; load it into its own model")
        if value.shape != state[name].shape or value.dtype != state[name].dtype:
            raise CheckpointError(
                f"{name} is {tuple(state[name].shape)} {state[name].dtype} in the checkpoint and {tuple(value.shape)} "
                f"{value.dtype} in the model; load it into a model of the same size and precision"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(scatter(state[name], value))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a gathered ``optimizer.state_dict()``. Tensors with the shape of their parameter are sharded like it.

    States of whole parameters of the 8-bit optimizers of bitsandbytes, torchao and flashoptim are decoded first.

    Raises:
        CheckpointError: the state is of another optimizer, or damaged. The optimizer is unchanged.

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
            f"the checkpoint's optimizer has {len(numbers)} parameters, this one {len(parameters)}; use the same model"
        )
    of = dict(zip(numbers, parameters, strict=True))

    def cut(number: int, key: str, value: Any) -> Any:
        # Codes are decoded with their scales before they are cut.
        whole = key in CODE_KEYS or key in SCALE_KEYS
        shapes = of[number].shape, (*of[number].shape, 2)  # the latter of remainders in pairs of bytes
        fits = isinstance(value, torch.Tensor) and value.shape in shapes and not whole
        return scatter(value, of[number]) if fits else value

    rollback = Rollback(None, optimizer)
    try:
        cut_state = {
            number: {
                key: cut(number, key, value) for key, value in decode(entry, f"state of parameter {number}").items()
            }
            for number, entry in state["state"].items()
            if number in of
        }
        optimizer.load_state_dict({**state, "state": cut_state})
    except BaseException as error:
        rollback.put_back()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {error}") from error


def check_optimizer_state(state: Any) -> None:
    """Raise unless `state` has the structure of an ``optimizer.state_dict()``.

    Raises:
        CheckpointError: it has another structure.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    whole = isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values())
    named = isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(type(one) in (int, str) for one in group["params"])
        for group in groups
    )
    if not whole or not named:
        raise CheckpointError(
            "the checkpoint's optimizer is not a state_dict with 'state' and 'param_groups'; load what was saved as one"
        )


def with_masters(state_dict: Mapping[str, Any], masters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Add fp32 masters to an optimizer's `state_dict`, for `halfstep.AdamW.load_state_dict`.

    apex does not save them in it: they are ``list(amp.master_params(optimizer))`` with opt_level O2, and
    ``optimizer.master_params`` of a ``FusedAdam(use_master=True)``. Parameters without state get a state of zeros.

    Args:
        state_dict: a dict with ``state`` and ``param_groups``, which is not changed.
        masters: floating-point tensors, one per parameter in the order of the groups.

    Returns:
        A copy of `state_dict` with the masters.

    Raises:
        ValueError: the number of masters is not that of the parameters, or one is not a floating-point tensor.

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
    for place, (index, master) in enumerate(zip(indices, masters, strict=True)):
        if not isinstance(master, torch.Tensor) or not master.is_floating_point():
            what = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
            raise ValueError(f"Expected masters[{place}] to be a floating-point tensor, but got {what}")
        master = master.detach().float()
        zeros = torch.zeros_like(master)
        entry = state.get(index) or {"step": 0.0, "exp_avg": zeros, "exp_avg_sq": zeros}
        state[index] = {**entry, "master": master}
    return {**state_dict, "state": state}
