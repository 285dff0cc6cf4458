"""The memory of optimizers per parameter: one frozen row per optimizer and precision.

A row gives the formats of weights, gradients, master and moments, the format in which the model computes, and the
temporary memory of `step`. The rows of halfstep are those of its `StateLayout`; rows of other libraries come from their
source code, at the version in `Layout.source`. tests/numerics/planning/test_planning_reality.py compares the rows of
halfstep and torch with the memory that they allocate.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from halfstep.numerics.messages import one_of
from halfstep.numerics.state_layout import (
    ADAM,
    BF16,
    CODES,
    FP16,
    FP32,
    INT8,
    POSITIVE_CODES,
    REMAINDERS,
    StateLayout,
    StoredFormat,
)

INT8_GROUPS = StoredFormat("int8 in groups of 32", 1, group=32, scale=2)
INT8_BLOCKS = StoredFormat("int8 in blocks of 256", 1, group=256, scale=4, least=4096)
PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
# Formats of the moments of halfstep, of which SGD has the first.
MOMENTS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "8bit": (CODES, POSITIVE_CODES)}


@dataclass(frozen=True)
class Layout:
    """The formats in which an optimizer stores a model of one precision."""

    optimizer: str
    precision: str  # "fp32", "bf16", "fp16": of the parameters; "amp-bf16", "amp-fp16": fp32 under `torch.autocast`
    weights: StoredFormat
    gradients: StoredFormat  # of ``.grad``
    master: StoredFormat | None  # of a full master, or of the remainder of a split one
    moments: tuple[tuple[str, StoredFormat], ...]  # by name
    compute: StoredFormat  # of matrix products and activations
    temporary: int = 0  # bytes per parameter that `step` allocates and frees
    scalars: int = 0  # further bytes on the device per parameter tensor: its step count
    source: str = ""  # where the numbers of this row come from

    @property
    def name(self) -> str:
        """``optimizer, precision``."""
        return f"{self.optimizer}, {self.precision}"

    @property
    def ours(self) -> bool:
        """Whether the optimizer is one of halfstep's."""
        return self.optimizer.startswith("halfstep")

    @property
    def autocast(self) -> bool:
        """Whether matrix products have another format than the parameters."""
        return self.weights != self.compute

    def states(self) -> tuple[tuple[str, StoredFormat], ...]:
        """Name and format of each optimizer state; ``"remainder"`` extends a 16-bit weight to its master."""
        name = "remainder" if self.master in REMAINDERS else "master"
        return (*([] if self.master is None else [(name, self.master)]), *self.moments)

    def per_parameter(self) -> Fraction:
        """Bytes of weight, gradient and states."""
        formats = (self.weights, self.gradients, *(stored for _, stored in self.states()))
        return sum((stored.per_parameter for stored in formats), Fraction(0))

    def moved_per_step(self) -> Fraction:
        """The least number of bytes per parameter that one step reads and writes.

        It reads the gradient, and reads and writes states and weight, but does not read a weight with a full master.
        """
        states = (stored.per_parameter for _, stored in self.states())
        return self.moved_besides_states + 2 * sum(states, Fraction(0))

    @property
    def moved_besides_states(self) -> Fraction:
        """What `moved_per_step` counts of gradients and weights."""
        rewritten = self.master is not None and self.master not in REMAINDERS
        return self.gradients.per_parameter + (1 if rewritten else 2) * self.weights.per_parameter

    @property
    def needs_rows(self) -> bool:
        """Whether the shards of parameters must consist of whole rows."""
        return any(stored.without_rows is not None for _, stored in self.states())


