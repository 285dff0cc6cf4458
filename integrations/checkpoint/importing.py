"""Readers of formats that halfstep does not write now: torch.distributed.checkpoint (DCP) folders, and ``.pt`` files.

torch reads a folder's ``.metadata`` with `pickle.load`, which imports and calls whatever the file names. Here it is
parsed as data (pickles.py), and checked against the files in the folder.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfstep.integrations import pickles
from halfstep.integrations.checkpoint import atomic
from halfstep.integrations.checkpoint.atomic import MANIFEST, SHARDS, STATE, CheckpointError
from halfstep.integrations.checkpoint.storage import Chunk, Reader, Stored, TensorName, pack
from halfstep.integrations.pickles import PickleError, Record

METADATA = ".metadata"
OBJECTS = "halfstep.pt"  # values that are not sharded, which earlier versions wrote next to torch's files
NUMPY = "halfstep.numpy"  # the key that marks numpy values in it
_TRAILER = re.compile(rb"\nhalfstep sha256 ([0-9a-f]{64})\n")  # at the end of ``.pt`` files of earlier versions
_TRAILER_LENGTH = 82

_DCP = "torch.distributed.checkpoint"
# Layouts, memory formats and paths are read but not needed. Python 3.11.0 to 3.11.3 pickle enum members with `getattr`.
_RECORDS = {
    f"{_DCP}.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo",
    "builtins": "getattr",
    "torch.serialization": "_get_layout",
    **dict.fromkeys(("pathlib", "pathlib._local"), "PosixPath PurePosixPath WindowsPath PureWindowsPath"),
}
_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): Record for module, names in _RECORDS.items() for name in names.split()},
    ("torch", "Size"): lambda sizes=(): torch.Size(sizes),
}


def _index(name: Any, offset: Any) -> tuple[str, torch.Size | None]:
    """A tensor's name and a part's offsets, as a key. Other types are refused: they may take unbounded time to hash."""
    if type(name) is not str or type(offset) not in (torch.Size, type(None)):
        raise PickleError("it has an index without a name")
    return name, offset


class _Range(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    length: int


class TorchReader(Reader):
    """A reader of a DCP folder, with the same interface as `Reader`."""

    sources = METADATA

    def verify(self, share: int = 0, shares: int = 1) -> None:
        if (self.path / MANIFEST).exists():  # torch writes none
            super().verify(share, shares)

    def _list(self) -> None:
        self._objects: dict[str, torch.Tensor] = {}  # tensors in `tree` that `tensors` does not list
        self.verify(shares=0)
        if not (self.path / METADATA).is_file():
            raise CheckpointError(f"its file {METADATA} is missing")
        stored: Any = pickles.read((self.path / METADATA).read_bytes(), _NAMES).state
        items = stored["storage_data"].items()
        places = {_index(key.state["fqn"], key.state.get("offset")): info.state for key, info in items}
        objects: dict[Any, Chunk] = {}
        for name, entry in stored["state_dict_metadata"].items():
            if entry.state is None:  # not a tensor
                objects[name] = Chunk(self._range(places[_index(name, None)], 1), (), ())
                continue
            dtype, chunks = entry.state["properties"].state[0], {}
            for chunk in entry.state["chunks"]:
                offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
                source = self._range(places[_index(name, offsets)], sizes.numel() * dtype.itemsize)
                chunks[offsets, sizes] = Chunk(source, offsets, sizes)
            self._add(name, Stored(dtype, entry.state["size"], list(chunks.values())))
        files = {chunk.source.file for tensor in self.tensors.values() for chunk in tensor.chunks}
        self._check_size(sum((self.path / name).stat().st_size for name in files))
        self.tree = self._tree(stored.get("planner_data") or {}, objects)

    def _range(self, info: dict[str, Any], size: int) -> _Range:
        """Where an entry is stored, after checking that the file exists and the entry has at least `size` bytes."""
        name, offset, length = info["relative_path"], info["offset"], info["length"]
        if not atomic.is_name(name) or not (self.path / name).is_file():
            raise CheckpointError(f"its file {str(name)[:100]!r} is missing, or is not in the folder")
        if info.get("transform_descriptors"):
            raise CheckpointError("its files are compressed or encrypted: save it without stream transforms")
        if min(offset, length - size) < 0 or offset + length > (self.path / name).stat().st_size:
            raise CheckpointError(f"its {METADATA} does not match the file {name}")
        return _Range(name, offset, length)

    def _read(self, name: str, chunk: Chunk) -> Any:
        with open(self.path / chunk.source.file, "rb") as file:
            file.seek(chunk.source.offset)
            return pickles.load(io.BytesIO(file.read(chunk.source.length)), chunk.source.length)

    def _tree(self, paths: dict[str, Any], objects: dict[Any, Chunk]) -> dict[str, Any]:
        """The nested values that torch flattened, and those that halfstep wrote next to torch's files."""
        root: dict[Any, Any] = {}
        for name, keys in paths.items():
            if type(keys) is not tuple or not 1 <= len(keys) < 100:
                raise PickleError("it has a path that is too long")
            parent = root
            for key in keys[:-1]:
                parent = parent.setdefault(key, {})
            parent[keys[-1]] = TensorName(name) if name in self.tensors else self._read(name, objects[name])
        root = {key: _with_lists(value) for key, value in root.items()}
        if (self.path / OBJECTS).is_file():
            root |= _with_numpy(pickles.load(str(self.path / OBJECTS), (self.path / OBJECTS).stat().st_size))
        return {str(key): pack(value, self._objects, f"beside.{key}") for key, value in root.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self._objects[name] if name in self._objects else super().tensor(name)


def _with_lists(value: Any) -> Any:
    """Convert dicts with the keys 0, 1, ..., back to the lists that torch flattened."""
    if type(value) is not dict:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[index] for index in range(len(items))] if items and items.keys() == set(range(len(items))) else items


