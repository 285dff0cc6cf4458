"""Tensor parallelism of the GPT: attention heads and hidden units of the MLP are sharded over the ranks (Megatron-LM).

Each rank computes its heads and its hidden units, and the outputs of all ranks are added: one all-reduce for each
attention and each MLP in the forward, and one in the backward. Embeddings, norms and the head are plain tensors,
replicated on every rank. Their inputs are the same on all ranks, so their gradients need no communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module


class _Sharded(ParallelStyle):
    """A module with sharded weights. Its input is replicated, and its outputs are added over the ranks.

    Args:
        dimensions: the sharded dimension of each weight.
    """

    def __init__(self, **dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch's annotation of the input and output functions lacks their return values.
        return distribute_module(module, device_mesh, self._shard, self._enter, self._leave)  # type: ignore[arg-type]

    def _shard(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for weight, dimension in self.dimensions.items():
            whole = getattr(module, weight).detach()
            # All ranks have drawn the same weights, so nothing needs to be sent.
            part = distribute_tensor(whole, mesh, [Shard(dimension)], src_data_rank=None)
            module.register_parameter(weight, nn.Parameter(part))

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> Any:
        (x,) = inputs
        # The gradient of the input is the sum over all ranks.
        return (DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()]),)

    @staticmethod
    def _leave(module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        summed = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local()


def divide(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a `GPT` over the ranks of a one-dimensional mesh, whose size must divide the number of heads."""
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention": _Sharded(qkv=0, out=1),
        "blocks.*.mlp": _Sharded(up=0, down=1),
    }
    return parallelize_module(model, mesh, plan)
