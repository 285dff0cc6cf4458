"""Processes whose memory and messages are counted, for test_planning_sharded.py and planned_strategies.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from counted_bytes import Messages, counted, storage_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.integrations import ddp

WORLD = 2
# Odd rows, so that shards are uneven; a bias of one element, of which rank 1 has none.
BLOCKS = ((7, 5), (5, 7), (7, 5))
CODED_BLOCKS = ((33, 200), (200, 33), (33, 200))  # matrices of more than 4,096 elements


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


def under_fsdp2(
    dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], blocks: tuple[tuple[int, int], ...] = BLOCKS
) -> dict[str, int]:
    model = Model(blocks).to(dtype)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make(model.parameters())
    step(model, optimizer, dtype, blocks[0][1])
    return counted(model.parameters(), optimizer)


def under_fsdp1() -> dict[str, int]:
    model = FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=False
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.float32)
    return counted(model.parameters(), optimizer)


def under_zero1(
    dtype: torch.dtype,
    kind: type[torch.optim.Optimizer],
    blocks: tuple[tuple[int, int], ...] = BLOCKS,
    **options: Any,
) -> dict[str, int]:
    model = DistributedDataParallel(Model(blocks).to(dtype))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, lr=1e-3, **options)
    step(model, optimizer, dtype, blocks[0][1])
    return counted(model.parameters(), optimizer.optim)


def under_ddp(view: bool) -> dict[str, int]:
    """Bytes of weights, gradients and buckets, and of reductions. Shared storages count once."""
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


# Every strategy trains this one. Five positions are uneven shards, and a norm's eight elements even ones.
SHAPE = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 6, "seq": 5}
BATCH = 3


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # As many heads as this rank has rows of `qkv` for; which rows are whose does not matter here.
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The planner's `Transformer(**shape)`."""

    def __init__(self, shape: dict[str, int] = SHAPE) -> None:
        super().__init__()
        hidden, vocab = shape["hidden"], shape["vocab"]
        self.embedding, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(shape["seq"], hidden)
        self.blocks = nn.ModuleList(Layer(hidden, shape["heads"]) for _ in range(shape["layers"]))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cut(model: GPT, mesh: Any) -> GPT:
    """Shard a module over tensor-parallel ranks as in Megatron-LM."""
    rows = ("blocks.*.out", "blocks.*.down")
    styles: dict[str, Any] = {name: ColwiseParallel() for name in ("blocks.*.qkv", "blocks.*.up")}
    styles |= {name: RowwiseParallel() for name in rows}
    styles["embedding"] = RowwiseParallel(input_layouts=Replicate())
    styles["head"] = ColwiseParallel(use_local_output=False)
    return parallelize_module(model, mesh, styles)


def strategies(mesh: Any) -> dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]]:
    """The wrapped GPT and its optimizer under each strategy."""
    ours = partial(halfstep.AdamW, lr=1e-3)

    def replicated(dtype: torch.dtype, hook: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(GPT().to(dtype))
        if hook:
            model.register_comm_hook(None, ddp.HOOKS[hook])
        return model, ours(model.parameters())

    def zero1() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(GPT().bfloat16())
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=halfstep.AdamW, lr=1e-3)

    def sharded(dtype: torch.dtype, **policy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = GPT().to(dtype)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **policy)
        return fully_shard(model, mesh=mesh, **policy), ours(model.parameters())

    def fsdp1() -> tuple[nn.Module, torch.optim.Optimizer]:
        device, units = torch.device("cpu"), ModuleWrapPolicy({Layer})
        model = FullyShardedDataParallel(
            GPT().bfloat16(), auto_wrap_policy=units, device_id=device, use_orig_params=False
        )
        return model, ours(model.parameters())

    def tensor_parallel() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = cut(GPT().bfloat16(), mesh)
        return model, ours(model.parameters())

    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "ddp": partial(replicated, torch.bfloat16),
        "ddp, fp32": partial(replicated, torch.float32),
        "ddp, fp32 sent as fp16": partial(replicated, torch.float32, "fp16"),
        "ddp, fp32 sent as bf16": partial(replicated, torch.float32, "bf16"),
        "zero1-torch": zero1,
        "fsdp": partial(sharded, torch.bfloat16),
        "fsdp, fp32 gathered as bf16": partial(sharded, torch.float32, mp_policy=mixed),
        "fsdp1": fsdp1,
        "tensor parallel": tensor_parallel,
    }


def one_step(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]) -> dict[str, Any]:
    """The bytes on a rank after its third step, and every collective of that step, with clipping and a loss scale."""
    model, optimizer = make()
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    tokens = torch.randint(SHAPE["vocab"], (BATCH, SHAPE["seq"] + 1))
    for _ in range(3):  # DDP builds its buckets in the first, and optimizers their states
        with Messages() as seen:
            optimizer.zero_grad()
            with loss_parallel():  # which changes nothing without a head that is divided
                logits = model(tokens[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                scaler.scale(loss).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    held = counted(model.parameters(), getattr(optimizer, "optim", optimizer))
    return {"held": held, "sent": seen.plain()}


@contextmanager
def joined(rank: int, world: int, port: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
        gc.collect()  # as in rank_processes.py
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_two() -> dict[str, Any]:
    result = {
        "fsdp split": under_fsdp2(torch.bfloat16, halfstep.AdamW),
        "fsdp full": under_fsdp2(torch.float16, halfstep.AdamW),
        "fsdp torch": under_fsdp2(torch.float32, torch.optim.AdamW),
        "fsdp 8bit": under_fsdp2(torch.bfloat16, partial(halfstep.AdamW, state_dtype="8bit"), CODED_BLOCKS),
        "fsdp1": under_fsdp1(),
        "zero1 split": under_zero1(torch.bfloat16, halfstep.AdamW),
        "zero1 8bit": under_zero1(torch.bfloat16, halfstep.AdamW, CODED_BLOCKS, state_dtype="8bit"),
        "zero1 torch": under_zero1(torch.float32, torch.optim.AdamW),
        "ddp": under_ddp(view=False),
        "ddp view": under_ddp(view=True),
    }
    made = strategies(init_device_mesh("cpu", (WORLD,)))
    return {**result, "strategies": {name: one_step(make) for name, make in made.items()}}


def on_four() -> dict[str, Any]:
    """Trainings on four ranks: HSDP in two groups of two, and strategies for any number of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = strategies(init_device_mesh("cpu", (2 * WORLD,)))
    names = ("ddp", "ddp, fp32 sent as bf16", "zero1-torch", "fsdp", "fsdp1")
    return {"hsdp": one_step(strategies(mesh)["fsdp"]), **{f"{name} on 4": one_step(made[name]) for name in names}}


def run(rank: int, ports: list[int]) -> dict[str, Any]:
    """The first two processes alone, then all four."""
    result: dict[str, Any] = {"strategies": {}}
    if rank < WORLD:
        with joined(rank, WORLD, ports[0]):
            result = on_two()
    with joined(rank, 2 * WORLD, ports[1]):
        result["strategies"] |= on_four()
    return result


def measured() -> list[dict[str, Any]]:
    """The counts of each of the four ranks."""
    with rank_processes.ports(2) as ports:
        return rank_processes.run(run, 2 * WORLD, ports, join=False)
