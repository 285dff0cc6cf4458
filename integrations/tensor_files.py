"""Read tensors from a file or a checkpoint, memory-mapped and without executing anything."""

from __future__ import annotations

import json
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from halfstep.integrations import pickles
from halfstep.integrations.pickles import PickleError, Refused
from halfstep.numerics.messages import printable

LONGEST_NAME = 2000  # characters
EXPECTED = "pass a checkpoint, a file of torch.save or a safetensors file"
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")  # of the files to read in a folder


class TensorFileError(ValueError):
    """A file that cannot be read; the message says which, why, and what to do, on one printable line."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class TensorFiles(NamedTuple):
    """Tensors by name, the paths of the files read, and why other files of a folder were skipped."""

    tensors: dict[str, torch.Tensor]
    files: list[str]
    skipped: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {"files": self.files, "skipped": self.skipped}

    def lines(self) -> list[str]:
        """Lines that list the files read and skipped; none if there is only one file."""
        skipped = [f"not read: {path}: {why}" for path, why in self.skipped.items()]
        return [f"read: {', '.join(self.files)}", *skipped] if skipped or len(self.files) > 1 else []


def read_all(paths: Sequence[str | Path]) -> TensorFiles:
    """All tensors of the parts of one checkpoint: of anything that `read_tensors` reads, and of other folders of tensor
    files, such as Hugging Face's, whose index lists the files.

    Raises TensorFileError if a file cannot be read or is damaged, or two of `paths` have a tensor of the same name.
    """
    result = TensorFiles({}, [], {})
    for path in map(Path, paths):
        for part in _parts(path, result.skipped):
            try:
                tensors = read_tensors(part)
            except TensorFileError as error:
                if part == path or not isinstance(error.__cause__, Refused):
                    raise
                result.skipped[str(part)] = f"holds {error.__cause__}"
                continue
            if repeated := result.tensors.keys() & tensors.keys():
                why = f"has a tensor {min(repeated)!r}, which a file before it also has; inspect them one by one"
                if part == path:
                    raise TensorFileError(f"{path} {why}")
                result.skipped[str(part)] = why
            else:
                result.tensors.update(tensors)
                result.files.append(str(part))
    return result


def _parts(path: Path, skipped: dict[str, str]) -> list[Path]:
    """The files to read in a folder, or `path` itself if `read_tensors` reads it."""
    entries = {entry.name: entry for entry in sorted(path.iterdir())} if path.is_dir() else {}
    if not entries or {"manifest.json", ".metadata"} & entries.keys():
        return [path]
    indexed: set[str] = set()
    for index in path.glob("*.safetensors.index.json"):
        try:
            indexed.update(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise TensorFileError(f"{index} is damaged: {error}; download it again, or pass the files") from error
    if missing := sorted(map(str, indexed - entries.keys())):
        raise TensorFileError(f"{path} lacks {missing[0]}, which its index lists; add it, or pass the files")
    parts, folders = [], [str(entry) for entry in entries.values() if entry.is_dir()]
    for name, entry in entries.items():
        if entry.is_dir():
            skipped[str(entry)] = "a folder; pass it separately"
        elif indexed and entry.suffix == ".safetensors" and name not in indexed:
            skipped[str(entry)] = "not in the index"
        elif entry.suffix in SUFFIXES:
            parts.append(entry)
        elif not name.endswith(".index.json"):
            skipped[str(entry)] = f"not one of {', '.join(SUFFIXES)}"
    if folders and not parts:
        raise TensorFileError(f"{path} has no file of tensors; pass a checkpoint in it, such as {folders[-1]}")
    return sorted(parts, key=lambda part: part.suffix != ".safetensors") or [path]


def read_tensors(path: str | Path) -> dict[str, torch.Tensor]:
    """All tensors on the CPU by name; tensors in nested dicts and lists have dotted names.

    They are memory-mapped until written to, except for tensors whose parts were written by several ranks. Expanded
    dimensions are returned with size 1.

    Args:
        path: a file of `torch.save`, a safetensors file, or the folder of a checkpoint of halfstep or
            torch.distributed.checkpoint; the content tells which.

    Raises:
        TensorFileError: the file cannot be read, is damaged, or contains objects whose loading would execute code.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        start = b""
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                start = file.read(9)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error.strerror or error}; {EXPECTED}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise TensorFileError(f"{path} is a pipe or a device; pass a file of tensors, which can be memory-mapped")
    if stat.S_ISREG(mode) and not start:
        raise TensorFileError(f"{path} is empty; {EXPECTED}")
    if start[:1] == b"\x80" and start[8:] != b"{":  # a safetensors header starts with { at byte 8
        raise TensorFileError(
            f"{path} is a pickle, as torch wrote files before 1.6; load it with torch.load(..., weights_only=True) and "
            "save it again with torch.save"
        )
    problem, read = "is not a safetensors file, is truncated or damaged", _from_safetensors
    if stat.S_ISDIR(mode):
        problem, read = "is a folder that is not a checkpoint, or is damaged", _from_folder
    elif start[:4] == b"PK\x03\x04" or path.suffix in (".pt", ".pth"):
        problem, read = "is not a file of torch.save, or is damaged", _from_torch
    try:
        return _named(read(path))
    except TensorFileError:
        raise
    except Refused as error:
        raise TensorFileError(f"{path} holds {error}; only plain tensors and values are read") from error
    except (SafetensorError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{path} {problem}: {error}; {EXPECTED}") from error


def _from_folder(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    # Imported here, because torch.distributed.checkpoint takes as long to import as the rest of torch.
    from halfstep.integrations.checkpoint.importing import open_checkpoint

    reader = open_checkpoint(path)
    reader.verify()
    for name in reader.tensors:
        yield name, reader.tensor(name)


def _from_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)


def _from_torch(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = pickles.load(str(path), path.stat().st_size)
    for name, tensor in _leaves("", content):
        yield name, _not_expanded(name, tensor)


def _not_expanded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with its expanded dimensions reduced to size 1."""
    for dimension, step in enumerate(() if tensor.is_meta else tensor.stride()):
        if step == 0 and tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, 0, 1)
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() > max(reach, 0):
        raise PickleError(f"the strides of {name[:100]!r} turn {reach:,} elements into {tensor.numel():,}: save a copy")
    return tensor


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield prefix or "tensor", value
    elif isinstance(value, dict | list | tuple):
        _check_name(prefix)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)


def _check_name(name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise TensorFileError(f"a tensor name is longer than {LONGEST_NAME:,} characters: {name[:100]}...")


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors by printable names, with a number appended to names that would occur more than once."""
    result: dict[str, torch.Tensor] = {}
    times: Counter[str] = Counter()
    for name, tensor in tensors:
        _check_name(name)
        name = numbered = printable(name)
        while numbered in result:
            times[name] += 1
            numbered = f"{name} ({times[name] + 1})"
        result[numbered] = tensor
    return result
