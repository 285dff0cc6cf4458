"""A small model and a comparison of two runs of it, for test_release*.py and test_offload.py."""

from typing import Any

import torch
from states import same_bits
from torch.nn import Embedding, LayerNorm, Linear, Module
from torch.nn.functional import gelu, mse_loss

BF16 = torch.bfloat16


class Net(Module):
    """One weight used twice, one that only odd batches use, a frozen one, and one that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(17, 12)
        self.first, self.second = Linear(12, 24), Linear(24, 12)
        self.norm = LayerNorm(12)
        self.sometimes = Linear(12, 12)
        self.frozen = Linear(12, 12).requires_grad_(False)
        self.unused = Linear(3, 3)

    def forward(self, tokens: torch.Tensor, odd: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        hidden = hidden + self.second(gelu(self.first(hidden)))
        if odd:
            hidden = hidden + self.sometimes(hidden)
        return self.frozen(self.norm(hidden)) @ self.embedding.weight.t()


def made(dtype: torch.dtype = BF16) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def loss_of(net: Module, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 17, (4, 6), generator=random)
    targets = torch.randn(4, 6, 17, generator=random, dtype=torch.float32)
    loss: torch.Tensor = mse_loss(net(tokens, step % 2 == 1).float(), targets)
    return loss


def same(one: tuple[Module, Any], other: tuple[Module, Any]) -> bool:
    """Whether weights and optimizer states have the same bits."""
    return same_bits(*([*net.parameters(), optimizer.state_dict()] for net, optimizer in (one, other)))


def gradient_bytes(net: Module) -> int:
    return sum(p.grad.untyped_storage().nbytes() for p in net.parameters() if p.grad is not None)
