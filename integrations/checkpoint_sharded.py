"""Checkpoints whose shards all ranks write and read in parallel, with torch.distributed.checkpoint.

**Files.** A checkpoint is a folder as `torch.distributed.checkpoint.save` writes it for
``{"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}``, with two more
files: ``halfstep.pt`` (the scaler and other state of the run) and ``manifest.json`` (size and SHA-256 of every file,
computed while it was written). torch can read these folders without halfstep, and `read` can read folders that torch
wrote without halfstep.

**Independence of the topology.** Tensors are identified by the name of the parameter and the position in the whole
parameter, so each rank of any later topology reads its own shards. Masters and moments are saved in fp32, whatever
their layout in memory, or as they are held (optim/held.py), and are read into new tensors of the dtype in the file,
never through the parameter's dtype.

**Problems of torch.distributed.checkpoint** that this file avoids: its errors are not subclasses of `Exception`; it
reads objects with pickle, which runs code; it silently omits entries that are missing in the optimizer's template; it
silently rounds tensors to another dtype; collectives of a background thread mix with those of training if they use the
same group.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.futures import Future as TorchFuture

from halfstep.integrations import archive, checkpoint_metadata, interrupts, unfinished_saves
from halfstep.integrations import checkpoint_files as files
from halfstep.integrations.archive import ArchiveError
from halfstep.integrations.checkpoint_files import CheckpointError
from halfstep.integrations.checkpoint_metadata import METADATA
from halfstep.integrations.optim.checkpoints import CanonicalState, saving
from halfstep.integrations.optim.held import HELD, empty_entry, shards_blocks
from halfstep.integrations.optim.state import CODES, SCALES
from halfstep.integrations.ranks import Ranks
from halfstep.integrations.rollback import Rollback
from halfstep.numerics.scaling.topology import local

BESIDE = "halfstep.pt"
STATE = ("optimizer", "state")
PARAM_GROUPS = ("optimizer", "param_groups")

Key = tuple[Any, ...]


@contextmanager
def _quiet() -> Any:
    """Suppress torch's warnings that FSDP1 is deprecated, and that torch.distributed is not initialized."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# ------------------------------------------------------------------------------------------------------------ saving


class _HashingFiles(FileSystem):
    """A file system that computes size and hash of each file while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        with Path(path).open(mode) as file:
            if "w" not in mode:
                yield file
                return
            hashed = files.Hashed(file)
            yield hashed
            self.records[Path(path).name] = hashed.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Writes objects with `archive`, which refuses those that could not be read again."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        written = io.BytesIO()
        archive.write(written, object, write_item.index.fqn)
        return written


class _Writer(dcp.FileSystemWriter):
    """Writes each rank's shards to one file, without torch.save, which an interrupt would make abort the process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self.fs: _HashingFiles = _HashingFiles()

    def write_data(self, plan: Any, planner: Any) -> TorchFuture[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{files.SHARDS}"
        results = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            for item in plan.items:
                begin, data = stream.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getvalue())
                else:
                    data = data.detach().cpu()
                    # A view is copied, so that the whole storage is not written.
                    archive.write(stream, data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), "")
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            stream.flush()
            os.fsync(stream.fileno())
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(results)
        return written


class PendingSave:
    """A checkpoint that is being written in the background."""

    def __init__(self, future: Future[Path], path: Path) -> None:
        self._future, self.path = future, path
        self._reported = False

    def done(self) -> bool:
        """Whether writing has ended, with or without an error."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on disk on all ranks, and return its path.

        Raises:
            CheckpointError: the checkpoint could not be written. Earlier checkpoints are unchanged.
            TimeoutError: writing took longer than `timeout` seconds.
        """
        try:
            path = self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:  # not the same class as TimeoutError before Python 3.11
            raise TimeoutError(*error.args) from None
        finally:
            self._reported = self._future.done()
        return path


_writer = ThreadPoolExecutor(1, thread_name_prefix="halfstep-checkpoint")
_pending: list[PendingSave] = []


def finish_pending() -> None:
    """Wait for a save in the background, and raise its error unless `result` has already raised it."""
    while _pending:
        pending = _pending[0]
        try:
            if not pending._reported:
                pending.result()
        finally:
            if pending.done():
                _pending.remove(pending)


