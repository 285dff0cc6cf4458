"""Decode 8-bit moments and 24-bit masters of other libraries' optimizers.

* bitsandbytes' 8-bit optimizers (`functional.dequantize_blockwise`): blocks of 256 elements of the flattened parameter,
  2,048 before 0.44; ``qmap[code] * absmax[block]`` in fp32. States of small parameters are fp32.
* flashoptim's ``compress_state_dict=True`` (`optimizers.dequantize`): groups of 32 elements of the flattened parameter
  with an fp16 scale. The first moment is ``t / (2 - |t|) * scale`` with ``t = q / 127``, the second moment
  ``(q / 255 * scale)^2``. Scales of bf16 parameters are saved as bf16 tensors with the same bits.
* flashoptim's masters (`optimizers.reconstruct_fp32_param`): the weight plus ``q / 127`` or ``q / 32767`` times half
  an ulp of it.
* torchao's 8-bit, 4-bit and fp8 states are tensor subclasses, which decode themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from halfstep.integrations.optim.state import like
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.state_layout import REMAINDER

BITSANDBYTES = "__bnb_optimizer_quant_state__"  # versions 0.45 and later nest the keys below under it
_BITSANDBYTES = "state1 state2 qmap1 qmap2 absmax1 absmax2 max1 max2 new_max1 new_max2 gnorm_vec unorm_vec".split()
_BLOCKS = (256, 2048)
_GROUP = 32
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


def decode(saved: dict[str, Any], where: str) -> dict[str, Any]:
    """The saved state of an unsharded parameter, which messages call `where`, with its codes decoded to fp32."""
    state = dict(saved)
    state.update(state.pop(BITSANDBYTES, {}))
    if "state1" in state:
        state = _of_bitsandbytes(state, where)
    for moment, maximum in (("exp_avg", 127), ("exp_avg_sq", 255)):
        if (codes := state.pop(f"{moment}::quantized", None)) is not None:
            state[moment] = _of_flashoptim(codes, state.pop(f"{moment}::scales"), maximum, f"{moment!r} in the {where}")
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and hasattr(value, "codes") and hasattr(value, "scale"):  # of torchao
            state[key] = value.dequantize().float()
    return state


def _in_groups(codes: torch.Tensor, scales: torch.Tensor, sizes: tuple[int, ...], where: str) -> torch.Tensor:
    """The scale of each element, flattened."""
    for size in sizes:
        if scales.numel() == -(-codes.numel() // size):
            return scales.flatten().repeat_interleave(size)[: codes.numel()]
    expected = " or ".join(f"{-(-codes.numel() // size)}" for size in sizes)
    raise ValueError(
        f"Expected {expected} scales for the {codes.numel()} codes of {where}, but got {scales.numel()}: the state "
        "belongs to a shard of the parameter, or to another version of the library; save it from one process"
    )


def _of_bitsandbytes(state: dict[str, Any], where: str) -> dict[str, Any]:
    if "max1" in state:
        raise ValueError(
            f"Expected the {where} to have a scale for each block, 'absmax1', but got one for the entire tensor, "
            "'max1', which bitsandbytes used with block_wise=False: load it with bitsandbytes, and save 32-bit states"
        )
    moments = {}
    for number, moment in ((1, "exp_avg"), (2, "exp_avg_sq")):
        codes = state[f"state{number}"]
        if codes.dtype != torch.uint8:
            moments[moment] = codes
            continue
        scales = _in_groups(codes, state[f"absmax{number}"], _BLOCKS, f"{moment!r} in the {where}")
        moments[moment] = (state[f"qmap{number}"][codes.flatten().int()] * scales).view(codes.shape)
    return {**{key: value for key, value in state.items() if key not in _BITSANDBYTES}, **moments}


def _of_flashoptim(codes: torch.Tensor, scales: torch.Tensor, maximum: int, where: str) -> torch.Tensor:
    scales = scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales
    of_elements = _in_groups(codes, scales.float(), (_GROUP,), where)
    scaled = codes.flatten().float() / maximum
    values = scaled / (2.0 - scaled.abs()) * of_elements if maximum == 127 else (scaled * of_elements).square()
    return values.view(codes.shape)


def master_of_flashoptim(weight: torch.Tensor, rest: torch.Tensor, width: int | None, where: str) -> torch.Tensor:
    """The fp32 master of a 16-bit weight, at the time of saving, and the `rest` of the master, its ``error_bits``.

    The rest is int8 or int16, or as saved: int8 converted to, or int16 viewed as, the dtype of the weight. `width` is
    the bytes of both together, 3 or 4, as saved in the group. Messages call the state `where`.
    """
    if rest.is_floating_point() and width in (3, 4):
        rest = rest.to(torch.int8) if width == 3 else rest.view(torch.int16)
    if weight.dtype not in _MANTISSA or rest.dtype not in (torch.int8, torch.int16) or rest.shape != weight.shape:
        raise ValueError(
            f"Expected 'error_bits' in the {where} to be int8 or int16 for a 16-bit weight of the same shape, but got "
            f"{rest.dtype} and {tuple(rest.shape)} for {weight.dtype} and {tuple(weight.shape)}: load model and "
            "optimizer in the dtype in which they were saved"
        )
    mantissa = _MANTISSA[weight.dtype]
    bias = 127 if mantissa == 7 else 15
    exponent = ((weight.view(torch.int16).int() & 0x7FFF) >> mantissa).clamp(min=1) - bias - mantissa - 1
    first = exponent.div(2, rounding_mode="floor")
    half_gap = torch.ldexp(torch.ldexp(rest.float() / torch.iinfo(rest.dtype).max, first), exponent - first)
    return weight.float() + half_gap


def _is_nothing(value: Any) -> bool:
    """Whether an entry means a missing one: None in TransformerEngine, an empty dict in torch's flat state dicts."""
    return value is None or (isinstance(value, dict) and not value)


