"""`save` and `load`: all ranks write and read their shards in parallel, whatever the topology. `convert` and `export`.

A shard is identified by the name of its parameter and its offsets in the full parameter. The optimizer state is read
into new tensors with the dtype of the file, and loaded only after all ranks have read everything.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.fsdp import FullyShardedDataParallel

from halfstep.integrations import interrupts
from halfstep.integrations.checkpoint import atomic, storage
from halfstep.integrations.checkpoint.atomic import CheckpointError, error_text, explained
from halfstep.integrations.checkpoint.importing import open_checkpoint, read_file
from halfstep.integrations.checkpoint.storage import Part, Reader, TensorName, pack, parts_to_write, unpack
from halfstep.integrations.checkpoint.whole import check_groups, check_model, check_optimizer_state, restoring
from halfstep.integrations.optim.classes import LayoutOptimizer, saving
from halfstep.integrations.optim.options import check_format
from halfstep.integrations.optim.state import empty_entry
from halfstep.integrations.pickles import PickleError
from halfstep.numerics.scaling.sharding import Sharding, checked_group, default_group, local
from halfstep.numerics.state_layout import HELD

T = TypeVar("T")
UNTOUCHED = "; earlier checkpoints are untouched"
# By the default process group, a group of all ranks for checkpoints only. Weak references, because torch aborts at exit
# if a group outlives destroy_process_group.
_groups: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def _group_for_checkpoints() -> Any:
    """A gloo group of all ranks, which keeps the collectives of an asynchronous save apart from those of training."""
    default: Any = dist.group.WORLD
    group = _groups[default]() if default in _groups else None
    if group is None:
        group = dist.new_group(backend="gloo")
        _groups[default] = weakref.ref(group)
    return group


class Ranks:
    """The ranks that save or load together, which exchange small objects over gloo."""

    def __init__(self, process_group: Any = None, alone: bool = False) -> None:
        self.members, self.number, self.group = [0], 0, None  # global ranks, and the index of this one among them
        base = None if alone else checked_group(process_group) or default_group()
        if base is None:
            return
        self.members, self.number = dist.get_process_group_ranks(base), dist.get_rank(base)
        if len(self.members) == 1:
            return
        # Creating a group of a subset of the ranks requires all ranks to call new_group, so use the one passed in.
        self.group = _group_for_checkpoints() if base is dist.group.WORLD else base
        if "cpu:" not in dist.get_backend_config(self.group):
            raise ValueError(
                "Expected process_group to have a backend for CPUs, but got "
                f'{dist.get_backend_config(self.group)}: make it with new_group(ranks, backend="gloo")'
            )

    def together(self, function: Callable[[], T]) -> list[T]:
        """Run `function` on every rank and return all results. If it raises on one rank, all raise, so that none hangs.

        Exceptions that end the program are reraised on their own rank, after the other ranks have been told.
        """
        error: BaseException | None = None
        try:
            answer: Any = function(), None
        except BaseException as failed:
            # Errors are sent as text: an exception that cannot be unpickled would hang the other ranks.
            answer, error = (None, error_text(failed)), failed
        answers = [answer] * len(self.members)
        try:
            if self.group is not None:
                dist.all_gather_object(answers, answer, group=self.group)
        except RuntimeError as lost:  # a rank was killed
            raise CheckpointError(error_text(error) if error else f"a rank does not respond: {lost}") from lost
        if error is not None and not isinstance(error, Exception):
            raise error
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}" if len(answers) > 1 else text) from error
        return [result for result, _ in answers]


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable autograd, and suppress torch's warnings that FSDP1 is deprecated."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def _only_with_model(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"Expected a model together with {name}, but got model=None: pass model=")


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, form: Any) -> dict[str, Any]:
    """The optimizer state keyed by parameter name. Collective under FSDP1, where it is always canonical."""
    with saving(optimizer, form):
        return torch_state.get_optimizer_state_dict(model, optimizer)


# ------------------------------------------------------------------------------------------------------------ saving


class PendingSave:
    """A checkpoint that is being written in the background."""

    _latest: ClassVar[PendingSave | None] = None  # None once its outcome has been collected

    def __init__(self, future: Future[Path], path: Path) -> None:
        self._future, self.path = future, path

    def done(self) -> bool:
        """Whether the save has finished, successfully or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is on disk on all ranks, and return its path.

        Raises:
            CheckpointError: the checkpoint could not be written. Earlier checkpoints are unchanged.
            TimeoutError: writing took longer than `timeout` seconds.
        """
        if not wait([self._future], timeout).done:
            raise TimeoutError(f"{self.path} was not complete after {timeout} s")
        if PendingSave._latest is self:
            PendingSave._latest = None
        return self._future.result()


_writer = ThreadPoolExecutor(1, thread_name_prefix="halfstep-checkpoint")


def _finish_pending() -> None:
    """Wait for the asynchronous save, if any, and raise its error unless `result` has already raised it."""
    if PendingSave._latest is not None:
        PendingSave._latest.result()


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
    """Write the checkpoint of `step`, then delete all but the newest `keep` checkpoints up to this step.

    Args:
        folder: folder of the run's checkpoints, created if missing. With `model`, all ranks must see the same folder.
        step: number of completed steps, ≥ 0.
        state: tensors, numbers, strings, bytes, numpy arrays, and lists, tuples, sets and dicts of these. With `model`,
            the first rank's state is saved; without, only rank 0 may call `save`.
        keep: number of checkpoints to keep, including this one, ≥ 1.
        model: a plain model, or one wrapped in DDP, FSDP1, FSDP2, tensor parallelism or a combination. All ranks call
            `save`, and each writes its shards.
        optimizer: the optimizer of the model's parameters.
        scaler: any object with a ``state_dict()``, such as a loss scaler.
        optimizer_state: ``"held"`` stores masters and moments as they are in memory: 8-bit codes and scales, bf16
            moments, and remainders instead of masters. ``"canonical"`` stores them in fp32, as ``"held"`` also does for
            other optimizers and under FSDP1. `load` reads both into every layout.
        asynchronous: copy everything to the CPU, return, and write the files in a thread while training continues. Only
            one save runs at a time: the next `save` or `load` waits for it, and raises if it failed.
        process_group: the ranks that save together, all with the same parameters. Default: all ranks.

    Returns:
        The `Path` of the checkpoint, which is on disk. With `asynchronous`, a `PendingSave` whose ``result()`` waits
        for the save; call it before ``destroy_process_group``.

    Raises:
        CheckpointError: the checkpoint could not be written; all ranks raise. Earlier checkpoints are untouched.
        ValueError: an argument is out of range, or requires `model`.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = halfstep.AdamW(model.parameters())
        >>> path = checkpoint.save("run", 30, {"tokens": 3000}, model=model, optimizer=optimizer)
        >>> checkpoint.load(path, model=model, optimizer=optimizer)
        {'tokens': 3000}
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"Expected step to be an integer of at least 0, but got {step!r}")
    if type(keep) is not int or keep < 1:
        raise ValueError(
            f"Expected keep to be an integer of at least 1, but got {keep!r}: a save never leaves the folder empty"
        )
    check_format(optimizer_state, "optimizer_state")
    if model is None:
        _only_with_model(optimizer=optimizer, scaler=scaler, asynchronous=asynchronous, process_group=process_group)
    _finish_pending()
    path = Path(folder) / f"step-{step:08d}"
    tree: dict[str, Any] = {"step": step}
    parts: list[Part] = []
    with interrupts.held():
        ranks = Ranks(process_group, alone=model is None)
        sharded: dict[str, Any] = {}
        if model is not None:
            with _quiet():
                sharded["model"] = dict(torch_state.get_model_state_dict(model))
                if optimizer is not None:
                    sharded["optimizer"] = _optimizer_state(model, optimizer, optimizer_state)
        of_first = {
            "scaler": None if scaler is None else scaler.state_dict(),
            "state": None if state is None else dict(state),
        }

        def prepare() -> str:
            tensors: dict[str, torch.Tensor] = {}
            tensors_of_first: dict[str, torch.Tensor] = {}
            tree.update((name, pack(content, tensors, name)) for name, content in sharded.items())
            tree.update((name, pack(content, tensors_of_first, name)) for name, content in of_first.items())
            rank = ranks.members[ranks.number]
            parts.extend(parts_to_write(tensors, rank, ranks.members))
            if ranks.number == 0:
                parts.extend(parts_to_write(tensors_of_first, rank, [rank]))
            if asynchronous:
                parts[:] = [part._replace(data=part.data.to("cpu", copy=True)) for part in parts]
            return hashlib.sha256("\0".join(sorted(tensors)).encode("utf-8", "surrogatepass")).hexdigest()

        with explained(f"cannot write checkpoint {path}", UNTOUCHED):
            if len(set(ranks.together(prepare))) > 1:
                raise CheckpointError(
                    "Expected all ranks to hold the same parameters, but they do not: pass process_group= of those "
                    "that do, and a folder for each group"
                )
        if not asynchronous:
            return write(path, tree, parts, keep, ranks)
        PendingSave._latest = PendingSave(_writer.submit(write, path, tree, parts, keep, ranks), path)
        return PendingSave._latest


