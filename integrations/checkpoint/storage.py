"""The files of a checkpoint: JSON, safetensors shards with hashes, a manifest, and a reader that trusts none of them.

`pack` encodes nested values as JSON. Tensors are collected in a dict, and the JSON refers to them by name. A dict with
a single key that begins with ``$`` encodes what JSON cannot express, such as ``{"$tuple": [...]}``.

torch's planner determines which parts of which tensors a rank holds. Each rank writes its parts to its own files; the
first rank adds the JSON and the manifest. Loading copies the overlaps of the parts in the files with those in memory.
Readers check what a file claims against the sizes of the files before they allocate memory, so the size of the
checkpoint bounds the memory and time of a load.

torch's safetensors reader (`HuggingFaceStorageReader`) can read the model's files too: they have its
``DCP_SHARDING_INFO``. Its writer is not used, because it refuses tied and non-contiguous tensors, buffers entire files
in memory, and writes no hashes.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import atomic
from halfstep.integrations.checkpoint.atomic import MANIFEST, SHARDS, STATE, CheckpointError, explained, write_file

# What reading a corrupted or malicious file may raise.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, SafetensorError)


def _file_and_key(name: str) -> tuple[str, str]:
    """The prefix of the files that hold a tensor (model, optimizer or state), and its key there."""
    prefix, _, key = name.partition(".")
    return (prefix, key) if prefix in ("model", "optimizer") else ("state", name)


# ---------------------------------------------------------------------------------------------------------------- JSON

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
        return {"$tensor": _named(value, tensors, name)}
    if cls is np.ndarray or isinstance(value, np.generic):
        native = np.array(value, value.dtype.newbyteorder("="), order="C")  # torch refuses negative strides
        try:
            tensor = torch.from_numpy(native)
        except TypeError:
            raise CheckpointError(f"{name} has numpy dtype {value.dtype}: save its .tolist()") from None
        return {"$array" if cls is np.ndarray else "$scalar": _named(tensor, tensors, name)}
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


def _named(value: Any, tensors: dict[str, torch.Tensor] | None, name: str) -> str:
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


# ------------------------------------------------------------------------------------------------------------- writing


class Part(NamedTuple):
    """A part of the tensor `name`, or all of it."""

    name: str
    shape: Sequence[int]  # of the full tensor
    offsets: Sequence[int]
    data: torch.Tensor

    @property
    def sizes(self) -> torch.Size:
        return self.data.shape


def parts_of(tensors: dict[str, Any]) -> Iterator[Part]:
    """The parts of tensors that this rank holds, as views of the tensors."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors)
    for item in planner.create_local_plan().items:
        planned, data = item.tensor_data, planner.resolve_data(item)
        assert isinstance(data, torch.Tensor) and planned is not None
        yield Part(item.index.fqn, planned.size, planned.chunk.offsets, data.detach())


def parts_to_write(tensors: dict[str, torch.Tensor], rank: int = 0, members: Sequence[int] = (0,)) -> Iterator[Part]:
    """The parts of tensors that this rank writes.

    Ranks in `members` that hold copies of the same parts take turns in writing them, largest first, so that each writes
    about as many bytes. All ranks compute the same order without communication.
    """
    largest_first = sorted(tensors, key=lambda name: (-math.prod(tensors[name].size()), name))
    turn = {name: number for number, name in enumerate(largest_first)}
    for part in parts_of(tensors):
        holders = _holders(tensors[part.name], rank, members)
        if holders[turn[part.name] % len(holders)] == rank:
            yield part


def _holders(tensor: torch.Tensor, rank: int, members: Sequence[int]) -> Sequence[int]:
    """The `members` that hold the same part of a tensor as this rank."""
    if not isinstance(tensor, DTensor):
        return [rank] if isinstance(tensor, ShardedTensor) else members
    coordinate: Any = tensor.device_mesh.get_coordinate()
    along = zip(tensor.placements, coordinate, strict=True)
    copies = tensor.device_mesh.mesh[tuple(slice(None) if place.is_replicate() else at for place, at in along)]
    return sorted({*copies.flatten().tolist()} & {*members}) or [rank]


