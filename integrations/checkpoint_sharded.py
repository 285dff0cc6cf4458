"""Checkpoints that all ranks write and read in parallel, each its own shards, with torch.distributed.checkpoint.

**On disk** a checkpoint is a folder as `torch.distributed.checkpoint.save` writes it, of
``{"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}``, with two files
beside it: ``halfstep.pt`` (the scaler and what else the run wants to keep) and ``manifest.json`` (size and SHA-256 of
every file, taken while it was written). torch alone can read it; `read` also reads such folders that torch alone has
written.

**The topology is no part of it.** Tensors are known by parameter name and place in the whole parameter, so each rank of
any later topology reads the parts that it holds. Masters and moments are in fp32 whatever their layout in memory, and
are read into fresh fp32 tensors, never through the parameter's dtype.

**Traps of torch.distributed.checkpoint** that this file walks around: its errors are no `Exception`; it reads objects
with pickle, which runs code; what is missing in the optimizer's template is left out silently; a tensor of another
dtype is rounded silently; a rank's collectives in a thread meet the training's in the same group.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from halfstep.integrations import checkpoint_files as files
from halfstep.integrations.checkpoint_files import CheckpointError

BESIDE = "halfstep.pt"
METADATA = ".metadata"
STATE = ("optimizer", "state")
GROUPS = ("optimizer", "param_groups")

T = TypeVar("T")
Key = tuple[Any, ...]


# ------------------------------------------------------------------------------------------------------------- ranks

# The group of all ranks that is for checkpoints alone, and the default group it was made beside. Only weakly: who keeps
# a group beyond destroy_process_group makes torch abort at exit.
_own_group: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def _group_for_checkpoints() -> Any:
    """A gloo group of all ranks, so that a save in a thread never meets a collective of the training."""
    global _own_group
    default = dist.group.WORLD
    known = _own_group[1]() if _own_group is not None and _own_group[0]() is default else None
    if known is None:
        known = dist.new_group(backend="gloo")
        _own_group = weakref.ref(default), weakref.ref(known)
    return known


class Ranks:
    """The ranks that save or load together, and what they say to each other: small objects, over gloo."""

    def __init__(self, process_group: Any = None) -> None:
        self.rank, self.size = 0, 1
        self.group: Any = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        base = dist.group.WORLD if process_group is None else process_group
        self.rank, self.size = dist.get_rank(base), dist.get_world_size(base)
        if self.rank < 0:
            raise ValueError(
                "process_group is one that this rank is not in; allowed are groups of the calling rank: call save and "
                "load on the group's ranks only"
            )
        if self.size == 1:
            return
        # torch cannot make a group of some ranks without the others' help, unless all are in equally many groups.
        self.group = _group_for_checkpoints() if base is dist.group.WORLD else base
        if "cpu:" not in dist.get_backend_config(self.group):
            raise ValueError(
                f"process_group has the backends {dist.get_backend_config(self.group)}; allowed are groups with one "
                'for CPUs: make it with new_group(ranks, backend="gloo")'
            )

    def all(self, mine: T) -> list[T]:
        """What each rank gives, in order."""
        if self.group is None:
            return [mine]
        everything: list[Any] = [None] * self.size
        dist.all_gather_object(everything, mine, group=self.group)
        return everything

    def together(self, function: Callable[[], T]) -> list[T]:
        """What `function` gives on each rank; if it raises on one, this raises on all, so that none waits in vain."""
        mine, error, interrupt, cause = None, None, None, None
        try:
            mine = function()
        except CheckpointException as failed:
            causes = [cause[0] for cause in failed.failures.values()]
            interrupt = next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), None)
            error, cause = "; ".join(map(str, causes)), causes[0]
        except KeyboardInterrupt as pressed:
            interrupt = pressed
        except Exception as failed:  # whatever it is, the others must hear of it
            error, cause = str(failed) or type(failed).__name__, failed
        if interrupt is not None:
            error = "it was interrupted"
        try:
            answers = self.all((mine, error))
        except RuntimeError as lost:  # a rank was killed
            raise CheckpointError(error or f"a rank does not answer: {lost}") from lost
        if interrupt is not None:
            raise KeyboardInterrupt
        errors = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
        if errors:
            where = f"rank {errors[0][0]}: " if self.size > 1 else ""
            raise CheckpointError(f"{where}{errors[0][1]}") from cause
        return [answer for answer, _ in answers]  # type: ignore[misc]  # no error, so it is what function gave

    def first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first rank, which alone calls it."""
        return self.together(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]


