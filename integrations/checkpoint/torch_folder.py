"""Folders that torch.distributed.checkpoint wrote: by itself, or for halfstep before ``halfstep checkpoint 2``.

torch reads their ``.metadata`` with `pickle.load`, which imports and calls what the file names. Here it is read as data
(pickles.py), and compared with the files in the folder.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from halfstep.integrations import pickles
from halfstep.integrations.checkpoint import folder
from halfstep.integrations.checkpoint.folder import CheckpointError
from halfstep.integrations.checkpoint.storage import Reader, check_parts
from halfstep.integrations.checkpoint.tree import TensorName, pack
from halfstep.integrations.pickles import PickleError, Record

METADATA, BESIDE = ".metadata", "halfstep.pt"
NUMPY = "halfstep.numpy"  # the key of numpy values in folders of halfstep
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    name: type(name, (Record,), {"kind": name})
    for name in (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_StorageInfo"),
    )
}


class _Index(Record):
    """A MetadataIndex, which is a key: by its name and offset."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and _index(self) == _index(other)

    def __hash__(self) -> int:
        return hash(_index(self))


def _nothing(*arguments: Any) -> None:
    """Stands for what is not needed: layouts, formats of memory, paths."""


def _size(numbers: Any = ()) -> torch.Size:
    return torch.Size(numbers)


_NAMES: dict[tuple[str, str], Any] = {
    **{(f"{_DCP}.metadata", name): kind for name, kind in _RECORDS.items() if name != "_StorageInfo"},
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.filesystem", "_StorageInfo"): _RECORDS["_StorageInfo"],
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    ("builtins", "getattr"): _nothing,  # Python 3.11.0 to 3.11.3 pickle members of enums so
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch", "Size"): _size,
    **{
        (module, name): _nothing
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def _index(record: Any) -> MetadataIndex:
    fqn, offset = record.state["fqn"], record.state.get("offset")
    if type(fqn) is not str or type(offset) not in (torch.Size, type(None)):
        raise PickleError("it has an index without a name")
    return MetadataIndex(fqn, offset)


class TorchReader(Reader):
    """A reader of such a folder, with the same tree and metadata as one of a checkpoint of halfstep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if (path / folder.MANIFEST).exists() and (said := folder.complaint(path, parts=0)) is not None:
            raise CheckpointError(said)
        if not (path / METADATA).is_file():
            raise CheckpointError(f"its file {METADATA} is missing")
        self.beside = {}
        try:
            self._read_metadata(pickles.read((path / METADATA).read_bytes(), pickles.table(_NAMES)))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"its {METADATA} cannot be used: {type(error).__name__}: {error}") from error

    def verify(self, part: int = 0, parts: int = 1) -> None:
        if (self.path / folder.MANIFEST).exists():  # torch writes none
            super().verify(part, parts)

    def _read_metadata(self, root: Any) -> None:
        stored = {_index(index): info.state for index, info in root.state["storage_data"].items()}
        known: dict[str, Any] = {}
        self._places = {}
        for name, record in root.state["state_dict_metadata"].items():
            if record.kind == "BytesStorageMetadata":
                known[name] = BytesStorageMetadata()
                self._places[MetadataIndex(name)] = torch.Size(()), self._range(stored[MetadataIndex(name)], 1)
                continue
            fields = record.state
            dtype, size, chunks = fields["properties"].state[0], fields["size"], {}
            for one in fields["chunks"]:
                chunk = ChunkStorageMetadata(one.state["offsets"], one.state["sizes"])
                index = MetadataIndex(name, chunk.offsets)
                needed = chunk.sizes.numel() * dtype.itemsize
                self._places[index] = chunk.sizes, self._range(stored[index], needed)
                chunks[chunk.offsets, chunk.sizes] = chunk
            known[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, list(chunks.values()))
        files = {file for _, (file, *_) in self._places.values()}
        check_parts(known, sum((self.path / name).stat().st_size for name in files))
        self.metadata = Metadata(known)
        self.tree = self._tree(known, root.state.get("planner_data") or {})

    def _range(self, info: dict[str, Any], needed: int) -> tuple[str, int, int]:
        """File, offset and length of an entry, which exist."""
        name, offset, length = info["relative_path"], info["offset"], info["length"]
        if not folder.is_name(name) or not (self.path / name).is_file():
            raise CheckpointError(f"its file {str(name)[:100]!r} is missing, or is no file of the folder")
        if info.get("transform_descriptors"):
            raise CheckpointError("its files are compressed or encrypted: save it without that")
        if min(offset, length - needed) < 0 or offset + length > (self.path / name).stat().st_size:
            raise CheckpointError(f"its {METADATA} does not match the file {name}")
        return name, offset, length

    def _content(self, index: MetadataIndex) -> Any:
        name, offset, length = self._places[index][1]
        with open(self.path / name, "rb") as file:
            file.seek(offset)
            return pickles.load(io.BytesIO(file.read(length)), length)

    def part(self, index: MetadataIndex) -> torch.Tensor:
        return self._content(index)

    def _tree(self, known: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
        """What torch has flattened, nested again, with the objects read; and what halfstep wrote beside."""
        root: dict[Any, Any] = {}
        for name, keys in paths.items():
            if type(keys) is not tuple or not 1 <= len(keys) < 100:
                raise PickleError("it has a path that is too long")
            tensor = isinstance(known[name], TensorStorageMetadata)
            within = root
            for key in keys[:-1]:
                within = within.setdefault(key, {})
            within[keys[-1]] = TensorName(name) if tensor else self._content(MetadataIndex(name))
        root = {key: _listed(value) for key, value in root.items()}
        if (self.path / BESIDE).is_file():
            root |= with_numpy(pickles.load(str(self.path / BESIDE), (self.path / BESIDE).stat().st_size))
        return {str(key): pack(value, self.beside, f"beside.{key}") for key, value in root.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self.beside[name] if name in self.beside else super().tensor(name)


def _listed(value: Any) -> Any:
    """Dicts with the keys 0, 1, ..., which were lists before torch flattened them, as lists."""
    if type(value) is not dict:
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    return [inner[place] for place in range(len(inner))] if inner and inner.keys() == set(range(len(inner))) else inner


def with_numpy(value: Any) -> Any:
    """Values that earlier versions saved, with numpy's where they saved tensors in their stead."""
    if type(value) is dict and NUMPY in value:
        values = value["values"].numpy()
        return values if value[NUMPY] == "array" else values[()]
    if isinstance(value, dict):
        return type(value)({key: with_numpy(one) for key, one in value.items()})
    return type(value)(map(with_numpy, value)) if type(value) in (list, tuple) else value


def open_checkpoint(path: Path) -> Reader:
    """A reader of a checkpoint of halfstep, of this version or an earlier one, or of torch.

    Raises:
        CheckpointError: it is none, its files are missing or have another length, or they do not hold what they say.
    """
    if (path / folder.MANIFEST).exists():
        before = folder.read_manifest(path)["format"] == folder.BEFORE
        return TorchReader(path) if before else Reader(path)
    ours = (path / BESIDE, path / folder.STATE, *path.glob(f"*{folder.SHARDS}"))
    if not (path / METADATA).is_file() or any(one.exists() for one in ours):
        raise CheckpointError(
            f"it has no {folder.MANIFEST}, and is not a checkpoint of torch with {METADATA}: it is not a checkpoint, "
            "or is truncated"
        )
    return TorchReader(path)