def _is_flattened(model: torch.nn.Module) -> bool:
    """Whether FSDP1 has flattened parameters of a model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, held: bool = True) -> dict[str, Any]:
    """The state that torch.distributed.checkpoint writes, the optimizer's as held or canonical. Collective in FSDP1."""
    form: Literal["held", "canonical"] = "held" if held else "canonical"
    with _quiet(), saving(optimizer, form):
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    held: bool,
    beside: dict[str, Any],
    keep: int,
    asynchronous: bool,
    process_group: Any,
) -> Path | PendingSave:
    """Write the checkpoint of `step`, all ranks of `process_group` together; see `checkpoint.save`."""
    finish_pending()
    with interrupts.held():
        ranks = Ranks(process_group)
        state = state_of(model, optimizer, held)
        path = folder / files.name_of(step)
        kept = io.BytesIO()
        try:
            ranks.together(lambda: _serialize_beside(state, beside, kept))
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched"
            ) from error
        if not asynchronous:
            return _write(path, step, state, kept, keep, ranks)
        staged = _copied(state)
        pending = PendingSave(_writer.submit(_write, path, step, staged, kept, keep, ranks), path)
        _pending.append(pending)
        return pending


def _serialize_beside(state: dict[str, Any], beside: dict[str, Any], kept: io.BytesIO) -> None:
    """Serialize the state other than shards, which may change while a background thread writes.

    Raises:
        ArchiveError: an object could not be read again.
        CheckpointError: a tensor of `state` could not be read again.
    """
    objects = [(name, value) for name, value in _leaves(state, "") if not isinstance(value, torch.Tensor)]
    for name, value in (*objects, *beside.items()):
        archive.writable(value, name)
    archive.write(kept, beside, "")


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values in a nested state, with their names."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list):
        for place, value in enumerate(state):
            yield from _leaves(value, f"{name}[{place}]")
    else:
        yield name, state


def _copied(value: Any) -> Any:
    """A copy of a nested state on the CPU, which later steps do not change."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    if isinstance(value, ShardedTensor):  # of FSDP1; torch's own staging cannot copy it
        shards = [Shard(_copied(shard.tensor), _metadata_on_cpu(shard.metadata)) for shard in value.local_shards()]
        known = value.metadata()
        everywhere = [_metadata_on_cpu(shard) for shard in known.shards_metadata]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards,
            sharded_tensor_metadata=dataclasses.replace(known, shards_metadata=everywhere),
            process_group=value._process_group,
        )
    if isinstance(value, DTensor):  # from_local would move the copy to the mesh's device
        return DTensor(_copied(value.to_local()), value._spec, requires_grad=False)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _metadata_on_cpu(known: ShardMetadata) -> ShardMetadata:
    rank = 0 if known.placement is None else known.placement.rank()
    return ShardMetadata(known.shard_offsets, known.shard_sizes, f"rank:{rank}/cpu")


def _write(path: Path, step: int, state: dict[str, Any], beside: io.BytesIO, keep: int, ranks: Ranks) -> Path:
    own: list[unfinished_saves.UnfinishedSave] = []  # on the first rank, which made it
    try:
        temporary = Path(ranks.first(lambda: _begin(path, own)))
        recorded = ranks.together(lambda: _write_shards(temporary, state, beside, ranks))
        ranks.first(lambda: _complete(own[0], path, step, files.merged(recorded), keep, ranks))
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched; free space or fix "
            "permissions, and restart ranks that were killed"
        ) from error
    finally:
        for one in own:
            one.end()
    return path


def _begin(path: Path, own: list[unfinished_saves.UnfinishedSave]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished_saves.clear(path.parent)
    own.append(unfinished_saves.UnfinishedSave(path.parent))
    own[0].path.mkdir()
    return str(own[0].path)


def _write_shards(
    temporary: Path, state: dict[str, Any], beside: io.BytesIO, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Write this rank's shards. Returns size and hash of the files that it wrote, by name."""
    if not temporary.is_dir():
        raise CheckpointError(
            f"Expected a folder that all ranks share, but rank {ranks.rank} does not see {temporary}, which rank 0 "
            "created"
        )
    writer = _Writer(temporary)
    with torch.no_grad(), _quiet() if ranks.group is None else nullcontext():
        dcp.save(
            state,
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    if ranks.rank == 0:
        with writer.fs.create_stream(temporary / BESIDE, "wb") as file:
            file.write(beside.getvalue())
            file.flush()
            os.fsync(file.fileno())
    return writer.fs.records


def _complete(
    own: unfinished_saves.UnfinishedSave,
    path: Path,
    step: int,
    recorded: dict[str, dict[str, Any]],
    keep: int,
    ranks: Ranks,
) -> None:
    """Check that everything has arrived, give the folder its name, and only then remove older ones."""
    temporary = own.path
    for name, record in recorded.items():
        there = (temporary / name).stat().st_size if (temporary / name).is_file() else 0
        if there != record["bytes"]:
            raise CheckpointError(
                f"Expected a folder that all ranks share, but rank 0 sees {there} of {record['bytes']} bytes of "
                f"{temporary / name}"
            )
    files.write_manifest(temporary, step, ranks.size, recorded)
    own.put_in_place(path)
    files.prune(path.parent, step, keep)


# ----------------------------------------------------------------------------------------------------------- loading


class _Reader:
    """Reads tensors and objects from a folder of shards, according to the plans of torch.distributed.checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metadata = folder, checkpoint_metadata.read(folder)

    def read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors in `wanted` and insert the objects. Each rank reads what it holds."""
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(wanted, self.metadata, is_coordinator=True)
        items = sorted(planner.create_local_plan().items, key=lambda item: self._where(item.storage_index))
        for (name, offset, length), same in groupby(items, key=lambda item: self._where(item.storage_index)):
            with (self.folder / name).open("rb") as file:
                try:
                    value = archive.read(file, offset, length)
                except ArchiveError as error:
                    raise CheckpointError(f"its file {name} cannot be used: at byte {offset}, {error}") from error
            for item in same:
                known = self.metadata.state_dict_metadata[item.storage_index.fqn]
                if isinstance(known, TensorStorageMetadata):
                    self._fill(planner, item, known, value)
                else:
                    wanted[item.dest_index.fqn] = value
        return wanted

    def _where(self, index: MetadataIndex) -> tuple[str, int, int]:
        info = self.metadata.storage_data[index]
        return info.relative_path, info.offset, info.length

    def _fill(self, planner: Any, item: ReadItem, known: TensorStorageMetadata, value: Any) -> None:
        index = item.storage_index
        chunk = next(one for one in known.chunks if one.offsets == index.offset)
        dtype, shape = known.properties.dtype, tuple(chunk.sizes)
        dense = type(value) is torch.Tensor and value.layout is torch.strided
        if not dense or value.dtype != dtype or tuple(value.shape) != shape:
            what = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"
            raise CheckpointError(f"its tensor {index.fqn} is {what} in the shard and {shape} {dtype} in {METADATA}")
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dim, begin, length)
        planner.resolve_tensor(item).detach().copy_(value)


