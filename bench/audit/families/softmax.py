"""The softmax kernels: one or two variants of each code path, at the sizes that need the most registers.

For a long row, the static count contains its tile once and one iteration of each loop over the other elements. In
variants named ``out of step``, rows of x and of the result start at different offsets from a multiple of 16 bytes. If
there are few long rows, they are computed in pieces, by two launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.softmax import exact, strided
from halfstep.kernels.softmax.rows import (
    BACKWARD_LOOP,
    BACKWARD_TILE,
    FORWARD_LOOP,
    FORWARD_TILE,
    backward_row_kernel,
    forward_row_kernel,
    held_columns,
)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.bool}
LONG, ODD = 1 << 20, (1 << 20) + 3


FORWARD = (
    *("64 bf16->bf16", "333 bf16->bf16", "4097 bf16->bf16", "512 fp32->fp32", "512 bf16->bf16 causal"),
    *("4096 bf16->bf16", f"{FORWARD_TILE} fp32->fp32", f"{FORWARD_TILE} bf16->bf16 causal"),
    *(f"{FORWARD_TILE} bf16->bf16 u8 mask", f"{FORWARD_TILE} fp16->fp32 fp32 mask log"),
    *(f"{FORWARD_TILE - 17} bf16->fp32 log", f"{FORWARD_TILE - 17} fp32->fp32 causal"),
    *(f"{FORWARD_TILE - 17} bf16->bf16 u8 mask", "50257 bf16->bf16", "65536 bf16->bf16"),
    *("50257 bf16->bf16 out of step", "50257 bf16->bf16 u8 mask out of step", "50257 bf16->fp32 log"),
    *("50257 bf16->bf16 bf16 mask causal", f"{LONG} fp32->bf16 log", f"{LONG} bf16->bf16 causal"),
    *(f"{LONG} bf16->bf16 bf16 mask", f"{LONG} bf16->bf16 first half of pieces"),
    *(f"{LONG} bf16->bf16 second half of pieces", f"{ODD} bf16->bf16 causal first half of pieces"),
    f"{ODD} bf16->fp32 causal log second half of pieces",
)
BACKWARD = (
    *("64 bf16->bf16", "333 bf16->bf16", "512 fp32->fp32", "512 bf16->bf16 causal log", "4096 bf16->bf16"),
    *(f"{BACKWARD_TILE} fp32->fp16 log", f"{BACKWARD_TILE} bf16->bf16 causal", f"{BACKWARD_TILE - 17} fp32->fp32"),
    *(f"{BACKWARD_TILE - 17} bf16->bf16 causal log", "50257 bf16->bf16", "50257 fp32->bf16 causal log"),
    *(f"{LONG} fp32->fp32", f"{LONG} bf16->bf16 causal log", f"{LONG} bf16->bf16 first half of pieces"),
    *(f"{LONG} bf16->bf16 second half of pieces", f"{ODD} bf16->bf16 causal log first half of pieces"),
    f"{ODD} bf16->bf16 causal log second half of pieces",
)
EXACT_FORWARD = (
    *("64 bf16->bf16", "333 bf16->bf16", "1024 bf16->bf16", "4096 bf16->bf16", "4096 fp32->fp32 log"),
    *("512 bf16->bf16 causal", "4096 bf16->bf16 u8 mask", "32768 bf16->bf16", "32768 fp32->fp32"),
    *("65536 bf16->bf16 first half of pieces", "65536 bf16->bf16 second half of pieces"),
)
EXACT_BACKWARD = (
    *("64 bf16->bf16", "4096 bf16->bf16", "512 bf16->bf16 causal log", "16384 fp32->fp32"),
    *("65536 bf16->bf16 first half of pieces", "65536 bf16->bf16 second half of pieces"),
)
# Softmax over the first of two dimensions or, if transposed, over the last dimension of the transposed x.
STRIDED_FORWARD = (
    *("64 apart, 4096 across bf16->bf16", "1024 apart, 4096 across fp32->bf16 log"),
    *("1024 apart, 4096 across bf16->bf16 u8 mask", "8192 apart, 4096 across bf16->bf16 u8 mask"),
    *("8192 apart, 4096 across fp32->fp32 log", "512 apart, 4096 across bf16->fp32"),
    "512 apart, 4096 across bf16->bf16 transposed",
)
STRIDED_BACKWARD = (
    *("64 apart, 4096 across bf16->bf16", "512 apart, 4096 across fp32->fp32 log"),
    *("512 apart, 4096 across bf16->fp32", "8192 apart, 4096 across bf16->bf16"),
    "8192 apart, 4096 across fp32->fp32 log",
)
_NAME = re.compile(
    r"(?P<columns>\d+)( apart, (?P<across>\d+) across)? (?P<source>\w+)->(?P<target>\w+)( (?P<mask>\w+) mask)?"
    r"(?P<causal> causal)?(?P<log> log)?(?P<transposed> transposed)?( (?P<stage>first|second) half of pieces)?"
    r"(?P<out_of_step> out of step)?"
)
_TILE, _TRIP = ("form.TILE",), ("form.TRIP",)


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")


def _backward(grad: torch.Tensor, y: torch.Tensor, dim: int, of: dict[str, Any], is_exact: bool) -> None:
    causal, log = of["causal"] is not None, of["log"] is not None
    torch.ops.halfstep.softmax_backward(grad, y, dim, 1.0, causal, log, is_exact, _DTYPES[of["target"]])


def _passes(columns: int, tile: int, loop: int, stage: int) -> tuple[tuple[str, ...], float, float]:
    """The constants whose product is the elements to divide bytes by, and how often these are read and written."""
    if stage:  # the tile of a piece is as large as an iteration
        return _TRIP, 2.0, 0.0 if stage == 1 else 2.0
    if columns <= tile:
        return _TILE, 1.0, 1.0
    trips = held_columns(columns, tile, loop) / loop  # for the columns that stay in registers
    return _TRIP, trips + 2.0, trips + 1.0


def _variant(kernel: Any, name: str, backward: bool) -> Variant:
    of = _NAME.fullmatch(name).groupdict()  # type: ignore[union-attr]
    columns, source, target, mask = int(of["columns"]), of["source"], of["target"], of["mask"]
    read, written = _DTYPES[source].itemsize, _DTYPES[target].itemsize
    stage, in_step = (None, "first", "second").index(of["stage"]), of["out_of_step"] is None
    tile: tuple[str, ...] = ()
    is_exact = kernel in (exact.forward_exact_kernel, exact.backward_exact_kernel)
    launch: partial[Any]
    if of["across"]:
        shape: tuple[int, ...] = (columns, int(of["across"]))
        x, masks, dim = _empty(source, *shape), _empty(mask, *shape) if mask else None, -2
        if of["transposed"]:
            x, dim = x.t(), -1
        # Columns that do not fit into registers are read twice.
        reads, writes = 2.0 if columns >= 8192 else 1.0, 1.0
    else:
        # The mask is shared by all heads. With 8 queries, each row of x has the same offset as the row of the mask.
        shape = (*((1, 1) if stage else (2, 2, 8)), columns + 3 * (not in_step))
        x, masks, dim = _empty(source, *shape)[..., :columns], _empty(mask, 2, 1, 8, columns) if mask else None, -1
        plain = not mask and in_step and max(read, written) == 2
        sizes = FORWARD_TILE if in_step else FORWARD_TILE // 2, FORWARD_LOOP if plain else FORWARD_LOOP // 2
        tile, reads, writes = ("tile",), 1.0, 0.0 if stage == 1 else 1.0
        if not is_exact:
            tile, reads, writes = _passes(columns, *((BACKWARD_TILE, BACKWARD_LOOP) if backward else sizes), stage)
    if backward:
        launch, read = partial(_backward, _empty(source, *shape), _empty(source, *shape), dim, of, is_exact), 2 * read
    else:
        options: dict[str, Any] = {} if of["across"] else {"causal": of["causal"] is not None}
        options["precision"] = "exact" if is_exact else "fast"
        function = halfstep.log_softmax if of["log"] else halfstep.softmax
        launch = partial(function, x, dim, mask=masks, dtype=_DTYPES[target], **options)
        # With different offsets, and by the exact kernel, the mask is read element by element, which the audit does not
        # count.
        read += _DTYPES[mask].itemsize if mask and in_step and not is_exact else 0
    return Variant(
        kernel,
        name,
        launch,
        read * reads,
        written * writes,
        exact=is_exact,
        fused=is_exact,
        tile=tile,
        index=max(stage - 1, 0),
    )


def variants() -> Iterator[Variant]:
    """Rows with each kind of tile and loop, and softmax over other dimensions; forward and backward."""
    for kernel, names, backward in (
        (forward_row_kernel, FORWARD, False),
        (strided.forward_strided_kernel, STRIDED_FORWARD, False),
        (exact.forward_exact_kernel, EXACT_FORWARD, False),
        (backward_row_kernel, BACKWARD, True),
        (exact.backward_exact_kernel, EXACT_BACKWARD, True),
        (strided.backward_strided_kernel, STRIDED_BACKWARD, True),
    ):
        yield from (_variant(kernel, name, backward) for name in names)
