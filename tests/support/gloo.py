"""Process groups on CPUs with correct means: with `ReduceOp.AVG`, torch 2.8's gloo returns the sum.

FSDP2 uses it, so its gradients are too large by the number of ranks, with every optimizer (docs/versions.md).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def start(rank: int, world: int, timeout: timedelta | None = None) -> None:
    """`init_process_group` with gloo, and with a corrected `reduce_scatter_tensor` if necessary."""
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    mean = torch.empty(1, device="cpu")
    dist.reduce_scatter_tensor(mean, torch.ones(world, device="cpu"), op=dist.ReduceOp.AVG)
    if mean.item() == 1:
        return
    scatter = dist.reduce_scatter_tensor

    def scatter_mean(
        output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
    ) -> Any:
        work = scatter(output, input, op, group, **options)
        if op == dist.ReduceOp.AVG:
            assert work is None, "a sum that is not there yet cannot be divided"
            output.div_(dist.get_world_size(group))
        return work

    dist.reduce_scatter_tensor = scatter_mean
