"""The files of a checkpoint: safetensors shards with hashes, a manifest, and a reader that trusts neither.

torch's planner determines which parts of which tensors a rank holds. Each rank writes its parts to its own files; the
first rank adds the JSON and the manifest. Loading copies the overlaps of the parts in the files with those in memory.
Readers check what a file claims against the sizes of the files before they allocate memory, so the size of the
checkpoint bounds the memory and time of a load.

torch's safetensors reader (`HuggingFaceStorageReader`) can read the model's files too: they have its
``DCP_SHARDING_INFO``. Its writer is not used, because it refuses tied and non-contiguous tensors, buffers entire files
in memory, and writes no hashes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import atomic
from halfstep.integrations.checkpoint.atomic import MANIFEST, SHARDS, STATE, CheckpointError, write_file
from halfstep.integrations.checkpoint.tree import DTYPES, NAMES

# What reading a corrupted or malicious file may raise.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, SafetensorError)


def _file_and_key(name: str) -> tuple[str, str]:
    """The prefix of the files that hold a tensor (model, optimizer or state), and its key there."""
    prefix, _, key = name.partition(".")
    return (prefix, key) if prefix in ("model", "optimizer") else ("state", name)


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
    """Reads a halfstep checkpoint.

    Raises:
        CheckpointError: files are missing or have the wrong size, or cannot hold the tensors that the manifest lists.
            Only `verify` checks their bytes.
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
        try:
            values = self._read(name, chunk)
        except DAMAGE as error:
            raise CheckpointError(f"its tensor {name[:100]!r} cannot be read: {error}") from error
        if type(values) is not torch.Tensor or (values.shape, values.dtype) != (chunk.sizes, dtype):
            actual = f"{tuple(values.shape)} {values.dtype}" if isinstance(values, torch.Tensor) else "no tensor"
            raise CheckpointError(
                f"its tensor {name[:100]!r} is {actual} in its file and {tuple(chunk.sizes)} {dtype} in the list of "
                "tensors"
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
