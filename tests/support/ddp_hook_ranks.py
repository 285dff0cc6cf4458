"""Communication hooks of DDP that divide before they round, on two ranks, for test_cases_on_ranks.py."""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations import ddp

INF, NAN = math.inf, math.nan
GRADIENTS = ([70000.0, 6e-8, 1.0, INF, NAN, 3.4e38], [0.0, 6e-8, 3.0, -INF, 1.0, 0.0])


class GradientIsInput(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def hooks_divide_before_they_round(group: Any) -> None:
    def reduced(hook: Any) -> torch.Tensor:
        model = DistributedDataParallel(GradientIsInput())
        model.register_comm_hook(group() if group else None, hook)
        model(torch.tensor(GRADIENTS[dist.get_rank()])).backward()
        return model.module.weight.grad

    fp16, bf16 = reduced(ddp.HOOKS["fp16"]), reduced(ddp.HOOKS["bf16"])
    assert reduced(default_hooks.fp16_compress_hook)[0] == INF, "torch casts first"
    assert fp16[:3].tolist() == [35008.0, 2.0**-23, 2.0], "35000 and 3e-8 to nearest"
    assert bf16[0] == 35072.0 and bf16[2] == 2.0 and abs(bf16[1] - 6e-8) <= 2**-8 * 6e-8
    for grad in (fp16, bf16):
        assert grad[3:5].isnan().all(), "infinities of both signs and NaN stay"
    assert fp16[5] == INF and bf16[5].isfinite()


CASES = {
    "hooks, default group": partial(hooks_divide_before_they_round, None),
    "hooks, a group": partial(hooks_divide_before_they_round, lambda: dist.group.WORLD),
}
