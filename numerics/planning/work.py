"""FLOPs of a linear layer and of a transformer, and bytes saved for the backward.

A multiplication and an addition are two FLOPs. For models only matrix products are counted, as is usual.

Needs no torch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from halfstep.numerics.messages import one_of
from halfstep.numerics.planning.models import Transformer, parameters_of

CHECKPOINTING = ("none", "selective", "full", "sqrt")


# ------------------------------------------------------------------------------------------------------------ FLOPs


def linear_flops(tokens: int, inputs: int, outputs: int) -> int:
    """Forward FLOPs of a linear layer: 2·B·D·K for B tokens, D inputs and K outputs."""
    return 2 * tokens * inputs * outputs


def score_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of the two products with the scores in one layer, on one sequence: 4·s²·h if heads are h wide."""
    return 4 * seq**2 * model.query_width


def layer_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of one block on one sequence: 24·s·h² + 4·s²·h if the MLP is 4·h wide and `kv_heads` is `heads`."""
    h, f = model.hidden, model.mlp
    projections = 2 * linear_flops(seq, h, model.query_width) + 2 * linear_flops(seq, h, model.kv_width)
    mlp = (3 if model.gated else 2) * linear_flops(seq, h, f) * (model.active_experts or 1)
    return projections + score_flops(model, seq) + mlp + linear_flops(seq, h, model.experts)


def forward_flops(model: Transformer, batch: int, seq: int) -> int:
    """Forward FLOPs of blocks and head on `batch` sequences. Looking up embeddings takes no FLOPs.

    This agrees with Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix,
    who count 96·b·s·l·h²·(1 + s/(6·h) + V/(16·l·h)) for training with full recomputation.
    """
    return batch * (model.layers * layer_flops(model, seq) + linear_flops(seq, model.hidden, model.vocab))


def adapter_flops(model: Transformer, batch: int, seq: int, rank: int) -> int:
    """Forward FLOPs of adapters of a rank; 0 without, for rank 0."""
    return 2 * batch * seq * parameters_of(model.adapters(rank)) if rank else 0


def training_flops(model: Transformer, batch: int, seq: int, rank: int = 0) -> int:
    """FLOPs of forward and backward, in which every product has two: for the gradients of both operands.

    Beside adapters of a rank, the weights are frozen and have no gradient, so their products have one.
    """
    forward = forward_flops(model, batch, seq)
    if not rank:
        return 3 * forward
    scores = batch * model.layers * score_flops(model, seq)
    return 2 * forward + scores + 3 * adapter_flops(model, batch, seq, rank)


def recomputed_flops(model: Transformer, batch: int, seq: int, checkpointing: str) -> int:
    """FLOPs repeated in the backward: the forward of all blocks, or only stored scores if selective."""
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    if checkpointing == "none" or (checkpointing == "selective" and model.flash):  # which stores no scores
        return 0
    per_layer = score_flops(model, seq) if checkpointing == "selective" else layer_flops(model, seq)
    return batch * model.layers * per_layer


def utilisation(flops: float, seconds: float, peak_flops: float) -> float:
    """Achieved FLOP/s as a share of the peak: MFU from the FLOPs of the model, HFU if recomputed FLOPs are added."""
    for name, value in (("seconds", seconds), ("peak_flops", peak_flops)):
        if not 0 < value < math.inf:
            raise ValueError(f"Expected {name} to be a number above 0, but got {value!r}")
    return flops / seconds / peak_flops


# ------------------------------------------------------------------------------------------------------ activations


def layer_activations(
    model: Transformer,
    batch: int,
    seq: int,
    *,
    width: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    scores: bool = True,
) -> int:
    """Bytes that one block saves for the backward on one of `tensor_parallel` GPUs.

    From Korthikanti et al., Reducing activation recomputation in large transformer models (2022), §4. With two bytes
    per element, one per element of a dropout mask, an MLP of width 4·h, and without the statistics of norms, this is
    s·b·h·(34 + 5·a·s/h) on one GPU and s·b·h·(10 + 24/t + 5·a·s/(h·t)) on t GPUs. With sequence parallelism, which
    also shards norms and dropouts, everything is divided by t. Without `scores`, the scores, their dropout and its mask
    are recomputed (selective checkpointing). `width`: bytes of an activation.
    """
    tokens, t, h = batch * seq, tensor_parallel, model.hidden
    masks = 2 * tokens * h if model.dropout else 0
    # Inputs of both norms, of the projections and of the MLP.
    replicated = 4 * width * tokens * h + masks
    # Queries and the result of the attention, keys and values, and the activations between the matrices of the MLP.
    between = (4 * model.mlp if model.gated else 2 * model.mlp) * (model.active_experts or 1)
    sharded = width * tokens * (2 * model.query_width + 2 * model.kv_width + between)
    if model.flash:
        sharded += 4 * model.heads * tokens  # the logarithm of the sum of each row, in fp32
    elif scores:
        sharded += model.heads * batch * seq**2 * (2 * width + 1 if model.dropout else width)
    return (replicated + sharded) // t if sequence_parallel else replicated + sharded // t


class Activations(NamedTuple):
    """Bytes saved for the backward."""

    saved: int  # by all blocks in the forward
    recomputed: int  # by the blocks that are recomputed at one time in the backward
    ends: int  # outside the blocks


def activations(
    model: Transformer,
    batch: int,
    seq: int,
    *,
    width: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    checkpointing: str = "none",
) -> Activations:
    """Activations of a forward pass on one GPU; see `layer_activations`.

    Checkpointing ``"selective"`` recomputes the scores (Korthikanti et al., §5). ``"full"`` saves only the input of
    each block, and recomputes one block at a time. ``"sqrt"`` saves the input of every ⌈√L⌉-th block, and recomputes
    ⌈√L⌉ blocks at a time (Chen et al., Training deep nets with sublinear memory cost, 2016).
    """
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    model.check_parallel(tensor_parallel, sequence_parallel)
    t, parallel = tensor_parallel, sequence_parallel
    layer = partial(layer_activations, model, batch, seq, width=width, tensor_parallel=t, sequence_parallel=parallel)
    share = t if parallel else 1
    hidden_states = width * batch * seq * model.hidden // share
    # The inputs of the last norm and of the head, and the dropout mask of the embedding.
    ends = hidden_states * (2 if model.final_norm else 1)
    ends += batch * seq * model.hidden // share if model.dropout else 0
    if checkpointing in ("none", "selective"):
        return Activations(model.layers * layer(scores=checkpointing == "none"), 0, ends)
    together = 1 if checkpointing == "full" else math.isqrt(model.layers - 1) + 1  # ⌈√L⌉
    segments = -(-model.layers // together)
    return Activations(segments * hidden_states, together * layer(), ends)
