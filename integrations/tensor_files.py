"""Tensors in a file, mapped into memory and not executed: torch's checkpoints (torch_file.py) and safetensors.

A safetensors file is 8 bytes with the length of a header, little-endian, the header in JSON, and the tensors' bytes:
for each name a dtype, a shape and where its bytes begin and end, counted from the end of the header. Nothing in a
header is trusted: every length, offset and shape is checked against the file first.

Source of the format: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.integrations import checkpoint_files, torch_file
from halfstep.integrations.pickle_data import DEEPEST, PickleError
from halfstep.integrations.torch_file import Dense, Meta, Refused, Sparse, Unsuitable
from halfstep.numerics.messages import printable

NAMES_EACH = 16  # of a tensor that several containers hold
LONGEST_NAME = 2000  # characters
EXPECTED = "pass a checkpoint of torch.save or a safetensors file"
LARGEST_HEADER = 100_000_000  # bytes; that of the format's own reader
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip


class TensorFileError(ValueError):
    """A file that cannot be read; the text says which, why, and what to do, in one line that can be printed."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


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
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise TensorFileError(f"{path} is a folder{_of_shards(path)}; give the file of tensors in it")
        if not stat.S_ISREG(mode):
            raise TensorFileError(
                f"{path} is a pipe or a device; give a file of tensors, which can be mapped into memory"
            )
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error.strerror or error}; {EXPECTED}") from error
    if not start:
        raise TensorFileError(f"{path} is empty; {EXPECTED}")
    if start == b"PK\x03\x04" or start[:1] == b"\x80" or path.suffix in (".pt", ".pth"):
        return _from_torch(path)
    return _from_safetensors(path)


def _of_shards(folder: Path) -> str:
    """Text for an error message if a folder is a checkpoint of halfstep, with its damage; empty for other folders."""
    if not (folder / checkpoint_files.MANIFEST).is_file():
        return ""
    complaint = checkpoint_files.complaint(folder)
    return " with a checkpoint in shards" + ("" if complaint is None else f", which is damaged: {complaint}")


def _from_torch(path: Path) -> dict[str, Any]:
    """The content of a file of `torch.save`, by name: a zip archive, or the format of torch before 1.6."""
    try:
        with torch_file.opened(path) as (content, storages), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse tensors warn that they are in beta
            leaves = _leaves(content)
            made = {id(leaf): torch_file.tensor(leaf, storages) for leaf in leaves.values()}
    except Refused as error:
        raise TensorFileError(
            f"{path} holds Python objects beside tensors, of {error}, and loading those could run any code; "
            "save a state_dict instead"
        ) from error
    except Unsuitable as error:
        raise TensorFileError(f"{path} {error}") from error
    except Exception as error:  # what a damaged file says of itself may be anything, and so may what follows from it
        said = str(error) if isinstance(error, PickleError) else f"it cannot be decoded ({type(error).__name__})"
        raise TensorFileError(f"{path} is not a checkpoint of torch.save, or is damaged: {said}; {EXPECTED}") from error
    return {name: made[id(leaf)] for name, leaf in leaves.items()}


