"""The softmax kernels: one or two variants of each code path, at the sizes with the most registers.

For a long row, the static count contains its tile once and one iteration of each loop over the other elements: a
forward one for the maximum and the sum, and a backward one for the result. Its bytes are per element of an iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.softmax import strided
from halfstep.kernels.softmax.row_kernels import backward_row_kernel, forward_row_kernel
from halfstep.kernels.softmax.row_launches import (
    BACKWARD_LOOP,
    BACKWARD_TILE,
    FORWARD_LOOP,
    FORWARD_TILE,
    held_columns,
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.bool}
_STAGES = ("", "first half of pieces", "second half of pieces")
LONG, ODD = 1 << 20, (1 << 20) + 3


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    """A tensor of uninitialized memory."""
    return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")


def _named(*words: str) -> str:
    return " ".join(filter(None, words))


def _softmax(log: bool, *args: Any, **options: Any) -> torch.Tensor:
    return (halfstep.log_softmax if log else halfstep.softmax)(*args, **options)


def _softmax_backward(grad: torch.Tensor, y: torch.Tensor, dim: int, causal: bool, log: bool, target: str) -> None:
    torch.ops.halfstep.softmax_backward(grad, y, dim, 1.0, causal, log, _DTYPES[target])


_TILE, _TRIP = ("PARTS", "ROWS", "LANES", "VECTOR"), ("LOOP", "LANES", "VECTOR")


def _passes(columns: int, tile: int, loop: int, stage: int) -> tuple[tuple[str, ...], float, float]:
    """The constants whose product bytes are divided by, and how often its elements are read and written."""
    if stage:  # the tile of a piece has the size of an iteration
        return _TRIP, 2.0, 0.0 if stage == 1 else 2.0
    if columns <= tile:
        return _TILE, 1.0, 1.0
    held = held_columns(columns, tile, loop) / loop
    return _TRIP, held + 2.0, held + 1.0


def _forward(
    columns: int,
    source: str,
    target: str,
    mask: str = "",
    causal: bool = False,
    log: bool = False,
    stage: int = 0,
    in_step: bool = True,
) -> Variant:
    """A variant of the forward kernel.

    Args:
        columns: columns of the rows.
        source, target: dtypes of input and result.
        mask: dtype of the mask; empty for none.
        causal, log: options of the softmax.
        stage: 1 or 2 for the first or second launch over rows in pieces, otherwise 0.
        in_step: whether the rows of all operands have the same offset from a multiple of 16 bytes.
    """
    # The mask is shared by all heads. With 8 queries, each row of x has the same offset as the row of the mask.
    x = _empty(source, *((1, 1) if stage else (2, 2, 8)), columns + 3 * (not in_step))[..., :columns]
    masks = _empty(mask, 2, 1, 8, columns) if mask else None
    # With different offsets, single elements of a mask are read, which are not counted.
    beside = _DTYPES[mask].itemsize if mask and in_step else 0
    words = [f"{columns} {source}->{target}", f"{mask} mask" * bool(mask), "causal" * causal, "log" * log]
    plain = not mask and in_step and max(_DTYPES[source].itemsize, _DTYPES[target].itemsize) == 2
    tile, loop = FORWARD_TILE if in_step else FORWARD_TILE // 2, FORWARD_LOOP if plain else FORWARD_LOOP // 2
    per, reads, writes = _passes(columns, tile, loop, stage)
    return Variant(
        forward_row_kernel,
        _named(*words, _STAGES[stage], "out of step" * (not in_step)),
        partial(_softmax, log, x, mask=masks, causal=causal, dtype=_DTYPES[target]),
        bytes_read=(_DTYPES[source].itemsize + beside) * reads,
        bytes_written=_DTYPES[target].itemsize * writes,
        exact=False,
        tile=per,
        index=max(stage - 1, 0),
    )


def _backward(
    columns: int, source: str, target: str, causal: bool = False, log: bool = False, stage: int = 0
) -> Variant:
    """A variant of the backward kernel; see `_forward`."""
    grad, y = (_empty(source, *((1, 1) if stage else (2, 2, 8)), columns) for _ in range(2))
    per, reads, writes = _passes(columns, BACKWARD_TILE, BACKWARD_LOOP, stage)
    return Variant(
        backward_row_kernel,
        _named(f"{columns} {source}->{target}", "causal" * causal, "log" * log, _STAGES[stage]),
        partial(_softmax_backward, grad, y, -1, causal, log, target),
        bytes_read=2.0 * _DTYPES[source].itemsize * reads,
        bytes_written=_DTYPES[target].itemsize * writes,
        exact=False,
        tile=per,
        index=max(stage - 1, 0),
    )


def _strided_forward(
    columns: int,
    across: int,
    source: str,
    target: str,
    mask: str = "",
    log: bool = False,
    transposed: bool = False,
    passes: int = 1,
) -> Variant:
    """A softmax over the first of two dimensions or, if `transposed`, over the last dimension of the transposed x."""
    x = _empty(source, columns, across)
    masks = _empty(mask, columns, across) if mask else None
    if transposed:
        x = x.t()
    words = [f"{columns} apart, {across} across {source}->{target}", f"{mask} mask" * bool(mask), "log" * log]
    return Variant(
        strided.forward_strided_kernel,
        _named(*words, "transposed" * transposed),
        partial(_softmax, log, x, -1 if transposed else 0, mask=masks, dtype=_DTYPES[target]),
        bytes_read=float((_DTYPES[source].itemsize + bool(mask)) * passes),
        bytes_written=_DTYPES[target].itemsize,
        exact=False,
    )


def _strided_backward(
    columns: int, inner: int, source: str, target: str, log: bool = False, passes: int = 1
) -> Variant:
    grad, y = (_empty(source, columns, inner) for _ in range(2))
    return Variant(
        strided.backward_strided_kernel,
        _named(f"{columns} apart, {inner} across {source}->{target}", "log" * log),
        partial(_softmax_backward, grad, y, -2, False, log, target),
        bytes_read=2.0 * _DTYPES[source].itemsize * passes,
        bytes_written=_DTYPES[target].itemsize,
        exact=False,
    )


def variants() -> Iterator[Variant]:
    """Rows with each kind of tile and loop, and other dimensions, forward and backward."""
    yield _forward(64, "bf16", "bf16")
    yield _forward(333, "bf16", "bf16")
    yield _forward(4097, "bf16", "bf16")
    yield _forward(512, "fp32", "fp32")
    yield _forward(512, "bf16", "bf16", causal=True)
    yield _forward(4096, "bf16", "bf16")
    yield _forward(FORWARD_TILE, "fp32", "fp32")
    yield _forward(FORWARD_TILE, "bf16", "bf16", causal=True)
    yield _forward(FORWARD_TILE, "bf16", "bf16", mask="u8")
    yield _forward(FORWARD_TILE, "fp16", "fp32", mask="fp32", log=True)
    yield _forward(FORWARD_TILE - 17, "bf16", "fp32", log=True)
    yield _forward(FORWARD_TILE - 17, "fp32", "fp32", causal=True)
    yield _forward(FORWARD_TILE - 17, "bf16", "bf16", mask="u8")
    yield _forward(50257, "bf16", "bf16")
    yield _forward(65536, "bf16", "bf16")
    yield _forward(50257, "bf16", "bf16", in_step=False)
    yield _forward(50257, "bf16", "bf16", mask="u8", in_step=False)
    yield _forward(50257, "bf16", "fp32", log=True)
    yield _forward(50257, "bf16", "bf16", mask="bf16", causal=True)
    yield _forward(LONG, "fp32", "bf16", log=True)
    yield _forward(LONG, "bf16", "bf16", causal=True)
    yield _forward(LONG, "bf16", "bf16", mask="bf16")
    yield _forward(LONG, "bf16", "bf16", stage=1)
    yield _forward(LONG, "bf16", "bf16", stage=2)
    yield _forward(ODD, "bf16", "bf16", causal=True, stage=1)
    yield _forward(ODD, "bf16", "fp32", causal=True, log=True, stage=2)
    yield _strided_forward(64, 4096, "bf16", "bf16")
    yield _strided_forward(1024, 4096, "fp32", "bf16", log=True)
    yield _strided_forward(1024, 4096, "bf16", "bf16", mask="u8")
    yield _strided_forward(8192, 4096, "bf16", "bf16", mask="u8", passes=2)
    yield _strided_forward(8192, 4096, "fp32", "fp32", log=True, passes=2)
    yield _strided_forward(512, 4096, "bf16", "fp32")
    yield _strided_forward(512, 4096, "bf16", "bf16", transposed=True)
    yield _backward(64, "bf16", "bf16")
    yield _backward(333, "bf16", "bf16")
    yield _backward(512, "fp32", "fp32")
    yield _backward(512, "bf16", "bf16", causal=True, log=True)
    yield _backward(4096, "bf16", "bf16")
    yield _backward(BACKWARD_TILE, "fp32", "fp16", log=True)
    yield _backward(BACKWARD_TILE, "bf16", "bf16", causal=True)
    yield _backward(BACKWARD_TILE - 17, "fp32", "fp32")
    yield _backward(BACKWARD_TILE - 17, "bf16", "bf16", causal=True, log=True)
    yield _backward(50257, "bf16", "bf16")
    yield _backward(50257, "fp32", "bf16", causal=True, log=True)
    yield _backward(LONG, "fp32", "fp32")
    yield _backward(LONG, "bf16", "bf16", causal=True, log=True)
    yield _backward(LONG, "bf16", "bf16", stage=1)
    yield _backward(LONG, "bf16", "bf16", stage=2)
    yield _backward(ODD, "bf16", "bf16", causal=True, log=True, stage=1)
    yield _backward(ODD, "bf16", "bf16", causal=True, log=True, stage=2)
    yield _strided_backward(64, 4096, "bf16", "bf16")
    yield _strided_backward(512, 4096, "fp32", "fp32", log=True)
    yield _strided_backward(512, 4096, "bf16", "fp32")
    yield _strided_backward(8192, 4096, "bf16", "bf16", passes=2)
    yield _strided_backward(8192, 4096, "fp32", "fp32", log=True, passes=2)
