"""Tensors in a file, mapped into memory and not executed: torch's checkpoints and safetensors.

A safetensors file is 8 bytes with the length of a header, little-endian, the header in JSON, and the tensors' bytes:
for each name a dtype, a shape and where its bytes begin and end, counted from the end of the header. Nothing in a
header is trusted: every length, offset and shape is checked against the file first.

Source of the format: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

LARGEST_HEADER = 100_000_000  # bytes; that of the format's own reader
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


class TensorFileError(ValueError):
    """A file that cannot be read; the text says which, why, and what to do."""


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors in a file by name, those in nested dicts and lists with dotted names; on the CPU.

    Their memory is the file's as long as nobody writes to them.

    Args:
        path: a checkpoint that `torch.save` wrote, or a safetensors file; which one is told from its content.

    Raises:
        TensorFileError: it cannot be read, is damaged, or holds objects that loading would have to execute.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise TensorFileError(f"{path} is a folder; give the file of tensors in it")
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80" or path.suffix in (".pt", ".pth"):
        return _from_torch(path, zipped=start[:4] == b"PK\x03\x04")
    return _from_safetensors(path)


def _from_torch(path: Path, zipped: bool) -> dict[str, torch.Tensor]:
    try:
        # Only zip archives, which torch has written since 1.6, can be mapped.
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True if zipped else None)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused:
            raise TensorFileError(
                f"{path} holds Python objects beside tensors, of {refused[1]}, and loading those could run any code; "
                "save a state_dict instead"
            ) from error
        said = str(error).splitlines()[-1][:200]
        raise TensorFileError(f"{path} is no checkpoint of torch.save, or is damaged: {said}") from error
    except (RuntimeError, EOFError, zipfile.BadZipFile, OSError, ValueError, KeyError, AttributeError) as error:
        said = (str(error).split(".")[0].splitlines() or [type(error).__name__])[0]
        raise TensorFileError(f"{path} is no checkpoint of torch.save, or is damaged: {said[:200]}") from error
    try:
        return dict(_flattened("", content))
    except RecursionError as error:
        raise TensorFileError(f"{path} holds containers that contain themselves; save a state_dict instead") from error


def _flattened(prefix: str, content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested containers, by dotted names."""
    if isinstance(content, torch.Tensor):
        yield prefix or "tensor", content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from _flattened(f"{prefix}.{name}" if prefix else str(name), value)
    elif isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from _flattened(f"{prefix}.{index}" if prefix else str(index), value)


def _from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    header, start = _header(path)
    size = path.stat().st_size - start
    # Written to, a page becomes a copy of its own, so torch does not warn of memory that must not be written.
    data = (
        torch.from_numpy(np.memmap(path, np.uint8, "c", start, (size,))) if size else torch.empty(0, dtype=torch.uint8)
    )
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, entry, size)
        piece = data[begin:end]
        # torch wants the place in the file's data to be a multiple, vector instructions the address.
        if piece.numel() and (begin % dtype.itemsize or piece.data_ptr() % dtype.itemsize):
            piece = piece.clone()
        found[name] = (piece.view(dtype) if piece.numel() else torch.empty(0, dtype=dtype)).reshape(shape)
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    size = path.stat().st_size
    known = "allowed are safetensors files and those of torch.save"
    if size < 8:
        raise TensorFileError(f"{path} is {size} bytes long, which no file of tensors is; {known}")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LARGEST_HEADER):
            raise TensorFileError(
                f"{path} is no file of tensors, or is cut off: as safetensors its header would be {length:,} bytes "
                f"long, and the file is {size:,}; {known}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{path} has a header that is no JSON: {str(error)[:200]}; {known}") from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path} has a header that is no JSON object; {known}")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands in it twice")
    return dict(pairs)


def _entry(path: Path, name: str, entry: Any, size: int) -> tuple[torch.dtype, list[int], int, int]:
    """(dtype, shape, begin, end) of one tensor, checked."""
    where = f"{path}, tensor {name[:100]!r}"
    if not isinstance(entry, dict):
        raise TensorFileError(f"{where}: its entry in the header is no JSON object; the file is damaged")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise TensorFileError(f"{where}: dtype is {entry.get('dtype')!r}; known are {', '.join(_DTYPES)}")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _whole(shape):
        raise TensorFileError(f"{where}: shape is {str(shape)[:100]}; allowed are lists of whole numbers")
    if not _whole(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise TensorFileError(
            f"{where}: data_offsets are {str(offsets)[:100]}; allowed are two that lie within the {size:,} bytes of "
            "data: the file is damaged or cut off"
        )
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise TensorFileError(
            f"{where}: shape {shape} of {entry['dtype']} takes {needed:,} bytes, and {offsets[1] - offsets[0]:,} are "
            "given; the file is damaged"
        )
    return dtype, shape, offsets[0], offsets[1]


def _whole(numbers: Any) -> bool:
    """Whether it is a list of whole numbers that fit 63 bits."""
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
