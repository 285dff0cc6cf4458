"""`save` and `load`: all ranks write and read their shards in parallel, whatever the topology.

Tensors are identified by the name of the parameter and the position in the whole parameter, so each rank of any later
topology reads its own shards. The optimizer's state is read into new tensors of the dtype in the file, never through
the parameter's dtype, and loaded only when all ranks have read everything.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import folder as files
from halfstep.integrations.checkpoint.folder import CheckpointError
from halfstep.integrations.checkpoint.ranks import Ranks
from halfstep.integrations.checkpoint.rollback import Rollback
from halfstep.integrations.checkpoint.storage import Reader, Writer
from halfstep.integrations.checkpoint.torch_folder import open_checkpoint
from halfstep.integrations.checkpoint.tree import TensorName, pack, unpack
from halfstep.integrations.checkpoint.whole import check_optimizer_state
from halfstep.integrations.optim.classes import LayoutOptimizer, saving
from halfstep.integrations.optim.state import empty_entry, shards_blocks
from halfstep.numerics.scaling.topology import local
from halfstep.numerics.state_layout import CODE_KEYS, HELD, SCALE_KEYS


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings that FSDP1 is deprecated, and that torch.distributed is not initialized."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


# ------------------------------------------------------------------------------------------------------------ saving


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


def _finish_pending() -> None:
    """Wait for a save in the background, and raise its error unless `result` has already raised it."""
    while _pending:
        pending = _pending[0]
        try:
            if not pending._reported:
                pending.result()
        finally:
            if pending.done():
                _pending.remove(pending)


def is_held(optimizer_state: str) -> bool:
    """Whether an optimizer's state is to be saved as it is held.

    Raises:
        ValueError: `optimizer_state` is neither ``"canonical"`` nor ``"held"``.
    """
    if optimizer_state not in ("canonical", "held"):
        raise ValueError(f"Expected optimizer_state to be 'canonical' or 'held', but got {optimizer_state!r}")
    return optimizer_state == "held"


def _only_with_model(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"Expected model to be given together with {name}, but got None: pass model=")


def _is_flat(model: torch.nn.Module) -> bool:
    """Whether FSDP1 has flattened parameters of a model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: bool) -> dict[str, Any]:
    """The optimizer's state by the names of parameters. Collective under FSDP1, whose state is always canonical."""
    with saving(optimizer, "held" if held else "canonical"):
        return get_optimizer_state_dict(model, optimizer)


@overload
def save(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    optimizer_state: Literal["canonical", "held"] = "held",
    asynchronous: Literal[False] = False,
    process_group: Any = None,
) -> Path: ...


@overload
def save(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    optimizer_state: Literal["canonical", "held"] = "held",
    asynchronous: Literal[True],
    process_group: Any = None,
) -> PendingSave: ...


