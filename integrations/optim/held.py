"""The state of an optimizer as it is held: the codes and scales of moments in 8 bits, and the remainders of masters.

It takes the bytes that it takes in memory. Codes and remainders have names of their own, so that code which expects the
canonical state finds entries missing, instead of taking codes for moments. A remainder belongs to the weight with which
it was saved: load the model first.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from halfstep.integrations.optim.options import MASTER_DTYPES, master_of, state_dtype_of
from halfstep.integrations.optim.state import (
    DTYPES_OF_SCALES,
    MOMENTS,
    SCALES,
    decoded,
    is_remainder,
    like,
    scales_like,
)
from halfstep.kernels import adam
from halfstep.kernels.block_codes import SPAN, blocks_per_row, decode, rows_and_columns
from halfstep.kernels.rounding import join_master
from halfstep.numerics.scaling.topology import is_sharded, local

CODES = {moment: f"{moment}_codes" for moment in MOMENTS}
REMAINDER = "master_remainder"
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


def held_state(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """One parameter's state in memory under the names of a checkpoint, without a master that is no remainder."""
    saved = {key: value for key, value in state.items() if key != "master"}
    master = state.get("master")
    # A remainder is useless without its bf16 parameter.
    if isinstance(master, torch.Tensor) and is_remainder(master) and parameter.dtype == torch.bfloat16:
        saved[REMAINDER] = master
    for key in MOMENTS:
        if key not in state or state[key].dtype != torch.uint8:
            continue
        del saved[key]
        if shards_blocks(parameter):
            saved[CODES[key]] = state[key]
        else:
            del saved[SCALES[key]]
            saved[key] = decoded(state, key, parameter)
    return saved


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
            raise ValueError(
                f"Expected a bfloat16 parameter for {REMAINDER!r} in the {where}, which completes a bfloat16 weight, "
                f"but got {parameter.dtype}: load model and optimizer in bfloat16, then convert"
            )
        kind = master_of(parameter, group["master_weights"])
        if kind is not None and MASTER_DTYPES[kind] == remainder.dtype:
            state["master"] = torch.empty_like(parameter, dtype=remainder.dtype, requires_grad=False).copy_(remainder)
        else:
            weight = local(parameter.detach())
            rest["master"] = like(parameter, join_master(weight, local(remainder).to(device)))
    return state, rest


def _checked(saved: dict[str, Any], key: str, shape: torch.Size, *dtypes: torch.dtype, where: str) -> torch.Tensor:
    """An entry of a saved state.

    Raises:
        ValueError: it is missing, or has another shape or dtype.
    """
    value = saved.get(key)
    got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype not in dtypes:
        raise ValueError(
            f"Expected {key!r} in the {where} to have shape {tuple(shape)} and dtype {' or '.join(map(str, dtypes))}, "
            f"but got {got}: the checkpoint is of another model, or its parameters are in another order"
        )
    return value
