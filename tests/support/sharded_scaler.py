"""A rank of two whose gradients overflow on rank 1 only, for test_bugs_of_others.py.

Each rank has different parameters, like the shards of FSDP1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import halfstep


def overflow(scaler: Any, make: Any, rank: int, unscale: bool) -> dict[str, Any]:
    """Two steps, the first with an Inf on rank 1. Returns the parameter of the rank and the scale."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = make([p])
    error = ""
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if step == 0 and rank == 1:
            p.grad[2] = float("inf")
        try:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        except RuntimeError as caught:
            error = str(caught)
            break
        scaler.update()
    steps = optimizer.state[p].get("step", 0)
    return {"weight": p[0].item(), "scale": scaler.get_scale(), "step": float(steps), "error": error}


def run(rank: int) -> dict[tuple[str, bool], dict[str, Any]]:
    result = {}
    for unscale in (False, True):
        ours = halfstep.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
        theirs = ShardedGradScaler("cpu", init_scale=8.0)
        result["ours", unscale] = overflow(ours, halfstep.AdamW, rank, unscale)
        result["torch", unscale] = overflow(theirs, lambda ps: torch.optim.AdamW(ps, fused=True), rank, unscale)
    return result
