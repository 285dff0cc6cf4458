"""Checkpoints that survive: written beside the last good one, checked, and only then given its name.

A checkpoint is one file, ``step-00000120.pt``: a ``torch.save`` archive followed by one line with the SHA-256 of all
bytes before it. ``torch.load(path, weights_only=True)`` reads it directly; `load` also proves that no byte changed
(torch does not: its archive reader skips the checksums).

`save` writes to a temporary name in the same folder, flushes and fsyncs it, renames it, fsyncs the folder, and only
then removes older files. Whatever stops it (Ctrl-C, ``kill -9``, a full disk, a power cut), every file that carries a
checkpoint's name is complete, and the newest one that was there before is still there.

The state is the same whatever the strategy: `gather` turns sharded tensors (FSDP2's DTensors) into whole ones on the
CPU, `scatter` cuts them again for the mesh of the run that loads them.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

_NAME = re.compile(r"step-(\d{8,})\.pt")
_TRAILER = b"\nhalfstep sha256 %s\n"
_TRAILER_LENGTH = len(_TRAILER % (b"0" * 64))
_TEMPORARY = ".checkpoint-"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or trusted. The message names the file and what to do."""


class _Hashed:
    """A file that hashes what is written to it, so that the archive is never read back or held in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in `folder` as (step, path), oldest first; none if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Windows cannot open folders and does this by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(folder: str | Path, step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write `state` as the checkpoint of `step`, then remove all but the newest `keep` up to this step.

    Args:
        folder: where the run's checkpoints lie; made if missing. One process writes: rank 0.
        step: steps done, ≥ 0.
        state: tensors, numbers, strings, lists and dicts: what ``torch.load(weights_only=True)`` can read.
        keep: how many to leave, this one included, ≥ 1.

    Returns:
        The file's path. When this returns, the checkpoint is on disk.

    Raises:
        CheckpointError: it could not be written. Earlier checkpoints are untouched.
        ValueError: `step` or `keep` out of range.
    """
    if step < 0:
        raise ValueError(f"step is {step}; allowed are 0 and above")
    if keep < 1:
        raise ValueError(f"keep is {keep}; allowed are 1 and above: a save never leaves the folder empty")
    folder = Path(folder)
    path = folder / f"step-{step:08d}.pt"
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_TEMPORARY}*"):  # of a process killed while saving
            left.unlink(missing_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
        with os.fdopen(descriptor, "wb") as file:
            hashed = _Hashed(file)
            torch.save(dict(state), hashed)  # type: ignore[arg-type]  # it writes and flushes, no more
            file.write(_TRAILER % hashed.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; earlier checkpoints are untouched; free space or fix permissions"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    older = [old for number, old in checkpoints(folder) if number <= step]
    for old in older[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _complaint(path: Path) -> str | None:
    """Why the file is not what `save` wrote, or None if every byte is."""
    size = path.stat().st_size
    if size <= _TRAILER_LENGTH:
        return f"it has {size} bytes, which is too short: it was cut off"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = size - _TRAILER_LENGTH
        while left:
            part = file.read(min(left, 1 << 20))
            if not part:
                return "it became shorter while it was read"
            digest.update(part)
            left -= len(part)
        trailer = file.read()
    if not (trailer.startswith(_TRAILER[:17]) and trailer.endswith(b"\n")):
        return "its last line is not a checksum: it was cut off, or halfstep did not write it"
    if trailer != _TRAILER % digest.hexdigest().encode():
        return "its bytes do not have the checksum on its last line: it was changed or damaged"
    return None


def _remedy(path: Path) -> str:
    good = [old for _, old in checkpoints(path.parent) if old != path and _complaint(old) is None]
    if good:
        return f"{good[-1]} is good: continue from that file, or delete the damaged one"
    return "no other checkpoint in that folder is good: delete it and start anew, or restore it from a copy"


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, after proving that it is complete and unchanged.

    Raises:
        CheckpointError: missing, unreadable, truncated, or damaged by even one bit. The message names the newest
            other checkpoint in the folder that is good.
    """
    path = Path(path)
    if not path.is_file():
        present = ", ".join(str(old) for _, old in checkpoints(path.parent)) or "none"
        raise CheckpointError(f"no checkpoint {path}; in that folder there are: {present}")
    try:
        complaint = _complaint(path)
        if complaint is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict):
                return state
            complaint = f"it holds a {type(state).__name__}, not a dict"
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        complaint = str(error)
    raise CheckpointError(f"checkpoint {path} cannot be used: {complaint}; {_remedy(path)}")


def gather(state: Any) -> Any:
    """A copy of nested dicts and lists with every tensor whole and on the CPU.

    Collective where there are DTensors: every rank must call it with the same structure.
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
    """`tensor` where `like` is: on its device, and cut over its mesh if that is a DTensor. The type is kept."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    # every rank has read the same file, so each takes its part and nothing is sent
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy gathered parameters and buffers into `model`, sharded or not.

    Raises:
        CheckpointError: a name, shape or type differs; then nothing has been copied.
    """
    own = model.state_dict()
    if own.keys() != state.keys():
        differing = ", ".join(sorted(own.keys() ^ state.keys())[:5])
        raise CheckpointError(
            f"checkpoint and model do not have the same tensors: {differing}; load it into its own model"
        )
    for name, value in own.items():
        if value.shape != state[name].shape or value.dtype != state[name].dtype:
            raise CheckpointError(
                f"{name} is {tuple(state[name].shape)} {state[name].dtype} in the checkpoint and {tuple(value.shape)} "
                f"{value.dtype} in the model; load it into a model of the same size and precision"
            )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(scatter(state[name], value))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a gathered ``optimizer.state_dict()``, cutting what has its parameter's shape as the parameter is cut."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(parameters) != len(numbers):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(numbers)} parameters, this one {len(parameters)}; use the same model"
        )
    of = dict(zip(numbers, parameters, strict=True))

    def cut(number: int, value: Any) -> Any:
        return (
            scatter(value, of[number]) if isinstance(value, torch.Tensor) and value.shape == of[number].shape else value
        )

    cut_state = {
        number: {key: cut(number, value) for key, value in entry.items()} for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": cut_state})


def with_masters(state_dict: Mapping[str, Any], masters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """An optimizer's `state_dict` with fp32 masters that were kept outside of it, for `halfstep.AdamW.load_state_dict`.

    apex keeps them so: ``list(amp.master_params(optimizer))`` with opt_level O2, ``optimizer.master_params`` of a
    ``FusedAdam(use_master=True)``. A parameter that never had a gradient gets state of zeros beside its master.

    Args:
        state_dict: with ``state`` and ``param_groups``; it is not changed.
        masters: one per parameter, in the order of the groups, floating-point.

    Raises:
        ValueError: their number is not that of the parameters, or one is no floating-point tensor.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    masters = list(masters)
    if len(masters) != len(indices):
        raise ValueError(
            f"masters has {len(masters)} tensors; allowed is {len(indices)}, one for each parameter in the checkpoint, "
            "in the order of its groups"
        )
    state = dict(state_dict["state"])
    for place, (index, master) in enumerate(zip(indices, masters, strict=True)):
        if not isinstance(master, torch.Tensor) or not master.is_floating_point():
            what = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
            raise ValueError(f"masters[{place}] is {what}; allowed are floating-point tensors")
        master = master.detach().float()
        zeros = torch.zeros_like(master)
        entry = state.get(index) or {"step": 0.0, "exp_avg": zeros, "exp_avg_sq": zeros}
        state[index] = {**entry, "master": master}
    return {**state_dict, "state": state}
