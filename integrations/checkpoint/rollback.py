"""Restore model, optimizer and scaler if loading a checkpoint into them fails."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from halfstep.numerics.scaling.sharding import local


def _remembered(value: Any, depth: int, numbers: bool = True) -> tuple[Any, Any]:
    """An object and its content: `depth` levels of dicts and lists, and the numbers in tensors of one element."""
    if isinstance(value, dict) and depth:
        return value, {key: _remembered(item, depth - 1, numbers) for key, item in value.items()}
    if isinstance(value, list) and depth:
        return value, [_remembered(item, depth - 1, numbers) for item in value]
    if isinstance(value, torch.Tensor) and depth and numbers and value.numel() == 1:
        return value, value.detach().clone()
    return value, None


def _restored(remembered: tuple[Any, Any]) -> Any:
    """The same object with its remembered content."""
    value, content = remembered
    if isinstance(content, dict):
        content = {key: _restored(item) for key, item in content.items()}
        value.clear()
        value.update(content)
    elif isinstance(content, list):
        value[:] = map(_restored, content)
    elif isinstance(content, torch.Tensor):
        value.detach().copy_(content)
    return value


class Rollback:
    """The state of model, optimizer and scaler before a load.

    Loading replaces the tensors of an optimizer without changing them, so references to them suffice. For the model,
    `exchange` swaps old and new values, so that the old ones need no more memory. Only FSDP1, which writes its flat
    parameters itself, requires a copy.
    """

    def __init__(self, model: torch.nn.Module | None, optimizer: Any, scaler: Any = None) -> None:
        self.model = model
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors of the model, and their old values
        self.objects: dict[str, Any] = {}
        getattr(optimizer, "state", None)  # reading it waits for what an offloaded optimizer still steps
        owners = [owner for owner in (optimizer, getattr(optimizer, "_on_host", None), scaler) if owner is not None]
        # The state tensors of an optimizer are replaced, not written, so their numbers are not copied.
        self.attributes = [
            (vars(owner), {name: _remembered(value, 3, name != "state") for name, value in vars(owner).items()})
            for owner in owners
        ]

    def copy(self) -> None:
        """Copy the model's tensors, if they will be written by other means than `exchange`."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.replaced.append((local(tensor.detach()), local(tensor.detach()).clone()))

    def exchange(self, live: torch.Tensor, fresh: torch.Tensor) -> None:
        """Swap the values of `live` and `fresh`."""
        old = live.clone()
        live.copy_(fresh)
        fresh.copy_(old)
        self.replaced.append((live, fresh))

    def put_back(self) -> None:
        """Restore model, optimizer and scaler with the same bits."""
        for live, old in reversed(self.replaced):
            live.copy_(old)
        if self.objects:
            assert self.model is not None
            set_model_state_dict(self.model, self.objects, options=StateDictOptions(strict=False))
        for attributes in self.attributes:
            _restored(attributes)
