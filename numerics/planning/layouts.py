"""The memory of optimizers per parameter: one frozen row per optimizer and precision.

A row gives the formats of weights, gradients, master and moments, the format in which the model computes, and the
temporary memory of `step`. The rows of halfstep are those of its `StateLayout`; rows of other libraries come from their
source code, at the version in `Layout.source`. tests/numerics/planning/test_planning_reality.py compares the rows of
halfstep, torch and flashoptim with the memory that they allocate.

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
    INT16,
    POSITIVE_CODES,
    REMAINDERS,
    StateLayout,
    StoredFormat,
)

FP8 = StoredFormat("fp8", 1)
INT8_GROUPS = StoredFormat("int8 in groups of 32", 1, group=32, scale=2)
INT8_BLOCKS = StoredFormat("int8 in blocks of 256", 1, group=256, scale=4, least=4096)
STORED_FORMATS = {stored.name: stored for stored in (FP32, FP16, BF16, FP8, CODES, POSITIVE_CODES)}
# Formats that second moments have instead of that of the first.
SECOND_MOMENTS = {CODES.name: POSITIVE_CODES}
PRECISIONS = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
GRADIENTS = ("fp32", "bf16", "fp16")  # formats of gradients, of their sums, and of what is sent


@dataclass(frozen=True)
class Layout:
    """The formats in which an optimizer stores a model of one precision."""

    optimizer: str
    precision: str  # "fp32", "bf16", "fp16": of the parameters; "amp-bf16", "amp-fp16": fp32 under `torch.autocast`
    weights: StoredFormat
    gradients: StoredFormat  # of ``.grad``
    master: StoredFormat | None  # of a full master, or of the remainder of a split one
    moments: tuple[tuple[str, StoredFormat], ...]  # by name; ``max_exp_avg_sq`` has the format of ``exp_avg_sq``
    compute: StoredFormat  # of matrix products and activations
    temporary: int = 0  # bytes per parameter that `step` allocates and frees
    scalars: int = 0  # further bytes on the device per parameter tensor (step counts, scales)
    amsgrad: bool = False  # whether the optimizer supports AMSGrad
    moments_allowed: tuple[str, ...] = ()  # other formats that the moments may have
    master_allowed: tuple[str, ...] = ()  # other formats that a full master may have
    note: str = ""  # a remark on unexpected behavior
    source: str = ""  # where the numbers of this row come from

    @property
    def name(self) -> str:
        """``optimizer, precision``."""
        return f"{self.optimizer}, {self.precision}"

    @property
    def autocast(self) -> bool:
        """Whether matrix products have another format than the parameters."""
        return self.weights != self.compute

    def states(self, amsgrad: bool = False) -> tuple[tuple[str, StoredFormat], ...]:
        """Name and format of each optimizer state; ``"remainder"`` extends a 16-bit weight to its master."""
        name = "remainder" if self.master in REMAINDERS else "master"
        master = [] if self.master is None else [(name, self.master)]
        return (*master, *self.moments, *[("max_exp_avg_sq", self.moments[-1][1])] * amsgrad)

    def per_parameter(self, amsgrad: bool = False) -> Fraction:
        """Bytes of weight, gradient and states."""
        states = sum((stored.per_parameter for _, stored in self.states(amsgrad)), Fraction(0))
        return states + self.weights.per_parameter + self.gradients.per_parameter

    def moved_per_step(self, amsgrad: bool = False) -> Fraction:
        """The least number of bytes per parameter that one step reads and writes.

        It reads the gradient, and reads and writes states and weight, but does not read a weight with a full master.
        """
        states = (stored.per_parameter for _, stored in self.states(amsgrad))
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
_OURS: dict[str, Any] = {
    "scalars": 4,
    "amsgrad": True,
    "moments_allowed": ("fp32", "bf16", "8bit"),
    "source": "integrations/optim",
}
_TORCH = {"amsgrad": True, "source": "torch 2.13, torch/optim/adam.py"}
_FOREACH = {**_TORCH, "note": "foreach, torch's default on a GPU, allocates the square root of exp_avg_sq"}
_FUSED_BF16 = {
    **{"scalars": 4, "amsgrad": True, "source": "torch 2.13, aten/src/ATen/native/cuda/fused_adam_utils.cuh"},
    "note": "the caller must create the moments in bf16, as torchtitan does",
}
_APEX = {"source": "apex 6424da3, apex/optimizers/fused_adam.py"}
_APEX_BF16 = {**_APEX, "note": "master_weights=True has no effect for bf16, but the copy is allocated"}
_APEX_O2 = {
    **{"temporary": 4, "source": "apex 00dbe4b, apex/amp/_process_optimizer.py"},
    "note": "amp O2, removed in 2025: holds fp32 gradients too, from unscaling to the end of the step",
}
_TE = {
    "moments_allowed": ("fp32", "fp16", "bf16", "fp8"),
    "source": "TransformerEngine d0067d0, transformer_engine/pytorch/optimizers/fused_adam.py",
}
_TE_MASTER = {**_TE, "master_allowed": ("fp32", "fp16")}
_TE_FP32 = {**_TE_MASTER, "note": "allocates a master of fp32 parameters, never updated"}
_FLASH = {"source": "flashoptim 0.1.4, flashoptim/optimizers.py"}
_BITSANDBYTES = {"source": "bitsandbytes 0.50.2, bitsandbytes/optim/optimizer.py"}
_DEEPSPEED = {
    "temporary": 4,
    "note": "its own estimators count 2 bytes more: the fp32 gradients of the step as if they always existed",
    "source": "Rajbhandari et al., ZeRO (2020), §3.1; DeepSpeed edaa722, deepspeed/runtime/zero/stage_1_and_2.py, step",
}
_DEEPSPEED_BF16 = {
    "note": "bf16_master_weights_and_grads and bf16_optimizer_states; the master is a second bf16 copy",
    "source": "DeepSpeed, deepspeed/runtime/zero/base_optimizer.py, and pull request 8010",
}

# Of ours: the name, the formats of the parameters, and `master_weights`, with each format of the moments.
_MASTERS: tuple[tuple[str, tuple[StoredFormat, ...], str | None], ...] = (
    *(("halfstep-full", _HALF, "full"), ("halfstep-split", (BF16,), "split")),
    *(("halfstep-split24", (BF16,), "split24"), ("halfstep-stochastic", _HALF, None)),
)
# Of others: the formats of the parameters, of the master, of the moments (None: that of the parameters), and the rest.
_OTHERS: tuple[tuple[str, tuple[StoredFormat, ...], StoredFormat | None, StoredFormat | None, dict[str, Any]], ...] = (
    ("torch", (FP32,), None, FP32, {**_FOREACH, "temporary": 4}),
    ("torch", _HALF, None, None, {**_FOREACH, "temporary": 2}),
    ("torch-fused", _ALL, None, None, {**_TORCH, "scalars": 4}),
    ("torch-fused-bf16", (FP32,), None, BF16, _FUSED_BF16),
    ("apex", _ALL, None, FP32, _APEX),
    ("apex-master", (BF16,), FP32, FP32, _APEX_BF16),
    ("apex-master", (FP16,), FP32, FP32, _APEX),
    ("apex-o2", (FP16,), FP32, FP32, _APEX_O2),
    ("te", _ALL, None, FP32, _TE),
    ("te-master", (FP32,), FP32, FP32, _TE_FP32),
    ("te-master", _HALF, FP32, FP32, _TE_MASTER),
    ("te-remainder", (BF16,), INT16, FP32, _TE),
    ("te-remainder-bf16", (BF16,), INT16, BF16, _TE),
    ("flashoptim", (FP32,), None, INT8_GROUPS, _FLASH),
    ("flashoptim-24", _HALF, INT8, INT8_GROUPS, _FLASH),
    ("flashoptim-32", _HALF, INT16, INT8_GROUPS, _FLASH),
    ("flashoptim-none", _HALF, None, INT8_GROUPS, _FLASH),
    ("bitsandbytes-8bit", _ALL, None, INT8_BLOCKS, _BITSANDBYTES),
    ("torchao-8bit", _ALL, None, INT8_BLOCKS, {"source": "torchao 0.18, torchao/optim/adam.py"}),
    ("deepspeed", _HALF, FP32, FP32, _DEEPSPEED),
    ("deepspeed-bf16", (BF16,), BF16, BF16, _DEEPSPEED_BF16),
)


def _ours(optimizer: str, form: StoredFormat, master: str | None, state: str) -> Layout:
    formats = dict(StateLayout.resolve(form.name, master, state).formats)
    stored = formats.pop("master", None) or formats.pop("remainder", None)
    return Layout(optimizer, form.name, form, form, stored, tuple(formats.items()), form, **_OURS)


def _rows() -> tuple[Layout, ...]:
    """The rows of all optimizers, and those with fp32 parameters once more for each dtype of autocast."""
    rows = [_ours("halfstep", form, "auto", "fp32") for form in _ALL]
    for optimizer, forms, master in _MASTERS:
        for state in ("fp32",) if master == "full" else ("fp32", "bf16", "8bit"):
            name = optimizer if state == "fp32" else f"{optimizer}-{state}"
            rows += [_ours(name, form, master, state) for form in forms]
    for optimizer, forms, stored, moment, more in _OTHERS:
        for form in forms:
            moments = tuple((name, moment or form) for name in ADAM)
            rows.append(Layout(optimizer, form.name, form, form, stored, moments, form, **more))
    plain = [row for row in rows if row.precision == "fp32"]
    autocast = (replace(row, precision=f"amp-{form.name}", compute=form) for form, row in product(_HALF, plain))
    return (*rows, *autocast)


LAYOUTS = _rows()
OPTIMIZERS = tuple(dict.fromkeys(row.optimizer for row in LAYOUTS))
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
    if not optimizer.startswith("te"):
        return row
    # TransformerEngine has scales, and its `step` makes fp32 copies of fp16 and fp8 states.
    states = [stored for name, stored in row.states() if name != "remainder"]
    scalars = sum(TE_SCALES[stored.name] for stored in states)
    return replace(row, scalars=scalars, temporary=4 * sum(stored in (FP16, FP8) for stored in states))


def _with_moments(row: Layout, moments: str) -> Layout:
    names = [name.strip() for name in moments.split(",")]
    if not row.moments_allowed:
        raise ValueError(
            f"moments is {moments!r}, but the format of the moments of optimizer {row.optimizer!r} is fixed; leave "
            "moments out"
        )
    if len(names) not in (1, 2):
        raise ValueError(f"Expected moments to be one format, or two separated by a comma, but got {moments!r}")
    for name in names:
        one_of("moments", name, row.moments_allowed)
    if row.optimizer.startswith("halfstep") and names[0] != names[-1]:
        raise ValueError(
            f"Expected moments to be one format for optimizer {row.optimizer!r}, but got {moments!r}: choose one of "
            f"{', '.join(row.moments_allowed)} for both moments"
        )
    formats = (STORED_FORMATS[names[0]], SECOND_MOMENTS.get(names[-1], STORED_FORMATS[names[-1]]))
    return replace(row, moments=tuple(zip(ADAM, formats, strict=True)))
