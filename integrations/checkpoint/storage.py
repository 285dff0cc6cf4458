"""Storage for torch.distributed.checkpoint: safetensors shards, with hashes and a manifest.

torch plans which rank writes which part of which tensor, and sends plans, results and errors between the ranks. The
`Writer` writes each rank's parts in files of their own; after all ranks have written, the first rank adds the JSON and
makes the folder appear by one rename. Readers check everything that a file says against the files that are there before
memory is allocated, so that memory and time of a load are bounded by the size of the checkpoint.

torch's own reader of safetensors (`HuggingFaceStorageReader`) reads the model's files too: they have its
``DCP_SHARDING_INFO``. Its writer is not used because it refuses tied and non-contiguous tensors, holds whole files in
memory, and writes no hashes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import atomic
from halfstep.integrations.checkpoint.atomic import MANIFEST, SHARDS, STATE, CheckpointError, Hashed, error_text
from halfstep.integrations.checkpoint.tree import DTYPES, NAMES

T = TypeVar("T")
# What reading a damaged or hostile file may raise.
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, SafetensorError)


def _file_and_key(name: str) -> tuple[str, str]:
    """The files that a tensor is in, model, optimizer or state, and its name there."""
    prefix, _, key = name.partition(".")
    return (prefix, key) if prefix in ("model", "optimizer") else ("state", name)


def _reported(method: Callable[..., T]) -> Callable[..., T]:
    """Raise errors as text. torch pickles them, and ranks would wait forever for one that cannot be unpickled."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupt = error
            raise CheckpointError(error_text(error)) from error

    return call


