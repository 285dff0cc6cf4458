"""How an optimizer holds a parameter: the formats of its master and moments, their names, and their bytes.

The optimizers allocate and convert their state by a `StateLayout`, checkpoints have its names, the planner counts its
bytes, and the audit takes the bytes that a step moves from it. It knows nothing of the rule but the names of its
moments. Of a moment ``exp_avg`` and a master there are, by name:

=====================  ========================  ========================  ===================
what                   in memory                 in a held state           in a canonical one
=====================  ========================  ========================  ===================
fp32 or bf16 moment    ``exp_avg``               ``exp_avg``               ``exp_avg``
codes in 8 bits        ``exp_avg``               ``exp_avg_codes``         ``exp_avg``
scales of the codes    ``exp_avg_scale``         ``exp_avg_scale``         none
fp32 master            ``master``                ``master``                ``master``
remainder of a master  ``master``                ``master_remainder``      ``master``
=====================  ========================  ========================  ===================

In memory, codes and remainders have the names of the canonical state, so that code which looks these up
(``flatten_optimizer_state_dict``, torchtitan) finds them. In a held state they have names of their own, so that code
which expects moments and masters finds these missing instead of taking codes for them.

Importing this module needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredFormat:
    """A format in memory."""

    name: str
    width: int  # bytes per element
    group: int = 0  # elements that share a scale; 0 without shared scales
    scale: int = 0  # bytes of a scale
    # Where groups lie within rows, the format of tensors without rows; None if groups lie anywhere.
    without_rows: StoredFormat | None = None
    least: int = 0  # elements of the smallest tensor in this format; smaller ones are in fp32
    dtype: str = ""  # torch's name
    scale_dtype: str = ""

    def bytes(self, elements: int, row: int = 0) -> int:
        """Bytes of a tensor with rows of `row` elements, or 0 without rows. A short last group has a complete scale."""
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


FP32, FP16 = StoredFormat("fp32", 4, dtype="float32"), StoredFormat("fp16", 2, dtype="float16")
BF16 = StoredFormat("bf16", 2, dtype="bfloat16")
INT16, INT8 = StoredFormat("int16", 2, dtype="int16"), StoredFormat("int8", 1, dtype="int8")
# kernels/block_codes.py
CODES = StoredFormat("8bit", 1, group=32, scale=1, without_rows=FP32, dtype="uint8", scale_dtype="uint8")
LINEAR_CODES = replace(CODES, name="8bit, linear", dtype="int8")
POSITIVE_CODES = replace(CODES, name="8bit, positive", scale=2, scale_dtype="int16")
LEAST_CODED = 4096  # elements of the smallest parameter whose moments are codes

# The moments of all rules, and whether they may be negative.
MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False, "momentum_buffer": True}
ADAM = ("exp_avg", "exp_avg_sq")
CODE_KEYS = {f"{moment}_codes": moment for moment in MOMENTS}
SCALE_KEYS = {f"{moment}_scale": moment for moment in MOMENTS}
REMAINDER = "master_remainder"
HELD = (*CODE_KEYS, *SCALE_KEYS, REMAINDER)  # names that a canonical state does not have

# The kinds of masters, in the order of their numbers in the kernels, and what each of them stores.
MASTERS: dict[str | None, StoredFormat | None] = {None: None, "full": FP32, "split": INT16, "split24": INT8}
REMAINDERS = (INT16, INT8)  # formats of the bits that extend a bf16 weight to its master
_DTYPES = {stored.name: stored.dtype for stored in (FP32, FP16, BF16)}


@dataclass(frozen=True)
class StateLayout:
    """How an optimizer holds a parameter."""

    weight: str  # "fp32", "fp16", "bf16"; other formats, of parameters that kernels cannot update, by torch's name
    master: str | None  # None, "full" (fp32 copy), "split" or "split24" (bf16 weight and a remainder of 16 or 8 bits)
    state: str = "fp32"  # the format of the moments, "fp32", "bf16" or "8bit"
    moments: tuple[str, ...] = ADAM  # their names, which are keys of `MOMENTS`
    stochastic: bool = False  # whether fewer than 32 bits are rounded stochastically. Exact masters never are
    linear: bool = False  # whether codes of moments are linear

    @classmethod
    @cache
    def resolve(
        cls, weight: str, master: str | None = "auto", state: str = "fp32", rounding: str = "auto",
        moments: tuple[str, ...] = ADAM, coded: bool = True, linear: bool = False,
    ) -> StateLayout:  # fmt: skip
        """The layout with the options of a group, each of which may be ``"auto"``. Without `coded`, for a parameter
        whose moments stay in fp32 with ``state="8bit"``."""
        if weight == "fp32":
            master = None
        elif master == "auto":
            master = "split" if weight == "bf16" else "full"
        stochastic = rounds_stochastically(rounding, state)
        if state == "8bit" and not coded:
            state = "fp32"
        exact = state == "fp32" and (weight == "fp32" or master in ("full", "split"))
        return cls(weight, master, state, moments, stochastic and not exact, linear)

    @classmethod
    def of(
        cls, parameter: torch.Tensor, group: dict[str, Any], moments: tuple[str, ...], linear: bool = False
    ) -> StateLayout:
        """The layout of a parameter in its group. Moments of vectors and of small parameters are never codes.

        They take next to no memory, and norms and biases, whose blocks would mix unrelated elements, are among them.
        """
        coded = parameter.dim() > 1 and parameter.numel() >= LEAST_CODED
        weight, state = _short(parameter.dtype), _short(group["state_dtype"])
        return cls.resolve(weight, group["master_weights"], state, group["rounding"], moments, coded, linear)

    @property
    def coded(self) -> bool:
        """Whether the moments are codes in 8 bits."""
        return self.state == "8bit"

    @cached_property
    def formats(self) -> dict[str, StoredFormat]:
        """The format of each part of the state but the step count; ``"remainder"`` extends a weight to its master."""
        stored = MASTERS[self.master]
        master = {} if stored is None else {"remainder" if stored in REMAINDERS else "master": stored}
        plain = FP32 if self.state == "fp32" else BF16
        signed = LINEAR_CODES if self.linear else CODES
        codes = {moment: signed if MOMENTS[moment] else POSITIVE_CODES for moment in self.moments}
        return {**master, **(codes if self.coded else dict.fromkeys(self.moments, plain))}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each state tensor, by its name in memory."""
        import torch

        stored = self.formats
        dtypes = {"step": "float32"}
        for moment in self.moments:
            dtypes[moment] = stored[moment].dtype
            if self.coded:
                dtypes[f"{moment}_scale"] = stored[moment].scale_dtype
        if self.master is not None:
            dtypes["master"] = MASTERS[self.master].dtype  # type: ignore[union-attr]
        return {key: getattr(torch, name) for key, name in dtypes.items()}

    def moved(self) -> tuple[int, int]:
        """Bytes per element that a step must read and write of the weight and its state, scales not counted."""
        weight, stored = 4 if self.weight == "fp32" else 2, MASTERS[self.master]
        state = sum(self.formats[moment].width for moment in self.moments)
        master = 0 if stored is None else stored.width
        return (0 if self.master == "full" else weight) + master + state, weight + master + state

    def variant(self, kernel: Any, grad: torch.dtype, **options: Any) -> Any:
        """The `Layout` of a kernel for this state and a dtype of the gradients; `options` are fields of its rule."""
        import torch

        param = getattr(torch, _DTYPES.get(self.weight, self.weight))
        state = self.dtypes[self.moments[0]] if self.moments else torch.float32
        master = list(MASTERS).index(self.master)
        return kernel(param=param, grad=grad, state=state, master=master, stochastic=self.stochastic, **options)


@cache
def _short(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in _DTYPES.items() if full == name), name)


def rounds_stochastically(rounding: str, state_dtype: Any) -> bool:
    """Whether the steps of a group round stochastically.

    By default they do with moments in 8 bits: to nearest, a second moment with 3 bits of mantissa stops changing.
    """
    return bool(state_dtype == "8bit") if rounding == "auto" else rounding == "stochastic"


def shape_of(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a state tensor of a parameter, or of a shard of one, by its name in memory."""
    if key not in SCALE_KEYS:
        return () if key == "step" else shape
    return (shape[0] if shape else 1, -(-math.prod(shape[1:]) // CODES.group))