def read(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    process_group: Any,
) -> dict[str, Any]:
    """Load a folder of shards into model, optimizer and scaler. All ranks must call this.

    Everything is read into new memory and compared before anything changes. Errors that only the optimizer or the
    scaler can find are raised when they load; all three are then restored.

    Returns:
        The other state of the checkpoint.

    Raises:
        CheckpointError: on one rank the checkpoint is missing, damaged, or does not fit, or `scaler` is given and the
            checkpoint has no state of a scaler. The error is raised on every rank, and nothing was changed.
    """
    finish_pending()
    with interrupts.held():
        ranks = Ranks(process_group)
        if not path.is_dir():
            raise files.missing(path)
        load = _Load(path, model, optimizer, scaler)
        try:
            ranks.together(lambda: load.trust(ranks))
        except CheckpointError as error:
            advice = ranks.first(lambda: files.remedy(path))
            raise CheckpointError(f"checkpoint {path} cannot be used: {error}; {advice}") from error
        rollback = Rollback(model, optimizer, scaler)
        try:
            with torch.no_grad(), _quiet():
                for part in (load.prepare, load.compare, load.read, lambda: load.load_into_live(rollback)):
                    ranks.together(part)
        except BaseException as error:
            with torch.no_grad(), _quiet():
                rollback.put_back()
            if isinstance(error, CheckpointError):
                if not path.exists():  # a save has removed it meanwhile
                    raise files.missing(path) from error
                raise CheckpointError(f"checkpoint {path} does not fit: {error}") from error
            raise
    return load.beside