def save(
    folder: str | Path,
    step: int,
    state: Mapping[str, Any] | None = None,
    *,
    keep: int = 2,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    optimizer_state: Literal["canonical", "held"] = "held",
    asynchronous: bool = False,
    process_group: Any = None,
) -> Path | PendingSave:
    """Write the checkpoint of `step`, then remove all but the newest `keep` up to this step.

    Args:
        folder: folder of the run's checkpoints, created if missing. With `model`, all ranks must see the same folder.
        step: number of completed steps, ≥ 0.
        state: tensors, numbers, strings, bytes, numpy arrays, and lists, tuples, sets and dicts of these. Without
            `model`, this is the checkpoint, and only rank 0 calls `save`. With `model`, the state of the first rank is
            stored with the shards.
        keep: number of checkpoints to keep, including this one, ≥ 1.
        model: a plain model, or one under DDP, FSDP1, FSDP2, tensor parallelism or several of these. All ranks call
            `save`, and each writes its shards.
        optimizer: optimizer of the model's parameters.
        scaler: an object with a ``state_dict()``, which is stored.
        optimizer_state: ``"held"`` stores masters and moments in the bytes that they take in memory: codes and scales,
            bf16 moments, and remainders instead of masters. ``"canonical"`` stores them in fp32, as other optimizers
            do; so does ``"held"`` with other optimizers and under FSDP1. `load` recognizes both, and loads both into
            every layout.
        asynchronous: copy everything to the CPU, return, and write the files in a thread while training continues. Only
            one save runs at a time: the next `save` or `load` waits for it, and raises if it failed.
        process_group: the ranks that save together; all have the same parameters. Default: all.

    Returns:
        The path of the checkpoint, which is on disk when the call returns. If `asynchronous`, a `PendingSave`, whose
        ``result()`` waits for the save; call it before ``destroy_process_group``.

    Raises:
        CheckpointError: it could not be written, on all ranks alike. Earlier checkpoints are untouched.
        ValueError: an argument is out of range, or goes together with `model` only.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = halfstep.AdamW(model.parameters())
        >>> path = checkpoint.save("run", 30, {"tokens": 3000}, model=model, optimizer=optimizer)
        >>> checkpoint.load(path, model=model, optimizer=optimizer)
        {'tokens': 3000}
    """
    if step < 0:
        raise ValueError(f"Expected step to be at least 0, but got {step}")
    if keep < 1:
        raise ValueError(f"Expected keep to be at least 1, but got {keep}: a save never leaves the folder empty")
    held = is_held(optimizer_state)
    if model is None:
        _only_with_model(
            optimizer=optimizer, scaler=scaler, asynchronous=asynchronous or None, process_group=process_group
        )
    _finish_pending()
    path = Path(folder) / files.name_of(step)
    with interrupts.held():
        ranks = Ranks(process_group, alone=model is None)
        parts: dict[str, Any] = {"step": step}
        if model is not None:
            with _quiet():
                parts["model"] = dict(get_model_state_dict(model))
                if optimizer is not None:
                    parts["optimizer"] = _optimizer_state(model, optimizer, held)
        parts["scaler"] = None if scaler is None else scaler.state_dict()
        parts["state"] = None if state is None else dict(state)
        tree: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}

        def packed() -> str:
            for name, part in parts.items():
                shared = name in ("model", "optimizer") or ranks.rank == 0
                tree[name] = pack(part, tensors if shared else {}, name)
            names = sorted(name for name in tensors if name.startswith(("model.", "optimizer.")))
            return hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()

        try:
            if len(set(ranks.together(packed))) > 1:
                raise CheckpointError(
                    "Expected all ranks to hold the same parameters, but they do not: pass process_group= of those "
                    "that do, and a folder for each group"
                )
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched"
            ) from error
        if not asynchronous:
            return write(path, step, tree, tensors, keep, ranks)
        with torch.no_grad():
            copies = {name: _staged(tensor) for name, tensor in tensors.items()}
        pending = PendingSave(_writer.submit(write, path, step, tree, copies, keep, ranks), path)
        _pending.append(pending)
        return pending


def _staged(value: Any) -> Any:
    """A copy on the CPU, which later steps do not change. torch's own stager refuses the shards of FSDP1."""
    if isinstance(value, ShardedTensor):
        shards = [Shard(_staged(shard.tensor), _metadata_on_cpu(shard.metadata)) for shard in value.local_shards()]
        known = value.metadata()
        everywhere = [_metadata_on_cpu(shard) for shard in known.shards_metadata]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards,
            sharded_tensor_metadata=dataclasses.replace(known, shards_metadata=everywhere),
            process_group=value._process_group,
        )
    if isinstance(value, DTensor):  # from_local would move the copy to the mesh's device
        return DTensor(_staged(value.to_local()), value._spec, requires_grad=False)
    return value.detach().to("cpu", copy=True)


def _metadata_on_cpu(known: ShardMetadata) -> ShardMetadata:
    rank = 0 if known.placement is None else known.placement.rank()
    return ShardMetadata(known.shard_offsets, known.shard_sizes, f"rank:{rank}/cpu")