_ALL, _HALF = (FP32, BF16, FP16), (BF16, FP16)
SGD = ("momentum_buffer",)
_TORCH = "torch 2.13, torch/optim/adam.py"
# Rows of halfstep: name, formats of the parameters, and `master_weights`. Each has every format of the moments.
_MASTERS: tuple[tuple[str, tuple[StoredFormat, ...], str | None], ...] = (
    *(("halfstep-full", _HALF, "full"), ("halfstep-split", (BF16,), "split")),
    *(("halfstep-split24", (BF16,), "split24"), ("halfstep-stochastic", _HALF, None)),
)
# Rows of others: formats of the parameters, the master and the moments (None: that of the parameters), and the rest.
_OTHERS: tuple[tuple[str, tuple[StoredFormat, ...], StoredFormat | None, StoredFormat | None, dict[str, Any]], ...] = (
    # foreach, torch's default on a GPU, allocates the square root of exp_avg_sq
    ("torch", (FP32,), None, FP32, {"temporary": 4, "source": _TORCH}),
    ("torch", _HALF, None, None, {"temporary": 2, "source": _TORCH}),
    ("torch-fused", _ALL, None, None, {"scalars": 4, "source": _TORCH}),
    ("flashoptim-24", _HALF, INT8, INT8_GROUPS, {"source": "flashoptim 0.1.4, flashoptim/optimizers.py"}),
    ("bitsandbytes-8bit", _ALL, None, INT8_BLOCKS, {"source": "bitsandbytes 0.50.2, bitsandbytes/optim/optimizer.py"}),
    ("torchao-8bit", _ALL, None, INT8_BLOCKS, {"source": "torchao 0.18, torchao/optim/adam.py"}),
)


def _ours(
    optimizer: str, form: StoredFormat, master: str | None, state: str, moments_of: tuple[str, ...] = ADAM
) -> Layout:
    formats = dict(StateLayout.resolve(form.name, master, state, moments=moments_of).formats)
    stored = formats.pop("master", None) or formats.pop("remainder", None)
    moments = tuple(formats.items())
    return Layout(optimizer, form.name, form, form, stored, moments, form, scalars=4, source="integrations/optim")


def _rows() -> tuple[Layout, ...]:
    """The rows of all optimizers, and those with fp32 parameters once more for each dtype of autocast."""
    rows = [_ours("halfstep", form, "auto", "fp32") for form in _ALL]
    for optimizer, forms, master in _MASTERS:
        for state in ("fp32",) if master == "full" else MOMENTS:
            name = optimizer if state == "fp32" else f"{optimizer}-{state}"
            rows += [_ours(name, form, master, state) for form in forms]
    rows += [_ours("halfstep-sgd", form, "auto", "fp32", SGD) for form in _ALL]  # with momentum
    for optimizer, forms, stored, moment, options in _OTHERS:
        for form in forms:
            moments = tuple((name, moment or form) for name in ADAM)
            rows.append(Layout(optimizer, form.name, form, form, stored, moments, form, **options))
    plain = [row for row in rows if row.precision == "fp32"]
    autocast = (replace(row, precision=f"amp-{form.name}", compute=form) for form, row in product(_HALF, plain))
    return (*rows, *autocast)


LAYOUTS = _rows()
OPTIMIZERS = tuple(dict.fromkeys(row.optimizer for row in LAYOUTS))


def layout(optimizer: str = "halfstep", precision: str = "bf16", *, moments: str | None = None) -> Layout:
    """The row of an optimizer and a precision.

    Args:
        optimizer: a name of `OPTIMIZERS`.
        precision: a name of `PRECISIONS`.
        moments: another format for the moments of one of halfstep's optimizers: ``"fp32"``, ``"bf16"`` or ``"8bit"``.

    Raises:
        ValueError: there is no such row, or the optimizer does not support the format.

    Examples:
        >>> from halfstep.numerics.planning import layout
        >>> row = layout("halfstep", "bf16", moments="bf16")
        >>> row.weights.width, *(stored.width for _, stored in row.states())  # bytes per parameter
        (2, 2, 2, 2)
    """
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("precision", precision, PRECISIONS)
    rows = {row.precision: row for row in LAYOUTS if row.optimizer == optimizer}
    if precision not in rows:
        raise ValueError(
            f"Expected precision to be one of {', '.join(rows)} for optimizer {optimizer!r}, but got {precision!r}"
        )
    row = rows[precision]
    if moments is not None:
        if not row.ours:
            raise ValueError(
                f"Expected moments to be None for optimizer {optimizer!r}, whose format is fixed, but got {moments!r}: "
                "leave moments out"
            )
        one_of("moments", moments, MOMENTS)
        formats = MOMENTS[moments][: len(row.moments)]
        row = replace(row, moments=tuple((name, form) for (name, _), form in zip(row.moments, formats, strict=True)))
    return row