class _Load:
    """One load: the content of the checkpoint, what model and optimizer need, and the tensors that are read."""

    def __init__(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any):
        self.path, self.model, self.optimizer, self.scaler = path, model, optimizer, scaler
        self.beside: dict[str, Any] = {}
        self.reader: _Reader
        # The name in the files, by the position in the nested state.
        self.names: dict[Key, str]
        self.own: Any = {"state": {}, "param_groups": []}
        self.flat_parameters = _is_flattened(model)
        self.read_in: dict[str, Any] = {}

    def trust(self, ranks: Ranks) -> None:
        """Raise unless every byte is as it was saved. Each rank reads a part of the files."""
        path = self.path
        ours = (path / BESIDE).is_file() or (path / files.MANIFEST).is_file()
        if not ours and not (path / METADATA).is_file():
            raise CheckpointError(
                f"it holds neither {files.MANIFEST} nor {METADATA}: it is not a checkpoint, or is truncated"
            )
        if not ours and files.has_our_name(path):
            raise CheckpointError(f"its {files.MANIFEST} is missing; if torch wrote it, rename it")
        if ours:
            complaint = files.folder_complaint(path, ranks.rank, ranks.size)
            if complaint is not None:
                raise CheckpointError(complaint)
        self.reader = _Reader(path)

    def prepare(self) -> None:
        """Read the state other than shards, and get the states of model and optimizer. Collective under FSDP1."""
        if (self.path / BESIDE).is_file():
            self.beside = files.read_archive(self.path / BESIDE)
        if not isinstance(self.beside.get("state") or {}, dict):
            raise CheckpointError(f"what {BESIDE} holds as the state is a {type(self.beside['state']).__name__}")
        if self.scaler is not None and self.beside.get("scaler") is None:
            raise CheckpointError("it holds no state of a scaler: pass scaler=None to start from the initial scale")
        self.names = {tuple(place): name for name, place in self.reader.metadata.planner_data.items()}
        self.model_state: dict[str, Any] = get_model_state_dict(self.model)
        if self.optimizer is not None:
            self.own = get_optimizer_state_dict(self.model, self.optimizer)
        self.groups: list[list[str]] = [list(group["params"]) for group in self.own["param_groups"]]

    def compare(self) -> None:
        """Raise unless the checkpoint is of the same model and of an optimizer with the same groups."""
        saved = {place[1]: name for place, name in self.names.items() if place[0] == "model" and len(place) == 2}
        if saved.keys() != self.model_state.keys():
            differing = ", ".join(sorted(map(str, saved.keys() ^ self.model_state.keys()))[:5])
            raise CheckpointError(f"checkpoint and model do not have the same tensors: {differing}; use the same model")
        for name, value in self.model_state.items():
            known = self.reader.metadata.state_dict_metadata[saved[name]]
            if isinstance(value, torch.Tensor) != isinstance(known, TensorStorageMetadata):
                raise CheckpointError(
                    f"{name} is a tensor on one side only, in the checkpoint or in the model; use the same model"
                )
            if not isinstance(known, TensorStorageMetadata):
                continue
            if known.size != value.size():
                raise CheckpointError(
                    f"{name} has shape {tuple(known.size)} in the checkpoint and {tuple(value.size())} in the model; "
                    "load it into a model of the same size"
                )
            if known.properties.dtype != value.dtype:
                raise CheckpointError(
                    f"{name} is {known.properties.dtype} in the checkpoint and {value.dtype} in the model; load it "
                    "into a model of the same precision, and convert afterwards"
                )
        if self.optimizer is not None:
            self._compare_groups()

    def _compare_groups(self) -> None:
        numbers = {place[2] for place in self.names if place[:2] == PARAM_GROUPS and len(place) > 3}
        places = [(*PARAM_GROUPS, number, "params") for number in range(len(numbers))]
        if not places:
            raise CheckpointError("it holds no state of an optimizer; pass optimizer=None to load the model alone")
        if not self.names.keys() >= set(places):
            raise CheckpointError("its optimizer's groups do not have all their parameters; it was not saved so")
        found = self.reader.read({self.names[place]: None for place in places})
        saved = [found[self.names[place]] for place in places]
        if not all(isinstance(group, list) and all(type(one) is str for one in group) for group in saved):
            raise CheckpointError("its optimizer's groups are not lists of parameters")
        if sorted(map(sorted, saved)) == sorted(map(sorted, self.groups)):
            return
        names, own = ({name for group in groups for name in group} for groups in (saved, self.groups))
        what = f"{', '.join(sorted(names ^ own)[:5])} on one side only"
        if names == own:
            what = (
                f"{list(map(len, saved))} parameters there, {list(map(len, self.groups))} here, or in another division"
            )
        raise CheckpointError(f"checkpoint and optimizer do not have the same groups: {what}; make it as it was made")

    def read(self) -> None:
        """Read everything into new tensors."""
        wanted = {self.names["model", name]: _read_target(value) for name, value in self.model_state.items()}
        if self.optimizer is not None:
            parameters: dict[str, torch.Tensor] = {}
            if not self.flat_parameters:
                for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
                    parameters.update(zip(names, group["params"], strict=True))
            for place, name in self.names.items():
                if place[0] == "optimizer":
                    known = self.reader.metadata.state_dict_metadata[name]
                    wanted[name] = (
                        self._empty(place, known, parameters) if isinstance(known, TensorStorageMetadata) else None
                    )
        self.read_in = self.reader.read(wanted)

    def _empty(self, place: Key, known: TensorStorageMetadata, parameters: Mapping[str, torch.Tensor]) -> Any:
        """A tensor for one entry of the optimizer's state: sharded like its parameter, in the dtype of the file."""
        if place[:2] == STATE and len(place) == 4:
            _, _, name, key = place
            parameter, dtype = parameters.get(name), known.properties.dtype
            own = self.own["state"].get(name, {}).get(key)
            unable = "FullyShardedDataParallel" if self.flat_parameters else type(self.optimizer).__name__
            ours = isinstance(self.optimizer, CanonicalState) and not self.flat_parameters
            if (key in HELD and not ours) or (dtype == torch.bfloat16 and self.flat_parameters):
                raise CheckpointError(
                    f"its optimizer's state is as it was held, such as {key} of {name}, which {unable} cannot load: "
                    "load it into an optimizer of halfstep, in one process or under fully_shard, and save it there "
                    "with optimizer_state='canonical'"
                )
            if self.flat_parameters and isinstance(own, torch.Tensor):
                if (own.size(), own.dtype) != (known.size, known.properties.dtype):
                    raise CheckpointError(
                        f"{key} of {name} is {tuple(known.size)} {known.properties.dtype} in the checkpoint and "
                        f"{tuple(own.size())} {own.dtype} in the optimizer; use the same model and optimizer"
                    )
                return own  # the tensor that FSDP1 made for this purpose
            coded = key in CODES.values() or key in SCALES.values()
            # Codes that cannot be sharded with their scales are read as a whole.
            if parameter is not None and (not coded or shards_blocks(parameter)):
                empty = empty_entry(parameter, key, known.size, dtype)
                if empty is not None:
                    return empty
        return torch.empty(known.size, dtype=known.properties.dtype, device="cpu")

    def load_into_live(self, rollback: Rollback) -> None:
        """Load the model, then the optimizer, whose masters set the parameters, then the scaler."""
        fresh = {name: self.read_in[self.names["model", name]] for name in self.model_state}
        if self.flat_parameters:
            rollback.objects = {
                name: old for name, old in self.model_state.items() if not isinstance(old, torch.Tensor)
            }
            rollback.copy()
        else:
            # Tensors are restored too: FSDP2 of torch 2.8 moves uneven shards to other memory when a model loads.
            rollback.objects = dict(self.model_state)
            for name, live in self.model_state.items():
                if isinstance(live, torch.Tensor):
                    rollback.exchange(local(live), local(fresh[name]))
                    fresh[name] = live
        set_model_state_dict(self.model, fresh)
        if self.optimizer is not None:
            content = _nested(
                {
                    place[1:]: self.read_in[name]
                    for place, name in self.names.items()
                    if place[:2] in (STATE, PARAM_GROUPS) and len(place) > 3
                }
            )
            groups = content["param_groups"]
            loaded: Any = {"state": content.get("state", {}), "param_groups": [groups[n] for n in sorted(groups)]}
            # Not strict, because parameters that never had a gradient have no state.
            set_optimizer_state_dict(self.model, self.optimizer, loaded, options=StateDictOptions(strict=False))
        if self.scaler is not None:
            self.scaler.load_state_dict(self.beside["scaler"])