def write(
    path: Path, step: int, tree: dict[str, Any], tensors: dict[str, torch.Tensor], keep: int | None, ranks: Ranks
) -> Path:
    """Write a checkpoint, all `ranks` together: `tree` is that of the first, `tensors` are each rank's."""
    writer = Writer(path, step, tree, keep)

    def run() -> None:
        try:
            with _quiet():
                dcp.save(
                    tensors,
                    storage_writer=writer,
                    planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                    process_group=ranks.group,
                    no_dist=ranks.group is None,
                )
        except BaseException:
            if writer.interrupt is not None:
                raise writer.interrupt from None
            raise

    try:
        ranks.together(run)
    except CheckpointError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched; free space or fix "
            "permissions, and restart ranks that were killed"
        ) from error
    finally:
        writer.end()
    return path


# ----------------------------------------------------------------------------------------------------------- loading


def load(
    path: str | Path,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    process_group: Any = None,
) -> dict[str, Any]:
    """Read a checkpoint, after verifying that it is complete and unchanged.

    All ranks together read it into `model`, `optimizer` and `scaler`, whatever topology saved it; masters and moments
    have the saved bits. Everything is read into new memory and compared before anything changes. Checkpoints of earlier
    versions, and folders that torch wrote (``torch.distributed.checkpoint.save`` of ``{"model": ..., "optimizer":
    ...}``), can be read too; those of torch have no checksums.

    Args:
        path: path of the checkpoint; ``newest(folder)`` finds the latest.
        model, optimizer, scaler: with the same names, shapes and groups as those saved. The options of the optimizer
            that describe the layout in memory are not changed.
        process_group: the ranks that load together. Default: all.

    Returns:
        The ``state`` that was saved; {} if there was none.

    Raises:
        CheckpointError: the checkpoint is missing, unreadable, truncated or damaged, even by one bit; a shard is
            missing or belongs to another checkpoint; or the checkpoint is of another model or optimizer. All ranks
            raise, and nothing is changed. The message names the file and the newest other good checkpoint there.
        ValueError: the checkpoint was saved with `model`, and is loaded without.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 20, {"tokens": 2000})
        >>> checkpoint.load(checkpoint.newest("run"))
        {'tokens': 2000}
    """
    path = Path(path)
    if model is None:
        _only_with_model(optimizer=optimizer, scaler=scaler, process_group=process_group)
    _finish_pending()
    with interrupts.held():
        ranks = Ranks(process_group, alone=model is None)
        if not path.is_dir():
            raise files.missing(path)
        loading = _Load(path, model, optimizer, scaler)
        try:
            ranks.together(lambda: loading.trust(ranks))
        except CheckpointError as error:
            advice = ranks.first(lambda: files.remedy(path))
            raise CheckpointError(f"checkpoint {path} cannot be used: {error}; {advice}") from error
        if model is None and "model" in loading.reader.tree:
            raise ValueError(f"Expected model for {path}, which was saved with one, but got None: pass model=")
        rollback = Rollback(model, optimizer, scaler)
        try:
            with _quiet():
                ranks.together(loading.prepare)
                ranks.together(lambda: loading.reader.read_into(loading.targets))
                ranks.together(lambda: loading.load_into_live(rollback))
        except BaseException as error:
            with _quiet():
                rollback.put_back()
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"checkpoint {path} does not fit: {error}") from error
            raise
        return loading.state