def _leaves(content: Any) -> dict[str, Any]:
    """The tensors in nested containers, by dotted names.

    A container that several others hold is looked at once, and all names together must not be many more than tensors.
    """
    below: dict[
        int, tuple[int, int] | None
    ] = {}  # by container: tensors in it, and how deep; None: it is being counted
    distinct: set[int] = set()

    def counted(value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, (Dense, Sparse, Meta)):
            distinct.add(id(value))
            return 1, 0
        if not isinstance(value, (dict, list, tuple)):
            return 0, 0
        if id(value) not in below:
            if depth > DEEPEST:
                raise Unsuitable(f"nests containers more than {DEEPEST} deep; save a state_dict instead")
            below[id(value)] = None
            for key in value if isinstance(value, dict) else ():
                if isinstance(key, tuple) and any(isinstance(part, (tuple, frozenset)) for part in key):
                    raise PickleError(f"it has a dict with a {type(key).__name__} for a key")
            parts = [counted(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
            height = 1 + max((height for _, height in parts), default=0)
            if height > DEEPEST:
                raise Unsuitable(f"nests containers more than {DEEPEST} deep; save a state_dict instead")
            below[id(value)] = (sum(number for number, _ in parts), height)
        known = below[id(value)]
        if known is None:
            raise Unsuitable("holds containers that contain themselves; save a state_dict instead")
        return known

    total, _ = counted(content, 0)
    if total > 1000 + NAMES_EACH * len(distinct):
        raise Unsuitable(
            f"has containers that hold one another so often that {len(distinct):,} tensors have {total:,} names; save "
            "a state_dict instead"
        )
    found: dict[str, Any] = {}
    taken: dict[str, int] = {}

    def walk(prefix: str, value: Any) -> None:
        if len(prefix) > LONGEST_NAME:
            raise Unsuitable(
                f"has a tensor whose name is longer than {LONGEST_NAME:,} characters; save a state_dict instead"
            )
        if isinstance(value, (Dense, Sparse, Meta)):
            found[_unique(prefix or "tensor", taken)] = value
        elif counted(value, 0)[0]:
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{prefix}.{key}" if prefix else str(key), part)

    walk("", content)
    return found


def _unique(name: str, taken: dict[str, int]) -> str:
    """`name` as it can be printed, with a number behind it if another tensor has that already."""
    name = numbered = printable(name)
    while numbered in taken:
        taken[name] += 1
        numbered = f"{name} ({taken[name]})"
    taken[numbered] = 1
    return numbered


def _from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    header, start = _header(path)
    size = path.stat().st_size - start
    # Copy-on-write: writes do not reach the file, and torch does not warn about read-only memory.
    data = (
        torch.from_numpy(np.memmap(path, np.uint8, "c", start, (size,)))
        if size
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    found: dict[str, torch.Tensor] = {}
    taken: dict[str, int] = {}
    ends = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, entry, size)
        ends += end - begin
        if ends > size or len(name) > LONGEST_NAME:
            raise TensorFileError(
                f"{path}, tensor {name[:100]!r}: its name is too long, or its bytes are another tensor's too; the file "
                "is damaged"
            )
        piece = data[begin:end]
        # torch wants the place in the file's data to be a multiple, vector instructions the address.
        if piece.numel() and (begin % dtype.itemsize or piece.data_ptr() % dtype.itemsize):
            piece = piece.clone()
        found[_unique(name, taken)] = (
            piece.view(dtype) if piece.numel() else torch.empty(0, dtype=dtype, device="cpu")
        ).reshape(shape)
    return found


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    size = path.stat().st_size
    if size < 8:
        raise TensorFileError(f"{path} is {size} bytes long, which no file of tensors is; {EXPECTED}")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LARGEST_HEADER):
            raise TensorFileError(
                f"{path} is not a file of tensors, or is truncated: as safetensors its header would be {length:,} "
                f"bytes long, and the file is {size:,}; {EXPECTED}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{path} has a header that is not JSON: {str(error)[:200]}; {EXPECTED}") from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path} has a header that is not a JSON object; {EXPECTED}")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name occurs in it twice")
    return dict(pairs)


def _entry(path: Path, name: str, entry: Any, size: int) -> tuple[torch.dtype, list[int], int, int]:
    """(dtype, shape, begin, end) of one tensor, checked."""
    where = f"{path}, tensor {name[:100]!r}"
    if not isinstance(entry, dict):
        raise TensorFileError(f"{where}: its entry in the header is not a JSON object; the file is damaged")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise TensorFileError(f"{where}: dtype is {entry.get('dtype')!r}; known are {', '.join(_DTYPES)}")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _whole(shape):
        raise TensorFileError(f"{where}: expected shape to be a list of integers, but got {str(shape)[:100]}")
    if not _whole(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise TensorFileError(
            f"{where}: expected two data_offsets within the {size:,} bytes of data, but got {str(offsets)[:100]}: the "
            "file is damaged or truncated"
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
