"""The state of one parameter: created, saved as it is held or in fp32, loaded from either, and fitted to a layout; and
masters, with those whose parameters other code has written since."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from halfstep.integrations.optim.options import plain_number
from halfstep.kernels.block_codes import LARGEST_POSITIVE, SPAN, decode, encode
from halfstep.kernels.multi_tensor import has_memory
from halfstep.kernels.rounding import join_master, split_master
from halfstep.numerics.scaling.decision import parameters_of
from halfstep.numerics.scaling.options import Option
from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local
from halfstep.numerics.state_layout import CODE_KEYS, HELD, MOMENTS, REMAINDER, REMAINDERS, SCALE_KEYS, shape_of

if TYPE_CHECKING:
    from halfstep.integrations.optim.classes import LayoutOptimizer
    from halfstep.numerics.state_layout import StateLayout

State = dict[str, Any]  # of one parameter
PIECE = 1 << 18  # elements that are compared or converted together
_MISSING = object()
HOST = ("cpu", "meta")  # device types whose tensors stay where they are in a canonical state
_REMAINDERS = tuple(getattr(torch, stored.dtype) for stored in REMAINDERS)
_STEP = Option(
    "an integer of at least 0 that fp32 represents, such as all up to 16,777,216",
    lambda x: x >= 0 and float(np.float32(x)) == x == int(x),
)
CODE_DTYPES = torch.uint8, torch.int8  # of codes of moments; the latter of linear ones
_SCALES = {key: torch.uint8 if MOMENTS[moment] else torch.int16 for key, moment in SCALE_KEYS.items()}


def is_remainder(master: torch.Tensor) -> bool:
    """Whether the state tensor "master" completes a bf16 parameter to its master, and is not the master itself."""
    return master.dtype in _REMAINDERS


def full_master(state: State) -> torch.Tensor | None:
    """The fp32 master in a state in memory; None if there is none, or a remainder."""
    master = state.get("master")
    return master if isinstance(master, torch.Tensor) and not is_remainder(master) else None


def like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Local values as a tensor like the parameter: a DTensor with its mesh and placements, or the values themselves."""
    return Sharding(parameter).like(values) if is_sharded(parameter) else values


