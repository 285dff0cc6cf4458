"""The file ``.metadata`` of torch.distributed.checkpoint, read as data and validated.

torch reads it with `pickle.load`, which imports and calls what the file names. Here the pickle is read as plain nodes
(pickle_data.py), from which `Metadata` is built field by field and compared with the files in the folder: every shard
is within its tensor and within its file, shards neither overlap nor leave gaps, and no two entries share bytes. What is
read is therefore no larger than the folder, and no allocated memory stays uninitialized.
"""

from __future__ import annotations

import itertools
import math
import stat
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from halfstep.integrations import archive, pickle_data
from halfstep.integrations.checkpoint_files import CheckpointError
from halfstep.integrations.pickle_data import Function, Node, PickleError, damaged

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"


def _one_of(*allowed: Any) -> Function:
    """A function that accepts one of some values and returns nothing, since its result is not used."""

    def check(value: Any) -> None:
        if value not in allowed:
            raise PickleError(f"expected one of {', '.join(map(str, allowed))}, but got {pickle_data.described(value)}")

    return Function(check)


_MEMORY_FORMAT = _one_of(0, 1, 2)


def _member(kind: Any, name: Any) -> None:
    """``getattr(_MEM_FORMAT_ENCODING, name)``: Python 3.11.0 to 3.11.3 pickle the members of enums this way."""
    if kind is not _MEMORY_FORMAT or name not in (
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    ):
        raise PickleError(f"it asks for the attribute {pickle_data.described(name)}, which no checkpoint needs")


