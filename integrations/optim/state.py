"""The state of an optimizer for each parameter: moments, step counts and masters, and writes by other code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from halfstep.integrations.optim.options import MASTER_DTYPES, master_of, plain_number, state_dtype_of
from halfstep.kernels import adam
from halfstep.kernels.block_codes import (
    LARGEST_POSITIVE,
    SCALE_DTYPES,
    blocks_per_row,
    encode,
    rows_and_columns,
)
from halfstep.kernels.multi_tensor import has_memory
from halfstep.kernels.rounding import join_master
from halfstep.numerics.scaling.topology import is_sharded, local, sharded_like
from halfstep.numerics.scaling.verdict import StepsOnVerdict, parameters_of

if TYPE_CHECKING:
    from halfstep.integrations.optim.step_plan import StepPlan

WHOLE = -1  # the part of a step that has all parameters
PIECE = 1 << 18  # elements that are compared or converted together
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
CANONICAL_KEYS = ("step", *MOMENTS, "master")
# The names of codes and remainders in a checkpoint, so that code which expects moments and masters does not find these.
CODES = {moment: f"{moment}_codes" for moment in MOMENTS}
REMAINDER = "master_remainder"
# The scales of blocks of moments in 8 bits, and their dtypes.
SCALES = {moment: f"{moment}_scale" for moment in MOMENTS}
DTYPES_OF_SCALES = {scales: SCALE_DTYPES[moment == "exp_avg"] for moment, scales in SCALES.items()}


def version_of(parameter: torch.Tensor) -> int:
    """A number that grows with every write to a parameter, through its DTensor or its local part."""
    return parameter._version + parameter._local_tensor._version if is_sharded(parameter) else parameter._version  # type: ignore[attr-defined]


def _address_of(values: torch.Tensor) -> int:
    return values.data_ptr() if has_memory(values) else 0


class Agreed(NamedTuple):
    """The version, address and dtype of a parameter when it and its full master last held the same weight."""

    version: int
    address: int
    dtype: torch.dtype

    @classmethod
    def now(cls, parameter: torch.Tensor) -> Agreed:
        return cls(version_of(parameter), _address_of(local(parameter)), parameter.dtype)

    def may_be_written(self, parameter: torch.Tensor) -> bool:
        """Whether other code may have written the parameter since. A change of dtype does not count."""
        if parameter.dtype != self.dtype:
            return False
        return (self.version, self.address) != (version_of(parameter), _address_of(local(parameter)))


def as_written(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A full master, replaced by the parameter where it does not round to it. Does not wait for the device."""
    return torch.where(parameter != master.to(parameter.dtype), parameter.float(), master)


