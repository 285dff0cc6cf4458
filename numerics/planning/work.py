"""FLOPs of a transformer, of which only matrix products count, and bytes saved for the backward. Needs no torch.

A multiplication and an addition are two FLOPs.
"""

from __future__ import annotations

from typing import NamedTuple

from halfstep.numerics.messages import one_of
from halfstep.numerics.planning.models import Transformer, parameters_of

CHECKPOINTING = ("none", "full")


def score_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of the two products with the scores in one layer, on one sequence: 4·s²·h if heads are h wide."""
    return 4 * seq**2 * model.query_width


def layer_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of one block on one sequence: 24·s·h² + 4·s²·h if the MLP is 4·h wide and `kv_heads` is `heads`."""
    mlps = model.matrices * model.mlp * (model.active_experts or 1)
    widths = 2 * model.query_width + 2 * model.kv_width + mlps + model.experts
    return 2 * seq * model.hidden * widths + score_flops(model, seq)


def forward_flops(model: Transformer, batch: int, seq: int, rank: int = 0) -> int:
    """Forward FLOPs of blocks and head on `batch` sequences, with adapters of a rank. Embeddings take none.

    This agrees with Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix,
    who count 96·b·s·l·h²·(1 + s/(6·h) + V/(16·l·h)) for training with full recomputation.
    """
    outside = model.hidden * model.vocab + (parameters_of(model.adapters(rank)) if rank else 0)
    return batch * (model.layers * layer_flops(model, seq) + 2 * seq * outside)


def training_flops(model: Transformer, batch: int, seq: int, rank: int = 0) -> int:
    """FLOPs of forward and backward, in which every product has two: for the gradients of both operands.

    Frozen weights, those of all but the adapters of a rank, have no gradient, so their products have one.
    """
    forward = forward_flops(model, batch, seq, rank)
    if not rank:
        return 3 * forward
    frozen = forward_flops(model, batch, seq) - batch * model.layers * score_flops(model, seq)
    return 3 * forward - frozen


def layer_activations(model: Transformer, batch: int, seq: int, *, width: int = 2) -> int:
    """Bytes that one block saves for the backward. `width`: bytes of an activation.

    From Korthikanti et al., Reducing activation recomputation in large transformer models (2022), §4. With two bytes
    per element, one per element of a dropout mask, stored scores and an MLP of width 4·h, this is
    s·b·h·(34 + 5·a·s/h).
    """
    tokens, h = batch * seq, model.hidden
    # Inputs of both norms, of the projections and of the MLP; and masks.
    size = tokens * h * (4 * width + (2 if model.dropout else 0))
    # Queries and the result of the attention, keys and values, and the activations between the matrices of the MLP.
    between = (4 if model.gated else 2) * model.mlp * (model.active_experts or 1)
    size += width * tokens * (2 * model.query_width + 2 * model.kv_width + between)
    if model.flash:
        return size + 4 * model.heads * tokens  # the logarithm of the sum of each row, in fp32
    return size + model.heads * tokens * seq * (2 * width + 1 if model.dropout else width)


class Activations(NamedTuple):
    """Bytes saved for the backward."""

    saved: int  # by all blocks in the forward
    recomputed: int  # by the block that is recomputed at one time in the backward
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
