"""The memory of optimizers per parameter: one frozen row per optimizer and precision.

A row gives the formats of weights, gradients, master and moments, the format in which the model computes, and the
temporary memory of `step`. Rows of other libraries come from their source code, at the version in `Layout.source`.
tests/numerics/planning/test_planning_reality.py compares the rows of halfstep, torch and flashoptim with the memory
that they allocate.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from halfstep.numerics.messages import one_of


@dataclass(frozen=True)
class StoredFormat:
    """A format in memory.

    Args:
        name: the name of the format.
        width: bytes per element.
        group: elements that share a scale; 0 for a format without shared scales.
        scale: bytes of a scale.
        without_rows: for a format whose groups lie within rows, the format of tensors without rows that are long
            enough; None if groups lie anywhere.
        least: elements of the smallest tensor in this format; smaller ones are in fp32.
    """

    name: str
    width: int
    group: int = 0
    scale: int = 0
    without_rows: StoredFormat | None = None
    least: int = 0

    def bytes(self, elements: int, row: int = 0) -> int:
        """Bytes of one tensor. A short last group has a complete scale.

        Args:
            elements: the number of its elements.
            row: the number of elements in a row, 0 for a tensor that `Shards.rows` leaves out.
        """
        if elements < self.least:
            return 4 * elements
        if self.without_rows is None:
            return elements * self.width + (-(-elements // self.group) * self.scale if self.group else 0)
        if not row:
            return self.without_rows.bytes(elements)
        return elements * self.width + elements // row * -(-row // self.group) * self.scale

    @property
    def per_parameter(self) -> Fraction:
        """Bytes per element of a tensor without a short group, and with rows if the format depends on them."""
        return self.width + (Fraction(self.scale, self.group) if self.group else Fraction(0))


FP32, FP16, BF16 = StoredFormat("fp32", 4), StoredFormat("fp16", 2), StoredFormat("bf16", 2)
FP8 = StoredFormat("fp8", 1)
INT16, INT8 = StoredFormat("int16", 2), StoredFormat("int8", 1)
INT8_GROUPS = StoredFormat("int8 in groups of 32", 1, group=32, scale=2)
# kernels/block_codes.py; the scales of second moments have two bytes.
CODES = StoredFormat("8bit", 1, group=32, scale=1, without_rows=FP32)
POSITIVE_CODES = replace(CODES, name="8bit, positive", scale=2)
INT8_BLOCKS = StoredFormat("int8 in blocks of 256", 1, group=256, scale=4, least=4096)
SECOND_MOMENTS = {CODES.name: POSITIVE_CODES.name}  # formats that second moments have instead of that of the first
REMAINDERS = (INT16, INT8)  # formats of the bits that extend a 16-bit weight to its master
STORED_FORMATS = {stored.name: stored for stored in (FP32, FP16, BF16, FP8, CODES, POSITIVE_CODES)}

PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")


@dataclass(frozen=True)
class Layout:
    """The formats in which an optimizer stores a model of one precision.

    Args:
        optimizer: its name in this table.
        precision: ``"fp32"``, ``"bf16"`` and ``"fp16"`` name the format of the parameters; ``"amp-bf16"`` and
            ``"amp-fp16"`` are fp32 parameters under `torch.autocast`.
        weights: format of the parameters.
        gradients: format of ``.grad``.
        master: format of a full master or of the remainder of a split one; None if there is no master.
        exp_avg, exp_avg_sq: formats of the moments; ``max_exp_avg_sq`` has the format of `exp_avg_sq`.
        compute: format of matrix products and activations.
        temporary: bytes per parameter that `step` allocates and frees.
        scalars: further bytes on the device per parameter tensor (step counts, scales).
        amsgrad: whether the optimizer supports AMSGrad.
        moments_allowed: other formats that the moments may have.
        master_allowed: other formats that a full master may have.
        note: a remark on unexpected behavior.
        source: the source of this row.
    """

    optimizer: str
    precision: str
    weights: StoredFormat
    gradients: StoredFormat
    master: StoredFormat | None
    exp_avg: StoredFormat
    exp_avg_sq: StoredFormat
    compute: StoredFormat
    temporary: int = 0
    scalars: int = 0
    amsgrad: bool = False
    moments_allowed: tuple[str, ...] = ()
    master_allowed: tuple[str, ...] = ()
    note: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """``optimizer, precision``."""
        return f"{self.optimizer}, {self.precision}"

    @property
    def master_name(self) -> str:
        """``"master"``, or ``"remainder"`` for the bits that extend a 16-bit weight to its master."""
        return "remainder" if self.master in REMAINDERS else "master"

    @property
    def autocast(self) -> bool:
        """Whether matrix products have another format than the parameters."""
        return self.weights != self.compute

    def states(self, amsgrad: bool = False) -> tuple[tuple[str, StoredFormat], ...]:
        """Name and format of each optimizer state."""
        master = [] if self.master is None else [(self.master_name, self.master)]
        moments = [("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)]
        return (*master, *moments, *[("max_exp_avg_sq", self.exp_avg_sq)] * amsgrad)

    def per_parameter(self, amsgrad: bool = False) -> Fraction:
        """Bytes of weight, gradient and states."""
        return sum(
            (stored.per_parameter for _, stored in self.states(amsgrad)),
            self.weights.per_parameter + self.gradients.per_parameter,
        )

    def moved_per_step(self, amsgrad: bool = False) -> Fraction:
        """The least number of bytes per parameter that one step reads and writes.

        A step reads the gradient, reads and writes the states and the weight, but does not read a weight that has a
        full master.
        """
        states = sum((stored.per_parameter for _, stored in self.states(amsgrad)), Fraction(0))
        return self.moved_besides_states + 2 * states

    @property
    def moved_besides_states(self) -> Fraction:
        """What `moved_per_step` counts of gradients and weights."""
        rewritten = self.master is not None and self.master_name == "master"
        return self.gradients.per_parameter + (1 if rewritten else 2) * self.weights.per_parameter

    @property
    def needs_rows(self) -> bool:
        """Whether the shards of parameters must consist of whole rows."""
        return any(stored.without_rows is not None for _, stored in self.states())


def _rows(
    optimizer: str,
    weights: Iterable[StoredFormat],
    master: StoredFormat | None,
    moment: StoredFormat | None = FP32,
    **rest: Any,
) -> Iterator[Layout]:
    """A row for each format of the parameters. If `moment` is None, the moments have the format of the parameters."""
    for form in weights:
        first = moment or form
        second = POSITIVE_CODES if first == CODES else first
        yield Layout(optimizer, form.name, form, form, master, first, second, compute=form, **rest)


def _under_autocast(rows: Iterable[Layout]) -> tuple[Layout, ...]:
    """The rows, and a copy of each row with fp32 parameters for each dtype of autocast."""
    listed = tuple(rows)
    cast = [
        replace(row, precision=f"amp-{compute.name}", compute=compute)
        for compute in (BF16, FP16)
        for row in listed
        if row.precision == "fp32"
    ]
    return (*listed, *cast)


_ALL, _HALF = (FP32, BF16, FP16), (BF16, FP16)
_OURS: dict[str, Any] = {
    "scalars": 4,
    "amsgrad": True,
    "moments_allowed": ("fp32", "bf16", "8bit"),
    "source": "integrations/optim",
}
_TORCH: dict[str, Any] = {"amsgrad": True, "source": "torch 2.13, torch/optim/adam.py"}
_FOREACH = "foreach, torch's default on a GPU, allocates the square root of exp_avg_sq"
_APEX: dict[str, Any] = {"source": "apex 6424da3, apex/optimizers/fused_adam.py"}
_TE: dict[str, Any] = {
    "moments_allowed": ("fp32", "fp16", "bf16", "fp8"),
    "source": "TransformerEngine d0067d0, transformer_engine/pytorch/optimizers/fused_adam.py",
}
_TE_MASTER: dict[str, Any] = {**_TE, "master_allowed": ("fp32", "fp16")}
_FLASH: dict[str, Any] = {"moment": INT8_GROUPS, "source": "flashoptim 0.1.4, flashoptim/optimizers.py"}
_DEEPSPEED: dict[str, Any] = {"source": "Rajbhandari et al., ZeRO (2020), §3.1"}

LAYOUTS = _under_autocast(
    (
        *_rows("halfstep", [FP32], None, **_OURS),
        *_rows("halfstep", [BF16], INT16, **_OURS),
        *_rows("halfstep", [FP16], FP32, **_OURS),
        *_rows("halfstep-full", _HALF, FP32, **_OURS),
        *_rows("halfstep-split", [BF16], INT16, **_OURS),
        *_rows("halfstep-split-bf16", [BF16], INT16, BF16, **_OURS),
        *_rows("halfstep-split-8bit", [BF16], INT16, CODES, **_OURS),
        *_rows("halfstep-split24", [BF16], INT8, **_OURS),
        *_rows("halfstep-split24-bf16", [BF16], INT8, BF16, **_OURS),
        *_rows("halfstep-split24-8bit", [BF16], INT8, CODES, **_OURS),
        *_rows("halfstep-stochastic", _HALF, None, **_OURS),
        *_rows("halfstep-stochastic-bf16", _HALF, None, BF16, **_OURS),
        *_rows("halfstep-stochastic-8bit", _HALF, None, CODES, **_OURS),
        *(
            row
            for form in _ALL
            for row in _rows("torch", [form], None, None, temporary=form.width, note=_FOREACH, **_TORCH)
        ),
        *_rows("torch-fused", _ALL, None, None, scalars=4, **_TORCH),
        *_rows(
            *("torch-fused-bf16", [FP32], None, BF16),
            scalars=4,
            note="the caller must create the moments in bf16, as torchtitan does",
            amsgrad=True,
            source="torch 2.13, aten/src/ATen/native/cuda/fused_adam_utils.cuh",
        ),
        *_rows("apex", _ALL, None, **_APEX),
        *_rows(
            *("apex-master", [BF16], FP32),
            note="master_weights=True has no effect for bf16, but the copy is allocated",
            **_APEX,
        ),
        *_rows("apex-master", [FP16], FP32, **_APEX),
        *_rows(
            *("apex-o2", [FP16], FP32),
            temporary=4,
            note="amp O2, removed in 2025: holds fp32 gradients too, from unscaling to the end of the step",
            source="apex 00dbe4b, apex/amp/_process_optimizer.py",
        ),
        *_rows("te", _ALL, None, **_TE),
        *_rows("te-master", [FP32], FP32, note="allocates a master of fp32 parameters, never updated", **_TE_MASTER),
        *_rows("te-master", _HALF, FP32, **_TE_MASTER),
        *_rows("te-remainder", [BF16], INT16, **_TE),
        *_rows("te-remainder-bf16", [BF16], INT16, BF16, **_TE),
        *_rows("flashoptim", [FP32], None, **_FLASH),
        *_rows("flashoptim-24", _HALF, INT8, **_FLASH),
        *_rows("flashoptim-32", _HALF, INT16, **_FLASH),
        *_rows("flashoptim-none", _HALF, None, **_FLASH),
        *_rows(
            "bitsandbytes-8bit", _ALL, None, INT8_BLOCKS, source="bitsandbytes 0.50.2, bitsandbytes/optim/optimizer.py"
        ),
        *_rows("torchao-8bit", _ALL, None, INT8_BLOCKS, source="torchao 0.18, torchao/optim/adam.py"),
        *_rows(
            *("deepspeed", [BF16], FP32),
            note="its BF16_Optimizer also allocates an fp32 gradient, the accumulator",
            **_DEEPSPEED,
        ),
        *_rows("deepspeed", [FP16], FP32, **_DEEPSPEED),
        *_rows(
            *("deepspeed-bf16", [BF16], BF16, BF16),
            note="bf16_master_weights_and_grads and bf16_optimizer_states; the master is a second bf16 copy",
            source="DeepSpeed, deepspeed/runtime/zero/base_optimizer.py, and pull request 8010",
        ),
    )
)

OPTIMIZERS = tuple(dict.fromkeys(row.optimizer for row in LAYOUTS))
_ROWS = {(row.optimizer, row.precision): row for row in LAYOUTS}
GRADIENTS = ("fp32", "bf16", "fp16")  # formats of gradients, of their sums, and of what is sent
# Bytes of the scales that TransformerEngine stores for each tensor of a state: one scale, and for fp8 also the scale,
# largest magnitude and inverse scale of the fp8 tensor.
TE_SCALES = {"fp32": 0, "fp16": 4, "bf16": 4, "fp8": 16}


def layout(
    optimizer: str = "halfstep",
    precision: str = "bf16",
    *,
    moments: str | None = None,
    master: str | None = None,
    gradients: str | None = None,
) -> Layout:
    """The row of an optimizer and a precision.

    Args:
        optimizer: a name of `OPTIMIZERS`.
        precision: a name of `PRECISIONS`.
        moments: another format for both moments, or one for each: ``"fp8,fp16"`` is exp_avg in fp8, exp_avg_sq in
            fp16.
        master: another format for a full master.
        gradients: another format for ``.grad``: ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: there is no such row, or the optimizer does not support the format.

    Examples:
        >>> from halfstep.numerics.planning import layout
        >>> row = layout("halfstep", "bf16", moments="bf16")
        >>> row.weights.width, row.master.width, row.exp_avg.width  # bytes per parameter
        (2, 2, 2)
    """
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("precision", precision, PRECISIONS)
    has = tuple(row.precision for row in LAYOUTS if row.optimizer == optimizer)
    if precision not in has:
        raise ValueError(
            f"Expected precision to be one of {', '.join(has)} for optimizer {optimizer!r}, but got {precision!r}"
        )
    row = _ROWS[optimizer, precision]
    if gradients is not None:
        one_of("gradients", gradients, GRADIENTS)
        row = replace(row, gradients=STORED_FORMATS[gradients])
    if moments is not None:
        row = _with_moments(row, moments)
    if master is not None:
        if not row.master_allowed:
            raise ValueError(
                f"master is {master!r}, but the format of the master of optimizer {optimizer!r} is fixed; leave master "
                "out, or choose optimizer 'te-master'"
            )
        one_of("master", master, row.master_allowed)
        row = replace(row, master=STORED_FORMATS[master])
    return _scaled(row) if optimizer.startswith("te") else row


def _with_moments(row: Layout, moments: str) -> Layout:
    given = [name.strip() for name in moments.split(",")]
    if not row.moments_allowed:
        raise ValueError(
            f"moments is {moments!r}, but the format of the moments of optimizer {row.optimizer!r} is fixed; leave "
            "moments out"
        )
    if len(given) not in (1, 2):
        raise ValueError(f"Expected moments to be one format, or two separated by a comma, but got {moments!r}")
    for name in given:
        one_of("moments", name, row.moments_allowed)
    if row.optimizer.startswith("halfstep") and given[0] != given[-1]:
        raise ValueError(
            f"Expected moments to be one format for optimizer {row.optimizer!r}, but got {moments!r}: choose one of "
            f"{', '.join(row.moments_allowed)} for both moments"
        )
    second = SECOND_MOMENTS.get(given[-1], given[-1])
    return replace(row, exp_avg=STORED_FORMATS[given[0]], exp_avg_sq=STORED_FORMATS[second])


def _scaled(row: Layout) -> Layout:
    """A row of TransformerEngine with its scales, and the fp32 copies that `step` makes of fp16 and fp8 states."""
    states = [row.exp_avg, row.exp_avg_sq] + ([] if row.master in (None, INT16) else [row.master])
    return replace(
        row,
        scalars=sum(TE_SCALES[state.name] for state in states if state is not None),
        temporary=4 * sum(state in (FP16, FP8) for state in states),
    )