_NAMES: dict[tuple[str, str], Any] = {
    **archive.NAMES,
    **{
        (f"{_DCP}.metadata", kind.__name__): Function(partial(Node, kind.__name__))
        for kind in (
            *(Metadata, TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, BytesStorageMetadata),
            *(MetadataIndex, StorageMeta),
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): Function(partial(Node, "_StorageInfo")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("builtins", "getattr"): Function(_member),
    ("torch.serialization", "_get_layout"): _one_of("torch.strided"),
    **{
        (module, name): Function(lambda *parts: None)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


def read(folder: Path) -> Metadata:
    """The metadata of a folder. All files and byte ranges that it refers to exist.

    Raises:
        CheckpointError: the metadata cannot be read, or does not match the files.
    """
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"its file {METADATA} is missing")
    try:
        metadata = _metadata(pickle_data.read((folder / METADATA).read_bytes(), _NAMES))
        _check_storage(metadata, folder)
    except PickleError as error:
        raise CheckpointError(f"its {METADATA} cannot be used: {error}") from error
    return metadata


def _fields(node: Any, kind: str) -> dict[str, Any]:
    if type(node) is not Node or node.kind != kind or type(node.state) not in (dict, type(None)):
        raise damaged(f"a {kind}")
    return node.state or {}


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise damaged(what)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise damaged("a name")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise damaged(what)
    return value


def _metadata(root: Any) -> Metadata:
    fields = _fields(root, "Metadata")
    contents = {
        _text(name): _entry(name, node)
        for name, node in _dict(fields.get("state_dict_metadata"), "the list of tensors").items()
    }
    paths = {
        _text(name): _path(path) for name, path in _dict(fields.get("planner_data") or {}, "the list of paths").items()
    }
    if not paths.keys() <= contents.keys():
        raise PickleError(f"it has a path for {next(iter(paths.keys() - contents.keys()))!r}, but no such entry")
    stored = {
        _index(index): _stored(info)
        for index, info in _dict(fields.get("storage_data"), "the list of byte ranges").items()
    }
    return Metadata(contents, paths, stored, StorageMeta())


def _path(path: Any) -> tuple[str | int, ...]:
    """The keys of an entry in nested dicts and lists."""
    if type(path) is not tuple or not 1 <= len(path) <= pickle_data.DEEPEST:
        raise damaged("a path")
    if not all(type(key) is str or (type(key) is int and 0 <= key < 2**31) for key in path):
        raise damaged("a path")
    return path


def _entry(name: str, node: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(node) is Node and node.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(node, "TensorStorageMetadata")
    properties, size, chunks = (fields.get(key) for key in ("properties", "size", "chunks"))
    if type(properties) is not Node or properties.kind != "TensorProperties" or type(properties.state) is not tuple:
        raise damaged("a dtype")
    dtype = properties.state[0] if properties.state else None
    if type(dtype) is not torch.dtype or type(size) is not torch.Size or type(chunks) is not list:
        raise damaged("a tensor's entry")
    found = {}
    for chunk in chunks:
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = parts.get("offsets"), parts.get("sizes")
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            raise damaged("a tensor's part")
        found[offsets, sizes] = ChunkStorageMetadata(offsets, sizes)
    entry = TensorStorageMetadata(TensorProperties(dtype=dtype), size, list(found.values()))
    _check_parts(name, entry)
    return entry


def _check_parts(name: str, entry: TensorStorageMetadata) -> None:
    """Raise unless a tensor's parts lie within the tensor, do not overlap and cover it completely."""
    size, chunks = entry.size, entry.chunks
    where = f"its tensor {name[:100]!r} of shape {list(size)[:16]}"
    for chunk in chunks:
        ends = zip(chunk.offsets, chunk.sizes, size, strict=False)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(at + long > all_ for at, long, all_ in ends):
            raise PickleError(f"{where} has a part that extends beyond it")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise PickleError(f"{where} has parts that do not cover it exactly")
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(full) < 2:
        return
    # Sweep along the dimension with the most cuts. Each part is compared with the parts that have not ended yet.
    along = max(range(len(size)), key=lambda dim: len({chunk.offsets[dim] for chunk in full}))
    full.sort(key=lambda chunk: chunk.offsets[along])
    open_: list[ChunkStorageMetadata] = []
    for chunk in full:
        open_ = [one for one in open_ if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        if any(_overlap(one, chunk) for one in open_):
            raise PickleError(f"{where} has parts that overlap")
        open_.append(chunk)


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    ranges = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(first < second + length and second < first + size for first, size, second, length in ranges)


def _index(node: Any) -> MetadataIndex:
    fields = _fields(node, "MetadataIndex")
    offset = fields.get("offset")
    if type(offset) not in (torch.Size, type(None)):
        raise damaged("a tensor's offset")
    return MetadataIndex(_text(fields.get("fqn")), offset)


def _stored(node: Any) -> _StorageInfo:
    fields = _fields(node, "_StorageInfo")
    name = _text(fields.get("relative_path"))
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise PickleError(f"expected the name of a file in the folder, but got {name[:100]!r}")
    if fields.get("transform_descriptors"):
        raise PickleError("expected files without compression and encryption, but got compressed or encrypted ones")
    return _StorageInfo(name, _count(fields.get("offset"), "an offset"), _count(fields.get("length"), "a length"))


def _check_storage(metadata: Metadata, folder: Path) -> None:
    """Raise unless each entry lies in a file of the folder, and no two entries share bytes."""
    needed: dict[MetadataIndex, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                count = math.prod(chunk.sizes)
                needed[MetadataIndex(name, chunk.offsets)] = count * entry.properties.dtype.itemsize
        else:
            needed[MetadataIndex(name)] = 1
    files: dict[str, list[tuple[int, int]]] = {}
    for index, size in needed.items():
        info = metadata.storage_data.get(index)
        if info is None or info.length < size:
            raise PickleError(f"it has no byte range for {index.fqn[:100]!r}, or one that is too short")
        files.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
    for name, ranges in files.items():
        path = folder / name
        if not path.exists():
            raise CheckpointError(f"its file {name} is missing")
        known = path.stat()
        ranges.sort()
        apart = all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
        if not stat.S_ISREG(known.st_mode) or ranges[-1][1] > known.st_size or not apart:
            raise PickleError(f"it does not match the file {name}, which has {known.st_size:,} bytes")