def write_shards(folder: Path, suffix: str, parts: Iterable[Part]) -> str:
    """Write this rank's parts. Returns its portion of the manifest as JSON."""
    if not folder.is_dir():
        raise CheckpointError(
            f"Expected a folder that all ranks share, but the rank of shard {suffix} does not see {folder}, which the "
            "first rank created"
        )
    tensors: dict[str, Any] = {}
    files: dict[str, dict[str, Part]] = {}
    for part in parts:
        entry = {"dtype": NAMES[part.data.dtype], "shape": list(part.shape), "parts": []}
        listed = tensors.setdefault(part.name, entry)["parts"]
        if part.data.numel():
            prefix, key = _file_and_key(part.name)
            # All parts of a tensor have the same key, so each goes into a file of its own.
            name = f"{prefix}-{suffix}{f'-{len(listed)}' if listed else ''}{SHARDS}"
            listed.append([name, list(part.offsets), list(part.sizes)])
            files.setdefault(name, {})[key] = part
    records = {name: write_file(folder / name, _bytes_of_file(files[name])) for name in files}
    return json.dumps({"files": records, "tensors": tensors})


def _bytes_of_file(parts: dict[str, Part]) -> Iterator[bytes | memoryview]:
    """A safetensors file, one tensor at a time, with the widest dtypes first so that all are aligned."""
    order = sorted(parts, key=lambda key: (-parts[key].data.itemsize, key))
    places = json.dumps({key: {"saved_offsets": list(parts[key].offsets)} for key in order})
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": places}}
    end = 0
    for key in order:
        data = parts[key].data
        begin, end = end, end + data.numel() * data.itemsize
        header[key] = {"dtype": NAMES[data.dtype], "shape": list(data.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in order:
        data = parts[key].data.cpu().resolve_conj().resolve_neg().contiguous()
        # A contiguous tensor of one element may have any stride, and view(uint8) requires 1.
        raw: Any = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
        yield memoryview(raw)


def write_manifest(folder: Path, content: dict[str, Any], tree: Any, shards: Iterable[str]) -> None:
    """Complete a checkpoint: write `tree` as JSON, and the manifest from what `write_shards` returned on each rank."""
    files = {STATE: write_file(folder / STATE, [json.dumps(tree).encode()])}
    tensors: dict[str, Any] = {}
    for share in map(json.loads, shards):
        files |= share["files"]
        for name, entry in share["tensors"].items():
            listed = tensors.setdefault(name, {**entry, "parts": {}})["parts"]
            listed.update((tuple(part[1]), part) for part in entry["parts"])
    for name, entry in tensors.items():
        entry["parts"] = list(entry["parts"].values())
        if problem := _problem_of_chunks(entry["shape"], [Chunk(*part) for part in entry["parts"]]):
            raise CheckpointError(f"the ranks that save have {name} with {problem}: save on all ranks that shard it")
    for name, record in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != record["bytes"]:
            raise CheckpointError(
                f"Expected a folder that all ranks share, but the first rank sees {size} of {record['bytes']} bytes of "
                f"{path}"
            )
    manifest = {**content, "files": dict(sorted(files.items())), "tensors": tensors}
    write_file(folder / MANIFEST, [atomic.sealed(manifest)])


# ------------------------------------------------------------------------------------------------------------- reading


class Chunk(NamedTuple):
    """A part of a tensor in a checkpoint. `source` is the name of a safetensors file, or a byte range of a DCP file."""

    source: Any
    offsets: Sequence[int]
    sizes: Sequence[int]


class Stored(NamedTuple):
    """A tensor in a checkpoint."""

    dtype: torch.dtype
    size: torch.Size
    chunks: list[Chunk]


class Reader:
    """Reads a halfstep checkpoint, whose files must exist with the right size, and be able to hold the tensors that the
    manifest lists. Only `verify` checks their bytes.
    """

    tree: Any  # everything that is not a tensor, as JSON
    sources = f"{MANIFEST} or {STATE}"  # where `tree` and `tensors` are read from, for errors

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self._opened: dict[str, Any] = {}
        try:
            self._list()
        except CheckpointError:
            raise
        except DAMAGE as error:
            raise CheckpointError(f"its {self.sources} is damaged: {type(error).__name__}: {error}") from error

    def _list(self) -> None:
        manifest = atomic.verify(self.path, shares=0)
        files = manifest["files"]
        for name, entry in manifest["tensors"].items():
            chunks = [Chunk(file, torch.Size(offsets), torch.Size(sizes)) for file, offsets, sizes in entry["parts"]]
            if unlisted := {chunk.source for chunk in chunks} - files.keys():
                raise CheckpointError(f"its tensor {name[:100]!r} is in {min(unlisted)!r}, which is not listed")
            self._add(name, Stored(DTYPES[entry["dtype"]], torch.Size(entry["shape"]), chunks))
        self._check_size(sum(record["bytes"] for record in files.values()))
        if STATE not in files:
            raise CheckpointError(f"its {MANIFEST} does not list {STATE}")
        self.tree = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        if not isinstance(self.tree, dict):
            raise CheckpointError(f"its {STATE} does not hold a dict")

    def _add(self, name: str, stored: Stored) -> None:
        """Register a tensor. Raises unless its parts lie within it, do not overlap, and cover it."""
        if problem := _problem_of_chunks(stored.size, stored.chunks):
            raise CheckpointError(f"its tensor {name[:100]!r} of shape {list(stored.size)[:16]} has {problem}")
        self.tensors[name] = stored

    def _check_size(self, available: int) -> None:
        required = sum(math.prod(stored.size) * stored.dtype.itemsize for stored in self.tensors.values())
        if required > available:
            raise CheckpointError(f"its tensors need {required:,} bytes, and its files have {available:,}")

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless the bytes of every `shares`-th file, starting at `share`, match their hash."""
        atomic.verify(self.path, share, shares)

    def _read(self, name: str, chunk: Chunk) -> Any:
        """A part of a tensor as stored in its file, which is memory-mapped."""
        if chunk.source not in self._opened:
            self._opened[chunk.source] = safe_open(self.path / chunk.source, framework="pt")
        return self._opened[chunk.source].get_tensor(_file_and_key(name)[1])

    def _part(self, name: str, chunk: Chunk) -> torch.Tensor:
        """A part of a tensor, after checking that it has the listed size and dtype."""
        dtype = self.tensors[name].dtype
        with explained(f"its tensor {name[:100]!r} cannot be read", errors=DAMAGE):
            values = self._read(name, chunk)
        if type(values) is not torch.Tensor or (values.shape, values.dtype) != (chunk.sizes, dtype):
            actual = f"{tuple(values.shape)} {values.dtype}" if isinstance(values, torch.Tensor) else "no tensor"
            raise CheckpointError(
                f"its tensor {name[:100]!r} is {actual} in its file and {tuple(chunk.sizes)} {dtype} in the list"
            )
        return values

    def empty(self, name: str, device: str = "meta") -> torch.Tensor:
        """An empty tensor with the full shape, by default on the meta device."""
        if name not in self.tensors:
            raise CheckpointError(f"it has no tensor {name[:200]}")
        return torch.empty(self.tensors[name].size, dtype=self.tensors[name].dtype, device=device)

    def tensor(self, name: str) -> torch.Tensor:
        """A full tensor on the CPU, memory-mapped if it has a single part."""
        if name in self.tensors and len(self.tensors[name].chunks) == 1:
            return self._part(name, self.tensors[name].chunks[0])
        self.read_into(whole := {name: self.empty(name, "cpu")})
        return whole[name]

    def copy(self, name: str) -> torch.Tensor:
        return self.tensor(name).clone()

    def read_into(self, targets: dict[str, Any]) -> None:
        """Read tensors by name into `targets` of the same full shape; each rank reads the parts that it holds."""
        for target in parts_of(targets):
            for chunk in self.tensors[target.name].chunks:
                if _overlap(target, chunk):
                    interrupts.poll()
                    ahead = [b - a for a, b in zip(target.offsets, chunk.offsets, strict=True)]
                    here = tuple(slice(max(d, 0), d + size) for d, size in zip(ahead, chunk.sizes, strict=True))
                    there = tuple(slice(max(-d, 0), size - d) for d, size in zip(ahead, target.sizes, strict=True))
                    target.data[here].copy_(self._part(target.name, chunk)[there])


def _overlap(first: Part | Chunk, second: Chunk) -> bool:
    spans = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def _problem_of_chunks(size: Sequence[int], chunks: list[Chunk]) -> str | None:
    """Why parts do not make up a tensor of this size; None if they do."""
    for chunk in (*chunks, Chunk(None, [0] * len(size), size)):
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            min(begin, length) < 0 or begin + length > limit
            for begin, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=False)
        ):
            return "a part that extends beyond it"
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return "parts that do not cover it exactly"
    if len(chunks) < 2:
        return None
    # Sweep along the dimension with the most cuts, comparing each part with those that have not ended before it.
    along = max(range(len(size)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        active = [before for before in active if before.offsets[along] + before.sizes[along] > chunk.offsets[along]]
        if any(_overlap(before, chunk) for before in active):
            return "parts that overlap"
        active.append(chunk)
    return None
