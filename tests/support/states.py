"""What tests of optimizers compare: the bits of parameters and canonical state, and a state after a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from oracles import bits


def held(optimizer: Any, parameters: Iterable[torch.Tensor], keys: Iterable[str] = ()) -> list[Any]:
    """Bits of all parameters and of the canonical state, or of some `keys` of it."""
    entries = optimizer.canonical_state_dict()["state"].values()
    state = [bits(entry[key]) for entry in entries for key in sorted(entry) if not keys or key in keys]
    return [bits(parameter.detach()) for parameter in parameters] + state


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether arrays of bits are equal."""
    return len(left) == len(right) and all((a == b).all() for a, b in zip(left, right, strict=True))


def through_a_file(state: Any, weights_only: bool = True) -> Any:
    """`state` after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