def write(path: Path, tree: dict[str, Any], parts: list[Part], keep: int | None, ranks: Ranks) -> Path:
    """Write a checkpoint from all `ranks`: the first rank's `tree`, and the `parts` of every rank."""
    step, size = tree["step"], len(ranks.members)
    advice = f"{UNTOUCHED}; free space or fix permissions, and restart ranks that were killed"
    with ExitStack() as stack, explained(f"cannot write checkpoint {path}", advice):

        def begin() -> Path | None:
            return stack.enter_context(atomic.unfinished_save(path.parent)) if ranks.number == 0 else None

        def finish() -> None:
            if ranks.number == 0:
                content = {"format": atomic.FORMAT, "step": step, "world_size": size}
                storage.write_manifest(folder, content, tree, shards)
                atomic.put_in_place(folder, path)
                if keep is not None:
                    atomic.prune(folder, step, keep)

        folder: Any = ranks.together(begin)[0]
        suffix = f"{ranks.number + 1:05}-of-{size:05}"
        shards = ranks.together(lambda: storage.write_shards(folder, suffix, parts))
        ranks.together(finish)
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
    """Load a checkpoint, after verifying that it is complete and unmodified.

    All ranks load `model`, `optimizer` and `scaler` together, whatever topology saved them; masters and moments are
    bit-identical to those saved. Everything is read into new memory and checked before anything is modified. Folders of
    earlier versions load too, as do those of ``dcp.save({"model": ..., "optimizer": ...})``, which have no checksums.

    Args:
        path: path of the checkpoint; ``newest(folder)`` returns the latest.
        model, optimizer, scaler: the objects to load, with the same names, shapes and groups as those saved. Optimizer
            options that determine the layout in memory are not changed.
        process_group: the ranks that load together. Default: all ranks.

    Returns:
        The saved ``state``, or {} if there was none.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or corrupted, even by one bit, or belongs to another
            model or optimizer. All ranks raise, and nothing is modified. The message names the file and the newest
            intact checkpoint of that folder.
        ValueError: the checkpoint was saved with `model`, but is loaded without.

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
        reader = open_verified(path, ranks)
        if model is None and "model" in reader.tree:
            raise ValueError(f"Expected model for {path}, which was saved with one, but got None: pass model=")
        loading = _Load(reader, model, optimizer, scaler)
        with explained(f"checkpoint {path} does not fit"), _quiet(), ExitStack() as undo:
            for owner in (optimizer, scaler):
                if owner is not None:
                    restoring(undo, vars(owner))
            ranks.together(loading.prepare)
            ranks.together(lambda: reader.read_into(loading.targets))
            ranks.together(lambda: loading.load_into_live(undo))
            undo.pop_all()
        return loading.state


def open_verified(path: Path, ranks: Ranks) -> Reader:
    """A reader of a checkpoint after verifying every byte of it. Each rank verifies some of the files."""
    if not path.is_dir():
        raise atomic.missing(path)
    readers: list[Reader] = []

    def verify() -> None:
        readers.append(open_checkpoint(path))
        readers[0].verify(ranks.number, len(ranks.members))

    try:
        ranks.together(verify)
    except CheckpointError as error:
        advice = ranks.together(lambda: atomic.remedy(path) if ranks.number == 0 else "")[0]
        raise CheckpointError(f"checkpoint {path} cannot be used: {error}; {advice}") from error
    return readers[0]


_ABSENT = {
    "model": "model: load it without model=, then use load_model and load_optimizer",
    "optimizer": "state of an optimizer; pass optimizer=None to load the model alone",
    "scaler": "state of a scaler: pass scaler=None to start from the initial scale",
}


class _Load:
    """One call of `load`: the checkpoint, the objects to load, and the tensors that are read."""

    def __init__(self, reader: Reader, model: Any, optimizer: torch.optim.Optimizer | None, scaler: Any) -> None:
        self.reader, self.model, self.optimizer = reader, model, optimizer
        objects = {"model": model, "scaler": scaler, "optimizer": optimizer}
        self.objects: dict[str, Any] = {name: value for name, value in objects.items() if value is not None}
        modules = () if model is None else model.modules()
        self.flat = any(isinstance(module, FullyShardedDataParallel) for module in modules)  # FSDP1's flat parameters
        self.targets: dict[str, Any] = {}

    def prepare(self) -> None:
        """Check the checkpoint against the model and optimizer, and allocate its tensors. Collective under FSDP1."""
        tree = self.reader.tree
        self.state = unpack(tree.get("state"), self.reader.copy) or {}
        if not isinstance(self.state, dict):
            raise CheckpointError(f"its state is a {type(self.state).__name__}")
        if self.model is None:
            return
        if missing := [name for name in self.objects if tree.get(name) is None]:
            raise CheckpointError(f"it holds no {_ABSENT[missing[0]]}")
        self.current: dict[str, Any] = dict(torch_state.get_model_state_dict(self.model))
        check_model(unpack(tree["model"], self.reader.empty), self.current)
        names = unpack(tree["model"])
        self.tensors = [key for key, name in names.items() if isinstance(name, TensorName)]  # of the model
        self.targets = {names[key]: _on_cpu(self.current[key]) for key in self.tensors}
        if self.optimizer is None:
            return
        saved = unpack(tree["optimizer"])
        check_optimizer_state(saved)
        current = _optimizer_state(self.model, self.optimizer, "held")
        check_groups(saved["param_groups"], current["param_groups"])
        parameters: dict[str, torch.Tensor] = {}
        if not self.flat:
            for named, group in zip(current["param_groups"], self.optimizer.param_groups, strict=True):
                parameters.update(zip(named["params"], group["params"], strict=True))
        for owner, entry in saved["state"].items():
            for key, name in entry.items():
                if isinstance(name, TensorName):
                    present, whole = current["state"].get(owner, {}).get(key), self.reader.empty(name)
                    target = self._target(f"{key} of {owner}", key, whole, parameters.get(owner), present)
                    if target is not None:
                        self.targets[name] = target

    def _target(self, label: str, key: str, saved: torch.Tensor, parameter: Any, present: Any) -> Any:
        """An empty tensor for an entry of the optimizer state, sharded like its parameter, with the dtype of the file.

        None if the entry is to be read unsharded.
        """
        size, dtype = saved.shape, saved.dtype
        ours = isinstance(self.optimizer, LayoutOptimizer) and not self.flat
        if (key in HELD and not ours) or (dtype == torch.bfloat16 and self.flat):
            unable = "FullyShardedDataParallel" if self.flat else type(self.optimizer).__name__
            raise CheckpointError(
                f"its optimizer state is in the held format, such as {label}, which {unable} cannot load: "
                "load it into a halfstep optimizer, in one process or under fully_shard, and save it again with "
                "optimizer_state='canonical'"
            )
        if self.flat and isinstance(present, torch.Tensor | ShardedTensor):
            if (present.size(), present.dtype) != (size, dtype):
                raise CheckpointError(
                    f"{label} is {tuple(size)} {dtype} in the checkpoint and {tuple(present.size())} {present.dtype} "
                    "in the optimizer; use the same model and optimizer"
                )
            return present  # FSDP1 allocated it for loading
        if parameter is None:
            return None
        if isinstance(self.optimizer, LayoutOptimizer):
            parameter = self.optimizer._target(parameter)
        return empty_entry(parameter, key, size, dtype)

    def load_into_live(self, undo: ExitStack) -> None:
        """Load the model, then the optimizer, whose masters set the parameters, then the scaler.

        `undo` restores all of them bit for bit. The model's old and new values are swapped, so keeping the old ones
        takes no extra memory. Only FSDP1, which writes its flat parameters itself, requires a copy.
        """
        if self.model is None:
            return
        saved = {name: unpack(self.reader.tree[name], self._read) for name in self.objects}
        fresh = saved["model"]
        not_strict = torch_state.StateDictOptions(strict=False)
        objects = {name: value for name, value in self.current.items() if name not in self.tensors}
        if objects:
            undo.callback(torch_state.set_model_state_dict, self.model, objects, options=not_strict)
        if self.flat:
            for tensor in map(torch.Tensor.detach, (*self.model.parameters(), *self.model.buffers())):
                undo.callback(local(tensor).copy_, local(tensor).clone())
        else:
            for name in self.tensors:
                live, new = local(self.current[name]), local(fresh[name])
                old = live.clone()
                live.copy_(new)
                new.copy_(old)
                del old  # before the next one is allocated
                undo.callback(live.copy_, new)
                fresh[name] = self.current[name]
        torch_state.set_model_state_dict(self.model, fresh)
        if self.optimizer is not None:
            # Not strict, because parameters that never had a gradient have no state.
            torch_state.set_optimizer_state_dict(self.model, self.optimizer, saved["optimizer"], options=not_strict)
            if isinstance(self.optimizer, LayoutOptimizer):
                self.optimizer.fit_masters(self.model.parameters())
        if "scaler" in saved:
            self.objects["scaler"].load_state_dict(saved["scaler"])

    def _read(self, name: str) -> torch.Tensor:
        """A tensor that `prepare` allocated and `read_into` filled, or an unsharded copy from the file."""
        return self.targets[name] if name in self.targets else self.reader.copy(name)


def _on_cpu(value: Any) -> Any:
    """An empty tensor on the CPU, sharded like `value`."""
    if isinstance(value, ShardedTensor):
        return value  # FSDP1 allocated it for loading
    return Sharding(value).like(torch.empty_like(local(value), device="cpu"))


# -------------------------------------------------------------------------------------------------------- conversion


def convert(old: str | Path, new: str | Path) -> Path:
    """Convert a checkpoint of an earlier version, or of torch.distributed.checkpoint, to the current format.

    Args:
        old: a file such as ``step-00000120.pt``, or a folder of shards. It is not modified.
        new: the folder to create, such as ``run/step-00000120``.

    Returns:
        `new`.

    Raises:
        CheckpointError: `old` is damaged or is not a checkpoint, or `new` exists or cannot be written.
    """
    old, new = Path(old), Path(new)
    if not old.exists():
        raise CheckpointError(f"{old} cannot be converted: it does not exist; pass a step-….pt or a checkpoint folder")
    if new.exists():
        raise CheckpointError(f"{new} exists: pass a folder that does not")
    tensors: dict[str, torch.Tensor] = {}
    with explained(f"{old} cannot be converted", errors=(OSError, PickleError, CheckpointError)):
        if old.is_dir():
            reader = open_checkpoint(old)
            reader.verify()
            tree = reader.tree
            unpack(tree, lambda name: tensors.setdefault(name, reader.tensor(name)))
        else:
            tree = {"state": pack(read_file(old), tensors, "state")}
    numbers = re.findall(r"\d+", new.name) or re.findall(r"\d+", old.stem)
    tree["step"] = int(numbers[-1]) if numbers else 0
    return write(new, tree, list(parts_to_write(tensors)), None, Ranks(alone=True))


def export(path: str | Path, out: str | Path) -> Path:
    """Write the model of a checkpoint to one file, ``model.safetensors``, for safetensors and transformers.

    With the model's ``config.json`` next to it, ``from_pretrained(out)`` loads it. The full model must fit in memory.

    Args:
        path: a checkpoint that was saved with ``model=``, by any number of ranks.
        out: the folder to write to, created if missing.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the checkpoint is damaged, or contains no model.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 40, model=torch.nn.Linear(3, 1))
        >>> checkpoint.export(path, "exported").name
        'model.safetensors'
    """
    path, out = Path(path), Path(out)
    reader = open_verified(path, Ranks(alone=True))
    if "model" not in reader.tree:
        raise CheckpointError(f"checkpoint {path} holds no model: save it with model=")
    names = unpack(reader.tree["model"])
    tensors = {key: reader.tensor(name) for key, name in names.items() if isinstance(name, TensorName)}
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / ".model.safetensors.unfinished"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, out / "model.safetensors")
    return out / "model.safetensors"
