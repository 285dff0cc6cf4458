"""A small byte-level GPT: pre-norm blocks, learned positions, no biases, attention with `halfstep.softmax`.

It consists of plain torch modules and parameters, so that DDP can wrap it and `fully_shard` can shard each block. For
tensor parallelism the rows of `qkv` are ordered by head (tensor_parallel.py shards heads), and each matrix product uses
the shard of the weight on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


# How the matrices are drawn. "scaled" keeps the variance of activations.
INITS: dict[str, Callable[[torch.Tensor, torch.Generator], object]] = {
    "scaled": lambda weight, generator: nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator),
    "gpt2": lambda weight, generator: nn.init.normal_(weight, std=0.02, generator=generator),
    "xavier": lambda weight, generator: nn.init.xavier_uniform_(weight, generator=generator),
    "kaiming": lambda weight, generator: nn.init.kaiming_normal_(weight, generator=generator),
    "orthogonal": lambda weight, generator: nn.init.orthogonal_(weight, generator=generator),
}


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The shard of a weight on this rank."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Matrices(nn.Module):
    """A module of matrices. Those with an adapter (adapters.py) have a product of low rank added to theirs.

    Attributes:
        adapter_scale: the factor of adapters; None without.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.adapter_scale: float | None = None

    def _product(self, x_BTC: torch.Tensor, name: str) -> torch.Tensor:
        result = self.precision.linear(x_BTC, _local(getattr(self, name)))
        if self.adapter_scale is None:
            return result
        low = self.precision.linear(x_BTC, getattr(self, f"{name}_a"))
        return result + self.precision.linear(low, getattr(self, f"{name}_b")) * self.adapter_scale


class _Attention(Matrices):
    def __init__(self, size: Size, precision: Precision) -> None:
        super().__init__(precision)
        self.heads = size.heads
        self.qkv = nn.Parameter(torch.empty(3 * size.width, size.width, dtype=torch.float32))
        self.out = nn.Parameter(torch.empty(size.width, size.width, dtype=torch.float32))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        # H: the heads on this rank
        qkv_BTH3D = self._product(x_BTC, "qkv").view(B, T, -1, 3, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv_BTH3D.permute(3, 0, 2, 1, 4)
        scores_BHTT = self.precision.matmul(q_BHTD, k_BHTD.transpose(-2, -1))
        weights_BHTT = halfstep.softmax(scores_BHTT, dim=-1, scale=1.0 / math.sqrt(C // self.heads), causal=True)
        mixed_BTF = self.precision.matmul(weights_BHTT, v_BHTD).transpose(1, 2).flatten(2)
        return self._product(mixed_BTF, "out")


class _MLP(Matrices):
    def __init__(self, size: Size, precision: Precision) -> None:
        super().__init__(precision)
        self.up = nn.Parameter(torch.empty(4 * size.width, size.width, dtype=torch.float32))
        self.down = nn.Parameter(torch.empty(size.width, 4 * size.width, dtype=torch.float32))

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self._product(F.gelu(self._product(x_BTC, "up")), "down")


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
        init: a name of `INITS`.
    """

    def __init__(
        self, size: Size, precision: Precision, seed: int, recompute: bool = False, init: str = "scaled"
    ) -> None:
        super().__init__()
        self.precision = precision
        self.bytes = nn.Parameter(torch.empty(VOCABULARY, size.width, dtype=torch.float32))
        self.positions = nn.Parameter(torch.empty(size.context, size.width, dtype=torch.float32))
        self.blocks = nn.ModuleList(_Block(size, precision, recompute) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, dtype=torch.float32)
        self.head = nn.Parameter(torch.empty(VOCABULARY, size.width, dtype=torch.float32))
        self._initialise(size, init, torch.Generator().manual_seed(seed))

    def _initialise(self, size: Size, init: str, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms keep their default initialization, 1 and 0
            if name in ("bytes", "positions"):
                # With GPT-2's 0.02, such a short training ends about 0.2 nats higher.
                nn.init.normal_(parameter, std=0.02 if init == "gpt2" else 0.5, generator=generator)
                continue
            INITS[init](parameter, generator)
            if init in ("scaled", "gpt2") and name.endswith(("attention.out", "mlp.down")):
                # The number of terms that are added to the residual stream, as in GPT-2.
                parameter.detach().div_(math.sqrt(2 * size.layers))
            if name.endswith("qkv"):  # drawn as queries, keys, values; reordered by head
                by_part = parameter.detach().view(3, size.heads, -1, size.width)
                parameter.detach().copy_(by_part.transpose(0, 1).flatten(0, 2))

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.precision.embedding(inputs_BT, self.bytes) + self.positions[: inputs_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.precision.linear(self.norm(x_BTC), self.head)
        return F.cross_entropy(self.precision.for_loss(logits_BTV).flatten(0, 1), targets_BT.flatten())
