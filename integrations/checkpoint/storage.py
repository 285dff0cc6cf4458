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

import dataclasses
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import folder
from halfstep.integrations.checkpoint.atomic import UnfinishedSave
from halfstep.integrations.checkpoint.folder import MANIFEST, SHARDS, STATE, CheckpointError, Hashed
from halfstep.integrations.checkpoint.ranks import error_text
from halfstep.integrations.checkpoint.tree import DTYPES, NAMES

T = TypeVar("T")


def _file_and_key(name: str) -> tuple[str, str]:
    """The kind of file that a tensor is in, and its name there."""
    kind, _, key = name.partition(".")
    return (kind, key) if kind in ("model", "optimizer") else ("state", name)


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


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
    """Writes a checkpoint: a `StorageWriter` for `torch.distributed.checkpoint.save`.

    Args:
        path: the folder that appears when the checkpoint is complete.
        step: number of completed steps.
        tree: everything that is not a tensor, as JSON; that of the first rank is written.
        keep: number of checkpoints up to this step that stay in the parent folder; None for all.
    """

    def __init__(self, path: Path, step: int, tree: Any, keep: int | None) -> None:
        self.path, self.step, self.tree, self.keep = path, step, tree, keep
        self.interrupt: BaseException | None = None
        self._unfinished: UnfinishedSave | None = None  # on the first rank

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    @_reported
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._unfinished = UnfinishedSave(self.path.parent)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @_reported
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self._unfinished is not None
        where = str(self._unfinished.path)
        return [
            dataclasses.replace(plan, storage_data=(where, f"{number:05}-of-{len(plans):05}"))
            for number, plan in enumerate(plans, 1)
        ]

    @_reported
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        where, ranks = Path(plan.storage_data[0]), plan.storage_data[1]
        if not where.is_dir():
            raise CheckpointError(
                f"Expected a folder that all ranks share, but the rank of shard {ranks} does not see {where}, which "
                "the first rank created"
            )
        files: dict[str, list[WriteItem]] = {}
        parts: Counter[str] = Counter()
        for item in plan.items:
            assert item.tensor_data is not None
            if math.prod(item.tensor_data.chunk.sizes):  # empty parts have no bytes
                name = item.index.fqn
                more = f"-{parts[name]}" if parts[name] else ""  # further parts of a tensor, which have the same name
                files.setdefault(f"{_file_and_key(name)[0]}-{ranks}{more}{SHARDS}", []).append(item)
                parts[name] += 1
        return _done([one for name, items in files.items() for one in self._write(where / name, items, planner)])

    def _write(self, path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        """Write one file, a tensor at a time, the dtypes with the most bytes first, so that all are aligned."""
        items = sorted(items, key=lambda item: (-item.tensor_data.properties.dtype.itemsize, item.index.fqn))  # type: ignore[union-attr]
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0"}}
        offsets, end = {}, 0
        for item in items:
            part, key = item.tensor_data, _file_and_key(item.index.fqn)[1]
            assert part is not None
            begin, end = end, end + math.prod(part.chunk.sizes) * part.properties.dtype.itemsize
            header[key] = {
                "dtype": NAMES[part.properties.dtype],
                "shape": list(part.chunk.sizes),
                "data_offsets": [begin, end],
            }
            offsets[key] = {"saved_offsets": list(part.chunk.offsets)}
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
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._unfinished is not None
        where = self._unfinished.path
        tensors: dict[str, Any] = {}
        for name, known in metadata.state_dict_metadata.items():
            assert isinstance(known, TensorStorageMetadata)
            tensors[name] = {"dtype": NAMES[known.properties.dtype], "shape": list(known.size), "parts": []}
        with Hashed(where / STATE) as file:
            file.write(json.dumps(self.tree).encode())
            files = {STATE: file.finish()}
        for result in itertools.chain.from_iterable(results):
            name, files[name], part = result.storage_data
            tensors[result.index.fqn]["parts"].append([name, list(part.chunk.offsets), list(part.chunk.sizes)])
        for name, record in files.items():
            there = (where / name).stat().st_size if (where / name).is_file() else 0
            if there != record["bytes"]:
                raise CheckpointError(
                    f"Expected a folder that all ranks share, but the first rank sees {there} of {record['bytes']} "
                    f"bytes of {where / name}"
                )
        content = {"format": folder.FORMAT, "step": self.step, "world_size": len(results)}
        with Hashed(where / MANIFEST) as file:
            file.write(folder.sealed({**content, "files": dict(sorted(files.items())), "tensors": tensors}))
            file.finish()
        self._unfinished.put_in_place(self.path)
        if self.keep is not None:
            folder.prune(self.path.parent, self.step, self.keep)

    def end(self) -> None:
        """Remove what a save that failed has written."""
        if self._unfinished is not None:
            self._unfinished.end()
            self._unfinished = None


class Reader:
    """Reads a checkpoint of halfstep, by the plans of torch.distributed.checkpoint.

    Raises:
        CheckpointError: files are missing or have another length, or the manifest describes other tensors than they can
            hold. `verify` compares their bytes.
    """

    tree: Any  # everything that is not a tensor, as JSON
    metadata: Metadata

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beside: dict[str, torch.Tensor] = {}  # tensors of the tree that `metadata` does not list
        self._opened: dict[str, Any] = {}
        if (said := folder.complaint(path, parts=0)) is not None:
            raise CheckpointError(said)
        try:
            self._read_manifest(folder.read_manifest(path))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"its {MANIFEST} or {STATE} is damaged: {type(error).__name__}: {error}") from error

    def _read_manifest(self, content: dict[str, Any]) -> None:
        self._places: dict[MetadataIndex, tuple[torch.Size, Any]] = {}  # size and file of each part
        known: dict[str, Any] = {}
        for name, one in content["tensors"].items():
            size, chunks = torch.Size(one["shape"]), []
            for file, offsets, sizes in one["parts"]:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                if file not in content["files"]:
                    raise CheckpointError(f"its tensor {name[:100]!r} is in {file!r}, which is not listed")
                self._places[MetadataIndex(name, chunk.offsets)] = chunk.sizes, file
                chunks.append(chunk)
            known[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[one["dtype"]]), size, chunks)
        check_parts(known, sum(record["bytes"] for record in content["files"].values()))
        self.metadata = Metadata(known)
        if STATE not in content["files"]:
            raise CheckpointError(f"its {MANIFEST} does not list {STATE}")
        self.tree = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        if not isinstance(self.tree, dict):
            raise CheckpointError(f"its {STATE} does not hold a dict")

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare the bytes of every `parts`-th file, beginning with `part`, with their hash.

        Raises:
            CheckpointError: they differ.
        """
        if (said := folder.complaint(self.path, part, parts)) is not None:
            raise CheckpointError(said)

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """One part of a tensor as it is in a file, which is mapped into memory."""
        name, key = self._places[index][1], _file_and_key(index.fqn)[1]
        if name not in self._opened:
            self._opened[name] = safe_open(self.path / name, framework="pt")
        return self._opened[name].get_tensor(key)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, mapped into memory if it has one part."""
        known = self.metadata.state_dict_metadata[name]
        assert isinstance(known, TensorStorageMetadata)
        if len(known.chunks) == 1:
            return self._checked(MetadataIndex(name, known.chunks[0].offsets))
        whole = torch.empty(known.size, dtype=known.properties.dtype, device="cpu")
        for chunk in known.chunks:
            part = self._checked(MetadataIndex(name, chunk.offsets))
            _narrowed(whole, chunk.offsets, chunk.sizes).copy_(part)
        return whole

    def _checked(self, index: MetadataIndex) -> torch.Tensor:
        known = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(known, TensorStorageMetadata)
        size, _ = self._places[index]
        try:
            part = self.part(index)
        except (SafetensorError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"its tensor {index.fqn[:100]!r} cannot be read: {error}") from error
        if type(part) is not torch.Tensor or (part.shape, part.dtype) != (size, known.properties.dtype):
            what = f"{tuple(part.shape)} {part.dtype}" if isinstance(part, torch.Tensor) else "no tensor"
            raise CheckpointError(
                f"its tensor {index.fqn[:100]!r} is {what} in its file and {tuple(size)} {known.properties.dtype} in "
                "the list of tensors"
            )
        return part

    def read_into(self, targets: dict[str, Any]) -> None:
        """Read tensors by name into others of the same size, of which each rank has its parts.

        Raises:
            CheckpointError: a tensor cannot be read, or is not as listed.
        """
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, self.metadata, is_coordinator=True)
        items = planner.create_local_plan().items
        items.sort(key=lambda item: (item.storage_index.fqn, item.storage_index.offset or ()))
        for index, same in itertools.groupby(items, key=lambda item: item.storage_index):
            interrupts.poll()
            part = self._checked(index)
            for item in same:
                values = _narrowed(part, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(values)


def _narrowed(tensor: torch.Tensor, offsets: Any, sizes: Any) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def check_parts(tensors: dict[str, Any], available: int) -> None:
    """Raise unless each tensor's parts lie within it, do not overlap and cover it, and all fit `available` bytes.

    Raises:
        CheckpointError: they do not.
    """
    needed = 0
    for name, known in tensors.items():
        if not isinstance(known, TensorStorageMetadata):
            continue
        size, chunks = known.size, [chunk for chunk in known.chunks if math.prod(chunk.sizes)]
        needed += math.prod(size) * known.properties.dtype.itemsize
        where = f"its tensor {name[:100]!r} of shape {list(size)[:16]}"
        for chunk in (*known.chunks, ChunkStorageMetadata(torch.Size([0] * len(size)), size)):
            ends = list(zip(chunk.offsets, chunk.sizes, size, strict=False))
            same = len(chunk.offsets) == len(chunk.sizes) == len(size)
            if not same or any(min(at, long) < 0 or at + long > all_ for at, long, all_ in ends):
                raise CheckpointError(f"{where} has a part that extends beyond it")
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise CheckpointError(f"{where} has parts that do not cover it exactly")
        if len(chunks) > 1 and _overlap(chunks, len(size)):
            raise CheckpointError(f"{where} has parts that overlap")
    if needed > available:
        raise CheckpointError(f"its tensors need {needed:,} bytes, and its files have {available:,}")


def _overlap(chunks: list[ChunkStorageMetadata], dims: int) -> bool:
    """Sweep along the dimension with the most cuts; each part is compared with the parts that have not ended yet."""
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    open_: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        open_ = [one for one in open_ if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        for one in open_:
            spans = zip(one.offsets, one.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(first < second + length and second < first + size for first, size, second, length in spans):
                return True
        open_.append(chunk)
    return False
