"""A rank of a two-process run whose memory and messages are counted; started by test_planning_sharded.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from counted_bytes import Outputs, counted, storage_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfstep

WORLD = 2
# Odd rows, so that shards are uneven; a bias of one element, of which rank 1 has none.
BLOCKS = ((7, 5), (5, 7), (7, 5))
EVEN_BLOCKS = ((8, 8), (8, 8), (8, 8))


class Block(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, rows)
        self.norm = nn.LayerNorm(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()


class Model(nn.Module):
    def __init__(self, blocks: tuple[tuple[int, int], ...] = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows, columns) for rows, columns in blocks)
        self.head = nn.Linear(blocks[-1][0], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, columns: int = BLOCKS[0][1]) -> None:
    model(torch.randn(4, columns, dtype=dtype)).float().square().mean().backward()
    optimizer.step()


def fsdp2(
    dtype: torch.dtype, mesh: Any = None, blocks: tuple[tuple[int, int], ...] = BLOCKS, **policy: Any
) -> nn.Module:
    model = Model(blocks).to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def under_fsdp2(dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], mesh: Any = None) -> dict[str, int]:
    model = fsdp2(dtype, mesh)
    optimizer = make(model.parameters())
    step(model, optimizer, dtype)
    return counted(model.parameters(), optimizer)


def under_fsdp1() -> dict[str, int]:
    model = FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=False
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.float32)
    return counted(model.parameters(), optimizer)


def under_zero1(dtype: torch.dtype, kind: type[torch.optim.Optimizer]) -> dict[str, int]:
    model = DistributedDataParallel(Model().to(dtype))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=1e-3)
    step(model, optimizer, dtype)
    return counted(model.parameters(), optimizer.optim)


def under_ddp(view: bool) -> dict[str, int]:
    """Weights, gradients and buckets, and what was reduced; storages that gradients and buckets share count once."""
    model = DistributedDataParallel(Model().bfloat16(), gradient_as_bucket_view=view)
    optimizer = halfstep.AdamW(model.parameters())
    buckets: list[torch.Tensor] = []

    def keep(state, bucket):  # DDP compares annotations with its classes, and here they are text
        buckets.append(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, keep)
    for _ in range(2):  # the buckets are rebuilt after the first backward
        buckets.clear()
        optimizer.zero_grad()
        step(model, optimizer, torch.bfloat16)
    gradients = [p.grad for p in model.parameters()]
    made = counted(model.parameters(), optimizer)
    made["gradients and buckets"] = storage_bytes([*gradients, *buckets])
    made["reduced"] = sum(bucket.numel() * bucket.element_size() for bucket in buckets)
    return made


def messages(**policy: Any) -> list[tuple[str, int]]:
    """The whole buffers that FSDP2 gathers and scatters in one step, in bytes and in order."""
    model = fsdp2(torch.float32, None, EVEN_BLOCKS, **policy)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.float32, columns=EVEN_BLOCKS[0][1])
    with Outputs() as seen:
        step(model, optimizer, torch.float32, columns=EVEN_BLOCKS[0][1])
    # The first argument is the output, the second the input; the whole buffer is the larger one.
    return [
        (name, max(tensor.numel() * tensor.element_size() for tensor in args[:2]))
        for name, args, _ in seen.made
        if name in ("_allgather_base_", "_reduce_scatter_base_")
    ]


SHAPE = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 6, "seq": 5}


def under_tensor_parallelism(mesh: Any) -> int:
    """Bytes of one rank's weights: a block and what stands around it, cut as Megatron-LM cuts them."""
    hidden, vocab = SHAPE["hidden"], SHAPE["vocab"]
    across = {"query": 1, "key": 1, "value": 1, "up": 4}
    model = nn.ModuleDict({name: nn.Linear(hidden, times * hidden) for name, times in across.items()})
    model["out"], model["down"] = nn.Linear(hidden, hidden), nn.Linear(4 * hidden, hidden)
    model["embedding"], model["positions"] = nn.Embedding(vocab, hidden), nn.Embedding(SHAPE["seq"], hidden)
    for name in ("norm1", "norm2", "norm"):
        model[name] = nn.LayerNorm(hidden)
    model["head"] = nn.Linear(hidden, vocab, bias=False)
    cut = {name: ColwiseParallel() for name in (*across, "head")}
    parallelize_module(model, mesh, {**cut, **{name: RowwiseParallel() for name in ("out", "down", "embedding")}})
    return storage_bytes(list(model.parameters()))


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        hybrid = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        result = {
            "fsdp split": under_fsdp2(torch.bfloat16, halfstep.AdamW),
            "fsdp full": under_fsdp2(torch.float16, halfstep.AdamW),
            "fsdp torch": under_fsdp2(torch.float32, torch.optim.AdamW),
            "hsdp": under_fsdp2(torch.bfloat16, halfstep.AdamW, hybrid),
            "fsdp1": under_fsdp1(),
            "zero1 split": under_zero1(torch.bfloat16, halfstep.AdamW),
            "zero1 torch": under_zero1(torch.float32, torch.optim.AdamW),
            "ddp": under_ddp(view=False),
            "ddp view": under_ddp(view=True),
            "tensor parallel": under_tensor_parallelism(init_device_mesh("cpu", (WORLD,))),
            "messages": messages(),
            "messages mixed": messages(mp_policy=mixed),
        }
        torch.save(result, os.path.join(folder, f"rank{rank}.pt"))
        gc.collect()  # as in sharded_training.py
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # as in sharded_training.py