def _with_numpy(value: Any) -> Any:
    """Convert tensors marked with `NUMPY` back to numpy values; earlier versions stored these as tensors."""
    if type(value) is dict and NUMPY in value:
        values = value["values"].numpy()
        return values if value[NUMPY] == "array" else values[()]
    if isinstance(value, dict):
        return type(value)({key: _with_numpy(item) for key, item in value.items()})
    return type(value)(map(_with_numpy, value)) if type(value) in (list, tuple) else value


def open_checkpoint(path: Path) -> Reader:
    """A reader of a checkpoint folder of this version, of an earlier version, or of DCP."""
    if (path / MANIFEST).exists():
        return TorchReader(path) if atomic.read_manifest(path)["format"] == atomic.FORMAT_1 else Reader(path)
    ours = (path / OBJECTS, path / STATE, *path.glob(f"*{SHARDS}"))
    if not (path / METADATA).is_file() or any(file.exists() for file in ours):
        raise CheckpointError(
            f"it has no {MANIFEST}, and is not a torch.distributed.checkpoint folder with {METADATA}: it is not a "
            "checkpoint, or is truncated"
        )
    return TorchReader(path)


def read_file(path: Path) -> dict[str, Any]:
    """The content of a ``step-….pt`` file of the first versions, whose last line is a checksum."""
    data = path.read_bytes()
    trailer = _TRAILER.fullmatch(data[-_TRAILER_LENGTH:])
    if trailer is None:
        raise CheckpointError("its last line is not a checksum: it was cut off, or halfstep did not write it")
    if hashlib.sha256(data[:-_TRAILER_LENGTH]).hexdigest().encode() != trailer[1]:
        raise CheckpointError("its bytes do not match the checksum on its last line: it was changed or damaged")
    content = _with_numpy(pickles.load(str(path), len(data)))
    if not isinstance(content, dict):
        raise CheckpointError(f"it holds a {type(content).__name__}, not a dict")
    return content
