"""The model of train_gpt.py: a byte-level GPT with pre-norm blocks, learned positions and no biases.

Weights, activations and gradients are fp32, bf16 or fp16; the loss is always computed in fp32. On CPUs, fp16 matrix
products, and without AVX-512 also bf16 ones, are 40 times as slow as in fp32. They are emulated: multiplied and
accumulated in fp32 and rounded once, as in a tensor core, so that gradients underflow and overflow as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.numerics.planning import Transformer

VOCABULARY = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shape(layers: int, width: int, heads: int, context: int) -> Transformer:
    """The planner's description of a model; `context` in bytes."""
    return Transformer(layers, width, heads, VOCABULARY, context, biases=False, dropout=False, flash=False)


# Shapes, and peak learning rates that suit them.
SIZES = {
    "nano": shape(layers=2, width=32, heads=2, context=32),
    "tiny": shape(layers=4, width=128, heads=4, context=64),
    "small": shape(layers=6, width=256, heads=8, context=256),
    "medium": shape(layers=8, width=512, heads=8, context=512),
    "base": shape(layers=12, width=768, heads=12, context=1024),
}
RATES = {"nano": 5e-3, "tiny": 3e-3, "small": 2e-3, "medium": 1e-3, "base": 6e-4}

# Initializations of the matrices in the blocks. "scaled" preserves the variance of activations.
INITS: dict[str, Callable[[torch.Tensor, torch.Generator], object]] = {
    "scaled": lambda weight, generator: nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator),
    "gpt2": lambda weight, generator: nn.init.normal_(weight, std=0.02, generator=generator),
    "xavier": lambda weight, generator: nn.init.xavier_uniform_(weight, generator=generator),
    "kaiming": lambda weight, generator: nn.init.kaiming_normal_(weight, generator=generator),
    "orthogonal": lambda weight, generator: nn.init.orthogonal_(weight, generator=generator),
}


@dataclass(frozen=True)
class Precision:
    """The precision of a run: ``"fp32"``, ``"bf16"`` or ``"fp16"``, its dtype, and whether products are emulated."""

    name: str
    dtype: torch.dtype
    emulated: bool

    @classmethod
    def on(cls, name: str, device: torch.device) -> Precision:
        slow = ("bf16", "fp16") if torch.backends.cpu.get_cpu_capability() == "AVX2" else ("fp16",)
        return cls(name, DTYPES[name], emulated=device.type == "cpu" and name in slow)

    def product(
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """The matrix product `function(a, b)` in this precision, as are its gradients."""
        if not self.emulated:
            return function(a, b)
        return halfstep.cast(function(halfstep.cast(a, torch.float32), halfstep.cast(b, torch.float32)), self.dtype)

    def embedding(self, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table, with the gradient summed in fp32. torch's CPU kernel sums it in the table's dtype."""
        if self.dtype == torch.float32:
            return F.embedding(index, table)
        return halfstep.cast(F.embedding(index, halfstep.cast(table, torch.float32)), self.dtype)


class Linear(nn.Module):
    """A linear layer without bias, computed in a given precision."""

    def __init__(self, columns: int, rows: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.precision.product(F.linear, x, self.weight)


class Adapted(nn.Module):
    """W·x + 2·B·A·x with W frozen and B·A of low rank (Hu et al., LoRA, 2021, arXiv:2106.09685, equation 3)."""

    def __init__(self, linear: Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        self.precision, self.weight = linear.precision, linear.weight
        self.lora_a = nn.Parameter(torch.empty(rank, columns, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank, dtype=torch.float32))  # training begins with W·x
        nn.init.normal_(self.lora_a, std=columns**-0.5, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.precision.product
        return product(F.linear, x, self.weight) + 2 * product(F.linear, product(F.linear, x, self.lora_a), self.lora_b)


class Block(nn.Module):
    """Attention and MLP, each added to its input. With `recompute`, only the input is saved for the backward."""

    def __init__(self, size: Transformer, precision: Precision, recompute: bool) -> None:
        super().__init__()
        self.heads, self.precision, self.recompute = size.heads, precision, recompute
        self.norm1 = nn.LayerNorm(size.hidden, dtype=torch.float32)
        self.qkv = Linear(size.hidden, 3 * size.hidden, precision)
        self.out = Linear(size.hidden, size.hidden, precision)
        self.norm2 = nn.LayerNorm(size.hidden, dtype=torch.float32)
        self.up = Linear(size.hidden, 4 * size.hidden, precision)
        self.down = Linear(4 * size.hidden, size.hidden, precision)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        # Checkpoint inside the module, so that FSDP2 has gathered its weights when the backward recomputes it.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.compute, x_BTC, use_reentrant=False)
        return self.compute(x_BTC)

    def compute(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = self.qkv(self.norm1(x_BTC)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores_BHTT = self.precision.product(torch.matmul, q_BHTD, k_BHTD.mT)
        weights_BHTT = halfstep.softmax(scores_BHTT, dim=-1, scale=(C // self.heads) ** -0.5, causal=True)
        mixed_BHTD = self.precision.product(torch.matmul, weights_BHTT, v_BHTD)
        x_BTC = x_BTC + self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.down(F.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """The model. Its forward takes bytes and targets and returns the mean cross-entropy in nats per byte.

    The initial weights are drawn in fp32 on the CPU by the rule `INITS[init]`, so they are the same in every precision.
    The parameters are fp32 until ``.to(precision.dtype)``. With `recompute`, only the inputs of blocks are saved.
    """

    def __init__(
        self, size: Transformer, precision: Precision, seed: int, recompute: bool = False, init: str = "scaled"
    ) -> None:
        super().__init__()
        self.precision = precision
        self.bytes = nn.Parameter(torch.empty(VOCABULARY, size.hidden, dtype=torch.float32))
        self.positions = nn.Parameter(torch.empty(size.seq, size.hidden, dtype=torch.float32))
        self.blocks = nn.ModuleList(Block(size, precision, recompute) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden, dtype=torch.float32)
        self.head = nn.Parameter(torch.empty(VOCABULARY, size.hidden, dtype=torch.float32))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name in ("bytes", "positions"):
                # With GPT-2's 0.02, the loss of so short a training ends about 0.2 nats higher.
                nn.init.normal_(parameter, std=0.02 if init == "gpt2" else 0.5, generator=generator)
            elif parameter.dim() == 2:  # norms keep their ones and zeros
                INITS[init](parameter, generator)
                if init in ("scaled", "gpt2") and name.endswith(("out.weight", "down.weight")):
                    # By the root of the number of residual branches, as in GPT-2.
                    parameter.detach().div_(math.sqrt(2 * size.layers))

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTC = self.precision.embedding(inputs_BT, self.bytes) + self.positions[: inputs_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = self.precision.product(F.linear, self.norm(x_BTC), self.head)
        if logits_BTV.dtype != torch.float32:  # an fp16 loss of 1 would be infinite with a scale of 65536
            logits_BTV = halfstep.cast(logits_BTV, torch.float32)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def add_adapters(model: GPT, rank: int, seed: int) -> None:
    """Freeze an fp32 model, and add LoRA adapters of `rank` to the matrices of its blocks."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name), rank, generator))


def merged(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a model with each adapter merged into its matrix, computed in fp64 and rounded once."""
    result = {name: weight for name, weight in weights.items() if "lora_" not in name}
    for name, a in weights.items():
        if name.endswith("lora_a"):
            weight = result[name.replace("lora_a", "weight")]
            product = 2 * weights[name.replace("lora_a", "lora_b")].double() @ a.double()
            result[name.replace("lora_a", "weight")] = (weight.double() + product).to(weight.dtype)
    return result
