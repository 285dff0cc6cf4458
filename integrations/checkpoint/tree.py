"""Nested values as JSON. Tensors are collected in a dict, and the JSON refers to them by name.

A dict with a single key that begins with ``$`` encodes what JSON cannot express, such as ``{"$tuple": [...]}``.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.integrations.checkpoint.atomic import CheckpointError

DEEPEST = 100  # levels of nesting, well below what Python's json can read
LARGEST_INTEGER = 2**10_000  # by default, Python parses integers of at most 4300 digits

# The dtypes that safetensors stores.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_SEQUENCES: dict[str, Any] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$size": torch.Size}
_MAPPINGS: dict[str, Any] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_TAGS = {cls: tag for tag, cls in (_SEQUENCES | _MAPPINGS).items()}


class TensorName(str):
    """The name of a tensor, which stands for the tensor in a tree."""


def pack(value: Any, tensors: dict[str, torch.Tensor] | None, name: str, depth: int = 0) -> Any:
    """Encode `value` as JSON, adding its tensors to `tensors` under names that begin with `name`.

    Raises CheckpointError for values that could not be read back, and for tensors if `tensors` is None.
    """
    cls = type(value)
    if value is None or cls in (bool, float, str) or (cls is int and abs(value) < LARGEST_INTEGER):
        return value
    if depth > DEEPEST:
        raise CheckpointError(f"{name[:200]} is nested more than {DEEPEST} deep, which could not be read back")
    if cls is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: pack(item, tensors, f"{name}.{key}", depth + 1) for key, item in value.items()}
    if cls in _MAPPINGS.values():
        keys = [pack(key, None, f"a key of {name}") for key in value]
        items = [pack(item, tensors, f"{name}.{key}", depth + 1) for key, item in value.items()]
        return {_TAGS[cls]: list(map(list, zip(keys, items, strict=True)))}
    if cls is list or cls in _SEQUENCES.values():
        items = [pack(item, tensors, f"{name}.{index}", depth + 1) for index, item in enumerate(value)]
        return items if cls is list else {_TAGS[cls]: items}
    if cls is TensorName:
        return {"$tensor": str(value)}
    if isinstance(value, torch.Tensor | ShardedTensor):
        return {"$tensor": _add(value, tensors, name)}
    if cls is np.ndarray or isinstance(value, np.generic):
        native = np.array(value, value.dtype.newbyteorder("="), order="C")  # torch refuses negative strides
        try:
            tensor = torch.from_numpy(native)
        except TypeError:
            raise CheckpointError(f"{name} has numpy dtype {value.dtype}: save its .tolist()") from None
        return {"$array" if cls is np.ndarray else "$scalar": _add(tensor, tensors, name)}
    if cls is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if cls is complex:
        return {"$complex": [value.real, value.imag]}
    if cls in (torch.dtype, torch.device):
        return {f"${cls.__name__}": str(value).removeprefix("torch.")}
    if cls is int:
        raise CheckpointError(f"{name} is an integer of more than 3,000 digits: save its hex(...)")
    remedy = "save str(...) of it, or its fields in a dict"
    if isinstance(value, Mapping) or hasattr(value, "state_dict"):
        remedy = f"save {'dict(...) of it' if isinstance(value, Mapping) else 'its state_dict()'}"
    raise CheckpointError(
        f"Expected {name} to be a tensor, number, string, bytes, None, numpy array, dtype, device, or a list, tuple, "
        f"dict or set of these, but got a {cls.__module__}.{cls.__qualname__}, which load cannot restore: {remedy}"
    )


def _add(value: Any, tensors: dict[str, torch.Tensor] | None, name: str) -> str:
    if tensors is None:
        raise CheckpointError(f"Expected {name} not to contain tensors, but got {str(value)[:100]}: use strings")
    expected = ""
    if value.dtype not in NAMES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
        expected = f"of a safetensors dtype ({dtypes}), but got {value.dtype}: save a view or a copy with one of these"
    elif value.layout is not torch.strided:
        expected = f"dense, but got {value.layout}: save its to_dense(), or its indices() and values()"
    elif not isinstance(value, DTensor | ShardedTensor) and (is_traceable_wrapper_subclass(value) or value.is_meta):
        actual = "meta" if value.is_meta else type(value).__name__
        expected = f"an ordinary tensor with memory, but got {actual}: save the tensors that it consists of"
    if expected:
        raise CheckpointError(f"Expected tensor {name} to be {expected}")
    while name in tensors:  # {"a.b": x, "a": {"b": y}}
        name += "'"
    tensors[name] = value
    return name


def unpack(value: Any, tensor: Callable[[str], Any] = TensorName) -> Any:
    """Decode the JSON of `pack`; `tensor` maps a name to its tensor. Raises CheckpointError for any other JSON."""
    try:
        return _unpack(value, tensor)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"its values are damaged: {type(error).__name__}: {error}") from error


def _unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _unpack(item, tensor) for key, item in value.items()}
    (content,) = value.values()
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_unpack(item, tensor) for item in content)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({_unpack(key, tensor): _unpack(item, tensor) for key, item in content})
    match tag:
        case "$tensor":
            return tensor(content)
        case "$array" | "$scalar":
            values = tensor(content)
            if isinstance(values, TensorName):
                return values
            return values.numpy() if tag == "$array" else values.numpy()[()]
        case "$bytes":
            return base64.b64decode(content)
        case "$complex":
            return complex(*content)
        case "$device":
            return torch.device(content)
        case "$dtype" if isinstance(dtype := getattr(torch, content), torch.dtype):
            return dtype
    raise ValueError(f"unknown tag {tag[:50]!r}")
