"""The softmax kernels: one or two variants of each code path, at the sizes that need the most registers.

In variants named ``out of step``, rows of x and of the result start at different offsets from a multiple of 16 bytes.
Long rows are computed by two launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.softmax import rows, strided

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "u8": torch.bool}

FORWARD = (
    *("64 bf16->bf16", "333 bf16->bf16", "1024 bf16->bf16", "4096 bf16->bf16", "4096 fp32->fp32 log"),
    *("512 bf16->bf16 causal", "4096 bf16->bf16 u8 mask", "32768 bf16->bf16", "32768 fp32->fp32"),
    *("4095 bf16->bf16", "4095 bf16->bf16 bf16 mask causal", "32751 bf16->fp32 log", "512 fp32->fp32"),
    *("32768 fp16->fp32 fp32 mask log", "4096 bf16->bf16 out of step", "4096 bf16->bf16 u8 mask out of step"),
    *("65536 bf16->bf16 first launch", "65536 bf16->bf16 second launch"),
    *("50257 bf16->fp32 causal log first launch", "50257 bf16->fp32 causal log second launch"),
)
BACKWARD = (
    *("64 bf16->bf16", "333 bf16->bf16", "4096 bf16->bf16", "512 bf16->bf16 causal log", "16384 fp32->fp32"),
    *("16384 fp32->fp16 log", "16367 fp32->fp32", "16367 bf16->bf16 causal log", "65536 bf16->bf16 first launch"),
    *("65536 bf16->bf16 second launch", "50257 bf16->bf16 causal log second launch"),
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
    r"(?P<causal> causal)?(?P<log> log)?(?P<transposed> transposed)?( (?P<stage>first|second) launch)?"
    r"(?P<out_of_step> out of step)?(?P<fast> fast)?"
)


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")


def _backward(grad: torch.Tensor, y: torch.Tensor, dim: int, of: dict[str, Any], is_exact: bool) -> None:
    causal, log = of["causal"] is not None, of["log"] is not None
    torch.ops.halfstep.softmax_backward(grad, y, dim, 1.0, causal, log, is_exact, _DTYPES[of["target"]])


def _variant(kernel: Any, name: str, backward: bool) -> Variant:
    of = _NAME.fullmatch(name).groupdict()  # type: ignore[union-attr]
    columns, source, target, mask = int(of["columns"]), of["source"], of["target"], of["mask"]
    read, written = _DTYPES[source].itemsize, _DTYPES[target].itemsize
    stage, in_step = (None, "first", "second").index(of["stage"]), of["out_of_step"] is None
    is_exact = not of["fast"] and not of["across"]
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
        reads, writes = 1.0, 0.0 if stage == 1 else 1.0
    if backward:
        launch, read = partial(_backward, _empty(source, *shape), _empty(source, *shape), dim, of, is_exact), 2 * read
    else:
        options: dict[str, Any] = {} if of["across"] else {"causal": of["causal"] is not None}
        options["precision"] = "exact" if is_exact else "fast"
        function = halfstep.log_softmax if of["log"] else halfstep.softmax
        launch = partial(function, x, dim, mask=masks, dtype=_DTYPES[target], **options)
        # With different offsets, the mask is read element by element, which the audit does not count.
        read += _DTYPES[mask].itemsize if mask and in_step else 0
    return Variant(
        kernel,
        name,
        launch,
        read * reads,
        written * writes,
        exact=is_exact,
        fused=is_exact,
        tile=() if of["across"] else ("tile",),
        index=max(stage - 1, 0),
    )


def variants() -> Iterator[Variant]:
    """Rows in each form, exact and fast, and softmax over other dimensions; forward and backward."""
    for kernel, names, backward in (
        (rows.forward_row_kernel, (*FORWARD, *(f"{name} fast" for name in FORWARD)), False),
        (strided.forward_strided_kernel, STRIDED_FORWARD, False),
        (rows.backward_row_kernel, (*BACKWARD, *(f"{name} fast" for name in BACKWARD)), True),
        (strided.backward_strided_kernel, STRIDED_BACKWARD, True),
    ):
        yield from (_variant(kernel, name, backward) for name in names)
