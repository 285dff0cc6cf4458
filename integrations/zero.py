"""ZeRO-1: gather the state of a `ZeroRedundancyOptimizer`, and load it on any number of ranks.

``ZeroRedundancyOptimizer.load_state_dict`` copies checkpoint entries into the state of the local optimizer without
calling the local optimizer's ``load_state_dict``. The next step converts them to the optimizer's layout: until then
they take as many bytes as in the checkpoint, and are not validated. The functions here pass each rank's part through
the local optimizer's own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from halfstep.integrations.checkpoint.atomic import CheckpointError
from halfstep.integrations.checkpoint.whole import check_optimizer_state, gather, unchanged_on_error
from halfstep.integrations.optim.classes import saving
from halfstep.integrations.optim.options import check_format
from halfstep.numerics.scaling.decision import parameters_of


def state_dict(
    optimizer: ZeroRedundancyOptimizer, *, optimizer_state: Literal["held", "canonical"] = "held"
) -> dict[str, Any]:
    """Gather the state dict that the local optimizer would return if one process had all parameters.

    All ranks of the optimizer's process group must call this.

    Args:
        optimizer: an optimizer whose local optimizer is a halfstep optimizer.
        optimizer_state: ``"held"`` gathers the state as it is in memory, ``"canonical"`` in fp32.

    Returns:
        On the first rank of the process group, the state of all parameters, unsharded and on the CPU, numbered as in
        ``optimizer.param_groups``. On the other ranks, ``state`` is empty.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.optim import ZeroRedundancyOptimizer
        >>> from halfstep.integrations import zero
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = ZeroRedundancyOptimizer([weight], halfstep.AdamW, lr=0.5)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> zero.state_dict(optimizer, optimizer_state="canonical")["state"][0]["master"]
        tensor([0.4950, 0.4950])
        >>> dist.destroy_process_group()
    """
    group = optimizer.process_group
    number_of = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    for inner, outer in zip(optimizer.optim.param_groups, optimizer.param_groups, strict=True):
        # Schedulers update the outer groups only.
        inner.update({name: value for name, value in outer.items() if name != "params"})
    check_format(optimizer_state, "optimizer_state")
    with saving(optimizer.optim, optimizer_state):
        local = optimizer.optim.state_dict()
    numbered = enumerate(parameters_of(optimizer.optim))
    part = {number_of[id(p)]: gather(local["state"][number]) for number, p in numbered if number in local["state"]}
    first = group.rank() == 0
    parts: list[Any] = [None] * group.size()
    dist.gather_object(part, parts if first else None, group=group, group_dst=0)
    groups = [
        {**saved, "params": [number_of[id(parameter)] for parameter in outer["params"]]}
        for saved, outer in zip(local["param_groups"], optimizer.param_groups, strict=True)
    ]
    states = {number: entry for entries in parts if entries is not None for number, entry in entries.items()}
    return {"state": dict(sorted(states.items())), "param_groups": groups}


def load_state_dict(optimizer: ZeroRedundancyOptimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of a complete state.

    Args:
        optimizer: an optimizer of the same parameters, in the same order and groups, on any number of ranks.
        state: the result of `state_dict`, or the state of an unsharded optimizer of the same parameters. It must be the
            same on every rank.

    Raises:
        CheckpointError: the number of parameters or groups differs, or the state is damaged. Nothing is changed.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.optim import ZeroRedundancyOptimizer
        >>> from halfstep.integrations import zero
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> one_process = halfstep.AdamW([weight], lr=0.5)
        >>> weight.grad = torch.ones_like(weight)
        >>> one_process.step()
        >>> optimizer = ZeroRedundancyOptimizer([weight], halfstep.AdamW)
        >>> zero.load_state_dict(optimizer, one_process.state_dict())
        >>> optimizer.param_groups[0]["lr"], zero.state_dict(optimizer)["state"][0]["exp_avg"]
        (0.5, tensor([0.1000, 0.1000]))
        >>> dist.destroy_process_group()
    """
    check_optimizer_state(state)
    parameters = parameters_of(optimizer)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters) or len(state["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(numbers)} parameters in {len(state['param_groups'])} groups, this "
            f"one {len(parameters)} in {len(optimizer.param_groups)}: use the same model and groups"
        )
    number_of = {id(parameter): number for parameter, number in zip(parameters, numbers, strict=True)}
    groups = [
        {**saved, "params": [number_of[id(parameter)] for parameter in inner["params"]]}
        for saved, inner in zip(state["param_groups"], optimizer.optim.param_groups, strict=True)
    ]
    local = {number for group in groups for number in group["params"]}
    entries = {number: entry for number, entry in state["state"].items() if number in local}
    with unchanged_on_error(optimizer.optim):
        optimizer.optim.load_state_dict({"state": entries, "param_groups": groups})
    for outer, inner in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        outer.update({name: value for name, value in inner.items() if name != "params"})
