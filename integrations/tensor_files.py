"""Tensors in a file or a checkpoint, mapped into memory and not executed."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from halfstep.integrations import pickles
from halfstep.integrations.pickles import PickleError, Refused
from halfstep.numerics.messages import printable

LONGEST_NAME = 2000  # characters
EXPECTED = "pass a checkpoint, a file of torch.save or a safetensors file"


class TensorFileError(ValueError):
    """A file that cannot be read; the text says which, why, and what to do, in one line that can be printed."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors by name, those in nested dicts and lists with dotted names; on the CPU.

    Their memory is the file's as long as nobody writes to them, except for tensors of which several ranks wrote parts.
    An expanded tensor holds each value once.

    Args:
        path: a file that `torch.save` wrote, a safetensors file, or the folder of a checkpoint of halfstep or of
            torch.distributed.checkpoint; which one is told from its content.

    Raises:
        TensorFileError: it cannot be read, is damaged, or holds objects that loading would have to execute.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _from_folder(path)
        if not stat.S_ISREG(mode):
            raise TensorFileError(
                f"{path} is a pipe or a device; give a file of tensors, which can be mapped into memory"
            )
        with open(path, "rb") as file:
            start = file.read(9)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error.strerror or error}; {EXPECTED}") from error
    if not start:
        raise TensorFileError(f"{path} is empty; {EXPECTED}")
    if start[:1] == b"\x80" and start[8:] != b"{":  # where the header of safetensors begins
        raise TensorFileError(
            f"{path} is a pickle, as torch wrote files before 1.6; load it with torch.load(..., weights_only=True) and "
            "save it again with torch.save"
        )
    if start[:4] == b"PK\x03\x04" or path.suffix in (".pt", ".pth"):
        return _from_torch(path)
    return _from_safetensors(path)


def _from_folder(path: Path) -> dict[str, torch.Tensor]:
    # Imported here because torch.distributed.checkpoint takes as long to import as the rest of torch.
    from halfstep.integrations.checkpoint.folder import CheckpointError
    from halfstep.integrations.checkpoint.torch_folder import open_checkpoint

    try:
        reader = open_checkpoint(path)
        reader.verify()
        names = [name for name, known in reader.metadata.state_dict_metadata.items() if hasattr(known, "chunks")]
        return _named([(name, reader.tensor(name)) for name in names])
    except CheckpointError as error:
        raise TensorFileError(f"{path} is a folder, and no checkpoint, or is damaged: {error}; {EXPECTED}") from error


def _from_torch(path: Path) -> dict[str, torch.Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaves = _leaves("", pickles.load(str(path), path.stat().st_size))
            return _named([(name, _not_expanded(name, tensor)) for name, tensor in leaves])
    except Refused as error:
        raise TensorFileError(f"{path} holds {error}; what is not a plain tensor or value is not read") from error
    except PickleError as error:
        raise TensorFileError(f"{path} is not a file of torch.save, or is damaged: {error}; {EXPECTED}") from error


def _not_expanded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, each once that an expanded one repeats."""
    for dimension, step in enumerate(() if tensor.is_meta else tensor.stride()):
        if step == 0 and tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, 1)
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() > max(reach, 0):
        raise PickleError(
            f"the strides of {name[:100]!r} make {tensor.numel():,} elements of {reach:,}: save a copy of it"
        )
    return tensor


def _leaves(prefix: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(prefix or "tensor", value)]
    if not isinstance(value, dict | list | tuple):
        return []
    if len(prefix) > LONGEST_NAME:
        raise TensorFileError(f"a name in it is longer than {LONGEST_NAME:,} characters: {prefix[:100]}...")
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, part in parts for leaf in _leaves(f"{prefix}.{key}" if prefix else str(key), part)]


def _from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return _named([(name, file.get_tensor(name)) for name in file.keys()])
    except (SafetensorError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, TensorFileError):
            raise
        raise TensorFileError(
            f"{path} is not a safetensors file, is truncated or damaged: {error}; {EXPECTED}"
        ) from error


def _named(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By names that can be printed, with a number behind those that several tensors would have."""
    found: dict[str, torch.Tensor] = {}
    taken: dict[str, int] = {}
    for name, tensor in tensors:
        if len(name) > LONGEST_NAME:
            raise TensorFileError(f"a name in it is longer than {LONGEST_NAME:,} characters: {name[:100]}...")
        name = numbered = printable(name)
        while numbered in found:
            taken[name] = taken.get(name, 1) + 1
            numbered = f"{name} ({taken[name]})"
        found[numbered] = tensor
    return found