@contextmanager
def _quiet() -> Any:
    """Without torch's warnings of FSDP1's age, and that one process was meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# ------------------------------------------------------------------------------------------------------------ saving


class _HashingFiles(FileSystem):
    """Files that are hashed while they are written."""

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


class PendingSave:
    """A checkpoint that is being written while training goes on."""

    def __init__(self, future: Future[Path], path: Path) -> None:
        self._future, self.path = future, path
        self._told = False

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on disk on all ranks, and return its path.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
            TimeoutError: it took longer than `timeout` seconds.
        """
        try:
            path = self._future.result(timeout)
        finally:
            self._told = self._future.done()
        return path


_writer = ThreadPoolExecutor(1, thread_name_prefix="halfstep-checkpoint")
_pending: list[PendingSave] = []


def finish_pending() -> None:
    """Wait for the save that is under way, if one is; raises what it raised unless its `result` has told."""
    while _pending:
        pending = _pending.pop()
        if not pending._told:
            pending.result()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What torch.distributed.checkpoint is to write. Collective under FSDP."""
    with _quiet():
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    beside: dict[str, Any],
    keep: int,
    asynchronous: bool,
    process_group: Any,
) -> Path | PendingSave:
    """Write the checkpoint of `step`, all ranks of `process_group` together; see `checkpoint.save`."""
    finish_pending()
    ranks = Ranks(process_group)
    state = state_of(model, optimizer)
    path = folder / files.name_of(step)
    archive = io.BytesIO()
    torch.save(beside, archive)  # now: what is in it may change while the thread writes
    if not asynchronous:
        return _write(path, step, state, archive, keep, ranks)
    staged = _copied(state)
    pending = PendingSave(_writer.submit(_write, path, step, staged, archive, keep, ranks), path)
    _pending.append(pending)
    return pending


def _copied(value: Any) -> Any:
    """A nested state on the CPU that no later step changes, also of what is on the CPU already."""
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one) for one in value)
    if isinstance(value, ShardedTensor):  # FSDP1's, which torch's own staging cannot copy
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


def _write(path: Path, step: int, state: dict[str, Any], archive: io.BytesIO, keep: int, ranks: Ranks) -> Path:
    temporary: Path | None = None
    try:
        temporary = Path(ranks.first(lambda: _begin(path)))
        recorded = ranks.together(lambda: _write_shards(Path(str(temporary)), state, archive, ranks))
        ranks.first(lambda: _complete(Path(str(temporary)), path, step, files.merged(recorded), keep, ranks))
    except CheckpointError as error:
        if temporary is not None and ranks.rank == 0:
            files.remove(temporary)
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched; free space or fix "
            "permissions, and restart ranks that were killed"
        ) from error
    return path


def _begin(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.clear(path.parent)
    temporary = tempfile.mkdtemp(prefix=f"{files.TEMPORARY}{path.name}-", dir=path.parent)
    os.chmod(temporary, 0o777 & ~_umask())  # mkdtemp lets nobody else in, and other ranks may be other users
    return temporary


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_shards(
    temporary: Path, state: dict[str, Any], archive: io.BytesIO, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Write this rank's part; what it wrote, by file name."""
    if not temporary.is_dir():
        raise CheckpointError(
            f"rank {ranks.rank} does not see {temporary}, which rank 0 made; allowed are folders that all ranks share"
        )
    writer = dcp.FileSystemWriter(temporary, sync_files=True, overwrite=False)
    writer.fs = hashing = _HashingFiles()
    with torch.no_grad(), _quiet() if ranks.group is None else nullcontext():
        dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    if ranks.rank == 0:
        with hashing.create_stream(temporary / BESIDE, "wb") as file:
            file.write(archive.getbuffer())
            file.flush()
            os.fsync(file.fileno())
    return hashing.records