def with_our_names(where: str, parameter: torch.Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A parameter's saved state with halfstep's names; `group` is its saved group."""
    state = decode({key: value for key, value in saved.items() if not _is_nothing(value)}, where)
    if group.get("step") is not None:
        state.setdefault("step", group["step"])
    rest = state.pop("error_bits", None)
    if isinstance(rest, torch.Tensor) and "master" not in state:
        weight, rest = local(parameter.detach()), local(rest)
        master = master_of_flashoptim(weight, rest.to(weight.device), group.get("master_bytewidth"), where)
        return {**state, "master": like(parameter, master)}
    master = state.pop("master_param", None)
    if not isinstance(master, torch.Tensor) or parameter.dtype == torch.float32:
        return state
    # Integers are the lower 16 bits of a master whose upper half was rounded as in `split_master`.
    return {**state, (REMAINDER if master.dtype == torch.int16 else "master"): master}


def check_masters(owners: dict[Any, tuple[torch.Tensor, Any, Any]], state_dict: dict[str, Any]) -> None:
    """Raise if a group whose options say that it had split masters has none of them.

    Code that loads flat state dicts looks up the names in memory, and omits entries that it does not find.
    """
    for number, group in enumerate(state_dict["param_groups"]):
        states = [(owners[index][0], state_dict["state"].get(index) or {}) for index in group["params"]]
        halves = [parameter for parameter, state in states if parameter.dtype == torch.bfloat16 and state]
        masters = [state for _, state in states if not (_is_nothing(state.get("master")) and REMAINDER not in state)]
        if group.get("master_weights") in ("split", "split24") and halves and not masters:
            raise ValueError(
                f"Expected {REMAINDER!r} or 'master' in the states of group {number}, whose masters were "
                f"{group['master_weights']!r} when it was saved, but got none: code that loads flat states looks up "
                "'master' only; set optimizer.state_dict_format = 'canonical' before saving and loading"
            )
