"""Conversion of checkpoints of earlier versions to the current format, and export of a model to a single file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfstep.integrations.checkpoint.api import Ranks, open_verified, write
from halfstep.integrations.checkpoint.atomic import CheckpointError
from halfstep.integrations.checkpoint.importing import open_checkpoint, read_file
from halfstep.integrations.checkpoint.storage import parts_to_write
from halfstep.integrations.checkpoint.tree import TensorName, pack, unpack
from halfstep.integrations.pickles import PickleError


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
        raise CheckpointError(
            f"{old} cannot be converted: it does not exist; pass a step-….pt or a checkpoint's folder"
        )
    if new.exists():
        raise CheckpointError(f"{new} exists: pass a folder that does not")
    tensors: dict[str, torch.Tensor] = {}
    try:
        if old.is_dir():
            reader = open_checkpoint(old)
            reader.verify()
            tree = reader.tree
            unpack(tree, lambda name: tensors.setdefault(name, reader.tensor(name)))
        else:
            tree = {"state": pack(read_file(old), tensors, "state")}
    except (OSError, PickleError, CheckpointError) as error:
        raise CheckpointError(f"{old} cannot be converted: {error}") from error
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
