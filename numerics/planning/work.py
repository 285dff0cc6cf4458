"""FLOPs of a transformer's matrix products, where a multiply-add counts as two, and bytes saved for the backward."""

from __future__ import annotations

from typing import NamedTuple

from halfstep.numerics.messages import one_of
from halfstep.numerics.planning.models import Transformer, parameters_of

CHECKPOINTING = ("none", "full")


def score_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of QKᵀ and scores · V in one layer, on one sequence: 4·s²·h if all heads together are h wide."""
    return 4 * seq**2 * model.query_width


def layer_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of one block on one sequence: 24·s·h² + 4·s²·h if the MLP is 4·h wide and `kv_heads` is `heads`."""
    mlps = model.matrices * model.mlp * (model.active_experts or 1)
    widths = 2 * model.query_width + 2 * model.kv_width + mlps + model.experts
    return 2 * seq * model.hidden * widths + score_flops(model, seq)


def forward_flops(model: Transformer, batch: int, seq: int, rank: int = 0) -> int:
    """Forward FLOPs of blocks and head on `batch` sequences, with LoRA adapters of this rank. Embeddings take none.

    This agrees with Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix,
    who count 96·b·s·l·h²·(1 + s/(6·h) + V/(16·l·h)) for training with full recomputation.
    """
    outside = model.hidden * model.vocab + (parameters_of(model.adapters(rank)) if rank else 0)
    return batch * (model.layers * layer_flops(model, seq) + 2 * seq * outside)


def training_flops(model: Transformer, batch: int, seq: int, rank: int = 0) -> int:
    """FLOPs of forward and backward. The backward of a product is two products, for the gradients of both operands.

    With LoRA adapters of this rank, all other weights are frozen, and the backward of their products is one product.
    """
    forward = forward_flops(model, batch, seq, rank)
    if not rank:
        return 3 * forward
    frozen = forward_flops(model, batch, seq) - batch * model.layers * score_flops(model, seq)
    return 3 * forward - frozen


def layer_activations(model: Transformer, batch: int, seq: int, *, width: int = 2) -> int:
    """Bytes that one block saves for the backward, with activations of `width` bytes.

    From Korthikanti et al., Reducing activation recomputation in large transformer models (2022), §4. With two bytes
    per element, one per element of a dropout mask, stored scores and an MLP of width 4·h, this is
    s·b·h·(34 + 5·a·s/h).
    """
    tokens, h = batch * seq, model.hidden
    # Inputs of both norms, of the QKV projection and of the MLP, and dropout masks.
    size = tokens * h * (4 * width + (2 if model.dropout else 0))
    # Queries and the attention output, keys and values, and the activations between the matrices of the MLP.
    between = (4 if model.gated else 2) * model.mlp * (model.active_experts or 1)
    size += width * tokens * (2 * model.query_width + 2 * model.kv_width + between)
    if model.flash:
        return size + 4 * model.heads * tokens  # the log-sum-exp of each row, in fp32
    return size + model.heads * tokens * seq * (2 * width + 1 if model.dropout else width)


class Activations(NamedTuple):
    """Bytes saved for the backward."""

    saved: int  # by all blocks in the forward
    recomputed: int  # by the one block that is being recomputed in the backward
    ends: int  # outside the blocks


def activations(
    model: Transformer, batch: int, seq: int, *, checkpointing: str = "none", width: int = 2
) -> Activations:
    """Activations of a forward pass on one GPU; `width` as in `layer_activations`.

    Checkpointing ``"full"`` saves only the input of each block, and recomputes one block at a time
    (Korthikanti et al., §5).
    """
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    layer = layer_activations(model, batch, seq, width=width)
    hidden_states = width * batch * seq * model.hidden
    # The inputs of the last norm and of the head, and the dropout mask of the embedding.
    ends = hidden_states * (2 if model.final_norm else 1) + (batch * seq * model.hidden if model.dropout else 0)
    if checkpointing == "none":
        return Activations(model.layers * layer, 0, ends)
    return Activations(model.layers * hidden_states, layer, ends)
