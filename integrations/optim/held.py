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

from halfstep.integrations.optim.options import state_dtype_of
from halfstep.integrations.optim.state import (
    CODES,
    DTYPES_OF_SCALES,
    MOMENTS,
    REMAINDER,
    SCALES,
    like,
    rows_of_a_piece,
    scales_like,
    sharded,
)
from halfstep.kernels import adam
from halfstep.kernels.block_codes import SPAN, blocks_per_row, decode, rows_and_columns
from halfstep.kernels.rounding import join_master
from halfstep.numerics.scaling.topology import is_sharded, local

HOST = ("cpu", "meta")  # device types whose tensors stay where they are in a canonical state
HELD = (*CODES.values(), *SCALES.values(), REMAINDER)  # entries that a canonical state does not have


def shards_blocks(parameter: torch.Tensor) -> bool:
    """Whether torch shards the codes and the scales of a parameter alike, so that each rank has whole blocks.

    All ranks decide alike.
    """
    if not is_sharded(parameter):
        return True
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    cut = [(getattr(p, "dim", 0), size) for p, size in zip(placements, mesh.shape, strict=True) if size > 1]
    ways = math.prod(size for dim, size in cut if dim == 1)
    if ways == 1:
        return all(dim == 0 for dim, _ in cut)
    evenly = parameter.shape[1] % ways == 0 and all(dim < 2 for dim, _ in cut)
    return evenly and parameter.shape[1] // ways * math.prod(parameter.shape[2:]) % SPAN == 0


def scales_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of the scales of a whole parameter."""
    rows, columns = rows_and_columns(parameter.shape or (1,))
    return torch.Size((rows, blocks_per_row(columns)))


def empty_scales(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for the scales of a parameter whose blocks are sharded like it, on its device."""
    rows, columns = rows_and_columns(local(parameter).shape)
    return scales_like(parameter, local(parameter.detach()).new_empty(rows, blocks_per_row(columns), dtype=dtype))


def held_state(state: dict[str, Any], parameter: torch.Tensor, master: torch.Tensor | None) -> dict[str, Any]:
    """One parameter's state in memory under the names of a checkpoint.

    Nothing is copied, but moments in 8 bits whose blocks torch does not shard like the parameter: they become fp32 on
    the CPU.

    Args:
        state: the state.
        parameter: its parameter.
        master: its full master, if it has one.
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


def canonical_state(state: dict[str, Any], parameter: torch.Tensor, written: torch.Tensor | None) -> dict[str, Any]:
    """One parameter's state in fp32 on the CPU. Nothing but a piece of one tensor is allocated on another device.

    Args:
        state: the state.
        parameter: the parameter.
        written: its full master, if it has one, with what other code has written into the parameter.
    """
    saved = {}
    for key, value in state.items():
        if key in MOMENTS:
            saved[key] = _decoded_on_cpu(state, key, parameter)
        elif key not in (*SCALES.values(), "master"):
            saved[key] = _on_cpu(value) if isinstance(value, torch.Tensor) else value
    if written is not None:
        saved["master"] = _on_cpu(written)
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

    Neither NCCL nor gloo transfers integers of 16 bits, and numbers of another dtype would be silently converted if a
    checkpoint of another layout were loaded into them.
    """
    if values.dtype != torch.int16:
        return values
    pairs = local(values).unsqueeze(-1).view(torch.uint8)
    if not is_sharded(values):
        return pairs
    return sharded(values, pairs, torch.Size((*values.shape, 2)), (*(2 * stride for stride in values.stride()), 1))


def _of_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """The inverse of `_in_bytes` for 16-bit integers."""
    values = local(pairs).contiguous().view(torch.int16).squeeze(-1)
    if not is_sharded(pairs):
        return values
    shape = pairs.shape[:-1]
    return sharded(pairs, values, shape, torch.empty(shape, dtype=values.dtype, device="meta").stride())


def empty_entry(parameter: torch.Tensor, key: str, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """Memory for an entry of a saved state, sharded like its parameter. None for an entry of another shape."""
    scales = key in SCALES.values()
    whole = scales_shape(parameter) if scales else parameter.shape
    if size not in (whole, torch.Size((*whole, 2))):
        return None
    part = local(parameter.detach())
    rows, columns = rows_and_columns(part.shape)
    shape = ((rows, blocks_per_row(columns)) if scales else tuple(part.shape)) + tuple(size[len(whole) :])
    values = part.new_empty(shape, dtype=dtype)
    if not is_sharded(parameter):
        return values
    return sharded(parameter, values, size, torch.empty(size, dtype=values.dtype, device="meta").stride())


def taken(
    saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide one parameter's saved state into copies of what is in the layout of an optimizer, and the rest, decoded.

    Args:
        saved: a state as `held_state` returns it, or a canonical one, which is the rest.
        parameter: the parameter, with the weight that belongs to the state.
        group: its group in the optimizer that loads.
        where: the name of the state in messages.

    Returns:
        Entries with the names in memory, and canonical ones.

    Raises:
        ValueError: an entry has another shape or dtype, its scales are missing, or the parameter has no remainder.
    """
    state: dict[str, Any] = {}
    rest = {key: value for key, value in saved.items() if key not in HELD}
    coded = state_dtype_of(parameter, group["state_dtype"]) == torch.uint8
    device = local(parameter).device
    for moment, name in CODES.items():
        if name not in saved:
            continue
        codes = _checked(saved, name, parameter.shape, torch.uint8, where=where)
        scales = _checked(saved, SCALES[moment], scales_shape(parameter), DTYPES_OF_SCALES[SCALES[moment]], where=where)
        if is_sharded(parameter) and not is_sharded(codes):
            from torch.distributed.tensor import distribute_tensor

            whole = decode(codes, scales, signed=moment == "exp_avg").to(device)
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            # Every rank has the same codes, so nothing is sent.
            rest[moment] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        elif coded:
            state[moment] = torch.empty_like(parameter, dtype=codes.dtype, requires_grad=False).copy_(codes)
            state[SCALES[moment]] = empty_scales(parameter, scales.dtype).copy_(scales)
        else:
            parts = (local(codes).to(device), local(scales).to(device))
            rest[moment] = like(parameter, decode(*parts, signed=moment == "exp_avg"))
    if REMAINDER in saved:
        remainder = _checked(saved, REMAINDER, parameter.shape, *adam.REMAINDERS.values(), where=where)
        if parameter.dtype != torch.bfloat16:
            weight = local(parameter.detach()).bfloat16()
            if parameter.dtype != torch.float32 or not torch.equal(weight.float(), local(parameter.detach())):
                raise ValueError(
                    f"Expected a parameter with numbers of bfloat16 for {REMAINDER!r} in the {where}, which completes "
                    f"these, but got others in {parameter.dtype}: load the model first, in bfloat16 or float32, and "
                    "convert it afterwards; or save canonical_state_dict()"
                )
            rest["master"] = like(parameter, join_master(weight, local(remainder).to(device)))
        else:  # the first step converts it to the present kind: the weight that belongs to it may be loaded later
            state["master"] = torch.empty_like(parameter, dtype=remainder.dtype, requires_grad=False).copy_(remainder)
    return state, rest


def _checked(saved: dict[str, Any], key: str, shape: torch.Size, *dtypes: torch.dtype, where: str) -> torch.Tensor:
    """An entry of a saved state.

    Raises:
        ValueError: it is missing, or has another shape or dtype.
    """
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
