"""Two ranks under DistributedDataParallel with gradients that some communication hooks lose; see test_ddp_hooks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations import ddp

INF, NAN = float("inf"), float("nan")
GRADIENTS = ([70000.0, 6e-8, 1.0, INF, NAN, 3.4e38], [0.0, 6e-8, 3.0, -INF, 1.0, 0.0])


class Given(torch.nn.Module):
    """A module whose gradient is its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def run(rank: int) -> dict[str, torch.Tensor]:
    """The reduced gradient with each hook, with the default process group and with a given one."""
    mine = torch.tensor(GRADIENTS[rank])
    hooks = {**ddp.HOOKS, "torch": default_hooks.fp16_compress_hook}
    found = {}
    for name, hook in hooks.items():
        for group in (None, dist.group.WORLD):
            model = DistributedDataParallel(Given(len(mine)))
            model.register_comm_hook(group, hook)
            model(mine).backward()
            found[f"{name}, {'default' if group is None else 'given'}"] = model.module.weight.grad.clone()
    return found
