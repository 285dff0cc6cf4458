"""Checkpoints that are atomic, verified and independent of the topology that wrote them.

A checkpoint is a folder, ``step-00000120/``, which appears by one rename once all ranks have written their files:

    model-00001-of-00004.safetensors       this rank's shards of the model, under the names in its state dict
    optimizer-00001-of-00004.safetensors   this rank's shards of the optimizer state
    state-00001-of-00004.safetensors       tensors of the scaler and of the user's state
    state.json                             all other values, and where each tensor belongs among them
    manifest.json                          size and SHA-256 of every file, and which file holds which shard

Tensors are sharded as torch.distributed.checkpoint (DCP) plans it, and everything else is JSON (storage.py).
Whatever interrupts a save (Ctrl-C, ``kill -9`` of a rank, a full disk, a power failure), every folder with the name of
a checkpoint is complete, and earlier checkpoints still exist (atomic.py). See docs/checkpoints.md.
"""

from halfstep.integrations.checkpoint.api import PendingSave, convert, export, load, save
from halfstep.integrations.checkpoint.atomic import CheckpointError, checkpoints, newest
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