def rows_of_a_piece(values: torch.Tensor) -> int:
    """How many rows of a tensor, indices of dimension 0, are about `PIECE` elements; at least one."""
    return max(1, PIECE // max(1, values[:1].numel())) if values.dim() else 1


def _rounds_to(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a full master rounds to its parameter everywhere. Needs memory for a piece of them only."""
    rows = rows_of_a_piece(parameter)
    pieces = zip(torch.atleast_1d(master).split(rows), torch.atleast_1d(parameter).split(rows), strict=True)
    return all(torch.equal(part.to(weight.dtype), weight) for part, weight in pieces)


def state_keys(layout: adam.Layout) -> dict[int, str]:
    """The names of the state tensors of a layout, by operand of the kernel."""
    keys = {adam.M: "exp_avg", adam.V: "exp_avg_sq", adam.STEP: "step"}
    if layout.master != adam.NO_MASTER:
        keys[adam.EXTRA] = "master"
    if layout.amsgrad:
        keys[adam.TOP] = "max_exp_avg_sq"
    if layout.coded:
        keys |= {adam.SCALES_OF[operand]: SCALES[key] for operand, key in keys.items() if key in MOMENTS}
    return keys


def is_remainder(master: torch.Tensor) -> bool:
    """Whether the state tensor "master" completes a bf16 parameter to its master, and is not the master itself."""
    return master.dtype in adam.REMAINDERS.values()


def shape_of(key: str, shape: torch.Size) -> torch.Size:
    """The shape of an entry of the state of a parameter, or of a part of a parameter, of some shape."""
    if key not in SCALES.values():
        return torch.Size(()) if key == "step" else shape
    rows, columns = rows_and_columns(shape or (1,))
    return torch.Size((rows, blocks_per_row(columns)))


def entries(parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
    """The names and dtypes of the state tensors that a step of a parameter needs, in the layout of its group."""
    dtype, master = state_dtype_of(parameter, group["state_dtype"]), master_of(parameter, group["master_weights"])
    dtypes = {"step": torch.float32}
    for moment in MOMENTS if group["amsgrad"] else MOMENTS[:2]:
        dtypes[moment] = dtype
        if dtype == torch.uint8:
            dtypes[SCALES[moment]] = DTYPES_OF_SCALES[SCALES[moment]]
    return dtypes if master is None else {**dtypes, "master": MASTER_DTYPES[master]}


def is_complete(state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter's state has all entries that a step needs, with moments and the master as they are held."""
    dtypes = entries(parameter, group)
    if not dtypes.keys() <= state.keys():
        return False
    step, master = state["step"], state.get("master")
    counted = isinstance(step, torch.Tensor) and (step.dtype, step.device) == (torch.float32, local(parameter).device)
    kind = (master.dtype if is_remainder(master) else torch.float32) if isinstance(master, torch.Tensor) else None
    return counted and kind in (None, dtypes.get("master")) and not foreign_moments(state, parameter, group)


def foreign_moments(state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> list[str]:
    """The names of moments that other code has assigned in fp32 or bf16, where the layout has another dtype."""
    own = local(parameter)
    held = {key: local(state[key]) for key in MOMENTS if isinstance(state.get(key), torch.Tensor)}
    return [
        key
        for key, dtype in entries(parameter, group).items()
        if key in held
        and held[key].dtype in {torch.float32, torch.bfloat16} - {dtype}
        and (held[key].shape, held[key].device) == (own.shape, own.device)
    ]


def new_entry(key: str, dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor before the first step: a full master is a copy of the parameter, all others are 0."""
    value = parameter.detach()
    if key == "step":
        return torch.zeros((), dtype=dtype, device=value.device)
    if key in SCALES.values():
        part = local(value)
        return scales_like(parameter, part.new_zeros(shape_of(key, part.shape), dtype=dtype))
    if key == "master" and dtype == torch.float32:
        return value.to(dtype, memory_format=torch.preserve_format)
    return torch.zeros_like(value, dtype=dtype, memory_format=torch.preserve_format)


def like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Local values as a tensor like the parameter: a DTensor with its mesh and placements, or the values themselves."""
    return sharded_like(parameter, values) if is_sharded(parameter) else values


def scales_like(parameter: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales of the local blocks of a parameter, sharded like the parameter."""
    shape = shape_of(SCALES["exp_avg"], parameter.shape)
    return sharded_like(parameter, scales, shape) if is_sharded(parameter) else scales


def moved(value: Any, device: torch.device) -> Any:
    """State of other code with its tensors moved to the device of their parameter, as `torch.optim.Optimizer` does."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(one, device) for key, one in value.items()}
    return type(value)(moved(one, device) for one in value) if type(value) in (list, tuple, set) else value


def encoded(key: str, values: torch.Tensor, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The entries of the state of a moment in 8 bits, from its local values in fp32."""
    if key != "exp_avg":  # second moments: limited as in the step, and not negative
        values = values.clamp(max=LARGEST_POSITIVE).masked_fill(values < 0, math.nan)
    codes, scales = encode(values.contiguous(), len(values), signed=key == "exp_avg")
    return {key: like(parameter, codes), SCALES[key]: scales_like(parameter, scales)}


def step_count(saved: Any, where: str) -> torch.Tensor:
    """A copy of a saved step count as a 0-dim fp32 tensor on the same device. It must be an integer of at least 0."""
    device, value = torch.device("cpu"), saved
    if isinstance(saved, torch.Tensor):
        if saved.numel() != 1:
            raise ValueError(f"Expected 'step' in the {where} to be one number, but got shape {tuple(saved.shape)}")
        held = local(saved.detach())
        if not has_memory(held):
            return held.reshape(()).to(torch.float32, copy=True)
        device, value = held.device, held.item()
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"Expected 'step' in the {where} to be an integer of at least 0, but got {value!r}")
    if value != int(value) or float(np.float32(value)) != value:
        raise ValueError(
            f"Expected 'step' in the {where} to be an integer that fp32 represents, such as all up to 16,777,216, but "
            f"got {value!r}"
        )
    return torch.full((), float(value), dtype=torch.float32, device=device)


class _Masters(Mapping[torch.Tensor, torch.Tensor]):
    """What `masters` returns. A split master is joined when it is looked up."""

    def __init__(self, optimizer: OptimizerState) -> None:
        self._optimizer = optimizer
        self._own = dict.fromkeys(parameters_of(optimizer))

    @torch.no_grad()
    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._own:
            raise KeyError("not a parameter of this optimizer")
        master = self._optimizer._master(parameter)
        return parameter.detach().float() if master is None else master

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class OptimizerState(StepsOnVerdict, Optimizer):
    """An optimizer's masters, and what other code writes to its parameters."""

    _agreed: dict[int, Agreed]  # by the parameter's id
    _plans: dict[int, StepPlan]  # of the last step (`WHOLE`), and of each part that is stepped on its own
    _bucket_of: Mapping[int, int] = {}  # by the parameter's id: different launches update different buckets

    def _forget(self, part: int | None = None) -> None:
        """Discard the plan of a part or, by default, all plans, which are derived from parameters and state."""
        self._note_agreed()
        if part is None:
            self._plans = {}
        else:
            self._plans.pop(part, None)

    def _note_agreed(self) -> None:
        """Copy from the plans when their parameters and masters last held the same weights."""
        for plan in self._plans.values():
            for batch, _ in plan.batches:
                self._agreed.update(batch.agreed())

    def _agree(self) -> None:
        """Store that all parameters and their full masters hold the same weights now."""
        self._agreed = {id(parameter): Agreed.now(parameter) for parameter in self._with_full_master()}

    def _with_full_master(self) -> list[torch.Tensor]:
        masters = ((p, self.state[p].get("master")) for p in parameters_of(self) if p in self.state)
        return [p for p, master in masters if isinstance(master, torch.Tensor) and master.dtype == torch.float32]

    def _master_if_written(self, parameter: torch.Tensor, compare: bool = False) -> torch.Tensor | None:
        """The local values of a full master whose parameter other code wrote; None if no code did.

        With `compare`, None too if the parameter has the same values as before. This waits for the device.
        """
        held, own = local(parameter.detach()), local(self.state[parameter]["master"])
        known = self._agreed.get(id(parameter))
        comparable = held.device == own.device and held.shape == own.shape
        if known is None or not comparable or not known.may_be_written(parameter):
            return None
        if compare and has_memory(held) and _rounds_to(own, held):
            return None
        return as_written(held, own)

    def _master(self, parameter: torch.Tensor, compare: bool = False) -> torch.Tensor | None:
        """The present fp32 master; None for fp32 parameters. Changes nothing. `_master_if_written` explains `compare`.

        So masters lose no bits if other weights, such as averages, are swapped in for an evaluation or a checkpoint.
        """
        state = self.state[parameter] if parameter in self.state else {}
        master = state.get("master")
        if parameter.dtype == torch.float32 or not isinstance(master, torch.Tensor):
            return None
        if is_remainder(master):
            return like(parameter, join_master(local(parameter.detach()), local(master)))
        written = self._master_if_written(parameter, compare)
        return master if written is None else like(parameter, written)

    def masters(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """The fp32 weight of each parameter: its master, or the parameter itself if it has none.

        Full masters and fp32 parameters are not copied. The next step changes them, so clone those that you keep, and
        do not write to them. A split master is joined when it is looked up, so that iterating over `items` holds one of
        them at a time. The masters of DTensors are DTensors.

        A moving average of the weights, which would not change in bf16::

            average = {p: master.clone() for p, master in optimizer.masters().items()}
            for p, master in optimizer.masters().items():  # after each step
                average[p].lerp_(master, 1 - decay)
        """
        self._note_agreed()
        return _Masters(self)

    @torch.no_grad()
    def _take_outside_writes(self, recording: bool = False) -> None:
        """Update the full masters of all parameters that other code wrote, including those without a gradient."""
        self._note_agreed()
        for parameter in self._with_full_master():
            written = self._master_if_written(parameter)
            if written is None:
                continue
            local(self.state[parameter]["master"]).copy_(written)
            if not recording:  # a captured copy runs in each replay, and may run again
                self._agreed[id(parameter)] = Agreed.now(parameter)

    @torch._disable_dynamo
    @torch.no_grad()
    def refresh_master(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Set masters to the present parameters, discarding the bits beyond the parameter's dtype.

        Call this after replacing weights by unrelated ones, or after writing them through ``.data``, which full masters
        do not notice. The call does not wait for the device.

        Args:
            parameters: one or more parameters of this optimizer; None for all.

        Raises:
            ValueError: a tensor is not a parameter of this optimizer. Nothing was changed.
        """
        own = {id(parameter) for parameter in parameters_of(self)}
        if parameters is None:
            parameters = parameters_of(self)
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for index, parameter in enumerate(chosen):
            if id(parameter) not in own:
                raise ValueError(
                    f"Expected parameters[{index}] to be a parameter of this optimizer, but got another of shape "
                    f"{tuple(parameter.shape)} and dtype {parameter.dtype}"
                )
        self._note_agreed()
        for parameter in chosen:
            state = self.state[parameter] if parameter in self.state else {}
            if "master" in state:
                master = local(state["master"])
                master.zero_() if is_remainder(master) else master.copy_(local(parameter.detach()))
            self._agreed[id(parameter)] = Agreed.now(parameter)
