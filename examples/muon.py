"""Muon with nanochat's groups under FSDP2: Muon for matrices, AdamW with separate learning rates for the rest.

torchrun --nproc-per-node 2 examples/muon.py
"""

import torch
from ranks import Losses, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients, send_gradients_in_16_bits

TOKENS, WIDTH = 64, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
            for _ in range(2)
        )
        self.scales = nn.Parameter(torch.ones(2))
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(nn.functional.rms_norm(x, (WIDTH,)))
        return self.lm_head(x)


def groups(model: Model) -> list[dict[str, object]]:
    matrices = list(model.blocks.parameters())
    adamw = {"algorithm": "adamw", "eps": 1e-10, "weight_decay": 0.0}
    return [
        {"params": matrices, "lr": 0.02, "adjust_lr_fn": "original"},
        {"params": list(model.embedding.parameters()), "lr": 0.1, "betas": (0.8, 0.995), **adamw},
        {"params": list(model.lm_head.parameters()), "lr": 0.01, "betas": (0.8, 0.96), **adamw},
        {"params": [model.scales], "lr": 0.005, "betas": (0.8, 0.95), **adamw},
    ]


def train(rank: int, device: torch.device) -> Losses:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    keep_reduced_gradients(model)
    send_gradients_in_16_bits(model)
    optimizer = halfstep.Muon(groups(model), weight_decay=0.0, state_dtype="8bit")

    for step in range(60):
        tokens = torch.randint(TOKENS, (64,), generator=torch.Generator().manual_seed(2 * step + rank)).to(device)
        loss = nn.functional.cross_entropy(model(tokens).float(), (5 * tokens + 1) % TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


if __name__ == "__main__":
    run("muon", train)
