"""The memory of optimizers per parameter: one row per optimizer and precision.

A row has the formats of weights, gradients, master and moments, the format in which the model computes, and the
temporary memory of `step`. halfstep's rows follow from its `StateLayout`; those of other libraries were read from their
source code, at the version in `Layout.source`. tests/numerics/planning/test_planning_reality.py compares the rows of
halfstep, torch and flashoptim with the memory that they allocate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from halfstep.numerics.messages import one_of
from halfstep.numerics.state_layout import ADAM, BF16, FP16, FP32, INT8, StateLayout, StoredFormat

INT8_GROUPS = StoredFormat("int8 in groups of 32", 1, group=32, scale=2)
INT8_BLOCKS = StoredFormat("int8 in blocks of 256", 1, group=256, scale=4, least=4096)
PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
MOMENTS = ("fp32", "bf16", "8bit")  # formats of halfstep's moments


@dataclass(frozen=True)
class Layout:
    """How an optimizer stores the weights, gradients and states of a model with a given precision."""

    optimizer: str
    precision: str  # of parameters: "fp32", "bf16", "fp16"; "amp-bf16", "amp-fp16": fp32 under `torch.autocast`
    weights: StoredFormat  # format of weights and gradients
    compute: StoredFormat  # format of matrix products and activations
    formats: tuple[tuple[str, StoredFormat], ...] = ()  # states of other libraries' optimizers: (name, format)
    state_layout: StateLayout | None = None  # states of halfstep's optimizers
    adamw: Layout | None = None  # with Muon, the layout of parameters that are not matrices, which AdamW steps
    temporary: int = 0  # bytes per parameter that `step` allocates and frees
    scalars: int = 0  # additional bytes on the device per parameter tensor: its step count
    source: str = ""  # where the numbers of this row come from

    @property
    def name(self) -> str:
        """``optimizer, precision``."""
        return f"{self.optimizer}, {self.precision}"

    @property
    def gradients(self) -> StoredFormat:
        return self.weights

    @property
    def ours(self) -> bool:
        """Whether the optimizer is one of halfstep's."""
        return self.state_layout is not None

    @property
    def autocast(self) -> bool:
        """Whether the model computes in another format than that of the parameters."""
        return self.weights != self.compute

    def states(self) -> tuple[tuple[str, StoredFormat], ...]:
        """Name and format of each optimizer state; ``"remainder"`` extends a 16-bit weight to its master."""
        return self.formats if self.state_layout is None else tuple(self.state_layout.formats.items())

    def per_parameter(self) -> Fraction:
        """Bytes per parameter of weight, gradient and states; with Muon, those of a matrix."""
        return 2 * self.weights.per_parameter + sum((stored.per_parameter for _, stored in self.states()), Fraction(0))

    def moved_per_step(self) -> Fraction:
        """The minimum number of bytes per parameter that one step reads and writes.

        It reads the gradient, and reads and writes states and weight; a weight with a full master is only written.
        """
        return self.moved_besides_states + 2 * sum((stored.per_parameter for _, stored in self.states()), Fraction(0))

    @property
    def moved_besides_states(self) -> Fraction:
        """The part of `moved_per_step` for gradients, weights, and Muon's matrices in scratch memory."""
        accesses = 2 if "master" in dict(self.states()) else 3
        return accesses * self.weights.per_parameter + (0 if self.adamw is None else 4)

    @property
    def needs_rows(self) -> bool:
        """Whether shards must consist of whole rows of parameters."""
        return any(stored.without_rows is not None for _, stored in self.states())


_ALL, _HALF = (FP32, BF16, FP16), (BF16, FP16)
_TORCH = "torch 2.13, torch/optim/adam.py"
# halfstep's, by the suffix after "halfstep": formats of the parameters, `master_weights`, and formats of the moments.
_MASTERS: dict[str, tuple[tuple[StoredFormat, ...], str | None, tuple[str, ...]]] = {
    "": (_ALL, "auto", MOMENTS[:1]),
    "-full": (_HALF, "full", MOMENTS[:1]),
    "-split": (_HALF[:1], "split", MOMENTS),
    "-split24": (_HALF[:1], "split24", MOMENTS),
    "-stochastic": (_HALF, None, MOMENTS),
}
# Others: formats of the parameters, format of the master, of the moments (None: that of the parameters), other fields.
_OTHERS: tuple[tuple[str, tuple[StoredFormat, ...], StoredFormat | None, StoredFormat | None, dict[str, Any]], ...] = (
    # foreach, torch's default on a GPU, allocates the square root of exp_avg_sq
    ("torch", (FP32,), None, FP32, {"temporary": 4, "source": _TORCH}),
    ("torch", _HALF, None, None, {"temporary": 2, "source": _TORCH}),
    ("torch-fused", _ALL, None, None, {"scalars": 4, "source": _TORCH}),
    ("flashoptim-24", _HALF, INT8, INT8_GROUPS, {"source": "flashoptim 0.1.4, flashoptim/optimizers.py"}),
    ("bitsandbytes-8bit", _ALL, None, INT8_BLOCKS, {"source": "bitsandbytes 0.50.2, bitsandbytes/optim/optimizer.py"}),
    ("torchao-8bit", _ALL, None, INT8_BLOCKS, {"source": "torchao 0.18, torchao/optim/adam.py"}),
)


def _with_momentum(row: Layout, algorithm: str, **options: Any) -> Layout:
    """A row of AdamW converted to an algorithm whose only moment is the momentum buffer."""
    assert row.state_layout is not None
    state_layout = replace(row.state_layout, moments=("momentum_buffer",), linear=algorithm == "muon")
    optimizer = row.optimizer.replace("halfstep", f"halfstep-{algorithm}")
    return replace(row, optimizer=optimizer, state_layout=state_layout, **options)


def _rows() -> tuple[Layout, ...]:
    """The rows of all optimizers, with those of fp32 parameters repeated for each autocast dtype."""
    adamw = [
        Layout(
            *(f"halfstep{name}{'' if state == 'fp32' else f'-{state}'}", form.name, form, form),
            state_layout=StateLayout.resolve(form.name, master, state),
            scalars=4,
            source="integrations/optim",
        )
        for name, (forms, master, states) in _MASTERS.items()
        for state in states
        for form in forms
    ]
    rows = [*adamw, *(_with_momentum(row, "muon", adamw=row) for row in adamw)]
    rows += [_with_momentum(row, "sgd") for row in adamw if row.optimizer == "halfstep"]
    for optimizer, forms, master, moment, options in _OTHERS:
        for form in forms:
            formats = [] if master is None else [("remainder", master)]
            formats += [(name, moment or form) for name in ADAM]
            rows.append(Layout(optimizer, form.name, form, form, tuple(formats), **options))
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
        moments: overrides the format of the moments of a halfstep optimizer: ``"fp32"``, ``"bf16"`` or ``"8bit"``.

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
    if moments is None:
        return row
    if row.state_layout is None:
        raise ValueError(
            f"Expected moments to be None for optimizer {optimizer!r}, whose format is fixed, but got {moments!r}: "
            "leave moments out"
        )
    one_of("moments", moments, MOMENTS)
    adamw = row.adamw and layout(row.adamw.optimizer, row.adamw.precision, moments=moments)
    return replace(row, state_layout=replace(row.state_layout, state=moments), adamw=adamw)
