"""How an optimizer's kernels find and store what they update: layouts, the rows of tables, batches of tensors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from halfstep.kernels.backend import EXACT, MOST_THREADS, TRITON_NAMES, most_warps
from halfstep.kernels.block_codes import SPAN, blocks_per_row, rows_and_columns
from halfstep.kernels.formats import CODED, LINEAR
from halfstep.kernels.multi_tensor import DTYPE_CODES, TensorTable

CHUNK = 2048  # elements per program
LONG_CHUNK = 16384  # the same with moments in 8 bits or random bits, which take more instructions per program
BLOCK = 1024  # elements per trip of a program's loop
MAX = torch.finfo(torch.float32).max

# How the fp32 weight is kept: in the parameter, beside it, or as the parameter and a remainder of 16 or 8 bits. With
# RESULT there is none: the parameter is a result of the rule, which is written to nearest and not read.
NO_MASTER, FULL_MASTER, SPLIT_MASTER, SPLIT24_MASTER, RESULT = range(5)
REMAINDERS = {SPLIT_MASTER: torch.int16, SPLIT24_MASTER: torch.int8}


# The rows of a tensor table by operand. EXTRA is the master or the remainder, TOP a moment's running maximum. Only with
# stochastic rounding: the parameter's number, where its shard lies in it, and the seed. Only with 8-bit moments:
# scales, and the elements in a row of the (local) tensor.
Rows = namedtuple(
    "Rows",
    "GRAD PARAM EXTRA M V TOP STEP STREAM BASE INNER INNER_WHOLE SEED M_SCALES V_SCALES TOP_SCALES COLUMNS",
)
ROWS = Rows(*range(16))
GRAD, PARAM, EXTRA, M, V, TOP, STEP = ROWS[:7]
STREAM, SEED, COLUMNS = ROWS.STREAM, ROWS.SEED, ROWS.COLUMNS
OPERANDS, STOCHASTIC_OPERANDS, CODED_OPERANDS = ROWS.STREAM, ROWS.M_SCALES, len(ROWS)
SCALES_OF = {M: ROWS.M_SCALES, V: ROWS.V_SCALES, TOP: ROWS.TOP_SCALES}


@dataclass(frozen=True)
class KernelLayout:
    """What a kernel is compiled for: the dtype combination and the options that change the arithmetic.

    The layout of a family adds the options of its rule as fields, all of them booleans.
    """

    param: torch.dtype  # fp32, fp16 or bf16
    grad: torch.dtype  # fp32, fp16 or bf16
    state: torch.dtype  # of the moments, fp32, bf16, or for codes in 8 bits uint8, or int8 if they are linear
    master: int  # one of the constants above; with remainders the parameter is bf16
    stochastic: bool = field(default=False, kw_only=True)  # round what `rounds_stochastically` names stochastically

    @property
    def moments(self) -> int:
        """How many moments there are; they are the operands from `M` on."""
        raise NotImplementedError

    @property
    def options(self) -> Any:
        """The options of the rule as kernels take them: a named tuple, whose names are in capitals."""
        options = _options_type(type(self))  # type: ignore[arg-type]
        return options(*(getattr(self, name.lower()) for name in options._fields))

    @property
    def coded(self) -> bool:
        return self.state in (torch.uint8, torch.int8)

    @property
    def in_rows(self) -> bool:
        """Whether results depend on the order of elements, which must be that of rows."""
        return self.stochastic or self.coded

    @property
    def operands(self) -> int:
        return CODED_OPERANDS if self.coded else STOCHASTIC_OPERANDS if self.stochastic else OPERANDS

    @property
    def chunk(self) -> int:
        return LONG_CHUNK if self.coded or self.stochastic else CHUNK

    def sizes(self, shapes: Sequence[torch.Size | tuple[int, ...]]) -> list[int]:
        """The sizes that the table of tensors of these shapes is built for: with codes, those of whole blocks."""
        if not self.coded:
            return list(map(prod, shapes))
        matrices = map(rows_and_columns, shapes)
        return [rows * blocks_per_row(columns) * SPAN for rows, columns in matrices]

    @property
    def codes(self) -> tuple[int, ...]:
        state = {torch.uint8: CODED, torch.int8: LINEAR}.get(self.state) or DTYPE_CODES[self.state]
        options = sum(option << bit for bit, option in enumerate(self.options))
        return DTYPE_CODES[self.param], DTYPE_CODES[self.grad], state, self.master, self.stochastic, options


@cache
def _options_type(layout: Any) -> Any:
    return namedtuple("Options", [option.name.upper() for option in fields(layout)[len(fields(KernelLayout)) :]])


class Form(NamedTuple):
    """A layout as kernels take it, their only constant: the names of types, and how the work is divided."""

    PARAM: str
    GRAD: str
    STATE: str
    EXTRA: str  # fp32 master, int16 or int8 remainder, or anything if there is neither
    FULL: bool  # whether there is an fp32 master
    RESULT: bool  # whether there is no weight
    REMAINDER: int  # bits of the remainder, or 0
    MOMENTS: int
    STOCHASTIC: bool
    OPTIONS: Any  # those of the rule
    HINT: int  # the alignment of 16-bit operands in bytes, see tiles.pointer
    COLUMNS: int  # of the table of hyper numbers
    CHUNK: int
    BLOCK: int  # elements per trip of a program's loop: eight per thread, in registers without spills


def _constants(layout: KernelLayout, hyper: torch.Tensor) -> dict[str, Any]:
    """What a kernel is compiled for. A thread holds eight elements of a block, and four where eight would spill: with a
    third fp32 moment, and on GPUs with warps of 64 threads (AMD).
    """
    lanes = MOST_THREADS // most_warps(hyper.device)
    by_fours = lanes == 64 or (layout.moments > 2 and layout.state == torch.float32)
    has_fp32 = torch.float32 in (layout.param, layout.grad, layout.state) or layout.master == FULL_MASTER
    remainder = {SPLIT_MASTER: 16, SPLIT24_MASTER: 8}.get(layout.master, 0)
    form = Form(
        PARAM=TRITON_NAMES[layout.param],
        GRAD=TRITON_NAMES[layout.grad],
        STATE={torch.uint8: "uint8", torch.int8: "int8"}.get(layout.state) or TRITON_NAMES[layout.state],
        EXTRA={16: "int16", 8: "int8", 0: "fp32"}[remainder],
        FULL=layout.master == FULL_MASTER,
        RESULT=layout.master == RESULT,
        REMAINDER=remainder,
        MOMENTS=layout.moments,
        STOCHASTIC=layout.stochastic,
        OPTIONS=layout.options,
        HINT=8 if has_fp32 or by_fours else 16,
        COLUMNS=hyper.shape[1],
        CHUNK=layout.chunk,
        BLOCK=BLOCK,
    )
    return {"FORM": form, "num_warps": BLOCK // (4 if by_fours else 8) // lanes, "num_stages": 1, **EXACT}


def rounds_stochastically(param: torch.dtype, state: torch.dtype, master: int) -> bool:
    """Whether there is anything that stochastic rounding applies to: moments or weights of fewer than 32 bits."""
    return state != torch.float32 or (param != torch.float32 and master in (NO_MASTER, SPLIT24_MASTER))


@dataclass
class Batch:
    """The tensors of one layout on one device.

    Those without memory of their own (wrapper subclasses, fake and meta tensors) have no table. The reference steps
    them by their own operations, whatever the backend; they cannot round stochastically.
    """

    layout: Any  # the `KernelLayout` that they have in common
    table: TensorTable | None  # addresses, and what names random bits; the launcher's caller keeps it fresh
    lists: list[list[torch.Tensor]]  # by operand, empty if it is not used
    groups: torch.Tensor  # int64, one per tensor: its row in the group table
    hyper: torch.Tensor  # fp32, shape ``(tensors, hyper columns of the family)``, scratch that the step fills

    @cached_property
    def codes(self) -> tuple[int, ...]:
        return self.layout.codes

    @cached_property
    def constants(self) -> dict[str, Any]:
        return _constants(self.layout, self.hyper)


class Control(NamedTuple):
    """Device scalars that steer a step, each of the dtype below with one element, or None if not used."""

    grad_scale: torch.Tensor | None = None  # what the gradients were multiplied by
    found_inf: torch.Tensor | None = None  # the step is skipped if it is not 0
    # Of the unscaled gradients, which are then clipped to the 2-norm in their group's row.
    sum_of_squares: torch.Tensor | None = None


CONTROL_DTYPES = torch.float32, torch.float32, torch.float64