def _read_target(value: Any) -> Any:
    """A tensor for one entry of the model's state: on the CPU, sharded like the entry."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, ShardedTensor):  # of FSDP1; already a copy
        return value
    if isinstance(value, DTensor):
        return DTensor(_read_target(value.to_local()), value._spec, requires_grad=False)
    return torch.empty_like(value, device="cpu", requires_grad=False)


def _nested(values: Mapping[Key, Any]) -> dict[Any, Any]:
    """Values by position as nested dicts. Dicts with the keys 0, 1, ... below a group or a state become lists."""
    root: dict[Any, Any] = {}
    for place, value in values.items():
        within = root
        for part in place[:-1]:
            within = within.setdefault(part, {})
            if not isinstance(within, dict):
                raise CheckpointError(f"it has two things at {'.'.join(map(str, place))[:200]}; it was not saved so")
        within[place[-1]] = value
    return {
        kind: {owner: {key: _listed(one) for key, one in entry.items()} for owner, entry in owners.items()}
        for kind, owners in root.items()
    }


def _listed(value: Any) -> Any:
    if type(value) is not dict or not value:
        return value
    inner = {key: _listed(one) for key, one in value.items()}
    return [inner[place] for place in range(len(inner))] if inner.keys() == set(range(len(inner))) else inner