def scales_like(parameter: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The scales of the local blocks of a parameter, sharded like the parameter."""
    shape = torch.Size(shape_of(next(iter(SCALE_KEYS)), parameter.shape))
    return Sharding(parameter).like(scales, shape)


def new(key: str, dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    """A state tensor before the first step: a full master is a copy of the parameter, all others are 0."""
    values = parameter.detach()
    if key == "step":
        return torch.zeros((), dtype=dtype, device=values.device)
    if key in SCALE_KEYS:
        shard = local(values)
        return scales_like(parameter, shard.new_zeros(shape_of(key, shard.shape), dtype=dtype))
    if key == "master" and dtype == torch.float32:
        return values.to(dtype, memory_format=torch.preserve_format)
    return torch.zeros_like(values, dtype=dtype, memory_format=torch.preserve_format)


def encoded(moment: str, values: torch.Tensor, parameter: torch.Tensor, linear: bool) -> dict[str, torch.Tensor]:
    """The state tensors of a moment in 8 bits, from its local values in fp32."""
    if not MOMENTS[moment]:  # limited as in the step, and not negative
        values = values.clamp(max=LARGEST_POSITIVE).masked_fill(values < 0, math.nan)
    codes, scales = encode(values.contiguous(), len(values), signed=MOMENTS[moment], linear=linear)
    return {moment: like(parameter, codes), f"{moment}_scale": scales_like(parameter, scales)}


def put_master(state: State, master: torch.Tensor, parameter: torch.Tensor, layout: StateLayout) -> torch.Tensor:
    """Put a master (local, fp32) into a state as the layout holds it. Returns the rounded weight, to be written."""
    dtype = layout.dtypes.get("master")
    if dtype is not None and dtype in _REMAINDERS:
        weight, master = split_master(master, dtype)
    else:
        weight = master.to(parameter.dtype)
    state.pop("master", None)
    if dtype is not None:
        state["master"] = like(parameter, master)
    return weight


def moved(state: Any, device: torch.device) -> Any:
    """State of other code with its tensors moved to the device of their parameter, as `torch.optim.Optimizer` does."""
    return tree_map_only(torch.Tensor, methodcaller("to", device), state)


def step_count(saved: Any, where: str) -> torch.Tensor:
    """A copy of a saved step count as a 0-dim fp32 tensor on the same device. It must be an integer of at least 0."""
    device, value = torch.device("cpu"), saved
    if isinstance(saved, torch.Tensor):
        if saved.numel() != 1:
            raise ValueError(f"Expected 'step' in the {where} to be one number, but got shape {tuple(saved.shape)}")
        shard = local(saved.detach())
        if not has_memory(shard):
            return shard.reshape(()).to(torch.float32, copy=True)
        device, value = shard.device, shard.item()
    count = _STEP.checked(f"'step' in the {where}", plain_number(value))
    return torch.full((), count, dtype=torch.float32, device=device)


# -------------------------------------------------------------------------------------------------------------- saving


def shards_blocks(parameter: torch.Tensor) -> bool:
    """Whether torch shards the codes and the scales of a parameter alike: each rank has whole blocks. All agree."""
    return Sharding(parameter).keeps_blocks(SPAN, evenly=True)


def saved_state(state: State, parameter: torch.Tensor, master: torch.Tensor | None, canonical: bool) -> State:
    """One parameter's state under the names of a checkpoint, with its full master.

    A `canonical` state is fp32 on the CPU; on a GPU, a few rows of one tensor are allocated. Otherwise nothing is
    copied but moments in 8 bits whose blocks torch does not shard like the parameter: they become fp32 on the CPU too.
    """
    saved: State = {}
    codes: State = {}
    for key, value in state.items():
        coded = key in MOMENTS and value.dtype in CODE_DTYPES
        if coded and not canonical and shards_blocks(parameter):
            codes |= {f"{key}_codes": value, f"{key}_scale": _in_bytes(state[f"{key}_scale"])}
        elif coded:
            decoded = partial(decode, signed=MOMENTS[key])
            values = _converted_on_cpu(parameter, decoded, value, state[f"{key}_scale"])
            (saved if canonical else codes)[key] = values
        elif key in MOMENTS and canonical and value.dtype != torch.float32:
            saved[key] = _converted_on_cpu(parameter, torch.Tensor.float, value)
        elif key not in SCALE_KEYS and key != "master":
            saved[key] = _on_cpu(value) if isinstance(value, torch.Tensor) and canonical else value
    remainder = state.get("master")
    if master is not None:
        saved["master"] = _on_cpu(master) if canonical else master
    elif isinstance(remainder, torch.Tensor) and parameter.dtype == torch.bfloat16:  # without which it is useless
        if canonical:
            saved["master"] = _converted_on_cpu(parameter, join_master, parameter.detach(), remainder)
        else:
            saved[REMAINDER] = _in_bytes(remainder)
    return saved | codes


def rows_of_a_piece(values: torch.Tensor) -> int:
    """How many rows of a tensor, indices of dimension 0, are about `PIECE` elements; at least one."""
    return max(1, PIECE // max(1, values[:1].numel())) if values.dim() else 1


def _converted_on_cpu(parameter: torch.Tensor, convert: Callable[..., Any], *operands: torch.Tensor) -> torch.Tensor:
    """What `convert` makes of operands with the rows of a parameter: fp32 on the CPU, sharded like the parameter.

    Rows are converted a few at a time, since there may be no memory on the device for a whole tensor.
    """
    shard = local(parameter.detach())
    host = shard.device if shard.device.type in HOST else torch.device("cpu")
    values = torch.empty_like(shard, dtype=torch.float32, device=host)
    rows = rows_of_a_piece(shard)
    chunks = (torch.atleast_1d(local(operand)).split(rows) for operand in (values, *operands))
    for target, *chunk in zip(*chunks, strict=True):
        target.copy_(convert(*chunk))
    return Sharding(parameter).like(values)


def _on_cpu(values: torch.Tensor) -> torch.Tensor:
    sharding = Sharding(values)
    return values if sharding.local.device.type in HOST else sharding.like(sharding.local.cpu())


def _in_bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory, for 16-bit integers as pairs of bytes in one more dimension.

    Neither NCCL nor gloo transfers such integers, and a load into them would silently convert other numbers.
    """
    if values.dtype != torch.int16:
        return values
    pairs = local(values).unsqueeze(-1).view(torch.uint8)
    strides = (*(2 * stride for stride in values.stride()), 1)
    return Sharding(values).like(pairs, torch.Size((*values.shape, 2)), strides)


def empty_entry(parameter: torch.Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """Memory for an entry of a saved state, sharded like its parameter.

    None for an entry of another shape, and for codes and scales that cannot be sharded alike.
    """
    whole, shard = shape_of(key, parameter.shape), local(parameter.detach())
    coded = key in CODE_KEYS or key in SCALE_KEYS
    if key == "step" or size not in (whole, (*whole, 2)) or (coded and not shards_blocks(parameter)):
        return None
    values = shard.new_empty((*shape_of(key, shard.shape), *size[len(whole) :]), dtype=dtype)
    return Sharding(parameter).like(values, size)


# ------------------------------------------------------------------------------------------------------------- loading


def loaded_state(
    saved: State, parameter: torch.Tensor, layout: StateLayout, where: str, final: bool = False
) -> tuple[State, torch.Tensor | None]:
    """One parameter's saved state as copies in a layout, and the new weight (None: unchanged).

    `saved` is what `saved_state` returns, or a state of another optimizer with the names of a canonical one; messages
    call it `where`. The parameter has the weight that belongs to a remainder, or gets it later: unless the load is
    `final`, a remainder stays as it was saved until the first step. Raises a ValueError if an entry is missing or has
    another shape or dtype, or if the parameter has no remainder.
    """
    source = _with_names_in_memory(saved, parameter, where)
    for key in ("step", *layout.moments):
        if key not in source:
            raise ValueError(
                f"{where} lacks {key!r}; it has {', '.join(map(repr, source)) or 'nothing'}: the checkpoint is of "
                "another optimizer or other options, or a flat one, which needs state_dict_format='canonical'"
            )
    state: State = {"step": step_count(source["step"], where).to(parameter.device)}
    for moment in layout.moments:
        value, scales = source[moment], source.get(f"{moment}_scale")
        if scales is not None and layout.coded and value.dtype == layout.dtypes[moment]:
            copied = new(f"{moment}_scale", scales.dtype, parameter).copy_(scales)
            state |= {moment: _copy(parameter, value, value.dtype), f"{moment}_scale": copied}
            continue
        if scales is not None:
            device = local(parameter).device
            codes, scales = local(value).to(device), local(scales).to(device)
            value = like(parameter, decode(codes, scales, signed=MOMENTS[moment]))
        _checked({moment: value}, moment, parameter.shape, where=where)
        if layout.coded:
            state |= encoded(moment, local(_copy(parameter, value, torch.float32)), parameter, layout.linear)
        else:
            state[moment] = _copy(parameter, value, layout.dtypes[moment])
    named = {*state, *MOMENTS, *SCALE_KEYS, "master"}
    state |= {key: moved(value, parameter.device) for key, value in source.items() if key not in named}
    if "master" not in source:
        if layout.master is not None:
            state["master"] = new("master", layout.dtypes["master"], parameter)
        return state, None
    master = source["master"]
    if isinstance(saved.get(REMAINDER), torch.Tensor) and is_remainder(master):
        remainder = _copy(parameter, master, master.dtype)
        if not final or layout.dtypes.get("master") == master.dtype:
            return {**state, "master": remainder}, None
        master = join_master(local(parameter.detach()), local(remainder))
    else:
        master = _checked(source, "master", parameter.shape, where=where)
        master = local(_copy(parameter, master, torch.float32))
    return state, put_master(state, master, parameter, layout)


def _with_names_in_memory(saved: State, parameter: torch.Tensor, where: str) -> State:
    """A saved state with its codes, scales and remainder, which are checked, under their names in memory."""
    values = local(parameter.detach())
    state = {key: value for key, value in saved.items() if key not in HELD}
    for key, moment in CODE_KEYS.items():
        if key not in saved:
            continue
        scale_key = f"{moment}_scale"
        dtypes = CODE_DTYPES if moment == "momentum_buffer" else CODE_DTYPES[:1]  # no other moment's codes are linear
        codes = _checked(saved, key, parameter.shape, *dtypes, where=where)
        scales = _checked(saved, scale_key, shape_of(scale_key, parameter.shape), _SCALES[scale_key], where=where)
        if is_sharded(parameter) and not is_sharded(codes):
            whole = decode(codes, scales, signed=MOMENTS[moment]).to(values.device)
            state[moment] = Sharding(parameter).distributed(whole)  # every rank has the same codes
        else:
            state |= {moment: codes, scale_key: scales}
    if REMAINDER in saved:
        if "master" in saved:  # of other code; the remainder counts
            _checked(saved, "master", parameter.shape, where=where)
        remainder = _checked(saved, REMAINDER, parameter.shape, *_REMAINDERS, where=where)
        if parameter.dtype == torch.bfloat16:
            state["master"] = remainder
        elif parameter.dtype == torch.float32 and torch.equal(values.bfloat16().float(), values):
            state["master"] = like(parameter, join_master(values.bfloat16(), local(remainder).to(values.device)))
        else:
            raise ValueError(
                f"Expected a parameter with numbers of bfloat16 for {REMAINDER!r} in the {where}, which completes "
                f"these, but got others in {parameter.dtype}: load the model first, in bfloat16 or float32, and "
                "convert it afterwards; or save canonical_state_dict()"
            )
    return state


def fitted_state(
    state: State, parameter: torch.Tensor, layout: StateLayout, written: torch.Tensor | None
) -> tuple[State, torch.Tensor | None]:
    """A state in memory with all tensors of a layout, and the new weight (None: unchanged).

    It is the state itself if that has them. Other code may have assigned moments in other dtypes; options and the
    dtype of the parameter may have changed. `written` is the full master, if other code wrote its parameter.
    """
    fitted = {**dict.fromkeys(layout.dtypes, _MISSING), **state}
    weight, values = None, local(parameter.detach())
    if isinstance(master := state.get("master"), torch.Tensor):
        dtype = master.dtype if is_remainder(master) else torch.float32
        expected = layout.dtypes.get("master")
        if expected is None and (dtype == torch.float32 or parameter.dtype != torch.bfloat16):
            del fitted["master"]
        elif dtype != expected and dtype in _REMAINDERS and parameter.dtype == torch.bfloat16:
            weight = put_master(fitted, join_master(values, local(master)), parameter, layout)
        elif dtype != expected and dtype in _REMAINDERS:  # it is useless without its bf16 parameter
            fitted["master"] = _MISSING
        elif dtype != expected:
            weight = put_master(fitted, local(master) if written is None else written, parameter, layout)
    for key, dtype in layout.dtypes.items():
        value = fitted[key]
        if value is _MISSING:
            fitted[key] = new(key, dtype, parameter)
        elif key == "step":
            ready = isinstance(value, torch.Tensor) and (value.dtype, value.device) == (torch.float32, values.device)
            fitted[key] = value if ready else step_count(value, "state of a parameter").to(values.device)
        elif key in MOMENTS and isinstance(value, torch.Tensor):
            shard = local(value)
            assigned = shard.dtype in {torch.float32, torch.bfloat16} - {dtype}
            if assigned and (shard.shape, shard.device) == (values.shape, values.device):
                if layout.coded:
                    fitted |= encoded(key, shard.float(), parameter, layout.linear)
                else:
                    fitted[key] = value.to(dtype)
    unchanged = fitted.keys() == state.keys() and all(fitted[key] is value for key, value in state.items())
    return (state if unchanged else fitted), weight


def _copy(parameter: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of saved values in a dtype, on the device of their parameter and sharded like it."""
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(values)


def _checked(saved: State, key: str, shape: tuple[int, ...], *dtypes: torch.dtype, where: str) -> torch.Tensor:
    """An entry of a saved state, which must exist and have a shape and one of some dtypes; without, a floating one."""
    value = saved.get(key)
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.shape == (*shape, 2):
        integers = local(value).contiguous().view(torch.int16).squeeze(-1)  # the inverse of `_in_bytes`
        value = Sharding(value).like(integers, torch.Size(shape))
    if not isinstance(value, torch.Tensor) or value.shape != shape or (dtypes and value.dtype not in dtypes):
        dtype = f" and dtype {' or '.join(map(str, dtypes))}" if dtypes else ""
        got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"Expected {key!r} in the {where} to have shape {tuple(shape)}{dtype}, but got {got}: the checkpoint is of "
            "another model, or its parameters are in another order"
        )
    if not dtypes and not value.is_floating_point():
        raise ValueError(f"Expected {key!r} in the {where} to have a floating-point dtype, but got {value.dtype}")
    return value


# ------------------------------------------------------------------------------------------------------------- masters


def version_of(parameter: torch.Tensor) -> int:
    """A number that grows with every write to a parameter, through its DTensor or its local tensor."""
    return parameter._version + parameter._local_tensor._version if is_sharded(parameter) else parameter._version  # type: ignore[attr-defined]


Written = tuple[int, int, torch.dtype]


def written_last(parameter: torch.Tensor) -> Written:
    """The version, address and dtype of a parameter, at least one of which changes when other code writes it."""
    shard = local(parameter)
    return version_of(parameter), shard.data_ptr() if has_memory(shard) else 0, parameter.dtype


class Agreements(dict[int, Written]):
    """The values of `written_last` when parameters and their full masters last agreed, by the parameter's id."""

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that parameters and their masters agree now."""
        self.update((id(parameter), written_last(parameter)) for parameter in parameters)

    def written(self, parameter: torch.Tensor, master: torch.Tensor, compare: bool = False) -> torch.Tensor | None:
        """The local values of a full master, replaced by the parameter wherever they do not round to it, if other code
        has written that since; otherwise None.

        A change of dtype does not count. With `compare`, also None if the master still rounds to the parameter, which
        makes the host wait.
        """
        weight, master, agreed = local(parameter.detach()), local(master), self.get(id(parameter))
        comparable = weight.device == master.device and weight.shape == master.shape
        if agreed is None or not comparable or parameter.dtype != agreed[-1] or agreed == written_last(parameter):
            return None
        if compare and has_memory(weight) and _rounds_to(master, weight):
            return None
        return torch.where(weight != master.to(weight.dtype), weight.float(), master)


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a master rounds to its weight everywhere. Allocates memory only for a few rows at a time."""
    rows = rows_of_a_piece(weight)
    pairs = zip(torch.atleast_1d(master).split(rows), torch.atleast_1d(weight).split(rows), strict=True)
    return all(torch.equal(values.to(rounded.dtype), rounded) for values, rounded in pairs)


class Masters(Mapping[torch.Tensor, torch.Tensor]):
    """The masters of an optimizer by parameter. A split master is assembled when it is looked up."""

    def __init__(self, optimizer: LayoutOptimizer) -> None:
        self._optimizer = optimizer
        self._parameters = dict.fromkeys(parameters_of(optimizer))

    @torch.no_grad()
    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._parameters:
            raise KeyError("not a parameter of this optimizer")
        master = self._optimizer._master(parameter)
        return self._optimizer._target(parameter).detach().float() if master is None else master

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
