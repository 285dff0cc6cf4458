"""DistributedDataParallel: gradients sent in 16 bits, divided before they are rounded.

torch's ``fp16_compress_hook`` rounds each rank's gradient to fp16 and divides after that, so 70000 on one of two ranks
is sent as infinity. The hooks here divide by the number of ranks first, in the gradient's dtype, and round once: 70000
arrives as 35000, and only a mean beyond 65504 overflows. They run on every backend that adds their dtype; gloo and NCCL
add both.

    model.register_comm_hook(model.process_group, mean_in_fp16_hook)  # half the bytes of fp32 gradients
    model.register_comm_hook(model.process_group, mean_in_bf16_hook)  # the same, with fp32's range, 8 bits of precision
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the hooks' annotations with the types.
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future


def _mean(dtype: torch.dtype, group: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    buffer = bucket.buffer()
    shrunk = torch.empty_like(buffer, dtype=dtype)
    torch.mul(buffer, 1.0 / group.size(), out=shrunk)  # multiplied in fp32 and rounded once

    def decompress(done: Future[Any]) -> torch.Tensor:
        found = done.value()
        return buffer.copy_(found if isinstance(found, torch.Tensor) else found[0])

    return dist.all_reduce(shrunk, group=group, async_op=True).get_future().then(decompress)


def mean_in_fp16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The mean over ranks, sent and added in fp16.

    Args:
        state: the process group; None for the default group.
        bucket: of gradients.
    """
    return _mean(torch.float16, state, bucket)


def mean_in_bf16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """The mean over ranks, sent and added in bf16.

    Args:
        state: the process group; None for the default group.
        bucket: of gradients.
    """
    return _mean(torch.bfloat16, state, bucket)


HOOKS = {"fp16": mean_in_fp16_hook, "bf16": mean_in_bf16_hook}
