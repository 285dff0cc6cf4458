"""DistributedDataParallel: communication hooks that send gradients in 16 bits, and divide before rounding.

torch's ``fp16_compress_hook`` rounds each rank's gradient to fp16 and divides afterwards, so a gradient of 70000 on one
of two ranks is sent as Inf. The hooks here first divide by the number of ranks, in the gradient's dtype, and round
once: 70000 is sent as 35000, and only a mean above 65504 overflows. The backend must be able to sum the 16-bit dtype,
as gloo and NCCL are.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the hooks' annotations with types.
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future


def _mean(dtype: torch.dtype, group: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    buffer = bucket.buffer()
    shrunk = torch.empty_like(buffer, dtype=dtype)
    torch.mul(buffer, 1.0 / group.size(), out=shrunk)  # multiplies in fp32, then rounds once

    def decompress(done: Future[Any]) -> torch.Tensor:
        mean = done.value()
        return buffer.copy_(mean if isinstance(mean, torch.Tensor) else mean[0])

    return dist.all_reduce(shrunk, group=group, async_op=True).get_future().then(decompress)


def mean_in_fp16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average gradients over the ranks of a process group, sending and summing them in fp16.

    Sends half the bytes of fp32 gradients, with 11 bits of precision and a maximum of 65504.

    Args:
        state: the process group; None for the default group.
        bucket: the gradients that DDP reduces in one message.

    Returns:
        A future of the averaged gradients, in the dtype of the bucket.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from halfstep.integrations.ddp import mean_in_fp16_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        >>> model.register_comm_hook(None, mean_in_fp16_hook)
        >>> model(torch.tensor([[1.0001]])).sum().backward()
        >>> model.module.weight.grad  # 1.0001 in fp16
        tensor([[1.]])
        >>> dist.destroy_process_group()
    """
    return _mean(torch.float16, state, bucket)


def mean_in_bf16_hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average gradients over the ranks of a process group, sending and summing them in bf16; see `mean_in_fp16_hook`.

    Sends half the bytes of fp32 gradients, with the range of fp32 and 8 bits of precision.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from halfstep.integrations.ddp import mean_in_bf16_hook
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        >>> model.register_comm_hook(None, mean_in_bf16_hook)
        >>> model(torch.tensor([[1e6]])).sum().backward()
        >>> model.module.weight.grad  # 1e6 in bf16; in fp16 it would be Inf
        tensor([[999424.]])
        >>> dist.destroy_process_group()
    """
    return _mean(torch.bfloat16, state, bucket)


HOOKS = {"fp16": mean_in_fp16_hook, "bf16": mean_in_bf16_hook}
