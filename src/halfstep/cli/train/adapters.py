"""Fine-tuning: the weights of an earlier run, and adapters of low rank beside frozen matrices.

A matrix W of o rows and i columns gets two trained ones, A of r rows and i columns and B of o rows and r columns, and
computes W·x + (alpha / r)·B·A·x (Hu et al., LoRA, 2021, arXiv:2106.09685, equation 3). A is drawn at random and B is 0,
so that training begins with the model as it is. Everything else is frozen: it has neither gradient nor optimizer state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep.cli.train.model import SIZES, Matrices
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import CheckpointError


class Base(NamedTuple):
    """The weights of an earlier run, in fp32 or in the dtype in which it trained, and their SHA-256."""

    weights: dict[str, torch.Tensor]
    digest: str


def read_base(path: Path, size: str) -> Base:
    """Read the weights of a run of ``halfstep train``. Its adapters, if it has some, are added to their matrices.

    Args:
        path: a checkpoint, or the folder of some, whose newest is read: that of a run, or its ``--out``.
        size: the name of the size that the model must have.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or of another size.
    """
    is_one = (path / "manifest.json").is_file()
    folders = [path, *sorted(path.glob("checkpoints/*"))] if path.is_dir() and not is_one else []
    found = [there[-1][1] for there in map(checkpoint.checkpoints, folders) if there]
    if path.is_dir() and not is_one and len(found) != 1:
        held = f"those of {len(found)} runs" if found else "no checkpoint"
        raise CheckpointError(f"--base {path} holds {held}; pass one checkpoint, or the folder of one run's")
    file = found[0] if found else path
    state = checkpoint.load(file)
    made = state.get("plan")
    if not isinstance(made, dict) or not isinstance(state.get("model"), Mapping):
        raise CheckpointError(f"--base {file} is no checkpoint of halfstep train; pass one that it wrote")
    if made.get("size") != size:
        raise CheckpointError(
            f"--base {file} has size {made.get('size')!r}, and --size is {size!r}; pass --size {made.get('size')}"
            if made.get("size") in SIZES
            else f"--base {file} has an unknown size; pass a checkpoint that halfstep train wrote"
        )
    weights = _merged(dict(state["model"]), made)
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy().data)
    return Base(weights, digest.hexdigest())


def _merged(weights: dict[str, torch.Tensor], made: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Weights in which each matrix has its adapter added, computed in fp64 and rounded once."""
    for name in [name for name in weights if name.endswith("_a")]:
        matrix = name.removesuffix("_a")
        down, up, weight = weights.pop(name), weights.pop(f"{matrix}_b"), weights[matrix]
        product = up.double() @ down.double() * (made["lora_alpha"] / made["lora"])
        weights[matrix] = (weight.double() + product).to(weight.dtype)
    return weights


def load_base(model: nn.Module, base: Base) -> None:
    """Load weights into a model in fp32 without adapters.

    Raises:
        CheckpointError: names or shapes differ.
    """
    checkpoint.load_model(model, {name: weight.float() for name, weight in base.weights.items()})


def add(model: nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Freeze a model, and add adapters to the matrices of its blocks.

    Args:
        model: the model, in fp32.
        rank: number of rows of A.
        alpha: the adapters' product is multiplied by alpha / rank.
        seed: of A, whose elements are normal with a variance of 1 / columns.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Matrices):
            module.adapter_scale = alpha / rank
            for name, weight in list(module.named_parameters(recurse=False)):
                rows, columns = weight.shape
                down = torch.empty(rank, columns, dtype=torch.float32)
                nn.init.normal_(down, std=columns**-0.5, generator=generator)
                module.register_parameter(f"{name}_a", nn.Parameter(down))
                up = torch.zeros(rows, rank, dtype=torch.float32)
                module.register_parameter(f"{name}_b", nn.Parameter(up))
