"""A small byte-level GPT: pre-norm blocks, learned positions, no biases, attention with `halfstep.softmax`.

It consists of plain torch modules and parameters, so that DDP can wrap it and `fully_shard` can shard each block. For
tensor parallelism the rows of `qkv` are ordered by head (tensor_parallel.py shards heads), and each matrix product uses
the shard of the weight on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.cli.train.precision import Precision

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """The shape of a model: blocks, width, heads and context in bytes, and a suitable learning rate."""

    layers: int
    width: int
    heads: int
    context: int
    lr: float


SIZES = {
    "nano": Size(layers=2, width=32, heads=2, context=32, lr=5e-3),
    "tiny": Size(layers=4, width=128, heads=4, context=64, lr=3e-3),
    "small": Size(layers=6, width=256, heads=8, context=256, lr=2e-3),
    "medium": Size(layers=8, width=512, heads=8, context=512, lr=1e-3),
    "base": Size(layers=12, width=768, heads=12, context=1024, lr=6e-4),
}


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The shard of a weight on this rank."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Attention(nn.Module):
    def __init__(self, size: Size, precision: Precision) -> None:
        super().__init__()
        self.heads = size.heads
        self.precision = precision
        self.qkv = nn.Parameter(torch.empty(3 * size.width, size.width, dtype=torch.float32))
        self.out = nn.Parameter(torch.empty(size.width, size.width, dtype=torch.float32))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        # H: the heads on this rank
        qkv_BTH3D = self.precision.linear(x_BTC, _local(self.qkv)).view(B, T, -1, 3, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv_BTH3D.permute(3, 0, 2, 1, 4)
        scores_BHTT = self.precision.matmul(q_BHTD, k_BHTD.transpose(-2, -1))
        weights_BHTT = halfstep.softmax(scores_BHTT, dim=-1, scale=1.0 / math.sqrt(C // self.heads), causal=True)
        mixed_BTF = self.precision.matmul(weights_BHTT, v_BHTD).transpose(1, 2).flatten(2)
        return self.precision.linear(mixed_BTF, _local(self.out))


class _MLP(nn.Module):
    def __init__(self, size: Size, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.up = nn.Parameter(torch.empty(4 * size.width, size.width, dtype=torch.float32))
        self.down = nn.Parameter(torch.empty(size.width, 4 * size.width, dtype=torch.float32))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.precision.linear(F.gelu(self.precision.linear(x_BTC, _local(self.up))), _local(self.down))


class _Block(nn.Module):
    def __init__(self, size: Size, precision: Precision, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1 = nn.LayerNorm(size.width, dtype=torch.float32)
        self.attention = _Attention(size, precision)
        self.norm2 = nn.LayerNorm(size.width, dtype=torch.float32)
        self.mlp = _MLP(size, precision)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        # Inside the module, so that FSDP2 has gathered its weights when the backward recomputes it.
        if self.recompute and torch.is_grad_enabled():
            result: torch.Tensor = checkpoint(self._forward, x_BTC, use_reentrant=False)
            return result
        return self._forward(x_BTC)

    def _forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class GPT(nn.Module):
    """The model. Its forward takes bytes and targets and returns the mean cross-entropy in nats per byte.

    Args:
        size: the shape.
        precision: the arithmetic. The parameters are fp32 until ``.to(precision.dtype)``.
        seed: seed of the initial weights. They are drawn in fp32 on the CPU, so that they are the same in every
            precision.
        recompute: whether only the inputs of blocks are saved, and the blocks recomputed in the backward.
    """

    def __init__(self, size: Size, precision: Precision, seed: int, recompute: bool = False) -> None:
        super().__init__()
        self.precision = precision
        self.bytes = nn.Parameter(torch.empty(VOCABULARY, size.width, dtype=torch.float32))
        self.positions = nn.Parameter(torch.empty(size.context, size.width, dtype=torch.float32))
        self.blocks = nn.ModuleList(_Block(size, precision, recompute) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, dtype=torch.float32)
        self.head = nn.Parameter(torch.empty(VOCABULARY, size.width, dtype=torch.float32))
        self._initialise(size, torch.Generator().manual_seed(seed))

    def _initialise(self, size: Size, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms keep their default initialization, 1 and 0
            if name in ("bytes", "positions"):
                std = 0.5  # with GPT-2's 0.02, such a short training ends about 0.2 nats higher
            else:
                std = 1 / math.sqrt(parameter.shape[1])  # keeps the variance of activations
            if name.endswith(("attention.out", "mlp.down")):
                std /= math.sqrt(2 * size.layers)  # the number of terms added to the residual stream, as in GPT-2
            nn.init.normal_(parameter, std=std, generator=generator)
            if name.endswith("qkv"):  # drawn as queries, keys, values; reordered by head
                by_part = parameter.detach().view(3, size.heads, -1, size.width)
                parameter.detach().copy_(by_part.transpose(0, 1).flatten(0, 2))

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.precision.embedding(inputs_BT, self.bytes) + self.positions[: inputs_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.precision.linear(self.norm(x_BTC), self.head)
        return F.cross_entropy(self.precision.for_loss(logits_BTV).flatten(0, 1), targets_BT.flatten())
