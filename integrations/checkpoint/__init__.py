"""Checkpoints that are atomic, verified and independent of the topology that wrote them.

A checkpoint is a folder, ``step-00000120/``, that appears by one rename when all ranks have written:

    model-00001-of-00004.safetensors       each rank's parts of the model, under the model's own names
    optimizer-00001-of-00004.safetensors   ... of the optimizer's state
    state-00001-of-00004.safetensors       tensors of the scaler and of the run's own state
    state.json                             everything that is not a tensor, and which tensor belongs where
    manifest.json                          size and SHA-256 of these files; which part of which tensor is in which

Tensors are divided as torch.distributed.checkpoint plans it (storage.py), the rest is JSON (tree.py).
Whatever interrupts a save (Ctrl-C, ``kill -9`` of a rank, a full disk, a power failure), every folder with the name of
a checkpoint is complete, and earlier checkpoints still exist (atomic.py). See docs/checkpoints.md.
"""

from halfstep.integrations.checkpoint.api import PendingSave, load, save
from halfstep.integrations.checkpoint.atomic import CheckpointError, checkpoints, newest
from halfstep.integrations.checkpoint.conversion import convert, export
from halfstep.integrations.checkpoint.whole import gather, load_model, load_optimizer, scatter, with_masters

__all__ = [
    "CheckpointError",
    "PendingSave",
    "checkpoints",
    "convert",
    "export",
    "gather",
    "load",
    "load_model",
    "load_optimizer",
    "newest",
    "save",
    "scatter",
    "with_masters",
]
