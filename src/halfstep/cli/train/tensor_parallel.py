"""Tensor parallelism of the GPT: attention heads and the MLP's hidden units divided among the ranks (Megatron-LM).

Each rank computes its heads and its hidden units, and the ranks' outputs are added up: one reduction for each attention
and each MLP in the forward pass, and one in the backward pass. Embeddings, norms and the head are plain tensors, the
same on every rank: they see the same numbers, and so get the same gradients, without a word sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module


class _Divided(ParallelStyle):
    """A module whose weights are cut, each along its own dimension: whole input, output to be summed over ranks."""

    def __init__(self, **dimensions: int) -> None:
        super().__init__()
        self.dimensions = dimensions

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._enter, self._leave)  # type: ignore[arg-type]  # what it returns counts

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for weight, dimension in self.dimensions.items():
            whole = getattr(module, weight).detach()
            # every rank has drawn the same weights, so each takes its part and nothing is sent
            part = distribute_tensor(whole, mesh, [Shard(dimension)], src_data_rank=None)
            module.register_parameter(weight, nn.Parameter(part))

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> Any:
        (x,) = inputs
        # each rank's gradient of the input is one summand
        return (DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()]),)

    @staticmethod
    def _leave(module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        summed = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local()


def divide(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide a `GPT` among the ranks of a one-dimensional mesh, whose size divides the number of heads."""
    plan: dict[str, ParallelStyle] = {
        "blocks.*.attention": _Divided(qkv=0, out=1),
        "blocks.*.mlp": _Divided(up=0, down=1),
    }
    return parallelize_module(model, mesh, plan)
