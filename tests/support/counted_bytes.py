"""What is really allocated: bytes of the storages behind parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ("master", "remainder", "error_bits", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors on this rank inside lists, dicts, DTensors and objects that hold tensors as attributes."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


def storage_bytes(values: Any) -> int:
    """Bytes of all storages, one that several tensors share once."""
    # Meta storages have no address; each is known by its object, which must live until all are counted.
    storages = [tensor.untyped_storage() for tensor in tensors_in(values)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def counted(parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes by the planner's names; step counts and the like are ``scalars``."""
    listed = list(parameters)
    states = [dict(optimizer.state[p]) for p in listed if p in optimizer.state]
    made = {"weights": storage_bytes(listed), "gradients": storage_bytes([p.grad for p in listed])}
    for part in PARTS:
        size = storage_bytes([state.pop(part) for state in states if part in state])
        if size:
            made["remainder" if part == "error_bits" else part] = size
    return {**made, "scalars": storage_bytes(states)}


class Outputs(TorchDispatchMode):
    """Records every operator with the bytes of new storages that it gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, kwargs])}
        new = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in given]
        self.made.append((func.overloadpacket.__name__, args, storage_bytes(new)))
        return result