class Writer(dcp.StorageWriter):
    """Writes the shards of a checkpoint: a `StorageWriter` for `torch.distributed.checkpoint.save`.

    Args:
        folder: the unfinished folder, which the first rank has created.
        rank, size: the number of this rank, and of all.
        content: `finish` adds ``files`` and ``tensors``, and writes it as the manifest.
        tree: everything that is not a tensor, as JSON; that of the first rank is written.
    """

    def __init__(self, folder: Path, rank: int, size: int, content: dict[str, Any], tree: Any) -> None:
        self.folder, self.suffix, self.content, self.tree = folder, f"{rank + 1:05}-of-{size:05}", content, tree
        self.interrupt: BaseException | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @_reported
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"Expected a folder that all ranks share, but the rank of shard {self.suffix} does not see "
                f"{self.folder}, which the first rank created"
            )
        files: dict[str, list[WriteItem]] = {}
        shards: Counter[str] = Counter()
        for item in plan.items:
            assert item.tensor_data is not None
            if math.prod(item.tensor_data.chunk.sizes):  # empty shards have no bytes
                name = item.index.fqn
                # Further shards of a tensor have the same name, so they are in another file.
                suffix = f"{self.suffix}-{shards[name]}" if shards[name] else self.suffix
                files.setdefault(f"{_file_and_key(name)[0]}-{suffix}{SHARDS}", []).append(item)
                shards[name] += 1
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [result for name, items in files.items() for result in self._write(self.folder / name, items, planner)]
        )
        return future

    def _write(self, path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write one file, a tensor at a time, the dtypes with the most bytes first, so that all are aligned."""
        items = sorted(items, key=lambda item: (-item.tensor_data.properties.dtype.itemsize, item.index.fqn))  # type: ignore[union-attr]
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0"}}
        offsets, end = {}, 0
        for item in items:
            assert item.tensor_data is not None
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            key = _file_and_key(item.index.fqn)[1]
            begin, end = end, end + math.prod(chunk.sizes) * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
            offsets[key] = {"saved_offsets": list(chunk.offsets)}
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(offsets)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with Hashed(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for item in items:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor) and item.tensor_data is not None
                if data.shape != item.tensor_data.chunk.sizes:
                    raise CheckpointError(f"{item.index.fqn} is {tuple(data.shape)} in memory, and not as planned")
                data = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
                # One element may have any stride, which a view as bytes refuses.
                raw: Any = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
                file.write(memoryview(raw))
            record = path.name, file.finish()
        return [WriteResult(item.index, 0, (*record, item.tensor_data)) for item in items]

    @_reported
    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Any] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = {"dtype": NAMES[tensor.properties.dtype], "shape": list(tensor.size), "parts": []}
        with Hashed(self.folder / STATE) as file:
            file.write(json.dumps(self.tree).encode())
            files = {STATE: file.finish()}
        for result in itertools.chain.from_iterable(results):
            name, files[name], data = result.storage_data
            tensors[result.index.fqn]["parts"].append([name, list(data.chunk.offsets), list(data.chunk.sizes)])
        for name, record in files.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else 0
            if size != record["bytes"]:
                raise CheckpointError(
                    f"Expected a folder that all ranks share, but the first rank sees {size} of {record['bytes']} "
                    f"bytes of {path}"
                )
        with Hashed(self.folder / MANIFEST) as manifest:
            manifest.write(atomic.sealed({**self.content, "files": dict(sorted(files.items())), "tensors": tensors}))
            manifest.finish()


class Reader:
    """Reads a checkpoint of halfstep, by the plans of torch.distributed.checkpoint.

    Raises:
        CheckpointError: files are missing or have another length, or the manifest describes other tensors than they can
            hold. `verify` compares their bytes.
    """

    tree: Any  # everything that is not a tensor, as JSON
    metadata: dcp_metadata.Metadata
    sources = f"{MANIFEST} or {STATE}"  # the files that they are read from, for errors

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chunks: dict[MetadataIndex, tuple[torch.Size, Any]] = {}  # size and file of each part of a tensor
        self._opened: dict[str, Any] = {}
        try:
            self._read_metadata()
        except CheckpointError:
            raise
        except DAMAGE as error:
            raise CheckpointError(f"its {self.sources} is damaged: {type(error).__name__}: {error}") from error

    def _read_metadata(self) -> None:
        manifest = atomic.verify(self.path, shares=0)
        files, tensors = manifest["files"], {}
        for name, entry in manifest["tensors"].items():
            size, chunks = torch.Size(entry["shape"]), []
            for file, offsets, sizes in entry["parts"]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                if file not in files:
                    raise CheckpointError(f"its tensor {name[:100]!r} is in {file!r}, which is not listed")
                self._chunks[MetadataIndex(name, chunk.offsets)] = chunk.sizes, file
                chunks.append(chunk)
            tensors[name] = TensorStorageMetadata(
                dcp_metadata.TensorProperties(dtype=DTYPES[entry["dtype"]]), size, chunks
            )
        self._set_metadata(tensors, sum(record["bytes"] for record in files.values()))
        if STATE not in files:
            raise CheckpointError(f"its {MANIFEST} does not list {STATE}")
        self.tree = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        if not isinstance(self.tree, dict):
            raise CheckpointError(f"its {STATE} does not hold a dict")

    def _set_metadata(self, tensors: dict[str, Any], available: int) -> None:
        """Raise unless the parts of each tensor lie within it, do not overlap and cover it, and all fit the files."""
        required = 0
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorStorageMetadata):
                required += math.prod(tensor.size) * tensor.properties.dtype.itemsize
                if problem := _problem_of_chunks(tensor.size, tensor.chunks):
                    shape = list(tensor.size)[:16]
                    raise CheckpointError(f"its tensor {name[:100]!r} of shape {shape} has {problem}")
        if required > available:
            raise CheckpointError(f"its tensors need {required:,} bytes, and its files have {available:,}")
        self.metadata = dcp_metadata.Metadata(tensors)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise unless the bytes of every `shares`-th file, beginning with `share`, have their hash."""
        atomic.verify(self.path, share, shares)

    def _read(self, index: MetadataIndex) -> Any:
        """One part of a tensor as it is in a file, which is mapped into memory."""
        name, key = self._chunks[index][1], _file_and_key(index.fqn)[1]
        if name not in self._opened:
            self._opened[name] = safe_open(self.path / name, framework="pt")
        return self._opened[name].get_tensor(key)

    def listed(self, name: str) -> TensorStorageMetadata:
        """The size, dtype and parts of a tensor."""
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"it has no tensor {name[:200]}")
        return entry

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, mapped into memory if it has one part."""
        entry = self.listed(name)
        if len(entry.chunks) == 1:
            return self._chunk(MetadataIndex(name, entry.chunks[0].offsets))
        self.read_into(whole := {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")})
        return whole[name]

    def copy(self, name: str) -> torch.Tensor:
        return self.tensor(name).clone()

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        """One part of a tensor, of the size and dtype that are listed."""
        size, dtype = self._chunks[index][0], self.listed(index.fqn).properties.dtype
        try:
            values = self._read(index)
        except DAMAGE as error:
            raise CheckpointError(f"its tensor {index.fqn[:100]!r} cannot be read: {error}") from error
        if type(values) is not torch.Tensor or (values.shape, values.dtype) != (size, dtype):
            actual = f"{tuple(values.shape)} {values.dtype}" if isinstance(values, torch.Tensor) else "no tensor"
            raise CheckpointError(
                f"its tensor {index.fqn[:100]!r} is {actual} in its file and {tuple(size)} {dtype} in the list of "
                "tensors"
            )
        return values

    def read_into(self, targets: dict[str, Any]) -> None:
        """Read tensors by name into others of the same size, of which each rank has its parts."""
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, self.metadata, is_coordinator=True)
        items = planner.create_local_plan().items
        items.sort(key=lambda item: (item.storage_index.fqn, item.storage_index.offset or ()))
        for index, reads in itertools.groupby(items, key=lambda item: item.storage_index):
            interrupts.poll()
            chunk = self._chunk(index)
            for item in reads:
                spans = zip(item.storage_offsets, item.lengths, strict=True)
                values = chunk[tuple(slice(begin, begin + length) for begin, length in spans)]
                planner.resolve_tensor(item).detach().copy_(values)


def _problem_of_chunks(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> str | None:
    """What prevents parts from making up a tensor of this size; None if they do."""
    for chunk in (*chunks, ChunkStorageMetadata(torch.Size([0] * len(size)), size)):
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
    # Sweep along the dimension with the most cuts; each part is compared with those that have not ended before it.
    along = max(range(len(size)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        active = [before for before in active if before.offsets[along] + before.sizes[along] > chunk.offsets[along]]
        for before in active:
            spans = zip(before.offsets, before.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans):
                return "parts that overlap"
        active.append(chunk)
    return None