class _Load:
    """One load: the content of the checkpoint, what model and optimizer need, and the tensors that are read."""

    def __init__(
        self, path: Path, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, scaler: Any
    ) -> None:
        self.path, self.model, self.optimizer, self.scaler = path, model, optimizer, scaler
        self.reader: Reader
        self.state: dict[str, Any] = {}
        self.own_model: dict[str, Any] = {}
        self.own: dict[str, Any] = {"state": {}, "param_groups": []}
        self.flat = model is not None and _is_flat(model)
        self.targets: dict[str, Any] = {}

    def trust(self, ranks: Ranks) -> None:
        """Raise unless every byte is as it was saved. Each rank reads a part of the files."""
        self.reader = open_checkpoint(self.path)
        self.reader.verify(ranks.rank, ranks.size)

    def prepare(self) -> None:
        """Compare the checkpoint with model and optimizer, and create tensors to read it into. Collective under FSDP1.

        Raises:
            CheckpointError: it is of another model, or of an optimizer with other groups.
        """
        tree = self.reader.tree
        state = unpack(tree.get("state"), self._own_tensor) or {}
        if not isinstance(state, dict):
            raise CheckpointError(f"its state is a {type(state).__name__}")
        self.state = state
        if self.model is None:
            return
        if "model" not in tree:
            raise CheckpointError("it holds no model: load it without model=, then use load_model and load_optimizer")
        if self.scaler is not None and tree.get("scaler") is None:
            raise CheckpointError("it holds no state of a scaler: pass scaler=None to start from the initial scale")
        self.own_model = dict(get_model_state_dict(self.model))
        self._compare_model(unpack(tree["model"]))
        if self.optimizer is not None:
            if "optimizer" not in tree:
                raise CheckpointError("it holds no state of an optimizer; pass optimizer=None to load the model alone")
            self.own = _optimizer_state(self.model, self.optimizer, held=True)
            saved = unpack(tree["optimizer"], self._named)
            check_optimizer_state(saved)
            self._compare_groups(saved["param_groups"])
            self._add_targets(saved["state"])

    def _own_tensor(self, name: str) -> torch.Tensor:
        return self.reader.tensor(name).clone()

    def _known(self, name: str) -> TensorStorageMetadata:
        known = self.reader.metadata.state_dict_metadata.get(name)
        if not isinstance(known, TensorStorageMetadata):
            raise CheckpointError(f"it has no tensor {name[:200]}")
        return known

    def _named(self, name: str) -> TensorName:
        """A tensor that is read whole, unless `_add_targets` finds a parameter that it belongs to."""
        known = self._known(name)
        self.targets[name] = torch.empty(known.size, dtype=known.properties.dtype, device="meta")
        return TensorName(name)

    def _compare_model(self, saved: Any) -> None:
        if not isinstance(saved, dict) or saved.keys() != self.own_model.keys():
            keys = saved.keys() if isinstance(saved, dict) else set()
            differing = ", ".join(sorted(map(str, keys ^ self.own_model.keys()))[:5])
            raise CheckpointError(f"checkpoint and model do not have the same tensors: {differing}; use the same model")
        for name, value in self.own_model.items():
            is_tensor = isinstance(value, torch.Tensor | ShardedTensor)
            if is_tensor != isinstance(saved[name], TensorName):
                raise CheckpointError(
                    f"{name} is a tensor on one side only, in the checkpoint or in the model; use the same model"
                )
            if not is_tensor:
                continue
            known = self._known(saved[name])
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
            self.targets[saved[name]] = _read_target(value)

    def _compare_groups(self, groups: list[dict[str, Any]]) -> None:
        saved = [list(group["params"]) for group in groups]
        here = [list(group["params"]) for group in self.own["param_groups"]]
        if not all(type(name) is str for group in saved for name in group):
            raise CheckpointError("its optimizer's groups are not lists of parameters")
        if sorted(map(sorted, saved)) == sorted(map(sorted, here)):
            return
        names, own = ({name for group in groups for name in group} for groups in (saved, here))
        what = f"{', '.join(sorted(names ^ own)[:5])} on one side only"
        if names == own:
            what = f"{list(map(len, saved))} parameters there, {list(map(len, here))} here, or in another division"
        raise CheckpointError(f"checkpoint and optimizer do not have the same groups: {what}; make it as it was made")

    def _add_targets(self, state: dict[Any, Any]) -> None:
        assert self.optimizer is not None
        parameters: dict[str, torch.Tensor] = {}
        if not self.flat:
            for own, group in zip(self.own["param_groups"], self.optimizer.param_groups, strict=True):
                parameters.update(zip(own["params"], group["params"], strict=True))
        for parameter, entry in state.items():
            for key, name in entry.items():
                if isinstance(name, TensorName):
                    self.targets[name] = self._empty(str(parameter), str(key), self._known(name), parameters)
        for name, target in self.targets.items():
            if target.device.type == "meta":
                self.targets[name] = torch.empty_like(target, device="cpu")

    def _empty(self, name: str, key: str, known: TensorStorageMetadata, parameters: Mapping[str, torch.Tensor]) -> Any:
        """A tensor for one entry of the optimizer's state: sharded like its parameter, in the dtype of the file."""
        parameter, dtype = parameters.get(name), known.properties.dtype
        own = self.own["state"].get(name, {}).get(key)
        unable = "FullyShardedDataParallel" if self.flat else type(self.optimizer).__name__
        ours = isinstance(self.optimizer, LayoutOptimizer) and not self.flat
        if (key in HELD and not ours) or (dtype == torch.bfloat16 and self.flat):
            raise CheckpointError(
                f"its optimizer's state is as it was held, such as {key} of {name}, which {unable} cannot load: "
                "load it into an optimizer of halfstep, in one process or under fully_shard, and save it there "
                "with optimizer_state='canonical'"
            )
        if self.flat and isinstance(own, torch.Tensor | ShardedTensor):
            if (own.size(), own.dtype) != (known.size, dtype):
                raise CheckpointError(
                    f"{key} of {name} is {tuple(known.size)} {dtype} in the checkpoint and "
                    f"{tuple(own.size())} {own.dtype} in the optimizer; use the same model and optimizer"
                )
            return own  # the tensor that FSDP1 made for this purpose
        coded = key in CODE_KEYS or key in SCALE_KEYS
        # Codes that cannot be sharded with their scales are read as a whole.
        if parameter is not None and (not coded or shards_blocks(parameter)):
            empty = empty_entry(parameter, key, known.size, dtype)
            if empty is not None:
                return empty
        return torch.empty(known.size, dtype=dtype, device="cpu")

    def load_into_live(self, rollback: Rollback) -> None:
        """Load the model, then the optimizer, whose masters set the parameters, then the scaler."""
        if self.model is None:
            return
        fresh = unpack(self.reader.tree["model"], self.targets.__getitem__)
        if self.flat:
            rollback.objects = {
                name: old for name, old in self.own_model.items() if not isinstance(old, torch.Tensor | ShardedTensor)
            }
            rollback.copy()
        else:
            rollback.objects = dict(self.own_model)
            for name, live in self.own_model.items():
                if isinstance(live, torch.Tensor):
                    rollback.exchange(local(live), local(fresh[name]))
                    fresh[name] = live
        set_model_state_dict(self.model, fresh)
        if self.optimizer is not None:
            loaded = unpack(self.reader.tree["optimizer"], self.targets.__getitem__)
            # Not strict, because parameters that never had a gradient have no state.
            set_optimizer_state_dict(self.model, self.optimizer, loaded, options=StateDictOptions(strict=False))
            if isinstance(self.optimizer, LayoutOptimizer):
                self.optimizer.fit_masters(self.model.parameters())
        if self.scaler is not None:
            self.scaler.load_state_dict(unpack(self.reader.tree["scaler"], self._own_tensor))


def _read_target(value: Any) -> Any:
    """A tensor for one entry of the model's state: on the CPU, sharded like the entry."""
    if isinstance(value, ShardedTensor):  # of FSDP1; already a copy
        return value
    if isinstance(value, DTensor):
        return DTensor(_read_target(value.to_local()), value._spec, requires_grad=False)
    return torch.empty_like(value, device="cpu", requires_grad=False)
