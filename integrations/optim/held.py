"""The state of an optimizer as it is held: the codes and scales of moments in 8 bits, and the remainders of masters.

It takes the bytes that it takes in memory. Codes and remainders have names of their own, so that code which expects the
canonical state finds entries missing, instead of taking codes for moments. A remainder belongs to the weight with which
it was saved, and is joined with it in the first step after loading, so that the model may be loaded later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfstep.integrations.optim.options import MASTER_DTYPES, master_of
from halfstep.integrations.optim.state import (
    CANONICAL_KEYS,
    CODES,
    DTYPES_OF_SCALES,
    MOMENTS,
    REMAINDER,
    SCALES,
    encoded,
    entries,
    is_remainder,
    like,
    moved,
    new_entry,
    rows_of_a_piece,
    shape_of,
    step_count,
)
from halfstep.kernels import adam
from halfstep.kernels.block_codes import SPAN, decode
from halfstep.kernels.rounding import join_master, split_master
from halfstep.numerics.scaling.topology import cuts, is_sharded, local, sharded_like

HOST = ("cpu", "meta")  # device types whose tensors stay where they are in a canonical state
HELD = (*CODES.values(), *SCALES.values(), REMAINDER)  # entries that a canonical state does not have


def shards_blocks(parameter: torch.Tensor) -> bool:
    """Whether torch shards the codes and the scales of a parameter alike, so that each rank has whole blocks.

    All ranks decide alike.
    """
    ways = cuts(parameter)
    if max(ways, default=0) == 0:
        return True
    inner = math.prod(parameter.shape[2:])
    return max(ways) == 1 and parameter.shape[1] % ways[1] == 0 and parameter.shape[1] // ways[1] * inner % SPAN == 0


def held_state(state: dict[str, Any], parameter: torch.Tensor, master: torch.Tensor | None) -> dict[str, Any]:
    """One parameter's state in memory under the names of a checkpoint, with its full master.

    Nothing is copied, but moments in 8 bits whose blocks torch does not shard like the parameter: they become fp32 on
    the CPU.
    """
    saved = {key: value for key, value in state.items() if key != "master"}
    if master is not None:
        saved["master"] = master
    # A remainder is useless without its bf16 parameter.
    elif isinstance(state.get("master"), torch.Tensor) and parameter.dtype == torch.bfloat16:
        saved[REMAINDER] = _in_bytes(state["master"])
    for key in MOMENTS:
        if key not in state or state[key].dtype != torch.uint8:
            continue
        codes, scales = saved.pop(key), saved.pop(SCALES[key])
        if shards_blocks(parameter):
            saved |= {CODES[key]: codes, SCALES[key]: _in_bytes(scales)}
        else:
            saved[key] = _decoded_on_cpu(state, key, parameter)
    return saved


def canonical_state(state: dict[str, Any], parameter: torch.Tensor, master: torch.Tensor | None) -> dict[str, Any]:
    """One parameter's state and full master in fp32 on the CPU. On a GPU, pieces of one tensor are allocated."""
    saved = {}
    for key, value in state.items():
        if key in MOMENTS:
            saved[key] = _decoded_on_cpu(state, key, parameter)
        elif key not in (*SCALES.values(), "master"):
            saved[key] = _on_cpu(value) if isinstance(value, torch.Tensor) else value
    if master is not None:
        saved["master"] = _on_cpu(master)
    elif isinstance(state.get("master"), torch.Tensor) and parameter.dtype == torch.bfloat16:
        saved["master"] = _converted_on_cpu(parameter, join_master, parameter.detach(), state["master"])
    return saved


def _decoded_on_cpu(state: dict[str, Any], key: str, parameter: torch.Tensor) -> torch.Tensor:
    """A moment in fp32 on the CPU; the tensor itself if it is one."""
    moment: torch.Tensor = state[key]
    if moment.dtype == torch.float32:
        return _on_cpu(moment)
    if moment.dtype != torch.uint8:
        return _converted_on_cpu(parameter, torch.Tensor.float, moment)
    return _converted_on_cpu(parameter, partial(decode, signed=key == "exp_avg"), moment, state[SCALES[key]])


