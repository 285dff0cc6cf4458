"""Functions that run on ranks, for tests/integrations/distributed/test_rank_processes.py."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

IMPORTED = os.environ.get("HALFSTEP_SAMPLE")


def seen(rank: int, name: str) -> dict[str, Any]:
    """An environment variable now and at the import, the process id, and the sum of all ranks."""
    total = torch.tensor(float(rank))
    if dist.is_initialized():
        dist.all_reduce(total)
    variables = {key: os.environ.get(key) for key in (name, "RANK", "WORLD_SIZE")}
    return {**variables, "imported": IMPORTED, "process": os.getpid(), "sum": total, "order": hash(name)}


def failing(rank: int, broken: int) -> None:
    """Rank `broken` raises, and the others wait for it."""
    if rank == broken:
        raise ValueError(f"rank {rank} is broken")
    dist.barrier()