def _complete(
    temporary: Path, path: Path, step: int, recorded: dict[str, dict[str, Any]], keep: int, ranks: Ranks
) -> None:
    """Check that everything has arrived, give the folder its name, and only then remove older ones."""
    for name, record in recorded.items():
        there = (temporary / name).stat().st_size if (temporary / name).is_file() else 0
        if there != record["bytes"]:
            raise CheckpointError(
                f"rank 0 sees {there} of {record['bytes']} bytes of {temporary / name}; allowed are folders that all "
                "ranks share"
            )
    files.write_manifest(temporary, step, ranks.size, recorded)
    files.put_in_place(temporary, path)
    files.prune(path.parent, step, keep)


# ----------------------------------------------------------------------------------------------------------- loading


class _Unpickler(pickle.Unpickler):
    """Reads torch.distributed.checkpoint's metadata and runs nothing else that a file may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if "." not in name else None
        own = module.startswith("torch.distributed.checkpoint.") and isinstance(found, type)
        paths = module in ("pathlib", "pathlib._local") and isinstance(found, type)
        plain = (module, name) in (
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        )
        if (own and found.__module__ == module) or paths or plain or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"its {METADATA} asks for {module}.{name}, which no checkpoint needs")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Loads by the names in the file, and objects without running code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # self.state_dict is a copy of what the caller has.
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scaled: bool,
    process_group: Any,
) -> dict[str, Any]:
    """Load a folder's shards into model and optimizer, all ranks together; what was kept beside them.

    Raises:
        CheckpointError: on every rank, if on one it is missing, damaged, or does not fit; then nothing was changed, but
            by a disk that fails when it is read for the second time. Or `scaled`, and it holds no scaler's state.
    """
    finish_pending()
    ranks = Ranks(process_group)
    if not path.is_dir():
        raise files.missing(path)
    try:
        ranks.together(lambda: _trust(path, ranks))
    except CheckpointError as error:
        advice = ranks.first(lambda: files.remedy(path))
        raise CheckpointError(f"checkpoint {path} cannot be used: {error}; {advice}") from error
    try:
        with torch.no_grad(), _quiet():
            beside = ranks.together(lambda: _read_beside(path, scaled))[ranks.rank]
            load = _Load(path, model, optimizer)
            ranks.together(load.compare)
            ranks.together(load.read)
            load.hand_over()
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} does not fit: {error}") from error
    return beside


def _trust(path: Path, ranks: Ranks) -> None:
    """Raise unless every byte is what was saved; each rank reads its part of the files."""
    ours = (path / BESIDE).is_file() or (path / files.MANIFEST).is_file()
    if not ours and not (path / METADATA).is_file():
        raise CheckpointError(f"it holds neither {files.MANIFEST} nor {METADATA}: it is no checkpoint, or was cut off")
    if ours:
        complaint = files.folder_complaint(path, ranks.rank, ranks.size)
        if complaint is not None:
            raise CheckpointError(complaint)
    names = {stored.relative_path for stored in _Reader(path).read_metadata().storage_data.values()}
    absent = sorted(name for name in names if not (path / name).is_file())
    if absent:
        raise CheckpointError(f"its file {absent[0]} is missing")


def _read_beside(path: Path, scaled: bool) -> dict[str, Any]:
    beside = files.read_archive(path / BESIDE) if (path / BESIDE).is_file() else {}
    if scaled and beside.get("scaler") is None:
        raise CheckpointError("it holds no state of a scaler; pass scaler=None, and the scale begins anew")
    return beside


class _Load:
    """One load: what the checkpoint holds, what model and optimizer need, and the tensors in between."""

    def __init__(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.path, self.model, self.optimizer = path, model, optimizer
        self.metadata = _Reader(path).read_metadata()
        # By place in the nested state: the name under which it lies in the files.
        self.names: dict[Key, str] = {tuple(place): name for name, place in (self.metadata.planner_data or {}).items()}
        self.model_state: dict[str, Any] = get_model_state_dict(model)
        self.own: Any = {"state": {}, "param_groups": []}
        if optimizer is not None:
            self.own = get_optimizer_state_dict(model, optimizer)
        self.groups: list[list[str]] = [list(group["params"]) for group in self.own["param_groups"]]
        self.flat_parameters = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self.read_in: dict[str, Any] = {}

    def compare(self) -> None:
        """Raise unless the checkpoint is of this model, and of an optimizer with these groups."""
        saved = {place[1]: name for place, name in self.names.items() if place[0] == "model" and len(place) == 2}
        if saved.keys() != self.model_state.keys():
            differing = ", ".join(sorted(saved.keys() ^ self.model_state.keys())[:5])
            raise CheckpointError(f"checkpoint and model do not have the same tensors: {differing}; use the same model")
        for name, value in self.model_state.items():
            known = self.metadata.state_dict_metadata[saved[name]]
            if not isinstance(value, torch.Tensor) or not isinstance(known, TensorStorageMetadata):
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
        places = sorted(place for place in self.names if place[:2] == GROUPS and place[-1] == "params")
        if not places:
            raise CheckpointError("it holds no state of an optimizer; pass optimizer=None to load the model alone")
        found = self._read({self.names[place]: None for place in places})
        saved = [list(found[self.names[place]]) for place in places]
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
        """Read everything: the model's tensors in place, the optimizer's into fresh ones."""
        wanted = {self.names["model", name]: value for name, value in self.model_state.items()}
        if self.optimizer is not None:
            parameters: dict[str, torch.Tensor] = {}
            if not self.flat_parameters:
                for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
                    parameters.update(zip(names, group["params"], strict=True))
            for place, name in self.names.items():
                if place[0] == "optimizer":
                    known = self.metadata.state_dict_metadata[name]
                    wanted[name] = (
                        self._empty(place, known, parameters) if isinstance(known, TensorStorageMetadata) else None
                    )
        self.read_in = self._read(wanted)

    def _empty(self, place: Key, known: TensorStorageMetadata, parameters: Mapping[str, torch.Tensor]) -> Any:
        """Where to read one of the optimizer's tensors: cut as its parameter is, in the dtype that it was saved in."""
        if place[:2] == STATE:
            _, _, name, key = place
            if self.flat_parameters and key in self.own["state"].get(name, {}):
                return self.own["state"][name][key]  # FSDP1's own kind, made for this
            if name in parameters and parameters[name].shape == known.size:
                return torch.empty_like(parameters[name].detach(), dtype=known.properties.dtype)
        return torch.empty(known.size, dtype=known.properties.dtype, device="cpu")

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Each rank for itself: what to read follows from the metadata and from what it holds."""
        dcp.load(wanted, storage_reader=_Reader(self.path), planner=_Planner(), no_dist=True)
        return wanted

    def hand_over(self) -> None:
        """Give the tensors to the model, then to the optimizer, whose masters have the last word."""
        set_model_state_dict(self.model, {name: self.read_in[self.names["model", name]] for name in self.model_state})
        if self.optimizer is None:
            return
        state: dict[str, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        for place, name in self.names.items():
            if place[:2] == STATE:
                state.setdefault(place[2], {})[place[3]] = self.read_in[name]
            elif place[:2] == GROUPS:
                groups.setdefault(place[2], {})[place[3]] = self.read_in[name]
        loaded: Any = {"state": state, "param_groups": [groups[number] for number in sorted(groups)]}
        # Not strict: parameters that never had a gradient have no state.
        set_optimizer_state_dict(self.model, self.optimizer, loaded, options=StateDictOptions(strict=False))