def _converted_on_cpu(
    parameter: torch.Tensor, convert: Callable[..., torch.Tensor], *operands: torch.Tensor
) -> torch.Tensor:
    """What `convert` makes of operands with the rows of a parameter: fp32 on the CPU, sharded like the parameter.

    Rows are converted a few at a time, since there may be no memory on the device for a whole tensor.
    """
    part = local(parameter.detach())
    host = part.device if part.device.type in HOST else torch.device("cpu")
    values = torch.empty_like(part, dtype=torch.float32, device=host)
    rows = rows_of_a_piece(part)
    pieces = zip(*(torch.atleast_1d(local(operand)).split(rows) for operand in (values, *operands)), strict=True)
    for target, *piece in pieces:
        target.copy_(convert(*piece))
    if not is_sharded(parameter):
        return values
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    return _with_spec(values, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=torch.float32)))


def _on_cpu(values: torch.Tensor) -> torch.Tensor:
    part = local(values)
    if part.device.type in HOST:
        return values
    return _with_spec(part.cpu(), values._spec) if is_sharded(values) else part.cpu()  # type: ignore[attr-defined]


def _with_spec(part: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor whose part stays on the CPU: DTensor.from_local would move it to the device of the mesh."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, spec, requires_grad=False)


def _in_bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory, for 16-bit integers as pairs of bytes in one more dimension.

    Neither NCCL nor gloo transfers such integers, and a load into them would silently convert other numbers.
    """
    if values.dtype != torch.int16:
        return values
    pairs = local(values).unsqueeze(-1).view(torch.uint8)
    if not is_sharded(values):
        return pairs
    return sharded_like(values, pairs, torch.Size((*values.shape, 2)), (*(2 * stride for stride in values.stride()), 1))


def _of_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of `_in_bytes` for 16-bit integers."""
    values = local(pairs).contiguous().view(torch.int16).squeeze(-1)
    return sharded_like(pairs, values, pairs.shape[:-1]) if is_sharded(pairs) else values


def empty_entry(parameter: torch.Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """Memory for an entry of a saved state, sharded like its parameter. None for an entry of another shape."""
    whole, part = shape_of(key, parameter.shape), local(parameter.detach())
    if key == "step" or size not in (whole, torch.Size((*whole, 2))):
        return None
    values = part.new_empty((*shape_of(key, part.shape), *size[len(whole) :]), dtype=dtype)
    return sharded_like(parameter, values, size) if is_sharded(parameter) else values


def loaded_state(
    saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any], where: str, final: bool = False
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """One parameter's saved state as copies in the layout of its group, and the new weight (None: unchanged).

    Args:
        saved: a state as `held_state` or `canonical_state` returns it, or of another Adam with the names of the latter.
        parameter: the parameter, with the weight that belongs to a remainder.
        group: its group in the optimizer that loads.
        where: the name of the state in messages.
        final: whether the master becomes that of the layout now. Otherwise a remainder stays as it was saved until the
            first step, since the weight that belongs to it may be loaded later.

    Raises:
        ValueError: an entry is missing or has another shape or dtype, or the parameter has no remainder.
    """
    dtypes, values = entries(parameter, group), local(parameter.detach())
    coded = dtypes["exp_avg"] == torch.uint8
    state, rest = _taken(saved, parameter, coded, where)
    for key in ("step", *MOMENTS):
        if key in dtypes and key not in rest and key not in state:
            raise ValueError(
                f"{where} lacks {key!r}; it has {', '.join(map(repr, (*rest, *state))) or 'nothing'}: "
                "the checkpoint is not of an Adam with the same options, or is a flat one, which needs "
                "state_dict_format='canonical'"
            )
    for key, value in rest.items():
        if key == "step":
            state[key] = step_count(value, where).to(parameter.device)
        elif key not in CANONICAL_KEYS:
            state[key] = moved(value, parameter.device)
        else:
            _check_floating(value, key, parameter, where)
            if key != "master" and coded:
                state |= encoded(key, local(_copy(parameter, value, torch.float32)), parameter)
            else:
                state[key] = _copy(parameter, value, torch.float32 if key == "master" else dtypes["exp_avg"])
    if not group["amsgrad"]:
        state.pop("max_exp_avg_sq", None)
        state.pop(SCALES["max_exp_avg_sq"], None)
    master = state.get("master")
    if master is None:
        if "master" in dtypes:
            state["master"] = new_entry("master", dtypes["master"], parameter)
        return state, None
    if is_remainder(master):
        if not final or dtypes.get("master") == master.dtype:
            return state, None
        master = join_master(values, local(master))
    return state, fit_master(state, local(master), parameter, group)


def _taken(
    saved: dict[str, Any], parameter: torch.Tensor, coded: bool, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Copies of what is held in a saved state and in the layout of an optimizer, and the rest, decoded."""
    values = local(parameter.detach())
    device, state = values.device, {}
    rest = {key: value for key, value in saved.items() if key not in HELD}
    for moment, name in CODES.items():
        if name not in saved:
            continue
        signed, names = moment == "exp_avg", SCALES[moment]
        codes = _checked(saved, name, parameter.shape, torch.uint8, where=where)
        scales = _checked(saved, names, shape_of(names, parameter.shape), DTYPES_OF_SCALES[names], where=where)
        if is_sharded(parameter) and not is_sharded(codes):
            from torch.distributed.tensor import distribute_tensor

            whole = decode(codes, scales, signed).to(device)
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            # Every rank has the same codes, so nothing is sent.
            rest[moment] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        elif coded:
            state[moment] = _copy(parameter, codes, codes.dtype)
            state[names] = new_entry(names, scales.dtype, parameter).copy_(scales)
        else:
            rest[moment] = like(parameter, decode(local(codes).to(device), local(scales).to(device), signed))
    if REMAINDER in saved:
        remainder = _checked(saved, REMAINDER, parameter.shape, *adam.REMAINDERS.values(), where=where)
        if parameter.dtype == torch.bfloat16:
            state["master"] = _copy(parameter, remainder, remainder.dtype)
        elif parameter.dtype == torch.float32 and torch.equal(values.bfloat16().float(), values):
            rest["master"] = like(parameter, join_master(values.bfloat16(), local(remainder).to(device)))
        else:
            raise ValueError(
                f"Expected a parameter with numbers of bfloat16 for {REMAINDER!r} in the {where}, which completes "
                f"these, but got others in {parameter.dtype}: load the model first, in bfloat16 or float32, and "
                "convert it afterwards; or save canonical_state_dict()"
            )
    return state, rest


def fit_master(
    state: dict[str, Any], master: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """Put a master (local, fp32) into a state as the layout holds it. Returns the rounded weight, to be written."""
    state.pop("master", None)
    kind = master_of(parameter, group["master_weights"])
    if kind is None or MASTER_DTYPES[kind] == torch.float32:
        weight = master.to(parameter.dtype)
    else:
        weight, master = split_master(master, MASTER_DTYPES[kind])
    if kind is not None:
        state["master"] = like(parameter, master)
    return weight


def _copy(parameter: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of saved values in a dtype, on the device of their parameter and sharded like it."""
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(values)


def _check_floating(value: Any, key: str, parameter: torch.Tensor, where: str) -> None:
    """Raise unless a moment or a master is a floating-point tensor of the shape of its parameter."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"Expected {key!r} in the {where} to have shape {tuple(parameter.shape)}, but got {shape}: the "
            "checkpoint is of another model, or its parameters are in another order"
        )
    if not value.is_floating_point():
        raise ValueError(f"Expected {key!r} in the {where} to have a floating-point dtype, but got {value.dtype}")


def _checked(saved: dict[str, Any], key: str, shape: torch.Size, *dtypes: torch.dtype, where: str) -> torch.Tensor:
    """An entry of a saved state, which must exist and have a shape and one of some dtypes."""
    value = saved.get(key)
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.shape == (*shape, 2):
        value = _of_bytes(value)
    got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype not in dtypes:
        raise ValueError(
            f"Expected {key!r} in the {where} to have shape {tuple(shape)} and dtype {' or '.join(map(str, dtypes))}, "
            f"but got {got}: the checkpoint is of another model, or its parameters are in another order"
        )
    return value
