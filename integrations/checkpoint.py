"""Checkpoints that are atomic: written under a temporary name, checked, and then renamed.

`save` and `load` support two kinds, which may be in the same folder:

- without a model, one process writes its state to one file, ``step-00000120.pt``;
- with a model, all ranks write a folder, ``step-00000120/``, each its own shards, in parallel and optionally in the
  background. It loads in any other topology with the same bits (checkpoint_sharded.py).

Whatever interrupts a save (Ctrl-C, ``kill -9`` of a rank, a full disk, a power failure), all files and folders with the
name of a checkpoint are complete, and earlier checkpoints still exist. `load` verifies that no byte has changed, which
torch does not: its archive reader skips the checksums. See checkpoint_files.py and docs/checkpoints.md.

The state in one file does not depend on the strategy: `gather` collects sharded tensors (DTensors of FSDP2) as complete
tensors on the CPU, and `scatter` shards them for the mesh of the run that loads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from halfstep.integrations import archive, interrupts, unfinished_saves
from halfstep.integrations import checkpoint_files as files
from halfstep.integrations.checkpoint_files import CheckpointError, checkpoints, newest
from halfstep.integrations.optim.foreign_codes import decode
from halfstep.integrations.optim.state import CODES, SCALES
from halfstep.integrations.rollback import Rollback

if TYPE_CHECKING:
    from halfstep.integrations.checkpoint_sharded import PendingSave

__all__ = [
    "CheckpointError",
    "checkpoints",
    "gather",
    "load",
    "load_model",
    "load_optimizer",
    "newest",
    "save",
    "scatter",
    "with_masters",
]


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
    optimizer_state: Literal["held", "canonical"] = "held",
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
    optimizer_state: Literal["held", "canonical"] = "held",
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
    optimizer_state: Literal["held", "canonical"] = "held",
    asynchronous: bool = False,
    process_group: Any = None,
) -> Path | PendingSave:
    """Write the checkpoint of `step`, then remove all but the newest `keep` up to this step.

    Args:
        folder: folder of the run's checkpoints, created if missing. With `model`, all ranks must see the same folder.
        step: number of completed steps, ≥ 0.
        state: tensors, numbers, strings, lists and dicts that ``torch.load(weights_only=True)`` can read. Without
            `model`, this is the checkpoint, and only rank 0 calls `save`. With `model`, the state of the first rank is
            stored with the shards.
        keep: number of checkpoints to keep, including this one, ≥ 1.
        model: a plain model, or one under DDP, FSDP1, FSDP2, tensor parallelism or several of these. All ranks call
            `save`, and each writes its shards.
        optimizer: optimizer of the model's parameters.
        scaler: an object with a ``state_dict()``, which is stored.
        optimizer_state: ``"held"`` stores the state of an optimizer of halfstep in the bytes that it takes in
            memory: codes and scales, bf16 moments, and remainders instead of masters. ``"canonical"`` stores them in
            fp32, which torch's optimizers, and parameters that FullyShardedDataParallel has flattened, can load; those
            are always saved so. `load` recognizes both, and loads both into every layout.
        asynchronous: copy everything to the CPU, return, and write the files in a thread while training continues. Only
            one save runs at a time: the next `save` or `load` waits for it, and raises if it failed.
        process_group: the ranks that save together, such as those of one pipeline. Default: all.

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
    if model is not None:
        from halfstep.integrations import checkpoint_sharded

        beside = {
            "step": step,
            "state": None if state is None else dict(state),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        return checkpoint_sharded.save(
            Path(folder), step, model, optimizer, held, beside, keep, asynchronous, process_group
        )
    _only_with_model(
        optimizer=optimizer,
        scaler=scaler,
        optimizer_state=None if held else optimizer_state,
        asynchronous=asynchronous or None,
        process_group=process_group,
    )
    with interrupts.held():
        return _save_file(Path(folder), step, state or {}, keep)


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


def _save_file(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    path = folder / f"{files.name_of(step)}.pt"
    own = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished_saves.clear(folder)
        own = unfinished_saves.UnfinishedSave(folder)
        with own.path.open("xb") as file:
            hashed = files.Hashed(file)
            archive.write(hashed, dict(state), "state")
            file.write(files.TRAILER % hashed.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        own.put_in_place(path)
        files.prune(folder, step, keep)
    except archive.ArchiveError as error:
        raise CheckpointError(f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched") from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched; free space or fix permissions"
        ) from error
    finally:
        if own is not None:
            own.end()
    return path


def load(
    path: str | Path,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    process_group: Any = None,
) -> dict[str, Any]:
    """Read a checkpoint, after verifying that it is complete and unchanged.

    One file is read to the CPU and returned. A folder of shards is read into `model`, `optimizer` and `scaler` by all
    ranks together, whatever topology saved it; masters and moments have the saved bits. Folders written by torch
    (``torch.distributed.checkpoint.save`` of ``{"model": ..., "optimizer": ...}``) can be read too; they have no
    checksums.

    Args:
        path: path of the checkpoint; ``newest(folder)`` finds the latest.
        model, optimizer, scaler: for a folder of shards; with the same names, shapes and groups as those saved. The
            options of the optimizer that describe the layout in memory are not changed.
        process_group: the ranks that load together. Default: all.

    Returns:
        The ``state`` that was saved; {} if there was none.

    Raises:
        CheckpointError: the checkpoint is missing, unreadable, truncated or damaged, even by one bit; a shard is
            missing or belongs to another checkpoint; or the checkpoint is of another model or optimizer. All ranks
            raise, and nothing is changed. The message names the file and the newest other good checkpoint there.
        ValueError: a folder of shards without `model`, or one file with it.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> path = checkpoint.save("run", 20, {"tokens": 2000})
        >>> checkpoint.load(checkpoint.newest("run"))
        {'tokens': 2000}
    """
    path = Path(path)
    if model is not None:
        if path.is_file():
            raise ValueError(
                f"Expected a folder of shards with model=, but got one file, {path}: load it without model, then use "
                "load_model and load_optimizer"
            )
        from halfstep.integrations import checkpoint_sharded

        beside = checkpoint_sharded.read(path, model, optimizer, scaler, process_group)
        return beside.get("state") or {}
    _only_with_model(optimizer=optimizer, scaler=scaler, process_group=process_group)
    if path.is_dir():
        raise ValueError(f"Expected one file without model=, but got a folder of shards, {path}: pass model=")
    if not path.is_file():
        raise files.missing(path)
    with interrupts.held():
        complaint = files.complaint(path)
        try:
            if complaint is None:
                return files.read_archive(path, path.stat().st_size - files.TRAILER_LENGTH)
        except (CheckpointError, OSError) as error:
            complaint = str(error)
        if not path.exists():  # a save has removed it meanwhile
            raise files.missing(path)
        raise CheckpointError(f"checkpoint {path} cannot be used: {complaint}; {files.remedy(path)}")


def gather(state: Any) -> Any:
    """A copy of nested dicts and lists with all tensors complete and on the CPU.

    Collective if there are DTensors: every rank must call it with the same structure.
    """
    if isinstance(state, Mapping):
        return {key: gather(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather(value) for value in state)
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return whole.detach().to("cpu", copy=True)
    return state


def scatter(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` on the device of `like`, and sharded over its mesh if `like` is a DTensor. The dtype is unchanged."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    # Every rank has read the same file, so each takes its shard and nothing is sent.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy gathered parameters and buffers into `model`, sharded or not.

    Raises:
        CheckpointError: a name, shape or dtype differs. Nothing was copied.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> saved, model = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> checkpoint.load_model(model, checkpoint.gather(saved.state_dict()))
        >>> torch.equal(model.weight, saved.weight)
        True
    """
    own = model.state_dict()
    if not isinstance(state, Mapping) or own.keys() != state.keys():
        keys = state.keys() if isinstance(state, Mapping) else set()
        differing = ", ".join(sorted(map(str, own.keys() ^ keys))[:5])
        raise CheckpointError(
            f"checkpoint and model do not have the same tensors: {differing}; load it into its own model"
        )
    for name, value in own.items():
        if not isinstance(state[name], torch.Tensor) or state[name].layout is not torch.strided:
            raise CheckpointError(f"{name} is not a dense tensor in the checkpoint; load it into its own model")
        if value.shape != state[name].shape or value.dtype != state[name].dtype:
            raise CheckpointError(
                f"{name} is {tuple(state[name].shape)} {state[name].dtype} in the checkpoint and {tuple(value.shape)} "
                f"{value.dtype} in the model; load it into a model of the same size and precision"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(scatter(state[name], value))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a gathered ``optimizer.state_dict()``. Tensors with the shape of their parameter are sharded like it.

    States of whole parameters of the 8-bit optimizers of bitsandbytes, torchao and flashoptim are decoded first.

    Raises:
        CheckpointError: the state is of another optimizer, or damaged. The optimizer is unchanged.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> saved, optimizer = halfstep.AdamW([weight], lr=0.1), halfstep.AdamW([weight], lr=0.2)
        >>> checkpoint.load_optimizer(optimizer, checkpoint.gather(saved.state_dict()))
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    check_optimizer_state(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(numbers)} parameters, this one {len(parameters)}; use the same model"
        )
    of = dict(zip(numbers, parameters, strict=True))

    def cut(number: int, key: str, value: Any) -> Any:
        # Codes are decoded with their scales before they are cut.
        whole = key in (*CODES.values(), *SCALES.values())
        shapes = of[number].shape, (*of[number].shape, 2)  # the latter of remainders in pairs of bytes
        fits = isinstance(value, torch.Tensor) and value.shape in shapes and not whole
        return scatter(value, of[number]) if fits else value

    rollback = Rollback(None, optimizer)
    try:
        cut_state = {
            number: {
                key: cut(number, key, value) for key, value in decode(entry, f"state of parameter {number}").items()
            }
            for number, entry in state["state"].items()
            if number in of
        }
        optimizer.load_state_dict({**state, "state": cut_state})
    except BaseException as error:
        rollback.put_back()
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {error}") from error


def check_optimizer_state(state: Any) -> None:
    """Raise unless `state` has the structure of an ``optimizer.state_dict()``.

    Raises:
        CheckpointError: it has another structure.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    whole = isinstance(entries, Mapping) and all(isinstance(entry, Mapping) for entry in entries.values())
    named = isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list)
        and all(type(one) in (int, str) for one in group["params"])
        for group in groups
    )
    if not whole or not named:
        raise CheckpointError(
            "the checkpoint's optimizer is not a state_dict with 'state' and 'param_groups'; load what was saved as one"
        )


def with_masters(state_dict: Mapping[str, Any], masters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Add fp32 masters to an optimizer's `state_dict`, for `halfstep.AdamW.load_state_dict`.

    apex does not save them in it: they are ``list(amp.master_params(optimizer))`` with opt_level O2, and
    ``optimizer.master_params`` of a ``FusedAdam(use_master=True)``. Parameters without state get a state of zeros.

    Args:
        state_dict: a dict with ``state`` and ``param_groups``, which is not changed.
        masters: floating-point tensors, one per parameter in the order of the groups.

    Returns:
        A copy of `state_dict` with the masters.

    Raises:
        ValueError: the number of masters is not that of the parameters, or one is not a floating-point tensor.

    Examples:
        >>> from halfstep.integrations import checkpoint
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        >>> optimizer = halfstep.AdamW([weight])
        >>> state = checkpoint.with_masters(optimizer.state_dict(), [torch.tensor([1.0001, 1.0002])])
        >>> optimizer.load_state_dict(state)
        >>> optimizer.masters()[weight]
        tensor([1.0001, 1.0002])
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    masters = list(masters)
    if len(masters) != len(indices):
        raise ValueError(
            f"Expected masters to have {len(indices)} tensors, one for each parameter in the checkpoint, in the order "
            f"of its groups, but got {len(masters)}"
        )
    state = dict(state_dict["state"])
    for place, (index, master) in enumerate(zip(indices, masters, strict=True)):
        if not isinstance(master, torch.Tensor) or not master.is_floating_point():
            what = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
            raise ValueError(f"Expected masters[{place}] to be a floating-point tensor, but got {what}")
        master = master.detach().float()
        zeros = torch.zeros_like(master)
        entry = state.get(index) or {"step": 0.0, "exp_avg": zeros, "exp_avg_sq": zeros}
        state[index] = {**entry, "master": master}
    return {**state_dict, "state": state}
