"""Work and activations: FLOPs of layers and of a transformer, bytes saved for backward, elements a softmax moves.

A multiplication and an addition are two FLOPs. Of models only matrix products are counted, as is usual.

Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from halfstep.numerics.messages import one_of
from halfstep.numerics.planning.models import Transformer

CHECKPOINTING = ("none", "selective", "full", "sqrt")


def linear_flops(tokens: int, inputs: int, outputs: int, exact: bool = False) -> int:
    """Forward FLOPs of a linear layer: 2·B·D·K, where B counts tokens.

    Args:
        tokens: rows B of the input, batch times sequence.
        inputs, outputs: D and K.
        exact: count the additions as they are, D − 1 per output: B·K·(2·D − 1).
    """
    return tokens * outputs * (2 * inputs - 1 if exact else 2 * inputs)


def elementwise_flops(rows: int, columns: int) -> int:
    """FLOPs of one operation on each of m·n elements."""
    return rows * columns


def convolution_flops(kernel: int, inputs: int, outputs: int, height: int, width: int) -> int:
    """Forward FLOPs of a k × k convolution per image: 2·k²·Cin·Cout·H·W, with H × W the output's map."""
    return 2 * kernel**2 * inputs * outputs * height * width


def attention_flops(seq: int, hidden: int) -> int:
    """Forward FLOPs of one attention layer on one sequence: 8·s·h² + 4·s²·h.

    Four projections of 2·s·h² and two products with the s × s scores of 2·s²·h. Half of it is the number of
    multiply-adds. Causal masks are not taken off, as is usual.
    """
    return 8 * seq * hidden**2 + 4 * seq**2 * hidden


@dataclass(frozen=True)
class Moved:
    """Elements read and written."""

    reads: int
    writes: int


def softmax_traffic(rows: int, columns: int, fused: bool) -> Moved:
    """Elements that a softmax over the rows of an M × N matrix moves.

    Naive, one pass each for maximum, difference, exponential, sum and quotient: reads 5·M·N + 2·M, writes
    3·M·N + 2·M. Fused: M·N and M·N (Tillet et al., Triton's tutorial on fused softmax).
    """
    elements = rows * columns
    return Moved(elements, elements) if fused else Moved(5 * elements + 2 * rows, 3 * elements + 2 * rows)


# ------------------------------------------------------------------------------------------------------------ FLOPs


def score_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of one layer's two products with the scores, on one sequence: 4·s²·h."""
    return 4 * seq**2 * model.hidden


def layer_flops(model: Transformer, seq: int) -> int:
    """Forward FLOPs of one block on one sequence: 24·s·h² + 4·s²·h for an MLP of 4·h and as many keys as queries."""
    h, kv, f = model.hidden, model.kv_width, model.mlp
    projections = 2 * linear_flops(seq, h, h) + 2 * linear_flops(seq, h, kv)
    return projections + score_flops(model, seq) + (3 if model.gated else 2) * linear_flops(seq, h, f)


def forward_flops(model: Transformer, batch: int, seq: int) -> int:
    """Forward FLOPs of blocks and head on `batch` sequences; looking up embeddings is no work.

    Narayanan et al., Efficient large-scale language model training on GPU clusters (2021), appendix, count
    96·b·s·l·h²·(1 + s/(6·h) + V/(16·l·h)) for training with full recomputation, which is the same.
    """
    return batch * (model.layers * layer_flops(model, seq) + linear_flops(seq, model.hidden, model.vocab))


def recomputed_flops(model: Transformer, batch: int, seq: int, checkpointing: str) -> int:
    """FLOPs repeated in backward: the blocks' forward when they are checkpointed, the scores only if selectively."""
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    if checkpointing == "none":
        return 0
    per_layer = score_flops(model, seq) if checkpointing == "selective" else layer_flops(model, seq)
    return batch * model.layers * per_layer


def utilisation(flops: float, seconds: float, peak_flops: float) -> float:
    """Achieved over peak FLOP/s. MFU with the model's FLOPs, HFU with recomputed ones added. 0.5 and above is good."""
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
    """Bytes that one block saves for backward on one GPU.

    Korthikanti et al., Reducing activation recomputation in large transformer models (2022), §4: with two bytes an
    element, dropout masks of one, no biases' or norms' statistics, and an MLP of 4·h, s·b·h·(34 + 5·a·s/h); on t
    GPUs without sequence parallelism s·b·h·(10 + 24/t + 5·a·s/(h·t)); with it everything is divided by t.

    Args:
        width: bytes of an activation.
        scores: False leaves out what selective recomputation computes again: scores, their dropout and its mask.
    """
    tokens, t, h = batch * seq, tensor_parallel, model.hidden
    masks = 2 * tokens * h if model.dropout else 0
    # Inputs of both norms, of the projections and of the MLP: every GPU has them whole.
    whole = 4 * width * tokens * h + masks
    # Queries and the attention's result; keys and values; what stands between the MLP's matrices.
    between = 4 * model.mlp if model.gated else 2 * model.mlp
    cut = width * tokens * (2 * h + 2 * model.kv_width + between)
    if model.flash:
        cut += 4 * model.heads * tokens  # the logarithm of each row's sum, fp32
    elif scores:
        cut += model.heads * batch * seq**2 * (2 * width + 1 if model.dropout else width)
    return (whole + cut) // t if sequence_parallel else whole + cut // t


@dataclass(frozen=True)
class Activations:
    """Bytes saved for backward: by all blocks, by blocks computed again in backward, and outside the blocks."""

    saved: int
    recomputed: int
    ends: int


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
    """Activations of a forward pass on one GPU.

    Args:
        checkpointing: ``"none"``; ``"selective"`` drops the scores (Korthikanti et al., §5); ``"full"`` keeps only each
            block's input, and in backward one block's activations; ``"sqrt"`` keeps the input of every ⌈√L⌉-th block,
            and in backward those of as many blocks (Chen et al., Training deep nets with sublinear memory cost, 2016).

    Raises:
        ValueError: unknown checkpointing, or sizes that do not divide by `tensor_parallel`.
    """
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    model.check_parallel(tensor_parallel, sequence_parallel)

    how: dict[str, Any] = {"width": width, "tensor_parallel": tensor_parallel, "sequence_parallel": sequence_parallel}
    layer = partial(layer_activations, model, batch, seq, **how)
    share = tensor_parallel if sequence_parallel else 1
    hidden_states = width * batch * seq * model.hidden // share
    # The embedding's dropout mask, the last norm's input and the head's.
    ends = hidden_states * (2 if model.final_norm else 1)
    ends += batch * seq * model.hidden // share if model.dropout else 0
    if checkpointing in ("none", "selective"):
        return Activations(model.layers * layer(scores=checkpointing == "none"), 0, ends)
    together = 1 if checkpointing == "full" else math.isqrt(model.layers - 1) + 1  # ⌈√L⌉
    segments = -(-model.layers // together)
    return Activations(segments * hidden_states, together * layer(), ends)
