"""GPT-2 on one rank of eight fake ranks; prints the bytes of its weights and of AdamW's states."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from counted_bytes import counted
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from halfstep.numerics.planning import MODELS, Transformer


def model_of(shape: Transformer) -> nn.Module:
    """Modules with parameters of the shapes of each unit."""

    def module(tensors: tuple) -> nn.Module:
        return nn.ParameterList(nn.Parameter(torch.empty(tensor.shape)) for tensor in tensors)

    block, root = shape.units()
    model = nn.Module()
    model.blocks = nn.ModuleList(module(block.tensors) for _ in range(block.count))
    model.root = module(root.tensors)
    return model


def main(rank: int, world: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    with torch.device("meta"):
        model = model_of(MODELS["gpt2"])
    mesh = dist.init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    print(json.dumps(counted(model.parameters(), optimizer)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
